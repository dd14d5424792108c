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
from .judged_kind import JudgedKind
from .thresholds import MIN_OPERATIONS
from .what_if import Gain

# Standard deviations of the group's noise from which on an operation counts as a late one.
_FAR = 5.0
# Hiccups are in one operation of a hundred, the operating system's noise in a few; and in so many more than others are.
_MIN_SHARE = 0.1
# What comes as regularly as a clock ticks, so much of it on every k-th operation, is the system's where most ranks have
# it, in so many of their operations, and for no more than so many times as long.
_REGULAR, _PERIODS = 0.75, range(4, 65)
_OF_THE_SYSTEM, _AS_LONG = 0.02, 2.0
# Late in more than this share, it is late for good.
_MOST = 0.75


def late_at_times(kinds: Sequence[JudgedKind], hot_ranks: Collection[int]) -> list[Found]:
    """Ranks that are late in some operations only, and for good in no kind of them.

    Args:
        kinds: of operations.
        hot_ranks: whose tokens explain it.
    """
    if not kinds:
        return []
    over = [_over_usual(kind) for kind in kinds]
    late = [over_usual > _bar(kind) for kind, over_usual in zip(kinds, over)]
    known = np.sum([np.isfinite(of_kind).sum(axis=0) for of_kind in over], axis=0)
    count = np.sum([of_kind.sum(axis=0) for of_kind in late], axis=0)
    share = count / np.maximum(known, 1)
    lateness = np.concatenate([np.where(of, x, np.nan) for of, x in zip(late, over)])
    typical = median(lateness, 0)
    of_system = np.full(share.size, np.median(share) >= _OF_THE_SYSTEM)
    of_system &= typical <= _AS_LONG * median_of(typical)
    found = []
    is_often = (share - np.median(share) >= _MIN_SHARE) & (count >= MIN_OPERATIONS)
    # In one kind it may come to some operations with what it was late for before: to a dispatch behind its notify.
    is_often &= ~np.any([_is_late_for_good(kind) for kind in kinds], axis=0)
    for rank in np.flatnonzero(is_often).tolist():
        if rank in hot_ranks or (of_system[rank] and _is_regular(kinds, late, rank)):
            continue
        burst = _longest_burst(kinds, late, rank)
        for kind, over_usual, is_late in zip(kinds, over, late):
            each = np.where(is_late[:, rank], over_usual[:, rank], 0.0)
            if is_late[:, rank].any() and _cost(kind, rank) > kind.floor:
                found.append(_verdict(kind, each, rank, burst))
    return found


def _bar(kind: JudgedKind) -> float:
    noise = MAD_TO_SIGMA * or_zero(median_of(np.abs(kind.e.work.excess - kind.e.work.value)))
    return max(_FAR * noise, kind.rank_floor)


def not_at_times(kind: JudgedKind) -> FloatArray:
    """[n, num_ranks] ns above the healthy ranks; NaN where a rank is late at times, and not for good."""
    excess = kind.e.work.excess
    return np.where((excess > _bar(kind)) & ~_is_late_for_good(kind), np.nan, excess)


def _over_usual(kind: JudgedKind) -> FloatArray:
    """[n, num_ranks] ns above what each rank takes when it is not late; NaN for ranks that are late for good."""
    usual = median(not_at_times(kind), 0)
    return np.asarray(kind.e.work.excess - np.where(_is_late_for_good(kind), np.nan, usual))


def _is_late_for_good(kind: JudgedKind) -> BoolArray:
    excess = kind.e.work.excess
    return np.asarray((excess <= _bar(kind)).sum(axis=0) < (1 - _MOST) * len(excess))


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


def _cost(kind: JudgedKind, rank: int) -> float:
    """What it is later than most ranks, mean over all operations: also in those in which it is hardly late."""
    known = np.isfinite(kind.e.work.excess)
    total = np.where(known, kind.e.work.excess, 0.0).sum(axis=0)
    mean = np.where(known.any(axis=0), total, np.nan) / np.maximum(known.sum(axis=0), 1)
    return float(mean[rank] - median_of(mean))


def _verdict(kind: JudgedKind, each: FloatArray, rank: int, burst: int) -> Found:
    """Of a kind in which it costs what is of interest; each: [n] ns that it is late, 0 where it is not."""
    e, is_late = kind.e, each > 0
    count = int(np.isfinite(e.work.excess[:, rank]).sum())
    share, cost = float(is_late.sum()) / count, _cost(kind, rank)
    typical = float(np.median(each[is_late]))
    bursts = int(np.sum(is_late & ~np.concatenate([[False], is_late[:-1]])))
    # Kinds take turns, so each burst may have an operation more in this kind or in the other one.
    turns = typical * math.sqrt(0.75 * bursts)
    size = float(np.std(each[is_late])) * math.sqrt(is_late.sum())
    error = math.hypot(turns, size, e.work.usual_error * count) / count
    return found_cause(
        kind,
        Cause.LATE_AT_TIMES,
        Named(rank),
        Size(cost, error, e.load.size, share * e.work.apart),
        cells_of(e, source=rank),
        Gain(e.operation, rank, work_each=each),
        seen_in=share,
        evidence={
            "lateness_when_late_us": typical / 1e3,
            "mean_over_all_us": cost / 1e3,
            "longest_burst_operations": float(burst),
            "error_us": error / 1e3,
            **own_times(e, rank),
        },
    )
