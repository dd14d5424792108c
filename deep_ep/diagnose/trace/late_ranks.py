"""Verdicts from traces of several ranks: which rank lasts to come late to exchanges, or early, and whether it is its own doing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..analyze.waits_only.judge import NamedRank, measured_waits, verdict_of
from ..analyze.waits_only.lasting import (
    FLOOR_US,
    LEAST_RANKS,
    LEAST_WINDOWS,
    MOST_WINDOWS,
    Lasting,
    find_lasting,
)
from ..core.causes import Cause
from ..core.diagnosis import Diagnosis, FloatArray, Measured, Verdict
from ..core.robust_stats import median, median_of
from .arrivals import Arrivals
from .kernels import COMBINE
from .rank_trace import RankTrace

# Matrices from elsewhere have no hosts.
_UNKNOWN_HOST = "?"
# More have no matrix that a page could show.
_MOST_RANKS = 2048
# Own time explains a lateness from this share on, and nothing of it up to that.
_OWN, _NOT_OWN = 0.5, 0.1
# A rank that is late in a smaller share of the exchanges is late at times.
_MOST_OF_THEM = 0.5
# What a rank is late by in front of other operations than combines is more than its load does to it, from this share of
# the whole on; and up to so many times the usual rows are no load. As of sums of waiting.
_ELSEWHERE, _EVEN = 1 / 3, 1.05
_NO_RANK = (
    f"undecided: a trace does not say of which rank it is, from 0 to {_MOST_RANKS - 1}, and neither does its name. "
    "Name files rank3.json"
)


def judge(found: Sequence[Arrivals], traces: Sequence[RankTrace]) -> Diagnosis:
    """Who lasts to be late or early, as a Diagnosis with source "waits", of windows of equally many exchanges.

    A rank waits for another as long as that one comes later. Without verdicts a note says what is undecided, and what
    is missing.
    """
    ranks = [trace.rank for trace in traces]
    are_known = all(0 <= rank < _MOST_RANKS for rank in ranks)
    num_ranks = max(ranks) + 1 if are_known else 0
    of_job = max([len(ranks), *(trace.num_ranks for trace in traces)])
    verdicts: list[Verdict] = []
    why = [_undecided(found, len(ranks))] if are_known else [_NO_RANK]
    if not any(why):
        judged = [each for each in found if each.count >= LEAST_WINDOWS and not each.num_unmatched]
        verdicts, why = _verdicts(judged)
    if not verdicts and not why and len(ranks) < of_job:
        why = [
            f"these are {len(ranks)} of the {of_job} ranks of the job: a rank without a trace may be late"
        ]
    return Diagnosis(
        measured=_measured(found, num_ranks) if num_ranks else {},
        verdicts=sorted(verdicts, key=lambda verdict: -verdict.effect_us),
        remarks=why,
        hosts=tuple(_UNKNOWN_HOST if rank in ranks else "" for rank in range(num_ranks)),
        devices=tuple(-1 for _ in range(num_ranks)),
        source="waits",
    )


def _undecided(found: Sequence[Arrivals], num_traces: int) -> str:
    """Why nobody can be named; empty if somebody could be."""
    if not found:
        return "undecided: no exchange of kernels is in all traces, so nobody can be late to one"
    if num_traces < LEAST_RANKS:
        return f"undecided: traces of {num_traces} ranks; {LEAST_RANKS} are needed, of which most tell what is usual. Profile more ranks"
    counts = [each.count for each in found if not each.num_unmatched]
    if not counts:
        return (
            f"undecided: ranks differ by {found[0].num_unmatched} in how many {found[0].name} they have, so it is not known which "
            "belong together. Profile the same steps everywhere"
        )
    if max(counts) < LEAST_WINDOWS:
        return (
            f"undecided: {max(counts)} exchanges of a kind; {LEAST_WINDOWS} are needed to tell what lasts from "
            "what happens once. Profile more steps"
        )
    return ""


def _verdicts(judged: Sequence[Arrivals]) -> tuple[list[Verdict], list[str]]:
    """The verdicts, and why nobody else is named."""
    count = min(MOST_WINDOWS, *(each.count for each in judged))
    windows = np.array(
        [[_waits(part) for part in np.array_split(each.late_us, count, axis=1)] for each in judged]
    )
    num_ranks = windows.shape[-1]
    windows[..., np.arange(num_ranks), np.arange(num_ranks)] = np.nan
    found = find_lasting(windows, np.zeros(num_ranks, np.int64), FLOOR_US)
    late = np.flatnonzero(found.waited_for.named)
    if 2 * len(late) >= num_ranks:
        return [], ["undecided: half of the ranks or more come late, so none of them is unusual"]
    causes = {int(place): _cause(judged, found, int(place)) for place in late}
    if not causes and all(each.has_notify for each in judged):
        early = np.flatnonzero(found.waits.named & found.wait_in_all_kinds)
        causes = dict.fromkeys(map(int, early), Cause.EARLY)
    verdicts = []
    for place, cause in causes.items():
        if not isinstance(cause, Cause):
            continue
        one = NamedRank(cause, int(cause == Cause.EARLY), place)
        for each, of_kind, effects in zip(judged, windows, found.by_kind[one.side, :, :, place]):
            if np.nanmedian(effects) >= one.effect(found) / 2:
                verdict = verdict_of(found, one, each.name, of_kind.mean(axis=0), effects)
                verdicts.append(_told(judged, verdict, each, one))
    return verdicts, [f"undecided: {each}" for each in causes.values() if type(each) is str]


def _waits(late_us: FloatArray) -> FloatArray:
    """[ranks, ranks]: the mean of how much later the other one came."""
    total = np.zeros((len(late_us), len(late_us)))
    for of_ranks in late_us.T:
        total += np.maximum(of_ranks[None, :] - of_ranks[:, None], 0.0)
    mean: FloatArray = total / late_us.shape[1]
    return mean


def _cause(judged: Sequence[Arrivals], found: Lasting, place: int) -> Cause | str:
    """Why a rank lasts to come late, or in words why that is not told."""
    rank = judged[0].ranks[place]
    by_kind = median(found.by_kind[0, :, :, place], 1)
    effect = float(by_kind.sum())
    spread = max(each.spread_us for each in judged)
    if spread > effect / 2:
        return (
            f"rank {rank} is in exchanges for {effect:,.0f} us less than the others, but their ends differ by {spread:,.0f} us from one "
            "exchange to the next: they were matched wrongly, or clocks were set meanwhile"
        )
    own = sum(_over_median(each.own_us, place) for each in judged)
    held_up = (
        f"rank {rank} is in exchanges for {effect:,.0f} us less than the others, of which {own:,.0f} us are its own time before "
        "them: for the rest the exchange before held it up, or it has less to receive. Counters tell"
    )
    if own < _NOT_OWN * effect:
        if sum(_over_median(each.after_us, place) for each in judged) >= _OWN * effect:
            return Cause.LINK
        return held_up
    elsewhere = sum(float(us) for us, each in zip(by_kind, judged) if each.operation != COMBINE)
    if elsewhere < _ELSEWHERE * effect:
        load = _load(judged, place)
        if load > _EVEN:
            return Cause.HOT_EXPERTS
        if math.isnan(load):
            return (
                f"rank {rank} comes {effect:,.0f} us late to combines alone: its experts get more tokens than the others', or they are "
                "slow. Profile with record_shapes=True, which says how many rows it has"
            )
    if own < _OWN * effect:
        return held_up
    over = np.concatenate([each.over_median_us[place] for each in judged])
    seen_in = (over >= effect / len(judged) / 2).mean()
    return Cause.LATE if seen_in >= _MOST_OF_THEM else Cause.LATE_AT_TIMES


def _over_median(times: FloatArray, place: int) -> float:
    """By how much the times of a rank are usually longer than the median rank's."""
    return median_of((times - median(times, 0))[place])


def _load(judged: Sequence[Arrivals], place: int) -> float:
    """Rows of a rank in combines over those of the usual one; NaN where they are not known."""
    loads = [
        float(each.rows[place] / median_of(each.rows))
        for each in judged
        if each.operation == COMBINE and median_of(each.rows) > 0
    ]
    return max(loads, default=math.nan)


def _told(judged: Sequence[Arrivals], verdict: Verdict, each: Arrivals, one: NamedRank) -> Verdict:
    """With what lengths of kernels tell besides; `one` has the place of a rank among those of the traces."""
    over, rank = each.over_median_us[one.rank], each.ranks[one.rank]
    step = one.cause.row.next_step.format(
        operation=each.operation, rank=rank, load=f"{_load(judged, one.rank):.1f}"
    )
    if one.cause not in (Cause.EARLY, Cause.LINK):
        did = each.before(one.rank)
        step = f"{step} {did[0].upper()}{did[1:]}."
    seen_in = float((over >= verdict.effect_us / 2).mean())
    return replace(
        verdict,
        rank=rank,
        seen_in=math.nan if one.cause == Cause.EARLY else seen_in,
        duration_us=median_of(each.duration_us),
        evidence={
            "later_than_median_us": median_of(over),
            "own_time_over_median_us": _over_median(each.own_us, one.rank),
            **verdict.evidence,
        },
        next_step=step,
    )


def _measured(found: Sequence[Arrivals], num_ranks: int) -> dict[str, Measured]:
    """What is known of each kind of exchange; all that a rank waits is waited before others have come."""
    measured = {}
    for each in found:
        ranks = np.array(each.ranks)
        wait, own = np.full((num_ranks, num_ranks), np.nan), np.full(num_ranks, np.nan)
        wait[np.ix_(ranks, ranks)] = _waits(each.late_us)
        own[ranks] = median(each.own_us, 1)
        measured[each.name] = replace(
            measured_waits(wait, each.name, each.count),
            duration_us=median_of(each.duration_us),
            gap_us=own,
            late_us=wait,
        )
    return measured
