"""Asking a running process for a dump: only those that said they write one are sent a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deep_ep.base import env
from deep_ep.diagnose.__main__ import main
from deep_ep.errors import EPArgumentError, EPTransportError, EPUsageError
from deep_ep.hang import request

# A process that writes a file, as one with a buffer writes a dump; into folders of some names it does not.
PROGRAM = """
import pathlib, signal, sys
from deep_ep.hang import request
own = pathlib.Path(sys.argv[1])
def handle(number, frame):
    asked = request.read_request()
    if asked is None or asked.directory.endswith("silent"):
        return
    if asked.directory.endswith("fails"):
        request.answer(asked, [], error="no space left")
        return
    place = pathlib.Path(asked.directory or own)
    place.mkdir(exist_ok=True)
    (place / "0.hang.json").write_text("{}")
    request.answer(asked, [place / "0.hang.json"], "no rank waits")
signal.signal(signal.SIGUSR2, handle)
request.announce(own, signal.SIGUSR2)
print("ready", flush=True)
sys.stdin.read()
request.withdraw()
"""


@pytest.fixture(autouse=True)
def _own_meeting_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "own")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
        started.communicate()
    assert started.returncode == 0
    assert not list((tmp_path / f"deep_ep-{os.geteuid()}").iterdir())


@pytest.mark.exhaustive
def test_a_process_is_asked(
    process: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "into"
    assert main(["dump", str(process.pid), "--into", str(into), "--timeout", "60"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"process {process.pid}: {into / '0.hang.json'}",
        f"process {process.pid}: no rank waits",
    ]
    # All processes of a job, by the directory that is theirs.
    assert main(["dump", str(tmp_path / "own"), "--timeout", "60"]) == 0
    assert (tmp_path / "own" / "0.hang.json").is_file()
    # A signal alone has no request with it, and harms nobody.
    os.kill(process.pid, signal.SIGUSR2)
    for name, said in (("fails", "no space left"), ("silent", "has not answered within 0.2 s")):
        timeout = "0.2" if name == "silent" else "60"
        into = tmp_path / name
        assert main(["dump", str(process.pid), "--into", str(into), "--timeout", timeout]) == 4
        assert said in capsys.readouterr().out


def test_what_all_processes_answer_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [request.Request(pid, f"request{pid}", "") for pid in (41, 42)]
    monkeypatch.setattr(request, "processes", lambda _: asked)
    monkeypatch.setattr(request, "request_dump", lambda pid, _: asked[pid - 41])

    def answer(one: request.Request, _: float) -> request.Answer:
        return request.Answer(one.name, ("0.hang.json", "1.hang.json"), "no rank waits")

    monkeypatch.setattr(request, "wait_for_answer", answer)
    assert main(["dump", str(tmp_path)]) == 0
    files = [f"process 41: {rank}.hang.json" for rank in (0, 1)]
    assert capsys.readouterr().out.splitlines() == [
        *files, "process 41: no rank waits", "process 42: the same",
    ]  # fmt: skip


def test_a_process_that_has_not_said_so_is_sent_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(EPUsageError, match="does not write dumps"):
            request.request_dump(other.pid)
        other.communicate(b"\n")
    assert other.returncode == 0


def test_a_number_that_another_process_has_got_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.announce(tmp_path, signal.SIGUSR2)
    assert [process.pid for process in request.processes()] == [os.getpid()]
    path = tmp_path / f"deep_ep-{os.geteuid()}" / f"{os.getpid()}.ready"
    path.write_text(path.read_text().replace('"started":', '"started":1'))
    assert request.processes() == []
    request.withdraw()


@pytest.mark.parametrize("planted", ["open", "link", "file"])
def test_a_meeting_place_of_somebody_else_is_refused(tmp_path: Path, planted: str) -> None:
    place = tmp_path / f"deep_ep-{os.geteuid()}"
    if planted == "open":
        place.mkdir()
        place.chmod(0o777)
    elif planted == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "other")
    else:
        place.write_text("")
    with pytest.raises(EPUsageError, match="only this user may open"):
        request.announce(tmp_path, signal.SIGUSR2)
    assert request.read_request() is None


def test_nobody_writes_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(tmp_path)]) == 2
    assert "no process of this user and host writes dumps" in capsys.readouterr().err


def test_an_answer_to_another_request_is_none() -> None:
    asked = request.Request(os.getpid(), "mine", "")
    request.answer(request.Request(os.getpid(), "other", ""), [])
    with pytest.raises(EPTransportError, match="has not answered within 0.1 s"):
        request.wait_for_answer(asked, 0.1)
    request.answer(asked, [], "no rank waits")
    assert request.wait_for_answer(asked, 1.0).line == "no rank waits"


@pytest.mark.parametrize(
    ("text", "number"),
    [("", signal.SIGUSR2), ("SIGUSR1", signal.SIGUSR1), ("10", 10), ("0", 0)],
)
def test_the_signal(text: str, number: int) -> None:
    with env.read_from({"DEEP_EP_DUMP_SIGNAL": text}):
        assert env.dump_signal() == number


def test_the_signal_that_others_are_told_is_the_one_that_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one would end the process that is asked for a dump."""
    watch: Any = object()
    monkeypatch.setattr(request, "_watches", set())
    for name in ("SIGUSR2", "SIGUSR1"):
        monkeypatch.setenv("DEEP_EP_DUMP_SIGNAL", name)
        assert request.attach(watch) >= 0
        assert [process.signal for process in request.processes()] == [signal.SIGUSR2]
        request.detach(watch)


@pytest.mark.parametrize("text", ["SIGKILL", "9", "USR", "-1", "SIG_IGN", "1000"])
def test_signals_that_cannot_be_handled(text: str) -> None:
    with (
        env.read_from({"DEEP_EP_DUMP_SIGNAL": text}),
        pytest.raises(EPArgumentError, match="DEEP_EP_DUMP_SIGNAL"),
    ):
        env.dump_signal()


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    place = tmp_path / f"deep_ep-{os.geteuid()}"
    place.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for kind in ("ready", "answer"):
        (place / f"{ended.pid}.{kind}").write_text("{}")
    request.announce(place, signal.SIGUSR2)
    assert [path.name for path in place.iterdir()] == [f"{os.getpid()}.ready"]
    request.withdraw()
    assert not list(place.iterdir())
