"""Where a rank's time goes: stamps that are made up, with the answer worked out by hand, and real operations."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

import deep_ep
from deep_ep.errors import EPUsageError
from deep_ep.observe import phases
from deep_ep.observe.counter_snapshot import CounterSnapshot
from deep_ep.observe.parts import PARTS, Part
from deep_ep.observe.phases import PHASES
from support import normal_exchange
from support.exchange import Mode, Shape, exchange_and_check, ranks_for
from support.launch import before_next_operation, keep_busy
from support.normal_exchange import SMALL
from support.phase_sums import assert_complete

OWN = ("op", "wait_begin", "exit", "previous_exit", "sent")
OF_SOURCE = ("entered", "issued", "arrival")


def recorded(own: tuple[int, ...], *sources: tuple[int, int, int]) -> CounterSnapshot:
    """One operation: its own stamps in the order of `OWN`, those of sources in that of `OF_SOURCE`."""
    ring = np.zeros((1, len(sources) + 1, len(OWN)), np.int64)
    ring[0, :-1, : len(OF_SOURCE)] = sources
    ring[0, -1] = own
    nothing = np.zeros((0, len(sources)), np.int64)
    return CounterSnapshot((), (), OF_SOURCE, OWN, nothing, np.zeros(0, np.int64), ring)


def only(
    kinds: dict[str, CounterSnapshot], *parts: tuple[str, int, int]
) -> tuple[dict[str, int], dict[int, int]]:
    """Of the one operation of rank 0: what is not 0."""
    (found,) = phases.of_snapshots(0, kinds, [Part(*part) for part in parts]).operations
    assert tuple(found.ns) == PHASES
    return {phase: ns for phase, ns in found.ns.items() if ns}, dict(found.charged)


def test_rows_that_travel_while_the_program_computes_are_hidden() -> None:
    # Entered at 110, sent at 130; the hook is called at 200, and rank 1, which entered at 205, has sent at 220.
    combined = recorded((7, 200, 260, 100, 130), (110, 130, 140), (205, 220, 250))
    assert only({"combine": combined}) == (
        {"between": 10, "send": 20, "hidden": 70, "late": 5, "issue": 15, "path": 30, "copy": 10},
        {1: 50},
    )


def test_the_waiting_for_notices_is_apart_from_that_for_rows() -> None:
    # Rank 2 enters 40 after rank 0, which has nothing else to do; then rank 1 is the last to send.
    noticed = recorded((3, 115, 165, 0, 0), (110, 112, 113), (105, 111, 114), (150, 152, 160))
    rows = recorded((3, 180, 300, 0, 220), (110, 220, 221), (105, 260, 270), (150, 230, 240))
    assert only({"notify": noticed, "normal dispatch": rows}) == (
        {"notify": 10, "host": 15, "send": 40, "late": 35, "issue": 42, "path": 18, "copy": 30},
        {2: 45, 1: 50},
    )


def test_a_cached_dispatch_has_no_notices() -> None:
    other = recorded((1, 15, 25, 0, 0), (10, 11, 12))
    rows = recorded((5, 112, 150, 100, 120), (110, 120, 121))
    assert only({"notify": other, "normal dispatch": rows}) == (
        {"between": 10, "send": 10, "path": 1, "copy": 29},
        {},
    )


def test_the_first_operation_follows_none() -> None:
    combined = recorded((1, 115, 130, 0, 112), (110, 111, 111), (108, 113, 114))
    assert only({"combine": combined}) == ({"send": 2, "hidden": 3, "copy": 15}, {})


def before_the_operation(*parts: tuple[str, int, int]) -> dict[str, int]:
    """Phases from 100, when the operation before ended, to 200, when this one is entered."""
    combined = recorded((7, 230, 260, 100, 220), (200, 220, 225), (190, 215, 250))
    ns, _ = only({"normal combine": combined}, *parts)
    assert sum(ns.values()) == 160
    return {phase: ns[phase] for phase in ("between", *PARTS) if phase in ns}


def test_what_is_done_between_operations_is_apart_from_the_rest_of_the_program() -> None:
    parts = (("unpermute", 150, 170), ("layout", 180, 195), ("unpermute", 170, 175))
    assert before_the_operation(*parts) == {"between": 60, "unpermute": 25, "layout": 15}


def test_what_is_done_while_an_operation_runs_is_no_time_between_two() -> None:
    others = (("permute", 40, 90), ("permute", 90, 100), ("layout", 200, 240), ("layout", 300, 310))
    assert before_the_operation(*others) == {"between": 100}
    assert before_the_operation(("permute", 80, 130), ("layout", 190, 240)) == {
        "between": 60,
        "permute": 30,
        "layout": 10,
    }
    assert before_the_operation(("permute", 50, 300)) == {"permute": 100}


def test_time_in_two_parts_at_once_is_counted_once() -> None:
    parts = (("layout", 120, 140), ("permute", 110, 130), ("permute", 112, 118))
    assert before_the_operation(*parts) == {"between": 70, "permute": 20, "layout": 10}


def test_a_part_is_of_the_operation_after_it() -> None:
    noticed = recorded((3, 115, 165, 50, 0), (110, 112, 113))
    rows = recorded((3, 180, 300, 0, 220), (110, 220, 221))
    combined = recorded((4, 415, 430, 300, 412), (410, 411, 411))
    parts = [Part("layout", 60, 70), Part("permute", 310, 330), Part("unpermute", 400, 409)]
    taken = {"notify": noticed, "normal dispatch": rows, "normal combine": combined}
    dispatched, returned = phases.of_snapshots(0, taken, parts).operations
    assert [dispatched.ns[each] for each in ("between", *PARTS)] == [50, 10, 0, 0]
    assert [returned.ns[each] for each in ("between", *PARTS)] == [81, 0, 20, 9]


def test_no_part_is_of_an_operation_that_follows_none() -> None:
    combined = recorded((1, 115, 130, 0, 112), (110, 111, 111))
    ns, _ = only({"combine": combined}, ("layout", 20, 40), ("permute", 90, 120))
    assert ns == {"send": 2, "hidden": 3, "copy": 15}


def test_sums_and_a_table() -> None:
    one = recorded((7, 200, 260, 100, 130), (110, 130, 140), (205, 220, 250))
    two = recorded((8, 300, 360, 260, 290), (270, 280, 290), (275, 350, 352))
    found = phases.of_snapshots(0, {"dispatch": one, "combine": two})
    assert [each.operation for each in found.operations] == [7, 8]
    assert found.total("combine")["between"] == 10
    assert found.total()["between"] == 20
    assert found.charged() == {1: 102}
    assert str(found).splitlines()[0].split() == [
        *("us", "per", "operation", "number", "between", "send", "hidden"),
        *("late", "issue", "path", "copy"),
    ]
    assert str(found).splitlines()[-1] == "rank 0 waited for: rank 1 0 us"


SHAPE = Shape((12, 12, 12), 64, 256, 6, 2)
# Longer than ranks that are threads keep each other waiting.
DELAY_NS = 50_000_000


def be_late(rank: int, buffer: deep_ep.Buffer) -> None:
    if rank == 1:
        before_next_operation(buffer, lambda: keep_busy(buffer, DELAY_NS))


@pytest.mark.parametrize("hook", [False, True])
def test_low_latency_is_taken_apart_and_the_late_rank_is_charged(hook: bool) -> None:
    mode = Mode(hook=hook)
    with ranks_for(SHAPE) as ranks:
        ranks.run(lambda _, buffer: buffer.enable_counters())
        for _ in range(3):
            ranks.run(be_late)
            exchange_and_check(ranks, SHAPE, mode)
        ranks.run(lambda _, buffer: assert_complete(buffer))
        found = ranks.run(lambda _, buffer: buffer.phases())
    for rank in (0, 2):
        assert next(iter(found[rank].charged())) == 1
        total = found[rank].total("dispatch")
        assert total["late"] > total["issue"] + total["path"]
    assert found[1].total("dispatch")["between"] > found[0].total("dispatch")["between"]


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_normal_operations_are_taken_apart_and_the_late_rank_is_charged(
    ranks_per_node: int,
) -> None:
    shape, mode = normal_exchange.shape_of((12,) * 4, 64, 8, 2), normal_exchange.Mode()
    row_bytes = normal_exchange.hidden_bytes_of(shape, mode)
    with normal_exchange.normal_ranks(4, ranks_per_node, [SMALL], row_bytes) as ranks:
        ranks.run(lambda _, buffer: buffer.enable_counters())
        for _ in range(3):
            ranks.run(be_late)
            normal_exchange.exchange_and_check(ranks, shape, mode, SMALL, ranks_per_node)
        ranks.run(lambda _, buffer: assert_complete(buffer))
        found = ranks.run(lambda _, buffer: buffer.phases())
    assert {each.kind for each in found[0].operations} == {"normal dispatch", "normal combine"}
    for rank in (0, 2, 3):
        assert next(iter(found[rank].charged())) == 1


def test_without_counters_it_says_how_to_have_them() -> None:
    def run(_: int, buffer: deep_ep.Buffer) -> None:
        with pytest.raises(EPUsageError, match=r"enable_counters\(\) .* DEEP_EP_PHASES=1"):
            buffer.phases()

    with ranks_for(SHAPE) as ranks:
        ranks.run(run)


def test_rank_0_logs_them_when_the_buffer_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEP_EP_PHASES", "1")
    with caplog.at_level(logging.WARNING, "deep_ep"):
        with ranks_for(SHAPE) as ranks:
            exchange_and_check(ranks, SHAPE, Mode())
            assert not caplog.messages
        (logged,) = [message for message in caplog.messages if "phases" in message]
    assert logged.startswith("phases of rank 0\nus per operation")
    assert "rank 0 waited for" in logged


def test_a_program_that_never_destroys_its_buffer_logs_them_at_its_end() -> None:
    program = """
import torch, deep_ep
from deep_ep.group import thread_groups
size = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 256, 1, 4)
buffer = deep_ep.Buffer(thread_groups(1)[0], 0, size, low_latency_mode=True, num_qps_per_rank=4)
x, idx = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(8, 1, dtype=torch.int64)
for _ in range(2):
    buffer.get_dispatch_layout(idx, 4)
    buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)
"""
    settings = {"DEEP_EP_PHASES": "1", "DEEP_EP_BACKEND": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    logged = done.stderr.partition("phases of rank 0\nus per operation")[2]
    assert logged.split()[1:3] == ["between", "layout"]
