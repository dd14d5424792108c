"""Verdicts from traces of several ranks: which rank lasts to come late to exchanges, or early, and whether it is its own doing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..analyze.waits_only.lasting import (
    FLOOR_US,
    LEAST_RANKS,
    LEAST_WINDOWS,
    MOST_WINDOWS,
    Lasting,
    error_of_median,
    find_lasting,
)
from ..core.causes import Cause
from ..core.diagnosis import BoolArray, Diagnosis, FloatArray, Measured, Verdict
from ..core.robust_stats import median, median_of, scale
from .arrivals import Arrivals, before
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


def judge(found: Sequence[Arrivals], traces: Sequence[RankTrace]) -> Diagnosis:
    """Who lasts to be late or early, as a Diagnosis with source "waits", of windows of equally many exchanges.

    A rank waits for another as long as that one comes later. Without verdicts a note says what is undecided, and what
    is missing.
    """
    ranks = [trace.rank for trace in traces]
    num_ranks = max(ranks) + 1 if _are_known(ranks) else 0
    of_job = max([len(ranks), *(trace.num_ranks for trace in traces)])
    why = _undecided(found, ranks)
    judged = [each for each in found if each.count >= LEAST_WINDOWS and not each.num_unmatched]
    verdicts: list[Verdict] = []
    if not why:
        verdicts, why = _verdicts(judged, traces)
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


def _are_known(ranks: Sequence[int]) -> bool:
    return all(0 <= rank < _MOST_RANKS for rank in ranks)


def _undecided(found: Sequence[Arrivals], ranks: Sequence[int]) -> list[str]:
    """Why nobody can be named; empty if somebody could be."""
    if not _are_known(ranks):
        return [
            f"undecided: a trace does not say of which rank it is, from 0 to {_MOST_RANKS - 1}, and neither does its name. Name files "
            "rank3.json"
        ]
    if not found:
        return ["undecided: no exchange of kernels is in all traces, so nobody can be late to one"]
    if len(ranks) < LEAST_RANKS:
        return [
            f"undecided: traces of {len(ranks)} ranks; {LEAST_RANKS} are needed, of which most tell what is usual. Profile more ranks"
        ]
    uneven = [each for each in found if each.num_unmatched]
    if len(uneven) == len(found):
        return [
            f"undecided: ranks differ by {uneven[0].num_unmatched} in how many {uneven[0].name} they have, so it is not known which "
            "belong together. Profile the same steps everywhere"
        ]
    if all(each.count < LEAST_WINDOWS for each in found if not each.num_unmatched):
        return [
            f"undecided: {max(each.count for each in found)} exchanges of a kind; {LEAST_WINDOWS} are needed to tell what lasts from "
            "what happens once. Profile more steps"
        ]
    return []


class _Late(NamedTuple):
    """Who is named, and why; nothing for what is not told."""

    place: int
    cause: Cause | None = None
    said: str = ""
    load: str = ""


def _verdicts(
    judged: Sequence[Arrivals], traces: Sequence[RankTrace]
) -> tuple[list[Verdict], list[str]]:
    """The verdicts, and why nobody else is named."""
    windows = np.stack(
        [_windows(each, min(_num_windows(each) for each in judged)) for each in judged]
    )
    num_ranks = windows.shape[-1]
    windows[..., np.arange(num_ranks), np.arange(num_ranks)] = np.nan
    found = find_lasting(windows, np.zeros(num_ranks, np.int64), FLOOR_US)
    places = np.flatnonzero(found.waited_for.named)
    if 2 * len(places) >= num_ranks:
        return [], ["undecided: half of the ranks or more come late, so none of them is unusual"]
    late = [_late(judged, found, int(place)) for place in places]
    if not late and all(each.has_notify for each in judged):
        early = np.flatnonzero(found.waits.named & _in_all_kinds(found))
        late = [_Late(int(place), Cause.EARLY) for place in early]
    verdicts: list[Verdict] = []
    for one in late:
        for kind, each in enumerate(judged):
            side = int(one.cause == Cause.EARLY)
            effects = found.by_kind[side, kind, :, one.place]
            least = found.sides[side].effect[one.place] / len(judged) / 2
            if one.cause is not None and np.nanmedian(effects) >= least:
                in_windows = float(found.sides[side].in_windows[one.place])
                verdicts.append(
                    _verdict(one, one.cause, each, effects, in_windows, windows[kind], traces)
                )
    return verdicts, [f"undecided: {one.said}" for one in late if one.said]


def _in_all_kinds(found: Lasting) -> BoolArray:
    """[ranks], who waits in each of several kinds, not as one that has less to do between two of them."""
    waits = median(found.by_kind[1], 1)
    in_all: BoolArray = (waits >= waits.mean(axis=0) / 2).all(axis=0) & (len(waits) > 1)
    return in_all


def _num_windows(each: Arrivals) -> int:
    return min(each.count, MOST_WINDOWS)


def _windows(each: Arrivals, count: int) -> FloatArray:
    """[count, ranks, ranks], what a rank waits for each other on average in as many parts of all exchanges."""
    parts = np.array_split(each.late_us, count, axis=1)
    return np.stack([_waits(part) for part in parts])


def _waits(late_us: FloatArray) -> FloatArray:
    """[ranks, ranks]: the mean of how much later the other one came."""
    total = np.zeros((len(late_us), len(late_us)))
    for of_ranks in late_us.T:
        total += np.maximum(of_ranks[None, :] - of_ranks[:, None], 0.0)
    mean: FloatArray = total / late_us.shape[1]
    return mean


def _late(judged: Sequence[Arrivals], found: Lasting, place: int) -> _Late:
    """Why a rank lasts to come late."""
    rank = judged[0].ranks[place]
    by_kind = median(found.by_kind[0, :, :, place], 1)
    effect = float(by_kind.sum())
    spread = max(each.spread_us for each in judged)
    if spread > effect / 2:
        return _Late(
            place,
            said=f"rank {rank} is in exchanges for {effect:,.0f} us less than the others, but their ends differ by {spread:,.0f} us from one "
            "exchange to the next: they were matched wrongly, or clocks were set meanwhile",
        )
    own = sum(_over_median(each.own_us, place) for each in judged)
    if own < _NOT_OWN * effect:
        if sum(_over_median(each.after_us, place) for each in judged) >= _OWN * effect:
            return _Late(place, Cause.LINK)
        return _Late(
            place,
            said=f"rank {rank} is in exchanges for {effect:,.0f} us less than the others, and its own time before them is not longer: the "
            "exchange before held it up, or it has less to receive. Counters tell",
        )
    elsewhere = sum(float(us) for us, each in zip(by_kind, judged) if each.operation != COMBINE)
    if elsewhere < _ELSEWHERE * effect:
        load = max(
            (_load(each, place) for each in judged if each.operation == COMBINE), default=math.nan
        )
        if load > _EVEN:
            return _Late(place, Cause.HOT_EXPERTS, load=f"{load:.1f}")
        if math.isnan(load):
            return _Late(
                place,
                said=f"rank {rank} comes {effect:,.0f} us late to combines alone: its experts get more tokens than the others', or they are "
                "slow. Profile with record_shapes=True, which says how many rows it has",
            )
    if own < _OWN * effect:
        return _Late(
            place,
            said=f"rank {rank} comes {effect:,.0f} us late, of which {own:,.0f} us are its own time: for the rest the exchange before held it up. "
            "Counters tell",
        )
    seen_in = _seen_in(judged, place, effect / len(judged))
    cause = Cause.LATE if seen_in >= _MOST_OF_THEM else Cause.LATE_AT_TIMES
    return _Late(place, cause)


def _over_median(times: FloatArray, place: int) -> float:
    """By how much the times of a rank are usually longer than the median rank's."""
    return median_of((times - median(times, 0))[place])


def _seen_in(judged: Sequence[Arrivals], place: int, least: float) -> float:
    """Share of the exchanges in which a rank is late by half of its effect or more."""
    over = np.concatenate([each.over_median_us[place] for each in judged])
    return float((over >= least / 2).mean())


def _load(each: Arrivals, place: int) -> float:
    """Rows of a rank over those of the usual one; NaN where they are not known."""
    usual = median_of(each.rows)
    return float(each.rows[place] / usual) if usual > 0 else math.nan


def _verdict(
    one: _Late,
    cause: Cause,
    each: Arrivals,
    effects: FloatArray,
    in_windows: float,
    windows: FloatArray,
    traces: Sequence[RankTrace],
) -> Verdict:
    rank, count = each.ranks[one.place], len(effects)
    effect = float(np.median(effects))
    half = 1.96 * float(error_of_median(scale(effects, 0), count))
    wait = np.nan_to_num(windows.mean(axis=0))
    longest = wait.max(axis=1)
    due = wait.argmax(axis=1) == one.place
    if cause == Cause.EARLY:
        due = np.arange(len(wait)) == one.place
    words = {"operation": each.operation, "rank": rank, "load": one.load}
    step = cause.row.next_step.format_map(words)
    if cause not in (Cause.EARLY, Cause.LINK):
        did = str(before(each, traces, one.place))
        step += f" {did[0].upper()}{did[1:]}."
    return Verdict(
        kind=cause.row.slow,
        cause=cause,
        operation=each.name,
        rank=rank,
        edge=None,
        effect_us=effect,
        interval_us=(effect - half, effect + half) if half > 0 else (math.nan, math.nan),
        share=float(longest[due].sum() / longest.sum()) if longest.any() else 0.0,
        seen_in=float((each.over_median_us[one.place] >= effect / 2).mean())
        if cause != Cause.EARLY
        else math.nan,
        duration_us=median_of(each.duration_us),
        evidence={
            "later_than_median_us": median_of(each.over_median_us[one.place]),
            "own_time_over_median_us": _over_median(each.own_us, one.place),
            "windows": float(count),
            "windows_with_it": in_windows,
        },
        next_step=step,
    )


def _measured(found: Sequence[Arrivals], num_ranks: int) -> dict[str, Measured]:
    """What is known of each kind of exchange; all that a rank waits is waited before others have come."""
    measured = {}
    for each in found:
        ranks = np.array(each.ranks)
        cell = np.full((num_ranks, num_ranks), np.nan)
        wait, rank = cell.copy(), np.full(num_ranks, np.nan)
        wait[np.ix_(ranks, ranks)] = _waits(each.late_us)
        own, waits = rank.copy(), rank.copy()
        own[ranks] = median(each.own_us, 1)
        waits[ranks] = np.nanmax(wait[ranks], axis=1)
        measured[each.name] = Measured(
            each.name,
            each.count,
            0,
            0,
            median_of(each.duration_us),
            own,
            rank,
            rank,
            waits,
            wait_us=wait,
            late_us=wait,
            issue_us=cell,
            path_us=cell,
            tokens=cell,
            bytes=cell,
        )
    return measured
