"""Windows of cumulative waiting, as tensors of any kernels fill them, collected for `judge.judge_waits`."""

from __future__ import annotations

from collections import deque

import numpy as np

from ...core.diagnosis import FloatArray, IntArray
from .lasting import MOST_WINDOWS

# Steps of a window. Noise outlasts shorter ones, and would seem to last.
LEAST_STEPS = 16


def since(before: IntArray, now: IntArray) -> IntArray:
    """What was added between two readings of one rank's tensors.

    Where any total is smaller than before, the program has set them to zero: all that is there was added.
    """
    return np.where((now < before).any(), now, now - before)


class Windows:
    """The latest windows of a group, on the rank that judges. Short ones are added up."""

    def __init__(self) -> None:
        self._whole: deque[tuple[FloatArray, int]] = deque(maxlen=MOST_WINDOWS)
        self._begun: FloatArray | None = None
        self._steps = 0

    def add(self, waits: FloatArray, steps: int) -> None:
        """The next window.

        Args:
            waits: [kinds, n, n], rows wait; NaN rows: what these ranks waited is not known.
            steps: of the program, in this window.
        """
        self._begun = waits if self._begun is None else self._begun + waits
        self._steps += steps
        if self._steps >= LEAST_STEPS:
            self._whole.append((self._begun, self._steps))
            self._begun, self._steps = None, 0

    def latest(self) -> FloatArray:
        """[kinds, k, n, n], oldest first; the window begun where there is no whole one."""
        return np.stack([waits for waits, _ in self._shown()], axis=1)

    def steps(self) -> IntArray:
        """[k], of the windows of `latest`."""
        return np.array([steps for _, steps in self._shown()], np.int64)

    def _shown(self) -> list[tuple[FloatArray, int]]:
        begun = [] if self._begun is None else [(self._begun, self._steps)]
        return [*self._whole] or begun
