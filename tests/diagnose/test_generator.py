"""The generator of timestamps: exact sums, known causes, and the same numbers however it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.diagnose.core.diagnosis import FloatArray, IntArray
from deep_ep.testing.faults import ClockFault, HotRank, SlowPath, SlowRank
from generator import Window, simulate, simulate_windows
from generator.faults import (
    EarlyRank,
    Everything,
    GeneratorFault,
    Hiccup,
    IntermittentRank,
    NicBursts,
    PathBursts,
    PausedSender,
    SlowIngress,
    SlowNic,
    SlowReceive,
    SlowReceiver,
    SlowSend,
    SlowUplink,
    Throttled,
)
from generator.machines import (
    CLUSTER,
    CPU,
    GPU,
    LOW_LATENCY,
    NORMAL,
    NORMAL_OF_ONE_NODE,
    Kind,
    Machine,
    Setup,
    StampRule,
)
from generator.noise import draw_noise
from generator.ports import served
from generator.recording import (
    ARRIVAL,
    CLOCK_ERROR,
    ENTERED,
    EXIT,
    ISSUED,
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
# Of eight ranks on two nodes. [receiver, source]: whether they are on different nodes; on one rail.
RANK = np.arange(8)
NODE, INDEX = RANK // 4, RANK % 4
BETWEEN = NODE[:, None] != NODE
SAME_RAIL = INDEX[:, None] == INDEX


def window(machine: Machine, injected: Sequence[GeneratorFault], num_ranks: int = 8) -> Window:
    return next(simulate_windows(machine, num_ranks, 20, [injected], seed=3))


machines = st.builds(
    replace,
    st.sampled_from(
        [
            CPU,
            GPU,
            CLUSTER,
            replace(CLUSTER, fenced=True, combine_by_destination=True),
            replace(CLUSTER, layers=3, moving_hot_share=2.0, rank_noise=5.0, congestion=30.0),
        ]
    ),
    jitter=st.sampled_from([0.0, 3.0, 10.0]),
    ranks_per_node=st.sampled_from([None, 1, 2, 3]),
    stamp_rule=st.sampled_from(StampRule),
    timer_step_ns=st.sampled_from([1, 32, 1000]),
    hook_us=st.sampled_from([0.0, 100.0]),
    skew=st.sampled_from([0.0, 0.3]),
    clock_error=st.just(1.0),
    host_clock_error=st.just(1.0),
    drift_ppm=st.just(10.0),
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
        require_promised_columns(s, machine)


@pytest.mark.parametrize("kinds", [NORMAL, NORMAL_OF_ONE_NODE])
def test_the_same_holds_for_every_hop_of_normal_operations(kinds: Sequence[Kind]) -> None:
    machine = replace(CLUSTER, ranks_per_node=3 if kinds is NORMAL else None)
    for seed, injected in enumerate([[], [SlowReceiver(1, 50e-6)], *([fault] for fault in FAULTS)]):
        for s in simulate(machine, 6, 6, injected, seed=seed, kinds=kinds):
            require_exact_sums(s)
            require_promised_columns(s, machine)
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


def require_promised_columns(s: Snapshot, machine: Machine) -> None:
    for kind, counters in s.operations.items():
        ring = counters.operations()
        sources, own, itself = ring[:, :-1], ring[:, -1], ring[:, s.rank]
        begin = own[:, WAIT_BEGIN, None]
        heard = sources[..., ARRIVAL] != 0
        assert not sources[~heard].any()
        hidden = heard & (sources[..., SEEN] == 0)
        assert np.isin(sources[..., SEEN], (0, 1)).all()
        assert (sources[..., ARRIVAL] <= begin)[hidden].all()
        if machine.stamp_rule is StampRule.TRUE_ARRIVAL:
            assert not hidden.any()
        else:
            assert (sources[..., ARRIVAL] >= begin)[heard & ~hidden].all()
        assert (own[:, TIMER_STEP] == machine.timer_step_ns).all()
        assert (own[:, [WAIT_BEGIN, EXIT, SENT]] % machine.timer_step_ns == 0).all()
        assert (sources[..., ARRIVAL] % machine.timer_step_ns == 0).all()
        assert (itself[:, CLOCK_ERROR] == 0).all()
        assert (sources[..., CLOCK_ERROR] > 0)[heard & (np.arange(s.num_ranks) != s.rank)].all()
        assert (sources[..., ENTERED] <= sources[..., ISSUED]).all()
        assert (itself[:, ISSUED] <= own[:, SENT]).all()
        # Rows of normal operations come while others are sent.
        sends_first = kind in ("dispatch", "combine", "notify")
        assert (own[:, SENT] <= own[:, WAIT_BEGIN if sends_first else EXIT]).all()
        assert (own[:, WAIT_BEGIN] <= own[:, EXIT]).all()


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
        require_equal(w.snapshots, simulate(machine, 4, 5, members, seed=w.seed))


def require_equal(some: Sequence[Snapshot], others: Sequence[Snapshot]) -> None:
    for ours, theirs in zip(some, others):
        for kind, one in ours.operations.items():
            other = theirs.operations[kind]
            np.testing.assert_array_equal(one.operations(), other.operations())
            np.testing.assert_array_equal(one.totals, other.totals)
            np.testing.assert_array_equal(one.own, other.own)


NOISY = replace(
    TWO_NODES,
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


@pytest.mark.parametrize("machine", [GPU, NOISY], ids=["usual", "noisy"])
def test_a_shorter_run_is_the_beginning_of_a_longer_one(machine: Machine) -> None:
    injected = [SlowRank(1, 50e-6), SlowPath(0, 2, 50e-6)]
    short, long = (
        next(simulate_windows(machine, 8, rounds, [injected], seed=11, capacity=240))
        for rounds in (60, 120)
    )
    require_equal(short.snapshots, long.first(120).snapshots)


def test_a_rank_that_is_hardly_ever_late_need_not_be_named() -> None:
    rarely = window(GPU, [IntermittentRank(1, 5e-5, 0.02)]).truth
    assert rarely.keys == frozenset()
    assert rarely.tolerated == {("comp-slow", 1)}


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


def test_a_rail_that_is_congested_in_much_of_a_window_may_be_named_and_no_path_of_it() -> None:
    machine = replace(CLUSTER, ranks_per_node=4, congestion=30.0, congested_share=0.3)
    tolerated = set()
    for w in simulate_windows(machine, 8, 64, [()] * 8, seed=1):
        assert w.truth.keys == frozenset()
        setup = Setup(machine, 8, 64, 64, LOW_LATENCY)
        rail = draw_noise(setup, np.random.SeedSequence(w.seed).spawn(13)[7]).rail
        often = np.flatnonzero(np.mean(rail > 0, axis=0) >= 0.4)
        assert w.truth.tolerated == {("comm-slow", ("rail", index)) for index in often.tolist()}
        tolerated |= w.truth.tolerated
    assert tolerated


def test_the_first_round_does_not_count_as_lost_time() -> None:
    assert abs(window(CALM, [Hiccup(3, 1, 1e-3)]).saving_us) < 1
    assert window(CALM, [Hiccup(3, 20, 1e-3)]).saving_us > 20


# ---- noise, clocks and ports

# Nothing depends on tokens, and nobody on when others come.
QUIET = replace(
    TWO_NODES,
    compute_per_token=0.0,
    send_per_token=0.0,
    path_per_token=0.0,
    path_per_token_between=0.0,
    drain_per_token=0.0,
)
ALL = np.zeros(8, int)
# [receiver, source], in the meaning of `Differs.groups`.
PAIRS = np.where(RANK[:, None] == RANK, -1, 8 * RANK[:, None] + RANK)
HOSTS = np.where(BETWEEN, NODE[:, None], -1)
RAILS = np.where(BETWEEN & SAME_RAIL, INDEX, -1)
FABRIC = np.where(BETWEEN, 0, -1)


class Differs(NamedTuple):
    """How what is measured differs from a quiet machine.

    Attributes:
        groups: of the cells; those of one number differ alike, others each in its way, of -1 not at all.
        mean: of what is added where something is, without its sign.
        share: of the operations in which something is.
        memory: correlation from one operation to the next; None: what is added stays, or grows.
        rel: of what `mean` may be wrong by; much, where few numbers were drawn.
    """

    groups: IntArray
    mean: float
    share: float = 1.0
    memory: float | None = None
    rel: float = 0.3


def measures(machine: Machine) -> dict[str, FloatArray]:
    """[operations, ...] of a run of 500 rounds; times in us."""
    snapshots = simulate(machine, 8, 500, seed=4, capacity=1000)
    kinds = [
        np.stack([s.operations[kind].operations() for s in snapshots], axis=1)
        for kind in ("dispatch", "combine")
    ]
    both = np.stack(kinds, axis=1).reshape(1000, 8, 9, -1)
    sources, own = both[:, :, :-1], both[:, :, -1]
    entered = sources[:, RANK, RANK, ENTERED]
    return {
        "gap": (entered - own[..., PREVIOUS_EXIT])[1:] / 1e3,
        "sending": (own[..., SENT] - entered) / 1e3,
        "path": (sources[..., ARRIVAL] - sources[..., ISSUED]) / 1e3,
        # Between a receiver's clock and a source's, as the receiver believes.
        "offset": (sources[..., ENTERED] - entered[:, None, :]) / 1e3,
        # Of an even share of what is dispatched.
        "load": sources[::2, ..., TOKENS].sum(axis=2) / 1024,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank_noise": 4.0}, {"gap": Differs(RANK, 3.2, memory=0.9)}),
        ({"node_noise": 4.0}, {"gap": Differs(NODE, 3.2, memory=0.9)}),
        ({"tick": 20.0}, {"gap": Differs(RANK, 20.0, 0.06, memory=-0.1)}),
        ({"layers": 4}, {"gap": Differs(ALL, 30.0, rel=0.9)}),
        ({"congestion": 50.0, "congested_share": 0.3}, {"path": Differs(RAILS, 50.0, 0.3, 0.95)}),
        ({"fabric_pause": 40.0, "paused_share": 0.1}, {"path": Differs(FABRIC, 40.0, 0.1, 0.0)}),
        ({"path_spread": 0.5}, {"path": Differs(PAIRS, 0.5 * 0.8 * 11)}),
        # Twice its load more for one rank, and two sevenths less for the others.
        ({"moving_hot_share": 3.0}, {"load": Differs(RANK, 0.5, memory=0.95)}),
        ({"batches": (0.5, 0.1)}, {"load": Differs(RANK, 0.7, memory=0.0)}),
        (
            {"batches": (0.5, 0.1), "batches_alternate": True},
            {"load": Differs(RANK, 0.7, memory=-1.0)},
        ),
        ({"clock_error": 2.0}, dict.fromkeys(("offset", "path"), Differs(PAIRS, 2.3))),
        (
            {"host_clock_error": 2.0},
            dict.fromkeys(("offset", "path"), Differs(HOSTS, 2.3, rel=0.9)),
        ),
        (
            {"drift_ppm": 10.0, "clock_age_s": 600.0},
            dict.fromkeys(("offset", "path"), Differs(PAIRS, 6800.0)),
        ),
        # Within a run of 0.2 s.
        ({"drift_ppm": 10.0}, dict.fromkeys(("offset", "path"), Differs(PAIRS, 1.0))),
    ],
    ids="-".join,
)
def test_what_a_machine_suffers_is_where_it_should_be_and_nowhere_else(
    changes: dict[str, Any], expected: dict[str, Differs]
) -> None:
    suffering, quiet = measures(replace(QUIET, **changes)), measures(QUIET)
    for name, values in quiet.items():
        added = suffering[name] - values
        if name in expected:
            require_differs(added, expected[name])
        else:
            np.testing.assert_allclose(added, 0, atol=0.01, err_msg=name)


def require_differs(added: FloatArray, expected: Differs) -> None:
    """added [operations, ...]."""
    groups, mean, share, memory, rel = expected
    np.testing.assert_allclose(added[:, groups < 0], 0, atol=0.01)
    cells = [added[:, groups == group] for group in np.unique(groups[groups >= 0])]
    assert max(np.ptp(alike, axis=1).max() for alike in cells) <= 0.01
    ways = np.stack([alike[:, 0] for alike in cells], axis=1)
    is_there = np.abs(ways) > 0.01
    assert is_there.mean() == pytest.approx(share, rel=0.3)
    assert np.abs(ways[is_there]).mean() == pytest.approx(mean, rel=rel)
    if memory is not None:
        apart = np.abs(ways[:, :, None] - ways[:, None, :]).max(axis=0)
        assert (apart[~np.eye(len(cells), dtype=bool)] > 0.01).all()
        centred = ways - ways.mean(axis=0)
        correlation = (centred[1:] * centred[:-1]).mean() / (centred**2).mean()
        assert correlation == pytest.approx(memory, abs=0.1)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.1, 50), st.floats(0, 1)), min_size=1, max_size=8
    )
)
def test_a_port_is_done_when_a_slow_reckoning_says(
    flows: list[tuple[float, float, float]],
) -> None:
    begin, length, load = np.array(flows).T
    end, work = begin + length, length * load
    step = 0.01
    times = np.arange(begin.min(), end.max() + step, step)
    came = (work * np.clip((times[:, None] - begin) / np.maximum(length, 1e-9), 0, 1)).sum(axis=1)
    backlog = np.zeros(times.size)
    for i in range(1, times.size):
        backlog[i] = max(backlog[i - 1] + came[i] - came[i - 1] - step, 0.0)
    expected = end + np.interp(end, times, backlog)
    np.testing.assert_allclose(served(begin, end, work), expected, atol=0.1)
