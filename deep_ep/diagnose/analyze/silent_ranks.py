"""Ranks that do not report: what the others saw of them is all there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..collect.group_matrices import Matrices
from ..core.causes import Cause
from ..core.diagnosis import BoolArray, FloatArray
from ..core.robust_stats import healthy, median_of, or_zero
from .estimates import Estimates
from .finding import Found, Named, Size, cells_of, found_cause
from .thresholds import MIN_OPERATIONS, JudgedKind
from .what_if import Gain

# Two who agree are the least.
_MIN_REPORTS = 2
# In so many operations a rank waited for it, last; or in half of them, where ranks are few.
_WAITED = 0.3
# A rank's own clock might say that it was held up; nobody can be surer than this without it.
_MOST_CERTAIN = 0.9
# Clocks that are off by more than this say nothing of when a rank without one issued.
_CLOCKS_KNOWN_NS = 5_000.0


@dataclass(frozen=True)
class _Seen:
    """A silent rank in one kind of operation, as the others saw it; times in ns.

    Attributes:
        kind: the kind.
        rank: the rank.
        waited: [num_ranks] bool, who waited for it, last, in many operations.
        share: in which share of the operations they did, median.
        late: how late it issued on their clocks.
        error: of that.
        spread: how far healthy ranks differ in it.
        effect: what it does longer than others, if nothing holds it up.
        unsure: how far that may be off because its own clock is not known.
    """

    kind: JudgedKind
    rank: int
    waited: BoolArray
    share: float
    late: float
    error: float
    spread: float
    effect: float
    unsure: float

    @property
    def is_certain(self) -> bool:
        """Whether most others waited for the rank, which was later than ranks ever are."""
        kind = self.kind
        noise = max(kind.z_ranks * self.error, kind.limits.spread * self.spread)
        most = 2 * self.waited.sum() > kind.e.m.present.sum()
        return bool(most and self.late > max(kind.rank_floor, noise))

    @property
    def bears_out(self) -> bool:
        """Whether it may well be as late, where another kind is certain of it."""
        return self.late > max(self.kind.floor, 2.0 * self.error) and bool(self.waited.any())


def late_and_silent(kinds: Sequence[JudgedKind]) -> list[Found]:
    """Ranks that did not report, that most others waited for, and that issued late on their clocks."""
    usable = [
        kind
        for kind in kinds
        if kind.e.has_stamps
        and kind.e.num_operations >= MIN_OPERATIONS
        and kind.e.m.present.sum() >= _MIN_REPORTS
    ]
    silent = {rank for kind in usable for rank in np.flatnonzero(~kind.e.m.present).tolist()}
    found = []
    for rank in sorted(silent):
        seen = [_seen(kind, rank) for kind in usable]
        if any(one.is_certain for one in seen):
            found += [_verdict(one) for one in seen if one.is_certain or one.bears_out]
    return found


def _seen(kind: JudgedKind, rank: int) -> _Seen:
    e, m = kind.e, kind.e.m
    share = _waited_share(m, rank)
    # Of few ranks each comes last in many operations by chance.
    waited = (share > min(max(_WAITED, 2.0 / (m.num_ranks - 1)), 0.5)) & m.present
    # Noise that lasts makes ranks late as well as slow.
    error = math.hypot(or_zero(float(e.late_error[rank])), e.work.usual_error)
    spread = 0.0 if _is_off(e) else healthy(np.delete(e.late, rank))[1]
    typical = or_zero(median_of(share[waited]))
    # What the others wait, which no clock of another rank is in, is how late it is and a path; once
    # where it comes last, and once in all operations, because those where it does are chosen.
    came_last = m.last[..., 0] == rank
    wait = or_zero(median_of(np.where(came_last, m.last_arrival[..., 0], np.nan)))
    usual = np.where(came_last, m.last_arrival[..., 0], 0.0)[:, waited]
    path = min(max(or_zero(median_of(np.array(e.paths.level))), 0.0), wait / 2)
    late = min(or_zero(float(e.late[rank])), wait)
    if _is_off(e):
        late = max(or_zero(median_of(usual)) - path, 0.0)
    # While it is late the data of the others comes in, so it leaves earlier by that, at most by a path's time. With one
    # kind of path that is what the others wait; with two, some of them wait for other nodes rather than for it.
    slowest = max((level for level in e.paths.level if math.isfinite(level)), default=0.0)
    lead = min(max(slowest, 0.0), wait if _is_off(e) else late)
    if not np.isfinite(e.paths.level[1]):
        effect = max(wait, late)
    elif _is_off(e):
        effect = wait - lead / 2
    else:
        effect = min(late + lead * (late > slowest), max(wait, late))
    unsure = math.hypot(e.work.apart, lead / 2)
    return _Seen(kind, rank, waited, typical, late, error, spread, effect, unsure)


def _is_off(e: Estimates) -> bool:
    return bool(np.abs(e.paths.clock).max() > _CLOCKS_KNOWN_NS)


def _verdict(seen: _Seen) -> Found:
    e, rank = seen.kind.e, seen.rank
    count = int(seen.waited.sum())
    return found_cause(
        seen.kind,
        Cause.LATE,
        Named(rank),
        Size(seen.effect, seen.error, e.load.size, seen.unsure),
        cells_of(e, source=rank),
        Gain(e.operation, rank, work_ns=seen.effect, is_recorded=False),
        seen_in=seen.share,
        evidence={
            "ranks_that_waited_for_it": float(count),
            "later_than_median_us": seen.late / 1e3,
            "error_us": seen.error / 1e3,
        },
        next_step=f"Rank {rank} was seen late by {count} ranks and did not report, so its own clock is "
        "not known: see whether its process runs, what it does, and what holds it up.",
        most_certain=_MOST_CERTAIN,
    )


def _waited_share(m: Matrices, rank: int) -> FloatArray:
    """[num_ranks]: in which share of its operations each waited for the rank, last."""
    last = (m.last[..., 0] == rank) & (m.last_arrival[..., 0] > 0)
    known = np.isfinite(m.wait).sum(axis=0)
    return np.asarray(last.sum(axis=0) / np.maximum(known, 1))
