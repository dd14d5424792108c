"""Files that users name: written under their own name, never through a planted link, and read more than once."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from .package import EPArgumentError, naming, printable

# A named pipe without a reader must not keep its writer waiting.
_FLAGS = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MODE = 0o666
# Everybody may write there, and links of others lie about: /tmp.
_SHARED = stat.S_ISVTX | stat.S_IWOTH


def require_regular(path: Path) -> None:
    """Refuses a pipe and its like, of which a second look sees no beginning; what is not there is no matter.

    Raises:
        EPArgumentError: it is one.
    """
    if path.exists() and not path.is_file():
        raise EPArgumentError(
            f"{path} is no regular file, and it is read more than once. Write what it says into a file first."
        )


def create(path: Path | str) -> BinaryIO:
    """Opens a file for writing from its beginning.

    Raises:
        EPArgumentError: the name is a link, or the file belongs to somebody else in a folder for all.
        OSError: the file cannot be written.
    """
    file = _open(Path(path), os.O_WRONLY)
    if stat.S_ISREG(os.fstat(file).st_mode):
        # Only now is it known to be what its name says.
        os.ftruncate(file, 0)
    return os.fdopen(file, "wb")


def write(path: Path | str, data: bytes) -> None:
    """Writes a file as a whole. Raises as `create`."""
    with naming(path), create(path) as file:
        file.write(data)


def open_to_append(path: Path | str) -> BinaryIO:
    """Opens a file for appending, and reading; nothing is buffered. Raises as `create`."""
    return os.fdopen(_open(Path(path), os.O_RDWR | os.O_APPEND), "ab+", buffering=0)


def require_own(path: Path | str) -> None:
    """Raises as `create`, where there is something under that name; changes nothing."""
    if os.path.lexists(path):
        os.close(_open(Path(path), os.O_WRONLY))


def _open(path: Path, flags: int) -> int:
    _require_own_folder(path)
    try:
        file = os.open(path, flags | _FLAGS, _MODE)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _refusal(path, "it is a symbolic link") from None
    try:
        _require_own_file(path, os.fstat(file))
    except BaseException:
        os.close(file)
        raise
    return file


def _require_own_folder(path: Path) -> None:
    """A link to the folder may be the user's, or the administrator's."""
    found = os.lstat(path.parent)
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        raise _refusal(path, f"its folder is a symbolic link of user {found.st_uid}")


def _require_own_file(path: Path, found: os.stat_result) -> None:
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISCHR(found.st_mode)):
        raise _refusal(path, "it is no regular file")
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        raise _refusal(path, f"the file has {found.st_nlink} names")
    in_shared_folder = path.parent.stat().st_mode & _SHARED == _SHARED
    if in_shared_folder and found.st_uid not in (0, os.geteuid()):
        raise _refusal(path, f"user {found.st_uid} put it into a folder for all")


def _refusal(path: Path, what: str) -> EPArgumentError:
    return EPArgumentError(
        f"{printable(str(path))}: {what}, and what is written there might end up elsewhere; only a "
        "regular file of this user is written, under its own name. Remove it, or name another file or folder."
    )
