"""Files of dumps: written as a whole or not at all, read within limits."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

# A ring of 4096 calls with frames takes a tenth of it.
LARGEST = 64 << 20


def replace(path: Path | str, data: bytes, mode: int = 0o600) -> None:
    """Puts a new file in the place of whatever has that name; who reads meets the old or the new one.

    Meanwhile it has a name that begins as no dump does, so that what reads dumps passes it over.

    Args:
        path: of it.
        data: what it holds.
        mode: who may read it, whatever the umask; only this user, unless told otherwise.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    file, name = tempfile.mkstemp(dir=path.parent, prefix=".~", suffix=".~")
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(data)
            os.fchmod(file, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def make_folder(path: Path) -> None:
    """Makes a folder that only this user may open, and those above it that are missing. What is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def read(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        ValueError: it is none, or too large.
        OSError: it cannot be read.
    """
    # A named pipe must not keep its reader waiting.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size > LARGEST:
            raise ValueError(f"it has {found.st_size} bytes, more than {LARGEST}")
        return file.read(LARGEST)
