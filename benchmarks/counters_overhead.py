"""What the counters cost: executed instructions of the host target with counters on and off.

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
LIMIT = 1.01


def run_rounds(args: argparse.Namespace) -> None:
    """The measured program."""
    workload = WORKLOADS[args.run]
    num_tokens = args.num_tokens or workload.num_tokens
    shape = GroupShape(args.num_ranks, num_tokens, args.hidden, args.num_topk, args.num_experts)
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
        _normal_group.run_rounds(shape, ranks_per_node, experts, args.rounds, args.counters)
        return
    group = Group(shape, experts, args.counters)
    for _ in range(args.rounds):
        group.dispatch()
        group.combine()
    if args.counters:
        for rank in group.ranks:
            (totals, _, _), _ = rank.counters["dispatch"]
            assert totals[0] == args.rounds, "nothing was counted"
    group.close()


def run(args: argparse.Namespace, workload: str, rounds: int, counters: bool) -> int:
    """Executed by one run of the measured program."""
    sizes = (
        word
        for name in ("num_ranks", "num_tokens", "hidden", "num_topk", "num_experts")
        if (value := getattr(args, name)) is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    )
    flags = ["--counters"] if counters else []
    return instructions(__file__, "--run", workload, "--rounds", str(rounds), *flags, *sizes)


def main() -> int:
    """Measures, prints, and fails where the counters cost more than the limit."""
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
    parser.add_argument("--counters", action="store_true", help="with --run: keep counters")
    args = parser.parse_args()
    if args.run:
        run_rounds(args)
        return 0
    require_valgrind()
    print(
        f"{args.num_ranks} ranks, {args.hidden} x top-{args.num_topk} of {args.num_experts} experts; "
        "a round is a dispatch and a combine of all ranks"
    )
    ratios = [measure(args, name) for name in WORKLOADS if name.startswith(args.only)]
    return 0 if max(ratios) <= LIMIT else 1


def measure(args: argparse.Namespace, workload: str) -> float:
    """Instructions with counters over those without; prints all three."""
    _, num_tokens, rounds = WORKLOADS[workload]
    per_round = {}
    for counters in (False, True):
        short, long = (run(args, workload, number, counters) for number in rounds)
        per_round[counters] = (long - short) / (rounds[1] - rounds[0])
    ratio = per_round[True] / per_round[False]
    print(
        f"{workload:15} {args.num_tokens or num_tokens:4} tokens, {per_round[False]:14,.0f} instructions a round without counters, "
        f"{per_round[True]:14,.0f} with: {ratio:.4f}",
        flush=True,
    )
    return ratio


if __name__ == "__main__":
    sys.exit(main())
