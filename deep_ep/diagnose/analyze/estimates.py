"""Robust numbers from matrices: per rank its own work and lateness, per path its time.

Each number is a median over operations, with its error and with the share of operations that
agree in sign. Nothing is decided here; `verdict.py` compares these numbers with thresholds.

Two principles:

* A rank answers for its own clock. It may enter late because it was held up in the operation
  before; only time between its own stamps (its work) is its own doing.
* A path is judged by arrival minus issue, whatever the receiver did meanwhile, from operations
  in which that time could be seen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..collect.group_matrices import Matrices
from ..collect.hops import GATEWAY_DISPATCH, NORMAL_COMBINE, NORMAL_DISPATCH
from ..core.diagnosis import FloatArray
from ..core.robust_stats import (
    MAD_TO_SIGMA,
    healthy,
    huber,
    inflation,
    lower_median,
    median,
    median_of,
    or_zero,
    student,
)
from .path_model import Paths, drifted_clocks, split_paths

# Operations whose tokens differ by less than this share of the median say nothing about their cost.
_MIN_TOKEN_SPREAD = 0.01
# Ranks this near the reference, in standard deviations, stand for it.
_NEAR = 2.0
# Operations and ranks settle against each other within a few sweeps; chosen, not tuned.
_SWEEPS = 2
# The cost of a token settles against hiccups within a few steps.
_COST_STEPS = 3
# How far healthy ranks are expected to differ for good, as a share of their time.
_HEALTHY_DIFFERENCE = 0.005
# What is expected of them weighs as much as so many ranks that were seen.
_EXPECTED_WEIGHT = 2.0
# A scale of n normal values is wrong by so many times itself over the root of n.
_SCALE_COST = 1.17
# A spread is compared with in about so many standard deviations, and in 1.96 of them for intervals.
_FAR, _NORMAL_95 = 4.0, 1.96
# A median of n values has so many times the variance of their mean.
_MEDIAN_VARIANCE = 1.57
# The cost of a token is taken from the operations of each rank when what it explains is known this
# well, in ns or as a share.
_COST_KNOWN_NS = 1_000.0
_COST_KNOWN_SHARE = 0.25


@dataclass(frozen=True)
class Effect:
    """How far one quantity of each rank lies above what is usual in the group; `[num_ranks]`.

    Attributes:
        value: nanoseconds per operation above the reference; NaN where unknown.
        error: its standard error; 0 where only totals were there.
        lasting: of it, what noise that outlasts an operation makes; kinds have it in common.
        above, below: share of the operations in which it lay above, below the reference.
        count: operations it rests on.
        spread: how far healthy ranks differ from each other for good, standard deviation; larger
            where few ranks tell.
        apart: how far a rank without any cause may lie from the reference besides its error,
            standard deviation; for intervals, which ask what the cause alone adds.
    """

    value: FloatArray
    error: FloatArray
    lasting: FloatArray
    above: FloatArray
    below: FloatArray
    count: FloatArray
    spread: float
    apart: float

    def reversed(self) -> Effect:
        """How far below instead of above, with the upper ranks for the healthy ones."""
        noise = or_zero(median_of(self.error))
        reference, spread = healthy(-self.value, float(np.hypot(noise, self.spread)))
        return Effect(
            -self.value - reference,
            self.error,
            self.lasting,
            self.below,
            self.above,
            self.count,
            _for_good(spread, noise, self.value.size),
            self.apart,
        )


def pooled(effects: Sequence[Effect]) -> Effect:
    """The mean over operation kinds, each as far as it is known; at least one."""
    values, errors, lasts = (
        np.array([getattr(x, name) for x in effects]) for name in ("value", "error", "lasting")
    )
    known = np.isfinite(values + errors)
    kinds = np.where(known.any(axis=0), known.sum(axis=0), np.nan)
    value = np.where(known, values, 0.0).sum(axis=0) / kinds
    # Noise that outlasts an operation is in all kinds alike; averaging takes nothing of it away.
    lasting = np.where(known, lasts, 0.0).sum(axis=0) / kinds
    single = np.where(known, errors**2 - lasts**2, 0.0).sum(axis=0)
    error = np.hypot(np.sqrt(np.maximum(single, 0.0)) / kinds, lasting)
    counts = np.where(known, [x.count for x in effects], 0.0)
    count = counts.sum(axis=0)
    above, below = (
        np.sum(counts * np.nan_to_num(shares), axis=0) / np.maximum(count, 1.0)
        for shares in ([x.above for x in effects], [x.below for x in effects])
    )
    noise = or_zero(median_of(error))
    reference, spread = healthy(value, float(np.hypot(noise, min(x.spread for x in effects))))
    for_good = _for_good(spread, noise, value.size)
    apart = min(x.apart for x in effects)
    return Effect(value - reference, error, lasting, above, below, count, for_good, apart)


@dataclass(frozen=True)
class Estimates:
    """Everything the rules look at, for one operation kind; times in nanoseconds per operation.

    Attributes:
        m: what it was made from.
        num_operations: operations the numbers rest on.
        has_stamps: False where only totals were there (means, without errors).
        duration_ns: what a rank spends in the operation, median.
        own_ns: what it spends by itself around one operation, before, while and after sending.
        work: own time before and while sending, up to the begin of waiting, without what the
            tokens that the rank sends explain.
        excess: [n, num_ranks], that time in each operation, above the operation's median rank.
        drain: own time after the last arrival, without what the tokens it received explain.
        token_time, token_error: [num_ranks], of these, what the tokens explain, and its error.
        cost_known: whether the cost of a token is known apart from differences between ranks, or
            does not matter, because all have the same number.
        late, late_error: [num_ranks], when the others saw everything of this rank issued.
        waited_for: [num_ranks], what the others wait when this rank comes last, mean; no clock but
            their own tells.
        load: tokens that the rank's experts handle, over an even share.
        gap_ns, span_ns, send_ns, drain_ns: [num_ranks], medians of what each rank does by itself.
        paths: the path matrix, taken apart.
        blame: [receiver, source], waiting of the receiver in operations in which the source came
            last.
    """

    m: Matrices
    num_operations: int
    has_stamps: bool
    duration_ns: float
    own_ns: float
    work: Effect
    excess: FloatArray
    drain: Effect
    token_time: FloatArray
    token_error: FloatArray
    cost_known: bool
    late: FloatArray
    late_error: FloatArray
    waited_for: FloatArray
    load: FloatArray
    gap_ns: FloatArray
    span_ns: FloatArray
    send_ns: FloatArray
    drain_ns: FloatArray
    paths: Paths
    blame: FloatArray

    @property
    def operation(self) -> str:
        """The operation kind."""
        return self.m.operation

    @functools.cached_property
    def busy(self) -> Effect:
        """Work and drain together, tokens not taken out; asked for where loads differ."""
        return _compare(self.m.gap + self.m.span + self.m.drain, self.m)


def estimate(
    m: Matrices,
    before: Matrices | None = None,
    held_up: FloatArray | float = 0.0,
    clock: FloatArray | None = None,
) -> Estimates:
    """Condenses matrices of one operation kind of a group of at least two ranks.

    Args:
        m: the kind.
        before: for a combine, the dispatch of the same group: what a rank's experts handled there
            explains its work here.
        held_up: [num_ranks], how long each rank's sending waited for slots of others, ns.
        clock: [num_ranks], by how many ns clocks have drifted; by default as far as this kind tells.
    """
    work = m.gap + m.span
    sent, received = _sent_and_received(m)
    paths = split_paths(m, drifted_clocks([m]) if clock is None else clock)
    by_work = _explained(work, sent, _handled_before(m, before))
    by_drain = _explained(m.drain, received, m.received)
    # A link or a receiver that holds up its sender is no fault of the sender's.
    own = work - by_work.each - paths.stalled.sum(axis=0) - held_up
    return Estimates(
        m=m,
        num_operations=m.num_operations or m.counted,
        has_stamps=m.num_operations > 0,
        duration_ns=median_of(m.duration),
        own_ns=median_of(work + m.drain),
        work=_compare(own, m, by_work.error),
        excess=_excess(own),
        drain=_compare(m.drain - by_drain.each, m, by_drain.error),
        token_time=by_work.time + by_drain.time,
        token_error=np.hypot(by_work.error, by_drain.error),
        cost_known=by_work.known and by_drain.known,
        late=_lateness(m, paths.clock),
        late_error=median(m.late_error, 0),
        waited_for=_waited_for(m),
        load=_over_even_share(_handled(m, before, sent, received)),
        gap_ns=median(m.gap, 0),
        span_ns=median(m.span, 0),
        send_ns=m.send_ns(),
        drain_ns=median(m.drain, 0),
        paths=paths,
        blame=m.blame,
    )


def _sent_and_received(m: Matrices) -> tuple[FloatArray, FloatArray]:
    """[num_ranks] each: tokens per operation; NaN where nobody knows.

    Of what a rank sent to ranks that did not report, the others' share stands for theirs. What it
    received only the rank itself knows.
    """
    known = np.isfinite(m.tokens)
    reported = known.any(axis=1)
    sent = np.where(known, m.tokens, 0.0).sum(axis=0)
    sent = sent * m.num_ranks / max(int(reported.sum()), 1)
    received = np.where(known, m.tokens, 0.0).sum(axis=1)
    return np.where(known.any(axis=0), sent, np.nan), np.where(reported, received, np.nan)


def _handled(
    m: Matrices, before: Matrices | None, sent: FloatArray, received: FloatArray
) -> FloatArray:
    """[num_ranks]: tokens that the experts of each rank got, or return."""
    if m.operation == NORMAL_COMBINE and before is not None:
        # Gateways return sums in the place of others.
        return _sent_and_received(before)[1]
    return sent if m.operation.endswith("combine") else received


def _handled_before(m: Matrices, before: Matrices | None) -> FloatArray | None:
    """[n, num_ranks]: what each rank received in the operation before each combine."""
    if before is None or not m.ops.size or not before.ops.size:
        return None
    at = np.searchsorted(before.ops, m.ops, side="left") - 1
    handled = np.where((at >= 0)[:, None], before.received[np.maximum(at, 0)], np.nan)
    return np.asarray(handled)


def _compare(values: FloatArray, m: Matrices, known_to: FloatArray | None = None) -> Effect:
    """`[n, num_ranks]` to one effect per rank, each operation against its own median rank.

    Operations differ (layers do), ranks should not. The operation's median is taken again without
    the effects found, or slow ranks would raise it and be judged too kindly.

    Args:
        values: nanoseconds.
        m: what they are from.
        known_to: [num_ranks], signed, what one standard error of what was taken out of the values
            beforehand makes of it.
    """
    num_ranks = values.shape[1]
    # Before the first operation there is no gap, so nobody's work is known.
    values = values[np.isfinite(values).any(axis=1)]
    known_to = np.zeros(num_ranks) if known_to is None else known_to
    effect = np.zeros(num_ranks)
    for _ in range(_SWEEPS):
        of_operation = median(values - np.nan_to_num(effect), 1)[:, None]
        effect = median(values - of_operation, 0)
    deviation = values - of_operation
    count = np.sum(np.isfinite(deviation), axis=0).astype(np.float64)
    safe = np.maximum(count, 1.0)
    effect, error = huber(deviation, effect)
    # Ranks are equally noisy unless they show otherwise; a quiet spell is luck.
    error = np.fmax(error, median_of(error))
    if m.num_operations:
        factor, alone = inflation(deviation - effect, error * np.sqrt(safe))
        single, error = error, error * np.sqrt(factor)
        lasting = np.sqrt(np.maximum(error**2 - single**2, 0.0))
    noise = or_zero(median_of(error))
    # Before anything is known of their spread, healthy ranks may differ a little for good.
    for_good = _HEALTHY_DIFFERENCE * max(median_of(values), 0.0)
    reference, spread = healthy(effect, math.hypot(noise, or_zero(for_good)))
    effect = effect - reference
    apart = _apart(effect, noise, or_zero(for_good))
    if not m.num_operations:
        ones = np.ones(num_ranks)
        zeros = 0.0 * ones
        return Effect(effect, zeros, zeros, ones, ones, m.counted * ones, spread, apart)
    # Of two ranks the median is halfway between them, so half of the effect is the even point.
    even_point = effect / 2 if num_ranks == 2 else np.zeros(num_ranks)
    above = np.sum(deviation - reference > even_point, axis=0) / safe
    below = np.sum(deviation - reference < even_point, axis=0) / safe
    # The reference has an error of its own: that of the mean of the other ranks. With two ranks,
    # or two nodes whose ranks move together, both deviate by half of their difference, in opposite
    # directions.
    of_reference = 2.0 if num_ranks == 2 else min(math.sqrt(1.0 + 1.0 / max(alone - 1.0, 0.3)), 2.0)
    error, lasting = error * of_reference, lasting * of_reference
    # What was taken out wrongly was taken out of the reference as well.
    at_reference = np.abs(effect) <= _NEAR * max(noise, spread)
    error = np.hypot(error, known_to - or_zero(median_of(known_to[at_reference])))
    for_good = _for_good(spread, noise, num_ranks)
    return Effect(effect, error, lasting, above, below, count, for_good, apart)


def _excess(values: FloatArray) -> FloatArray:
    return values - median(values, 1)[:, None]


def _for_good(spread: float, noise: float, num_ranks: int) -> float:
    """What of the spread between ranks is more than the error of each, which itself varies.

    A few ranks may happen to be alike, so their spread stands for a larger one.
    """
    by_chance = noise * (1.0 + _SCALE_COST / np.sqrt(num_ranks))
    excess = math.sqrt(max(spread**2 - by_chance**2, 0.0))
    return excess * student(_FAR, num_ranks - 1 + 2 * _EXPECTED_WEIGHT) / _FAR


def _apart(effects: FloatArray, noise: float, expected: float) -> float:
    """How far a rank may lie from the reference for no cause: for good, and by the reference's error.

    Args:
        effects: [num_ranks], above the reference; slow ranks among them.
        noise: standard error of one of them.
        expected: by how much healthy ranks differ for good where nothing is known of it.
    """
    known = effects[np.isfinite(effects)]
    alike = known[np.abs(known) <= _FAR * math.hypot(noise, expected)]
    degrees = max(alike.size - 1, 0)
    # Around the reference, not their mean: that is what effects are above.
    seen = max(float(np.sum(alike**2)) - degrees * noise**2, 0.0)
    prior = _EXPECTED_WEIGHT * expected**2
    for_good = (prior + seen) / (_EXPECTED_WEIGHT + degrees)
    of_reference = _MEDIAN_VARIANCE * (for_good + noise**2) / max(alike.size, 1)
    few = student(_NORMAL_95, _EXPECTED_WEIGHT + degrees) / _NORMAL_95
    return few * math.sqrt(for_good + of_reference)


def _lateness(m: Matrices, clock: FloatArray) -> FloatArray:
    """[num_ranks]: median over receivers, above the healthy ranks."""
    seen = median(m.late, 0) - (clock - np.median(clock))
    return seen - healthy(seen)[0]


def _waited_for(m: Matrices) -> FloatArray:
    """[num_ranks]: what others wait when the rank comes last, mean, above the healthy ranks."""
    others = ~np.eye(m.num_ranks, dtype=bool)
    mean = np.sum(m.blame, axis=0, where=others) / max(m.num_ranks - 1, 1)
    return np.asarray(mean - healthy(mean)[0])


def _over_even_share(tokens: FloatArray) -> FloatArray:
    """A rank's tokens over the mean of all; 1 where there are none at all."""
    known = tokens[np.isfinite(tokens)]
    mean = float(np.mean(known)) if known.size else 0.0
    return tokens / mean if mean > 0 else np.ones(tokens.shape)


@dataclass(frozen=True)
class _Explained:
    """What the tokens of each rank explain, `[num_ranks]` ns, and how well that is known.

    Attributes:
        time: above (or below) the reference rank, in a usual operation.
        each: [n, num_ranks], in each operation, as far as its tokens are known.
        error: what it is if the cost of a token is one standard error off; signed as the time.
        known: whether the cost of a token is known apart from differences between ranks, or does
            not matter.
    """

    time: FloatArray
    each: FloatArray
    error: FloatArray
    known: bool


def _explained(values: FloatArray, usual: FloatArray, each: FloatArray | None) -> _Explained:
    """What the tokens explain of the time that ranks take.

    Args:
        values: [n, num_ranks] nanoseconds.
        usual: [num_ranks], tokens per operation.
        each: [n, num_ranks], tokens of each operation; or None.
    """
    if each is not None and np.isfinite(each).any():
        usual = median(each, 0)
    surplus = np.nan_to_num(usual - lower_median(usual))
    most = float(np.abs(surplus).max(initial=0.0))
    cost, error = _cost_within_ranks(values, each)
    if error * most <= max(_COST_KNOWN_NS, _COST_KNOWN_SHARE * cost * most):
        time = cost * surplus
        in_each = np.broadcast_to(time, values.shape)
        if each is not None:
            more = each - median(each, 1)[:, None]
            in_each = np.where(np.isfinite(more), cost * more, in_each)
        return _Explained(time, in_each, error * surplus, True)
    time = _cost_between_ranks(median(values, 0), usual) * surplus
    known = bool(np.abs(time).max(initial=0.0) <= _COST_KNOWN_NS)
    return _Explained(time, np.broadcast_to(time, values.shape), np.zeros(time.shape), known)


def _cost_within_ranks(values: FloatArray, tokens: FloatArray | None) -> tuple[float, float]:
    """Nanoseconds per token and error, from how each rank's time follows its own tokens.

    Differences between ranks, slow ones included, do not enter here. The error is infinite where
    tokens do not change.
    """
    if tokens is None or values.shape[0] < 2:
        return 0.0, float("inf")
    known = np.isfinite(values).any(axis=1)
    moved, time = _deviations(tokens[known]), _deviations(values[known])
    known = np.isfinite(moved) & np.isfinite(time)
    moved, time = moved[known], time[known]
    weight = float(np.sum(moved**2))
    if not weight > 0:
        return 0.0, float("inf")
    cost = float(np.sum(moved * time)) / weight
    for _ in range(_COST_STEPS):
        left = time - cost * moved
        # Hiccups are no cost of tokens; what tokens explain may be as rare, and is no hiccup.
        limit = 3 * MAD_TO_SIGMA * median_of(np.abs(left))
        left = np.clip(left, -limit, limit)
        cost += float(np.sum(moved * left)) / weight
    cost = max(cost, 0.0)
    return cost, float(np.std(left)) / math.sqrt(weight)


def _deviations(values: FloatArray) -> FloatArray:
    """From the operation's median rank, and from what is usual for the rank."""
    against_peers = values - median(values, 1)[:, None]
    return against_peers - median(against_peers, 0)[None, :]


def _cost_between_ranks(values: FloatArray, tokens: FloatArray) -> float:
    """Theil-Sen slope over the ranks, at most as if all of the time were spent on tokens."""
    known = np.flatnonzero(np.isfinite(values) & np.isfinite(tokens))
    typical = lower_median(tokens)
    if known.size < 2 or not typical > 0:
        return 0.0
    a, b = np.triu_indices(known.size, 1)
    step = tokens[known][a] - tokens[known][b]
    telling = np.abs(step) > _MIN_TOKEN_SPREAD * typical
    if not telling.any():
        return 0.0
    slopes = (values[known][a] - values[known][b])[telling] / step[telling]
    most = max(lower_median(values) / typical, 0.0)
    return min(max(float(np.median(slopes)), 0.0), most)


def estimate_kinds(matrices: Mapping[str, Matrices]) -> list[Estimates]:
    """Estimates of every kind that can be judged, each combine with its dispatch."""
    clock = drifted_clocks(list(matrices.values())) if matrices else None
    return [
        estimate(
            m,
            matrices.get(kind.replace("combine", "dispatch")) if "combine" in kind else None,
            _held_up(matrices) if kind == NORMAL_DISPATCH else 0.0,
            clock,
        )
        for kind, m in matrices.items()
    ]


def _held_up(matrices: Mapping[str, Matrices]) -> FloatArray:
    """[num_ranks]: how long the sending of a normal dispatch waited for slots, ns."""
    hops = [matrices[kind] for kind in (GATEWAY_DISPATCH, NORMAL_DISPATCH) if kind in matrices]
    # Of what a gateway has passed on, the gateway waited; a rank may wait for its own slots.
    waited = [np.where(m.has_sources & ~m.is_relayed, m.credit, 0.0) for m in hops]
    longest = [credit.max(axis=0) for credit in waited]
    return np.asarray(np.max(longest, axis=0))
