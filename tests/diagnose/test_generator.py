"""The generator of timestamps: exact sums, known causes, and the same numbers however it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep.diagnose.collect.hops import ROW_HOPS
from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.diagnose.core.diagnosis import FloatArray
from deep_ep.testing import faults
from deep_ep.testing.faults import ClockFault, HotRank, SlowPath, SlowRank
from generator import Window, simulate, simulate_windows
from generator.faults import (
    EarlyRank,
    Everything,
    GeneratorFault,
    Hiccup,
    IntermittentRank,
    NicBursts,
    NonReporting,
    NowAndThen,
    PathBursts,
    PausedSender,
    SlowDownlink,
    SlowEgress,
    SlowIngress,
    SlowNic,
    SlowNodePair,
    SlowNvlinkIn,
    SlowNvlinkOut,
    SlowRail,
    SlowReceive,
    SlowReceiver,
    SlowSend,
    SlowUplink,
    Throttled,
    operations_with,
)
from generator.machines import (
    CLUSTER,
    CPU,
    GPU,
    NORMAL,
    NORMAL_OF_ONE_NODE,
    Kind,
    Machine,
    StampRule,
)
from generator.recording import (
    ARRIVAL,
    CLOCK_ERROR,
    ENTERED,
    EXIT,
    ISSUED,
    OP,
    PREVIOUS_EXIT,
    SEEN,
    SENT,
    TIMER_STEP,
    TOKENS,
    WAIT_BEGIN,
)

CALM = replace(
    GPU,
    jitter=0.0,
    path_jitter=0.0,
    spread=0.0,
    wander=0.0,
    clock_error=0.0,
    stamp_rule=StampRule.TRUE_ARRIVAL,
    timer_step_ns=1,
)
TWO_NODES = replace(CALM, ranks_per_node=4)


def window(machine: Machine, injected: Sequence[GeneratorFault], num_ranks: int = 8) -> Window:
    return next(simulate_windows(machine, num_ranks, 20, [injected], seed=3))


def rings(snapshots: Sequence[Snapshot], kind: str) -> np.ndarray:
    """[n, receiver, source or own, columns]."""
    return np.stack([s.operations[kind].operations() for s in snapshots], axis=1)


def path_us(window: Window, kind: str = "dispatch") -> np.ndarray:
    """[receiver, source]: mean time from issuing to arriving."""
    stamps = rings(window.snapshots, kind)[:, :, :-1]
    return (stamps[..., ARRIVAL] - stamps[..., ISSUED]).mean(axis=0) / 1e3


def slower_paths(machine: Machine, injected: GeneratorFault) -> set[tuple[int, int]]:
    """(source, destination) of the paths that are 50 us slower than without the fault."""
    added = path_us(window(machine, [injected])) - path_us(window(machine, []))
    assert np.all((np.abs(added) < 0.01) | (np.abs(added - 50) < 0.01))
    return {(int(src), int(dst)) for dst, src in np.argwhere(added > 25)}


machines = st.builds(
    lambda base, jitter, ranks_per_node, stamp_rule, timer_step_ns, hook_us, skew: replace(
        base,
        jitter=jitter,
        ranks_per_node=ranks_per_node,
        stamp_rule=stamp_rule,
        timer_step_ns=timer_step_ns,
        hook_us=hook_us,
        skew=skew,
        clock_error=1.0,
        host_clock_error=1.0,
        drift_ppm=10.0,
    ),
    st.sampled_from(
        [
            CPU,
            GPU,
            CLUSTER,
            replace(CLUSTER, fenced=True, combine_by_destination=True),
            replace(CLUSTER, layers=3, moving_hot_share=2.0, rank_noise=5.0, congestion=30.0),
        ]
    ),
    st.sampled_from([0.0, 3.0, 10.0]),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from(StampRule),
    st.sampled_from([1, 32, 1000]),
    st.sampled_from([0.0, 100.0]),
    st.sampled_from([0.0, 0.3]),
)
FAULTS: list[GeneratorFault] = [
    SlowRank(0, 50e-6),
    SlowPath(1, 0, 50e-6),
    HotRank(1, 1.5),
    EarlyRank(1, 50e-6),
    SlowSend(0, 50e-6),
    SlowReceive(1, 50e-6),
    SlowIngress(0, 50e-6),
    Hiccup(1, 4, 1e-3),
    IntermittentRank(1, 50e-6),
    SlowUplink(0, 50e-6),
    SlowNic(1),
    Throttled(1, 50e-6, 3.0),
    NicBursts(0, 50e-6, 0.5, 2),
    PathBursts(1, 0, 50e-6, 0.5, 2),
    PausedSender(1, 50e-6),
    Everything(50e-6),
    ClockFault(0, 1.0, 20.0),
]


@settings(max_examples=40, deadline=None)
@given(
    machine=machines,
    num_ranks=st.integers(2, 7),
    injected=st.lists(st.sampled_from(FAULTS), max_size=3),
    seed=st.integers(0, 2**31),
)
def test_every_wait_is_late_and_issue_and_path_and_rings_hold_the_same(
    machine: Machine, num_ranks: int, injected: list[GeneratorFault], seed: int
) -> None:
    for s in simulate(machine, num_ranks, 6, injected, seed=seed):
        require_exact_sums(s)


@pytest.mark.parametrize("kinds", [NORMAL, NORMAL_OF_ONE_NODE])
def test_the_same_holds_for_every_hop_of_normal_operations(kinds: Sequence[Kind]) -> None:
    machine = replace(CLUSTER, ranks_per_node=3 if kinds is NORMAL else None)
    for seed, injected in enumerate([[], [SlowReceiver(1, 50e-6)], *([fault] for fault in FAULTS)]):
        for s in simulate(machine, 6, 6, injected, seed=seed, kinds=kinds):
            require_exact_sums(s)
            assert list(s.operations) == [kind.name for kind in kinds]


def require_exact_sums(s: Snapshot) -> None:
    for kind, counters in s.operations.items():
        parts = counters["late_ns"] + counters["issue_ns"] + counters["path_ns"]
        np.testing.assert_array_equal(counters["wait_ns"], parts)
        assert min(counters["late_ns"].min(), counters["issue_ns"].min()) >= 0
        assert counters["path_ns"].min() >= 0
        # What a gateway passes on it may wait for when the source has issued.
        passed_on = counters["path_ns"] if kind == "normal dispatch" else 0
        assert (counters["credit_ns"] <= counters["issue_ns"] + passed_on).all()
        ring = counters.operations()
        assert len(ring) == counters.ops == 6
        sources, own = ring[:, :-1], ring[:, -1]
        begin = own[:, WAIT_BEGIN, None]
        heard = sources[..., ARRIVAL] != 0
        np.testing.assert_array_equal(heard.sum(axis=0), counters["ops"])
        wait = np.where(heard, np.maximum(sources[..., ARRIVAL] - begin, 0), 0)
        np.testing.assert_array_equal(wait.sum(axis=0), counters["wait_ns"])
        sending = np.minimum(sources[..., ISSUED], sources[..., ARRIVAL])
        sending = np.maximum(sending - np.maximum(sources[..., ENTERED], begin), 0)
        np.testing.assert_array_equal(np.where(heard, sending, 0).sum(axis=0), counters["issue_ns"])
        np.testing.assert_array_equal(wait.max(axis=0), counters["max_wait_ns"])
        np.testing.assert_array_equal(sources[..., TOKENS].sum(axis=0), counters["tokens"])
        spent = own[:, EXIT] - own[:, WAIT_BEGIN]
        assert spent.sum() == counters.own_value("wait_ns") + counters.own_value("drain_ns")
        assert wait.max(axis=1).sum() == counters.own_value("wait_ns")
        assert counters["critical_ops"].sum() == (wait.max(axis=1) > 0).sum()


def test_the_runner_up_decides_how_critical_the_last_was() -> None:
    counters = simulate(GPU, 4, 1, seed=2)[1].operations["dispatch"]
    ring = counters.operations()[0]
    waits = np.sort(np.maximum(ring[:-1, ARRIVAL] - ring[-1, WAIT_BEGIN], 0))
    assert counters["critical_ns"].sum() == waits[-1] - waits[-2] > 0
    assert counters["critical_ns"].argmax() == counters["wait_ns"].argmax()


def test_the_same_seed_gives_the_same_data_and_another_one_does_not() -> None:
    once, again, other = (simulate(GPU, 4, 5, [SlowRank(1, 20e-6)], seed=s) for s in (7, 7, 8))
    np.testing.assert_array_equal(rings(once, "combine"), rings(again, "combine"))
    assert (rings(once, "combine") != rings(other, "combine")).any()


@pytest.mark.parametrize("batch_bytes", [2**28, 1])
def test_a_window_does_not_depend_on_its_batch(
    batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generator._BATCH_BYTES", batch_bytes)
    injected: list[list[GeneratorFault]] = [[], [SlowRank(1, 50e-6)], [HotRank(2)], FAULTS]
    machine = replace(GPU, ranks_per_node=2, skew=0.3, drift_ppm=10.0)
    windows = list(simulate_windows(machine, 4, 5, injected, seed=20))
    assert [w.seed for w in windows] == [20, 21, 22, 23]
    for w, members in zip(windows, injected):
        alone = simulate(machine, 4, 5, members, seed=w.seed)
        for kind in ("dispatch", "combine"):
            np.testing.assert_array_equal(rings(w.snapshots, kind), rings(alone, kind))
            for ours, theirs in zip(w.snapshots, alone):
                one, other = ours.operations[kind], theirs.operations[kind]
                np.testing.assert_array_equal(one.totals, other.totals)
                np.testing.assert_array_equal(one.own, other.own)


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    injected = [SlowRank(1, 50e-6), SlowPath(0, 2, 50e-6)]
    short = simulate(GPU, 4, 5, injected, seed=4)
    long = next(simulate_windows(GPU, 4, 20, [injected], seed=4)).first(10)
    for ours, theirs in zip(long.snapshots, short):
        for kind in ("dispatch", "combine"):
            one, other = ours.operations[kind], theirs.operations[kind]
            np.testing.assert_array_equal(one.operations(), other.operations())
            np.testing.assert_array_equal(one.totals, other.totals)


def test_the_ring_keeps_the_last_operation_of_each_slot() -> None:
    for capacity, expected in ((8, [13, 15, 17, 19]), (7, [7, 9, 11, 13, 15, 17, 19]), (0, [])):
        counters = simulate(GPU, 2, 10, capacity=capacity)[0].operations["dispatch"]
        assert counters.operations()[:, -1, OP].tolist() == expected
        assert counters.ops == 10


def test_without_faults_and_noise_all_ranks_are_alike() -> None:
    steady = replace(CALM, compute_per_token=0, send_per_token=0, drain_per_token=0)
    steady = replace(steady, path_per_token=0.0)
    stamps = rings(simulate(steady, 4, 5, seed=1), "combine")
    entered = stamps[:, range(4), range(4), ENTERED] - stamps[:, :, -1, PREVIOUS_EXIT]
    assert np.ptp(entered[1:]) <= 1
    waits = stamps[:, :, :-1, ARRIVAL] - stamps[:, :, -1:, WAIT_BEGIN]
    off_diagonal = waits[:, ~np.eye(4, dtype=bool)]
    # Each rank sends to rank 0 first and to the last rank last, a fifth of its sending later.
    assert off_diagonal.min() > 5_000
    assert off_diagonal.max() < 9_000


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_slow_rank_enters_later_than_the_others(machine: Machine) -> None:
    late_us = 10 * machine.jitter
    exact = replace(machine, clock_error=0.0, jitter=machine.jitter / 10)
    stamps = rings(simulate(exact, 8, 20, [SlowRank(3, late_us * 1e-6)], seed=5), "dispatch")
    seen_by_0 = stamps[1:, 0, :-1, ENTERED]
    behind = (seen_by_0 - np.median(seen_by_0, axis=1)[:, None]).mean(axis=0) / 1e3
    assert behind.argmax() == 3
    # Less what it starts ahead of the others, whose data it never waits for.
    assert late_us - 2 * machine.path - 10 - machine.jitter < behind[3] < late_us + machine.jitter


@pytest.mark.parametrize(
    ("fault", "field", "added"),
    [
        (SlowRank(3, 50e-6), "gap_ns", 50),
        (EarlyRank(3, 50e-6), "gap_ns", -50),
        (SlowSend(3, 50e-6), "send_ns", 50),
        (SlowReceive(3, 50e-6), "drain_ns", 50),
    ],
)
def test_a_rank_fault_is_in_that_ranks_own_time_only(
    fault: GeneratorFault, field: str, added: float
) -> None:
    machine = replace(GPU, timer_step_ns=1)
    faulty, healthy = window(machine, [fault]), window(machine, [])
    for ours, theirs in zip(faulty.snapshots, healthy.snapshots):
        for own in ("gap_ns", "send_ns", "drain_ns"):
            one, other = (s.operations["combine"].own_value(own) for s in (ours, theirs))
            expected = added * 20e3 if (ours.rank, own) == (3, field) else 0
            assert one - other == pytest.approx(expected, abs=100)


@pytest.mark.parametrize(
    ("fault", "slower"),
    [
        (SlowPath(2, 5, 50e-6), lambda src, dst: (src, dst) == (2, 5)),
        (SlowIngress(5, 50e-6), lambda _src, dst: dst == 5),
        (SlowEgress(2, 50e-6), lambda src, _dst: src == 2),
        (SlowNodePair(0, 1, 50e-6), lambda src, dst: src < 4 <= dst),
        (SlowRail(2, 50e-6), lambda src, dst: {src, dst} == {2, 6}),
        (SlowUplink(1, 50e-6), lambda src, dst: dst < 4 <= src),
        (SlowDownlink(1, 50e-6), lambda src, dst: src < 4 <= dst),
        (SlowNvlinkIn(2, 50e-6), lambda src, dst: src < 4 and dst == 2),
        (SlowNvlinkOut(2, 50e-6), lambda src, dst: src == 2 and dst < 4),
        (Everything(50e-6), lambda _src, _dst: True),
    ],
)
def test_a_path_fault_is_on_its_paths_only(
    fault: GeneratorFault, slower: Callable[[int, int], bool]
) -> None:
    pairs = [(src, dst) for src in range(8) for dst in range(8) if src != dst]
    assert slower_paths(TWO_NODES, fault) == {pair for pair in pairs if slower(*pair)}


def test_paths_between_nodes_take_longer_and_across_rails_longest() -> None:
    by_tokens = replace(TWO_NODES, path_per_token=0.0, path_per_token_between=0.0)
    found = path_us(window(by_tokens, []))
    assert found[0, 1] == pytest.approx(8, abs=0.01)
    assert found[1, 5] == pytest.approx(12, abs=0.01)
    assert found[1, 4] == pytest.approx(14, abs=0.01)


def test_a_throttled_path_takes_time_by_its_bytes() -> None:
    added = path_us(window(CALM, [SlowPath(1, 4, bytes_per_s=5e9)])) - path_us(window(CALM, []))
    assert added[4, 1] == pytest.approx(128 * 7168 / 5e9 * 1e6, rel=0.1)


def test_a_hot_rank_receives_its_share_of_the_tokens() -> None:
    faulty = window(GPU, [HotRank(3, 2.0)])
    tokens = [s.operations["dispatch"]["tokens"].sum() / (20 * 1024) for s in faulty.snapshots]
    assert tokens[3] == pytest.approx(2.0, abs=0.05)
    assert np.delete(tokens, 3) == pytest.approx([6 / 7] * 7, abs=0.05)
    assert faulty.truth.effects_us == {("mixed-slow", 3): pytest.approx(51.2)}


def test_a_hiccup_is_in_one_operation() -> None:
    faulty, healthy = (window(CALM, f) for f in ([Hiccup(2, 7, 1e-3)], []))
    late, usual = (rings(w.snapshots, "dispatch") for w in (faulty, healthy))
    gaps = late[:, 2, 2, ENTERED] - late[:, 2, -1, PREVIOUS_EXIT]
    usual_gaps = usual[:, 2, 2, ENTERED] - usual[:, 2, -1, PREVIOUS_EXIT]
    added = dict(zip(late[:, 2, -1, OP].tolist(), (gaps - usual_gaps).tolist()))
    assert added.pop(1) == 0
    assert added.pop(7) == pytest.approx(1_000_000, abs=5)
    assert max(added.values()) <= 5
    assert faulty.truth.keys == frozenset()
    assert faulty.truth.outliers == {(7, 2)}


@pytest.mark.parametrize(("share", "burst"), [(0.3, 1), (0.3, 20), (0.2, 10)])
def test_a_rank_that_is_late_now_and_then_is_late_in_its_share_and_in_bursts(
    share: float, burst: int
) -> None:
    fault = IntermittentRank(1, 5e-5, share, burst)
    (late,) = simulate_windows(GPU, 2, 2000, [[fault]], seed=4, capacity=4000)
    (usual,) = simulate_windows(GPU, 2, 2000, [[]], seed=4, capacity=4000)
    added = np.zeros(4000)
    for kind in ("dispatch", "combine"):
        gaps = [
            w.snapshots[1].operations[kind].operations()[:, 1, ENTERED]
            - w.snapshots[1].operations[kind].operations()[:, -1, PREVIOUS_EXIT]
            for w in (late, usual)
        ]
        numbers = late.snapshots[1].operations[kind].operations()[:, -1, OP]
        added[numbers - 1] = (gaps[0] - gaps[1]) / 1e3
    is_late = added[1:] > 25  # the first has no exit before it
    np.testing.assert_allclose(added[1:], 50.0 * is_late, atol=0.1)
    assert is_late.mean() == pytest.approx(share, abs=0.06)
    ends = np.flatnonzero(np.diff(is_late.astype(int)))
    lengths = np.diff(ends)[int(is_late[0]) :: 2] if burst > 1 else np.zeros(0)
    assert (np.isin(lengths, (burst, 2 * burst))).all()
    assert late.truth.keys == {("comp-slow", 1)}
    assert late.truth.effects_us["comp-slow", 1] == pytest.approx(50 * is_late.mean(), abs=0.1)


def test_a_rank_that_is_hardly_ever_late_need_not_be_named() -> None:
    rarely = window(GPU, [IntermittentRank(1, 5e-5, 0.02)]).truth
    assert rarely.keys == frozenset()
    assert rarely.tolerated == {("comp-slow", 1)}


def both_kinds(machine: Machine, injected: Sequence[GeneratorFault]) -> tuple[Window, FloatArray]:
    """A long window of two nodes, and [operations, receiver, source or own, columns] of both kinds in turn."""
    (w,) = simulate_windows(machine, 8, 500, [injected], seed=4, capacity=1000)
    kinds = [rings(w.snapshots, kind) for kind in ("dispatch", "combine")]
    return w, np.stack(kinds, axis=1).reshape(1000, 8, 9, -1)


def added_to_paths_us(injected: GeneratorFault) -> tuple[Window, FloatArray]:
    """The window, and [operations, receiver, source] by how much longer each way takes with the fault."""
    w, slow = both_kinds(TWO_NODES, [injected])
    _, usual = both_kinds(TWO_NODES, [])
    ways = [(s[..., ARRIVAL] - s[..., ISSUED])[:, :, :-1] / 1e3 for s in (slow, usual)]
    return w, ways[0] - ways[1]


@pytest.mark.parametrize(
    ("fault", "slower", "subject", "share"),
    [
        (NicBursts(5, 50e-6), lambda src, dst: (src == 5) != (dst == 5) and src // 4 != dst // 4, 5, 0.4),
        (PathBursts(2, 5, 50e-6), lambda src, dst: (src, dst) == (2, 5), (2, 5), 0.4),
        (PausedSender(2, 50e-6), lambda src, dst: src == 2 and dst >= 4, 2, 0.3),
    ],
)  # fmt: skip
def test_what_comes_and_goes_on_paths_slows_all_of_them_at_once_in_its_share_of_operations(
    fault: NowAndThen,
    slower: Callable[[int, int], bool],
    subject: int | tuple[int, int],
    share: float,
) -> None:
    w, added = added_to_paths_us(fault)
    on_path = np.array([[src != dst and slower(src, dst) for src in range(8)] for dst in range(8)])
    np.testing.assert_allclose(added[:, ~on_path], 0, atol=0.01)
    is_there = added[:, on_path] > 25
    assert (is_there == is_there[:, :1]).all()
    np.testing.assert_allclose(added[:, on_path], 50.0 * is_there, atol=0.01)
    assert is_there.mean() == pytest.approx(share, abs=0.06)
    present = 1 + np.flatnonzero(is_there[:, 0])
    assert present.tolist() == operations_with(fault, 1000, w.seed)
    assert w.truth.effects_us == {("comm-slow", subject): pytest.approx(50 * is_there.mean())}
    changes = np.flatnonzero(np.diff(is_there[:, 0].astype(int)))
    lengths = np.diff(changes)[int(is_there[0, 0]) :: 2]
    expected = fault.burst if fault.burst > 1 else 1 / (1 - share)
    assert lengths.mean() == pytest.approx(expected, rel=0.25)


def test_a_sender_that_is_paused_knows_nothing_of_it_and_on_one_node_holds_back_everything() -> (
    None
):
    for machine, others in ((TWO_NODES, [4, 5, 6, 7]), (CALM, [0, 1, 3, 4, 5, 6, 7])):
        (paused, usual) = (
            rings(window(machine, f).snapshots, "dispatch") for f in ([PausedSender(2, 50e-6)], [])
        )
        own_us = [(s[:, 2, -1, SENT] - s[:, 2, 2, ENTERED]) / 1e3 for s in (paused, usual)]
        np.testing.assert_allclose(own_us[0], own_us[1], atol=0.01)
        later = (paused - usual)[:, :, 2, ARRIVAL] - (paused - usual)[:, :, 2, ISSUED]
        assert np.flatnonzero(later.max(axis=0) > 40_000).tolist() == others


def test_a_throttled_rank_is_late_in_a_slow_swing() -> None:
    w, throttled = both_kinds(CALM, [Throttled(3, 50e-6, 100.0)])
    _, usual = both_kinds(CALM, [])
    gaps = [
        s[1:, range(8), range(8), ENTERED] - s[1:, :, -1, PREVIOUS_EXIT] for s in (throttled, usual)
    ]
    later = (gaps[0] - gaps[1]) / 1e3
    np.testing.assert_allclose(np.delete(later, 3, axis=1), 0, atol=0.01)
    late = later[:, 3]
    assert late.min() == pytest.approx(0, abs=0.1)
    assert late.max() == pytest.approx(50, abs=0.1)
    np.testing.assert_allclose(late[100:], late[:-100], atol=0.05)
    assert np.abs(np.diff(late)).max() < 50 * np.pi / 100 + 0.05
    assert w.truth.effects_us == {("comp-slow", 3): pytest.approx(25, abs=0.1)}
    # Nobody knows where in its swing it is when a window begins.
    short = simulate_windows(CALM, 8, 5, [[Throttled(3, 50e-6, 100.0)]] * 8, seed=4)
    assert np.ptp([w.truth.effects_us["comp-slow", 3] for w in short]) > 25


def test_a_rank_that_does_not_report_is_missing_and_late_all_the_same() -> None:
    w = window(GPU, [SlowRank(3, 50e-6), NonReporting(3)])
    assert [s.rank for s in w.snapshots] == [0, 1, 2, 4, 5, 6, 7]
    assert w.truth.keys == {("comp-slow", 3)}
    assert window(GPU, [NonReporting(3)]).truth.keys == frozenset()


def test_a_slow_nic_takes_longer_for_tokens_of_other_nodes_both_ways() -> None:
    slow, usual = (path_us(window(TWO_NODES, f)) for f in ([SlowNic(5, 4.0)], []))
    tokens = 128
    added = (slow - usual) / (tokens * TWO_NODES.path_per_token_between)
    expected = np.zeros((8, 8))
    expected[5, :4] = expected[:4, 5] = 3.0
    np.testing.assert_allclose(added, expected, atol=0.3)


def test_loads_differ_by_the_skew_and_what_they_explain_is_tolerated() -> None:
    windows = list(simulate_windows(replace(GPU, skew=0.3), 16, 4, [()] * 40, seed=1))
    loads = np.array(
        [[s.operations["dispatch"]["tokens"].sum() for s in w.snapshots] for w in windows]
    )
    assert loads.std(axis=1).mean() / loads.mean() == pytest.approx(0.28, abs=0.04)
    truth = windows[0].truth
    assert truth.keys == frozenset()
    far = np.flatnonzero(np.abs(loads[0] / loads[0].mean() - 1) > 0.15)
    assert {("mixed-slow", int(rank)) for rank in far} <= truth.tolerated


def stamped(rule: StampRule, injected: Sequence[GeneratorFault]) -> np.ndarray:
    """Dispatches of eight ranks, [n, receiver, source or own, columns]."""
    return rings(window(replace(CALM, stamp_rule=rule), injected).snapshots, "dispatch")


def test_what_is_there_at_the_first_look_counts_as_there_when_waiting_began() -> None:
    true, sight = (
        stamped(rule, [SlowRank(1, 1e-4)])
        for rule in (StampRule.TRUE_ARRIVAL, StampRule.FIRST_SIGHT)
    )
    begin = true[:, :, -1:, WAIT_BEGIN]
    there = true[:, :, :-1, ARRIVAL] <= begin
    assert there[:, 1].all()
    assert not there[1:, 0, 1].any()
    assert (true[:, :, :-1, SEEN] == 1).all()
    np.testing.assert_array_equal(sight[:, :, :-1, SEEN], ~there)
    expected = np.maximum(true[:, :, :-1, ARRIVAL], begin)
    np.testing.assert_array_equal(sight[:, :, :-1, ARRIVAL], expected)


@settings(max_examples=40, deadline=None)
@given(
    machine=machines,
    num_ranks=st.integers(2, 7),
    injected=st.lists(st.sampled_from(FAULTS), max_size=3),
    seed=st.integers(0, 2**31),
)
def test_rings_keep_to_what_is_promised_of_their_columns(
    machine: Machine, num_ranks: int, injected: list[GeneratorFault], seed: int
) -> None:
    for s in simulate(machine, num_ranks, 6, injected, seed=seed):
        for counters in s.operations.values():
            ring = counters.operations()
            sources, own, itself = ring[:, :-1], ring[:, -1], ring[:, s.rank]
            begin = own[:, WAIT_BEGIN, None]
            hidden = sources[..., SEEN] == 0
            assert np.isin(sources[..., SEEN], (0, 1)).all()
            assert (sources[..., ARRIVAL] <= begin)[hidden].all()
            if machine.stamp_rule is StampRule.TRUE_ARRIVAL:
                assert not hidden.any()
            else:
                assert (sources[..., ARRIVAL] >= begin)[~hidden].all()
            assert (own[:, TIMER_STEP] == machine.timer_step_ns).all()
            assert (own[:, [WAIT_BEGIN, EXIT, SENT]] % machine.timer_step_ns == 0).all()
            assert (sources[..., ARRIVAL] % machine.timer_step_ns == 0).all()
            assert (itself[:, CLOCK_ERROR] == 0).all()
            assert (np.delete(sources[..., CLOCK_ERROR], s.rank, axis=1) > 0).all()
            assert (sources[..., ENTERED] <= sources[..., ISSUED]).all()
            assert (itself[:, ISSUED] <= own[:, SENT]).all()
            assert (own[:, SENT] <= own[:, WAIT_BEGIN]).all()
            assert (own[:, WAIT_BEGIN] <= own[:, EXIT]).all()


def test_a_rank_has_sent_when_it_has_issued_to_the_last_destination() -> None:
    stamps = rings(window(CALM, []).snapshots, "combine")
    sending = stamps[:, :, :-1, ISSUED] - stamps[:, :, :-1, ENTERED]
    entered = np.diagonal(stamps[:, :, :-1, ENTERED], axis1=1, axis2=2)
    np.testing.assert_allclose(sending.max(axis=1), stamps[:, :, -1, SENT] - entered, atol=2)


def test_timers_with_coarse_steps_round_down_on_the_clock_of_their_rank() -> None:
    fine, coarse = (
        rings(window(replace(CALM, timer_step_ns=step), []).snapshots, "dispatch")
        for step in (1, 1000)
    )
    for column in (ENTERED, ISSUED, ARRIVAL):
        lost = (fine - coarse)[:, :, :-1, column]
        assert lost.min() >= 0
        assert 900 < lost.max() < 1000
    # A source's steps are not the receiver's.
    assert (coarse[:, 0, 1, ENTERED] % 1000 != 0).all()


def test_clocks_are_wrong_by_rank_and_by_host_and_drift() -> None:
    def seen_wrong(**clocks: float) -> np.ndarray:
        """[n, receiver, source], us."""
        wrong, exact = (
            rings(window(m, []).snapshots, "dispatch")[:, :, :-1]
            for m in (replace(TWO_NODES, **clocks), TWO_NODES)
        )
        np.testing.assert_array_equal(wrong[..., ARRIVAL], exact[..., ARRIVAL])
        return (wrong[..., ENTERED] - exact[..., ENTERED]) / 1e3

    by_rank, by_host = seen_wrong(clock_error=2.0)[0], seen_wrong(host_clock_error=2.0)[0]
    np.testing.assert_allclose(by_rank, -by_rank.T, atol=1e-3)
    assert abs(by_rank[0, 1]) > 0.01
    assert abs(by_host[0, 1]) < 1e-3 < abs(by_host[0, 4])
    drifting = seen_wrong(drift_ppm=100.0)[:, 0, 1]
    assert abs(drifting[-1]) > 10 * abs(drifting[0])


def test_truth_is_what_faults_expects_where_both_know_the_fault() -> None:
    injected = [SlowRank(0, 1e-5), SlowPath(1, 2, 2e-5), HotRank(3), SlowRank(3, 1e-5)]
    injected += [ClockFault(1, 1.0, 5.0)]
    truth = window(GPU, injected).truth
    assert truth.keys == faults.expected_verdicts(injected)
    assert truth.effects_us["comm-slow", (1, 2)] == 20
    subjects = window(
        TWO_NODES, [SlowIngress(1, 1e-5), SlowRail(2, 1e-5), SlowNodePair(1, 0, 1e-5)]
    )
    assert subjects.truth.keys == {
        ("comm-slow", 1),
        ("comm-slow", ("rail", 2)),
        ("comm-slow", ("nodes", 1, 0)),
    }


def test_the_saving_is_what_the_group_loses_by_the_fault() -> None:
    assert window(GPU, []).saving_us == 0
    # The late rank has a path's time in hand, because it never waits for the others.
    late = window(CALM, [SlowRank(3, 50e-6)])
    without = window(CALM, []).period_us
    assert late.period_us - late.saving_us == without
    assert 50 - 20 < late.saving_us <= 50
    assert abs(window(CALM, [EarlyRank(3, 50e-6)]).saving_us) < 1


def test_the_first_round_does_not_count_as_lost_time() -> None:
    assert abs(window(CALM, [Hiccup(3, 1, 1e-3)]).saving_us) < 1
    assert window(CALM, [Hiccup(3, 20, 1e-3)]).saving_us > 20


def test_operations_follow_each_other_and_a_hook_delays_the_wait() -> None:
    snapshots = window(replace(CALM, hook_us=100.0), []).snapshots
    dispatch, combine = (rings(snapshots, kind) for kind in ("dispatch", "combine"))
    np.testing.assert_array_equal(combine[:, :, -1, PREVIOUS_EXIT], dispatch[:, :, -1, EXIT] + 500)
    sending_and_hook_us = (
        dispatch[:, :, -1, WAIT_BEGIN] - dispatch[:, range(8), range(8), ENTERED]
    ) / 1e3
    np.testing.assert_allclose(sending_and_hook_us, 10 + 0.01 * 1024 + 100, atol=0.01)


def test_wait_matrices_are_those_of_the_counters() -> None:
    w = window(GPU, [SlowRank(3, 50e-6)]).first(25)
    for kind in ("dispatch", "combine"):
        expected = [s.operations[kind]["wait_ns"] for s in w.snapshots]
        np.testing.assert_array_equal(w.wait_matrix(kind), expected)


def test_hops_of_normal_operations_have_their_own_cells_and_share_their_stamps() -> None:
    snapshots = simulate(TWO_NODES, 8, 10, kinds=NORMAL, seed=6)
    ranks = np.arange(8)
    same_rail = ranks[:, None] % 4 == ranks[None, :] % 4
    same_node = ranks[:, None] // 4 == ranks[None, :] // 4
    for s in snapshots:
        ops = {kind: counters["ops"] for kind, counters in s.operations.items()}
        assert (ops["notify"] == 10).all()
        assert (ops["normal dispatch"] == 10).all()
        at_gateway = same_rail & ~same_node
        np.testing.assert_array_equal(ops["gateway dispatch"], 10 * at_gateway[s.rank])
        np.testing.assert_array_equal(ops["gateway combine"], 10 * same_node[s.rank])
        np.testing.assert_array_equal(ops["normal combine"], 10 * (same_node | same_rail)[s.rank])
        own = {kind: c.operations()[:, -1] for kind, c in s.operations.items()}
        assert own["notify"][:, OP].tolist() == list(range(1, 20, 2))
        assert own["normal combine"][:, OP].tolist() == list(range(2, 21, 2))
        for hop, last in (
            ("gateway dispatch", "normal dispatch"),
            ("gateway combine", "normal combine"),
        ):
            np.testing.assert_array_equal(own[hop], own[last])
        assert (own["normal dispatch"][:, WAIT_BEGIN] > own["notify"][:, EXIT]).all()
        assert not s.operations["notify"]["tokens"].any()
    # Every row crosses to another node once, and comes to its rank.
    rows = {
        kind: np.array([s.operations[kind]["tokens"] for s in snapshots])
        for kind in ("gateway dispatch", "normal dispatch")
    }
    away = np.where(same_node, 0, rows["normal dispatch"])
    assert rows["gateway dispatch"].sum() == away.sum()
    assert rows["normal dispatch"].sum() == 8 * 10 * 1024


def test_who_sends_to_a_slow_receiver_waits_for_its_slots_and_so_do_gateways_before() -> None:
    slow, healthy = (
        {kind: waits_for_slots_us(faults, kind) for kind in ROW_HOPS}
        for faults in ([SlowReceiver(2, 50e-6)], [])
    )
    more = slow["normal dispatch"] - healthy["normal dispatch"]
    # Rows of the other node by way of gateways, which wait.
    np.testing.assert_allclose(np.delete(more[2], 2), 50, atol=0.1)
    np.testing.assert_allclose(np.delete(more, 2, axis=0), 0, atol=0.1)
    assert (slow["gateway dispatch"][:4].max(axis=1) >= 24).all()
    assert slow["gateway dispatch"][4:].max() < 10


def test_who_waits_for_the_sums_of_a_slow_receiver_gives_no_slots_back_meanwhile() -> None:
    slow, healthy = (
        waits_for_slots_us(faults, "normal combine") for faults in ([SlowReceiver(2, 50e-6)], [])
    )
    within = {2: [0, 1, 3], 6: [4, 5, 7]}
    for rank, sources in within.items():
        np.testing.assert_allclose((slow - healthy)[rank, sources], 50, atol=1)
    others = np.delete(slow - healthy, list(within), axis=0)
    assert others.max() < 15


def waits_for_slots_us(faults: Sequence[GeneratorFault], kind: str) -> FloatArray:
    """[receiver, source], of an operation."""
    snapshots = simulate(TWO_NODES, 8, 10, faults, kinds=NORMAL, seed=6)
    return np.array([s.operations[kind]["credit_ns"] for s in snapshots]) / 1e4


def test_ranks_say_where_they_are() -> None:
    places = [(s.host, s.node, s.device_index) for s in simulate(TWO_NODES, 8, 1)]
    assert places[:2] == [("host0", 0, 0), ("host0", 0, 1)]
    assert places[-1] == ("host1", 1, 3)
    assert {s.host for s in simulate(GPU, 8, 1)} == {"host0"}
