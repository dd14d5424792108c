"""A rank that is killed or ended in the middle of normal operations, on one node and on two: the others
agree on it in time, and go on without it or with another one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import deep_ep
from deep_ep.errors import EPRankGoneError
from deep_ep.ops import normal
from support.missing_rank import (
    MISSING,
    NEVER_S,
    all_alike,
    die,
    run_without,
    timeout_of,
)
from support.normal_exchange import (
    SMALL,
    Expected,
    Inputs,
    Mode,
    assert_outputs,
    expect,
    make_inputs,
    run_combine,
    run_dispatch,
    run_exchange,
    shape_of,
)

NUM_RANKS = 4
OTHERS = tuple(rank for rank in range(NUM_RANKS) if rank != MISSING)
# For which the queues of SMALL are short.
NUM_TOKENS = (40, 33, 28, 36)
HIDDEN = 64
MODE = Mode()

pytestmark = [
    pytest.mark.skipif(
        deep_ep.native.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
    ),
    pytest.mark.filterwarnings("ignore:destroy on rank"),
]
on_nodes = pytest.mark.parametrize("ranks_per_node", [4, 2], ids=["one-node", "two-nodes"])


class Rank:
    """One rank that is a process: its buffer, and an exchange of which it knows the results."""

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(ranks_per_node)
        self.shape = shape_of(NUM_TOKENS[: group.size()], HIDDEN, 3 * group.size(), 3)
        row_bytes, num_ranks = 2 * HIDDEN, group.size()
        self.buffer = deep_ep.Buffer(
            group,
            SMALL.get_nvl_buffer_size_hint(row_bytes, num_ranks),
            SMALL.get_rdma_buffer_size_hint(row_bytes, num_ranks),
            explicitly_destroy=True,
        )
        inputs = make_inputs(self.shape, MODE)
        self.expected: Expected = expect(inputs, self.shape, MODE, ranks_per_node)
        self.inputs: Inputs = inputs[group.rank()]

    def exchange(self) -> None:
        """Layout, dispatch, cached dispatch and combine."""
        outputs = run_exchange(self.buffer, self.expected, SMALL)
        assert_outputs(outputs, self.buffer.rank, self.expected, SMALL)

    def exchange_for_ever(self) -> None:
        while True:
            self.exchange()

    def dispatch(self) -> Any:
        """The handle."""
        return run_dispatch(self.buffer, self.inputs, self.shape, MODE, SMALL)[1][4]

    def combine(self, handle: Any) -> None:
        y = self.expected.ys[self.buffer.rank]
        run_combine(self.buffer, y, handle, (), None, MODE, SMALL)


# --- killed ---------------------------------------------------------------------------------------


def rank_dies_while_rows_travel(rank: int, group: dist.ProcessGroup, ranks_per_node: int) -> Any:
    """At whatever moment of many exchanges it is."""
    this = Rank(group, ranks_per_node)
    this.exchange()
    if rank == MISSING:
        threading.Timer(0.1, die).start()
    return timeout_of(this.exchange_for_ever)


def rank_dies_before_its_rows(rank: int, group: dist.ProcessGroup, ranks_per_node: int) -> Any:
    """It has told how many rows it will send."""
    this = Rank(group, ranks_per_node)
    if rank == MISSING:
        normal.Normal._new_received = lambda *_: die()  # type: ignore[assignment]
    return timeout_of(this.dispatch)


def rank_dies_before_combine(rank: int, group: dist.ProcessGroup, ranks_per_node: int) -> Any:
    this = Rank(group, ranks_per_node)
    handle = this.dispatch()
    if rank == MISSING:
        die()
    return timeout_of(lambda: this.combine(handle))


@on_nodes
@pytest.mark.parametrize(
    ("scenario", "operation", "op"),
    [
        (rank_dies_while_rows_travel, None, None),
        (rank_dies_before_its_rows, "dispatch", 1),
        (rank_dies_before_combine, "combine", 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_killed_rank_is_named(
    scenario: Callable[..., Any], operation: str | None, op: int | None, ranks_per_node: int
) -> None:
    seen = run_without(scenario, NUM_RANKS, -signal.SIGKILL, NEVER_S, ranks_per_node)
    for one in seen:
        assert one["dead"] == (MISSING,)
        # Who is one operation ahead may hear first that another one has ended because of it.
        assert set(one["missing"]) - set(one["left"]) == {MISSING}
        assert one["type"] is EPRankGoneError
        assert f"rank {MISSING} is dead" in one["text"]
        assert operation in (None, one["operation"])
        assert op in (None, one["op"])


def rank_dies_and_the_others_build_anew(
    rank: int, group: dist.ProcessGroup, ranks_per_node: int
) -> Any:
    """First without it, then with a spare process in its place."""
    spare = NUM_RANKS

    def group_of(*ranks: int) -> dist.ProcessGroup:
        return dist.new_group(ranks, use_local_synchronization=True)

    if rank == spare:
        seen = None
        for _ in range(2):  # as many as the others make: torch counts them to name the next one
            group_of(spare)
    else:
        first = Rank(group_of(*range(NUM_RANKS)), ranks_per_node)
        first.exchange()
        if rank == MISSING:
            threading.Timer(0.1, die).start()
        seen = timeout_of(first.exchange_for_ever)["dead"]
        first.buffer.destroy()
        left = Rank(group_of(*OTHERS), len(OTHERS))
        left.exchange()
        left.buffer.destroy()
    again = Rank(group_of(*OTHERS, spare), ranks_per_node)
    for _ in range(3):
        again.exchange()
    again.buffer.destroy()
    return seen


@on_nodes
def test_survivors_go_on_without_the_dead_rank_and_with_another_one(ranks_per_node: int) -> None:
    seen = run_without(
        rank_dies_and_the_others_build_anew,
        NUM_RANKS + 1,
        -signal.SIGKILL,
        NEVER_S,
        ranks_per_node,
    )
    assert seen == [(MISSING,)] * len(OTHERS) + [None]


# --- gone -----------------------------------------------------------------------------------------


def rank_leaves_between_dispatch_and_combine(
    rank: int, group: dist.ProcessGroup, ranks_per_node: int, destroys: bool
) -> Any:
    this = Rank(group, ranks_per_node)
    this.exchange()
    handle = this.dispatch()
    if rank != MISSING:
        return timeout_of(lambda: this.combine(handle))
    if destroys:
        this.buffer.destroy()
        return None
    raise ValueError("what a model raises between dispatch and combine")


@on_nodes
@pytest.mark.parametrize("destroys", [True, False], ids=["it-destroys", "it-raises"])
def test_a_rank_that_leaves_between_dispatch_and_combine_is_named(
    destroys: bool, ranks_per_node: int
) -> None:
    seen = run_without(
        rank_leaves_between_dispatch_and_combine,
        NUM_RANKS,
        0 if destroys else 1,
        NEVER_S,
        ranks_per_node,
        destroys,
    )
    alike = all_alike(seen)
    assert alike["missing"] == alike["left"] == (MISSING,)
    assert alike["dead"] == ()
    for one in seen:
        assert (one["operation"], one["op"], one["type"]) == ("combine", 5, EPRankGoneError)
        assert f"rank {MISSING} destroyed its buffer, or ended, after operation 4" in one["text"]
