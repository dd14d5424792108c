"""What one normal operation costs, counted on the host target: messages, bytes, signals and fences of a rank,
within its node and to other nodes, and how many rows had to cross the network.

The ranks are simulated: one process, virtual time, puts to other nodes as a NIC takes them. So counts repeat
exactly. The second round of a group is counted, because the first one has to agree on the number of channels.
Numbers are means over the ranks of a group.

    python benchmarks/normal_counts.py             the table of docs/cost_model.md
    python benchmarks/normal_counts.py --write     puts it there
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DEEP_EP_BACKEND", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch  # noqa: E402
from _counts import (  # noqa: E402
    CHANNELS_PER_SCALE,
    PathCounts,
    mean_sent,
    options,
    pairs_of,
    row_bytes,
    table,
    write_into_page,
)
from _one_thread_group import GroupShape, random_routes  # noqa: E402

import deep_ep  # noqa: E402
from explore.machine import Machine, SimulatedGroup  # noqa: E402
from explore.program import Pace  # noqa: E402
from support import normal_reference as reference  # noqa: E402

BEGIN, END = "<!-- counted, normal: begin -->", "<!-- counted, normal: end -->"
# Ranks, and ranks of a node.
GROUPS = ((8, 8), (8, 4), (16, 8))
OPERATIONS = ("dispatch", "dispatch, handle", "combine")
HOPS = ("NVLink", "network")
# Every message takes 2 us, and every 16 steps of a rank 0.5 us.
PACE = Pace(16, 500, 2_000, 2_000)


@dataclass(frozen=True)
class HopCounts:
    """One operation of one rank over one hop, mean of the group.

    Rows within the node are one for each token and rank, those to other nodes one for each token and node.
    """

    num_ranks: int
    ranks_per_node: int
    operation: str
    hop: str
    path: PathCounts


def payload_bytes(operation: str, shape: GroupShape) -> int:
    """Of a row: data, scales and, without a handle, top-k entries out; bf16 back."""
    entries = 8 * shape.num_topk if operation == "dispatch" else 0
    return row_bytes(shape.hidden, operation != "combine") + entries


def rows_to_send(layouts: Sequence[reference.Layout], ranks_per_node: int) -> dict[str, int]:
    """Rows that must go over each hop, of all ranks; those of a combine go back the same way."""
    num_ranks = len(layouts)
    rows = dict.fromkeys(HOPS, 0)
    for source, layout in enumerate(layouts):
        node, local = divmod(source, ranks_per_node)
        in_rank = layout.is_token_in_rank
        in_node = in_rank.view(len(in_rank), -1, ranks_per_node).any(2)
        rows["network"] += int(in_node.sum()) - int(in_node[:, node].sum())
        # Those for the source itself and its gateways are there already.
        at_home = torch.arange(num_ranks) % ranks_per_node == local
        rows["NVLink"] += int(in_rank[:, ~at_home].sum())
    return rows


def run_rank(
    rank: int,
    machine: Machine,
    shape: GroupShape,
    topk_idx: torch.Tensor,
    seen: dict[int, list[dict[str, Any]]],
) -> None:
    """Two rounds; of the second one, what had been sent before and after each operation."""
    configs = (
        deep_ep.Buffer.get_dispatch_config(shape.num_ranks),
        deep_ep.Buffer.get_combine_config(shape.num_ranks),
    )
    hidden_bytes = 2 * shape.hidden
    buffer = deep_ep.Buffer(
        SimulatedGroup(machine, rank, 1e3),
        max(c.get_nvl_buffer_size_hint(hidden_bytes, shape.num_ranks) for c in configs),
        max(c.get_rdma_buffer_size_hint(hidden_bytes, shape.num_ranks) for c in configs),
    )
    x = torch.zeros(shape.num_tokens, shape.hidden, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(shape.num_tokens, shape.hidden // CHANNELS_PER_SCALE)
    weights = torch.ones(topk_idx.shape)

    def note(number: int) -> None:
        machine.meet("counted", number, rank, None)
        seen[rank].append(buffer.runtime.native.traffic())
        machine.meet("go on", number, rank, None)

    for number in range(2):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            topk_idx, shape.num_experts
        )
        note(4 * number)
        *_, handle, _ = buffer.dispatch(
            (x, scales), None, per_rank, per_node, in_rank, per_expert, topk_idx, weights
        )
        note(4 * number + 1)
        rows = buffer.dispatch((x, scales), handle)[0][0]
        note(4 * number + 2)
        buffer.combine(torch.zeros(rows.shape, dtype=torch.bfloat16), handle)
        note(4 * number + 3)


def count(shape: GroupShape, ranks_per_node: int) -> list[HopCounts]:
    """Counts a dispatch, one with its handle and a combine of `shape` with random routes."""
    topk_idx = [
        torch.tensor(routes).view(shape.num_tokens, shape.num_topk)
        for routes in random_routes(shape)
    ]
    machine = Machine(shape.num_ranks, ranks_per_node, PACE, seed=1)
    seen: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(shape.num_ranks)}
    settings = {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node), "DEEP_EP_VERIFY": "0"}
    with mock.patch.dict(os.environ, settings):
        outcomes = machine.run(lambda rank: run_rank(rank, machine, shape, topk_idx[rank], seen))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    layouts = [
        reference.layout(one, shape.num_experts, shape.num_ranks, ranks_per_node)
        for one in topk_idx
    ]

    result = []
    to_send = rows_to_send(layouts, ranks_per_node)
    for number, operation in enumerate(OPERATIONS):
        before, after = (
            [of_rank[4 + number + when] for of_rank in seen.values()] for when in (0, 1)
        )
        for hop in HOPS if ranks_per_node < shape.num_ranks else HOPS[:1]:
            rows = to_send[hop] / shape.num_ranks
            pairs = pairs_of(shape.num_ranks, ranks_per_node, same_node=hop == "NVLink")
            counts = mean_sent(before, after, pairs)
            path = PathCounts(rows, rows * payload_bytes(operation, shape), counts)
            result.append(HopCounts(shape.num_ranks, ranks_per_node, operation, hop, path))
    return result


def lines_of(counts: Sequence[HopCounts]) -> str:
    """The table, as the page has it."""
    rows = [
        [
            f"{one.num_ranks // one.ranks_per_node} x {one.ranks_per_node}",
            f"{one.operation}: {one.hop}",
            f"{one.path.rows:,.0f}",
            *(f"{one.path.counts[name]:,.0f}" for name in ("puts", "words", "signals", "fences")),
            f"{one.path.payload_bytes / 1e6:.3f}",
            one.path.overhead,
            f"{one.path.messages / one.path.rows:.2f}",
        ]
        for one in counts
    ]
    header = (
        "nodes", "operation, hop", "rows", "puts", "words", "signals", "fences", "payload MB", "more bytes",
        "messages a row",
    )  # fmt: skip
    return table(header, rows)


def main() -> int:
    args = options(__doc__).parse_args()
    counts: list[HopCounts] = []
    for num_ranks, ranks_per_node in GROUPS:
        shape = GroupShape(num_ranks, args.num_tokens, args.hidden, args.num_topk, args.num_experts)
        counts += count(shape, ranks_per_node)
    text = lines_of(counts)
    print(text)
    if args.write:
        write_into_page(BEGIN, END, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
