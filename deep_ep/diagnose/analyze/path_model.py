"""Path times of all kinds of operation of a group as one additive model; what it leaves over, causes compete for.

    arrival - issue = level of kind and class of link + load of the ports + clock of receiver - clock of source + rest

All rows of a source go through one port, and so do all that come to a receiver: who has more of them takes longer, at
most as if ports did nothing else. Causes only add, so levels are those of the healthy half. A path that was there at
the first look bounds its time from above. NVLink and NICs have levels, loads and noise of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..collect.group_matrices import Matrices, Place
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import healthy, median, median_of, or_zero, quantile_of
from .clocks import Prior, joint_clocks, prior_of
from .partners import partners

# Below four ranks a row of the path matrix has too few cells to tell a path from a clock.
MIN_RANKS_TO_SPLIT_PATHS = 4
# The price in nats of a cause of the few that the paths of one rank or node can have.
A_CAUSE = 10.0
# Ports may be busier in other ways than the model knows, by this share of what paths take.
OTHERWISE_BUSY = 0.03
# Noise is at least this share of the smallest effect of interest.
_LEAST_NOISE = 1 / 6
# Levels settle against clocks and loads within so many sweeps, and are known from so many paths.
_SWEEPS, _ENOUGH_PATHS = 2, 4_096
# One direction of a rank is hardly seen at less than this share of the other. Clocks are not off by so many standard
# deviations, unless both directions say so.
_ONE_WAY, _TOO_FAR = 0.2, 4.0
# Fences of so many mates tell into which rank paths are slow.
_MATES = 2
# A rank's clock is told by the paths of this share of the others.
_CONNECTED = 0.4
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
        by_load: what the loads of the ports explain.
        uneven: by what share the loads of the ports differ from those of others.
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
    by_load: FloatArray
    uneven: FloatArray
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

    @property
    def corrected(self) -> FloatArray:
        """Path times with clocks set."""
        return self.time - _apart(self.clock)

    @functools.cached_property
    def usual(self) -> FloatArray:
        """What healthy paths take."""
        return self.level[:, self.classes] + self.by_load


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
    bound = np.where(expected & ~np.isfinite(time), np.stack([m.path_bound for m in kinds]), np.inf)
    by_fence = np.stack([_by_fence(m, classes, floor_ns) for m in kinds])
    # Whatever a rank sends within its node has come when it leaves its fence.
    least_held = by_fence.min(axis=(1, 2))
    by_fence = np.where(expected & ~np.isfinite(time), by_fence, np.inf)
    prior = prior_of(_stated_errors(kinds))
    fence = np.stack([_over_mates(median(m.held, 0), place.nodes) for m in kinds])
    into = _into_by_fence(fence, classes, floor_ns)
    is_told = _are_connected(time, prior, floor_ns) | (into > 0).any(axis=0)
    time = np.where(is_told, time, np.nan)
    is_bound = np.isfinite(np.fmin(bound, by_fence))
    load, uneven = np.stack([_port_loads(m, classes) for m in kinds], axis=1)
    clock = np.zeros(place.num_ranks)
    by_load = np.zeros(time.shape)
    least_noise = _LEAST_NOISE * floor_ns
    for _ in range(_SWEEPS):
        if place.num_ranks >= MIN_RANKS_TO_SPLIT_PATHS:
            told, sigma = joint_clocks(time - by_load - into, classes, place, least_held, prior)
            told = _without_slow_sides(told, time, fence, prior)
            clock = prior.drawn(_without_slow_pair(told, place, prior), sigma)
        # What a rank waits at its fence is on its own clock.
        on_one_clock = is_bound & (by_fence <= bound - _apart(clock))
        rest = np.where(is_bound, bound, time) - _apart(clock)
        rest = np.where(on_one_clock, by_fence, rest)
        level, spread = _levels(rest - by_load - into, is_bound, classes, least_noise, least_held)
        by_load = _by_load(rest, is_bound, load, classes, level, place.nodes)
    rest -= by_load
    level, spread = _levels(rest - into, is_bound, classes, least_noise, least_held)
    rest -= level[:, classes]
    error = np.stack([m.path_error for m in kinds])
    noise = np.hypot(np.maximum(spread[:, classes], least_noise), np.where(is_bound, 0.0, error))
    if place.num_ranks < MIN_RANKS_TO_SPLIT_PATHS:
        # The clocks stay as measured, and the way back, which is as much faster, is taken for the healthy one.
        noise = np.hypot(noise, prior.sigma[:, None] + prior.sigma)
    return PathModel(
        place,
        classes,
        expected,
        time,
        is_bound,
        on_one_clock,
        level,
        by_load,
        uneven,
        fence,
        clock,
        prior,
        error,
        noise,
        rest,
    )


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
    last = np.fmax.reduce(m.send, axis=0, initial=np.nan)
    bound = np.where(classes == 0, held + last - m.send, np.inf)
    seen = m.path[(classes == 0) & np.isfinite(m.path) & (m.path_clock < floor_ns)]
    if not median_of(held) > max(floor_ns / 2, or_zero(median_of(seen)) / 2):
        return np.full(classes.shape, np.inf)
    return np.where(np.isfinite(bound), bound, np.inf)


def _over_mates(values: FloatArray, nodes: IntArray) -> FloatArray:
    """[num_ranks]: above the median of the other ranks of the node; 0 where nothing is known."""
    mates = (nodes[:, None] == nodes[None, :]) & ~np.eye(nodes.size, dtype=bool)
    return np.nan_to_num(values - median(np.where(mates, values, np.nan), 1))


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
    return np.where(slow > _TOO_FAR * prior.sigma, 0.0, told + held)


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
    rest: FloatArray, is_bound: BoolArray, classes: IntArray, noise: float, least_held: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """[kinds, classes + 1] each: what healthy paths take, and by how much they differ; the last are the diagonal's.

    Args:
        rest: [kinds, receiver, source] ns.
        is_bound: likewise, whether it is not more than a bound.
        classes: [receiver, source].
        noise: the least that paths differ by, ns.
        least_held: [kinds] ns, within a node healthy paths take no longer.
    """
    levels, spreads = np.full((len(rest), 4), np.nan), np.zeros((len(rest), 4))
    few = classes.shape[0] < MIN_RANKS_TO_SPLIT_PATHS
    for link in range(3):
        of_link = classes == link
        for k, (values, hides) in enumerate(zip(rest[:, of_link], is_bound[:, of_link])):
            step = max(1, values.size // _ENOUGH_PATHS)
            seen, bounds = values[::step][~hides[::step]], values[::step][hides[::step]]
            if few:
                # Most of two or three paths may be slow; the fastest is the healthy one.
                levels[k, link] = quantile_of(seen, 0.0)
                continue
            level, spread = healthy(seen, noise)
            if (bounds < level).any():
                level, spread = healthy(np.concatenate([seen, bounds[bounds < level]]), noise)
            levels[k, link], spreads[k, link] = level, spread
    levels[:, 0] = np.fmin(levels[:, 0], least_held)
    # Of what was never seen, bounds are all that is known.
    return np.where(np.isfinite(levels), levels, 0.0), spreads


def _port_loads(m: Matrices, classes: IntArray) -> FloatArray:
    """[2, receiver, source]: by what share the busier port of a path has more rows than usual; by how much any differs."""
    loads = np.zeros((2, *classes.shape))
    for of_link in (classes == 0, classes > 0):
        rows = np.where(of_link & np.isfinite(m.tokens), m.tokens, 0.0)
        has_port = of_link.any(axis=1)
        into = np.where(has_port & m.present, rows.sum(axis=1), np.nan)
        out_of = np.where(has_port, rows.sum(axis=0), np.nan)
        usual = max(or_zero(median_of(into)), or_zero(median_of(out_of)))
        if usual > 0:
            of_ports = np.nan_to_num(
                np.stack(np.broadcast_arrays(into[:, None], out_of)) / usual - 1.0
            )
            loads[0] = np.where(of_link, np.maximum(of_ports.max(axis=0), 0.0), loads[0])
            loads[1] = np.where(of_link, np.abs(of_ports).max(axis=0), loads[1])
    return loads


def _by_load(
    rest: FloatArray,
    is_bound: BoolArray,
    load: FloatArray,
    classes: IntArray,
    level: FloatArray,
    nodes: IntArray,
) -> FloatArray:
    """What the loads of ports explain, by what ranks with more rows take longer there and back together."""
    explained = np.zeros(rest.shape)
    for link, of_link in ((0, classes == 0), (1, classes > 0)):
        others = partners(nodes, of_link, within=link == 0)
        for k, values in enumerate(known_rest(rest, is_bound)):
            if not of_link.any() or np.ptp(load[k][of_link]) < _EVEN:
                continue
            x, y = (
                np.where(of_link & np.isfinite(values), v, np.nan)
                for v in (load[k], values - level[k][classes])
            )
            # Clocks cancel between the two directions, where both are known.
            more, longer = (_there_and_back(v, others) for v in (x, y))
            most = max(or_zero(quantile_of(level[k, link : 2 * link + 1], 1.0)), 0.0)
            cost = min(max(_slope(more, longer), 0.0), most)
            explained[k] = np.where(of_link, cost * load[k], explained[k])
    return explained


def _there_and_back(values: FloatArray, others: IntArray) -> FloatArray:
    """[num_ranks]: medians into each rank and out of it, added up; of one where the other is not known."""
    ranks = np.arange(len(values))[:, None]
    ways = np.stack([values[others, ranks], values[ranks, others]])
    both = median(np.where(others >= 0, ways, np.nan), 2)
    return np.where(np.isfinite(both).any(axis=0), np.nansum(both, axis=0), np.nan)


def _slope(x: FloatArray, y: FloatArray) -> float:
    """Median slope between pairs of ranks whose loads differ (Theil and Sen); 0 where they do not."""
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    a, b = np.triu_indices(known.size, 1)
    if a.size > _PAIRS:
        a, b = np.random.default_rng(0).integers(0, known.size, (2, _PAIRS))
    step = x[known[a]] - x[known[b]]
    telling = np.abs(step) > max(_EVEN, np.abs(step).max(initial=0.0) / 2)
    return or_zero(median_of((y[known[a]] - y[known[b]])[telling] / step[telling]))
