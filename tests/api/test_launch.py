"""How tests and programs start ranks that are processes: with the package of the process that starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deep_ep
from support.launch import package_under_test

PROGRAM = Path(__file__).parents[1] / "test_low_latency.py"
SMALL = "--num-processes 2 --num-tokens 4 --hidden 512 --num-topk 2 --num-experts 4 --quick"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are processes share no GPU; this process and those that it starts use none."""
    monkeypatch.setenv("DEEP_EP_BACKEND", "cpu")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("on_cpu")
def test_ranks_have_the_package_of_their_program(tmp_path: Path) -> None:
    other = tmp_path / "deep_ep"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the package of the current folder')")
    env = {**os.environ, "PYTHONPATH": str(Path(deep_ep.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *SMALL.split()],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "current folder" not in done.stderr
    assert done.stdout.splitlines()[0] == package_under_test()


def answers_ctrl_c(rank: int, group: Any) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.exhaustive
@pytest.mark.usefixtures("on_cpu")
def test_ranks_answer_ctrl_c_where_their_tests_run_in_the_background() -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "from support.launch import raise_failures, run_processes; from api.test_launch import answers_ctrl_c; "
        "assert raise_failures(run_processes(answers_ctrl_c, 1)) == [True]"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, timeout=120, check=False)
    assert done.returncode == 0
