"""`--test`: ranks that exchange rows, on this machine and under torchrun; the pair that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.doctor import exchange
from deep_ep.doctor.checks import FAIL, OK, WARN, Finding
from deep_ep.doctor.exchange import Tried
from deep_ep.doctor.host import Host
from deep_ep.testing import identity
from made_up_host import named
from support.program import torchrun

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


@pytest.mark.parametrize(
    ("damage", "pairs"),
    [
        ("none", []),
        ("lost", [(2, 1)]),
        ("changed", [(2, 1)]),
        ("changed on its way back", [(3, 1)]),
    ],
)
def test_the_ends_of_a_row_that_is_lost_or_changed_are_named(
    damage: str, pairs: list[tuple[int, int]]
) -> None:
    received, combined = received_by(1), identity.rows_of(1, SIZE)
    place = int((received[:, 1] == 2).nonzero()[0])
    if damage == "lost":
        received = received[torch.arange(len(received)) != place]
    elif damage == "changed":
        received[place, 300] += 1
    elif damage == "changed on its way back":
        combined[2] = 0  # of the token that goes to rank (2 + 1) % 4
    assert identity.wrong_pairs(1, SIZE, received, combined) == pairs


def seen(operation: int = 1, **what: Any) -> Tried:
    """What a rank says that was in the first operation and saw nothing wrong."""
    return Tried(operation=operation, **what)


def crashed(silence: str) -> Tried:
    """What stands for a rank that has said nothing."""
    return Tried(operation=0, silence=silence)


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        pytest.param(
            [
                seen(awaited=[2], error="rank 2 is missing", operation=1),
                seen(awaited=[0], error="rank 0 is missing", operation=2),
                seen(error="rank 0 gave up", operation=2),
            ],
            "rows do not arrive, or arrive wrong: rank 2 to rank 0",
            id="a path, both of whose ends took part",
        ),
        pytest.param(
            [
                seen(error="rank 1 gave up", operation=3),
                seen(awaited=[0], error="rank 0 is between operations", operation=3),
            ],
            "rank 0 is between operations",
            id="a rank that comes too late, whose paths are not broken",
        ),
        pytest.param(
            [
                seen(bad_pairs=[(1, 0)], error="x", operation=5),
                seen(bad_pairs=[(0, 1)], error="y", operation=6),
            ],
            "rows do not arrive, or arrive wrong: rank 1 to rank 0",
            id="what fails in the first operation, which explains the next",
        ),
        pytest.param(
            [seen(error="rank 1 is dead"), crashed("ended with status -7: Bus error")],
            "rank 1 ended with status -7: Bus error",
            id="a rank that crashed, with its last words",
        ),
        pytest.param(
            [seen(awaited=[1], error="rank 1 is missing"), seen(operation=0)],
            "rank 1 is missing",
            id="a rank that is missing",
        ),
        pytest.param([seen(error="no memory")] * 2, "no memory", id="an error of all"),
    ],
)
def test_what_is_at_fault_is_the_only_line(tried: list[Tried], said: str) -> None:
    (found,) = exchange.judge(dict(enumerate(tried)), len(tried))
    assert (found.status, found.found) == (FAIL, said)


def program(tmp_path: Path, text: str) -> Tried:
    """What comes of a program in the place of a rank's."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\n{text}\n")
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.sys, "executable", str(python))
        job = exchange.Job(0, 1, "nowhere", 0)
        return exchange.try_rank({}, job, 60, threading.Event())


def test_what_a_rank_prints_last_is_what_it_has_seen(tmp_path: Path) -> None:
    printed = (
        'print("hello"); print(r\'{"operation": 3, "bad_pairs": [[1, 0]], "error": "\\u001b[2J"}\')'
    )
    assert program(tmp_path, printed) == seen(3, bad_pairs=[(1, 0)], error="\\x1b[2J")


@pytest.mark.parametrize(
    "printed", ["", "hello", "{}", '{"operation": "3"}', '{"operation": 3, "awaited": ["x"]}']
)
def test_the_last_words_of_a_rank_that_prints_nothing_of_use_are_told(
    tmp_path: Path, printed: str
) -> None:
    text = f'print({printed!r}); sys.stderr.write("so\\n\\x1b[2Jlong\\n"); sys.exit(5)'
    assert program(tmp_path, text) == crashed("ended with status 5: \\x1b[2Jlong")


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
    (found,) = between_two(monkeypatch, 3, **broken)
    assert found.status == FAIL
    assert found.found == "rows do not arrive, or arrive wrong: rank 1 to rank 0"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_under_torchrun_the_ranks_of_the_job_exchange_rows() -> None:
    ran = subprocess.run(
        [sys.executable, *torchrun(2), "-m", "deep_ep.doctor", "--test", "--json"],
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
