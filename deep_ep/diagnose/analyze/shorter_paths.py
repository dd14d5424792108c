"""Which paths are shorter without a cause, and by how much."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import median, median_of, or_zero
from .gains import Gain, Replayed

# Of larger groups, the receivers that tell what paths take.
_RECEIVERS_LOOKED_AT = 16
# Receivers with so many times the usual tokens have ports at which others wait; so many are looked at.
_BUSY, _BUSY_RECEIVERS = 1.1, 8
# Rows that come to a busy port when the others' have passed take so much less, at least, ns and share.
_PASSES_NS, _PASSES = 3_000.0, 0.1
# Of the paths that were seen, this share is slow before that says something of the others.
_NEARLY_ALL = 0.3


class Hot(NamedTuple):
    """What the tokens of a hot rank make longer; ns.

    Attributes:
        receives: whether it gets them in this kind; else it returns them.
        cells, path: its paths, and by how much.
        later: by how much everything comes later when all have these tokens.
    """

    receives: bool
    cells: IntArray
    path: FloatArray
    later: float


class Cut(NamedTuple):
    """Paths that are shorter without a set: places in all [receiver, source], by how much, what they take
    at most, and whether they were seen; of the others nothing but the most is known. ns."""

    cells: IntArray
    path: FloatArray
    most: FloatArray
    seen: BoolArray


class ShorterPaths:
    """Paths of one kind, [receiver, source], with and without causes.

    Attributes:
        time: what they take, ns; NaN where they were not seen.
        usual: what those take that were not seen; see `lower_usual`.
        later: by how much a source hands over later to the last of all than to this one.
        hot: what the tokens of hot ranks do.
    """

    def __init__(self, e: Replayed, gains: Sequence[Gain]) -> None:
        self.e, self.m, self.gains = e, e.m, gains
        self.num_ranks, self.nodes = e.m.num_ranks, e.m.place.nodes
        self.time, self.usual = (x.astype(np.float32) for x in (e.paths.time, e.paths.usual))
        self.later = np.float32(e.send_ns) - e.m.send.astype(np.float32)
        for known in (self.usual, self.later):
            np.copyto(known, 0.0, where=np.isnan(known))
        # The number of each path, in the order of cells.
        self._number = np.arange(self.num_ranks**2).reshape(self.num_ranks, self.num_ranks)
        # Receivers that tell what paths take.
        self._rows = np.arange(0, self.num_ranks, max(1, self.num_ranks // _RECEIVERS_LOOKED_AT))
        shared = {gain.rank for gain in gains if gain.is_shared and gain.rank is not None}
        self.hot = {rank: self._tokens_of(rank) for rank in sorted(shared)}
        self._of_gain = {id(gain): self._paths_of(gain) for gain in gains}
        self._behind = {id(gain): list(self._behind_others(gain)) for gain in gains}
        self._healthy: Mapping[int, FloatArray] = {}

    def others_load(self, rank: int) -> float:
        """Tokens that the others handle, over an even share; median."""
        return median_of(np.delete(self.e.load, rank))

    def healthy(self) -> Iterator[tuple[int, FloatArray]]:
        """Of each gain of this kind, by its id, how long its paths take without it; ns."""
        for gain in self.gains:
            if gain.operation == self.m.operation:
                cells, path = self._of_gain[id(gain)]
                yield id(gain), np.maximum(self.time.reshape(-1)[cells] - path, 0.0)

    def lower_usual(self, healthy: Mapping[int, FloatArray]) -> None:
        """Where nearly all paths that were seen are slow, the others take less than is usual there.

        Args:
            healthy: of the gains of all kinds, as `healthy` has them.
        """
        self._healthy = healthy
        slow = [(*self._of_gain[id(g)], g.operation != self.m.operation, id(g)) for g in self.gains]
        slow += [(hot.cells, hot.path, False, 0) for hot in self.hot.values()]
        cells = np.concatenate([cells for cells, *_ in slow])
        if not cells.size:
            return
        touched = cells[:: max(1, cells.size // _RECEIVERS_LOOKED_AT)] // self.num_ranks
        rows = np.array(sorted({*self._rows.tolist(), *touched.tolist()}))
        place = np.full(self.num_ranks, -1)
        place[rows] = np.arange(rows.size)
        now = self.time[rows]
        without = now.copy()
        for cells, path, is_elsewhere, gain in slow:
            looked_at = place[cells // self.num_ranks] >= 0
            row, column = np.divmod(cells[looked_at], self.num_ranks)
            at = place[row], column
            if is_elsewhere:
                without[at] = np.fmin(without[at], self._healthy[gain][looked_at])
            else:
                without[at] -= path[looked_at]
        for same in (True, False):
            link = ((self.nodes[rows][:, None] == self.nodes) == same) & ~np.isnan(now)
            if link.any() and np.mean(without[link] < now[link]) > _NEARLY_ALL:
                drop = median_of(now[link]) - median_of(without[link])
                self.usual[(self.nodes[:, None] == self.nodes) == same] -= max(drop, 0.0)

    def cut(self, gains: Sequence[Gain], hot: Collection[int]) -> Cut:
        """Without these gains, of which those ranks are hot."""
        here = [self._of_gain[id(g)] for g in gains if g.operation == self.m.operation]
        here += [(self.hot[rank].cells, self.hot[rank].path) for rank in hot]
        for gain in gains:
            # Where a hot receiver's tokens are taken away as well, nobody waits at its port.
            behind = self._behind[id(gain)]
            here += [(cells, ns) for receiver, cells, ns in behind if receiver not in hot]
        cells, path = _summed(here)
        seen = ~np.isnan(self.time.reshape(-1)[cells])
        most = np.where(seen, np.inf, self._usual_of(cells))
        for gain in gains:
            # Of a path that is hardly ever waited for nothing is found; but it is the same in all kinds.
            if gain.operation != self.m.operation and self._of_gain[id(gain)][0].size:
                more = self._of_gain[id(gain)][0]
                takes = np.fmin(self._usual_of(more), self._healthy[id(gain)])
                only = ~np.isin(more, cells)
                cells, path = np.append(cells, more[only]), np.append(path, np.zeros(only.sum()))
                seen = np.append(seen, np.zeros(only.sum(), bool))
                most = np.append(most, takes[only])
        return Cut(cells, path, most, seen)

    def _usual_of(self, cells: IntArray) -> FloatArray:
        row, column = np.divmod(cells, self.num_ranks)
        return np.asarray(self.usual[row, column] - self.later[row, column])

    def _paths_of(self, gain: Gain) -> tuple[IntArray, FloatArray]:
        if gain.paths is None or gain.is_shared:
            return np.zeros(0, np.int64), np.zeros(0)
        cells = self._number[gain.paths]
        return cells.reshape(-1), np.broadcast_to(gain.path_ns, cells.shape).reshape(-1)

    def _tokens_of(self, rank: int) -> Hot:
        """Without its tokens, a hot rank's paths take as long as those of others, which then have them."""
        load, tokens = self.e.load, self.m.tokens
        received, returned = float(np.nansum(tokens[rank])), float(np.nansum(tokens[:, rank]))
        receives = received > returned
        if received == returned:
            return Hot(receives, np.zeros(0, np.int64), np.zeros(0), 0.0)
        cells = self._number[rank] if receives else self._number[:, rank]
        time = self.time.reshape(-1)[cells].astype(np.float64)
        rows = self._rows[self._rows != rank]
        others = self.time[rows]
        others[:, rank] = np.nan
        usual = self.others_load(rank)
        more = max(load[rank] / usual - 1.0, 0.0) / self.num_ranks if usual > 0 else 0.0
        longer, later = np.zeros(self.num_ranks), 0.0
        for same in (True, False):
            of_rank = (self.nodes == self.nodes[rank]) == same
            level = median_of(others[(self.nodes[rows][:, None] == self.nodes) == same])
            if not np.isfinite(level):
                level = or_zero(median_of(time[of_rank])) / max(float(load[rank]), 1.0)
            longer[of_rank] = np.maximum(time[of_rank] - level, 0.0)
            later = more * level if level > 0 and not receives else later
        known = np.isfinite(longer)
        return Hot(receives, cells[known], longer[known], later)

    def _behind_others(self, gain: Gain) -> Iterator[tuple[int, IntArray, FloatArray]]:
        """Rows that come late to a busy port pass it at once; earlier, they wait behind others': receiver,
        place, ns below 0."""
        rank = gain.rank
        if rank is None or not gain.work_ns > 0 or gain.operation != self.m.operation:
            return
        for receiver in self._busy:
            same_node = self.nodes == self.nodes[receiver]
            port = same_node == same_node[rank]
            port[[rank, receiver]] = False
            time = self.time[receiver].astype(np.float64)
            over, others = time - self.e.paths.usual[receiver], median_of(time[port])
            flows = int(np.isfinite(time[port]).sum())
            shorter = median_of(over[port]) - over[rank]
            if flows > 1 and shorter > max(_PASSES_NS, _PASSES * others):
                longer = others * (1 + 1 / flows) - time[rank]
                yield (
                    receiver,
                    self._number[receiver, [rank]],
                    -np.clip([longer], 0.0, gain.work_ns),
                )

    @functools.cached_property
    def _busy(self) -> list[int]:
        """Receivers with the most tokens."""
        received = median(self.m.received, 0)
        busy = np.flatnonzero(received > _BUSY * median_of(received))
        most: list[int] = busy[np.argsort(-received[busy])][:_BUSY_RECEIVERS].tolist()
        return most


def _summed(some: Sequence[tuple[IntArray, FloatArray]]) -> tuple[IntArray, FloatArray]:
    """Places, each once, with the sums of their values."""
    some = [(cells, values) for cells, values in some if cells.size]
    if len(some) < 2:
        return some[0] if some else (np.zeros(0, np.int64), np.zeros(0))
    cells, back = np.unique(np.concatenate([cells for cells, _ in some]), return_inverse=True)
    sums = np.bincount(back, weights=np.concatenate([of_some for _, of_some in some]))
    return cells, sums.astype(np.float64)
