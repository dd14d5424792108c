"""Path times of all kinds of operation of a group as one additive model; what it leaves over, causes compete for.

    arrival - issue = level of kind and class of link + load of the ports + place in the order of sending
                      + clock of receiver - clock of source + rest

All rows of a source go through one port, and so do all that come to a receiver: who has more of them takes longer, at
most as if ports did nothing else, and what is sent last waits longest. Causes only add, so levels are those of the healthy half. A path that was there at
the first look bounds its time from above. NVLink and NICs have levels, loads and noise of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..collect.group_matrices import Matrices, Place
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import (
    FAR,
    healthy,
    median,
    median_of,
    or_zero,
    quantile_of,
    typical_slope,
)
from .clocks import Prior, joint_clocks, prior_of
from .partners import members, over_mates, partners
from .sending_order import queued_in_ports

# Below four ranks a row of the path matrix has too few cells to tell a path from a clock.
MIN_RANKS_TO_SPLIT_PATHS = 4
# The price in nats of a cause of the few that the paths of one rank or node can have.
A_CAUSE = 10.0
# Ports may be busier in other ways than the model knows, by this share of what paths take; seldom by more than a third of it.
OTHERWISE_BUSY = 0.03
MOSTLY_BUSY = OTHERWISE_BUSY / 3
# Noise is at least this share of the smallest effect of interest.
_LEAST_NOISE = 1 / 6
# Levels are known from so many paths.
_ENOUGH_PATHS = 4_096
# One direction of a rank is hardly seen at less than this share of the other.
_ONE_WAY = 0.2
# Fences of so many mates tell into which rank paths are slow.
_MATES = 2
# A rank's clock is told by the paths of this share of the others.
_CONNECTED = 0.4
# Of the ports of a kind of link, the share that has few rows.
_FEW_ROWS = 0.25
# Loads that differ by less say nothing; pairs of ranks that tell what load costs.
_EVEN, _PAIRS = 0.04, 4_000


@dataclass(frozen=True)
class PathModel:
    """`[kinds, receiver, source]` ns unless said otherwise.

    Attributes:
        place: of the ranks.
        classes: [receiver, source], 0 within a node (an NVLink domain), 1 between nodes on one rail, 2 across
            rails, -1 on the diagonal.
        expected: over which paths anything came.
        time: median of arrival minus issue, by clocks as measured; NaN where not known.
        is_bound: where `rest` says no more than that a path is not slower.
        on_one_clock: where the bound is of the sender's clock alone.
        level: [kinds, classes], of healthy paths.
        usual: what healthy paths take.
        by_load: by how much paths may be slower than healthy ones for the rows of their ports.
        fence: [kinds, num_ranks], how much longer than the others of its node a rank waits, before it waits for others,
            until what it sent within the node has come there.
        clock: [num_ranks], by how much each clock is ahead of what was measured.
        prior: what was measured of clocks.
        error: standard error of `time`.
        noise: standard deviation between healthy paths.
        rest: what the model leaves over; NaN where nothing is known.
    """

    place: Place
    classes: IntArray
    expected: BoolArray
    time: FloatArray
    is_bound: BoolArray
    on_one_clock: BoolArray
    level: FloatArray
    usual: FloatArray
    by_load: FloatArray
    fence: FloatArray
    clock: FloatArray
    prior: Prior
    error: FloatArray
    noise: FloatArray
    rest: FloatArray

    @functools.cached_property
    def between(self) -> BoolArray:
        """[receiver, source]: whether a path joins two nodes."""
        return np.asarray(self.classes > 0)

    def corrected(self, k: int) -> FloatArray:
        """[receiver, source]: path times of a kind with clocks set."""
        return np.asarray(self.time[k] - _apart(self.clock))


@dataclass(frozen=True)
class _SeenPaths:
    """What was seen of all paths; `[kinds, paths]` ns, NaN where nothing was.

    Attributes:
        time: arrival minus issue; where there is none, what it is at most.
        by_fence: what it is at most, by the clock of the sender alone.
        is_bound: where no more than a bound is known.
        into: by how much paths are slower into the one rank of a node that all others wait for.
        classes: [paths].
        ports: [kinds, links, 2, num_ranks], by what share more rows than usual come into each rank and out of it, within
            nodes and between.
    """

    time: FloatArray
    by_fence: FloatArray
    is_bound: BoolArray
    into: FloatArray
    classes: IntArray
    ports: FloatArray

    def with_clocks(self, clock: FloatArray, paths: IntArray) -> FloatArray:
        """[kinds, ...] of some paths."""
        dst, src = np.divmod(paths, clock.size)
        return np.fmin(self.time[:, paths] - (clock[dst] - clock[src]), self.by_fence[:, paths])

    def loads(self, paths: IntArray) -> FloatArray:
        """[kinds, ...]: by what share the busier port of some paths has more rows than usual."""
        link, (dst, src) = (
            np.minimum(self.classes[paths], 1),
            np.divmod(paths, self.ports.shape[-1]),
        )
        into, out_of = self.ports[:, link, 0, dst], self.ports[:, link, 1, src]
        return np.asarray(np.maximum(np.maximum(into, out_of), 0.0))


def fit_paths(kinds: Sequence[Matrices], floor_ns: float) -> PathModel:
    """The model without causes.

    Args:
        kinds: of operation, of one group.
        floor_ns: the smallest effect of interest.
    """
    place = kinds[0].place
    classes = _classes(place)
    expected = np.stack([m.expected & (classes >= 0) for m in kinds])
    time = np.where(expected, np.stack([m.path for m in kinds]), np.nan)
    fences = np.stack([_by_fence(m, classes, floor_ns) for m in kinds])
    # Whatever a rank sends within its node has come when it leaves its fence, and in larger nodes ranks send more.
    inside = members(place.nodes)
    of_nodes = np.where(inside >= 0, fences.min(axis=1)[:, inside], np.inf).min(axis=2)
    known = np.where(np.isfinite(of_nodes), of_nodes, np.nan)
    least_held = np.nan_to_num(np.fmax.reduce(known, axis=1), nan=np.inf)
    is_open = expected & ~np.isfinite(time)
    bound, by_fence = (
        np.where(is_open & np.isfinite(at_most), at_most, np.nan)
        for at_most in (np.stack([m.path_bound for m in kinds]), fences)
    )
    prior = prior_of(_stated_errors(kinds))
    fence = np.stack([over_mates(median(m.held, 0), place.nodes) for m in kinds])
    into = _into_by_fence(fence, classes, floor_ns)
    is_told = _are_connected(time, prior, floor_ns) | (into > 0).any(axis=0)
    time[:, ~is_told] = np.nan
    is_bound = np.isfinite(bound) | np.isfinite(by_fence)
    known = np.fmin(time, bound)
    ports = np.stack([_port_loads(m, classes) for m in kinds])
    queued = np.stack(
        [queued_in_ports(m, of_kind, classes, floor_ns) for m, of_kind in zip(kinds, time)]
    )
    seen = _SeenPaths(
        flat(known - queued),
        flat(by_fence - queued),
        flat(is_bound),
        flat(into),
        classes.ravel(),
        ports,
    )
    least_noise = _LEAST_NOISE * floor_ns
    clock, cost = np.zeros(place.num_ranks), np.zeros((len(kinds), 2))
    while True:
        if place.num_ranks >= MIN_RANKS_TO_SPLIT_PATHS:
            times = time - queued - _by_load(cost, ports, classes) - into
            told, sigma = joint_clocks(times, classes, place, least_held, prior)
            told = _without_slow_sides(told, time, fence, prior)
            clock = prior.drawn(_without_slow_pair(told, place, prior), sigma)
        level, spread = _levels(seen, clock, cost, least_noise, least_held)
        if cost.any():
            break
        # What rows cost is told by pairs of paths in which clocks cancel, and then clocks without it.
        cost = _costs(seen, clock, level, place.nodes)
        if not cost.any():
            break
    usual = level[:, classes] + queued + _by_load(cost, ports, classes)
    rest = known - _apart(clock)
    # What a rank waits at its fence is on its own clock.
    on_one_clock = ~(rest < by_fence) & np.isfinite(by_fence)
    rest = np.fmin(rest, by_fence) - usual
    error = np.stack([m.path_error for m in kinds])
    differ = np.maximum(spread, least_noise) ** 2
    noise = np.sqrt(differ[:, classes] + np.where(is_bound, 0.0, error) ** 2)
    if place.num_ranks < MIN_RANKS_TO_SPLIT_PATHS:
        # The clocks stay as measured, and the way back, which is as much faster, is taken for the healthy one.
        noise = np.hypot(noise, prior.sigma[:, None] + prior.sigma)
    return PathModel(
        place=place,
        classes=classes,
        expected=expected,
        time=time,
        is_bound=is_bound,
        on_one_clock=on_one_clock,
        level=level,
        usual=usual,
        by_load=_most_by_load(kinds, ports, usual, classes),
        fence=fence,
        clock=clock,
        prior=prior,
        error=error,
        noise=noise,
        rest=rest,
    )


def flat(cells: Any) -> Any:
    """[kinds, paths] of [kinds, receiver, source]."""
    return cells.reshape(len(cells), -1)


def known_rest(rest: FloatArray, is_bound: BoolArray) -> FloatArray:
    """Without bounds that say nothing."""
    return np.where(is_bound & (rest > 0), np.nan, rest)


def _are_connected(time: FloatArray, prior: Prior, floor_ns: float) -> BoolArray:
    """[receiver, source]: paths between ranks whose clocks are known, or can be found out from paths to enough others."""
    known = np.asarray(np.isfinite(time).any(axis=0))
    partners = (known | known.T).sum(axis=0)
    enough = partners >= max(MIN_RANKS_TO_SPLIT_PATHS - 1, _CONNECTED * (len(known) - 1))
    is_told = enough | (prior.sigma < floor_ns) | (len(known) < MIN_RANKS_TO_SPLIT_PATHS)
    return np.asarray(is_told[:, None] & is_told[None, :])


def _by_fence(m: Matrices, classes: IntArray, floor_ns: float) -> FloatArray:
    """[receiver, source]: what a path within a node takes at most, as its source has waited for it; inf if it has not.

    On a GPU waiting for others begins when what was sent within the node has come there.
    """
    held = median(m.held, 0)
    seen = m.path[(classes == 0) & np.isfinite(m.path) & (m.path_clock < floor_ns)]
    if not median_of(held) > max(floor_ns / 2, or_zero(median_of(seen)) / 2):
        return np.full(classes.shape, np.inf)
    last = np.fmax.reduce(m.send, axis=0, initial=np.nan)
    bound = np.where(classes == 0, held + last - m.send, np.inf)
    return np.where(np.isfinite(bound), bound, np.inf)


def _into_by_fence(fence: FloatArray, classes: IntArray, floor_ns: float) -> FloatArray:
    """[kinds, receiver, source] ns: how much slower paths within a node are into the one rank that all others wait for.

    They do so at their fences, on their own clocks. Of two ranks, one may as well be slow to send.
    """
    mates = (classes == 0).sum(axis=1)
    longer = np.where((-fence > floor_ns) & (mates >= _MATES), -fence, 0.0)
    return np.asarray(np.where(classes == 0, longer[:, :, None], 0.0))


def _without_slow_sides(
    told: FloatArray, time: FloatArray, fence: FloatArray, prior: Prior
) -> FloatArray:
    """[num_ranks]: clocks, without what paths tell of ranks of which hardly more than one direction was seen.

    That is no clock's doing if it is more than clocks may be off; nor is what ranks wait at their fences.
    """
    known = np.isfinite(time).sum(axis=0)
    into, out_of = known.sum(axis=1), known.sum(axis=0)
    only_out, only_into = into < _ONE_WAY * out_of, out_of < _ONE_WAY * into
    longer = median(fence, 0)
    held = np.where(only_out, np.maximum(longer, 0.0), 0.0)
    slow = np.where(only_out, -told, np.where(only_into, told, 0.0))
    return np.where(slow > FAR * prior.sigma, 0.0, told + held)


def _without_slow_pair(told: FloatArray, place: Place, prior: Prior) -> FloatArray:
    """[num_ranks]: clocks, those of two nodes together as measured where they are rather a slow pair than so wrong."""
    if place.num_nodes != 2:
        return told
    of_node = np.array([told[place.nodes == node].mean() for node in range(2)])
    apart = np.full(told.size, abs(of_node[0] - of_node[1]) / 2)
    if np.mean(prior.penalty(apart)) < A_CAUSE:
        return told
    return np.asarray(told - np.where(place.nodes >= 0, of_node[place.nodes], 0.0))


def _apart(clock: FloatArray) -> FloatArray:
    return np.asarray(clock[:, None] - clock[None, :])


def _stated_errors(kinds: Sequence[Matrices]) -> FloatArray:
    stated = np.stack([np.where(m.expected, m.path_clock, np.nan) for m in kinds])
    # Ranks on CPUs share one clock, of which old rings say nothing.
    return np.nan_to_num(stated) if kinds[0].place.device == "cpu" else stated


def _classes(place: Place) -> IntArray:
    nodes, devices = place.nodes, np.array(place.devices)
    same_node = nodes[:, None] == nodes[None, :]
    same_rail = devices[:, None] == devices[None, :]
    classes = np.where(same_node, 0, np.where(same_rail, 1, 2))
    # Where a rank is that did not report, nobody knows.
    classes[nodes < 0, :] = classes[:, nodes < 0] = -1
    np.fill_diagonal(classes, -1)
    return classes


def _levels(
    seen: _SeenPaths, clock: FloatArray, cost: FloatArray, noise: float, least_held: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """[kinds, classes + 1] each: what healthy paths take, and by how much they differ; the last are the diagonal's.

    Args:
        seen: of all paths.
        clock: [num_ranks] ns.
        cost: [kinds, links] ns, of rows.
        noise: the least that paths differ by, ns.
        least_held: [kinds] ns, within a node healthy paths take no longer.
    """
    levels, spreads = np.full((len(cost), 4), np.nan), np.zeros((len(cost), 4))
    few = clock.size < MIN_RANKS_TO_SPLIT_PATHS
    for link in range(3):
        paths = np.flatnonzero(seen.classes == link)
        paths = paths[:: max(1, paths.size // _ENOUGH_PATHS)]
        by_load = cost[:, min(link, 1), None] * seen.loads(paths)
        rest = seen.with_clocks(clock, paths) - by_load - seen.into[:, paths]
        for k, (values, hides) in enumerate(zip(rest, seen.is_bound[:, paths])):
            certain, bounds = values[~hides], values[hides]
            if few:
                # Most of two or three paths may be slow; the fastest is the healthy one.
                levels[k, link] = quantile_of(certain, 0.0)
                continue
            level, spread = healthy(certain, noise)
            if (bounds < level).any():
                level, spread = healthy(np.concatenate([certain, bounds[bounds < level]]), noise)
            levels[k, link], spreads[k, link] = level, spread
    levels[:, 0] = np.fmin(levels[:, 0], least_held)
    # Of what was never seen, bounds are all that is known.
    return np.where(np.isfinite(levels), levels, 0.0), spreads


def _port_loads(m: Matrices, classes: IntArray) -> FloatArray:
    """[links, 2, num_ranks]: by what share more rows than usual come into each rank and out of it; 0 if nobody knows."""
    loads = np.zeros((2, 2, len(classes)))
    tokens = np.where(np.isfinite(m.tokens), m.tokens, 0.0)
    for link, of_link in enumerate((classes == 0, classes > 0)):
        rows, has_port = tokens * of_link, of_link.any(axis=1)
        into = np.where(has_port & m.present, rows.sum(axis=1), np.nan)
        out_of = np.where(has_port, rows.sum(axis=0), np.nan)
        usual = max(or_zero(median_of(into)), or_zero(median_of(out_of)))
        if usual > 0:
            loads[link] = np.nan_to_num(np.stack([into, out_of]) / usual - 1.0)
    return loads


def _by_load(cost: FloatArray, ports: FloatArray, classes: IntArray) -> Any:
    """[kinds, receiver, source] ns: what the loads of ports explain, or 0."""
    if not cost.any():
        return 0.0
    explained = np.zeros((len(cost), *classes.shape))
    for link, of_link in enumerate((classes == 0, classes > 0)):
        for of_kind, per_share, (into, out_of) in zip(explained, cost[:, link], ports[:, link]):
            load = np.maximum(np.maximum(into, 0.0)[:, None], out_of)
            np.multiply(per_share, load, out=of_kind, where=of_link)
    return explained


def _most_by_load(
    kinds: Sequence[Matrices], ports: FloatArray, usual: FloatArray, classes: IntArray
) -> FloatArray:
    """[kinds, receiver, source] ns: by how much paths may differ from those behind ports with few rows; NaN on others.

    A port has been busy at most since its rank began to send.
    """
    found = np.full(usual.shape, np.nan)
    for of_kind, m, of_links, takes in zip(found, kinds, ports, usual):
        busy = takes + np.nan_to_num(m.send)
        for of_link, loads in zip((classes == 0, classes > 0), of_links):
            has_port = of_link.any(axis=1)
            few = [quantile_of(1 + load[has_port], _FEW_ROWS) for load in loads]
            into, out_of = (
                np.abs((1 + load) / least - 1) if least > 0 else 0.0 * load
                for load, least in zip(loads, few)
            )
            more = np.maximum(into[:, None], out_of)
            np.multiply(busy, more, out=of_kind, where=of_link & m.expected)
    return found


def _costs(seen: _SeenPaths, clock: FloatArray, level: FloatArray, nodes: IntArray) -> FloatArray:
    """[kinds, links] ns: what rows cost, by what ranks with more of them take longer there and back together."""
    costs, ranks = np.zeros((len(level), 2)), np.arange(nodes.size)[:, None]
    for link in range(2):
        if seen.ports[:, link].max() < _EVEN:
            continue
        of_link = (seen.classes == 0 if link == 0 else seen.classes > 0).reshape(nodes.size, -1)
        others = partners(nodes, of_link, within=link == 0)
        # Clocks cancel between the two directions, where both are known.
        paths = np.stack([others * nodes.size + ranks, ranks * nodes.size + others])
        is_path = (others >= 0) & of_link.ravel()[paths]
        if not is_path.any():
            continue
        load, over = seen.loads(paths), seen.with_clocks(clock, paths)
        is_known = is_path & np.isfinite(over) & ~(seen.is_bound[:, paths] & (over > 0))
        over = over - level[:, seen.classes[paths]]
        for k, known in enumerate(is_known):
            if np.ptp(load[k][is_path]) < _EVEN:
                continue
            more, longer = (_there_and_back(np.where(known, x, np.nan)) for x in (load[k], over[k]))
            most = max(level[k, link : 2 * link + 1].max(), 0.0)
            costs[k, link] = min(max(_slope(more, longer), 0.0), most)
    return costs


def _there_and_back(values: FloatArray) -> FloatArray:
    """[num_ranks]: medians of [2, num_ranks, others], there and back, added up; of one where the other is not known."""
    both = median(values, 2)
    return np.where(np.isfinite(both).any(axis=0), np.nansum(both, axis=0), np.nan)


def _slope(x: FloatArray, y: FloatArray) -> float:
    """Median slope between pairs of ranks whose loads differ (Theil and Sen); 0 where they do not."""
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if known.size * (known.size - 1) <= 2 * _PAIRS:
        a, b = np.triu_indices(known.size, 1)
    else:
        a, b = np.random.default_rng(0).integers(0, known.size, (2, _PAIRS))
    return typical_slope(x[known[a]] - x[known[b]], y[known[a]] - y[known[b]], _EVEN)
