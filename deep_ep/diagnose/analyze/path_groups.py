"""What slow paths may have in common: sides of ranks, links of nodes, pairs of nodes, rails.

NVLink and NICs are looked at apart: a slow NIC slows the paths between nodes only. Paths are flat indices into
[receiver, source].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Union

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
        num_ranks: of the whole group of ranks.
        clocks: ranks whose clocks, if all are off by the same, make these paths slow, or those of the
            other direction.
    """

    cause: Cause
    number: Number
    link: str
    receivers: IntArray
    sources: IntArray
    num_ranks: int
    clocks: IntArray = field(default_factory=lambda: NO_RANKS)

    @property
    def edge(self) -> tuple[int, int]:
        """(source, destination) of its first path, which is all of a single one."""
        return int(self.sources[0]), int(self.receivers[0])

    def is_same(self, other: PathGroup) -> bool:
        """Whether both are the same cause of the same ranks or nodes, on whatever link."""
        return (self.cause, self.number) == (other.cause, other.number)

    @property
    def either(self) -> Cause | None:
        """The name of both directions, if there is one."""
        return _MIRRORED[self.cause][1]

    @functools.cached_property
    def mirrored(self) -> PathGroup:
        """The other direction."""
        number = self.number[::-1] if isinstance(self.number, tuple) else self.number
        return replace(
            self,
            cause=_MIRRORED[self.cause][0],
            number=number,
            receivers=self.sources,
            sources=self.receivers,
        )

    @functools.cached_property
    def paths(self) -> IntArray:
        """Flat indices."""
        return np.asarray(self.receivers * self.num_ranks + self.sources)

    @functools.cached_property
    def around(self) -> Around:
        """All paths that the clocks move."""
        others = np.delete(np.arange(self.num_ranks), self.clocks)
        into = (self.clocks[:, None] * self.num_ranks + others).ravel()
        out_of = (others[:, None] * self.num_ranks + self.clocks).ravel()
        paths = np.concatenate([into, out_of])
        way = np.repeat([1.0, -1.0], [into.size, out_of.size])
        ours, opposite = (np.isin(paths, of.paths) for of in (self, self.mirrored))
        return Around(paths, way, ours, opposite)


class Around(NamedTuple):
    """Paths between some ranks and all others.

    Attributes:
        paths: flat indices.
        way: 1 into the ranks, -1 out of them.
        ours, opposite: which of them are the group's, and which are those of the other direction.
    """

    paths: IntArray
    way: FloatArray
    ours: BoolArray
    opposite: BoolArray


@dataclass(frozen=True)
class Look:
    """All groups of one kind.

    Attributes:
        cause, link: as in PathGroup.
        receivers, sources: [groups, paths], some paths of each; negative: none.
        num_ranks: of the whole group of ranks.
        group: makes one of them, by its place.
    """

    cause: Cause
    link: str
    receivers: IntArray
    sources: IntArray
    num_ranks: int
    group: Callable[[int], PathGroup]

    @functools.cached_property
    def _paths(self) -> tuple[IntArray, BoolArray]:
        """[groups, paths] flat indices, and where there is one."""
        receivers, sources = self.receivers, self.sources
        is_path = (receivers >= 0) & (sources >= 0) & (receivers != sources)
        return receivers * self.num_ranks + sources, is_path

    def medians(self, rest: FloatArray, expected: BoolArray) -> FloatArray:
        """[kinds, groups]: what each has more, 0 where too little is known.

        Args:
            rest: [kinds, receiver, source] ns.
            expected: likewise, whether there is such a path.
        """
        paths, is_path = self._paths
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


def path(receiver: int, source: int, link: str, num_ranks: int) -> PathGroup:
    """A single path."""
    ends = np.array([receiver]), np.array([source])
    return PathGroup(Cause.PATH, (source, receiver), link, *ends, num_ranks)


def _all_between(
    cause: Cause,
    number: Number,
    receivers: IntArray,
    sources: IntArray,
    num_ranks: int,
    clocks: IntArray,
) -> PathGroup:
    """All paths from ranks of some nodes to ranks of others."""
    ends = np.meshgrid(receivers, sources, indexing="ij")
    return PathGroup(cause, number, NIC, ends[0].ravel(), ends[1].ravel(), num_ranks, clocks)


def looks(model: PathModel, *, at_times: bool) -> Iterator[Look]:
    """All kinds of groups that these ranks can have.

    Of two nodes a rail is two paths, which loads may slow for good, but not at the same times.

    Args:
        model: of the paths.
        at_times: whether bursts are looked at.
    """
    place = model.place
    for link in links_of(model):
        yield from _sides(model, link)
    if not 1 < place.num_nodes < place.num_ranks:
        return
    nodes = members(place.nodes)
    yield _node_pairs(model, nodes)
    if place.num_nodes >= _MIN_NODES:
        yield from _node_links(model, nodes)
    if place.num_nodes >= _MIN_NODES or at_times:
        yield _rails(model)


def side(model: PathModel, cause: Cause, link: str, rank: int) -> PathGroup:
    """All paths into a rank, or out of it."""
    others = np.flatnonzero(_are_of_link(model.classes[rank], link))
    itself = np.full(others.size, rank)
    ends = (itself, others) if cause == Cause.INGRESS else (others, itself)
    return PathGroup(cause, rank, link, ends[0], ends[1], model.place.num_ranks, np.array([rank]))


def links_of(model: PathModel) -> list[str]:
    """Kinds of link that there are, all of them together at the end."""
    links = [NVLINK] * bool((model.classes == 0).any()) + [NIC] * bool((model.classes > 0).any())
    return links + [ALL_LINKS] * (len(links) == 2)


def _are_of_link(classes: IntArray, link: str) -> BoolArray:
    return np.asarray(classes == 0 if link == NVLINK else classes > (0 if link == NIC else -1))


def _sides(model: PathModel, link: str) -> Iterator[Look]:
    ranks = np.arange(model.place.num_ranks)[:, None]
    others = partners(model.place.nodes, _are_of_link(model.classes, link), within=link == NVLINK)
    for cause, ends in ((Cause.INGRESS, (ranks, others)), (Cause.EGRESS, (others, ranks))):
        of_rank = functools.partial(side, model, cause, link)
        yield Look(cause, link, ends[0], ends[1], ranks.size, of_rank)


def _node_links(model: PathModel, nodes: IntArray) -> Iterator[Look]:
    place = model.place
    some = some_ranks(place.num_ranks)
    elsewhere = np.where(place.nodes[some] != np.arange(len(nodes))[:, None], some, -1)
    inside = np.repeat(nodes, some.size, axis=1)
    outside = np.tile(elsewhere, (1, nodes.shape[1]))

    def group(cause: Cause, node: int) -> PathGroup:
        here, there = np.flatnonzero(place.nodes == node), np.flatnonzero(place.nodes != node)
        ends = (here, there) if cause == Cause.DOWNLINK else (there, here)
        return _all_between(cause, node, *ends, place.num_ranks, here)

    for cause, ends in ((Cause.DOWNLINK, (inside, outside)), (Cause.UPLINK, (outside, inside))):
        yield Look(cause, NIC, ends[0], ends[1], place.num_ranks, functools.partial(group, cause))


def _node_pairs(model: PathModel, nodes: IntArray) -> Look:
    place = model.place
    pairs = [(a, b) for a in range(len(nodes)) for b in range(len(nodes)) if a != b]
    sources, receivers = np.array(pairs).T
    few = nodes if nodes.size <= ENOUGH_RANKS else nodes[:, :_OF_A_PAIR]

    def group(i: int) -> PathGroup:
        there, here = (np.flatnonzero(place.nodes == node) for node in pairs[i])
        # Of more than two nodes the others tell a clock.
        return _all_between(Cause.NODE_PAIR, pairs[i], here, there, place.num_ranks, here)

    return Look(
        Cause.NODE_PAIR,
        NIC,
        np.repeat(few[receivers], few.shape[1], axis=1),
        np.tile(few[sources], (1, few.shape[1])),
        place.num_ranks,
        group,
    )


def _rails(model: PathModel) -> Look:
    devices = np.array(model.place.devices)
    rails, some = members(devices), some_ranks(model.place.num_ranks)
    partners = np.where(devices[some] == np.arange(len(rails))[:, None], some, -1)

    def group(rail: int) -> PathGroup:
        of_rail = np.flatnonzero(devices == rail)
        group = _all_between(Cause.RAIL, rail, of_rail, of_rail, devices.size, NO_RANKS)
        apart = model.classes[group.receivers, group.sources] > 0
        return replace(group, receivers=group.receivers[apart], sources=group.sources[apart])

    return Look(
        Cause.RAIL,
        NIC,
        np.repeat(rails, some.size, axis=1),
        np.tile(partners, (1, rails.shape[1])),
        devices.size,
        group,
    )
