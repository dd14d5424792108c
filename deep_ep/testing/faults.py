"""Faults with names and dials, for tests, demos and the command line; the same words everywhere.

    slow-rank=3:2ms         rank 3 is busy for 2 ms before each operation
    slow-path=2>5:1ms       data from rank 2 to rank 5 arrives 1 ms late
    slow-path=2>5:10GB/s    it passes at most 10 GB/s; "1ms,10GB/s" does both
    slow-nic=2:1ms          data between rank 2 and all other nodes arrives 1 ms late, both ways; takes a rate too
    slow-receiver=4:1ms     rank 4 takes in the rows of normal operations 1 ms after they came; named so if slots run out
    hot-rank=6              the experts of rank 6 get 4 times their even share of the tokens
    hot-rank=6:2x           2 times
    clock=3:1.5s,20ppm      rank 3's clock is 1.5 s ahead and gains 20 us per second

All but hot ranks are faults of the cpu backend. Hot ranks work on every backend, because the caller skews the
routing with `skew_routing`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Union

import torch

from deep_ep.errors import EPArgumentError

# The kinds of deep_ep.diagnose, by the names that its verdicts carry.
_COMP_SLOW, _COMM_SLOW, _MIXED_SLOW = "comp-slow", "comm-slow", "mixed-slow"

DEFAULT_HOT_SHARE = 4.0

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_TIME = rf"{_NUMBER}(us|ms|s)"

# (class, rank or (source, destination)) of a verdict.
Key = tuple[str, Union[int, tuple[int, int]]]
Undo = Callable[[], None]


class Fault(ABC):
    """One fault. `str` writes it as `parse` reads it.

    Attributes:
        name: what stands before the equals sign.
        form: of the text, for messages.
    """

    name: ClassVar[str]
    form: ClassVar[str]

    @classmethod
    @abstractmethod
    def read(cls, text: str, value: str) -> Fault:
        """From what stands behind the equals sign of `text`.

        Raises:
            EPArgumentError: it cannot be read.
        """

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The ranks it names."""

    @property
    @abstractmethod
    def verdict(self) -> Key | None:
        """What must be named for it; None: nothing may be."""

    def inject(self, buffer: Any) -> Undo | None:
        """Injects this rank's part; returns how to take it back, None if there is none."""
        return None


@dataclass(frozen=True)
class _FaultOfRank(Fault):
    rank: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)


@dataclass(frozen=True)
class _DelayOfRank(_FaultOfRank):
    delay_s: float

    def __str__(self) -> str:
        return f"{self.name}={self.rank}:{_time_text(self.delay_s)}"

    @classmethod
    def read(cls, text: str, value: str) -> Fault:
        match = re.fullmatch(rf"(\d+):{_TIME}", value)
        if match is None:
            raise _malformed(text)
        return cls(int(match[1]), _not_negative(text, _seconds(match[2], match[3])))


@dataclass(frozen=True)
class SlowRank(_DelayOfRank):
    """Rank `rank` is busy for `delay_s` seconds before each operation."""

    name, form = "slow-rank", "slow-rank=RANK:TIME"

    @property
    def verdict(self) -> Key:
        return _COMP_SLOW, self.rank

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

    name, form = "slow-path", "slow-path=SRC>DST:TIME[,RATE]"
    src: int
    dst: int
    delay_s: float = 0.0
    bytes_per_s: float | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.src}>{self.dst}:{_dials_text(self.delay_s, self.bytes_per_s)}"

    @classmethod
    def read(cls, text: str, value: str) -> SlowPath:
        match = re.fullmatch(r"(\d+)>(\d+):(.+)", value)
        if match is None:
            raise _malformed(text)
        return cls(int(match[1]), int(match[2]), *_dials(text, match[3]))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.src, self.dst

    @property
    def verdict(self) -> Key:
        return _COMM_SLOW, (self.src, self.dst)

    def inject(self, buffer: Any) -> Undo | None:
        if buffer.rank != self.src:
            return None
        return _slow_paths(buffer.runtime, [self.dst], self.delay_s, self.bytes_per_s)


@dataclass(frozen=True)
class SlowNic(_FaultOfRank):
    """Data between `rank` and ranks of other nodes takes `delay_s` seconds longer, at most `bytes_per_s` a path."""

    name, form = "slow-nic", "slow-nic=RANK:TIME[,RATE]"
    delay_s: float = 0.0
    bytes_per_s: float | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.rank}:{_dials_text(self.delay_s, self.bytes_per_s)}"

    @classmethod
    def read(cls, text: str, value: str) -> SlowNic:
        match = re.fullmatch(r"(\d+):(.+)", value)
        if match is None:
            raise _malformed(text)
        return cls(int(match[1]), *_dials(text, match[2]))

    @property
    def verdict(self) -> Key:
        return _COMM_SLOW, self.rank

    def inject(self, buffer: Any) -> Undo | None:
        topology = buffer.runtime.topology
        if topology.num_nodes == 1:
            raise EPArgumentError(
                f"fault: {self} slows what passes between nodes; all ranks of this group are on one node. Set "
                "DEEP_EP_RANKS_PER_NODE, or name a slow-path."
            )
        node = self.rank // topology.ranks_per_node
        others = [r for r in range(buffer.group_size) if r // topology.ranks_per_node != node]
        ends = {self.rank: others} | dict.fromkeys(others, [self.rank])
        destinations = ends.get(buffer.rank, [])
        return _slow_paths(buffer.runtime, destinations, self.delay_s, self.bytes_per_s)


@dataclass(frozen=True)
class SlowReceiver(_DelayOfRank):
    """Rank `rank` sees the rows that normal operations send it `delay_s` seconds after they came."""

    name, form = "slow-receiver", "slow-receiver=RANK:TIME"

    @property
    def verdict(self) -> Key:
        return _MIXED_SLOW, self.rank

    def inject(self, buffer: Any) -> Undo | None:
        if buffer.rank != self.rank:
            return None
        runtime = buffer.runtime
        runtime.set_receive_fault(delay_ns=round(self.delay_s * 1e9))
        return lambda: runtime.set_receive_fault(delay_ns=0)


@dataclass(frozen=True)
class HotRank(_FaultOfRank):
    """The experts of `rank` are selected `share` times as often as an even routing would."""

    name, form = "hot-rank", "hot-rank=RANK[:SHAREx]"
    share: float = DEFAULT_HOT_SHARE

    def __str__(self) -> str:
        return f"{self.name}={self.rank}:{self.share:g}x"

    @classmethod
    def read(cls, text: str, value: str) -> HotRank:
        match = re.fullmatch(rf"(\d+)(?::{_NUMBER}x)?", value)
        if match is None:
            raise _malformed(text)
        share = float(match[2]) if match[2] else DEFAULT_HOT_SHARE
        if share <= 1:
            raise EPArgumentError(
                f"fault: {text!r} gives the rank {share:g} times its even share; a hot rank has more "
                "than 1. Write for example hot-rank=6:4x."
            )
        return cls(int(match[1]), share)

    @property
    def verdict(self) -> Key:
        return _MIXED_SLOW, self.rank


@dataclass(frozen=True)
class ClockFault(_FaultOfRank):
    """The clock of `rank` is `offset_s` seconds ahead and gains `drift_ppm` us per second."""

    name, form = "clock", "clock=RANK:TIME[,DRIFTppm]"
    offset_s: float = 0.0
    drift_ppm: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}={self.rank}:{_time_text(self.offset_s)},{self.drift_ppm:g}ppm"

    @classmethod
    def read(cls, text: str, value: str) -> ClockFault:
        match = re.fullmatch(rf"(\d+):{_TIME}(?:,{_NUMBER}ppm)?", value)
        if match is None:
            raise _malformed(text)
        drift_ppm = float(match[4]) if match[4] else 0.0
        return cls(int(match[1]), _seconds(match[2], match[3]), drift_ppm)

    @property
    def verdict(self) -> None:
        return None

    def inject(self, buffer: Any) -> Undo | None:
        if buffer.rank != self.rank:
            return None
        runtime = buffer.runtime
        runtime.set_clock_fault(offset_ns=round(self.offset_s * 1e9), drift_ppm=self.drift_ppm)
        return lambda: runtime.set_clock_fault(offset_ns=0, drift_ppm=0.0)


_FAULTS: dict[str, type[Fault]] = {
    fault.name: fault for fault in (SlowRank, SlowPath, SlowNic, SlowReceiver, HotRank, ClockFault)
}
_FORMS = ", ".join(fault.form for fault in _FAULTS.values())


def parse(text: str, num_ranks: int | None = None) -> Fault:
    """Reads one fault, such as `slow-rank=3:2ms`.

    Args:
        text: as in the table at the head of this module.
        num_ranks: size of the group, to check the ranks named; not checked when None.

    Raises:
        EPArgumentError: the text is no fault, or names a rank outside of the group.
    """
    name, equals, value = text.strip().partition("=")
    kind = _FAULTS.get(name)
    if kind is None or not equals:
        raise EPArgumentError(
            f"fault: {text!r} is not a fault; the faults are {_FORMS}. Write one of these forms."
        )
    fault = kind.read(text, value)
    if num_ranks is not None:
        validate(fault, num_ranks)
    return fault


def parse_list(text: str, num_ranks: int | None = None) -> list[Fault]:
    """Reads several faults, separated by commas, semicolons or spaces.

    Raises:
        EPArgumentError: as `parse` does.
    """
    parts = re.split(r"[,;\s]+(?=[a-z-]+=)", text.strip())
    return [parse(part.strip(",; "), num_ranks) for part in parts if part.strip(",; ")]


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
    nothing here; pass the routing through `skew_routing`.

    Returns:
        A function that takes the faults back (collective likewise).

    Raises:
        EPArgumentError: a fault names a rank outside of the group, or a NIC where there is one node.
        RuntimeError: the backend cannot inject the fault.
    """
    for fault in faults:
        validate(fault, buffer.group_size)
    undo = [step for step in (fault.inject(buffer) for fault in faults) if step is not None]
    clocks_changed = any(isinstance(fault, ClockFault) for fault in faults)
    if clocks_changed:
        buffer.measure_clock_offsets()

    def remove() -> None:
        for step in undo:
            step()
        if clocks_changed:
            buffer.measure_clock_offsets()

    return remove


def _slow_paths(
    runtime: Any, destinations: Sequence[int], delay_s: float, bytes_per_s: float | None
) -> Undo:
    def set_all(delay_ns: int, rate: float) -> None:
        for dst in destinations:
            runtime.set_path_fault(dst=dst, delay_ns=delay_ns, bytes_per_s=rate)

    set_all(round(delay_s * 1e9), bytes_per_s or 0.0)
    return lambda: set_all(0, 0.0)


def skew_routing(
    topk_idx: torch.Tensor,
    fault: HotRank,
    num_experts: int,
    num_ranks: int,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Redirects selections to the experts of a hot rank; each row's experts stay distinct.

    Args:
        topk_idx: [num_tokens, num_topk] integer, experts per token, -1 where there is none.
        fault: the hot rank and its share. A row cannot select more of the rank's experts than the
            rank has, or than the row has selections; the share ends there.
        num_experts: experts of the group, a multiple of `num_ranks`.
        num_ranks: size of the group.
        generator: source of randomness on the device of `topk_idx`; the global one when None.

    Returns:
        A new tensor like `topk_idx`.

    Raises:
        EPArgumentError: the rank is outside of the group, or the experts do not divide.
    """
    validate(fault, num_ranks)
    if num_experts % num_ranks != 0:
        raise EPArgumentError(
            f"skew_routing: num_experts is {num_experts} and num_ranks {num_ranks}; the experts "
            "must divide evenly. Pass the sizes that the buffer is used with."
        )
    skewed = topk_idx.clone()
    if topk_idx.numel() == 0:
        return skewed
    num_local = num_experts // num_ranks
    first = fault.rank * num_local
    num_tokens = topk_idx.shape[0]

    def random(width: int) -> torch.Tensor:
        return torch.rand((num_tokens, width), device=topk_idx.device, generator=generator)

    valid = topk_idx >= 0
    is_hot = valid & (topk_idx >= first) & (topk_idx < first + num_local)
    even_share = valid.sum(dim=1, keepdim=True) / num_ranks
    # Rounded up as often as the fraction says, so that the mean over tokens is the share.
    wanted = torch.floor(fault.share * even_share + random(1)).long()
    lacking = wanted - is_hot.sum(dim=1, keepdim=True)

    # Candidates: the rank's experts that the row has not selected, in random order; taken ones last.
    taken = torch.zeros((num_tokens, num_local + 1), dtype=torch.bool, device=topk_idx.device)
    taken.scatter_(1, torch.where(is_hot, topk_idx.long() - first, num_local), True)
    candidates = (random(num_local) + taken[:, :num_local]).argsort(dim=1) + first
    num_candidates = num_local - is_hot.sum(dim=1, keepdim=True)

    # Selections to give up: those of other ranks, in random order.
    position = (random(topk_idx.shape[1]) + ~(valid & ~is_hot)).argsort(dim=1).argsort(dim=1)
    replace = valid & ~is_hot & (position < torch.minimum(lacking, num_candidates))
    chosen = candidates.gather(1, position.clamp(max=num_local - 1)).to(topk_idx.dtype)
    return torch.where(replace, chosen, skewed)


def expected_verdicts(faults: Sequence[Fault]) -> set[Key]:
    """What `deep_ep.diagnose` must name: (class, rank or (source, destination)) per fault.

    A clock fault must not be seen at all. A slow rank that is hot as well is named as hot, since
    its lateness cannot be told from that of its experts.
    """
    hot = {fault.rank for fault in faults if isinstance(fault, HotRank)}
    hidden = {(_COMP_SLOW, rank) for rank in hot}
    return {key for fault in faults if (key := fault.verdict) is not None} - hidden


def _dials(text: str, value: str) -> tuple[float, float | None]:
    """Delay in seconds, and bytes per second if they are limited."""
    match = re.fullmatch(rf"(?:{_TIME})?(,)?(?:{_NUMBER}(B/s|KB/s|MB/s|GB/s))?", value)
    # A comma stands between the two dials and nowhere else; at least one dial is given.
    if match is None or (match[3] is not None) != (match[1] is not None and match[4] is not None):
        raise _malformed(text)
    if match[1] is None and match[4] is None:
        raise _malformed(text)
    delay_s = _seconds(match[1], match[2]) if match[1] else 0.0
    bytes_per_s = float(match[4]) * _BYTES[match[5]] if match[4] else None
    if bytes_per_s is not None and bytes_per_s <= 0:
        raise EPArgumentError(
            f"fault: {text!r} throttles to {bytes_per_s:g} bytes per second; a throttle must be "
            "above 0. Name a rate such as 10GB/s, or only a delay."
        )
    return _not_negative(text, delay_s), bytes_per_s


def _malformed(text: str) -> EPArgumentError:
    name = text.strip().partition("=")[0]
    return EPArgumentError(
        f"fault: {text!r} cannot be read; the form is {_FAULTS[name].form}, with times in us, ms or s and "
        "rates in B/s, KB/s, MB/s or GB/s. Write for example slow-rank=3:2ms, "
        "slow-path=2>5:1ms,10GB/s, hot-rank=6:4x or clock=3:1.5s,20ppm."
    )


def _seconds(number: str, unit: str) -> float:
    # To the picosecond, so that equal texts in other units are equal faults.
    return round(float(number) * _SECONDS[unit], 12)


def _not_negative(text: str, seconds: float) -> float:
    if seconds < 0:
        raise EPArgumentError(
            f"fault: {text!r} asks for a delay of {seconds:g} s; a delay cannot be negative. "
            "Make it 0 or more."
        )
    return seconds


def _dials_text(delay_s: float, bytes_per_s: float | None) -> str:
    dials = [_time_text(delay_s)] if delay_s or bytes_per_s is None else []
    if bytes_per_s is not None:
        dials.append(f"{bytes_per_s / 1e9:g}GB/s")
    return ",".join(dials)


def _time_text(seconds: float) -> str:
    for unit in ("s", "ms"):
        if abs(seconds) >= _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds * 1e6:g}us"
