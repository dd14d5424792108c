"""One self-contained HTML page from diagnoses: what a terminal says, bars and a timeline, and a heatmap drawn by slow.js.

The page asks the network for nothing, and its own policy forbids it. Without a script all but the heatmap
is still there.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ..core import quantities, rank_blocks, safe_files
from ..core.causes import CAUSES
from ..core.diagnosis import Diagnosis, FloatArray, Measured, Verdict
from ..core.package import counted
from ..render import bandwidths, wording
from ..storage.record import Record
from .figure import colour_scale
from .page import page
from .phase_bars import bars
from .timeline import timeline

# Up to here matrices keep 16 bits of mantissa; beyond, 8: a page of 1024 ranks stays below 20 MB.
_LARGEST_EXACT = 256
_EXACT_BITS = 16
_ROUNDED_BITS = 8
# More outliers hide what matters.
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
        bandwidths=bandwidths,
        data={"windows": [_window_data(record) for record in records]},
    )
    safe_files.write(path, text)


def _until(record: Record) -> str:
    if not math.isfinite(record.time_s):
        return ""
    ended = datetime.fromtimestamp(record.time_s, tz=timezone.utc)
    return f" until {ended:%Y-%m-%d %H:%M:%S} UTC"


def _window(record: Record) -> dict[str, Any]:
    """What slow.html shows of one window."""
    diagnosis = record.diagnosis
    answer, mood = _short_answer(diagnosis)
    measured = diagnosis.measured.values()
    return {
        "answer": answer,
        "mood": mood,
        "about": _about(record),
        "headlines": [] if diagnosis.verdicts else wording.headlines(diagnosis),
        "causes": [
            {
                "name": wording.cause(verdicts),
                "details": wording.details(diagnosis, verdicts),
                "shown_at": [at for v in verdicts if (at := _shown_at(diagnosis, v))],
            }
            for verdicts in wording.causes(diagnosis)
        ],
        "savings": wording.savings(diagnosis),
        "outliers": wording.outliers(diagnosis, _MOST_OUTLIERS),
        "notes": wording.notes(diagnosis),
        "bandwidths": bandwidths.rows(diagnosis, with_paths=not record.block_of),
        "bars": [drawn for m in measured if (drawn := bars(diagnosis, m))],
        "timelines": [drawn for m in measured if (drawn := timeline(diagnosis, m))],
    }


def _short_answer(diagnosis: Diagnosis) -> tuple[str, str]:
    """In two words, and the class of page.css that colours it."""
    if diagnosis.verdicts:
        return counted(len(diagnosis.keys), "cause"), "bad"
    if wording.undecided(diagnosis):
        return "undecided", "open"
    is_whole = diagnosis.measured and not diagnosis.remarks
    return ("no anomaly", "good") if is_whole else ("see notes", "open")


def _about(record: Record) -> str:
    diagnosis = record.diagnosis
    text = wording.size(diagnosis)
    if diagnosis.device:
        text += f", {diagnosis.device}"
    for name, m in diagnosis.measured.items():
        text += f"; {name}: {wording.operations(m)}"
        if math.isfinite(m.duration_us):
            text += f", {quantities.microseconds(m.duration_us)} each"
    if diagnosis.source == "waits":
        text += "; from cumulative waiting alone: which side is slow, not why"
    if record.block_of:
        text += "; matrices were stored as means over blocks of ranks"
    return text


def _shown_at(diagnosis: Diagnosis, verdict: Verdict) -> dict[str, Any] | None:
    """Which heatmap shows a verdict, and where: [row, column, rows, columns] of each rectangle."""
    if verdict.operation not in diagnosis.measured:
        return None
    row = CAUSES.get(verdict.cause)
    part, shape = (row.matrix, row.axis) if row else ("path", "cell")
    everyone = [(0, diagnosis.num_ranks)]
    if verdict.edge is not None:
        columns, rows = ([(rank, 1)] for rank in verdict.edge)
    elif verdict.nodes is not None:
        columns, rows = (_of(rank_blocks.nodes_of(diagnosis), node) for node in verdict.nodes)
    elif verdict.rail is not None:
        columns, rows = _of(diagnosis.devices, verdict.rail), everyone
    else:
        ranks = everyone if verdict.rank is None else [(verdict.rank, 1)]
        if verdict.node is not None:
            ranks = _of(rank_blocks.nodes_of(diagnosis), verdict.node)
        columns, rows = (ranks, everyone) if shape == "column" else (everyone, ranks)
    marks = [[r, c, height, width] for r, height in rows for c, width in columns]
    return {"operation": verdict.operation, "part": part, "marks": marks}


def _of(places: Sequence[int], place: int) -> list[tuple[int, int]]:
    """A mark for each rank at that place."""
    return [(rank, 1) for rank, at in enumerate(places) if at == place]


def _window_data(record: Record) -> dict[str, Any]:
    """What slow.js reads of one window: names of the ranks, and packed matrices per operation."""
    diagnosis = record.diagnosis
    return {
        "labels": [wording.rank_name(diagnosis, rank) for rank in range(diagnosis.num_ranks)],
        "missing": list(wording.missing_ranks(diagnosis)),
        "borders": rank_blocks.borders(diagnosis),
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
        "rounded": rounded,
        # One scale for all parts of the waiting, so that switching between them compares them.
        "scale": {
            "us": colour_scale(list(waiting.values())),
            "tokens": colour_scale([m.tokens]),
        },
        "matrices": {part: _packed(values, bits) for part, values in stored.items()} or None,
    }


def _packed(values: FloatArray, bits: int) -> str:
    """float32 with `bits` of mantissa, deflated, base64; NaN stays NaN."""
    known = np.isfinite(values)
    words = np.where(known, values, 0.0).astype("<f4").view("<u4")
    dropped = 23 - bits
    words = (words + np.uint32(1 << (dropped - 1))) >> np.uint32(dropped) << np.uint32(dropped)
    words[~known] = np.float32(np.nan).view(np.uint32)
    return base64.b64encode(zlib.compress(words.tobytes(), 6)).decode("ascii")
