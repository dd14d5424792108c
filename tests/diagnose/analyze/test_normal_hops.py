"""Hops of normal operations judged together: one cause is one verdict, on the hop where it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis
from deep_ep.diagnose.analyze.estimates import estimate_kinds
from deep_ep.diagnose.analyze.judged_paths import judge_paths
from deep_ep.diagnose.analyze.thresholds import Thresholds
from deep_ep.diagnose.collect.group_matrices import Matrices
from deep_ep.diagnose.collect.rank_summary import summarize
from deep_ep.testing.faults import HotRank, SlowPath, SlowRank
from generator import simulate
from generator.faults import (
    GeneratorFault,
    SlowNicOut,
    SlowReceive,
    SlowReceiver,
    SlowSend,
)
from generator.machines import CLUSTER, NORMAL, NORMAL_OF_ONE_NODE

EFFECT_S = 20e-6
SHAPES = [(1, 8), (2, 4), (4, 2)]
ROUNDS = 24


def gather(
    nodes: int, per_node: int, injected: Sequence[GeneratorFault], seed: int = 1
) -> dict[str, Matrices]:
    machine = replace(CLUSTER, ranks_per_node=per_node, clock_error=0.5, host_clock_error=0.3)
    kinds = NORMAL if nodes > 1 else NORMAL_OF_ONE_NODE
    snapshots = simulate(
        machine, nodes * per_node, ROUNDS, injected, seed, capacity=2 * ROUNDS, kinds=kinds
    )
    return diagnose.gather(snapshots)


def judge(nodes: int, per_node: int, *injected: GeneratorFault) -> Diagnosis:
    return diagnose.judge(gather(nodes, per_node, injected))


def causes(found: Diagnosis) -> set[tuple[str, object]]:
    return {(str(verdict.cause), verdict.subject) for verdict in found.verdicts}


def operations(found: Diagnosis) -> set[str]:
    return {verdict.operation for verdict in found.verdicts}


@pytest.mark.parametrize("seed", [2, 10, 20])
@pytest.mark.parametrize("fault", [SlowPath(0, 1, 50e-6), SlowPath(7, 1, 200e-6)])
def test_a_path_that_a_hop_shows_alone_is_no_side_and_no_pair_of_nodes(
    fault: SlowPath, seed: int
) -> None:
    """With two ranks a node, hops have one path out of a rank within its node, and two from node to node."""
    found = diagnose.judge(gather(4, 2, [fault], seed))
    assert found.keys == {("comm-slow", (fault.src, fault.dst))}


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_nothing_is_named_where_nothing_is_the_matter(nodes: int, per_node: int) -> None:
    found = judge(nodes, per_node)
    hops = NORMAL if nodes > 1 else NORMAL_OF_ONE_NODE
    assert set(found.measured) == {kind.name for kind in hops}
    assert not found.verdicts
    assert not found.remarks


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
@pytest.mark.parametrize(
    ("fault", "cause", "hops"),
    [
        (SlowRank(1, EFFECT_S), "late", {"notify", "normal combine"}),
        (SlowSend(1, EFFECT_S), "slow send", {"normal dispatch"}),
        (SlowReceive(1, EFFECT_S), "slow receive", {"normal dispatch", "normal combine"}),
        (SlowReceiver(1, EFFECT_S), "slow receiver", {"normal dispatch", "normal combine"}),
        (HotRank(1, 2.0), "hot experts", {"normal dispatch", "normal combine"}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, set)) else None,
)
def test_a_cause_of_one_rank_is_one_cause_and_on_the_hops_where_it_passes(
    nodes: int, per_node: int, fault: GeneratorFault, cause: str, hops: set[str]
) -> None:
    found = judge(nodes, per_node, fault)
    assert causes(found) == {(cause, 1)}
    assert operations(found) == hops


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2)])
def test_a_slow_path_of_a_rail_is_no_other_path_behind_the_gateway(
    nodes: int, per_node: int
) -> None:
    """Rows that come late through it look as though ranks and paths within the node were slow."""
    found = judge(nodes, per_node, SlowPath(1, 1 + per_node, EFFECT_S))
    assert causes(found) == {("path", (1, 1 + per_node))}
    assert operations(found) == {"notify", "gateway dispatch", "normal combine"}


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_a_slow_path_within_a_node_is_named_on_every_hop_that_takes_it(
    nodes: int, per_node: int
) -> None:
    found = judge(nodes, per_node, SlowPath(1, 0, EFFECT_S))
    assert causes(found) == {("path", (1, 0))}
    across = {"gateway combine"} if nodes > 1 else set()
    assert operations(found) == {"notify", "normal dispatch", "normal combine"} | across


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 2), (2, 4)])
def test_a_slow_nic_is_one_rank_and_no_rail_nor_the_paths_that_rows_take(
    nodes: int, per_node: int
) -> None:
    found = judge(nodes, per_node, SlowNicOut(1, EFFECT_S))
    assert causes(found) == {("egress", 1)}
    assert nodes == 2 or operations(found) == {"notify", "gateway dispatch", "normal combine"}


def test_a_late_rank_and_a_slow_path_and_a_slow_receiver_are_told_apart() -> None:
    injected = [SlowRank(3, 2 * EFFECT_S), SlowPath(0, 4, EFFECT_S), SlowReceiver(6, EFFECT_S)]
    assert causes(judge(2, 4, *injected)) == {
        ("late", 3),
        ("path", (0, 4)),
        ("slow receiver", 6),
    }


def test_back_pressure_of_one_source_alone_is_no_receiver_s_doing() -> None:
    matrices = gather(1, 8, [])
    for kind in ("normal dispatch", "normal combine"):
        credit = matrices[kind].credit.copy()
        credit[2, 5] += 1e6 * EFFECT_S * 1e3
        matrices[kind] = replace(matrices[kind], credit=credit)
    assert "slow receiver" not in {
        str(verdict.cause) for verdict in diagnose.judge(matrices).verdicts
    }


def test_time_that_a_sender_waits_for_slots_is_not_its_own() -> None:
    matrices = gather(1, 8, [SlowReceiver(1, EFFECT_S)])
    m = matrices["normal dispatch"]
    # One sender was held up by as much as it says that it waited for slots.
    longer, credit = m.span.copy(), m.credit.copy()
    longer[:, 5] += 50_000.0
    credit[1, 5] += 50_000.0
    for waited in (credit, m.credit):
        matrices["normal dispatch"] = replace(m, span=longer, credit=waited)
        paths = judge_paths(matrices, dict.fromkeys(matrices, Thresholds.of("cuda")))
        work = {e.operation: e.work for e in estimate_kinds(matrices, paths)}["normal dispatch"]
        if waited is credit:
            assert np.ptp(work.value) < 0.2 * EFFECT_S * 1e9
        else:
            assert work.value[5] > 20_000.0


@pytest.mark.parametrize("share", [4, 5, 6])
def test_experts_in_demand_are_no_slow_pair_of_nodes(share: float) -> None:
    demanded = gather(2, 8, [HotRank(5, share)], seed=3)
    assert causes(diagnose.judge(demanded)) == {("hot experts", 5)}


def test_own_time_is_counted_once_in_the_hop_in_which_it_passes() -> None:
    for matrices in (gather(2, 4, []), gather(2, 4, [SlowRank(1, EFFECT_S)])):
        for gateway in ("gateway dispatch", "gateway combine"):
            for series in (matrices[gateway].gap, matrices[gateway].span, matrices[gateway].drain):
                assert not series.any()
    late = matrices["notify"].gap - matrices["notify"].gap.mean(axis=1)[:, None]
    assert np.median(late[1:, 1]) > 0.5 * EFFECT_S * 1e9
    host = matrices["normal dispatch"].gap
    assert np.abs(np.median(host[:, 1]) - np.median(host)) < 0.1 * EFFECT_S * 1e9


def test_what_a_gateway_passed_on_says_nothing_of_paths_of_the_last_hop() -> None:
    m = gather(2, 4, [])["normal dispatch"]
    between = m.place.nodes[:, None] != m.place.nodes[None, :]
    assert np.isnan(m.path[between]).all()
    assert np.isfinite(m.path[~between & ~np.eye(8, dtype=bool)]).all()
    assert not m.expected[between].any()
    # They are waited for all the same.
    assert np.isfinite(m.wait_parts[:, between]).all()


def test_a_source_without_rows_leaves_arrivals_stamped() -> None:
    """A queue without rows has no word, so nobody saw one come."""
    machine = replace(CLUSTER, ranks_per_node=None)
    (snapshot, *_) = simulate(
        machine, 4, 10, [HotRank(1, 4.0)], seed=2, capacity=20, kinds=NORMAL_OF_ONE_NODE
    )
    kind = summarize(snapshot).kinds["normal dispatch"]
    assert not kind.tokens.any()
    assert kind.stamps_arrivals
    assert np.isnan(kind.path).all()
