"""Reads data of anybody by the types of its fields: texts come out printable, fields of later versions are left out."""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Callable
from pathlib import Path

from ..core.package import EPArgumentError, codec, printable

read = functools.partial(codec.from_plain, text=printable, is_strict=False)


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Files of a folder, in order of their names. A named pipe is none, and would keep its reader waiting.

    Raises:
        OSError: the folder may not be read, which `Path.glob` takes for an empty one.
    """
    names = fnmatch.filter(os.listdir(folder), pattern)
    return sorted(file for name in names if (file := folder / name).is_file())


def refusal(error: codec.CodecError, where: str, part: str, schema: str) -> EPArgumentError:
    """The error to raise for one of `read`: `where` is the file and the line, `part` what its parts are called."""
    name = f"{part} {error.name}" if error.name else "the line"
    if error.advice:
        return EPArgumentError(printable(f"{where}: {name} {error.what}. ") + error.advice)
    return EPArgumentError(
        printable(f"{where}: {name} {error.what} ({schema}). ")
        + "The file is damaged or was written by something else."
    )


def schema(name: str) -> Callable[[str, codec.Sides], str]:
    """The check of a field that says to what layout the data was written."""

    def check(found: str, _: codec.Sides) -> str:
        if found != name:
            raise codec.CodecError(
                f"is {found!r}; this version reads {name!r} only",
                advice="Read the file with the version of deep_ep that wrote it.",
            )
        return found

    return check
