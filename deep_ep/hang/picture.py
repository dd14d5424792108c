"""The wait-for graph laid out: nodes on a circle, arrows between them. Ranks that wait for the same are one node."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deep_ep.errors import ranks_text
from deep_ep.hang import wording
from deep_ep.hang.cause import HangVerdict

WIDTH, HEIGHT, NODE_HEIGHT = 760, 440, 26
_RADIUS = 150
# Letters of a node; what is longer is counted.
_LONGEST = 24
# Where every rank waits for another set of ranks, more arrows only make it black.
_MOST_ARROWS, _MOST_LABELS = 400, 30


@dataclass(frozen=True)
class Node:
    """An ellipse.

    Attributes:
        ranks: which it stands for, in words.
        name: the same, or their number where that is too long.
        why: what they are accused of, or nothing.
        at: its middle, x + iy.
        half_width: of it; half its height is `NODE_HEIGHT`.
    """

    ranks: str
    name: str
    why: str
    at: complex
    half_width: float

    def reach(self, way: complex) -> float:
        """From its middle to its edge in a direction of length 1."""
        return 1 / math.hypot(way.real / self.half_width, way.imag / NODE_HEIGHT)


@dataclass(frozen=True)
class Arrow:
    """A curve from the edge of one node to that of another.

    Attributes:
        kind: "arrow" of who waits, "lost" of what has not come.
        label: what is waited for; nothing where there are many.
        first, middle, last: points of the quadratic curve, x + iy; the label is at its middle.
    """

    kind: str
    label: str
    first: complex
    middle: complex
    last: complex


@dataclass(frozen=True)
class Picture:
    """What picture.svg draws; arrows that are left out are counted."""

    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]
    left_out: int


def picture(verdict: HangVerdict) -> Picture:
    """The graph of a verdict."""
    groups = _alike(verdict)
    accused = {rank: wording.TITLES[cause.kind] for cause in verdict.causes for rank in cause.ranks}
    nodes = [
        _node(ranks, accused.get(ranks[0], ""), index, len(groups))
        for index, ranks in enumerate(groups)
    ]
    node_of = {rank: index for index, ranks in enumerate(groups) for rank in ranks}
    waits: dict[tuple[int, int], str] = {
        (node_of[waiter], node_of[rank]): edge.what
        for edge in verdict.edges
        for waiter in edge.waiters
        for rank in edge.owed
        if rank in node_of and node_of[waiter] != node_of[rank]
    }
    lost = [
        ((node_of[source], node_of[destination]), "lost")
        for cause in verdict.causes
        for source, destination in cause.paths
        if source != destination
    ]
    arrows = *_arrows("arrow", sorted(waits.items()), nodes), *_arrows("lost", lost, nodes)
    return Picture(tuple(nodes), arrows, len(waits) + len(lost) - len(arrows))


def _alike(verdict: HangVerdict) -> list[list[int]]:
    """Ranks that wait for the same and are accused of the same, or of nothing, together."""
    waits: dict[int, list[int]] = {}
    for index, edge in enumerate(verdict.edges):
        for waiter in edge.waiters:
            waits.setdefault(waiter, []).append(index)
    accused = {rank: index for index, cause in enumerate(verdict.causes) for rank in cause.ranks}
    ends = {rank: rank for cause in verdict.causes for path in cause.paths for rank in path}
    circles = {
        rank: rank for cause in verdict.causes if cause.kind == "circle" for rank in cause.ranks
    }
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(verdict.num_ranks):
        alone = (where.get(rank, -1) for where in (accused, ends, circles))
        groups.setdefault((*alone, *waits.get(rank, ())), []).append(rank)
    return list(groups.values())


def _node(ranks: list[int], why: str, index: int, count: int) -> Node:
    """On an ellipse around the middle; a node alone is there."""
    around = cmath.rect(_RADIUS if count > 1 else 0.0, 2 * math.pi * index / count - math.pi / 2)
    at = complex(WIDTH / 2 + 1.6 * around.real, HEIGHT / 2 - 8 + around.imag)
    text = ranks_text(ranks)
    name = text if len(text) <= _LONGEST else f"{len(ranks)} ranks"
    return Node(text, name, why, at, max(30.0, 3.8 * len(name) + 12))


def _arrows(
    kind: str, labels: Sequence[tuple[tuple[int, int], str]], nodes: Sequence[Node]
) -> Iterator[Arrow]:
    """Between pairs of nodes; bent, so that the way back is another one."""
    for (begin, end), label in labels[:_MOST_ARROWS]:
        source, target = nodes[begin], nodes[end]
        way = (target.at - source.at) / abs(target.at - source.at)
        aside = 1j * way
        first = source.at + (source.reach(way) + 2) * way + 6 * aside
        last = target.at - (target.reach(way) + 4) * way + 6 * aside
        middle = (source.at + target.at) / 2 + 24 * aside
        yield Arrow(kind, label if len(labels) < _MOST_LABELS else "", first, middle, last)
