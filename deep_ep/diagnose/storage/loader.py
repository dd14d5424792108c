"""Reads whatever holds waiting: our records, saved counters, logs of cumulative-wait matrices.

What a file is, its content says, not its name.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..analyze.engine import judge
from ..analyze.waits_only.judge import judge_waits
from ..analyze.waits_only.lasting import MOST_WINDOWS
from ..collect.group_matrices import gather
from ..collect.snapshot import Snapshot
from ..collect.snapshot_checks import latest_operation
from ..core import safe_files
from ..core.diagnosis import FloatArray
from ..core.package import EPArgumentError, printable, ranks_text
from . import counter_archive, diagnosis_log, foreign, record_layout
from .diagnosis_log import Log
from .record import Record

_EXPECTED = (
    "records (diagnose-*.jsonl), saved counters (counters-rank*.npz), or a log with lines "
    '"[time] rank=R [wait wait ...]". `hang` reads dumps (<rank>.hang.json)'
)
_ARCHIVE = b"PK\x03\x04"
_ARRAY = b"\x93NUMPY"
# Enough of a file to tell what it is.
_HEAD_BYTES = 4096
# A bracket that begins with anything but a number has words of another line.
_ROW = re.compile(
    r"\brank\s*=\s*(?P<rank>-?\d{1,18})\s*[:,]?\s*\[\s*(?P<values>(?:[-+.]?\d|(?:nan|inf)\b)[^\[\]]*)(?P<end>\]?)"
)
_TIME = re.compile(r"\[\s*(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)\s*\]")
_DEFAULT_OPERATION = "dispatch"
# Windows of a matrix log that are judged, and numbers that their matrices may have.
_MOST_WINDOWS, _MOST_NUMBERS = 1000, 2**21
_OPERATION = re.compile(r"\b((?:normal |gateway )?(?:dispatch|combine)|notify)\b", re.IGNORECASE)


def read_any(path: Path | str) -> Log:
    """Windows of any kind of file, judged where only numbers were stored.

    Args:
        path: a file, or a folder with files of one kind; records come before counters before logs.

    Returns:
        The windows in order of time, and what could not be read.

    Raises:
        EPArgumentError: nothing there can be read, or only once, as from a pipe; names file, line and what was expected.
        OSError: a file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise EPArgumentError(f"{path}: there is no such file or folder; expected {_EXPECTED}.")
    if path.is_dir():
        return _read_folder(path)
    safe_files.require_regular(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((_ARCHIVE, _ARRAY)):
        return _read_counters([path])
    if head.lstrip().startswith(b"{"):
        return diagnosis_log.read(path)
    return _read_matrices([path])


def _read_folder(folder: Path) -> Log:
    if foreign.files_in(folder, record_layout.FILE_PATTERN):
        return diagnosis_log.read(folder)
    counters = foreign.files_in(folder, counter_archive.FILE_PATTERN)
    if counters:
        return _read_counters(counters)
    # Daily rotation appends the date to the name.
    logs = foreign.files_in(folder, "*.log*")
    if not logs:
        raise EPArgumentError(f"{folder}: nothing to read in this folder; expected {_EXPECTED}.")
    return _read_matrices(logs)


def _read_counters(files: Sequence[Path]) -> Log:
    snapshots: list[Snapshot] = []
    remarks: list[str] = []
    for file in files:
        try:
            snapshots += counter_archive.load(file)
        except (EPArgumentError, OSError) as error:
            if len(files) == 1:
                raise
            why = f"{file}: {error.strerror}" if isinstance(error, OSError) else error
            remarks.append(printable(f"left out: {why}"))
    if not snapshots:
        raise EPArgumentError(f"{files[0].parent}: no file can be read; {remarks[0]}")
    # Without a ring there is no number, and nothing to roll back.
    ended_by_all = min(filter(None, map(latest_operation, snapshots)), default=0)
    try:
        snapshots = [
            s.until(ended_by_all) if ended_by_all and s.operation else s for s in snapshots
        ]
    except EPArgumentError as error:
        remarks.insert(0, f"rows of the ranks cover different operations: {error}")
    try:
        diagnosis = judge(gather(snapshots))
    except EPArgumentError as error:
        raise EPArgumentError(f"{files[0].parent}: {error}") from None
    record = Record(
        diagnosis=diagnosis,
        time_s=max(file.stat().st_mtime for file in files),
        window=1,
        group=printable(files[0].resolve().parent.name),
    )
    return Log((record,), tuple(remarks))


class _LoggedRow(NamedTuple):
    """One line of a matrix log: what one rank waited for every rank."""

    number: int
    where: str
    time: str
    operation: str
    rank: int
    waits: FloatArray


def _read_matrices(files: Sequence[Path]) -> Log:
    remarks: list[str] = []
    by_file = [rows for rows in (_rows(file, remarks) for file in files) if rows]
    if not by_file:
        seen = f"; {remarks[0]}" if remarks else ""
        where = files[0] if len(files) == 1 else files[0].parent
        raise EPArgumentError(f"{where}: nothing to read; expected {_EXPECTED}{seen}")
    by_file.sort(key=lambda rows: rows[0].time)
    records, before = [], defaultdict[str, deque[FloatArray]](lambda: deque(maxlen=MOST_WINDOWS))
    for number, rows in enumerate(_windows(by_file), start=1):
        first, num_ranks = rows[0], rows[0].waits.size
        matrix = np.full((num_ranks, num_ranks), np.nan)
        for row in rows:
            matrix[row.rank] = row.waits
        latest = before[first.operation]
        latest.append(matrix)
        try:
            diagnosis = judge_waits(np.stack(latest), operation=first.operation)
        except EPArgumentError as error:
            raise EPArgumentError(f"{first.where}: {error}") from None
        missing = sorted(set(range(num_ranks)) - {row.rank for row in rows})
        if missing:
            remarks.append(
                f"window {number} ({first.where}): no line of {ranks_text(missing)}; what they waited is "
                "not known."
            )
        group = printable(files[0].stem)
        records.append(Record(diagnosis, _seconds(rows[-1].time), number, group))
    return Log(tuple(records), tuple(remarks))


def _rows(file: Path, remarks: list[str]) -> list[_LoggedRow]:
    first: _LoggedRow | None = None
    # Of each rank and operation its latest rows, because logs are larger than memory.
    kept: dict[tuple[int, str], deque[_LoggedRow]] = {}
    left_out = Counter[tuple[int, str]]()
    for number, encoded in diagnosis_log.lines(file):
        # Around the rows a log may hold anything.
        line = encoded.decode("utf-8", "replace")
        found = _ROW.search(line)
        if found is None:
            continue
        where = f"{printable(str(file))}:{number}"
        if not found["end"]:
            remarks.append(
                f"{where}: the line is cut off; what rank {found['rank']} waited is missing."
            )
            continue
        around = line[: found.start()] + line[found.end() :]
        time = _TIME.search(around)
        operation = _OPERATION.search(around)
        row = _LoggedRow(
            number=number,
            where=where,
            time=time[1].replace(",", ".") if time else "",
            operation=operation[1].lower() if operation else _DEFAULT_OPERATION,
            rank=int(found["rank"]),
            waits=_waits(where, found["values"]),
        )
        first = first or row
        _require_same_size(row, first)
        key = row.rank, row.operation
        of_rank = kept.setdefault(key, deque(maxlen=_most_windows(first.waits.size)))
        left_out[key] += len(of_rank) == of_rank.maxlen
        of_rank.append(row)
    num_left_out = max(left_out.values(), default=0)
    if num_left_out:
        remarks.append(
            f"{printable(str(file))}: the first {num_left_out} windows are left out; of a log "
            "the latest are judged. Split the file to see the others."
        )
    return sorted((row for rows in kept.values() for row in rows), key=lambda row: row.number)


def _most_windows(num_ranks: int) -> int:
    return max(1, min(_MOST_WINDOWS, _MOST_NUMBERS // max(num_ranks, 1) ** 2))


def _waits(where: str, values: str) -> FloatArray:
    waits = []
    for column, word in enumerate(values.replace(",", " ").split()):
        try:
            wait = float(word)
        except ValueError:
            wait = math.nan
        if not (math.isfinite(wait) and wait >= 0):
            raise EPArgumentError(
                f"{where}: value {column + 1} is {word!r}; expected a number of at least 0, the "
                "waiting for one rank. Counters that wrapped, or a damaged log: leave the line out."
            )
        waits.append(wait)
    return np.array(waits)


def _require_same_size(row: _LoggedRow, first: _LoggedRow) -> None:
    expected = first.waits.size
    if row.waits.size != expected or not 0 <= row.rank < expected:
        raise EPArgumentError(
            f"{row.where}: the line is of rank {row.rank} and has {row.waits.size} values; expected {expected}, "
            f"one for each rank from 0 to {expected - 1}, as in {first.where}. Leave the line out, or split the "
            "file where the group changes."
        )


def _windows(by_file: Sequence[Sequence[_LoggedRow]]) -> list[list[_LoggedRow]]:
    """Rows of each window, in order of rank: a rank that appears again is of the next one of its kind of operation.

    Where every rank wrote a file of its own, each begins with the first window.
    """
    of_ranks = len(by_file) > 1 and all(len({row.rank for row in rows}) == 1 for rows in by_file)
    windows: dict[tuple[int, str], dict[int, _LoggedRow]] = {}
    number = Counter[str]()
    for rows in by_file:
        _require_same_size(rows[0], by_file[0][0])
        if of_ranks:
            number.clear()
        for row in rows:
            kind = row.operation
            while row.rank in windows.setdefault((number[kind], kind), {}):
                number[kind] += 1
            windows[number[kind], kind][row.rank] = row
    return [[window[rank] for rank in sorted(window)] for window in windows.values()]


def _seconds(time: str) -> float:
    """Local time as logs write it, in seconds since 1970; NaN if there is none."""
    whole, _, fraction = time.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{fraction:0<6}").timestamp()
    except (ValueError, OverflowError):
        return math.nan
