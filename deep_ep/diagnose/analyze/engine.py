"""Estimates of all ranks become verdicts. Pure; prints nothing, measures nothing.

Where time goes is one additive model. What ranks do is judged on their own clocks (`own_work`, `rank_causes`); what
paths take is fitted together, clocks included, and causes compete for what is left (`path_model`, `path_causes`).
Low latency and normal operations are judged apart, for a rank need not be slow in both. Hops of one normal operation
are judged together: a rank's own time in the hop in which it passes, a path on the hops that take it (`collect.hops`).

1. Causes of slow paths. What a rank waits at its fence for a slow path out of it is the path's.
2. Mixed-Slow, hot experts: more tokens than the others *and* more time because of it. Slow receiver: most of its
   sources wait for slots that it does not give back *and* its own clock says that it takes long to empty them.
3. Comp-Slow: a rank's own clock says that it worked longer; in most operations, or in some. Of a rank that did not
   report, most others must have waited for it.
4. Mixed-Slow, early receiver: a rank works clearly less than the others, and nothing else is the matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..collect.group_matrices import LOW_LATENCY_KINDS, Matrices
from ..core.diagnosis import Diagnosis, Subject, Verdict
from ..core.package import EPTypeError, ranks_text
from .back_pressure import longest, slow_receivers
from .baseline import History
from .estimates import estimate_kinds
from .finding import Found
from .intermittent import late_at_times
from .judged_kind import JudgedKind
from .judged_paths import JudgedPaths, judge_paths
from .outliers import outliers
from .path_verdicts import slow_paths, slower_than_before
from .rank_causes import early_receivers, hot_experts, late_ranks
from .silent_ranks import late_and_silent
from .thresholds import MIN_OPERATIONS, MOST_READ, Thresholds
from .what_if import savings_ns


def judge(
    matrices: Mapping[str, Matrices],
    thresholds: Thresholds | None = None,
    history: History | None = None,
) -> Diagnosis:
    """Verdicts, with the numbers they rest on and what could not be judged.

    Args:
        matrices: per operation kind, as `gather` returns them.
        thresholds: by default according to the device of the counters.
        history: of the same group, to find what slows everything alike; it is brought up to date.

    Raises:
        EPTypeError: anything else.
    """
    if not isinstance(matrices, Mapping) or not all(
        isinstance(m, Matrices) for m in matrices.values()
    ):
        raise EPTypeError(
            f"judge: matrices are a {type(matrices).__name__}; they must be Matrices by kind of operation. "
            "Pass what diagnose.gather() returns."
        )
    families = _estimate(matrices, thresholds)
    found, said = _causes(families, history)
    judged, savings_us = _savings(families, found)
    seen = [o for f in families for kind in f.of_ranks for o in outliers(kind.e, kind.floor)]
    place = next(iter(matrices.values())).place if matrices else None
    return Diagnosis(
        measured={kind: m.measured() for kind, m in matrices.items()},
        verdicts=judged,
        remarks=[*_remarks(matrices), *_clock_remarks(families), *said],
        events=sorted(seen, key=lambda outlier: -outlier.effect_us),
        hosts=place.hosts if place else (),
        devices=place.devices if place else (),
        nodes=tuple(place.nodes.tolist()) if place else (),
        device=place.device if place else "",
        savings_us=savings_us,
    )


@dataclass(frozen=True)
class _Family:
    """Kinds of operation that follow each other, and their paths."""

    kinds: list[JudgedKind]
    paths: JudgedPaths

    @property
    def of_ranks(self) -> list[JudgedKind]:
        """Kinds in which ranks spend time of their own."""
        return [kind for kind in self.kinds if kind.shows_ranks]


def _estimate(matrices: Mapping[str, Matrices], thresholds: Thresholds | None) -> list[_Family]:
    """Low latency, and normal operations."""
    usable = {
        kind: m
        for kind, m in matrices.items()
        if m.present.sum() > 1 and m.num_operations >= MIN_OPERATIONS
    }
    families = [
        {kind: m for kind, m in usable.items() if (kind in LOW_LATENCY_KINDS) == is_low_latency}
        for is_low_latency in (True, False)
    ]
    return [_family(family, thresholds) for family in families if family]


def _family(matrices: Mapping[str, Matrices], thresholds: Thresholds | None) -> _Family:
    limits = {
        kind: thresholds or Thresholds.of(m.place.device, m.stamps_arrivals)
        for kind, m in matrices.items()
    }
    paths = judge_paths(matrices, limits)
    estimates = estimate_kinds(matrices, paths)
    return _Family([JudgedKind(e, limits[e.operation]) for e in estimates], paths)


def _causes(families: Sequence[_Family], history: History | None) -> tuple[list[Found], list[str]]:
    """What was found, and what is to be said beside it."""
    found, said = [], []
    for family in families:
        of_family, remarks = _causes_of(family, history)
        found += of_family
        said += remarks
    if not found:
        found = [f for family in families for f in early_receivers(family.of_ranks)]
    if history is not None:
        history.end_window()
    return sorted(found, key=lambda f: -f.verdict.effect_us), said


def _causes_of(family: _Family, history: History | None) -> tuple[list[Found], list[str]]:
    of_ranks = family.of_ranks
    hot = [f for kind in of_ranks for f in hot_experts(kind)]
    hot_ranks = _ranks(hot)
    slow = slow_receivers(of_ranks)
    holding_up = longest(slow)
    on_paths, remarks = slow_paths(family.paths, family.kinds, hot_ranks, holding_up)
    if history is not None:
        on_paths += [f for kind in family.kinds for f in slower_than_before(kind, history)]
    uneven = [*hot, *slow, *(f for f in on_paths if f.kind.carries_rows)]
    at_times = late_at_times(of_ranks, hot_ranks)
    late = late_ranks(of_ranks, hot_ranks, _ranks(at_times), _largest_ns(uneven))
    silent = late_and_silent(of_ranks)
    return [*hot, *slow, *at_times, *late, *silent, *on_paths], remarks


def _largest_ns(found: Sequence[Found]) -> float:
    return max((f.verdict.effect_us * 1e3 for f in found), default=0.0)


def _ranks(found: Sequence[Found]) -> set[int]:
    return {f.verdict.rank for f in found if f.verdict.rank is not None}


def _savings(
    families: Sequence[_Family], found: Sequence[Found]
) -> tuple[list[Verdict], dict[str, float]]:
    """Verdicts with what is gained without each cause, first and last of all, and per kind what is without all causes.

    A cause is taken out of all kinds that it shows in: ranks in lockstep make up in one operation
    for what they lost in another.
    """
    judged = [f.verdict for f in found]
    together: dict[str, float] = {}
    for family in ([kind.e for kind in of_family.kinds] for of_family in families):
        operations = [e.operation for e in family]
        causes: dict[tuple[str, Subject], list[int]] = {}
        for i, verdict in enumerate(judged):
            if verdict.operation in operations:
                causes.setdefault(verdict.key, []).append(i)
        if not causes:
            continue
        alone = list(causes.values())[:MOST_READ]
        everything = tuple(sorted(i for places in causes.values() for i in places))
        others = [tuple(i for i in everything if i not in places) for places in alone]
        # Of two causes the others are the other one.
        sets = list(dict.fromkeys([*map(tuple, alone), *filter(None, others), everything]))
        gains = [[found[i].gain for i in places] for places in sets]
        saved = {(): 0.0, **dict(zip(sets, (savings_ns(family, gains) / 1e3).tolist()))}
        for places, of_others in zip(alone, others):
            first, last = saved[tuple(places)], max(saved[everything] - saved[of_others], 0.0)
            for i in places:
                judged[i] = replace(judged[i], saving_us=first, alone_us=last)
        together.update(dict.fromkeys(operations, saved[everything]))
    return judged, together


def _remarks(matrices: Mapping[str, Matrices]) -> list[str]:
    if not matrices:
        return ["nothing was counted; call buffer.enable_counters() before the operations"]
    said: list[str] = []
    for kind, m in matrices.items():
        if m.num_ranks < 2:
            return ["one rank: nothing to compare"]
        said += [f"{kind}: of rank {rank} {why}" for rank, why in sorted(m.spoilt.items())]
        missing = [r for r in np.flatnonzero(~m.present).tolist() if r not in m.spoilt]
        if missing:
            said.append(f"{kind}: no counters from {ranks_text(missing)}")
        if m.present.sum() < 2:
            said.append(f"{kind}: undecided, fewer than 2 ranks reported what can be compared")
        elif m.counted and not m.num_operations:
            said.append(
                f"{kind}: undecided, counters have no ring of recent operations, enable_counters(ring=...)"
            )
        elif m.num_operations < MIN_OPERATIONS:
            said.append(
                f"{kind}: undecided, {m.num_operations} operations counted; {MIN_OPERATIONS} are needed"
            )
        reported = np.isfinite(m.span)
        common = reported[reported.sum(axis=1) > m.present.sum() / 2]
        partly = np.flatnonzero(m.present & (common.sum(axis=0) < common.shape[0] / 2)).tolist()
        if partly:
            said.append(
                f"{kind}: {ranks_text(partly)} reported other operations than the rest, at most "
                f"{int(common.sum(axis=0)[partly].max())} of {common.shape[0]} the same; take the "
                "snapshots of all ranks at the same time"
            )
    return said


def _clock_remarks(families: Sequence[_Family]) -> list[str]:
    said = []
    off_us = max((family.paths.clocks_off_us for family in families), default=0.0)
    if off_us:
        said.append(
            f"clocks are off by up to {off_us:,.0f} us from what was measured; verdicts allow for it, but "
            "the late, issue and path parts of the waiting do not. buffer.measure_clock_offsets() on all "
            "ranks puts that right"
        )
    if any(family.paths.is_too_small_for_clocks for family in families):
        said.append(
            "paths are not judged: between two or three ranks a slow path and clocks that drifted look "
            "the same"
        )
    return said
