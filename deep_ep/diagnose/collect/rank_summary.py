"""One rank condenses its counters to what the group needs: vectors per source, series of its own.

Everything that needs the raw stamps of all sources happens here, on the rank that has them; what
is sent is linear in the size of the group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Optional

import numpy as np

from ..core.diagnosis import BoolArray, FloatArray, IntArray, Rank, Timeline
from ..core.package import CounterSnapshot, codec, stamps
from ..core.robust_stats import median, median_of, quantile, standard_error
from .fields import FIELDS, KEPT_ARRIVALS, Numbers
from .hops import NORMAL_KINDS, NOTIFY, ROW_HOPS, OwnTimes, own_times, since
from .path_times import MIN_SEEN, path_times
from .snapshot import NumRanks, Snapshot, columns
from .snapshot_checks import require_snapshot, without_contradictions

# The latest operation of which all ranks tell is one that this divides, so that it is the same one.
_ANCHORS = 8
# Operations that the timeline shows.
TIMELINE_OPERATIONS = 24
# Operations with so many times the tokens are of another batch size, which hot experts do not make; so few tokens
# make none. Paths are compared in the largest size that so large a share of the operations has.
_OTHER_BATCH = 12.0
_FEW_TOKENS = 16
_BATCH_SHARE = 0.25
# So many times the usual tokens, and so many standard deviations of what chance makes of them, are a load of its own.
_MUCH_MORE, _CHANCE = 1.15, 3.0
# Before and after a step times are nearer to what they were at that end of the window, but for this share, and last
# this part of it.
_OVERLAP, _LASTS = 1 / 16, 1 / 8
# Numbers, or NaN; ranks and truth values cannot be anything else.
_FINITE = [n.name for n in FIELDS if isinstance(n.missing, float) and not n.may_be_infinite]
# Nothing that is counted comes near the end of int64; and devices of one host, and more.
_LARGEST, _MOST_DEVICES = 2**62, 2**16
# Kinds of operations that others may tell of.
_FEW = codec.Most(64)


@dataclass(frozen=True)
class KindSummary(Numbers):
    """One operation kind as one rank saw it.

    Attributes:
        ops: [n] operation numbers in the ring; empty without a ring.
        stamps_arrivals: whether the true arrival of every word was stamped, however late the rank looked.
        timeline: the latest operations, of rank 0 only.
    """

    ops: Annotated[IntArray, ("rows",)]
    stamps_arrivals: bool
    timeline: Optional[Timeline]  # noqa: UP045 - read at run time, by Python 3.9 as well


def _require_possible(s: KindSummary, sides: codec.Sides) -> KindSummary:
    """Of what another rank says, besides the lengths of sides."""
    latest = sides["num_ranks"] - 1
    # All at once: there are as many summaries as ranks.
    numbers = np.concatenate([getattr(s, name).ravel() for name in _FINITE])
    wrong = {
        f"has ranks that came last beyond -1 and {latest}": s.last.min(initial=0) < -1
        or s.last.max(initial=0) > latest,
        f"has operations beyond 0 and {_LARGEST:.0e}": not all(
            ((counts >= 0) & (counts <= _LARGEST)).all() for counts in (s.ops, s.heard)
        ),
        "is infinite where it must be a number or NaN": np.isinf(numbers).any(),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise codec.CodecError(what)
    return s


@dataclass(frozen=True)
class Summary:
    """What one rank tells about a window. Fields as in `Snapshot`, and

    Attributes:
        spoilt: per kind of operation, what was wrong with its counters; a kind that is here and not
            in `kinds` was left out.
    """

    rank: Rank
    num_ranks: NumRanks
    device: str
    host: str
    device_index: Annotated[int, codec.Range(0, _MOST_DEVICES)]
    node: int
    kinds: Annotated[Mapping[str, Annotated[KindSummary, _require_possible]], _FEW]
    spoilt: Annotated[Mapping[str, str], _FEW] = field(default_factory=dict)


def summarize(snapshot: Snapshot) -> Summary:
    """Condenses the counters of one rank; local, no communication.

    Raises:
        EPArgumentError: no snapshot, or its rank, sizes and fields do not fit each other.
    """
    require_snapshot("summarize", snapshot)
    checked = {
        kind: without_contradictions(counters, snapshot.rank)
        for kind, counters in snapshot.operations.items()
    }
    believed = {kind: counters for kind, (counters, _) in checked.items() if counters is not None}
    return Summary(
        snapshot.rank,
        snapshot.num_ranks,
        snapshot.device,
        snapshot.host,
        snapshot.device_index,
        snapshot.node,
        {kind: _summarize_kind(kind, believed, snapshot.rank) for kind in believed},
        {kind: why for kind, (_, why) in checked.items() if why},
    )


def nothing_counted(num_ranks: int) -> KindSummary:
    """Of a kind of which nothing can be used."""
    unknown = {row.name: row.unknown(num_ranks) for row in FIELDS}
    return KindSummary(ops=np.zeros(0, np.int64), stamps_arrivals=True, timeline=None, **unknown)


def _summarize_kind(kind: str, kinds: Mapping[str, CounterSnapshot], rank: int) -> KindSummary:
    counters = kinds[kind]
    heard = counters["ops"].astype(np.float64)
    per_op = {
        name: row / np.where(heard > 0, heard, np.nan)
        for name, row in zip(counters.fields, counters.totals)
    }
    sums = {
        "heard": heard,
        "mean_tokens": per_op["tokens"],
        "mean_bytes": per_op["bytes"],
        "credit": np.nan_to_num(per_op["credit_ns"]),
    }
    used = counters.operations()
    if not used.shape[0]:
        # Nothing is concluded from sums, but they show who was waited for.
        parts = np.stack([per_op[name] for name in ("late_ns", "issue_ns", "path_ns")])
        return replace(nothing_counted(heard.size), wait_parts=parts, **sums)

    of_source, own_stamps = columns(counters, used)
    begin = own_stamps["wait_begin"]
    entered, issued, arrival = (
        since(of_source[name], begin[:, None]) for name in ("entered", "issued", "arrival")
    )
    took_part = np.isfinite(arrival)
    tokens = np.where(took_part, of_source["tokens"], np.nan).astype(np.float64)
    if kind in ROW_HOPS:
        # A queue without rows has no word that could come.
        took_part &= tokens > 0
        arrival = np.where(took_part, arrival, np.nan)
    clock = _clock_errors(of_source.get("clock_error"), took_part)
    leaves = since(own_stamps["exit"], begin)
    ready = stamps.ready(arrival, np.zeros(begin.shape))
    # Others were there at the first look.
    was_seen = (of_source["seen"] != 0) & np.isfinite(arrival)
    sent = since(own_stamps["sent"], begin)
    received = np.nansum(tokens, axis=1)
    compared = _of_one_batch_size(received)
    lateness = issued - median(issued, 1)[:, None]
    duration = leaves - entered[:, rank]
    gap = entered[:, rank] - since(own_stamps["previous_exit"], begin)
    is_settled = _since_step(lateness, gap + duration)
    is_settled &= is_settled[:, rank, None]
    elapsed = (arrival - issued)[compared]
    elapsed[~(_of_usual_load(tokens[compared]) & is_settled[compared])] = np.nan
    elapsed[:, rank] = np.nan
    paths = path_times(elapsed, was_seen[compared])
    own_ns = OwnTimes(
        gap=gap,
        span=-entered[:, rank],
        held=-sent,
        drain=leaves - ready,
        duration=duration,
        meets=np.full(begin.shape, kind in NORMAL_KINDS and kind != NOTIFY),
    )
    if kind in NORMAL_KINDS:
        own_ns = own_times(kind, kinds, own_stamps["op"], begin, sent, ready, leaves, own_ns)
    # Where all begin together, nobody is seen to issue later than who entered last.
    came_later = entered - median(entered, 1)[:, None]
    lateness = lateness + np.where(own_ns.meets[:, None], came_later, 0.0)
    lateness = np.where(is_settled, lateness, np.nan)
    last = np.argsort(np.where(took_part, -arrival, np.inf), axis=1)[:, :KEPT_ARRIVALS]
    start = np.maximum(entered, 0.0)
    on_the_way = np.where(arrival > start, arrival - start, 0.0)
    on_the_way[:, rank] = 0.0
    # Standard deviation of what a timer's step leaves open.
    rounding = float(np.median(own_stamps["timer_step"])) / math.sqrt(12.0)
    # The operation that all ranks tell of; the latest where there are too few.
    common = np.flatnonzero(own_stamps["op"] % _ANCHORS == 0)
    anchor = int(common[-1]) if common.size else -1
    return KindSummary(
        ops=own_stamps["op"].copy(),
        gap=own_ns.gap,
        span=own_ns.span,
        held=own_ns.held,
        drain=own_ns.drain,
        wait=ready,
        duration=own_ns.duration,
        received=received,
        last=last.astype(np.int64),
        last_arrival=np.take_along_axis(arrival, last, axis=1),
        last_path=np.take_along_axis(np.where(arrival > 0, arrival - issued, np.nan), last, axis=1),
        wait_parts=_trimmed_parts(entered, issued, arrival),
        late=median(lateness, 0),
        late_error=standard_error(lateness, 0),
        send=median((issued - entered)[compared], 0),
        path=paths.median,
        path_error=np.hypot(paths.error, rounding),
        path_count=paths.seen,
        path_bound=paths.bound,
        path_burst=paths.burst,
        path_burst_share=paths.burst_share,
        path_clock=clock,
        anchor=np.asarray(own_stamps["op"][anchor]),
        anchor_entered=of_source["entered"][anchor].copy(),
        tokens=median(tokens, 0),
        **sums,
        blame=np.bincount(last[:, 0], ready, minlength=arrival.shape[1]) / ready.size,
        active=np.mean(on_the_way, axis=0),
        busy=np.asarray(_union(start, arrival, rank)),
        stamps_arrivals=bool((was_seen | ~took_part).all()),
        # One rank's is enough for a timeline, and rank 0 is always there.
        timeline=_timeline(own_stamps["op"], begin, entered, arrival, rank) if rank == 0 else None,
    )


def _timeline(
    ops: IntArray, begin: IntArray, entered: FloatArray, arrival: FloatArray, rank: int
) -> Timeline:
    last = slice(-TIMELINE_OPERATIONS, None)
    came = np.where(np.isfinite(arrival[last]), arrival[last], -np.inf)
    return Timeline(
        observer=rank,
        ops=ops[last].copy(),
        begin_us=(begin[last] - begin[last][0]) / 1e3,
        entered_us=entered[last] / 1e3,
        arrival_us=arrival[last] / 1e3,
        last=np.argmax(came, axis=1).astype(np.int64),
    )


def _of_one_batch_size(received: FloatArray) -> BoolArray:
    """`[n]`: operations that are compared; where sizes lie far apart, a median over all falls into either.

    Args:
        received: [n] tokens.
    """
    order = np.argsort(received, kind="stable")
    sizes = received[order] + _FEW_TOKENS
    size = np.cumsum(np.diff(sizes, prepend=sizes[0]) > (_OTHER_BATCH - 1) * np.roll(sizes, 1))
    often = np.flatnonzero(np.bincount(size) >= _BATCH_SHARE * size.size)
    chosen = np.zeros(size.size, bool)
    chosen[order] = size == often[-1] if often.size else True
    return chosen


def _since_step(lateness: FloatArray, rounds: FloatArray) -> BoolArray:
    """`[n, num_ranks]`: operations since the clock of a source was set; all of them where it was not.

    Args:
        lateness: [n, num_ranks] ns, later than most by the receiver's clock.
        rounds: [n] ns, from the end of an operation to the end of the next one; all wait for who is late, so nobody is
            later than that.
    """
    length = max(int(_LASTS * len(lateness)), 1)
    before, after = median(lateness[:length], 0), median(lateness[-length:], 0)
    known = np.isfinite(lateness)
    is_nearer = np.abs(lateness - after) < np.abs(lateness - before)
    last_before = np.argmin(np.cumsum(known * np.where(is_nearer, 1, -1), axis=0), axis=0)
    is_after = np.arange(len(lateness))[:, None] > last_before
    longest = np.fmax(median_of(rounds[:length]), median_of(rounds[-length:]))
    has_stepped = np.abs(after - before) > longest
    for part in (~is_after, is_after):
        count = (known & part).sum(axis=0)
        others = (known & part & (is_nearer != is_after)).sum(axis=0)
        has_stepped &= (count >= max(length, MIN_SEEN)) & (others <= _OVERLAP * count)
    return np.asarray(is_after | ~has_stepped)


def _of_usual_load(tokens: FloatArray) -> BoolArray:
    """`[n, num_ranks]`: operations in which a source sent no more than it usually does; hot experts may move."""
    usual = quantile(tokens, 0.25, 0)
    return np.asarray(~(tokens > _MUCH_MORE * usual + _CHANCE * np.sqrt(usual + 1.0)))


def _clock_errors(errors: IntArray | None, took_part: BoolArray) -> FloatArray:
    """`[num_ranks]` ns, how far offsets may be wrong; NaN where rings do not tell."""
    if errors is None:
        return np.full(took_part.shape[1], np.nan)
    return median(np.where(took_part, errors, np.nan), 0)


def _trimmed_parts(entered: FloatArray, issued: FloatArray, arrival: FloatArray) -> FloatArray:
    """`[3, num_ranks]`: late, issue and path part of the waiting; stamps since its begin."""
    wait, *parts = stamps.waiting(entered, issued, arrival, np.zeros(arrival.shape[0]))
    count = np.sum(np.isfinite(wait), axis=0)
    trim = count // 10
    # Place of each operation among the known waits of its source; unknown ones sort last.
    place = np.argsort(np.argsort(wait, axis=0), axis=0)
    keep = (place >= trim) & (place < count - trim)
    total = np.sum(np.where(keep, parts, 0.0), axis=1)
    kept = (count - 2 * trim).astype(np.float64)
    return np.asarray(np.divide(total, kept, out=np.full(total.shape, np.nan), where=kept > 0))


def _union(start: FloatArray, arrival: FloatArray, rank: int) -> float:
    """Mean length of the union of the intervals in which data of other ranks was on its way."""
    others = np.arange(start.shape[1]) != rank
    if not others.any():
        return float("nan")
    begin, end = start[:, others], arrival[:, others]
    begin = np.where(end > begin, begin, np.inf)
    order = np.argsort(begin, axis=1)
    begin = np.take_along_axis(begin, order, axis=1)
    end = np.where(np.isfinite(begin), np.take_along_axis(end, order, axis=1), -np.inf)
    covered = np.maximum.accumulate(end, axis=1)
    # What an interval adds lies after everything before it.
    after = np.concatenate([np.full((end.shape[0], 1), -np.inf), covered[:, :-1]], axis=1)
    added = end - np.maximum(begin, after)
    return float(np.mean(np.sum(np.where(added > 0, added, 0.0), axis=1)))
