"""What the counters and the recorder of calls cost: executed instructions of the host target with and without.

valgrind counts the instructions of a program that drives all ranks of a group. In low latency from one
thread: first every rank sends, then every rank receives, so nobody ever waits. In normal mode, within a
node and between nodes, in the simulation, where ranks wait in virtual time. So the count repeats to the
instruction or nearly so. Start-up is taken out by the difference of a long and a short run.

    python benchmarks/counters_overhead.py [--num-ranks 4] [--num-tokens 32] [--only normal]
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import _normal_group
from _one_thread_group import Group, GroupShape
from _valgrind import instructions, require_valgrind


class Workload(NamedTuple):
    """What is measured; `num_nodes` is 0 for low latency."""

    num_nodes: int
    num_tokens: int  # of a rank; few, for what the mode is for
    rounds: tuple[int, int]  # of dispatch + combine, of the short and of the long run


WORKLOADS = {
    "low-latency": Workload(0, 32, (2, 8)),
    "normal": Workload(1, 128, (2, 4)),
    "normal-2-nodes": Workload(2, 128, (2, 4)),
}
# Ratio to a round with neither, at most. Counts of one program differ by 0.0004 between environments.
LIMITS = {"counters": 1.012, "recorder": 1.002}
NUM_RECORDED_CALLS = 64


def run_rounds(args: argparse.Namespace) -> None:
    """The measured program."""
    workload = WORKLOADS[args.run]
    num_tokens = args.num_tokens or workload.num_tokens
    shape = GroupShape(
        *(args.num_ranks, num_tokens, args.hidden, args.num_topk, args.num_experts),
        num_recorded_calls=NUM_RECORDED_CALLS if args.keep == "recorder" else 0,
    )
    counters = args.keep == "counters"
    experts = [
        [
            (token * 7 + slot * 11 + rank) % args.num_experts
            for token in range(num_tokens)
            for slot in range(args.num_topk)
        ]
        for rank in range(args.num_ranks)
    ]
    if workload.num_nodes > 0:
        ranks_per_node = args.num_ranks // workload.num_nodes
        _normal_group.run_rounds(shape, ranks_per_node, experts, args.rounds, counters)
        return
    group = Group(shape, experts, counters)
    for _ in range(args.rounds):
        group.dispatch()
        group.combine()
    if counters:
        for rank in group.ranks:
            assert rank.counters["dispatch"].totals[0] == args.rounds, "nothing was counted"
    group.close()


def run(args: argparse.Namespace, workload: str, rounds: int, kept: str) -> int:
    """Executed by one run of the measured program."""
    sizes = (
        word
        for name in ("num_ranks", "num_tokens", "hidden", "num_topk", "num_experts")
        if (value := getattr(args, name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    )
    kept_flag = ["--keep", kept] if kept else []
    return instructions(__file__, "--run", workload, "--rounds", str(rounds), *kept_flag, *sizes)


def main() -> int:
    """Measures, prints, and fails where something costs more than its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, help="of a rank (32, in normal mode 128)")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--only", default="", help="workloads whose names begin so")
    parser.add_argument("--run", choices=WORKLOADS, help="be the measured program")
    parser.add_argument("--rounds", type=int, default=1, help="with --run")
    parser.add_argument("--keep", choices=LIMITS, help="with --run: what is kept")
    args = parser.parse_args()
    if args.run:
        run_rounds(args)
        return 0
    require_valgrind()
    print(
        f"{args.num_ranks} ranks, {args.hidden} x top-{args.num_topk} of {args.num_experts} experts; "
        "a round is a dispatch and a combine of all ranks"
    )
    names = [name for name in WORKLOADS if name.startswith(args.only)]
    within = [measure(args, name) for name in names]
    return 0 if all(within) else 1


def measure(args: argparse.Namespace, workload: str) -> bool:
    """Whether each costs no more than its limit; prints the instructions of a round."""
    _, num_tokens, rounds = WORKLOADS[workload]
    per_round = {}
    for kept in ("", *LIMITS):
        short, long = (run(args, workload, number, kept) for number in rounds)
        per_round[kept] = (long - short) / (rounds[1] - rounds[0])
    ratios = {kept: per_round[kept] / per_round[""] for kept in LIMITS}
    print(
        f"{workload:15} {args.num_tokens or num_tokens:4} tokens, {per_round['']:14,.0f} instructions a round"
        + "".join(f"; with {kept} {ratio:.4f}" for kept, ratio in ratios.items()),
        flush=True,
    )
    return all(ratio <= LIMITS[kept] for kept, ratio in ratios.items())


if __name__ == "__main__":
    sys.exit(main())
