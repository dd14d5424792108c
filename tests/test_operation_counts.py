"""What operations send, as benchmarks/operation_counts.py counts it, and the page that states it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import deep_ep  # noqa: F401 - its native module is the one that is counted

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
NUM_RANKS, NUM_TOKENS, NUM_TOPK, NUM_EXPERTS = 4, 16, 2, 8


@pytest.fixture(scope="module")
def command() -> Any:
    """benchmarks/operation_counts.py as a module."""
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(
        "operation_counts", BENCHMARKS / "operation_counts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["operation_counts"] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture(scope="module")
def counts(command: Any) -> dict[str, Any]:
    """Counts of a small group, by operation."""
    shape = command.GroupShape(NUM_RANKS, NUM_TOKENS, 256, NUM_TOPK, NUM_EXPERTS)
    return {one.operation: one for one in command.count(shape)}


def test_the_page_states_what_the_command_counts(command: Any) -> None:
    shape = command.GroupShape(8, 128, 7168, 8, 256)
    lines = command.tables(command.count(shape)).splitlines()
    page = command.PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line for line in lines if line and line not in page]
    assert not missing, "run benchmarks/operation_counts.py --write"


def test_every_row_and_header_is_one_put(counts: dict[str, Any]) -> None:
    headers = NUM_RANKS - 1
    for operation in ("dispatch", "combine"):
        path = counts[operation].nvlink
        assert path.rows > 0
        lists = path.counts["puts"] - path.rows - headers
        assert lists == 0 if operation == "combine" else 0 < lists <= path.counts["signals"]
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
