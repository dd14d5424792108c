"""What the counters cost: executed instructions of the host target with counters on and off.

valgrind counts the instructions of a program that drives all ranks of a group from one thread:
first every rank sends, then every rank receives, so nobody ever waits and the count repeats to the
instruction or nearly so. Start-up is taken out by the difference of a long and a short run.

    python benchmarks/counters_overhead.py [--num-ranks 4] [--num-tokens 32]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys

from _one_thread_group import Group, GroupShape

SHORT_RUN, LONG_RUN = 2, 8  # rounds of dispatch + combine
LIMIT = 1.01


def run_rounds(args: argparse.Namespace) -> None:
    """The measured program: all ranks in one thread, one phase after the other."""
    shape = GroupShape(
        args.num_ranks, args.num_tokens, args.hidden, args.num_topk, args.num_experts
    )
    experts = [
        [
            (token * 7 + slot * 11 + rank) % args.num_experts
            for token in range(args.num_tokens)
            for slot in range(args.num_topk)
        ]
        for rank in range(args.num_ranks)
    ]
    group = Group(shape, experts, args.counters)
    for _ in range(args.rounds):
        group.dispatch()
        group.combine()
    if args.counters:
        for rank in group.ranks:
            (totals, _, _), _ = rank.counters["dispatch"]
            assert totals[0] == args.rounds, "nothing was counted"
    group.close()


def instructions(args: argparse.Namespace, rounds: int, counters: bool) -> int:
    """Executed by one run, as valgrind counts them."""
    command = [
        "valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null",
        sys.executable, __file__, "--run", "--rounds", str(rounds),
        *(["--counters"] if counters else []),
        *(word for name in ("num_ranks", "num_tokens", "hidden", "num_topk", "num_experts")
          for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))),
    ]  # fmt: skip
    # A fixed hash seed, because Python's own instructions depend on it.
    env = {**os.environ, "PYTHONHASHSEED": "0", "DEEP_EP_CPU_CLOCK": "wall"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode or found is None:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return int(found[1].replace(",", ""))


def main() -> int:
    """Measures, prints, and fails where the counters cost more than the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--run", action="store_true", help="be the measured program")
    parser.add_argument("--rounds", type=int, default=LONG_RUN)
    parser.add_argument("--counters", action="store_true", help="with --run: keep counters")
    args = parser.parse_args()
    if args.run:
        run_rounds(args)
        return 0
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed; on Debian or Ubuntu: apt-get install valgrind")
    per_round = {}
    for counters in (False, True):
        short, long = (instructions(args, rounds, counters) for rounds in (SHORT_RUN, LONG_RUN))
        per_round[counters] = (long - short) / (LONG_RUN - SHORT_RUN)
        print(
            f"counters {'on ' if counters else 'off'}  {per_round[counters]:15,.0f} instructions a round"
        )
    ratio = per_round[True] / per_round[False]
    print(
        f"ratio         {ratio:15.4f}  ({args.num_ranks} ranks, {args.num_tokens} tokens x {args.hidden} x "
        f"top-{args.num_topk} of {args.num_experts} experts; a round is a dispatch and a combine of all ranks)"
    )
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
