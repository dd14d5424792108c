"""Robust statistics that know of missing values: NaN is "not known" and never counts."""

from __future__ import annotations

import functools
import math
import operator
from statistics import NormalDist

import numpy as np

from .diagnosis import FloatArray, IntArray

# Median absolute deviation to standard deviation, and the cost of a median over a mean (normal).
MAD_TO_SIGMA = 1.4826
MEDIAN_COST = 1.2533
# Where Huber's location changes from mean to median, in standard deviations (the usual choice), and
# steps until it has settled.
_HUBER = 1.345
_HUBER_STEPS = 3
# So many standard deviations above the healthy ones known so far still count as healthy.
_REACH = 4.0
# Deviations beyond so many standard deviations are cut to that before they are correlated.
_CUT = 3.0
# Lags that tell how noise forgets itself, and steps until what demeaning hides is put back.
_LAGS = 4
_INFLATION_STEPS, _SETTLED = 12, 1e-3
# Noise that forgets itself more slowly than this cannot be told from a lasting difference.
_SLOWEST = 0.98
# A correlation is believed from so many standard errors on; one rank's own, against all others', later.
_BELIEVED, _BELIEVED_ALONE = 3.0, 4.0
# And then taken to last longer, by so many standard errors.
_UNSURE = 1.0
# Noise lasts where means vary by so much more; few independent values, or one series, tell how noisy, of
# which effects must exceed so many standard deviations.
_LASTS, _FEW_SERIES, _LEAST_VALUES, _TESTED = 1.5, 1.5, 10.0, 5.0


def median(values: FloatArray, axis: int) -> FloatArray:
    """`numpy.nanmedian`, silent and fast: NaN where nothing is known."""
    rows, count = _rows(values, axis)
    if rows.size == 0:
        return np.full(count.shape, np.nan)
    size, least, most = rows.shape[-1], int(count.min()), int(count.max())
    if least == most:
        at, below = _at(rows, most // 2)
        return at if most % 2 else (at + below) / 2
    # What is unknown is put on both sides in turn, so that all middles are at the same places.
    unknown = ~np.isfinite(rows)
    above = np.cumsum(unknown, axis=-1, dtype=np.uint8) % 2 == 1
    at, below = _at(np.where(unknown, np.where(above, np.inf, -np.inf), rows), size // 2)
    with np.errstate(invalid="ignore"):
        middle = np.where(count % 2 == 0, (at + below) / 2, at if size % 2 else below)
    return np.where(count > 0, middle, np.nan)


def quantile(values: FloatArray, share: float, axis: int) -> FloatArray:
    """The value below which `share` of the known values lie; NaN where nothing is known."""
    rows, count = _rows(values, axis)
    if rows.size == 0:
        return np.full(count.shape, np.nan)
    least, most = int(count.min()), int(count.max())
    if least == most:
        return _at(rows, int(share * (most - 1)))[0]
    places = np.maximum(np.floor(share * (count - 1)), 0.0).astype(np.intp)
    return np.take_along_axis(np.sort(rows, axis=-1), places[..., None], -1)[..., 0]


def _rows(values: FloatArray, axis: int) -> tuple[FloatArray, IntArray]:
    """The axis last, each row in one piece of memory; and how much of each is known."""
    rows = np.ascontiguousarray(np.moveaxis(values, axis, -1))
    return rows, np.isfinite(rows).sum(axis=-1)


def _at(rows: FloatArray, place: int) -> tuple[FloatArray, FloatArray]:
    """Values at a place of the order of each row, and one before; NaN is last."""
    place = max(place, 0)
    # Asking for both places at once takes numpy five times as long.
    ordered = np.partition(rows, place, axis=-1)
    return ordered[..., place], np.maximum.reduce(ordered[..., :place], axis=-1, initial=-np.inf)


def median_of(values: FloatArray) -> float:
    """Median of all known values; NaN if none is."""
    known = values[np.isfinite(values)]
    return _median_of_all(np.partition(known, known.size // 2)) if known.size else float("nan")


def _median_of_all(ordered: FloatArray) -> float:
    """Of known values in order, or parted in the middle."""
    middle = ordered.size // 2
    at = float(ordered[middle])
    return at if ordered.size % 2 else (at + float(ordered[:middle].max())) / 2


def lower_median(values: FloatArray) -> float:
    """The lower of the two middle values; holds when half of the ranks are slow. NaN if empty."""
    return quantile_of(values, 0.5)


def or_zero(value: float) -> float:
    """The value if it is known, else 0."""
    return value if math.isfinite(value) else 0.0


def quantile_of(values: FloatArray, share: float) -> float:
    """The value below which `share` of all known values lie; NaN if none is."""
    known = values[np.isfinite(values)]
    if not known.size:
        return float("nan")
    return float(_at(known, int(share * (known.size - 1)))[0])


def scale(values: FloatArray, axis: int) -> FloatArray:
    """Standard deviation of normal data, from the median absolute deviation."""
    center = np.expand_dims(median(values, axis), axis)
    return MAD_TO_SIGMA * median(np.abs(values - center), axis)


def huber(values: FloatArray, start: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Huber's location of each column and its standard error; NaN where nothing is known.

    A median needs half as many operations again for the same error.

    Args:
        values: NaN where unknown.
        start: their medians.
    """
    location = start
    reach = _HUBER * MAD_TO_SIGMA * median(np.abs(values - start), 0)
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


def inflation(values: FloatArray, spread: FloatArray) -> tuple[FloatArray, float]:
    """By what the variance of each column's mean exceeds that of independent values; and how many
    columns move by themselves.

    Noise that lasts several operations leaves fewer independent ones. The autocorrelation is taken
    for a part that fades geometrically beside one that does not last; columns share it, unless
    one shows its own. What the mean of each column takes out of it is put back.

    Args:
        values: [n, columns] deviations from each column's location, NaN where unknown.
        spread: [columns], their standard deviations.

    Returns:
        `[columns]`, at least 1; and a number from 1 to that of the columns.
    """
    size, columns = values.shape
    if size < 2 * _LAGS or columns < 2:
        return np.ones(columns), float(columns)
    cut = values / np.where(spread > 0, spread, 1.0)
    cut = np.where(np.isfinite(cut), np.minimum(np.maximum(cut, -_CUT), _CUT), 0.0)
    squares = np.einsum("ij,ij->j", cut, cut)
    # A lag has fewer pairs than there are values.
    products = np.stack(
        [
            np.einsum("ij,ij->j", cut[lag:], cut[:-lag]) * (size / (size - lag))
            for lag in range(1, _LAGS + 1)
        ]
    )
    unit = cut / np.sqrt(np.maximum(squares, 1e-12))
    # Sum of the squares of all correlations between columns; the smaller product has the same.
    product = unit.T @ unit if columns < size else unit @ unit.T
    # By chance, and because they are compared with each other.
    expected = columns**2 / size + columns / (columns - 1)
    series = columns**2 / max(float(np.vdot(product, product)) - expected, float(columns))
    # Two are each other's mirror image.
    series = 1.0 if columns == 2 else series
    each = products / np.maximum(squares, 1e-12)
    # What a few columns show is theirs alone.
    together = np.median(each, axis=1)
    alone = each[0] > together[0] + _BELIEVED_ALONE / math.sqrt(size)
    factors = np.full(columns, _inflation(together, size, series))
    for column in np.flatnonzero(alone).tolist():
        factors[column] = max(factors[column], _inflation(each[:, column], size, 1.0))
    return factors, series


def _inflation(correlations: FloatArray, size: int, series: float) -> float:
    """Of one autocorrelation at the first lags, found around the means of `series` times `size` values."""
    noise = MEDIAN_COST / math.sqrt(size * series)
    believed = _BELIEVED * noise * math.sqrt(_LAGS - 1)
    lost, factor = 0.0, 1.0
    for _ in range(_INFLATION_STEPS):
        # The mean takes its own variance out of every product.
        found = [c * (1.0 - lost) + lost for c in correlations.tolist()]
        if sum(found[:-1]) < believed:
            factor = 1.0 + 2.0 * max(found[0], 0.0)
        else:
            memory = min(max(sum(found[1:]) / sum(found[:-1]), 0.0), _SLOWEST)
            # It may well be longer, which matters more than that it may be shorter.
            memory = min(memory + _UNSURE * noise * math.sqrt(1.0 - memory**2), _SLOWEST)
            # How much of the variance lasts at all.
            powers = [memory**lag for lag in range(1, _LAGS + 1)]
            lasting = sum(map(operator.mul, found, powers)) / sum(p**2 for p in powers) + noise
            factor = 1.0 + 2.0 * min(max(lasting, 0.0), 1.0) * _remembered(memory, size)
        before, lost = lost, min(factor / size, 0.9)
        if abs(lost - before) < _SETTLED:
            break
    factor /= 1.0 - lost
    if factor < _LASTS and series > _FEW_SERIES:
        return factor
    # How noisy the series are is known from so few independent values that it may well be more.
    values = max(size * series / factor, _LEAST_VALUES)
    return factor * (student(_TESTED, values) / _TESTED) ** 2


def _remembered(memory: float, size: int) -> float:
    """Sum of `(1 - k / size) * memory**k` over k from 1 on, which is below `size`."""
    left = 1.0 - memory
    return memory / left - memory * (1.0 - memory**size) / (size * left**2)
