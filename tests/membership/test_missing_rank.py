"""A rank that was killed, ended or does not come, in low-latency operations and in normal ones, on one node and on two:
the others agree on it in time, exit cleanly, and leave nothing behind.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import deep_ep
from deep_ep.errors import EPRankGoneError, EPTimeoutError, EPTransportError
from deep_ep.ops import normal
from support import normal_exchange
from support.exchange import (
    Mode,
    Received,
    Shape,
    begin_dispatch,
    buffer_for,
    combine,
    dispatch,
    exchange_and_check,
    experts,
    make_inputs,
    ranks_for,
)
from support.launch import HANG_S, run_processes, short_timeout_s
from support.missing_rank import (
    MISSING,
    NEVER_S,
    TIMEOUT_S,
    all_alike,
    die,
    run_without,
    timeout_of,
)
from support.normal_exchange import SMALL

SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=512, num_experts=6, num_topk=3)
FP8 = Mode(use_fp8=True)

NORMAL_RANKS = 4
OTHERS = tuple(rank for rank in range(NORMAL_RANKS) if rank != MISSING)
# For which the queues of `SMALL` are short.
NORMAL_TOKENS, NORMAL_HIDDEN, NORMAL = (40, 33, 28, 36), 64, normal_exchange.Mode()

pytestmark = [
    pytest.mark.skipif(
        deep_ep.native.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
    ),
    pytest.mark.filterwarnings("ignore:destroy on rank"),
]
# Ranks of a node in normal operations; 0: low-latency ones.
on_nodes = pytest.mark.parametrize("per_node", [4, 2], ids=["one-node", "two-nodes"])


class Rank:
    """One rank that is a process, and its buffer; in low latency."""

    def __init__(self, group: dist.ProcessGroup, **arguments: Any) -> None:
        self.buffer = buffer_for(SHAPE, group, **arguments)
        self.inputs = make_inputs(SHAPE)[group.rank()]

    def exchange(self) -> None:
        self.combine(self.dispatch())

    def exchange_for_ever(self) -> None:
        while True:
            self.exchange()

    def dispatch(self) -> Received:
        return dispatch(self.buffer, self.inputs, SHAPE, FP8)

    def combine(self, received: Received) -> None:
        ys = experts(received, self.buffer.rank)
        combine(self.buffer, self.inputs, received.handle, ys, FP8)


class NormalRank(Rank):
    """In normal operations."""

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(ranks_per_node)
        num_ranks = group.size()
        self.shape = normal_exchange.shape_of(
            NORMAL_TOKENS[:num_ranks], NORMAL_HIDDEN, 3 * num_ranks, 3
        )
        sizes = 2 * NORMAL_HIDDEN, num_ranks
        self.buffer = deep_ep.Buffer(
            group,
            SMALL.get_nvl_buffer_size_hint(*sizes),
            SMALL.get_rdma_buffer_size_hint(*sizes),
            explicitly_destroy=True,
        )
        inputs = normal_exchange.make_inputs(self.shape, NORMAL)
        self.expected = normal_exchange.expect(inputs, self.shape, NORMAL, ranks_per_node)
        self.normal_inputs = inputs[group.rank()]

    def exchange(self) -> None:
        """Layout, dispatch, cached dispatch and combine."""
        outputs = normal_exchange.run_exchange(self.buffer, self.expected, SMALL)
        normal_exchange.assert_outputs(outputs, self.buffer.rank, self.expected, SMALL)

    def dispatch(self) -> Any:
        """The handle."""
        known = self.normal_inputs, self.shape, NORMAL, SMALL
        return normal_exchange.run_dispatch(self.buffer, *known)[1][4]

    def combine(self, received: Any) -> None:
        y = self.expected.ys[self.buffer.rank]
        normal_exchange.run_combine(self.buffer, y, received, (), None, NORMAL, SMALL)


def rank_of(group: dist.ProcessGroup, per_node: int) -> Rank:
    return NormalRank(group, per_node) if per_node else Rank(group, explicitly_destroy=True)


def num_ranks_of(per_node: int) -> int:
    return NORMAL_RANKS if per_node else SHAPE.num_ranks


def rank_dies_before_combine(rank: int, group: dist.ProcessGroup, per_node: int) -> Any:
    this = rank_of(group, per_node)
    received = this.dispatch()
    if rank == MISSING:
        die()
    return timeout_of(lambda: this.combine(received))


def rank_dies_before_its_rows(rank: int, group: dist.ProcessGroup, per_node: int) -> Any:
    """It has told how many rows it will send."""
    this = rank_of(group, per_node)
    if rank == MISSING:
        normal.Normal._new_received = lambda *_: die()  # type: ignore[assignment]
    return timeout_of(this.dispatch)


def rank_dies_between_send_and_receive(rank: int, group: dist.ProcessGroup, _: int) -> Any:
    this = Rank(group)
    _, _, hook = begin_dispatch(this.buffer, this.inputs, SHAPE, replace(FP8, hook=True))
    if rank == MISSING:
        die()
    hook()  # everything it owed us was sent
    return timeout_of(this.dispatch)


def exchange_until_somebody_is_missing(
    rank: int, group: dist.ProcessGroup, per_node: int, victims: Sequence[int]
) -> Any:
    """Exchanges without a pause; the victims die somewhere on the way, all at once."""
    this = rank_of(group, per_node)
    this.exchange()  # nobody is still making its buffer
    if rank in victims:
        threading.Timer(0.2, die).start()
    return timeout_of(this.exchange_for_ever)


def rank_dies_on_another_host(rank: int, group: dist.ProcessGroup) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{rank}")
        return exchange_until_somebody_is_missing(rank, group, 0, (MISSING,))


def rank_leaves(
    rank: int, group: dist.ProcessGroup, per_node: int, how: str, num_exchanges: int
) -> Any:
    """It destroys its buffer, drops it, exits, or raises an exception of that name; in normal operations after a dispatch."""
    this = rank_of(group, per_node) if per_node or how == "destroys" else Rank(group)
    for _ in range(num_exchanges):
        this.exchange()
    received = this.dispatch() if per_node else None
    result = None
    if rank != MISSING:
        result = timeout_of(lambda: this.combine(received) if per_node else this.exchange())
    elif how == "exits":
        sys.exit(3)
    elif how not in ("destroys", "drops"):
        raise getattr(builtins, how)("no batch")
    if how == "destroys":
        this.buffer.destroy()
    elif how == "drops":
        del this.buffer
        dist.barrier(group)
    return result


def rank_that_forked_dies(rank: int, group: dist.ProcessGroup) -> Any:
    """Its child has what was open in the parent, and lives on."""
    this = Rank(group)
    child = os.fork() if rank == MISSING else 0
    if rank == MISSING and child == 0:
        time.sleep(2 * HANG_S)
        os._exit(0)
    children: list[Any] = [None] * SHAPE.num_ranks
    dist.all_gather_object(children, child, group=group)
    this.exchange()
    if rank == MISSING:
        die()
    result = timeout_of(this.exchange)
    if rank == 0:
        os.kill(children[MISSING], signal.SIGKILL)
    return result


def rank_is_stopped_for_a_while(rank: int, group: dist.ProcessGroup) -> Any:
    this = Rank(group)
    pids: list[Any] = [None] * SHAPE.num_ranks
    dist.all_gather_object(pids, os.getpid(), group=group)
    this.exchange()
    if rank != MISSING:
        others = dist.new_group([0, 2], use_local_synchronization=True)
        result = timeout_of(this.exchange)
        dist.barrier(others)
        if rank == 0:
            os.kill(pids[MISSING], signal.SIGCONT)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            this.exchange()
        except EPTransportError as error:
            result = {"text": str(error)}
    dist.barrier(group)
    for _ in range(3):
        this.exchange()
    return result


def longest_wait_s(seen: Sequence[dict[str, Any]]) -> float:
    """Of who gave up first; who hears of that from another rank has waited less than its own timeout."""
    return float(max(one["after_s"] for one in seen))


def rank_dies_before_its_first_operation(rank: int, group: dist.ProcessGroup, _: int) -> Any:
    """The others destroy their buffers after that."""
    this = Rank(group, explicitly_destroy=True)
    if rank == MISSING:
        die()
    result = timeout_of(this.dispatch)
    with contextlib.suppress(RuntimeError):  # it is collective: it may say that somebody is gone
        this.buffer.destroy()
    return result


def rank_dies_while_buffers_are_made(rank: int, group: dist.ProcessGroup) -> Any:
    group.barrier().wait()  # gloo itself has connected everybody
    if rank == MISSING:
        time.sleep(0.2)
        die()
    with pytest.raises(RuntimeError):  # the group's own error: it lost a member
        Rank(group)


@pytest.mark.parametrize(
    ("scenario", "per_node", "operation", "op"),
    [
        (rank_dies_before_its_first_operation, 0, "low_latency_dispatch", 1),
        (rank_dies_between_send_and_receive, 0, "low_latency_dispatch", 2),
        (rank_dies_before_combine, 0, "low_latency_combine", 2),
        (rank_dies_before_its_rows, 4, "dispatch", 1),
        (rank_dies_before_its_rows, 2, "dispatch", 1),
        (rank_dies_before_combine, 4, "combine", 2),
        (rank_dies_before_combine, 2, "combine", 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_killed_rank_is_named(
    scenario: Callable[..., Any], per_node: int, operation: str, op: int
) -> None:
    num_ranks = num_ranks_of(per_node)
    for seen in run_without(scenario, num_ranks, -signal.SIGKILL, NEVER_S, per_node):
        assert seen["missing"] == seen["dead"] == (MISSING,)
        assert (seen["operation"], seen["op"]) == (operation, op)
        assert f"rank {MISSING} is dead" in seen["text"]
        assert seen["type"] is EPRankGoneError
        if per_node == 0:
            assert seen["last_seen"] == {MISSING: op - 1}


@pytest.mark.parametrize(
    ("victims", "per_node"), [((1,), 0), ((1, 2), 0), ((0,), 0), ((1,), 4), ((1,), 2)]
)
def test_all_dead_ranks_are_named_and_survivors_say_the_same(
    victims: tuple[int, ...], per_node: int
) -> None:
    scenario, killed = exchange_until_somebody_is_missing, -signal.SIGKILL
    num_ranks = num_ranks_of(per_node)
    seen = run_without(scenario, num_ranks, killed, NEVER_S, per_node, victims, victims=victims)
    for one in seen:
        assert one["dead"] == victims
        # In normal operations, who is one ahead may hear first that another one has ended because of it.
        assert set(one["missing"]) - set(one["left"] if per_node else ()) == {*victims}
        # Ranks are in one operation, or in two that follow each other.
        assert abs(one["op"] - seen[0]["op"]) <= 1
        if one["op"] == seen[0]["op"] and per_node == 0:
            assert one["reason"] == seen[0]["reason"]


def test_a_death_on_another_host_is_known_at_once() -> None:
    seen = all_alike(
        run_without(rank_dies_on_another_host, SHAPE.num_ranks, -signal.SIGKILL, NEVER_S)
    )
    assert seen["missing"] == seen["dead"] == (MISSING,)
    assert f"on host host{MISSING} ended" in seen["text"]


def test_children_of_a_dead_rank_do_not_keep_it_alive() -> None:
    seen = all_alike(run_without(rank_that_forked_dies, SHAPE.num_ranks, -signal.SIGKILL, NEVER_S))
    assert seen["dead"] == (MISSING,)


@pytest.mark.parametrize(
    ("how", "exit_code", "per_node"),
    [
        *(("destroys", 0, 0), ("drops", 0, 0), ("exits", 3, 0)),
        *(("destroys", 0, 4), ("destroys", 0, 2), ("ValueError", 1, 4), ("ValueError", 1, 2)),
    ],
)
def test_a_rank_that_ended_in_order_is_not_called_dead(
    how: str, exit_code: int, per_node: int
) -> None:
    num_ranks = num_ranks_of(per_node)
    closed = 4 if per_node else 2
    for seen in run_without(rank_leaves, num_ranks, exit_code, NEVER_S, per_node, how, 1):
        assert seen["missing"] == seen["left"] == (MISSING,)
        assert (seen["dead"], seen["op"], seen["type"]) == ((), closed + 1, EPRankGoneError)
        ended = f"rank {MISSING} destroyed its buffer, or ended, after operation {closed}"
        assert ended in seen["text"]


# torch catches ValueError and exits; KeyboardInterrupt passes through.
@pytest.mark.parametrize(
    ("error", "num_exchanges"), [("ValueError", 0), ("ValueError", 1), ("KeyboardInterrupt", 1)]
)
def test_the_exception_that_ends_a_child_of_multiprocessing_is_told(
    error: str, num_exchanges: int
) -> None:
    seen = all_alike(run_without(rank_leaves, SHAPE.num_ranks, 1, NEVER_S, 0, error, num_exchanges))
    assert seen["missing"] == seen["left"] == (MISSING,)
    assert seen["last_seen"] == {MISSING: 2 * num_exchanges}
    assert seen["op"] == 2 * num_exchanges + 1
    assert f"whose program raised {error}: no batch at {__file__}" in seen["text"]


@pytest.mark.exhaustive
def test_a_stopped_rank_is_not_called_dead_and_comes_back() -> None:
    outcomes = run_processes(
        rank_is_stopped_for_a_while,
        SHAPE.num_ranks,
        env={"DEEP_EP_TIMEOUT_S": str(TIMEOUT_S)},
    )
    assert [(o.exit_code, o.error) for o in outcomes] == [(0, "")] * SHAPE.num_ranks
    others = [outcomes[rank].value for rank in (0, 2)]
    for seen in others:
        assert seen["missing"] == (MISSING,)
        assert seen["dead"] == ()
        assert seen["waiting"] == (0, 2)
        assert f"rank {MISSING} does not answer" in seen["text"]
    assert longest_wait_s(others) >= TIMEOUT_S
    assert re.search(gave_up(3), outcomes[MISSING].value["text"])


def gave_up(op: int) -> str:
    """What a late rank is told, whether it calls before it has heard of that, or afterwards."""
    return rf"(ranks 0, 2|rank 0|rank 2) gave up operation {op} (while|before) this rank"


def test_a_rank_that_dies_while_buffers_are_made_leaves_nothing_behind() -> None:
    run_without(rank_dies_while_buffers_are_made, SHAPE.num_ranks, -signal.SIGKILL, NEVER_S)


def rank_dies_and_the_others_build_anew(rank: int, group: dist.ProcessGroup, per_node: int) -> Any:
    """First without it, then with a spare process in its place."""
    spare = NORMAL_RANKS

    def group_of(*ranks: int) -> dist.ProcessGroup:
        return dist.new_group(ranks, use_local_synchronization=True)

    if rank == spare:
        seen = None
        for _ in range(2):  # as many as the others make: torch counts them to name the next one
            group_of(spare)
    else:
        first = NormalRank(group_of(*range(NORMAL_RANKS)), per_node)
        first.exchange()
        if rank == MISSING:
            threading.Timer(0.1, die).start()
        seen = timeout_of(first.exchange_for_ever)["dead"]
        first.buffer.destroy()
        left = NormalRank(group_of(*OTHERS), len(OTHERS))
        left.exchange()
        left.buffer.destroy()
    again = NormalRank(group_of(*OTHERS, spare), per_node)
    for _ in range(3):
        again.exchange()
    again.buffer.destroy()
    return seen


@on_nodes
def test_survivors_go_on_without_the_dead_rank_and_with_another_one(per_node: int) -> None:
    seen = run_without(
        rank_dies_and_the_others_build_anew,
        NORMAL_RANKS + 1,
        -signal.SIGKILL,
        NEVER_S,
        per_node,
    )
    assert seen == [(MISSING,)] * len(OTHERS) + [None]


def call(rank: int, buffer: deep_ep.Buffer) -> None:
    """A dispatch of a rank that is a thread."""
    dispatch(buffer, make_inputs(SHAPE)[rank], SHAPE, FP8)


def test_all_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", str(TIMEOUT_S))
    with ranks_for(SHAPE) as ranks:
        (error, *_) = ranks.outcomes(lambda rank, buffer: call(rank, buffer) if rank == 0 else None)
        assert type(error) is EPTimeoutError
        assert error.missing_ranks == (1, 2)
        assert error.waiting_ranks == (0,)
        assert error.last_seen == {1: 0, 2: 0}
        for rank in (1, 2):
            assert f"rank {rank} is between operations, after operation 0" in str(error)


def test_a_rank_that_is_gone_is_named_without_those_that_are_only_late() -> None:
    with ranks_for(SHAPE) as ranks:
        ranks.buffers[0].runtime.mark_gone(MISSING)
        (error, *_) = ranks.outcomes(lambda rank, buffer: call(rank, buffer) if rank == 0 else None)
        assert isinstance(error, EPTimeoutError)
        assert error.missing_ranks == (MISSING,)
        ranks.buffers[0].runtime.mark_gone(MISSING, is_gone=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_missed", [1, 3])
def test_a_late_rank_begins_behind_what_the_others_gave_up(
    num_missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others timed out in `num_missed` operations. Who calls then waits a little for them in the next one; if
    they do not come, all meet in the one after it.
    """
    with ranks_for(SHAPE) as healthy:
        timeout_s = short_timeout_s(lambda: exchange_and_check(healthy, SHAPE, FP8), 1.0)
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", str(timeout_s))
    with ranks_for(SHAPE) as ranks:
        exchange_and_check(ranks, SHAPE, FP8)
        for _ in range(num_missed):
            early = ranks.outcomes(
                lambda rank, buffer: None if rank == MISSING else call(rank, buffer)
            )
            for rank in (0, 2):
                assert type(early[rank]) is EPTimeoutError
                assert early[rank].missing_ranks == (MISSING,)
        late = ranks.outcomes(lambda rank, buffer: call(rank, buffer) if rank == MISSING else None)
        assert type(late[MISSING]) is EPTransportError
        assert early[0].op == early[2].op
        assert re.search(gave_up(early[0].op), str(late[MISSING]))
        for _ in range(3):
            exchange_and_check(ranks, SHAPE, FP8)


def interrupted_rank(rank: int, group: dist.ProcessGroup) -> str:
    """Waits for a rank that never calls, until the user presses Ctrl-C."""
    this = Rank(group)
    group.barrier().wait()
    if rank == MISSING:
        group.barrier().wait()
        return "never called"
    assert this.buffer.runtime is not None
    native = this.buffer.runtime.native

    def press() -> None:
        while not native.progress()["waiting"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    try:
        this.exchange()
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="build a new Buffer"):
            this.exchange()
        group.barrier().wait()
        return "interrupted"
    return "finished"


def test_ctrl_c_ends_the_wait_for_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", str(NEVER_S))
    outcomes = run_processes(interrupted_rank, SHAPE.num_ranks)
    said = ["never called" if rank == MISSING else "interrupted" for rank in range(SHAPE.num_ranks)]
    assert [outcome.value for outcome in outcomes] == said
