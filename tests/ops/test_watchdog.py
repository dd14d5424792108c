"""Operations that hang where no deadline holds: what the host says, in a time that the test counts."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from deep_ep.ops.watchdog import Watchdog

TIMEOUT_S = 100.0


class Communicator:
    """A rank's; `open`: the operation that it is in."""

    def __init__(self) -> None:
        self.rank = 3
        self.open = 0
        self.open_hooks: list[Any] = []
        progress = SimpleNamespace(progress=lambda: {"closed": 0, "open": self.open})
        self.runtime: Any = SimpleNamespace(native=progress)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_an_operation_that_outlasts_its_timeout_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = Communicator()
    dog = Watchdog(rank, TIMEOUT_S)  # type: ignore[arg-type]
    rank.open = 12
    for now_s in range(0, 400, 10):
        assert dog.look(float(now_s))
        assert bool(errors(caplog)) == (now_s > 150)
    (said,) = errors(caplog)
    assert "rank 3: operation 12 has been running for more than 160 s" in said
    assert "inside NVSHMEM" in said


def test_operations_that_end_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    rank = Communicator()
    dog = Watchdog(rank, TIMEOUT_S)  # type: ignore[arg-type]
    for now_s in range(0, 1000, 100):
        rank.open = now_s // 100 + 1
        assert dog.look(float(now_s))
    assert not errors(caplog)


def test_a_hook_that_was_not_called_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    rank = Communicator()
    dog = Watchdog(rank, TIMEOUT_S)  # type: ignore[arg-type]
    rank.open, rank.open_hooks = 1, [object()]
    assert dog.look(0.0)
    assert dog.look(1000.0)
    rank.open_hooks.clear()  # called: its kernel runs from now on
    assert dog.look(1001.0)
    assert dog.look(1100.0)
    assert not errors(caplog)
    assert dog.look(1200.0)
    assert len(errors(caplog)) == 1


def test_it_ends_with_the_buffer_and_does_not_keep_it() -> None:
    rank = Communicator()
    dog = Watchdog(rank, TIMEOUT_S)  # type: ignore[arg-type]
    rank.runtime = None
    assert not dog.look(0.0)
    del rank
    gc.collect()
    assert not dog.look(0.0)
    dog.start().end()
    dog.close()
