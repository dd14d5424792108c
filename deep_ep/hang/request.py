"""How another program asks a process for a dump: a file with what is asked for, and a signal.

Both sides meet in a directory of the user's own, `deep_ep-UID` under the temporary one, which only this user
may open. A process with buffers that handles the signal says so there (`announce`), and so nobody sends
it to a process that it would end. Who asks (`request_dump`) leaves `PID.request` there and sends the
signal. The process takes that (`read_request`), writes its dump, and says so (`answer`) in
`PID.answer`. A signal without a request asks for a dump into the process's own directory.

faulthandler handles the signal, in C, so that nobody's thread is interrupted for long, and writes into a pipe.
That wakes the threads that speak for ranks (liveness.py), of which the first one reads it (`take`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import secrets
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from deep_ep.base import codec, env, files
from deep_ep.errors import EPTransportError, EPUsageError
from deep_ep.hang import traces
from deep_ep.hang.stacks import started

_LOOK_EVERY_S = 0.05
# Of what the signal makes faulthandler write; a pipe holds no more.
_MOST_BYTES = 1 << 16
# Once for each signal. The rest of a stack follows in many pieces, of which each may wake a reader.
_HEADER = b"Stack (most recent call first):"

T = TypeVar("T")

_log = logging.getLogger("deep_ep")


@dataclass(frozen=True)
class Process:
    """A process that writes a dump when it is asked to.

    Attributes:
        pid: of it.
        signal: that asks it.
        directory: where it writes if nobody says otherwise.
        started: when it began, see `stacks.started`.
    """

    pid: int
    signal: int
    directory: str
    started: int


@dataclass(frozen=True)
class Request:
    """What is asked of a process.

    Attributes:
        pid: of it.
        name: of this request.
        directory: where the dump shall be written; empty: where the process writes by itself.
    """

    pid: int
    name: str
    directory: str


@dataclass(frozen=True)
class Answer:
    """What became of a request.

    Attributes:
        name: of the request.
        files: that were written.
        line: the verdict.
        error: why there is no dump; empty if there is one.
    """

    name: str
    files: tuple[str, ...] = ()
    line: str = ""
    error: str = ""


# ---- the process


def announce(directory: Path | str, signal_number: int) -> None:
    """Says that this process handles the signal. To be called once it does.

    What processes have left that were killed is removed.

    Raises:
        EPUsageError: the directory for requests belongs to somebody else.
        OSError: it cannot be written.
    """
    pid = os.getpid()
    where = str(Path(directory).absolute())
    process = Process(pid, signal_number, where, started(pid))
    for path in _meeting_place().glob("*.*"):
        if path.stem.isdecimal() and not started(int(path.stem)):
            path.unlink(missing_ok=True)
    _write(_meeting_place() / f"{pid}.ready", process)


def withdraw() -> None:
    """Takes back what this process has announced. May be repeated; raises nothing."""
    pid = os.getpid()
    with contextlib.suppress(OSError, EPUsageError):
        for kind in ("ready", "request", "answer"):
            (_meeting_place() / f"{pid}.{kind}").unlink(missing_ok=True)


def read_request() -> Request | None:
    """Takes the request that came with the signal; `None` if there is none, or it cannot be read."""
    try:
        path = _meeting_place() / f"{os.getpid()}.request"
        request = _read(Request, path)
        path.unlink()
    except (OSError, ValueError, EPUsageError):
        return None
    return request


def answer(request: Request, written: Iterable[Path], line: str = "", error: str = "") -> None:
    """Says what became of a request.

    Raises:
        OSError, EPUsageError: as `announce`.
    """
    paths = tuple(str(path) for path in written)
    _write(_meeting_place() / f"{request.pid}.answer", Answer(request.name, paths, line, error))


# ---- its signal


class Watch(Protocol):
    """Who writes the dumps of one rank: its `HangWatch`."""

    buffer: str

    def ask_for_dump(self, directory: str, asked: Request | None = None) -> None:
        """See `HangWatch`."""


_reading_end, _handled = -1, 0  # 0: no signal yet
_tail = b""  # of what was read: a header may come in two pieces
_reading = threading.Lock()
_watches: set[Watch] = set()


def attach(watch: Watch) -> int:
    """Takes requests for a rank from now on.

    Returns:
        What becomes readable with a request, for `take`; -1 if the program has the signal for itself, or wants none.
    """
    global _reading_end, _handled
    number = env.dump_signal()
    if _reading_end < 0 and number and signal.getsignal(number) is signal.SIG_DFL:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        faulthandler.register(number, file=writing, all_threads=False, chain=False)
        _reading_end, _handled = reading, number
    if _reading_end >= 0 and not _watches:
        try:
            announce(_own_folder(), _handled)
        except (OSError, EPUsageError) as error:
            _log.warning("deep_ep: nobody can ask this process for a dump: %s", error)
    _watches.add(watch)
    return _reading_end


def detach(watch: Watch) -> None:
    """Takes no more requests for a rank. May be repeated."""
    _watches.discard(watch)
    if not _watches and _reading_end >= 0:
        withdraw()


def take() -> None:
    """Passes a request on to all ranks of this process; the pipe has become readable."""
    if not _signalled():
        return
    asked = read_request()
    folder = asked.directory if asked is not None and asked.directory else _own_folder()
    for watch in list(_watches):
        # A buffer that is gone may have left a dump there, so each has a place of its own.
        watch.ask_for_dump(os.path.join(folder, watch.buffer), asked)


def _signalled() -> bool:
    global _tail
    with _reading:
        try:
            written = _tail + os.read(_reading_end, _MOST_BYTES)
        except BlockingIOError:  # another thread has read it
            return False
        _tail = written[written.rfind(_HEADER) + len(_HEADER) :] if _HEADER in written else written
        _tail = _tail[1 - len(_HEADER) :]
        return _HEADER in written


def forget() -> None:
    """In a forked child, which has the pipe of its parent."""
    global _reading_end, _reading
    _reading = threading.Lock()
    if _reading_end >= 0:
        faulthandler.unregister(_handled)
        _reading_end = -1
    _watches.clear()


def _own_folder() -> str:
    return os.path.abspath(traces.default_folder() or "deep_ep_dump")


os.register_at_fork(after_in_child=forget)


# ---- who asks


def processes(directory: Path | str | None = None) -> list[Process]:
    """The processes of this user and host that write dumps, ascending.

    Args:
        directory: only those that write into it; `None`: all.

    Raises:
        EPUsageError: as `announce`.
    """
    found = []
    for path in _meeting_place().glob("*.ready"):
        with contextlib.suppress(OSError, ValueError):
            process = _read(Process, path)
            if process.started == started(process.pid):
                found.append(process)
    if directory is not None:
        wanted = Path(directory).resolve()
        found = [process for process in found if Path(process.directory).resolve() == wanted]
    return sorted(found, key=lambda process: process.pid)


def request_dump(pid: int, directory: Path | str | None = None) -> Request:
    """Asks a process of this user and host for a dump. Does not wait for it.

    Args:
        pid: of the process.
        directory: where it shall write; `None`: where it does by itself.

    Raises:
        EPUsageError: it has no buffers, handles no signal, or belongs to somebody else.
        OSError: it cannot be asked.
    """
    process = next((process for process in processes() if process.pid == pid), None)
    if process is None:
        raise EPUsageError(
            f"dump: process {pid} does not write dumps; it must be a process of this user, on this host, with a "
            "deep_ep.Buffer and DEEP_EP_DUMP_SIGNAL not 0. Name another one, or the directory of the job."
        )
    where = "" if directory is None else str(Path(directory).absolute())
    request = Request(pid, secrets.token_hex(8), where)
    _write(_meeting_place() / f"{pid}.request", request)
    os.kill(pid, process.signal)
    return request


def wait_for_answer(request: Request, timeout_s: float) -> Answer:
    """What became of a request.

    Raises:
        EPTransportError: the process has not answered in time, or is gone.
    """
    path = _meeting_place() / f"{request.pid}.answer"
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError, ValueError):
            said = _read(Answer, path)
            if said.name == request.name:
                path.unlink(missing_ok=True)
                return said
        time.sleep(_LOOK_EVERY_S)
    raise EPTransportError(
        f"dump: process {request.pid} has not answered within {timeout_s:g} s; it must be running, and not be "
        "stopped. Read what its peers have written of it, or look at it with py-spy."
    )


# ---- the directory


def _meeting_place() -> Path:
    path = Path(tempfile.gettempdir()) / f"deep_ep-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or found.st_mode & 0o077:
        raise EPUsageError(
            f"dump: {path} is not a directory that only this user may open; requests for dumps are left there. "
            "Remove it, or set TMPDIR to another directory, for the job and for who asks."
        )
    return path


def _write(path: Path, said: Any) -> None:
    files.replace(path, codec.encode(said))


def _read(kind: type[T], path: Path) -> T:
    return codec.from_plain(kind, codec.loads(files.read(path)), is_strict=False)
