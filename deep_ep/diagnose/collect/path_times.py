"""What the path from each source takes, as far as its receiver could see it; and what bursts on it add.

A word that was there at the first look came in at most the time until then: its path time is censored from the left.
Disturbances only add, so the lowest times tell what a path takes, and its everyday noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..core.diagnosis import BoolArray, FloatArray
from ..core.robust_stats import MEDIAN_COST, median

# A path seen less often, or in fewer of the operations, has no median worth the name.
MIN_SEEN, _MIN_SEEN_SHARE = 6, 16
# Of what is only known to be at most something, the twentieth part is left out.
_SURELY = 20
# Quartiles, and tenths, are so many standard deviations from the median.
_QUARTILE, _TENTH = 0.6745, 1.2816
# From so many standard deviations above what is usual on a path is in a burst, and most of it is further by this
# factor; they recur in so many stretches, and are this share of all operations.
_BURST, _WIDER, _APART, _RECURS, _OFTEN = 3.0, 4.0, 1.25, 3, 1 / 6
# The search for bursts begins as if so many operations were in one, and is repeated so often.
_MOST_IN_BURSTS, _SWEEPS = 0.4, 4
# A path that is slow in more of the operations is so for good.
_FOR_GOOD = 0.75
# Operations in a burst that are no further apart are of the same one.
_TOGETHER = 3
# Fewer operations do not tell bursts from chance.
_MANY = 24


class PathTimes(NamedTuple):
    """`[num_ranks]` each, fields as in `Numbers`."""

    median: FloatArray
    error: FloatArray
    seen: FloatArray
    bound: FloatArray
    burst: FloatArray
    burst_share: FloatArray


def path_times(elapsed: FloatArray, was_seen: BoolArray) -> PathTimes:
    """What path times of each source were.

    Quantiles are those of the product-limit estimate (Kaplan and Meier 1958), reversed in time.

    Args:
        elapsed: [n, num_ranks] ns from issue to arrival, or to the first look; NaN where nothing came.
        was_seen: [n, num_ranks], whether the word was seen to arrive.
    """
    known = np.isfinite(elapsed)
    seen = was_seen & known
    order = np.argsort(elapsed, axis=0, kind="stable")  # what is not known comes last
    times, events = np.take_along_axis(elapsed, order, 0), np.take_along_axis(seen, order, 0)
    at_most = np.arange(1.0, len(times) + 1)[:, None]
    factors = np.where(events, 1.0 - 1.0 / at_most, 1.0)
    # The share of path times below each.
    below = np.asarray(np.cumprod(factors[::-1], axis=0)[::-1], dtype=np.float64)
    low, middle, high = (_censored_quantile(times, events, below, q) for q in (0.25, 0.5, 0.75))
    count = seen.sum(axis=0).astype(np.float64)
    enough = count >= np.maximum(MIN_SEEN, known.sum(axis=0) // _MIN_SEEN_SHARE)
    middle = np.where(enough, middle, np.nan)
    sigma = np.fmax(middle - low, high - middle) / _QUARTILE
    # What was there at the first look may have been in a burst, too: those that were seen count for more.
    weight = np.zeros(elapsed.shape)
    np.put_along_axis(
        weight, order, np.where(events, np.diff(below, axis=0, append=1.0), 0.0), axis=0
    )
    share = np.full(middle.shape, _MOST_IN_BURSTS)
    for _ in range(_SWEEPS):
        lowest, low, half = (
            _censored_quantile(times, events, below, q * (1.0 - share)) for q in (0.1, 0.25, 0.5)
        )
        quiet_sigma = (low - lowest) / (_TENTH - _QUARTILE)
        quiet = np.fmin(half, low + _QUARTILE * quiet_sigma)
        # Noise that goes one way is wider above.
        one_way = np.fmin((half - low) / _QUARTILE, _WIDER * quiet_sigma)
        bar = _BURST * np.fmax(quiet_sigma, one_way)
        over = elapsed - quiet
        share = np.where(seen & (over > bar), weight, 0.0).sum(axis=0)
    burst, share = _bursts(over, seen, weight, bar)
    middle, sigma = (np.where(share > 0, a, b) for a, b in ((quiet, middle), (quiet_sigma, sigma)))
    hidden = np.sort(np.where(known & ~seen, elapsed, np.inf), axis=0)
    at = np.minimum(known.sum(axis=0) // _SURELY, len(hidden) - 1)
    bound = np.take_along_axis(hidden, at[None], 0)[0]
    return PathTimes(
        median=middle,
        error=MEDIAN_COST * sigma / np.sqrt(np.maximum(count, 1.0)),
        seen=count,
        bound=np.where(np.isfinite(middle), np.inf, bound),
        burst=burst,
        burst_share=share,
    )


def _censored_quantile(
    times: FloatArray, events: BoolArray, below: FloatArray, share: FloatArray | float
) -> FloatArray:
    """`[num_ranks]`: the largest time seen below which less than `share` lies; NaN where nothing tells."""
    candidate = events & (below < share)
    last = len(times) - 1 - np.argmax(candidate[::-1], axis=0)
    found = np.take_along_axis(times, last[None], 0)[0]
    return np.where(candidate.any(axis=0), found, np.nan)


def _bursts(
    over: FloatArray, seen: BoolArray, weight: FloatArray, bar: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """`[num_ranks]` each: what bursts add to an operation, ns on average; and their share, if they recur.

    weight: [n, num_ranks], for which share of all operations each stands.
    """
    in_burst = seen & (over > bar)
    known = np.maximum(np.sum(seen | (over <= bar), axis=0), 1)
    typical = median(np.where(in_burst, over, np.nan), 0)
    is_apart = typical > _APART * bar
    # What just exceeds the bar is noise, and no burst begins with it.
    is_of_burst = in_burst & (over > typical / 2)
    starts = is_of_burst & ~_shortly_before(is_of_burst)
    is_apart &= known > np.maximum(len(over) // 2, _MANY)
    added = np.where(in_burst, weight * over, 0.0).sum(axis=0)
    share = np.where(in_burst, weight, 0.0).sum(axis=0)
    is_apart &= share < _FOR_GOOD
    recurs = is_apart & (starts.sum(axis=0) >= _RECURS) & (share >= _OFTEN)
    return np.where(is_apart, added, 0.0), np.where(recurs, share, 0.0)


def _shortly_before(in_burst: BoolArray) -> BoolArray:
    """`[n, num_ranks]`: whether one of the operations just before was in a burst; noise takes single ones out of it."""
    before = np.zeros_like(in_burst)
    for back in range(1, _TOGETHER + 1):
        before[back:] |= in_burst[:-back]
    return before
