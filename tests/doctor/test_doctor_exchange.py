"""`--test`: ranks that exchange rows, on this machine and under torchrun; the pair that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.doctor import exchange
from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host
from deep_ep.testing import identity
from made_up_host import named
from program import torchrun

ROOT = str(Path(deep_ep.__file__).resolve().parent.parent)
SIZE = 4


def received_by(rank: int) -> torch.Tensor:
    """What comes to a rank, from the last source to the first."""
    to = torch.arange(2 * SIZE)
    return torch.cat(
        [
            identity.rows_of(source, SIZE)[(to + source) % SIZE == rank]
            for source in reversed(range(SIZE))
        ]
    )


def test_rows_that_are_all_there_in_any_order_are_right() -> None:
    combined = identity.rows_of(1, SIZE)
    assert identity.wrong_pairs(1, SIZE, received_by(1), combined) == []


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_the_source_of_a_row_that_is_lost_or_changed_is_named(damage: str) -> None:
    received = received_by(1)
    place = int((received[:, 1] == 2).nonzero()[0])
    if damage == "lost":
        received = received[torch.arange(len(received)) != place]
    else:
        received[place, 300] += 1
    combined = identity.rows_of(1, SIZE)
    assert identity.wrong_pairs(1, SIZE, received, combined) == [(2, 1)]


def test_the_rank_from_which_a_row_comes_back_wrong_is_named() -> None:
    combined = identity.rows_of(1, SIZE)
    combined[2] = 0  # of the token that goes to rank (2 + 1) % 4
    assert identity.wrong_pairs(1, SIZE, received_by(1), combined) == [(3, 1)]


def seen(**what: Any) -> dict[str, Any]:
    """What a rank says that was in the first operation and saw nothing wrong."""
    nothing: dict[str, Any] = {"bad_pairs": [], "missing": [], "awaited": [], "verdicts": []}
    return {**nothing, "error": "", "operation": 1, **what}


def test_a_path_is_named_where_both_of_its_ends_took_part() -> None:
    outcomes = {
        0: seen(missing=[2], awaited=[2], error="x", operation=1),
        1: seen(missing=[0], awaited=[0], error="y", operation=2),
        2: seen(error="rank 0 gave up", operation=2),
    }
    (found,) = exchange.judge(outcomes, 3)
    assert (found.status, found.found) == (
        FAIL,
        "rows do not arrive, or arrive wrong: rank 2 to rank 0",
    )


def test_a_rank_that_comes_too_late_is_missing_and_its_paths_are_not_broken() -> None:
    outcomes = {
        0: seen(missing=[1], awaited=[1], error="x", operation=3),
        1: seen(error="rank 0 gave up", operation=3),
    }
    (found,) = exchange.judge(outcomes, 2)
    assert found.found == "rank 1 did not take part in it"


def test_what_fails_in_the_first_operation_explains_the_next() -> None:
    outcomes = {
        0: seen(bad_pairs=[[1, 0]], error="x", operation=5),
        1: seen(bad_pairs=[[0, 1]], error="y", operation=6),
    }
    (found,) = exchange.judge(outcomes, 2)
    assert found.found.endswith(": rank 1 to rank 0")


def test_a_rank_that_crashed_is_named_with_its_last_words() -> None:
    outcomes: dict[int, exchange.Outcome] = {
        0: seen(missing=[1], error="rank 1 is dead"),
        1: "ended with status -7: Bus error",
    }
    (found,) = exchange.judge(outcomes, 2)
    assert (found.status, found.found) == (FAIL, "rank 1 ended with status -7: Bus error")


def test_a_rank_that_is_missing_and_an_error_of_all_are_told() -> None:
    (missing,) = exchange.judge({0: seen(missing=[1], error="x"), 1: seen(operation=0)}, 2)
    assert missing.found == "rank 1 did not take part in it"
    (error,) = exchange.judge({rank: seen(error="no memory") for rank in range(2)}, 2)
    assert error.found == "no memory"


def test_verdicts_of_the_first_diagnosis_are_lines() -> None:
    findings = exchange.judge({0: seen(verdicts=["combine: rank 1, late"]), 1: seen()}, 2)
    assert named(findings, "exchange").status == OK
    diagnosis = named(findings, "first diagnosis")
    assert (diagnosis.status, diagnosis.found) == (WARN, "combine: rank 1, late")


def between_two(monkeypatch: pytest.MonkeyPatch, seconds: int, **env: str) -> list[Finding]:
    """What two ranks of this machine find."""
    monkeypatch.setattr(exchange, "_CPU_RANKS", 2)
    environment = {**os.environ, "PYTHONPATH": ROOT, "DEEP_EP_BACKEND": "cpu", **env}
    return exchange.on_this_machine(Host(environment=environment), seconds)


@pytest.mark.exhaustive
def test_ranks_of_this_machine_exchange_rows_and_a_slow_one_is_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = between_two(monkeypatch, 60, DEEP_EP_INJECT="slow-rank=1:20ms")
    exchanged = named(findings, "exchange").found
    assert exchanged == "rows of all 2 ranks arrive at all ranks, and come back"
    assert "rank 1" in named(findings, "first diagnosis").found


@pytest.mark.exhaustive
def test_the_pair_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"DEEP_EP_INJECT": "slow-path=1>0:1000s", "DEEP_EP_CPU_CLOCK": "wall"}
    (found,) = between_two(monkeypatch, 1, **broken)
    assert found.status == FAIL
    assert found.found == "rows do not arrive, or arrive wrong: rank 1 to rank 0"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_under_torchrun_the_ranks_of_the_job_exchange_rows() -> None:
    ran = subprocess.run(
        [sys.executable, *torchrun(2), "-m", "deep_ep.doctor", "--test", "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": ROOT,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    report = json.loads(ran.stdout[ran.stdout.index("{") :])
    assert ran.returncode == report["exit_status"], ran.stderr
    (found,) = [one["found"] for one in report["findings"] if one["name"] == "exchange"]
    assert found == "rows of all 2 ranks arrive at all ranks, and come back"
