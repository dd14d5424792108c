"""What the tests of missing ranks share: who is missing, what the others say of it, and what is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from deep_ep.errors import EPTimeoutError
from support.launch import (
    HANG_S,
    Outcome,
    run_processes,
    shared_memory_left,
    shared_memory_segments,
)

MISSING = 1
TIMEOUT_S = 2.0
# Where the end of a wait is no matter of the timeout: who waits for that hangs, see `run_processes`.
NEVER_S = 5 * HANG_S


def die() -> None:
    """As the kernel's out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def timeout_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What the expected EPTimeoutError of `call` says, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except EPTimeoutError as error:
        return {
            "missing": error.missing_ranks,
            "last_seen": error.last_seen,
            "operation": error.operation,
            "op": error.op,
            "text": str(error),
            "reason": str(error).partition(": ")[2],
            "dead": error.dead_ranks,
            "left": error.left_ranks,
            "waiting": error.waiting_ranks,
            "type": type(error),
            "after_s": time.monotonic() - begin,
        }
    raise AssertionError("nobody was missed")


def run_without(
    scenario: Callable[..., Any],
    num_ranks: int,
    victim_exit_code: int,
    timeout_s: float,
    *args: Any,
    victims: Sequence[int] = (MISSING,),
) -> list[Any]:
    """Runs scenario(rank, group, *args); checks that nothing is left, and how everybody ended. Returns
    what the survivors saw.
    """
    before = shared_memory_segments()
    outcomes = run_processes(
        scenario,
        num_ranks,
        *args,
        env={"DEEP_EP_TIMEOUT_S": str(timeout_s)},
    )
    survivors: list[Outcome] = [o for rank, o in enumerate(outcomes) if rank not in victims]
    assert [outcomes[victim].exit_code for victim in victims] == [victim_exit_code] * len(victims)
    for outcome in survivors:
        assert outcome.exit_code == 0, f"{outcome.error_type}: {outcome.error}"
    assert not shared_memory_left(before)
    return [outcome.value for outcome in survivors]


def all_alike(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """What all survivors say alike."""
    for one in seen:
        for what in ("missing", "dead", "left"):
            assert one[what] == seen[0][what]
    return seen[0]
