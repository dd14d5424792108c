"""Which other ranks tell of a rank: all of its node or of a small group, and some of a large one."""

from __future__ import annotations

import functools

import numpy as np

from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import median

# Paths from or to so many ranks tell as much as those of all.
ENOUGH_RANKS = 64


@functools.lru_cache(maxsize=8)
def some_ranks(num_ranks: int) -> IntArray:
    """All ranks in order, or as many of them as are enough."""
    return np.sort(np.random.default_rng(0).permutation(num_ranks)[:ENOUGH_RANKS])


def members(groups: IntArray) -> IntArray:
    """[num_groups, largest group]: the ranks of each, filled up with -1."""
    in_order = np.argsort(groups, kind="stable")[np.count_nonzero(groups < 0) :]
    sizes = np.bincount(groups[in_order])
    ranks = np.full((sizes.size, int(sizes.max(initial=0))), -1)
    ranks[np.arange(ranks.shape[1]) < sizes[:, None]] = in_order
    return ranks


def over_mates(values: FloatArray, nodes: IntArray) -> FloatArray:
    """[num_ranks]: above the median of the other ranks of the node; 0 where nothing is known."""
    mates = members(nodes)[nodes]
    is_mate = (mates >= 0) & (mates != np.arange(nodes.size)[:, None])
    return np.nan_to_num(values - median(np.where(is_mate, values[mates], np.nan), 1))


def partners(nodes: IntArray, of_link: BoolArray, *, within: bool) -> IntArray:
    """[num_ranks, partners]: ranks whose paths to and from each tell of it; -1: none.

    Args:
        nodes: [num_ranks].
        of_link: [receiver, source], paths of one kind of link.
        within: whether it joins ranks of one node. Then a rank is among its own partners.
    """
    if within and nodes.max() > 0:
        return members(nodes)[nodes]
    some = some_ranks(nodes.size)
    return np.where(of_link[:, some], some, -1)
