"""One rank's trace, condensed: its exchanges in order, and when its GPU did what."""

from __future__ import annotations

import bisect
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

from . import facts
from .counted import Counted
from .operations import (
    DISPATCH,
    LinkBytes,
    RecordedRows,
    added_up,
    call_of,
    kernel_of,
    moved_by,
    operation_of,
    sent_of,
)
from .stream import TraceStream

Times = npt.NDArray[np.float64]
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# The year 2286.
_LATEST_US = 1e16
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


@dataclass
class TracedExchange:
    """One operator that dispatches or combines, or one kernel where no operator stands above it.

    Attributes:
        name: of the operator or kernel.
        operation: `DISPATCH` or `COMBINE`.
        begin_us: when the host called it, in the trace's time; of a kernel, when it began.
        host_us: how long the host was in it.
        sent: what it says of its rows.
        thread: process and thread that called it.
        kernels: [n, 2] begin and end of its kernels, us; empty where there was no GPU.
        number: by which the trace names the operator, if it does.
        calls: numbers of the calls of this package in it.
        links: what it moves, as it or the counters say exactly; `None`: neither does.
        counted: these calls, as far as counters have them.
        is_merged: whether links and counted stood in the trace.
    """

    name: str
    operation: str
    begin_us: float
    host_us: float
    sent: RecordedRows
    thread: tuple[str, str] = ("", "")
    kernels: list[tuple[float, float]] = field(default_factory=list)
    number: int | None = None
    calls: list[int] = field(default_factory=list)
    links: LinkBytes | None = None
    counted: list[Counted] = field(default_factory=list)
    is_merged: bool = False

    @property
    def span_us(self) -> tuple[float, float]:
        """From its first kernel to its last one, or the host's time where there is none."""
        if self.kernels:
            return min(begin for begin, _ in self.kernels), max(end for _, end in self.kernels)
        return self.begin_us, self.begin_us + self.host_us

    def is_within(self, earlier: TracedExchange) -> bool:
        """Whether it is called by another one of the same operation."""
        ends_in_it = self.begin_us + self.host_us <= earlier.begin_us + earlier.host_us
        return earlier.operation == self.operation and ends_in_it


@dataclass
class RankTrace:
    """What a trace says of one rank.

    Attributes:
        path: the file.
        rank: of the job, -1 if neither the trace nor its name says.
        exchanges: in order of time.
        other: [n, 2] begin and end of all other work on the GPU, us, sorted, without overlaps.
        own: [n, 2] the same of the kernels of exchanges.
        base_ns: what its times count from, UTC; 0 where it does not say.
    """

    path: Path
    rank: int
    exchanges: list[TracedExchange]
    other: Times
    own: Times
    base_ns: int = 0

    @property
    def has_gpu(self) -> bool:
        """Whether there is any work on a GPU."""
        return len(self.other) + len(self.own) > 0


def read(path: Path) -> RankTrace:
    """Reads one trace. Memory grows with the numbers of kernels and exchanges, not with the file.

    Raises:
        EPArgumentError: the file is damaged, or no trace.
        OSError: it cannot be read.
    """
    stream = TraceStream(path)
    return condense(path, stream, stream.header)


def condense(
    path: Path, events: Iterable[Mapping[str, Any]], header: Mapping[str, Any]
) -> RankTrace:
    """The same of events that somebody else has read.

    Args:
        path: where they come from.
        events: as the profiler writes them.
        header: what stands beside them; it may be filled while they are read.
    """
    operators: dict[int, TracedExchange] = {}
    nameless: list[TracedExchange] = []
    moved: list[_Moved] = []
    kernels: dict[int, list[tuple[str, str, float, float]]] = defaultdict(list)
    other, own = array("d"), array("d")
    for event in events:
        if event.get("ph") != "X":
            continue
        name, category = str(event.get("name", "")), str(event.get("cat", "")).lower()
        begin, lasts = _number(event.get("ts")), _number(event.get("dur"))
        if begin is None or lasts is None:
            continue
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        number = arguments.get("External id", arguments.get("external id"))
        if category in _ON_GPU:
            operation = kernel_of(name) if category == "kernel" else None
            if operation is None:
                other.extend((begin, begin + lasts))
                continue
            own.extend((begin, begin + lasts))
            key = number if isinstance(number, int) else -1
            # There are few names, and long ones.
            kernels[key].append((sys.intern(name), operation, begin, begin + lasts))
        elif (operation := operation_of(name)) is not None:
            exchange = TracedExchange(
                name, operation, begin, lasts, sent_of(name, arguments), _thread(event)
            )
            _add_facts(exchange, arguments, path)
            if isinstance(number, int):
                exchange.number = number
                operators[number] = exchange
            else:
                nameless.append(exchange)
        elif (said := moved_by(name, arguments)) is not None:
            moved.append(_Moved(_thread(event), begin, *said))
    alone = _add_kernels(operators, kernels)
    called = _outermost([*operators.values(), *nameless])
    _add_moved(called, moved)
    found = sorted([*called, *alone], key=lambda each: each.span_us[0])
    exchanges = [each for each in found if each.kernels or not kernels]
    base = header.get("baseTimeNanoseconds")
    base_ns = base if isinstance(base, int) else 0
    return RankTrace(path, _rank(header, path), exchanges, union(other), union(own), base_ns)


def add_counted(trace: RankTrace, counted: Mapping[int, Counted]) -> list[str]:
    """Adds what counters know of the calls of a rank.

    Args:
        trace: of this rank.
        counted: by number of the call.

    Returns:
        What does not fit, for people.
    """
    if not any(each.calls for each in trace.exchanges):
        return [
            f"{trace.path}: no operator says which call of this package it is, so counters add nothing; profile "
            "with record_shapes=True"
        ]
    exchanges = [each for each in trace.exchanges if each.calls and not each.is_merged]
    of_exchanges = [_counted_links(exchange, counted) for exchange in exchanges]
    for exchange, links in zip(exchanges, of_exchanges):
        # Of a combine, counters say what this rank receives, and the trace what it sends.
        is_known = links is not None and exchange.links is not None
        if is_known and exchange.operation == DISPATCH and links != exchange.links:
            return [
                f"{trace.path}: counters are left out, since they are of another buffer or run: call "
                f"{exchange.calls[0]} moves {links} there, and {exchange.links} in the trace"
            ]
    for exchange, links in zip(exchanges, of_exchanges):
        exchange.links = exchange.links or links
        exchange.counted = [counted[call] for call in exchange.calls if call in counted]
    num_calls = sum(len(each.calls) for each in exchanges)
    num_found = sum(len(each.counted) for each in exchanges)
    if num_found == num_calls:
        return []
    return [
        f"{trace.path}: counters have {num_found} of {num_calls} calls. They keep the latest: raise DEEP_EP_RECORDER, "
        "and ring of enable_counters()"
    ]


def _counted_links(exchange: TracedExchange, counted: Mapping[int, Counted]) -> LinkBytes | None:
    """`None` unless counters have all calls and their bytes."""
    found = (counted.get(call) for call in exchange.calls)
    return added_up(None if each is None else each.links for each in found)


def _add_facts(exchange: TracedExchange, arguments: Mapping[str, Any], path: Path) -> None:
    """Adds what the arguments of an operator say of its calls."""
    known = facts.of(arguments, f"{path}: {exchange.name} at {exchange.begin_us} us")
    exchange.links, exchange.counted = known.links, list(known.calls)
    exchange.is_merged = facts.KEY in arguments
    call = call_of(exchange.name, arguments)
    exchange.calls = [] if call is None else [call]


def _add_kernels(
    operators: dict[int, TracedExchange], kernels: dict[int, list[tuple[str, str, float, float]]]
) -> list[TracedExchange]:
    """Adds kernels to their operators; those without one are exchanges of their own, which it returns."""
    alone = []
    for number, launched in kernels.items():
        for name, operation, begin, end in launched:
            above = operators.get(number)
            if above is None:
                above = TracedExchange(_short(name), operation, begin, 0.0, RecordedRows())
                alone.append(above)
            above.kernels.append((begin, end))
    return alone


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


class _Moved(NamedTuple):
    """What a call moves, and where in the trace it says so."""

    thread: tuple[str, str]
    at_us: float
    call: int
    links: LinkBytes


def _add_moved(called: list[TracedExchange], moved: list[_Moved]) -> None:
    """Adds to each exchange what the calls in it move, which stands in it or behind it.

    Args:
        called: in order of time.
        moved: in any order.
    """
    of_thread: dict[tuple[str, str], list[TracedExchange]] = defaultdict(list)
    for exchange in called:
        of_thread[exchange.thread].append(exchange)
    begins = {thread: [each.begin_us for each in of] for thread, of in of_thread.items()}
    for thread, at_us, call, links in moved:
        place = bisect.bisect_right(begins.get(thread, []), at_us) - 1
        if place < 0:
            continue
        behind = of_thread[thread][place]
        # A merged trace has said so already.
        if call in behind.calls and not behind.is_merged:
            before = [] if behind.links is None else [behind.links]
            behind.links = added_up([*before, links])


def _short(name: str) -> str:
    """A kernel's name without its type and arguments."""
    return re.sub(r"^void |<.*|\(.*", "", name)


def _rank(header: Mapping[str, Any], path: Path) -> int:
    about = header.get("distributedInfo")
    rank = about.get("rank") if isinstance(about, dict) else None
    if isinstance(rank, int):
        return rank
    named = _RANK_IN_NAME.search(path.name)
    return int(named.group(1)) if named else -1


def _thread(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _LATEST_US else None


def union(flat: Sequence[float]) -> Times:
    """[n, 2] sorted intervals without overlaps, of begins and ends that alternate."""
    times = np.asarray(flat, dtype=np.float64).reshape(-1, 2)
    times = times[np.argsort(times[:, 0], kind="stable")]
    if not len(times):
        return times
    reach = np.maximum.accumulate(times[:, 1])
    is_first = np.r_[True, times[1:, 0] > reach[:-1]]
    first = np.flatnonzero(is_first)
    last = np.r_[first[1:] - 1, len(times) - 1]
    return np.stack([times[first, 0], reach[last]], axis=1)


def covered_us(times: Times, intervals: Times) -> Times:
    """For each time, how much of all before it is in any of the intervals, which do not overlap each other."""
    if not len(intervals):
        return np.zeros(len(times))
    lengths = intervals[:, 1] - intervals[:, 0]
    before = np.r_[0.0, np.cumsum(lengths)]
    index = np.searchsorted(intervals[:, 0], times, side="right")
    inside = np.minimum(times, np.r_[-np.inf, intervals[:, 1]][index])
    begun = np.r_[0.0, intervals[:, 0]][index]
    partial = np.where(index > 0, np.maximum(inside - begun, 0), 0)
    covered: Times = before[np.maximum(index - 1, 0)] + partial
    return covered
