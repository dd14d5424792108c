"""Snapshots: rolled back to an operation number, subtracted, and copied while operations run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_ep
from deep_ep import diagnose
from deep_ep.errors import EPArgumentError
from deep_ep.native import backend
from deep_ep.observe.copier import Reading, copy_between_operations
from deep_ep.observe.counter_snapshot import CounterSnapshot
from deep_ep.observe.counters import RecvCounters
from fixtures import OF_TWO_RANKS, SHAPE, exchange
from generator import simulate_windows
from generator.machines import CLUSTER, NORMAL
from support.counter_reference import add_operation
from support.exchange import ranks_for
from support.launch import DEVICE

BINDING = backend.get().binding
FIELDS = tuple(BINDING.COUNTER_FIELDS)
OWN_FIELDS = tuple(BINDING.OWN_FIELDS)
RING_SOURCE_FIELDS = tuple(BINDING.RING_SOURCE_FIELDS)
RING_OWN_FIELDS = tuple(BINDING.RING_OWN_FIELDS)
ROW_BYTES = 528


@dataclass(frozen=True)
class Operation:
    """Raw times of one operation; per source where there are several."""

    entered: list[int]
    issued: list[int]
    arrival: list[int]
    tokens: list[int]
    wait_begin: int
    leave: int
    previous_exit: int
    send_ns: int


class Model:
    """The counters of one rank with their ring."""

    def __init__(self, num_ranks: int, capacity: int, rank: int) -> None:
        self.num_ranks, self.capacity, self.rank = num_ranks, capacity, rank
        self.totals = {name: [0] * num_ranks for name in FIELDS}
        self.own = dict.fromkeys(OWN_FIELDS, 0)
        self.ring = np.zeros((capacity, num_ranks + 1, BINDING.NUM_RING_FIELDS), dtype=np.int64)

    def count(self, number: int, op: Operation) -> None:
        stamps = {
            "entered": op.entered,
            "issued": op.issued,
            "arrival": op.arrival,
            "tokens": op.tokens,
        }
        add_operation(self.totals, self.own, stamps, op.wait_begin, op.leave, ROW_BYTES)
        if op.previous_exit:
            self.own["gap_ns"] += op.entered[self.rank] - op.previous_exit
        self.own["send_ns"] += op.send_ns
        if self.capacity:
            slot = self.ring[number % self.capacity]
            seen = [int(arrival > op.wait_begin) for arrival in op.arrival]
            sources = {**stamps, "seen": seen, "clock_error": 0}
            own = {
                "op": number,
                "wait_begin": op.wait_begin,
                "exit": op.leave,
                "previous_exit": op.previous_exit,
                "sent": op.entered[self.rank] + op.send_ns,
                "timer_step": 1,
            }
            for name, values in sources.items():
                slot[:-1, RING_SOURCE_FIELDS.index(name)] = values
            for name, value in own.items():
                slot[-1, RING_OWN_FIELDS.index(name)] = value

    def snapshot(self) -> CounterSnapshot:
        return CounterSnapshot(
            FIELDS,
            OWN_FIELDS,
            RING_SOURCE_FIELDS,
            RING_OWN_FIELDS,
            np.array([self.totals[name] for name in FIELDS], dtype=np.int64),
            np.array([self.own[name] for name in OWN_FIELDS], dtype=np.int64),
            self.ring.copy(),
        )


STAMP = st.integers(1, 60)


@st.composite
def operations(draw: st.DrawFn, num_ranks: int) -> Operation:
    """Stamps from a narrow range, so that ties and every order of them occur."""

    def stamps() -> list[int]:
        return draw(st.lists(STAMP, min_size=num_ranks, max_size=num_ranks))

    return Operation(
        stamps(), stamps(), stamps(),
        draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks)),
        draw(STAMP), draw(STAMP), draw(st.integers(0, 60)), draw(st.integers(0, 9)),
    )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> tuple[Model, list[tuple[int, Operation]], int]:
    """A model, numbered operations, and a number to roll back to. Numbers of other kinds lie between."""
    num_ranks = draw(st.integers(1, 4))
    steps = draw(st.lists(st.integers(1, 3), max_size=10))
    numbers = [int(n) for n in np.cumsum([draw(st.integers(1, 5)), *steps])]
    counted = [(number, draw(operations(num_ranks))) for number in numbers]
    model = Model(num_ranks, draw(st.integers(0, 24)), draw(st.integers(0, num_ranks - 1)))
    return model, counted, draw(st.integers(0, numbers[-1] + 1))


def difference(got: CounterSnapshot, want: CounterSnapshot) -> list[str]:
    """Names of the exact fields in which two snapshots differ."""
    names = [n for n in FIELDS if n != "max_wait_ns" and got[n].tolist() != want[n].tolist()]
    own = [n for n in OWN_FIELDS if got.own_value(n) != want.own_value(n)]
    return names + [f"own {n}" for n in own]


@given(run=runs())
def test_rolling_back_gives_the_snapshot_that_was_taken_then(run: Any) -> None:
    model, counted, until = run
    then = model.snapshot()
    for number, operation in counted:
        model.count(number, operation)
        if number <= until:
            then = model.snapshot()
    now = model.snapshot()
    held = set(now.ring[:, -1, 0].tolist())
    oldest_sure = counted[-1][0] - model.capacity if model.capacity else np.inf
    if until < oldest_sure and not held.issuperset(number for number, _ in counted):
        with pytest.raises(EPArgumentError, match=f"operation is {until}, and the ring of"):
            now.until(until, model.rank)
        return
    rolled = now.until(until, model.rank)
    assert difference(rolled, then) == []
    assert rolled.operation == then.operation or not held.issuperset([then.operation])
    assert not rolled.estimated
    kept = {number for number in held if 0 < number <= until}
    assert {int(n) for n in rolled.operations()[:, -1, 0]} == kept
    assert (rolled["max_wait_ns"] == now["max_wait_ns"]).all()


@given(run=runs())
def test_windows_of_rolled_back_snapshots_hold_exactly_their_operations(run: Any) -> None:
    model, counted, until = run
    model = Model(model.num_ranks, 64, model.rank)  # no operation leaves the ring
    middle = counted[len(counted) // 2][0]
    window = Model(model.num_ranks, 64, model.rank)
    early = model.snapshot()
    for number, operation in counted:
        model.count(number, operation)
        if number == middle:
            early = model.snapshot().until(min(until, middle), model.rank)
        if min(until, middle) < number <= until:
            window.count(number, operation)
    got = model.snapshot().until(until, model.rank).since(early)
    assert difference(got, window.snapshot()) == []
    assert np.array_equal(got.operations(), window.snapshot().operations())


def test_hops_that_have_some_sources_only_roll_back_exactly() -> None:
    machine = replace(CLUSTER, ranks_per_node=2)
    (window,) = simulate_windows(machine, 4, 6, [[]], seed=3, capacity=12, kinds=NORMAL)
    for now, then in zip(window.snapshots, window.first(4 * len(NORMAL)).snapshots):
        back = now.until(8)
        for kind, counters in back.operations.items():
            for name in ("ops", "tokens", "wait_ns", "late_ns", "issue_ns", "path_ns"):
                np.testing.assert_array_equal(counters[name], then.operations[kind][name])
            assert counters.own_value("drain_ns") == then.operations[kind].own_value("drain_ns")
            exact_gap = now.rank not in np.flatnonzero(counters["ops"] == 0)
            assert ("gap_ns" in counters.estimated) == (not exact_gap)


def test_what_the_ring_does_not_tell_is_cut_in_proportion_and_named() -> None:
    operation = Operation([5, 5], [6, 6], [9, 8], [2, 0], 4, 12, 1, 10)
    model = Model(2, 8, rank=0)
    for number in range(1, 5):
        model.count(number, operation)
    now = model.snapshot()
    rolled = now.until(1)
    assert rolled.own_value("send_ns") == 10
    assert rolled.own_value("gap_ns") == 4
    assert rolled.estimated == now.since(rolled).estimated == ("gap_ns", "send_ns")
    mixed = now.totals.copy()
    mixed[FIELDS.index("bytes"), 0] += 3  # a row of another size
    rolled = replace(now, totals=mixed).until(3, rank=0)
    assert rolled.estimated == ("bytes",)
    assert rolled["bytes"].tolist() == [8 * ROW_BYTES + 3 - 2 * ROW_BYTES, 0]


def test_estimates_never_make_a_window_fail() -> None:
    quick, slow = (Operation([5], [6], [9], [1], 4, 12, 1, send) for send in (0, 1000))
    model = Model(1, 64, rank=0)
    for number, operation in enumerate([slow] * 2 + [quick] * 9, start=1):
        model.count(number, operation)
    early = model.snapshot().until(10, 0)
    model.count(12, quick)
    window = model.snapshot().until(11, 0).since(early)
    assert window.ops == 1
    assert window.own_value("send_ns") >= 0


def test_counters_that_fell_are_named_with_both_values() -> None:
    model = Model(2, 4, rank=0)
    model.count(1, Operation([5, 5], [6, 6], [9, 8], [2, 7], 4, 12, 1, 10))
    before = model.snapshot()
    fewer = before.totals.copy()
    fewer[FIELDS.index("tokens"), 1] = 3
    with pytest.raises(
        EPArgumentError, match="tokens of source 1 is 3, and 7 in the earlier snapshot"
    ):
        replace(before, totals=fewer).since(before)


def test_without_a_ring_nothing_can_be_rolled_back() -> None:
    model = Model(1, 0, rank=0)
    assert model.snapshot().until(3).ops == 0
    model.count(1, Operation([5], [6], [9], [1], 4, 12, 0, 1))
    with pytest.raises(EPArgumentError, match="the ring of 0 holds .* none"):
        model.snapshot().until(3)


# ---- copying while kernels write


class Changing:
    """A copier whose counters change between readings, as told: a step before each access."""

    def __init__(self, *steps: Any) -> None:
        self.now = Reading(np.zeros((2, 3), np.int64), np.zeros(1, np.int64), np.zeros(4, np.int64))
        self.slots = np.zeros((4, 4, 4), np.int64)
        self.steps = list(steps)
        self.num_readings = 0

    def step(self) -> None:
        if self.steps:
            change = self.steps.pop(0)
            if change is not None:
                change(self)

    def reading(self) -> Reading:
        self.step()
        self.num_readings += 1
        return Reading(*(a.copy() for a in (self.now.totals, self.now.own, self.now.op_of_slot)))

    def ring(self) -> np.ndarray:
        self.step()
        return self.slots.copy()


def add(number: int) -> Any:
    def count(counters: Changing) -> None:
        counters.now.totals[:] += 1
        finish(number)(counters)

    return count


def begin(counters: Changing) -> None:
    counters.now.totals[:, 0] += 1


def finish(number: int) -> Any:
    def count(counters: Changing) -> None:
        counters.now.totals[:] = counters.now.totals.max()
        counters.now.own[:] += 1
        counters.now.op_of_slot[number % 4] = number
        counters.slots[number % 4] = number

    return count


def whole(reading: Reading) -> bool:
    return bool((reading.totals <= reading.own[0]).all())


def test_a_quiet_moment_needs_two_readings_on_either_side_of_the_ring() -> None:
    counters = Changing(add(1))
    reading, ring, lost = copy_between_operations(counters, whole, lambda _: None)
    assert counters.num_readings == 4
    assert (reading.own[0], lost) == (1, 0)
    assert (ring[1] == 1).all()


def test_an_operation_that_is_being_counted_is_waited_for() -> None:
    paused: list[float] = []
    counters = Changing(add(1), begin, None, None, finish(2))
    reading, ring, _ = copy_between_operations(counters, whole, paused.append)
    assert reading.own[0] == 2
    assert (reading.totals == 2).all()
    assert (ring[2] == 2).all()
    assert paused == sorted(paused[:-1]) + [paused[-1]], "each pause is longer, until it settles"


def test_what_is_written_while_the_ring_is_copied_is_left_out_and_remembered() -> None:
    counters = Changing(*(add(n) for n in (1, 2, 3)), None, None, add(6), add(7))
    reading, ring, lost = copy_between_operations(counters, whole, lambda _: None)
    assert reading.op_of_slot.tolist() == [0, 1, 2, 3]
    assert ring[:, 0, 0].tolist() == [0, 1, 0, 0]
    assert lost == 3
    model = Model(1, 8, rank=0)
    for number in range(1, 5):
        model.count(number, Operation([5], [6], [9], [1], 4, 12, 1, 10))
    now = model.snapshot()
    torn = now.ring.copy()
    torn[2] = 0
    torn = replace(now, ring=torn, lost=2)
    assert torn.until(2, 0).ops == 2
    with pytest.raises(EPArgumentError, match="operation is 1"):
        torn.until(1, 0)


def test_counters_that_never_rest_are_copied_all_the_same() -> None:
    waited: list[float] = []
    counters = Changing(*[begin] * 1000)
    reading, _, _ = copy_between_operations(counters, whole, waited.append)
    assert reading.totals.max() > 1
    assert sum(waited) < 0.5


def test_of_counters_that_never_rest_the_latest_whole_reading_is_taken() -> None:
    steps = [step for number in range(1, 100) for step in (begin, finish(number))]
    counters = Changing(add(0), *steps)
    reading, _, _ = copy_between_operations(counters, whole, lambda _: None)
    assert whole(reading)
    assert reading.own[0] > 10


def test_snapshots_agree_while_another_thread_counts() -> None:
    """Operations of known content are counted without a pause; every copy holds whole ones."""
    operation = Operation([5, 6], [6, 6], [9, 8], [2, 7], 4, 12, 1, 10)
    model = Model(2, 8, rank=0)
    counters = RecvCounters(2, ring=8, device="cpu")
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            model.count(number, operation)
            now = model.snapshot()
            # In the order of the kernels: sources, then this rank, each with its ring slot.
            counters.totals.copy_(torch.from_numpy(now.totals))
            counters.ring[:, :-1] = torch.from_numpy(now.ring[:, :-1])
            counters.own.copy_(torch.from_numpy(now.own))
            counters.ring[:, -1] = torch.from_numpy(now.ring[:, -1])
            stop.wait(0.0005)

    writer = threading.Thread(target=count)
    writer.start()
    try:
        taken = [counters.snapshot() for _ in range(100)]
    finally:
        stop.set()
        writer.join()
    for snapshot in taken:
        assert (snapshot["ops"] == snapshot.ops).all()
        assert (snapshot["tokens"] == snapshot.ops * np.array([2, 7])).all()
        assert snapshot.own_value("drain_ns") == 3 * snapshot.ops
    assert taken[-1].ops > taken[0].ops


# ---- the kernels' own


def test_counters_of_the_kernels_roll_back_to_what_they_were() -> None:
    def program(_: int, buffer: deep_ep.Buffer) -> Any:
        exchange(buffer, 1)  # so that the first gap has a beginning
        buffer.enable_counters(ring=32)
        taken = []
        for _ in range(6):
            exchange(buffer, 1)
            taken.append(diagnose.snapshot(buffer))
        return taken

    with ranks_for(SHAPE) as ranks:
        of_ranks = ranks.run(program)
    for taken in of_ranks:
        assert [s.operation for s in taken] == [taken[0].operation + 2 * i for i in range(6)]
        for then in taken:
            rolled = taken[-1].until(then.operation)
            assert rolled.operation == then.operation
            for kind, counters in rolled.operations.items():
                assert difference(counters, then.operations[kind]) == []


def test_a_snapshot_says_which_device_its_counters_are_on() -> None:
    with ranks_for(OF_TWO_RANKS) as ranks:
        places = ranks.run(
            lambda _, buffer: (buffer.enable_counters(), diagnose.snapshot(buffer, wait=False))[1]
        )
    assert [(s.rank, s.num_ranks, s.device) for s in places] == [(0, 2, DEVICE), (1, 2, DEVICE)]
    assert [s.device_index for s in places] == ([0, 1] if DEVICE == "cpu" else [0, 0])
