"""A flag that tells the background threads of a live diagnosis to end, and that a destructor may set."""

from __future__ import annotations

import contextlib
import queue


class StopFlag:
    """An event that one thread waits for, and whose `set` may be called by a destructor.

    The garbage collector may call that in any thread, in the middle of anything. A `set` of `threading.Event` that
    interrupts a call of the same event finds its lock taken by its own thread, and waits for ever; `put` of
    `queue.SimpleQueue` may interrupt itself.
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
