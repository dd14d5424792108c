"""Ranks that are late now and then: in bursts, or in some operations of many. Medians hide them.

What counts is lateness far outside of the group's noise, in more operations than hiccups and the
operating system are good for, and in more than the other ranks show. It costs its mean over all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.causes import Cause
from ..core.diagnosis import BoolArray, FloatArray
from ..core.robust_stats import MAD_TO_SIGMA, median_of, or_zero
from .estimates import Estimates
from .finding import Found, Named, Size, cells_of, found_cause, own_times
from .thresholds import JudgedKind
from .what_if import Gain

# Standard deviations of the group's noise from which on an operation counts as a late one.
_FAR = 5.0
# And, of a rank that is known to be late at times, at the least.
_NEAR = 2.0
# Hiccups are in one operation of a hundred, the operating system's noise in a few; or it is a burst
# of so many operations, which neither is.
_MIN_SHARE, _BURST = 0.1, 12
# What comes as regularly as a clock ticks is the system's, unless it costs so many times what is of
# interest. So much of it must fall on every k-th operation, for a k that is not too small to tell.
_REGULAR_COST, _REGULAR = 3.0, 0.75
_PERIODS = range(4, 65)
# In so many standard deviations more operations than the other ranks, and times as many.
_MORE, _TIMES = 5.0, 4.0
# Noise goes both ways.
_ONE_SIDED = 4.0
# Half of the operations of a rank that is late in some are not late at all, or by half of what
# counts; a quarter where the others are late by twice what counts. Else it is late for good.
_MOST, _QUIET_MOSTLY = 0.4, 0.5
_QUIET, _APART = 0.25, 2.0
# In so many of its late operations the others must have waited for the rank.
_WAITED = 0.3
# A cost must exceed its error, and that of a rank's whole work, so many times.
_CERTAIN = 3.0


@dataclass(frozen=True)
class _Excess:
    """One kind of operation.

    Attributes:
        kind: the kind.
        values: [n, num_ranks] ns, own time above the operation's median rank.
        bar: from which on an operation counts as a late one, ns.
        late: [n, num_ranks], which ones do.
    """

    kind: JudgedKind
    values: FloatArray
    bar: float
    late: BoolArray

    def of(self, rank: int) -> _Late:
        """What one rank shows.

        Found by a bar far outside of the noise, late operations are told from others halfway to what
        is typical of them, and what noise puts beyond that, which goes both ways, is taken off.
        """
        values, found = self.values[:, rank], self.late[:, rank]
        quiet = values[np.isfinite(values) & ~found]
        own = float(np.median(quiet)) if quiet.size else 0.0
        values = values - own
        half = or_zero(median_of(values[found])) / 2
        bar = min(max(half, self.bar * _NEAR / _FAR), self.bar)
        at = np.where(np.abs(values) > bar, values, 0.0)
        return _Late(self, rank, np.where(np.isfinite(at), at, 0.0), int(np.isfinite(values).sum()))


@dataclass(frozen=True)
class _Late:
    """One rank in one kind of operation.

    Attributes:
        among: the kind.
        rank: the rank.
        each: [n], how late it was in each operation, ns above what the rank takes when it is not late; 0
            where it was not, negative where noise makes it as early.
        count: operations of which the rank's time is known.
    """

    among: _Excess
    rank: int
    each: FloatArray
    count: int

    @property
    def share(self) -> float:
        """Of the operations, the late ones."""
        return max(float(np.sign(self.each).sum()), 0.0) / max(self.count, 1)

    @property
    def typical(self) -> float:
        """Median of the late ones, ns; 0 without any."""
        return or_zero(median_of(self.each[self.each > 0]))

    @property
    def cost(self) -> float:
        """Mean over all operations, ns."""
        return float(self.each.sum()) / max(self.count, 1)

    @property
    def error(self) -> float:
        """Of the cost in the operations of any kind, as this kind tells it."""
        late = self.each > 0
        if not late.any():
            return 0.0
        bursts = int(np.sum(late & ~np.concatenate([[False], late[:-1]])))
        # Kinds take turns, so each burst may have an operation more in this kind or in the other one.
        turns = self.typical * math.sqrt(0.75 * bursts)
        size = float(np.std(self.each[late])) * math.sqrt(np.count_nonzero(self.each))
        return math.hypot(turns, size) / max(self.count, 1)

    @property
    def is_certain(self) -> bool:
        """Whether the cost is of interest, and more than noise that lasts makes of a quiet rank."""
        noise = or_zero(median_of(self.among.kind.e.work.error))
        return self.cost > max(self.among.kind.floor, _CERTAIN * math.hypot(self.error, noise))

    @property
    def is_apart(self) -> bool:
        """Whether the late operations are some of many, and not what is usual for the rank."""
        values = self.among.values[:, self.rank]
        quiet = float(np.sum(values < self.among.bar / 2)) / max(self.count, 1)
        return (self.share <= _MOST and quiet >= _QUIET_MOSTLY) or (
            quiet >= _QUIET and self.typical > _APART * self.among.bar
        )

    @property
    def is_waited_for(self) -> bool:
        """Whether most others waited for the rank, last, in enough of its late operations."""
        m = self.among.kind.e.m
        late = self.among.late[:, self.rank]
        others = m.present & (np.arange(m.num_ranks) != self.rank)
        waited = (m.last[..., 0] == self.rank) & (m.last_arrival[..., 0] > 0)
        most = waited[np.ix_(late, others)].sum(axis=1) * 2 > others.sum()
        return bool(most.size and most.mean() >= _WAITED)


def late_at_times(kinds: Sequence[JudgedKind], explained: set[int]) -> list[Found]:
    """Ranks that are late in some operations only.

    Args:
        kinds: of operations; those without raw stamps tell nothing.
        explained: ranks whose lateness has a cause already.
    """
    each = [_excess(kind) for kind in kinds if kind.e.has_stamps]
    found = []
    for rank in _candidates(each, explained):
        burst = _longest_burst(each, rank)
        least = _REGULAR_COST if _is_regular(each, rank) else 1.0
        for late in (one.of(rank) for one in each):
            big = late.cost > least * late.among.kind.floor
            if big and late.is_certain and late.is_apart and late.is_waited_for:
                found.append(_verdict(late, burst))
    return found


def _excess(kind: JudgedKind) -> _Excess:
    values = kind.e.excess
    # Of two ranks the median is halfway between them.
    values = values * 2 if values.shape[1] == 2 else values
    noise = MAD_TO_SIGMA * or_zero(median_of(np.abs(values)))
    bar = max(_FAR * noise, kind.rank_floor)
    return _Excess(kind, values, bar, values > bar)


def _candidates(each: Sequence[_Excess], explained: set[int]) -> list[int]:
    """Ranks that are late more often than chance and the other ranks are, all kinds together."""
    if not each:
        return []
    late, early, count = (
        np.sum([np.sum(which, axis=0) for which in kinds], axis=0)
        for kinds in (
            [x.late for x in each],
            [x.values < -x.bar for x in each],
            [np.isfinite(x.values) for x in each],
        )
    )
    share = late / np.maximum(count, 1)
    found = []
    for rank in np.flatnonzero(late > _MORE).tolist():
        if rank in explained or late[rank] < _ONE_SIDED * early[rank]:
            continue
        usual = median_of(np.delete(share, rank))
        expected = usual * count[rank]
        more = late[rank] - expected > _MORE * math.sqrt(expected + 1.0)
        often = share[rank] >= _MIN_SHARE or _longest_burst(each, rank) >= _BURST
        if more and often and share[rank] >= _TIMES * usual:
            found.append(rank)
    return found


def _longest_burst(each: Sequence[_Excess], rank: int) -> int:
    """Operations of all kinds, one after the other, in which the rank was late."""
    order = np.argsort(np.concatenate([x.kind.e.m.ops for x in each]), kind="stable")
    late = np.concatenate([x.late[:, rank] for x in each])[order]
    ends = np.flatnonzero(~np.concatenate([[False], late, [False]]))
    return int(np.diff(ends).max()) - 1


def _is_regular(each: Sequence[_Excess], rank: int) -> bool:
    """Whether most late operations, of all kinds, are so many apart or a multiple of it."""
    late = np.concatenate([x.kind.e.m.ops[x.late[:, rank]] for x in each])
    most = (np.bincount(late % period).max() for period in _PERIODS)
    # Of a few, some are apart like that by chance.
    return late.size > _MORE and max(most) >= _REGULAR * late.size


def _verdict(late: _Late, burst: int) -> Found:
    kind, rank = late.among.kind, late.rank
    e: Estimates = kind.e
    return found_cause(
        kind,
        Cause.LATE_AT_TIMES,
        Named(rank),
        Size(late.cost, late.error, e.load.size, late.share * e.work.apart),
        cells_of(e, source=rank),
        Gain(e.operation, rank, work_each=np.maximum(late.each, 0.0)),
        seen_in=late.share,
        evidence={
            "lateness_when_late_us": late.typical / 1e3,
            "mean_over_all_us": late.cost / 1e3,
            "longest_burst_operations": float(burst),
            "error_us": late.error / 1e3,
            **own_times(e, rank),
        },
    )
