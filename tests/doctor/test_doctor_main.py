"""`python -m deep_ep.doctor` as a program: what it prints, how it ends, and that it needs nothing to run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import deep_ep
from deep_ep.doctor import __main__ as program
from deep_ep.doctor import exchange, package
from deep_ep.doctor.__main__ import main
from deep_ep.doctor.checks import FAIL, OK, Check, examine, fail, ok, report, warn
from made_up_host import made_up, named

ROOT = Path(deep_ep.__file__).resolve().parent.parent
MODEL = ("--tokens", "128", "--hidden", "7168", "--experts", "256", "--topk", "8", "--ranks", "8")

# Those that every machine has.
LINES = (
    "deep_ep, deep_ep._cpu, deep_ep._cuda, deep_ep._cuda_nvshmem, torch, NVSHMEM, NVSHMEM in process, "
    "GPU, RDMA ports, /dev/shm, memlock, open files, /proc, ptrace, memory of container, variables, timeout, "
    "kernels of others, sizes, queue depth, memory per GPU"
)


def python(
    *arguments: str, path: tuple[Path, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with these folders first on its path."""
    search = ":".join(map(str, (*path, ROOT)))
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": search, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **env},
    )


@pytest.mark.exhaustive
def test_this_machine_has_every_line_and_a_status_that_follows_from_them() -> None:
    ran = python("-m", "deep_ep.doctor", "--json", *MODEL)
    said = json.loads(ran.stdout)
    names = {finding["name"] for finding in said["findings"]}
    assert names >= set(LINES.split(", "))
    fails = any(finding["status"] == FAIL for finding in said["findings"])
    assert ran.returncode == said["exit_status"] == int(fails)
    assert all(finding["repair"] for finding in said["findings"] if finding["status"] != OK)
    assert all(finding["why"] for finding in said["findings"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("where", "statuses"), [(">&-", {0, 1}), (">/dev/full", {2})])
def test_output_that_nobody_takes_ends_in_no_traceback(where: str, statuses: set[int]) -> None:
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m deep_ep.doctor --json {where}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode in statuses
    assert "Traceback" not in ran.stderr


def test_it_alone_runs_where_torch_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    ran = python("-m", "deep_ep.doctor", path=(tmp_path,))
    assert ran.returncode == 1
    assert "fail   torch" in ran.stdout
    assert "OSError: libcudart.so.13: cannot open" in ran.stdout
    assert "ok     deep_ep._cpu" in ran.stdout
    assert "Traceback" not in ran.stderr
    without = python("-c", "import deep_ep", path=(tmp_path,))
    assert "OSError: libcudart.so.13: cannot open" in without.stderr


def test_what_the_terminal_cannot_show_does_not_end_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = SimpleNamespace(CHECKS=[Check("a", lambda host: ok("é of a name"))])
    shown = io.BytesIO()
    monkeypatch.setattr(program, "_SUBJECTS", (subject,))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main([]) == 0
    assert b" ? of a name\n" in shown.getvalue()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "128"], "--hidden, --experts, --topk, --ranks"),
        (
            ["--test", "--deadline", "1" + 9 * "0"],
            "'1000000000' is not a number of seconds above 0 (and below 1e9)",
        ),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "on_this_machine", lambda **_: pytest.fail("ranks begin"))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_check_that_fails_itself_does_not_end_the_others(tmp_path: Path) -> None:
    def broken(name: str) -> None:
        raise ValueError("unheard of")

    findings = examine(package.CHECKS, made_up(tmp_path, load=broken))
    assert "ValueError: unheard of" in named(findings, "torch").found
    assert named(findings, "deep_ep").status == OK


def test_only_fails_are_an_exit_status_and_the_summary_names_what_is_bad() -> None:
    lines = [ok("x", "y", name="a"), warn("x", "y", "z", name="b")]
    for status, last in ((0, "1 warn: b"), (1, "1 fail: c; 1 warn: b")):
        printed, as_json = io.StringIO(), io.StringIO()
        assert report(lines, printed) == report(lines, as_json, as_json=True) == status
        assert printed.getvalue().splitlines()[-1] == last
        assert printed.getvalue().count("why: y") == len(lines) - 1
        said = json.loads(as_json.getvalue())
        assert (said["exit_status"], said["summary"]) == (status, last)
        lines.append(fail("x", "y", "z", name="c"))
