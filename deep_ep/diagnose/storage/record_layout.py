"""How a record is laid out: a JSON object, in a line. `docs/records.md` is the schema.

Unknown numbers are null. The types of the fields say how they are stored; those of verdicts and what is measured
stand in `core/diagnosis.py`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Optional

import numpy as np

from ..core import rank_blocks
from ..core.diagnosis import (
    OTHER,
    TIME,
    Bandwidth,
    Count,
    Diagnosis,
    FloatArray,
    Measured,
    MeasuredOfRanks,
    Microseconds,
    Outlier,
    Timeline,
    Verdict,
)
from ..core.package import codec
from ..core.rank_blocks import Blocks
from . import foreign
from .record import MATRICES, Means, Record

SCHEMA = "deep_ep.diagnose/1"
FILE_PATTERN = "diagnose-*.jsonl"
# The longest line that is read: records of 1,024 ranks with matrices of six kinds take half of it.
LONGEST_LINE = 16 * 2**20
# Records of larger groups are not read: a few bytes could ask for any amount of memory.
MOST_RANKS = 2048
_MOST_KINDS = codec.Most(8)
# Beyond so many ranks matrices are stored per block of ranks.
LARGEST_MATRIX = 128
# In seconds since 1970, about the year 5000.
_LAST_TIME = 95e9


def _time(value: float, _: codec.Sides) -> float:
    if math.isfinite(value) and not 0 <= value < _LAST_TIME:
        raise codec.CodecError.of(value, "seconds since 1970 before the year 5000, or null")
    return value


def _numbered(what: str) -> Callable[[Any, codec.Sides], Any]:
    """Of numbers of what ranks belong to: each from 0 on occurs; how many there are is the length of a side."""

    def check(numbers: Any, sides: codec.Sides) -> Any:
        count = max(numbers, default=-1) + 1
        if not set(range(count)).issubset(numbers):
            raise codec.CodecError.of([*numbers], f"every {what} from 0 on to have a rank")
        if numbers:
            sides[f"num_{what}s"] = count
        return numbers

    return check


_Time = Annotated[float, TIME, _time]
_NumRanks = Annotated[
    int, codec.Range(0, MOST_RANKS + 1), codec.Length(("num_ranks", "num_blocks"))
]
_OfRanks = ("num_ranks",)
_Place = Annotated[int, codec.Range(-1)]
_Node = Annotated[int, codec.Range(-1, "num_ranks")]
_Block = Annotated[int, codec.Range(0, "num_ranks")]
_Rates = Annotated[FloatArray, _OfRanks, OTHER]
_RatesOfBlocks = Optional[Annotated[FloatArray, ("num_blocks", "num_blocks"), OTHER]]
_Cells = Annotated[FloatArray, ("num_blocks", "num_blocks"), TIME]
_Matrices = Optional[Annotated[Mapping[str, _Cells], MATRICES]]


@dataclass(frozen=True)
class StoredBandwidth:
    """`Bandwidth`; the edges only where matrices are, per block."""

    ingress: _Rates
    egress: _Rates
    effective: _Rates
    edge: _RatesOfBlocks = None


@dataclass(frozen=True)
class StoredMeasured(MeasuredOfRanks):
    """`Measured`, with matrices as means over ranks, and per block of ranks where all is stored."""

    means: Means
    bandwidth: Optional[StoredBandwidth]  # noqa: UP045 - read at run time, by Python 3.9 as well
    matrices: _Matrices
    timeline: Optional[Timeline]  # noqa: UP045


@dataclass(frozen=True)
class Line:
    """`Diagnosis`, and what a `Record` has beside it. Every rank is a block of its own, unless `block_of` says otherwise."""

    schema: Annotated[str, foreign.schema(SCHEMA)]
    time: _Time
    window: Count
    group: str
    num_ranks: _NumRanks
    hosts: Annotated[tuple[str, ...], _OfRanks]
    devices: Annotated[tuple[_Place, ...], _OfRanks]
    device: str
    source: Literal["stamps", "waits"]
    block_of: Optional[Annotated[list[_Block], _OfRanks, _numbered("block")]]  # noqa: UP045
    verdicts: list[Verdict]
    events: list[Outlier]
    remarks: list[str]
    savings_us: Mapping[str, Microseconds]
    measured: Annotated[list[StoredMeasured], _MOST_KINDS]
    # Records of before they were stored have none.
    nodes: Annotated[tuple[_Node, ...], _OfRanks, codec.OR_EMPTY, _numbered("node")] = ()


def to_line(record: Record, *, with_matrices: bool) -> str:
    """The record as one line of JSON, without the line end."""
    diagnosis = record.diagnosis
    of = rank_blocks.at_most(LARGEST_MATRIX, diagnosis)
    if record.block_of:
        of = rank_blocks.from_indices(record.block_of)
    blocks = of if with_matrices else None
    line = Line(
        **{
            **vars(diagnosis),
            "measured": [
                _to_store(m, record.means(kind), blocks) for kind, m in diagnosis.measured.items()
            ],
        },
        schema=SCHEMA,
        time=record.time_s,
        window=record.window,
        group=record.group,
        num_ranks=diagnosis.num_ranks,
        block_of=None if blocks is None or of.single else of.of_rank.tolist(),
    )
    return json.dumps(codec.to_plain(line), allow_nan=False)


def from_json(value: Any) -> Record:
    """The record of what JSON makes of a line; raises CodecError."""
    line = foreign.read(Line, value)
    of = rank_blocks.single(line.num_ranks)
    if line.block_of is not None:
        of = rank_blocks.from_indices(line.block_of)
    found = {field.name: getattr(line, field.name) for field in fields(Diagnosis)}
    return Record(
        Diagnosis(**{**found, "measured": {m.operation: _measured(m, of) for m in line.measured}}),
        time_s=line.time,
        window=line.window,
        group=line.group,
        block_of=() if of.single else tuple(of.of_rank.tolist()),
        stored_means={m.operation: m.means for m in line.measured},
    )


def _to_store(m: Measured, means: Means, of: Blocks | None) -> StoredMeasured:
    """Matrices per block, or none of them."""

    def condensed(matrix: FloatArray) -> FloatArray | None:
        return None if of is None else matrix if of.single else of.mean(matrix)

    rates = m.bandwidth
    matrices: Any = {name: condensed(getattr(m, name)) for name in MATRICES}
    return StoredMeasured(
        **_of_ranks(m),
        means=means,
        bandwidth=None
        if rates is None
        else StoredBandwidth(**{**vars(rates), "edge": condensed(rates.edge)}),
        matrices=None if of is None else matrices,
        timeline=None if of is None else m.timeline,
    )


def _of_ranks(m: MeasuredOfRanks) -> dict[str, Any]:
    return {field.name: getattr(m, field.name) for field in fields(MeasuredOfRanks)}


def _measured(stored: StoredMeasured, of: Blocks) -> Measured:
    """With matrices of unknown numbers where none are stored."""

    def spread_out(cells: FloatArray | None) -> FloatArray:
        if cells is None:
            return _unknown(of.of_rank.size)
        return cells if of.single else of.spread_out(cells)

    given, rates = stored.matrices or {}, stored.bandwidth
    matrices: dict[str, Any] = {name: spread_out(given.get(name)) for name in MATRICES}
    return Measured(
        **_of_ranks(stored),
        **matrices,
        bandwidth=None
        if rates is None
        else Bandwidth(**{**vars(rates), "edge": spread_out(rates.edge)}),
        timeline=stored.timeline,
    )


@functools.lru_cache(maxsize=1)
def _unknown(num_ranks: int) -> FloatArray:
    """One number stands for all, so that a window without matrices costs no memory."""
    return np.broadcast_to(np.float64(np.nan), (num_ranks, num_ranks))
