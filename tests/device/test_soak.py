"""Both modes, mixed, for long: rows verify themselves, buffers come and go, and nothing is left of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deep_ep
from support import exchange
from support import normal_exchange as normal
from support.launch import DEVICE, Held, assert_no_more_held

# Rounds of both modes: a minute or two on a GPU, where hosts of all ranks share an interpreter.
NUM_ROUNDS = 4_000 if DEVICE == "cuda" else 60
NUM_BUFFERS = 50
# Results are compared in every so many.
CHECKED = 100 if DEVICE == "cuda" else 10

LOW = exchange.Shape((4, 3, 0, 2), num_max_tokens=4, hidden=512, num_experts=8, num_topk=3)
NORMAL = normal.shape_of([30, 7, 0, 21], 512, 16, 4)
MODES = [exchange.Mode(), exchange.Mode(use_fp8=True), exchange.Mode(hook=True)]


def device_memory_free() -> int:
    """Bytes, with what torch keeps for later given back."""
    if DEVICE != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def test_both_modes_mixed_go_on_for_long() -> None:
    low, plain = exchange.make_inputs(LOW), normal.Mode()
    expected = normal.expect(normal.make_inputs(NORMAL, plain), NORMAL, plain, 4)
    with (
        exchange.ranks_for(LOW) as ranks,
        normal.normal_ranks(4, 4, [normal.SMALL], 2048) as others,
    ):
        for number in range(0, NUM_ROUNDS, CHECKED):
            seed, mode = number // CHECKED, MODES[number // CHECKED % len(MODES)]

            def unchecked(rank: int, buffer: deep_ep.Buffer, mode: exchange.Mode = mode) -> None:
                for _ in range(CHECKED - 1):
                    exchange.round_trip(buffer, low[rank], LOW, mode)
                    normal.run_exchange(others.buffers[rank], expected, normal.SMALL)

            ranks.run(unchecked)
            exchange.exchange_and_check(ranks, replace(LOW, seed=seed), mode)
            normal.exchange_and_check(others, replace(NORMAL, seed=seed), plain, normal.SMALL, 4)


@pytest.mark.exhaustive
def test_buffers_that_come_and_go_leave_neither_memory_nor_descriptors() -> None:
    def live(times: int) -> tuple[Held, int]:
        for seed in range(times):
            with (
                exchange.ranks_for(LOW) as ranks,
                normal.normal_ranks(4, 4, [normal.SMALL], 2048) as others,
            ):
                exchange.exchange_and_check(ranks, replace(LOW, seed=seed), MODES[0])
                normal.exchange_and_check(others, NORMAL, normal.Mode(), normal.SMALL, 4)
        return Held.now(), device_memory_free()

    warm, free = live(10)
    later, free_later = live(NUM_BUFFERS - 10)
    assert_no_more_held(later, warm)
    # Less than one buffer of each of the others would have kept.
    assert free - free_later < (NUM_BUFFERS - 10) << 20
