"""The runner of `make gpu`: whatever a step does, it is reported as what it is, and the others go on.

And the programs that it measures with, as far as they go without a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import against_published
import gpu_facts
import pytest

import gpu
from gpu import Result, Step
from support.waiting import eventually

pytestmark = pytest.mark.exhaustive

# Far above what a made-up step takes, far below what a test may.
LIMIT_S = 60.0


def python(name: str, code: str, **arguments: Any) -> Step:
    command = [sys.executable, "-c", code]
    return Step(name, "what it shows", [command], **{"limit_s": LIMIT_S, **arguments})


def run(*steps: Step, out: Path) -> dict[str, Result]:
    return {one.step.name: one for one in gpu.run_steps(steps, out, {})}


def is_running(noted: Path) -> bool:
    """Whether the process whose number a file holds has not ended."""
    status = Path("/proc", noted.read_text().strip(), "stat")
    return status.exists() and status.read_text().split()[2] != "Z"


FINE = python("fine", "print('all is well')")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (python("bad", "print('why'); raise SystemExit(3)"), "exit status 3; why"),
        (python("bad", "import os; os.kill(os.getpid(), 9)"), "ended by signal 9; $ "),
        (replace(FINE, name="bad", commands=[["/no/such/program"]]), "/no/such/program cannot be run"),
    ],
    ids=["status", "signal", "absent"],
)  # fmt: skip
def test_a_step_that_fails_is_named_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: Step, said: str
) -> None:
    found = run(bad, FINE, out=tmp_path)
    assert (found["bad"].passed, found["fine"].passed) == (False, True)
    assert found["bad"].said.startswith(said)
    assert f"FAILED: {said}" in capsys.readouterr().out
    assert "all is well" in (tmp_path / "fine.txt").read_text()
    assert "1 of 2 passed" in (tmp_path / "summary.txt").read_text()


def test_a_step_that_hangs_is_ended_with_what_it_started_and_says_where(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '{10 * LIMIT_S:.0f}'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "def stuck_here(): time.sleep(1000)\n"
        "stuck_here()\n"
    )
    # Long enough for an interpreter to start on a busy machine.
    hangs = python("hangs", code, limit_s=5.0, environment={"PYTHONFAULTHANDLER": "1"})
    found = run(hangs, FINE, out=tmp_path)
    assert (found["hangs"].passed, found["fine"].passed) == (False, True)
    assert found["hangs"].said == "ended after 5 s"
    assert "in stuck_here" in (tmp_path / "hangs.txt").read_text()
    assert not is_running(child)


def test_garbage_leaves_a_readable_table(tmp_path: Path) -> None:
    garbage = "import os; os.write(1, bytes(range(256)) * 4 + b'|' * 200)"
    run(python("binary", garbage), python("bars", "print('|' * 321)"), out=tmp_path)
    header, rule, *rows = (tmp_path / "summary.txt").read_text().splitlines()[:4]
    for line in (header, rule, *rows):
        assert line.isprintable()
        assert len(re.findall(r"(?<!\\)\|", line)) == 6, line
    assert set(rule) <= set("|-:")


@pytest.mark.parametrize(
    ("output", "is_good"),
    [
        ("........\n57 passed, 3 skipped in 6.99s\n", True),
        ("57 passed in 6.99s\nError in sys.excepthook: the driver is gone\n", True),
        ("=== 1 failed, 14 passed in 7.00s ===\n1 failed, 14 passed in 7.00s\n", True),
        ("3 skipped in 0.10s\n", False),
        ("no tests ran in 0.10s\n", False),
        ("57 passed\nSegmentation fault\n", False),
        ("", False),
    ],
)
def test_tests_that_were_all_skipped_have_shown_nothing(output: str, is_good: bool) -> None:
    """Whether one failed the exit status says."""
    assert gpu.tests_passed(output)[0] == is_good


@pytest.mark.parametrize(
    ("output", "is_good"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", False),
        ("========= ERROR SUMMARY: 10 errors\n", False),
        ("========= ERROR SUMMARY: 3 errors\n========= ERROR SUMMARY: 0 errors\n", False),
        ("2 passed in 3.00s\n", False),
    ],
)
def test_a_sanitizer_that_looked_at_nothing_has_found_nothing_out(
    output: str, is_good: bool
) -> None:
    assert gpu.nothing_found(output)[0] == is_good


def test_steps_are_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--only", "latency", "speed"])
    said = capsys.readouterr().err
    assert "--only: speed is no step; the steps are driver, build, facts" in said
    assert gpu.main(["--list"]) == 0
    assert "compute-sanitizer --tool racecheck" in capsys.readouterr().out


def test_a_part_fits_ten_minutes_and_the_build_is_in_the_first(tmp_path: Path) -> None:
    steps = gpu.all_steps(tmp_path)
    for part in range(1, gpu.PARTS + 1):
        assert 0 < sum(one.limit_s for one in steps if one.part == part) <= gpu.PART_S, part
    assert {"build", "gpu"} <= {one.name for one in steps if one.part == 1}
    assert len({one.name for one in steps}) == len(steps)


@pytest.mark.parametrize("tests", ["test_gpu.py", "test_low_latency.py", "test_normal_gpu.py"])
def test_results_are_compared_with_and_without_verification(tmp_path: Path, tests: str) -> None:
    steps = gpu.all_steps(tmp_path)
    runs = [s for s in steps if any(w.endswith(tests) for c in s.commands for w in c)]
    assert {s.environment.get("DEEP_EP_VERIFY", "1") for s in runs} == {"0", "1"}
    if tests == "test_normal_gpu.py":
        assert {s.environment.get("DEEP_EP_BULK_COPIES", "1") for s in runs} == {"0", "1"}


class Stream:
    """A stream of a hardware queue, in which a kernel runs, or none."""

    def __init__(self, queue: list[bool]) -> None:
        self.queue = queue

    def occupy(self) -> mock.Mock:
        self.queue[0] = True
        return mock.Mock(query=lambda: False, synchronize=lambda: self.queue.__setitem__(0, False))

    def mark(self) -> mock.Mock:
        held_up = self.queue[0]
        return mock.Mock(query=lambda: not held_up)

    def wait_event(self, event: mock.Mock) -> None:
        """Holds up its queue, until what it waits for has ended."""
        end, self.queue[0] = event.synchronize, True

        def synchronize() -> None:
            end()
            self.queue[0] = False

        event.synchronize = synchronize


def test_streams_that_share_a_hardware_queue_are_named() -> None:

    first, second, third = [False], [False], [False]
    streams = {"a": Stream(first), "b": Stream(second), "c": Stream(first), "d": Stream(third)}
    paused = mock.Mock()
    pairs = gpu_facts.shared_queues(streams, Stream.occupy, Stream.mark, paused, {})
    assert pairs == [("a", "c"), ("c", "a")]
    assert paused.call_count == len(streams)
    found = {
        "device": "H200", "timer_step_ns": 32, "copy_gb_per_s": 2000.0, "allocation_ms": 0.2,
        "pinned_allocation_ms": 101.0, "streams_that_share_a_queue": pairs,
    }  # fmt: skip
    assert "c waits for kernels of a; a waits for kernels of c; beside" in gpu_facts.sentences(
        found
    )
    # The wait of `a` for `d` is in the queue of `c`.
    pairs = gpu_facts.shared_queues(streams, Stream.occupy, Stream.mark, mock.Mock(), {"d": "a"})
    assert pairs == [("a", "c"), ("c", "a"), ("d", "c")]
    found["streams_that_share_a_queue"] = []
    assert "no two of 16 streams share a queue" in gpu_facts.sentences(found)


def test_times_are_put_beside_published_ones_of_the_same_sizes(tmp_path: Path) -> None:
    sizes = "device,node_num,hidden_size,num_token,num_topk,num_experts"
    (tmp_path / "low.csv").write_text(
        f"{sizes},dispatch_avg_t_us,combine_avg_t_us\n"
        "NVIDIA H200,1,7168,128,8,256,35,70\n"
        "NVIDIA H200,1,7168,256,8,256,60,120\n"
        "NVIDIA H200,2,7168,128,8,256,1,1\n"
        "NVIDIA H100,1,7168,128,8,256,2,2\n"
    )
    (tmp_path / "normal.csv").write_text(
        f"{sizes},dispatch_sms,dispatch_transmit_us,combine_transmit_us\n"
        "NVIDIA H200,1,7168,4096,8,256,8,1000,2000\n"
        "NVIDIA H200,1,7168,4096,8,256,20,500,900\n"
    )

    def times(us: float) -> dict[str, Any]:
        return {kind: {"figures": {"off": {"median": us}}} for kind in ("dispatch", "combine")}

    ours = {"device": "NVIDIA H200 141GB", "num_tokens": 128, "hidden": 7168, "num_topk": 8, "num_experts": 256}  # fmt: skip
    low = [{"setting": {"num_ranks": n}, **times(us)} for n, us in ((4, 10.0), (8, 80.0), (8, 70.0))]  # fmt: skip
    normal = [{"num_ranks": 8, "num_sms": sms, **times(3000.0)} for sms in (8, 16)]
    rows = against_published.published_rows(tmp_path)
    found = list(against_published.compared({**ours, "rows": low}, rows))
    assert found == [
        ("low-latency dispatch, 128 tokens", 35.0, 70.0),
        ("low-latency combine, 128 tokens", 70.0, 70.0),
    ]
    found = list(against_published.compared({**ours, "num_tokens": 4096, "rows": normal}, rows))
    assert found == [
        ("normal dispatch, 8 SMs, 4096 tokens", 1000.0, 3000.0),
        ("normal combine, 8 SMs, 4096 tokens", 2000.0, 3000.0),
    ]
    assert (
        "| normal dispatch, 8 SMs, 4096 tokens | 1000.0 | 3000.0 | 3.00 |"
        in against_published.table(found, "H200").markdown()
    )


def test_the_daemon_of_mps_ends_with_its_command(tmp_path: Path) -> None:
    daemon, noted = tmp_path / "nvidia-cuda-mps-control", tmp_path / "pid"
    daemon.write_text(f'#!/bin/sh\n[ "$1" = -f ] || exit 0\necho $$ > {noted}\nexec sleep 600\n')
    daemon.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps"),
    }  # fmt: skip
    for status in (0, 3):
        # The daemon has begun when its command does.
        code = f"while ! [ -s {noted} ]; do sleep 0.01; done; exit {status}"
        command = ["sh", "-c", gpu.WITH_MPS, "sh", "sh", "-c", code]
        done = subprocess.run(command, env=environment, check=False, timeout=60)
        assert done.returncode == status
        assert eventually(lambda: not is_running(noted))
        noted.unlink()


@pytest.mark.slow
def test_what_is_measured_on_a_gpu_is_measured_in_small_on_the_cpu(tmp_path: Path) -> None:
    few = ["--num-tokens", "4", "--hidden", "256", "--num-topk", "2", "--num-experts", "8", "--rounds", "2"]  # fmt: skip
    programs = {
        "gpu_facts": [],
        "low_latency_gpu": ["--num-ranks", "1", "2", "--blocks", "2", *few],
        "normal_gpu": ["--num-ranks", "2", "4", "--num-sms", "4", *few],
    }
    found = {}
    for name, options in programs.items():
        file = tmp_path / f"{name}.json"
        command = [sys.executable, f"benchmarks/{name}.py", *options, "--json", str(file)]
        environment = {**os.environ, **gpu.step_environment(), "DEEP_EP_BACKEND": "cpu"}
        subprocess.run(command, cwd=gpu.ROOT, env=environment, check=True, timeout=300)
        found[name] = json.loads(file.read_text())
    assert found["gpu_facts"]["timer_step_ns"] > 0
    assert {r["setting"]["hooks"] for r in found["low_latency_gpu"]["rows"]} == {False, True}
    rows = found["normal_gpu"]["rows"]
    assert [row["num_ranks"] for row in rows] == [2, 4]
    operations = [row[kind] for row in rows for kind in ("dispatch", "combine")]
    assert all(set(operation["figures"]) == {"off", "on"} for operation in operations)
