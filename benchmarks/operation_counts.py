"""What one low-latency operation costs, counted on the host target: messages, bytes, signals, fences and
polls of a rank, and what they mean on NVLink and on a NIC.

Every rank sends, then every rank receives, so nobody waits and counts repeat exactly. Polls are then those
that find something: one per word. The second round of a group is counted, because the first one has to
agree on sizes. Numbers are means over the ranks of a group.

    python benchmarks/operation_counts.py                      the tables of docs/cost_model.md
    python benchmarks/operation_counts.py --write              puts them there
    python benchmarks/operation_counts.py --num-ranks 8 --instructions    with valgrind's count
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from _counts import (
    PathCounts,
    mean_sent,
    options,
    pairs_of,
    row_bytes,
    table,
    write_into_page,
)
from _one_thread_group import Group, GroupShape, random_routes
from _valgrind import instructions, require_valgrind

BEGIN, END = "<!-- counted: begin -->", "<!-- counted: end -->"
RANKS = (8, 16, 64)
RANKS_PER_NODE = 8
NVLINK_BYTES_PER_US = 450e3  # one way
NIC_BYTES_PER_US = 50e3  # 400 Gb/s
OPERATIONS = ("dispatch", "combine")


@dataclass(frozen=True)
class OperationCounts:
    """One operation of one rank, mean of the group."""

    num_ranks: int
    operation: str
    num_tokens: int
    nvlink: PathCounts  # to the others of the node
    nic: PathCounts  # to other nodes
    polls: float


def traffic(group: Group) -> list[dict[str, Any]]:
    return [rank.runtime.traffic() for rank in group.ranks]


def count(shape: GroupShape) -> list[OperationCounts]:
    """Counts a dispatch and a combine of `shape` with random routes."""
    routes = random_routes(shape)
    group = Group(shape, routes)
    group.dispatch()
    group.combine()
    seen = [traffic(group)]
    for operation in (group.dispatch, group.combine):
        operation()
        seen.append(traffic(group))
    group.close()
    num_local_experts = shape.num_experts // shape.num_ranks
    rows = [[0] * shape.num_ranks for _ in range(shape.num_ranks)]
    for source, experts in enumerate(routes):
        for expert in experts:
            rows[source][expert // num_local_experts] += 1
    rows_back = [list(column) for column in zip(*rows)]
    return [
        counts_between(shape, "dispatch", rows, seen[0], seen[1]),
        counts_between(shape, "combine", rows_back, seen[1], seen[2]),
    ]


def counts_between(
    shape: GroupShape,
    operation: str,
    rows: list[list[int]],
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
) -> OperationCounts:
    """Of an operation that sends rows[rank][peer], by the traffic before and after it."""
    num_ranks, num_bytes = shape.num_ranks, row_bytes(shape.hidden, operation == "dispatch")

    def path(same_node: bool) -> PathCounts:
        pairs = pairs_of(num_ranks, RANKS_PER_NODE, same_node)
        num_rows = sum(rows[rank][peer] for rank, peer in pairs) / num_ranks
        return PathCounts(num_rows, num_rows * num_bytes, mean_sent(before, after, pairs))

    polls = sum(now["polls"] - then["polls"] for then, now in zip(before, after))
    return OperationCounts(
        num_ranks, operation, shape.num_tokens, path(True), path(False), polls / num_ranks
    )


def executed(shape: GroupShape) -> dict[str, float]:
    """Instructions of a rank in an operation, by operation."""
    sizes = (
        "--num-ranks", str(shape.num_ranks), "--num-tokens", str(shape.num_tokens),
        "--hidden", str(shape.hidden), "--num-topk", str(shape.num_topk),
        "--num-experts", str(shape.num_experts),
    )  # fmt: skip
    base, *more = (
        instructions(__file__, "--run", str(dispatches), str(combines), *sizes)
        for dispatches, combines in ((1, 1), (2, 1), (1, 2))
    )
    return {name: (total - base) / shape.num_ranks for name, total in zip(OPERATIONS, more)}


def counted_rows(counts: Sequence[OperationCounts]) -> list[list[str]]:
    """Rows of the table of counts: an operation of a rank, to all other ranks."""
    rows = []
    for one in counts:
        paths = (one.nvlink, one.nic)
        messages = sum(path.messages for path in paths)
        sent = sum(path.bytes for path in paths)
        names = ("puts", "words", "signals", "fences")
        totals = [sum(path.counts[name] for path in paths) for name in names]
        rows.append(
            [
                f"EP{one.num_ranks}",
                one.operation,
                f"{sum(path.rows for path in paths):,.0f}",
                *(f"{total:,.0f}" for total in totals),
                f"{one.polls:,.0f}",
                f"{messages / one.num_tokens:.2f}",
                f"{sent / one.num_tokens:,.0f}",
            ]
        )
    return rows


def bound_rows(counts: Sequence[OperationCounts]) -> list[list[str]]:
    """Rows of the table of bounds: an operation of a rank, each kind of path for itself."""
    rows = []
    for one in counts:
        for name, path, speed in (
            ("NVLink", one.nvlink, NVLINK_BYTES_PER_US),
            ("NIC", one.nic, NIC_BYTES_PER_US),
        ):
            if path.rows == 0:
                continue
            rows.append(
                [
                    f"EP{one.num_ranks}",
                    f"{one.operation}, {name}",
                    f"{path.rows:,.0f}",
                    f"{path.payload_bytes / 1e6:.3f}",
                    f"{path.payload_bytes / speed:.2f}",
                    f"{path.bytes / speed:.2f}",
                    path.overhead,
                    f"{path.messages:,.0f}",
                    f"{path.messages / path.rows:.2f}",
                ]
            )
    return rows


def tables(counts: Sequence[OperationCounts]) -> str:
    """Both tables, as the page has them."""
    return "\n".join(
        [
            table(
                ("group", "operation", "rows", "puts", "words", "signals", "fences", "polls",
                 "messages a token", "bytes a token"),
                counted_rows(counts),
            ),
            "",
            table(
                ("group", "operation, path", "rows", "payload MB", "bound us", "as sent us",
                 "more bytes", "messages", "messages a row"),
                bound_rows(counts),
            ),
        ]
    )  # fmt: skip


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--num-ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--instructions", action="store_true", help="needs valgrind, takes minutes")
    parser.add_argument("--run", type=int, nargs=2, help="be the program that valgrind counts")
    args = parser.parse_args()
    shapes = [
        GroupShape(num_ranks, args.num_tokens, args.hidden, args.num_topk, args.num_experts)
        for num_ranks in args.num_ranks
    ]
    if args.run:
        group = Group(shapes[0], random_routes(shapes[0]))
        dispatches, combines = args.run
        for _ in range(dispatches):
            group.dispatch()
        for _ in range(combines):
            group.combine()
        group.close()
        return 0
    if args.instructions:
        require_valgrind()
        for shape in shapes:
            for operation, number in executed(shape).items():
                print(
                    f"EP{shape.num_ranks} {operation}: {number:,.0f} instructions a rank, "
                    f"{number / shape.num_tokens:,.0f} a token"
                )
        return 0
    text = tables([one for shape in shapes for one in count(shape)])
    print(text)
    if args.write:
        write_into_page(BEGIN, END, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
