"""What programs get and what wires did, as the rows of a table: on a terminal and on a page."""

from __future__ import annotations

import math

import numpy as np

from ..core.diagnosis import Diagnosis, FloatArray
from ..core.robust_stats import lowest, median_of

TITLE = "bandwidth in GB/s; tokens that stay on their rank do not count"
COLUMNS = (
    [""],
    ["program gets", "median, lowest"],
    ["paths", "median"],
    ["slowest", "paths"],
    ["slowest", "NIC in"],
    ["slowest", "NIC out"],
)
# Of the ends of a list so many are named.
_NAMED = 3


def rows(diagnosis: Diagnosis, *, with_paths: bool = True) -> list[list[list[str]]]:
    """A row for each operation whose bandwidth is known; a cell is a list of lines."""
    found = []
    for name, m in diagnosis.measured.items():
        if m.bandwidth is None:
            continue
        between = np.array(m.bandwidth.edge)
        np.fill_diagonal(between, np.nan)
        slowest_paths = [
            f"{_rate(rate)} {path % len(between)} > {path // len(between)}"
            for path, rate in lowest(between.reshape(-1), _NAMED * with_paths)
        ]
        effective = m.bandwidth.effective
        found.append(
            [
                [name],
                [_rate(median_of(effective)), *_slowest(effective, 1)],
                [_rate(median_of(between))],
                slowest_paths or ["not known"],
                _slowest(m.bandwidth.ingress, _NAMED) or ["not known"],
                _slowest(m.bandwidth.egress, _NAMED) or ["not known"],
            ]
        )
    return found


def _slowest(rates: FloatArray, most: int) -> list[str]:
    return [f"{_rate(rate)} rank {rank}" for rank, rate in lowest(rates, most)]


def _rate(gb_per_s: float) -> str:
    """Three digits: 0.0412, 4.12, 41.2, 412."""
    if not math.isfinite(gb_per_s):
        return "not known"
    if gb_per_s >= 100 or gb_per_s <= 0:
        return f"{gb_per_s:,.0f}"
    return f"{gb_per_s:.{2 - math.floor(math.log10(gb_per_s))}f}"
