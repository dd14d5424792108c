"""Ranks that are processes of one GPU: memory over CUDA IPC, kernels in turn, or at once with MPS.

On the cpu backend they run as well, over shared memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import deep_ep
from support import normal_exchange as normal
from support.exchange import Mode, Shape, buffer_for, dispatch, make_inputs
from support.launch import raise_failures, run_processes
from support.low_latency_cases import exchange_in_process
from support.missing_rank import MISSING, TIMEOUT_S, die, run_without, timeout_of

ENV = {"DEEP_EP_TIMEOUT_S": "60"}  # kernels of all ranks take turns


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_low_latency_equals_the_reference(num_ranks: int) -> None:
    tokens = tuple(range(5, 5 + num_ranks))
    shape = Shape(tokens, num_max_tokens=8, hidden=1024, num_experts=4 * num_ranks, num_topk=4)
    modes = ["fp8", "bf16-zero-copy-hook"]
    raise_failures(run_processes(exchange_in_process, num_ranks, shape, modes, env=ENV))


def exchange_normally(rank: int, group: dist.ProcessGroup, num_ranks: int) -> None:
    """One rank: fresh, with a handle, combine."""
    shape, mode = normal.shape_of([9, 0, 20, 13][:num_ranks], 512, 4 * num_ranks, 3), normal.Mode()
    inputs = normal.make_inputs(shape, mode)
    expected = normal.expect(inputs, shape, mode, num_ranks)
    buffer = deep_ep.Buffer(group, 1 << 22, 0, explicitly_destroy=True)
    for _ in range(2):
        got = normal.run_exchange(buffer, inputs[rank], expected, shape, mode, normal.SMALL)
        normal.assert_outputs(got, rank, inputs[rank], expected, shape, mode, normal.SMALL)
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_normal_mode_equals_the_reference(num_ranks: int) -> None:
    raise_failures(run_processes(exchange_normally, num_ranks, num_ranks, env=ENV))


SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=512, num_experts=6, num_topk=3)


def one_dies(rank: int, group: dist.ProcessGroup) -> Any:
    """What the others are told of it."""
    buffer = buffer_for(SHAPE, group)
    inputs = make_inputs(SHAPE)[rank]

    def call() -> None:
        dispatch(buffer, inputs, SHAPE, Mode())
        deep_ep.native.backend.get().current_stream().synchronize()
        buffer.communicator.raise_failure()

    call()
    if rank == MISSING:
        die()
    return timeout_of(call)


def test_a_rank_that_is_killed_is_named() -> None:
    for seen in run_without(one_dies, SHAPE.num_ranks, -9, 10 * TIMEOUT_S):
        assert seen["missing"] == (MISSING,)
