"""The rules: estimates of all ranks become verdicts. Pure; prints nothing, measures nothing.

Order of the rules, each taking the ranks it explains away from the later ones:

1. Mixed-Slow, hot experts: far more tokens than the others *and* more time because of it.
   Slow receiver: most of its sources wait for slots that it does not give back *and* its own clock says
   that it takes long to empty them.
2. Comp-Slow: a rank's own clock says it worked longer *and* the others see it late; in most operations,
   or in some. Of a rank that did not report, most others must have waited for it.
3. Comm-Slow: all paths into (ingress) or out of (egress) one rank, between two nodes, on one rail;
   or one path slower than all that explains.
4. Mixed-Slow, early receiver: a rank works clearly less than the others, and nothing else is
   the matter.

Hops of one normal operation are judged together, in the order in which rows travel, each by what only it
can cause: a rank's own time in the hop in which it passes, a path on the hop that takes it (`collect.hops`).
Low latency and normal operations are judged apart, for a rank need not be slow in both.

A cause is named when its effect is big enough to care about, far outside its own error, outside
of how healthy ranks differ from each other, and there in most operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..collect.group_matrices import LOW_LATENCY_KINDS, Matrices
from ..core.diagnosis import Diagnosis, Subject, Verdict
from ..core.package import EPTypeError, ranks_text
from .back_pressure import longest, slow_receivers
from .baseline import History
from .estimates import estimate_kinds
from .finding import Found
from .intermittent import late_at_times
from .outliers import outliers
from .path_rules import path_remarks, slow_paths, slower_than_before, without_parts
from .rank_rules import early_receivers, hot_experts, late_ranks
from .silent_ranks import late_and_silent
from .thresholds import MIN_OPERATIONS, JudgedKind, Thresholds
from .what_if import savings_ns

# Single savings are computed for this many verdicts; a report of more is not read to its end.
_MOST_SAVINGS = 12


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
    _require_matrices("judge", matrices)
    kinds = _estimate(matrices, thresholds)
    found = _causes(kinds, history)
    judged, savings_us = _savings(kinds, found)
    seen = [outlier for kind in _of_ranks(kinds) for outlier in outliers(kind.e, kind.floor)]
    place = next(iter(matrices.values())).place if matrices else None
    return Diagnosis(
        measured={kind: m.measured() for kind, m in matrices.items()},
        verdicts=judged,
        remarks=[
            *_remarks(matrices),
            *_clock_remarks(kinds),
            *(remark for kind in kinds for remark in path_remarks(kind)),
        ],
        events=sorted(seen, key=lambda outlier: -outlier.effect_us),
        hosts=place.hosts if place else (),
        devices=place.devices if place else (),
        nodes=tuple(place.nodes.tolist()) if place else (),
        device=place.device if place else "",
        savings_us=savings_us,
    )


def verdicts(
    matrices: Matrices | Mapping[str, Matrices], thresholds: Thresholds | None = None
) -> list[Verdict]:
    """Names the causes of waiting, the largest effect first; an empty list is "no anomaly".

    Args:
        matrices: of one operation kind, or per kind as `gather` returns them. Kinds are judged
            together: a rank that is hot in one kind is explained by it in the other.
        thresholds: by default according to the device of the counters.
    """
    by_kind = {matrices.operation: matrices} if isinstance(matrices, Matrices) else matrices
    _require_matrices("verdicts", by_kind)
    kinds = _estimate(by_kind, thresholds)
    return _savings(kinds, _causes(kinds, None))[0]


def _require_matrices(where: str, given: Any) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(m, Matrices) for m in given.values()):
        raise EPTypeError(
            f"{where}: matrices are a {type(given).__name__}; they must be Matrices by kind of operation. "
            "Pass what diagnose.gather() returns."
        )


def _estimate(matrices: Mapping[str, Matrices], thresholds: Thresholds | None) -> list[JudgedKind]:
    usable = {
        kind: m
        for kind, m in matrices.items()
        if m.present.sum() > 1 and (m.num_operations or m.counted) >= MIN_OPERATIONS
    }
    return [
        JudgedKind(e, thresholds or Thresholds.of(e.m.place.device, e.m.stamps_arrivals))
        for e in estimate_kinds(usable)
    ]


def _causes(kinds: Sequence[JudgedKind], history: History | None) -> list[Found]:
    found = [f for family in _families(kinds) for f in _causes_of(family, history)]
    if not found:
        found = [f for family in _families(kinds) for f in early_receivers(_of_ranks(family))]
    if history is not None:
        history.end_window()
    return sorted(found, key=lambda f: -f.verdict.effect_us)


def _causes_of(kinds: Sequence[JudgedKind], history: History | None) -> list[Found]:
    """Of kinds that follow each other."""
    of_ranks = _of_ranks(kinds)
    hot = [f for kind in of_ranks for f in hot_experts(kind)]
    hot_ranks = _ranks(hot)
    slow = slow_receivers(of_ranks, hot_ranks)
    holding_up = longest(slow)
    on_paths = []
    hops = [kind for kind in kinds if kind.carries_rows]
    for kind in kinds:
        others = [hop for hop in hops if hop is not kind] if kind.carries_rows else []
        on_paths += slow_paths(kind, hot_ranks, holding_up, others)
        if history is not None:
            on_paths += slower_than_before(kind, history)
    at_times = late_at_times(of_ranks, hot_ranks | set(holding_up))
    uneven = [*hot, *slow, *(f for f in on_paths if f.kind.carries_rows)]
    late = late_ranks(of_ranks, hot_ranks, _ranks(at_times), set(holding_up), _largest_ns(uneven))
    return [*hot, *slow, *at_times, *late, *late_and_silent(of_ranks), *without_parts(on_paths)]


def _largest_ns(found: Sequence[Found]) -> float:
    return max((f.verdict.effect_us * 1e3 for f in found), default=0.0)


def _families(kinds: Sequence[JudgedKind]) -> list[list[JudgedKind]]:
    """Low latency, and normal operations."""
    low_latency = [kind.e.operation in LOW_LATENCY_KINDS for kind in kinds]
    return [
        [k for k, is_low in zip(kinds, low_latency) if is_low == which] for which in (True, False)
    ]


def _of_ranks(kinds: Sequence[JudgedKind]) -> list[JudgedKind]:
    return [kind for kind in kinds if kind.shows_ranks]


def _ranks(found: Sequence[Found]) -> set[int]:
    return {f.verdict.rank for f in found if f.verdict.rank is not None}


def _savings(
    kinds: Sequence[JudgedKind], found: Sequence[Found]
) -> tuple[list[Verdict], dict[str, float]]:
    """Verdicts with what each cause alone would save, and per kind what all causes would.

    A cause is taken out of all kinds that it shows in: ranks in lockstep make up in one operation
    for what they lost in another.
    """
    judged = [f.verdict for f in found]
    together: dict[str, float] = {}
    for family in ([kind.e for kind in of_family] for of_family in _families(kinds)):
        operations = [e.operation for e in family]
        causes: dict[tuple[str, Subject], list[int]] = {}
        for i, verdict in enumerate(judged):
            if verdict.operation in operations:
                causes.setdefault(verdict.key, []).append(i)
        if not causes:
            continue
        # A long list is not read to its end.
        alone = list(causes.values())[:_MOST_SAVINGS]
        everything = [i for places in causes.values() for i in places]
        sets = [[found[i].gain for i in places] for places in (*alone, everything)]
        saved = (savings_ns(family, sets) / 1e3).tolist()
        for places, saving_us in zip(alone, saved):
            for i in places:
                judged[i] = replace(judged[i], saving_us=saving_us)
        together.update(dict.fromkeys(operations, saved[-1]))
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
        counted = m.num_operations or m.counted
        if m.present.sum() < 2:
            said.append(f"{kind}: undecided, fewer than 2 ranks reported what can be compared")
        elif counted < MIN_OPERATIONS:
            said.append(
                f"{kind}: undecided, {counted} operations counted; {MIN_OPERATIONS} are needed"
            )
        elif m.num_operations == 0:
            said.append(f"{kind}: no ring of recent operations; judged by totals, which is weaker")
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


def _clock_remarks(kinds: Sequence[JudgedKind]) -> list[str]:
    said = []
    off_us = max((kind.clocks_off_us for kind in kinds), default=0.0)
    if off_us:
        said.append(
            f"clocks are off by up to {off_us:,.0f} us from what was measured; verdicts allow for it, but "
            "the late, issue and path parts of the waiting do not. buffer.measure_clock_offsets() on all "
            "ranks puts that right"
        )
    if any(kind.is_too_small_for_clocks for kind in kinds):
        said.append(
            "paths are not judged: between two or three ranks a slow path and clocks that drifted look "
            "the same"
        )
    return said
