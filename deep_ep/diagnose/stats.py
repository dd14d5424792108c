"""Robust statistics that know of missing values: NaN is "not known" and never counts."""

from __future__ import annotations

import functools
from statistics import NormalDist

import numpy as np

from deep_ep.diagnose.findings import FloatArray, IntArray

# Median absolute deviation to standard deviation, and the cost of a median over a mean (normal).
MAD_TO_SIGMA = 1.4826
MEDIAN_COST = 1.2533
# Where Huber's location changes from mean to median, in standard deviations (the usual choice), and
# steps until it has settled.
_HUBER = 1.345
_HUBER_STEPS = 3
# So many standard deviations above the healthy ones known so far still count as healthy.
_REACH = 4.0


def median(values: FloatArray, axis: int) -> FloatArray:
    """`numpy.nanmedian`, silent and fast: NaN where nothing is known."""
    count = np.sum(np.isfinite(values), axis=axis, keepdims=True)
    return ordered_mean(values, axis, (count - 1) // 2, count // 2)


def quantile(values: FloatArray, share: float, axis: int) -> FloatArray:
    """The value below which `share` of the known values lie; NaN where nothing is known."""
    count = np.sum(np.isfinite(values), axis=axis, keepdims=True)
    at = np.floor(share * (count - 1)).astype(np.intp)
    return ordered_mean(values, axis, at, at)


def ordered_mean(values: FloatArray, axis: int, low: IntArray, high: IntArray) -> FloatArray:
    """Mean of the values at two places of their order along an axis, which goes; NaN sorts last.

    Args:
        values: NaN where unknown.
        axis: the one that goes.
        low, high: places, as an array of which that axis has length 1.
    """
    size = values.shape[axis]
    if size == 0 or low.size == 0:
        return np.full(np.delete(values.shape, axis), np.nan)
    first, second = int(low.flat[0]), int(high.flat[0])
    if (low == first).all() and (high == second).all():
        # The usual case, as much known everywhere: no need to sort.
        places = [min(max(place, 0), size - 1) for place in (first, second)]
        ordered = np.partition(values, sorted(set(places)), axis=axis)
        return np.asarray((ordered.take(places[0], axis) + ordered.take(places[1], axis)) / 2)
    ordered = np.sort(values, axis=axis)
    low, high = np.clip(low, 0, size - 1), np.clip(high, 0, size - 1)
    taken = np.take_along_axis(ordered, low, axis) + np.take_along_axis(ordered, high, axis)
    return np.asarray(np.squeeze(taken, axis=axis) / 2)


def median_of(values: FloatArray) -> float:
    """Median of all known values; NaN if none is."""
    known = values[np.isfinite(values)]
    if not known.size:
        return float("nan")
    middle = known.size // 2
    ordered = np.partition(known, (max(middle - 1, 0), middle))
    return float(ordered[middle] if known.size % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def lower_median(values: FloatArray) -> float:
    """The lower of the two middle values; holds when half of the ranks are slow. NaN if empty."""
    known = values[np.isfinite(values)]
    if not known.size:
        return float("nan")
    middle = (known.size - 1) // 2
    return float(np.partition(known, middle)[middle])


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


def huber(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Huber's location of each column and its standard error; NaN where nothing is known.

    A median needs half as many operations again for the same error.
    """
    location, width = median(values, 0), scale(values, 0)
    reach = _HUBER * width
    for _ in range(_HUBER_STEPS):
        deviation = np.clip(values - location, -reach, reach)
        inside = np.maximum(np.sum(np.abs(deviation) < reach, axis=0), 1)
        location = location + np.nansum(deviation, axis=0) / inside
    return location, np.sqrt(np.nansum(deviation**2, axis=0)) / inside


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
            reach = location + _REACH * max(spread, noise)
            grown = max(int(np.searchsorted(ordered, reach, side="right")), size)
            if grown == size:
                return location, spread
            size = grown
    gaps = np.diff(ordered)[at_least - 1 :]
    return _location_and_spread(
        ordered[: at_least + int(np.argmax(gaps))] if gaps.size else ordered
    )


def _location_and_spread(members: FloatArray) -> tuple[float, float]:
    location = float(np.median(members))
    return location, MAD_TO_SIGMA * float(np.median(np.abs(members - location)))


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
