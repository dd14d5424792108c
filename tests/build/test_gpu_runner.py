"""The runner of `make gpu`: whatever a step does, it is reported as what it is, and the others go on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import against_published
import gpu_facts
import pytest

import gpu
from gpu import FAILED, LEFT_OUT, OUT_OF_TIME, PASSED, SHOWN, Step
from support.waiting import eventually

pytestmark = pytest.mark.exhaustive

RUNNER = Path(gpu.__file__)
# Far above what a made-up step takes, far below what a test may.
LIMIT_S = 60.0


def python(name: str, code: str, **arguments: Any) -> Step:
    return Step(
        name,
        "what it shows",
        [[sys.executable, "-c", code]],
        **{"limit_s": LIMIT_S, **arguments},
    )


def run(*steps: Step, out: Path, budget_s: float = 10 * LIMIT_S) -> dict[str, dict[str, Any]]:
    """What results.json says of each step."""
    gpu.run_steps(steps, out, budget_s, {}, say=lambda _: None)
    found = json.loads((out / "results.json").read_text())["steps"]
    return {one["name"]: one for one in found}


def outcomes(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: one["outcome"] for name, one in found.items()}


def is_running(noted: Path) -> bool:
    """Whether the process whose number a file holds has not ended."""
    status = Path("/proc", noted.read_text().strip(), "stat")
    return status.exists() and status.read_text().split()[2] != "Z"


FINE = python("fine", "print('all is well')")


def test_a_step_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    found = run(python("bad", "print('why'); raise SystemExit(3)"), FINE, out=tmp_path)
    assert outcomes(found) == {"bad": FAILED, "fine": PASSED}
    assert found["bad"]["detail"] == "exit status 3; why"
    assert found["bad"]["tail"][-1] == "why"
    assert "all is well" in (tmp_path / "fine.txt").read_text()


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
    assert outcomes(found) == {"hangs": OUT_OF_TIME, "fine": PASSED}
    assert "in stuck_here" in (tmp_path / "hangs.txt").read_text()
    assert not is_running(child)


def test_a_step_that_cannot_be_run_fails(tmp_path: Path) -> None:
    found = run(replace(FINE, name="absent", commands=[["/no/such/program"]]), FINE, out=tmp_path)
    assert outcomes(found) == {"absent": FAILED, "fine": PASSED}
    assert "/no/such/program cannot be run" in found["absent"]["detail"]


def test_a_step_ended_by_a_signal_says_so(tmp_path: Path) -> None:
    found = run(python("killed", "import os; os.kill(os.getpid(), 9)"), out=tmp_path)
    assert found["killed"]["detail"].startswith("ended by signal 9")


def test_garbage_is_a_failure_and_leaves_a_readable_table(tmp_path: Path) -> None:
    garbage = "import os; os.write(1, bytes(range(256)) * 4 + b'|' * 200)"
    found = run(
        python("binary", garbage),
        python("tests", garbage, judge=gpu.tests_passed),
        python("sanitizer", garbage, judge=gpu.nothing_found),
        python("bars", "print('|' * 321)"),
        FINE,
        out=tmp_path,
    )
    assert outcomes(found) == {
        "binary": PASSED, "tests": FAILED, "sanitizer": FAILED, "bars": PASSED, "fine": PASSED,
    }  # fmt: skip
    header, rule, *rows = (tmp_path / "summary.txt").read_text().splitlines()[:7]
    for line in (header, rule, *rows):
        assert line.isprintable()
        assert len(re.findall(r"(?<!\\)\|", line)) == 6, line
    assert set(rule) <= set("|-:")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "found.json was not written"),
        ("{'a': 1}", "found.json is no JSON"),
        ("[]", "found.json holds no JSON object"),
        ("{}", "found.json holds no JSON object"),
    ],
)
def test_results_that_cannot_be_read_are_a_failure(
    tmp_path: Path, text: str | None, why: str
) -> None:
    (tmp_path / "found.json").write_text('{"of": "an earlier run"}')
    path = str(tmp_path / "found.json")
    code = "" if text is None else f"open({path!r}, 'w').write({text!r})"
    found = run(python("measures", code, writes=("found.json",)), FINE, out=tmp_path)
    assert outcomes(found) == {"measures": FAILED, "fine": PASSED}
    assert found["measures"]["detail"].startswith(why)


def test_results_that_can_be_read_go_into_those_of_the_run(tmp_path: Path) -> None:
    path = str(tmp_path / "found.json")
    # Also of a step that failed later.
    code = f"open({path!r}, 'w').write('{{\"us\": 7}}'); raise SystemExit(1)"
    found = run(python("measures", code, writes=("found.json",)), out=tmp_path)
    assert found["measures"]["wrote"] == {"found.json": {"us": 7}}


def test_what_needs_a_step_that_failed_is_left_out(tmp_path: Path) -> None:
    bad = python("bad", "raise SystemExit(1)")
    shown = Step("shown", "", [], LIMIT_S, only_shown="needs a GPU")
    later = python("later", "", needs=("bad",))
    found = run(bad, later, shown, replace(FINE, needs=("shown",)), out=tmp_path)
    assert outcomes(found) == {"bad": FAILED, "later": LEFT_OUT, "shown": SHOWN, "fine": PASSED}
    assert found["later"]["detail"] == "bad did not pass"
    # Where it was not selected, it is taken for done.
    assert outcomes(run(later, out=tmp_path)) == {"later": PASSED}


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = run(replace(FINE, programs=("sh", "no-such-program")), out=tmp_path)
    assert outcomes(found) == {"fine": LEFT_OUT}
    assert found["fine"]["detail"] == "no-such-program not found on PATH"


def test_what_no_longer_fits_the_budget_is_named(tmp_path: Path) -> None:
    found = run(FINE, replace(FINE, name="later"), out=tmp_path, budget_s=gpu.LEAST_S - 1)
    assert outcomes(found) == {"fine": LEFT_OUT, "later": LEFT_OUT}
    assert "the budget is used up" in found["later"]["detail"]


def test_a_step_gets_no_more_than_is_left_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 0.5)
    hangs = python("hangs", "import time; time.sleep(1000)")
    found = run(hangs, FINE, out=tmp_path, budget_s=1.0)
    assert outcomes(found) == {"hangs": OUT_OF_TIME, "fine": LEFT_OUT}
    assert found["hangs"]["detail"] != f"ended after {LIMIT_S:.0f} s", "it got its own limit"


@pytest.mark.parametrize(
    ("output", "is_good"),
    [
        ("........\n57 passed, 3 skipped in 6.99s\n", True),
        ("57 passed in 6.99s\nError in sys.excepthook: the driver is gone\n", True),
        ("92/117 tests collected (25 deselected) in 0.93s\n", True),
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
    assert "--only: speed is no step; the steps are driver, packages, build" in said
    assert gpu.main(["--list"]) == 0
    assert "compute-sanitizer --tool racecheck" in capsys.readouterr().out


def test_steps_never_fall_back_to_the_other_backend() -> None:
    assert gpu.step_environment([], dry=False)["DEEP_EP_BACKEND"] == "cuda"


def test_missing_packages_come_from_wheels(tmp_path: Path) -> None:
    """A package that no index knows, in a folder of wheels."""
    source, wheels, target = (tmp_path / name for name in ("source", "wheels", "target"))
    wheels.mkdir()
    (source / "made_up_for_this").mkdir(parents=True)
    info = source / "made_up_for_this-1.0.dist-info"
    info.mkdir()
    (source / "made_up_for_this" / "__init__.py").write_text("")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-for-this\nVersion: 1.0\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "RECORD").write_text("")
    archive = shutil.make_archive(str(tmp_path / "wheel"), "zip", source)
    Path(archive).rename(wheels / "made_up_for_this-1.0-py3-none-any.whl")
    assert gpu.install(["made-up-for-this"], wheels, target) == 0
    assert (target / "made_up_for_this" / "__init__.py").exists()
    assert "--dest wheels pybind11 'rich>=3'" in gpu.wheels_command(["pybind11", "rich>=3"])


def test_a_package_that_is_too_old_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.metadata, "version", lambda name: "76.1.0")
    assert gpu.missing_packages() == ["setuptools>=77"]
    monkeypatch.setattr(gpu.importlib.metadata, "version", lambda name: "77.0")
    assert gpu.missing_packages() == []


def test_a_part_fits_ten_minutes_and_the_build_is_in_the_first(tmp_path: Path) -> None:
    steps = gpu.all_steps(tmp_path, dry=False)
    parts = {part: [s for s in steps if s.part == part] for part in range(1, gpu.PARTS + 1)}
    for part, ones in parts.items():
        assert 0 < sum(one.limit_s for one in ones) <= gpu.PART_S, part
    assert sum(map(len, parts.values())) == len(steps)
    assert {"build", "gpu"} <= {one.name for one in parts[1]}


@pytest.mark.parametrize("tests", ["test_gpu.py", "test_low_latency.py", "test_normal_gpu.py"])
def test_results_are_compared_with_and_without_verification(tmp_path: Path, tests: str) -> None:
    steps = gpu.all_steps(tmp_path, dry=False)
    runs = [s for s in steps if any(w.endswith(tests) for c in s.commands for w in c)]
    assert {s.environment.get("DEEP_EP_VERIFY", "1") for s in runs} == {"0", "1"}
    if tests == "test_normal_gpu.py":
        assert {s.environment.get("DEEP_EP_BULK_COPIES", "1") for s in runs} == {"0", "1"}


def test_a_run_leaves_three_files(tmp_path: Path) -> None:
    details = tmp_path / "details"
    table = f"open({str(details / gpu.TABLE)!r}, 'w').write('| a table |')"
    run(python("measures", table, writes=(gpu.TABLE,)), FINE, out=details)
    gpu.pack(details, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"summary.txt", "results.json", "details.tar.gz"}
    said = (tmp_path / "summary.txt").read_text()
    assert "2 passed" in said
    assert "| a table |" in said
    with tarfile.open(tmp_path / "details.tar.gz") as archive:
        assert "details/fine.txt" in archive.getnames()


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


def only_collects(step: Step) -> bool:
    """Whether a dry run asks pytest which tests it would run, and no more."""
    asks = [
        command[1:3] == ["-m", "pytest"] and "--collect-only" in command
        for command in step.commands
    ]
    return not step.only_shown and bool(asks) and all(asks)


@pytest.mark.slow
def test_a_dry_run_does_all_that_it_can_without_a_gpu(tmp_path: Path) -> None:
    """But for what tests/tidy/test_collection.py asks a collection of all tests."""
    steps = gpu.all_steps(tmp_path / "details", dry=True)
    only = [step.name for step in steps if not only_collects(step)]
    command = [sys.executable, str(RUNNER), "--dry-run", "--out", str(tmp_path), "--only", *only]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, cwd=RUNNER.parent.parent,
        env={name: value for name, value in os.environ.items() if not name.startswith("DEEP_EP_")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())["steps"]
    again = {f"{name}-{other}" for name, others in gpu.OTHER_SETTINGS.items() for other in others}
    assert {one["name"] for one in found if one["outcome"] == SHOWN} - {"costs"} == {
        "build", "code", "nvshmem", "published", *again,
    }  # fmt: skip
    by_name = {one["name"]: one for one in found}
    said = (
        "needs nvcc" if gpu.compiler() is None else "compiled; on a GPU it would measure shared_ns,"
    )
    assert by_name["costs"]["detail"].startswith(said)
    assert by_name["facts"]["wrote"]["facts.json"]["timer_step_ns"] > 0
    rows = by_name["latency"]["wrote"]["latency.json"]["rows"]
    assert {row["setting"]["hooks"] for row in rows} == {False, True}
    rows = by_name["bandwidth"]["wrote"]["normal.json"]["rows"]
    assert [row["num_ranks"] for row in rows] == [2, 4]
    operations = [row[kind] for row in rows for kind in ("dispatch", "combine")]
    assert all(set(operation["figures"]) == {"off", "on"} for operation in operations)
    assert done.stdout.count("| dispatch us |") == 2
    assert "nothing of this is a fact about a GPU" in done.stdout
