"""Recent operations as one rank saw them: who entered when, whose data came when, and who came last."""

from __future__ import annotations

import math

import numpy as np
from markupsafe import Markup

from ..core import quantities
from ..core.diagnosis import Diagnosis, FloatArray, Measured
from ..core.robust_stats import quantile_of
from ..render import wording
from .page import part

_WIDTH, _SIDE, _TOP, _LINE = 900, 76, 24, 18


def timeline(diagnosis: Diagnosis, m: Measured) -> Markup:
    """A line for each operation; zero is when the observer began to wait. Nothing where none were kept."""
    recent = m.timeline
    if recent is None or not len(recent.ops):
        return Markup()
    operations = range(len(recent.ops))
    entered, arrived = (x[operations, recent.last] for x in (recent.entered_us, recent.arrival_us))
    # Left of zero: entered before the observer began to wait. The waiting gets at least half of the width.
    end = 1.1 * max(1.0, float(np.nan_to_num(quantile_of(arrived, 0.9))))
    begin = max(float(np.min(recent.entered_us, initial=0.0, where=recent.entered_us < 0)), -end)

    def place(us: FloatArray) -> FloatArray:
        return _SIDE + (np.clip(us, begin, end) - begin) / (end - begin) * (_WIDTH - 2 * _SIDE)

    def marks(us: FloatArray, up: int, mark: str) -> str:
        """One path of marks where the times are known."""
        known = np.argwhere(np.isfinite(us)).tolist()
        x = place(us)
        return "".join(f"M{x[row, rank]:.1f} {_middle(row) - up}{mark}" for row, rank in known)

    lines = [
        {
            "operation": int(recent.ops[row]),
            "last": f"rank {recent.last[row]}",
            "said": f"{m.operation} {recent.ops[row]}: {wording.rank_name(diagnosis, int(recent.last[row]))} came last; "
            f"data there {_when(arrived[row])}, entered {_when(entered[row])}",
            "y": _middle(row),
            "entered": float(place(entered)[row]),
            "arrived": float(place(arrived)[row]),
        }
        for row in operations
        if math.isfinite(arrived[row])
    ]
    step = _step(end - begin)
    ticks = np.arange(math.ceil(begin / step), end / step) * step
    return part(
        "timeline.html",
        caption=f"{m.operation}: recent operations as {wording.rank_name(diagnosis, recent.observer)} saw them; "
        "zero is when it began to wait. Ticks: entered. Dots: data there. Large dot: came last. At an edge: beyond it.",
        width=_WIDTH,
        height=_TOP + _LINE * len(operations),
        side=_SIDE,
        ticks=[{"x": float(x), "us": f"{us:,g}"} for x, us in zip(place(ticks), ticks)],
        entered=marks(recent.entered_us, 5, "v10"),
        arrived=marks(recent.arrival_us, 0, "h0"),
        lines=lines,
    )


def _middle(row: int) -> int:
    return _TOP + row * _LINE + _LINE // 2


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten: so far are at most ten ticks apart."""
    power = 10.0 ** math.floor(math.log10(span / 10))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= span / 10)


def _when(us: float) -> str:
    if not math.isfinite(us):
        return "at a time not known"
    return f"{quantities.microseconds(abs(us))} {'before' if us < 0 else 'after'} the wait began"
