"""Nodes in a matrix of waiting: which ranks share one, and which cells are comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from deep_ep.diagnose.core.diagnosis import FloatArray, IntArray
from deep_ep.diagnose.core.robust_stats import quantile, quantile_of

# A lower quartile of a row is healthy while half of the ranks are late; so is a lower median of a
# column.
LOW, MIDDLE = 0.25, 0.5
# A node of fewer ranks has too few cells to be looked at by itself.
MIN_PER_NODE = 4
# Waiting between nodes is so many times that within nodes where they are told apart without names.
_RATIO = 2.0


def find_nodes(wait: FloatArray, hosts: Sequence[str] | None) -> tuple[IntArray, bool]:
    """`[n]` node of each rank, numbered in order of rank, and whether that is a guess.

    Args:
        wait: [n, n], NaN where unknown, and on the diagonal.
        hosts: [n] host names; where they differ, they are the nodes.
    """
    num_ranks = wait.shape[0]
    one = np.zeros(num_ranks, np.int64)
    if hosts is not None and len(set(hosts)) > 1:
        number = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
        # Nodes of one rank leave nothing within a node to be told apart.
        alone = len(number) == num_ranks
        return (one if alone else np.array([number[host] for host in hosts], np.int64)), False
    # Late ranks, which hardly wait, would hide what their node looks like.
    usual = quantile(wait, MIDDLE, 1)
    waits_little = usual < 0.25 * quantile_of(usual, 0.75)
    waiting = np.where(waits_little[:, None], np.nan, wait)
    for per_node in range(num_ranks // 2, 1, -1):
        if num_ranks >= 2 * MIN_PER_NODE and num_ranks % per_node == 0:
            nodes = np.arange(num_ranks) // per_node
            if _looks_like_nodes(waiting, nodes):
                return nodes, True
    return one, False


def _looks_like_nodes(wait: FloatArray, nodes: IntArray) -> bool:
    """Whether every pair of nodes waits clearly longer for each other than any within itself.

    Half of the sources of a node may be late then, or some hardly be waited for; not both.
    """
    first, second = np.flatnonzero(nodes == 0), np.flatnonzero(nodes == 1)
    inside = quantile_of(wait[np.ix_(first, first)], LOW)
    if quantile_of(wait[np.ix_(first, second)], MIDDLE) <= _RATIO * inside:
        return False
    columns = quantile_by_node(wait, nodes, MIDDLE)
    for share in (MIDDLE, LOW):
        blocks = quantile_by_node(columns.T, nodes, share).T
        within = np.diag(blocks)
        between = blocks[~np.eye(within.size, dtype=bool)]
        # Nodes of which nobody waited are NaN, and speak neither for it nor against it.
        if np.fmin.reduce(between) > _RATIO * np.fmax.reduce(within):
            return True
    return False


def devices(homes: Sequence[object]) -> tuple[int, ...]:
    """Place of each rank among the ranks of its home, a host or a node."""
    counted: Counter[object] = Counter()
    places = []
    for home in homes:
        places.append(counted[home])
        counted[home] += 1
    return tuple(places)


def kinds_of_link(nodes: IntArray) -> IntArray:
    """`[n, n]`: which cells are comparable.

    Within nodes, and between nodes; with two nodes each direction by itself, because a difference
    between the two directions is common and nothing is left to compare it with.
    """
    same = nodes[:, None] == nodes[None, :]
    if int(nodes.max()) == 1:
        return np.where(same, 0, 1 + nodes[:, None])
    return np.where(same, 0, 1)


def members(nodes: IntArray) -> IntArray:
    """`[num_nodes, largest node]`: the ranks of each node, -1 where there are fewer."""
    sizes = np.bincount(nodes)
    ranks = np.full((sizes.size, int(sizes.max())), -1, np.int64)
    for node in range(sizes.size):
        ranks[node, : sizes[node]] = np.flatnonzero(nodes == node)
    return ranks


def quantile_by_node(values: FloatArray, nodes: IntArray, share: float) -> FloatArray:
    """`[num_nodes, columns]`: a quantile over the known rows of each node."""
    return np.stack(
        [quantile(values[nodes == node], share, 0) for node in range(int(nodes.max()) + 1)]
    )


def sum_by_node(values: FloatArray, nodes: IntArray) -> FloatArray:
    """`[num_nodes, columns]`: the sum over the rows of each node."""
    return np.stack([values[nodes == node].sum(axis=0) for node in range(int(nodes.max()) + 1)])
