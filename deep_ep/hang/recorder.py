"""What a rank can say of itself at any time, also while its kernel waits: its `RankState`.

The ring of calls and stamps is the runtime's (csrc/runtime/call_log.h), which is read without asking the
device. Added here is who called, and where the threads of the program are.
"""

from __future__ import annotations

import itertools
import linecache
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Callable

import torch

from deep_ep.hang.activity import call_of
from deep_ep.hang.states import CONSTRUCTION, DESTRUCTION, Call, Frame, RankState, Thread, Waits

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime as NativeRuntime
    from deep_ep.base.ranks import RankPlace

# Of this package; looked up for every call.
_OWN_FILES = frozenset(map(str, Path(__file__).parents[1].rglob("*.py")))
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
# Frames of a thread that are told, characters of an exception and of a line. Chosen.
_MOST_FRAMES, _MOST_TEXT, _MOST_OF_LINE = 40, 2000, 200
# Of what all ranks must agree on, what has no number.
_NO_NUMBERS = ("operation", "dtype")


class Recorder:
    """Of one rank of one buffer.

    Attributes:
        buffer: names it.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        buffer: str,
        place: RankPlace,
        native: NativeRuntime,
        most: int,
        masked: Callable[[], Iterable[int]] = tuple,
        num_frames: int = 1,
        called_ns: int = 0,
    ) -> None:
        """Called by the thread that makes the buffer.

        Args:
            rank: this rank.
            num_ranks: size of the group.
            buffer: names the buffer, the same on all ranks.
            place: where this rank runs.
            native: its runtime.
            most: calls that it remembers.
            masked: whom it goes on without.
            num_frames: of the program, that are remembered with a call.
            called_ns: when the program called `Buffer`, UTC; 0: that is not known.
        """
        self.buffer = buffer
        self._known = RankState(rank, num_ranks, buffer, place.host, place.pid, written_by=rank)
        self._native, self._most, self._masked = native, most, masked
        self._thread = threading.get_ident()
        self._num_frames = num_frames
        # Of the last calls: number, and where the program called.
        self._sites: deque[tuple[int, _Sites]] = deque(maxlen=max(most, 1))
        self._construction = self._without_kernel(CONSTRUCTION, "Buffer", called_ns)
        self._destruction: Call | None = None
        # Since when it waits in `destroy`, and for whom.
        self._parts: tuple[float, Callable[[], Iterable[int]]] | None = None

    def note_call(self, name: str) -> None:
        """Remembers from where the program makes its next call. Before every operation."""
        self._sites.append((self._native.num_calls() + 1, _sites(self._num_frames)))

    def note_destruction(self, missing: Callable[[], Iterable[int]]) -> None:
        """The program has called `destroy`, and waits there.

        Args:
            missing: who has not come there yet; called from any thread.
        """
        self._destruction = self._without_kernel(DESTRUCTION, "destroy", time.time_ns())
        self._parts = time.monotonic(), missing

    def _without_kernel(self, series: str, name: str, called_ns: int) -> Call:
        """The first and the last call of a buffer, which all ranks make once."""
        now = time.time_ns()
        finished = now if series == CONSTRUCTION else 0
        frames = _frames_at(_sites(self._num_frames))
        return Call(
            *(0, series, 1, name),
            called_ns=called_ns,
            entered_ns=now,
            sent_ns=now,
            finished_ns=finished,
            frames=frames,
        )

    def state(self, most_calls: int, with_threads: bool) -> RankState:
        """What this rank says of itself now. From any thread; waits for nothing but the GIL.

        Args:
            most_calls: how many calls, the newest.
            with_threads: whether the stacks of all Python threads are wanted.
        """
        native = self._native
        sites = dict(self._sites.copy())
        # Not `progress()`, which asks the device: not while another thread captures a graph.
        calls = [_call(plain, sites) for plain in native.recorded_calls(most=self._most)]
        entered = [call for call in calls if call.series == "operation" and call.entered_ns]
        threads = threads_of_process(self._thread) if with_threads else ()
        ends = () if self._destruction is None else (self._destruction,)
        return replace(
            self._known,
            global_rank=_global_rank(),
            taken_ns=time.time_ns(),
            raised=_raised or _handled_by(self._thread),
            closed=max((call.number for call in entered if call.finished_ns), default=0),
            opened=max((call.number for call in entered if not call.finished_ns), default=0),
            in_call=call_of(threads),
            calls=(self._construction, *calls[-most_calls:], *ends),
            waits=self.waits(),
            threads=threads,
            masked=tuple(sorted(self._masked())),
        )

    def place(self) -> tuple[int, int]:
        """What changes when it goes on: its calls, and when the newest one has ended."""
        newest = self._native.recorded_calls(most=1)
        return self._native.num_calls(), newest[0]["finished_ns"] if newest else 0

    def waits(self) -> Waits | None:
        """For whom it waits now."""
        if self._parts is not None:
            since_s, missing = self._parts
            owed = tuple(sorted(missing()))
            return Waits(DESTRUCTION, 1, time.monotonic() - since_s, {"entry": owed})
        waits = self._native.waits()
        return None if waits is None else Waits(**waits)


# Where the program is, innermost first: code and line.
_Sites = tuple[tuple[CodeType, int], ...]


def _sites(most: int) -> _Sites:
    """Of the thread that asks, from where it has called this package."""
    frame: FrameType | None = sys._getframe(2)
    # Functions with gradients and modules are called by way of torch.
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _OWN_FILES and not file.startswith(_TORCH):
            break
        frame = frame.f_back
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < most:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _frames_at(sites: _Sites) -> tuple[Frame, ...]:
    return tuple(Frame(code.co_name, code.co_filename, line or 0) for code, line in sites)


def _call(plain: dict[str, Any], sites: dict[int, _Sites]) -> Call:
    agreed = plain.pop("agreed")
    sizes = {name: value for name, value in agreed.items() if name not in _NO_NUMBERS and value}
    names = tuple(sizes)
    if plain["num_tokens"]:
        sizes["num_tokens"] = plain["num_tokens"]
    del plain["num_tokens"]
    frames = _frames_at(sites.get(plain["call"], ()))
    failed = plain.pop("failed")
    return Call(
        **plain,
        name=agreed["operation"],
        sizes=sizes,
        agreed=names,
        dtype=agreed.get("dtype", "") if names else "",
        failed="" if failed == "none" else failed,
        frames=frames,
    )


def _global_rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return -1


def threads_of_process(first: int) -> tuple[Thread, ...]:
    """The Python threads of this process, `first` first; not those of this package."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, f"thread {ident}")
        if not name.startswith("deep_ep"):
            found.append((ident != first, name, _frames(frame)))
    return tuple(
        Thread(name, frames) for _, name, frames in sorted(found, key=lambda found: found[:2])
    )


def _frames(frame: FrameType) -> tuple[Frame, ...]:
    """Innermost first."""
    found = []
    for inner, line in itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES):
        file = inner.f_code.co_filename
        text = linecache.getline(file, line or 0).strip()[:_MOST_OF_LINE]
        found.append(Frame(inner.f_code.co_name, file, line or 0, text))
    return tuple(found)


# ---- exceptions

_raised = ""  # the one that ends this process
_listeners: list[Callable[[str], None]] = []


def _handled_by(thread: int) -> str:
    """The exception that a thread is handling, as in a `finally` that does not end; Python 3.9 does not tell it."""
    of_threads: Callable[[], dict[int, Any]] = getattr(sys, "_current_exceptions", dict)
    handled = of_threads().get(thread)
    error = handled if handled is None or isinstance(handled, BaseException) else handled[1]
    return "" if error is None else _text_of(error, error.__traceback__)


def _text_of(error: BaseException, trace: TracebackType | None) -> str:
    place = traceback.extract_tb(trace)[-1:] if trace is not None else []
    where = "".join(f" at {frame.filename}:{frame.lineno} in {frame.name}" for frame in place)
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{text}"[:_MOST_TEXT] + where


def watch_exceptions(listener: Callable[[str], None]) -> Callable[[], None]:
    """Has `listener` called with the text of an exception that nobody catches.

    Returns:
        What ends that.
    """
    global _next_hook
    if sys.excepthook is not _on_exception:
        _next_hook, sys.excepthook = sys.excepthook, _on_exception
    _listeners.append(listener)
    _watch_child()
    # Before the rank says goodbye (loop.py), whose priority is lower.
    at_exit = multiprocessing.util.Finalize(None, _tell_leaving, exitpriority=2)

    def end() -> None:
        at_exit.cancel()
        if listener in _listeners:
            _listeners.remove(listener)

    return end


_next_hook: Callable[..., Any] = sys.excepthook


def _tell_leaving(*_: Any) -> None:
    """At the end of a process: the exception that it ends with although somebody catches it.

    multiprocessing ends a child while its exception is on the way, and so without `sys.excepthook`;
    torch.multiprocessing.spawn catches it, and leaves by `sys.exit(1)` from there.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        error = error.__cause__ or error.__context__
    if error is not None and not isinstance(error, SystemExit) and not _raised:
        _tell(_text_of(error, error.__traceback__))


def _watch_child() -> None:
    """From Python 3.13 on multiprocessing has handled the exception of a child before the end: it is seen where it does so."""
    ends = getattr(multiprocessing.process.BaseProcess, "_bootstrap", None)
    if sys.version_info >= (3, 13) and multiprocessing.parent_process() is not None and ends:
        watching = sys.monitoring
        # The other numbers are a debugger's, a profiler's and the like.
        users = {number: watching.get_tool(number) for number in (3, 4)}
        if None in users.values() and __name__ not in users.values():
            tool = next(number for number, user in users.items() if user is None)
            watching.use_tool_id(tool, __name__)
            watching.register_callback(tool, watching.events.LINE, _tell_leaving)
            watching.set_local_events(tool, ends.__code__, watching.events.LINE)


def _tell(text: str) -> None:
    global _raised
    _raised = text
    for listener in list(_listeners):
        listener(text)


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        _tell(_text_of(error, trace))
    finally:
        _next_hook(kind, error, trace)
