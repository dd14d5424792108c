"""Looks for faults of the protocol: random programs of a group in simulated time, against a model.

    python tools/explore.py --seconds 600          new seeds, on all cores, and a summary
    python tools/explore.py --seed 12345           one seed again, exactly
    python tools/explore.py --seed 12345 --trace   with every call of every rank

What a seed does, and what counts as a failure, is in tests/explore.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Before this folder, where a module of the same name is.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from explore.explorer import explore  # noqa: E402
from explore.fleet import Seeds, explore_all  # noqa: E402
from explore.program import DISTURBANCES  # noqa: E402


def main() -> int:
    """Exit status 1 if any seed failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="only this one, in this process")
    parser.add_argument("--trace", action="store_true", help="show the calls of --seed")
    parser.add_argument("--seconds", type=float, default=600, help="how long to look (600)")
    parser.add_argument("--first", type=int, help="first seed (the time, so that they are new)")
    parser.add_argument("--count", type=int, help="how many seeds, instead of --seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes")
    parser.add_argument(
        "--kinds",
        dest="disturbances",
        type=lambda text: tuple(name for name in text.split(",") if name),
        default=DISTURBANCES,
        help=f"only these, of {','.join(DISTURBANCES)} (all)",
    )
    args = parser.parse_args()
    if not set(args.disturbances) <= set(DISTURBANCES):
        parser.error(f"--kinds: allowed are {', '.join(DISTURBANCES)}")
    if args.seed is not None:
        return explore_one(args.seed, args.disturbances, args.trace)
    first = int(time.time()) * 1000 if args.first is None else args.first
    seeds = (
        Seeds(count(first), time.monotonic() + args.seconds)
        if args.count is None
        else Seeds(range(first, first + args.count))
    )
    began = time.monotonic()
    summary = explore_all(seeds, args.disturbances, args.jobs)
    took_s = time.monotonic() - began
    only = "" if args.disturbances == DISTURBANCES else f" --kinds {','.join(args.disturbances)}"
    for seed, failures in sorted(summary.failures.items()):
        print(f"seed {seed}: {failures[0]}")
        if len(failures) > 1:
            print(f"    and {len(failures) - 1} more")
        print(f"    replay: python tools/explore.py --seed {seed}{only}")
    injected = ", ".join(f"{name} {n}" for name, n in sorted(summary.injected.items()))
    print(
        f"{summary.num_seeds} seeds from {first} on, {summary.num_operations} operations in "
        f"{took_s:.0f} s ({summary.num_operations / took_s:.0f} a second); disturbances: "
        f"{injected or 'none'}; {summary.num_errors} operations failed for a reason; "
        f"{len(summary.failures)} seeds failed"
    )
    return 1 if summary.failures else 0


def explore_one(seed: int, names: tuple[str, ...], shows_calls: bool) -> int:
    """Repeats one seed in this process, so that a debugger can be there."""
    faulthandler.enable()
    explored = explore(seed, names)
    if shows_calls:
        print("\n".join(explored.calls))
    print("\n".join(explored.failures) or f"seed {seed}: nothing wrong")
    return 1 if explored.failures else 0


if __name__ == "__main__":
    sys.exit(main())
