"""Paths: what slows many of them is one cause, and nothing is named for what clocks or orders do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis, Snapshot
from deep_ep.diagnose.analyze.judged_paths import judge_paths
from deep_ep.diagnose.analyze.path_groups import NIC, NVLINK
from deep_ep.diagnose.analyze.thresholds import Thresholds
from deep_ep.diagnose.core.causes import Cause
from deep_ep.observe.counter_snapshot import CounterSnapshot
from deep_ep.testing.faults import HotRank, SlowPath, SlowRank
from generator import simulate, simulate_windows
from generator.faults import (
    GeneratorFault,
    SlowDownlink,
    SlowEgress,
    SlowIngress,
    SlowNic,
    SlowNodePair,
    SlowRail,
    SlowSend,
    SlowUplink,
)
from generator.machines import CLUSTER, GPU, Machine
from support.launch import on_all_cores

ROUNDS = 64


def diagnosed(snapshots: Sequence[Snapshot]) -> Diagnosis:
    return diagnose.judge(diagnose.gather(snapshots))


def windows(
    machine: Machine,
    num_ranks: int,
    faults: Sequence[GeneratorFault],
    seeds: range,
) -> list[Diagnosis]:
    """A diagnosis per seed."""
    made = simulate_windows(
        machine, num_ranks, ROUNDS, [faults] * len(seeds), seeds.start, capacity=2 * ROUNDS
    )
    return on_all_cores(diagnosed, (window.snapshots for window in made))


def without_clock_errors(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """As rings were that did not tell how far clocks are off."""

    def without(c: CounterSnapshot) -> CounterSnapshot:
        names = tuple("unused" if name == "clock_error" else name for name in c.ring_source_fields)
        return replace(c, ring_source_fields=names)

    return [
        replace(s, operations={kind: without(c) for kind, c in s.operations.items()})
        for s in snapshots
    ]


def on_nodes(machine: Machine, ranks_per_node: int) -> Machine:
    return replace(machine, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(4, 8), (3, 4)])
@pytest.mark.parametrize("fault", [SlowUplink(1, 20e-6), SlowDownlink(2, 20e-6)])
def test_a_nodes_link_is_one_cause(
    fault: SlowUplink | SlowDownlink, num_nodes: int, ranks_per_node: int
) -> None:
    machine = on_nodes(GPU, ranks_per_node)
    cause = "uplink" if isinstance(fault, SlowUplink) else "downlink"
    for found in windows(machine, num_nodes * ranks_per_node, [fault], range(40, 42)):
        assert found.keys == {("comm-slow", ("node", fault.node, cause))}
        for verdict in found.verdicts:
            low, high = verdict.interval_us
            assert verdict.effect_us == pytest.approx(20, abs=1)
            assert low < verdict.effect_us < high
            assert verdict.where == f"host{fault.node}"
            assert f"node {fault.node}" in verdict.next_step


def test_between_two_nodes_a_slow_direction_is_a_pair_where_clocks_are_known() -> None:
    for found in windows(on_nodes(GPU, 4), 8, [SlowUplink(1, 20e-6)], range(44, 48)):
        assert found.keys == {("comm-slow", ("nodes", 1, 0))}


def test_between_two_nodes_clocks_that_drifted_by_less_than_paths_take_are_no_slow_pair() -> None:
    machine = replace(on_nodes(CLUSTER, 8), clock_age_s=0.3, host_drift_ppm=10.0)
    for found in windows(machine, 16, [], range(300, 302)):
        assert not found.verdicts
    for found in windows(machine, 16, [SlowEgress(1, 20e-6)], range(300, 302)):
        assert found.keys == {("comm-slow", 1)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fault",
    [
        SlowSend(5, 20e-6),
        HotRank(5, 4.0),
        SlowNic(5, 4.0),
        SlowRail(3, 20e-6),
        SlowNodePair(0, 2, 20e-6),
        SlowIngress(5, 20e-6),
        SlowEgress(5, 20e-6),
        SlowUplink(1, 20e-6),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_one_cause_adds_no_paths_and_no_rails_where_ports_are_shared(
    fault: GeneratorFault,
) -> None:
    """Tokens of several sources wait for each other, so that a slow one makes others look odd."""
    made = simulate_windows(
        on_nodes(CLUSTER, 8), 24, ROUNDS, [[fault]] * 2, 50, capacity=2 * ROUNDS
    )
    for window in made:
        found = diagnose.judge(diagnose.gather(window.snapshots))
        assert found.keys == window.truth.keys


@pytest.mark.parametrize("fault", [SlowIngress, SlowEgress])
def test_five_us_between_nodes_are_named_where_paths_take_far_longer(
    fault: type[SlowIngress],
) -> None:
    machine = replace(on_nodes(CLUSTER, 4), clock_error=0.5, host_clock_error=0.3)
    made = simulate_windows(
        machine, 12, 256, [[fault(seed, 5e-6)] for seed in range(2)], 77, capacity=512
    )
    for seed, found in enumerate(on_all_cores(diagnosed, (window.snapshots for window in made))):
        assert found.keys == {("comm-slow", seed)}


@pytest.mark.parametrize("fault", [SlowIngress, SlowEgress])
def test_a_slow_port_is_named_and_not_its_paths_one_by_one(fault: type[SlowIngress]) -> None:
    """Of 9 us in 90 a port may be busy by some. What its paths have in common is its own, or nobody's."""
    for found in windows(on_nodes(CLUSTER, 1), 8, [fault(5, 9e-6)], range(4)):
        assert found.keys == {("comm-slow", 5)}


@pytest.mark.parametrize("by_destination", [False, True])
@pytest.mark.parametrize("ranks_per_node", [8, 24])
def test_the_order_of_sending_is_nobodys_fault(
    ranks_per_node: int, *, by_destination: bool
) -> None:
    machine = replace(on_nodes(CLUSTER, ranks_per_node), combine_by_destination=by_destination)
    for found in windows(machine, 24, [], range(60, 63)):
        assert not found.verdicts


IN_TURN = replace(on_nodes(CLUSTER, 4), in_turn=True)


def test_what_is_sent_last_waits_longest_and_is_nobodys_clock() -> None:
    machine = replace(IN_TURN, drift_ppm=10.0, clock_age_s=600.0)
    for found in windows(machine, 12, [], range(52, 55)):
        assert not found.verdicts


@pytest.mark.parametrize("fault", [SlowIngress(5, 50e-6), SlowEgress(5, 50e-6)])
def test_a_slow_side_is_found_where_destinations_are_sent_to_in_turn(
    fault: GeneratorFault,
) -> None:
    for found in windows(IN_TURN, 12, [fault], range(50, 52)):
        assert found.keys == {("comm-slow", 5)}


@pytest.mark.parametrize(
    ("fault", "link", "words"),
    [
        (SlowNic(5, 4.0), NIC, "between nodes"),
        (SlowIngress(5, 20e-6), "", "Every path into rank 5"),
    ],
)
def test_a_slow_nic_slows_the_paths_between_nodes_only(
    fault: GeneratorFault, link: str, words: str
) -> None:
    for found in windows(on_nodes(CLUSTER, 8), 24, [fault], range(70, 71)):
        assert found.keys == {("comm-slow", 5)}
        assert all(words in verdict.next_step for verdict in found.verdicts), link
        assert not any("within the node" in verdict.next_step for verdict in found.verdicts)


def slowed(snapshots: list[Snapshot], paths: Sequence[tuple[int, int]], ns: int) -> list[Snapshot]:
    """The same, with everything on these (receiver, source) paths seen to come later."""
    for receiver, source in paths:
        for counters in snapshots[receiver].operations.values():
            used = counters.ring[:, -1, 0] > 0
            before = counters.ring[used, :-1, 2].max(axis=1)
            counters.ring[used, source, 2] += ns
            counters.ring[used, -1, 2] += counters.ring[used, :-1, 2].max(axis=1) - before
    return snapshots


def test_a_slow_nvlink_port_slows_the_paths_within_the_node_only() -> None:
    snapshots = simulate(on_nodes(GPU, 8), 24, ROUNDS, seed=74, capacity=2 * ROUNDS)
    into = [(5, source) for source in range(8) if source != 5]
    found = diagnose.judge(diagnose.gather(slowed(snapshots, into, 20_000)))
    assert found.keys == {("comm-slow", 5)}
    assert {v.cause for v in found.verdicts} == {"ingress"}
    assert all("within the node" in v.next_step and "NVLink" in v.next_step for v in found.verdicts)


def test_many_single_paths_without_a_common_cause_are_one_remark() -> None:
    generator = np.random.default_rng(75)
    snapshots = simulate(on_nodes(GPU, 8), 24, ROUNDS, seed=75, capacity=2 * ROUNDS)
    paths = [(i, j) for i in range(24) for j in range(24) if i != j and generator.random() < 0.08]
    found = diagnose.judge(diagnose.gather(slowed(snapshots, paths, 20_000)))
    assert found.verdicts == []
    said = [remark for remark in found.remarks if "single paths are slow" in remark]
    assert len(said) == 2
    assert f"{len(paths)} single paths are slow" in said[0]


def test_what_is_measured_exceeds_what_is_usual_by_the_effect() -> None:
    """No verdict rests on what a fit leaves over."""
    injected: list[GeneratorFault] = [SlowPath(2, 13, 15e-6), SlowIngress(13, 30e-6)]
    found = windows(on_nodes(CLUSTER, 8), 24, [injected[0]], range(80, 82))
    found += windows(on_nodes(CLUSTER, 8), 24, injected[1:], range(80, 82))
    for diagnosis in found:
        for verdict in diagnosis.verdicts:
            if verdict.cause == "path":
                over = verdict.evidence["path_us"] - verdict.evidence["usual_path_us"]
                assert over == pytest.approx(verdict.effect_us)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_where_clocks_are_known_two_ranks_are_enough_for_a_slow_path(num_ranks: int) -> None:
    for found in windows(GPU, num_ranks, [SlowPath(1, 0, 30e-6)], range(84, 88)):
        assert found.keys == {("comm-slow", (1, 0))}
        assert not any("paths are not judged" in remark for remark in found.remarks)
    for found in windows(GPU, num_ranks, [SlowRank(1, 30e-6)], range(84, 88)):
        assert found.keys == {("comp-slow", 1)}


def test_two_clocks_that_are_off_by_what_is_stated_are_no_slow_path() -> None:
    machine = replace(GPU, clock_error=0.7, path_spread=0.0)
    for found in windows(machine, 2, [], range(84, 104)):
        assert not found.verdicts


@pytest.mark.parametrize("num_ranks", [4, 16])
@pytest.mark.parametrize("delay_s", [50e-6, 2e-3])
def test_where_clocks_have_drifted_far_a_slow_path_is_named_or_which_way_is_not_known(
    num_ranks: int, delay_s: float
) -> None:
    machine = replace(on_nodes(GPU, 8), clock_error=400.0, host_clock_error=400.0, drift_ppm=20.0)
    right = 0
    for seed in range(90, 94):
        snapshots = simulate(
            machine, num_ranks, ROUNDS, [SlowPath(2, 1, delay_s)], seed=seed, capacity=2 * ROUNDS
        )
        found = diagnose.judge(diagnose.gather(without_clock_errors(snapshots)))
        right += found.keys == {("comm-slow", (2, 1))}
        for verdict in found.verdicts:
            assert verdict.effect_us == pytest.approx(delay_s * 1e6, rel=0.05, abs=3)
            assert verdict.cause in ("path", "path or back")
    assert right >= 3


def test_everything_there_at_the_first_look_says_nothing_of_paths() -> None:
    machine = replace(on_nodes(GPU, 8), hook_us=300.0)
    for found in windows(machine, 16, [SlowPath(3, 9, 50e-6)], range(100, 103)):
        assert not found.verdicts


@pytest.mark.parametrize("link", [NVLINK, NIC])
def test_coarse_timers_and_offsets_that_are_wrong_by_two_us_are_no_slow_paths(link: str) -> None:
    machine = replace(
        on_nodes(CLUSTER, 24 if link == NVLINK else 4),
        timer_step_ns=1024,
        clock_error=1.0,
        host_clock_error=1.0,
    )
    for found in windows(machine, 24, [], range(110, 114)):
        assert not found.verdicts
    for found in windows(machine, 24, [SlowPath(3, 9, 20e-6)], range(110, 112)):
        assert found.keys == {("comm-slow", (3, 9))}


@pytest.mark.parametrize(
    ("cause", "in_combine", "is_named"),
    [
        (Cause.INGRESS, "busy", True),
        (Cause.INGRESS, "quiet", False),
        (Cause.INGRESS, "unknown", False),
        (Cause.EGRESS, "quiet", True),
        (Cause.EGRESS, "unknown", True),
    ],
)
def test_a_side_that_is_busy_at_times_shows_where_experts_in_demand_do_not(
    cause: Cause, in_combine: str, is_named: bool
) -> None:
    """Those make more rows come into their rank in dispatch, and go out of it in combine."""
    snapshots = simulate(on_nodes(GPU, 8), 16, ROUNDS, [], 5, capacity=2 * ROUNDS)
    matrices = diagnose.gather(snapshots)
    ours = np.zeros((16, 16), bool)
    ours[5, 8:] = True
    ours = ours if cause == Cause.INGRESS else ours.T
    busy = {"path_burst": np.where(ours, 12e3, 0.0), "path_burst_share": np.where(ours, 0.4, 0.0)}
    unknown = {"path": np.where(ours, np.nan, matrices["combine"].path)}
    changes = {"busy": busy, "quiet": {}, "unknown": unknown}[in_combine]
    matrices = {
        "dispatch": replace(matrices["dispatch"], **busy),
        "combine": replace(matrices["combine"], **changes),
    }
    judged = judge_paths(matrices, dict.fromkeys(matrices, Thresholds.of("cuda")))
    found = [(one.group.cause, one.group.number) for one in judged.causes if one.at_times]
    assert ((cause, 5) in found) == is_named


@pytest.mark.parametrize(("delay_s", "seed"), [(15e-6, 9), (20e-6, 2)])
def test_a_clock_moves_what_one_of_its_node_sees_as_well(delay_s: float, seed: int) -> None:
    """Of the paths into a rank that leaves its fence last, only that of a late one is seen."""
    old_clocks = replace(CLUSTER, ranks_per_node=8, fenced=True, drift_ppm=10.0, clock_age_s=600.0)
    faults = [SlowEgress(2, delay_s), SlowRank(1, delay_s)]
    found = diagnosed(simulate(old_clocks, 16, ROUNDS, faults, seed=seed, capacity=2 * ROUNDS))
    assert found.keys == {("comm-slow", 2), ("comp-slow", 1)}
