"""What the kernels would have written: counters and rings, from the stamps of every operation.

Stamps are [., receiver, source or own, 6] int64, as rings hold them: a row per source, and the
receiver's own times last.
"""

from __future__ import annotations

import numpy as np

from deep_ep.diagnose.core.diagnosis import BoolArray, IntArray
from deep_ep.native import backend
from deep_ep.observe import stamps as stamps_of
from deep_ep.observe.counter_snapshot import CounterSnapshot
from generator.machines import TOKEN_BYTES, Kind

_BINDING = backend.get().binding
COUNTER_FIELDS = tuple(_BINDING.COUNTER_FIELDS)
OWN_FIELDS = tuple(_BINDING.OWN_FIELDS)
RING_SOURCE_FIELDS = tuple(_BINDING.RING_SOURCE_FIELDS)
RING_OWN_FIELDS = tuple(_BINDING.RING_OWN_FIELDS)
# Their places in the last dimension of the stamps.
ENTERED, ISSUED, ARRIVAL, TOKENS, SEEN, CLOCK_ERROR = range(6)
OP, WAIT_BEGIN, EXIT, PREVIOUS_EXIT, SENT, TIMER_STEP = range(6)
COLUMNS = _BINDING.NUM_RING_FIELDS

# Cells that are counted at once; bounds memory.
_COUNTED_CELLS = 2**21


class Recorded:
    """Counters of all ranks of one operation kind, from its stamps [n, receiver, source or own, 6].

    relayed: [receiver, source], whose rows a gateway passed on.
    """

    def __init__(
        self,
        stamps: IntArray,
        blocked: IntArray | None,
        kind: Kind,
        capacity: int,
        relayed: BoolArray,
    ) -> None:
        self.stamps = stamps
        self.kind = kind
        self.relayed = relayed
        self.capacity = capacity
        num_ranks = stamps.shape[1]
        self.totals = np.zeros((num_ranks, len(COUNTER_FIELDS), num_ranks), np.int64)
        self.own = np.zeros((num_ranks, len(OWN_FIELDS)), np.int64)
        step = max(1, _COUNTED_CELLS // num_ranks**2)
        for begin in range(0, len(stamps), step):
            part = slice(begin, begin + step)
            self._count(stamps[part], None if blocked is None else blocked[part])
        # A slot holds the last operation that was written to it.
        slots = stamps[::-1, 0, -1, OP] % max(capacity, 1)
        self.kept = len(stamps) - 1 - np.unique(slots, return_index=True)[1]

    def counters(self, rank: int) -> CounterSnapshot:
        num_ranks = self.stamps.shape[1]
        ring = np.zeros((self.capacity, num_ranks + 1, COLUMNS), np.int64)
        if self.capacity:
            kept = self.stamps[self.kept, rank]
            ring[kept[:, -1, OP] % self.capacity] = kept
        return CounterSnapshot(
            fields=COUNTER_FIELDS,
            own_fields=OWN_FIELDS,
            ring_source_fields=RING_SOURCE_FIELDS,
            ring_own_fields=RING_OWN_FIELDS,
            totals=self.totals[rank],
            own=self.own[rank],
            ring=ring,
        )

    def _count(self, stamps: IntArray, blocked: IntArray | None) -> None:
        entered, issued, arrival, tokens = np.moveaxis(stamps[:, :, :-1, : TOKENS + 1], -1, 0)
        _, wait_begin, exit_at, previous_exit, sent = np.moveaxis(
            stamps[:, :, -1, : SENT + 1], -1, 0
        )
        itself = np.arange(stamps.shape[1])
        heard = arrival != 0
        own_entered = entered[:, itself, itself]
        # A gateway is no source of its own hop, and its entry is not in these stamps.
        is_source = own_entered != 0
        own = {
            "ops": np.ones_like(wait_begin),
            "gap_ns": np.where(is_source, stamps_of.gap(own_entered, previous_exit), 0),
            "send_ns": np.where(is_source, stamps_of.send(own_entered, sent), 0),
            **stamps_of.own_counters(arrival, wait_begin, exit_at),
        }
        for name, values in own.items():
            self.own[:, OWN_FIELDS.index(name)] += values.sum(axis=0)
        added = stamps_of.source_counters(entered, issued, arrival, wait_begin)
        sums = {name: np.where(heard, values, 0) for name, values in added.items()}
        if blocked is not None:
            passing_on = np.where(self.relayed, sums["path_ns"], 0)
            sums["credit_ns"] = np.minimum(blocked, sums["issue_ns"] + passing_on)
        sums |= {"ops": heard, "tokens": tokens, "bytes": tokens * TOKEN_BYTES}
        for name, values in sums.items():
            self.totals[:, COUNTER_FIELDS.index(name)] += values.sum(axis=0)
        largest = self.totals[:, COUNTER_FIELDS.index("max_wait_ns")]
        np.maximum(largest, sums["wait_ns"].max(axis=0, initial=0), out=largest)
