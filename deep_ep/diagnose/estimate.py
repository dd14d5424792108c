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

from deep_ep.diagnose.findings import FloatArray
from deep_ep.diagnose.gather import Matrices
from deep_ep.diagnose.paths import Paths, split_paths
from deep_ep.diagnose.stats import (
    healthy,
    huber,
    lower_median,
    median,
    median_of,
    or_zero,
    scale,
)

# Operations whose tokens differ by less than this share of the median say nothing about their cost.
_MIN_TOKEN_SPREAD = 0.01
# Ranks this near the reference, in standard deviations, stand for it.
_NEAR = 2.0
# Operations and ranks settle against each other within a few sweeps; chosen, not tuned.
_SWEEPS = 2
# How far healthy ranks are expected to differ for good, as a share of their time.
_HEALTHY_DIFFERENCE = 0.005
# A scale of n normal values is wrong by so many times itself over the root of n.
_SCALE_COST = 1.17
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
        above, below: share of the operations in which it lay above, below the reference.
        count: operations it rests on.
        spread: how far healthy ranks differ from each other for good, standard deviation.
    """

    value: FloatArray
    error: FloatArray
    above: FloatArray
    below: FloatArray
    count: FloatArray
    spread: float

    def reversed(self) -> Effect:
        """How far below instead of above, with the upper ranks for the healthy ones."""
        noise = or_zero(median_of(self.error))
        reference, spread = healthy(-self.value, float(np.hypot(noise, self.spread)))
        return Effect(
            -self.value - reference,
            self.error,
            self.below,
            self.above,
            self.count,
            _for_good(spread, noise, self.value.size),
        )


def pooled(effects: Sequence[Effect]) -> Effect:
    """The mean over operation kinds, each as far as it is known; at least one."""
    values, errors = (np.array([getattr(x, name) for x in effects]) for name in ("value", "error"))
    known = np.isfinite(values + errors)
    kinds = np.where(known.any(axis=0), known.sum(axis=0), np.nan)
    value = np.where(known, values, 0.0).sum(axis=0) / kinds
    error = np.sqrt(np.where(known, errors**2, 0.0).sum(axis=0)) / kinds
    counts = np.where(known, [x.count for x in effects], 0.0)
    count = counts.sum(axis=0)
    above, below = (
        np.sum(counts * np.nan_to_num(shares), axis=0) / np.maximum(count, 1.0)
        for shares in ([x.above for x in effects], [x.below for x in effects])
    )
    noise = or_zero(median_of(error))
    reference, spread = healthy(value, float(np.hypot(noise, min(x.spread for x in effects))))
    for_good = _for_good(spread, noise, value.size)
    return Effect(value - reference, error, above, below, count, for_good)


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
        drain: own time after the last arrival, without what the tokens it received explain.
        token_time, token_error: [num_ranks], of these, what the tokens explain, and its error.
        cost_known: whether the cost of a token is known apart from differences between ranks, or
            does not matter, because all have the same number.
        late, late_error: [num_ranks], when the others saw everything of this rank issued.
        waited_for: [num_ranks], what the others wait when this rank comes last, mean; no clock but
            their own tells.
        load: tokens that the rank's experts handle, over an even share.
        gap_ns, send_ns, drain_ns: per rank, for the evidence.
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
    drain: Effect
    token_time: FloatArray
    token_error: FloatArray
    cost_known: bool
    late: FloatArray
    late_error: FloatArray
    waited_for: FloatArray
    load: FloatArray
    gap_ns: FloatArray
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


def estimate(m: Matrices, before: Matrices | None = None) -> Estimates:
    """Condenses matrices of one operation kind of a group of at least two ranks.

    Args:
        m: the kind.
        before: for a combine, the dispatch of the same group: what a rank's experts handled there
            explains its work here.
    """
    work = m.gap + m.span
    sent = np.nansum(m.tokens, axis=0)
    received = np.nansum(m.tokens, axis=1)
    paths = split_paths(m)
    by_work = _explained(work, sent, _handled_before(m, before))
    by_drain = _explained(m.drain, received, m.received)
    return Estimates(
        m=m,
        num_operations=m.num_operations or m.counted,
        has_stamps=m.num_operations > 0,
        duration_ns=median_of(m.duration),
        own_ns=median_of(work + m.drain),
        # A link that holds up its sender is no fault of the sender's.
        work=_compare(work - by_work.time - paths.stalled.sum(axis=0), m, by_work.error),
        drain=_compare(m.drain - by_drain.time, m, by_drain.error),
        token_time=by_work.time + by_drain.time,
        token_error=np.hypot(by_work.error, by_drain.error),
        cost_known=by_work.known and by_drain.known,
        late=_lateness(m, paths.coarse_clock + paths.clock),
        late_error=median(m.late_error, 0),
        waited_for=_waited_for(m),
        load=_over_even_share(sent if m.operation.endswith("combine") else received),
        gap_ns=median(m.gap, 0),
        send_ns=m.send_ns(),
        drain_ns=median(m.drain, 0),
        paths=paths,
        blame=m.blame,
    )


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
    noise = or_zero(median_of(error))
    # Before anything is known of their spread, healthy ranks may differ a little for good.
    for_good = _HEALTHY_DIFFERENCE * max(median_of(values), 0.0)
    reference, spread = healthy(effect, math.hypot(noise, or_zero(for_good)))
    effect = effect - reference
    if not m.num_operations:
        ones = np.ones(num_ranks)
        return Effect(effect, 0.0 * ones, ones, ones, m.counted * ones, spread)
    # Of two ranks the median is halfway between them, so half of the effect is the even point.
    even_point = effect / 2 if num_ranks == 2 else np.zeros(num_ranks)
    above = np.sum(deviation - reference > even_point, axis=0) / safe
    below = np.sum(deviation - reference < even_point, axis=0) / safe
    # The reference has an error of its own: that of the mean of the other ranks. With two ranks
    # both deviate by half of their difference, in opposite directions.
    error = error * (2.0 if num_ranks == 2 else np.sqrt(1.0 + 1.0 / max(num_ranks - 1, 1)))
    # What was taken out wrongly was taken out of the reference as well.
    at_reference = np.abs(effect) <= _NEAR * max(noise, spread)
    error = np.hypot(error, known_to - or_zero(median_of(known_to[at_reference])))
    return Effect(effect, error, above, below, count, _for_good(spread, noise, num_ranks))


def _for_good(spread: float, noise: float, num_ranks: int) -> float:
    """What of the spread between ranks is more than the error of each, which itself varies."""
    by_chance = noise * (1.0 + _SCALE_COST / np.sqrt(num_ranks))
    return float(np.sqrt(max(spread**2 - by_chance**2, 0.0)))


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
        time: above (or below) the reference rank.
        error: what it is if the cost of a token is one standard error off; signed as the time.
        known: whether the cost of a token is known apart from differences between ranks, or does
            not matter.
    """

    time: FloatArray
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
        return _Explained(cost * surplus, error * surplus, True)
    time = _cost_between_ranks(median(values, 0), usual) * surplus
    known = bool(np.abs(time).max(initial=0.0) <= _COST_KNOWN_NS)
    return _Explained(time, np.zeros(time.shape), known)


def _cost_within_ranks(values: FloatArray, tokens: FloatArray | None) -> tuple[float, float]:
    """Nanoseconds per token and error, from how each rank's time follows its own tokens.

    Differences between ranks, slow ones included, do not enter here. The error is infinite where
    tokens do not change.
    """
    if tokens is None or values.shape[0] < 2:
        return 0.0, float("inf")
    known = np.isfinite(values).any(axis=1)
    moved, noise = _deviations(tokens[known]), _deviations(values[known])
    # Hiccups are no cost of tokens.
    limit = 3 * median_of(scale(noise, 0))
    noise = np.clip(noise, -limit, limit)
    known = np.isfinite(moved) & np.isfinite(noise)
    weight = float(np.sum(moved[known] ** 2))
    if not weight > 0:
        return 0.0, float("inf")
    cost = max(float(np.sum(moved[known] * noise[known])) / weight, 0.0)
    return cost, float(np.std(noise[known] - cost * moved[known])) / np.sqrt(weight)


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
    return [
        estimate(
            m, matrices.get(kind.replace("combine", "dispatch")) if "combine" in kind else None
        )
        for kind, m in matrices.items()
    ]
