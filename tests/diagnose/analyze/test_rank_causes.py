"""Rules about ranks on generated windows: noise that lasts, missing ranks, lateness now and then, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis
from deep_ep.diagnose.analyze.estimates import Estimates, estimate_kinds
from deep_ep.diagnose.analyze.judged_kind import JudgedKind
from deep_ep.diagnose.analyze.judged_paths import judge_paths
from deep_ep.diagnose.analyze.rank_causes import hot_experts
from deep_ep.diagnose.analyze.thresholds import Thresholds
from deep_ep.testing.faults import HotRank, SlowPath, SlowRank
from generator import Window, simulate_windows
from generator.faults import (
    EarlyRank,
    GeneratorFault,
    Hiccup,
    IntermittentRank,
    NonReporting,
    SlowReceive,
    SlowSend,
)
from generator.machines import CLUSTER, GPU, Machine
from support.launch import on_all_cores

NODES = replace(GPU, ranks_per_node=8)
NUM_ROUNDS = 64


def diagnosed(snapshots: Sequence[diagnose.Snapshot]) -> Diagnosis:
    return diagnose.judge(diagnose.gather(snapshots))


def judged(
    machine: Machine, num_ranks: int, faults: Sequence[Sequence[GeneratorFault]], seed: int
) -> list[tuple[Window, Diagnosis]]:
    windows = list(
        simulate_windows(machine, num_ranks, NUM_ROUNDS, faults, seed, capacity=2 * NUM_ROUNDS)
    )
    return list(zip(windows, on_all_cores(diagnosed, (w.snapshots for w in windows))))


@pytest.mark.parametrize("num_ranks", [4, 16])
@pytest.mark.parametrize("fault", [SlowRank, SlowSend, SlowReceive, EarlyRank])
def test_intervals_hold_what_was_injected(fault: type[SlowRank], num_ranks: int) -> None:
    """Stated are 95 %; what a rank differs from others anyway, and what these vary by, is in them."""
    injected = [[fault(seed % num_ranks, 40e-6)] for seed in range(20)]
    held = [
        low <= 40 <= high
        for _, found in judged(NODES, num_ranks, injected, 600)
        for low, high in (verdict.interval_us for verdict in found.verdicts)
    ]
    assert len(held) >= 35
    assert np.mean(held) >= 0.9


def estimates(snapshots: Sequence[diagnose.Snapshot]) -> dict[str, Estimates]:
    matrices = diagnose.gather(snapshots)
    paths = judge_paths(matrices, dict.fromkeys(matrices, Thresholds.of("cuda")))
    return {e.operation: e for e in estimate_kinds(matrices, paths)}


def test_nobody_knows_what_a_missing_rank_received() -> None:
    ((window, _),) = judged(NODES, 8, [[]], 700)
    for kind, e in estimates([s for s in window.snapshots if s.rank != 3]).items():
        others = np.delete(e.load, 3)
        assert others == pytest.approx(np.ones(7), abs=0.05), kind
        # What it sent, the others know.
        assert np.isnan(e.load[3]) == (kind == "dispatch")


def test_the_load_of_a_rank_is_what_all_layers_together_give_it() -> None:
    """A median over four routings that take turns is none of theirs: healthy ranks looked hot by it."""
    ((window, found),) = judged(replace(GPU, layers=4, skew=0.3), 8, [[]], 710)
    for kind, e in estimates(window.snapshots).items():
        handled = np.nansum(found.measured[kind].tokens, axis=1 if kind == "dispatch" else 0)
        assert e.load == pytest.approx(handled / handled.mean(), abs=1e-9), kind


def late_every(rank: int, period: int, late_s: float) -> list[GeneratorFault]:
    return [Hiccup(rank, op, late_s) for op in range(1, 2 * NUM_ROUNDS + 1, period)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_ranks", [4, 16])
@pytest.mark.parametrize("burst", [1, 20])
def test_a_rank_that_is_late_now_and_then_is_named_with_its_share_and_mean_cost(
    num_ranks: int, burst: int
) -> None:
    """In 30 % of the operations, one by one or 20 in a row, each after the other."""
    late = [[IntermittentRank(seed % num_ranks, 50e-6, 0.3, burst)] for seed in range(20)]
    held = []
    right = 0
    for window, found in judged(NODES, num_ranks, late, 800):
        (rank,) = (fault.rank for fault in window.faults if isinstance(fault, IntermittentRank))
        # A window may fall between two bursts.
        right += found.keys == window.truth.keys
        mean_us = window.truth.effects_us.get(("comp-slow", rank), 0.0)
        for verdict in found.verdicts:
            assert verdict.cause == "late at times"
            assert verdict.seen_in == pytest.approx(mean_us / 50, abs=0.15)
            assert verdict.evidence["lateness_when_late_us"] == pytest.approx(50, abs=8)
            assert burst == 1 or verdict.evidence["longest_burst_operations"] >= 10
            low, high = verdict.interval_us
            held.append(low <= mean_us <= high)
    # A window may hold hardly more than the end of a burst.
    assert right >= 16
    assert np.mean(held) >= 0.9


@pytest.mark.parametrize("num_ranks", [4, 16])
def test_who_is_late_to_every_combine_and_half_of_the_dispatches_is_late_for_good(
    num_ranks: int,
) -> None:
    """As a trainer's are who is late: half of its dispatches come behind a notify, in which it was late already."""
    late = [[Hiccup(1, op, 50e-6) for op in range(1, 2 * NUM_ROUNDS + 1) if op % 4 != 1]] * 3
    for _, found in judged(NODES, num_ranks, late, 840):
        assert found.keys == {("comp-slow", 1)}
        assert {v.cause for v in found.verdicts} == {"late"}
        (combine,) = (v for v in found.verdicts if v.operation == "combine")
        assert combine.effect_us == pytest.approx(50, abs=8)


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_one_burst_is_enough(num_ranks: int) -> None:
    late = [[Hiccup(1, op, 50e-6) for op in range(41, 61)]] * 3
    for _, found in judged(NODES, num_ranks, late, 830):
        assert found.keys == {("comp-slow", 1)}
        assert {v.evidence["longest_burst_operations"] for v in found.verdicts} <= {19, 20, 21}


@pytest.mark.parametrize("late_us", [30, 60])
@pytest.mark.parametrize("period", [100, 25])
def test_hiccups_and_what_the_system_does_now_and_then_are_no_cause(
    late_us: int, period: int
) -> None:
    for _, found in judged(NODES, 8, [late_every(2, period, late_us * 1e-6)] * 8, 850):
        assert found.verdicts == []


def test_ticks_that_all_ranks_have_are_no_cause() -> None:
    for _, found in judged(replace(NODES, tick=20.0), 8, [[]] * 16, 860):
        assert found.verdicts == []


def test_ticks_that_all_come_in_one_kind_of_operation_are_no_cause() -> None:
    """Every sixth operation is a dispatch. Where a third of all dispatches is late, so is the median of all."""
    generator = np.random.default_rng(1)
    for window in simulate_windows(NODES, 8, NUM_ROUNDS, [[]] * 8, 7, capacity=2 * NUM_ROUNDS):
        matrices = diagnose.gather(window.snapshots)
        for kind, m in matrices.items():
            gap = m.gap + generator.normal(0.0, 9e3, m.gap.shape)
            for rank in range(8):
                gap[m.ops % (6 + 4 * rank) == 1, rank] += 60e3
            matrices[kind] = replace(m, gap=gap)
        assert diagnose.judge(matrices).verdicts == []


@pytest.mark.parametrize("tick", [0.0, 20.0])
def test_one_rank_that_is_late_as_regularly_is_late(tick: float) -> None:
    for _, found in judged(replace(NODES, tick=tick), 8, [late_every(2, 5, 200e-6)] * 4, 865):
        assert found.keys == {("comp-slow", 2)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tail_degrees", [2.0, 3.0])
def test_heavy_tails_are_no_cause(tail_degrees: float) -> None:
    machine = replace(NODES, tail_degrees=tail_degrees, hiccup_share=0.03)
    for num_ranks in (4, 16):
        for _, found in judged(machine, num_ranks, [[]] * 6, 870):
            assert found.verdicts == []


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
@pytest.mark.parametrize("late_us", [50, 200])
def test_a_straggler_that_does_not_report_is_named_from_what_the_others_saw(
    num_ranks: int, late_us: int
) -> None:
    """Its own clock is not known, which is said, and keeps the verdict from being certain."""
    faults = [
        [SlowRank(seed % num_ranks, late_us * 1e-6), NonReporting(seed % num_ranks)]
        for seed in range(6)
    ]
    right = 0
    for window, found in judged(NODES, num_ranks, faults, 900):
        right += found.keys == window.truth.keys
        for verdict in found.verdicts:
            assert verdict.effect_us == pytest.approx(late_us, rel=0.1, abs=8)
            assert verdict.certainty <= 0.9
            assert verdict.where == "did not report"
            assert verdict.evidence["ranks_that_waited_for_it"] > num_ranks / 2
            assert "did not report" in verdict.next_step
            assert found.savings_us["dispatch"] == pytest.approx(window.saving_us, rel=0.15, abs=6)
    # Slower paths than it is late may hide it from its own node.
    assert right >= 5


@pytest.mark.parametrize(("ranks_per_node", "num_ranks"), [(4, 12), (8, 16)])
@pytest.mark.parametrize("late_us", [20, 200])
def test_how_late_a_straggler_is_that_does_not_report_is_told_by_its_node(
    ranks_per_node: int, num_ranks: int, late_us: int
) -> None:
    """Its node waits for the data of other nodes as it does, so what it is later than these is its own."""
    machine = replace(CLUSTER, ranks_per_node=ranks_per_node)
    faults = [[SlowRank(seed, late_us * 1e-6), NonReporting(seed)] for seed in range(8)]
    half, held = [], []
    for window, found in judged(machine, num_ranks, faults, 920):
        assert found.keys == window.truth.keys
        for low, high in (verdict.interval_us for verdict in found.verdicts):
            half.append((high - low) / 2)
            held.append(low <= late_us <= high)
    assert np.median(half) < 8
    assert np.mean(held) >= 0.8


def test_who_waited_for_a_rank_that_does_not_report_is_counted_over_all_kinds() -> None:
    """Late by little it comes last in some kinds of operation only."""
    faults = [[SlowRank(seed % 8, 7e-6), NonReporting(seed % 8)] for seed in range(16)]
    for _, found in judged(NODES, 8, faults, 940):
        assert all(v.evidence["ranks_that_waited_for_it"] > 4 for v in found.verdicts)


def test_a_rank_is_hot_whose_tokens_cost_five_us() -> None:
    machine = replace(CLUSTER, ranks_per_node=8)
    for window, found in judged(machine, 8, [[HotRank(seed, 1.1)] for seed in range(8)], 930):
        assert found.keys == window.truth.keys


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_rank_that_does_not_report_and_is_not_waited_for_is_not_named(num_ranks: int) -> None:
    for _, found in judged(NODES, num_ranks, [[NonReporting(1)]] * 4, 950):
        assert found.verdicts == []
        assert "dispatch: no counters from rank 1" in found.remarks


@pytest.mark.parametrize("delay_s", [20e-6, 100e-6])
def test_who_waits_at_its_fence_for_a_slow_link_is_not_late(delay_s: float) -> None:
    """Waiting begins when NVLink has taken what was sent; that time is the path's."""
    fenced = replace(CLUSTER, ranks_per_node=8, fenced=True)
    injected = [[SlowPath(seed % 8, (seed + 3) % 8, delay_s)] for seed in range(4)]
    for window, found in judged(fenced, 8, injected, 900):
        assert found.keys == window.truth.keys, found.verdicts


@pytest.mark.parametrize("num_ranks", [12, 16])
def test_nobody_is_late_for_how_long_links_take_what_its_node_sends(num_ranks: int) -> None:
    """What is handed over last comes last, and ranks of the larger of two nodes send more within it."""
    machine = replace(
        CLUSTER,
        ranks_per_node=8,
        path_per_token=0.04,
        fenced=True,
        combine_by_destination=num_ranks == 16,
    )
    for _, found in judged(machine, num_ranks, [[]] * 3, 910):
        assert not found.verdicts


@pytest.mark.parametrize("load", [1.3, 2.0])
def test_a_rank_with_more_tokens_that_is_late_without_them_is_both(load: float) -> None:
    """Tokens cost it nothing ahead of a dispatch, so more than they explain is left there."""
    injected = [[HotRank(3, load), SlowRank(3, 50e-6)]] * 4
    for _, found in judged(NODES, 16, injected, 940):
        assert found.keys == {("mixed-slow", 3), ("comp-slow", 3)}


def test_where_nobody_knows_what_tokens_cost_a_hot_rank_is_not_late_as_well() -> None:
    """It gets all tokens, as many in every operation."""
    for _, found in judged(CLUSTER, 4, [[HotRank(1, 4.0)]] * 4, 945):
        assert found.keys == {("mixed-slow", 1)}


def test_a_rank_that_is_late_by_far_more_than_tokens_could_cost_is_not_hot() -> None:
    """Also where noise hides how much later it is, and nobody knows what tokens cost."""
    noisy = replace(GPU, rank_noise=60.0, noise_memory=2.0)
    for window, _ in judged(noisy, 3, [[HotRank(1, 1.25), SlowRank(1, 200e-6)]] * 6, 5):
        for e in estimates(window.snapshots).values():
            unknown = replace(
                e.by_work, time=0 * e.by_work.time, each=0 * e.by_work.each, is_known=False
            )
            kind = JudgedKind(replace(e, by_work=unknown, by_drain=unknown), Thresholds.of("cuda"))
            assert not hot_experts(kind)


def test_tokens_that_others_get_for_a_while_hide_no_rank_that_always_has_more() -> None:
    """What tokens explain in each operation is no noise."""
    moving = replace(CLUSTER, ranks_per_node=8, moving_hot_share=1.5)
    for _, found in judged(moving, 8, [[HotRank(3, 1.3)]] * 6, 950):
        assert ("mixed-slow", 3) in found.keys


@pytest.mark.parametrize(("num_ranks", "seed"), [(16, 1814800049), (8, 133700062), (8, 133700103)])
def test_ranks_whose_loads_differ_for_good_are_not_late(num_ranks: int, seed: int) -> None:
    """What a token costs is known with an error, which makes a busy rank late in every operation."""
    machine = replace(CLUSTER, ranks_per_node=8, skew=0.25, clock_error=0.5, host_clock_error=0.3)
    (window,) = simulate_windows(machine, num_ranks, 64, [[]], seed, capacity=128)
    assert not diagnosed(window.snapshots).verdicts
