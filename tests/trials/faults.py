"""The faults of a trial: what a rank does to itself in the middle of its operations, and what may be said of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deep_ep.hang.cause import HangCause

# Longer than any operation of a trial waits, and longer than the time until a warning.
FOR_EVER_S, A_WHILE_S = 30.0, 2.0


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: for the table.
        act: called on the rank, instead of or before its operation.
        kinds: of the causes that name it right.
        ends: whether the process is gone, or of no use any more, afterwards.
        recovers: whether the operation ends well, after a warning.
        raises: whether all ranks raise at once, with no cause that has to be looked for.
        loses_path: whether it is the path to the next rank of its node that fails, and the rank is fine.
        hooked: whether it strikes between the two halves of an operation.
        blocks_s: for how long its stream has other work, ahead of its operation; 0: it has none.
    """

    name: str
    act: Callable[[], object] = lambda: None
    kinds: tuple[str, ...] = ()
    ends: bool = False
    recovers: bool = False
    raises: bool = False
    hooked: bool = False
    loses_path: bool = False
    blocks_s: float = 0.0

    @property
    def silences(self) -> bool:
        """Whether the rank does not answer any more."""
        return bool({"stopped", "busy"} & {*self.kinds})

    def is_named_by(self, cause: HangCause, rank: int) -> bool:
        """Whether a cause says what happened to a rank, or to a path from it."""
        if cause.kind == "not_arrived" and cause.kind in self.kinds:
            return any(source == rank for source, _ in cause.paths)
        return cause.kind in self.kinds and rank in cause.ranks


class Broken(Exception):
    """What a rank raises that fails for a reason of its own."""


def _spin() -> None:
    end = time.monotonic() + FOR_EVER_S
    while time.monotonic() < end:
        pass


def _fail_and_clean_up() -> None:
    try:
        raise Broken("the batch is empty")
    finally:
        time.sleep(FOR_EVER_S)


FAULTS = (
    Fault("killed", lambda: os.kill(os.getpid(), signal.SIGKILL), ("gone",), ends=True),
    Fault("stopped", lambda: os.kill(os.getpid(), signal.SIGSTOP), ("stopped",), ends=True),
    Fault("holds the GIL in C", lambda: sum(range(1 << 40)), ("busy",), ends=True),
    Fault("loops in Python", _spin, ("not_called",), ends=True),
    Fault("raised and cleans up", _fail_and_clean_up, ("not_called",), ends=True),
    Fault("stands between two halves", _fail_and_clean_up, ("not_called",), ends=True, hooked=True),
    Fault("loses what it sends", kinds=("not_arrived",), ends=True, loses_path=True),
    Fault("stream is busy", kinds=("not_started",), ends=True, blocks_s=FOR_EVER_S),
    Fault("stream is busy for a while", kinds=("not_started",), recovers=True, blocks_s=A_WHILE_S),
    Fault("compiles for a while", lambda: time.sleep(A_WHILE_S), ("not_called",), recovers=True),
    Fault("leaves out an operation", kinds=("not_called",)),
    Fault("calls another operation", kinds=("mismatch",), raises=True),
    Fault("calls with another size", kinds=("mismatch",), raises=True),
)
NONE = Fault("")
BY_NAME: dict[str, Any] = {fault.name: fault for fault in FAULTS}
