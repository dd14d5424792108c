"""What one rank says of itself, or is said of it, when operations hang: plain data, and where its calls place it.

A verdict (verdict.py) is made from the states of all ranks, and a dump is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional, TypeVar

from deep_ep.base import codec

# What a rank waits for of another one: that it enters the operation; its rows, or the word that there
# are none; or that it empties slots of its queues.
Owed = Literal["entry", "rows", "slots"]

# "busy": the process runs and does not let its Python threads run. "silent": it does not answer, and it is not
# known why. "ended": in order. "unknown": nothing was ever heard.
Process = Literal["alive", "busy", "stopped", "silent", "unreachable", "gone", "ended", "unknown"]

# Series of calls. In the last two ranks wait without a kernel.
OPERATIONS, CONSTRUCTION, DESTRUCTION = "operation", "construction", "destruction"
# A fresh normal dispatch takes two kernels, one behind the other, of one number.
NOTIFY, NORMAL_DISPATCH, NORMAL_COMBINE = "normal_notify", "normal_dispatch", "normal_combine"

FORMAT = 1

T = TypeVar("T")

# No group has more ranks.
_NumRanks = Annotated[int, codec.Range(1, (1 << 16) + 1), codec.Length(("num_ranks",))]
_Rank = Annotated[int, codec.Range(below="num_ranks")]


class InDump:
    """What a file of a dump holds: a dataclass that becomes JSON and is made of it."""

    def plain(self) -> dict[str, Any]:
        """As data for JSON."""
        return {"format": FORMAT, **codec.to_plain(self)}

    @classmethod
    def of(cls: type[T], plain: Any) -> T:
        """From plain data of this or a later format; what that has in addition is left out.

        Raises:
            codec.CodecError: it is none.
        """
        return codec.from_plain(cls, plain, is_strict=False)


@dataclass(frozen=True)
class Frame:
    """A place in Python code.

    Attributes:
        function, file, line: where it is.
        text: of that line; empty if it is not known.
    """

    function: str
    file: str
    line: int
    text: str = ""


@dataclass(frozen=True)
class Thread:
    """A Python thread.

    Attributes:
        name: of the thread.
        frames: innermost first.
    """

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Call:
    """An operation in the ring of a rank. Times are 0 where that has not happened.

    Attributes:
        call: number of the host's call, from 1. All replays of a captured graph have one.
        series: "operation" for dispatch and combine, which are numbered together; else as `name`.
        number: in its series, from 1; 0: its kernel has not entered yet.
        name: of the operation.
        sizes: by name; what all ranks must agree on comes with `agreed`.
        agreed: names in `sizes` which must be the same on all ranks.
        dtype: of the rows; empty if it has none.
        stream: on which it was called.
        called_ns: when the host called it, UTC, ns since 1970.
        receive_called_ns: the same for the hook of an operation that has one.
        has_hook: whether it has one.
        entered_ns: on the device's clock, as all that follow.
        sent_ns: when the last row to anybody had been handed over.
        finished_ns: when it ended.
        failed: the reason, if it ended by a failure.
        frames: who called it, innermost first.
    """

    call: int
    series: str
    number: int
    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    agreed: tuple[str, ...] = ()
    dtype: str = ""
    stream: int = 0
    called_ns: int = 0
    receive_called_ns: int = 0
    has_hook: bool = False
    entered_ns: int = 0
    sent_ns: int = 0
    finished_ns: int = 0
    failed: str = ""
    frames: tuple[Frame, ...] = ()

    @property
    def has_entered(self) -> bool:
        """Whether its kernel has."""
        return self.number > 0 or self.entered_ns > 0

    @property
    def is_pending(self) -> bool:
        """Whether it was called and its kernel has not entered."""
        return not (self.has_entered or self.finished_ns or self.failed)


@dataclass(frozen=True)
class Waits:
    """For whom a kernel waits now.

    Attributes:
        series, number: of the operation, as in `Call`.
        waited_s: how long the kernel has been waiting, seconds.
        missing: by what it waits for, the ranks that owe it, ascending.
    """

    series: str
    number: int
    waited_s: float
    missing: Mapping[Owed, tuple[_Rank, ...]]

    def ranks(self) -> tuple[int, ...]:
        """All ranks that it waits for, ascending."""
        return tuple(sorted({rank for ranks in self.missing.values() for rank in ranks}))


@dataclass(frozen=True)
class RankState(InDump):
    """One rank of one buffer.

    Attributes:
        rank: in the group of the buffer.
        num_ranks: size of that group.
        buffer: names the buffer, the same on all ranks.
        host, pid: where it runs; empty and 0 if that is not known.
        global_rank: in the job; -1 if that is not known.
        taken_ns: when this was so, UTC, ns since 1970.
        written_by: the rank that said it.
        process: see `Process`.
        exit: how the process ended, if that is known: "exit status 1", "signal 9".
        raised: the exception that the program has raised, if it has: type, text, and where.
        closed: newest operation that has ended; the series is "operation".
        opened: the one it is in; 0: none.
        in_call: name of the call of this package in which the host is now; empty: none.
        calls: the ring, oldest first.
        waits: for whom it waits; `None`: for nobody.
        threads: its Python threads, the main thread first.
        masked: ranks that are masked out.
    """

    rank: _Rank
    num_ranks: _NumRanks
    buffer: str = ""
    host: str = ""
    pid: int = 0
    global_rank: int = -1
    taken_ns: int = 0
    written_by: int = -1
    process: Process = "alive"
    exit: str = ""
    raised: str = ""
    closed: int = 0
    opened: int = 0
    in_call: str = ""
    calls: tuple[Call, ...] = ()
    waits: Optional[Waits] = None  # noqa: UP045 - read at run time, by Python 3.9 as well
    threads: tuple[Thread, ...] = ()
    masked: tuple[_Rank, ...] = ()

    @property
    def last(self) -> int:
        """Newest operation that it has entered, by its own word; 0: none; -1: that is not known."""
        is_own = self.written_by in (self.rank, -1) and self.process != "unknown"
        return max(self.closed, self.opened) if is_own else -1


# ---- where a rank is in its operations, read off its ring of calls


def numbered(state: RankState, series: str) -> list[tuple[int, Call]]:
    """The calls of a series and their numbers, oldest first. Those that failed before they had a number are left out.

    Of a call whose kernel has not entered the number is inferred.
    """
    newest = newest_entered(state, series)
    found: list[tuple[int, Call]] = []
    for call in state.calls:
        if call.series != series:
            continue
        number = call.number
        if call.is_pending:
            is_second = call.name == NORMAL_DISPATCH and found and found[-1][1].name == NOTIFY
            number = found[-1][0] if is_second else newest + 1
        if number:
            newest = max(newest, number)
            found.append((number, call))
    return found


def calls_at(state: RankState, series: str, number: int) -> list[Call]:
    """The calls with this number, in order; empty if they are no longer, or not yet, in the ring."""
    return [call for its, call in numbered(state, series) if its == number]


def newest_entered(state: RankState, series: str) -> int:
    """Number of the newest operation of a series whose kernel has entered; 0: none."""
    newest = [call.number for call in state.calls if call.series == series]
    if series == OPERATIONS:
        newest += [state.closed, state.opened]
    if state.waits is not None and state.waits.series == series:
        newest.append(state.waits.number)
    return max(newest, default=0)


def is_truncated(state: RankState, series: str, number: int) -> bool:
    """Whether the ring may have lost the first call with this number."""
    oldest = next((its for its, _ in numbered(state, series)), 0)
    oldest_call = next((call.call for call in state.calls if call.call), 0)
    return oldest == number and oldest_call > 1


def open_hook(state: RankState) -> int:
    """Operation that has been sent and whose receive hook has not been called; 0: none."""
    for call in reversed(state.calls):
        if call.number and call.number == state.opened and call.series == OPERATIONS:
            return call.number if call.has_hook and not call.receive_called_ns else 0
    return 0
