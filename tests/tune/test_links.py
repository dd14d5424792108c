"""`python -m deep_ep.tune --measure-links`."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deep_ep.diagnose.cli import link_limit
from deep_ep.tune import links
from deep_ep.tune.links import Speeds
from support.launch import DEVICE, raise_failures, run_processes
from support.program import run_program, torchrun

PROGRAM = Path(links.__file__).with_name("__main__.py")


def measured_in_seconds(rank: int, group: Any, num_bytes: int) -> Speeds:
    """Where a clock goes on by a second whenever it is read, so that each round takes one."""
    seconds = itertools.count()
    links.time = SimpleNamespace(perf_counter=lambda: next(seconds))  # type: ignore[assignment]
    return links.measure(num_bytes, 3)


@pytest.mark.parametrize(
    ("ranks_per_node", "nvlink", "nic"),
    [
        (4, 6000, None),
        (2, 6000, 6000),
        (1, None, 6000),
        # The second node has one rank, so two of the first have none of their place there.
        (3, 6000, 6000),
    ],
)
def test_speeds_are_bytes_to_others_over_time(
    ranks_per_node: int, nvlink: int | None, nic: int | None
) -> None:
    env = {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node)}
    outcomes = run_processes(measured_in_seconds, 4, 6000, env=env)
    for speeds in raise_failures(outcomes):
        for got, want in ((speeds.nvlink, nvlink), (speeds.nic, nic)):
            assert got == (None if want is None else pytest.approx(want / 1e9))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_what_is_printed_is_what_the_diagnosis_takes(
    ranks_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "DEEP_EP_RANKS_PER_NODE", str(ranks_per_node))
    done = run_program(PROGRAM, "--measure-links", "--rounds", "1", launcher=torchrun(2))
    assert done.returncode == 0, done.stderr
    found, absent = ("within a node", "between nodes")[:: 1 if ranks_per_node == 2 else -1]
    assert f"{absent}: no such links" in done.stdout
    assert f"{found}: " in done.stdout
    last = done.stdout.splitlines()[-1]
    speeds = link_limit.parse(last.rpartition("--links ")[2])
    assert links.NONE in (speeds.nvlink, speeds.nic)


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_a_backend_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "DEEP_EP_BACKEND", "cuda")
    done = run_program(PROGRAM, "--measure-links", launcher=torchrun(2))
    assert done.returncode == 1
    assert "python -m deep_ep.tune: backend: DEEP_EP_BACKEND=cuda cannot be used" in done.stderr
    assert f'{PROGRAM}", line' not in done.stderr
