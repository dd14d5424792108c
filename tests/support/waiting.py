"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], bool],
    within_s: float = 60.0,
    meanwhile: Callable[[], object] = lambda: None,
) -> bool:
    """Whether the condition comes true in time; looks every 10 ms, after a call of `meanwhile`."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        meanwhile()
        time.sleep(0.01)
    return True
