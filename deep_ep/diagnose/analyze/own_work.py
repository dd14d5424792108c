"""What ranks do by themselves, on their own clocks: how much longer it takes each than the healthy ones.

A rank answers for its own clock. It may enter late because it was held up in the operation before; only time between
its own stamps is its own doing. Operations differ (layers do), ranks should not, so each operation is compared with its
own median rank, and ranks with the healthy half of them: causes only add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..core.diagnosis import FloatArray
from ..core.robust_stats import (
    FAR,
    MAD_TO_SIGMA,
    MEDIAN_COST,
    healthy,
    lower_median,
    median,
    median_of,
    or_zero,
    standard_error,
    student,
)

# Operations and ranks settle against each other within a few sweeps.
_SWEEPS = 2
# Stretches of a window whose medians tell how long noise lasts, of so many operations at least.
_STRETCHES, _MIN_STRETCH = 8, 6
# Only stretches are independent where they differ by so much more than single operations explain.
_LASTS = 1.15
# The correlation of neighbouring stretches that is allowed for.
_MOST_TOGETHER = 0.7
# How far healthy ranks differ for good, as a share of their time; it weighs as much as so many ranks seen.
_HEALTHY_DIFFERENCE, _EXPECTED_WEIGHT = 0.004, 2.0


@dataclass(frozen=True)
class Effect:
    """How far one quantity of each rank lies above that of the healthy ones; `[num_ranks]`.

    Attributes:
        value: ns per operation; NaN where unknown.
        error: its standard error, by the rank's own noise.
        usual_error: that of a rank as noisy as most; whether a rank is late at all is asked with this one.
        above: share of the operations in which it lay above the reference.
        by_tokens: ns, standard error of what was taken out for tokens.
        spread: standard deviation by which healthy ranks differ for good.
        apart: and by which any of them may lie from the reference, for intervals.
        degrees: of freedom of `usual_error`.
        lasts: whether noise lasts several operations.
        excess: [n, num_ranks] ns above the healthy ones in each operation.
    """

    value: FloatArray
    error: FloatArray
    usual_error: float
    above: FloatArray
    by_tokens: FloatArray
    spread: float
    apart: float
    degrees: float
    lasts: bool
    excess: FloatArray

    def reversed(self) -> Effect:
        """How far below instead of above, with the upper ranks for the healthy ones."""
        below = compare(-self.excess, lasts=self.lasts)
        return replace(below, error=np.hypot(below.error, self.by_tokens), by_tokens=self.by_tokens)

    def lasting(self) -> Effect:
        """With errors as of noise that lasts, where another kind of operation shows that it does."""
        if self.lasts:
            return self
        error, usual_error, degrees, _ = _errors(self.excess - self.value, lasts=True)
        error = np.hypot(error, self.by_tokens)
        return replace(self, error=error, usual_error=usual_error, degrees=degrees, lasts=True)


def compare(
    values: FloatArray, taken_out: FloatArray | None = None, *, lasts: bool = False
) -> Effect:
    """`[n, num_ranks]` to one effect per rank.

    Args:
        values: ns of each operation, or one row of means, which have no error.
        taken_out: [num_ranks], signed, what one standard error of what was taken out beforehand makes of them.
        lasts: whether noise is known to last several operations.
    """
    num_ranks = values.shape[1]
    effect = np.zeros(num_ranks)
    for _ in range(_SWEEPS):
        reference = median(values - np.nan_to_num(effect), 1)
        excess = values - reference[:, None]
        effect = median(excess, 0)
    error, usual_error, degrees, lasts = _errors(excess - effect, lasts=lasts)
    expected = _HEALTHY_DIFFERENCE * or_zero(abs(median_of(values)))
    location, spread = healthy(effect, math.hypot(usual_error, expected))
    effect, excess = effect - location, excess - location
    by_tokens = np.zeros(num_ranks)
    if taken_out is not None:
        alike = np.abs(effect) <= FAR * max(usual_error, spread)
        by_tokens = np.nan_to_num(taken_out - or_zero(median_of(taken_out[alike])))
    even = effect / 2 if num_ranks == 2 else 0.0
    above = np.sum(excess > even, axis=0) / np.maximum(np.isfinite(excess).sum(axis=0), 1)
    apart = _apart(effect, usual_error, expected)
    return Effect(
        effect,
        np.hypot(error, by_tokens),
        usual_error,
        above,
        np.abs(by_tokens),
        math.sqrt(max(spread**2 - usual_error**2, 0.0)),
        apart,
        degrees,
        lasts,
        excess,
    )


def _errors(deviation: FloatArray, *, lasts: bool) -> tuple[FloatArray, float, float, bool]:
    """`[num_ranks]`, standard errors of effects; that of a usual rank, its degrees of freedom, and whether noise lasts.

    Noise may last several operations. Then stretches differ by more than single operations explain.

    Args:
        deviation: [n, num_ranks] ns, what is left.
        lasts: whether that is known already.
    """
    length, error = len(deviation) // _STRETCHES, standard_error(deviation, 0)
    series, each = float(deviation.shape[1] - 1), float(len(deviation))
    if length >= _MIN_STRETCH:
        stretches = median(deviation[-length * _STRETCHES :].reshape(_STRETCHES, length, -1), 1)
        of_stretches = np.std(stretches, axis=0, ddof=1) / math.sqrt(_STRETCHES)
        series = _series(stretches)
        lasts |= or_zero(median_of(of_stretches)) > _LASTS * or_zero(median_of(error))
        if lasts:
            # Noise lasts longer than a stretch: the mean is known less well, and so is how well it is known (Bartlett 1946).
            together = _together(stretches)
            of_stretches *= math.sqrt((1 + together) / (1 - together))
            each = _STRETCHES * (1 - together**2) / (1 + together**2)
        error = np.fmax(error, of_stretches)
    # The reference has an error of its own. Two ranks, or two nodes whose ranks move together, deviate both by half of
    # their difference.
    error = error * math.sqrt(1.0 + 1.0 / max(series - 1.0, 1 / 3))
    usual = or_zero(median_of(error))
    return np.fmax(error, usual), usual, max(series * (each - 1), 1.0), lasts


def _together(stretches: FloatArray) -> float:
    """The correlation r of neighbouring stretches, of which `n` in a row say (1 + 3 r) / n too little (Kendall 1954)."""
    count, left = len(stretches), np.nan_to_num(stretches - stretches.mean(axis=0))
    seen = float(np.sum(left[1:] * left[:-1])) / max(float(np.sum(left**2)), 1e-12)
    return min(max((seen + 1 / count) / (1 - 3 / count), 0.0), _MOST_TOGETHER)


def _series(stretches: FloatArray) -> float:
    """How many ranks' noise there is, as far as it is not the same; ranks of a node may go together."""
    num_ranks = stretches.shape[1]
    left = np.nan_to_num(stretches - stretches.mean(axis=0))
    unit = left / np.sqrt(np.maximum((left**2).sum(axis=0), 1e-12))
    # The sum of squared correlations, without what chance makes of them.
    squares = float(np.sum((unit @ unit.T) ** 2)) - num_ranks**2 / (len(stretches) - 1)
    return float(max(num_ranks**2 / max(squares, num_ranks) - 1.0, 1.0))


def _apart(effects: FloatArray, noise: float, expected: float) -> float:
    """How far a rank may lie from the reference for no cause: for good, and by the reference's error."""
    known = effects[np.isfinite(effects)]
    alike = known[np.abs(known) <= FAR * math.hypot(noise, expected)]
    degrees = max(alike.size - 1, 0)
    seen = max(float(np.sum(alike**2)) - degrees * noise**2, 0.0)
    for_good = (_EXPECTED_WEIGHT * expected**2 + seen) / (_EXPECTED_WEIGHT + degrees)
    of_reference = MEDIAN_COST**2 * (for_good + noise**2) / max(alike.size, 1)
    few = student(2.0, _EXPECTED_WEIGHT + degrees) / 2.0
    return few * math.sqrt(for_good + of_reference)


@dataclass(frozen=True)
class ByTokens:
    """What the tokens of each rank explain, `[num_ranks]` ns, and how well that is known.

    Attributes:
        time: above the reference rank, in a usual operation.
        each: [n, num_ranks], in each operation.
        error: of `time`, if the cost of a token is one standard error off; signed as the time.
        is_known: whether the cost of a token is known, because tokens of a rank change, or does not matter, because
            all have as many.
    """

    time: FloatArray
    each: FloatArray
    error: FloatArray
    is_known: bool


def by_tokens(values: FloatArray, usual: FloatArray, each: FloatArray | None) -> ByTokens:
    """What the tokens explain of the time that ranks take.

    Args:
        values: [n, num_ranks] ns.
        usual: [num_ranks], tokens per operation.
        each: [n, num_ranks], tokens of each operation; or None.
    """
    if each is not None and np.isfinite(each).any():
        usual = median(each, 0)
    surplus = np.nan_to_num(usual - lower_median(usual))
    most = float(np.abs(surplus).max(initial=0.0))
    cost, error = _cost_of_a_token(values, each)
    if not math.isfinite(error):
        nothing = np.zeros(surplus.size)
        return ByTokens(nothing, np.broadcast_to(nothing, values.shape), nothing, not most > 0)
    in_each = np.broadcast_to(cost * surplus, values.shape)
    if each is not None:
        more = each - median(each, 1)[:, None]
        in_each = np.where(np.isfinite(more), cost * more, in_each)
    return ByTokens(cost * surplus, in_each, error * surplus, True)


def _cost_of_a_token(values: FloatArray, tokens: FloatArray | None) -> tuple[float, float]:
    """Nanoseconds per token and error, from how each rank's time follows its own tokens.

    Differences between ranks, slow ones included, do not enter here. The error is infinite where tokens do not change.
    """
    if tokens is None or len(values) < 2:
        return 0.0, math.inf
    time = _from_medians(values)
    moved = _from_means(np.where(np.isfinite(time), tokens, np.nan))
    known = np.isfinite(moved)
    moved, time = moved[known], time[known]
    weight = float(np.sum(moved**2))
    # Each operation and each rank has a level of its own.
    to_spare = moved.size - sum(values.shape)
    if not (weight > 0 and to_spare > 0):
        return 0.0, math.inf
    cost = float(np.sum(moved * time)) / weight
    left = time - cost * moved
    # Hiccups are no cost of tokens.
    limit = 3 * MAD_TO_SIGMA * median_of(np.abs(left))
    left = np.clip(left, -limit, limit)
    cost += float(np.sum(moved * left)) / weight
    return max(cost, 0.0), math.sqrt(float(np.sum(left**2)) / to_spare / weight)


def _from_means(tokens: FloatArray) -> FloatArray:
    """Deviations from the means of each operation and each rank, which cancel what is usual for either."""
    for _ in range(_SWEEPS):
        for axis in (0, 1):
            count = np.maximum(np.isfinite(tokens).sum(axis=axis, keepdims=True), 1)
            tokens = tokens - np.nansum(tokens, axis=axis, keepdims=True) / count
    return tokens


def _from_medians(values: FloatArray) -> FloatArray:
    """From the operation's median rank, and from what is usual for the rank."""
    against_peers = values - median(values, 1)[:, None]
    return against_peers - median(against_peers, 0)[None, :]
