"""What is replayed of one kind of operation: the times of its ranks and paths, as they were recorded.

Of the two latest sources of an operation it is known how long their rows took. The others' take what is
usual, but none came later than the second latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..collect.group_matrices import Matrices
from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import median, median_of, or_zero
from .gains import Replayed

# Numbers of tokens that differ by a smaller share say nothing of what one costs.
_TOKENS_DIFFER = 0.1

# Cells are many, and only differences of times are kept in it.
Times = npt.NDArray[np.float32]


@dataclass
class Recorded:
    """Operations of one kind, n of them; ns. Paths are [source, receiver]: that is the faster way.

    Attributes:
        own, held, drain: [n, num_ranks], before waiting; of it, after handing over the last row; after
            the last arrival.
        path: [source, receiver], from handing over the last row of all to the arrival, as is usual; -inf
            where nothing comes.
        last, took, came: [n, 2, num_ranks], the latest sources, how long their rows took (-inf: not
            known), and when they came after the begin of waiting.
        silent: ranks that did not report.
        unheard: of each operation, the ranks of which it is not known who came last.
        more: [n, num_ranks], by which share a receiver gets more tokens than usual.
        by_tokens: [source, receiver], how much longer paths take with twice the tokens; None: no matter.
        sent, second, left: [n, num_ranks], of the run as it was: when each rank had handed over its last
            row, when the second latest source came to it, and when it was done.
    """

    own: FloatArray
    held: FloatArray
    drain: FloatArray
    path: Times
    last: IntArray
    took: FloatArray
    came: FloatArray
    silent: IntArray
    unheard: Sequence[IntArray]
    more: Times = field(init=False)
    by_tokens: Times | None = None
    sent: FloatArray = field(init=False)
    second: FloatArray = field(init=False)
    left: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.sent, self.second, self.left = np.empty((3, *self.own.shape))

    def paths(self, some: slice, out: Times) -> Times:
        """[., source, receiver], in some operations of the run as it was; written to the begin of `out`."""
        begin = self.sent[some, :1]
        second, sent = (np.float32(x[some] - begin) for x in (self.second, self.sent))
        paths: Times = np.subtract(second[:, None, :], sent[:, :, None], out=out[: len(sent)])
        usual = self.path
        if self.by_tokens is not None:
            usual = usual + self.by_tokens * self.more[some, None, :]
        np.minimum(usual, paths, out=paths)
        op, which, receiver = np.nonzero(self.took[some] > -np.inf)
        source = self.last[some][op, which, receiver]
        paths[op, source, receiver] = self.took[some][op, which, receiver]
        return paths


def record(e: Replayed, at: Sequence[int], time: Times, usual: Times, later: Times) -> Recorded:
    """Some operations of a kind.

    Args:
        e: the kind.
        at: which of its operations.
        time: [receiver, source], what paths take; NaN where they were not seen.
        usual: likewise, what these take.
        later: likewise, by how much a source hands over later to the last of all than to this one.
    """
    m, some = e.m, np.array(at, np.int64)
    span = _filled(m.span[some], e.span_ns)
    last = np.swapaxes(m.last[some], 1, 2)
    took, came = (np.swapaxes(x[some], 1, 2) for x in (m.last_path, m.last_arrival))
    receiver = np.arange(m.num_ranks)
    took = took - e.paths.clock + e.paths.clock[last] - later[receiver, last]
    known = np.isfinite(took) & (last >= 0) & (last != receiver)
    recorded = Recorded(
        own=_filled(m.gap[some], e.gap_ns) + span,
        held=_filled(m.held[some], np.maximum(e.span_ns - e.send_ns, 0.0)),
        drain=_filled(m.drain[some], e.drain_ns),
        path=_paths(e.m, time, usual, later),
        last=last,
        took=np.where(known, took, -np.inf),
        came=came,
        silent=np.flatnonzero(~m.present),
        unheard=[np.flatnonzero(of_op < 0) for of_op in last[:, 0]],
    )
    _weigh_tokens(recorded, m, m.received[some])
    return recorded


def _filled(series: FloatArray, usual: FloatArray) -> FloatArray:
    """`[n, num_ranks]` with what is usual for each rank where nothing is known; of silent ones the others'."""
    if np.isfinite(series).all():
        return series
    known = np.where(np.isfinite(series), series, usual)
    if not np.isfinite(usual).all():
        known = np.where(np.isfinite(known), known, median(known, 1)[:, None])
    return np.where(np.isfinite(known), known, 0.0)


def _paths(m: Matrices, time: Times, usual: Times, later: Times) -> Times:
    expected, present = m.expected, m.present[:, None]
    if not present.all():
        # Of what comes into a rank that did not report the way back is the best guess.
        time, expected = (np.where(present, x, x.T) for x in (time, expected))
    paths = np.where(np.isnan(time), usual, time) - later
    paths[~expected] = -np.inf
    return np.ascontiguousarray(paths.T)


def _weigh_tokens(recorded: Recorded, m: Matrices, received: FloatArray) -> None:
    """What tokens cost, where their number changes, from the latest sources of each operation."""
    numbers = received / np.maximum(received.mean(axis=0), 1.0)
    if not numbers[np.isfinite(numbers)].std() > _TOKENS_DIFFER:
        return
    known = np.isfinite(m.path_tokens)
    usual = np.where(known, m.path_tokens, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    more = received / np.maximum(usual * m.num_ranks, 1.0) - 1.0
    more = np.where(np.isfinite(more) & (usual > 0), more, 0.0)
    recorded.more = more.astype(np.float32)
    recorded.by_tokens = np.zeros_like(recorded.path)
    op, which, receiver = np.nonzero(recorded.took > -np.inf)
    source = recorded.last[op, which, receiver]
    longer = recorded.took[op, which, receiver] - recorded.path[source, receiver]
    more, nodes = more[op, receiver], m.place.nodes
    same_node = nodes[:, None] == nodes
    for link in (same_node, ~same_node):
        seen = link[source, receiver] & np.isfinite(longer)
        if seen.any() and more[seen].std() > _TOKENS_DIFFER:
            x = more[seen] - more[seen].mean()
            most = or_zero(median_of(recorded.path[link & (recorded.path > 0)]))
            recorded.by_tokens[link] = np.clip(x @ longer[seen] / (x @ x), 0.0, most)
