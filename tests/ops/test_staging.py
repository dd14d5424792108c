"""What an operation has staged stays as it is until its puts have read it, though the rank is in the next one.

In the simulation a put to another node reads its source when it arrives, as a NIC may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

import deep_ep

if deep_ep.native.backend.get().name != "cpu":
    pytest.skip("the simulation is of the cpu backend", allow_module_level=True)

from explore.machine import Machine, SimulatedGroup
from explore.program import Pace
from support.exchange import (
    Mode,
    Received,
    Shape,
    assert_received_one,
    assert_same_bytes,
    buffer_for,
    combine,
    dispatch,
    expected_combine,
    expected_dispatch,
    expected_experts,
    experts,
    make_inputs,
)

US = 1_000
SHAPE = Shape((8, 8, 8), num_max_tokens=8, hidden=256, num_experts=6, num_topk=3)
SHAPES = [replace(SHAPE, seed=seed) for seed in range(2)]
SLOW_NS = 5_000 * US
T = TypeVar("T")


def run_with_a_slow_path(calls: Callable[[deep_ep.Buffer, Callable[[], None]], T]) -> list[T]:
    """What calls(buffer, slow) returns on each rank; from slow() on, what rank 0 sends to rank 2 comes late."""
    machine = Machine(SHAPE.num_ranks, 1, Pace(1 << 30, 0, 20 * US, 20 * US), seed=1)

    def run(rank: int) -> T:
        buffer = buffer_for(SHAPE, SimulatedGroup(machine, rank, 1.0))

        def slow() -> None:
            assert buffer.runtime is not None
            if rank == 0:
                buffer.runtime.native.set_path_fault(dst=2, delay_ns=SLOW_NS, bytes_per_s=0.0)

        result = calls(buffer, slow)
        machine.meet("end", 0, rank, None)  # what is on its way would be lost with its sender
        return result

    return machine.results(run)


@pytest.mark.parametrize("mode", [Mode(), Mode(use_fp8=True)], ids=str)
def test_a_dispatch_leaves_what_the_one_before_has_staged(mode: Mode) -> None:
    """Rank 0 has all that it needs for the next dispatch while its rows are still on their way to rank 2."""
    inputs = [make_inputs(shape) for shape in SHAPES]

    def calls(buffer: deep_ep.Buffer, slow: Callable[[], None]) -> list[Received]:
        slow()
        return [
            dispatch(buffer, one[buffer.rank], shape, mode) for one, shape in zip(inputs, SHAPES)
        ]

    seen = run_with_a_slow_path(calls)
    for number, shape in enumerate(SHAPES):
        expected = expected_dispatch(inputs[number], shape, mode)
        for rank, received in enumerate(seen):
            where = f"dispatch {number}, rank {rank}"
            assert_received_one(received[number], expected[rank], shape, mode, where)


@pytest.mark.parametrize("mode", [Mode(), Mode(zero_copy=True)], ids=str)
def test_a_combine_leaves_what_the_one_before_has_staged(mode: Mode) -> None:
    """The second one returns nothing but zeros."""
    inputs = make_inputs(SHAPE)

    def calls(buffer: deep_ep.Buffer, slow: Callable[[], None]) -> list[torch.Tensor]:
        own = inputs[buffer.rank]
        received = dispatch(buffer, own, SHAPE, mode)
        slow()
        ys = experts(received, buffer.rank)
        zeros = [torch.zeros_like(y) for y in ys]
        return [combine(buffer, own, received.handle, each, mode) for each in (ys, zeros)]

    dispatched = expected_dispatch(inputs, SHAPE, mode)
    expected = expected_combine(inputs, expected_experts(dispatched), dispatched)
    for rank, (first, second) in enumerate(run_with_a_slow_path(calls)):
        assert_same_bytes(first, expected[rank], f"combine, rank {rank}")
        assert not second.any()
