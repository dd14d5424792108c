"""The receive counters against the clock of the simulation, which is not the one they are made from.

Every rank enters at a time that is known, messages take a time that is known, and every rank's own clock
is off by seconds and drifts. So it is known what each stamp had to be, and what each wait is made of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import deep_ep

if deep_ep.native.backend.get().name != "cpu":
    pytest.skip("the simulation is of the cpu backend", allow_module_level=True)

from explore.machine import NEVER, Machine, SimulatedGroup
from explore.program import Pace
from support.counter_reference import parts_of_wait
from support.exchange import Mode, Shape, buffer_for, dispatch, make_inputs

US = 1_000
MS = 1_000_000
SHAPE = Shape((3, 0, 4, 2), num_max_tokens=4, hidden=256, num_experts=8, num_topk=3)
NUM_RANKS = SHAPE.num_ranks
DELIVERY_NS = 20 * US
ROUNDS = 6
# Of its rank and operation: when it enters, beyond the common beginning of the round.
DELAYS_NS = [
    [(rank * 7 + number * 3) % 5 * 300 * US for rank in range(NUM_RANKS)]
    for number in range(ROUNDS)
]
ROUND_NS = 5 * MS
# What sending takes here: nothing but the readings of the clock, a nanosecond each, unless it is stopped.
WORK_NS = 4 * US
# A stop in the middle of sending, after the headers and before the last rows.
STOP_NS = 200 * US
STOP_POINT = 60


class Skew(NamedTuple):
    """How a rank's clock is wrong."""

    offset_ns: int
    drift_ppm: float
    since_ns: int

    def of(self, true_ns: int) -> float:
        """What it shows at a time of the simulation."""
        return true_ns + self.offset_ns + self.drift_ppm * 1e-6 * (true_ns - self.since_ns)


class Seen(NamedTuple):
    """What one rank recorded of all rounds: its ring, and its clock."""

    ring: np.ndarray[Any, Any]
    fields: list[str]
    totals: dict[str, np.ndarray[Any, Any]]
    skew: Skew


def run(
    schedule_seed: int | None, stopped: int | None = None, slow_path_ns: int = 0
) -> tuple[list[Seen], list[int]]:
    """All rounds on all ranks; also when each round began. Rank `stopped` stops in each of its sends."""
    pace = Pace(1 << 30, 0, DELIVERY_NS, DELIVERY_NS)
    machine = Machine(NUM_RANKS, 2, pace, seed=1)
    begin_ns = machine.began_ns + 100 * MS
    begins = [begin_ns + number * ROUND_NS for number in range(ROUNDS)]
    inputs = make_inputs(SHAPE)

    def run_rank(rank: int) -> Seen:
        buffer = buffer_for(SHAPE, SimulatedGroup(machine, rank, 1.0))
        assert buffer.runtime is not None
        native = buffer.runtime.native
        if schedule_seed is not None:
            native.set_launch_shape(blocks=2, warps=1)
            native.set_schedule(policy="random", seed=schedule_seed + rank)
        if slow_path_ns and rank == 0:
            native.set_path_fault(dst=3, delay_ns=slow_path_ns, bytes_per_s=0.0)
        machine.sleep(begins[0] - 50 * MS - machine.now_ns())
        skew = Skew((rank - 1) * 3_000 * MS, 15.0 * (rank - 2), machine.now_ns())
        native.set_clock_fault(offset_ns=skew.offset_ns, drift_ppm=skew.drift_ppm)
        buffer.measure_clock_offsets()
        machine.sleep(begins[0] - 20 * MS - machine.now_ns())
        buffer.measure_clock_offsets()  # the second measurement tells the drift
        buffer.enable_counters(ring=ROUNDS)
        for number in range(ROUNDS):
            machine.sleep(begins[number] + DELAYS_NS[number][rank] - machine.now_ns())
            if rank == stopped:
                machine.stop_after(STOP_POINT, STOP_NS)
            dispatch(buffer, inputs[rank], SHAPE, Mode())
            machine.stop_after(NEVER, 0)
        machine.meet("end", 0, rank, None)  # what is on its way would be lost with its sender
        assert buffer.dispatch_counters is not None
        snapshot = buffer.dispatch_counters.snapshot()
        totals = {name: snapshot[name] for name in ("wait_ns", "late_ns", "issue_ns", "path_ns")}
        return Seen(snapshot.operations(), snapshot.ring_source_fields, totals, skew)

    return machine.results(run_rank), begins


def test_of_many_samples_of_a_clock_the_shortest_round_trip_counts() -> None:
    machine = Machine(NUM_RANKS, 2, Pace(1 << 30, 0, 2 * US, 100 * US), seed=1)

    def run_rank(rank: int) -> list[int]:
        buffer = buffer_for(SHAPE, SimulatedGroup(machine, rank, 1.0))
        took = [int(buffer.measure_clock_offsets(samples)[1].sum()) for samples in (1, 1, 64, 64)]
        machine.meet("end", 0, rank, None)
        return took

    once, again, shortest, shortest_again = np.sum(machine.results(run_rank), axis=0)
    assert 4 * (shortest + shortest_again) < 3 * (once + again)


@pytest.mark.parametrize("schedule_seed", [None, 1, 2, 3])
@pytest.mark.parametrize("stopped", [None, 2])
@pytest.mark.parametrize("slow_path_ns", [0, 500 * US])
def test_stamps_and_parts_are_those_of_the_independent_clock(
    schedule_seed: int | None, stopped: int | None, slow_path_ns: int
) -> None:
    seen, begins = run(schedule_seed, stopped, slow_path_ns)
    for rank, one in enumerate(seen):
        expected = {name: np.zeros(NUM_RANKS) for name in one.totals}
        allowed = np.zeros(NUM_RANKS)
        assert len(one.ring) == ROUNDS
        for number, slot in enumerate(one.ring):
            for source in range(NUM_RANKS):
                stamps = dict(zip(one.fields, slot[source]))
                entered = begins[number] + DELAYS_NS[number][source]
                stop_ns = STOP_NS if source == stopped else 0
                path_ns = slow_path_ns if (source, rank) == (0, 3) else 0
                issued = entered + stop_ns
                arrival = issued + DELIVERY_NS + path_ns
                where = f"rank {rank}, round {number}, source {source}"
                error = int(stamps["clock_error"])
                assert error <= DELIVERY_NS + slow_path_ns + WORK_NS, where
                assert abs(stamps["entered"] - one.skew.of(entered)) <= error + WORK_NS, where
                assert abs(stamps["issued"] - one.skew.of(issued)) <= error + WORK_NS, where
                assert abs(stamps["arrival"] - one.skew.of(arrival)) <= WORK_NS, where
                own_stop_ns = STOP_NS if rank == stopped else 0
                begin = begins[number] + DELAYS_NS[number][rank] + own_stop_ns
                for name, ns in parts_of_wait(entered, issued, arrival, begin).items():
                    expected[name][source] += ns
                allowed[source] += error + 2 * WORK_NS
        for name, totals in one.totals.items():
            off = np.abs(totals - expected[name])
            assert (off <= allowed).all(), f"rank {rank}, {name}: {totals} for {expected[name]}"
