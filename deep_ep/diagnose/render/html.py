"""One self-contained HTML page from diagnoses: verdicts and tables as text, two pictures drawn by slow.js.

The page asks the network for nothing, and its own policy forbids it. Without a script, words and tables
are still there.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ..core import quantities, rank_blocks, safe_files
from ..core.causes import CAUSES, TITLES
from ..core.diagnosis import Diagnosis, FloatArray, Measured, Verdict
from ..core.package import counted
from ..core.robust_stats import lowest, median_of
from ..render import wording
from ..storage.record import Record
from .page import page
from .phase_bars import bars, of_measured

# Up to here matrices keep 16 bits of mantissa; beyond, 8: a page of 1024 ranks stays below 20 MB.
_LARGEST_EXACT = 256
_EXACT_BITS = 16
_ROUNDED_BITS = 8
# Longer tables hide what matters; the matrices hold the rest.
_SLOWEST = 3
_MOST_RANKS = 64
_MOST_OUTLIERS = 50


def write_page(records: Sequence[Record], path: str | Path) -> None:
    """Writes one HTML file that shows these windows, in order of time, the last one first; it needs no network.

    It has about 50 kB at 8 ranks, 200 kB at 64, below 20 MB at 1024 per window.
    """
    groups = list(dict.fromkeys(record.group for record in records))
    windows = []
    for number, record in enumerate(records, start=1):
        name = f"window {number} of {len(records)}" if len(records) > 1 else "window"
        if len(groups) > 1:
            name += f", group {record.group}"
        windows.append({"name": name + _until(record), **_window(record)})
    text = page(
        "slow.html",
        ", ".join(groups),
        windows=windows,
        data={"windows": [_window_data(record) for record in records]},
    )
    safe_files.write(path, text)


def _until(record: Record) -> str:
    if not math.isfinite(record.time_s):
        return ""
    ended = datetime.fromtimestamp(record.time_s, tz=timezone.utc)
    return f" until {ended:%Y-%m-%d %H:%M:%S} UTC"


# ----------------------------------------------------------------------- words and tables


def _window(record: Record) -> dict[str, Any]:
    """What slow.html shows of one window."""
    diagnosis = record.diagnosis
    answer, mood = _short_answer(diagnosis)
    bandwidths = {name: m.bandwidth for name, m in diagnosis.measured.items() if m.bandwidth}
    # The same for all: windows of logs from elsewhere have no count of operations at all.
    per = wording.per(diagnosis, next(iter(diagnosis.measured), ""))
    kinds = wording.mean_of(diagnosis)
    return {
        "answer": answer,
        "mood": mood,
        "about": _about(diagnosis),
        "headlines": wording.headlines(diagnosis),
        "per": per,
        "saving_per": f"{per}, mean of {kinds}" if kinds else per,
        "verdicts": _verdicts(diagnosis),
        "outliers": wording.outliers(diagnosis, _MOST_OUTLIERS),
        "notes": wording.notes(diagnosis),
        "bandwidths": [
            [name, *map(_middle, (b.effective, b.ingress, b.egress, b.edge))]
            for name, b in bandwidths.items()
        ],
        "slowest": _slowest_of_all(diagnosis, with_paths=not record.block_of),
        "own_times": _own_times(diagnosis),
    }


def _short_answer(diagnosis: Diagnosis) -> tuple[str, str]:
    """In two words, and the class of page.css that colours it."""
    if diagnosis.verdicts:
        return counted(len(diagnosis.keys), "cause"), "bad"
    if wording.undecided(diagnosis):
        return "undecided", "open"
    is_whole = diagnosis.measured and not diagnosis.remarks
    return ("no anomaly", "good") if is_whole else ("see notes", "open")


def _about(diagnosis: Diagnosis) -> str:
    text = wording.size(diagnosis)
    if diagnosis.device:
        text += f", {diagnosis.device}"
    for name, m in diagnosis.measured.items():
        text += f"; {name}: {wording.operations(m)}"
        if math.isfinite(m.duration_us):
            text += f", {quantities.microseconds(m.duration_us)} each"
    if diagnosis.source == "waits":
        text += "; from cumulative waiting alone: which side is slow, not why"
    return text


def _verdicts(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """A row of the table each, those of a cause together."""
    rows = []
    for of_cause in wording.causes(diagnosis):
        for place, verdict in enumerate(of_cause):
            cells = [
                f"{TITLES[verdict.kind]}: {verdict.cause}",
                ", ".join(filter(None, (wording.subject(verdict), verdict.where))),
                verdict.operation,
                quantities.number(verdict.effect_us) + wording.interval(verdict),
                quantities.percent(verdict.share),
                # One number for all operations that a cause shows in.
                "" if place else _saving(diagnosis, verdict),
                quantities.percent(verdict.seen_in),
                wording.certainty(verdict),
            ]
            rows.append(
                {
                    "cells": cells,
                    "next_step": verdict.next_step,
                    "evidence": wording.evidence(verdict),
                    "shown_at": _shown_at(diagnosis, verdict),
                }
            )
    return rows


def _saving(diagnosis: Diagnosis, verdict: Verdict) -> str:
    number = quantities.number(verdict.saving_us)
    return f"{number}, hidden" if wording.is_hidden(diagnosis, verdict) else number


def _shown_at(diagnosis: Diagnosis, verdict: Verdict) -> dict[str, Any] | None:
    """Which heatmap shows a verdict, and where."""
    if verdict.operation not in diagnosis.measured:
        return None
    row = CAUSES.get(verdict.cause)
    part, shape = (row.matrix, row.axis) if row else ("path", "cell")
    marks = _marks(diagnosis, verdict, shape)
    return {"operation": verdict.operation, "part": part, "marks": marks}


def _marks(diagnosis: Diagnosis, verdict: Verdict, shape: str) -> list[list[int]]:
    """[row, column, row end, column end] of every rectangle of the heatmap that shows the subject."""
    everyone = list(range(diagnosis.num_ranks))
    if verdict.edge is not None:
        columns, rows = ([rank] for rank in verdict.edge)
    elif verdict.nodes is not None:
        columns, rows = (_of_node(diagnosis, node) for node in verdict.nodes)
    elif verdict.rail is not None:
        columns, rows = [r for r in everyone if diagnosis.devices[r] == verdict.rail], everyone
    else:
        ranks = everyone if verdict.rank is None else [verdict.rank]
        if verdict.node is not None:
            ranks = _of_node(diagnosis, verdict.node)
        columns, rows = (ranks, everyone) if shape == "column" else (everyone, ranks)
    return [[r.start, c.start, r.stop, c.stop] for r in _runs(rows) for c in _runs(columns)]


def _of_node(diagnosis: Diagnosis, node: int) -> list[int]:
    nodes = rank_blocks.nodes_of(diagnosis)
    return [rank for rank, of in enumerate(nodes) if of == node]


def _runs(ranks: Sequence[int]) -> list[range]:
    """[0, 1, 2, 5] -> [range(0, 3), range(5, 6)]."""
    runs: list[range] = []
    for rank in ranks:
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs


def _slowest_of_all(diagnosis: Diagnosis, *, with_paths: bool) -> list[list[str]]:
    def rank_name(rank: int) -> str:
        return wording.rank_name(diagnosis, rank)

    def path_name(cell: int) -> str:
        receiver, source = divmod(cell, diagnosis.num_ranks)
        return f"{rank_name(source)} > {rank_name(receiver)}"

    rows = []
    for name, m in diagnosis.measured.items():
        if m.bandwidth is not None:
            rows += _slowest(f"{name}, into", m.bandwidth.ingress, rank_name)
            rows += _slowest(f"{name}, out of", m.bandwidth.egress, rank_name)
            if with_paths:
                others = np.array(m.bandwidth.edge)
                np.fill_diagonal(others, np.nan)
                rows += _slowest(f"{name}, path", others.reshape(-1), path_name)
    return rows


def _slowest(what: str, rates: FloatArray, name_of: Callable[[int], str]) -> list[list[str]]:
    median = median_of(rates)
    return [
        [
            what,
            name_of(place),
            quantities.number(rate),
            quantities.percent(rate / median) if median > 0 else "",
        ]
        for place, rate in lowest(rates, _SLOWEST)
    ]


def _own_times(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Bars and a table of each operation of which anything is known."""
    shown = []
    for name, m in diagnosis.measured.items():
        phases = of_measured(m)
        if not any(np.isfinite(values).any() for values in phases.values()):
            continue
        ranks = _ranks_by_gap(m)
        is_cut = len(ranks) < m.gap_us.size
        shown.append(
            {
                "bars": bars(diagnosis, m, ranks),
                "about": f"{name}: the {_MOST_RANKS} ranks with the largest gap" if is_cut else "",
                "titles": [name, *phases],
                "rows": [
                    [
                        wording.rank_name(diagnosis, rank),
                        *(quantities.number(float(values[rank])) for values in phases.values()),
                    ]
                    for rank in ranks
                ],
            }
        )
    return shown


def _ranks_by_gap(m: Measured) -> Sequence[int]:
    """All ranks; of many those with the largest gap."""
    if m.gap_us.size <= _MOST_RANKS:
        return range(m.gap_us.size)
    order = np.argsort(np.where(np.isfinite(m.gap_us), -m.gap_us, np.inf), kind="stable")
    return [int(rank) for rank in order[:_MOST_RANKS]]


def _middle(values: FloatArray) -> str:
    return quantities.number(median_of(values))


# ------------------------------------------------------------------ data of the pictures


def _window_data(record: Record) -> dict[str, Any]:
    """What slow.js reads of one window: names of the ranks, and packed matrices per operation."""
    diagnosis = record.diagnosis
    ranks = range(diagnosis.num_ranks)
    return {
        "labels": [wording.rank_name(diagnosis, rank) for rank in ranks],
        "missing": list(wording.missing_ranks(diagnosis)),
        "borders": rank_blocks.borders(diagnosis),
        "notes": ["Stored as means over blocks of ranks."] if record.block_of else [],
        "operations": {
            name: {"per": wording.per(diagnosis, name), **_operation_data(m)}
            for name, m in diagnosis.measured.items()
        },
    }


def _operation_data(m: Measured) -> dict[str, Any]:
    rounded = m.wait_us.shape[0] > _LARGEST_EXACT
    bits = _ROUNDED_BITS if rounded else _EXACT_BITS
    waiting = {"wait": m.wait_us, "late": m.late_us, "issue": m.issue_us, "path": m.path_us}
    stored = {**waiting, "tokens": m.tokens} if np.isfinite(m.wait_us).any() else {}
    return {
        "about": wording.operations(m),
        "notes": ["Values are rounded to 0.2 %."] if rounded else [],
        # One scale for all parts of the waiting, so that switching between them compares them.
        "scale": {
            "us": _colour_scale(list(waiting.values())),
            "tokens": _colour_scale([m.tokens]),
        },
        "matrices": {part: _packed(values, bits) for part, values in stored.items()} or None,
        "timeline": _timeline_data(m),
    }


def _colour_scale(matrices: Sequence[FloatArray]) -> tuple[float, float]:
    """Median of the first matrix and largest value of all, each at least 1.

    What a rank does with itself must not set the colours, unless it is alone.
    """
    between = ~np.eye(len(matrices[0]), dtype=bool) if len(matrices[0]) > 1 else np.True_
    tops = [float(np.max(m, initial=1.0, where=np.isfinite(m) & between)) for m in matrices]
    median = median_of(np.where(between, matrices[0], np.nan))
    return median if median > 1.0 else 1.0, max(tops)


def _timeline_data(m: Measured) -> Mapping[str, Any] | None:
    recent = m.timeline
    if recent is None or not len(recent.ops):
        return None
    return {
        "observer": recent.observer,
        "ops": [int(op) for op in recent.ops],
        "begin": [round(us, 1) if math.isfinite(us) else None for us in recent.begin_us.tolist()],
        "entered": _packed(recent.entered_us, _EXACT_BITS),
        "arrival": _packed(recent.arrival_us, _EXACT_BITS),
        "last": [int(rank) for rank in recent.last],
    }


def _packed(values: FloatArray, bits: int) -> str:
    """float32 with `bits` of mantissa, as four planes of bytes, deflated, base64; NaN stays NaN."""
    known = np.isfinite(values)
    words = np.ascontiguousarray(np.where(known, values, 0.0), dtype="<f4").view("<u4")
    dropped = 23 - bits
    words = (words + np.uint32(1 << (dropped - 1))) >> np.uint32(dropped) << np.uint32(dropped)
    words[~known] = np.float32(np.nan).view(np.uint32)
    planes = words.reshape(-1, 1).view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")
