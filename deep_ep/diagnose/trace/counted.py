"""What counters know of the operations in a trace: their phases, and what crossed which link.

A call has the same number in a trace and in what the recorder keeps, which knows its operation in the counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..collect.hops import GATEWAY_COMBINE, GATEWAY_DISPATCH, NORMAL_COMBINE, NORMAL_DISPATCH
from ..collect.snapshot import Snapshot
from ..core.diagnosis import IntArray
from ..core.package import PARTS, CounterSnapshot, OperationPhases, Part, phases_of
from ..storage import counter_archive
from .operations import LinkBytes, added_up

# What a gateway passes on in an operation.
_GATEWAY_HOP = {NORMAL_DISPATCH: GATEWAY_DISPATCH, NORMAL_COMBINE: GATEWAY_COMBINE}
# Of an operation; in the others nothing of it can move.
_MOVING = ("notify", "host", "send", "issue", "path", "copy")


@dataclass(frozen=True)
class Counted:
    """One operation of one rank.

    Attributes:
        phases: where its time went.
        links: what this rank received by link; `None`: rows of several sizes were counted together, or a rank is missing.
    """

    phases: OperationPhases
    links: LinkBytes | None

    @property
    def moving_us(self) -> float:
        """Its time without that in which nothing of it could move: before it, and while a rank was late."""
        return sum(self.phases.ns[phase] for phase in _MOVING) / 1e3


def read(path: Path) -> dict[int, dict[int, Counted]]:
    """What `diagnose.save` wrote, by rank and number of the call."""
    snapshots = counter_archive.load(path)
    is_whole = [each.rank for each in snapshots] == list(range(snapshots[0].num_ranks))
    nodes = np.array([each.node for each in snapshots]) if is_whole else None
    return {each.rank: _of_rank(each, nodes) for each in snapshots}


def _of_rank(snapshot: Snapshot, nodes: IntArray | None) -> dict[int, Counted]:
    if snapshot.calls is None:
        return {}
    calls = {operation: call for call, operation in snapshot.calls.tolist()}
    rows = {kind: _Rows.of(counters) for kind, counters in snapshot.operations.items()}
    found = {}
    parts = [] if snapshot.parts is None else snapshot.parts.tolist()
    known = [Part(PARTS[i], begin, end) for i, begin, end in parts if 0 <= i < len(PARTS)]
    for each in phases_of(snapshot.rank, snapshot.operations, known).operations:
        if each.operation in calls:
            links = None if nodes is None else _links(each, rows, snapshot.rank, nodes)
            found[calls[each.operation]] = Counted(each, links)
    return found


@dataclass(frozen=True)
class _Rows:
    """Rows of one kind of operation.

    Attributes:
        of_operation: [num_ranks] int64 by source, by operation.
        row_bytes: of each; `None`: several sizes were counted together.
    """

    of_operation: Mapping[int, IntArray]
    row_bytes: int | None

    @classmethod
    def of(cls, counters: CounterSnapshot) -> _Rows:
        tokens, num_bytes = counters["tokens"], counters["bytes"]
        row_bytes = int(num_bytes.sum()) // max(int(tokens.sum()), 1)
        is_one_size = np.array_equal(tokens * row_bytes, num_bytes)
        op = counters.ring_own_fields.index("op")
        column = counters.ring_source_fields.index("tokens")
        slots = {int(slot[-1, op]): slot[:-1, column] for slot in counters.operations()}
        return cls(slots, row_bytes if is_one_size else None)


def _links(
    operation: OperationPhases, rows: Mapping[str, _Rows], rank: int, nodes: IntArray
) -> LinkBytes | None:
    """What a rank received.

    In a dispatch of several nodes, rows from a rank of another place come by NVLink from their gateway, and those that
    this rank got as the gateway came by RDMA. In a combine, counters know who sent.
    """
    kind = operation.kind
    gateway = rows.get(_GATEWAY_HOP.get(kind, ""))
    mine = np.arange(len(nodes)) == rank
    near = (nodes == nodes[rank]) & ~mine
    if kind == NORMAL_DISPATCH:
        firsts = np.searchsorted(nodes, nodes)  # nodes are numbered in the order of ranks
        places = np.arange(len(nodes)) - firsts
        by_link = mine, places != places[rank], np.zeros_like(mine)
        relayed = np.zeros_like(mine), np.zeros_like(mine), ~mine
    else:
        by_link = mine, near, nodes != nodes[rank]
        relayed = np.zeros_like(mine), near, np.zeros_like(mine)
    found: list[LinkBytes | None] = []
    for hop, chosen in ((rows[kind], by_link), (gateway, relayed)):
        if hop is None:
            continue
        if hop.row_bytes is None:
            return None
        size = hop.row_bytes
        tokens = hop.of_operation.get(operation.operation, np.zeros(len(nodes), np.int64))
        found.append(LinkBytes(*(int(tokens[of].sum()) * size for of in chosen)))
    return added_up(found)
