"""Streams as a GPU has them, on the host target: written down is what waits for what, and who uses which memory when.

Kernels run when they are called, so results say nothing of waits that are missing. The tracker does: every operator of torch
and every launch is an event on a stream, with a vector clock of all streams. Two uses of the same memory of which one
writes must be ordered by waits; so must all uses and the end of the memory, which the next allocation of its stream may get.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import deep_ep
from deep_ep.checks import handles as handle_values
from deep_ep.checks import layouts as layout_values
from deep_ep.moe.awaited import AwaitedTensor
from deep_ep.native import backend
from deep_ep.native.backend import CpuBackend, CpuStream

Tensor = torch.Tensor
# Of each stream, how many of its events have come before.
Clock = dict[int, int]

# What a launch writes; all else it is given it reads. Packs are scratch memory.
_LAYOUT = {"num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert"}
_PREFIXES = {
    *("source_prefix", "channel_prefix", "recv_channel_prefix", "node_channel_prefix"),
    *("recv_node_channel_prefix", "recv_node_prefix"),
}
_ROWS = {"recv_x", "recv_scales", "packs"}
_FRESH = {"recv_topk_idx", "recv_topk_weights", "recv_src_idx", "recv_src_meta", "nvl_head"}
_WRITTEN = {
    "dispatch_layout": {*_LAYOUT, "is_token_in_rank"},
    "copy_rows": {"out"},
    "sum_rows": {"out"},
    "normal_notify": _PREFIXES,
    "normal_dispatch": _ROWS,
    "normal_combine": {"combined_x", "combined_topk_weights", "packs"},
}
_handles = itertools.count(0x100)
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


class Stream(CpuStream):
    """With a native handle and the clock of what was queued last."""

    def __init__(self) -> None:
        self.cuda_stream = next(_handles)
        self.clock: Clock = {}
        _streams[self.cuda_stream] = self


class Memory:
    """An allocation, and its uses that no later one is known to follow.

    Attributes:
        home: the stream whose later allocations may get it.
        kept_for: streams that the allocator waits for before (`record_use`).
    """

    def __init__(self, storage: torch.UntypedStorage, home: Stream) -> None:
        self.begin, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.home = home
        self.kept_for: set[Stream] = set()
        self.alive = StorageWeakRef(storage)
        self.reads: Clock = {}
        # Whoever had it before may have used it in all that its stream was given.
        self.writes: Clock = {home.cuda_stream: home.clock.get(home.cuda_stream, 0)}


class Tracker(TorchDispatchMode):
    """The streams of one rank, which is a thread.

    Attributes:
        races: what no wait orders, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.races: list[str] = []
        self._host: Clock = {}
        self._memories: dict[int, Memory] = {}

    # ---- what is queued

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, AwaitedTensor) for kind in types):
            return NotImplemented  # it waits, and calls again
        self.look_for_ends()
        kwargs = kwargs or {}
        given = [*zip(func._schema.arguments, args)]
        given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        reads: list[Memory] = []
        writes: list[Memory] = []
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(self._memories_of(value))
        result = func(*args, **kwargs)
        returned = self._memories_of(result)
        new = [memory for memory in returned if memory not in (*reads, *writes)]
        is_view = not new and not writes and bool(returned)
        if not is_view and "empty" not in func.__name__:
            self._use(func.__name__, self.current, reads, [*writes, *new])
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_waits(self.current)
        return result

    def launch(self, name: str, arguments: dict[str, Any]) -> None:
        """A kernel; which memory its pointers lead to is found."""
        self.look_for_ends()
        written = _WRITTEN[name] | (_FRESH | {"node_head"} if arguments.get("fresh") else set())
        reads: list[Memory] = []
        writes: list[Memory] = []
        for keyword, value in arguments.items():
            memory = self._memory_at(value) if isinstance(value, int) else None
            if memory is not None:
                (writes if keyword in written else reads).append(memory)
        self._use(name, _streams[arguments["stream"]], reads, writes)

    # ---- what waits

    def waits(self, stream: Stream, clock: Clock) -> None:
        """What follows on a stream comes after what the clock says."""
        self.look_for_ends()
        _join(stream.clock, clock)

    def host_waits(self, stream: Stream) -> None:
        """Whatever is queued from now on, on any stream, comes after what is on this one."""
        self.look_for_ends()
        _join(self._host, stream.clock)

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        """See `Memory.kept_for`."""
        written = tensor.written if isinstance(tensor, AwaitedTensor) else tensor
        for memory in self._memories_of(written):
            memory.kept_for.add(stream)

    # ---- memory

    def look_for_ends(self) -> None:
        """Memory that nobody holds any more is its stream's; before anything else is queued or waits."""
        for key, memory in list(self._memories.items()):
            if not memory.alive.expired():
                continue
            del self._memories[key]
            known = dict(self._host)
            for stream in (memory.home, *memory.kept_for):
                _join(known, stream.clock)
            self._require("memory ends", known, memory.reads, "read")
            self._require("memory ends", known, memory.writes, "written")

    def _memories_of(self, values: Any) -> list[Memory]:
        """Of all tensors within that have memory."""
        found = []
        for tensor in tensors_in(values):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                if storage._cdata not in self._memories:
                    self._memories[storage._cdata] = Memory(storage, self.current)
                found.append(self._memories[storage._cdata])
        return found

    def _memory_at(self, pointer: int) -> Memory | None:
        for memory in self._memories.values():
            if memory.begin <= pointer < memory.end and not memory.alive.expired():
                return memory
        return None

    def _use(
        self, name: str, stream: Stream, reads: Iterable[Memory], writes: Iterable[Memory]
    ) -> None:
        key = stream.cuda_stream
        _join(stream.clock, self._host)
        stream.clock[key] = stream.clock.get(key, 0) + 1
        for memory in reads:
            self._require(f"{name} reads", stream.clock, memory.writes, "written")
            memory.reads[key] = stream.clock[key]
        for memory in writes:
            self._require(f"{name} writes", stream.clock, memory.writes, "written")
            self._require(f"{name} writes", stream.clock, memory.reads, "read")
            memory.writes, memory.reads = {key: stream.clock[key]}, {}

    def _require(self, what: str, known: Clock, uses: Clock, how: str) -> None:
        for stream, count in uses.items():
            if known.get(stream, 0) < count:
                self.races.append(f"{what}, {how} on {stream:#x} as event {count}: not awaited")


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class TrackedBackend(CpuBackend):
    """The cpu backend in such streams; each thread has its own."""

    runs_in_streams = True

    def __init__(self) -> None:
        super().__init__(backend.get().binding)
        self._of_thread = threading.local()

    @property
    def tracker(self) -> Tracker:
        """Of this thread."""
        if not hasattr(self._of_thread, "tracker"):
            self.begin()
        tracker: Tracker = self._of_thread.tracker
        return tracker

    def begin(self) -> Tracker:
        """A new one for this thread."""
        self._of_thread.tracker = Tracker()
        return self.tracker

    def current_stream(self) -> Any:
        return self.tracker.current

    def create_comm_stream(self, others: Collection[int] = ()) -> Any:
        return Stream()

    def stream_handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        tracker = self.tracker
        before, tracker.current = tracker.current, stream
        try:
            yield
        finally:
            tracker.current = before

    def record_event(self, stream: Any) -> Any:
        return dict(stream.clock)

    def wait_event(self, stream: Any, event: Any) -> None:
        self.tracker.waits(stream, event)

    def wait_stream(self, waiting: Any, waited_for: Any, event: Any = None) -> None:
        self.tracker.waits(waiting, waited_for.clock)

    def record_use(self, tensor: Tensor, stream: Any) -> None:
        self.tracker.keep_for(tensor, stream)


def use_tracked(monkeypatch: pytest.MonkeyPatch) -> TrackedBackend:
    """Buffers that are made in this test use it."""
    selected = TrackedBackend()
    monkeypatch.setattr(backend, "_select", lambda wanted: selected)
    # Only memory of the host is looked into, and that needs no stream.
    monkeypatch.setattr(layout_values, "check", lambda *args: None)
    monkeypatch.setattr(handle_values, "check", lambda *args: None)
    return selected


class TrackedNative:
    """A native runtime whose launches are noted."""

    def __init__(self, native: Any, tracker: Tracker) -> None:
        self._native, self._tracker = native, tracker
        self._notified = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._native, name)
        if name not in _WRITTEN:
            return call

        def launch(**arguments: Any) -> Any:
            self._tracker.launch(name, arguments)
            if name == "normal_notify":
                self._notified = arguments["stream"]
            return call(**arguments)

        return launch

    def normal_counts(self) -> Any:
        """The host waits for them."""
        self._tracker.host_waits(_streams[self._notified])
        return self._native.normal_counts()


@contextlib.contextmanager
def tracked(selected: TrackedBackend, buffer: deep_ep.Buffer) -> Iterator[Tracker]:
    """Everything that this rank does; what is held by nobody at the end has been judged."""
    tracker = selected.begin()
    runtime = buffer.runtime
    native = runtime.native
    runtime.native = TrackedNative(native, tracker)
    try:
        with tracker:
            yield tracker
        tracker.look_for_ends()
    finally:
        runtime.native = native


class Way(NamedTuple):
    """How a call is made: after an event, awaited by the program, on memory of the comm stream, on the second stream."""

    previous: bool = False
    is_async: bool = False
    on_comm: bool = False
    elsewhere: bool = False


class Program:
    """What a program does on its two streams by torch's rules: it waits for what it uses, and tells the allocator of
    whatever it uses on another stream than the one where it got it.
    """

    def __init__(self, selected: TrackedBackend, tracker: Tracker) -> None:
        self._selected, self._tracker = selected, tracker
        self._streams = tracker.current, Stream()
        self._event = deep_ep.EventOverlap()  # of the last call, if it was not waited for yet

    def go_to(self, way: Way) -> None:
        """The stream of the next call, behind what was queued on the other one."""
        stream = self._streams[way.elsewhere]
        self._selected.wait_stream(stream, self._tracker.current)
        self._tracker.current = stream

    def call(self, way: Way, call: Callable[..., Any], inputs: Any) -> Any:
        """What a call returns, without its event. An event of the call before may be all that it waits for."""
        self.use(inputs)
        if not way.previous:
            self.wait()
        before = self._event if self._event.event is not None else deep_ep.Buffer.capture()
        torch.ones(1)  # the stream goes on
        *results, self._event = call(
            previous_event=before if way.previous else None,
            async_finish=way.is_async,
            allocate_on_comm_stream=way.on_comm,
        )
        assert (self._event.event is not None) == way.is_async
        return self.own(results)

    def wait(self) -> None:
        if self._event.event is not None:
            self._event.current_stream_wait(release_handle=True)

    def copies(self, values: Any, copy: Callable[[Tensor], Tensor] = torch.clone) -> Any:
        """Of what was awaited."""
        self.use(values)
        return self.own(tree_map_only(Tensor, copy, values))

    def use(self, values: Any) -> None:
        for tensor in tensors_in(values):
            if getattr(tensor, "got_on", None) is not self._tracker.current:
                self._selected.record_use(tensor, self._tracker.current)

    def own(self, values: Any) -> Any:
        for tensor in tensors_in(values):
            if not hasattr(tensor, "got_on"):
                tensor.got_on = self._tracker.current  # type: ignore[attr-defined]
        return values


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
