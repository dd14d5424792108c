"""One rank condenses its counters: exact parts, visible path times only, bandwidth from counted bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deep_ep import diagnose
from deep_ep.diagnose.collect.rank_summary import summarize
from deep_ep.testing.faults import SlowPath, SlowRank
from generator import simulate
from generator.faults import IntermittentRank
from generator.machines import CLUSTER, CPU, GPU


def of_kind(snapshots: list[diagnose.Snapshot], rank: int = 0, kind: str = "dispatch"):  # noqa: ANN201
    return summarize(snapshots[rank]).kinds[kind]


def test_the_series_of_a_rank_add_up_to_its_own_counters() -> None:
    snapshots = simulate(CPU, 4, 10, seed=2)
    for s in snapshots:
        for kind in s.operations.values():
            found = summarize(s).kinds[
                "dispatch" if kind is s.operations["dispatch"] else "combine"
            ]
            assert np.nansum(found.gap) == kind.own_value("gap_ns")
            assert found.wait.sum() == kind.own_value("wait_ns")
            assert found.drain.sum() == kind.own_value("drain_ns")
            assert (found.duration == found.span + found.wait + found.drain).all()


def test_the_parts_of_the_waiting_are_those_of_the_counters() -> None:
    """With fewer than ten operations nothing is trimmed, so means and totals agree."""
    snapshots = simulate(CPU, 4, 9, seed=3)
    counters = snapshots[1].operations["combine"]
    late, issue, path = of_kind(snapshots, 1, "combine").wait_parts * counters.ops
    np.testing.assert_allclose(late, counters["late_ns"], rtol=1e-9)
    np.testing.assert_allclose(issue, counters["issue_ns"], rtol=1e-9)
    np.testing.assert_allclose(path, counters["path_ns"], rtol=1e-9, atol=1e-3)


def test_a_path_is_not_judged_by_the_operations_in_which_it_happened_to_be_seen() -> None:
    """The receiver comes at random, so that half of the arrivals are hidden; the rest are late ones."""
    machine = replace(GPU, jitter=10.0, clock_error=0.0)
    snapshots = simulate(machine, 4, 120, seed=4, capacity=240)
    path = np.array([of_kind(snapshots, rank).path for rank in range(4)])
    usual = machine.path + machine.path_per_token * 256
    off_diagonal = path[~np.eye(4, dtype=bool)] / 1e3
    assert np.isnan(np.diagonal(path)).all()
    assert off_diagonal == pytest.approx(np.full(12, usual), abs=2.0)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_a_congested_rail_makes_late_have_set_no_clock(seed: int) -> None:
    machine = replace(CLUSTER, ranks_per_node=4, congestion=60.0, congested_share=0.2)
    require_all_operations(simulate(machine, 12, 64, seed=seed, capacity=128))


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_becomes_late_by_more_than_rounds_took_has_set_no_clock(seed: int) -> None:
    """The others wait for it, so rounds take as long then."""
    late = IntermittentRank(2, 5e-3, share=0.4, burst=50)
    require_all_operations(simulate(GPU, 4, 64, [late], seed=seed, capacity=128))


def require_all_operations(snapshots: list[diagnose.Snapshot]) -> None:
    """All that were seen tell of paths, not only those since something has changed."""
    for rank, snapshot in enumerate(snapshots):
        counters = snapshot.operations["dispatch"]
        flag = counters.ring_source_fields.index("seen")
        seen = np.delete(counters.operations()[:, :-1, flag].sum(axis=0), rank)
        found = np.delete(of_kind(snapshots, rank).path_count, rank)
        np.testing.assert_array_less(0.8 * seen - 1, found)


@pytest.mark.parametrize("num_operations", range(1, 6))
def test_short_windows_have_no_bursts(num_operations: int) -> None:
    snapshots = simulate(GPU, 4, num_operations, [SlowPath(1, 2, 50e-6)], seed=3)
    for rank in range(4):
        assert not of_kind(snapshots, rank).path_burst_share.any()


def test_a_path_hidden_behind_a_long_pause_is_unknown() -> None:
    snapshots = simulate(replace(GPU, hook_us=200.0), 4, 20, seed=5)
    assert np.isnan(of_kind(snapshots).path).all()
    assert (of_kind(snapshots).path_count == 0).all()


def test_the_latest_arrivals_are_kept_in_order() -> None:
    snapshots = simulate(CPU, 8, 20, [SlowRank(5, 5e-3)], seed=6)
    found = of_kind(snapshots)
    assert found.last.shape == found.last_arrival.shape == (20, 2)
    assert (np.diff(found.last_arrival, axis=1) <= 0).all()
    assert (found.last[5:, 0] == 5).all()


def test_bandwidth_counts_what_was_on_its_way_and_not_the_waiting_for_a_late_rank() -> None:
    machine = replace(GPU, jitter=0.0, path_jitter=0.0, clock_error=0.0, spread=0.0)
    slow = simulate(machine, 4, 20, [SlowPath(2, 1, 80e-6)], seed=7)
    late = simulate(machine, 4, 20, [SlowRank(2, 80e-6)], seed=7)
    on_slow_path = diagnose.gather(slow)["dispatch"].measured().bandwidth
    on_late_rank = diagnose.gather(late)["dispatch"].measured().bandwidth
    assert on_slow_path is not None
    assert on_late_rank is not None
    # The wire from 2 to 1 is slow in one case only; what the program gets is bad in both.
    assert on_slow_path.edge[1, 2] < 0.5 * on_late_rank.edge[1, 2]
    assert on_slow_path.ingress[1] < 0.75 * on_late_rank.ingress[1]
    assert on_late_rank.effective[1] < 0.8 * on_late_rank.ingress[1]
    assert np.isnan(np.diagonal(on_late_rank.edge)).all()


def test_a_summary_is_linear_in_the_size_of_the_group() -> None:
    def numbers(num_ranks: int) -> int:
        found = of_kind(simulate(CPU, num_ranks, 8, seed=8))
        return sum(
            np.size(value) for value in vars(found).values() if isinstance(value, np.ndarray)
        )

    assert numbers(32) - numbers(16) <= 2 * (numbers(16) - numbers(8)) + 16
