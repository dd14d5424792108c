"""The flag that ends a background thread."""

from __future__ import annotations

import threading

from deep_ep.diagnose.live.stop_flag import StopFlag
from support.launch import HANG_S


def test_set_ends_a_wait_and_all_later_ones() -> None:
    flag = StopFlag()
    waiting = threading.Thread(target=flag.wait, args=(2 * HANG_S,), daemon=True)
    waiting.start()
    flag.set()
    waiting.join(HANG_S)
    assert not waiting.is_alive()
    assert flag.is_set()
    assert flag.wait(2 * HANG_S)
    flag.set()


def test_a_wait_ends_by_itself() -> None:
    flag = StopFlag()
    assert not flag.wait(0.001)
    assert not flag.is_set()
