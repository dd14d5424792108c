"""Where the time of each rank goes, as stacked bars: before the operation, sending, waiting, after the last arrival."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from ..core import quantities
from ..core.diagnosis import Diagnosis, Measured
from ..render import wording
from .page import part

# Of a phase: its name, and its class in page.css.
_PHASES = (
    ("before it (gap)", "gap"),
    ("sending", "send"),
    ("waiting", "wait"),
    ("after the last arrival", "drain"),
)
_NAMES_WIDTH, _BARS_WIDTH, _LINE = 170, 560, 20
_MOST_RANKS = 64


def bars(diagnosis: Diagnosis, m: Measured) -> Markup:
    """A bar for each rank; those that a verdict names are marked. Nothing where nothing is known."""
    times = np.nan_to_num(np.stack([m.gap_us, m.send_us, m.own_wait_us, m.drain_us]))
    # All ranks; of many those with the largest gap.
    ranks: Sequence[int] = range(m.gap_us.size)
    if m.gap_us.size > _MOST_RANKS:
        ranks = np.argsort(-times[0], kind="stable")[:_MOST_RANKS].tolist()
    times = times[:, list(ranks)]
    longest = float(times.sum(axis=0).max(initial=0.0))
    if longest <= 0:
        return Markup()
    which = (
        f", of the {len(ranks)} ranks with the largest gap" if len(ranks) < m.gap_us.size else ""
    )
    named = {verdict.rank for verdict in diagnosis.verdicts}
    lines = []
    for line, rank in enumerate(ranks):
        x, parts = float(_NAMES_WIDTH), []
        for (phase, style), us in zip(_PHASES, times[:, line].tolist()):
            width = max(us, 0.0) / longest * _BARS_WIDTH
            said = f"{phase}: {quantities.microseconds(us)}"
            parts.append({"style": style, "x": x, "width": width, "said": said})
            x += width
        lines.append(
            {
                "name": wording.rank_name(diagnosis, rank),
                "is_named": rank in named,
                "y": line * _LINE + 2,
                "bars": parts,
                "end": x,
                "total": quantities.number(float(times[:, line].sum())),
            }
        )
    return part(
        "bars.html",
        caption=f"{m.operation}, microseconds {wording.per(diagnosis, m.operation)}{which}:",
        label=f"time of each rank around {m.operation}",
        phases=_PHASES,
        left=_NAMES_WIDTH,
        width=_NAMES_WIDTH + _BARS_WIDTH + 80,
        height=_LINE * len(lines) + 4,
        lines=lines,
    )
