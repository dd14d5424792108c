"""Diagnoses on disk: a JSON object per line and window. `docs/records.md` is the schema.

Unknown numbers are null. Times are rounded to nanoseconds.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from deep_ep.diagnose.core import rank_blocks as blocks
from deep_ep.diagnose.core.diagnosis import (
    COMM_SLOW,
    COMP_SLOW,
    MIXED_SLOW,
    Bandwidth,
    Diagnosis,
    Event,
    FloatArray,
    Measured,
    Timeline,
    Verdict,
)
from deep_ep.diagnose.core.rank_blocks import Blocks
from deep_ep.diagnose.storage.json_fields import Fields
from deep_ep.errors import EPArgumentError

SCHEMA = "deep_ep.diagnose/1"
FILE_PATTERN = "diagnose-*.jsonl"

# Beyond so many ranks matrices are stored per block of ranks.
LARGEST_MATRIX = 128
# Cells of a timeline; of many ranks only the latest operations are stored.
_LARGEST_TIMELINE = 16_384
_TIME_DIGITS = 3
_OTHER_DIGITS = 6
# Certainties differ in how far they are from 1.
_CERTAINTY_DIGITS = 12
_VECTORS = ("gap_us", "send_us", "drain_us", "own_wait_us")
MATRICES = ("wait_us", "late_us", "issue_us", "path_us", "tokens", "bytes")
_START = '{"schema": "deep_ep.diagnose/'


@dataclass(frozen=True)
class Means:
    """Matrices of one operation kind, condensed: means over all other ranks, of what is known.

    Attributes:
        waiting: per matrix, `wait_us` to `bytes`, [num_ranks]: the rank waits, or receives.
        waited_for: the same where the rank is waited for, or sends.
    """

    waiting: Mapping[str, FloatArray]
    waited_for: Mapping[str, FloatArray]

    @classmethod
    def of(cls, measured: Measured) -> Means:
        """From the matrices."""
        matrices = {name: getattr(measured, name) for name in MATRICES}
        return cls(
            waiting={name: _mean_of_others(matrix, 1) for name, matrix in matrices.items()},
            waited_for={name: _mean_of_others(matrix, 0) for name, matrix in matrices.items()},
        )


@dataclass(frozen=True)
class Record:
    """One diagnosis with when and of whom it is.

    Attributes:
        diagnosis: what was found; matrices that were not stored are NaN.
        time_s: end of the window, seconds since 1970; NaN where unknown.
        window: its number, counted from 1 by the program that wrote it.
        group: name of the group of ranks.
        block_of: block of each rank, where matrices were stored as means over blocks; else empty.
        stored_means: per operation kind, as read: they are there where matrices are not.
    """

    diagnosis: Diagnosis
    time_s: float
    window: int
    group: str
    block_of: tuple[int, ...] = ()
    stored_means: Mapping[str, Means] = field(default_factory=dict)

    def means(self, operation: str) -> Means:
        """Per rank, of one operation kind of `diagnosis.measured`."""
        stored = self.stored_means.get(operation)
        return Means.of(self.diagnosis.measured[operation]) if stored is None else stored


@dataclass(frozen=True)
class Log(Sequence[Record]):
    """Records of a file in order of its lines, of several files in order of time.

    Attributes:
        records: what could be read.
        remarks: what could not, a sentence each.
    """

    records: tuple[Record, ...]
    remarks: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)


class Writer:
    """Appends records of one group to `FOLDER/diagnose-GROUP.jsonl`."""

    def __init__(self, folder: Path | str, group: str) -> None:
        """Creates the folder.

        Args:
            folder: where to.
            group: name of the group; what a file name cannot hold becomes "-".

        Raises:
            OSError: the folder cannot be made.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", group) or "group"
        self.path = Path(folder) / f"diagnose-{name}.jsonl"

    def write(self, record: Record, *, with_matrices: bool) -> None:
        """Appends one line, in one write, so that who follows the file meets whole lines.

        Raises:
            OSError: the file cannot be written.
        """
        line = to_line(record, with_matrices=with_matrices).encode() + b"\n"
        with self.path.open("ab+", buffering=0) as file:
            if file.tell() and not _ends_a_line(file.fileno(), file.tell()):
                # The program before this one was stopped in the middle of a line.
                line = b"\n" + line
            file.write(line)


def to_line(record: Record, *, with_matrices: bool) -> str:
    """The record as one line of JSON, without the line end."""
    diagnosis = record.diagnosis
    of = blocks.at_most(LARGEST_MATRIX, diagnosis)
    if record.block_of:
        of = blocks.from_indices(record.block_of)
    return json.dumps(
        {
            "schema": SCHEMA,
            "time": _number(record.time_s),
            "window": record.window,
            "group": record.group,
            "num_ranks": diagnosis.num_ranks,
            "hosts": list(diagnosis.hosts),
            "devices": list(diagnosis.devices),
            "nodes": list(diagnosis.nodes),
            "device": diagnosis.device,
            "source": diagnosis.source,
            "block_of": of.of_rank.tolist() if with_matrices and not of.single else None,
            "verdicts": [_verdict_to_json(v) for v in diagnosis.verdicts],
            "events": [
                {
                    "operation": e.operation,
                    "number": e.number,
                    "rank": e.rank,
                    "effect_us": _number(e.effect_us),
                }
                for e in diagnosis.events
            ],
            "remarks": list(diagnosis.remarks),
            "savings_us": {name: _number(us) for name, us in diagnosis.savings_us.items()},
            "measured": [
                _measured_to_json(m, record.means(name), of, with_matrices)
                for name, m in diagnosis.measured.items()
            ],
        },
        allow_nan=False,
    )


def _verdict_to_json(v: Verdict) -> dict[str, Any]:
    return {
        "kind": v.kind,
        "cause": v.cause,
        "operation": v.operation,
        "rank": v.rank,
        "edge": None if v.edge is None else list(v.edge),
        "nodes": None if v.nodes is None else list(v.nodes),
        "rail": v.rail,
        "node": v.node,
        "where": v.where,
        "effect_us": _number(v.effect_us),
        "interval_us": [_number(limit) for limit in v.interval_us],
        "share": _number(v.share, _OTHER_DIGITS),
        "saving_us": _number(v.saving_us),
        "duration_us": _number(v.duration_us),
        "certainty": _number(v.certainty, _CERTAINTY_DIGITS),
        "seen_in": _number(v.seen_in, _OTHER_DIGITS),
        "evidence": {name: _number(value, _OTHER_DIGITS) for name, value in v.evidence.items()},
        "next_step": v.next_step,
    }


def _measured_to_json(m: Measured, means: Means, of: Blocks, with_matrices: bool) -> dict[str, Any]:
    stored: dict[str, Any] = {
        "operation": m.operation,
        "num_operations": m.num_operations,
        "first_operation": m.first_operation,
        "last_operation": m.last_operation,
        "duration_us": _number(m.duration_us),
        **{name: _array(getattr(m, name)) for name in _VECTORS},
        "means": {
            "waiting": {name: _array(values) for name, values in means.waiting.items()},
            "waited_for": {name: _array(values) for name, values in means.waited_for.items()},
        },
        "bandwidth": None,
        "matrices": None,
        "timeline": None,
    }
    if m.bandwidth is not None:
        stored["bandwidth"] = {
            name: _array(getattr(m.bandwidth, name), _OTHER_DIGITS)
            for name in ("ingress", "egress", "effective")
        }
    if with_matrices:
        stored["matrices"] = {name: _matrix(getattr(m, name), of) for name in MATRICES}
        if m.bandwidth is not None:
            stored["bandwidth"]["edge"] = _matrix(m.bandwidth.edge, of, _OTHER_DIGITS)
        if m.timeline is not None:
            stored["timeline"] = _timeline_to_json(m.timeline)
    return stored


def _timeline_to_json(t: Timeline) -> dict[str, Any]:
    latest = slice(-max(1, _LARGEST_TIMELINE // max(t.entered_us.shape[1], 1)), None)
    begin = t.begin_us[latest]
    return {
        "observer": t.observer,
        "ops": t.ops[latest].tolist(),
        "begin_us": _array(begin - begin[0] if begin.size < t.begin_us.size else begin),
        "entered_us": _array(t.entered_us[latest]),
        "arrival_us": _array(t.arrival_us[latest]),
        "last": t.last[latest].tolist(),
    }


def _number(value: float, digits: int = _TIME_DIGITS) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None


def _array(values: FloatArray, digits: int = _TIME_DIGITS) -> Any:
    """Nested lists, None where unknown."""
    rounded = np.round(np.asarray(values, dtype=np.float64), digits)
    cells = rounded.astype(object)
    cells[~np.isfinite(rounded)] = None
    return cells.tolist()


def _matrix(values: FloatArray, of: Blocks, digits: int = _TIME_DIGITS) -> Any:
    return _array(values if of.single else of.mean(values), digits)


def read(path: Path | str) -> Log:
    """Reads what `Writer` wrote.

    Args:
        path: a file, or a folder with `diagnose-*.jsonl` files.

    Returns:
        The records, with a remark for each line that is cut off; such lines are left out.

    Raises:
        EPArgumentError: nothing is there, or a line is not a record of this version; names file, line
            and what was expected.
        OSError: a file cannot be read.
    """
    path = Path(path)
    files = sorted(path.glob(FILE_PATTERN)) if path.is_dir() else [path]
    if not files:
        raise EPArgumentError(
            f"{path}: there is no {FILE_PATTERN} in this folder; expected the folder that "
            "DEEP_EP_DIAGNOSE_DIR named. Pass that folder, or a file."
        )
    records: list[Record] = []
    remarks: list[str] = []
    for file in files:
        _read_file(file, records, remarks)
    if len(files) > 1:
        records.sort(key=lambda r: r.time_s if math.isfinite(r.time_s) else -math.inf)
    return Log(tuple(records), tuple(remarks))


def _read_file(file: Path, records: list[Record], remarks: list[str]) -> None:
    text = file.read_bytes()
    if not text.strip():
        raise EPArgumentError(
            f"{file}: the file is empty; expected a {SCHEMA!r} object per line. "
            "Wait for the first window to end, or pass another file."
        )
    lines = text.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = parse_line(line, f"{file}:{number}", is_last=number == len(lines))
        if record is None:
            remarks.append(
                f"{file}:{number}: the line is cut off, so its window is missing "
                "(the program was stopped while it wrote, or writes now)."
            )
        else:
            records.append(record)


def parse_line(line: bytes, where: str, *, is_last: bool = False) -> Record | None:
    """The record in one line; None if the line is cut off.

    Args:
        line: the bytes, without the line end.
        where: "FILE:LINE", for the error.
        is_last: whether no line end follows, so that any line that does not parse is cut off.

    Raises:
        EPArgumentError: the line is whole, but no record of this version.
    """
    try:
        text = line.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if is_last or _is_cut_off(line, error):
            return None
        raise EPArgumentError(
            f"{where}: not JSON ({error}); expected a {SCHEMA!r} object per line. "
            "Remove the line, or pass another file."
        ) from None
    return _record_from_json(Fields(where, SCHEMA, value))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number; unknown numbers are null")


def _is_cut_off(line: bytes, error: Exception) -> bool:
    """Whether a line in the middle of a file is one of ours that was never finished."""
    if not line.startswith(_START.encode()):
        return False
    if isinstance(error, json.JSONDecodeError):
        unfinished_text = error.msg.startswith("Unterminated string")
        return unfinished_text or error.pos >= len(error.doc.rstrip())
    return isinstance(error, UnicodeDecodeError) and error.end == len(line)


def _record_from_json(fields: Fields) -> Record:
    schema = fields.text("schema")
    if schema != SCHEMA:
        raise EPArgumentError(
            f"{fields.where}: schema is {schema!r}; this version reads {SCHEMA!r} only. "
            "Read the file with the version of deep_ep that wrote it."
        )
    num_ranks = fields.count("num_ranks")
    of = _blocks_from_json(fields, num_ranks)
    measured = [_measured_from_json(m, num_ranks, of) for m in fields.objects("measured")]
    means = [_means_from_json(m.object("means"), num_ranks) for m in fields.objects("measured")]
    diagnosis = Diagnosis(
        measured={m.operation: m for m in measured},
        verdicts=[_verdict_from_json(v, num_ranks) for v in fields.objects("verdicts")],
        remarks=fields.texts("remarks"),
        events=[
            Event(
                operation=e.text("operation"),
                number=e.count("number"),
                rank=e.count("rank", below=num_ranks),
                effect_us=e.number("effect_us"),
            )
            for e in fields.objects("events")
        ],
        hosts=tuple(fields.texts("hosts", num_ranks)),
        devices=tuple(fields.counts("devices", num_ranks, least=-1)),
        nodes=_nodes_from_json(fields, num_ranks),
        device=fields.text("device"),
        savings_us=fields.mapping("savings_us"),
        source=fields.choice("source", ("stamps", "waits")),
    )
    return Record(
        diagnosis=diagnosis,
        time_s=fields.number("time"),
        window=fields.count("window"),
        group=fields.text("group"),
        block_of=() if of.single else tuple(of.of_rank.tolist()),
        stored_means={m.operation: mean for m, mean in zip(measured, means)},
    )


def _nodes_from_json(fields: Fields, num_ranks: int) -> tuple[int, ...]:
    """Empty where they are not known, and in records of before they were stored."""
    if not fields.value.get("nodes"):
        return ()
    nodes = fields.counts("nodes", num_ranks, least=-1, below=num_ranks)
    if set(range(max(nodes) + 1)) - set(nodes):
        raise fields.error("nodes", "every node from 0 on to have a rank", nodes)
    return tuple(nodes)


def _blocks_from_json(fields: Fields, num_ranks: int) -> Blocks:
    if fields.get("block_of", "a list or null") is None:
        return blocks.single(num_ranks)
    of_rank = fields.counts("block_of", num_ranks, below=max(num_ranks, 1))
    if set(of_rank) != set(range(len(set(of_rank)))):
        raise fields.error("block_of", "every block from 0 on to have a rank", of_rank)
    return blocks.from_indices(of_rank)


def _verdict_from_json(fields: Fields, num_ranks: int) -> Verdict:
    def pair(key: str) -> tuple[int, int] | None:
        if fields.get(key, "a pair or null") is None:
            return None
        source, destination = fields.counts(key, 2, below=num_ranks)
        return source, destination

    low, high = fields.numbers("interval_us", 2).tolist()
    return Verdict(
        kind=fields.choice("kind", (COMP_SLOW, COMM_SLOW, MIXED_SLOW)),
        cause=fields.text("cause"),
        operation=fields.text("operation"),
        rank=fields.optional_count("rank", below=num_ranks),
        edge=pair("edge"),
        nodes=pair("nodes"),
        rail=fields.optional_count("rail"),
        # Records of earlier versions know of no such subject.
        node=fields.optional_count("node") if "node" in fields.value else None,
        where=fields.text("where"),
        effect_us=fields.number("effect_us"),
        interval_us=(low, high),
        share=fields.number("share"),
        saving_us=fields.number("saving_us"),
        duration_us=fields.number("duration_us"),
        certainty=fields.number("certainty"),
        seen_in=fields.number("seen_in"),
        evidence=fields.mapping("evidence"),
        next_step=fields.text("next_step"),
    )


def _measured_from_json(fields: Fields, num_ranks: int, of: Blocks) -> Measured:
    stored = fields.optional_object("matrices")
    rates = fields.optional_object("bandwidth")
    timeline = fields.optional_object("timeline")
    bandwidth = None
    if rates is not None:
        bandwidth = Bandwidth(
            edge=_matrix_from_json(rates if "edge" in rates.value else None, "edge", of),
            ingress=rates.numbers("ingress", num_ranks),
            egress=rates.numbers("egress", num_ranks),
            effective=rates.numbers("effective", num_ranks),
        )
    return Measured(
        operation=fields.text("operation"),
        num_operations=fields.count("num_operations"),
        first_operation=fields.count("first_operation"),
        last_operation=fields.count("last_operation"),
        duration_us=fields.number("duration_us"),
        **{name: _matrix_from_json(stored, name, of) for name in MATRICES},
        **{name: fields.numbers(name, num_ranks) for name in _VECTORS},
        bandwidth=bandwidth,
        timeline=None if timeline is None else _timeline_from_json(timeline, num_ranks),
    )


def _means_from_json(fields: Fields, num_ranks: int) -> Means:
    waiting, waited_for = fields.object("waiting"), fields.object("waited_for")
    return Means(
        waiting={name: waiting.numbers(name, num_ranks) for name in MATRICES},
        waited_for={name: waited_for.numbers(name, num_ranks) for name in MATRICES},
    )


def _matrix_from_json(fields: Fields | None, name: str, of: Blocks) -> FloatArray:
    if fields is None:
        # One number stands for all, so that a window without matrices costs no memory.
        return np.broadcast_to(np.float64(np.nan), (of.of_rank.size, of.of_rank.size))
    cells = fields.matrix(name, of.count, of.count)
    return cells if of.single else of.spread_out(cells)


def _timeline_from_json(fields: Fields, num_ranks: int) -> Timeline:
    ops = np.array(fields.counts("ops"), dtype=np.int64)
    return Timeline(
        observer=fields.count("observer", below=num_ranks),
        ops=ops,
        begin_us=fields.numbers("begin_us", ops.size),
        entered_us=fields.matrix("entered_us", ops.size, num_ranks),
        arrival_us=fields.matrix("arrival_us", ops.size, num_ranks),
        last=np.array(fields.counts("last", ops.size, below=num_ranks), dtype=np.int64),
    )


def _mean_of_others(matrix: FloatArray, axis: int) -> FloatArray:
    """[num_ranks]: means along an axis of what is known, ranks with themselves left out."""
    known = np.isfinite(matrix)
    np.fill_diagonal(known, False)
    total = np.sum(np.where(known, matrix, 0.0), axis=axis)
    count = known.sum(axis=axis)
    return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))


def _ends_a_line(file: int, size: int) -> bool:
    return os.pread(file, 1, size - 1) == b"\n"
