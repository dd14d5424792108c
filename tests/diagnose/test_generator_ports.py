"""Ports of generated machines: first come first served, nothing lost, and incast where there is any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep.diagnose.core.diagnosis import FloatArray
from deep_ep.testing.faults import HotRank
from generator import Window, simulate_windows
from generator.faults import GeneratorFault, SlowNic, SlowPath
from generator.machines import CLUSTER, LOW_LATENCY, NORMAL, Machine
from generator.ports import served
from generator.recording import ARRIVAL, ENTERED, ISSUED, SENT, TOKENS, WAIT_BEGIN

CALM = replace(
    CLUSTER,
    jitter=0.0,
    path_jitter=0.0,
    spread=0.0,
    wander=0.0,
    clock_error=0.0,
    timer_step_ns=1,
    stamp_rule=CLUSTER.stamp_rule.TRUE_ARRIVAL,
)
FAR = replace(CALM, ranks_per_node=4, path_same_rail=12.0, path_cross_rail=12.0)
TOKENS_PER_RANK = 1024

flows = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0.1, 50), st.floats(0, 1)), min_size=1, max_size=8
)


def window(machine: Machine, injected: Sequence[GeneratorFault] = (), num_ranks: int = 8) -> Window:
    return next(simulate_windows(machine, num_ranks, 20, [injected], seed=3))


def stamps(window: Window, kind: str) -> np.ndarray:
    """[n, receiver, source or own, 6]; all times since the source entered, in us, but the own ones."""
    rows = np.stack([s.operations[kind].operations() for s in window.snapshots], axis=1)
    times = rows.astype(np.float64)
    for column in (ISSUED, ARRIVAL):
        times[:, :, :-1, column] = (rows[:, :, :-1, column] - rows[:, :, :-1, ENTERED]) / 1e3
    return times


def one_by_one(begin: FloatArray, end: FloatArray, work: FloatArray) -> FloatArray:
    """`served` in small steps of time."""
    step = 0.01
    times = np.arange(begin.min(), end.max() + step, step)
    length = np.maximum(end - begin, 1e-9)
    came = (work * np.clip((times[:, None] - begin) / length, 0, 1)).sum(axis=1)
    backlog = np.zeros(times.size)
    for i in range(1, times.size):
        backlog[i] = max(backlog[i - 1] + came[i] - came[i - 1] - step, 0.0)
    return end + np.interp(end, times, backlog)


@given(flows)
def test_a_port_serves_in_order_loses_nothing_and_never_rests_while_there_is_work(
    members: list[tuple[float, float, float]],
) -> None:
    begin, length, load = np.array(members).T
    end, work = begin + length, length * load
    done = served(begin, end, work)
    assert (done >= end - 1e-9).all()
    order = np.argsort(end)
    assert (np.diff(done[order]) >= -1e-9).all()
    assert done.max() >= begin.min() + work.sum() - 1e-6
    assert done.max() <= end.max() + work.sum() + 1e-6


@settings(max_examples=20, deadline=None)
@given(flows)
def test_a_port_is_done_when_a_slow_reckoning_says(
    members: list[tuple[float, float, float]],
) -> None:
    begin, length, load = np.array(members).T
    end, work = begin + length, length * load
    np.testing.assert_allclose(served(begin, end, work), one_by_one(begin, end, work), atol=0.1)


def test_a_single_flow_passes_two_ports_as_fast_as_one() -> None:
    begin, end, work = np.array([[3.0]]), np.array([[10.0]]), np.array([[7.0]])
    np.testing.assert_allclose(served(begin, end, work), end)


@pytest.mark.parametrize("by_destination", [False, True])
def test_a_nic_passes_all_its_tokens_at_its_speed_and_no_faster(by_destination: bool) -> None:
    machine = replace(FAR, combine_by_destination=by_destination)
    for kind in ("dispatch", "combine"):
        rows = stamps(window(machine), kind)[:, :, :-1]
        for source in range(8):
            others = np.flatnonzero(np.arange(8) // 4 != source // 4)
            work = 0.14 * rows[:, others, source, TOKENS].sum(axis=1)
            last = rows[:, others, source, ARRIVAL].max(axis=1)
            assert (last >= work + 12 - 0.01).all()
            # Each source of the other node may be ahead at one of the receivers.
            assert (last <= work + 12 + 4 * 0.14 * TOKENS_PER_RANK / 8).all()


def test_tokens_of_one_destination_come_before_those_of_the_next_where_sent_so() -> None:
    machine = replace(FAR, combine_by_destination=True)
    rows = stamps(window(machine), "combine")[:, :, :-1]
    for column in (ISSUED, ARRIVAL):
        of_source_0 = rows[:, 4:, 0, column]
        assert (np.diff(of_source_0, axis=1) > 1).all()
    mixed = stamps(window(FAR), "combine")[:, :, :-1]
    assert np.ptp(mixed[:, 4:, 0, ISSUED], axis=1).max() < 0.25 * mixed[:, 4:, 0, ISSUED].max()


def test_all_who_begin_with_the_same_destination_queue_there() -> None:
    machine = replace(FAR, combine_by_destination=True)
    rows = stamps(window(machine), "combine")[:, :, :-1]
    # The first of a node to be sent to gets four flows at a time, and its port passes one.
    work = 0.14 * rows[:, 4, :4, TOKENS]
    assert (rows[:, 4, :4, ARRIVAL].max(axis=1) > 12 + 0.9 * work.sum(axis=1)).all()
    alone = replace(machine, ports=False)
    unhindered = stamps(window(alone), "combine")[:, :, :-1]
    assert unhindered[:, 4, :4, ARRIVAL].max() < 12 + 2.5 * work.max()


def test_everybody_who_sends_to_a_hot_rank_waits_at_its_port() -> None:
    hot, even = (stamps(window(FAR, f), "dispatch")[:, :, :-1] for f in ([HotRank(5, 3.0)], []))
    added = (hot - even)[:, 5, :4, ARRIVAL].mean()
    assert added > 0.14 * 2 * TOKENS_PER_RANK / 8 * 3


def test_a_slow_nic_holds_up_what_leaves_and_what_enters_and_nothing_within_its_node() -> None:
    slow, usual = (stamps(window(FAR, f), "dispatch")[:, :, :-1] for f in ([SlowNic(5)], []))
    added = (slow - usual)[..., ARRIVAL].mean(axis=0)
    assert added[:4, 5].min() > 100
    assert added[5, :4].min() > 100
    np.testing.assert_allclose(added[4:, 4:], 0, atol=0.01)
    np.testing.assert_allclose(added[4, :4], 0, atol=30)


def test_a_fence_waits_for_what_was_sent_within_the_node() -> None:
    slow_path = [SlowPath(1, 2, 50e-6)]
    open_, fenced = (
        stamps(window(replace(CALM, fenced=f), slow_path), "dispatch") for f in (False, True)
    )
    after_sent = [
        (r[:, :, -1, WAIT_BEGIN] - r[:, :, -1, SENT]).mean(axis=0) / 1e3 for r in (open_, fenced)
    ]
    np.testing.assert_allclose(after_sent[0], 0, atol=0.01)
    assert after_sent[1][1] > 50
    assert np.delete(after_sent[1], 1).max() < 30
    # When a rank has sent does not tell of the path.
    np.testing.assert_allclose(fenced[..., :-1, ISSUED], open_[..., :-1, ISSUED], atol=0.01)


@pytest.mark.parametrize("ranks_per_node", [None, 1, 3])
def test_nothing_comes_before_it_was_issued_on_machines_of_any_shape(
    ranks_per_node: int | None,
) -> None:
    machine = replace(CALM, ranks_per_node=ranks_per_node)
    # Nodes of normal operations have equally many ranks.
    for kinds, num_ranks in ((LOW_LATENCY, 7), (NORMAL, 6)):
        (w,) = simulate_windows(machine, num_ranks, 5, [[]], seed=3, kinds=kinds)
        for kind in w.snapshots[0].operations:
            rows = stamps(w, kind)[:, :, :-1]
            heard = rows[..., ENTERED] > 0
            if kind != "notify":  # of a queue without rows nothing need come
                heard &= rows[..., TOKENS] > 0
            assert (rows[..., ARRIVAL] >= rows[..., ISSUED])[heard].all()
            assert (rows[..., ISSUED] > 0)[heard].all()
