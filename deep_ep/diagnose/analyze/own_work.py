"""What ranks do by themselves, on their own clocks: how much longer it takes each than the healthy ones.

A rank answers for its own clock. It may enter late because it was held up in the operation before; only time between
its own stamps is its own doing. Operations differ (layers do), ranks should not, so each operation is compared with its
own median rank, and ranks with the healthy half of them: causes only add.

Noise may be common to the ranks of a node, of which there are few, and so known less well than that of ranks beside
their mates. Both are kept apart: a rank that is unlike its mates is late, whatever its node does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..core.diagnosis import FloatArray, IntArray
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
from .partners import members, over_mates

# Operations and ranks settle against each other within a few sweeps.
_SWEEPS = 2
# Stretches of a window whose medians tell how long noise lasts: of ranks, and of nodes, of which there are few; in
# windows of so many operations at least.
_OF_RANKS, _OF_NODES, _MANY = 8, 16, 48
# Only stretches are independent where they differ by so much more than single operations explain.
_LASTS = 1.15
# The correlation of neighbouring stretches that is allowed for.
_MOST_TOGETHER = 0.7
# How far healthy ranks differ for good, as a share of their time; it weighs as much as so many ranks seen.
_HEALTHY_DIFFERENCE, _EXPECTED_WEIGHT = 0.004, 2.0


class Noise(NamedTuple):
    """How well medians over operations are known.

    Attributes:
        error: [ranks or nodes] ns, standard errors, by the noise of each, but at least the usual one.
        usual: ns, that of a rank or node as noisy as most.
        degrees: of freedom of `usual`.
    """

    error: FloatArray
    usual: float
    degrees: float


@dataclass(frozen=True)
class Effect:
    """How far one quantity of each rank lies above that of the healthy ones; `[num_ranks]`.

    Attributes:
        value: ns per operation; NaN where unknown.
        error: its standard error, by the rank's own noise and that of its node.
        own: noise of ranks beside their mates. Whether a rank is late at all is asked with what is usual.
        common: noise of nodes.
        over_mates: ns above the median of the others of its node; 0 where there is none.
        above: share of the operations in which it lay above the reference.
        by_tokens: ns, standard error of what was taken out for tokens.
        spread: standard deviation by which healthy ranks differ for good.
        expected: by how much they are expected to, ns.
        apart: and by which any of them may lie from the reference, for intervals.
        excess: [n, num_ranks] ns above the healthy ones in each operation.
        nodes: of each rank; negative where nobody knows.
    """

    value: FloatArray
    error: FloatArray
    own: Noise
    common: Noise
    over_mates: FloatArray
    above: FloatArray
    by_tokens: FloatArray
    spread: float
    expected: float
    apart: float
    excess: FloatArray
    nodes: IntArray

    @property
    def usual_error(self) -> float:
        """Standard error of a rank as noisy as most, ns."""
        return math.hypot(self.own.usual, self.common.usual)

    def reversed(self) -> Effect:
        """How far below instead of above, with the upper ranks for the healthy ones."""
        below = compare(-self.excess, self.nodes, expected=self.expected)
        return replace(below, error=np.hypot(below.error, self.by_tokens), by_tokens=self.by_tokens)


def compare(
    values: FloatArray,
    nodes: IntArray,
    taken_out: FloatArray | None = None,
    *,
    expected: float | None = None,
) -> Effect:
    """`[n, num_ranks]` to one effect per rank.

    Args:
        values: ns of each operation, or one row of means, which have no error.
        nodes: [num_ranks], of each rank; negative where nobody knows.
        taken_out: [num_ranks], signed, what one standard error of what was taken out beforehand makes of them.
        expected: how far healthy ranks differ for good, ns; `None`: by the level of `values`.
    """
    num_ranks = values.shape[1]
    effect = np.zeros(num_ranks)
    for _ in range(_SWEEPS):
        reference = median(values - np.nan_to_num(effect), 1)
        excess = values - reference[:, None]
        effect = median(excess, 0)
    own, common, error = _noises(excess - effect, nodes)
    usual_error = math.hypot(own.usual, common.usual)
    if expected is None:
        expected = _HEALTHY_DIFFERENCE * or_zero(abs(median_of(values)))
    location, spread = healthy(effect, math.hypot(usual_error, expected))
    effect, excess = effect - location, excess - location
    by_tokens = np.zeros(num_ranks)
    if taken_out is not None:
        alike = np.abs(effect) <= FAR * max(usual_error, spread)
        by_tokens = np.nan_to_num(taken_out - or_zero(median_of(taken_out[alike])))
    even = effect / 2 if num_ranks == 2 else 0.0
    return Effect(
        value=effect,
        error=np.hypot(error, by_tokens),
        own=own,
        common=common,
        over_mates=over_mates(effect, nodes),
        above=np.sum(excess > even, axis=0) / np.maximum(np.isfinite(excess).sum(axis=0), 1),
        by_tokens=np.abs(by_tokens),
        spread=math.sqrt(max(spread**2 - usual_error**2, 0.0)),
        expected=expected,
        apart=_apart(effect, usual_error, expected),
        excess=excess,
        nodes=nodes,
    )


def _noises(deviation: FloatArray, nodes: IntArray) -> tuple[Noise, Noise, FloatArray]:
    """Noise of ranks beside their mates, that of nodes, and `[num_ranks]` ns, the standard errors of both together.

    Args:
        deviation: [n, num_ranks] ns, what is left.
        nodes: [num_ranks], of each rank.
    """
    inside, num_ranks = members(nodes), nodes.size
    if len(inside) < 2 or inside.shape[1] < 2:
        own = _noise(deviation, num_ranks - 1, num_ranks, _OF_RANKS)
        return own, Noise(np.zeros(len(inside)), 0.0, 1.0), own.error
    of_nodes = np.where(inside >= 0, deviation[:, inside], np.nan)
    each = median(of_nodes, 2)
    beside = deviation - each[:, nodes]
    own = _noise(beside, num_ranks - len(inside), inside.shape[1], _OF_RANKS)
    # Of few nodes nobody could tell that it does not last.
    common = _noise(each, len(inside) - 1, len(inside), _OF_NODES, lasts=True)
    return own, common, np.hypot(own.error, common.error[nodes])


def _noise(
    deviation: FloatArray, series: float, peers: int, count: int, *, lasts: bool = False
) -> Noise:
    """Noise may last several operations. Then stretches differ by more than single operations explain.

    Args:
        deviation: [n, ranks or nodes] ns, what is left.
        series: how many of them deviate independently of the others, at most.
        peers: of which the reference is the median.
        count: of stretches.
        lasts: whether it is known already that noise lasts.
    """
    length, error = len(deviation) // count, standard_error(deviation, 0)
    each = float(len(deviation))
    if len(deviation) >= _MANY:
        stretches = median(deviation[-length * count :].reshape(count, length, -1), 1)
        of_stretches = np.std(stretches, axis=0, ddof=1) / math.sqrt(count)
        lasts |= or_zero(median_of(of_stretches)) > _LASTS * or_zero(median_of(error))
        if lasts:
            # Noise lasts longer than a stretch: the mean is known less well, and so is how well it is known (Bartlett 1946).
            together = _together(stretches)
            of_stretches *= math.sqrt((1 + together) / (1 - together))
            each = count * (1 - together**2) / (1 + together**2)
        error = np.fmax(error, of_stretches)
    # The reference has an error of its own. Two deviate both by half of their difference.
    error = error * math.sqrt(1.0 + 1.0 / max(min(series, peers - 1) - 1.0, 1 / 3))
    usual = or_zero(median_of(error))
    return Noise(np.fmax(error, usual), usual, max(series * (each - 1), 1.0))


def _together(stretches: FloatArray) -> float:
    """The correlation r of neighbouring stretches, of which `n` in a row say (1 + 3 r) / n too little (Kendall 1954)."""
    count, left = len(stretches), np.nan_to_num(stretches - stretches.mean(axis=0))
    seen = float(np.sum(left[1:] * left[:-1])) / max(float(np.sum(left**2)), 1e-12)
    return min(max((seen + 1 / count) / (1 - 3 / count), 0.0), _MOST_TOGETHER)


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
        return ByTokens(nothing, np.broadcast_to(nothing, values.shape), nothing, most < 1)
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
