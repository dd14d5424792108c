"""Follows the records of a running job: whole lines only, each once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deep_ep.diagnose.storage import diagnosis_log as records
from deep_ep.diagnose.storage.diagnosis_log import Log, Record
from deep_ep.errors import EPArgumentError


@dataclass
class _Position:
    """How far a file has been read."""

    offset: int = 0
    line: int = 0


@dataclass
class Follower:
    """Reads what is appended to a file, or to the `diagnose-*.jsonl` of a folder.

    Attributes:
        path: the file or folder; it may come to be later.
    """

    path: Path
    _positions: dict[Path, _Position] = field(default_factory=dict)

    def poll(self) -> Log:
        """The records that came since the last call, and remarks about lines that are none.

        Raises:
            OSError: a file cannot be read.
        """
        found: list[Record] = []
        remarks: list[str] = []
        files = self._files()
        # A file that is gone and comes back is a new one.
        self._positions = {file: self._positions.get(file, _Position()) for file in files}
        for file, position in self._positions.items():
            lines = self._new_lines(file, position)
            for line in lines:
                position.line += 1
                self._take(line, f"{file}:{position.line}", found, remarks)
        return Log(tuple(found), tuple(remarks))

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(self.path.glob(records.FILE_PATTERN))
        return [self.path] if self.path.exists() else []

    def _new_lines(self, file: Path, position: _Position) -> list[bytes]:
        with file.open("rb") as opened:
            if opened.seek(0, 2) < position.offset:
                # The file was replaced by a shorter one.
                position.offset = position.line = 0
            opened.seek(position.offset)
            text = opened.read()
        # What follows the last line end is still being written.
        whole = text[: text.rfind(b"\n") + 1]
        position.offset += len(whole)
        return whole.split(b"\n")[:-1]

    def _take(self, line: bytes, where: str, found: list[Record], remarks: list[str]) -> None:
        if not line.strip():
            return
        try:
            record = records.parse_line(line, where)
        except EPArgumentError as error:
            remarks.append(str(error))
            return
        if record is not None:
            found.append(record)
        else:
            remarks.append(f"{where}: the line is cut off, so its window is missing.")
