"""Clock offsets: artificial skew and drift are recovered within the measured round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_ep
from deep_ep import diagnose
from support.exchange import Mode, Shape, make_inputs, ranks_for, round_trip
from support.launch import Ranks, measured_again
from support.normal_exchange import layout_of, normal_ranks

SECOND_NS = 1_000_000_000
# While a drift acts, the time that calls take besides the delay is not known to better than this.
UNKNOWN_ELAPSED_NS = SECOND_NS // 5

pytestmark = pytest.mark.skipif(
    deep_ep.native.backend.get().name != "cpu", reason="clocks are bent on the cpu backend only"
)

skews = st.lists(st.integers(-5 * SECOND_NS, 5 * SECOND_NS), min_size=2, max_size=6)


def make_ranks(num_ranks: int) -> Ranks:
    """A small group."""
    return Ranks(num_ranks, num_max_tokens=1, hidden=128, num_experts=num_ranks)


def skew(ranks: Ranks, offsets: Sequence[int]) -> torch.Tensor:
    """Sets each rank's clock off; returns [rank, other], what is then to be found."""
    ranks.run(
        lambda rank, buffer: buffer.runtime.set_clock_fault(offset_ns=offsets[rank], drift_ppm=0.0)
    )
    return differences(offsets)


def differences(clocks: Sequence[int]) -> torch.Tensor:
    """[rank, other] of what they read."""
    return torch.tensor(clocks)[None, :] - torch.tensor(clocks)[:, None]


def measured_offsets(ranks: Ranks, samples: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """offset_ns [rank, other] and round_trip_ns [rank, other] as each rank measures them."""
    results = ranks.run(lambda _, buffer: buffer.measure_clock_offsets(samples=samples))
    return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])


@given(offsets=skews)
def test_a_skew_of_seconds_is_recovered_within_the_round_trip(offsets: list[int]) -> None:
    with make_ranks(len(offsets)) as ranks:
        expected = skew(ranks, offsets)
        found, round_trips = measured_offsets(ranks)
    assert ((found - expected).abs() <= round_trips).all(), (found - expected, round_trips)
    assert (round_trips < SECOND_NS // 10).all(), "a round trip of that length says nothing"
    assert (round_trips.diagonal() == 0).all()


@given(
    offsets=skews,
    drifts=st.lists(st.sampled_from([-200.0, -20.0, 0.0, 20.0, 200.0]), min_size=6, max_size=6),
)
def test_a_drift_is_followed_by_measuring_again(offsets: list[int], drifts: list[float]) -> None:
    elapsed_ns = 10 * SECOND_NS

    def bend_and_let_time_pass(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.runtime.set_clock_fault(offset_ns=offsets[rank], drift_ppm=drifts[rank])
        buffer.runtime.delay(elapsed_ns)

    with make_ranks(len(offsets)) as ranks:
        ranks.run(bend_and_let_time_pass)
        found, round_trips = measured_offsets(ranks)
    gained = [o + round(d * 1e-6 * elapsed_ns) for o, d in zip(offsets, drifts)]
    unknown = 2 * max(abs(d) for d in drifts) * 1e-6 * UNKNOWN_ELAPSED_NS
    error = (found - differences(gained)).abs()
    assert (error <= round_trips + unknown).all(), (error, round_trips, unknown)


def test_offsets_are_measured_with_the_buffer() -> None:
    """A buffer can count at once: nobody has to measure clocks first. What is not measured has no error."""
    shape = Shape((2,) * 3, num_max_tokens=2, hidden=128, num_experts=3, num_topk=1)
    inputs = make_inputs(shape)

    def run(rank: int, buffer: deep_ep.Buffer) -> Any:
        buffer.enable_counters()
        round_trip(buffer, inputs[rank], shape, Mode())
        assert buffer.dispatch_counters is not None
        return buffer.dispatch_counters.snapshot()

    with ranks_for(shape) as ranks:
        kinds = ranks.run(run)
    of_others = ~torch.eye(3, dtype=torch.bool)
    _, stated = clock_errors(kinds, [0.0] * 3)
    assert (stated[of_others] > 0).all(), stated


def test_the_machines_own_clock_shows_no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """In wall mode all ranks read one clock, so every offset found is error."""
    monkeypatch.setenv("DEEP_EP_CPU_CLOCK", "wall")
    with make_ranks(3) as ranks:
        found, round_trips = measured_offsets(ranks)
        assert (found.abs() <= round_trips).all()
        expected = skew(ranks, [0, 2 * SECOND_NS, 4 * SECOND_NS])
        found, round_trips = measured_offsets(ranks, samples=1)
    assert ((found - expected).abs() <= round_trips).all()


def drifting_group(
    monkeypatch: pytest.MonkeyPatch, interval_s: str, drifts_ppm: list[float], num_rounds: int
) -> list[tuple[Any, Any]]:
    """Per rank its counters after rounds of 50 ms each, with clocks that drift from the start on."""
    monkeypatch.setenv("DEEP_EP_CLOCK_INTERVAL_S", interval_s)
    num_ranks = len(drifts_ppm)
    # Of three blocks one leaves a dispatch that the others wait in.
    num_experts = 2 * num_ranks
    shape = Shape(
        (2,) * num_ranks, num_max_tokens=2, hidden=128, num_experts=num_experts, num_topk=1
    )
    inputs = make_inputs(shape)

    def run(rank: int, buffer: deep_ep.Buffer) -> tuple[Any, Any]:
        buffer.runtime.set_clock_fault(offset_ns=rank * SECOND_NS, drift_ppm=drifts_ppm[rank])
        buffer.measure_clock_offsets()
        buffer.enable_counters()
        for _ in range(num_rounds):
            buffer.runtime.delay(SECOND_NS // 20)
            round_trip(buffer, inputs[rank], shape, Mode())
        assert buffer.dispatch_counters is not None
        assert buffer.combine_counters is not None
        return buffer.dispatch_counters.snapshot(), buffer.combine_counters.snapshot()

    with ranks_for(shape) as ranks:
        return ranks.run(run)


def clock_errors(kinds: list[Any], drifts_ppm: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each stamp of the last operation is off, and how far it says it may be; both ns.

    The truth is what each source wrote of its own entry, on its own clock, brought to the receiver's
    by the clocks' true lines.
    """
    slots = [kind.operations()[-1] for kind in kinds]
    fields = kinds[0].ring_source_fields
    num_ranks = len(slots)
    # Clocks begin at 1000 s; the fault's line counts from where it was set, a moment later.
    begin = 1000 * SECOND_NS
    error, stated = torch.zeros(2, num_ranks, num_ranks)
    for source in range(num_ranks):
        own = int(slots[source][source, fields.index("entered")])
        age = (own - source * SECOND_NS - begin) / (1 + drifts_ppm[source] * 1e-6)
        for receiver in range(num_ranks):
            row = slots[receiver][source]
            true = begin + receiver * SECOND_NS + age * (1 + drifts_ppm[receiver] * 1e-6)
            error[receiver, source] = int(row[fields.index("entered")]) - true
            stated[receiver, source] = int(row[fields.index("clock_error")])
    return error.abs(), stated


@pytest.mark.parametrize("shape", ["1x1", "3x2"])
@measured_again
def test_drifts_are_followed_within_operations(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Without a launch or a call: offsets stay right to what is stated, and that stays small."""
    monkeypatch.setenv("DEEP_EP_LAUNCH_SHAPE", shape)
    drifts = [0.0, 20.0, -20.0, 15.0]
    dispatches, combines = zip(*drifting_group(monkeypatch, "1", drifts, num_rounds=80))
    for kinds in (dispatches, combines):
        error, stated = clock_errors(list(kinds), drifts)
        # What the fault's line and the group's construction leave unknown: 20 ppm of some ms.
        assert (error <= stated + 5_000).all(), (error, stated)
        # Four seconds old, 20 ppm would make it 80 us; a round trip under the rank clock is some 10 us.
        assert stated.max() < 20_000, stated
        assert (stated.diagonal() == 0).all()


def test_without_exchanges_the_stated_error_grows_with_the_age_of_the_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drifts = [0.0, 20.0, -20.0]
    dispatches, _ = zip(*drifting_group(monkeypatch, "0", drifts, num_rounds=80))
    error, stated = clock_errors(list(dispatches), drifts)
    assert (error <= stated + 5_000).all(), (error, stated)
    assert stated[0, 1] > 4 * 40_000 * 0.9, "40 us in each of four seconds may have gone unseen"
    assert error[1, 2] > 100_000, "and it has"


def test_exchanges_are_paid_from_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interval is twice the one before, up to the longest; none where it is 0."""
    drifts = [0.0, 0.0]
    dispatches, combines = zip(*drifting_group(monkeypatch, "0.4", drifts, num_rounds=40))
    fields = dispatches[0].ring_source_fields
    slots = np.concatenate([dispatches[0].operations(), combines[0].operations()])
    slots = slots[np.argsort(slots[:, -1, 0])]
    stated = slots[:, 1, fields.index("clock_error")]
    # The stated error grows from one operation to the next, except where clocks were measured again.
    num_measured = int((np.diff(stated) < 0).sum())
    assert 1 <= num_measured <= 8, stated


SLOW_NS = 2_000_000


def snapshot_after(
    rank: int, buffer: deep_ep.Buffer, dst: int, step: Callable[[], None]
) -> tuple[diagnose.Snapshot, torch.Tensor]:
    """Counters of 32 steps, and offsets measured while the path from rank 2 to `dst` was slow already."""
    if rank == 2:
        assert buffer.runtime is not None
        buffer.runtime.native.set_path_fault(dst=dst, delay_ns=SLOW_NS, bytes_per_s=0.0)
    offsets, _ = buffer.measure_clock_offsets()
    buffer.enable_counters(ring=256)
    for _ in range(32):
        step()
    return diagnose.snapshot(buffer), offsets


def assert_only_named(dst: int, ranks: Sequence[tuple[diagnose.Snapshot, torch.Tensor]]) -> None:
    snapshots, offsets = zip(*ranks)
    assert abs(int(offsets[2][dst])) > SLOW_NS / 4, "the fault is in no offset"
    found = diagnose.judge(diagnose.gather(snapshots)).verdicts
    assert {verdict.edge for verdict in found} == {(2, dst)}, found
    assert all(abs(verdict.effect_us - SLOW_NS / 1e3) < 200 for verdict in found), found


@measured_again
def test_a_path_that_is_slow_while_clocks_are_measured_is_named_and_its_way_back_is_not() -> None:
    """Half of its delay is in the measured offset of the pair; all other pairs contradict that."""
    shape = Shape((8,) * 8, num_max_tokens=8, hidden=512, num_experts=16, num_topk=4)
    inputs = make_inputs(shape)

    def run(rank: int, buffer: deep_ep.Buffer) -> tuple[diagnose.Snapshot, torch.Tensor]:
        def step() -> None:
            round_trip(buffer, inputs[rank], shape, Mode())

        return snapshot_after(rank, buffer, 5, step)

    with ranks_for(shape) as ranks:
        assert_only_named(5, ranks.run(run))


@pytest.mark.parametrize(("ranks_per_node", "dst"), [(8, 5), (4, 6)])
@measured_again
def test_and_so_it_is_of_normal_operations(ranks_per_node: int, dst: int) -> None:
    num_ranks, config = 8, deep_ep.Config(4, 8, 64, 16, 64)
    generator = torch.Generator().manual_seed(0)
    topk_idx = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(64)])
    x = torch.ones(64, 512, dtype=torch.bfloat16)

    def run(rank: int, buffer: deep_ep.Buffer) -> tuple[diagnose.Snapshot, torch.Tensor]:
        def step() -> None:
            layout, _ = layout_of(buffer, topk_idx, 16)
            recv_x, _, _, _, handle, _ = buffer.dispatch(
                x,
                **layout,
                topk_idx=topk_idx,
                topk_weights=torch.ones(64, 4),
                config=config,
            )
            buffer.combine(recv_x, handle, config=config)

        return snapshot_after(rank, buffer, dst, step)

    with normal_ranks(num_ranks, ranks_per_node, [config], 1024) as ranks:
        assert_only_named(dst, ranks.run(run))
