"""What a rank does around its operations: stamps of parts that are phases of their own, and ranges for Nsight.

A part is stamped where it runs: on a GPU by its stream, before it and after it, so that nothing waits. The clock is that of
the stamps of operations, so what lies between two of these is known exactly, whichever stream it was on.

Without counters each of these is a branch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from deep_ep.observe.copier import to_host

if TYPE_CHECKING:
    import threading

    from deep_ep.native.backend import Backend
    from deep_ep.native.runtime import Runtime

PARTS = ("layout", "permute", "unpermute")

_NOTHING = contextlib.nullcontext()


class Part(NamedTuple):
    """One part, ns on the rank's clock."""

    name: str
    begin: int
    end: int


class PartStamps:
    """The stamps of a rank's recent parts. It keeps no part of a buffer alive.

    Attributes:
        capacity: parts of each name.
        stamps: [len(PARTS), capacity, 2] int64, begin and end, on the device; 0: never written.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Without any; the capacity is 1 at least, and the device is where they are written."""
        self.capacity = capacity
        self.stamps = torch.zeros((len(PARTS), capacity, 2), dtype=torch.int64, device=device)
        self._numbers = {name: itertools.count() for name in PARTS}

    def next(self, name: str) -> tuple[int, int]:
        """Where the next part of that name is stamped: addresses of its begin and its end."""
        slot = PARTS.index(name) * self.capacity + next(self._numbers[name]) % self.capacity
        begin = self.stamps.data_ptr() + slot * 2 * self.stamps.itemsize
        return begin, begin + self.stamps.itemsize

    def finished(self) -> list[Part]:
        """Those that have ended, in no order."""
        (copied,) = to_host(self.stamps)
        # One that runs, or raised, has the end of an earlier one, or none.
        return [
            Part(name, begin, end)
            for name, stamps in zip(PARTS, copied.tolist())
            for begin, end in stamps
            if begin < end
        ]


class ObservedCommunicator(Protocol):
    """The communicator of a rank (ops/communicator.py), as far as it is observed."""

    backend: Backend
    lock: threading.RLock
    runtime: Runtime | None
    parts: PartStamps | None


def marked(communicator: ObservedCommunicator, name: str) -> AbstractContextManager[None]:
    """What happens within is the range `deep_ep::NAME` for Nsight, while the rank counts."""
    if communicator.parts is None:
        return _NOTHING
    return _range(communicator.backend, name)


def measured(
    communicator: ObservedCommunicator, name: str, stream: Any = None
) -> AbstractContextManager[None]:
    """What happens within is a part, and marked, while the rank counts.

    Args:
        communicator: of the rank.
        name: one of `PARTS`.
        stream: on which it runs; the current one unless given.
    """
    parts = communicator.parts
    return _NOTHING if parts is None else _part(communicator, parts, name, stream)


@contextlib.contextmanager
def _range(backend: Backend, name: str) -> Iterator[None]:
    backend.push_range(f"deep_ep::{name}")
    try:
        yield
    finally:
        backend.pop_range()


@contextlib.contextmanager
def _part(
    communicator: ObservedCommunicator, parts: PartStamps, name: str, stream: Any
) -> Iterator[None]:
    backend = communicator.backend
    stream = backend.current_stream() if stream is None else stream
    with _range(backend, name):
        begin, end = parts.next(name)
        has_begun = _write_clock(communicator, begin, stream)
        yield
        if has_begun:
            _write_clock(communicator, end, stream)
            backend.record_use(parts.stamps, stream)


def _write_clock(communicator: ObservedCommunicator, where: int, stream: Any) -> bool:
    """Stamps, unless another thread is in an operation: its part is none of what lies between operations."""
    if not communicator.lock.acquire(blocking=False):
        return False
    try:
        runtime = communicator.runtime
        if runtime is None:
            return False
        handle = communicator.backend.stream_handle(stream)
        runtime.native.write_clock(where=where, stream=handle)
        return True
    finally:
        communicator.lock.release()
