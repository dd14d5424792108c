"""What one rank knows: a copy of its counters, with who it is. Stores; never decides.

Plain NumPy, so that it pickles through any group.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deep_ep.errors import EPArgumentError

if TYPE_CHECKING:
    from deep_ep.counters import CounterSnapshot


@dataclass(frozen=True)
class Snapshot:
    """Counters of one rank at one moment, or between two.

    Attributes:
        rank, num_ranks: who, of how many.
        device: "cpu" or "cuda", where the counters live.
        host: host name.
        operations: counters per operation kind, "dispatch" and "combine", as far as counted.
    """

    rank: int
    num_ranks: int
    device: str
    host: str
    operations: Mapping[str, CounterSnapshot]

    def since(self, earlier: Snapshot) -> Snapshot:
        """The window between `earlier` and this snapshot of the same rank.

        Raises:
            EPArgumentError: the two belong to different ranks or groups.
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


def snapshot(buffer: Any) -> Snapshot:
    """Copies the counters of this rank's `buffer`; local, no communication.

    Kinds whose counters are off are left out; `buffer.enable_counters()` turns them on.
    """
    attached = {"dispatch": buffer.dispatch_counters, "combine": buffer.combine_counters}
    counters = {kind: counter for kind, counter in attached.items() if counter is not None}
    return Snapshot(
        rank=buffer.rank,
        num_ranks=buffer.group_size,
        device=next((c.device.type for c in counters.values()), "cpu"),
        host=socket.gethostname(),
        operations={kind: counter.snapshot() for kind, counter in counters.items()},
    )
