"""How tests and programs start ranks that are processes: with the package of the process that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deep_ep
from support.launch import package_under_test

PROGRAM = Path(__file__).parents[1] / "test_low_latency.py"
SMALL = "--num-processes 2 --num-tokens 4 --hidden 512 --num-topk 2 --num-experts 4 --quick"


@pytest.mark.exhaustive
def test_ranks_have_the_package_of_their_program(tmp_path: Path) -> None:
    other = tmp_path / "deep_ep"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the package of the current folder')")
    package = str(Path(deep_ep.__file__).parent.parent)
    # Ranks that are processes share no GPU.
    env = {**os.environ, "PYTHONPATH": package, "DEEP_EP_BACKEND": "cpu"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *SMALL.split()],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "current folder" not in done.stderr
    assert done.stdout.splitlines()[0] == package_under_test()
