"""One rank's trace, condensed: its exchanges in order, and when its GPU did what."""

from __future__ import annotations

import functools
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.diagnosis import FloatArray
from ..core.package import printable
from .kernels import (
    ALL_TO_ALL,
    COMBINE,
    DISPATCH,
    LAYOUT,
    PACK,
    TRANSFER,
    WAITING,
    Kernel,
    base_name,
    kernel_of,
)
from .operations import (
    LinkBytes,
    RecordedRows,
    added_up,
    calls_of,
    moved_by,
    operation_of,
    sent_of,
)
from .stream import TraceStream

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# Ranges that a program names, where the GPU does what was launched in them, and on the host; the profiler's are its own.
_ON_STREAM, _ON_HOST, _STEPS = "gpu_user_annotation", "user_annotation", "ProfilerStep"
# The year 2286.
_LATEST_US = 1e16
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


class Launched(NamedTuple):
    """A kernel of a dispatch or combine.

    Attributes:
        row: of the table.
        name: its own.
        span: begin and end, us.
        stream: process and stream that it ran on.
        number: by which the trace names the operator that launched it, if it does.
    """

    row: Kernel
    name: str
    span: tuple[float, float]
    stream: tuple[str, str]
    number: int | None


@dataclass
class TracedExchange:
    """One operator that dispatches or combines, or the kernels of one exchange where no operator stands above them.

    Attributes:
        name: of the operator, or of the kernel that transfers.
        operation: `DISPATCH` or `COMBINE`; `ALL_TO_ALL` where a kernel's name does not tell.
        begin_us: when the host called it, in the trace's time; of kernels, when the first one began.
        host_us: how long the host was in it.
        sent: what it says of its rows.
        thread: process and thread that called it.
        number: by which the trace names the operator, if it does.
        kernels: empty where there was no GPU.
        calls: numbers of the calls of this package in it.
        links: what it moves, exactly; `None`: it does not say.
    """

    name: str
    operation: str
    begin_us: float
    host_us: float
    sent: RecordedRows
    thread: tuple[str, str] = ("", "")
    number: int | None = None
    kernels: list[Launched] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    links: LinkBytes | None = None

    @property
    def span_us(self) -> tuple[float, float]:
        """From its first kernel behind the layout to its last one, or the host's time where there is none."""
        return self._span(WAITING, TRANSFER, PACK) or (
            self.begin_us,
            self.begin_us + self.host_us,
        )

    @property
    def meeting_us(self) -> tuple[float, float]:
        """In which ranks wait for each other, and which ends for all at once: of its notify or barrier, or else transfer."""
        return self._span(WAITING) or self._span(TRANSFER) or self.span_us

    def has(self, phase: str) -> bool:
        """Whether any of its kernels stands in that phase."""
        return any(kernel.row.phase == phase for kernel in self.kernels)

    def may_be(self, operation: str) -> bool:
        """Whether what is of that operation may be a part of it, as far as names of kernels tell."""
        return self.operation == operation or ALL_TO_ALL in (self.operation, operation)

    def add(self, kernel: Launched) -> None:
        """One of its kernels, which may tell its operation."""
        self.kernels.append(kernel)
        if self.operation == ALL_TO_ALL:
            self.operation = kernel.row.operation

    def _span(self, *phases: str) -> tuple[float, float] | None:
        spans = [kernel.span for kernel in self.kernels if kernel.row.phase in phases]
        if not spans:
            return None
        return min(begin for begin, _ in spans), max(end for _, end in spans)

    def is_within(self, earlier: TracedExchange) -> bool:
        """Whether it is called by another one of the same operation."""
        ends_in_it = self.begin_us + self.host_us <= earlier.begin_us + earlier.host_us
        return earlier.operation == self.operation and ends_in_it


class NamedSpans:
    """Times and names of many spans, 20 bytes each."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._flat = array("d")
        self._places = array("I")

    def add(self, name: str, begin: float, end: float) -> None:
        """One more; in any order."""
        self._flat.extend((begin, end))
        self._places.append(self._names.setdefault(name, len(self._names)))

    @property
    def times(self) -> FloatArray:
        """[n, 2] begin and end."""
        return np.asarray(self._flat, np.float64).reshape(-1, 2)

    def total_us(self) -> list[tuple[str, int, float]]:
        """Of each name, how many and how long together."""
        places, times = np.asarray(self._places), self.times
        counts = np.bincount(places, minlength=len(self._names))
        us = np.bincount(places, times[:, 1] - times[:, 0], minlength=len(self._names))
        return list(zip(self._names, counts.tolist(), us.tolist()))

    def ending_within(self, begin: float, end: float) -> list[tuple[str, float, float]]:
        """Those that ended in that time, in order of their ends."""
        ends, order = self._by_end
        first, last = np.searchsorted(ends, (begin, end), side="right")
        names, flat = list(self._names), self._flat
        return [
            (names[self._places[i]], flat[2 * i], flat[2 * i + 1])
            for i in order[first:last].tolist()
        ]

    def around(self, at: float) -> str:
        """The shortest one at that time; "" if there is none."""
        times = self.times
        inside = np.flatnonzero((times[:, 0] <= at) & (at <= times[:, 1]))
        if not len(inside):
            return ""
        shortest = int(inside[np.argmin(times[inside, 1] - times[inside, 0])])
        return list(self._names)[self._places[shortest]]

    @functools.cached_property
    def _by_end(self) -> tuple[FloatArray, npt.NDArray[np.intp]]:
        ends = self.times[:, 1]
        order = np.argsort(ends, kind="stable")
        return ends[order], order


@dataclass
class RankTrace:
    """What a trace says of one rank.

    Attributes:
        path: the file.
        rank: of the job, -1 if neither the trace nor its name says.
        exchanges: in order of time.
        own: [n, 2] begin and end of the kernels of exchanges, us, sorted, without overlaps.
        work: all other work on the GPU by name.
        ranges: that the program named, where the GPU ran what was launched in them, and on the host.
        num_ranks: of the job, 0 if the trace does not say.
    """

    path: Path
    rank: int
    exchanges: list[TracedExchange]
    own: FloatArray
    work: NamedSpans
    ranges: tuple[NamedSpans, NamedSpans]
    num_ranks: int

    @functools.cached_property
    def other(self) -> FloatArray:
        """The same as `own` of all other work on the GPU."""
        return union(self.work.times)

    @functools.cached_property
    def busy(self) -> FloatArray:
        """The same of all of its work."""
        return union(np.concatenate([self.own, self.other]))

    @property
    def wall_us(self) -> float:
        """From the first work on the GPU to the end of the last."""
        return float(self.busy[-1, 1] - self.busy[0, 0]) if self.has_gpu else 0.0

    @property
    def has_gpu(self) -> bool:
        """Whether there is any work on a GPU."""
        return len(self.busy) > 0


def read(path: Path) -> RankTrace:
    """Reads one trace. Memory grows with the numbers of kernels and exchanges, not with the file."""
    stream = TraceStream(path)
    return condense(path, stream, stream.header)


def condense(
    path: Path, events: Iterable[Mapping[str, Any]], header: Mapping[str, Any]
) -> RankTrace:
    """The same of events that somebody else has read; the header may be filled while they are."""
    called: list[TracedExchange] = []
    moved: list[tuple[float, int, LinkBytes]] = []
    kernels: list[Launched] = []
    work, on_stream, on_host = NamedSpans(), NamedSpans(), NamedSpans()
    for event in events:
        if event.get("ph") != "X":
            continue
        name = printable(str(event.get("name", "")))
        category = str(event.get("cat", "")).lower()
        begin, lasts = _number(event.get("ts")), _number(event.get("dur"))
        if begin is None or lasts is None:
            continue
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        if category in _ON_GPU:
            row = kernel_of(name) if category == "kernel" else None
            if row is None:
                work.add(name, begin, begin + lasts)
                continue
            # There are few names, and long ones.
            name, span, number = sys.intern(name), (begin, begin + lasts), _number_in(arguments)
            kernels.append(Launched(row, name, span, _thread(event), number))
        elif category == _ON_STREAM:
            if not name.startswith(_STEPS):
                on_stream.add(name, begin, begin + lasts)
        elif (operation := operation_of(name)) is not None:
            sent, number = sent_of(name, arguments), _number_in(arguments)
            exchange = TracedExchange(name, operation, begin, lasts, sent, _thread(event), number)
            exchange.calls = calls_of(name, arguments)
            called.append(exchange)
        elif (said := moved_by(name, arguments)) is not None:
            moved.append((begin, *said))
        elif category == _ON_HOST and not name.startswith(_STEPS):
            on_host.add(name, begin, begin + lasts)
    kernels.sort(key=lambda kernel: kernel.span[0])
    operators = {each.number: each for each in called if each.number is not None}
    for kernel in kernels:
        if kernel.number in operators:
            operators[kernel.number].kernels.append(kernel)
    alone = _of_streams([kernel for kernel in kernels if kernel.number not in operators])
    outermost = _outermost(called)
    _add_moved(outermost, moved)
    found = sorted([*outermost, *alone], key=lambda each: each.span_us[0])
    return RankTrace(
        path,
        _rank(header, path),
        [each for each in found if each.kernels or not kernels],
        union([kernel.span for kernel in kernels]),
        work,
        (on_stream, on_host),
        max(_of_job(header, "world_size") or 0, 0),
    )


def _of_streams(kernels: list[Launched]) -> list[TracedExchange]:
    """The exchanges of kernels that no operator launched, which are in order of time.

    On a stream follow each other notify, transfer, and what is done with the rows. Layout may stand on another one, and
    belongs to the next transfer that it may be of; what belongs to none is told together.
    """
    found: list[TracedExchange] = []
    latest: dict[tuple[str, str], TracedExchange] = {}
    layouts: dict[str, list[Launched]] = {}
    for kernel in kernels:
        phase = kernel.row.phase
        if phase == LAYOUT:
            layouts.setdefault(kernel.row.operation, []).append(kernel)
            continue
        exchange = latest.get(kernel.stream)
        is_over = exchange is not None and exchange.has(TRANSFER) and phase != PACK
        if exchange is None or is_over or not exchange.may_be(kernel.row.operation):
            exchange = TracedExchange("", ALL_TO_ALL, kernel.span[0], 0.0, RecordedRows())
            latest[kernel.stream] = exchange
            found.append(exchange)
        exchange.add(kernel)
        if phase == TRANSFER:
            for operation in list(filter(exchange.may_be, layouts)):
                for layout in layouts.pop(operation):
                    exchange.add(layout)
    for operation, left in layouts.items():
        begin = left[0].span[0]
        found.append(TracedExchange("", operation, begin, 0.0, RecordedRows(), kernels=left))
    # Where one kernel does both, and layout stands before some of them: these are dispatches, so the others are combines.
    mixed = [each for each in found if any(map(_is_both, each.kernels))]
    has_told = any(each.operation == DISPATCH for each in mixed)
    for exchange in mixed:
        if has_told and exchange.operation == ALL_TO_ALL:
            exchange.operation = COMBINE
    for exchange in found:
        # The kernel that transfers, and the direction where the kernel's name does not tell.
        first = next((k for k in exchange.kernels if k.row.phase == TRANSFER), exchange.kernels[0])
        is_told = _is_both(first) and exchange.operation != ALL_TO_ALL
        exchange.name = base_name(first.name) + (f" ({exchange.operation})" if is_told else "")
    return found


def _is_both(kernel: Launched) -> bool:
    return kernel.row.operation == ALL_TO_ALL and kernel.row.phase == TRANSFER


def _outermost(called: list[TracedExchange]) -> list[TracedExchange]:
    """Operators that stand in no other one of the same operation; these take over the kernels of those that do.

    A trainer's function calls one of ours, and the operator that torch.compile calls stands in an autograd function.
    The inner one knows which rows travel.
    """
    found: list[TracedExchange] = []
    outer: dict[tuple[str, str], TracedExchange] = {}
    for each in sorted(called, key=lambda each: (each.begin_us, -each.host_us)):
        above = outer.get(each.thread)
        if above is None or not each.is_within(above):
            outer[each.thread] = each
            found.append(each)
            continue
        above.kernels += each.kernels
        above.calls += each.calls
        if each.sent.num_bytes is not None:
            above.sent = replace(each.sent, worst_tokens=above.sent.worst_tokens)
    return found


def _add_moved(called: list[TracedExchange], moved: list[tuple[float, int, LinkBytes]]) -> None:
    """Adds to each exchange what the calls in it move: when it is said, in it or behind it, call, and what."""
    of_call: dict[int, list[TracedExchange]] = defaultdict(list)
    for exchange in sorted(called, key=lambda each: each.begin_us):
        for call in exchange.calls:
            of_call[call].append(exchange)
    for said_us, call, links in moved:
        begun = [exchange for exchange in of_call[call] if exchange.begin_us <= said_us]
        if begun:
            begun[-1].links = added_up([begun[-1].links or LinkBytes(0, 0, 0), links])


def _rank(header: Mapping[str, Any], path: Path) -> int:
    rank = _of_job(header, "rank")
    named = _RANK_IN_NAME.search(path.name)
    return rank if rank is not None else int(named.group(1)) if named else -1


def _of_job(header: Mapping[str, Any], name: str) -> int | None:
    about = header.get("distributedInfo")
    value = about.get(name) if isinstance(about, dict) else None
    return value if type(value) is int else None


def _number_in(arguments: Mapping[str, Any]) -> int | None:
    """By which a trace names an operator, in its `args` and in those of what it launched."""
    number = arguments.get("External id", arguments.get("external id"))
    return number if isinstance(number, int) else None


def _thread(event: Mapping[str, Any]) -> tuple[str, str]:
    return sys.intern(str(event.get("pid"))), sys.intern(str(event.get("tid")))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _LATEST_US else None


def union(spans: FloatArray | Sequence[tuple[float, float]]) -> FloatArray:
    """[n, 2] sorted intervals without overlaps, of begins and ends."""
    times = np.asarray(spans, dtype=np.float64).reshape(-1, 2)
    times = times[np.argsort(times[:, 0], kind="stable")]
    if not len(times):
        return times
    reach = np.maximum.accumulate(times[:, 1])
    is_first = np.r_[True, times[1:, 0] > reach[:-1]]
    first = np.flatnonzero(is_first)
    last = np.r_[first[1:] - 1, len(times) - 1]
    return np.stack([times[first, 0], reach[last]], axis=1)


def covered_us(times: FloatArray, intervals: FloatArray) -> FloatArray:
    """For each time, how much of all before it is in any of the intervals, which do not overlap each other."""
    if not len(intervals):
        return np.zeros(len(times))
    lengths = intervals[:, 1] - intervals[:, 0]
    until = np.cumsum(lengths)
    return np.interp(times, intervals.ravel(), np.stack([until - lengths, until], axis=1).ravel())
