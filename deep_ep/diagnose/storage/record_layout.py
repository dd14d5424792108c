"""How a record is laid out: a JSON object, in a line. `docs/records.md` is the schema.

Unknown numbers are null. Times are rounded to nanoseconds. A field that is added has a row here, in the
order of the line; what is in no row is not stored.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import numpy as np

from ..core import rank_blocks
from ..core.causes import COMM_SLOW, COMP_SLOW, MIXED_SLOW
from ..core.diagnosis import (
    Bandwidth,
    Diagnosis,
    FloatArray,
    Measured,
    Outlier,
    Timeline,
    Verdict,
)
from ..core.rank_blocks import Blocks
from .codec import (
    TEXT,
    Array,
    Integer,
    List,
    MappingOf,
    Maybe,
    Number,
    Numbering,
    Object,
    Schema,
    Sides,
    Word,
)
from .record import MATRICES, Means, Record

SCHEMA = "deep_ep.diagnose/1"
FILE_PATTERN = "diagnose-*.jsonl"
# How every line begins, of this version or another.
START = '{"schema": "deep_ep.diagnose/'
# The longest line that is read: records of 1,024 ranks with matrices of six kinds take half of it.
LONGEST_LINE = 16 * 2**20
# Records of larger groups are not read: a few bytes could ask for any amount of memory.
MOST_RANKS = 2048
_MOST_KINDS = 8
# Beyond so many ranks matrices are stored per block of ranks.
LARGEST_MATRIX = 128
# Cells of a timeline; of many ranks only the latest operations are stored.
_LARGEST_TIMELINE = 16_384
_TIME_DIGITS = 3
_OTHER_DIGITS = 6
# Certainties differ in how far they are from 1.
_CERTAINTY_DIGITS = 12

_COUNT = Integer()
_RANK = Integer(below="num_ranks")
_TIME_US = Number(_TIME_DIGITS)
_OTHER = Number(_OTHER_DIGITS)
_TIMES_US = Array(_TIME_DIGITS, ("num_ranks",))
_BETWEEN_BLOCKS = ("num_blocks", "num_blocks")
_PER_OPERATION = Array(_TIME_DIGITS, ("n", "num_ranks"))


def _int64(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


OUTLIER = Object(
    Outlier,
    (TEXT, "operation"),
    (_COUNT, "number"),
    (_RANK, "rank"),
    (_TIME_US, "effect_us"),
)

VERDICT = Object(
    Verdict,
    (Word((COMP_SLOW, COMM_SLOW, MIXED_SLOW)), "kind"),
    (TEXT, "cause", "operation"),
    (Maybe(_RANK), "rank"),
    (Maybe(List(_RANK, ("source", "destination"), tuple)), "edge", "nodes"),
    (Maybe(_COUNT), "rail"),
    # Records of earlier versions know of no such subject.
    (Maybe(_COUNT, absent=None), "node"),
    (TEXT, "where"),
    (_TIME_US, "effect_us"),
    (List(_TIME_US, ("low", "high"), tuple), "interval_us"),
    (_OTHER, "share"),
    (_TIME_US, "saving_us", "duration_us"),
    # Records of earlier versions do not tell.
    (Number(_TIME_DIGITS, absent=None), "alone_us"),
    (Number(_CERTAINTY_DIGITS), "certainty"),
    (_OTHER, "seen_in"),
    (MappingOf(_OTHER), "evidence"),
    (TEXT, "next_step"),
)

MEANS = Object(
    Means,
    (Object(dict, (_TIMES_US, *MATRICES)), "waiting", "waited_for"),
)

BANDWIDTH = Object(
    dict,
    (Array(_OTHER_DIGITS, ("num_ranks",)), "ingress", "egress", "effective"),
    # Where matrices are.
    (Maybe(Array(_OTHER_DIGITS, _BETWEEN_BLOCKS), absent=None, left_out=True), "edge"),
)

TIMELINE = Object(
    Timeline,
    (_RANK, "observer"),
    (List(_COUNT, "n", _int64), "ops"),
    (Array(_TIME_DIGITS, ("n",)), "begin_us"),
    (_PER_OPERATION, "entered_us", "arrival_us"),
    (List(_RANK, "n", _int64), "last"),
)

MEASURED = Object(
    dict,
    (TEXT, "operation"),
    (_COUNT, "num_operations", "first_operation", "last_operation"),
    (_TIME_US, "duration_us"),
    (_TIMES_US, "gap_us", "send_us", "drain_us", "own_wait_us"),
    (MEANS, "means"),
    (Maybe(BANDWIDTH), "bandwidth"),
    (Maybe(Object(dict, (Array(_TIME_DIGITS, _BETWEEN_BLOCKS), *MATRICES))), "matrices"),
    (Maybe(TIMELINE), "timeline"),
)


class _Nodes(Numbering):
    """Empty where they are not known, and in records of before they were stored."""

    absent = ()

    @property
    def type_name(self) -> str:
        return f"{super().type_name}, or empty"

    def read(self, value: Any, sides: Sides) -> Any:
        return super().read(value, sides) if value else ()


def _record(
    *,
    schema: str,
    time: float,
    window: int,
    group: str,
    num_ranks: int,
    block_of: list[int] | None,
    measured: list[dict[str, Any]],
    **of_diagnosis: Any,
) -> Record:
    of = rank_blocks.single(num_ranks)
    if block_of is not None:
        of = rank_blocks.from_indices(block_of)
    means = {m["operation"]: m.pop("means") for m in measured}
    return Record(
        diagnosis=Diagnosis(
            measured={m["operation"]: _measured(m, of) for m in measured}, **of_diagnosis
        ),
        time_s=time,
        window=window,
        group=group,
        block_of=() if of.single else tuple(of.of_rank.tolist()),
        stored_means=means,
    )


RECORD = Object(
    _record,
    (Schema(SCHEMA), "schema"),
    (Number(_TIME_DIGITS, 0, 95e9, "seconds since 1970 before the year 5000, or null"), "time"),
    (_COUNT, "window"),
    (TEXT, "group"),
    # Every rank is a block of its own, unless `block_of` says otherwise.
    (Integer(below=MOST_RANKS + 1, length_of=("num_ranks", "num_blocks")), "num_ranks"),
    (List(TEXT, "num_ranks", tuple), "hosts"),
    (List(Integer(least=-1), "num_ranks", tuple), "devices"),
    (_Nodes(Integer(-1, "num_ranks"), "num_ranks", tuple, of="node"), "nodes"),
    (TEXT, "device"),
    (Word(("stamps", "waits")), "source"),
    (Maybe(Numbering(_RANK, "num_ranks", of="block")), "block_of"),
    (List(VERDICT), "verdicts"),
    (List(OUTLIER), "events"),
    (List(TEXT), "remarks"),
    (MappingOf(_TIME_US), "savings_us"),
    (List(MEASURED, most=_MOST_KINDS), "measured"),
)


def to_line(record: Record, *, with_matrices: bool) -> str:
    """The record as one line of JSON, without the line end."""
    diagnosis = record.diagnosis
    of = rank_blocks.at_most(LARGEST_MATRIX, diagnosis)
    if record.block_of:
        of = rank_blocks.from_indices(record.block_of)
    stored = RECORD.write(
        {
            **vars(diagnosis),
            "schema": SCHEMA,
            "time": record.time_s,
            "window": record.window,
            "group": record.group,
            "num_ranks": diagnosis.num_ranks,
            "block_of": of.of_rank if with_matrices and not of.single else None,
            "measured": [
                _to_store(m, record.means(name), of if with_matrices else None)
                for name, m in diagnosis.measured.items()
            ],
        }
    )
    return json.dumps(stored, allow_nan=False)


def _to_store(m: Measured, means: Means, of: Blocks | None) -> dict[str, Any]:
    """The fields of an entry; matrices per block, or none of them."""

    def condensed(matrix: FloatArray) -> FloatArray | None:
        return None if of is None else matrix if of.single else of.mean(matrix)

    bandwidth = m.bandwidth and {**vars(m.bandwidth), "edge": condensed(m.bandwidth.edge)}
    return {
        **vars(m),
        "means": means,
        "bandwidth": bandwidth,
        "matrices": of and {name: condensed(getattr(m, name)) for name in MATRICES},
        "timeline": of and m.timeline and _latest(m.timeline),
    }


def _latest(t: Timeline) -> Timeline:
    """What is kept of it: so many operations at its end."""
    count, num_ranks = t.entered_us.shape
    most = max(1, _LARGEST_TIMELINE // max(num_ranks, 1))
    if count <= most:
        return t
    begin = t.begin_us[-most:]
    return replace(
        t,
        ops=t.ops[-most:],
        begin_us=begin - begin[0],
        entered_us=t.entered_us[-most:],
        arrival_us=t.arrival_us[-most:],
        last=t.last[-most:],
    )


def _measured(stored: dict[str, Any], of: Blocks) -> Measured:
    """Of the fields of an entry."""

    def spread_out(cells: FloatArray | None) -> FloatArray:
        if cells is None:
            return _unknown(of.of_rank.size)
        return cells if of.single else of.spread_out(cells)

    matrices, rates = stored.pop("matrices") or {}, stored.pop("bandwidth")
    whole: dict[str, Any] = {name: spread_out(matrices.get(name)) for name in MATRICES}
    return Measured(
        **stored,
        **whole,
        bandwidth=rates and Bandwidth(**{**rates, "edge": spread_out(rates["edge"])}),
    )


@functools.lru_cache(maxsize=1)
def _unknown(num_ranks: int) -> FloatArray:
    """One number stands for all, so that a window without matrices costs no memory."""
    return np.broadcast_to(np.float64(np.nan), (num_ranks, num_ranks))
