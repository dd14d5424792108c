"""Asking running processes for dumps: who is asked, what is answered, and whom it harms: nobody."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deep_ep.diagnose.__main__ import main
from deep_ep.errors import EPUsageError
from deep_ep.hang import messages, request
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.messages import InquiryVerdict
from deep_ep.membership import dump_requests
from deep_ep.membership.dump_requests import DumpRequests
from support.launch import HANG_S, Ranks
from support.waiting import eventually


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where these tests meet, and nobody else."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("DEEP_EP_DUMP_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"deep_ep-{os.geteuid()}"


@pytest.fixture
def buffer_name(place: Path) -> Iterator[str]:
    """Of a buffer whose ranks are threads of this process."""
    with Ranks(2, 8, 256, 4):
        assert eventually(lambda: place.is_dir() and len(list(place.iterdir())) == 1)
        (address,) = place.iterdir()
        yield address.name.split(".")[1]
    assert eventually(lambda: not list(place.iterdir()))


def listener(place: Path, name: str, backlog: int = 1) -> socket.socket:
    """A process that answers nothing."""
    place.mkdir(mode=0o700, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    with request.meeting_place() as folder:
        server.bind(str(folder / name))
    server.listen(backlog)
    return server


def test_who_is_asked_writes_each_dump_into_a_place_of_its_own(
    buffer_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A buffer that is gone may have left a dump there."""
    own = str(tmp_path / "own")
    for folder, given in (
        ("own", [own]),
        ("into", [str(os.getpid()), "--into", str(tmp_path / "into")]),
    ):
        assert main(["dump", *given, "--timeout", str(HANG_S)]) == 0
        of_buffer = tmp_path / folder / buffer_name
        said = capsys.readouterr().out.splitlines()
        assert f"process {os.getpid()}: {of_buffer / 'verdict.hang.json'}" in said
        assert said[-1] == f"process {os.getpid()}: no rank waits"
        names = {path.name for path in of_buffer.iterdir()}
        assert {"0.hang.json", "1.hang.json", "verdict.hang.json"} < names


def test_a_signal_asks_for_a_dump(buffer_name: str, tmp_path: Path) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert eventually((tmp_path / "own" / buffer_name / "verdict.hang.json").exists)


def test_a_signal_asks_once_in_however_many_pieces_its_stack_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    monkeypatch.setattr(dump_requests, "_reading_end", reading)
    monkeypatch.setattr(dump_requests, "_all", [SimpleNamespace(ask=asked.append)])
    for piece in (
        b"Stack (most recent ca",
        b"ll first):\n",
        b'  File "train.py", line 3 in step\n',
    ):
        os.write(writing, piece)
        dump_requests._take_signal()
    assert asked == [""]
    os.write(writing, b"Stack (most recent call first):\n")
    dump_requests._take_signal()
    assert asked == ["", ""]
    os.close(reading)
    os.close(writing)


def test_a_folder_that_cannot_be_written_is_said(
    buffer_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["dump", "--into", str(tmp_path / "file"), "--timeout", str(HANG_S)]) == 4
    assert f"{tmp_path / 'file' / buffer_name} cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said", [b"[" * 100_000 + b"\n", b'{"type":"AskState","inquiry":1,"rank":0}\n', b""]
)
@pytest.mark.usefixtures("buffer_name")
def test_what_is_no_request_ends_nothing(said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger, request.meeting_place() as place:
        stranger.connect(str(next(place.iterdir())))
        stranger.sendall(said)
    (hurried,) = request.ask(str(os.getpid()))
    hurried[1].close()
    (patient,) = request.ask(str(os.getpid()))
    assert request.answer(*patient, HANG_S).dumped


def test_what_all_processes_answer_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = InquiryVerdict(HangVerdict(), {"dump": ("0.hang.json", "1.hang.json")})
    monkeypatch.setattr(request, "ask", lambda *_: [(41, None), (42, None)])
    monkeypatch.setattr(request, "answer", lambda *_: found)
    assert main(["dump"]) == 0
    files = [f"process 41: {rank}.hang.json" for rank in (0, 1)]
    assert capsys.readouterr().out.splitlines() == [
        *files, "process 41: no rank waits", "process 42: the same",
    ]  # fmt: skip


def test_who_does_not_answer_is_named_however_often_it_is_asked(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listener(place, "41.b0.0.x"):
        for _ in range(4):
            assert main(["dump", "41", "--timeout", "0.05"]) == 4
            assert "process 41 has not answered within 0.05 s" in capsys.readouterr().out


def test_what_a_killed_process_has_left_is_removed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listener(place, "41.b0.0.x").close()
    (place / "notes").touch()  # which is somebody else's
    assert main(["dump", "42"]) == 2
    assert "there is no process that is '42'" in capsys.readouterr().err
    assert main(["dump"]) == 2
    assert "there is no process; " in capsys.readouterr().err
    assert os.listdir(place) == ["notes"]


def test_who_ends_while_it_is_asked_keeps_nobody_from_being_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, encode = listener(place, "42.b0.0.x"), messages.encode
    (place / "41.b0.0.x").symlink_to(place / "gone")

    def encoded(message: messages.Message) -> bytes:
        ending.close()  # connected, and not yet asked
        return encode(message)

    monkeypatch.setattr(messages, "encode", encoded)
    with listener(place, "43.b0.0.x"):
        ((pid, connection),) = request.ask(None)
    connection.close()
    assert pid == 43
    assert len(os.listdir(place)) == 3


def test_a_fork_leaves_the_address_to_its_parent(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop: Any = SimpleNamespace(listen=lambda *_: None, read=lambda *_: None)
    watch: Any = SimpleNamespace(buffer="b0", rank=0)
    requests = DumpRequests(loop, watch)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        requests.close()
    assert os.listdir(place)[0].startswith(f"{os.getpid()}.b0.0.")
    requests.close()
    assert os.listdir(place) == []


@pytest.mark.parametrize("planted", ["open", "link", "file"])
def test_a_meeting_place_of_somebody_else_is_refused(
    planted: str, place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if planted == "open":
        place.mkdir()
        place.chmod(0o777)
    elif planted == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "other")
    else:
        place.write_text("")
    with pytest.raises(EPUsageError, match="only this user may open"):
        request.ask(None)
    loop: Any = SimpleNamespace(read=lambda *_: None)
    watch: Any = SimpleNamespace(buffer="b0", rank=0)
    DumpRequests(loop, watch).close()
    assert "nobody can ask this process" in caplog.text
