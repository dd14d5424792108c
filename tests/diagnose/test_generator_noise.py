"""Noise that remembers, routing that moves and clocks that age: as strong, as often and as long as said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from generator import Window, simulate_windows
from generator.draws import MOVING_OPERATIONS
from generator.faults import GeneratorFault, SlowNodePair, SlowPath
from generator.machines import GPU, Machine, StampRule
from generator.noise import CONGESTED_OPERATIONS, TICKS_APART, bursts, regular, remembering
from generator.recording import (
    ARRIVAL,
    CLOCK_ERROR,
    ENTERED,
    EXIT,
    ISSUED,
    OP,
    PREVIOUS_EXIT,
    TOKENS,
)

CALM = replace(
    GPU,
    jitter=0.0,
    path_jitter=0.0,
    spread=0.0,
    wander=0.0,
    clock_error=0.0,
    timer_step_ns=1,
    compute_per_token=0.0,
    send_per_token=0.0,
    ranks_per_node=4,
    stamp_rule=StampRule.TRUE_ARRIVAL,
)
ROUNDS = 1000


def window(
    machine: Machine, num_rounds: int = ROUNDS, faults: Sequence[GeneratorFault] = ()
) -> Window:
    capacity = 2 * num_rounds
    return next(simulate_windows(machine, 8, num_rounds, [faults], seed=11, capacity=capacity))


def rows(window: Window, kind: str) -> np.ndarray:
    """[n, receiver, source or own, 6]."""
    return np.stack([s.operations[kind].operations() for s in window.snapshots], axis=1)


def gaps(window: Window) -> np.ndarray:
    """[operations - 1, num_ranks]: us from each exit to the next entry, of both kinds in turn."""
    both = [rows(window, kind) for kind in ("dispatch", "combine")]
    entered = np.stack([np.diagonal(r[:, :, :-1, ENTERED], axis1=1, axis2=2) for r in both], 1)
    before = np.stack([r[:, :, -1, PREVIOUS_EXIT] for r in both], axis=1)
    return ((entered - before) / 1e3).reshape(-1, 8)[1:]


def correlation(values: np.ndarray, lag: int) -> float:
    """Mean over columns of the autocorrelation at a lag."""
    centred = values - values.mean(axis=0)
    return float((centred[lag:] * centred[:-lag]).mean() / (centred**2).mean())


@pytest.mark.parametrize("memory", [3.0, 10.0, 30.0])
def test_noise_that_remembers_has_variance_one_and_forgets_in_its_time(memory: float) -> None:
    values = remembering(np.random.default_rng(1), (4000, 20), memory)
    assert values.std() == pytest.approx(1.0, abs=0.05)
    assert values[0].std() == pytest.approx(1.0, abs=0.5)
    for lag in (1, 5, 10):
        assert correlation(values, lag) == pytest.approx(np.exp(-lag / memory), abs=0.05)


def test_what_an_operating_system_takes_comes_at_regular_times() -> None:
    values = regular(np.random.default_rng(2), (2000, 50))
    for column in values.T:
        (when,) = np.nonzero(column)
        (apart,) = set(np.diff(when).tolist())
        assert TICKS_APART[0] <= apart <= TICKS_APART[1]
        assert 0.5 <= column[when].min() <= column[when].max() <= 1.5


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_bursts_last_as_long_and_are_as_frequent_as_said(share: float) -> None:
    values = np.stack([bursts(np.random.default_rng(i), 3000, share) for i in range(40)], axis=1)
    assert (values > 0).mean() == pytest.approx(share, rel=0.15)
    # Nothing is said about the first operations only.
    assert (values[:50] > 0).mean() == pytest.approx(share, abs=0.1)
    lengths = []
    for column in values.T:
        edges = np.flatnonzero(np.diff(column))
        level = column[edges[:-1] + 1]
        lengths += np.diff(edges)[level > 0].tolist()
    assert CONGESTED_OPERATIONS[0] == min(lengths)
    assert CONGESTED_OPERATIONS[1] == max(lengths)


def test_noise_of_a_rank_is_its_own_and_noise_of_a_node_is_common() -> None:
    own, shared = (gaps(window(replace(CALM, **{n: 4.0}))) for n in ("rank_noise", "node_noise"))
    for values in (own, shared):
        assert values.std(axis=0).mean() == pytest.approx(4.0, rel=0.15)
        assert correlation(values, 1) == pytest.approx(np.exp(-0.1), abs=0.05)
    among = np.corrcoef(own.T)
    np.testing.assert_allclose(among - np.eye(8), 0, atol=0.3)
    among = np.corrcoef(shared.T)
    np.testing.assert_allclose(among[:4, :4], 1, atol=1e-3)
    assert abs(among[0, 4]) < 0.3


def test_healthy_paths_differ_for_good_by_a_share_of_their_latency() -> None:
    differing, alike = (
        rows(window(replace(CALM, path_spread=s), 20), "dispatch")[:, :, :-1] for s in (0.05, 0.0)
    )
    added = (differing - alike)[..., ARRIVAL] - (differing - alike)[..., ISSUED]
    assert np.ptp(added, axis=0).max() <= 2
    share = added[0, :4, :4][~np.eye(4, dtype=bool)] / (1e3 * CALM.path)
    assert 0.02 < share.std() < 0.08
    assert np.abs(share).max() <= 0.1 + 1e-3


def test_ticks_make_ranks_late_now_and_then() -> None:
    added = gaps(window(replace(CALM, tick=20.0))) - gaps(window(CALM))
    hit = added > 1
    assert 1 / TICKS_APART[1] <= hit.mean() <= 1 / TICKS_APART[0]
    assert 9.9 < added[hit].min() < added[hit].max() < 30.1


def test_congestion_slows_a_rail_between_nodes_and_nothing_else() -> None:
    congested, free = (
        rows(window(replace(CALM, congestion=c)), "dispatch")[:, :, :-1] for c in (50.0, 0.0)
    )
    added = (congested - free)[..., ARRIVAL] - (congested - free)[..., ISSUED]
    rank = np.arange(8)
    on_rail = (rank[:, None] % 4 == rank[None, :] % 4) & (rank[:, None] != rank[None, :])
    assert np.abs(added[:, ~on_rail]).max() <= 2
    slow = added[:, 4:, :4][:, rank[:4], rank[:4]] / 1e3
    assert (slow > 1).mean() == pytest.approx(0.05, abs=0.03)
    assert slow[slow > 1].min() > 24
    back = added[:, :4, 4:][:, rank[:4], rank[:4]] / 1e3
    np.testing.assert_allclose(slow, back, atol=0.01)


def test_pauses_of_the_fabric_hold_up_all_that_passes_between_nodes_alike() -> None:
    paused, free = (
        rows(window(replace(CALM, fabric_pause=p)), "dispatch")[:, :, :-1] for p in (40.0, 0.0)
    )
    added = ((paused - free)[..., ARRIVAL] - (paused - free)[..., ISSUED]) / 1e3
    between = np.arange(8)[:, None] // 4 != np.arange(8) // 4
    np.testing.assert_allclose(added[:, ~between], 0, atol=0.01)
    assert np.ptp(added[:, between], axis=1).max() <= 0.01
    length = added[:, 0, 4]
    assert (length > 1).mean() == pytest.approx(0.02, abs=0.012)
    assert 19.9 < length[length > 1].min() < length.max() < 60.1
    assert np.ptp(length[length > 1]) > 20


def test_large_and_small_batches_alternate_where_they_do() -> None:
    machine = replace(CALM, batches=(0.5, 1 / 128))
    alternating, at_random = (
        rows(window(replace(machine, batches_alternate=a), 40), "dispatch")[:, :, :-1, TOKENS]
        for a in (True, False)
    )
    np.testing.assert_array_equal(alternating.sum(axis=1), [[512] * 8, [8] * 8] * 20)
    large = at_random.sum(axis=1)[:, 0] == 512
    assert not (large[::2] == large[0]).all()


def test_layers_have_routings_and_gaps_of_their_own_and_come_again() -> None:
    machine = replace(CALM, layers=4, skew=0.3)
    w = window(machine)
    tokens = rows(w, "dispatch")[:, :, :-1, TOKENS].sum(axis=2)
    by_layer = np.stack([tokens[layer::4].mean(axis=0) for layer in range(4)])
    assert np.abs(np.diff(by_layer, axis=0)).max() > 100
    for layer in range(4):
        assert tokens[layer::4].std(axis=0).max() < 40
    dispatches = gaps(w)[1::2].mean(axis=1)  # that of the first dispatch has no exit before it
    of_layer = [dispatches[(layer - 1) % 4 :: 4] for layer in range(4)]
    assert max(np.ptp(g) for g in of_layer) < 0.1
    assert np.ptp([g.mean() for g in of_layer]) > 10


def test_hot_experts_move() -> None:
    w = window(replace(CALM, moving_hot_share=3.0))
    tokens = rows(w, "dispatch")[:, :, :-1, TOKENS].sum(axis=2) / 1024
    hot = tokens.argmax(axis=1)
    np.testing.assert_allclose(tokens.max(axis=1), 3.0, atol=0.2)
    spans = hot.reshape(-1, MOVING_OPERATIONS // 2)
    assert (spans == spans[:, :1]).all()
    assert np.unique(spans[:, 0]).size > 5


def test_runs_with_noise_may_end_anywhere() -> None:
    machine = replace(
        CALM,
        layers=3,
        skew=0.3,
        moving_hot_share=2.0,
        batches=(0.5, 1 / 128),
        batches_alternate=True,
        fabric_pause=40.0,
        rank_noise=3.0,
        node_noise=3.0,
        tick=20.0,
        congestion=30.0,
        congested_share=0.3,
    )
    short, long = window(machine, 60), window(machine, 120)
    for kind in ("dispatch", "combine"):
        np.testing.assert_array_equal(rows(short, kind), rows(long, kind)[:60])


@pytest.mark.parametrize(("age_s", "drift_ppm"), [(2.0, 10.0), (600.0, 10.0)])
def test_clocks_drift_apart_since_they_were_measured(age_s: float, drift_ppm: float) -> None:
    aged, exact = (
        rows(window(m, 20), "dispatch")[:, :, :-1, ENTERED]
        for m in (replace(CALM, clock_age_s=age_s, drift_ppm=drift_ppm), CALM)
    )
    wrong = (aged - exact)[0] / 1e3
    np.testing.assert_allclose(wrong, -wrong.T, atol=0.01)
    largest = age_s * 2 * 2 * drift_ppm  # two clocks, two deviations each
    assert 0.2 * largest < np.abs(wrong).max() <= 1.01 * largest


def test_the_stated_error_of_a_clock_is_larger_to_another_host_and_holds_when_it_was_measured() -> (
    None
):
    machine = replace(CALM, clock_error=0.5, host_clock_error=0.5)
    stated = rows(window(machine, 5), "dispatch")[0, :, :-1, CLOCK_ERROR]
    assert (np.diag(stated) == 0).all()
    assert stated[0, 1] == pytest.approx(2 * np.sqrt(2) * 500, abs=1)
    assert stated[0, 4] == pytest.approx(2 * np.sqrt(4) * 500, abs=1)
    held = []
    for seed in range(40):
        w, exact = (next(simulate_windows(m, 8, 2, [[]], seed=seed)) for m in (machine, CALM))
        wrong = (rows(w, "dispatch") - rows(exact, "dispatch"))[0, :, :-1, ENTERED]
        held += (np.abs(wrong) <= stated).ravel().tolist()
    assert np.mean(held) > 0.93


def test_errors_of_clocks_are_stated_as_half_a_round_trip_of_words_and_grow_with_age() -> None:
    machine = replace(CALM, states_round_trip=True, clock_error=0.5, timer_step_ns=32)
    stated = rows(window(machine, 5), "dispatch")[:, :, :-1, CLOCK_ERROR]
    between = np.arange(8)[:, None] // 4 != np.arange(8) // 4
    rail = between & (np.arange(8)[:, None] % 4 == np.arange(8) % 4)
    within = ~between & ~np.eye(8, dtype=bool)
    np.testing.assert_array_equal(stated, np.swapaxes(stated, 1, 2))
    for pairs, path_us in ((within, 8), (rail, 12), (between & ~rail, 14)):
        least = path_us * 500 + 32
        assert least <= stated[:, pairs].min() < stated[:, pairs].max() <= least + 250
    assert (stated[:, np.eye(8, dtype=bool)] == 0).all()
    for changes, ppm in (
        ({"drift_ppm": 10.0}, 40),
        ({"drift_ppm": 0.1, "stated_drift_ppm": 0.4}, 0.4),
    ):
        aged = replace(machine, clock_age_s=10.0, **changes)
        grown = rows(window(aged, 5), "dispatch")[0, :, :-1, CLOCK_ERROR] - stated[0]
        np.testing.assert_allclose(grown[within], 10e3 * ppm, rtol=1e-3)


@pytest.mark.parametrize(
    "fault", [SlowPath(1, 6, 50e-6), SlowNodePair(0, 1, 50e-6)], ids=["path", "node pair"]
)
def test_clocks_measured_over_slow_paths_are_wrong_by_half_of_the_difference_of_both_ways(
    fault: GeneratorFault,
) -> None:
    machine = replace(CALM, states_round_trip=True)
    slow, usual = (
        rows(window(replace(machine, measured_while_slow=w), 5, [fault]), "dispatch")[:, :, :-1]
        for w in (True, False)
    )
    moved = (slow - usual) / 1e3
    is_slow = np.zeros((8, 8), bool)
    is_slow[(6, 1) if isinstance(fault, SlowPath) else (slice(4, 8), slice(0, 4))] = True
    expected = 25.0 * is_slow - 25.0 * is_slow.T
    np.testing.assert_allclose(
        moved[..., ENTERED], np.broadcast_to(expected, moved.shape[:3]), atol=1e-9
    )
    np.testing.assert_array_equal(moved[..., ISSUED], moved[..., ENTERED])
    assert not moved[..., ARRIVAL].any()
    np.testing.assert_array_equal(moved[..., CLOCK_ERROR], np.abs(moved[..., ENTERED]))


def test_a_clock_that_was_set_forward_before_the_run_is_wrong_throughout_and_nobody_says_so() -> (
    None
):
    stepped, steady = (
        rows(window(replace(CALM, states_round_trip=True, clock_step=s), 5), "dispatch")
        for s in (5000.0, 0.0)
    )
    apart = ((stepped - steady)[:, :, :-1, ENTERED] - (stepped - steady)[:, :, -1:, EXIT]) / 1e3
    (rank,) = np.flatnonzero((stepped - steady)[0, :, -1, EXIT])
    expected = np.zeros((8, 8))
    # Its own clock is ahead: it sees the others earlier, and they see it later.
    expected[rank], expected[:, rank], expected[rank, rank] = -5000.0, 5000.0, 0.0
    np.testing.assert_array_equal(apart, np.broadcast_to(expected, apart.shape))
    own = stepped[:, :, -1], steady[:, :, -1]
    np.testing.assert_array_equal(*(o[1:, :, EXIT] - o[1:, :, PREVIOUS_EXIT] for o in own))
    stated = [r[:, :, :-1, CLOCK_ERROR] for r in (stepped, steady)]
    np.testing.assert_array_equal(*stated)


def test_a_clock_that_is_set_forward_within_the_run_is_right_before_and_jumps_once() -> None:
    machine = replace(CALM, clock_step=5000.0, clock_steps_within=True)
    stepped, steady = window(machine, 60), window(CALM, 60)
    added = gaps(stepped) - gaps(steady)
    ((op, rank),) = np.argwhere(np.abs(added) > 0.01)
    assert added[op, rank] == pytest.approx(5000, abs=0.01)
    number = int(op) + 2  # the gap of the first operation is not known
    assert 32 <= number < 96
    for kind in ("dispatch", "combine"):
        ahead = (rows(stepped, kind) - rows(steady, kind))[:, :, -1, EXIT] / 1e3
        has_stepped = rows(steady, kind)[:, 0, -1, OP] >= number
        np.testing.assert_allclose(ahead[:, rank], 5000.0 * has_stepped, atol=0.01)
        np.testing.assert_allclose(np.delete(ahead, rank, axis=1), 0, atol=0.01)
