"""Path times against what healthy paths take: tokens, kind of link, order of sending.

In this order, so that each explanation takes away what it explains before the next is tried:

    time = class + tokens * cost + order + excess[receiver, source]

A source that hands over rows faster than its port takes them in makes those wait that it hands over
last: order is how much, by when a source had handed over all for a receiver.

What rails, nodes, sides of ranks and single paths have of the excess, path_causes tells. A clock
that is wrong by c makes the paths into its rank c slower and those out of it c faster; up to a few us
that is left in, and verdicts allow for it. Clocks that make data arrive before it was sent are set before
all else, or they would drown it (drifted_clocks). Where all paths of a rank are slow one way, nobody knows
then which way it was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..collect.group_matrices import Matrices, Place
from ..collect.rank_summary import RESOLUTION_NS
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import (
    healthy,
    lower_median,
    median,
    median_of,
    or_zero,
    quantile_of,
)
from .drifted_clocks import joint_clocks
from .sender_stalls import stalls

# Below four ranks a row of the path matrix has too few cells to tell path from row and column.
MIN_RANKS_TO_SPLIT_PATHS = 4
# Paths that were never seen rest on clocks that agree to this, ns.
_CLOCKS_AGREE_NS = 5_000.0
# The cost of a token is taken from the operations of each path when it is known this well, ns.
_COST_KNOWN_NS = 1_000.0
# Pairs of cells looked at for the cost of a token; enough for a stable median at any group size.
_SLOPE_PAIRS = 20_000
# Token counts this close to each other are even.
_EVEN_TOKENS = 0.05
# Token counts closer together than this share of the median say nothing about the cost of one.
_SLOPE_MIN_SPREAD = 0.2
# So many receivers there are at least where the order of sending is looked at; fewer say as much of
# what is slow. It explains something if it leaves less than this share.
_MIN_TO_ORDER = 7
_ORDER_EXPLAINS = 0.8
# Of places in the order that differ by less, ns, nothing is learnt.
_STEP_NS = 30.0
# Pairs of cells, and sources, that its cost is taken from.
_ORDER_PAIRS = 4_000
_SOURCES_LOOKED_AT = 32


@dataclass(frozen=True)
class Paths:
    """The path matrix `[receiver, source]`, compared with healthy paths; ns.

    Attributes:
        time: median of arrival minus issue, NaN where not known, and on the diagonal; with `stalled`.
        stalled: by how much a link within a node held up its sender, which then issued late.
        usual: what a healthy path of this class, these tokens and this place in the order takes.
        excess: time over usual; 0 where data was there so soon that more is not known.
        classes: int, 0 within a node (an NVLink domain), 1 between nodes on one rail, 2 across rails,
            -1 on the diagonal.
        both_sides: [num_ranks], whether enough is known of what comes in and of what goes out; else a
            wrong clock cannot be told from a slow side.
        inbound: [num_ranks], how much slower paths into a rank are than others, tokens not taken out.
        clock: [num_ranks], how far the clock of each rank has drifted since it was measured, where that
            is far; already taken out of `time`.
        clock_error: how far the measured difference of two clocks may be wrong; NaN where nobody knows
            or it is too far to rest anything on it.
        level: median of the healthy paths within a node, and between nodes; NaN where there is none.
    """

    time: FloatArray
    stalled: FloatArray
    usual: FloatArray
    excess: FloatArray
    classes: IntArray
    both_sides: BoolArray
    inbound: FloatArray
    clock: FloatArray
    clock_error: FloatArray
    level: tuple[float, float]

    @functools.cached_property
    def between(self) -> BoolArray:
        """[receiver, source]: whether a path joins two nodes."""
        return np.asarray(self.classes > 0)

    @property
    def drifted(self) -> bool:
        """Whether clocks have drifted so far that nobody knows which side of a rank is slow."""
        return bool(self.clock.any())


def split_paths(m: Matrices, clock: FloatArray) -> Paths:
    """Takes the path matrix of one operation kind apart.

    Args:
        m: the kind.
        clock: as `drifted_clocks` has it.
    """
    few = m.num_ranks < MIN_RANKS_TO_SPLIT_PATHS
    known = _known_clocks(m)
    if clock.any() or (few and _too_early(m, known)):
        known = np.full(known.shape, np.nan)
    classes = _classes(m.place)
    stalled = stalls(m, classes)
    time = _set_clocks(m, clock) + stalled
    usual, by_tokens, level = _usual(m, time, classes)
    usual = usual + _by_order(m, _excess(m, time, usual), classes)
    excess = _excess(m, time, usual)
    both = _known_well(excess, 1) & _known_well(excess, 0)
    inbound = np.zeros(m.num_ranks)
    if not few:
        inbound = np.nan_to_num(median(excess, 1)) + median(by_tokens, 1)
        inbound = inbound - healthy(inbound)[0]
        excess = excess - _level_of_two_nodes(excess, m.place)
    return Paths(
        time=time,
        stalled=stalled,
        usual=usual,
        excess=excess,
        classes=classes,
        both_sides=both,
        inbound=inbound,
        clock=clock,
        clock_error=known,
        level=level,
    )


def drifted_clocks(kinds: Sequence[Matrices]) -> FloatArray:
    """[num_ranks]: by how many ns clocks have drifted, where that is far; else all 0.

    Args:
        kinds: all kinds of operation of one group; clocks are the same in all.
    """
    num_ranks = kinds[0].num_ranks
    unset = np.zeros(num_ranks)
    if num_ranks < MIN_RANKS_TO_SPLIT_PATHS or not any(map(_may_have_drifted, kinds)):
        return unset
    classes = [_classes(m.place) for m in kinds]
    seen = [np.where(m.path_seen, m.path, np.nan) for m in kinds]
    clock = joint_clocks(seen, classes, kinds[0].place)
    # With clocks set, it is known what tokens cost, which some ranks have more of.
    for m, time, of_link in zip(kinds, seen, classes):
        time -= _usual(m, _set_clocks(m, clock), of_link)[0]
    clock = joint_clocks(seen, classes, kinds[0].place)
    return clock if (np.abs(clock) > _CLOCKS_AGREE_NS).any() else unset


def _may_have_drifted(m: Matrices) -> bool:
    """Whether data arrives before it was sent, or nobody knows how far clocks are off; ranks on CPUs share one."""
    known = _known_clocks(m)
    unknown = m.place.device == "cuda" and not np.isfinite(known[m.expected]).any()
    return unknown or _too_early(m, known)


def _known_clocks(m: Matrices) -> FloatArray:
    """How far clocks may be off; NaN where by more than paths take, as they tell more themselves."""
    return np.where(m.path_clock <= _CLOCKS_AGREE_NS, m.path_clock, np.nan)


def _too_early(m: Matrices, known: FloatArray) -> bool:
    """Whether data seems to arrive before it was sent, by more than clocks are known to be off."""
    return bool((np.where(m.path_seen, m.path, np.nan) < -np.nan_to_num(known)).any())


def _set_clocks(m: Matrices, clock: FloatArray) -> FloatArray:
    """[num_ranks, num_ranks] path times with clocks set; those that rested on wrong ones unknown."""
    apart = clock[:, None] - clock[None, :]
    return np.where(m.path_seen | (np.abs(apart) <= _CLOCKS_AGREE_NS), m.path - apart, np.nan)


def _excess(m: Matrices, time: FloatArray, usual: FloatArray) -> FloatArray:
    """What hid is not slow; that is all that is known of it."""
    return np.where(m.path_hidden, 0.0, time - usual)


def _usual(
    m: Matrices, time: FloatArray, classes: IntArray
) -> tuple[FloatArray, FloatArray, tuple[float, float]]:
    """What healthy paths take, what of that tokens explain (NaN where unknown), and `Paths.level`."""
    # Links within a node and between nodes differ in what a token costs.
    links = (classes == 0, classes > 0)
    surplus = m.path_tokens - median_of(median(m.path_tokens, 1))
    costs = [_token_cost(m, time, link, surplus) for link in links]
    by_tokens = np.where(links[1], costs[1], costs[0]) * surplus
    usual = np.where(np.isfinite(surplus), by_tokens, 0.0)
    # With two or three ranks most paths may be slow; the fastest is the healthy one then.
    location = lower_median if m.num_ranks < MIN_RANKS_TO_SPLIT_PATHS else median_of
    levels = [
        _level((time - usual)[classes == c], m.path_hidden[classes == c], location)
        for c in range(3)
    ]
    for c, level in enumerate(levels):
        usual = usual + np.where(classes == c, or_zero(level), 0.0)
    between = np.array(levels[1:])
    overall = (levels[0], float(np.nanmin(between)) if np.isfinite(between).any() else float("nan"))
    return usual, by_tokens, overall


def _level(times: FloatArray, hidden: BoolArray, location: Callable[[FloatArray], float]) -> float:
    """What healthy paths take; those that hid are faster than any that was seen."""
    known = times[np.isfinite(times)]
    fastest = min(known.min(initial=0.0), 0.0) - 1.0
    level = location(np.concatenate([known, np.full(int(hidden.sum()), fastest)]))
    return RESOLUTION_NS if level <= fastest else level


def _by_order(m: Matrices, excess: FloatArray, classes: IntArray) -> FloatArray:
    """[receiver, source]: what comes from when a source hands over to each receiver, ns."""
    by_order = np.zeros(excess.shape)
    some = slice(None, None, max(1, m.num_ranks // _SOURCES_LOOKED_AT))
    over_usual = np.where(m.path_hidden[:, some], np.nan, excess[:, some])
    for link in (classes == 0, classes > 0):
        if not np.count_nonzero(link[:, 0]) >= _MIN_TO_ORDER:
            continue
        when, over = (
            np.where(link[:, some], values, np.nan) for values in (m.send[:, some], over_usual)
        )
        when, over = when - median(when, 0), over - median(over, 0)
        slope = _slope(when, over, m.place)
        left = over - slope * when
        if slope and median_of(np.abs(left)) < _ORDER_EXPLAINS * median_of(np.abs(over)):
            when = np.where(link, m.send, np.nan)
            by_order += slope * np.nan_to_num(when - median(when, 0))
    return by_order


def _slope(x: FloatArray, y: FloatArray, place: Place) -> float:
    """Median slope between random pairs of cells of the same column; 0 where x hardly differs.

    Both receivers are on one node where it has two, so that what slows a node does not count.
    """
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, x.shape[0], (2, _ORDER_PAIRS))
    if place.num_nodes < place.num_ranks:
        nodes = members(place.nodes)
        b = nodes[place.nodes[a], b % nodes.shape[1]]
        a, b = a[b < x.shape[0]], b[b < x.shape[0]]
    column = generator.integers(0, x.shape[1], a.size)
    step, rise = x[a, column] - x[b, column], y[a, column] - y[b, column]
    telling = (np.abs(step) > max(median_of(np.abs(x)) / 2, _STEP_NS)) & np.isfinite(rise)
    return max(or_zero(median_of(rise[telling] / step[telling])), 0.0)


def _classes(place: Place) -> IntArray:
    """0 within a node, 1 between nodes on one rail, 2 across rails, -1 on the diagonal."""
    nodes, devices = place.nodes, np.array(place.devices)
    same_node = nodes[:, None] == nodes[None, :]
    same_rail = devices[:, None] == devices[None, :]
    classes = np.where(same_node, 0, np.where(same_rail, 1, 2))
    np.fill_diagonal(classes, -1)
    return classes


def _token_cost(m: Matrices, time: FloatArray, link: BoolArray, surplus: FloatArray) -> float:
    """Nanoseconds per token on one kind of link, from within each path, or from between them.

    Args:
        m: the kind.
        time: [num_ranks, num_ranks], path times.
        link: [num_ranks, num_ranks], whose cost it is.
        surplus: [num_ranks, num_ranks], tokens above what is usual.
    """
    cost = _token_cost_within_paths(m, link, surplus)
    return _token_cost_between_paths(m, time, link) if cost is None else cost


def _token_cost_within_paths(m: Matrices, link: BoolArray, surplus: FloatArray) -> float | None:
    """From how each path's time follows its own tokens; None if unclear.

    Differences between paths, slow ones included, do not enter here.
    """
    tokens, both, time = (float(np.sum(moment, where=link)) for moment in m.path_moments)
    if not tokens > 0:
        return None
    cost = both / tokens
    count = max(float(np.sum(m.path_count, where=link)), 1.0)
    error = math.sqrt(max(time - cost * both, 0.0) / tokens / count)
    if not error * quantile_of(np.abs(surplus[link]), 0.9) <= _COST_KNOWN_NS:
        return None
    return max(cost, 0.0)


def _token_cost_between_paths(m: Matrices, time: FloatArray, link: BoolArray) -> float:
    """Theil-Sen slope of path time over tokens; 0 when tokens are even or cost nothing.

    NaN where too few paths are there to tell what tokens cost from what is slow.
    """
    of_link, tokens = time[link], m.path_tokens[link]
    if m.num_ranks < MIN_RANKS_TO_SPLIT_PATHS:
        known = tokens[np.isfinite(tokens)]
        even = known.size and known.max() <= (1 + _EVEN_TOKENS) * known.min()
        return 0.0 if even else float("nan")
    usable = np.flatnonzero(np.isfinite(of_link) & np.isfinite(tokens))
    if usable.size < 2:
        return 0.0
    times, counts = of_link[usable], tokens[usable]
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, usable.size, (2, _SLOPE_PAIRS))
    step = counts[a] - counts[b]
    telling = np.abs(step) > _SLOPE_MIN_SPREAD * max(float(np.median(counts)), 1.0)
    if not telling.any():
        return 0.0
    slope = float(np.median((times[a] - times[b])[telling] / step[telling]))
    # At most as if all of a usual path's time were spent on tokens: of a few paths the slow one may be
    # the one with more tokens.
    most = max(float(np.median(times)), 0.0) / max(float(np.median(counts)), 1.0)
    return min(max(slope, 0.0), most)


def _level_of_two_nodes(excess: FloatArray, place: Place) -> FloatArray:
    """[num_ranks, num_ranks]: between two nodes the faster direction is the healthy one."""
    if place.num_nodes != 2:
        return np.zeros(excess.shape)
    one, other = place.nodes == 0, place.nodes == 1
    there, back = (lower_median(excess[a][:, b]) for a, b in ((one, other), (other, one)))
    faster = or_zero(float(np.fmin(there, back)))
    return np.where(place.nodes[:, None] != place.nodes[None, :], faster, 0.0)


def _known_well(cells: FloatArray, axis: int) -> BoolArray:
    """Whether two thirds are known of what is known of the best known row or column.

    A rank that waits for one slow node sees that one and its own, which is half of four nodes' ranks.
    """
    known = np.isfinite(cells).sum(axis=axis)
    enough = max(MIN_RANKS_TO_SPLIT_PATHS - 1, 2 * int(known.max(initial=0)) // 3)
    return np.asarray(known >= enough)


def members(groups: IntArray) -> IntArray:
    """[num_groups, largest group]: the ranks of each; num_ranks, a rank too many, fills it up."""
    sizes = np.bincount(groups[groups >= 0])
    ranks = np.full((sizes.size, int(sizes.max(initial=0))), groups.size)
    for group, size in enumerate(sizes.tolist()):
        ranks[group, :size] = np.flatnonzero(groups == group)
    return ranks


def padded(cells: FloatArray) -> FloatArray:
    """With the paths of a rank too many, which are not known."""
    return np.pad(cells, (0, 1), constant_values=np.nan)
