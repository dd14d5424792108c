"""A flag that tells a background thread to end, and that a destructor may set.

The threads of a live diagnosis wait on it between two windows. A buffer that nobody holds any more is ended by its
destructor, which the garbage collector may call in any thread and in the middle of anything. `threading.Event` has a
lock that is not made for that, so the flag is built on `queue.SimpleQueue`, whose `put` is.
"""

from __future__ import annotations

import contextlib
import queue


class StopFlag:
    """An event that one thread waits for, and whose `set` may be called by a destructor.

    A `set` of `threading.Event` that interrupts a call of the same event in the same thread finds the lock taken by
    that thread, and waits for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Ends `wait`, and lets no later one wait."""
        self._is_set = True
        self._wakeup.put(None)

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Waits for `set`, at most so long; whether it was called."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wakeup.get(timeout=timeout_s)
        return self._is_set
