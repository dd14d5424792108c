"""What is said to be gained without a cause, against the same run without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from deep_ep import diagnose
from deep_ep.testing.faults import HotRank, SlowPath, SlowRank
from generator import Window, simulate_windows
from generator.faults import (
    GeneratorFault,
    NicBursts,
    NonReporting,
    PathBursts,
    PausedSender,
    SlowEgress,
    SlowNvlinkIn,
    SlowNvlinkOut,
    SlowReceiver,
    Throttled,
)
from generator.machines import CLUSTER, LOW_LATENCY, NORMAL_OF_ONE_NODE, Kind, Machine

NUM_ROUNDS, NUM_WINDOWS = 64, 3
ONE_NODE = replace(CLUSTER, ranks_per_node=8)
NODES = replace(CLUSTER, ranks_per_node=4)
# Waiting begins when NVLink has taken what was sent, as on GPUs.
FENCED, FENCED_NODES = replace(ONE_NODE, fenced=True), replace(NODES, fenced=True)
BATCHES = replace(NODES, batches=(0.5, 1 / 128), batches_alternate=True)


def of_windows(
    machine: Machine,
    num_ranks: int,
    faults: list[GeneratorFault],
    num_windows: int,
    kinds: Sequence[Kind] = LOW_LATENCY,
) -> Iterator[Window]:
    capacity = len(kinds) * NUM_ROUNDS
    injected = [faults] * num_windows
    return simulate_windows(
        machine, num_ranks, NUM_ROUNDS, injected, 40, capacity=capacity, kinds=kinds
    )


def is_close(said_us: float, true_us: float) -> bool:
    return abs(said_us - true_us) <= max(3.0, 0.1 * abs(true_us))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("machine", "num_ranks", "faults"),
    [
        (ONE_NODE, 8, [SlowRank(3, 50e-6)]),
        (FENCED, 8, [SlowPath(2, 5, 200e-6)]),
        (FENCED, 8, [SlowNvlinkOut(2, 50e-6)]),
        (FENCED, 8, [SlowNvlinkIn(2, 200e-6)]),
        (FENCED_NODES, 12, [SlowEgress(2, 200e-6)]),
        (NODES, 12, [NicBursts(5, 200e-6)]),
        (ONE_NODE, 8, [PathBursts(1, 6, 200e-6)]),
        (NODES, 12, [PausedSender(7, 200e-6)]),
        (ONE_NODE, 8, [Throttled(4, 200e-6)]),
        (NODES, 12, [SlowRank(6, 50e-6), NonReporting(6)]),
        (BATCHES, 12, [SlowRank(6, 50e-6)]),
        (ONE_NODE, 8, [HotRank(2, 4.0)]),
    ],
    ids=[
        "late",
        "path behind a fence",
        "NVLink egress behind a fence",
        "NVLink ingress behind fences",
        "egress behind a fence",
        "bursts at a NIC",
        "bursts on a path",
        "paused sender",
        "throttled",
        "does not report",
        "batches of two sizes",
        "hot",
    ],
)
def test_without_a_cause_operations_take_what_they_take_in_the_same_run_without_it(
    machine: Machine, num_ranks: int, faults: list[GeneratorFault]
) -> None:
    num_judged = 0
    for window in of_windows(machine, num_ranks, faults, NUM_WINDOWS):
        found = diagnose.judge(diagnose.gather(window.snapshots))
        if found.keys == window.truth.keys:
            num_judged += 1
            assert window.saving_us > 5
            for verdict in found.verdicts:
                assert is_close(verdict.saving_us, window.saving_us), (verdict, window.saving_us)
    assert num_judged > NUM_WINDOWS / 2


def test_a_cause_that_another_one_hides_is_worth_what_it_costs_once_that_is_gone() -> None:
    late, path = SlowRank(3, 200e-6), SlowPath(5, 6, 100e-6)
    (both,) = of_windows(ONE_NODE, 8, [late, path], 1)
    (only_path,) = of_windows(ONE_NODE, 8, [path], 1)
    (only_late,) = of_windows(ONE_NODE, 8, [late], 1)
    found = diagnose.judge(diagnose.gather(both.snapshots))
    of_rank, of_path = ([v for v in found.verdicts if v.subject == s] for s in (3, (5, 6)))
    assert of_rank
    assert of_path
    for verdict in of_path:
        assert verdict.saving_us < 3
        assert is_close(verdict.alone_us, only_path.saving_us)
    for verdict in of_rank:
        assert is_close(verdict.saving_us, both.saving_us - only_path.saving_us)
        assert is_close(verdict.alone_us, only_late.saving_us)
    assert is_close(found.savings_us["dispatch"], both.saving_us)


def test_who_waits_for_slots_of_a_slow_receiver_does_not_without_it() -> None:
    faults: list[GeneratorFault] = [SlowReceiver(3, 200e-6)]
    (window,) = of_windows(ONE_NODE, 8, faults, 1, NORMAL_OF_ONE_NODE)
    found = diagnose.judge(diagnose.gather(window.snapshots))
    assert found.keys == window.truth.keys
    for saving_us in found.savings_us.values():
        assert 0.7 * window.saving_us < saving_us < window.saving_us


def test_the_only_cause_is_worth_as_much_alone() -> None:
    (window,) = of_windows(ONE_NODE, 8, [SlowRank(3, 50e-6)], 1)
    found = diagnose.judge(diagnose.gather(window.snapshots))
    assert found.verdicts
    for verdict in found.verdicts:
        assert verdict.alone_us == verdict.saving_us == found.savings_us[verdict.operation]
