"""Receivers that hold up their senders, and those that are held up by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deep_ep import diagnose
from deep_ep.diagnose.collect.group_matrices import Matrices
from deep_ep.diagnose.collect.hops import LAST_HOPS, NORMAL_COMBINE
from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.testing.faults import SlowPath, SlowRank
from generator import simulate
from generator.faults import GeneratorFault, SlowNicOut, SlowReceive, SlowReceiver, SlowSend
from generator.machines import CLUSTER, NORMAL

SMALL_S, LARGE_S = 20e-6, 200e-6
SHAPES = [(2, 4), (4, 2), (4, 8)]
ROUNDS, FEW_ROUNDS = 24, 10


def record(
    nodes: int, per_node: int, injected: Sequence[GeneratorFault], rounds: int = ROUNDS
) -> list[Snapshot]:
    machine = replace(CLUSTER, ranks_per_node=per_node, clock_error=0.5, host_clock_error=0.3)
    num_ranks = nodes * per_node
    return simulate(machine, num_ranks, rounds, injected, 3, capacity=2 * rounds, kinds=NORMAL)


def gather(*arguments: Any) -> dict[str, Matrices]:
    """As `record`."""
    return diagnose.gather(record(*arguments))


def causes(matrices: Mapping[str, Matrices]) -> set[tuple[str, object]]:
    return {(str(verdict.cause), verdict.subject) for verdict in diagnose.judge(matrices).verdicts}


def with_credit(matrices: dict[str, Matrices], ranks: Sequence[int], ns: float) -> None:
    """All sources wait for slots of some ranks, in every operation; by half as long again for some of them."""
    for kind in LAST_HOPS:
        credit = matrices[kind].credit.copy()
        more = ns * np.linspace(1.0, 1.5, len(ranks))[:, None]
        credit[ranks] = np.where(matrices[kind].has_sources[ranks], credit[ranks] + more, 0.0)
        matrices[kind] = replace(matrices[kind], credit=credit)


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
@pytest.mark.parametrize("delay_s", [SMALL_S, LARGE_S])
def test_a_slow_receiver_is_named_and_nobody_whom_it_holds_up(
    nodes: int, per_node: int, delay_s: float
) -> None:
    """On other nodes sources wait for slots of ranks that wait for its sums."""
    matrices = gather(nodes, per_node, [SlowReceiver(1, delay_s)])
    assert causes(matrices) == {("slow receiver", 1)}


@pytest.mark.exhaustive
def test_the_same_holds_for_256_ranks() -> None:
    matrices = gather(32, 8, [SlowReceiver(1, LARGE_S)], FEW_ROUNDS)
    assert causes(matrices) == {("slow receiver", 1)}


def test_sources_do_wait_for_slots_of_ranks_that_wait_for_sums_of_a_slow_receiver() -> None:
    credit = gather(2, 4, [SlowReceiver(1, LARGE_S)])[NORMAL_COMBINE].credit
    assert credit[5, 4] > 0.5 * LARGE_S * 1e9
    assert credit[5, 4] > 2 * credit[6, 4]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
@pytest.mark.parametrize(
    ("fault", "cause", "subject"),
    [
        (SlowNicOut(1, LARGE_S), "egress", 1),
        (SlowSend(1, LARGE_S), "slow send", 1),
        (SlowReceive(1, LARGE_S), "slow receive", 1),
        (SlowRank(1, LARGE_S), "late", 1),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, int)) else None,
)
def test_slots_that_run_out_because_rows_come_late_make_nobody_a_slow_receiver(
    nodes: int, per_node: int, fault: GeneratorFault, cause: str, subject: int
) -> None:
    assert causes(gather(nodes, per_node, [fault])) == {(cause, subject)}


def test_a_slow_path_between_gateways_is_no_slow_receiver_behind_it() -> None:
    matrices = gather(2, 4, [SlowPath(1, 5, LARGE_S)])
    # Whoever sends to rank 5 waits for its slots.
    assert matrices[NORMAL_COMBINE].credit[5, 4] > 0.5 * LARGE_S * 1e9
    assert causes(matrices) == {("path", (1, 5))}


def test_two_slow_receivers_are_both_named() -> None:
    assert causes(gather(4, 2, [SlowReceiver(1, SMALL_S), SlowReceiver(6, LARGE_S)])) == {
        ("slow receiver", 1),
        ("slow receiver", 6),
    }


@pytest.mark.parametrize("num_ranks", [4, 8], ids=["for a node", "for everybody"])
def test_where_slots_run_out_the_rank_with_rows_left_is_named(num_ranks: int) -> None:
    matrices = gather(2, 4, [SlowReceive(1, SMALL_S)])
    with_credit(matrices, range(num_ranks), LARGE_S * 1e9)
    assert causes(matrices) == {("slow receiver", 1)}


def test_who_takes_longer_than_its_sources_wait_for_slots_is_a_slow_receive() -> None:
    matrices = gather(2, 4, [SlowReceive(1, SMALL_S)])
    with_credit(matrices, range(8), SMALL_S * 1e9 / 4)
    assert causes(matrices) == {("slow receive", 1)}


def test_a_little_more_than_what_late_sums_explain_is_no_back_pressure() -> None:
    """How long slots last is not known better than that."""
    matrices = gather(2, 4, [SlowReceive(1, SMALL_S)])
    m = matrices[NORMAL_COMBINE]
    between = m.place.nodes[:, None] != m.place.nodes[None, :]
    later = np.full(between.shape, LARGE_S * 1e9)
    later[1] = np.where(between[1], later[1], 1.08 * later[1])
    matrices[NORMAL_COMBINE] = replace(
        m,
        late=m.late + later,
        send=m.send + later,
        credit=m.credit + np.where(between, 0.0, later),
    )
    assert causes(matrices) == {("slow receive", 1)}


def test_who_has_no_rows_left_is_no_slow_receiver() -> None:
    matrices = gather(2, 4, [])
    with_credit(matrices, [1], LARGE_S * 1e9)
    assert not causes(matrices)


def test_a_rank_that_did_not_report_is_no_slow_receiver_and_hides_none() -> None:
    snapshots = record(2, 4, [SlowReceiver(1, LARGE_S)])
    found = causes(diagnose.gather([s for s in snapshots if s.rank != 6]))
    assert {subject for cause, subject in found if cause == "slow receiver"} == {1}
