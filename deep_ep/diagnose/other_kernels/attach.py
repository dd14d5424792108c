"""Attaches to a buffer of other kernels: passes its operations tensors to count waiting in, and judges these.

Methods are patched on the class, so it does not matter under which name a program has it. Nothing is launched, and
nothing is allocated after `attach`: a captured graph goes on counting. Only the first operation of a buffer may find
that its wheel does not take the tensor; it is done again without.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections import Counter as Count
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from ..analyze.waits_only.lasting import LEAST_RANKS
from ..core.package import EPArgumentError, EPTypeError, Group, as_group, env
from ..live.mailbox import Mailbox, is_lost, open_mailbox, store_of
from ..live.wait_sampler import WaitSampler, Window
from ..live.window_log import reason, say
from .entries import EntryWaits, counts_entries, entries
from .judge import Judge
from .waiting import CountedWait, clock_of, kernel_device, take
from .wheels import Counter, Wheel, counters_of, parameters, wheel_of

# Where a buffer keeps what was attached to it, and what was said when its memory was made.
_ATTACHED, _MADE_WITH = "_deep_ep_diagnose", "_deep_ep_diagnose_made_with"
_PATCHED = "_deep_ep_diagnose_patched"
# What is kept of that: the buffer's memory is freed when nobody has the buffer any more.
_SIZES = ("num_ranks", "num_experts_per_rank")
# Entries of a tensor whose number the buffer does not tell: as many experts as any model has. Chosen.
_MOST_EXPERTS = 4096
_DEFAULT_INTERVAL_S = 1.0

# Buffers that were attached to, by the name of their group and the rank: what tells them apart in its store.
_numbers: Count[tuple[str, int]] = Count()
_told: set[str] = set()


class Attached:
    """What was attached to one buffer, until the buffer goes or `detach()`.

    Attributes:
        counted: what is read, by method.
        operations: what is judged.
    """

    def __init__(
        self, wheel: Wheel, buffer: Any, ranks: _RanksOf, counters: list[Counter], interval_s: float
    ) -> None:
        """Internal: use `attach`."""
        device = kernel_device()
        self.grows = wheel.grows
        self._noted: int | None = None
        self.counted: dict[str, CountedWait] = {}
        for counter in counters:
            is_npu = counter.unit == "us"
            length, dtype = (_MOST_EXPERTS, torch.int32) if is_npu else (ranks.size, torch.int64)
            ours = torch.zeros(length, dtype=dtype, device=device)
            self.counted[counter.method] = CountedWait(
                counter, ranks.size, ours, length, ranks.experts_per_rank
            )
        clock = clock_of(device)
        if clock is None and device.type == "cuda" and ranks.rank == 0:
            say("the clock of the SMs cannot be read; waiting is told as if it were 1 GHz")
        at_entries = entries(buffer, ranks.size, ranks.rank, device)
        readers: list[CountedWait | EntryWaits] = [*self.counted.values(), *at_entries]
        self.operations = [reader.operation for reader in readers]
        read = functools.partial(take, readers, clock or (lambda: 1.0))
        # The first reading makes the stream that copies are queued on, which no capture may see.
        read()
        judge = _judge_of(len(self.counted), self.operations)
        sampler = WaitSampler(ranks.mailbox(), read, judge, _failed, interval_s, interval_s)
        self._stop = weakref.finalize(buffer, sampler.stop)

    def tensor(
        self, counted: CountedWait, signature: _Signature, args: Any, kwargs: Any
    ) -> torch.Tensor | None:
        """Notes a call, and gives what it counts in; None: it does so in a tensor of the program."""
        num_experts = signature.value("num_experts", args, kwargs)
        of_experts = signature.value("num_tokens_per_expert", args, kwargs)
        if num_experts is not None:
            self._note(num_experts)
        elif of_experts is not None:
            self._note(of_experts.numel())
        elif self.grows:
            # The second tensor of a handle has an entry for each expert of the rank and each rank.
            counted.length = signature.value("handle", args, kwargs)[1].size(1)
        if not counted.replays and counted.ours.is_cuda:
            counted.replays = torch.cuda.is_current_stream_capturing()
        counted.calls += 1
        given = signature.value(counted.counter.keyword, args, kwargs)
        if given is None:
            return counted.passed()
        counted.adopt(given)
        return None

    def detach(self) -> None:
        """Ends this rank's part. Not collective; operations of the buffer count no more."""
        self.counted, self.operations = {}, []
        self._stop()

    def _note(self, num_experts: int) -> None:
        """Experts of all ranks, of a call that begins now."""
        if num_experts == self._noted:
            return
        self._noted = num_experts
        for counted in self.counted.values():
            if self.grows:
                counted.length = num_experts // counted.experts_per_rank
                continue
            counted.experts_per_rank = max(num_experts // counted.num_ranks, 1)
            if counted.counter.unit == "us":
                counted.length = num_experts


def attach(buffer: Any, group: Any = None, *, interval_s: float | None = None) -> Attached:
    """Watches a buffer of other kernels by the waiting that they count. Every rank of its group calls it.

    Call it before a graph is captured. Where the group has a TCPStore, as torchrun's and vLLM's have, ranks wait
    for nobody; otherwise it is collective. Verdicts go to rank 0's log "deep_ep.diagnose", and records to
    `DEEP_EP_DIAGNOSE_DIR`. They take five windows, and five ranks.

    Args:
        buffer: of a class in `wheels.WHEELS`.
        group: what the buffer was built on, if it does not say: a process group, or an mpi4py communicator.
        interval_s: length of a window, seconds; that of `DEEP_EP_DIAGNOSE=async:SECONDS`, or 1.

    Returns:
        What can be taken off again. A buffer that was attached to before gives what it has.

    Raises:
        EPTypeError: the buffer is of no known wheel, or of one that does not count what it waits; torch is for ROCm.
        EPArgumentError: there is no group, or one of another size than the buffer's; the interval is not above 0; the
            group grows and is not watched from its start.
        EPTransportError, EPTimeoutError: ranks do not reach each other.
    """
    cls = type(buffer)
    wheel = wheel_of(cls)
    if wheel is None:
        raise EPTypeError(
            f"attach: buffer is a {cls.__module__}.{cls.__qualname__}; it must be a buffer of other kernels. "
            "Buffers of deep_ep itself are watched by DEEP_EP_DIAGNOSE=1."
        )
    counters = counters_of(cls)
    if not counters and not counts_entries(buffer):
        raise EPTypeError(
            f"attach: buffer is a {cls.__qualname__} of {wheel.library}; it must count what it waits. {wheel.without}"
        )
    if interval_s is not None and not 0 < interval_s < float("inf"):
        raise EPArgumentError(
            f"attach: interval_s is {interval_s}; it must be a number of seconds above 0. Leave it out for 1."
        )
    before: Attached | None = vars(buffer).get(_ATTACHED)
    if before is not None and before.operations:
        return before
    if torch.version.hip is not None:
        raise EPTypeError(
            "attach: this is torch for ROCm; reading aside takes CUDA's driver. Profile the program "
            "(python -m deep_ep.diagnose trace)."
        )
    ranks = _RanksOf(wheel, buffer, group)
    patch(cls)
    attached = Attached(wheel, buffer, ranks, counters, interval_s or _interval_s())
    setattr(buffer, _ATTACHED, attached)
    if ranks.rank == 0:
        few = f"; waiting alone names nobody among fewer than {LEAST_RANKS} ranks"
        say(
            f"watches a buffer of {wheel.library}, {ranks.size} ranks: waiting in "
            f"{', '.join(attached.operations)}{few if ranks.size < LEAST_RANKS else ''}"
        )
    return attached


def watch(module: ModuleType) -> None:
    """Attaches to every buffer that will be made of the module's classes. What fails is said, and nothing else is."""
    for cls in {c for c in vars(module).values() if isinstance(c, type)}:
        wheel = wheel_of(cls)
        if wheel is not None and not hasattr(getattr(cls, wheel.ready), _PATCHED):
            setattr(cls, wheel.ready, _attaching(getattr(cls, wheel.ready), wheel))


def patch(cls: type) -> None:
    """Lets a class's methods pass tensors to count in, for buffers that have them. May be repeated."""
    for counter in counters_of(cls):
        method = getattr(cls, counter.method)
        if not hasattr(method, _PATCHED):
            setattr(cls, counter.method, _counting(method, counter, cls))


class _RanksOf:
    """Who this rank is, of how many, and how it reaches the others.

    Attributes:
        rank: this rank.
        size: number of ranks; of a group that grows, as many as there can be.
        experts_per_rank: of a group that grows; 1 where calls tell it.
    """

    def __init__(self, wheel: Wheel, buffer: Any, given: Any) -> None:
        group = getattr(buffer, "group", None) if given is None else given
        self.experts_per_rank = 1
        self._group: Group | None = None
        if wheel.grows:
            made_with: Mapping[str, int] = vars(buffer).get(_MADE_WITH, {})
            self._store = getattr(buffer, "tcp_store_group", None)
            if not made_with or not self._store:
                raise EPArgumentError(
                    f"attach: buffer is one of {wheel.library}, whose ranks join and leave; it must be watched "
                    "from its start, and have a tcp_store_group. Call deep_ep.diagnose.install() before it is "
                    "made, or start the program with `python -m deep_ep.diagnose run`."
                )
            self._name = ""
            self.rank = int(buffer.rank)
            self.size, self.experts_per_rank = (made_with[name] for name in _SIZES)
            return
        if group is None:
            raise EPArgumentError(
                "attach: group is None, and the buffer does not say what it was built on; its ranks must reach "
                "each other. Pass the process group."
            )
        self._group = as_group(group)
        self._store, self._name = store_of(self._group), str(getattr(group, "group_name", ""))
        self.rank, self.size = self._group.rank, self._group.size
        # Some kernels look at no length, and write what the buffer's ranks need.
        of_buffer = int(getattr(buffer, "group_size", self.size))
        if of_buffer != self.size:
            raise EPArgumentError(
                f"attach: group has {self.size} ranks, the buffer {of_buffer}; it must be the buffer's. Pass the one "
                "that it was built on."
            )

    def mailbox(self) -> Mailbox:
        """Between the ranks that attach to this buffer, the n-th of its group."""
        if self._store is None:
            assert self._group is not None
            return open_mailbox(self._group, "attach")
        number = _numbers[self._name, self.rank]
        _numbers[self._name, self.rank] += 1
        return Mailbox(self.rank, self.size, f"attach/{number}", self._store.clone, self._store)


class _Signature:
    """Where a method takes its arguments, and the tensor that it counts in."""

    def __init__(self, cls: type, counter: Counter) -> None:
        self._names = parameters(cls, counter.method)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._keyword = counter.keyword

    def value(self, name: str, args: Any, kwargs: Any) -> Any:
        """What a call passes, by position or by name; None if nothing, or if the method has no such argument."""
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)

    def with_tensor(self, args: Any, kwargs: dict[str, Any], tensor: Any) -> Any:
        """Positional arguments of the same call with that tensor, which goes into `kwargs`, with all behind it."""
        place = self._places[self._keyword]
        if len(args) > place:
            kwargs.update(zip(self._names[place:], args[place:]))
            args = args[:place]
        kwargs[self._keyword] = tensor
        return args


def _counting(method: Callable[..., Any], counter: Counter, cls: type) -> Callable[..., Any]:
    """The method, which passes the tensor where the program passes none."""
    signature = _Signature(cls, counter)

    @functools.wraps(method)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached: Attached | None = self.__dict__.get(_ATTACHED)
        counted = attached.counted.get(counter.method) if attached is not None else None
        if attached is None or counted is None or counted.refused:
            return method(self, *args, **kwargs)
        try:
            ours = attached.tensor(counted, signature, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            _refuse(self, counted, error)
            ours = None
        if ours is None:
            return method(self, *args, **kwargs)
        args = signature.with_tensor(args, kwargs, ours)
        if counted.calls > 1:
            return method(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except NotImplementedError as error:
            # MORI has the keyword, and says so before anything is sent.
            _refuse(self, counted, error)
            kwargs[counter.keyword] = None
            return method(self, *args, **kwargs)

    setattr(counting, _PATCHED, True)
    return counting


def _refuse(buffer: Any, counted: CountedWait, error: Exception) -> None:
    counted.refused = True
    method = counted.counter.method
    _say_once(f"{method} does not count what it waits on this wheel: {reason(error)}", buffer)


def _attaching(method: Callable[..., Any], wheel: Wheel) -> Callable[..., Any]:
    """The method, at whose end the buffer is attached to."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def attaching(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        try:
            if not counters_of(type(self)) and not counts_entries(self):
                _say_once(f"a buffer of {wheel.library} is not watched. {wheel.without}", self)
            elif vars(self).get(_ATTACHED) is None:
                if wheel.grows:
                    given = signature.bind(self, *args, **kwargs).arguments
                    setattr(self, _MADE_WITH, {name: int(given[name]) for name in _SIZES})
                attach(self)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            with contextlib.suppress(AttributeError):  # a class with slots
                setattr(self, _ATTACHED, None)
            _say_once(f"a buffer of {wheel.library} is not watched: {reason(error)}")
        return result

    setattr(attaching, _PATCHED, True)
    return attaching


def _judge_of(num_counted: int, operations: list[str]) -> Callable[[Window], None]:
    """Judges low latency, and entries to normal operations, which are other operations, apart."""
    folder = env.diagnose_dir()
    judges = [
        (rows, Judge(operations[rows], folder, within_nodes=within_nodes))
        for rows, within_nodes in ((slice(num_counted), False), (slice(num_counted, None), True))
        if operations[rows]
    ]

    def judge(window: Window) -> None:
        for rows, one in judges:
            waits, counts = window.waits[rows], window.operations[rows]
            one.window(replace(window, waits=waits, operations=counts))
            # Who is missing is said once.
            window = replace(window, silent={}, refused=[])

    return judge


def _interval_s() -> float:
    # The seconds of "1" are for counters that are copied as a whole.
    mode = env.diagnose()
    is_said = mode.mode == "async" and env.diagnose.text() != "1"
    return mode.seconds if is_said else _DEFAULT_INTERVAL_S


def _failed(error: Exception) -> None:
    # The process that has the store is over, which happens a little earlier than that of the others.
    level = logging.INFO if is_lost(error) else logging.WARNING
    say(f"watching a buffer of other kernels has failed and ended: {reason(error)}", level)


def _say_once(line: str, buffer: Any = None) -> None:
    """What all ranks know is said on rank 0 of a buffer; what one knows, on that."""
    if line not in _told and getattr(buffer, "rank", 0) == 0:
        _told.add(line)
        say(line)
