"""Ranks that are late now and then: in bursts, or in some operations of many. Medians hide them.

What counts is lateness far outside of the group's noise, in more operations than hiccups and the operating system are
good for, and in more than the other ranks show. It costs its mean over all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from ..core.causes import Cause
from ..core.diagnosis import BoolArray, FloatArray
from ..core.robust_stats import MAD_TO_SIGMA, median, median_of, or_zero
from .finding import Found, Named, Size, cells_of, found_cause, own_times
from .thresholds import JudgedKind
from .what_if import Gain

# Standard deviations of the group's noise from which on an operation counts as a late one, once a rank is known to
# be late at times: fewer.
_FAR, _NEAR = 5.0, 2.0
# Hiccups are in one operation of a hundred, the operating system's noise in a few; or it is a burst of so many
# operations, which neither is.
_MIN_SHARE, _BURST = 0.1, 12
# So many times as often as the other ranks are, and this share more.
_TIMES, _MORE = 4.0, 0.05
# What comes as regularly as a clock ticks is the system's: so much of it on every k-th operation.
_REGULAR, _PERIODS = 0.75, range(4, 65)
# Late in more than this share, it is late for good.
_MOST = 0.75
# In so many of its late operations most others must have waited for the rank, last.
_WAITED = 0.3


def late_at_times(kinds: Sequence[JudgedKind], explained: Collection[int]) -> list[Found]:
    """Ranks that are late in some operations only.

    Args:
        kinds: of operations; those without raw stamps tell nothing.
        explained: ranks whose lateness has a cause already.
    """
    kinds = [kind for kind in kinds if kind.e.has_stamps]
    if not kinds:
        return []
    late = [_late(kind) for kind in kinds]
    found = []
    for rank in _candidates(kinds, late, explained):
        burst = _longest_burst(kinds, late, rank)
        for kind, of_kind in zip(kinds, late):
            verdict = _verdict(kind, of_kind, rank, burst)
            if verdict is not None:
                found.append(verdict)
    return found


def _bar(kind: JudgedKind) -> float:
    noise = MAD_TO_SIGMA * or_zero(median_of(np.abs(kind.e.work.excess - kind.e.work.value)))
    return max(_FAR * noise, kind.rank_floor)


def _over_own(kind: JudgedKind) -> FloatArray:
    """[n, num_ranks] ns above what each rank takes when it is not late."""
    excess = kind.e.work.excess
    quiet = np.where(excess > _bar(kind), np.nan, excess)
    is_often = np.isfinite(quiet).sum(axis=0) >= (1 - _MOST) * len(excess)
    return np.asarray(excess - np.where(is_often, median(quiet, 0), kind.e.work.value))


def _late(kind: JudgedKind) -> BoolArray:
    """[n, num_ranks]: operations in which each rank is far later than ranks are, itself included."""
    return np.asarray(_over_own(kind) > _bar(kind))


def _candidates(
    kinds: Sequence[JudgedKind], late: Sequence[BoolArray], explained: Collection[int]
) -> list[int]:
    """Ranks that are late more often than the other ranks are, all kinds together."""
    early = np.sum([(_over_own(kind) < -_bar(kind)).sum(axis=0) for kind in kinds], axis=0)
    count = np.sum([np.isfinite(kind.e.work.excess).sum(axis=0) for kind in kinds], axis=0)
    share = (np.sum([of.sum(axis=0) for of in late], axis=0) - early) / np.maximum(count, 1)
    found = []
    for rank in np.flatnonzero(share > 0).tolist():
        usual = max(or_zero(median_of(np.delete(share, rank))), 0.0)
        often = share[rank] >= _MIN_SHARE or _longest_burst(kinds, late, rank) >= _BURST
        more = share[rank] >= _TIMES * usual + _MORE and not _is_regular(kinds, late, rank)
        if rank not in explained and often and more:
            found.append(rank)
    return found


def _is_regular(kinds: Sequence[JudgedKind], late: Sequence[BoolArray], rank: int) -> bool:
    """Whether most late operations, of all kinds, are so many apart or a multiple of it."""
    at = np.concatenate([kind.e.m.ops[of[:, rank]] for kind, of in zip(kinds, late)])
    most = max(np.bincount(at % period).max() for period in _PERIODS)
    return bool(most >= _REGULAR * at.size)


def _longest_burst(kinds: Sequence[JudgedKind], late: Sequence[BoolArray], rank: int) -> int:
    """Operations of all kinds, one after the other, in which the rank was late."""
    order = np.argsort(np.concatenate([kind.e.m.ops for kind in kinds]), kind="stable")
    in_order = np.concatenate([of[:, rank] for of in late])[order]
    ends = np.flatnonzero(~np.concatenate([[False], in_order, [False]]))
    return int(np.diff(ends).max()) - 1


def _is_waited_for(kind: JudgedKind, late: BoolArray, rank: int) -> bool:
    m = kind.e.m
    others = m.present & (np.arange(m.num_ranks) != rank)
    waited = (m.last[..., 0] == rank) & (m.last_arrival[..., 0] > 0)
    most = waited[np.ix_(late, others)].sum(axis=1) * 2 > others.sum()
    return bool(most.size and most.mean() >= _WAITED)


def _verdict(kind: JudgedKind, late: BoolArray, rank: int, burst: int) -> Found | None:
    """Of a kind in which it costs what is of interest.

    Late operations are told from others halfway to what is typical of them; what noise puts beyond that goes both ways
    and is taken off.
    """
    e, over = kind.e, _over_own(kind)[:, rank]
    over = over[np.isfinite(over)]
    bar = _bar(kind)
    half = or_zero(median_of(over[over > bar])) / 2
    bar = min(max(half, bar * _NEAR / _FAR), bar)
    each = np.where(np.abs(over) > bar, over, 0.0)
    count = max(over.size, 1)
    share, cost = float(np.sign(each).sum()) / count, float(each.sum()) / count
    is_late = each > 0
    if not is_late.any() or share > _MOST:
        return None
    typical = float(np.median(each[is_late]))
    bursts = int(np.sum(is_late & ~np.concatenate([[False], is_late[:-1]])))
    # Kinds take turns, so each burst may have an operation more in this kind or in the other one.
    turns = typical * math.sqrt(0.75 * bursts)
    size = float(np.std(each[is_late])) * math.sqrt(np.count_nonzero(each))
    error = math.hypot(turns, size) / count
    if cost < max(kind.floor, 2.0 * math.hypot(error, e.work.usual_error)):
        return None
    if not _is_waited_for(kind, late[:, rank], rank):
        return None
    known = np.isfinite(e.work.excess[:, rank])
    in_each = np.zeros(known.size)
    in_each[known] = np.maximum(each, 0.0)
    return found_cause(
        kind,
        Cause.LATE_AT_TIMES,
        Named(rank),
        Size(cost, error, e.load.size, share * e.work.apart),
        cells_of(e, source=rank),
        Gain(e.operation, rank, work_each=in_each),
        seen_in=share,
        evidence={
            "lateness_when_late_us": typical / 1e3,
            "mean_over_all_us": cost / 1e3,
            "longest_burst_operations": float(burst),
            "error_us": error / 1e3,
            **own_times(e, rank),
        },
    )
