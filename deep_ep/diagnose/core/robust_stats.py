"""Robust statistics for diagnosis: medians, spreads and tests that slow ranks and missing values do not upset.

The analysers compare ranks and paths of which some may be slow, and some may have no value. So a typical value is a
median and a spread comes from the median absolute deviation; both hold while less than half of the values are
outliers. NaN means "not known" and counts nowhere. `healthy` finds location and spread of the members of a group
that are not slow; `z_for`, `certainty` and `student` say how large a deviation must be, in standard errors, to be no
chance among many tests.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np

from .diagnosis import FloatArray, IntArray

# Median absolute deviation to standard deviation, and the cost of a median over a mean (normal).
MAD_TO_SIGMA = 1.4826
MEDIAN_COST = 1.2533
# So many standard deviations away from healthy members, or from what a clock may be, is no chance.
FAR = 4.0


def median(values: FloatArray, axis: int) -> FloatArray:
    """`numpy.nanmedian`, silent and fast: NaN where nothing is known."""
    ordered, count = _in_order(values, axis)
    return _mean_at(ordered, count, (count - 1) // 2, count // 2)


def quantile(values: FloatArray, share: float, axis: int) -> FloatArray:
    """The value below which `share` of the known values lie; NaN where nothing is known."""
    ordered, count = _in_order(values, axis)
    return _mean_at(ordered, count, np.floor(share * (count - 1)).astype(np.intp))


def _in_order(values: FloatArray, axis: int) -> tuple[FloatArray, IntArray]:
    """The axis last, what is unknown at its end; and how much of each row is known."""
    rows = np.moveaxis(values, axis, -1)
    known = np.isfinite(rows)
    # Sorting NaN, or rows that do not lie together, takes numpy several times as long.
    ordered = np.ascontiguousarray(np.where(known, rows, np.inf))
    ordered.sort(axis=-1)
    return ordered, known.sum(axis=-1)


def _mean_at(ordered: FloatArray, count: IntArray, *places: IntArray) -> FloatArray:
    """Of each row, the mean of what stands at one or two places; NaN where nothing is known."""
    most = count.max(initial=0)
    if not most:
        return np.full(count.shape, np.nan)
    if count.min() == most:
        found = [ordered[..., of_rows.flat[0]] for of_rows in places]
        return np.asarray(found[0] + found[-1]) / 2
    first = np.arange(count.size).reshape(count.shape) * ordered.shape[-1]
    # What is not known stands at no place, and is infinite at the first one.
    found = [ordered.reshape(-1)[first + np.maximum(of_rows, 0)] for of_rows in places]
    return np.where(count > 0, (found[0] + found[-1]) / 2, np.nan)


def median_of(values: FloatArray) -> float:
    """Median of all known values; NaN if none is."""
    known = values[np.isfinite(values)]
    return _median_of_all(np.partition(known, known.size // 2)) if known.size else float("nan")


def _median_of_all(ordered: FloatArray) -> float:
    """Of known values in order, or parted in the middle."""
    middle = ordered.size // 2
    at = float(ordered[middle])
    return at if ordered.size % 2 else (at + float(ordered[:middle].max())) / 2


def lowest(values: FloatArray, most: int) -> list[tuple[int, float]]:
    """(index, value) of the lowest known values, ascending; of equal ones the first."""
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")][:most]
    return [(int(i), float(values[i])) for i in order]


def lower_median(values: FloatArray) -> float:
    """The lower of the two middle values; holds when half of the ranks are slow. NaN if empty."""
    return quantile_of(values, 0.5)


def weighted_median(values: FloatArray, weights: FloatArray) -> float:
    """The known value below which half of the weight lies, or the middle of two; 0 if none is known."""
    known = np.isfinite(values)
    order = np.argsort(values[known])
    ordered, below = values[known][order], np.cumsum(weights[known][order])
    if not ordered.size:
        return 0.0
    at = np.searchsorted(below, below[-1] / 2)
    next_one = np.searchsorted(below, below[-1] / 2, side="right")
    return float(ordered[at] + ordered[min(next_one, ordered.size - 1)]) / 2


def typical_slope(step: FloatArray, rise: FloatArray, least: float) -> float:
    """Median of what each step rises by, in which long ones count for more; 0 where none is longer than `least`."""
    known = np.isfinite(rise) & (np.abs(step) > least)
    return weighted_median(rise[known] / step[known], np.abs(step[known]))


def or_zero(value: float) -> float:
    """The value if it is known, else 0."""
    return value if math.isfinite(value) else 0.0


def quantile_of(values: FloatArray, share: float) -> float:
    """The value below which `share` of all known values lie; NaN if none is."""
    known = values[np.isfinite(values)]
    if not known.size:
        return float("nan")
    place = int(share * (known.size - 1))
    return float(np.partition(known, place)[place])


def scale(values: FloatArray, axis: int) -> FloatArray:
    """Standard deviation of normal data, from the median absolute deviation."""
    center = np.expand_dims(median(values, axis), axis)
    return MAD_TO_SIGMA * median(np.abs(values - center), axis)


def standard_error(values: FloatArray, axis: int) -> FloatArray:
    """Standard error of the median along an axis."""
    count = np.maximum(np.sum(np.isfinite(values), axis=axis), 1)
    return np.asarray(MEDIAN_COST * scale(values, axis) / np.sqrt(count))


def healthy(values: FloatArray, noise: float = 0.0) -> tuple[float, float]:
    """Location and standard deviation of the healthy members of a group, from their values.

    Slow members lie above and are at most half. Where the noise of a value is known, the lower half
    is taken for healthy, and whoever lies within reach of it, until nobody joins. Otherwise, among
    the upper half, the widest gap between neighbours is taken for the border; where nobody is slow
    it falls near the top and costs nothing.

    Args:
        values: one per member, NaN where unknown.
        noise: standard deviation of a value by itself; 0 if unknown.

    Returns:
        (median, spread); NaN and 0 when no value is known.
    """
    ordered = np.sort(values[np.isfinite(values)])
    if ordered.size == 0:
        return float("nan"), 0.0
    at_least = (ordered.size + 1) // 2
    if noise > 0:
        size = at_least
        while True:
            location, spread = _location_and_spread(ordered[:size])
            reach = location + FAR * max(spread, noise)
            grown = max(int(np.searchsorted(ordered, reach, side="right")), size)
            if grown == size:
                return location, spread
            size = grown
    gaps = np.diff(ordered)[at_least - 1 :]
    return _location_and_spread(
        ordered[: at_least + int(np.argmax(gaps))] if gaps.size else ordered
    )


def _location_and_spread(ordered: FloatArray) -> tuple[float, float]:
    location = _median_of_all(ordered)
    return location, MAD_TO_SIGMA * median_of(np.abs(ordered - location))


@functools.lru_cache
def z_for(num_tests: int, false_alarms: float) -> float:
    """Standard errors that a healthy group exceeds in one of `num_tests` tests this rarely."""
    return NormalDist().inv_cdf(1.0 - false_alarms / max(num_tests, 1))


def certainty(effect: float, error: float, num_tests: int) -> float:
    """1 - probability of such an effect in any of `num_tests` by chance (normal, Bonferroni)."""
    if not error > 0:
        return 1.0 if error == 0 else float("nan")
    by_chance = num_tests * NormalDist().cdf(-effect / error)
    return max(0.0, 1.0 - by_chance)


@functools.lru_cache
def student(z: float, degrees: float) -> float:
    """So many estimated standard deviations are as rare as `z` known ones; Student's t.

    Args:
        z: standard deviations.
        degrees: of freedom with which the standard deviation was estimated, at least 1.
    """
    # Inverts the well-known normal approximation of the t distribution, which is good far out.
    shrink = (8.0 * degrees + 1.0) / (8.0 * degrees + 3.0)
    return math.sqrt(degrees * math.expm1((z / shrink) ** 2 / degrees))
