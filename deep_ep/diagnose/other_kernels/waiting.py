"""The tensors of one buffer that a wheel's kernels add waiting to, read from aside and told in nanoseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..analyze.waits_only.sampling import since
from ..core.diagnosis import IntArray
from ..core.package import EPArgumentError, env, to_host
from ..live.wait_sampler import UNKNOWN, Waited
from .entries import EntryWaits
from .wheels import Counter

# Of a counter, tensors of the program that are read; one that passes a new tensor with each call is not followed.
_MOST_TENSORS = 64
_US = 1e3


@dataclass
class _LastRead:
    """A tensor, and what was in it when it was read last; None: it has not been read."""

    tensor: torch.Tensor
    is_ours: bool
    before: IntArray | None


@dataclass
class CountedWait:
    """One counter of one buffer. The program's thread passes tensors, another one reads them.

    Attributes:
        counter: which.
        num_ranks: of the group, or as many as it can grow to.
        ours: int64 `[num_ranks]`, or int32 at least `[num_experts]`, zeroed; for life, because a captured graph keeps its
            address.
        length: entries of it that the next call gets.
        experts_per_rank: as the last call said; of a group that grows, as the buffer said.
        calls: with a tensor, so far; replays of graphs are not seen.
        replays: whether graphs call the operation: calls are not all that there is.
        refused: whether the wheel has the keyword and does not take it.
    """

    counter: Counter
    num_ranks: int
    ours: torch.Tensor
    length: int
    experts_per_rank: int = 1
    calls: int = 0
    replays: bool = False
    refused: bool = False
    _reads: dict[int, _LastRead] = field(default_factory=dict)
    _views: dict[int, torch.Tensor] = field(default_factory=dict)
    _calls_before: int = 0
    _was_quiet: bool = False
    _ns_before: float | None = None

    def __post_init__(self) -> None:
        zeros = np.zeros(self.ours.numel(), np.int64)
        self._reads[self.ours.data_ptr()] = _LastRead(self.ours, True, zeros)
        self._views[self.ours.numel()] = self.ours

    @property
    def operation(self) -> str:
        """What verdicts call it."""
        return self.counter.operation

    def passed(self) -> torch.Tensor:
        """`[length]`, the first entries of our tensor.

        Raises:
            EPArgumentError: it has not so many.
        """
        view = self._views.get(self.length)
        if view is None:
            if not 0 < self.length <= self.ours.numel():
                raise EPArgumentError(
                    f"attach: a call needs {self.length} entries; there are {self.ours.numel()}, which kernels "
                    "would write beyond. Attach to a buffer of that many ranks and experts."
                )
            view = self._views[self.length] = self.ours[: self.length]
        return view

    def adopt(self, tensor: torch.Tensor) -> None:
        """The program passes a tensor of its own, which is read from now on."""
        if tensor.data_ptr() not in self._reads and len(self._reads) < _MOST_TENSORS:
            self._reads[tensor.data_ptr()] = _LastRead(tensor, False, None)

    def take(self, ns_per_cycle: float) -> tuple[IntArray, int]:
        """What was added since the last call: [num_ranks] ns, and in how many operations (`UNKNOWN`)."""
        calls = self.calls
        length = self.ours.numel()
        added = np.sum([_added(read, length) for read in list(self._reads.values())], axis=0)
        operations, self._calls_before = calls - self._calls_before, calls
        # Kernels end after their call, in the next window at the latest. Who waits later has not called: a graph
        # was captured before we came.
        is_quiet = operations == 0
        self.replays |= is_quiet and self._was_quiet and bool(added.any())
        self._was_quiet = is_quiet
        waits = added.astype(np.float64)
        if self.counter.unit == "cycles":
            waits *= self._mean_ns(ns_per_cycle) / self.experts_per_rank
        else:
            # A call of more experts than there are entries was not counted.
            experts = min(self.experts_per_rank, length // self.num_ranks)
            of_experts = waits[: self.num_ranks * experts].reshape(self.num_ranks, experts)
            waits = of_experts.mean(axis=1) * _US
        return np.rint(waits).astype(np.int64), UNKNOWN if self.replays else operations

    def _mean_ns(self, ns_per_cycle: float) -> float:
        """Of the clock at both ends of the window, which follows the load."""
        before, self._ns_before = self._ns_before, ns_per_cycle
        return ns_per_cycle if before is None else (before + ns_per_cycle) / 2


def take(readers: Sequence[CountedWait | EntryWaits], ns_per_cycle: Callable[[], float]) -> Waited:
    """What a rank waited since the last call, a row for each reader."""
    now = ns_per_cycle()
    taken = [one.take(now) for one in readers]
    operations = np.array([count for _, count in taken], np.int64)
    return Waited(np.stack([waits for waits, _ in taken]), operations)


def kernel_device() -> torch.device:
    """Where kernels of this process count, whoever's they are; the CPU where there is no GPU, or none is wanted."""
    if env.backend() != "cpu":
        if torch.version.hip is None and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        npu = getattr(torch, "npu", None)
        if npu is not None and npu.is_available():
            return torch.device("npu", npu.current_device())
    return torch.device("cpu")


def clock_of(device: torch.device) -> Callable[[], float] | None:
    """Nanoseconds of a cycle of this GPU's SMs, now; `None` if that cannot be known.

    NVML tells the present clock; where it is not installed, CUDA tells the highest one.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    kilohertz = getattr(properties, "clock_rate", 0)
    highest = 1e6 / kilohertz if kilohertz else 0.0

    def now() -> float:
        # Whatever is missing: nvidia-ml-py, or the driver's permission.
        with contextlib.suppress(Exception):
            return 1e3 / torch.cuda.clock_rate(device)
        return highest

    return now if now() else None


def _added(read: _LastRead, length: int) -> IntArray:
    """[length], since the last look; 0 behind the end of the tensor."""
    now = np.zeros(length, np.int64)
    values = to_host(read.tensor)[0].reshape(-1)[:length].numpy()
    now[: values.size] = values
    before, read.before = read.before, now
    if before is None:
        return np.zeros(length, np.int64)
    if values.dtype == np.int32 and read.is_ours:
        # Microseconds run over after 36 minutes.
        return np.asarray((now - before) % (1 << 32))
    return since(before, now)
