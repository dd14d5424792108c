"""The receive counters on the Python side: storage, snapshots, windows. Rules about them live elsewhere.

Counters only grow; nobody resets them. A window is the difference of two snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deep_ep import backend
from deep_ep.errors import EPArgumentError

Int64Array = npt.NDArray[np.int64]

# Fields that are not sums: a difference of snapshots keeps the later value.
_NOT_SUMS = ("max_wait_ns",)


def _is_sum(field: str) -> bool:
    return field not in _NOT_SUMS


@dataclass(frozen=True)
class CounterSnapshot:
    """The counters of one rank and one kind of operation, copied at one moment.

    Attributes:
        fields: names of the rows of `totals`.
        own_fields: names of the entries of `own`.
        ring_source_fields: names of the last dimension of `ring` for a source rank.
        ring_own_fields: the same for this rank's own row, the last one.
        totals: `[len(fields), num_ranks]` int64, per source rank; nanoseconds where the name ends in `_ns`.
        own: `[len(own_fields)]` int64, of this rank.
        ring: `[capacity, num_ranks + 1, 4]` int64, the raw times of recent operations, ascending by
            operation number after `operations()`; unused slots are zeros.
    """

    fields: tuple[str, ...]
    own_fields: tuple[str, ...]
    ring_source_fields: tuple[str, ...]
    ring_own_fields: tuple[str, ...]
    totals: Int64Array
    own: Int64Array
    ring: Int64Array

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return int(self.totals.shape[1])

    @property
    def ops(self) -> int:
        """Operations counted so far, or within the window if this is a difference."""
        return int(self.own[self.own_fields.index("ops")])

    @property
    def operation(self) -> int:
        """Number of the latest operation in the ring (dispatch and combine count together); 0: none."""
        return int(self._ring_ops().max(initial=0))

    def __getitem__(self, field: str) -> Int64Array:
        """`[num_ranks]` int64: one field of the totals, per source rank."""
        if field not in self.fields:
            raise EPArgumentError(
                f"CounterSnapshot: there is no field {field!r}; the fields are {', '.join(self.fields)}. "
                "Fields of this rank itself are read with own_value()."
            )
        row: Int64Array = self.totals[self.fields.index(field)]
        return row

    def own_value(self, field: str) -> int:
        """One field of `own`."""
        if field not in self.own_fields:
            raise EPArgumentError(
                f"CounterSnapshot: there is no own field {field!r}; they are {', '.join(self.own_fields)}. "
                "Fields per source rank are read with snapshot[name]."
            )
        return int(self.own[self.own_fields.index(field)])

    def operations(self) -> Int64Array:
        """The used ring slots in order of operation: `[n, num_ranks + 1, 4]` int64."""
        ops = self._ring_ops()
        order = np.argsort(ops, kind="stable")
        used: Int64Array = self.ring[order[ops[order] > 0]]
        return used

    def since(self, earlier: CounterSnapshot) -> CounterSnapshot:
        """The window from `earlier` to this snapshot: sums are subtracted, older ring slots are zero."""
        if earlier.fields != self.fields or earlier.totals.shape != self.totals.shape:
            raise EPArgumentError(
                f"CounterSnapshot: a snapshot of {earlier.num_ranks} ranks and one of {self.num_ranks} "
                "differ in shape or fields; a window needs two snapshots of the same counters. "
                "Take both from one RecvCounters."
            )
        sums = np.array([_is_sum(field) for field in self.fields])[:, None]
        totals = np.where(sums, self.totals - earlier.totals, self.totals)
        ring = self.ring.copy()
        ring[self._ring_ops() <= earlier.operation] = 0
        return CounterSnapshot(
            fields=self.fields,
            own_fields=self.own_fields,
            ring_source_fields=self.ring_source_fields,
            ring_own_fields=self.ring_own_fields,
            totals=totals,
            own=self.own - earlier.own,
            ring=ring,
        )

    def __sub__(self, earlier: CounterSnapshot) -> CounterSnapshot:
        return self.since(earlier)

    def _ring_ops(self) -> Int64Array:
        ops: Int64Array = self.ring[:, self.num_ranks, self.ring_own_fields.index("op")]
        return ops


class RecvCounters:
    """What one rank measures about what it receives, for one kind of operation.

    Pass it to `low_latency_dispatch` or `low_latency_combine` as `recv_counters`, or let
    `Buffer.enable_counters()` make one for each. Use one object per kind of operation.

    Attributes:
        num_ranks: size of the group.
        capacity: operations the ring keeps; 0 = no ring.
        totals: `[num_fields, num_ranks]` int64, on the device.
        own: `[num_own_fields]` int64, on the device.
        ring: `[capacity, num_ranks + 1, 4]` int64, on the device; slot = operation number % capacity.
    """

    def __init__(
        self, num_ranks: int, ring: int = 256, device: torch.device | str | None = None
    ) -> None:
        """Allocates zeroed counters.

        Args:
            num_ranks: size of the group the counters will be used with.
            ring: how many recent operations keep their raw times, >= 0.
            device: where the kernels write; the backend's device unless given.

        Raises:
            EPArgumentError: `num_ranks` below 1 or `ring` below 0.
        """
        if num_ranks < 1 or ring < 0:
            raise EPArgumentError(
                f"RecvCounters: num_ranks is {num_ranks} and ring is {ring}; num_ranks must be at "
                "least 1 and ring at least 0. Pass buffer.group_size."
            )
        selected = backend.get()
        binding = selected.binding
        where = selected.device() if device is None else torch.device(device)
        self.fields = tuple(binding.COUNTER_FIELDS)
        self.own_fields = tuple(binding.OWN_FIELDS)
        self.ring_source_fields = tuple(binding.RING_SOURCE_FIELDS)
        self.ring_own_fields = tuple(binding.RING_OWN_FIELDS)
        self.num_ranks = num_ranks
        self.capacity = ring
        columns = max(len(self.ring_source_fields), len(self.ring_own_fields))

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=where)

        self.totals = zeros(len(self.fields), num_ranks)
        self.own = zeros(len(self.own_fields))
        self.ring = zeros(ring, num_ranks + 1, columns)

    @property
    def device(self) -> torch.device:
        """Where the counters live."""
        return self.totals.device

    def pointers(self) -> tuple[int, int, int, int]:
        """What the binding takes: pointers of totals, own and ring, and the ring's capacity."""
        ring = self.ring.data_ptr() if self.capacity else 0
        return self.totals.data_ptr(), self.own.data_ptr(), ring, self.capacity

    def snapshot(self) -> CounterSnapshot:
        """Copies the counters to the host. Waits for the device; take it between operations."""
        return CounterSnapshot(
            fields=self.fields,
            own_fields=self.own_fields,
            ring_source_fields=self.ring_source_fields,
            ring_own_fields=self.ring_own_fields,
            totals=_copy(self.totals),
            own=_copy(self.own),
            ring=_copy(self.ring),
        )

    def __getitem__(self, field: str) -> torch.Tensor:
        """`[num_ranks]` int64: the live row of one field, on the device."""
        if field not in self.fields:
            raise EPArgumentError(
                f"RecvCounters: there is no field {field!r}; the fields are {', '.join(self.fields)}. "
                "Correct the name."
            )
        return self.totals[self.fields.index(field)]

    def __repr__(self) -> str:
        return f"RecvCounters(num_ranks={self.num_ranks}, ring={self.capacity}, device='{self.device}')"


def _copy(tensor: torch.Tensor) -> Int64Array:
    array: Any = tensor.detach().cpu().numpy()
    copied: Int64Array = np.array(array, dtype=np.int64, copy=True)
    return copied
