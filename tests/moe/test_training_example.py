"""examples/train_moe.py learns as the same model in one process does, and repeats itself bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"


def losses(*arguments: str) -> list[str]:
    command = [sys.executable, str(EXAMPLE), "--num-processes", "2", "--steps", "5", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.exhaustive
def test_the_curve_is_that_of_one_process_and_the_same_each_time() -> None:
    spread = losses()
    assert len(spread) == 5
    assert losses() == spread
    # Rows and sums are rounded to bfloat16 on their way.
    assert [float(loss) for loss in spread] == pytest.approx(
        [float(loss) for loss in losses("--dense")], rel=2e-3
    )
