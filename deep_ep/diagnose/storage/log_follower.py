"""Follows the records of a running job: whole lines only, each once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.package import EPArgumentError, printable
from . import diagnosis_log, foreign, record_layout
from .record import Record


@dataclass
class _Position:
    """How far a file has been read; whether in the middle of a line that is too long."""

    offset: int = 0
    line: int = 0
    skips: bool = False
    is_told: bool = False  # that it cannot be read


class Follower:
    """Reads what is appended to a file, or to the `diagnose-*.jsonl` of a folder; it may come to be later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._positions: dict[Path, _Position] = {}

    def catch_up(self) -> Iterator[Record | str]:
        """The records that came since the last call, and in their place notes about lines that are none.

        Of a file that cannot be read there is one note, and the others are read.

        Raises:
            OSError: the folder cannot be read.
        """
        files = [self._path] if self._path.exists() else []
        if self._path.is_dir():
            files = foreign.files_in(self._path, record_layout.FILE_PATTERN)
        # A file that is gone and comes back is a new one.
        self._positions = {file: self._positions.get(file, _Position()) for file in files}
        for file, position in self._positions.items():
            try:
                yield from _read_on(file, position)
            except FileNotFoundError:
                pass  # it has vanished since it was listed
            except OSError as error:
                if not position.is_told:
                    position.is_told = True
                    why = error.strerror or error
                    yield f"{printable(str(file))}: {why}. Its windows are missing."


def _read_on(file: Path, position: _Position) -> Iterator[Record | str]:
    with file.open("rb") as opened:
        if opened.seek(0, os.SEEK_END) < position.offset:
            # The file was replaced by a shorter one.
            position.offset, position.line, position.skips = 0, 0, False
        opened.seek(position.offset)
        while line := opened.readline(record_layout.LONGEST_LINE + 1):
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) <= record_layout.LONGEST_LINE:
                return  # what follows the last line end is still being written
            position.offset += len(line)
            was_skipped, position.skips = position.skips, not is_whole
            if not is_whole:
                continue
            position.line += 1
            where = f"{printable(str(file))}:{position.line}"
            if was_skipped:
                yield diagnosis_log.too_long(where)
            elif line.strip():
                try:
                    yield diagnosis_log.parse_line(line, where)
                except EPArgumentError as error:
                    yield str(error)
