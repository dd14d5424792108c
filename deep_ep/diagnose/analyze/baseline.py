"""A group compared with itself: what slows all paths alike shows against its own past only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .estimates import Estimates

# Windows that make the reference; until then nothing is said.
_WINDOWS = 5
_KEPT = 32


@dataclass
class History:
    """Path levels of the windows seen so far; give the same object to every `judge` of a group.

    The reference is the median of the windows in which nothing was found to have shifted, so that
    a lasting shift stays named instead of becoming the new normal.
    """

    _levels: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    _since: dict[tuple[str, int], int] = field(default_factory=dict)
    _windows: int = 0

    def shifts(self, e: Estimates, floor_ns: float) -> list[tuple[int, float, float, int]]:
        """Classes of paths of this kind that became slower: (class, reference, shift, windows).

        Args:
            e: the estimates of this window.
            floor_ns: the smallest shift of interest.

        Returns:
            Per class (0 within nodes, 1 between) the reference level and the shift in ns, and for
            how many windows it has lasted.
        """
        found = []
        for link, level in enumerate(e.paths.level):
            key = (e.operation, link)
            past = self._levels.setdefault(key, [])
            if not np.isfinite(level):
                continue
            reference = float(np.median(past)) if past else level
            spread = float(np.median(np.abs(np.array(past) - reference))) if past else 0.0
            shifted = level - reference > max(floor_ns, 10 * spread)
            if len(past) >= _WINDOWS and shifted:
                self._since.setdefault(key, self._windows)
                found.append(
                    (link, reference, level - reference, self._windows - self._since[key] + 1)
                )
                continue
            self._since.pop(key, None)
            past.append(level)
            del past[:-_KEPT]
        return found

    def end_window(self) -> None:
        """All kinds of this window have been asked for."""
        self._windows += 1
