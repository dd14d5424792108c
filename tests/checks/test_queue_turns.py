"""What is said of queues whose few slots slow normal operations down, and when nothing is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import deep_ep
from deep_ep.base.rules import NORMAL_COMBINE, NORMAL_DISPATCH
from deep_ep.base.topology import Topology
from deep_ep.checks import normal as normal_checks
from deep_ep.checks.arguments import Limits
from deep_ep.checks.normal import NormalShape
from deep_ep.checks.queue_turns import QueueTurns
from deep_ep.native import backend
from deep_ep.types import config
from support.launch import Ranks
from support.normal_exchange import (
    Mode,
    expect,
    hidden_bytes_of,
    make_inputs,
    normal_ranks,
    run_exchange,
    shape_of,
)

NUM_RANKS, NUM_TOKENS = 4, 160
# Every token goes to every rank, so each queue of the two channels takes 80 rows.
SHAPE = shape_of((NUM_TOKENS,) * NUM_RANKS, 64, NUM_RANKS, NUM_RANKS, dropped=0.0)
MODE = Mode(combine_hidden=64)
NUM_CHANNELS = 2
NARROW = deep_ep.Config(2 * NUM_CHANNELS, 2, 8, 2, 4)
WIDE = deep_ep.Config(2 * NUM_CHANNELS, 6, 256, 6, 128)


NVL = "80 rows for each NVLink queue of {} slots, in {} turns"
RDMA = "80 rows for each RDMA queue of 4 slots, in 20 turns"
NVL_FIELD, RDMA_FIELD = "num_max_nvl_chunked_recv_tokens", "num_max_rdma_chunked_recv_tokens"


def exchange(
    ranks: Ranks, ranks_per_node: int, settings: deep_ep.Config, mode: Mode = MODE
) -> None:
    """On all ranks: a dispatch, another one with its handle, a combine."""
    inputs = make_inputs(SHAPE, mode)
    expected = expect(inputs, SHAPE, mode, ranks_per_node)
    ranks.run(
        lambda rank, buffer: run_exchange(buffer, inputs[rank], expected, SHAPE, mode, settings)
    )


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Since the last time."""
    lines = [record.getMessage() for record in caplog.records if "slots" in record.getMessage()]
    caplog.clear()
    return lines


def advised(line: str, settings: deep_ep.Config) -> deep_ep.Config:
    """The settings that a remark says to set instead."""
    values = re.findall(r"(num_max_\w+)=(\d+)", line.split("; ")[1])
    return replace(settings, **{field: int(value) for field, value in values})


@pytest.mark.parametrize(
    ("ranks_per_node", "found", "given"),
    [
        (4, NVL.format(8, 10), f"{NVL_FIELD}=8"),
        (2, f"{NVL.format(4, 20)} and {RDMA}", f"{NVL_FIELD}=8, {RDMA_FIELD}=4"),
    ],
)
def test_few_slots_are_said_once_for_each_kind_of_operation_with_what_to_set(
    ranks_per_node: int, found: str, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    row_bytes = hidden_bytes_of(SHAPE, MODE)
    with normal_ranks(NUM_RANKS, ranks_per_node, [NARROW, WIDE], row_bytes) as ranks:
        exchange(ranks, ranks_per_node, NARROW)
        lines = said(caplog)
        for call, line in zip(("dispatch", "combine"), lines, strict=True):
            assert line.startswith(f"deep_ep: {call}: {found}. ")
            assert f"The Config that it was given has {given}; the buffer has room for" in line
        exchange(ranks, ranks_per_node, NARROW)
        assert not said(caplog)
    with normal_ranks(NUM_RANKS, ranks_per_node, [NARROW, WIDE], row_bytes) as ranks:
        exchange(ranks, ranks_per_node, advised(lines[0], NARROW))
        assert not said(caplog)


@pytest.mark.parametrize(
    ("settings", "num_rows"),
    [
        (replace(NARROW, num_max_nvl_chunked_recv_tokens=17), 80),
        (replace(NARROW, num_max_nvl_chunked_recv_tokens=16), 48),
    ],
    ids=["slots enough", "few turns"],
)
def test_nothing_is_said_where_it_costs_nothing(
    settings: deep_ep.Config, num_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    one_node = Topology(0, NUM_RANKS, NUM_RANKS)
    shape = NormalShape(NUM_TOKENS, 128, 0, 0, NUM_RANKS, settings)
    turns = QueueTurns(limits_of(10**9, 0, NUM_RANKS), one_node)
    turns.look(NORMAL_DISPATCH, shape, num_rows * NUM_RANKS * NUM_CHANNELS, 0)
    assert not said(caplog)


def test_where_rows_are_not_known_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with normal_ranks(NUM_RANKS, 2, [NARROW, WIDE], hidden_bytes_of(SHAPE, MODE)) as ranks:
        exchange(ranks, 2, NARROW, replace(MODE, spare_rows=0))
        assert not said(caplog)


def limits_of(num_nvl_bytes: int, num_rdma_bytes: int, num_ranks: int) -> Limits:
    binding = backend.get().binding
    return Limits(num_ranks, num_rdma_bytes, torch.device("cpu"), binding, num_nvl_bytes)


@pytest.mark.parametrize("room", [0, 10, 100])
@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_what_is_advised_fits_the_buffer_that_there_is_or_that_is_advised(
    ranks_per_node: int, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`room`: for as many times the slots that there are."""
    place = Topology(0, NUM_RANKS, ranks_per_node)
    shape = NormalShape(NUM_TOKENS, 14336, 8, 0, NUM_RANKS, NARROW)
    least = normal_checks.num_bytes(
        *(backend.get().binding, NUM_RANKS, ranks_per_node, NARROW, 14336, 8, 0)
    )
    limits = limits_of(*(max(1, room) * size for size in least), NUM_RANKS)
    QueueTurns(limits, place).look(NORMAL_COMBINE, shape, 10_000, 10_000)
    [line] = said(caplog)
    wider = replace(shape, config=advised(line, NARROW))
    larger = dict(re.findall(r"(num_nvl_bytes|num_rdma_bytes)=(\d+)", line))
    assert bool(larger) == (room == 0)
    if larger:
        sizes = int(larger["num_nvl_bytes"]), int(larger["num_rdma_bytes"])
        limits = limits_of(*sizes, NUM_RANKS)
    normal_checks.buffer_size(NORMAL_COMBINE, wider, place, limits)
    QueueTurns(limits, place).look(NORMAL_COMBINE, wider, 10_000, 10_000)
    assert not said(caplog)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_it_for_all(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    shape = NormalShape(NUM_TOKENS, 128, 0, 0, NUM_RANKS, NARROW)
    turns = QueueTurns(limits_of(10**9, 0, NUM_RANKS), Topology(rank, NUM_RANKS, NUM_RANKS))
    turns.look(NORMAL_DISPATCH, shape, 10_000, 0)
    assert len(said(caplog)) == (rank == 0)


@pytest.mark.parametrize("num_tokens", [4096, 65536])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160])
def test_the_recommended_configurations_are_no_cause_for_a_remark(
    num_ranks: int, num_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever gets every token of all ranks, as a rank with the hottest experts does."""
    place = Topology(0, num_ranks, min(num_ranks, 8))
    turns = QueueTurns(limits_of(0, 0, num_ranks), place)
    relayed = num_tokens * (place.num_nodes - 1)
    for call, recommend in (
        (NORMAL_DISPATCH, config.recommended_dispatch),
        (NORMAL_COMBINE, config.recommended_combine),
    ):
        shape = NormalShape(num_tokens, 14336, 8, 0, 2 * num_ranks, recommend(num_ranks, 20))
        turns.look(call, shape, num_tokens * num_ranks, relayed)
    assert not said(caplog)
