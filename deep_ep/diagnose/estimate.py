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

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deep_ep.diagnose.gather import FloatArray, Matrices

# Median absolute deviation to standard deviation, and the cost of a median over a mean (normal).
_MAD_TO_SIGMA = 1.4826
_MEDIAN_COST = 1.2533
# Fewer operations say nothing.
MIN_OPERATIONS = 8
# Below four ranks a row of the path matrix has too few cells to tell path from row and column.
MIN_RANKS_TO_SPLIT_PATHS = 4
# Median polish settles within a few sweeps; chosen, not tuned.
_POLISH_SWEEPS = 10
# Pairs of cells looked at for the cost of a token; enough for a stable median at any group size.
_SLOPE_PAIRS = 20_000
# Token counts closer together than this share of the median say nothing about the cost of one.
_SLOPE_MIN_SPREAD = 0.2


@dataclass(frozen=True)
class Effect:
    """How far one quantity of each rank (or path) lies above what is usual in the group.

    Attributes:
        value: nanoseconds per operation above the reference; NaN where unknown.
        error: its standard error; 0 where only totals were there.
        above, below: share of the operations in which it lay above, below the reference.
        count: operations it rests on.
        spread: standard deviation of `value` between healthy ranks (paths).
    """

    value: FloatArray
    error: FloatArray
    above: FloatArray
    below: FloatArray
    count: FloatArray
    spread: float


@dataclass(frozen=True)
class Paths:
    """Path times `[num_ranks, num_ranks]` taken apart into receivers, sources and single paths.

    Attributes:
        time: median of arrival minus issue per path, NaN where unseen, and on the diagonal.
        tokens: median tokens per path.
        excess: per path above what its receiver, its source and its tokens explain.
        ingress, egress: per receiver, per source, above the group's reference; tokens taken out.
        inbound: per receiver like `ingress`, tokens not taken out.
    """

    time: FloatArray
    tokens: FloatArray
    excess: Effect
    ingress: FloatArray
    egress: FloatArray
    inbound: FloatArray


@dataclass(frozen=True)
class Estimates:
    """Everything the rules look at, for one operation kind; times in nanoseconds per operation.

    Attributes:
        operation: "dispatch" or "combine".
        source: "ring", or "totals" when no raw stamps were there (means, without errors).
        num_operations: operations the numbers rest on.
        duration_ns: what a rank spends in the operation, median.
        work: own time before and while sending (gap, send, overlap), without what the tokens
            that the rank sends explain.
        busy: own time around the operation, receiving included, tokens not taken out.
        drain: own time after the last arrival, tokens not taken out.
        late: when the others saw everything of this rank issued.
        load: tokens that the rank's experts handle, over the group's lower median.
        gap_ns, send_ns, drain_ns: per rank, for the evidence.
        paths: the path matrix, taken apart.
        blame_ns: [receiver, source], waiting of the receiver in operations in which the source
            came last; sums to all waiting.
    """

    operation: str
    source: str
    num_operations: int
    duration_ns: float
    work: Effect
    busy: Effect
    drain: Effect
    late: Effect
    load: FloatArray
    gap_ns: FloatArray
    send_ns: FloatArray
    drain_ns: FloatArray
    paths: Paths
    blame_ns: FloatArray


def estimate(matrices: Matrices, resolution_ns: float) -> Estimates:
    """Condenses matrices.

    Args:
        matrices: one operation kind of a group of at least two ranks.
        resolution_ns: path times of which up to this much cannot be seen are still used.

    Returns:
        Estimates from the ring, or from the totals where the ring is empty.
    """
    if matrices.num_operations == 0:
        return _from_totals(matrices)
    return _from_ring(matrices, resolution_ns)


def lower_median(values: FloatArray) -> float:
    """The lower of the two middle values; holds when half of the ranks are slow. NaN if empty."""
    finite = np.sort(values[np.isfinite(values)])
    return float(finite[(finite.size - 1) // 2]) if finite.size else float("nan")


def healthy(values: FloatArray) -> tuple[float, float]:
    """Location and standard deviation of the healthy members of a group, from their values.

    Slow members lie above and are at most half: among the upper half the widest gap between
    neighbours is taken for the border, and what lies below it for healthy. Where nobody is slow
    the border falls near the top and costs nothing.

    Returns:
        (median, spread); NaN and 0 when no value is known.
    """
    ordered = np.sort(values[np.isfinite(values)])
    if ordered.size == 0:
        return float("nan"), 0.0
    at_least = (ordered.size + 1) // 2
    gaps = np.diff(ordered)[at_least - 1 :]
    members = ordered[: at_least + int(np.argmax(gaps))] if gaps.size else ordered
    location = float(np.median(members))
    return location, _MAD_TO_SIGMA * float(np.median(np.abs(members - location)))


def _from_ring(m: Matrices, resolution_ns: float) -> Estimates:
    own = np.arange(m.num_ranks)
    entered = m.entered[:, own, own]
    received_at = np.maximum(np.fmax.reduce(m.arrival, axis=2), 0.0)
    gap = entered - m.previous_exit
    send = m.send_ns
    drain = m.exit - received_at
    sent, handled = _loads(median(m.tokens, 0), m.operation)
    work = gap + send + m.overlap_ns
    explained = _explained_by_tokens(m.operation, sent, median(gap, 0), median(send, 0))
    lateness = m.issued - median(m.issued, 2)[:, :, None]
    return Estimates(
        operation=m.operation,
        source="ring",
        num_operations=m.num_operations,
        duration_ns=float(median((m.exit - entered).reshape(-1), 0)),
        work=_compare(work - explained),
        busy=_compare(work + drain),
        drain=_compare(drain),
        late=_compare(median(lateness, 1)),
        load=handled,
        gap_ns=median(gap, 0),
        send_ns=median(send, 0),
        drain_ns=median(drain, 0),
        paths=_paths_from_ring(m, resolution_ns),
        blame_ns=_blame(m),
    )


def _from_totals(m: Matrices) -> Estimates:
    ops = np.where(m.totals["ops"] > 0, m.totals["ops"], np.nan)
    per_op = {name: values / ops for name, values in m.totals.items()}
    own_ops = np.where(m.own["ops"] > 0, m.own["ops"], np.nan)
    gap, send, drain, wait = (
        m.own[name] / own_ops for name in ("gap_ns", "send_ns", "drain_ns", "wait_ns")
    )
    sent, handled = _loads(per_op["tokens"], m.operation)
    explained = _explained_by_tokens(m.operation, sent, gap, send)
    count = float(np.nanmax(own_ops)) if np.isfinite(own_ops).any() else 0.0
    late = median(_without_diagonal(per_op["late_ns"] + per_op["issue_ns"]), 0)
    return Estimates(
        operation=m.operation,
        source="totals",
        num_operations=int(count),
        duration_ns=float(median(send + wait + drain, 0)),
        work=_means(gap + send - explained, count),
        busy=_means(gap + send + drain, count),
        drain=_means(drain, count),
        late=_means(late, count),
        load=handled,
        gap_ns=gap,
        send_ns=send,
        drain_ns=drain,
        paths=_split_paths(
            _without_diagonal(per_op["path_ns"]),
            per_op["tokens"],
            lambda excess: _means(excess, count),
        ),
        blame_ns=np.nan_to_num(m.totals["critical_ns"]),
    )


def _compare(values: FloatArray) -> Effect:
    """`[n, num_ranks]` to one effect per rank, each operation against its own median rank."""
    num_ranks = values.shape[1]
    deviation = values - median(values, 1)[:, None]
    center = median(deviation, 0)
    reference, spread = healthy(center)
    effect = center - reference
    # Of two ranks the median is halfway between them, so half of the effect is the even point.
    even_point = effect / 2 if num_ranks == 2 else np.zeros(num_ranks)
    above, below, count = _agreement(deviation - reference, even_point)
    # The reference has an error of its own: that of the mean of the other ranks. With two ranks
    # both deviate by half of their difference, in opposite directions.
    others = 1.0 / (num_ranks - 1) if num_ranks > 1 else 0.0
    error = _standard_error(deviation) * (2.0 if num_ranks == 2 else np.sqrt(1.0 + others))
    return Effect(effect, error, above, below, count, spread)


def _means(values: FloatArray, count: float) -> Effect:
    reference, spread = healthy(values.reshape(-1))
    ones = np.ones(values.shape)
    return Effect(values - reference, 0.0 * ones, ones, ones, count * ones, spread)


def _agreement(
    deviation: FloatArray, even_point: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    count = np.sum(np.isfinite(deviation), axis=0).astype(np.float64)
    safe = np.maximum(count, 1.0)
    above = np.sum(deviation > even_point, axis=0) / safe
    below = np.sum(deviation < even_point, axis=0) / safe
    return above, below, count


def _standard_error(values: FloatArray) -> FloatArray:
    count = np.maximum(np.sum(np.isfinite(values), axis=0), 1)
    scale = _MAD_TO_SIGMA * median(np.abs(values - median(values, 0)), 0)
    return np.asarray(_MEDIAN_COST * scale / np.sqrt(count))


def _loads(tokens: FloatArray, operation: str) -> tuple[FloatArray, FloatArray]:
    """Tokens each rank sends, and tokens its experts handle, each over the lower median."""
    present = np.isfinite(tokens)
    received = np.where(present.any(axis=1), np.nansum(tokens, axis=1), np.nan)
    sent = np.where(present.any(axis=0), np.nansum(tokens, axis=0), np.nan)
    # What comes back in a combine is what the sender's experts had received.
    handled = sent if operation == "combine" else received
    return _over_lower_median(sent), _over_lower_median(handled)


def _over_lower_median(values: FloatArray) -> FloatArray:
    reference = lower_median(values)
    # Without any tokens at the reference rank a ratio has no meaning; one token stands in.
    return values / max(reference, 1.0) if np.isfinite(reference) else np.ones(values.shape)


def _explained_by_tokens(
    operation: str, sent_load: FloatArray, gap: FloatArray, send: FloatArray
) -> FloatArray:
    """Nanoseconds of a rank's work that its tokens explain, if cost is proportional to tokens.

    Sending grows with the tokens sent; ahead of a combine, so does what the experts compute.
    """
    surplus = np.maximum(np.nan_to_num(sent_load, nan=1.0) - 1.0, 0.0)
    explained = surplus * max(lower_median(send), 0.0)
    if operation == "combine":
        explained = explained + surplus * max(np.nan_to_num(lower_median(gap)), 0.0)
    return np.asarray(np.nan_to_num(explained))


def _paths_from_ring(m: Matrices, resolution_ns: float) -> Paths:
    elapsed = m.arrival - m.issued
    if not np.any(m.arrival < 0):
        elapsed = _without_hidden(elapsed, m.arrival, -m.issued, resolution_ns)
    else:
        # The target knows the true arrival even if nobody was waiting yet.
        elapsed = np.where(m.arrival != 0, elapsed, np.nan)
    seen = np.isfinite(elapsed) & ~np.eye(m.num_ranks, dtype=bool)
    elapsed = np.where(seen & (np.sum(seen, axis=0) >= MIN_OPERATIONS), elapsed, np.nan)

    def excess_effect(excess: FloatArray) -> Effect:
        deviation = elapsed - (median(elapsed, 0) - excess)
        above, below, count = _agreement(deviation, np.zeros(excess.shape))
        spread = _MAD_TO_SIGMA * float(median(np.abs(excess.reshape(-1)), 0))
        return Effect(excess, _standard_error(elapsed), above, below, count, spread)

    return _split_paths(median(elapsed, 0), median(m.tokens, 0), excess_effect)


def _without_hidden(
    elapsed: FloatArray, arrival: FloatArray, receiver_after_issue: FloatArray, resolution_ns: float
) -> FloatArray:
    """Path times of a target that stamps an arrival no earlier than the receiver looked.

    Keeping what was seen would keep the slow ones only, so operations are chosen by when the
    receiver came: so early that a path time of interest (the resolution, or what was seen of this
    path when it was seen) could not have hidden. A path that hid all the same counts as 0.
    """
    seen = arrival > resolution_ns
    usual_when_seen = median(np.where(seen, elapsed, np.nan), 0)
    in_time = receiver_after_issue <= resolution_ns
    in_time_for_usual = receiver_after_issue <= usual_when_seen - resolution_ns
    hidden = np.where(in_time_for_usual, 0.0, np.nan)
    return np.where(seen & in_time_for_usual | in_time, elapsed, hidden)


def _split_paths(
    time: FloatArray, tokens: FloatArray, effect: Callable[[FloatArray], Effect]
) -> Paths:
    token_cost = _token_cost_ns(time, tokens)
    typical = median(tokens.reshape(-1), 0)
    level = time - token_cost * np.nan_to_num(tokens - typical)
    num_ranks = time.shape[0]
    if num_ranks < MIN_RANKS_TO_SPLIT_PATHS:
        zeros = np.zeros(num_ranks)
        residual = level - lower_median(level.reshape(-1))
        return Paths(time, tokens, effect(residual), zeros, zeros, zeros)
    ingress, egress, residual = _median_polish(level)
    inbound = ingress if token_cost == 0.0 else _median_polish(time)[0]
    return Paths(time, tokens, effect(residual), ingress, egress, inbound)


def _token_cost_ns(time: FloatArray, tokens: FloatArray) -> float:
    """Theil-Sen slope of path time over tokens; 0 when tokens are even or cost nothing."""
    usable = np.flatnonzero(np.isfinite(time) & np.isfinite(tokens))
    if usable.size < 2:
        return 0.0
    times, counts = time.reshape(-1)[usable], tokens.reshape(-1)[usable]
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, usable.size, (2, _SLOPE_PAIRS))
    step = counts[a] - counts[b]
    telling = np.abs(step) > _SLOPE_MIN_SPREAD * max(float(np.median(counts)), 1.0)
    if not telling.any():
        return 0.0
    return max(float(np.median((times[a] - times[b])[telling] / step[telling])), 0.0)


def _median_polish(cells: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Row effects, column effects (both above the healthy ones) and what they leave over.

    A row or column of which too little is known gets no effect: its cells speak for themselves.
    """
    known = np.isfinite(cells)
    enough = max(MIN_RANKS_TO_SPLIT_PATHS - 1, cells.shape[0] // 2)
    use_rows, use_columns = known.sum(axis=1) >= enough, known.sum(axis=0) >= enough
    residual = cells - median(cells.reshape(-1), 0)
    rows, columns = np.zeros(cells.shape[0]), np.zeros(cells.shape[1])
    for _ in range(_POLISH_SWEEPS):
        step = np.where(use_rows, median(residual, 1), 0.0)
        rows, residual = rows + step, residual - step[:, None]
        step = np.where(use_columns, median(residual, 0), 0.0)
        columns, residual = columns + step, residual - step[None, :]
    return rows - healthy(rows)[0], columns - healthy(columns)[0], residual


def _blame(m: Matrices) -> FloatArray:
    """[receiver, source] nanoseconds: waiting of receivers, booked on whom they waited for last."""
    arrival = np.where(np.isfinite(m.arrival), m.arrival, -np.inf)
    last = np.argmax(arrival, axis=2)
    waited = np.maximum(np.max(arrival, axis=2), 0.0)
    blame = np.zeros((m.num_ranks, m.num_ranks))
    receiver = np.broadcast_to(np.arange(m.num_ranks), last.shape)
    np.add.at(blame, (receiver.reshape(-1), last.reshape(-1)), waited.reshape(-1))
    return blame


def _without_diagonal(cells: FloatArray) -> FloatArray:
    return np.where(np.eye(cells.shape[0], dtype=bool), np.nan, cells)


def median(values: FloatArray, axis: int) -> FloatArray:
    """`numpy.nanmedian` that answers NaN, silently, where nothing is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=axis))
