"""Ranks that are processes of one GPU: memory over CUDA IPC, kernels in turn, or at once with MPS.

On the cpu backend they run as well, over shared memory.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import deep_ep
from support import normal_exchange as normal
from support.exchange import Mode, Shape, buffer_for, dispatch, make_inputs
from support.launch import raise_failures, run_processes
from support.low_latency_cases import exchange_in_process
from support.missing_rank import MISSING, TIMEOUT_S, die, run_without, timeout_of

ENV = {"DEEP_EP_TIMEOUT_S": "60"}  # kernels of all ranks take turns


def test_low_latency_equals_the_reference() -> None:
    shape = Shape((5, 6, 7, 8), num_max_tokens=8, hidden=1024, num_experts=16, num_topk=4)
    modes = ["fp8", "bf16-zero-copy-hook"]
    raise_failures(run_processes(exchange_in_process, 4, shape, modes, env=ENV))


def exchange_normally(rank: int, group: dist.ProcessGroup) -> None:
    """One rank: fresh, with a handle, combine."""
    shape, mode = normal.shape_of([9, 0, 20, 13], 512, 16, 3), normal.Mode()
    expected = normal.expect(normal.make_inputs(shape, mode), shape, mode, 4)
    buffer = deep_ep.Buffer(group, 1 << 22, 0, explicitly_destroy=True)
    for _ in range(2):
        got = normal.run_exchange(buffer, expected, normal.SMALL)
        normal.assert_outputs(got, rank, expected, normal.SMALL)
    buffer.destroy()


def test_normal_mode_equals_the_reference() -> None:
    raise_failures(run_processes(exchange_normally, 4, env=ENV))


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
