"""What slow paths have in common: a rail, a node's uplink, a side of a rank, a pair of nodes; or nothing.

A common cause slows nearly all paths that it is on, so a group of paths is slow when three quarters
of those that are known are. Larger groups come before smaller ones, and what one explains the next
does not see. NVLink and NICs are looked at apart: a slow NIC slows the paths between nodes only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..collect.group_matrices import Matrices
from ..core.causes import Cause
from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import MAD_TO_SIGMA, MEDIAN_COST, healthy, median_of, or_zero, quantile
from .path_model import MIN_RANKS_TO_SPLIT_PATHS, Paths, members, padded

# Kinds of link: within a node, between nodes, or all of them.
NVLINK, NIC, ALL_LINKS = "nvlink", "nic", "all"

# A group is slow when all but this share of its paths are, and half of what is worth a verdict shows
# in all of those.
_SPARED = 0.25
# Of a group so many of the paths must be known.
_KNOWN = 2.0 / 3.0
# Paths of a group may differ by this share of their effect.
_UNEVEN = 0.5
# Of the deviation between the paths of a group so much is in all of them; and of what paths take this
# share is not known from one group to the next, as ports are busy in another way.
_COMMON = 0.5
_OF_USUAL = 0.03
# Groups that overlap are fitted to each other within a few sweeps.
_SWEEPS = 3
# Sides of this share of the ranks of a node are one link's doing, where there are so many nodes that
# it is not a pair's.
_MOST_OF_NODE = 0.6
_MIN_NODES = 3
# Effects that differ by less than this share are alike.
_ALIKE = 0.25
# Of so few groups a standard deviation says more than a median of deviations.
_FEW = 8
# The groups of the same subjects in the other direction.
_BACK = {
    Cause.INGRESS: Cause.EGRESS,
    Cause.EGRESS: Cause.INGRESS,
    Cause.UPLINK: Cause.DOWNLINK,
    Cause.DOWNLINK: Cause.UPLINK,
    Cause.NODE_PAIR: Cause.NODE_PAIR,
}
_EITHER = {
    Cause.INGRESS: Cause.INGRESS_OR_EGRESS,
    Cause.EGRESS: Cause.INGRESS_OR_EGRESS,
    Cause.UPLINK: Cause.UPLINK_OR_DOWNLINK,
    Cause.DOWNLINK: Cause.UPLINK_OR_DOWNLINK,
}
# Paths so many standard deviations slower than others say nothing of what is usual.
_FAR = 4.0
# Rounds of looking for groups among what the ones before have left.
_ROUNDS = 3


@dataclass(frozen=True)
class Group:
    """Paths that are slow together.

    Attributes:
        cause: what they have in common.
        number: the rail, the node or the rank; of a pair of nodes (source, destination).
        link: of which kind the paths are.
        paths: index into [receiver, source].
        effect: ns above what is usual.
        reading: likewise, as their receivers read it; that may be their clocks.
        error: standard error of that: of the medians of its paths, of what is usual.
        spread: standard deviation by which healthy groups of its kind differ.
        unknown: and by which its paths may differ for what else is on them.
        peers: from so many others that is known.
        count: groups among which it was found.
    """

    cause: Cause
    number: int | tuple[int, int]
    link: str
    paths: tuple[IntArray, IntArray]
    effect: float
    reading: float = 0.0
    error: float = float("nan")
    spread: float = 0.0
    unknown: float = 0.0
    peers: int = 0
    count: int = 1


@dataclass(frozen=True)
class Explained:
    """The excess of all paths, explained as far as it can be.

    Attributes:
        groups: what is slow together.
        residual: [receiver, source], what single paths have above all that.
        spread: likewise, standard deviation between healthy paths of the same kind of link.
        of_groups: likewise, what groups have of the excess.
    """

    groups: Sequence[Group]
    residual: FloatArray
    spread: FloatArray
    of_groups: FloatArray

    @property
    def uneven(self) -> FloatArray:
        """[receiver, source]: what is slow together is not slow by exactly the same."""
        return _UNEVEN * self.of_groups


@dataclass(frozen=True)
class _Candidates:
    """All groups of one kind.

    Attributes:
        cause, link: as in Group.
        numbers: of each group.
        low, middle: lower quantile and median of the paths of each, ns.
        both: their medians in both directions together, in which clocks cancel; or the same as `middle`.
        known: share of its paths that are known.
        paths: index of the paths of a group, by its number.
    """

    cause: Cause
    link: str
    numbers: Sequence[int | tuple[int, int]]
    low: FloatArray
    middle: FloatArray
    both: FloatArray
    known: FloatArray
    paths: Callable[[Any], tuple[IntArray, IntArray]]


def explain(m: Matrices, paths: Paths, floor: float, spreads: float) -> Explained:
    """Finds the groups of slow paths, and what is left over.

    Args:
        m: what the paths are from.
        paths: compared with healthy ones.
        floor: the smallest effect of interest, ns.
        spreads: in standard deviations between healthy groups, the same.
    """
    excess = paths.excess.copy()
    np.fill_diagonal(excess, np.nan)
    residual = excess
    groups: list[Group] = []
    few = m.num_ranks < MIN_RANKS_TO_SPLIT_PATHS
    looks = [] if few else _looks(m, paths)
    for _ in range(_ROUNDS):
        before = len(groups)
        for look in looks:
            beyond = residual
            if groups:
                beyond = residual - _UNEVEN * _of_groups(groups, residual)
            found = [g for candidates in look(beyond) for g in _slow(candidates, floor, spreads)]
            if found:
                groups, residual = _fit([*groups, *found], excess)
        if len(groups) == before:
            break
    joined = _joined(groups, m, floor)
    if groups or m.num_ranks <= _FEW:
        # Slow paths made what is usual look slower than it is.
        excess = excess - _level(paths, groups, np.where(m.path_hidden, np.nan, residual))
    groups, residual = _fit(joined, excess)
    if few:
        return Explained([], residual, np.zeros(residual.shape), np.zeros(residual.shape))
    # Of paths that hid it is not known how far they differ.
    seen = np.where(m.path_hidden, np.nan, residual)
    spread = _between_paths(paths, seen)
    if not groups:
        return Explained([], residual, spread, np.zeros(residual.shape))
    # As groups are judged: clocks cancel between the two directions.
    there_and_back = seen + seen.T
    spread_both = _between_paths(paths, there_and_back)
    readings = {(c.cause, c.link): c for look in looks for c in look(there_and_back)}
    measured = [
        _with_error(g, groups, m, paths, seen, spread, spread_both, readings) for g in groups
    ]
    return Explained(
        [_either_way(g, m) for g in measured] if paths.drifted else measured,
        residual,
        spread,
        _of_groups(groups, residual),
    )


def _slow(candidates: _Candidates, floor: float, spreads: float) -> list[Group]:
    both, middle = candidates.both, candidates.middle
    if candidates.cause in (Cause.INGRESS, Cause.EGRESS) or middle.size < 3:
        spread = healthy(both)[1]
    else:
        # Links, pairs and rails are few, and hardly half of them slow.
        spread = _deviation(both)
    if candidates.cause == Cause.NODE_PAIR and middle.size > 2:
        # Both directions of three nodes are three numbers.
        spread = max(spread, _deviation(middle))
    bar = max(floor, spreads * spread)
    slow = (both > bar) & (middle > max(floor, bar / 2)) & (candidates.low > middle / 2)
    slow &= candidates.known >= _KNOWN
    return [
        Group(
            candidates.cause,
            candidates.numbers[i],
            candidates.link,
            candidates.paths(candidates.numbers[i]),
            float(candidates.middle[i]),
            count=len(candidates.numbers),
        )
        for i in np.flatnonzero(slow).tolist()
    ]


def _deviation(values: FloatArray) -> float:
    return MAD_TO_SIGMA * or_zero(median_of(np.abs(values - median_of(values))))


def _fit(groups: Sequence[Group], excess: FloatArray) -> tuple[list[Group], FloatArray]:
    """The groups with effects that fit together, and what they leave over."""
    if not groups:
        return [], excess
    effects = [0.0] * len(groups)
    residual = excess.copy()
    for _ in range(_SWEEPS if len(groups) > 1 else 1):
        for i, group in enumerate(groups):
            step = or_zero(median_of(residual[group.paths]))
            effects[i] += step
            residual[group.paths] -= step
    return [replace(g, effect=effect) for g, effect in zip(groups, effects)], residual


def _of_groups(groups: Sequence[Group], residual: FloatArray) -> FloatArray:
    """[receiver, source]: the sum of the effects of the groups that each path is in."""
    total = np.zeros(residual.shape)
    for group in groups:
        total[group.paths] += group.effect
    return total


def _level(paths: Paths, groups: Sequence[Group], residual: FloatArray) -> FloatArray:
    """[receiver, source]: what paths of each class have that are in no group and not slow alone."""
    alone = residual.copy()
    for group in groups:
        alone[group.paths] = np.nan
    alone[residual > _FAR * _between_paths(paths, residual)] = np.nan
    # Clocks cancel between the two directions.
    both = (alone + alone.T) / 2
    level = np.zeros(residual.shape)
    for link in range(3):
        of_class = paths.classes == link
        level[of_class] = or_zero(median_of(both[of_class]))
    return level


def _joined(groups: Sequence[Group], m: Matrices, floor: float) -> list[Group]:
    """Sides that are slow alike on both kinds of link are slow, whatever the link; those of most ranks
    of a node between nodes are the node's."""
    by_subject: dict[Any, list[Group]] = {}
    for group in _of_whole_nodes(groups, m):
        by_subject.setdefault((group.cause, group.number), []).append(group)
    joined = []
    for alike in by_subject.values():
        effects = [g.effect for g in alike]
        if len(alike) == 2 and max(effects) - min(effects) < max(floor, _ALIKE * max(effects)):
            rank = np.array([alike[0].number])
            everybody = np.flatnonzero(np.arange(m.num_ranks) != rank)
            paths = (rank, everybody) if alike[0].cause == Cause.INGRESS else (everybody, rank)
            joined.append(replace(alike[0], link=ALL_LINKS, paths=paths))
        else:
            joined += alike
    return joined


def _of_whole_nodes(groups: Sequence[Group], m: Matrices) -> list[Group]:
    nodes = m.place.nodes
    joined = list(groups)
    if not _MIN_NODES <= m.place.num_nodes < m.num_ranks:
        return joined
    for side, cause in ((Cause.EGRESS, Cause.UPLINK), (Cause.INGRESS, Cause.DOWNLINK)):
        sides = [g for g in groups if g.cause == side and g.link == NIC]
        of_node = np.array([nodes[g.number] for g in sides], dtype=np.int64)
        for node in np.unique(of_node).tolist():
            together = [g for g, at in zip(sides, of_node.tolist()) if at == node]
            ranks, others = np.flatnonzero(nodes == node), np.flatnonzero(nodes != node)
            if len(together) < max(_MOST_OF_NODE * ranks.size, 2):
                continue
            paths = _index(others, ranks) if cause == Cause.UPLINK else _index(ranks, others)
            effect = float(np.median([g.effect for g in together]))
            joined = [g for g in joined if all(g is not side for side in together)]
            joined.append(Group(cause, node, NIC, paths, effect, count=m.place.num_nodes))
    return joined


def _between_paths(paths: Paths, residual: FloatArray) -> FloatArray:
    """[receiver, source]: standard deviation between healthy paths of the same kind of link."""
    apart = np.abs(residual)
    within, between = (
        MAD_TO_SIGMA * or_zero(median_of(apart[kind])) for kind in (~paths.between, paths.between)
    )
    return np.asarray(np.where(paths.between, between, within))


def _with_error(
    group: Group,
    groups: Sequence[Group],
    m: Matrices,
    paths: Paths,
    residual: FloatArray,
    spread: FloatArray,
    spread_both: FloatArray,
    readings: Mapping[tuple[Cause, str], _Candidates],
) -> Group:
    """With how far it may be wrong. What a clock adds to paths it takes from those of the other
    direction, so both are added up.
    """
    back = (group.paths[1], group.paths[0])
    one_way = group.cause != Cause.RAIL
    slow_back = any(_same_paths(g.paths, back) for g in groups)
    known = np.isfinite(residual[group.paths])
    effect, size = group.effect, max(int(known.sum()), 1)
    errors = m.path_error[group.paths][known]
    # What disturbs one path of a group for a while disturbs the others.
    error = or_zero(median_of(errors))
    apart = spread
    if one_way and not slow_back:
        effect += or_zero(median_of(residual[back]))
        error *= math.sqrt(2.0)
        apart = spread_both
    unlike = MEDIAN_COST * float(np.mean(apart[group.paths])) / math.sqrt(size)
    like = _healthy_readings(group, groups, readings)
    within = _COMMON * MAD_TO_SIGMA * or_zero(median_of(np.abs(residual[group.paths])))
    busy = _OF_USUAL * or_zero(median_of(paths.usual[group.paths]))
    # What is usual is known from all paths, so that healthy groups are about zero.
    if 0 < like.size <= _FEW:
        of_groups = float(np.sqrt(np.mean(like**2)))
    else:
        of_groups = MAD_TO_SIGMA * or_zero(median_of(np.abs(like)))
    return replace(
        group,
        effect=effect,
        reading=group.effect,
        error=math.hypot(error, unlike),
        spread=of_groups,
        unknown=math.hypot(within, busy),
        peers=int(like.size) + 1,
    )


def _healthy_readings(
    group: Group, groups: Sequence[Group], readings: Mapping[tuple[Cause, str], _Candidates]
) -> FloatArray:
    """What the groups like this one read of which nothing is slow."""
    link = group.link if (group.cause, group.link) in readings else NIC
    here = readings.get((group.cause, link)) or readings[group.cause, NVLINK]
    slow = [g.number for g in groups if g.cause in (group.cause, _BACK.get(group.cause))]
    slow += [n[::-1] for n in slow if isinstance(n, tuple)]
    like = [v for n, v in zip(here.numbers, here.middle.tolist()) if n not in slow]
    known: FloatArray = np.array(like)
    return np.asarray(known[np.isfinite(known)])


def _either_way(group: Group, m: Matrices) -> Group:
    """What takes all paths of a rank or node one way, said of both: its clock may be what is off."""
    cause = _EITHER.get(group.cause)
    if cause is None:
        return group
    rank_or_node = m.place.nodes if cause == Cause.UPLINK_OR_DOWNLINK else np.arange(m.num_ranks)
    inside = rank_or_node == group.number
    paths = m.expected & ~(inside[:, None] & inside[None, :])
    paths &= inside[:, None] if group.cause in (Cause.INGRESS, Cause.DOWNLINK) else inside[None, :]
    covered = int(m.expected[group.paths].sum()) == int(paths.sum())
    return replace(group, cause=cause) if covered else group


def _same_paths(a: tuple[IntArray, IntArray], b: tuple[IntArray, IntArray]) -> bool:
    return all(x.size == y.size and (x.ravel() == y.ravel()).all() for x, y in zip(a, b))


# --- where to look --------------------------------------------------------------------------------

_Look = Callable[[FloatArray], "list[_Candidates]"]


def _looks(m: Matrices, paths: Paths) -> list[_Look]:
    """Kinds of groups that this group of ranks can have, in the order in which they explain."""
    place = m.place
    grouped = 1 < place.num_nodes < m.num_ranks
    if not grouped:
        looks: list[Any] = [_sides]
    elif place.num_nodes >= _MIN_NODES:
        looks = [_rails, _node_links, _sides, _node_pairs]
    else:
        # Between two nodes an uplink, a downlink and a pair of nodes are the same paths, and a rail is one
        # path and its way back, of more that a NIC has.
        looks = [_node_pairs, _sides]
        if (paths.classes[m.expected] > 1).any():  # on the hop of gateways every path is on a rail
            looks.append(_rails)
    return [functools.partial(look, m, paths) for look in looks]


def _rails(m: Matrices, paths: Paths, residual: FloatArray) -> list[_Candidates]:
    devices = np.array(m.place.devices)
    of_rail = members(devices)
    index = of_rail[:, :, None], of_rail[:, None, :]
    cells = padded(np.where(paths.between, residual, np.nan))[index].reshape(len(of_rail), -1)
    possible = np.pad(m.expected & paths.between, (0, 1))[index].reshape(cells.shape).sum(axis=1)

    def on(rail: int) -> tuple[IntArray, IntArray]:
        return _index(np.flatnonzero(devices == rail), np.flatnonzero(devices == rail))

    return [_candidates(Cause.RAIL, NIC, cells, possible, on)]


def _node_links(m: Matrices, _paths: Paths, residual: FloatArray) -> list[_Candidates]:
    """Uplinks and downlinks of nodes."""
    nodes = m.place.nodes
    low, middle, known = _blocks(m, residual)

    def into(node: int) -> tuple[IntArray, IntArray]:
        return _index(np.flatnonzero(nodes == node), np.flatnonzero(nodes != node))

    def out_of(node: int) -> tuple[IntArray, IntArray]:
        return _index(np.flatnonzero(nodes != node), np.flatnonzero(nodes == node))

    down, up = (
        _Candidates(
            cause,
            NIC,
            range(m.place.num_nodes),
            quantile(low, _SPARED, axis),
            quantile(middle, 0.5, axis),
            np.zeros(0),
            np.nanmean(known, axis=axis),
            where,
        )
        for cause, axis, where in ((Cause.DOWNLINK, 1, into), (Cause.UPLINK, 0, out_of))
    )
    return _in_both(up, down)


def _node_pairs(m: Matrices, _paths: Paths, residual: FloatArray) -> list[_Candidates]:
    nodes = m.place.nodes
    count = m.place.num_nodes
    pairs = [(src, dst) for dst in range(count) for src in range(count) if src != dst]
    at = tuple(np.array(pairs)[:, ::-1].T)

    def between(pair: tuple[int, int]) -> tuple[IntArray, IntArray]:
        return _index(np.flatnonzero(nodes == pair[1]), np.flatnonzero(nodes == pair[0]))

    low, middle, known = _blocks(m, residual)
    both = middle + middle.T
    return [
        _Candidates(Cause.NODE_PAIR, NIC, pairs, low[at], middle[at], both[at], known[at], between)
    ]


def _sides(m: Matrices, paths: Paths, residual: FloatArray) -> list[_Candidates]:
    return [
        side
        for link, exists in ((NVLINK, not paths.between.all()), (NIC, paths.between.any()))
        if exists
        for side in _in_both(
            *(_side(cause, link, m, paths, residual) for cause in (Cause.INGRESS, Cause.EGRESS))
        )
    ]


def _in_both(one: _Candidates, other: _Candidates) -> list[_Candidates]:
    both = one.middle + other.middle
    return [replace(one, both=both), replace(other, both=both)]


def _side(cause: Cause, link: str, m: Matrices, paths: Paths, residual: FloatArray) -> _Candidates:
    of_link = {NVLINK: ~paths.between, NIC: paths.between}.get(link)
    possible = m.expected if of_link is None else m.expected & of_link
    cells = residual if of_link is None else np.where(of_link, residual, np.nan)
    if cause == Cause.EGRESS:
        cells, possible = cells.T, possible.T
    if link == NVLINK and m.place.num_nodes > 1:
        mates = members(m.place.nodes)[m.place.nodes]
        cells = padded(cells)[np.arange(m.num_ranks)[:, None], mates]

    def of(rank: int) -> tuple[IntArray, IntArray]:
        others = np.flatnonzero(possible[rank])
        one = np.array([rank])
        return (one, others) if cause == Cause.INGRESS else (others, one)

    return _candidates(cause, link, cells, possible.sum(axis=1), of)


def _candidates(
    cause: Cause, link: str, cells: FloatArray, possible: IntArray, paths: Any
) -> _Candidates:
    """cells: [groups, paths], possible: [groups], so many of them there can be; one is no group."""
    low, middle, count = _low_and_middle(cells)
    known = np.where(possible > 1, count / np.maximum(possible, 1), 0.0)
    return _Candidates(cause, link, range(len(cells)), low, middle, middle, known, paths)


def _low_and_middle(cells: FloatArray) -> tuple[FloatArray, FloatArray, IntArray]:
    """Of the last dimension: the lower quantile, the lower median, and how many are known."""
    # What is not known comes last.
    ordered = np.sort(cells, axis=-1)
    count = np.isfinite(ordered).sum(axis=-1)
    low, middle = (
        np.take_along_axis(
            ordered, np.maximum(share * (count - 1), 0.0).astype(np.intp)[..., None], -1
        )[..., 0]
        for share in (_SPARED, 0.5)
    )
    return low, middle, count


def _blocks(m: Matrices, residual: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[num_nodes, num_nodes] each, of the paths of a receiving and a sending node: their lower
    quantile, their median, the share known; NaN within a node."""
    nodes = members(m.place.nodes)
    index = nodes[:, None, :, None], nodes[None, :, None, :]
    shape = len(nodes), len(nodes), -1
    low, middle, count = _low_and_middle(padded(residual)[index].reshape(shape))
    possible = np.pad(m.expected, (0, 1))[index].reshape(shape).sum(axis=2)
    known = count / np.maximum(possible, 1)
    for values in (low, middle, known):
        np.fill_diagonal(values, np.nan)
    return low, middle, known


def _index(receivers: IntArray, sources: IntArray) -> tuple[IntArray, IntArray]:
    return receivers[:, None], sources[None, :]
