"""A rank that does not come to `Buffer()` or to `destroy()`: the others say whom they wait for, and why."""

from __future__ import annotations

import logging
import time
import warnings

import pytest

import deep_ep
from launch import Ranks


def comes_late() -> None:
    time.sleep(1.5)


def test_who_has_not_called_destroy_is_named_while_the_others_wait_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEP_EP_WARN_S", "0.2")

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 2:
            comes_late()
        buffer.destroy()

    with caplog.at_level(logging.WARNING, "deep_ep"), Ranks(3, 8, 256, 3) as ranks:
        ranks.run(run)
    (line,) = {record.getMessage() for record in caplog.records}
    assert line.startswith("deep_ep: rank 2 has not called destroy(); its thread")
    assert "comes_late" in line
    assert "ranks 0-1 wait for it" in line


def test_who_waited_in_destroy_in_vain_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARN_S", "0.2"), ("TIMEOUT_S", "1.5")):
        monkeypatch.setenv(f"DEEP_EP_{name}", value)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 0:
            buffer.destroy()
        else:
            time.sleep(2.5)

    with warnings.catch_warnings(record=True) as caught, Ranks(2, 8, 256, 2) as ranks:
        warnings.simplefilter("always")
        ranks.run(run)
        (said,) = [str(w.message) for w in caught if "not all ranks came" in str(w.message)]
        assert "rank 1 has not called destroy(); its thread" in said
        ranks.run(lambda rank, buffer: None)
