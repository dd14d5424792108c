"""Sizes that change between calls on one buffer: every result is right, or an error names the ranks.

Ranks run ahead of each other here: each goes through its list of exchanges by itself, and nobody
waits for the others in between.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from deep_ep.errors import EPArgumentError
from support.exchange import (
    Exchange,
    Mode,
    Shape,
    assert_received_one,
    begin_dispatch,
    dispatch,
    finish,
    make_inputs,
    ranks_for,
)
from support.launch import HANG_S

BASE = Shape(
    (17, 3, 16, 9, 0, 17, 11, 5),
    num_max_tokens=17,
    hidden=512,
    num_experts=16,
    num_topk=4,
    routing="random",
)
MODES = [Mode(use_fp8=True), Mode(), Mode(use_logfmt=True), Mode(hook=True), Mode(zero_copy=True)]
SMALLER = {
    "tokens": replace(BASE, num_tokens=(16, 3, 16, 9, 0, 16, 11, 5), num_max_tokens=16),
    "experts": replace(BASE, num_experts=8),
    "hidden": replace(BASE, hidden=384),
}


@pytest.mark.parametrize("what", SMALLER)
@pytest.mark.parametrize("cleans", [False, True], ids=["", "cleaned-between"])
def test_sizes_may_change_between_calls(what: str, cleans: bool) -> None:
    exchanges = [
        Exchange(replace(shape, seed=number), MODES[number % len(MODES)])
        for number in range(8)
        for shape in (BASE, SMALLER[what])
    ]

    def run(rank: int, buffer: Any) -> None:
        for number in range(40):
            exchange = exchanges[number % len(exchanges)]
            if cleans and number % 5 == 0:
                shape = exchange.shape
                buffer.clean_low_latency_buffer(
                    shape.num_max_tokens, shape.hidden, shape.num_experts
                )
            exchange.run(rank, buffer, f"rank {rank}, exchange {number}")

    with ranks_for(BASE) as ranks:
        ranks.run(run)


def test_the_next_combine_buffer_leaves_rows_of_other_sizes_alone() -> None:
    """A batch of smaller rows has arrived, and is not received, while a larger one is filled in."""
    large, small = Exchange(BASE, Mode()), Exchange(SMALLER["hidden"], Mode(hook=True))
    all_have_sent = threading.Barrier(BASE.num_ranks)

    def run(rank: int, buffer: Any) -> None:
        for number in range(2):  # the buffer has two halves
            handle = large.dispatch(rank, buffer, f"rank {rank}").handle
            received, event, hook = begin_dispatch(
                buffer, small.inputs[rank], small.shape, small.mode
            )
            all_have_sent.wait(HANG_S)
            buffer.get_next_low_latency_combine_buffer(handle).fill_(-1)
            finish(small.mode, event, hook)
            where = f"rank {rank}, time {number}"
            assert_received_one(received, small.dispatched[rank], small.shape, small.mode, where)
            large.run(rank, buffer, where)

    with ranks_for(BASE) as ranks:
        ranks.run(run)


def test_the_next_combine_buffer_waits_for_no_rows_of_the_same_sizes() -> None:
    """The caller fills it while another batch is on its way."""
    first, second = Exchange(BASE, Mode()), Exchange(BASE, Mode(hook=True))
    others_may_send = threading.Event()

    def run(rank: int, buffer: Any) -> None:
        handle = first.dispatch(rank, buffer, f"rank {rank}").handle
        if rank:
            assert others_may_send.wait(HANG_S)
        received, event, hook = begin_dispatch(
            buffer, second.inputs[rank], second.shape, second.mode
        )
        buffer.get_next_low_latency_combine_buffer(handle)
        others_may_send.set()
        finish(second.mode, event, hook)
        where = f"rank {rank}"
        assert_received_one(received, second.dispatched[rank], second.shape, second.mode, where)

    with ranks_for(BASE) as ranks:
        ranks.run(run)


@pytest.mark.parametrize("what", SMALLER)
def test_a_rank_alone_with_other_sizes_is_named_and_harms_nobody(what: str) -> None:
    """It disagrees in a dispatch, while others may still read what the combine before brought."""
    exchange = Exchange(BASE, Mode(use_fp8=True))
    other = make_inputs(SMALLER[what])
    odd = 2

    def run(rank: int, buffer: Any) -> None:
        for number in range(12):
            exchange.run(rank, buffer, f"rank {rank}, exchange {number}")
            inputs, shape = (
                (other, SMALLER[what]) if rank == odd else (exchange.inputs, exchange.shape)
            )
            with pytest.raises(EPArgumentError, match=f"rank {odd}|ranks 0-1, 3-7"):
                dispatch(buffer, inputs[rank], shape, exchange.mode)

    with ranks_for(BASE) as ranks:
        ranks.run(run)
