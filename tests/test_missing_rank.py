"""A rank that was killed or does not come: the others name it in time, exit cleanly, and leave
nothing behind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import deep_ep
from deep_ep.errors import EPTimeoutError, EPTransportError
from exchange import (
    Inputs,
    Mode,
    Shape,
    combine,
    dispatch,
    exchange_and_check,
    experts,
    make_inputs,
    ranks_for,
)
from launch import Outcome, run_processes, shared_memory_left, shared_memory_segments

SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=512, num_experts=6, num_topk=3)
FP8 = Mode(use_fp8=True)
MISSING = 1
TIMEOUT_S = 2.0
# An operation may need some time of its own beside the wait, on a machine that others use too.
GRACE_S = 10.0

pytestmark = pytest.mark.skipif(
    deep_ep.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
)


def make_buffer(group: dist.ProcessGroup, explicitly_destroy: bool = False) -> deep_ep.Buffer:
    """A buffer for SHAPE."""
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        SHAPE.num_max_tokens, SHAPE.hidden, group.size(), SHAPE.num_experts
    )
    return deep_ep.Buffer(
        group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=SHAPE.num_local_experts,
        explicitly_destroy=explicitly_destroy,
    )


def exchange(buffer: deep_ep.Buffer, inputs: Inputs) -> None:
    """A dispatch and a combine."""
    received = dispatch(buffer, inputs, SHAPE, FP8)
    combine(buffer, inputs, received.handle, experts(received, buffer.rank), FP8)


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
            "after_s": time.monotonic() - begin,
        }
    raise AssertionError("nobody was missed")


def rank_dies_before_its_first_operation(rank: int, group: dist.ProcessGroup) -> Any:
    buffer = make_buffer(group)
    if rank == MISSING:
        die()
    return timeout_of(lambda: dispatch(buffer, make_inputs(SHAPE)[rank], SHAPE, FP8))


def rank_dies_between_operations(rank: int, group: dist.ProcessGroup) -> Any:
    buffer = make_buffer(group)
    inputs = make_inputs(SHAPE)[rank]
    exchange(buffer, inputs)
    received = dispatch(buffer, inputs, SHAPE, FP8)
    if rank == MISSING:
        die()
    ys = experts(received, rank)
    return timeout_of(lambda: combine(buffer, inputs, received.handle, ys, FP8))


def rank_dies_between_send_and_receive(rank: int, group: dist.ProcessGroup) -> Any:
    buffer = make_buffer(group)
    inputs = make_inputs(SHAPE)[rank]
    *_, hook = buffer.low_latency_dispatch(
        inputs.x, inputs.topk_idx, SHAPE.num_max_tokens, SHAPE.num_experts, return_recv_hook=True
    )
    if rank == MISSING:
        die()
    hook()  # everything it owed us was sent
    return timeout_of(lambda: dispatch(buffer, inputs, SHAPE, FP8))


def rank_never_calls(rank: int, group: dist.ProcessGroup) -> Any:
    buffer = make_buffer(group)
    result = None
    if rank != MISSING:
        result = timeout_of(lambda: dispatch(buffer, make_inputs(SHAPE)[rank], SHAPE, FP8))
    dist.barrier(group)
    return result


def rank_dies_and_the_others_destroy(rank: int, group: dist.ProcessGroup) -> Any:
    buffer = make_buffer(group, explicitly_destroy=True)
    if rank == MISSING:
        die()
    result = timeout_of(lambda: dispatch(buffer, make_inputs(SHAPE)[rank], SHAPE, FP8))
    try:
        buffer.destroy()
    except RuntimeError as error:  # destroy is collective: it may say that somebody is gone
        result["destroy"] = str(error)
    return result


def rank_dies_while_buffers_are_made(rank: int, group: dist.ProcessGroup) -> Any:
    if rank == MISSING:
        die()
    begin = time.monotonic()
    try:
        make_buffer(group)
    except RuntimeError as error:  # the group's own error: it lost a member
        return {"text": str(error), "after_s": time.monotonic() - begin}
    raise AssertionError("the buffer was made without one of its ranks")


def run_without(scenario: Callable[..., Any], victim_exit_code: int) -> list[dict[str, Any]]:
    """Runs a scenario; checks that nothing is left, and how everybody ended. Returns what the
    survivors saw.
    """
    before = shared_memory_segments()
    outcomes = run_processes(
        scenario, SHAPE.num_ranks, env={"DEEP_EP_TIMEOUT_S": str(TIMEOUT_S)}, timeout_s=60
    )
    survivors: list[Outcome] = [o for rank, o in enumerate(outcomes) if rank != MISSING]
    assert outcomes[MISSING].exit_code == victim_exit_code
    for outcome in survivors:
        assert outcome.exit_code == 0, f"{outcome.error_type}: {outcome.error}"
    assert not shared_memory_left(before)
    return [outcome.value for outcome in survivors]


@pytest.mark.parametrize(
    ("scenario", "operation", "op", "last_seen"),
    [
        (rank_dies_before_its_first_operation, "low_latency_dispatch", 1, 0),
        (rank_dies_between_operations, "low_latency_combine", 4, 3),
        (rank_dies_between_send_and_receive, "low_latency_dispatch", 2, 1),
        (rank_dies_and_the_others_destroy, "low_latency_dispatch", 1, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_killed_rank_is_named(
    scenario: Callable[..., Any], operation: str, op: int, last_seen: int
) -> None:
    for seen in run_without(scenario, victim_exit_code=-signal.SIGKILL):
        assert seen["missing"] == (MISSING,)
        assert seen["last_seen"] == {MISSING: last_seen}
        assert (seen["operation"], seen["op"]) == (operation, op)
        assert f"rank {MISSING}" in seen["text"]
        assert TIMEOUT_S <= seen["after_s"] < TIMEOUT_S + GRACE_S


def test_a_rank_that_never_calls_is_named() -> None:
    for seen in run_without(rank_never_calls, victim_exit_code=0):
        assert seen["missing"] == (MISSING,)
        assert TIMEOUT_S <= seen["after_s"] < TIMEOUT_S + GRACE_S


def test_a_rank_that_dies_while_buffers_are_made_leaves_nothing_behind() -> None:
    for seen in run_without(rank_dies_while_buffers_are_made, victim_exit_code=-signal.SIGKILL):
        assert seen["after_s"] < GRACE_S


def test_all_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "0.5")
    with ranks_for(SHAPE) as ranks:
        (error, *_) = ranks.outcomes(
            lambda rank, buffer: exchange(buffer, make_inputs(SHAPE)[rank]) if rank == 0 else None
        )
        assert type(error) is EPTimeoutError
        assert error.missing_ranks == (1, 2)
        assert error.last_seen == {1: 0, 2: 0}


@pytest.mark.parametrize("num_missed", [1, 2, 3])
def test_a_late_rank_is_told_and_joins_the_next_operation(
    num_missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others timed out in `num_missed` operations; what the late rank calls then belongs to
    none of them.
    """
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "1")
    inputs = make_inputs(SHAPE)

    def call(rank: int, buffer: deep_ep.Buffer) -> None:
        dispatch(buffer, inputs[rank], SHAPE, FP8)

    with ranks_for(SHAPE) as ranks:
        exchange_and_check(ranks, SHAPE, FP8)
        for _ in range(num_missed):
            early = ranks.outcomes(
                lambda rank, buffer: None if rank == MISSING else call(rank, buffer)
            )
            for rank in (0, 2):
                assert type(early[rank]) is EPTimeoutError
                assert early[rank].missing_ranks == (MISSING,)
        late = ranks.outcomes(lambda rank, buffer: call(rank, buffer) if rank == MISSING else None)
        assert type(late[MISSING]) is EPTransportError
        assert "ranks 0, 2 gave this operation up" in str(late[MISSING])
        for _ in range(3):
            exchange_and_check(ranks, SHAPE, FP8)


def interrupted_rank(rank: int, group: dist.ProcessGroup) -> str:
    """Rank 0 waits for one that never calls, until the user presses Ctrl-C."""
    buffer = make_buffer(group)
    group.barrier().wait()
    if rank == MISSING:
        return "never called"
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        exchange(buffer, make_inputs(SHAPE)[rank])
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="build a new Buffer"):
            exchange(buffer, make_inputs(SHAPE)[rank])
        return "interrupted"
    return "finished"


def test_ctrl_c_ends_the_wait_for_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "600")
    outcomes = run_processes(interrupted_rank, SHAPE.num_ranks, timeout_s=60)
    said = ["never called" if rank == MISSING else "interrupted" for rank in range(SHAPE.num_ranks)]
    assert [outcome.value for outcome in outcomes] == said
