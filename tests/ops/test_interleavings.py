"""Seeded random interleavings: order of fibers, of deliveries, shape of launch change nothing.

Each seed runs two exchanges (so that both halves of the double buffer are used) with the fibers of
every kernel scheduled at random, and puts that no fence orders delivered at random. Repeat one seed
with

    pytest tests/ops/test_interleavings.py --schedule-seed 118
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import deep_ep
from support.exchange import Mode, Shape, exchange_and_check, ranks_for

# Every shape in every mode, in both places, and in three launch shapes.
NUM_SEEDS = 90

SHAPES = [
    Shape((3, 2), num_max_tokens=3, hidden=256, num_experts=4, num_topk=2),
    Shape((2, 0, 4), num_max_tokens=4, hidden=128, num_experts=6, num_topk=3),
    Shape((1, 5, 2, 5), num_max_tokens=5, hidden=512, num_experts=8, num_topk=4, dropped=0.3),
    Shape((4, 4), num_max_tokens=4, hidden=128, num_experts=2, num_topk=2, routing="repeats"),
    Shape((6,), num_max_tokens=6, hidden=384, num_experts=3, num_topk=2),
    Shape((4, 4, 4), num_max_tokens=4, hidden=128, num_experts=3, num_topk=1, routing="one-expert"),
]
MODES = [
    Mode(use_fp8=True),
    Mode(),
    Mode(use_fp8=True, round_scale=True, use_ue8m0=True, hook=True),
    Mode(zero_copy=True, hook=True),
    Mode(use_logfmt=True),
]
# Blocks and warps per block; (0, 0) is the automatic choice.
LAUNCH_SHAPES = [(0, 0), (1, 2), (2, 4), (3, 3), (5, 8), (4, 16)]

pytestmark = pytest.mark.skipif(
    deep_ep.native.backend.get().name != "cpu", reason="schedules are a feature of the host target"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule_seed" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--schedule-seed")
        seeds = range(NUM_SEEDS) if wanted is None else [wanted]
        metafunc.parametrize("schedule_seed", seeds)


def test_any_schedule_and_delivery_order_gives_the_reference(
    schedule_seed: int, replay: Callable[..., None]
) -> None:
    replay("--schedule-seed", schedule_seed)
    shape = replace(SHAPES[schedule_seed % len(SHAPES)], seed=schedule_seed)
    mode = MODES[schedule_seed % len(MODES)]
    blocks, warps = LAUNCH_SHAPES[schedule_seed // 3 % len(LAUNCH_SHAPES)]

    def disturb(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.runtime.set_schedule(policy="random", seed=schedule_seed * 100 + rank)
        buffer.runtime.set_delivery(policy="random", seed=schedule_seed * 100 + 50 + rank)
        buffer.runtime.set_launch_shape(blocks=blocks, warps=warps)

    # Half of the seeds cross between "nodes", where puts travel on queue pairs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_EP_RANKS_PER_NODE", "1" if schedule_seed % 2 else str(shape.num_ranks))
        with ranks_for(shape) as ranks:
            ranks.run(disturb)
            exchange_and_check(ranks, shape, mode)
            exchange_and_check(ranks, replace(shape, seed=schedule_seed + 1), mode)
