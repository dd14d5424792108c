"""How far each clock is from what was measured, as all paths of all ranks tell together.

A clock that is ahead by c makes the paths into its rank c slower and those out of it c faster. So every path of a
rank, there or back, in dispatch or in combine, is a reading of its clock, and the median of the readings is its clock,
whatever single paths add. A side that is slow adds to half of the readings: the clock may then be anything in
between, and is taken to be the one nearer to what was measured. Causes compete for that later (path_causes).

A node whose link is slow takes the clocks of all its ranks along, so nodes are set like ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..collect.group_matrices import Place
from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import FAR, MAD_TO_SIGMA, median, median_of, or_zero, quantile_of
from .partners import members, some_ranks

# Slow paths leave these quantiles of what two directions take together alone; standard deviations between them.
_HEALTHY = 0.1, 0.3
_SIGMAS = 0.757
# So many of the pairs of a kind of link, or as many as there are ranks, tell what is usual there.
_ENOUGH_PAIRS = 0.5
# Readings of links that vary less count for more, down to this standard deviation, ns.
_LEAST_SIGMA_NS = 500.0
# The middle of the readings, which has both ends of a slow side that is as well known as the other side.
_MIDDLE = 0.49, 0.51
# A fit of so many readings for each clock leaves over what they differ by.
_TO_SPARE = 8
# After so many sweeps nothing moves.
_MOST_SWEEPS = 8
# Stated errors of offsets are limits, of about two standard deviations; clocks that were stepped are off by
# far more, so the tails are those of Student's t with so many degrees of freedom.
_STATED, _DEGREES = 2.0, 10.0
# Offsets that are as good as this are where the fit begins, ns.
_GOOD_NS = 10_000.0


@dataclass(frozen=True)
class Prior:
    """What was measured of clocks: `sigma` [num_ranks] ns, standard deviation; infinite where nothing was."""

    sigma: FloatArray

    def penalty(self, clock: FloatArray) -> FloatArray:
        """Loss, in nats, of clocks that are so far from what was measured."""
        deviations = np.where(clock == 0, 0.0, clock / self.sigma)
        return np.asarray(np.log1p(deviations**2 / _DEGREES) * (_DEGREES + 1) / 2)

    def drawn(self, clock: FloatArray, sigma: float) -> FloatArray:
        """Clocks between what was measured and what paths tell with an error of `sigma`."""
        variance = self.sigma**2 + clock**2 / _DEGREES
        return clock / (1.0 + sigma**2 / variance)


def prior_of(stated: FloatArray) -> Prior:
    """From `[kinds, receiver, source]` ns, how far offsets may be wrong; NaN where nobody knows."""
    per_rank = median(np.concatenate(list(stated[:, :, some_ranks(stated.shape[1])]), axis=1), 1)
    return Prior(np.where(np.isfinite(per_rank), np.maximum(per_rank, 1.0) / _STATED, np.inf))


@dataclass(frozen=True)
class _Readings:
    """By how much the clock of a rank is ahead of another one's.

    Attributes:
        others: [others], the ranks that all are compared with.
        ahead: [rank, kind and direction, other] ns, infinite where not known, which sorts faster than NaN.
        weight: likewise, 0 where not known.
        sigma: least standard deviation between those of healthy paths of any kind, ns.
    """

    others: IntArray
    ahead: FloatArray
    weight: FloatArray
    sigma: float

    def left(self, clock: FloatArray) -> FloatArray:
        """What clocks do not explain."""
        return np.asarray(self.ahead - clock[:, None, None] + clock[self.others])


def joint_clocks(
    times: FloatArray, classes: IntArray, place: Place, most: FloatArray, prior: Prior
) -> tuple[FloatArray, float]:
    """`[num_ranks]` ns: by how much each clock is ahead of what was measured, about the median of all.

    Args:
        times: [kinds, receiver, source] ns by clocks as measured; NaN where not known.
        classes: [receiver, source], kind of link, -1 on the diagonal.
        place: where the ranks are.
        most: [kinds] ns, what healthy paths within a node take at most; inf where nobody knows.
        prior: what was measured; where that is good, most clocks are near to it.

    Returns:
        The clocks, and the standard deviation of one reading.
    """
    is_good = bool(np.median(prior.sigma) < _GOOD_NS)
    readings = _read(times, classes, most, is_good)
    clock = np.zeros(len(classes)) if is_good else _against_one(readings)
    clock = _settled(readings, clock, place)
    _doubt(readings, clock, classes)
    clock = _settled(readings, clock, place)
    return clock - np.median(clock), _left_over(readings, clock)


def _left_over(readings: _Readings, clock: FloatArray) -> float:
    """Standard deviation of one reading, by what the fit leaves; where that is not much more than clocks, as assumed."""
    left = readings.left(clock)
    if np.isfinite(left).sum() < _TO_SPARE * clock.size:
        return readings.sigma
    # Kinds of operation may differ, and the best one tells.
    sigma = min(or_zero(median_of(np.abs(left[:, way]))) for way in range(0, left.shape[1], 2))
    return max(MAD_TO_SIGMA * sigma, _LEAST_SIGMA_NS)


def _doubt(readings: _Readings, clock: FloatArray, classes: IntArray) -> None:
    """Takes weight from readings of a kind that contradict each other, as where ports queue in the order of sending."""
    left = np.abs(readings.left(clock))
    for link in range(3):
        of_link = (classes[:, readings.others] == link)[:, None]
        for way in range(0, left.shape[1], 2):
            both = left[:, way : way + 2]
            apart = MAD_TO_SIGMA * or_zero(median_of(np.where(of_link, both, np.nan)))
            weight = readings.weight[:, way : way + 2]
            np.divide(weight, 1 + apart**2 * weight, out=weight, where=of_link)


def _settled(readings: _Readings, clock: FloatArray, place: Place) -> FloatArray:
    clock, nodes = clock.copy(), place.nodes
    from_outside = readings.weight * (nodes[:, None] != nodes[readings.others])[:, None]
    for _ in range(_MOST_SWEEPS):
        before = clock.copy()
        clock += _step(readings.left(clock), readings.weight, clock, readings.sigma)
        if 1 < place.num_nodes < place.num_ranks:
            _set_nodes(readings.left(clock), from_outside, clock, nodes, readings.sigma)
        if np.abs(clock - before).max() < readings.sigma:
            break
    return clock


def _read(times: FloatArray, classes: IntArray, most: FloatArray, is_good: bool) -> _Readings:
    """Times over those of healthy paths of their class, there and back."""
    others = some_ranks(len(classes))
    links = classes[:, others]
    ahead, weight, sigmas = [], [], []
    for time, at_most in zip(times, most):
        # Clocks cancel between the two directions.
        ways = np.stack([time[:, others], time.T[:, others]])
        both = ways.mean(axis=0)
        usual, sigma = np.full(links.shape, np.nan), np.full(links.shape, np.inf)
        for link in range(3):
            of_link = links == link
            # Of paths that are seen one way only, a clock and what is usual are one number: if clocks are good, that
            # is what they take, else fences may tell. A few pairs that are seen both ways may be the slow ones, and
            # clocks may be further off than any path is slow, so the least of both counts that paths can take.
            known = np.isfinite(both[of_link])
            is_enough = known.sum() >= min(_ENOUGH_PAIRS * known.size, 2 * (len(classes) - 1))
            at_fence = link == 0 and np.isfinite(at_most)
            one_way = at_most if at_fence and not is_good else median_of(ways[:, of_link])
            least = min((t for t in (one_way, median_of(both[of_link])) if t > 0), default=0.0)
            telling = both[of_link] if is_enough and known.any() else np.array([least])
            low, high = (or_zero(quantile_of(telling, share)) for share in _HEALTHY)
            usual[of_link] = min(max(high, 0.0), at_most if at_fence else np.inf)
            sigma[of_link] = max((high - low) / _SIGMAS, _LEAST_SIGMA_NS)
        ahead += [ways[0] - usual, usual - ways[1]]
        weight += [1 / sigma**2] * 2
        sigmas.append(float(sigma[np.isfinite(sigma)].max(initial=_LEAST_SIGMA_NS)))
    all_ahead = np.stack(ahead, axis=1)
    known = np.where(np.isfinite(all_ahead), np.stack(weight, axis=1), 0.0)
    return _Readings(others, np.where(known > 0, all_ahead, np.inf), known, min(sigmas))


def _against_one(readings: _Readings) -> FloatArray:
    """[num_ranks]: clocks as the paths to and from the best known rank have them."""
    known = readings.weight > 0
    best = int(np.argmax(known.any(axis=1).sum(axis=0)))
    weight = readings.weight[:, :, best]
    of_best = (weight * np.nan_to_num(readings.ahead[:, :, best])).sum(axis=1)
    clock = of_best / np.where(weight.any(axis=1), weight.sum(axis=1), 1.0)
    return np.asarray(clock - np.median(clock))


def _set_nodes(
    left: FloatArray, weight: FloatArray, clock: FloatArray, nodes: IntArray, sigma: float
) -> None:
    """Moves the clocks of each node together; weight: of readings from other nodes."""
    inside = members(nodes)
    is_there = inside >= 0
    sizes = is_there.sum(axis=1)
    mean = np.where(is_there, clock[inside], 0.0).sum(axis=1) / sizes
    step = _step(left[inside], weight[inside] * is_there[..., None, None], mean, sigma)
    # All move at once, so each goes its share of the way.
    step *= 1 - 1 / sizes.size
    clock[inside[is_there]] += np.repeat(step, sizes)


def _step(left: FloatArray, weight: FloatArray, clock: FloatArray, sigma: float) -> FloatArray:
    """[clock]: by how much to move each; left, weight: [clock, ...] readings."""
    left, weight = left.reshape(len(clock), -1), weight.reshape(len(clock), -1)
    order, rows = np.argsort(left, axis=1), np.arange(len(clock))[:, None]
    below = np.cumsum(weight[rows, order], axis=1)
    ends = [np.argmax(below >= share * below[:, -1:], axis=1) for share in _MIDDLE]
    middle = left[rows, order[rows, np.stack(ends, axis=1)]]
    low, high = np.where(below[:, -1:] > 0, middle, 0.0).T
    nearer = np.where(np.abs(clock + low) < np.abs(clock + high), low, high)
    # Ends that are far apart are those of a slow side.
    return np.asarray(np.where(high - low > FAR * sigma, nearer, (low + high) / 2))
