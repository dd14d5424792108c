"""Receivers that hold up their senders: they empty queues so late that there are no slots left.

Whoever sends to such a rank issues late, and its data comes late, through no fault of the sender's or
of what lies between. All sources of the rank show it; where only one does, a path or the source has
another cause.

Who waits for slots of a rank that itself waits is held up further on, and the chain is followed to its end:

* A rank that sums rows gives a slot back when all rows of the sum have come, so sources wait for its slots
  while the rows of another one are late: from a gateway, say, that empties its own queues slowly.
* A rank that empties its queues slowly still has its slots to empty when the last row has come. Who has
  nothing left to do then, by its own clock, is held up by others, whatever these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..collect.hops import LAST_HOPS, NORMAL_COMBINE
from ..core.causes import Cause
from ..core.diagnosis import FloatArray
from ..core.robust_stats import MAD_TO_SIGMA, healthy, median, median_of, or_zero
from .estimates import Estimates
from .finding import Found, Named, Size, cells_of, found_cause
from .judged_kind import JudgedKind
from .what_if import Gain

# A slow receiver has at least this share of what its sources wait for left to do: slots are filled some
# thirty times at most, and the last time is left.
_LEFT = 0.03
# What one cause makes of others that only look slow is known to this factor.
UNEVEN = 1.3
NOBODY: Mapping[int, float] = MappingProxyType({})


def slow_receivers(kinds: Sequence[JudgedKind]) -> list[Found]:
    """Ranks for whose slots most of their sources wait, and who are not held up themselves.

    Args:
        kinds: of operations that follow each other; low latency has slots for everything.
    """
    return [f for kind in kinds if kind.e.operation in LAST_HOPS for f in _of_hop(kind)]


def longest(found: Sequence[Found]) -> dict[int, float]:
    """By rank, how long it holds up its sources in any operation, ns."""
    by_rank: dict[int, float] = {}
    for f in found:
        rank = f.verdict.rank
        if rank is not None:
            by_rank[rank] = max(by_rank.get(rank, 0.0), f.verdict.effect_us * 1e3)
    return by_rank


def _of_hop(kind: JudgedKind) -> list[Found]:
    e = kind.e
    # How long sources wait for slots, without what the receiver cannot help.
    waited = np.where(e.m.has_sources & ~np.eye(e.m.num_ranks, dtype=bool), e.m.credit, np.nan)
    sources = np.isfinite(waited).sum(axis=1)
    for_others = np.where(np.isfinite(waited), _for_other_rows(e), np.nan)
    charged = np.maximum(waited - for_others, 0.0)
    of_most = median(charged, 1)
    usual, spread = healthy(of_most)
    over = charged - usual
    effect = np.nan_to_num(median(over, 1))
    error = MAD_TO_SIGMA * median(np.abs(over - effect[:, None]), 1)
    error = error / np.sqrt(np.maximum(sources, 1))
    # What is taken off is known to a factor.
    taken_off = median(for_others, 1)
    taken_off = np.nan_to_num(np.fmax(taken_off, median_of(taken_off)))
    bar = np.maximum((UNEVEN - 1.0) * taken_off, max(kind.floor, kind.limits.spread * spread))
    # Where slots run out for everybody, its own clock tells who is slow to give them back.
    left = np.nan_to_num(e.drain.value)
    is_slow = (e.drain.value > kind.bar(e.drain)) & (of_most >= left)
    by_clock = is_slow & (effect < left)
    effect, error = np.where(by_clock, left, effect), np.where(by_clock, e.drain.error, error)
    is_certain = ((effect > bar) | is_slow) & (left > _LEFT * effect)
    return [
        found_cause(
            kind,
            Cause.SLOW_RECEIVER,
            Named(rank),
            Size(float(effect[rank]), float(error[rank]), e.load.size, spread),
            cells_of(e, receiver=rank),
            # Its senders' time, which none of them takes by itself.
            Gain(e.operation, rank, paths=(rank, slice(None)), path_ns=float(effect[rank])),
            evidence={
                "sources_wait_for_its_slots_us": float(of_most[rank]) / 1e3,
                "own_time_over_median_us": float(left[rank]) / 1e3,
                "tokens_over_even_share": float(e.load[rank]),
                "drain_us": float(e.drain_ns[rank]) / 1e3,
            },
        )
        for rank in np.flatnonzero(is_certain).tolist()
    ]


def _for_other_rows(e: Estimates) -> FloatArray:
    """[receiver, source]: of the waiting for slots, what a receiver that sums rows cannot help, ns.

    It gives no slot back until the rows of all others have come. The slots last for some time of that: as
    long as most sources go on before they wait.
    """
    m = e.m
    if e.operation != NORMAL_COMBINE:
        return np.zeros(m.credit.shape)
    # `late` has the entering once more than the issuing, and `send` once less.
    issued = (m.late + m.send) / 2
    path = np.where(np.isfinite(m.path), m.path, e.paths.usual)
    came = np.where(m.expected, issued + path - m.credit, np.nan)
    others = np.fmax.reduce(came, axis=1, initial=np.nan)[:, None] - came
    others -= or_zero(median_of(others - m.credit))
    return np.asarray(np.maximum(np.nan_to_num(others), 0.0))
