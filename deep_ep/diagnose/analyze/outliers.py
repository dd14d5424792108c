"""Single operations that stood out: a hiccup of one rank for which the others waited once."""

from __future__ import annotations

import numpy as np

from ..core.diagnosis import Outlier
from ..core.robust_stats import median, median_of, scale
from .estimates import Estimates

# So many standard deviations of a rank's own work are no everyday noise (spec: 20).
_SPREADS = 20.0
_MOST = 5


def outliers(e: Estimates, floor_ns: float) -> list[Outlier]:
    """The largest hiccups: the rank's own clock shows it, and most others waited for it.

    Args:
        e: one operation kind.
        floor_ns: smaller ones are of no interest.
    """
    m = e.m
    work = m.gap + m.span
    deviation = work - median(work, 1)[:, None]
    deviation = deviation - median(deviation, 0)[None, :]
    bar = max(_SPREADS * median_of(scale(deviation, 0)), floor_ns)
    found = []
    for at, rank in np.argwhere(deviation > bar).tolist():
        others = m.present & (np.arange(m.num_ranks) != rank)
        waited = (m.last[at, :, 0] == rank) & others
        if waited.sum() * 2 <= others.sum():
            continue
        first, second = m.last_arrival[at, waited, 0], m.last_arrival[at, waited, 1]
        lead = median_of(first - np.maximum(np.nan_to_num(second), 0.0))
        if lead > floor_ns:
            found.append(Outlier(e.operation, int(m.ops[at]), rank, lead / 1e3))
    return sorted(found, key=lambda outlier: -outlier.effect_us)[:_MOST]
