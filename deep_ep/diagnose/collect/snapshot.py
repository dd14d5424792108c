"""What one rank knows: a copy of its counters, with who it is. Stores; never decides.

Plain NumPy, so that it pickles through any group.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from ..core.diagnosis import Count, IntArray, Rank
from ..core.package import CounterSnapshot, EPArgumentError, codec, counters_of

if TYPE_CHECKING:
    from ..core.package import RecvCounters

# What is read; counters may have more.
NEEDED_FIELDS = {
    "fields": (
        *("ops", "tokens", "bytes", "wait_ns", "late_ns", "issue_ns", "path_ns", "critical_ns"),
        "credit_ns",
    ),
    "own_fields": ("ops", "gap_ns", "send_ns", "wait_ns", "drain_ns"),
    "ring_source_fields": ("entered", "issued", "arrival", "tokens", "seen"),
    "ring_own_fields": ("op", "wait_begin", "exit", "previous_exit", "sent", "timer_step"),
}


def _require_fields(counters: CounterSnapshot, _: codec.Sides) -> CounterSnapshot:
    for names, needed in NEEDED_FIELDS.items():
        missing = [name for name in needed if name not in getattr(counters, names)]
        if missing:
            raise codec.CodecError(
                f"lacks {', '.join(missing)}",
                names,
                advice="Judge it with the version of deep_ep that counted.",
            )
    return counters


NumRanks = Annotated[int, codec.Range(1), codec.Length(("num_ranks",))]


def _count_sources(num_ranks: int, sides: codec.Sides) -> int:
    """In a ring this rank itself has a row, too."""
    sides["num_sources"] = num_ranks + 1
    return num_ranks


@dataclass(frozen=True)
class Snapshot:
    """Counters of one rank at one moment, or between two.

    Attributes:
        rank, num_ranks: who, of how many.
        device: "cpu" or "cuda", where the counters live.
        host: host name.
        operations: counters per operation kind, as far as counted: "dispatch" and "combine" of low latency;
            of normal mode "notify" (the exchange before a fresh dispatch), "gateway dispatch" and
            "gateway combine" (what a gateway passes on), "normal dispatch" and "normal combine".
        device_index: index of the device on its host; the rank's place on its node on the cpu backend.
        node: the NVLink domain; ranks of one node share host and node.
    """

    rank: Rank
    num_ranks: Annotated[NumRanks, _count_sources]
    device: str
    host: str
    operations: Mapping[str, Annotated[CounterSnapshot, _require_fields]]
    device_index: Count = 0
    node: Count = 0

    @property
    def operation(self) -> int:
        """Number of the latest operation of any kind; 0: none, or no ring."""
        return max((counters.operation for counters in self.operations.values()), default=0)

    def holds_all_after(self, operation: int) -> bool:
        """Whether the rings hold all later operations, so that `until` can go back to this one."""
        return all(now.holds_all_after(operation) for now in self.operations.values())

    def until(self, operation: int) -> Snapshot:
        """This snapshot as it was after that operation; numbers count all kinds of a buffer together.

        Taken on every rank with one number, windows cover the same operations. See
        `CounterSnapshot.until` for what is not exact.

        Raises:
            EPArgumentError: the rings do not reach back that far.
        """
        return replace(
            self,
            operations={
                kind: now.until(operation, self.rank) for kind, now in self.operations.items()
            },
        )

    def since(self, earlier: Snapshot) -> Snapshot:
        """The window between `earlier` and this snapshot of the same rank.

        Raises:
            EPArgumentError: the two belong to different ranks or groups, or to other counters.
        """
        if (self.rank, self.num_ranks) != (earlier.rank, earlier.num_ranks):
            raise EPArgumentError(
                f"Snapshot.since: this snapshot is of rank {self.rank} of {self.num_ranks}, the "
                f"earlier one of rank {earlier.rank} of {earlier.num_ranks}; a window needs two "
                "snapshots of one rank. Keep one earlier snapshot per rank."
            )
        return replace(
            self,
            operations={
                kind: now.since(earlier.operations[kind]) if kind in earlier.operations else now
                for kind, now in self.operations.items()
            },
        )


def columns(
    counters: CounterSnapshot, rows: IntArray
) -> tuple[dict[str, IntArray], dict[str, IntArray]]:
    """Of rows of its ring by name: `[n, num_ranks]` of the sources, and `[n]` of the rank itself."""
    sources = {name: rows[:, :-1, i] for i, name in enumerate(counters.ring_source_fields)}
    return sources, {name: rows[:, -1, i] for i, name in enumerate(counters.ring_own_fields)}


@dataclass(frozen=True)
class Observed:
    """The counters of one rank's buffer, and who it is; usable after the buffer is gone.

    Attributes:
        who: of what rank, without counters.
        counters: per operation kind, as far as counted.
    """

    who: Snapshot
    counters: Mapping[str, RecvCounters]

    def snapshot(self, *, wait: bool = True) -> Snapshot:
        """Copies the counters; `wait` as in `RecvCounters.snapshot`."""
        copied = {kind: counters.snapshot(wait=wait) for kind, counters in self.counters.items()}
        # A program uses some kinds only; all are there before its first operation.
        used = {kind: counters for kind, counters in copied.items() if counters.ops > 0}
        device = next((c.device.type for c in self.counters.values()), "cpu")
        return replace(self.who, device=device, operations=used or copied)

    def num_ops(self) -> int:
        """Operations counted by now, of all kinds."""
        return sum(counters.num_ops() for counters in self.counters.values())


def observe(buffer: Any) -> Observed:
    """The counters that this rank's `buffer` has at the moment, and who it is."""
    counters = counters_of(buffer)
    topology = None if buffer.runtime is None else buffer.runtime.topology
    # A process that sees one GPU calls it 0, whichever it is.
    index = next((c.device.index for c in counters.values()), None)
    who = Snapshot(
        rank=buffer.rank,
        num_ranks=buffer.group_size,
        device="cpu",
        host=socket.gethostname(),
        operations={},
        device_index=index or (0 if topology is None else topology.local_rank),
        node=0 if topology is None else topology.node,
    )
    return Observed(who, counters)


def snapshot(buffer: Any, *, wait: bool = True) -> Snapshot:
    """Copies the counters of this rank's `buffer`; local, no communication.

    Kinds whose counters are off are left out; `buffer.enable_counters()` turns them on.

    Args:
        buffer: this rank's `deep_ep.Buffer`.
        wait: on a GPU, count what is queued on the current stream, too. False: what has run so far.
    """
    return observe(buffer).snapshot(wait=wait)
