"""What slow paths may have in common: sides of ranks, links of nodes, pairs of nodes, rails.

NVLink and NICs are looked at apart: a slow NIC slows the paths between nodes only. Paths are flat indices into
[receiver, source].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Union

import numpy as np

from ..core.causes import Cause
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import healthy, median
from .partners import ENOUGH_RANKS, members, partners, some_ranks
from .path_model import PathModel

# Kinds of link: within a node, between nodes, or all of them.
NVLINK, NIC, ALL_LINKS = "nvlink", "nic", "all"
# Of large groups, paths of so many ranks of each of two nodes tell which pairs to look at.
_OF_A_PAIR = 4
# Of a group so many of the paths must be known.
KNOWN = 0.5
# Up to so many groups have no spread of their own.
_FEW = 3
# Two nodes are a pair, and their links are the same paths.
_MIN_NODES = 3
Number = Union[int, tuple[int, int]]
# The same paths in the other direction, which clocks that are off confuse with these, and the name of both.
_MIRRORED: dict[Cause, tuple[Cause, Cause | None]] = {
    Cause.INGRESS: (Cause.EGRESS, Cause.INGRESS_OR_EGRESS),
    Cause.EGRESS: (Cause.INGRESS, Cause.INGRESS_OR_EGRESS),
    Cause.UPLINK: (Cause.DOWNLINK, Cause.UPLINK_OR_DOWNLINK),
    Cause.DOWNLINK: (Cause.UPLINK, Cause.UPLINK_OR_DOWNLINK),
    # Which of the two it is must be known.
    Cause.NODE_PAIR: (Cause.NODE_PAIR, None),
    Cause.PATH: (Cause.PATH, Cause.PATH_OR_BACK),
}
NO_RANKS: IntArray = np.zeros(0, np.int64)


@dataclass(frozen=True)
class PathGroup:
    """Paths that a cause would slow together.

    Attributes:
        cause: what they have in common.
        number: the rank, the node or the rail; of pairs and paths (source, destination).
        link: of which kind the paths are.
        receivers, sources: of each path.
        clocks: ranks whose clocks, if all are off by the same, make these paths slow, or those of the
            other direction.
    """

    cause: Cause
    number: Number
    link: str
    receivers: IntArray
    sources: IntArray
    clocks: IntArray = field(default_factory=lambda: NO_RANKS)

    @property
    def edge(self) -> tuple[int, int]:
        """(source, destination) of its first path, which is all of a single one."""
        return int(self.sources[0]), int(self.receivers[0])

    @property
    def either(self) -> Cause | None:
        """The name of both directions, if there is one."""
        return _MIRRORED[self.cause][1]

    def mirrored(self) -> PathGroup:
        """The other direction."""
        number = self.number[::-1] if isinstance(self.number, tuple) else self.number
        return PathGroup(
            _MIRRORED[self.cause][0], number, self.link, self.sources, self.receivers, self.clocks
        )

    def paths(self, num_ranks: int) -> IntArray:
        """Flat indices."""
        return np.asarray(self.receivers * num_ranks + self.sources)


@dataclass(frozen=True)
class Look:
    """All groups of one kind.

    Attributes:
        cause, link: as in PathGroup.
        receivers, sources: [groups, paths], some paths of each; negative: none.
        group: makes one of them, by its place.
    """

    cause: Cause
    link: str
    receivers: IntArray
    sources: IntArray
    group: Callable[[int], PathGroup]

    def medians(self, rest: FloatArray, expected: BoolArray) -> FloatArray:
        """[kinds, groups]: what each has more, 0 where too little is known.

        Args:
            rest: [kinds, receiver, source] ns.
            expected: likewise, whether there is such a path.
        """
        receivers, sources = self.receivers, self.sources
        is_path = (receivers >= 0) & (sources >= 0) & (receivers != sources)
        paths = receivers * rest.shape[-1] + sources
        values = np.where(is_path, rest.reshape(len(rest), -1)[:, paths], np.nan)
        possible = (is_path & expected.reshape(len(rest), -1)[:, paths]).sum(axis=2)
        known = np.isfinite(values).sum(axis=2)
        enough = (possible > 1) & (known >= np.maximum(KNOWN * possible, 2))
        return np.where(enough, np.nan_to_num(median(values, 2)), 0.0)


def spread_of(medians: FloatArray) -> FloatArray:
    """[kinds]: by how much healthy groups differ, standard deviation."""
    if medians.shape[1] <= _FEW:
        return np.zeros(len(medians))
    return np.array([healthy(of_kind)[1] for of_kind in medians])


def path(receiver: int, source: int, link: str) -> PathGroup:
    """A single path."""
    ends = np.array([receiver]), np.array([source])
    return PathGroup(Cause.PATH, (source, receiver), link, *ends)


def _all_between(
    cause: Cause, number: Number, receivers: IntArray, sources: IntArray, clocks: IntArray
) -> PathGroup:
    """All paths from ranks of some nodes to ranks of others."""
    ends = np.meshgrid(receivers, sources, indexing="ij")
    return PathGroup(cause, number, NIC, ends[0].ravel(), ends[1].ravel(), clocks)


def looks(model: PathModel) -> Iterator[Look]:
    """All kinds of groups that these ranks can have."""
    place = model.place
    for link in links_of(model):
        yield from _sides(model, link)
    if not 1 < place.num_nodes < place.num_ranks:
        return
    nodes = members(place.nodes)
    yield _node_pairs(model, nodes)
    if place.num_nodes >= _MIN_NODES:
        yield from _node_links(model, nodes)
        yield _rails(model)


def side(model: PathModel, cause: Cause, link: str, rank: int) -> PathGroup:
    """All paths into a rank, or out of it."""
    partners = np.flatnonzero(_of_link(model, link)[rank])
    itself = np.full(partners.size, rank)
    ends = (itself, partners) if cause == Cause.INGRESS else (partners, itself)
    return PathGroup(cause, rank, link, ends[0], ends[1], np.array([rank]))


def links_of(model: PathModel) -> list[str]:
    """Kinds of link that there are, all of them together at the end."""
    links = [NVLINK] * bool((model.classes == 0).any()) + [NIC] * bool((model.classes > 0).any())
    return links + [ALL_LINKS] * (len(links) == 2)


def _of_link(model: PathModel, link: str) -> BoolArray:
    classes = model.classes
    return np.asarray({NVLINK: classes == 0, NIC: classes > 0, ALL_LINKS: classes >= 0}[link])


def _sides(model: PathModel, link: str) -> Iterator[Look]:
    ranks = np.arange(model.place.num_ranks)[:, None]
    others = partners(model.place.nodes, _of_link(model, link), within=link == NVLINK)
    yield Look(
        Cause.INGRESS, link, ranks, others, lambda rank: side(model, Cause.INGRESS, link, rank)
    )
    yield Look(
        Cause.EGRESS, link, others, ranks, lambda rank: side(model, Cause.EGRESS, link, rank)
    )


def _node_links(model: PathModel, nodes: IntArray) -> Iterator[Look]:
    place = model.place
    some = some_ranks(place.num_ranks)
    elsewhere = np.where(place.nodes[some] != np.arange(len(nodes))[:, None], some, -1)
    inside = np.repeat(nodes, some.size, axis=1)
    outside = np.tile(elsewhere, (1, nodes.shape[1]))

    def group(cause: Cause, node: int) -> PathGroup:
        here, there = np.flatnonzero(place.nodes == node), np.flatnonzero(place.nodes != node)
        ends = (here, there) if cause == Cause.DOWNLINK else (there, here)
        return _all_between(cause, node, *ends, here)

    yield Look(Cause.DOWNLINK, NIC, inside, outside, lambda node: group(Cause.DOWNLINK, node))
    yield Look(Cause.UPLINK, NIC, outside, inside, lambda node: group(Cause.UPLINK, node))


def _node_pairs(model: PathModel, nodes: IntArray) -> Look:
    place = model.place
    pairs = [(a, b) for a in range(len(nodes)) for b in range(len(nodes)) if a != b]
    sources, receivers = np.array(pairs).T
    few = nodes if nodes.size <= ENOUGH_RANKS else nodes[:, :_OF_A_PAIR]

    def group(i: int) -> PathGroup:
        there, here = (np.flatnonzero(place.nodes == node) for node in pairs[i])
        # Of more than two nodes the others tell a clock.
        return _all_between(Cause.NODE_PAIR, pairs[i], here, there, here)

    return Look(
        Cause.NODE_PAIR,
        NIC,
        np.repeat(few[receivers], few.shape[1], axis=1),
        np.tile(few[sources], (1, few.shape[1])),
        group,
    )


def _rails(model: PathModel) -> Look:
    devices = np.array(model.place.devices)
    rails, some = members(devices), some_ranks(model.place.num_ranks)
    partners = np.where(devices[some] == np.arange(len(rails))[:, None], some, -1)

    def group(rail: int) -> PathGroup:
        of_rail = np.flatnonzero(devices == rail)
        group = _all_between(Cause.RAIL, rail, of_rail, of_rail, NO_RANKS)
        apart = model.classes[group.receivers, group.sources] > 0
        return replace(group, receivers=group.receivers[apart], sources=group.sources[apart])

    return Look(
        Cause.RAIL,
        NIC,
        np.repeat(rails, some.size, axis=1),
        np.tile(partners, (1, rails.shape[1])),
        group,
    )
