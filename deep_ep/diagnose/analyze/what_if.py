"""What the program would gain without a cause: its operations are replayed, with and without it.

A cause does not cost what it takes. A rank that is late by d starts ahead by one path time, since
the data of the others is there when it comes; three equally late ranks cost as much as one; a slow
path holds up its receiver, and that one everybody else in the next operation. So all ranks are run
through the recorded operations again, with their own times of each operation:

    waits = exit + own                      sent = waits - held
    ready_i = max(waits_i, max_j (sent_j + path_ij))        exit = ready + drain

The two latest sources of an operation took what they took. Of the others it is known that they came no later than
these, so they took what their paths usually do, or less. A rank is held at its fence until what it sent within its
node has come there. That is no time of its own: it goes with the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import median, median_of, or_zero, quantile_of
from .estimates import Estimates

# Operations replayed at most, and cells looked at, which bounds the time for large groups.
_MOST_OPERATIONS, _MOST_CELLS = 128, 2e7
# Cells of all sets worked on at once, which fit into the nearest caches.
_BLOCK = 2**15
# Until the ranks have fallen into the step of the replay.
_FALLING_IN = 4
# Lateness may swing; it is the median over so many operations before and after each.
_BESIDE = 4


@dataclass(frozen=True)
class Gain:
    """What one cause adds to one operation kind; ns to be taken away.

    Attributes:
        operation: kind.
        rank: whose own time, or None.
        work_ns, drain_ns: of the time before waiting, after the last arrival.
        work_each: [n] of the time before waiting in each operation of the kind, or None.
        is_recorded: False where the rank did not report. Without the cause it takes what the others take.
        is_shared: whether the rank has more tokens than the others, which all have together without the cause.
        paths: index into [receiver, source], or None.
        path_ns: of these paths; one number, or one for each.
        at_times: whether the paths are slow in some operations only. Without the cause they take what is usual.
    """

    operation: str
    rank: int | None = None
    work_ns: float = 0.0
    work_each: FloatArray | None = None
    drain_ns: float = 0.0
    is_recorded: bool = True
    is_shared: bool = False
    paths: Any = None
    path_ns: float | FloatArray = 0.0
    at_times: bool = False


def savings_ns(estimates: Sequence[Estimates], sets: Sequence[Sequence[Gain]]) -> FloatArray:
    """[len(sets)]: by how much an operation would be shorter, on average, without each set.

    Args:
        estimates: of kinds that follow each other (dispatch and combine).
        sets: causes that are taken away together.

    Returns:
        Nanoseconds per operation, whatever its kind; NaN of a few.
    """
    order = sorted((int(op), k, i) for k, e in enumerate(estimates) for i, op in enumerate(e.m.ops))
    if len(order) <= _FALLING_IN:
        return np.full(len(sets), np.nan)
    cells = estimates[0].load.size ** 2 * (len(sets) + 1)
    latest = order[-int(min(max(_MOST_CELLS // cells, _FALLING_IN + 2), _MOST_OPERATIONS)) :]
    kinds = [
        _Kind(e, np.array([i for _, of, i in latest if of == k], np.int64), [(), *sets])
        for k, e in enumerate(estimates)
    ]
    done = _replay(kinds, [k for _, k, _ in latest])
    saved: FloatArray = np.maximum(done[0] - done[1:], 0.0) / (len(latest) - _FALLING_IN)
    return saved


def _replay(kinds: Sequence[_Kind], order: Sequence[int]) -> FloatArray:
    """[sets]: when the ranks are done with all operations but the first few, on average.

    Args:
        kinds: of which nothing is taken away in the first set.
        order: of which kind each operation is.
    """
    begin, left = np.zeros(1), np.zeros(kinds[0].own.shape[1:])
    turns = [iter(range(len(kind.own))) for kind in kinds]
    for number, k in enumerate(order):
        if number == _FALLING_IN:
            begin = left.mean(axis=1)
        kind, i = kinds[k], next(turns[k])
        waits = left + kind.own[i]
        kind.add_late_and_silent(i, waits)
        left = np.maximum(waits, kind.arrival(i, waits)) + kind.drain[i]
    return np.asarray(left.mean(axis=1) - begin)


class _Shortened(NamedTuple):
    """Paths that take less without some set of causes, in order of receivers; ns.

    Attributes:
        sets, receivers, sources: [paths], without which set, and of each path.
        usual: [paths], what they usually take.
        took: [n, paths], what they took in operations in which their source was one of the two latest, else NaN.
    """

    sets: IntArray
    receivers: IntArray
    sources: IntArray
    usual: FloatArray
    took: FloatArray


class _Kind:
    """Some operations of one kind, without each of several sets; ns. Paths are [receiver, source].

    Attributes:
        own, held, drain: [n, sets, num_ranks], before waiting; of it, at the fence; after the last arrival.
    """

    def __init__(self, e: Estimates, some: IntArray, sets: Sequence[Sequence[Gain]]) -> None:
        self._e, self._some, m, num_ranks = e, some, e.m, e.load.size
        self._silent = np.flatnonzero(~m.present).tolist()
        self._is_late = np.ones((len(sets), num_ranks), bool)
        self._last, self._came, took = (
            np.swapaxes(x[some], 1, 2) for x in (m.last, m.last_arrival, m.last_path)
        )
        # Paths begin when a source has handed over its last row, whomever that is for.
        later, self._receivers = e.send_ns - m.send, np.arange(num_ranks)
        self._later = np.where(np.isfinite(later), later, 0.0)
        self._usual = usual = _usual(e) - self._later
        latest = (self._receivers, self._last)
        took = took - self._later[latest] - e.paths.clock + e.paths.clock[self._last]
        # The clock of a rank that did not report is known by what it sends only, and that may be late.
        as_usual = usual[latest] + 0.0 * took
        over = np.where(m.present[self._last], took - as_usual, 0.0)
        took = np.where(m.present[self._last], took, as_usual)
        is_known = np.isfinite(took + over) & (self._last >= 0) & (self._last != self._receivers)
        over = np.where(is_known, over, np.nan).reshape(some.size, 2 * num_ranks)
        # By how much all paths take less, below 0, in operations with few tokens.
        self._shorter = np.fmin(median(over, 1), 0.0)
        self._took = np.where(is_known, took, -np.inf)
        # What is not known is nothing on a path to oneself.
        self._latest = np.where(is_known, self._last, self._receivers)
        self._latest_took = np.where(is_known, took, 0.0)

        # Of hops of normal operations it is not known when each rank had handed over its last row.
        self._is_exact = np.isfinite(m.held).any()
        span = _filled(m.span[some], e.span_ns)
        own = _filled(m.gap[some], e.gap_ns) + span
        held = np.clip(_filled(m.held[some], e.span_ns - e.send_ns), 0.0, span)
        drain = _filled(m.drain[some], e.drain_ns)
        self.own, self.held, self.drain = (
            np.repeat(x[:, None], len(sets), axis=1) for x in (own, held, drain)
        )
        self._mates = m.expected & ~e.paths.between
        self._numbers = np.arange(num_ranks**2).reshape(num_ranks, num_ranks)
        self._least_held = or_zero(quantile_of(median(m.held, 0), 0.0))
        self._less = self._shortened(sets)
        rows = max(_BLOCK // (len(sets) * num_ranks), 1)
        self._came_by_path = np.empty((len(sets), min(rows, num_ranks), num_ranks))
        first = np.arange(0, num_ranks, rows)
        of_rows = np.searchsorted(self._less.receivers, [*first, num_ranks])
        self._blocks = [
            (slice(begin, begin + rows), slice(*less))
            for begin, less in zip(first.tolist(), zip(of_rows, of_rows[1:]))
        ]
        for s, gains in enumerate(sets):
            here = [gain for gain in gains if gain.operation == e.operation]
            found = {gain.rank for gain in here}
            # Who is late in one kind may be so in another one in which that is not certain.
            elsewhere = {gain.rank: gain for gain in gains if gain.rank not in found}
            for gain in (*here, *elsewhere.values()):
                if gain.rank is not None:
                    self._relieve(s, gain, gain.rank)
        np.maximum(self.own, self.held, out=self.own)
        np.maximum(self.drain, 0.0, out=self.drain)

    def _shortened(self, sets: Sequence[Sequence[Gain]]) -> _Shortened:
        of_sets = [
            self._shorten_paths(s, [gain for gain in gains if gain.paths is not None])
            for s, gains in enumerate(sets)
        ]
        less = _Shortened(*(np.concatenate(of, axis=-1) for of in zip(*of_sets)))
        order = np.argsort(less.receivers, kind="stable")
        ends = (less.sets[order], less.receivers[order], less.sources[order])
        return _Shortened(*ends, less.usual[order], less.took[:, order])

    def _shorten_paths(self, s: int, gains: Sequence[Gain]) -> _Shortened:
        """What paths take less.

        Where a path is hardly ever waited for, nothing is found; but it is the same path in all kinds.
        """
        e, m = self._e, self._e.m
        of_gains = [self._numbers[gain.paths].ravel() for gain in gains]
        touched = np.unique(np.concatenate([np.zeros(0, np.int64), *of_gains]))
        less, heals = np.zeros(touched.size), np.zeros(touched.size, bool)
        for gain, numbers in zip(gains, of_gains):
            places = np.searchsorted(touched, numbers)
            if gain.operation == e.operation and not gain.at_times:
                less[places] += gain.path_ns
            else:
                heals[places] = True
        heals &= ~(less > 0)
        at = dst, src = np.divmod(touched, m.num_ranks)
        usual = self._usual[at] - less
        usual = np.where(heals, np.minimum(usual, self._healthy(at)), usual)
        is_latest, took = self._latest[..., dst] == src, self._latest_took[..., dst] - less
        took = np.where(heals, np.minimum(took, usual), took)
        took = np.where(is_latest[:, 0], took[:, 0], np.where(is_latest[:, 1], took[:, 1], np.nan))
        slow, hold_up = np.zeros((2, m.num_ranks))
        np.maximum.at(slow, src, np.where(self._mates[at], np.where(heals, np.inf, less), 0.0))
        # At its fence a rank still waits for other causes.
        some = np.flatnonzero(slow)
        paths = self._usual[:, some]
        is_there = slow[src] > 0
        paths[dst[is_there], np.searchsorted(some, src[is_there])] = usual[is_there]
        over = np.where(self._mates[:, some], paths - self._healthy((slice(None), some)), 0.0)
        others = over.max(axis=0, initial=0.0)
        fence = np.clip(self.held[:, 0, some] - self._least_held - others, 0.0, slow[some])
        self.own[:, s, some] -= fence
        self.held[:, s, some] -= fence
        # Nor does it wait for slots of a receiver to which rows come sooner.
        np.maximum.at(hold_up, src, np.where((less > 0) | heals, m.credit[at], 0.0))
        self.own[:, s] -= hold_up
        return _Shortened(np.full(dst.size, s), dst, src, usual, took)

    def _healthy(self, at: Any) -> FloatArray:
        """Of some paths what they take without any cause."""
        return np.asarray(np.nan_to_num(self._e.paths.usual[at]) - self._later[at])

    def _relieve(self, s: int, gain: Gain, rank: int) -> None:
        """Takes away a rank's own time."""
        is_here = gain.operation == self._e.operation
        if not gain.is_recorded:
            self._is_late[s, rank] = False
        elif gain.is_shared:
            for times in (self.own, self.drain) if gain.work_ns and is_here else ():
                more = times[:, 0, rank] - median(np.delete(times[:, 0], rank, axis=1), 1)
                times[:, s, rank] -= more
                times[:, s] += (more / times.shape[2])[:, None]
        elif gain.work_ns or gain.work_each is not None:
            excess = np.pad(self._e.work.excess[:, rank], _BESIDE, "reflect")
            beside = np.lib.stride_tricks.sliding_window_view(excess, 2 * _BESIDE + 1)
            late = np.nan_to_num(median(beside[self._some], 1))
            if gain.work_each is not None and is_here:
                late = np.maximum(late, gain.work_each[self._some])
            self.own[:, s, rank] -= late
        if is_here:
            self.drain[:, s, rank] -= gain.drain_ns

    def add_late_and_silent(self, i: int, waits: FloatArray) -> None:
        """To `waits`, [sets, num_ranks], by how much ranks that did not report were later, as others saw it."""
        for rank in self._silent:
            seen = (self._last[i] == rank) & np.isfinite(self._took[i])
            sent = (waits[0] + self._came[i] - self._took[i])[seen]
            late = median_of(sent) + self.held[i, 0, rank] - waits[0, rank]
            waits[self._is_late[:, rank], rank] += np.fmax(late, 0.0)

    def arrival(self, i: int, waits: FloatArray) -> FloatArray:
        """[sets, num_ranks]: when the last source has come, if ranks begin to wait then."""
        sent = waits - self.held[i]
        # The second latest source came then, or the rank began to wait; of some nobody knows.
        came = np.maximum(waits[0], sent[0, self._last[i, 1]] + self._took[i, 1])
        no_later = np.where(self._is_exact & (self._last[i, 0] >= 0), came, np.inf)
        paths = self._usual + self._shorter[i]
        np.minimum(paths, no_later[:, None] - sent[0], out=paths)
        paths[self._receivers, self._latest[i]] = self._latest_took[i]
        less = self._less
        shorter = np.minimum(
            less.usual + self._shorter[i], no_later[less.receivers] - sent[0, less.sources]
        )
        shorter = np.where(np.isnan(less.took[i]), shorter, less.took[i])
        arrival, shorter = np.empty(waits.shape), shorter + sent[less.sets, less.sources]
        for rows, of_rows in self._blocks:
            of_block = paths[rows]
            came = np.add(of_block, sent[:, None], out=self._came_by_path[:, : len(of_block)])
            at = less.receivers[of_rows] - rows.start
            came[less.sets[of_rows], at, less.sources[of_rows]] = shorter[of_rows]
            np.maximum.reduce(came, axis=2, out=arrival[:, rows])
        return arrival


def _filled(series: FloatArray, usual: FloatArray) -> FloatArray:
    """`[n, num_ranks]` with what is usual for each rank where nothing is known; of silent ones the others'."""
    known = np.where(np.isfinite(series), series, usual)
    if not np.isfinite(usual).all():
        known = np.where(np.isfinite(known), known, median(known, 1)[:, None])
    return np.where(np.isfinite(known), known, 0.0)


def _usual(e: Estimates) -> FloatArray:
    """[receiver, source] median path times, the usual ones where none was seen; none to oneself."""
    present = e.m.present
    paths = np.where(np.isfinite(e.paths.time), e.paths.time, e.paths.usual)
    expected = np.where(present[:, None], e.m.expected, e.m.expected.T)
    # Of ranks that did not report nobody knows the node.
    unknown = expected & ~(present & present[:, None] & np.isfinite(paths))
    if unknown.any():
        paths[unknown] = or_zero(median_of(e.paths.time))
    paths[~expected] = -np.inf
    np.fill_diagonal(paths, 0.0)
    return paths
