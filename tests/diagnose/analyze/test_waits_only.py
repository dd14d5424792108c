"""Verdicts from windows of summed waiting: who lasts is named, and nobody else, at any size of group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import EPArgumentError
from deep_ep.diagnose.analyze.waits_only.judge import judge_waits
from deep_ep.diagnose.analyze.waits_only.lasting import LEAST_WINDOWS, MOST_WINDOWS
from deep_ep.diagnose.analyze.waits_only.sampling import LEAST_STEPS, Windows, since
from deep_ep.diagnose.compat import diagnose_matrix
from deep_ep.diagnose.core.causes import COMM_SLOW, COMP_SLOW, MIXED_SLOW
from deep_ep.diagnose.core.diagnosis import Diagnosis
from deep_ep.testing.faults import SlowPath, SlowRank
from generator import simulate_windows
from generator.faults import (
    EarlyRank,
    GeneratorFault,
    IntermittentRank,
    SlowEgress,
    SlowIngress,
    SlowNvlinkOut,
)
from generator.machines import CLUSTER, Machine

Matrix = npt.NDArray[np.float64]

KINDS = ("dispatch", "combine")
OPERATIONS = 32
NODES = Machine(**{**CLUSTER.__dict__, "ranks_per_node": 8})


def even(num_ranks: int) -> Matrix:
    """Everybody waits 10 for everybody."""
    return np.full((num_ranks, num_ranks), 10.0)


def late(num_ranks: int, *ranks: int, wait: float, own_row: float = 10.0) -> Matrix:
    """Columns of late ranks; the diagonal stays healthy, and so does what they wait themselves."""
    m = even(num_ranks)
    m[:, ranks] = wait
    m[ranks, :] = own_row
    np.fill_diagonal(m, 10.0)
    return m


def changed(m: Matrix, where: Any, wait: float) -> Matrix:
    """With this waiting in a cell (receiver, source), a row, or a column."""
    m[where] = wait
    return m


def two_nodes() -> Matrix:
    node = np.arange(16) // 8
    return np.where(node[:, None] == node, 450.0, 25_000.0)


def again(matrix: Any, times: int = 8) -> dict[str, Matrix]:
    """The same in all windows of both kinds."""
    windows = np.array([matrix] * times, np.float64)
    return dict.fromkeys(KINDS, windows)


def undecided(diagnosis: Diagnosis) -> str:
    (said,) = (r for r in diagnosis.remarks if "undecided" in r)
    return said


def random_windows(seed: int, times: int, late_ns: Matrix) -> dict[str, Matrix]:
    """Sums of waiting from times of entering, [n] of which are later, and of paths."""
    generator = np.random.default_rng(seed)
    num_ranks = len(late_ns)

    def window() -> Matrix:
        usual = 10.0 * (1 + 0.05 * generator.standard_normal((num_ranks, num_ranks)))
        entered = generator.exponential(3.0, (OPERATIONS, num_ranks)) + late_ns
        path = usual + generator.exponential(0.1 * usual, (OPERATIONS, *usual.shape))
        waits = entered[:, None, :] + path - entered[:, :, None]
        return np.asarray(np.maximum(waits, 0.0).sum(axis=0))

    return {kind: np.stack([window() for _ in range(times)]) for kind in KINDS}


def host_bound(
    seed: int, fault: SlowRank | EarlyRank | SlowEgress | SlowIngress
) -> dict[str, Matrix]:
    """Windows of eight ranks whose hosts start an operation every 300 us, 120 us after the last has ended."""
    generator = np.random.default_rng(seed)
    effect, rank = fault.delay_s * 1e6, fault.rank
    waits = np.zeros((LEAST_WINDOWS, OPERATIONS, 2, 8, 8))
    ended = np.zeros(8)
    for number, wait in enumerate(waits.reshape(-1, 8, 8)):
        entered = 300.0 * number + generator.exponential(3.0, 8)
        entered = np.maximum(entered, ended + 160.0)
        path = 8.0 + generator.exponential(1.0, (8, 8))
        if isinstance(fault, (SlowRank, EarlyRank)):
            entered[rank] += effect if isinstance(fault, SlowRank) else -effect
        else:
            (path if isinstance(fault, SlowIngress) else path.T)[rank] += effect
        np.fill_diagonal(path, 0.0)
        wait[:] = np.maximum(entered[None, :] + path - entered[:, None], 0.0)
        ended = entered + wait.max(axis=1)
    return {kind: waits[:, :, i].sum(axis=1) for i, kind in enumerate(KINDS)}


def generated(
    machine: Machine, num_ranks: int, fault: GeneratorFault | None, seed: int
) -> dict[str, Matrix]:
    """Windows of a run that follows the protocol."""
    each = OPERATIONS * len(KINDS)
    faults = [[fault] if fault else []]
    (run,) = simulate_windows(
        machine, num_ranks, OPERATIONS * LEAST_WINDOWS, faults, seed, each * LEAST_WINDOWS
    )
    ends = range(0, each * LEAST_WINDOWS + 1, each)
    return {
        kind: np.diff([run.first(end).wait_matrix(kind) for end in ends], axis=0).astype(float)
        for kind in KINDS
    }


LATE = {(COMP_SLOW, 5)}
# The truth, or nobody where waiting does not tell; never anybody else.
CASES: dict[str, tuple[Any, set[tuple[str, Any]]]] = {
    "F1": ([[10, 10_000_000], [0, 10]], set()),
    "F2": (
        [[10, 10, 10_000, 10_000], [10, 10, 10_000, 10_000], [0, 0, 10, 10], [0, 0, 10, 10]],
        set(),
    ),
    "F4": (late(8, 5, 6, 7, wait=1e4, own_row=0.0), {(COMP_SLOW, r) for r in (5, 6, 7)}),
    "F5 1.5x": (late(8, 5, wait=15), LATE),
    "F5 4x": (late(8, 5, wait=40), LATE),
    "F5 EP32": (late(32, 5, wait=30), LATE),
    "F6": (changed(even(8), (2, 6), 50), set()),
    "F7": (changed(two_nodes(), (2, 6), 4500), set()),
    "F8": (changed(even(8), 3, 130), set()),
    "F8 early": (changed(changed(even(8), np.s_[:, 3], 0), 3, 130), {(MIXED_SLOW, 3)}),
    "F9": (late(8, 3, wait=130), {(COMP_SLOW, 3)}),
    "F13 EP64": (changed(even(64), (2, 1), 10_000), set()),
    "half": (late(8, 4, 5, 6, 7, wait=1e6, own_row=0.0), set()),
    "F14": (late(8, 1, 4, wait=4e5), {(COMP_SLOW, 1), (COMP_SLOW, 4)}),
}


@pytest.mark.parametrize("unit", [1.0, 1e6, 1e-6])
@pytest.mark.parametrize("case", CASES)
def test_the_known_cases_name_the_truth_or_nobody_at_any_scale(case: str, unit: float) -> None:
    matrix, truth = CASES[case]
    diagnosis = judge_waits(again(np.array(matrix) * unit))
    assert diagnosis.keys == truth
    if len(matrix) < 5:
        assert f"{len(matrix)} of {len(matrix)} ranks reported" in undecided(diagnosis)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8, 16, 32, 64, 128])
def test_healthy_jitter_names_nobody_at_any_size(num_ranks: int) -> None:
    # F10: the rule of the mean names somebody in most of them from 8 ranks on.
    generator = np.random.default_rng(num_ranks)
    theirs = 0
    for _ in range(max(3, 60 // num_ranks)):
        windows = generator.exponential(20.0, (2, MOST_WINDOWS, num_ranks, num_ranks))
        theirs += any(diagnose_matrix(windows[0, 0]).values())
        for known in (None, [f"host{rank // 8}" for rank in range(num_ranks)]):
            assert judge_waits(dict(zip(KINDS, windows)), hosts=known).keys == set()
    assert theirs or num_ranks < 8


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.sampled_from([5, 8, 12, 16, 33]),
    late_ns=st.sampled_from([40.0, 200.0]),
    num_windows=st.integers(LEAST_WINDOWS, MOST_WINDOWS),
)
def test_of_any_group_the_late_ranks_are_named_and_nobody_of_a_healthy_one(
    seed: int, num_ranks: int, late_ns: float, num_windows: int
) -> None:
    generator = np.random.default_rng(seed)
    slow = generator.choice(num_ranks, generator.integers(0, (num_ranks - 1) // 2), replace=False)
    windows = random_windows(seed, num_windows, np.isin(np.arange(num_ranks), slow) * late_ns)
    diagnosis = judge_waits(windows, operations=OPERATIONS, unit_ns=1e3)
    assert diagnosis.keys == {(COMP_SLOW, int(rank)) for rank in slow}
    for verdict in diagnosis.verdicts:
        assert verdict.effect_us == pytest.approx(late_ns, rel=0.3)


def test_a_single_long_operation_is_not_taken_for_many() -> None:
    # F11: 580 healthy operations, and one in which rank 3 came 20 ms later.
    windows = np.random.default_rng(11).gamma(58.0, 2_000.0, (2, MOST_WINDOWS, 8, 8))
    windows[:, 4, :, 3] += 20e6
    assert judge_waits(dict(zip(KINDS, windows)), operations=58).keys == set()
    assert any(diagnose_matrix(windows[0].sum(axis=0)).values())


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        (None, None),
        (SlowRank(3, 20e-6), (COMP_SLOW, 3)),
        (SlowPath(2, 5, 50e-6), (COMM_SLOW, (2, 5))),
        (SlowPath(2, 5, 200e-6), (COMM_SLOW, (2, 5))),
        (SlowEgress(6, 50e-6), (COMM_SLOW, 6)),
        (SlowIngress(6, 50e-6), (COMM_SLOW, 6)),
        (EarlyRank(1, 50e-6), (MIXED_SLOW, 1)),
    ],
)
def test_whose_doing_it_is_follows_from_both_kinds(fault: Any, key: Any) -> None:
    for seed in range(3):
        windows = generated(CLUSTER, 8, fault, seed)
        diagnosis = judge_waits(windows, operations=OPERATIONS, hosts=["a"] * 8)
        assert diagnosis.keys == ({key} if key else set())


IS_LATE = "late, if only at times, or a slow way out"
IS_EARLY = "early, if only at times, or a slow way in"


@pytest.mark.parametrize(
    ("fault", "named", "said"),
    [
        (SlowRank(6, 60e-6), {(COMP_SLOW, 6)}, ""),
        (SlowRank(6, 160e-6), {(COMP_SLOW, 6)}, ""),
        (EarlyRank(6, 60e-6), {(MIXED_SLOW, 6)}, ""),
        (SlowEgress(6, 160e-6), {(COMM_SLOW, 6)}, ""),
        (SlowIngress(6, 160e-6), {(COMM_SLOW, 6)}, ""),
        (SlowEgress(6, 500e-6), {(COMM_SLOW, 6)}, ""),
        (SlowIngress(6, 500e-6), {(COMM_SLOW, 6)}, ""),
        # Nobody is held up any more: a link leaves others' waiting as it is, a late rank waits less.
        (SlowEgress(6, 60e-6), set(), IS_LATE),
        (SlowIngress(6, 60e-6), set(), IS_EARLY),
    ],
)
def test_links_are_told_from_ranks_where_hosts_are_slower_than_what_is_waited_for(
    fault: Any, named: set[Any], said: str
) -> None:
    for seed in range(3):
        windows = host_bound(seed, fault)
        for hosts in (["a"] * 8, ["a", "b"] * 4):
            found = judge_waits(windows, operations=OPERATIONS, unit_ns=1e3, hosts=hosts)
            assert found.keys == named
            assert len(found.verdicts) <= len(KINDS)
            assert not said or f"{said}: rank 6;" in undecided(found)


def behind_fences(per_node: int, fault: Any, seed: int) -> Diagnosis:
    """What is said of eight ranks, so many on a node, whose fences wait for what they have sent."""
    machine = replace(CLUSTER, fenced=True, ranks_per_node=per_node)
    hosts = [f"node{rank // per_node}" for rank in range(8)]
    windows = generated(machine, 8, fault, seed)
    return judge_waits(windows, operations=OPERATIONS, hosts=hosts)


@pytest.mark.parametrize("effect_s", [20e-6, 50e-6, 200e-6, 2e-3])
@pytest.mark.parametrize("per_node", [8, 4, 2])
def test_behind_fences_that_wait_a_slow_way_out_is_not_told_from_a_late_rank(
    per_node: int, effect_s: float
) -> None:
    for fault in (SlowEgress(6, effect_s), SlowRank(6, effect_s)):
        found = behind_fences(per_node, fault, 1)
        assert found.keys == set()
        assert f"{IS_LATE}: rank 6" in undecided(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("effect_s", [20e-6, 50e-6, 200e-6, 2e-3])
@pytest.mark.parametrize("per_node", [8, 4, 2])
def test_behind_fences_that_wait_a_slow_way_in_names_nothing_that_is_not_slow(
    per_node: int, effect_s: float
) -> None:
    for seed in range(3):
        found = behind_fences(per_node, SlowIngress(6, effect_s), seed)
        assert found.keys <= {(COMM_SLOW, 6), *((COMM_SLOW, (rank, 6)) for rank in range(6))}
        # The others hardly wait for each other, and more for it than for anybody.
        assert found.keys or (per_node, effect_s) != (8, 20e-6)


def test_behind_fences_that_wait_the_source_of_a_slow_path_is_not_named() -> None:
    assert behind_fences(8, SlowPath(2, 5, 50e-6), 1).keys == {(COMM_SLOW, (2, 5))}


def test_who_is_waited_for_in_its_own_node_is_not_early() -> None:
    # The four ranks of the other node wait for its mates, which it makes late.
    machine = replace(CLUSTER, ranks_per_node=4)
    hosts = [f"node{rank // 4}" for rank in range(8)]
    for seed in range(3):
        windows = generated(machine, 8, SlowNvlinkOut(6, 200e-6), seed)
        found = judge_waits(windows, operations=OPERATIONS, hosts=hosts)
        assert found.keys <= {(COMM_SLOW, 6)}


def test_who_is_late_at_times_has_no_slow_link() -> None:
    named = [
        judge_waits(
            generated(CLUSTER, 8, IntermittentRank(3, 200e-6), seed),
            operations=OPERATIONS,
            hosts=["a"] * 8,
        ).keys
        for seed in range(6)
    ]
    assert named.count({(COMP_SLOW, 3)}) > 3
    assert all(keys <= {(COMP_SLOW, 3)} for keys in named)


@pytest.mark.parametrize("known", [{"operations": OPERATIONS}, {"hosts": ["a"] * 8}])
def test_without_what_tells_them_apart_a_late_rank_is_named_and_the_other_cause_said(
    known: dict[str, Any],
) -> None:
    require_likelier(judge_waits(generated(CLUSTER, 8, SlowRank(3, 50e-6), 1), **known))


def require_likelier(found: Diagnosis) -> None:
    verdict, *_ = found.verdicts
    assert verdict.key == (COMP_SLOW, 3)
    assert "A slow way out of it may look the same" in verdict.next_step


def test_what_looks_the_same_is_undecided_or_the_likelier_is_named() -> None:
    """Behind fences ranks of a node do not wait for each other, as if a rank's way out were slow."""
    windows = generated(replace(CLUSTER, fenced=True), 8, SlowRank(3, 50e-6), 1)
    known: dict[str, Any] = {"hosts": ["a"] * 8, "operations": OPERATIONS}
    found = judge_waits(windows, **known)
    assert not found.verdicts
    assert "a slow way out: rank 3" in undecided(found)
    require_likelier(judge_waits(windows, **known, name_likelier=True))


def test_fences_hide_nothing_between_nodes() -> None:
    machine = replace(CLUSTER, fenced=True, ranks_per_node=1)
    hosts = [f"node{rank}" for rank in range(8)]
    for fault, key in ((SlowRank(6, 50e-6), COMP_SLOW), (SlowEgress(6, 50e-6), COMM_SLOW)):
        for seed in range(3):
            windows = generated(machine, 8, fault, seed)
            found = judge_waits(windows, operations=OPERATIONS, hosts=hosts)
            assert found.keys == {(key, 6)}


def test_of_one_kind_alone_the_side_is_named_and_what_is_missing_said() -> None:
    windows = generated(CLUSTER, 8, SlowRank(3, 50e-6), 1)
    (verdict,) = judge_waits(windows["dispatch"], operations=OPERATIONS).verdicts
    assert (verdict.key, verdict.cause) == ((COMP_SLOW, 3), "sender side")
    assert "Pass all kinds of operation" in verdict.next_step


@pytest.mark.parametrize("known", [True, False])
def test_nodes_are_no_cause(known: bool) -> None:
    hosts = [f"node{rank // 8}" for rank in range(16)] if known else None
    healthy = judge_waits(generated(NODES, 16, None, 5), operations=OPERATIONS, hosts=hosts)
    assert healthy.keys == set()
    windows = generated(NODES, 16, SlowRank(9, 200e-6), 5)
    diagnosis = judge_waits(windows, operations=OPERATIONS, hosts=hosts)
    assert diagnosis.keys == {(COMP_SLOW, 9)}
    assert any("hosts are not known" in remark for remark in diagnosis.remarks) != known
    assert {v.where for v in diagnosis.verdicts} == {"node1 device:1" if known else ""}


# ---- what is not decided


@pytest.mark.parametrize("times", range(1, LEAST_WINDOWS))
def test_too_few_windows_name_nobody_and_say_so(times: int) -> None:
    diagnosis = judge_waits(again(late(8, 5, wait=1e6), times))
    assert diagnosis.keys == set()
    assert f"at least {LEAST_WINDOWS}" in undecided(diagnosis)
    assert diagnosis.measured["dispatch"].wait_us[0, 5] == 1e3


def test_one_matrix_is_one_window() -> None:
    assert undecided(judge_waits(late(8, 5, wait=1e6))).startswith("undecided: one window;")
    (one,) = judge_waits([[7.0]]).remarks
    assert one == "one rank: nothing to compare"


def test_a_slow_link_needs_hosts() -> None:
    windows = generated(CLUSTER, 8, SlowEgress(6, 50e-6), 1)
    diagnosis = judge_waits(windows, operations=OPERATIONS)
    assert diagnosis.keys == set()
    assert "rank 6 seem" in undecided(diagnosis)


def test_what_does_not_last_is_undecided() -> None:
    windows = again(even(8), 10)["dispatch"]
    windows[:7, :, 5] = 100.0
    assert "others wait for rank 5" in undecided(judge_waits(windows))
    assert "in 7 of 10 windows" in undecided(judge_waits(windows))


def test_what_is_too_small_is_undecided() -> None:
    small = again(late(8, 5, wait=18e3))
    assert "exceeds 40 us in 0 of 8 windows" in undecided(judge_waits(small, delta_ns=40e3))
    assert judge_waits(small, delta_ns=30e3).keys == LATE
    assert judge_waits(small).keys == LATE


def test_of_more_windows_the_latest_count() -> None:
    before, after = again(late(8, 2, wait=1e3), 30), again(late(8, 5, wait=1e3), MOST_WINDOWS)
    windows = {kind: np.concatenate([before[kind], after[kind]]) for kind in KINDS}
    assert judge_waits(windows).keys == LATE


# ---- what a larger load explains


@pytest.mark.parametrize(("num_ranks", "per_node"), [(8, 8), (16, 8)])
def test_loads_that_differ_for_good_name_nobody(num_ranks: int, per_node: int) -> None:
    machine = replace(CLUSTER, skew=0.25, ranks_per_node=per_node)
    hosts = [f"node{rank // per_node}" for rank in range(num_ranks)]
    told = 0
    for seed in range(4):
        windows = generated(machine, num_ranks, None, seed)
        diagnosis = judge_waits(windows, operations=OPERATIONS, hosts=hosts)
        assert diagnosis.keys == set()
        told += any("in combines only" in remark for remark in diagnosis.remarks)
    assert told


def in_one_kind(kind: str) -> dict[str, Matrix]:
    return again(even(8)) | {kind: again(late(8, 5, wait=100.0, own_row=0.0))[kind]}


def test_who_is_late_to_combines_only_is_not_told_from_a_hot_rank() -> None:
    windows = in_one_kind("combine")
    assert judge_waits(windows).keys == set()
    assert "rank 5 in combines only" in undecided(judge_waits(windows))
    assert judge_waits(windows["combine"], operation="combine").keys == set()


def test_load_explains_nothing_that_dispatches_show() -> None:
    assert judge_waits(in_one_kind("dispatch")).keys == LATE


@pytest.mark.parametrize(("dispatches", "spread"), [(4.0, 0.0), (20.0, 10.0)])
def test_load_explains_what_dispatches_hardly_show(dispatches: float, spread: float) -> None:
    windows = in_one_kind("combine")
    columns = spread * np.resize([1.0, -1.0], 8)
    columns[5] = dispatches
    windows["dispatch"] = again(changed(100.0 + np.tile(columns, (8, 1)), 5, 0.0))["dispatch"]
    assert judge_waits(windows, operations=1, unit_ns=1e3).keys == set()
    columns[5] = 60.0
    windows["dispatch"] = again(changed(100.0 + np.tile(columns, (8, 1)), 5, 0.0))["dispatch"]
    assert judge_waits(windows, operations=1, unit_ns=1e3, hosts=["a"] * 8).verdicts[0].rank == 5


def test_a_hot_rank_is_said_beside_a_late_one() -> None:
    late_rank = late(8, 2, wait=100.0, own_row=0.0)
    windows = again(late_rank)
    windows["combine"] = again(changed(late_rank.copy(), np.s_[:, 5], 200.0))["combine"]
    diagnosis = judge_waits(windows, operations=1, unit_ns=1e3)
    assert diagnosis.keys == {(COMP_SLOW, 2)}
    assert "rank 5 in combines only" in undecided(diagnosis)


def test_a_rank_is_early_in_every_kind_and_only_if_others_wait_for_nobody() -> None:
    windows = again(CASES["F8 early"][0], 10)
    assert judge_waits(windows).keys == {(MIXED_SLOW, 3)}
    assert judge_waits(windows["dispatch"]).keys == set()
    combines = judge_waits(windows | {"dispatch": again(even(8), 10)["dispatch"]})
    assert combines.keys == set()
    assert IS_EARLY not in " ".join(combines.remarks)
    # It lasts too little for a verdict, and is there.
    combine = windows["combine"].copy()
    combine[:8, :, 5] += 100.0
    assert judge_waits(windows | {"combine": combine}).keys == set()


# ---- what a verdict says


REAL = """
0.42 1.10 0.86 0.66 73.9 0.99 0.77 0.83 6.61 7.71 9.71 11.7 11.1 10.3 7.83 11.6
2.39 0.45 0.60 0.56 71.7 0.77 0.46 0.66 5.72 4.93 8.01 10.1 8.91 8.57 6.46 10.2
3.34 1.67 0.48 0.65 74.1 0.90 0.92 1.26 8.91 10.4 5.05 7.33 8.62 8.00 7.59 11.9
3.34 1.93 0.76 0.42 74.7 1.02 1.04 1.30 8.90 11.1 6.35 8.03 10.9 9.91 7.25 12.8
1.00 0.33 0.34 0.39 0.33 0.30 0.39 0.37 4.36 4.81 4.27 5.24 2.93 2.78 4.02 5.95
3.57 1.81 0.81 0.85 74.2 0.47 1.02 1.39 11.2 11.5 10.6 10.5 7.75 7.40 7.96 13.3
2.87 1.43 0.74 0.74 73.5 0.80 0.51 0.91 9.83 11.2 9.59 10.2 10.8 10.4 5.01 7.31
2.73 1.33 0.81 0.70 73.9 0.92 0.52 0.47 11.3 12.2 10.3 11.6 12.0 11.1 5.67 8.20
18.0 17.7 22.1 20.9 98.4 19.7 20.6 20.7 0.40 2.67 1.40 0.98 1.19 1.16 0.91 2.39
16.6 15.6 20.0 20.5 94.7 17.9 19.8 18.8 0.50 0.39 0.59 0.88 0.58 0.62 0.51 1.06
23.4 23.4 16.4 15.2 93.5 19.6 19.9 21.0 0.51 1.85 0.33 0.85 0.77 0.61 0.48 1.18
21.6 20.0 13.6 13.4 94.4 16.9 19.6 18.1 0.53 2.62 1.52 0.39 1.04 1.08 0.91 2.00
23.7 22.9 21.0 21.0 90.8 12.6 19.7 20.9 0.52 2.05 0.84 0.81 0.45 0.67 0.54 1.48
21.6 22.6 19.8 17.7 91.5 13.0 23.9 19.8 0.55 2.21 0.92 0.81 0.77 0.35 0.54 1.45
24.6 25.1 21.4 21.4 98.8 20.8 18.2 16.0 0.94 2.82 1.47 1.49 1.33 1.23 0.42 1.92
21.3 21.3 18.7 17.5 91.4 17.0 12.1 13.3 0.33 1.56 0.72 0.67 0.48 0.73 0.56 0.47
"""


def test_a_real_matrix_of_two_nodes_names_its_late_rank() -> None:
    # Published measurement, rounded: rank 4 is late; the two directions between nodes differ by 2.
    matrix = [[float(value) for value in line.split()] for line in REAL.split("\n") if line]
    for hosts in (None, ["a"] * 8 + ["b"] * 8):
        assert judge_waits(again(matrix), hosts=hosts).keys == {(COMP_SLOW, 4)}
        assert "one window" in undecided(judge_waits(matrix, hosts=hosts))


def test_what_a_verdict_says() -> None:
    hosts = ["node0"] * 4 + ["node1"] * 4
    windows = again(late(8, 5, wait=500.0))
    diagnosis = judge_waits(windows, hosts=hosts, operations=10, unit_ns=100.0, delta_ns=1.0)
    assert diagnosis.verdicts == [], (
        "490 units of 100 ns over 10 operations are 4.9 us of each kind"
    )
    windows = again(late(8, 5, wait=2010.0))
    diagnosis = judge_waits(windows, hosts=hosts, operations=10, unit_ns=100.0)
    for verdict, kind in zip(diagnosis.verdicts, KINDS):
        assert (verdict.kind, verdict.operation) == (COMP_SLOW, kind)
        assert verdict.where == "node1 device:1"
        assert verdict.effect_us == pytest.approx(20.0)
        # 7 of 8 receivers wait for it.
        assert verdict.saving_us == pytest.approx(20.0 * 7 / 8)
        assert diagnosis.savings_us[kind] == pytest.approx(20.0 * 7 / 8)
        assert verdict.share == pytest.approx(7 * 2010 / (7 * 2010 + 10))
        assert verdict.evidence == {"windows": 8, "windows_with_it": 8}
    assert diagnosis.source == "waits"
    assert diagnosis.hosts == tuple(hosts)
    assert diagnosis.measured["combine"].wait_us[0, 5] == pytest.approx(20.1)
    assert diagnosis.measured["combine"].num_operations == 10
    assert not any("unit" in remark for remark in diagnosis.remarks)


def test_three_equally_late_ranks_save_nothing_alone_but_all_together() -> None:
    diagnosis = judge_waits(again(CASES["F4"][0]), unit_ns=1000.0)
    assert [verdict.saving_us for verdict in diagnosis.verdicts] == [0.0] * 6
    assert diagnosis.savings_us["dispatch"] == pytest.approx(9990 * 5 / 8)


def test_what_is_not_known_is_said() -> None:
    said = " ".join(judge_waits(even(8)).remarks)
    assert "taken for nanoseconds" in said
    assert "effects are of a window" in said


# ---- what ranks hand in


def test_missing_ranks_leave_a_partial_result_that_says_so() -> None:
    matrix = late(8, 5, wait=100.0)
    matrix[2, :] = np.nan
    matrix[4, 2] = np.nan  # it sent nothing, either
    diagnosis = judge_waits(again(matrix), hosts=["node0"] * 8)
    assert diagnosis.keys == LATE
    assert any("rank 2 did not report" in remark for remark in diagnosis.remarks)
    assert (diagnosis.hosts[2], diagnosis.devices[2]) == ("", -1)
    matrix[[0, 1, 3]] = np.nan
    assert "4 of 8 ranks reported" in undecided(judge_waits(again(matrix)))
    assert judge_waits(again(np.full((8, 8), np.nan))).keys == set()


@pytest.mark.parametrize(("silent", "nodes"), [([0], "-00111222"), ([3, 4, 5], "000---111")])
def test_nodes_are_numbered_without_those_of_silent_ranks(silent: list[int], nodes: str) -> None:
    matrix = even(9)
    matrix[silent] = np.nan
    hosts = ["", *"aabbbccc"] if len(silent) == 1 else [*"aaabbbccc"]
    diagnosis = judge_waits(again(matrix), hosts=hosts)
    assert diagnosis.nodes == tuple(-1 if node == "-" else int(node) for node in nodes)


def test_a_late_rank_that_does_not_report_is_named_by_the_others() -> None:
    matrix = late(8, 5, wait=100.0)
    matrix[5] = np.nan
    assert {subject for _, subject in judge_waits(again(matrix)).keys} == {5}


def test_windows_without_a_rank_do_not_count_for_it() -> None:
    windows = again(late(8, 5, wait=100.0))
    for of_kind in windows.values():
        of_kind[:4] = np.nan
    assert "4 windows" in undecided(judge_waits(windows))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_numbers_are_judged_or_refused(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    values = st.sampled_from([0.0, 1.0, 5.0, 1e18, 1e300, -1.0, float("nan"), float("inf")])
    shape = data.draw(st.sampled_from([(5, num_ranks, num_ranks), (num_ranks, num_ranks)]))
    size = int(np.prod(shape))
    drawn = data.draw(st.lists(values, min_size=size, max_size=size))
    matrix = np.reshape(drawn, shape)
    usable = data.draw(st.booleans())
    if usable:
        matrix = np.where(np.isfinite(matrix) & (matrix >= 0), matrix, 2.0)
    try:
        judge_waits(matrix)
    except EPArgumentError:
        assert not usable


def test_the_diagonal_says_nothing() -> None:
    matrix = late(8, 5, wait=100.0)
    for own in (0.0, 1e9, np.nan):
        np.fill_diagonal(matrix, own)
        assert judge_waits(again(matrix)).keys == LATE


def test_lists_arrays_and_tensors_are_taken_and_left_as_they_are() -> None:
    windows = again(late(8, 5, wait=100.0))["dispatch"]
    for given_ in (
        windows.tolist(),
        windows.astype(np.int64),
        torch.tensor(windows).long(),
        torch.tensor(windows).bfloat16(),
    ):
        assert judge_waits(given_).keys == LATE
    assert windows[0, 0, 0] == 10.0


@pytest.mark.parametrize(
    ("matrix", "arguments", "message"),
    [
        ([[1, 2, 3], [4, 5, 6]], {}, r"int64 of shape \[2, 3\]"),
        ([1, 2], {}, r"shape \[2\]"),
        (3.0, {}, r"shape \[\]"),
        (np.zeros((2, 2, 2, 2)), {}, r"shape \[2, 2, 2, 2\]"),
        (np.zeros((0, 2, 2)), {}, r"\[0\] windows"),
        ({}, {}, "no kind of operation"),
        ({"a": np.zeros((5, 2, 2)), "b": np.zeros((4, 2, 2))}, {}, r"a, b with \[5, 4\] windows"),
        ([np.zeros((2, 2)), [[0, -7], [1, 0]]], {}, r"\[0\]\[1\] is -7"),
        ([], {}, r"shape \[0\]"),
        ([[1, 2], [3]], {}, "object of shape"),
        ([["a", "b"], ["c", "d"]], {}, r"str32 of shape \[2, 2\]"),
        ([[0, -7], [1, 0]], {}, r"\[0\]\[1\] is -7"),
        ([[0, 7], [np.inf, 0]], {}, r"\[1\]\[0\] is inf"),
        ([[0, 1, 2], [1, 0, np.nan], [1, 2, 0]], {}, r"\[1\]\[2\] is nan"),
        (
            [[0, 1], [1, 0]],
            {"hosts": ["a"]},
            r"hosts is \['a'\], of windows of 2 ranks; it must be None, or 2 names",
        ),
        ([[0, 1], [1, 0]], {"operations": 0}, "operations is 0"),
        ([[0, 1], [1, 0]], {"unit_ns": 0.0}, r"unit_ns is 0\.0"),
        ([[0, 1], [1, 0]], {"delta_ns": -1.0}, r"delta_ns is -1\.0"),
        ([[0, 1], [1, 0]], {"within_nodes": True}, "within_nodes is True, .* False without hosts"),
    ],
)
def test_bad_input_is_named(matrix: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EPArgumentError, match="judge_waits: .*" + message):
        judge_waits(matrix, **arguments)


def test_totals_that_decrease_were_reset() -> None:
    before, now = np.array([[5, 7], [9, 9]]), np.array([[6, 9], [9, 11]])
    assert since(before, now).tolist() == [[1, 2], [0, 2]]
    assert since(now, np.array([[3, 20], [20, 20]])).tolist() == [[3, 20], [20, 20]]


def test_short_windows_are_added_up_and_the_latest_are_kept() -> None:
    windows = Windows()
    one = np.ones((2, 3, 3))
    windows.add(one, LEAST_STEPS - 1)
    assert windows.latest().shape == (2, 1, 3, 3), "nothing else is there"
    windows.add(one, 1)
    windows.add(one, LEAST_STEPS)
    assert windows.latest()[0, :, 0, 0].tolist() == [2.0, 1.0]
    for _ in range(2 * MOST_WINDOWS):
        windows.add(one, LEAST_STEPS)
    assert windows.latest().shape == (2, MOST_WINDOWS, 3, 3)
