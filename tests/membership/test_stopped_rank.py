"""A rank that is stopped (SIGSTOP) at any moment, while the others time out and try again: what it
returns when it goes on is right, or an error.

Every exchange has inputs of its own, and rows say for which operation they were meant, so rows of another one
show. Rows are not verified here: the protocol itself must keep what a stopped rank still reads.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from deep_ep.errors import EPError
from support.exchange import Inputs, Mode, Received, Shape, buffer_for, dispatch, make_inputs
from support.launch import HANG_S, raise_failures, run_processes

SHAPE = Shape((192, 192, 192), num_max_tokens=192, hidden=7168, num_experts=6, num_topk=3)
# Each has inputs of its own; of other sizes, its rows lie across what the operation before received.
SHAPES = {
    "one size": [replace(SHAPE, seed=seed) for seed in range(3)],
    "changing sizes": [
        replace(SHAPE, num_tokens=(most,) * 3, num_max_tokens=most) for most in (192, 160, 176)
    ],
}
MODE = Mode()
STOPPED = 1
# The first in which healthy ranks are done, on a machine as busy as it is.
TIMEOUTS_S = (0.3, 1.0, 4.0)
LONGER = 3.5  # than the timeout a stop lasts
NUM_STOPS = 8
# What the first value of a row counts up to, exact in BF16; and how many operations the others may have given up
# between a rank's look at the number and its call.
MARKS, MOST_BEHIND = 128, 4

pytestmark = pytest.mark.skipif(
    deep_ep.native.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
)


def stop_now_and_then(process: int, stop_s: float) -> None:
    """Stops a process for longer than the others wait, at random moments."""
    moments = random.Random(1)
    for _ in range(NUM_STOPS):
        time.sleep(moments.uniform(0.05, 0.15))
        os.kill(process, signal.SIGSTOP)
        time.sleep(stop_s)
        os.kill(process, signal.SIGCONT)


def check(received: Received, rank: int, op: int, inputs: list[list[Inputs]]) -> None:
    """All rows of a source are those that it sent in this operation, whichever it had thought to call."""
    num_local_experts = SHAPE.num_local_experts
    for source in range(SHAPE.num_ranks):
        ranges = [divmod(one, 1 << 32) for one in received.handle[1][:, source].tolist()]
        rows = [
            rows[begin : begin + count] for rows, (begin, count) in zip(received.recv_x, ranges)
        ]
        (mark,) = torch.cat(rows)[:, 0].unique().int().tolist()
        behind = (op - mark) % MARKS
        assert behind <= MOST_BEHIND, (
            f"rank {rank}, operation {op}: rows of rank {source} for {mark}"
        )
        sent = inputs[(op - behind) % len(inputs)][source]
        for i, got in enumerate(rows):
            expert = rank * num_local_experts + i
            want = sent.x[(sent.topk_idx == expert).any(1)]
            assert torch.equal(got[:, 1:], want[:, 1:])


def dispatch_all_the_time(
    rank: int, group: dist.ProcessGroup, shapes: list[Shape], stop_s: float
) -> tuple[int, int]:
    """Dispatches until the stops are over; returns how many dispatches were right, and failed."""
    inputs = [make_inputs(shape) for shape in shapes]
    buffer = buffer_for(SHAPE, group)
    ids: list[Any] = [None] * SHAPE.num_ranks
    dist.all_gather_object(ids, os.getpid(), group=group)
    stopping = ids[STOPPED], stop_s
    stopper = threading.Thread(target=stop_now_and_then, args=stopping, daemon=True)
    if rank == 0:
        stopper.start()
    end = time.monotonic() + NUM_STOPS * (stop_s + 0.15)
    num_right = num_failed = 0
    while time.monotonic() < end:
        # The number chooses the inputs, so that ranks agree again after some have missed operations.
        number = buffer.runtime.operation() + 1
        mine = inputs[number % len(shapes)][rank]
        mine.x[:, 0] = number % MARKS
        try:
            received = dispatch(buffer, mine, shapes[number % len(shapes)], MODE)
        except EPError:
            num_failed += 1
            continue
        check(received, rank, buffer.runtime.native.entered_operation(), inputs)
        num_right += 1
    return num_right, num_failed


@pytest.mark.exhaustive
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_rank_that_was_stopped_returns_nothing_of_a_later_operation(shapes: list[Shape]) -> None:
    for timeout_s in TIMEOUTS_S:
        outcomes = run_processes(
            dispatch_all_the_time,
            SHAPE.num_ranks,
            shapes,
            LONGER * timeout_s,
            env={"DEEP_EP_TIMEOUT_S": str(timeout_s), "DEEP_EP_VERIFY": "0"},
            timeout_s=2 * HANG_S,
        )
        num_right, num_failed = zip(*raise_failures(outcomes))
        # One rank may come through: it was stopped between two calls, or had all rows before.
        if min(num_right) > 0 and sum(num_failed) > 0:
            return
    pytest.fail(f"right {num_right}, failed {num_failed}")
