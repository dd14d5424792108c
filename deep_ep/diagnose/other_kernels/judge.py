"""Rank 0: windows of waiting to verdicts, in the log and in records."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..analyze.waits_only.judge import judge_waits
from ..analyze.waits_only.lasting import MOST_WINDOWS
from ..analyze.waits_only.sampling import LEAST_STEPS, Windows
from ..core.diagnosis import Diagnosis
from ..live.wait_sampler import Window
from ..live.window_log import WindowLog, silence

# The least effect of interest, of the time that passes: a rank that an operating system interrupts in every
# operation of 3 ms makes others wait 1 %. Chosen.
_OF_WALL_TIME = 0.01


class Judge:
    """Of one buffer. Effects are of an operation while all ranks know how many there were, else of a window."""

    def __init__(
        self, kinds: Sequence[str], folder: Path | None, *, within_nodes: bool = False
    ) -> None:
        """The first window begins now.

        Args:
            kinds: of operation, as in `Window.waits`, that are called equally often.
            folder: where records go; `None`: nowhere.
            within_nodes: what ranks of different hosts wait for each other is not counted.
        """
        self._kinds = list(kinds)
        self._within_nodes = within_nodes
        self._log = WindowLog(folder)
        self._ended = time.monotonic()
        self._counted: list[str] = []
        self._knows_operations = True
        self._forget()

    def window(self, window: Window) -> None:
        """The next one, which is told. One in which nobody waited is no window, but may lack somebody."""
        before, self._ended = self._ended, time.monotonic()
        absent = silence(window.silent)
        if not np.nansum(window.waits) > 0:
            self._log.tell_missing(window.refused, absent)
            return
        diagnosis = self.judge(window, self._ended - before)
        self._log.tell(window.number, time.time(), diagnosis, refused=window.refused, absent=absent)

    def judge(self, window: Window, seconds: float) -> Diagnosis:
        """From this window and the ones before it.

        Args:
            window: in which somebody waited.
            seconds: how long it was.
        """
        waits = np.nansum(window.waits, axis=(1, 2)) > 0
        operations = window.operations[waits]
        counted = [k for k, w in zip(self._kinds, waits) if w or k in self._counted]
        knows_operations = bool(np.isfinite(operations).all())
        if (counted, knows_operations) != (self._counted, self._knows_operations):
            # Windows no longer mean the same.
            self._counted, self._knows_operations = counted, knows_operations
            self._forget()
        # None, where what was waited for is of calls before.
        steps = math.ceil(operations.max()) if self._knows_operations else LEAST_STEPS
        self._passed.append((steps, seconds))
        rows = [self._kinds.index(kind) for kind in self._counted]
        self._windows.add(window.waits[rows], steps)

        matrices, counts = self._windows.latest(), np.maximum(self._windows.steps(), 1)
        usual = int(np.median(counts))
        # Windows of as many operations as the usual one.
        matrices = matrices * (usual / counts)[:, None, None]
        total_steps, total_s = map(sum, zip(*self._passed))
        of_operation_ns = total_s / max(total_steps, 1) * 1e9
        return judge_waits(
            dict(zip(self._counted, matrices)),
            hosts=self._hosts(window),
            operations=usual if self._knows_operations else None,
            unit_ns=1.0,
            delta_ns=_OF_WALL_TIME * of_operation_ns * (1 if self._knows_operations else usual),
            # The same rank either way, which is what can be acted on.
            name_likelier=True,
            within_nodes=self._within_nodes,
        )

    def _hosts(self, window: Window) -> list[str] | None:
        """A group without a name for every host is looked at as if it had none, or such a rank as if it were alone."""
        if self._within_nodes:
            return [host or f"host of rank {rank}" for rank, host in enumerate(window.hosts)]
        return window.hosts if all(window.hosts) else None

    def _forget(self) -> None:
        self._windows = Windows()
        self._passed: deque[tuple[int, float]] = deque(maxlen=MOST_WINDOWS)
