"""Path times taken apart: tokens, kind of link, clocks, receivers, sources, groups, single paths.

In this order, so that each explanation takes away what it explains before the next is tried:

    time = class + tokens * cost + clock[receiver] - clock[source]
         + ingress[receiver] + egress[source] + excess[receiver, source]

A clock that is wrong by c makes the paths into its rank c slower and those out of it c faster. A
path cannot be faster than a healthy one, so what looks faster is the clock, and only the rest is
a slow side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deep_ep.diagnose.findings import BoolArray, FloatArray, IntArray
from deep_ep.diagnose.gather import Matrices, Place
from deep_ep.diagnose.stats import (
    MAD_TO_SIGMA,
    healthy,
    lower_median,
    median,
    median_of,
    quantile,
)
from deep_ep.diagnose.summary import RESOLUTION_NS

# Below four ranks a row of the path matrix has too few cells to tell path from row and column.
MIN_RANKS_TO_SPLIT_PATHS = 4
# With two nodes the cells between them are all there is to compare them with.
_MIN_NODES_TO_COMPARE = 3
# Up to so many ranks medians alone may not find what is additive.
_FEW_RANKS = 8
# Median polish settles within a few sweeps; it stops when nothing moves by more than this, ns.
_MAX_SWEEPS = 10
_SETTLED_NS = 10.0
# The cost of a token is taken from the operations of each path when it is known this well, ns.
_COST_KNOWN_NS = 1_000.0
# Pairs of cells looked at for the cost of a token; enough for a stable median at any group size.
_SLOPE_PAIRS = 20_000
# Token counts closer together than this share of the median say nothing about the cost of one.
_SLOPE_MIN_SPREAD = 0.2
# A clock is corrected when it is off by so many spreads between healthy ranks.
_CLOCK_SPREADS = 2.0


@dataclass(frozen=True)
class Paths:
    """The path matrix `[receiver, source]`, taken apart; ns.

    Attributes:
        time: median of arrival minus issue, NaN where unseen, and on the diagonal.
        usual: what a healthy path of this class and these tokens takes.
        ingress, egress: [num_ranks], per receiver, per source, above the healthy ones.
        inbound: [num_ranks], like `ingress`, tokens not taken out.
        excess: above all other explanations.
        spread: standard deviation of `excess` between healthy paths.
        node_pairs: [num_nodes, num_nodes], median excess between nodes; NaN where not comparable.
        rails: [num_rails], median excess of the paths between nodes on one rail; likewise.
        clock: [num_ranks], how far the clock of each rank seems ahead of what was measured.
        token_cost: nanoseconds per token.
        level: median of the healthy paths within a node, and between nodes; NaN where there is none.
    """

    time: FloatArray
    usual: FloatArray
    ingress: FloatArray
    egress: FloatArray
    inbound: FloatArray
    excess: FloatArray
    spread: float
    node_pairs: FloatArray
    rails: FloatArray
    clock: FloatArray
    token_cost: float
    level: tuple[float, float]


def split_paths(m: Matrices) -> Paths:
    """Takes the path matrix of one operation kind apart."""
    classes = _classes(m.place)
    cost = _token_cost_within_paths(m)
    if cost is None:
        cost = _token_cost_between_paths(m.path, m.tokens, classes)
    typical = median_of(m.tokens)
    usual = cost * np.nan_to_num(m.tokens - typical)
    # With two or three ranks most paths may be slow; the fastest is the healthy one then.
    location = lower_median if m.num_ranks < MIN_RANKS_TO_SPLIT_PATHS else median_of
    levels = [
        _level((m.path - usual)[classes == c], m.path_hidden[classes == c], location)
        for c in range(3)
    ]
    for c, level in enumerate(levels):
        usual = usual + np.where(classes == c, np.nan_to_num(level), 0.0)
    # What hid is not slow; that is all that is known of it.
    excess = np.where(m.path_hidden, 0.0, m.path - usual)
    between = np.array(levels[1:])
    overall = (levels[0], float(np.nanmin(between)) if np.isfinite(between).any() else float("nan"))

    num_ranks = m.num_ranks
    zeros = np.zeros(num_ranks)
    if num_ranks < MIN_RANKS_TO_SPLIT_PATHS:
        no_pairs, no_rails = np.full((0, 0), np.nan), np.zeros(0)
        return Paths(
            *(m.path, usual, zeros, zeros, zeros, excess, 0.0, no_pairs, no_rails, zeros, cost),
            level=overall,
        )
    clock = _node_clocks(excess, m.place)
    excess = excess - clock[:, None] + clock[None, :]
    rows, columns, residual = _rows_and_columns(excess)
    rank_clock = _rank_clocks(rows, columns)
    ingress, egress = rows - rank_clock, columns + rank_clock
    inbound = ingress
    if cost > 0:
        time = m.path - clock[:, None] + clock[None, :]
        inbound = _rows_and_columns(time - usual + cost * np.nan_to_num(m.tokens - typical))[0]
        inbound = inbound - rank_clock
    node_pairs = _node_pairs(residual, m.place)
    residual = residual - _spread_out(node_pairs, m.place)
    rails = _rails(residual, m.place)
    return Paths(
        time=m.path,
        usual=usual,
        ingress=ingress - healthy(ingress)[0],
        egress=egress - healthy(egress)[0],
        inbound=inbound - healthy(inbound)[0],
        excess=residual,
        spread=MAD_TO_SIGMA * median_of(np.abs(residual)),
        node_pairs=node_pairs,
        rails=rails,
        clock=clock + rank_clock,
        token_cost=cost,
        level=overall,
    )


def _level(times: FloatArray, hidden: BoolArray, location: Callable[[FloatArray], float]) -> float:
    """What healthy paths take; those that hid are faster than any that was seen."""
    known = times[np.isfinite(times)]
    fastest = min(known.min(initial=0.0), 0.0) - 1.0
    level = location(np.concatenate([known, np.full(int(hidden.sum()), fastest)]))
    return RESOLUTION_NS if level <= fastest else level


def _classes(place: Place) -> IntArray:
    """0 within a node, 1 between nodes on one rail, 2 across rails, -1 on the diagonal."""
    nodes, devices = place.nodes, np.array(place.devices)
    same_node = nodes[:, None] == nodes[None, :]
    same_rail = devices[:, None] == devices[None, :]
    classes = np.where(same_node, 0, np.where(same_rail, 1, 2))
    np.fill_diagonal(classes, -1)
    return classes


def _token_cost_within_paths(m: Matrices) -> float | None:
    """Nanoseconds per token, from how each path's time follows its own tokens; None if unclear.

    Differences between paths, slow ones included, do not enter here.
    """
    tokens, both, time = np.nansum(m.path_moments, axis=(1, 2))
    if not tokens > 0:
        return None
    cost = both / tokens
    error = np.sqrt(max(time - cost * both, 0.0) / tokens / max(np.sum(m.path_count), 1.0))
    surplus = np.abs(m.tokens - median_of(m.tokens))
    if not error * quantile(surplus.reshape(-1), 0.9, 0) <= _COST_KNOWN_NS:
        return None
    return max(float(cost), 0.0)


def _token_cost_between_paths(time: FloatArray, tokens: FloatArray, classes: IntArray) -> float:
    """Theil-Sen slope of path time over tokens; 0 when tokens are even or cost nothing."""
    if time.shape[0] < MIN_RANKS_TO_SPLIT_PATHS:
        return 0.0
    usable = np.flatnonzero(np.isfinite(time) & np.isfinite(tokens))
    if usable.size < 2:
        return 0.0
    times, counts, of = (a.reshape(-1)[usable] for a in (time, tokens, classes))
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, usable.size, (2, _SLOPE_PAIRS))
    step = counts[a] - counts[b]
    telling = np.abs(step) > _SLOPE_MIN_SPREAD * max(float(np.median(counts)), 1.0)
    telling &= of[a] == of[b]
    if not telling.any():
        return 0.0
    return max(float(np.median((times[a] - times[b])[telling] / step[telling])), 0.0)


def _node_clocks(excess: FloatArray, place: Place) -> FloatArray:
    """Half of what the two directions between nodes differ by, as a clock per rank.

    A clock that drifted since it was measured does this to all pairs of a host. With two nodes a
    link that is slow in one direction does the same and cannot be told apart.
    """
    if place.num_nodes < 2:
        return np.zeros(place.num_ranks)
    blocks = _block_medians(excess, place)
    odd = np.nan_to_num((blocks - blocks.T) / 2)
    per_node = odd[:, 0] - odd[0, 0] if place.num_nodes == 2 else np.median(odd, axis=1)
    return np.where(place.nodes >= 0, per_node[place.nodes], 0.0)


def _rank_clocks(rows: FloatArray, columns: FloatArray) -> FloatArray:
    """What makes the paths of a rank look faster than healthy ones in one of the directions."""
    rows, columns = rows - np.median(rows), columns - np.median(columns)
    opposite = np.sign(rows) != np.sign(columns)
    clock = np.sign(rows) * np.minimum(np.abs(rows), np.abs(columns))
    # Clocks cancel in the sum, so it tells the noise.
    noise = _CLOCK_SPREADS * MAD_TO_SIGMA * median_of(np.abs(rows + columns))
    return np.where(opposite & (np.abs(clock) > noise), clock, 0.0)


def _rows_and_columns(cells: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Row effects, column effects and what they leave over."""
    plain = _median_polish(cells)
    complete = np.isnan(cells).sum() <= cells.shape[0]
    if cells.shape[0] > _FEW_RANKS or not complete:
        return plain
    # Few cells with wrong clocks in all of them do not settle by medians alone. Then it helps to
    # take out what the two directions of every pair differ by, and to give it back afterwards.
    odd = np.where(np.isfinite(cells - cells.T), (cells - cells.T) / 2, 0.0)
    clock = odd.mean(axis=1)
    rows, columns, residual = _median_polish(cells - clock[:, None] + clock[None, :])
    if np.nansum(np.abs(residual)) < 0.9 * np.nansum(np.abs(plain[2])):
        return rows + clock, columns - clock, residual
    return plain


def _median_polish(cells: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Row effects, column effects and what they leave over, by medians."""
    residual = cells
    rows, columns = np.zeros(cells.shape[0]), np.zeros(cells.shape[1])
    for _ in range(_MAX_SWEEPS):
        row_step = _typical(residual, 1)
        rows, residual = rows + row_step, residual - row_step[:, None]
        column_step = _typical(residual, 0)
        columns, residual = columns + column_step, residual - column_step[None, :]
        moved = max(np.abs(row_step).max(initial=0.0), np.abs(column_step).max(initial=0.0))
        if moved < _SETTLED_NS:
            break
    return rows, columns, residual


def _typical(cells: FloatArray, axis: int) -> FloatArray:
    """Median per row or column; of those of which little is known the lower one, of one cell none.

    So one slow path among two known ones stays a slow path.
    """
    known = np.isfinite(cells).sum(axis=axis)
    enough = max(MIN_RANKS_TO_SPLIT_PATHS - 1, int(known.max(initial=0)) // 2)
    return np.where(known > 1, median(cells, axis, few=enough), 0.0)


def _block_medians(cells: FloatArray, place: Place) -> FloatArray:
    """[num_nodes, num_nodes]: lower median per receiving and sending node; NaN where unknown."""
    size = int(np.bincount(place.nodes[place.nodes >= 0]).max(initial=0))
    # Every node gets as many places as the largest has; those without a rank are unknown.
    places = np.full((place.num_nodes, size), place.num_ranks)
    for node in range(place.num_nodes):
        ranks = np.flatnonzero(place.nodes == node)
        places[node, : ranks.size] = ranks
    padded = np.pad(cells, (0, 1), constant_values=np.nan)
    blocks = padded[places[:, None, :, None], places[None, :, None, :]]
    return quantile(blocks.reshape(*blocks.shape[:2], -1), 0.5, axis=2)


def _node_pairs(residual: FloatArray, place: Place) -> FloatArray:
    blocks = np.full((place.num_nodes, place.num_nodes), np.nan)
    # A node of one rank has no pairs of nodes apart from pairs of ranks.
    if _MIN_NODES_TO_COMPARE <= place.num_nodes < place.num_ranks:
        blocks = _block_medians(residual, place)
        np.fill_diagonal(blocks, np.nan)
    return blocks


def _spread_out(node_pairs: FloatArray, place: Place) -> FloatArray:
    """[num_ranks, num_ranks]: the positive part of each pair of nodes, for each pair of its ranks."""
    if not np.isfinite(node_pairs).any():
        return np.zeros((place.num_ranks, place.num_ranks))
    # Small medians are noise of which nothing is to be taken away.
    spread = MAD_TO_SIGMA * median_of(np.abs(node_pairs))
    taken = np.where(node_pairs > 3 * spread, node_pairs, 0.0)
    return np.asarray(taken[place.nodes[:, None], place.nodes[None, :]])


def _rails(residual: FloatArray, place: Place) -> FloatArray:
    devices = np.array(place.devices)
    rails = np.full(int(devices.max(initial=-1)) + 1, np.nan)
    if place.num_nodes < 2 or place.num_nodes == place.num_ranks:
        return rails
    for rail in range(rails.size):
        ranks = np.flatnonzero(devices == rail)
        if ranks.size > 1:
            # The lower of two cells: one slow path is no slow rail.
            rails[rail] = lower_median(residual[np.ix_(ranks, ranks)])
    return rails
