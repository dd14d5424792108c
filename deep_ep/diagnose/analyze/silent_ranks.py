"""Ranks that do not report: what the others saw of them is all there is.

A rank that is late is not seen late by all of that. While it is late the data of the others comes in, so it leaves the
operation earlier than those who still wait for it, and begins the next one earlier by as much. Its lateness is what
shows in one operation and by what it left the one before earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..collect.group_matrices import Matrices
from ..core.causes import Cause
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import median, median_of, or_zero
from .estimates import Estimates
from .finding import Found, Named, Size, cells_of, found_cause
from .judged_kind import JudgedKind
from .partners import members
from .thresholds import BORNE_OUT, CLOCKS_KNOWN_NS
from .what_if import Gain

# A rank's own clock might say that it was held up; nobody can be surer than this without it.
_MOST_CERTAIN = 0.9
# Of all ranks that report, late ones among them, standard deviations that nobody healthy is beyond.
_UNLIKE = 5.0
# By what a rank leaves earlier is known to this share of it.
_LEAD_KNOWN = 1 / 8


class _Seen(NamedTuple):
    """How late a rank is in one kind of operation, ns, as the others saw it.

    Attributes:
        kind: of operation.
        effect: how late it is.
        shown: what shows of that.
        error: standard error.
        unsure: by how much `effect` may be off for other reasons, standard deviation.
        others: [num_ranks], how late each rank that reported was seen, compared with others of its node.
        share: [num_ranks], of the operations of each, in which it came last.
        waited: [num_ranks], who waited for it more often than for others.
    """

    kind: JudgedKind
    effect: float
    shown: float
    error: float
    unsure: float
    others: FloatArray
    share: FloatArray
    waited: BoolArray


def late_and_silent(kinds: Sequence[JudgedKind]) -> list[Found]:
    """Ranks that did not report, that most others waited for, and that issued late on their clocks."""
    silent = {rank for kind in kinds for rank in np.flatnonzero(~kind.e.m.present).tolist()}
    found = []
    for rank in sorted(silent):
        leads = [_lead(kind.e, rank) for kind in kinds]
        # Kinds follow each other, and the last one comes before the first.
        seen = [_seen(kind, rank, leads[i - 1]) for i, kind in enumerate(kinds)]
        effect, bar = float(np.mean([one.effect for one in seen])), _bar(seen)
        if effect > bar and any(2 * one.waited.sum() > one.kind.e.m.present.sum() for one in seen):
            waited = np.any([one.waited for one in seen], axis=0)
            named = [one for one in seen if one.effect > BORNE_OUT * bar]
            found += [_found(one, rank, waited, abs(one.effect - effect)) for one in named]
    return found


def _bar(seen: Sequence[_Seen]) -> float:
    """What it must exceed, ns: be of interest, beyond noise, and beyond what ranks that report differ by."""
    differ = _UNLIKE * float(np.nanstd(np.mean([one.others for one in seen], axis=0)))
    of_kinds = [max(one.kind.rank_floor, one.kind.z(one.others.size) * one.error) for one in seen]
    return max(float(np.mean(of_kinds)), differ)


def _lead(e: Estimates, rank: int) -> float:
    """How much earlier a rank leaves an operation than others like it do, ns: by what is waited for it alone.

    That is a path's time at most, as it sends before it leaves.
    """
    m, alike = e.m, _alike(e.m, rank)
    most = max(or_zero(next((x for x in e.paths.level if math.isfinite(x)), 0.0)), 0.0)
    first, second = m.last_arrival[:, alike, 0], m.last_arrival[:, alike, 1]
    alone = np.nan_to_num(np.clip(first - np.fmax(second, 0.0), 0.0, most))
    came_last = m.last[:, alike, 0]
    is_known = came_last >= 0
    waited = np.bincount(came_last[is_known], alone[is_known], m.num_ranks) / max(alone.size, 1)
    return max(float(waited[rank] - np.median(waited[alike])), 0.0)


def _seen(kind: JudgedKind, rank: int, lead: float) -> _Seen:
    e, m = kind.e, kind.e.m
    share = _waited_share(m, rank)
    # Of few ranks each comes last in many operations by chance.
    waited = (share > min(2.0 / (m.num_ranks - 1), 0.5)) & m.present
    came_last = m.last[..., 0] == rank
    # What the others wait, which no clock of another rank is in, is how late it is and a path.
    wait = or_zero(median_of(np.where(came_last, m.last_arrival[..., 0], np.nan)))
    error, others = e.work.usual_error, np.where(m.present, 0.0, np.nan)
    if _is_off(e):
        # Once where it comes last, and once in all operations, because those where it does are chosen.
        usual = np.where(came_last, m.last_arrival[..., 0], 0.0)[:, waited]
        shortest = min(max(or_zero(median_of(np.array(e.paths.level))), 0.0), wait / 2)
        shown = max(or_zero(median_of(usual)) - shortest, 0.0)
        # With two kinds of path some wait for other nodes rather than for it.
        slowest = max((level for level in e.paths.level if math.isfinite(level)), default=0.0)
        unsure = min(max(slowest, 0.0), wait) / 2
        effect = wait - unsure if np.isfinite(e.paths.level[1]) else wait
        error = math.hypot(error, or_zero(median_of(m.late_error[:, rank])))
    else:
        alike = _alike(m, rank)
        shown = min(or_zero(float(e.late[rank] - median_of(e.late[alike]))), wait)
        others = np.where(m.present, e.late - _usual(e, m.place.nodes[alike]), np.nan)
        effect, unsure = shown + lead, math.hypot(_LEAD_KNOWN * lead, np.nanstd(others))
    return _Seen(kind, effect, shown, error, unsure, others, share, waited)


def _found(seen: _Seen, rank: int, waited: BoolArray, unlike: float) -> Found:
    """Its verdict of one kind of operation.

    Args:
        seen: how late it is there.
        rank: which.
        waited: [num_ranks], who waited for it in any kind.
        unlike: what this kind says otherwise than all together, ns.
    """
    kind, count = seen.kind, int(waited.sum())
    apart = math.hypot(kind.e.work.apart, seen.unsure, unlike)
    return found_cause(
        kind,
        Cause.LATE,
        Named(rank),
        Size(seen.effect, seen.error, kind.e.load.size, apart),
        cells_of(kind.e, source=rank),
        Gain(kind.e.operation, rank, work_ns=seen.effect, is_recorded=False),
        seen_in=or_zero(median_of(seen.share[waited])),
        evidence={
            "ranks_that_waited_for_it": float(count),
            "later_than_median_us": seen.shown / 1e3,
            "error_us": seen.error / 1e3,
        },
        next_step=f"Rank {rank} was seen late by {count} ranks and did not report, so its own clock is "
        "not known: see whether its process runs, what it does, and what holds it up.",
        most_certain=_MOST_CERTAIN,
    )


def _alike(m: Matrices, rank: int) -> IntArray:
    """The other ranks of its node, if nodes are blocks of ranks of one size; else all that reported."""
    nodes = m.place.nodes
    size, odd = divmod(m.num_ranks, max(m.place.num_nodes, 1))
    block = np.arange(rank // size * size, (rank // size + 1) * size)
    mates = block[nodes[block] >= 0] if not odd else block[:0]
    is_node = mates.size > 1 and np.array_equal(np.flatnonzero(nodes == nodes[mates[0]]), mates)
    return mates if is_node else np.flatnonzero(m.present)


def _usual(e: Estimates, of_alike: IntArray) -> FloatArray:
    """[num_ranks] ns: how late ranks of each one's node are, or all ranks if those alike are of several nodes."""
    nodes = e.m.place.nodes
    if np.unique(of_alike).size > 1:
        return np.full(nodes.size, median_of(e.late))
    inside = members(nodes)
    return np.asarray(median(np.where(inside >= 0, e.late[inside], np.nan), 1)[nodes])


def _is_off(e: Estimates) -> bool:
    """Whether clocks are off. What is sent while nobody else sends is fast, so those of silent ranks do not tell."""
    return bool(np.abs(e.paths.clock[e.m.present]).max() > CLOCKS_KNOWN_NS)


def _waited_share(m: Matrices, rank: int) -> FloatArray:
    """[num_ranks]: in which share of its operations each waited for the rank, last."""
    last = (m.last[..., 0] == rank) & (m.last_arrival[..., 0] > 0)
    known = np.isfinite(m.wait).sum(axis=0)
    return np.asarray(last.sum(axis=0) / np.maximum(known, 1))
