"""Phases: into what the time of one rank goes, operation by operation, for `Buffer.phases` and the log.

The kernels stamp the steps of each operation (stamps.py), and `deep_ep.moe` and `ElasticBuffer` those around it (parts.py).
This module turns the stamps of one rank into phases; it needs nothing from other ranks. The phases of an operation
fill the time from the end of the operation before to its own end, without gap or overlap:

    between   the program: experts, attention, everything that is nothing of the following
    layout    before a normal dispatch: it is counted where tokens go
    permute   received rows are put in the order of experts
    unpermute rows by expert are summed up for their way back; also the gradients of that
    notify    in a fresh normal dispatch: counts are exchanged, without the waiting for others
    host      there: the host reads the counts and launches the rest
    send      until the last row of this rank is handed over
    hidden    low latency with hooks: rows travel while the program does something else
    late      this rank waits, and the rank that it waits for has not entered the operation
    issue     ... has entered, and has not sent everything
    path      ... has sent everything, and it has not come
    copy      after the last arrival: rows are put where they belong, or summed up

The first four lie before the operation. A part of the program that runs while rows travel, on another stream or before a
hook is called, counts as what the operation does meanwhile. The wait (late, issue, path) begins when the rank has nothing left
to send, and is charged to the rank whose data came last. Waiting for free slots of queues is part of "send".
"""

from __future__ import annotations

import bisect
import itertools
import logging
import multiprocessing.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deep_ep.errors import EPUsageError
from deep_ep.observe import stamps
from deep_ep.observe.parts import PARTS, Part, PartStamps

if TYPE_CHECKING:
    from deep_ep.observe.counter_snapshot import CounterSnapshot
    from deep_ep.observe.counters import RecvCounters

PHASES = ("between", *PARTS, "notify", "host", "send", "hidden", "late", "issue", "path", "copy")
# Which operations have phases of their own; what others count is a part of these.
_NOTIFY, _DISPATCH = "notify", "normal dispatch"
_KINDS = ("dispatch", "combine", _DISPATCH, "normal combine")
# Of the ranks that one waited for, how many a table names. Chosen.
_MOST_NAMED = 3

_log = logging.getLogger("deep_ep")


@dataclass(frozen=True)
class OperationPhases:
    """One operation of one rank.

    Attributes:
        operation: its number in the buffer.
        kind: "dispatch" or "combine" of low latency, "normal dispatch" or "normal combine".
        ns: by phase, those of `PHASES`; their sum is the time since the end of the operation before.
        charged: by rank, how long this one waited for it, ns; itself is left out.
    """

    operation: int
    kind: str
    ns: Mapping[str, int]
    charged: Mapping[int, int]


@dataclass(frozen=True)
class Phases:
    """The recent operations of one rank, as many as its ring holds.

    Attributes:
        rank: this rank.
        operations: in their order.
    """

    rank: int
    operations: Sequence[OperationPhases]

    def total(self, kind: str | None = None) -> dict[str, int]:
        """Sums by phase, ns, of one kind of operation or of all."""
        chosen = [each for each in self.operations if kind in (None, each.kind)]
        return {phase: sum(each.ns[phase] for each in chosen) for phase in PHASES}

    def charged(self) -> dict[int, int]:
        """By rank, how long this one waited for it, ns; the longest first."""
        sums: dict[int, int] = {}
        for each in self.operations:
            for rank, ns in each.charged.items():
                sums[rank] = sums.get(rank, 0) + ns
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        """A table: a line for each kind of operation, means in microseconds, and for whom it waited."""
        kinds = [kind for kind in _KINDS if any(each.kind == kind for each in self.operations)]
        shown = [phase for phase, ns in self.total().items() if ns]
        lines = [f"{'us per operation':16} {'number':>6}" + "".join(f"{p:>10}" for p in shown)]
        for kind in kinds:
            number = sum(each.kind == kind for each in self.operations)
            total = self.total(kind)
            cells = "".join(f"{total[phase] / number / 1e3:10.1f}" for phase in shown)
            lines.append(f"{kind:16} {number:6}{cells}")
        waited = [
            f"rank {rank} {ns / 1e3:.0f} us"
            for rank, ns in list(self.charged().items())[:_MOST_NAMED]
        ]
        lines.append(f"rank {self.rank} waited for: {', '.join(waited) or 'nobody'}")
        return "\n".join(lines)


class AtTheEnd:
    """Logs the phases of one rank's buffer when that ends, or with the process. It keeps the counters alive, never
    the buffer.
    """

    def __init__(self, buffer: Any) -> None:
        """Logs nothing yet; the counters of the buffer are enabled."""
        self._rank, self._counters = buffer.rank, counters_of(buffer)
        self._parts = buffer.communicator.parts
        # What multiprocessing starts may leave atexit out.
        self._at_exit = multiprocessing.util.Finalize(self, self._log, exitpriority=1)

    def end(self) -> None:
        """Logs them."""
        self._at_exit()

    def close(self) -> None:
        """Nothing is left to do."""

    def _log(self) -> None:
        _log.warning(
            "phases of rank %d\n%s", self._rank, _of(self._rank, self._counters, self._parts)
        )


def of(buffer: Any) -> Phases:
    """The phases of this rank's recent operations; see `Buffer.phases`."""
    counters = counters_of(buffer)
    if not counters:
        raise EPUsageError(
            "phases: this buffer counts nothing; phases are made of the stamps that counters keep. Call "
            "buffer.enable_counters() before the operations, or set DEEP_EP_PHASES=1."
        )
    return _of(buffer.rank, counters, buffer.communicator.parts)


def of_snapshots(
    rank: int, taken: Mapping[str, CounterSnapshot], parts: Sequence[Part] = ()
) -> Phases:
    """The phases of the operations that these rings hold.

    Args:
        rank: whose they are.
        taken: by kind, as `deep_ep.diagnose.Snapshot` names them.
        parts: of the program, on the same clock, in any order; they may overlap.
    """
    around = _Around.of(parts)
    notices = {}
    if _NOTIFY in taken:
        rows = [_StampRow.of(row, taken[_NOTIFY]) for row in taken[_NOTIFY].operations()]
        notices = {row.own["op"]: row for row in rows}
    found = []
    for kind, counters in taken.items():
        if kind in _KINDS:
            for each in counters.operations():
                row = _StampRow.of(each, counters)
                notice = notices.get(row.own["op"]) if kind == _DISPATCH else None
                found.append(_operation(kind, row, notice, rank, around))
    return Phases(rank, sorted(found, key=lambda each: each.operation))


def counters_of(buffer: Any) -> dict[str, RecvCounters]:
    """The counters that a buffer has at the moment, by kind as `deep_ep.diagnose.Snapshot` names them."""
    kinds = {
        "dispatch": buffer.dispatch_counters,
        "combine": buffer.combine_counters,
        _NOTIFY: buffer.normal_notify_counters,
        "gateway dispatch": buffer.normal_relay_dispatch_counters,
        "gateway combine": buffer.normal_relay_combine_counters,
        _DISPATCH: buffer.normal_dispatch_counters,
        "normal combine": buffer.normal_combine_counters,
    }
    return {kind: counters for kind, counters in kinds.items() if counters is not None}


def _of(rank: int, counters: Mapping[str, RecvCounters], parts: PartStamps | None) -> Phases:
    used = (kind for kind in (_NOTIFY, *_KINDS) if kind in counters)
    taken = {kind: counters[kind].snapshot() for kind in used}
    return of_snapshots(rank, taken, () if parts is None else parts.finished())


@dataclass(frozen=True)
class _Around:
    """What a rank did around its operations: parts in order and without overlap, and where they end."""

    parts: Sequence[Part]
    ends: Sequence[int]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> _Around:
        """What two of them share belongs to the one that began first."""
        apart: list[Part] = []
        end = 0
        for part in sorted(parts, key=lambda part: part.begin):
            if part.end > end:
                apart.append(Part(part.name, max(part.begin, end), part.end))
                end = part.end
        return cls(apart, [part.end for part in apart])

    def between(self, begin: int, end: int) -> dict[str, int]:
        """That time by phase: the parts, and what is left."""
        ns = {"between": max(end - begin, 0)}
        first = bisect.bisect_right(self.ends, begin)
        for part in itertools.takewhile(lambda part: part.begin < end, self.parts[first:]):
            took = max(min(part.end, end) - max(part.begin, begin), 0)
            ns[part.name] = ns.get(part.name, 0) + took
            ns["between"] -= took
        return ns


@dataclass(frozen=True)
class _StampRow:
    """Stamps of one operation, ns on this rank's clock: `own` by name, the others `[num_ranks]` int64."""

    own: Mapping[str, int]
    entered: Any
    issued: Any
    arrival: Any

    @classmethod
    def of(cls, row: Any, counters: CounterSnapshot) -> _StampRow:
        own = dict(zip(counters.ring_own_fields, row[-1].tolist()))
        of_source = {name: row[:-1, i] for i, name in enumerate(counters.ring_source_fields)}
        return cls(own, *(of_source[name] for name in ("entered", "issued", "arrival")))


def _operation(
    kind: str, row: _StampRow, notice: _StampRow | None, rank: int, around: _Around
) -> OperationPhases:
    ns = dict.fromkeys(PHASES, 0)
    charged: dict[int, int] = {}
    first = notice or row
    entered, previous = int(first.entered[rank]), first.own["previous_exit"]
    if previous:
        ns.update(around.between(previous, entered))
    begin, end = row.own["wait_begin"], row.own["exit"]
    if notice is not None:
        noticed = notice.own["exit"]
        waited = _wait(ns, charged, notice, notice.own["wait_begin"])
        ns["notify"] = max(noticed - entered - waited, 0)
        entered = max(begin, noticed)
        ns["host"] = entered - noticed
    sent = min(max(row.own["sent"] or begin, entered), end)
    ns["send"] = sent - entered
    waits = max(sent, begin)
    ns["hidden"] = waits - sent
    ns["copy"] = max(end - waits - _wait(ns, charged, row, waits), 0)
    charged.pop(rank, None)
    return OperationPhases(row.own["op"], kind, ns, charged)


def _wait(ns: dict[str, int], charged: dict[int, int], row: _StampRow, begin: int) -> int:
    """Adds the waiting for the last arrival to its phases and to its rank; returns how long it was."""
    last = int(np.argmax(row.arrival))
    only = slice(last, last + 1)
    parts = stamps.waiting(
        row.entered[only], row.issued[only], row.arrival[only], np.asarray(begin)
    )
    waited, *split = (int(part[0]) for part in parts)
    if waited:
        charged[last] = charged.get(last, 0) + waited
        for phase, part in zip(("late", "issue", "path"), split):
            ns[phase] += part
    return waited
