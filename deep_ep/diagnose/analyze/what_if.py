"""What the program would gain without a cause: its operations are replayed, with and without it.

A cause does not cost what it takes. A rank that is late by d starts ahead by one path time, since
the data of the others is there when it comes; three equally late ranks cost as much as one; a slow
path holds up its receiver, and that one everybody else in the next operation. So all ranks are run
through the recorded operations again (`replay`), with their own times of each operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.diagnosis import FloatArray
from ..core.robust_stats import median, median_of
from .gains import Gain, PathTimes, Replayed
from .recorded import record
from .replay import FALLING_IN, Less, ahead, run
from .shorter_paths import Cut, Hot, ShorterPaths

__all__ = ["Gain", "PathTimes", "Replayed", "savings_ns"]

# Operations replayed, and cells looked at, which bounds the time for large groups.
_LEAST_OPERATIONS, _MOST_OPERATIONS = 28, 128
_MOST_CELLS = 6e5


def savings_ns(kinds: Sequence[Replayed], sets: Sequence[Sequence[Gain]]) -> FloatArray:
    """[len(sets)]: by how much an operation would be shorter, on average, without each set.

    Args:
        kinds: that follow each other (dispatch and combine).
        sets: causes that are taken away together.

    Returns:
        Nanoseconds per operation, whatever its kind; NaN without raw stamps.
    """
    # One cause is the same alone and all together.
    keys = [tuple(map(id, gains)) for gains in sets]
    different = dict(zip(keys, sets))
    steps = _steps(kinds, len(different))
    if not sets or not all(kind.has_stamps for kind in kinds) or len(steps) <= FALLING_IN:
        return np.full(len(sets), np.nan)
    at: list[list[int]] = [[] for _ in kinds]
    order = []
    for k, op in steps:
        order.append((k, len(at[k])))
        at[k].append(op)
    gains = list({id(gain): gain for gains in sets for gain in gains}.values())
    paths = [ShorterPaths(e, gains) for e in kinds]
    healthy = {gain: ns for of_kind in paths for gain, ns in of_kind.healthy()}
    for of_kind in paths:
        of_kind.lower_usual(healthy)
    without = [_Without(*each, list(different.values())) for each in zip(kinds, at, paths)]
    recorded = [kind.recorded for kind in without]
    run(recorded, order)
    saved = np.maximum(ahead(recorded, [kind.less() for kind in without], order), 0.0)
    saved /= len(steps) - FALLING_IN
    place = {key: i for i, key in enumerate(different)}
    return np.array([saved[place[key]] for key in keys])


def _steps(kinds: Sequence[Replayed], num_sets: int) -> list[tuple[int, int]]:
    """The latest operations of all kinds in their order: the kind, and which of its operations."""
    order = sorted((int(op), k, at) for k, e in enumerate(kinds) for at, op in enumerate(e.m.ops))
    cells = max((e.m.num_ranks**2 * (num_sets + 1) for e in kinds), default=1)
    most = min(max(int(_MOST_CELLS // cells), _LEAST_OPERATIONS), _MOST_OPERATIONS)
    return [(k, at) for _, k, at in order[-most:]]


class _Without:
    """One kind, and what it is without each set."""

    def __init__(
        self, e: Replayed, at: Sequence[int], paths: ShorterPaths, sets: Sequence[Sequence[Gain]]
    ) -> None:
        self.e, self.m, self.at, self.sets, self.paths = e, e.m, at, sets, paths
        self.num_ranks, self.nodes = e.m.num_ranks, e.m.place.nodes
        self.recorded = record(e, at, paths.time, paths.usual, paths.later)
        for gain in paths.gains:
            if not gain.is_recorded and gain.operation == self.m.operation:
                self.recorded.own[:, gain.rank] += gain.work_ns

    def less(self) -> Less:
        """What each set takes away, once it is known how the recorded operations went."""
        own, held, drain = np.zeros((3, len(self.at), len(self.sets), self.num_ranks), np.float32)
        later, cuts = np.zeros(len(self.sets), np.float32), []
        of_tokens = {rank: self._of_tokens(rank, hot) for rank, hot in self.paths.hot.items()}
        for s, gains in enumerate(self.sets):
            hot = {gain.rank for gain in gains if gain.is_shared and gain.rank is not None}
            for rank in sorted(hot):
                less = drain if self.paths.hot[rank].receives else own
                less[:, s] += of_tokens[rank]
                later[s] += self.paths.hot[rank].later
            for gain in gains:
                of_rank = gain.rank is not None and not gain.is_shared
                if of_rank and gain.operation == self.m.operation:
                    own[:, s, gain.rank] += self._work(gain)
                    drain[:, s, gain.rank] += gain.drain_ns
            cuts.append(self.paths.cut(gains, hot))
            held[:, s] = self._at_fence(cuts[-1])
        receiver, source = np.divmod(np.concatenate([c.cells for c in cuts]), self.num_ranks)
        return Less(
            own=own + held,
            held=held,
            drain=drain,
            later=later,
            of_set=np.repeat(np.arange(len(cuts)), [c.cells.size for c in cuts]),
            source=source,
            receiver=receiver,
            path=np.float32(np.concatenate([np.where(c.seen, c.path, 0.0) for c in cuts])),
            most=np.float32(np.concatenate([c.most for c in cuts])),
        )

    def _work(self, gain: Gain) -> FloatArray | float:
        own = self.recorded.own
        if not gain.is_recorded:
            return max(median_of(own[:, gain.rank] - median(own, 1)), 0.0)
        return gain.work_ns + (0.0 if gain.work_each is None else gain.work_each[self.at])

    def _of_tokens(self, rank: int, hot: Hot) -> FloatArray:
        """[n, num_ranks]: what a hot rank's tokens cost it, less what they then cost all.

        It is in proportion to all tokens of an operation, and they go where the others' go.
        """
        times = self.recorded.drain if hot.receives else self.recorded.own
        over = times[:, rank] - median(np.delete(times, rank, axis=1), 1)
        tokens = np.nansum(self.m.received[self.at], axis=1)
        cost = over.sum() / tokens.sum() if hot.cells.size and tokens.any() else 0.0
        load = self.e.load.copy()
        load[rank] = self.paths.others_load(rank)
        moved = -load / load.sum() if load.any() else np.full(load.size, -1 / load.size)
        moved[rank] += 1.0
        return np.asarray(max(cost, 0.0) * tokens[:, None] * moved)

    def _at_fence(self, cut: Cut) -> FloatArray | float:
        """[n, num_ranks]: by how much less ranks are held up until their stores within the node have landed.

        Waiting for others begins then. Never less than what their other paths take, and a healthy rank is
        held up.
        """
        if not cut.cells.size or not self.recorded.held.any():
            return 0.0
        held = median(self.recorded.held, 0)
        receiver, source = np.divmod(cut.cells, self.num_ranks)
        within = (self.nodes[receiver] == self.nodes[source]) & (receiver != source)
        shorter, landed, then = np.zeros((3, self.num_ranks))
        for rank in set(source[within].tolist()):
            mine = np.flatnonzero(within & (source == rank))
            now = np.where(self.nodes == self.nodes[rank], self.recorded.path[rank], 0.0)
            now[receiver[mine]] += np.where(cut.seen, 0.0, cut.path)[mine]
            without = now.copy()
            without[receiver[mine]] = np.minimum(
                now[receiver[mine]] - cut.path[mine], cut.most[mine]
            )
            landed[rank], then[rank] = now.max(), without.max()
            shorter[rank] = max(landed[rank] - then[rank], 0.0)
        healthy = held[(shorter == 0) & self.m.present]
        if healthy.size:
            needed = np.fmax(then, healthy.min())
        else:
            # Nobody shows what is usual: it must be as long as the slowest path takes.
            needed = np.where(np.abs(held - landed) < shorter / 4, then, np.inf)
        return np.asarray(np.clip(self.recorded.held - needed, 0.0, shorter))
