"""Snapshots to matrices: alignment by operation number, exact differences, missing is not zero."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from deep_ep import EPArgumentError, diagnose
from deep_ep.diagnose.collect.group_matrices import gather_group
from deep_ep.group import thread_groups
from deep_ep.testing.faults import SlowRank
from generator import simulate
from generator.machines import CLUSTER, CPU, NORMAL_OF_ONE_NODE


def test_rows_wait_and_columns_are_waited_for() -> None:
    """With fewer than ten operations nothing is trimmed, so means and sums agree."""
    snapshots = simulate(CPU, 4, 9, seed=1)
    measured = diagnose.gather(snapshots)["dispatch"].measured()
    for s in snapshots:
        counters = s.operations["dispatch"]
        np.testing.assert_allclose(measured.wait_us[s.rank] * 9e3, counters["wait_ns"])
        np.testing.assert_allclose(measured.bytes[s.rank] * 9, counters["bytes"])


def test_operations_are_aligned_by_number_not_by_slot() -> None:
    snapshots = simulate(CPU, 4, 10, seed=3, capacity=64)
    shorter = simulate(CPU, 4, 10, seed=3, capacity=8)
    mixed = [snapshots[0], snapshots[1], shorter[2], snapshots[3]]
    whole, part = diagnose.gather(snapshots)["combine"], diagnose.gather(mixed)["combine"]
    np.testing.assert_array_equal(whole.ops, part.ops)
    kept = np.isin(whole.ops, shorter[2].operations["combine"].operations()[:, -1, 0])
    assert 0 < kept.sum() < kept.size
    np.testing.assert_array_equal(part.wait[kept], whole.wait[kept])
    assert np.isnan(part.wait[~kept, 2]).all()
    assert np.isfinite(part.wait[~kept, 1]).all()


def test_a_missing_rank_is_nan_and_not_zero() -> None:
    dispatch = diagnose.gather(simulate(CPU, 4, 10, seed=4)[:3])["dispatch"]
    assert np.isnan(dispatch.mean_tokens[3]).all()
    wait_us = dispatch.measured().wait_us
    assert np.isnan(wait_us[3]).all()
    assert np.isfinite(wait_us[:3]).all()
    assert dispatch.place.hosts == ("host0", "host0", "host0", "")
    assert dispatch.place.devices[3] == dispatch.place.nodes[3] == -1


def test_a_source_that_was_not_heard_is_nan() -> None:
    snapshots = simulate(CPU, 4, 10, seed=5)
    snapshots[1].operations["dispatch"].ring[:, 2, :] = 0
    dispatch = diagnose.gather(snapshots)["dispatch"]
    measured = dispatch.measured()
    for matrix in (dispatch.path, dispatch.late, dispatch.tokens, measured.wait_us):
        assert np.isnan(matrix[1, 2])
        assert np.isfinite(matrix[2, 1])


def test_waiting_for_notices_is_waiting_and_no_sending() -> None:
    late = simulate(
        CLUSTER, 4, 24, [SlowRank(1, 1e-3)], seed=7, capacity=48, kinds=NORMAL_OF_ONE_NODE
    )
    matrices = diagnose.gather(late)
    notify, dispatch = (matrices[kind].measured() for kind in ("notify", "normal dispatch"))
    others = [0, 2, 3]
    assert (notify.own_wait_us[others] > 900).all()
    assert (notify.send_us < 100).all()
    assert (dispatch.send_us > 1).all()
    assert (dispatch.send_us < 100).all()


def test_stamps_beyond_the_exact_range_of_floats_are_subtracted_exactly() -> None:
    snapshots = simulate(CPU, 2, 10, seed=6)
    expected = diagnose.gather(snapshots)["dispatch"]
    for s in snapshots:
        ring = s.operations["dispatch"].ring
        used = ring[:, -1, 0] > 0
        ring[used, :-1, :3] += 2**61
        ring[used, -1, 1:] += np.where(ring[used, -1, 1:] != 0, 2**61, 0)
    moved = diagnose.gather(snapshots)["dispatch"]
    np.testing.assert_array_equal(moved.path, expected.path)
    np.testing.assert_array_equal(moved.gap, expected.gap)


def test_one_hiccup_does_not_paint_a_column() -> None:
    snapshots = simulate(CPU, 4, 20, seed=8)
    calm = diagnose.gather(snapshots)["dispatch"].measured().wait_us
    for s in snapshots:
        ring = s.operations["dispatch"].ring
        ring[np.flatnonzero(ring[:, -1, 0])[0], 2, :3] += 10**9
    shaken = diagnose.gather(snapshots)["dispatch"].measured().wait_us
    assert np.abs(shaken - calm).max() < 300


def test_ranks_of_one_host_and_node_share_a_node() -> None:
    snapshots = [
        replace(s, host=f"host{s.rank // 4}", node=s.rank // 2)
        for s in simulate(CPU, 6, 10, seed=11)
    ]
    assert diagnose.gather(snapshots)["dispatch"].place.nodes.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_window_holds_later_operations_only() -> None:
    long, short = simulate(CPU, 4, 20, seed=9), simulate(CPU, 4, 12, seed=9)
    window = diagnose.gather([now.since(then) for now, then in zip(long, short)])["combine"]
    assert window.ops.tolist() == [2 * i for i in range(13, 21)]
    assert (window.heard == 8).all()


def test_a_window_of_another_rank_is_refused() -> None:
    first, second = simulate(CPU, 2, 3)
    with pytest.raises(EPArgumentError, match="rank 0 of 2, the earlier one of rank 1 of 2"):
        first.since(second)


def test_snapshots_travel_through_a_group() -> None:
    """Thread groups pickle what they exchange, as the others do."""
    snapshots = [pickle.loads(pickle.dumps(s)) for s in simulate(CPU, 1, 3)]
    gathered = gather_group(thread_groups(1)[0], lambda: snapshots[0])
    assert gathered is not None
    assert gathered["dispatch"].num_operations == 3
