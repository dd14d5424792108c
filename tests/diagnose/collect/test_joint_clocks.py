"""Offsets of pairs that contradict all others are found, whatever clocks say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_ep import diagnose
from deep_ep.diagnose import Snapshot
from deep_ep.diagnose.collect.joint_clocks import contradictions
from deep_ep.testing.faults import SlowPath
from generator import simulate
from generator.machines import CLUSTER, GPU, NORMAL, NORMAL_OF_ONE_NODE, Kind, Machine

DAY_NS = 86_400 * 10**9
ROUNDS = 64


def entered_with(
    clocks: Sequence[int], wrong: dict[tuple[int, int], int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[receiver, source]: an operation that all enter at once, by clocks and wrong offsets of pairs."""
    clock = np.array(clocks)
    offset = clock[None, :] - clock[:, None]
    for (receiver, source), error in wrong.items():
        offset[receiver, source] += error
        offset[source, receiver] -= error
    return 10**18 + clock[None, :] - offset


@given(st.data())
def test_a_wrong_pair_is_found_to_the_nanosecond(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(4, 12))
    ranks = st.integers(0, num_ranks - 1)
    clocks = data.draw(
        st.lists(st.integers(-DAY_NS, DAY_NS), min_size=num_ranks, max_size=num_ranks)
    )
    receiver, source = data.draw(st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1]))
    error = data.draw(st.integers(-(10**9), 10**9))
    found = contradictions(np.full(num_ranks, 8), entered_with(clocks, {(receiver, source): error}))
    expected = np.zeros((num_ranks, num_ranks))
    expected[receiver, source], expected[source, receiver] = error, -error
    off = ~np.eye(num_ranks, dtype=bool)
    assert np.array_equal(found[off], expected[off])


def test_of_three_ranks_none_can_outvote_a_pair() -> None:
    assert np.isnan(contradictions(np.full(3, 8), entered_with([0, 5, 9], {(0, 1): 7}))).all()


def test_nothing_is_known_of_who_tells_of_another_operation() -> None:
    entered = entered_with(range(6), {(0, 1): 700})
    found = contradictions(np.array([8, 8, 8, 16, 8, -1]), entered)
    assert np.isnan(found[[3, 5]]).all()
    assert np.isnan(found[:, [3, 5]]).all()
    assert (found[0, 1], found[1, 0], found[0, 2]) == (700, -700, 0)


def measured_while_slow(
    snapshots: Sequence[Snapshot], src: int, dst: int, delay_ns: int
) -> list[Snapshot]:
    """As rings are where the path was slow while offsets were measured: half of it is in the offset."""
    bent = []
    for s in snapshots:
        source, error = {dst: (src, delay_ns // 2), src: (dst, -delay_ns // 2)}.get(s.rank, (0, 0))
        kinds = {}
        for kind, counters in s.operations.items():
            ring = counters.ring.copy()
            for name in ("entered", "issued"):
                stamps = ring[:, source, counters.ring_source_fields.index(name)]
                stamps[stamps != 0] += error
            kinds[kind] = replace(counters, ring=ring)
        bent.append(replace(s, operations=kinds))
    return bent


@pytest.mark.parametrize(("machine", "num_ranks"), [(GPU, 4), (GPU, 16), (CLUSTER, 16)])
@pytest.mark.parametrize("seed", range(4))
def test_a_path_that_was_slow_while_clocks_were_measured_is_named_and_its_way_back_is_not(
    machine: Machine, num_ranks: int, seed: int
) -> None:
    slow = SlowPath(2, 1, 50e-6)
    made = simulate(machine, num_ranks, ROUNDS, [slow], seed, capacity=2 * ROUNDS)
    found = diagnose.judge(diagnose.gather(measured_while_slow(made, 2, 1, 50_000)))
    assert {v.edge for v in found.verdicts} == {(2, 1)}, found.verdicts
    assert all(45 < v.effect_us < 55 for v in found.verdicts), found.verdicts


@pytest.mark.parametrize(("nodes", "kinds"), [(1, NORMAL_OF_ONE_NODE), (2, NORMAL)])
def test_hops_of_normal_operations_share_the_clocks(nodes: int, kinds: Sequence[Kind]) -> None:
    """Between nodes a path is a rail's, which is the gateways' hop."""
    machine = replace(CLUSTER, ranks_per_node=8 // nodes)
    src, dst = (2, 1) if nodes == 1 else (2, 6)
    made = simulate(
        machine, 8, ROUNDS, [SlowPath(src, dst, 400e-6)], 3, capacity=2 * ROUNDS, kinds=kinds
    )
    found = diagnose.judge(diagnose.gather(measured_while_slow(made, src, dst, 400_000)))
    assert {v.edge for v in found.verdicts} == {(src, dst)}, found.verdicts
