"""Reads logs of records, which may be larger than memory: each is checked and left in its file."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np

from ..core.package import EPArgumentError, codec, printable
from . import foreign, record_layout
from .record import Headline, Record
from .record_layout import FILE_PATTERN, SCHEMA

# Of a file with more lines that are cut off nothing is right.
_MOST_REMARKS = 1000


class _Place(NamedTuple):
    """Where a record is stored, and what is known of it without reading it again."""

    file: Path
    number: int
    offset: int
    length: int
    headline: Headline


@dataclass(frozen=True)
class Log(Sequence[Record]):
    """Records of a file in order of its lines, of several files in order of time.

    Attributes:
        records: what could be read, or where it is stored: logs are larger than memory, so records are read again each time
            they are asked for.
        remarks: notes on what could not, a sentence each.
    """

    records: Sequence[Record | _Place]
    remarks: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            return Log(self.records[index])
        found = self.records[index]
        return _read_again(found) if isinstance(found, _Place) else found

    def __len__(self) -> int:
        return len(self.records)

    @functools.cached_property
    def headlines(self) -> Sequence[Headline]:
        """Of every record; nothing is read for it."""
        return [
            one.headline if isinstance(one, _Place) else Headline.of(one) for one in self.records
        ]


def _read_again(place: _Place) -> Record:
    with place.file.open("rb") as file:
        file.seek(place.offset)
        line = file.read(place.length)
    return parse_line(line, _where(place.file, place.number))


def read(path: Path | str) -> Log:
    """What `Writer` wrote to a file, or to the `diagnose-*.jsonl` of a folder; a line that is cut off is a note.

    Raises:
        EPArgumentError: nothing is there, or a line is whole and no record of this version; names file,
            line and what was expected.
    """
    path = Path(path)
    paths = foreign.files_in(path, FILE_PATTERN) if path.is_dir() else [path]
    if not paths:
        raise EPArgumentError(
            f"{path}: there is no {FILE_PATTERN} in this folder; expected the folder that "
            "DEEP_EP_DIAGNOSE_DIR named. Pass that folder, or a file."
        )
    found: list[_Place] = []
    remarks: list[str] = []
    for file in paths:
        _read_file(file, found, remarks)
    if not found and not remarks:
        raise EPArgumentError(
            f"{printable(str(paths[0]))}: the file is empty; expected a {SCHEMA!r} object per line. "
            "Wait for the first window to end, or pass another file."
        )
    if len(paths) > 1:
        found.sort(key=lambda place: np.nan_to_num(place.headline.time_s, nan=-np.inf))
    return Log(found, tuple(remarks))


def _read_file(file: Path, found: list[_Place], remarks: list[str]) -> None:
    offset = 0
    for number, line in lines(file):
        if line.strip():
            where = _where(file, number)
            try:
                record = parse_line(line, where)
                found.append(_Place(file, number, offset, len(line), Headline.of(record)))
            except CutOffError as error:
                if len(remarks) == _MOST_REMARKS:
                    raise
                remarks.append(str(error))
        offset += len(line)


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their ends and their numbers, from 1 on; raises EPArgumentError where one is too long to be read."""
    with file.open("rb") as opened:
        for number in itertools.count(1):
            line = opened.readline(record_layout.LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > record_layout.LONGEST_LINE:
                raise EPArgumentError(too_long(_where(file, number)))
            yield number, line


def _where(file: Path, number: int) -> str:
    return f"{printable(str(file))}:{number}"


def too_long(where: str) -> str:
    """What to say of a line that is not read."""
    most = record_layout.LONGEST_LINE
    return f"{where}: the line has more than {most} bytes, which is not read. Remove it, or pass another file."


class CutOffError(EPArgumentError):
    """A line begins as a record, and does not end."""


def parse_line(line: bytes, where: str) -> Record:
    """The record in one line.

    Args:
        line: the bytes; a line end does no harm.
        where: "FILE:LINE", for the error.

    Raises:
        CutOffError: it begins as one and is no JSON: the program was stopped while it wrote, or writes now.
        EPArgumentError: it is no record of this version.
    """
    try:
        value = codec.loads(line.removesuffix(b"\n"))
    except ValueError as error:
        if line.startswith(b"{"):
            raise CutOffError(
                f"{where}: the line is cut off, so its window is missing ({error})."
            ) from None
        raise EPArgumentError(
            f"{where}: not JSON ({error}); expected a {SCHEMA!r} object per line. "
            "Remove the line, or pass another file."
        ) from None
    try:
        return record_layout.from_json(value)
    except codec.CodecError as error:
        raise foreign.refusal(error, where, "field", SCHEMA) from None
