"""Faults with names and dials, for tests, demos and the command line; the same words everywhere.

    slow-rank=3:2ms         rank 3 is busy for 2 ms before each operation
    slow-path=2>5:1ms       data from rank 2 to rank 5 arrives 1 ms late
    slow-path=2>5:10GB/s    it passes at most 10 GB/s; "1ms,10GB/s" does both
    slow-nic=2:1ms          data between rank 2 and all other nodes arrives 1 ms late, both ways; takes a rate too
    slow-receiver=4:1ms     rank 4 takes in the rows of normal operations 1 ms after they came; named so if slots run out
    hot-rank=6              the experts of rank 6 get 4 times their even share of the tokens
    hot-rank=6:2x           2 times
    clock=3:1.5s,20ppm      rank 3's clock is 1.5 s ahead and gains 20 us per second

All but hot ranks are faults of the cpu backend. A hot rank is a property of the routing: whoever calls skews it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Union

from deep_ep.errors import EPArgumentError

# The kinds of deep_ep.diagnose, by the names that its verdicts carry.
_COMP_SLOW, _COMM_SLOW, _MIXED_SLOW = "comp-slow", "comm-slow", "mixed-slow"

DEFAULT_HOT_SHARE = 4.0
# In nanoseconds these still are 64-bit numbers.
_LONGEST_S = 1e9

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_UNITS = {**_SECONDS, **_BYTES, "x": 1.0, "ppm": 1.0}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_TIME, _RATE = (rf"{_NUMBER}(?:{'|'.join(units)})" for units in (_SECONDS, _BYTES))
_RANK = r"(?P<rank>\d{1,9})"
_DELAY = rf"(?P<delay_s>{_TIME})"
# At least one dial is given, and a comma stands between the two and nowhere else.
_DIALS = rf"(?!$){_DELAY}?(?:(?(delay_s),)(?P<bytes_per_s>{_RATE}))?"

# A rank, or (source, destination); what a verdict says of it: (class, place).
Place = Union[int, tuple[int, int]]
Key = tuple[str, Place]
Undo = Callable[[], None]


class Fault(ABC):
    """One fault. `str` writes it as `parse` reads it.

    Attributes:
        name: what stands before the equals sign.
        form: of the text, for messages.
        pattern: of what stands behind the equals sign; its groups are named as the fields that they become.
        verdict_kind: the class of the verdict that must name it; `None`: nothing may be named for it.
    """

    name: ClassVar[str]
    form: ClassVar[str]
    pattern: ClassVar[str]
    verdict_kind: ClassVar[str | None]

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where it is."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks it names."""
        return (self.place,) if isinstance(self.place, int) else self.place

    def inject(self, buffer: Any) -> Undo | None:
        """Injects this rank's part, but for slow paths; returns how to take it back, None if there is none."""
        return None

    def slow_paths(self, buffer: Any) -> Mapping[int, tuple[float, float | None]]:
        """What it does to paths from this rank: (delay in seconds, bytes per second) by destination."""
        return {}

    def __str__(self) -> str:
        dials = {
            key: value for key, value in vars(self).items() if key in _TEXTS and value is not None
        }
        if dials.get("bytes_per_s") and not dials["delay_s"]:
            del dials["delay_s"]
        said = ",".join(_TEXTS[key](value) for key, value in dials.items())
        return f"{self.name}={'>'.join(map(str, self.ranks))}:{said}"


@dataclass(frozen=True)
class _FaultOfRank(Fault):
    rank: int

    @property
    def place(self) -> int:
        return self.rank


@dataclass(frozen=True)
class SlowRank(_FaultOfRank):
    """Rank `rank` is busy for `delay_s` seconds before each operation."""

    name, form, verdict_kind = "slow-rank", "slow-rank=RANK:TIME", _COMP_SLOW
    pattern = rf"{_RANK}:{_DELAY}"
    delay_s: float

    def inject(self, buffer: Any) -> Undo | None:
        if buffer.rank != self.rank:
            return None
        runtime, delay_ns = buffer.runtime, round(self.delay_s * 1e9)

        def be_busy(_operation: str) -> None:
            runtime.delay(delay_ns)

        callbacks = buffer.communicator.before_operation
        callbacks.append(be_busy)
        return lambda: callbacks.remove(be_busy)


@dataclass(frozen=True)
class SlowPath(Fault):
    """Data from `src` to `dst` takes `delay_s` seconds longer, at most `bytes_per_s`."""

    name, form, verdict_kind = "slow-path", "slow-path=SRC>DST:TIME[,RATE]", _COMM_SLOW
    pattern = rf"(?P<src>\d{{1,9}})>(?P<dst>\d{{1,9}}):{_DIALS}"
    src: int
    dst: int
    delay_s: float = 0.0
    bytes_per_s: float | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.src, self.dst

    def slow_paths(self, buffer: Any) -> Mapping[int, tuple[float, float | None]]:
        return {self.dst: (self.delay_s, self.bytes_per_s)} if buffer.rank == self.src else {}


@dataclass(frozen=True)
class SlowNic(_FaultOfRank):
    """Data between `rank` and ranks of other nodes takes `delay_s` seconds longer, at most `bytes_per_s` a path."""

    name, form, verdict_kind = "slow-nic", "slow-nic=RANK:TIME[,RATE]", _COMM_SLOW
    pattern = rf"{_RANK}:{_DIALS}"
    delay_s: float = 0.0
    bytes_per_s: float | None = None

    def slow_paths(self, buffer: Any) -> Mapping[int, tuple[float, float | None]]:
        topology = buffer.runtime.topology
        if topology.num_nodes == 1:
            raise EPArgumentError(
                f"fault: {self} slows what passes between nodes; all ranks of this group are on one node. Set "
                "DEEP_EP_RANKS_PER_NODE, or name a slow-path."
            )
        node = self.rank // topology.ranks_per_node
        others = [r for r in range(buffer.group_size) if r // topology.ranks_per_node != node]
        ends = {self.rank: others} | dict.fromkeys(others, [self.rank])
        return dict.fromkeys(ends.get(buffer.rank, []), (self.delay_s, self.bytes_per_s))


@dataclass(frozen=True)
class SlowReceiver(_FaultOfRank):
    """Rank `rank` sees the rows that normal operations send it `delay_s` seconds after they came."""

    name, form, verdict_kind = "slow-receiver", "slow-receiver=RANK:TIME", _MIXED_SLOW
    pattern = rf"{_RANK}:{_DELAY}"
    delay_s: float

    def inject(self, buffer: Any) -> Undo | None:
        if buffer.rank != self.rank:
            return None
        return _until_zero(buffer.runtime.set_receive_fault, delay_ns=round(self.delay_s * 1e9))


@dataclass(frozen=True)
class HotRank(_FaultOfRank):
    """The experts of `rank` are selected `share` times as often as an even routing would."""

    name, form, verdict_kind = "hot-rank", "hot-rank=RANK[:SHAREx]", _MIXED_SLOW
    pattern = rf"{_RANK}(?::(?P<share>{_NUMBER}x))?"
    share: float = DEFAULT_HOT_SHARE


@dataclass(frozen=True)
class ClockFault(_FaultOfRank):
    """The clock of `rank` is `offset_s` seconds ahead and gains `drift_ppm` us per second."""

    name, form, verdict_kind = "clock", "clock=RANK:TIME[,DRIFTppm]", None
    pattern = rf"{_RANK}:(?P<offset_s>{_TIME})(?:,(?P<drift_ppm>{_NUMBER}ppm))?"
    offset_s: float = 0.0
    drift_ppm: float = 0.0

    def inject(self, buffer: Any) -> Undo | None:
        if buffer.rank != self.rank:
            return None
        offset_ns = round(self.offset_s * 1e9)
        set_fault = buffer.runtime.set_clock_fault
        return _until_zero(set_fault, offset_ns=offset_ns, drift_ppm=self.drift_ppm)


_FAULTS: dict[str, type[Fault]] = {
    fault.name: fault for fault in (SlowRank, SlowPath, SlowNic, SlowReceiver, HotRank, ClockFault)
}
_FORMS = ", ".join(fault.form for fault in _FAULTS.values())


def parse(text: str) -> Fault:
    """Reads one fault, such as `slow-rank=3:2ms`, as in the table at the head of this module.

    Raises:
        EPArgumentError: the text is no fault.
    """
    name, equals, value = text.strip().partition("=")
    kind = _FAULTS.get(name)
    if kind is None or not equals:
        raise EPArgumentError(
            f"fault: {text!r} is not a fault; the faults are {_FORMS}. Write one of these forms."
        )
    match = re.fullmatch(kind.pattern, value, re.ASCII)
    if match is None:
        raise EPArgumentError(
            f"fault: {text!r} cannot be read; the form is {kind.form}, with times in us, ms or s and rates in B/s, "
            "KB/s, MB/s or GB/s. Write for example slow-rank=3:2ms, slow-path=2>5:1ms,10GB/s, hot-rank=6:4x or "
            "clock=3:1.5s,20ppm."
        )
    dials = {key: _quantity(said) for key, said in match.groupdict().items() if said is not None}
    _check_dials(text, dials)
    return kind(**dials)


def parse_list(text: str) -> list[Fault]:
    """Reads several faults, separated by commas, semicolons or spaces.

    Raises:
        EPArgumentError: as `parse` does.
    """
    parts = re.split(r"[,;\s]+(?=[a-z-]+=)", text.strip())
    return [parse(part.strip(",; ")) for part in parts if part.strip(",; ")]


def validate(fault: Fault, num_ranks: int) -> None:
    """Checks a fault against the size of the group.

    Raises:
        EPArgumentError: a rank outside of the group, or a path from a rank to itself.
    """
    for rank in fault.ranks:
        if not 0 <= rank < num_ranks:
            raise EPArgumentError(
                f"fault: {fault} names rank {rank}; ranks of this group are 0 to {num_ranks - 1}. "
                "Name one of them."
            )
    if isinstance(fault, SlowPath) and fault.src == fault.dst:
        raise EPArgumentError(
            f"fault: {fault} is a path from a rank to itself; source and destination must differ. "
            "Name two ranks."
        )


def apply(buffer: Any, faults: Sequence[Fault]) -> Callable[[], None]:
    """Injects faults into this rank's buffer, from its next operation on.

    Call it on every rank with the same faults: each rank takes the ones that concern it. With a
    clock fault it is collective, because the clock offsets are measured again. Hot ranks do
    nothing here; the caller skews the routing. Of several faults of one path, the delays add up and
    the lowest rate holds. If one cannot be injected, none stays.

    Returns:
        A function that takes the faults back (collective likewise).

    Raises:
        EPArgumentError: a fault names a rank outside of the group, or a NIC where there is one node.
        RuntimeError: the backend cannot inject the fault.
    """
    for fault in faults:
        validate(fault, buffer.group_size)
    clocks_changed = any(isinstance(fault, ClockFault) for fault in faults)
    with ExitStack() as steps:
        for fault in faults:
            step = fault.inject(buffer)
            if step is not None:
                steps.callback(step)
        for dst, dials in _path_dials(buffer, faults).items():
            set_fault = partial(buffer.runtime.set_path_fault, dst=dst)
            steps.callback(_until_zero(set_fault, **dials))
        if clocks_changed:
            buffer.measure_clock_offsets()
        undo = steps.pop_all()

    def remove() -> None:
        undo.close()
        if clocks_changed:
            buffer.measure_clock_offsets()

    return remove


def _until_zero(set_fault: Callable[..., None], **dials: float) -> Undo:
    set_fault(**dials)
    return lambda: set_fault(**dict.fromkeys(dials, 0))


def _path_dials(buffer: Any, faults: Sequence[Fault]) -> dict[int, dict[str, float]]:
    """By destination, what all faults together do to the path from this rank; the runtime holds one per path."""
    dials: dict[int, dict[str, float]] = {}
    for fault in faults:
        for dst, (delay_s, rate) in fault.slow_paths(buffer).items():
            of_path = dials.setdefault(dst, {"delay_ns": 0, "bytes_per_s": 0.0})
            of_path["delay_ns"] += round(delay_s * 1e9)
            if rate is not None:
                of_path["bytes_per_s"] = min(of_path["bytes_per_s"] or rate, rate)
    return dials


def expected_verdicts(faults: Sequence[Fault]) -> set[Key]:
    """What `deep_ep.diagnose` must name: (class, rank or (source, destination)) per fault.

    A clock fault must not be seen at all. A slow rank that is hot as well is named as hot, since
    its lateness cannot be told from that of its experts.
    """
    hot = {fault.rank for fault in faults if isinstance(fault, HotRank)}
    hidden = {(_COMP_SLOW, rank) for rank in hot}
    return {
        (each.verdict_kind, each.place) for each in faults if each.verdict_kind is not None
    } - hidden


def _quantity(text: str) -> int | float:
    """A number with its unit; one without is a rank."""
    if text.isdecimal():
        return int(text)
    unit = text.lstrip("+-.0123456789eE")
    value = float(text[: len(text) - len(unit)]) * _UNITS[unit]
    # To the picosecond, so that equal times in other units are equal faults.
    return round(value, 12) if unit in _SECONDS else value


def _check_dials(text: str, dials: Mapping[str, float]) -> None:
    delay_s, rate = dials.get("delay_s", 0.0), dials.get("bytes_per_s", 1.0)
    share = dials.get("share", DEFAULT_HOT_SHARE)
    longest_s = max(delay_s, abs(dials.get("offset_s", 0.0)))
    if longest_s >= _LONGEST_S:
        raise EPArgumentError(
            f"fault: {text!r} asks for {longest_s:g} s; a time must be below {_LONGEST_S:g} s. "
            "Make it shorter."
        )
    if delay_s < 0:
        raise EPArgumentError(
            f"fault: {text!r} asks for a delay of {delay_s:g} s; a delay cannot be negative. "
            "Make it 0 or more."
        )
    if any(map(math.isinf, dials.values())):
        raise EPArgumentError(f"fault: {text!r} has a number that is too large. Make it smaller.")
    if rate <= 0:
        raise EPArgumentError(
            f"fault: {text!r} throttles to {rate:g} bytes per second; a throttle must be "
            "above 0. Name a rate such as 10GB/s, or only a delay."
        )
    if share <= 1:
        raise EPArgumentError(
            f"fault: {text!r} gives the rank {share:g} times its even share; a hot rank has more "
            "than 1. Write for example hot-rank=6:4x."
        )


def _digits(number: float) -> str:
    """As few as are read as the same number."""
    return str(number).removesuffix(".0")


def _time_text(seconds: float) -> str:
    unit = next((unit for unit in ("s", "ms") if abs(seconds) >= _SECONDS[unit]), "us")
    # Times are read to the picosecond; what is beyond it came from the division.
    return f"{_digits(round(seconds / _SECONDS[unit], 12))}{unit}"


def _rate_text(rate: float) -> str:
    text = f"{_digits(rate / 1e9)}GB/s"
    return text if _quantity(text) == rate else f"{_digits(rate)}B/s"


_TEXTS: dict[str, Callable[[float], str]] = {
    "delay_s": _time_text,
    "bytes_per_s": _rate_text,
    "share": lambda share: f"{_digits(share)}x",
    "offset_s": _time_text,
    "drift_ppm": lambda drift: f"{_digits(drift)}ppm",
}
