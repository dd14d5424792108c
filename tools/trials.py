"""Random faults in groups of real processes: is the right rank named, with the right class, and nobody else?

    python tools/trials.py --trials 300            new seeds, and a table
    python tools/trials.py --seed 12345            one seed again, with what was said
    python tools/trials.py --without-rank-0        rank 0 does not answer, and another rank has a fault, too

What a seed does, and what counts as right, is in tests/trials.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Before this folder, where a module of the same name is.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from trials.judge import Judged  # noqa: E402
from trials.many import WARN_S, draw, draw_without_rank_0, run_all, run_trial  # noqa: E402


def main() -> int:
    """Exit status 1 if any trial went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trials", type=int, default=300, help="how many (300)")
    parser.add_argument("--first", type=int, help="first seed (the time, so that they are new)")
    parser.add_argument("--without-rank-0", action="store_true", help="rank 0 does not answer")
    args = parser.parse_args()
    drawn = draw_without_rank_0 if args.without_rank_0 else draw
    if args.seed is not None:
        judged = run_trial(drawn(args.seed))
        tell(judged)
        print(*judged.said, sep="\n")
        return 0 if judged.is_right else 1
    first = int(time.time()) if args.first is None else args.first
    done = []
    for judged in run_all(map(drawn, range(first, first + args.trials))):
        done.append(judged)
        if not judged.is_right:
            tell(judged)
    print_table(done)
    return 0 if all(judged.is_right for judged in done) else 1


def tell(judged: Judged) -> None:
    """One trial, for whoever repeats it."""
    missed = [rank for rank, is_named in judged.named.items() if not is_named]
    print(
        f"{judged.trial}: {'right' if judged.is_right else 'WRONG'}"
        + (f", not named: {missed}" if missed else "")
        + (f", accused for nothing: {list(judged.accused)}" if judged.accused else "")
        + "".join(f", {complaint}" for complaint in judged.complaints),
        flush=True,
    )


def print_table(done: list[Judged]) -> None:
    """By fault: how often it happened, and how often it was named."""
    named: dict[str, list[bool]] = defaultdict(list)
    for judged in done:
        for rank, name in judged.trial.victims.items():
            named[name].append(judged.named[rank])
    print(f"{'fault':28} ranks  named")
    for name, found in sorted(named.items()):
        print(f"{name:28} {len(found):5} {sum(found):6}")
    first = [judged.first_line_s for judged in done if judged.first_line_s is not None]
    wrong = sum(bool(judged.accused) for judged in done)
    complaints = sum(bool(judged.complaints) for judged in done)
    print(
        f"{len(done)} trials, {sum(judged.is_right for judged in done)} right; {wrong} with a wrong "
        f"accusation, {complaints} with a wrong result or something left"
    )
    if first:
        print(
            f"first line after {statistics.median(first):.2f} s (median), {max(first):.2f} s (longest), "
            f"where the warning is due after {WARN_S:g} s"
        )


if __name__ == "__main__":
    sys.exit(main())
