"""Causes in ranks: hot experts, late ranks, slow sending and receiving, ranks that come early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..collect.hops import LAST_HOPS
from ..core.causes import Cause
from ..core.diagnosis import EvidenceKey, FloatArray
from ..core.robust_stats import median, or_zero
from .back_pressure import UNEVEN
from .estimates import Estimates
from .finding import NO_WORDS, Found, Named, Size, cells_of, found_cause, own_times
from .intermittent import not_at_times
from .judged_kind import JudgedKind
from .own_work import Effect, compare
from .thresholds import BORNE_OUT
from .what_if import Gain


def hot_experts(kind: JudgedKind) -> list[Found]:
    """Ranks with more tokens than the others, and with more to do because of them."""
    e = kind.e
    has_more = e.load > kind.limits.load
    if not has_more.any():
        return []
    bar = kind.bar(e.busy)
    # As if all that ranks do were done for tokens.
    at_most = (e.load - 1.0) * or_zero(e.own_ns)
    # Where nobody knows what tokens cost, they must be able to explain the larger half.
    by_tokens = e.token_time > kind.floor if e.cost_known else at_most > e.busy.value / 2
    by_tokens &= e.busy.value < at_most + bar
    is_hot = has_more & (e.busy.value > bar) & by_tokens
    return [_hot_rank(kind, rank) for rank in np.flatnonzero(is_hot).tolist()]


def _hot_rank(kind: JudgedKind, rank: int) -> Found:
    e = kind.e
    own_ns, load = float(e.busy.value[rank]), float(e.load[rank])
    evidence: dict[EvidenceKey, float] = {
        "tokens_over_even_share": load,
        "own_time_over_median_us": own_ns / 1e3,
        "explained_by_tokens_us": float(e.token_time[rank]) / 1e3,
    }
    gain, words = _hot_gain(e, rank, own_ns), {"load": f"{load:.1f}"}
    return _found(kind, Cause.HOT_EXPERTS, rank, e.busy, gain, evidence, words)


def _found(
    kind: JudgedKind,
    cause: Cause,
    rank: int,
    effect: Effect,
    gain: Gain,
    evidence: Mapping[EvidenceKey, float],
    words: Mapping[str, str] = NO_WORDS,
) -> Found:
    """A cause in what a rank does by itself. Others wait for it, or it for them if it is early."""
    e = kind.e
    is_early = cause == Cause.EARLY
    return found_cause(
        kind,
        cause,
        Named(rank),
        Size(float(effect.value[rank]), float(effect.error[rank]), e.load.size, effect.apart),
        cells_of(e, receiver=rank) if is_early else cells_of(e, source=rank),
        gain,
        seen_in=float(effect.above[rank]),
        evidence={**evidence, **own_times(e, rank)},
        words=words,
    )


def _hot_gain(e: Estimates, rank: int, own_ns: float) -> Gain:
    """Its own time, and that of the paths that its tokens take, spread over all ranks."""
    m = e.m
    rows = np.nansum(m.tokens[rank]) >= np.nansum(m.tokens[:, rank])
    paths = (rank, slice(None)) if rows else (slice(None), rank)
    within, between = e.paths.level
    longer = e.paths.time[paths] - np.where(e.paths.between[paths], between, within)
    longer = np.maximum(np.nan_to_num(longer), 0.0)
    return Gain(e.operation, rank, work_ns=own_ns, is_shared=True, paths=paths, path_ns=longer)


def late_ranks(
    kinds: Sequence[JudgedKind],
    hot_ranks: set[int],
    at_times: set[int],
    uneven_ns: float = 0.0,
) -> list[Found]:
    """Ranks that work longer by their own clock; kinds bear each other out.

    Args:
        kinds: of operations.
        hot_ranks: whose tokens explain it.
        at_times: ranks that are late in some operations only, of which a median shows something.
        uneven_ns: by how much rows come later to some ranks than to others in normal operations. Who has
            to wait for them does meanwhile what others do at the end, or passes them on at the end.
    """
    found = []
    for cause in (Cause.LATE, Cause.SLOW_RECEIVE):
        effects = [kind.e.work if cause == Cause.LATE else kind.e.drain for kind in kinds]
        # Ticks of the operating system may all come in the operations of one kind, and move its median.
        excess = [not_at_times(kind) for kind in kinds] if cause == Cause.LATE else None
        certain = _certain(kinds, effects, excess)
        for kind, effect in zip(kinds, effects):
            for rank in certain:
                if not effect.value[rank] > max(kind.floor, BORNE_OUT * kind.bar(effect)[rank]):
                    continue
                # Who has more to do for its tokens is late as well if more is left than they explain.
                is_more = kind.e.cost_known and effect.value[rank] > kind.e.token_time[rank]
                if rank in hot_ranks and not is_more:
                    continue
                if cause == Cause.LATE and rank in at_times:
                    continue
                # A rank passes rows on while it sends its own, and at the end.
                follows = effect.value[rank] < UNEVEN * uneven_ns
                if not (kind.e.operation in LAST_HOPS and follows):
                    found.append(_late_rank(kind, cause, effect, rank))
    return found


def _certain(
    kinds: Sequence[JudgedKind],
    effects: Sequence[Effect],
    excess: Sequence[FloatArray] | None = None,
) -> list[int]:
    """Ranks that exceed what is asked in one kind, or in all of them together.

    Noise may be in all kinds alike, so together they are one series.

    Args:
        kinds: of operations.
        effects: of each kind.
        excess: of each kind, [n, num_ranks] ns, in place of that of the effects.
    """
    excess = excess or [effect.excess for effect in effects]
    over = [median(of, 0) > kind.bar(effect) for of, kind, effect in zip(excess, kinds, effects)]
    length = min((len(effect.excess) for effect in effects), default=0)
    if len(kinds) > 1:
        mean = np.mean([of_kind[-length:] for of_kind in excess], axis=0)
        together = compare(mean, effects[0].nodes)
        # What was taken out for tokens is off by as much in every operation.
        off = np.sqrt(np.sum([effect.by_tokens**2 for effect in effects], axis=0)) / len(effects)
        together = replace(together, by_tokens=off)
        least = min(kinds, key=lambda kind: kind.rank_floor)
        over.append(together.value > least.bar(together))
    return np.flatnonzero(np.any(over, axis=0)).tolist() if over else []


def _late_rank(kind: JudgedKind, cause: Cause, effect: Effect, rank: int) -> Found:
    e = kind.e
    extra = float(effect.value[rank])
    gain = Gain(
        e.operation,
        rank,
        work_ns=extra if cause == Cause.LATE else 0.0,
        drain_ns=extra if cause == Cause.SLOW_RECEIVE else 0.0,
    )
    send_surplus = float(e.send_ns[rank]) - float(np.nanmedian(e.send_ns))
    if cause == Cause.LATE and send_surplus > extra / 2:
        cause = Cause.SLOW_SEND
    evidence: dict[EvidenceKey, float] = {
        "later_than_median_us": float(e.late[rank]) / 1e3,
        "own_time_over_median_us": extra / 1e3,
        "error_us": float(effect.error[rank]) / 1e3,
    }
    return _found(kind, cause, rank, effect, gain, evidence)


def early_receivers(kinds: Sequence[JudgedKind]) -> list[Found]:
    """Ranks that work clearly less than the others; for groups in which nothing else was found."""
    effects = [kind.e.work.reversed() for kind in kinds]
    certain = _certain(kinds, effects)
    return [
        _early_receiver(kind, early, rank)
        for kind, early in zip(kinds, effects)
        for rank in certain
        if early.value[rank] > max(kind.floor, BORNE_OUT * kind.bar(early)[rank])
    ]


def _early_receiver(kind: JudgedKind, early: Effect, rank: int) -> Found:
    evidence: dict[EvidenceKey, float] = {
        "earlier_than_median_us": -float(kind.e.late[rank]) / 1e3,
        "tokens_over_even_share": float(kind.e.load[rank]),
    }
    # Nothing ends earlier when it comes later.
    return _found(kind, Cause.EARLY, rank, early, Gain(kind.e.operation), evidence)
