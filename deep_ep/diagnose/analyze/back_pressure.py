"""Receivers that hold up their senders: they empty queues so late that there are no slots left.

Whoever sends to such a rank issues late, and its data comes late, through no fault of the sender's or
of what lies between. All sources of the rank show it; where only one does, a path or the source has
another cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..collect.hops import LAST_HOPS
from ..core.causes import Cause
from ..core.diagnosis import FloatArray
from ..core.robust_stats import MAD_TO_SIGMA, healthy, median, median_of
from .finding import Found, Named, Size, cells_of, found_cause
from .thresholds import JudgedKind
from .what_if import Gain

# Fewer sources do not tell a receiver from a path.
_MIN_SOURCES = 2
# A sum has no error but how its sources differ, in so many of which it must be certain.
_CERTAIN = 3.0
# If paths into the rank are slow by this share of it, they are the reason.
_BY_PATHS = 0.5
# What one cause makes of others that only look slow is known to this factor.
UNEVEN = 1.3
NOBODY: Mapping[int, float] = MappingProxyType({})


def slow_receivers(kind: JudgedKind, hot_ranks: set[int]) -> list[Found]:
    """Ranks for whose slots most of their sources wait.

    Args:
        kind: of operation; low latency has slots for everything.
        hot_ranks: which get so much that their slots may well run out.
    """
    e = kind.e
    if e.operation not in LAST_HOPS:
        return []
    waited = np.where(e.m.has_sources & ~np.eye(e.m.num_ranks, dtype=bool), e.m.credit, np.nan)
    sources = np.isfinite(waited).sum(axis=1)
    usual, spread = healthy(median(waited, 1))
    over = waited - usual
    effect = median(over, 1)
    apart = MAD_TO_SIGMA * median(np.abs(over - effect[:, None]), 1)
    error = apart / np.sqrt(np.maximum(sources, 1))
    bar = np.maximum(kind.floor, np.maximum(_CERTAIN * error, kind.limits.spread * spread))
    certain = (effect > bar) & (sources >= _MIN_SOURCES)
    certain &= ~(e.paths.inbound > _BY_PATHS * effect)
    return [
        _slow_receiver(kind, rank, over, float(error[rank]), spread)
        for rank in np.flatnonzero(certain).tolist()
        if rank not in hot_ranks
    ]


def longest(found: Sequence[Found]) -> dict[int, float]:
    """By rank, how long it holds up its sources in any operation, ns."""
    by_rank: dict[int, float] = {}
    for f in found:
        rank = f.verdict.rank
        if rank is not None:
            by_rank[rank] = max(by_rank.get(rank, 0.0), f.verdict.effect_us * 1e3)
    return by_rank


def _slow_receiver(
    kind: JudgedKind, rank: int, over: FloatArray, error: float, spread: float
) -> Found:
    e = kind.e
    effect = median_of(over[rank])
    return found_cause(
        kind,
        Cause.SLOW_RECEIVER,
        Named(rank),
        Size(effect, error, e.load.size, spread, e.load.size),
        cells_of(e, receiver=rank),
        # Its senders' time, which none of them takes by itself.
        Gain(e.operation, rank, paths=(rank, slice(None)), path_ns=effect),
        evidence={
            "sources_wait_for_its_slots_us": effect / 1e3,
            "tokens_over_even_share": float(e.load[rank]),
            "drain_us": float(e.drain_ns[rank]) / 1e3,
        },
    )
