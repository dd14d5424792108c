"""The word to a background thread that it shall end, from anywhere."""

from __future__ import annotations

import contextlib
import queue


class StopFlag:
    """An event that one thread waits for, and whose `set` may be called by a destructor.

    The garbage collector calls destructors in any thread, in the middle of anything: where `set` of a
    `threading.Event` finds its lock taken by the very thread that calls it, that thread stays for ever.
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
