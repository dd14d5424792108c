"""What the kernels would have written: counters and rings, from the stamps of every operation.

Stamps are [., receiver, source or own, 6] int64, as rings hold them: a row per source, and the
receiver's own times last.
"""

from __future__ import annotations

import numpy as np
from generator_machines import TOKEN_BYTES, Kind, StampRule

from deep_ep.counters import CounterSnapshot
from deep_ep.diagnose.core.diagnosis import IntArray

COUNTER_FIELDS = (
    "ops",
    "tokens",
    "bytes",
    "wait_ns",
    "late_ns",
    "issue_ns",
    "path_ns",
    "slack_ns",
    "critical_ops",
    "critical_ns",
    "max_wait_ns",
)
OWN_FIELDS = ("ops", "gap_ns", "send_ns", "wait_ns", "drain_ns")
RING_SOURCE_FIELDS = ("entered", "issued", "arrival", "tokens", "seen", "clock_error")
RING_OWN_FIELDS = ("op", "wait_begin", "exit", "previous_exit", "sent", "timer_step")
# Their places in the last dimension of the stamps.
ENTERED, ISSUED, ARRIVAL, TOKENS, SEEN, CLOCK_ERROR = range(6)
OP, WAIT_BEGIN, EXIT, PREVIOUS_EXIT, SENT, TIMER_STEP = range(6)
COLUMNS = len(RING_SOURCE_FIELDS)
# Kernels that waited for all headers first had only these.
_OLD_COLUMNS = 4

# Cells that are counted at once; bounds memory.
_COUNTED_CELLS = 2**21


class Recorded:
    """Counters of all ranks of one operation kind, from its stamps [n, receiver, source or own, 6]."""

    def __init__(self, stamps: IntArray, kind: Kind, capacity: int, rule: StampRule) -> None:
        self.stamps = stamps
        self.kind = kind
        self.capacity = capacity
        self.columns = _OLD_COLUMNS if rule is StampRule.AFTER_ALL_HEADERS else COLUMNS
        num_ranks = stamps.shape[1]
        self.totals = np.zeros((num_ranks, len(COUNTER_FIELDS), num_ranks), np.int64)
        self.own = np.zeros((num_ranks, len(OWN_FIELDS)), np.int64)
        step = max(1, _COUNTED_CELLS // num_ranks**2)
        for begin in range(0, len(stamps), step):
            self._count(stamps[begin : begin + step])
        # A slot holds the last operation that was written to it.
        slots = stamps[::-1, 0, -1, OP] % max(capacity, 1)
        self.kept = len(stamps) - 1 - np.unique(slots, return_index=True)[1]

    def counters(self, rank: int) -> CounterSnapshot:
        num_ranks = self.stamps.shape[1]
        ring = np.zeros((self.capacity, num_ranks + 1, self.columns), np.int64)
        if self.capacity:
            kept = self.stamps[self.kept, rank, :, : self.columns]
            if self.kind.own_times_only:
                kept[:, :-1] = 0
            ring[kept[:, -1, OP] % self.capacity] = kept
        return CounterSnapshot(
            fields=COUNTER_FIELDS,
            own_fields=OWN_FIELDS,
            ring_source_fields=RING_SOURCE_FIELDS[: self.columns],
            ring_own_fields=RING_OWN_FIELDS[: self.columns],
            totals=self.totals[rank],
            own=self.own[rank],
            ring=ring,
        )

    def _count(self, stamps: IntArray) -> None:
        entered, issued, arrival, tokens = np.moveaxis(stamps[:, :, :-1, : TOKENS + 1], -1, 0)
        _, wait_begin, exit_at, previous_exit, sent = np.moveaxis(
            stamps[:, :, -1, : SENT + 1], -1, 0
        )
        itself = np.arange(stamps.shape[1])
        heard = arrival != 0
        begin = wait_begin[:, :, None]
        wait = np.where(heard, np.maximum(arrival - begin, 0), 0)
        late = np.clip(entered - begin, 0, wait)
        issue = np.clip(issued - np.maximum(entered, begin), 0, wait - late)
        ready = np.maximum(arrival.max(axis=2), wait_begin)
        runner_up = np.maximum(_second_largest(arrival), wait_begin)
        came_last = np.argmax(arrival, axis=2)[:, :, None]
        waited = ready > wait_begin
        critical_ops, critical_ns = np.zeros_like(wait), np.zeros_like(wait)
        np.put_along_axis(critical_ops, came_last, waited[:, :, None], axis=2)
        lead = np.where(waited, ready - runner_up, 0)
        np.put_along_axis(critical_ns, came_last, lead[:, :, None], axis=2)
        own = {
            "ops": np.ones_like(ready),
            "gap_ns": np.where(previous_exit != 0, entered[:, itself, itself] - previous_exit, 0),
            "send_ns": sent - entered[:, itself, itself],
            "wait_ns": ready - wait_begin,
            "drain_ns": exit_at - ready,
        }
        for name, values in own.items():
            self.own[:, OWN_FIELDS.index(name)] += values.sum(axis=0)
        if self.kind.own_times_only:
            return
        sums = {
            "ops": heard,
            "tokens": tokens,
            "bytes": tokens * TOKEN_BYTES,
            "wait_ns": wait,
            "late_ns": late,
            "issue_ns": issue,
            "path_ns": wait - late - issue,
            "slack_ns": np.where(heard, np.maximum(begin - issued, 0), 0),
            "critical_ops": critical_ops,
            "critical_ns": critical_ns,
        }
        for name, values in sums.items():
            self.totals[:, COUNTER_FIELDS.index(name)] += values.sum(axis=0)
        largest = self.totals[:, COUNTER_FIELDS.index("max_wait_ns")]
        np.maximum(largest, wait.max(axis=0, initial=0), out=largest)


def _second_largest(values: IntArray) -> IntArray:
    """Of the last dimension; the largest where there is no other."""
    if values.shape[-1] == 1:
        return values[..., 0]
    second: IntArray = np.partition(values, -2, axis=-1)[..., -2]
    return second
