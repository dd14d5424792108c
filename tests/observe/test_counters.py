"""The receive counters: parts of a wait add up, delays land in the right cell, off means off.

Every test runs under the rank clock (as though each rank had a core of its own; a delay passes without
being slept) and under the wall clock, which is what a GPU has, in launches of one block and of several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_ep
from deep_ep.errors import EPTimeoutError
from deep_ep.observe.counter_snapshot import CounterSnapshot
from deep_ep.observe.counters import RecvCounters
from support import reference
from support.counter_reference import add_operation
from support.exchange import (
    Inputs,
    Mode,
    Shape,
    combine,
    dispatch,
    experts,
    make_inputs,
    ranks_for,
)
from support.launch import measured_again

MS = 1_000_000
FP8 = Mode(use_fp8=True)
SHAPE = Shape((3, 0, 4, 2), num_max_tokens=4, hidden=256, num_experts=8, num_topk=3)
# A delay to be found again: far above the CPU time of an exchange.
DELAY_NS = 200 * MS

pytestmark = pytest.mark.skipif(
    deep_ep.native.backend.get().name != "cpu", reason="delays are injected on the cpu backend only"
)


@pytest.fixture(autouse=True, params=[("rank", "3x2"), ("wall", "1x1")], ids="-".join)
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The clock of the test's buffers; the launch shape goes with it."""
    name, shape = request.param
    monkeypatch.setenv("DEEP_EP_CPU_CLOCK", name)
    monkeypatch.setenv("DEEP_EP_LAUNCH_SHAPE", shape)
    return str(name)


def are_three_delays(total_ns: float, clock: str) -> bool:
    """In wall time a busy machine may begin to wait late, or hear late."""
    least, most = (2.9, 3.5) if clock == "rank" else (2.3, 4.0)
    return bool(least * DELAY_NS < total_ns < most * DELAY_NS)


def exchange(buffer: deep_ep.Buffer, inputs: Inputs, shape: Shape = SHAPE, mode: Mode = FP8) -> Any:
    """Dispatch and combine of one rank; returns the handle."""
    received = dispatch(buffer, inputs, shape, mode)
    combine(buffer, inputs, received.handle, experts(received, buffer.rank), mode)
    return received.handle


def exchange_three_times(
    buffer: deep_ep.Buffer, inputs: Inputs, late_rank: int | None = None
) -> None:
    """One rank's calls; the late rank is delayed before each exchange."""
    for _ in range(3):
        if buffer.rank == late_rank:
            buffer.runtime.delay(DELAY_NS)
        exchange(buffer, inputs)


def on_all_ranks(
    run: Callable[[deep_ep.Buffer, Inputs], Any], shape: Shape = SHAPE, **counters: int
) -> list[Any]:
    """What this returns on each rank, whose buffer counts."""
    inputs = make_inputs(shape)

    def run_counted(rank: int, buffer: deep_ep.Buffer) -> Any:
        buffer.enable_counters(**counters)
        return run(buffer, inputs[rank])

    with ranks_for(shape) as ranks:
        return ranks.run(run_counted)


def after_exchanges(times: int) -> list[dict[str, CounterSnapshot]]:
    """By rank, what so many undisturbed ones count."""

    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> dict[str, CounterSnapshot]:
        for _ in range(times):
            exchange(buffer, inputs)
        return counted(buffer)

    return on_all_ranks(run)


def begin_and_finish(buffer: deep_ep.Buffer, inputs: Inputs, delay_ns: int) -> CounterSnapshot:
    """A dispatch whose receive phase comes that much later than its send phase."""
    *_, hook = buffer.low_latency_dispatch(
        inputs.x, inputs.topk_idx, SHAPE.num_max_tokens, SHAPE.num_experts, return_recv_hook=True
    )
    buffer.runtime.delay(delay_ns)
    hook()
    return buffer.dispatch_counters.snapshot()


def counted(buffer: deep_ep.Buffer) -> dict[str, CounterSnapshot]:
    """Snapshots of the buffer's own counters, by kind of operation."""
    assert buffer.dispatch_counters is not None
    assert buffer.combine_counters is not None
    return {
        "dispatch": buffer.dispatch_counters.snapshot(),
        "combine": buffer.combine_counters.snapshot(),
    }


def assert_consistent(snapshot: CounterSnapshot, row_bytes: int, what: str) -> None:
    """Totals equal what the ring says, exactly, and every wait is the sum of its parts."""
    expected = {name: np.zeros(snapshot.num_ranks, dtype=np.int64) for name in snapshot.fields}
    own = dict.fromkeys(snapshot.own_fields, 0)
    for slot in snapshot.operations():
        stamps = dict(zip(snapshot.ring_source_fields, slot[:-1].T))
        _, begin, leave, *_ = slot[-1]
        add_operation(expected, own, stamps, begin, leave, row_bytes)
    for name in snapshot.fields:
        assert snapshot[name].tolist() == expected[name].tolist(), f"{what}: {name}"
    for name in ("ops", "wait_ns", "drain_ns"):
        assert snapshot.own_value(name) == own[name], f"{what}: own {name}"
    parts = snapshot["late_ns"] + snapshot["issue_ns"] + snapshot["path_ns"]
    assert snapshot["wait_ns"].tolist() == parts.tolist(), what


@st.composite
def disturbances(
    draw: st.DrawFn,
) -> tuple[Shape, list[dict[str, int]], dict[tuple[int, int], tuple[int, float]]]:
    """A shape, delays before each rank's send and receive phases, and slow paths."""
    num_ranks = draw(st.integers(1, 5))
    max_tokens = draw(st.integers(1, 4))
    shape = Shape(
        tuple(draw(st.lists(st.integers(0, max_tokens), min_size=num_ranks, max_size=num_ranks))),
        num_max_tokens=max_tokens,
        hidden=128,
        num_experts=num_ranks * draw(st.integers(1, 3)),
        num_topk=2,
        seed=draw(st.integers(0, 1000)),
    )
    delay = st.sampled_from([0, 0, 1_000, 50_000, MS, 40 * MS, 2_000 * MS])
    per_rank = st.fixed_dictionaries({"send": delay, "receive": delay})
    delays = draw(st.lists(per_rank, min_size=2 * num_ranks, max_size=2 * num_ranks))
    pair = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_ranks - 1))
    fault = st.tuples(st.sampled_from([0, 10_000, 3 * MS]), st.sampled_from([0.0, 1e6, 1e9]))
    return shape, delays, draw(st.dictionaries(pair, fault, max_size=3))


@pytest.mark.parametrize(
    "clock", [*itertools.product(("rank", "wall"), ("1x1", "3x2"))], ids="-".join, indirect=True
)
@settings(max_examples=25)
@given(case=disturbances(), use_fp8=st.booleans())
def test_every_wait_is_the_sum_of_its_parts(clock: str, case: Any, use_fp8: bool) -> None:
    shape, delays, slow_paths = case
    # What takes no time under the rank clock is slept under the other.
    shorter = 100 if clock == "wall" else 1
    mode = Mode(use_fp8=use_fp8)
    inputs = make_inputs(shape)

    def disturbed(rank: int, buffer: deep_ep.Buffer) -> Any:
        buffer.enable_counters(ring=16)
        for (src, dst), (delay_ns, bytes_per_s) in slow_paths.items():
            if src == rank:
                buffer.runtime.set_path_fault(
                    dst=dst, delay_ns=delay_ns // shorter, bytes_per_s=bytes_per_s * shorter
                )
        for number in range(2):
            delay = delays[number * shape.num_ranks + rank]
            buffer.runtime.delay(delay["send"] // shorter)
            recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
                inputs[rank].x, inputs[rank].topk_idx, shape.num_max_tokens, shape.num_experts,
                use_fp8=use_fp8, return_recv_hook=True,
            )  # fmt: skip
            buffer.runtime.delay(delay["receive"] // shorter)
            hook()
            exchange(buffer, inputs[rank], shape, mode)
        return counted(buffer)

    with ranks_for(shape) as ranks:
        snapshots = ranks.run(disturbed)
    dispatch_bytes = (
        shape.hidden + 4 * (shape.hidden // reference.FP8_GROUP) if use_fp8 else 2 * shape.hidden
    )
    for rank, kinds in enumerate(snapshots):
        assert_consistent(kinds["dispatch"], dispatch_bytes, f"rank {rank}, dispatch")
        assert_consistent(kinds["combine"], 2 * shape.hidden, f"rank {rank}, combine")
        assert kinds["dispatch"].ops == 4
        assert kinds["combine"].ops == 2


def test_tokens_and_bytes_are_those_of_the_routing() -> None:
    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        handle = exchange(buffer, inputs)
        exchange(buffer, inputs)
        return counted(buffer), (handle[1] & 0xFFFFFFFF).sum(0), inputs.topk_idx

    for kinds, rows_from, topk_idx in on_all_ranks(run):
        assert kinds["dispatch"]["ops"].tolist() == [2] * 4
        assert kinds["dispatch"]["tokens"].tolist() == (2 * rows_from).tolist()
        assert kinds["dispatch"]["bytes"].tolist() == (2 * rows_from * (256 + 8)).tolist()
        rows_back = torch.bincount(topk_idx[topk_idx >= 0] // SHAPE.num_local_experts, minlength=4)
        assert kinds["combine"]["tokens"].tolist() == (2 * rows_back).tolist()
        assert kinds["combine"]["bytes"].tolist() == (2 * rows_back * 512).tolist()


@measured_again
def test_a_slow_rank_shows_as_lateness_in_its_column_and_as_its_own_gap(clock: str) -> None:
    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        buffer.disable_counters()
        exchange(buffer, inputs)  # so that the first measured gap has a beginning
        buffer.enable_counters()
        exchange_three_times(buffer, inputs, late_rank=2)
        return counted(buffer)["dispatch"]

    snapshots = on_all_ranks(run)
    for rank, snapshot in enumerate(snapshots):
        late = snapshot["late_ns"]
        if rank == 2:
            assert late.max() < DELAY_NS, "the late rank itself waits for nobody"
            assert snapshot.own_value("gap_ns") > 3 * DELAY_NS
            continue
        assert are_three_delays(late[2], clock)
        assert late[[0, 1, 3]].max() < 0.5 * DELAY_NS
        assert snapshot["path_ns"].max() < 0.5 * DELAY_NS
        assert snapshot["critical_ops"].tolist() == [0, 0, 3, 0]
        assert snapshot["critical_ns"][2] > 2.5 * DELAY_NS
        assert snapshot.own_value("gap_ns") < 0.5 * DELAY_NS


@measured_again
def test_a_slow_path_shows_as_path_time_in_its_cell_and_makes_its_receiver_late(clock: str) -> None:
    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        if buffer.rank == 0:
            buffer.runtime.set_path_fault(dst=3, delay_ns=DELAY_NS, bytes_per_s=0.0)
        exchange_three_times(buffer, inputs)
        return counted(buffer)

    snapshots = on_all_ranks(run)
    # Rank 3, having waited in the dispatch, is late in the combine, and its data is there by then.
    path = np.stack(
        [kinds["dispatch"]["path_ns"] + kinds["combine"]["path_ns"] for kinds in snapshots]
    )
    assert are_three_delays(path[3, 0], clock)
    path[3, 0] = 0
    assert path.max() < 0.5 * DELAY_NS, "some other path looks slow"
    for rank in (0, 1, 2):
        assert are_three_delays(snapshots[rank]["combine"]["late_ns"][3], clock)


@measured_again
def test_a_throttled_path_takes_time_in_proportion_to_its_bytes(clock: str) -> None:
    shape = replace(
        SHAPE, num_tokens=(4, 4, 4, 4), num_topk=8, dropped=0.0
    )  # every expert gets all
    bytes_per_s = 1e5 if clock == "rank" else 1e4

    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        if buffer.rank == 1:
            buffer.runtime.set_path_fault(dst=2, delay_ns=0, bytes_per_s=bytes_per_s)
        dispatch(buffer, inputs, shape, FP8)
        return buffer.dispatch_counters.snapshot()

    slow = on_all_ranks(run, shape)[2]
    payload_ns = slow["bytes"][1] / bytes_per_s * 1e9
    (slot,) = slow.operations()
    stamps = dict(zip(slow.ring_source_fields, slot[1]))
    # From issue to arrival, whenever the receiver began to wait; messages carry some bytes besides payload.
    elapsed_ns = stamps["arrival"] - stamps["issued"] + stamps["clock_error"]
    assert payload_ns < elapsed_ns < 3 * payload_ns
    assert slow["wait_ns"][1] > 0.5 * payload_ns
    assert slow["wait_ns"][[0, 2, 3]].max() < 0.5 * payload_ns


@measured_again
def test_data_issued_long_before_the_receive_phase_is_slack_and_no_wait() -> None:

    snapshots = on_all_ranks(
        lambda buffer, inputs: begin_and_finish(buffer, inputs, DELAY_NS * (buffer.rank == 1))
    )
    assert snapshots[1]["wait_ns"].tolist() == [0] * 4
    assert snapshots[1]["slack_ns"].min() > 0.5 * DELAY_NS
    assert snapshots[0]["slack_ns"].max() < 0.5 * DELAY_NS


def test_the_ring_keeps_the_latest_operations_at_their_number() -> None:
    capacity = 5

    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        first = buffer.runtime.operation() + 1
        for _ in range(7):
            exchange(buffer, inputs)
        return first, counted(buffer)

    seen = on_all_ranks(run, ring=capacity)
    assert len({first for first, _ in seen}) == 1, "ranks number operations alike"
    for first, kinds in seen:
        for start, kind in enumerate(("dispatch", "combine")):
            numbers = [first + start + 2 * i for i in range(7)]
            ring = kinds[kind].ring
            held = ring[:, -1, 0]
            expected = np.zeros(capacity, dtype=np.int64)
            for number in numbers:
                expected[number % capacity] = number
            assert held.tolist() == expected.tolist()
            slots = kinds[kind].operations()
            assert (slots[:, -1, 2] >= slots[:, -1, 1]).all(), "exit before the wait began"
            assert (slots[1:, -1, 3] >= slots[:-1, -1, 2]).all(), (
                "previous exit before that operation"
            )


def test_nothing_is_counted_when_counters_are_off() -> None:
    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        exchange(buffer, inputs)
        kept = buffer.dispatch_counters, buffer.combine_counters
        before = [counters.snapshot() for counters in kept]
        buffer.disable_counters()
        assert buffer.dispatch_counters is None
        exchange(buffer, inputs)
        return before, [counters.snapshot() for counters in kept]

    for before, after in on_all_ranks(run):
        for one, other in zip(before, after):
            assert one.ops == other.ops == 1
            for array in ("totals", "own", "ring"):
                assert np.array_equal(getattr(one, array), getattr(other, array))


def test_counters_given_with_a_call_count_that_call_only() -> None:
    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        mine = RecvCounters(buffer.group_size, ring=0)
        received = dispatch(buffer, inputs, SHAPE, FP8, recv_counters=mine)
        combine(buffer, inputs, received.handle, experts(received, buffer.rank), FP8)
        return mine.snapshot(), counted(buffer)

    for mine, kinds in on_all_ranks(run):
        assert (mine.ops, kinds["dispatch"].ops, kinds["combine"].ops) == (1, 0, 1)
        assert (mine["late_ns"] + mine["issue_ns"] + mine["path_ns"]).tolist() == mine[
            "wait_ns"
        ].tolist()


def test_the_original_wait_tensors_equal_the_counters() -> None:
    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        waits = [torch.zeros(4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)]
        for _ in range(3):
            buffer.runtime.delay(buffer.rank * MS)
            received = dispatch(buffer, inputs, SHAPE, FP8, dispatch_wait_recv_cost_stats=waits[0])
            combine(
                buffer, inputs, received.handle, experts(received, buffer.rank), FP8,
                combine_wait_recv_cost_stats=waits[1],
            )  # fmt: skip
        return waits, counted(buffer)

    results = on_all_ranks(run)
    for rank, (waits, kinds) in enumerate(results):
        assert waits[0].tolist() == kinds["dispatch"]["wait_ns"].tolist()
        assert waits[1][rank].tolist() == kinds["combine"]["wait_ns"].tolist()


def test_an_operation_that_failed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "1")

    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        if buffer.rank != 3:
            with pytest.raises(EPTimeoutError):
                dispatch(buffer, inputs, SHAPE, FP8)
        return buffer.dispatch_counters.snapshot()

    for snapshot in on_all_ranks(run):
        assert not snapshot.totals.any()
        assert not snapshot.own.any()
        assert not snapshot.ring.any()


@measured_again
def test_a_word_that_is_there_when_the_rank_looks_is_no_wait_and_never_critical(clock: str) -> None:
    """Also when the receive launch comes long after the send."""

    for snapshot in on_all_ranks(lambda *given: begin_and_finish(*given, delay_ns=DELAY_NS)):
        assert not snapshot["wait_ns"].any()
        assert not snapshot["critical_ops"].any()
        (slot,) = snapshot.operations()
        stamps = dict(zip(snapshot.ring_source_fields, slot[:-1].T))
        own = dict(zip(snapshot.ring_own_fields, slot[-1]))
        assert (stamps["arrival"] <= own["wait_begin"]).all()
        # The rank clock knows when words came; in wall time nobody was there to see it.
        assert (stamps["seen"] == (clock == "rank")).all()


@measured_again
def test_a_late_source_does_not_make_the_others_look_late(clock: str) -> None:
    """Arrivals are stamped source by source: who came early waits for nobody's header."""

    def run(buffer: deep_ep.Buffer, inputs: Inputs) -> Any:
        buffer.runtime.delay({1: DELAY_NS // 2, 3: DELAY_NS}.get(buffer.rank, 0))
        dispatch(buffer, inputs, SHAPE, FP8)
        return buffer.dispatch_counters.snapshot()

    snapshots = on_all_ranks(run)
    for rank in (0, 2):
        wait = snapshots[rank]["wait_ns"]
        assert wait[[0, 2]].max() < 0.25 * DELAY_NS
        assert 0.4 * DELAY_NS < wait[1] < 0.75 * DELAY_NS
        assert 0.9 * DELAY_NS < wait[3] < 1.25 * DELAY_NS
        assert snapshots[rank]["critical_ops"].tolist() == [0, 0, 0, 1]
        (slot,) = snapshots[rank].operations()
        seen = slot[:-1, snapshots[rank].ring_source_fields.index("seen")]
        assert seen[[1, 3]].tolist() == [1, 1], "somebody was there to see these arrive"


def test_issued_is_stamped_per_destination_and_sent_is_the_last_of_them() -> None:
    snapshots = after_exchanges(3)
    for kind in ("dispatch", "combine"):
        slots = [one[kind].operations() for one in snapshots]
        fields, own = snapshots[0][kind].ring_source_fields, snapshots[0][kind].ring_own_fields
        # All ranks of this process read clocks that agree, but for what an offset may be wrong by.
        error = max(int(one[:, :-1, fields.index("clock_error")].max()) for one in slots)
        for source in range(SHAPE.num_ranks):
            entered = slots[source][:, source, fields.index("entered")]
            sent = slots[source][:, -1, own.index("sent")]
            issued = np.stack([one[:, source, fields.index("issued")] for one in slots])
            assert (issued >= entered - error).all()
            assert (np.abs(issued.max(axis=0) - sent) <= error).all(), "sent is the last issue"


def test_the_timers_step_is_known() -> None:
    for kinds in after_exchanges(1):
        snapshot = kinds["dispatch"]
        step = snapshot.operations()[:, -1, snapshot.ring_own_fields.index("timer_step")]
        assert (step > 0).all()
        assert (step < MS).all()
