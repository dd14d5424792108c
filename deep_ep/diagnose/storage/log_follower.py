"""Follows the records of a running job: whole lines only, each once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..core.package import EPArgumentError, printable
from . import diagnosis_log, record_layout
from .diagnosis_log import Log
from .record import Record

# Of a file so many bytes at a time, so that a log of any size takes little memory.
_AT_ONCE = 4 * 2**20


@dataclass
class _Position:
    """How far a file has been read; whether in the middle of a line that is too long."""

    offset: int = 0
    line: int = 0
    skips: bool = False


@dataclass
class Follower:
    """Reads what is appended to a file, or to the `diagnose-*.jsonl` of a folder; it may come to be later."""

    path: Path
    _positions: dict[Path, _Position] = field(default_factory=dict)

    def catch_up(self) -> Iterator[Log]:
        """The records that came since the last call, some at a time, and notes about lines that are none."""
        files = self._files()
        # A file that is gone and comes back is a new one.
        self._positions = {file: self._positions.get(file, _Position()) for file in files}
        for file, position in self._positions.items():
            while (log := self._read_on(file, position)) is not None:
                yield log

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(self.path.glob(record_layout.FILE_PATTERN))
        return [self.path] if self.path.exists() else []

    def _read_on(self, file: Path, position: _Position) -> Log | None:
        """What some more whole lines hold; None if there is none."""
        found: list[Record] = []
        remarks: list[str] = []
        text = self._new_text(file, position)
        # What follows the last line end is still being written.
        whole = text[: text.rfind(b"\n") + 1]
        if not whole and len(text) <= record_layout.LONGEST_LINE:
            return None
        if not whole:
            position.offset += len(text)
            position.skips = True
            return Log((), ())
        position.offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            position.line += 1
            where = f"{printable(str(file))}:{position.line}"
            if position.skips:
                position.skips = False
                remarks.append(diagnosis_log.too_long(where))
            else:
                self._take(line, where, found, remarks)
        return Log(tuple(found), tuple(remarks))

    def _new_text(self, file: Path, position: _Position) -> bytes:
        with file.open("rb") as opened:
            if opened.seek(0, 2) < position.offset:
                # The file was replaced by a shorter one.
                position.offset = position.line = 0
                position.skips = False
            opened.seek(position.offset)
            text = opened.read(_AT_ONCE)
            if b"\n" not in text:
                text += opened.readline(max(record_layout.LONGEST_LINE + 1 - len(text), 0))
        return text

    def _take(self, line: bytes, where: str, found: list[Record], remarks: list[str]) -> None:
        if not line.strip():
            return
        try:
            record = diagnosis_log.parse_line(line, where)
        except EPArgumentError as error:
            remarks.append(str(error))
            return
        if record is not None:
            found.append(record)
        else:
            remarks.append(f"{where}: the line is cut off, so its window is missing.")
