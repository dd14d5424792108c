"""Files of this user: written as a whole or not at all, read within limits."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# A ring of 4096 calls with frames takes a tenth of it.
LARGEST = 64 << 20
# Of a line of a log; what is longer is read as several.
_LONGEST_LINE = 1 << 14


def open_closed_streams() -> None:
    """What a program says to a standard output or error that was closed (`>&-`) goes nowhere, and does not end it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process


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
    with naming(path):
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


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """An `OSError` says this path: by itself a full disk says none, and another name would tell nobody anything."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


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
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST:
            raise ValueError(f"it has {size} bytes, more than {LARGEST}")
        return file.read(LARGEST)


def lines(path: Path) -> Iterator[str]:
    """The lines of a regular file of any size, without their ends.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    with _open(path) as file:
        while line := file.readline(_LONGEST_LINE):
            yield line.decode("utf-8", "replace").rstrip("\r\n")


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    # A named pipe must not keep its reader waiting.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        yield file
