"""Causes in a matrix of summed waiting: sides of senders, sides of receivers, and pairs.

The sums are taken apart into what a receiver does to all its sources (its row), what a source does
to all its receivers (its column), and single paths:

    wait[i, j] = level(kind of link) + row[i] + column[j] + excess[i, j]

Sources come first. A late source hardly waits itself, so its row is small and says nothing; it is
left out of everything that follows. Rows and columns are located by lower quantiles, never by the
mean of two values, because up to half of the group may spoil them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from deep_ep.diagnose.analyze.waits_only.nodes import (
    LOW,
    MIDDLE,
    MIN_PER_NODE,
    kinds_of_link,
    members,
    quantile_by_node,
    sum_by_node,
)
from deep_ep.diagnose.analyze.waits_only.tails import (
    chance_of_median,
    chance_of_one,
    noise,
    tail_of_median,
)
from deep_ep.diagnose.core.diagnosis import BoolArray, FloatArray, IntArray
from deep_ep.diagnose.core.robust_stats import (
    MAD_TO_SIGMA,
    MEDIAN_COST,
    healthy,
    median_of,
    quantile,
    quantile_of,
)

SENDER_SIDE, RECEIVER_SIDE, PAIR = "sender side", "receiver side", "pair"

# Of two ranks one is named when it is waited for so many times longer, over that many operations.
PAIR_RATIO, PAIR_OPERATIONS = 3.0, 16
# Effects below this share of what is healthy, and of the receiver's largest waiting, are not named.
_OF_LEVEL, _OF_LARGEST = 0.25, 0.05
# And below so many standard deviations between healthy members. Chosen, not tuned.
_SPREADS = 6.0
# Chance of any false verdict of one sort (sources, receivers, paths) in a healthy window.
_BY_CHANCE = 0.002
# Up to so many nodes one rank more or less decides what is usual between them.
_FEW_NODES = 4
# Ranks named late make room for others; that settles within a few rounds.
_MAX_ROUNDS = 6


@dataclass(frozen=True)
class Cause:
    """Who is named: a source, a receiver, or both for a path; in the unit of the matrix.

    Attributes:
        side: SENDER_SIDE, RECEIVER_SIDE or PAIR.
        receiver, source: -1 where it is everybody.
        effect, error: waiting above the healthy, its standard error.
        healthy: what is usual there.
        chance: bound on the probability of such an effect anywhere in the group by chance.
        cells: how many cells of the matrix show it.
        only_node: the node to which the others belong, -1 for all nodes.
        node_pair: receiver and source are nodes.
    """

    side: str
    receiver: int
    source: int
    effect: float
    error: float
    healthy: float
    chance: float
    cells: int
    only_node: int = -1
    node_pair: bool = False


@dataclass(frozen=True)
class _Columns:
    """What the columns of a matrix do.

    Attributes:
        causes: the columns that stand out.
        explained: [n, n], what columns that stand out in one node only do to its rows.
    """

    causes: list[Cause]
    explained: FloatArray


def find_causes(wait: FloatArray, nodes: IntArray, operations: int | None) -> list[Cause]:
    """Whoever stands out, in no particular order.

    Args:
        wait: [n, n] numbers >= 0, rows wait; NaN where unknown, and on the diagonal.
        nodes: [n], numbered in order of rank.
        operations: how many the sums cover; `None` if unknown.
    """
    if wait.shape[0] < 2:
        return []
    if wait.shape[0] == 2:
        return _of_two(wait, operations)
    # Of two views of what is usual between nodes, the one that needs fewer causes. A middle level
    # is wrong when most ranks of a node are late, a low one when a rank of a small node is hardly
    # waited for. With one node, or many, the two agree.
    num_nodes = int(nodes.max()) + 1
    shares = (MIDDLE, LOW) if 1 < num_nodes <= _FEW_NODES else (LOW,)
    return min((_of_many(wait, nodes, share) for share in shares), key=len)


def _of_two(wait: FloatArray, operations: int | None) -> list[Cause]:
    """Two ranks can only be compared with each other: the one that is waited for far longer."""
    waited_for = np.array([wait[1, 0], wait[0, 1]])
    if not np.isfinite(waited_for).all():
        return []
    late = int(waited_for[1] > waited_for[0])
    more, less = float(waited_for[late]), float(waited_for[1 - late])
    few = operations is not None and operations < PAIR_OPERATIONS
    if few or not more > PAIR_RATIO * less:
        return []
    unknown = float("nan")
    return [Cause(SENDER_SIDE, -1, late, more - less, unknown, less, unknown, cells=1)]


def _of_many(wait: FloatArray, nodes: IntArray, level_share: float) -> list[Cause]:
    kinds = kinds_of_link(nodes)
    late = np.zeros(nodes.size, bool)
    for _ in range(_MAX_ROUNDS):
        seen = np.where(late[:, None], np.nan, wait)
        levels = _levels(seen, kinds, level_share)
        sources = _columns(seen, levels, nodes, late, SENDER_SIDE)
        before = late.copy()
        late[[c.source for c in sources.causes if c.only_node < 0]] = True
        if (before == late).all():
            break
    nobody = np.zeros(nodes.size, bool)
    receivers = _columns(seen.T, levels.T, nodes, nobody, RECEIVER_SIDE)
    explained = sources.explained + receivers.explained.T
    paths = _paths(wait - explained, levels, kinds, late, wait)
    return sources.causes + receivers.causes + _merge_node_pairs(paths, nodes)


def _levels(wait: FloatArray, kinds: IntArray, share: float) -> FloatArray:
    """`[n, n]`: what is usual for this kind of link."""
    levels = np.zeros(wait.shape)
    for kind in range(int(kinds.max()) + 1):
        cells = kinds == kind
        levels[cells] = np.nan_to_num(quantile_of(wait[cells], share))
    return levels


def _threshold(by_chance: Any, level: Any, largest: Any, spread: Any) -> FloatArray:
    """What an effect must exceed.

    Args:
        by_chance: how large it gets in a healthy window.
        level: what is healthy there.
        largest: the largest waiting beside it.
        spread: standard deviation between healthy members.
    """
    limits = (by_chance, _OF_LEVEL * level, _OF_LARGEST * largest, _SPREADS * spread)
    return np.asarray(reduce(np.maximum, limits))


# ---- columns


def _columns(
    wait: FloatArray, levels: FloatArray, nodes: IntArray, late: BoolArray, side: str
) -> _Columns:
    """Columns that stand out of a matrix.

    Args:
        wait: [n, n], NaN where unknown or not to be looked at.
        levels: what is usual for each cell.
        nodes: [n].
        late: columns that are known to stand out and stay in the list.
        side: SENDER_SIDE, or RECEIVER_SIDE when everything is transposed.
    """
    above = wait - levels
    above = above - quantile(above, LOW, 1)[:, None]
    column = quantile(above, MIDDLE, 0)
    known = np.isfinite(above)
    count = known.sum(axis=0)
    tail, spread = noise(above - column)
    error = MEDIAN_COST * spread / np.sqrt(np.maximum(count, 1))
    reference, between = healthy(column)
    effect = column - reference
    level = np.where(known, levels, 0.0).sum(axis=0) / np.maximum(count, 1)
    threshold = _threshold(
        tail * tail_of_median(count, _BY_CHANCE / nodes.size),
        level,
        _largest(wait, late, side),
        between,
    )
    stands_out = late | (effect > threshold)
    # Scale-free, but rounding is no effect.
    stands_out &= effect > 1e-9 * np.nanmax(wait, initial=0.0)
    chance = nodes.size * chance_of_median(effect, tail, count)
    whole = [
        Cause(
            side,
            *_ends(side, j),
            effect=float(effect[j]),
            error=float(error[j]),
            healthy=float(level[j] + reference),
            chance=float(chance[j]),
            cells=int(count[j]),
        )
        for j in np.flatnonzero(stands_out)
    ]
    parts = _columns_within_nodes(above, levels, wait, nodes, stands_out, side)
    return _Columns(whole + parts.causes, parts.explained)


def _ends(side: str, column: Any) -> tuple[int, int]:
    """(receiver, source) of a column."""
    return (-1, int(column)) if side == SENDER_SIDE else (int(column), -1)


def _largest(wait: FloatArray, late: BoolArray, side: str) -> Any:
    """The largest waiting with which an effect of each column competes.

    For a source that is the largest of a usual receiver, beside late ranks; for a receiver (all is
    transposed then) its own.
    """
    if side == RECEIVER_SIDE:
        return np.nanmax(wait, axis=0, initial=0.0)
    return np.nan_to_num(median_of(_largest_of_rows(np.where(late, np.nan, wait))))


def _largest_of_rows(wait: FloatArray) -> FloatArray:
    return np.asarray(np.fmax.reduce(wait, axis=1, initial=np.nan))


def _columns_within_nodes(
    above: FloatArray,
    levels: FloatArray,
    wait: FloatArray,
    nodes: IntArray,
    named: BoolArray,
    side: str,
) -> _Columns:
    """Columns that stand out in the rows of one node only, such as all NVLink paths of a rank.

    Args:
        above: [n, n], waiting above the levels, rows made comparable.
        levels, wait, nodes, side: see `_columns`.
        named: [n], columns that stand out in all rows.
    """
    explained = np.zeros(wait.shape)
    sizes = np.bincount(nodes)
    if sizes.size < 2 or sizes.min() < MIN_PER_NODE:
        return _Columns([], explained)
    effect = quantile_by_node(above, nodes, MIDDLE)
    count = sum_by_node(np.isfinite(above).astype(np.float64), nodes)
    # [row node, column node, place]: each column among its peers.
    peers = members(nodes)
    among = np.where(peers >= 0, effect[:, peers], np.nan)
    reference = quantile(among, MIDDLE, 2)
    spread = MAD_TO_SIGMA * quantile(np.abs(among - reference[:, :, None]), MIDDLE, 2)
    tail = _noise_by_node(above - effect[nodes], nodes)[:, nodes]
    effect = effect - reference[:, nodes]
    usual = sum_by_node(levels, nodes) / sizes[:, None]
    threshold = _threshold(
        tail * tail_of_median(count, _BY_CHANCE / effect.size),
        usual,
        _largest_by_node(wait, nodes, side),
        spread[:, nodes],
    )
    chance = effect.size * chance_of_median(effect, tail, count)
    causes: dict[int, Cause] = {}
    for node, j in np.argwhere((effect > threshold) & ~named):
        explained[nodes == node, j] = effect[node, j]
        found = Cause(
            side,
            *_ends(side, j),
            effect=float(effect[node, j]),
            error=float("nan"),
            healthy=float(usual[node, j]),
            chance=float(chance[node, j]),
            cells=int(count[node, j]),
            only_node=int(node),
        )
        if j in causes:
            found = replace(max(causes[j], found, key=lambda c: c.effect), only_node=-1)
        causes[j] = found
    return _Columns(list(causes.values()), explained)


def _largest_by_node(wait: FloatArray, nodes: IntArray, side: str) -> FloatArray:
    """`_largest` for the rows of each node: broadcasts to `[num_nodes, n]`."""
    if side == RECEIVER_SIDE:
        return np.asarray(np.nanmax(wait, axis=0, initial=0.0))
    return np.nan_to_num(quantile_by_node(_largest_of_rows(wait)[:, None], nodes, MIDDLE))


def _noise_by_node(residual: FloatArray, nodes: IntArray) -> FloatArray:
    """`[num_nodes, num_nodes]`: the tail within nodes and between them."""
    same = nodes[:, None] == nodes[None, :]
    within, _ = noise(np.where(same, residual, np.nan))
    between, _ = noise(np.where(same, np.nan, residual))
    return np.where(np.eye(int(nodes.max()) + 1, dtype=bool), within, between)


# ---- paths


def _paths(
    wait: FloatArray, levels: FloatArray, kinds: IntArray, late: BoolArray, raw: FloatArray
) -> list[Cause]:
    """Single cells that stand out of what rows, columns and the kind of link leave over.

    Args:
        wait: [n, n], without what causes within nodes explain.
        levels, kinds: [n, n], what is usual for each cell, and its kind of link.
        late: [n], sources whose rows say nothing.
        raw: [n, n], all waiting.
    """
    above = wait - levels
    row, column = np.zeros(late.size), np.zeros(late.size)
    for _ in range(2):
        row = row + quantile(above - row[:, None] - column, MIDDLE, 1)
        rest = np.where(late[:, None], np.nan, above - row[:, None])
        column = np.nan_to_num(quantile(rest, MIDDLE, 0))
    # Waiting ends at zero: a rank that is late, or comes early, shows less of it in some cells than
    # the others would have. That makes no other cell slow.
    usual = median_of(row[~late]) + median_of(column[~late])
    row, column = row - median_of(row[~late]), column - median_of(column[~late])
    excess = above - usual - np.maximum(row, 0.0)[:, None] - np.maximum(column, 0.0)
    residual = above - usual - row[:, None] - column
    excess = np.minimum(excess, residual)
    tail, error = np.zeros(wait.shape), np.zeros(wait.shape)
    for kind in range(int(kinds.max()) + 1):
        cells = kinds == kind
        tail[cells], error[cells] = noise(np.where(cells & ~late[:, None], residual, np.nan))
    threshold = _threshold(
        tail * math.log(excess.size / _BY_CHANCE),
        levels,
        np.nanmax(raw, axis=1, initial=0.0)[:, None],
        error,
    )
    return [
        Cause(
            PAIR,
            receiver=int(i),
            source=int(j),
            effect=float(excess[i, j]),
            error=float(error[i, j]),
            healthy=float(raw[i, j] - excess[i, j]),
            chance=chance_of_one(float(excess[i, j]), float(tail[i, j])) * excess.size,
            cells=1,
        )
        for i, j in np.argwhere(excess > threshold)
    ]


def _merge_node_pairs(paths: list[Cause], nodes: IntArray) -> list[Cause]:
    """Most paths from one node to another are one cause."""
    sizes = np.bincount(nodes)
    by_pair: dict[tuple[int, int], list[Cause]] = {}
    for path in paths:
        by_pair.setdefault((int(nodes[path.receiver]), int(nodes[path.source])), []).append(path)
    merged = []
    for (a, b), found in by_pair.items():
        if a == b or len(found) <= max(1, sizes[a] * sizes[b] // 2):
            merged += found
            continue
        typical = sorted(found, key=lambda path: path.effect)[len(found) // 2]
        merged.append(replace(typical, receiver=a, source=b, cells=len(found), node_pair=True))
    return merged
