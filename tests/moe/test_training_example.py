"""examples/train_moe.py learns as the same model in one process does, and repeats itself bit for bit."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.launch import DEVICE, raise_failures, run_processes

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"
RANKS, STEPS = 2, 5


def train_again(rank: int, group: Any) -> list[float]:
    """What a rank of the program does, in a process that has imported torch already."""
    example = runpy.run_path(str(EXAMPLE))
    buffer = example["make_buffer"](group)
    losses: list[float] = example["train"](range(rank, rank + 1), STEPS, buffer, group)
    buffer.destroy()
    return losses


def losses_in(printed: str) -> list[str]:
    return [line.split()[-1] for line in printed.splitlines() if line.startswith("step")]


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE != "cpu", reason="ranks that are processes share no GPU")
def test_the_curve_is_that_of_one_process_and_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(EXAMPLE), "--num-processes", str(RANKS), "--steps", str(STEPS)]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    spread = losses_in(done.stdout)
    assert len(spread) == STEPS
    for losses in raise_failures(run_processes(train_again, RANKS)):
        assert [f"{loss:.6f}" for loss in losses] == spread
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as it does itself, where nobody has
    monkeypatch.setattr(sys, "argv", [*arguments, "--dense"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    # Rows and sums are rounded to bfloat16 on their way.
    assert [float(loss) for loss in spread] == pytest.approx(
        [float(loss) for loss in losses_in(capsys.readouterr().out)], rel=2e-3
    )
