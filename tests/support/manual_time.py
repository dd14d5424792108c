"""A clock and timers that only a test moves on."""

from __future__ import annotations

import sched
from collections.abc import Callable


class ManualTime:
    """In the place of a loop's time.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._timers = sched.scheduler(lambda: self.now, lambda _: None)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Calls it once so many seconds have passed."""
        self._timers.enter(delay_s, 0, action)

    def pass_time(self, seconds: float) -> None:
        """What is due meanwhile is called in its order, each at its time."""
        end = self.now + seconds
        while self._timers.queue and self._timers.queue[0].time <= end:
            self.now = max(self.now, self._timers.queue[0].time)
            self._timers.run(blocking=False)
        self.now = end
