"""Which stream which rank uses, where ranks are threads of one process and share a GPU.

Kernels of one stream run in turn, and kernels of ranks wait for each other: two ranks on one stream would
wait for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection
from typing import Any, Callable

from deep_ep.base.rules import fail
from deep_ep.errors import EPUsageError

_lock = threading.Lock()
# By buffer and rank: native handles of the streams that it used last.
_used: dict[tuple[str, int], set[int]] = {}
# What `release` was called for: the garbage collector may call it in the thread that holds the lock.
_released: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()


class StreamClaims:
    """The streams of one rank of a buffer, on its GPU; the other ranks of the process may not use them."""

    def __init__(self, buffer: str, device_index: int, rank: int) -> None:
        """Claims nothing yet.

        Args:
            buffer: what its ranks call it, and no other buffer of the process.
            device_index: the GPU; ranks on others do not matter.
            rank: this rank.
        """
        self._buffer = f"{buffer} on {device_index}"
        self._device_index = device_index
        self._rank = rank
        self._own: set[int] = set()

    def take(
        self, create: Callable[[Collection[int]], Any], handle_of: Callable[[Any], int]
    ) -> Any:
        """A stream that is this rank's as long as it has the buffer.

        Args:
            create: makes one that is none of these.
            handle_of: the native handle of a stream.
        """
        with _lock:
            _forget_released()
            others = {handle for _, handles in self._of_others() for handle in handles}
            stream = create(others)
            self._own.add(handle_of(stream))
            _used[self._buffer, self._rank] = set(self._own)
        return stream

    def use(self, where: str, handle: int) -> None:
        """Notes that this rank calls on this stream now, and no longer on the one before.

        Raises:
            EPUsageError: another rank uses it.
        """
        with _lock:
            _forget_released()
            wanted = {*self._own, handle}
            for rank, handles in self._of_others():
                for shared in sorted(wanted & handles):
                    name = f"stream {shared:#x}" if shared else "the default stream"
                    got = (
                        f"rank {self._rank} and rank {rank} use {name} of GPU {self._device_index}"
                    )
                    fail(where, got, "shared_stream", EPUsageError)
            _used[self._buffer, self._rank] = wanted

    def release(self) -> None:
        """The buffer has ended. May be called by a destructor, wherever its thread is."""
        _released.put((self._buffer, self._rank))

    def _of_others(self) -> list[tuple[int, set[int]]]:
        return [
            (rank, handles)
            for (buffer, rank), handles in sorted(_used.items())
            if buffer == self._buffer and rank != self._rank
        ]


def _forget_released() -> None:
    while not _released.empty():
        _used.pop(_released.get(), None)
