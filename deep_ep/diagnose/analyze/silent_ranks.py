"""Ranks that do not report: what the others saw of them is all there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..collect.group_matrices import Matrices
from ..core.causes import Cause
from ..core.diagnosis import FloatArray
from ..core.robust_stats import healthy, median_of, or_zero
from .estimates import Estimates
from .finding import Found, Named, Size, cells_of, found_cause
from .thresholds import CLOCKS_KNOWN_NS, JudgedKind
from .what_if import Gain

# In so many operations a rank waited for it, last; or in half of them, where ranks are few.
_WAITED = 0.3
# A rank's own clock might say that it was held up; nobody can be surer than this without it.
_MOST_CERTAIN = 0.9


class _Seen(NamedTuple):
    """A silent rank in one kind of operation, as the others saw it.

    `is_certain`: whether most others waited for it, which was later than ranks ever are; `bears_out`: whether it may
    well be as late, where another kind is certain of it.
    """

    found: Found
    is_certain: bool
    bears_out: bool


def late_and_silent(kinds: Sequence[JudgedKind]) -> list[Found]:
    """Ranks that did not report, that most others waited for, and that issued late on their clocks."""
    usable = [kind for kind in kinds if kind.e.has_stamps]
    silent = {rank for kind in usable for rank in np.flatnonzero(~kind.e.m.present).tolist()}
    found = []
    for rank in sorted(silent):
        seen = [_seen(kind, rank) for kind in usable]
        if any(one.is_certain for one in seen):
            found += [one.found for one in seen if one.is_certain or one.bears_out]
    return found


def _seen(kind: JudgedKind, rank: int) -> _Seen:
    e, m = kind.e, kind.e.m
    share = _waited_share(m, rank)
    # Of few ranks each comes last in many operations by chance.
    waited = (share > min(max(_WAITED, 2.0 / (m.num_ranks - 1)), 0.5)) & m.present
    # Noise that lasts makes ranks late as well as slow.
    error = math.hypot(or_zero(median_of(m.late_error[:, rank])), e.work.usual_error)
    spread = 0.0 if _is_off(e) else healthy(np.delete(e.late, rank))[1]
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
    # kind of path that is what the others wait, or twice what it is late; with two, some of them wait for other nodes
    # rather than for it.
    slowest = max((level for level in e.paths.level if math.isfinite(level)), default=0.0)
    lead = min(max(slowest, 0.0), wait if _is_off(e) else late)
    if not np.isfinite(e.paths.level[1]):
        effect = wait if _is_off(e) else min(wait, 2 * late)
    elif _is_off(e):
        effect = wait - lead / 2
    else:
        effect = min(late + lead * (late > slowest), max(wait, late))
    count, beyond = int(waited.sum()), max(kind.z_ranks * error, kind.limits.spread * spread)
    found = found_cause(
        kind,
        Cause.LATE,
        Named(rank),
        Size(effect, error, e.load.size, math.hypot(e.work.apart, lead / 2)),
        cells_of(e, source=rank),
        Gain(e.operation, rank, work_ns=effect, is_recorded=False),
        seen_in=or_zero(median_of(share[waited])),
        evidence={
            "ranks_that_waited_for_it": float(count),
            "later_than_median_us": late / 1e3,
            "error_us": error / 1e3,
        },
        next_step=f"Rank {rank} was seen late by {count} ranks and did not report, so its own clock is "
        "not known: see whether its process runs, what it does, and what holds it up.",
        most_certain=_MOST_CERTAIN,
    )
    is_certain = 2 * count > m.present.sum() and late > max(kind.rank_floor, beyond)
    return _Seen(found, bool(is_certain), late > max(kind.floor, 2.0 * error) and count > 0)


def _is_off(e: Estimates) -> bool:
    """Whether clocks are off. What is sent while nobody else sends is fast, so those of silent ranks do not tell."""
    return bool(np.abs(e.paths.clock[e.m.present]).max() > CLOCKS_KNOWN_NS)


def _waited_share(m: Matrices, rank: int) -> FloatArray:
    """[num_ranks]: in which share of its operations each waited for the rank, last."""
    last = (m.last[..., 0] == rank) & (m.last_arrival[..., 0] > 0)
    known = np.isfinite(m.wait).sum(axis=0)
    return np.asarray(last.sum(axis=0) / np.maximum(known, 1))
