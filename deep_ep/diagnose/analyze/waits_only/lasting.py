"""Who stands out of the waiting of several windows, and does so in nearly all of them.

One sum over one window cannot tell a cause from noise; the same sum cut into windows can. All kinds of
operation count together, because a slow path makes its receiver late: waiting swings between dispatch
and combine from window to window, while their sum stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.diagnosis import BoolArray, FloatArray, IntArray
from ...core.robust_stats import MEDIAN_COST, median, median_of, quantile, scale

# A verdict takes so many windows; of more than that the latest are looked at.
LEAST_WINDOWS, MOST_WINDOWS = 5, 10
# Fewer ranks have no majority that tells what is usual.
LEAST_RANKS = 5
# The least effect of interest, per operation and summed over the kinds: a rank that an operating system
# interrupts in every fifth or sixth operation reaches 8 us on generated data, one late by 20 us 21 us.
FLOOR_US = 10.0
# In so many of the windows an effect is there, and so many standard errors from zero.
_MOST_OF_THEM, _ERRORS = 0.9, 6.0
# And above the spread of healthy ranks, and a share of the longest that a usual rank waits beyond what is
# usual for the kind of link.
SPREADS, _OF_LONGEST = 4.0, 0.25
# The share where there is no floor, because operations were not counted.
_WITHOUT_FLOOR = 0.5


@dataclass(frozen=True)
class Side:
    """What every rank makes others wait, or waits itself, above the usual; in the unit of the windows.

    Attributes:
        effect: [n], median over the windows.
        error: [n], its standard error.
        in_windows: [n], number of windows in which it is above the threshold.
        threshold: what it must exceed.
        named: [n], whether it lasts.
    """

    effect: FloatArray
    error: FloatArray
    in_windows: IntArray
    threshold: float
    named: BoolArray


@dataclass(frozen=True)
class Lasting:
    """What lasts over the windows.

    Attributes:
        waited_for: what others wait for each rank.
        waits: what each rank waits for all others.
        by_kind: [2, kinds, k, n], both sides, in that order, in each kind of operation and window.
        shortfall: [n], how much less than usual a rank itself waits, summed over the kinds: as much
            as others wait for it if the time is lost on the rank, nothing if it is lost on a link.
        cells: [n, n], what each path adds to the usual of its receiver, summed over the kinds.
        mutual: what ranks of one node wait for each other as a rule, summed over the kinds; all ranks,
            where no two share a node.
    """

    waited_for: Side
    waits: Side
    by_kind: FloatArray
    shortfall: FloatArray
    cells: FloatArray
    mutual: float

    @property
    def sides(self) -> tuple[Side, Side]:
        """In the order of `by_kind`."""
        return self.waited_for, self.waits

    @property
    def wait_in_all_kinds(self) -> BoolArray:
        """[n], who waits in each of several kinds, not as one that has less to do between two of them."""
        waits = median(self.by_kind[1], 1)
        in_all: BoolArray = (waits >= waits.mean(axis=0) / 2).all(axis=0) & (len(waits) > 1)
        return in_all


def find_lasting(windows: FloatArray, nodes: IntArray, floor: float) -> Lasting:
    """Both sides of every rank.

    Args:
        windows: [kinds, k, n, n], rows wait; NaN where unknown, and on the diagonal.
        nodes: [n], equal where ranks share a node.
        floor: the least effect that counts, summed over the kinds; 0: not known.
    """
    by_row, by_column = (_above_usual(windows, nodes, axis) for axis in (3, 2))
    # Lower medians: of half of the ranks being late nothing is seen, of one less everything.
    columns = _centered(quantile(by_row, 0.5, 2))
    rows = _centered(quantile(by_column, 0.5, 3))
    longest = np.fmax.reduce(windows, axis=3)
    usual = median(longest, 2)
    above = median(np.fmax.reduce(by_row, axis=3), 2)
    near = np.where(nodes[:, None] == nodes, windows, np.nan)
    near = near if np.isfinite(near).any() else windows
    share = _OF_LONGEST if floor else _WITHOUT_FLOOR
    floor = max(floor, share * float(np.nansum(median(above, 1))))
    return Lasting(
        waited_for=_side(columns.sum(axis=0), floor),
        waits=_side(rows.sum(axis=0), floor),
        by_kind=np.stack([columns, rows]),
        shortfall=median((usual[:, :, None] - longest).sum(axis=0), 0),
        cells=median(by_row.sum(axis=0), 0),
        mutual=float(np.nansum(median(median(quantile(near, 0.5, 3), 2), 1))),
    )


def error_of_median(sigma: FloatArray, count: Any) -> FloatArray:
    """Standard error of the median of `count` windows."""
    return np.asarray(MEDIAN_COST * sigma / np.sqrt(np.maximum(count, 1)))


def _above_usual(windows: FloatArray, nodes: IntArray, axis: int) -> FloatArray:
    """Cells less the lower median of their row (axis 3) or column (2), within their class of link."""
    same = nodes[:, None] == nodes[None, :]
    above = np.full(windows.shape, np.nan)
    for of_class in (same, ~same):
        cells = np.where(of_class, windows, np.nan)
        rest = cells - np.expand_dims(quantile(cells, 0.5, axis), axis)
        above = np.where(of_class, rest, above)
    return above


def _centered(of_ranks: FloatArray) -> FloatArray:
    return of_ranks - median(of_ranks, -1)[..., None]


def _side(of_windows: FloatArray, floor: float) -> Side:
    """From what ranks do in each window, [k, n]."""
    count = np.isfinite(of_windows).sum(axis=0)
    effect, sigma = median(of_windows, 0), scale(of_windows, 0)
    sigma = np.fmax(sigma, median_of(sigma))
    error = error_of_median(sigma, count)
    threshold = max(floor, SPREADS * np.nan_to_num(median_of(np.abs(effect))))
    in_windows = (of_windows > threshold).sum(axis=0)
    lasts = (count >= LEAST_WINDOWS) & (in_windows >= _MOST_OF_THEM * count)
    return Side(effect, error, in_windows, threshold, lasts & (effect > _ERRORS * error))
