"""tests/test_low_latency.py as a program: it names what was injected and nothing else, and all its options work."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launch import measured_again
from support.program import run_program

PROGRAM = Path(__file__).parents[1] / "test_low_latency.py"
REDUCED = ("--num-tokens=32", "--hidden=1024", "--num-experts=64", "--num-topk=4")
QUICK = (*REDUCED, "--quick")
NAMED = "the verdicts name what was injected, and nothing else"


def said_by_program(*arguments: str, exit_code: int = 0) -> str:
    """What the program prints."""
    done = run_program(PROGRAM, *arguments)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@measured_again
def test_program_names_what_was_injected_in_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_CPU_CLOCK", "wall")
    sizes = "--num-processes 4 --num-tokens 16 --hidden 512 --num-topk 4 --num-experts 16 --quick"
    assert NAMED in said_by_program(*sizes.split(), "--inject", "slow-rank=2:20ms")


@pytest.mark.exhaustive
def test_program_fails_when_a_fault_is_not_named() -> None:
    """A delay far below what matters is injected, so naming it would be wrong, and not naming it is
    a failure.
    """
    said = said_by_program(*QUICK, "--inject", "slow-rank=3:1us", exit_code=1)
    assert "injected but not named" in said


@pytest.mark.exhaustive
@measured_again
def test_program_checks_measures_and_names_what_was_injected() -> None:
    injected = ("slow-rank=1:3ms", "slow-path=4>2:2ms", "hot-rank=6")
    flags = [word for fault in injected for word in ("--inject", fault)]
    said = said_by_program(*REDUCED, "--diagnose", *flags)
    for words in (
        "Allocating buffer size:",
        "Dispatch + combine bandwidth:",
        "Dispatch send/recv time:",
        NAMED,
    ):
        assert words in said


@pytest.mark.exhaustive
def test_program_repeats_itself_under_pressure() -> None:
    pressure = "--num-processes 2 --pressure-test --pressure-seeds 1"
    said_by_program(*QUICK, *pressure.split())


@pytest.mark.exhaustive
def test_program_runs_every_loop_with_logfmt() -> None:
    sizes = "--num-processes 2 --num-tokens 16 --hidden 1024 --num-experts 8 --num-topk 4"
    said_by_program(*sizes.split(), "--use-logfmt", "--disable-nvlink")


@pytest.mark.exhaustive
def test_program_goes_on_without_ranks_that_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "4")
    said = said_by_program(*QUICK, "--num-processes", "8", "--shrink-test")
    for rank in (1, 3, 5):
        assert f"rank {rank} did not arrive in" in said
