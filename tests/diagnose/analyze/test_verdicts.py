"""Generated timestamps with known faults: the verdicts name what was injected, and nothing else.

Thresholds were chosen on other seeds than the ones used here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis
from deep_ep.testing import faults
from deep_ep.testing.faults import Fault, HotRank, SlowPath, SlowRank
from generator import simulate, simulate_windows
from generator.faults import (
    EarlyRank,
    Everything,
    GeneratorFault,
    Hiccup,
    SlowEgress,
    SlowIngress,
    SlowNodePair,
    SlowRail,
    SlowReceive,
    SlowSend,
)
from generator.machines import CLUSTER, CPU, GPU, Machine, StampRule
from support.launch import on_all_cores

NUM_ROUNDS = 30
FIRST_SEED = 7_000


def judge(machine: Machine, num_ranks: int, injected: Sequence[Fault], seed: int) -> Diagnosis:
    return diagnose.judge(
        diagnose.gather(simulate(machine, num_ranks, NUM_ROUNDS, injected, seed=seed))
    )


def effect_s(machine: Machine) -> float:
    """Three times the jitter; a path's own time hides as much of a rank's lateness."""
    return (3 * machine.jitter + machine.path) * 1e-6


def nothing(_generator: np.random.Generator, _num_ranks: int, _machine: Machine) -> list[Fault]:
    return []


def slow_rank(generator: np.random.Generator, num_ranks: int, machine: Machine) -> list[Fault]:
    return [SlowRank(int(generator.integers(num_ranks)), effect_s(machine))]


def slow_path(generator: np.random.Generator, num_ranks: int, machine: Machine) -> list[Fault]:
    src, dst = generator.permutation(num_ranks)[:2].tolist()
    return [SlowPath(src, dst, effect_s(machine))]


def hot_rank(generator: np.random.Generator, num_ranks: int, machine: Machine) -> list[Fault]:
    return [HotRank(int(generator.integers(num_ranks)), 3.0)]


def one_of_each(generator: np.random.Generator, num_ranks: int, machine: Machine) -> list[Fault]:
    slow, src, dst, hot = generator.permutation(num_ranks)[:4].tolist()
    effect = effect_s(machine)
    return [SlowRank(slow, effect), SlowPath(src, dst, effect), HotRank(hot, 4.0)]


def nearly_half_late(
    generator: np.random.Generator, num_ranks: int, machine: Machine
) -> list[Fault]:
    late = generator.permutation(num_ranks)[: num_ranks // 2 - 1].tolist()
    return [SlowRank(rank, effect_s(machine)) for rank in late]


Scenario = Callable[[np.random.Generator, int, Machine], "list[Fault]"]
# Of a machine: what takes time.
TIMES = (
    "gap", "compute_per_token", "send", "send_per_token", "path", "path_per_token", "drain",
    "drain_per_token", "jitter", "path_jitter",
)  # fmt: skip
# Ranks that share cores in wall time are noisier by far, and judged by that.
WALL = replace(
    CPU,
    stamp_rule=StampRule.FIRST_SIGHT,
    **{name: 50 * getattr(CPU, name) for name in TIMES},
)
MACHINES = {
    "cpu": CPU,
    "cpu with wrong clocks": replace(CPU, clock_error=20.0, drift_ppm=20.0),
    "cpu in wall time": WALL,
    "gpu": GPU,
}
CASES = [
    (nothing, 2),
    (nothing, 8),
    (nothing, 64),
    (slow_rank, 2),
    (slow_rank, 4),
    (slow_rank, 8),
    (slow_rank, 16),
    (slow_path, 4),
    (slow_path, 8),
    (slow_path, 16),
    (hot_rank, 4),
    (hot_rank, 8),
    (one_of_each, 8),
    (one_of_each, 16),
    (one_of_each, 64),
    (nearly_half_late, 8),
    (nearly_half_late, 16),
]


def named_and_expected(
    scenario: Scenario, num_ranks: int, machine: Machine, seed: int
) -> tuple[set[Any], set[Any]]:
    injected = scenario(np.random.default_rng(seed), num_ranks, machine)
    return judge(machine, num_ranks, injected, seed).keys, faults.expected_verdicts(injected)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize(("scenario", "num_ranks"), CASES)
def test_verdicts_name_what_was_injected_and_nothing_else(
    scenario: Scenario, num_ranks: int, machine: Machine
) -> None:
    # All of few windows must be right, but for a fifth of two ranks, which tell little of how noise lasts. The share
    # of many is what benchmarks/diagnosis_accuracy.py measures.
    num_windows = {64: 1, 2: 5}.get(num_ranks, 4)
    wrong = Counter[str]()
    seeds = range(FIRST_SEED, FIRST_SEED + num_windows)
    of_seed = functools.partial(named_and_expected, scenario, num_ranks, machine)
    for seed, (named, expected) in zip(seeds, on_all_cores(of_seed, seeds)):
        if named != expected:
            wrong[
                f"seed {seed}: named {sorted(named, key=str)}, not {sorted(expected, key=str)}"
            ] += 1
    assert sum(wrong.values()) <= (num_windows // 5 if num_ranks == 2 else 0), wrong


@pytest.mark.exhaustive
@settings(max_examples=40)
@given(
    num_ranks=st.integers(4, 12),
    slow=st.integers(0, 11),
    path=st.tuples(st.integers(0, 11), st.integers(0, 11)),
    factors=st.tuples(st.floats(5.0, 50.0), st.floats(5.0, 50.0)),
    seed=st.integers(0, 2**31),
)
def test_a_slow_rank_and_a_slow_path_are_told_apart(
    num_ranks: int,
    slow: int,
    path: tuple[int, int],
    factors: tuple[float, float],
    seed: int,
) -> None:
    src, dst = path[0] % num_ranks, path[1] % num_ranks
    injected: list[Fault] = [SlowRank(slow % num_ranks, factors[0] * CPU.jitter * 1e-6)]
    if src != dst:
        injected.append(SlowPath(src, dst, factors[1] * CPU.jitter * 1e-6))
    assert judge(CPU, num_ranks, injected, seed).keys == faults.expected_verdicts(injected)


def test_a_throttled_path_is_named_by_its_bytes() -> None:
    injected = [SlowPath(1, 4, bytes_per_s=5e8)]
    found = judge(CPU, 8, injected, 4)
    assert found.keys == faults.expected_verdicts(injected)
    assert found.verdicts[0].effect_us == pytest.approx(128 * 7168 / 5e8 * 1e6, rel=0.1)


NODES = replace(GPU, ranks_per_node=8)
SIDES_AND_GROUPS = [
    (SlowIngress(5, 20e-6), "ingress", 5),
    (SlowEgress(5, 20e-6), "egress", 5),
    (SlowNodePair(2, 0, 20e-6), "node pair", ("nodes", 2, 0)),
    (SlowRail(3, 20e-6), "rail", ("rail", 3)),
    (SlowPath(21, 3, 20e-6), "path", (21, 3)),
]


@pytest.mark.parametrize(("fault", "cause", "subject"), SIDES_AND_GROUPS)
def test_slow_paths_are_named_by_what_they_have_in_common(
    fault: GeneratorFault, cause: str, subject: object
) -> None:
    snapshots = simulate(NODES, 24, 32, [fault], seed=7)
    found = diagnose.judge(diagnose.gather(snapshots))
    assert found.keys == {("comm-slow", subject)}
    assert {v.cause for v in found.verdicts} == {cause}
    for verdict in found.verdicts:
        assert verdict.effect_us == pytest.approx(20, abs=1)


def test_a_node_that_sees_one_slow_node_and_itself_is_not_slow() -> None:
    """Its ranks come so late that of all other nodes everything is there: half of four is known."""
    for seed in range(30, 32):
        snapshots = simulate(NODES, 32, 64, [SlowNodePair(0, 3, 100e-6)], seed=seed, capacity=128)
        found = diagnose.judge(diagnose.gather(snapshots))
        assert found.keys == {("comm-slow", ("nodes", 0, 3))}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (SlowRank(5, 20e-6), "late"),
        (SlowSend(5, 20e-6), "slow send"),
        (SlowReceive(5, 20e-6), "slow receive"),
        (EarlyRank(5, 30e-6), "early"),
    ],
)
def test_a_rank_is_named_by_where_its_time_goes(fault: GeneratorFault, cause: str) -> None:
    found = diagnose.judge(diagnose.gather(simulate(NODES, 8, 64, [fault], seed=8, capacity=128)))
    assert {v.subject for v in found.verdicts} == {5}
    assert {v.cause for v in found.verdicts} == {cause}


def test_verdicts_say_where_to_go_and_how_sure_they_are() -> None:
    injected = [SlowRank(12, 40e-6), SlowPath(3, 17, 40e-6), SlowNodePair(1, 2, 40e-6)]
    found = diagnose.judge(diagnose.gather(simulate(NODES, 24, 64, injected, seed=9, capacity=128)))
    assert {v.subject: v.where for v in found.verdicts} == {
        12: "host1 cuda:4",
        (3, 17): "host0 cuda:3 > host2 cuda:1",
        ("nodes", 1, 2): "host1 > host2",
    }
    for verdict in found.verdicts:
        low, high = verdict.interval_us
        assert low < verdict.effect_us < high
        assert pytest.approx(verdict.effect_us, abs=2) == 40
        assert verdict.certainty > 0.999
        assert 0 <= verdict.saving_us <= verdict.duration_us
        assert verdict.next_step.endswith((".", ")."))


def test_the_saving_is_what_the_operation_gains_without_the_cause() -> None:
    """Three equally late ranks: removing one gains nothing, removing all gains all."""
    machine = replace(GPU, jitter=0.3, spread=0.0, wander=0.0)
    late = [SlowRank(rank, 60e-6) for rank in (1, 4, 6)]
    (window,) = simulate_windows(machine, 8, 32, [late], seed=10)
    found = diagnose.judge(diagnose.gather(window.snapshots))
    assert found.keys == {("comp-slow", rank) for rank in (1, 4, 6)}
    assert all(v.saving_us < 3 for v in found.verdicts)
    together = found.savings_us["dispatch"] + found.savings_us["combine"]
    assert together / 2 == pytest.approx(window.saving_us, rel=0.1)


def test_a_single_hiccup_is_an_outlier_and_not_a_verdict() -> None:
    snapshots = simulate(GPU, 8, 32, [Hiccup(2, 31, 5e-3)], seed=11)
    found = diagnose.judge(diagnose.gather(snapshots))
    assert found.verdicts == []
    (outlier,) = found.events
    assert (outlier.operation, outlier.number, outlier.rank) == ("dispatch", 31, 2)
    assert outlier.effect_us == pytest.approx(5_000, rel=0.05)


def test_what_slows_everything_is_found_in_the_groups_own_history() -> None:
    history = diagnose.History()

    def judge_with_history(faults: list[GeneratorFault], seed: int) -> Diagnosis:
        snapshots = simulate(NODES, 16, 32, faults, seed=seed)
        return diagnose.judge(diagnose.gather(snapshots), history=history)

    for seed in range(12, 20):
        assert judge_with_history([], seed).verdicts == []
    for since in (1, 2):
        found = judge_with_history([Everything(20e-6)], 20 + since)
        assert found.keys == {("comm-slow", None)}
        for verdict in found.verdicts:
            assert verdict.cause == "everywhere"
            assert verdict.effect_us == pytest.approx(20, abs=1)
            assert verdict.evidence["windows_since"] == since
    assert judge_with_history([], 30).verdicts == []


def test_nobody_is_certain_of_what_has_no_known_error() -> None:
    history = diagnose.History()
    for seed in range(8):
        diagnose.judge(diagnose.gather(simulate(NODES, 16, 32, [], seed=seed)), history=history)
    matrices = diagnose.gather(simulate(NODES, 16, 32, [Everything(20e-6)], seed=8))
    unknown = {
        kind: replace(m, path_error=np.full_like(m.path_error, np.nan))
        for kind, m in matrices.items()
    }
    found = diagnose.judge(unknown, history=history)
    assert found.keys == {("comm-slow", None)}
    assert all(np.isnan(verdict.certainty) for verdict in found.verdicts)


def keys_of_short_window(
    machine: Machine, num_ranks: int, injected: Sequence[Fault], seed: int
) -> set[Any]:
    snapshots = simulate(machine, num_ranks, 64, injected, seed=seed, capacity=128)
    return diagnose.judge(diagnose.gather(snapshots)).keys


@pytest.mark.parametrize("clock_us", [12.0, 2_000_000.0])
@pytest.mark.parametrize("num_ranks", [4, 16])
@pytest.mark.parametrize("fault", [None, SlowRank, SlowEgress, SlowIngress])
def test_how_far_clocks_are_off_does_not_matter(
    fault: Callable[[int, float], Fault] | None, num_ranks: int, clock_us: float
) -> None:
    machine = replace(NODES, clock_error=clock_us, host_clock_error=clock_us, drift_ppm=20.0)
    injected = [fault(1, 50e-6)] if fault else []
    expected: set[Any] = set()
    if fault:
        expected.add(("comp-slow" if fault is SlowRank else "comm-slow", 1))
    if fault and num_ranks > 4:  # two causes are half of what four ranks have
        injected.append(SlowPath(2, 3, 60e-6))
        expected.add(("comm-slow", (2, 3)))
    of_seed = functools.partial(keys_of_short_window, machine, num_ranks, injected)
    assert all(keys == expected for keys in on_all_cores(of_seed, range(19, 22)))


def test_clocks_that_are_off_are_said_and_so_is_what_they_hide() -> None:
    machine = replace(GPU, clock_error=2_000.0)
    found = diagnose.judge(
        diagnose.gather(simulate(machine, 8, 64, [SlowEgress(3, 50e-6)], seed=19, capacity=128))
    )
    assert any("measure_clock_offsets() on all ranks" in remark for remark in found.remarks)
    assert {(v.cause, v.rank) for v in found.verdicts} == {("ingress or egress", 3)}
    assert all(v.effect_us == pytest.approx(50.0, abs=3.0) for v in found.verdicts)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("clock_us", [0.3, 12.0, 400.0])
def test_with_two_or_three_ranks_drifting_clocks_are_no_slow_paths_and_hide_no_late_rank(
    num_ranks: int, clock_us: float
) -> None:
    machine = replace(GPU, clock_error=clock_us)
    for injected in ([], [SlowRank(1, 30e-6)]):
        for seed in range(30, 32):
            snapshots = simulate(machine, num_ranks, 64, injected, seed=seed, capacity=128)
            found = diagnose.judge(diagnose.gather(snapshots))
            assert found.keys == faults.expected_verdicts(injected)
            # What rings say of clocks is enough where these are good to a microsecond.
            unjudged = any("paths are not judged" in remark for remark in found.remarks)
            assert unjudged == (clock_us > 1)


def test_operations_that_are_not_those_of_the_others_are_said() -> None:
    snapshots = simulate(CPU, 4, NUM_ROUNDS, seed=20)
    for counters in snapshots[2].operations.values():
        used = counters.ring[:, -1, 0] > 0
        counters.ring[used, -1, 0] += 1_000
    found = diagnose.judge(diagnose.gather(snapshots))
    assert any("rank 2 reported other operations" in remark for remark in found.remarks)


def test_without_a_ring_waiting_is_shown_and_nobody_named() -> None:
    snapshots = simulate(CPU, 8, NUM_ROUNDS, [SlowRank(3, 5e-3)], seed=9, capacity=0)
    found = diagnose.judge(diagnose.gather(snapshots))
    assert found.verdicts == []
    assert all("undecided, counters have no ring" in remark for remark in found.remarks)
    wait = found.measured["dispatch"].wait_us
    assert (wait[np.arange(8) != 3, 3] > 4000).all()


def test_few_operations_are_undecided() -> None:
    found = diagnose.judge(diagnose.gather(simulate(CPU, 8, 4, [SlowRank(3, 5e-3)])))
    assert found.verdicts == []
    assert "dispatch: undecided, 4 operations counted; 8 are needed" in found.remarks


def test_one_rank_has_nothing_to_compare_with() -> None:
    found = diagnose.judge(diagnose.gather(simulate(CPU, 1, NUM_ROUNDS)))
    assert (found.verdicts, found.remarks) == ([], ["one rank: nothing to compare"])


def test_how_late_a_rank_is_that_does_not_report_is_known_also_below_the_time_of_a_path() -> None:
    """What the others wait for it is that and a path, and it leaves earlier than they do by what it has come later."""
    held = []
    for seed in range(4):
        snapshots = simulate(CLUSTER, 8, 64, [SlowRank(3, 10e-6)], seed=seed, capacity=128)
        found = diagnose.judge(diagnose.gather(snapshots[:3] + snapshots[4:]))
        assert found.keys == {("comp-slow", 3)}
        intervals = [verdict.interval_us for verdict in found.verdicts]
        held += [low < 10 < high for low, high in intervals]
    assert np.mean(held) >= 0.75


def named_together_and_alone(seed: int) -> tuple[bool, bool]:
    late = SlowRank(seed % 8, 10e-6)
    matrices = diagnose.gather(simulate(replace(GPU, jitter=10.0), 8, 64, [late], seed=seed))
    key = ("comp-slow", late.rank)
    return (
        diagnose.judge(matrices).keys == {key},
        key in diagnose.judge({"dispatch": matrices["dispatch"]}).keys,
    )


def test_kinds_that_bear_each_other_out_name_a_rank_that_neither_could() -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + 20)
    together, alone = map(sum, zip(*on_all_cores(named_together_and_alone, seeds)))
    assert together >= 12
    assert 2 * alone <= together
