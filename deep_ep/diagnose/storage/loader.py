"""Reads whatever holds waiting: our records, saved counters, logs of cumulative-wait matrices.

What a file is, its content says, not its name.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from ..analyze.engine import judge
from ..analyze.waits_only.judge import judge_waits
from ..analyze.waits_only.lasting import MOST_WINDOWS
from ..collect.group_matrices import gather
from ..collect.snapshot import Snapshot
from ..collect.snapshot_checks import latest_operation, require_snapshot
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
_ROW = re.compile(r"\brank\s*=\s*(?P<rank>-?\d{1,18})\s*[:,]?\s*\[(?P<values>[^\[\]]*)(?P<end>\]?)")
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
        EPArgumentError: nothing there can be read; names file, line and what was expected.
        OSError: a file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise EPArgumentError(f"{path}: there is no such file or folder; expected {_EXPECTED}.")
    if path.is_dir():
        return _read_folder(path)
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
        except EPArgumentError as error:
            if len(files) == 1:
                raise
            remarks.append(printable(f"left out: {error}"))
    if not snapshots:
        raise EPArgumentError(f"{files[0].parent}: no file can be read; {remarks[0]}")
    try:
        for snapshot in snapshots:
            require_snapshot("saved counters", snapshot)
        remarks = _put_at_same_operation(snapshots) + remarks
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


def _put_at_same_operation(snapshots: list[Snapshot]) -> list[str]:
    """Rolls every snapshot back, in place, to the operation that all have ended."""
    # Without a ring there is no number, and nothing to roll back.
    numbered = [number for number in map(latest_operation, snapshots) if number]
    if not numbered:
        return []
    try:
        snapshots[:] = [
            snapshot.until(min(numbered)) if snapshot.operation else snapshot
            for snapshot in snapshots
        ]
    except EPArgumentError as error:
        return [f"rows of the ranks cover different operations: {error}"]
    return []


@dataclass(frozen=True)
class _LoggedRow:
    """One line of a matrix log: what one rank waited for every rank."""

    number: int
    where: str
    time: str
    operation: str
    rank: int
    waits: FloatArray


# Rows of one matrix, by rank.
_LoggedWindow = dict[int, _LoggedRow]


def _read_matrices(files: Sequence[Path]) -> Log:
    remarks: list[str] = []
    by_file = [rows for rows in (_rows(file, remarks) for file in files) if rows]
    if not by_file:
        seen = f"; {remarks[0]}" if remarks else ""
        where = files[0] if len(files) == 1 else files[0].parent
        raise EPArgumentError(f"{where}: nothing to read; expected {_EXPECTED}{seen}")
    by_file.sort(key=lambda rows: rows[0].time)
    windows = _windows(by_file)
    before: dict[str, deque[FloatArray]] = {}
    kept = [
        _judge_window(window, number, printable(files[0].stem), remarks, before)
        for number, window in enumerate(windows, start=1)
    ]
    return Log(tuple(kept), tuple(remarks))


def _rows(file: Path, remarks: list[str]) -> list[_LoggedRow]:
    first: _LoggedRow | None = None
    # Of each rank and operation its latest rows, because logs are larger than memory.
    kept: dict[tuple[int, str], deque[_LoggedRow]] = {}
    left_out = Counter[tuple[int, str]]()
    for number, encoded in diagnosis_log.lines(file):
        # Around the rows a log may hold anything.
        line = encoded.decode("utf-8", "replace")
        found = _ROW.search(line)
        if found is None or not _holds_numbers(found["values"]):
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


def _holds_numbers(values: str) -> bool:
    """Whether a bracket after "rank=" is a row, or words of another line."""
    return any(word.lstrip("+-.")[:1].isdecimal() for word in values.replace(",", " ").split())


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
    if row.waits.size != first.waits.size:
        raise EPArgumentError(
            f"{row.where}: the line has {row.waits.size} values; expected {first.waits.size}, one "
            f"for each rank, as in {first.where}. Leave the line out, or split the file where the "
            "group changes."
        )
    if not 0 <= row.rank < row.waits.size:
        raise EPArgumentError(
            f"{row.where}: the line is of rank {row.rank} and has {row.waits.size} values; expected "
            f"a rank from 0 to {row.waits.size - 1}, one value for each rank. Leave the line out."
        )


def _windows(by_file: Sequence[Sequence[_LoggedRow]]) -> list[_LoggedWindow]:
    ranks_by_file = [{row.rank for row in rows} for rows in by_file]
    if len(by_file) > 1 and all(len(ranks) == 1 for ranks in ranks_by_file):
        return _windows_of_ranks(by_file)
    windows: list[_LoggedWindow] = []
    for rows in by_file:
        _require_same_size(rows[0], by_file[0][0])
        latest: dict[str, _LoggedWindow] = {}
        for row in rows:
            window = latest.get(row.operation)
            if window is None or row.rank in window:
                window = latest[row.operation] = {}
                windows.append(window)
            window[row.rank] = row
    return windows


def _windows_of_ranks(by_file: Sequence[Sequence[_LoggedRow]]) -> list[_LoggedWindow]:
    """Every rank wrote its own file: the k-th row of each is the k-th window."""
    windows: dict[tuple[int, str], _LoggedWindow] = {}
    seen: dict[tuple[int, str], int] = {}
    for rows in by_file:
        _require_same_size(rows[0], by_file[0][0])
        for row in rows:
            number = seen[row.rank, row.operation] = seen.get((row.rank, row.operation), 0) + 1
            windows.setdefault((number, row.operation), {})[row.rank] = row
    return [windows[key] for key in sorted(windows, key=lambda key: key[0])]


def _judge_window(
    window: _LoggedWindow,
    number: int,
    group: str,
    remarks: list[str],
    before: dict[str, deque[FloatArray]],
) -> Record:
    """Judges a window with those before it; `before` holds the latest of each operation."""
    rows = sorted(window.values(), key=lambda row: row.rank)
    operation, num_ranks = rows[0].operation, rows[0].waits.size
    matrix = np.full((num_ranks, num_ranks), np.nan)
    for row in rows:
        matrix[row.rank] = row.waits
    latest = before.setdefault(operation, deque(maxlen=MOST_WINDOWS))
    latest.append(matrix)
    try:
        diagnosis = judge_waits(np.stack(latest), operation=operation)
    except EPArgumentError as error:
        raise EPArgumentError(f"{rows[0].where}: {error}") from None
    missing = sorted(set(range(num_ranks)) - set(window))
    if missing:
        where = rows[0].where
        remarks.append(
            f"window {number} ({where}): no line of {ranks_text(missing)}; what they waited is not known."
        )
    return Record(diagnosis, _seconds(rows[-1].time), number, group)


def _seconds(time: str) -> float:
    """Local time as logs write it, in seconds since 1970; NaN if there is none."""
    whole, _, fraction = time.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{fraction:0<6}").timestamp()
    except (ValueError, OverflowError):
        return math.nan
