"""Recorded operations run through again: as they were, and with some times taken away.

waits = exit + own                      sent = waits - held
ready_i = max(waits_i, max_j (sent_j + path_ij))        exit = ready + drain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import median_of
from .recorded import Recorded, Times

# Until the ranks have fallen into the step of the replay.
FALLING_IN = 4
# Cells of paths that are worked out at once, and that a fast cache holds.
_CELLS_AT_ONCE, _CACHED_CELLS = 2**16, 2**17

# Which operations follow each other: the kind, and its place among those of the kind.
Order = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Less:
    """What is taken away from the operations of one kind, for each of several sets; ns.

    Attributes:
        own, held, drain: [n, sets, num_ranks], as in `Recorded`.
        later: [sets], by how much everything comes later.
        of_set, source, receiver: [k] each, paths.
        path, most: [k], of them, and what they take at most then.
    """

    own: Times
    held: Times
    drain: Times
    later: Times
    of_set: IntArray
    source: IntArray
    receiver: IntArray
    path: Times
    most: Times


def run(kinds: Sequence[Recorded], order: Order) -> None:
    """Runs through the operations as they were, and notes when."""
    left = np.zeros(kinds[0].own.shape[1])
    for k, i in order:
        kind = kinds[k]
        if kind.silent.size:
            _hear_of_silent(kind, i, left)
        waits = left + kind.own[i]
        sent = waits - kind.held[i]
        came = sent[kind.last[i]] + kind.took[i]
        arrival = np.maximum(came[0], came[1])
        second = np.maximum(waits, came[1])
        unheard = kind.unheard[i]
        if unheard.size:
            into = sent[:, None] + kind.path[:, unheard]
            arrival[unheard], second[unheard] = into.max(axis=0), np.inf
        left = np.maximum(waits, arrival) + kind.drain[i]
        kind.sent[i], kind.second[i], kind.left[i] = sent, second, left


def _hear_of_silent(kind: Recorded, i: int, left: FloatArray) -> None:
    """The own times of ranks that did not report, from when what they sent came to the others."""
    sent = left + kind.own[i] + kind.came[i] - kind.took[i]
    for rank in kind.silent.tolist():
        seen = sent[(kind.last[i] == rank) & (kind.took[i] > -np.inf)]
        if seen.size:
            kind.own[i, rank] = max(median_of(seen) + kind.held[i, rank] - left[rank], 0.0)


def ahead(kinds: Sequence[Recorded], less: Sequence[Less], order: Order) -> FloatArray:
    """[sets]: how much earlier the ranks are done with all operations but the first few, on average.

    Args:
        kinds: that were run.
        less: of each kind.
        order: as in `run`.
    """
    num_sets, num_ranks = less[0].own.shape[1:]
    left, begin = np.zeros((num_sets, num_ranks), np.float32), np.zeros(num_sets)
    arrival = np.empty_like(left)
    # As many sets as have all their cells in a fast cache.
    together = min(max(_CACHED_CELLS // num_ranks**2, 1), num_sets)
    on_the_way = np.empty((together, num_ranks, num_ranks), np.float32)
    some_sets = [slice(s, min(s + together, num_sets)) for s in range(0, num_sets, together)]
    at_once = max(_CELLS_AT_ONCE // num_ranks**2, 1)
    changed = [_Changed(*each, some_sets, at_once) for each in zip(kinds, less)]
    # What is left are differences from the run as it was.
    ended = np.diff([float(kinds[k].left[i].sum()) / num_ranks for k, i in order], prepend=0.0)
    for number, (k, i) in enumerate(order):
        if number == FALLING_IN:
            begin = left.mean(axis=1, dtype=np.float64)
        kind, place = changed[k], i % at_once
        if place == 0:
            kind.work_out(slice(i, i + at_once))
        waits = left + kind.own[i]
        sent = waits - kind.held[i]
        for some, shorter, cells, senders in kind.groups:
            way = on_the_way[: some.stop - some.start]
            np.add(sent[some, :, None], kind.paths[place], out=way)
            if cells.size:
                way.reshape(-1)[cells] = sent.reshape(-1)[senders] + kind.shorter[place, shorter]
            np.maximum.reduce(way, axis=1, out=arrival[some])
        if kind.later is not None:
            arrival += kind.later
        left = np.maximum(waits, arrival)
        left += kind.drain[i]
        left -= np.float32(ended[number])
    return np.asarray(begin - left.mean(axis=1, dtype=np.float64))


class _Changed:
    """Operations of one kind without each set; attributes as those of `Less`, and:

    Attributes:
        groups: of some sets each: which, which of the shorter paths, their places in the paths of these
            sets, and in all sources.
        paths, shorter: [., source, receiver] all paths of some operations, [., k] those that are shorter.
    """

    def __init__(
        self, kind: Recorded, less: Less, some_sets: Sequence[slice], at_once: int
    ) -> None:
        self.kind, self.less = kind, less
        n, num_ranks = kind.own.shape
        self.own = np.maximum(np.float32(kind.own)[:, None] - less.own, 0.0)
        self.held = np.float32(kind.held)[:, None] - less.held
        self.drain = np.maximum(np.float32(kind.drain)[:, None] - less.drain, 0.0)
        self.later = less.later[:, None] if less.later.any() else None
        self.groups = []
        for some in some_sets:
            shorter = slice(*np.searchsorted(less.of_set, [some.start, some.stop]).tolist())
            senders = less.of_set[shorter] * num_ranks + less.source[shorter]
            cells = (senders - some.start * num_ranks) * num_ranks + less.receiver[shorter]
            self.groups.append((some, shorter, cells, senders))
        self._all_paths = np.empty((min(at_once, n), num_ranks, num_ranks), np.float32)

    def work_out(self, some: slice) -> None:
        """Fills in paths."""
        less = self.less
        self.paths = self.kind.paths(some, self._all_paths)
        shorter = self.paths[:, less.source, less.receiver] - less.path
        self.shorter = np.minimum(shorter, less.most)
