"""A rank that is stopped (SIGSTOP) at any moment, while the others time out and try again: what it
returns when it goes on is right, or an error.

Every exchange has inputs of its own, so rows of another one show. Rows are not verified here: the
protocol itself must keep what a stopped rank still reads.
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
from exchange import (
    Mode,
    Shape,
    dispatch,
    expected_dispatch,
    make_inputs,
)
from launch import raise_failures, run_processes

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
TIMEOUT_S = 0.3
STOP_S = 3.5 * TIMEOUT_S
NUM_STOPS = 8

pytestmark = pytest.mark.skipif(
    deep_ep.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
)


def stop_now_and_then(process: int) -> None:
    """Stops a process for longer than the others wait, at random moments."""
    moments = random.Random(1)
    for _ in range(NUM_STOPS):
        time.sleep(moments.uniform(0.05, 0.15))
        os.kill(process, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(process, signal.SIGCONT)


def dispatch_all_the_time(
    rank: int, group: dist.ProcessGroup, shapes: list[Shape]
) -> tuple[int, int]:
    """Dispatches until the stops are over; returns how many dispatches were right, and failed."""
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        SHAPE.num_max_tokens, SHAPE.hidden, SHAPE.num_ranks, SHAPE.num_experts
    )
    inputs = [make_inputs(shape)[rank] for shape in shapes]
    expected = [expected_dispatch(make_inputs(shape), shape, MODE)[rank] for shape in shapes]
    buffer = deep_ep.Buffer(group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=2)
    ids: list[Any] = [None] * SHAPE.num_ranks
    dist.all_gather_object(ids, os.getpid(), group=group)
    stopper = threading.Thread(target=stop_now_and_then, args=(ids[STOPPED],), daemon=True)
    if rank == 0:
        stopper.start()
    end = time.monotonic() + NUM_STOPS * (STOP_S + 0.15)
    num_right = num_failed = 0
    while time.monotonic() < end:
        # The number chooses the inputs, so that ranks agree again after some have missed operations.
        which = (buffer.runtime.operation() + 1) % len(shapes)
        try:
            received = dispatch(buffer, inputs[which], shapes[which], MODE)
        except EPError:
            num_failed += 1
            continue
        # Not assert_received_one(): the more of its time a rank copies, the more stops hit a copy.
        for rows, want in zip(received.recv_x, expected[which].data):
            assert torch.equal(rows[: len(want)].view(torch.int16), want.view(torch.int16))
        num_right += 1
    return num_right, num_failed


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_rank_that_was_stopped_returns_nothing_of_a_later_operation(shapes: list[Shape]) -> None:
    outcomes = run_processes(
        dispatch_all_the_time,
        SHAPE.num_ranks,
        shapes,
        env={"DEEP_EP_TIMEOUT_S": str(TIMEOUT_S), "DEEP_EP_VERIFY": "0"},
    )
    for num_right, num_failed in raise_failures(outcomes):
        assert num_right > 0
        assert num_failed > 0
