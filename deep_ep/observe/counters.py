"""The receive counters on the Python side: where kernels write them, and how they are copied. Rules about them live elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep.errors import EPArgumentError, EPTypeError
from deep_ep.native import backend
from deep_ep.observe.copier import DeviceCopier, HostCopier, Reading, copy_between_operations
from deep_ep.observe.counter_snapshot import CounterSnapshot
from deep_ep.types.bounds import integer, memory


def _device(value: Any) -> torch.device:
    """`value` as a device that there is.

    Raises:
        EPArgumentError: it is none.
    """
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise EPTypeError(
            f"RecvCounters: device is {str(value)[:40]!r}; it must be a torch.device that can be used, or its name "
            f"({str(error).splitlines()[0]}). Leave it out: kernels write where the backend runs."
        ) from None
    return device


class RecvCounters:
    """What one rank measures about what it receives, for one kind of operation.

    Pass it to a dispatch or combine, low-latency or normal, as `recv_counters`, or let
    `Buffer.enable_counters()` make one for each. Use one object per kind of operation.

    Attributes:
        num_ranks: size of the group.
        capacity: operations the ring keeps; 0 = no ring.
        totals: `[num_fields, num_ranks]` int64, on the device.
        own: `[num_own_fields]` int64, on the device.
        ring: `[capacity, num_ranks + 1, num_ring_fields]` int64, on the device; slot = operation
            number % capacity.
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
            EPUsageError: the current stream is being captured.
        """
        num_ranks = integer("RecvCounters", "num_ranks", num_ranks, least=1)
        ring = integer("RecvCounters", "ring", ring, least=0)
        selected = backend.get()
        binding = selected.binding
        where = selected.device() if device is None else _device(device)
        self.fields = tuple(binding.COUNTER_FIELDS)
        self.own_fields = tuple(binding.OWN_FIELDS)
        self.ring_source_fields = tuple(binding.RING_SOURCE_FIELDS)
        self.ring_own_fields = tuple(binding.RING_OWN_FIELDS)
        self.num_ranks = num_ranks
        self.capacity = ring

        num_words = ring * (num_ranks + 1) * binding.NUM_RING_FIELDS + num_ranks * len(self.fields)
        got = f"ring is {ring} and num_ranks {num_ranks}"
        memory("RecvCounters", got, 8 * num_words, "Pass buffer.group_size, and a ring of hundreds")

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=where)

        self.totals = zeros(len(self.fields), num_ranks)
        self.own = zeros(len(self.own_fields))
        self.ring = zeros(ring, num_ranks + 1, binding.NUM_RING_FIELDS)
        # With the counters: pinned memory is allocated, on a GPU behind all kernels that run, and by then a job does.
        made = DeviceCopier if self.device.type == "cuda" else HostCopier
        op_field = self.ring_own_fields.index("op")
        self._copier: HostCopier | DeviceCopier = made(self.totals, self.own, self.ring, op_field)

    @property
    def device(self) -> torch.device:
        """Where the counters live."""
        return self.totals.device

    def pointers(self) -> tuple[int, int, int, int]:
        """What the binding takes: pointers of totals, own and ring, and the ring's capacity."""
        ring = self.ring.data_ptr() if self.capacity else 0
        return self.totals.data_ptr(), self.own.data_ptr(), ring, self.capacity

    def snapshot(self, *, wait: bool = True) -> CounterSnapshot:
        """Copies the counters to the host, as they are between two operations.

        Usable from any thread, also while operations run. On a GPU the copy goes through a stream of
        its own; no other stream waits for it, and CUDA graphs may be captured meanwhile.

        Args:
            wait: count what is queued on the current stream, too; the host waits until it has run.
                False: what has run so far.

        Raises:
            EPUsageError: `wait` while the current stream is being captured.
        """
        copier = self._copier
        if wait and isinstance(copier, DeviceCopier):
            copier.wait_for_current_stream()
        reading, ring, lost = copy_between_operations(copier, self._consistent)
        return CounterSnapshot(
            fields=self.fields,
            own_fields=self.own_fields,
            ring_source_fields=self.ring_source_fields,
            ring_own_fields=self.ring_own_fields,
            totals=reading.totals,
            own=reading.own,
            ring=ring,
            lost=lost,
        )

    def num_ops(self) -> int:
        """Operations that have been counted by now. Waits for nothing that runs."""
        return int(self._copier.reading().own[self.own_fields.index("ops")])

    def _consistent(self, reading: Reading) -> bool:
        """Whether no operation is being counted; an operation counts its sources first."""
        total = dict(zip(self.fields, reading.totals))
        parts = total["late_ns"] + total["issue_ns"] + total["path_ns"]
        own_ops = reading.own[self.own_fields.index("ops")]
        return bool((total["ops"] <= own_ops).all() and (total["wait_ns"] == parts).all())

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
