"""What operations send, as benchmarks/operation_counts.py and normal_counts.py count it, and the page that
states it.
"""

from __future__ import annotations

import importlib
from typing import Any

import operation_counts
import pytest
from _counts import PAGE
from _normal_group import run_rounds
from _one_thread_group import GroupShape, random_routes

import deep_ep
from deep_ep import _cpu  # noqa: F401 - the module that is counted; it can be loaded once

NUM_RANKS, NUM_TOKENS, NUM_TOPK, NUM_EXPERTS = 4, 16, 2, 8


@pytest.fixture(scope="module")
def normal_command() -> Any:
    if deep_ep.native.backend.get().name != "cpu":
        pytest.skip("the simulation is of the cpu backend")
    return importlib.import_module("normal_counts")


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    """Counts of a small group, by operation."""
    shape = GroupShape(NUM_RANKS, NUM_TOKENS, 256, NUM_TOPK, NUM_EXPERTS)
    return {one.operation: one for one in operation_counts.count(shape)}


def test_the_page_states_what_the_command_counts() -> None:
    shape = GroupShape(8, 128, 7168, 8, 256)
    lines = operation_counts.tables(operation_counts.count(shape)).splitlines()
    page = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line for line in lines if line and line not in page]
    assert not missing, "run benchmarks/operation_counts.py --write"


def test_every_row_and_header_is_one_put(counts: dict[str, Any]) -> None:
    headers = NUM_RANKS - 1
    for operation in ("dispatch", "combine"):
        path = counts[operation].nvlink
        assert path.rows > 0
        assert path.counts["puts"] == pytest.approx(path.rows + headers)
        assert path.counts["words"] == 0


def test_each_signal_has_a_fence_and_each_word_is_found_by_one_poll(
    counts: dict[str, Any],
) -> None:
    peers = NUM_RANKS - 1
    for one in counts.values():
        words = peers * (1 + NUM_EXPERTS // NUM_RANKS)  # a header and the counts of a peer
        assert one.nvlink.counts["signals"] == words
        assert one.nvlink.counts["fences"] == words
        assert one.nvlink.counts["quiets"] == 0
        found = NUM_RANKS + NUM_EXPERTS
        assert one.polls == found + 2 * NUM_RANKS  # and at the end, who has gone on or given up


def test_a_group_within_one_node_sends_nothing_to_others(counts: dict[str, Any]) -> None:
    for one in counts.values():
        assert one.nic.rows == one.nic.messages == 0


# --- normal operations ----------------------------------------------------------------------------


def test_the_page_states_what_normal_operations_send(normal_command: Any) -> None:
    shape = GroupShape(8, 128, 7168, 8, 256)
    lines = normal_command.lines_of(normal_command.count(shape, 4)).splitlines()
    page = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line for line in lines if line not in page]
    assert not missing, "run benchmarks/normal_counts.py --write"


@pytest.fixture(scope="module", params=[1, 2, 3], ids="nodes of {}".format)
def normal_counts(request: pytest.FixtureRequest, normal_command: Any) -> dict[str, Any]:
    """What goes to other nodes in a group of six, by operation."""
    shape = GroupShape(6, NUM_TOKENS, 7168, NUM_TOPK, 12)
    counts = normal_command.count(shape, request.param)
    return {one.operation: one for one in counts if one.hop == "network"}


def test_each_token_crosses_the_network_once_per_node(normal_counts: dict[str, Any]) -> None:
    for operation, one in normal_counts.items():
        others = one.num_ranks - one.ranks_per_node
        messages = 2 * others if operation == "dispatch" else others  # headers, and notices
        assert one.path.rows > 0
        # Rows whose slots lie next to each other go as one put.
        assert messages < one.path.counts["puts"] < one.path.rows + messages
        # What leads a row and what marks it, up to the next slot, and the larger one of header and notice. A row of
        # 7168 bytes is far more, so a token that crosses twice is seen.
        most = one.path.payload_bytes + one.path.rows * (16 + 32 + 15 + 127) + messages * 256
        assert one.path.payload_bytes < one.path.counts["put_bytes"] <= most


def test_each_signal_to_another_node_has_a_fence(normal_counts: dict[str, Any]) -> None:
    for one in normal_counts.values():
        assert one.path.counts["fences"] == one.path.counts["signals"]
        assert one.path.counts["quiets"] == 0
        # At most a word for each row and one that gives its slot back; and of headers and notices.
        assert one.path.counts["signals"] <= 2 * one.path.rows + 2 * one.num_ranks


def test_a_single_node_uses_no_network(normal_command: Any) -> None:
    shape = GroupShape(3, NUM_TOKENS, 256, NUM_TOPK, 6)
    counts = normal_command.count(shape, 3)
    assert {one.hop for one in counts} == {"NVLink"}
    assert all(one.path.counts["puts"] > one.path.rows > 0 for one in counts)


@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_the_program_whose_instructions_are_counted_runs(
    normal_command: Any, ranks_per_node: int
) -> None:
    """It says itself if an operation fails, or counts nothing."""
    shape = GroupShape(NUM_RANKS, NUM_TOKENS, 256, NUM_TOPK, NUM_EXPERTS)
    routes = random_routes(shape)
    for keeps_counters in (False, True):
        run_rounds(shape, ranks_per_node, routes, 2, keeps_counters)
