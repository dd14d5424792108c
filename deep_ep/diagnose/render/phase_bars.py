"""Where the time of each rank goes, as stacked bars: before the operation, sending, waiting, after the last arrival."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import quantities
from ..core.diagnosis import Diagnosis, FloatArray, Measured
from ..render import wording
from .page_parts import Element, add

# Of a phase: its name, and its class in html.css.
_PHASES = (
    ("before it (gap)", "gap"),
    ("sending", "send"),
    ("waiting", "wait"),
    ("after the last arrival", "drain"),
)
_NAMES_WIDTH, _BARS_WIDTH, _LINE = 170, 560, 20


def of_measured(m: Measured) -> dict[str, FloatArray]:
    """[num_ranks] microseconds by phase, in the order in which they pass."""
    values = (m.gap_us, m.send_us, m.own_wait_us, m.drain_us)
    return {name: each for (name, _), each in zip(_PHASES, values)}


def add_bars(parent: Element, diagnosis: Diagnosis, m: Measured, ranks: Sequence[int]) -> None:
    """Adds a bar for each of these ranks; those that a verdict names are marked."""
    times = np.nan_to_num(np.stack(list(of_measured(m).values()))[:, list(ranks)])
    longest = float(times.sum(axis=0).max(initial=0.0))
    if longest <= 0:
        return
    named = {verdict.rank for verdict in diagnosis.verdicts}
    figure = add(parent, "figure")
    caption = add(
        figure, "figcaption", f"{m.operation}, microseconds {wording.per(diagnosis, m.operation)}: "
    )
    for name, style in _PHASES:
        add(caption, "span", name, **{"class": f"key {style}"})
    svg = add(
        figure,
        "svg",
        viewBox=f"0 0 {_NAMES_WIDTH + _BARS_WIDTH + 80} {_LINE * len(ranks) + 4}",
        role="img",
        **{"class": "phases", "aria-label": f"time of each rank around {m.operation}"},
    )
    for line, rank in enumerate(ranks):
        y = str(line * _LINE + 2)
        base = str(line * _LINE + 15)
        name = wording.rank_name(diagnosis, rank)
        style = "named" if rank in named else "name"
        add(svg, "text", name, x=str(_NAMES_WIDTH - 8), y=base, **{"class": style})
        x = float(_NAMES_WIDTH)
        for (phase, color), us in zip(_PHASES, times[:, line].tolist()):
            width = max(us, 0.0) / longest * _BARS_WIDTH
            bar = add(svg, "rect", x=f"{x:.1f}", y=y, width=f"{width:.1f}", height="16")
            bar.set("class", color)
            add(bar, "title", f"{name}, {phase}: {quantities.microseconds(us)}")
            x += width
        total = quantities.number(float(times[:, line].sum()))
        add(svg, "text", total, x=f"{x + 6:.1f}", y=base, **{"class": "total"})
