"""How another program asks a process for a dump: over a socket in a folder that only its user may open.

A process with buffers listens for each of them in `deep_ep-UID` under the temporary directory, at `PID.BUFFER.RANK.FOLDER`,
of which the last is short for where it writes by itself (membership/dump_requests.py). Who asks sends an `InquiryRequest`,
as ranks do to each other, and is answered with the `InquiryVerdict`, which names the files that were written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deep_ep.errors import EPTransportError, EPUsageError
from deep_ep.hang import messages
from deep_ep.hang.messages import InquiryRequest, InquiryVerdict

# Of an answer, bytes; that of 1024 ranks, with the names of all files, takes a quarter of it.
_LONGEST = 1 << 20


@contextlib.contextmanager
def meeting_place() -> Iterator[Path]:
    """The folder, under a name that leaves room for another one in the address of a socket.

    Raises:
        EPUsageError: it belongs to somebody else.
        OSError: it cannot be opened.
    """
    path = Path(tempfile.gettempdir()) / f"deep_ep-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or found.st_mode & 0o077:
        raise EPUsageError(
            f"dump: {path} is not a directory that only this user may open; processes are asked for dumps there. "
            "Remove it, or set TMPDIR to another directory, for the job and for who asks."
        )
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield Path(f"/proc/self/fd/{folder}")
    finally:
        os.close(folder)


def short(folder: str) -> str:
    """Names a folder in an address."""
    return hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:12]


def ask(whom: str | None, into: Path | None = None) -> list[tuple[int, socket.socket]]:
    """Asks processes of this user and host for dumps of their buffers. Waits for none.

    What processes have left that were killed is removed.

    Args:
        whom: number of a process, or the folder into which those that are asked write by themselves; `None`: all.
        into: where they shall write; `None`: where they do by themselves.

    Returns:
        Of each buffer the process, and the connection over which it answers.

    Raises:
        EPUsageError: no such process has buffers, or the folder belongs to somebody else.
        OSError: one cannot be asked.
    """
    request = InquiryRequest(final=False, dump_to="" if into is None else str(into.absolute()))
    asked = []
    with meeting_place() as place:
        for address in sorted(place.iterdir()):
            words = address.name.split(".")
            is_meant = whom in (None, words[0]) or short(str(whom)) == words[-1]
            if not words[0].isdecimal() or not is_meant:
                continue
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            try:
                connection.connect(str(address))
                connection.sendall(messages.encode(request) + b"\n")
            except BlockingIOError:
                pass  # it is stopped, and was asked often before; it does not answer
            except ConnectionRefusedError:
                connection.close()
                address.unlink(missing_ok=True)
                continue
            except (FileNotFoundError, BrokenPipeError, ConnectionResetError):
                connection.close()  # it has ended meanwhile
                continue
            asked.append((int(words[0]), connection))
    if not asked:
        for_whom = "" if whom is None else f" that is {whom!r}, or writes there"
        raise EPUsageError(
            f"dump: there is no process{for_whom}; it must be of this user, on this host, and have a deep_ep.Buffer of "
            "several ranks, with DEEP_EP_RECORDER not 0. Use the TMPDIR of the job."
        )
    return asked


def answer(pid: int, connection: socket.socket, timeout_s: float) -> InquiryVerdict:
    """What became of a request.

    Raises:
        EPTransportError: the process has not answered in time, or is gone.
    """
    connection.settimeout(timeout_s)
    try:
        with connection, connection.makefile("rb") as said:
            found = messages.decode(said.readline(_LONGEST))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, InquiryVerdict):
        raise EPTransportError(
            f"dump: process {pid} has not answered within {timeout_s:g} s; it must be running, and not be stopped. "
            "Read what its peers have written of it, or look at it with py-spy."
        )
    return found
