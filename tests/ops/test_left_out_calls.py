"""One rank leaves a call out, in a program whose ranks meet between steps: the others name it, and the next
step is right on all ranks.

tests/explore has the property, for any fault that leaves all ranks alive; here are programs in real time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

import deep_ep
from deep_ep.errors import EPArgumentError, EPTimeoutError
from support import normal_reference
from support.exchange import (
    Exchange,
    Mode,
    Shape,
    assert_same_bytes,
    begin_dispatch,
    buffer_for,
    dispatch,
    make_inputs,
    ranks_for,
)
from support.launch import DEVICE, Ranks, raise_failures, run_processes, short_timeout_s
from support.normal_exchange import SMALL, expect, normal_ranks, run_dispatch, shape_of
from support.normal_exchange import Mode as NormalMode
from support.normal_exchange import make_inputs as make_normal_inputs

FAULTY, NUM_RANKS = 1, 3
SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=512, num_experts=6, num_topk=3)
NORMAL_SHAPE, NORMAL = shape_of((4, 0, 7), 64, 6, 2), NormalMode(weights=False)
HOOK = Mode(hook=True)

# step(rank, buffer, number of calls, whether an argument is refused): raises unless results are the reference's
Step = Callable[[int, deep_ep.Buffer, int, bool], None]


def low_latency_step(rank: int, buffer: deep_ep.Buffer, num_calls: int, refused: bool) -> None:
    exchange = Exchange(SHAPE, Mode())
    if refused:
        mine = exchange.inputs[rank]
        dispatch(buffer, mine._replace(topk_idx=mine.topk_idx.int()), SHAPE, Mode())
    elif num_calls == 1:
        exchange.dispatch(rank, buffer, f"rank {rank}")
    else:
        exchange.run(rank, buffer, f"rank {rank}")


def normal_step(rank: int, buffer: deep_ep.Buffer, num_calls: int, refused: bool) -> None:
    inputs = make_normal_inputs(NORMAL_SHAPE, NORMAL)
    mine, expected = inputs[rank], expect(inputs, NORMAL_SHAPE, NORMAL, NUM_RANKS)
    given = mine._replace(topk_weights=mine.topk_weights.double()) if refused else mine
    _, dispatched, _ = run_dispatch(buffer, given, NORMAL_SHAPE, NORMAL, SMALL)
    assert_same_bytes(dispatched[0], expected.received[rank].x, f"rank {rank}")
    if num_calls == 2:
        y, handle = expected.ys[rank], dispatched[4]
        combined = buffer.combine(y.to(DEVICE), handle, config=SMALL)[0]
        want = normal_reference.combine(
            expected.ys, expected.received, rank, len(mine.x), (), NUM_RANKS
        )
        assert_same_bytes(combined, want, f"rank {rank}, combined")


@contextmanager
def normal_group() -> Iterator[Ranks]:
    with normal_ranks(NUM_RANKS, NUM_RANKS, [SMALL], 2 * NORMAL_SHAPE.hidden) as ranks:
        yield ranks


MODES = {
    "low latency": (lambda: ranks_for(SHAPE), low_latency_step),
    "normal": (normal_group, normal_step),
}


def timeout_s(mode: str) -> str:
    """Ranks begin their calls within a quarter of that, also on a busy machine."""
    group, step = MODES[mode]
    with group() as ranks:
        return str(short_timeout_s(lambda: ranks.run(lambda rank, b: step(rank, b, 2, False)), 2.0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("refused", [False, True], ids=["step-left-out", "argument-refused"])
@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_are_right_in_the_step_after_a_call_was_left_out(
    mode: str, num_calls: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", timeout_s(mode))
    group, step = MODES[mode]

    def faulty_step(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank != FAULTY or refused:
            step(rank, buffer, num_calls, rank == FAULTY)

    with group() as ranks:
        ranks.run(lambda rank, buffer: step(rank, buffer, num_calls, False))
        outcomes = ranks.outcomes(faulty_step)  # ranks meet at the end of each step
        assert type(outcomes[FAULTY]) is (EPArgumentError if refused else type(None))
        for rank in {*range(NUM_RANKS)} - {FAULTY}:
            assert type(outcomes[rank]) is EPTimeoutError
            assert outcomes[rank].missing_ranks == (FAULTY,)
        for _ in range(2):
            ranks.run(lambda rank, buffer: step(rank, buffer, num_calls, False))


def lose_hooks(rank: int, group: dist.ProcessGroup, num_lost: int) -> list[str]:
    """Four steps; in the second one the faulty rank loses its dispatches' hooks and leaves the rest out."""
    buffer = buffer_for(SHAPE, group)
    inputs = make_inputs(SHAPE)[rank]
    seen = []
    for step in range(4):
        dist.barrier(group)
        try:
            if step == 1 and rank == FAULTY:
                for _ in range(num_lost):
                    begin_dispatch(buffer, inputs, SHAPE, HOOK)
                gc.collect()
                continue
            for _ in range(num_lost):
                low_latency_step(rank, buffer, 1, False)
            low_latency_step(rank, buffer, 2, False)
            seen.append("right")
        except EPTimeoutError as error:
            seen.append(f"{error.missing_ranks} missing")
    return seen


@pytest.mark.parametrize("num_lost", [1, 2])
@pytest.mark.filterwarnings("ignore:.*was lost before it was called")
def test_all_ranks_are_right_in_the_step_after_hooks_were_lost(num_lost: int) -> None:
    env = {"DEEP_EP_TIMEOUT_S": timeout_s("low latency")}
    outcomes = run_processes(lose_hooks, NUM_RANKS, num_lost, env=env)
    want = ["right", f"({FAULTY},) missing", "right", "right"]
    for rank, seen in enumerate(raise_failures(outcomes)):
        assert seen == (["right", "right", "right"] if rank == FAULTY else want)
