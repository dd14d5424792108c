"""Clocks that have drifted since they were measured, as all paths of all ranks tell them together.

A clock that is wrong by c makes the paths into its rank c slower and those out of it c faster. So every path of a
rank, there or back, in dispatch or in combine, is a reading of its clock, and the median of the readings is its clock,
whatever single paths add. A side that is slow adds to half of the readings: the clock may then be anything in
between, and is taken to be the one nearer to what was measured. Which side it is, nobody knows then.

A node whose link is slow takes the clocks of all its ranks along, so nodes are set like ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..collect.group_matrices import Place
from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import or_zero, quantile_of

# Slow paths leave these quantiles of what two directions take together alone; standard deviations between them.
_HEALTHY = 0.1, 0.3
_SIGMAS = 0.757
# Readings of links that vary less count for more, down to this standard deviation, ns.
_LEAST_SIGMA_NS = 500.0
# The middle of the readings, which has both ends of a slow side that is as well known as the other side.
_MIDDLE = 0.49, 0.51
# Ends are those of a slow side if they are so many standard deviations apart.
_FAR_APART = 4.0
# After two sweeps nothing moves.
_SWEEPS = 2
# Paths to and from so many other ranks tell as much as those of all.
_OTHERS = 128


@dataclass(frozen=True)
class _Readings:
    """By how much the clock of a rank is ahead of another one's.

    Attributes:
        others: [others], the ranks that all are compared with.
        ahead: [kind and direction, rank, other] ns, NaN where not known.
        weight: likewise.
        sigma: least standard deviation between those of healthy paths of any kind, ns.
    """

    others: IntArray
    ahead: FloatArray
    weight: FloatArray
    sigma: float


def joint_clocks(
    times: Sequence[FloatArray], classes: Sequence[IntArray], place: Place
) -> FloatArray:
    """`[num_ranks]` ns: how far each clock has drifted, about the median of all.

    Args:
        times: of each kind of operation, [receiver, source] ns by clocks as measured; NaN where not known.
        classes: likewise, kind of link, -1 on the diagonal.
        place: where the ranks are.
    """
    readings = _read(times, classes)
    clock = _against_one(readings)
    for _ in range(_SWEEPS):
        left = readings.ahead - clock[:, None] + clock[readings.others]
        clock += _step(left, readings.weight, clock, readings.sigma)
        if 1 < place.num_nodes < place.num_ranks:
            _set_nodes(readings, clock, place.nodes)
    return clock - np.median(clock)


def _read(times: Sequence[FloatArray], classes: Sequence[IntArray]) -> _Readings:
    """Times over those of healthy paths of their class, there and back."""
    num_ranks = len(times[0])
    others = np.sort(np.random.default_rng(0).permutation(num_ranks)[:_OTHERS])
    ahead, weight, sigmas = [], [], []
    for time, of_kind in zip(times, classes):
        # Clocks cancel between the two directions.
        both = (time + time.T) / 2
        over, sigma = np.where(of_kind < 0, np.nan, time), np.full(time.shape, np.inf)
        for link in range(3):
            of_link = of_kind == link
            low, usual = (or_zero(quantile_of(both[of_link], share)) for share in _HEALTHY)
            over[of_link] -= usual
            sigma[of_link] = max((usual - low) / _SIGMAS, _LEAST_SIGMA_NS)
        ahead += [over[:, others], -over.T[:, others]]
        weight += [1 / sigma[:, others] ** 2] * 2
        sigmas.append(float(sigma[np.isfinite(sigma)].max(initial=_LEAST_SIGMA_NS)))
    return _Readings(others, np.stack(ahead), np.stack(weight), min(sigmas))


def _against_one(readings: _Readings) -> FloatArray:
    """[num_ranks]: clocks as the paths to and from the best known rank have them."""
    known = np.isfinite(readings.ahead)
    best = int(np.argmax(known.any(axis=0).sum(axis=0)))
    of_best = np.where(known, readings.ahead, 0.0)[:, :, best].sum(axis=0)
    clock = of_best / np.maximum(known[:, :, best].sum(axis=0), 1)
    return np.asarray(clock - np.median(clock))


def _set_nodes(readings: _Readings, clock: FloatArray, nodes: IntArray) -> None:
    """Moves the clocks of each node together."""
    for node in range(int(nodes.max(initial=-1)) + 1):
        inside = np.flatnonzero(nodes == node)
        outside = np.flatnonzero(nodes[readings.others] != node)
        ahead, weight = (
            values[:, inside][:, :, outside] for values in (readings.ahead, readings.weight)
        )
        left = ahead - clock[inside][:, None] + clock[readings.others[outside]]
        mean = clock[inside].mean(keepdims=True)
        clock[inside] += _step(
            left.reshape(1, 1, -1), weight.reshape(1, 1, -1), mean, readings.sigma
        )


def _step(left: FloatArray, weight: FloatArray, clock: FloatArray, sigma: float) -> FloatArray:
    """[clock]: by how much to move each; left, weight: [kind and direction, clock, path]."""
    by_clock, of_clock = (np.moveaxis(v, 1, 0).reshape(len(clock), -1) for v in (left, weight))
    order = np.argsort(by_clock, axis=1)  # what is not known comes last
    ordered = np.take_along_axis(by_clock, order, 1)
    of_clock = np.where(np.isfinite(ordered), np.take_along_axis(of_clock, order, 1), 0.0)
    below = np.cumsum(of_clock, axis=1)
    low, high = (
        np.nan_to_num(
            np.take_along_axis(
                ordered, np.argmax(below >= share * below[:, -1:], axis=1)[:, None], 1
            )[:, 0]
        )
        for share in _MIDDLE
    )
    nearer = np.where(np.abs(clock + low) < np.abs(clock + high), low, high)
    return np.where(high - low > _FAR_APART * sigma, nearer, (low + high) / 2)
