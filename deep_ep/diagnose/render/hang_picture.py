"""The wait-for graph as an SVG picture. Ranks that wait for the same are one node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.etree import ElementTree

from ..core.package import HangVerdict, ranks_text
from .hang_views import folded_edges, title_of
from .page_parts import Element, add

_WIDTH, _HEIGHT, _RADIUS = 760, 440, 150
_NODE_HEIGHT = 26
# Letters of a node; what is longer is counted.
_LONGEST = 24
# Where every rank waits for another set of ranks, more arrows only make it black.
_MOST_ARROWS, _MOST_LABELS = 400, 30
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2026;text-anchor:middle;"
    "paint-order:stroke;stroke:#ffffff;stroke-width:4px}.name{stroke:none}"
    ".why{fill:#b3261e;font-weight:600}.node{fill:#f4f5f8;stroke:#5b6270}"
    ".accused{fill:#fbdcd9;stroke:#b3261e;stroke-width:2.5}"
    ".arrow{stroke:#5b6270;fill:none}.lost{stroke:#b3261e;stroke-width:2.5;stroke-dasharray:6 4;fill:none}"
    "#tip{fill:#5b6270}.paper{fill:#ffffff}"
)


@dataclass(frozen=True)
class _Node:
    """An ellipse."""

    ranks: tuple[int, ...]
    name: str
    x: float
    y: float
    half_width: float

    def reach(self, x: float, y: float) -> float:
        """From its middle to its edge in a direction of length 1."""
        return 1 / math.hypot(x / self.half_width, y / _NODE_HEIGHT)


def picture(verdict: HangVerdict) -> Element:
    """The root of an SVG document, which needs nothing else."""
    svg = Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
    )
    add(svg, "title", "Who waits for whom")
    add(svg, "style", STYLE)
    tip = {
        "viewBox": "0 0 8 8",
        "refX": "8",
        "refY": "4",
        "orient": "auto",
        "markerUnits": "userSpaceOnUse",
    }
    marker = add(add(svg, "defs"), "marker", id="end", markerWidth="10", markerHeight="10", **tip)
    add(marker, "path", d="M0 0L8 4L0 8z", id="tip")
    add(svg, "rect", width=str(_WIDTH), height=str(_HEIGHT), **{"class": "paper"})
    nodes = _nodes(verdict)
    places = {ranks: _place(ranks, index, len(nodes)) for index, ranks in enumerate(nodes)}
    node_of = {rank: ranks for ranks in nodes for rank in ranks}
    arrows = {
        (node_of[edge.waiter], node_of[edge.owed]): edge.what
        for edge in verdict.edges
        if edge.owed in node_of and node_of[edge.waiter] != node_of[edge.owed]
    }
    for (waiter, owed), what in sorted(arrows.items())[:_MOST_ARROWS]:
        label = what if len(arrows) < _MOST_LABELS else ""
        _add_arrow(svg, places[waiter], places[owed], "arrow", label)
    lost = [path for cause in verdict.causes for path in cause.paths if path[0] != path[1]]
    for source, destination in lost[:_MOST_ARROWS]:
        name = "lost" if len(lost) < _MOST_LABELS else ""
        _add_arrow(svg, places[node_of[source]], places[node_of[destination]], "lost", name)
    accused = {rank: title_of(cause) for cause in verdict.causes for rank in cause.ranks}
    for node in places.values():
        _add_node(svg, node, accused.get(node.ranks[0], ""))
    if len(arrows) > _MOST_ARROWS:
        more = f"{len(arrows) - _MOST_ARROWS} more arrows are left out"
        add(svg, "text", more, x=str(_WIDTH // 2), y=str(_HEIGHT - 8))
    return svg


def svg_text(verdict: HangVerdict) -> str:
    """The same as text of a file."""
    return ElementTree.tostring(picture(verdict), encoding="unicode") + "\n"


def _nodes(verdict: HangVerdict) -> list[tuple[int, ...]]:
    """Ranks that wait for the same and are accused of the same, or of nothing, together."""
    waits = {
        waiter: index for index, (ranks, _) in enumerate(folded_edges(verdict)) for waiter in ranks
    }
    accused = {rank: index for index, cause in enumerate(verdict.causes) for rank in cause.ranks}
    ends = {rank: rank for cause in verdict.causes for path in cause.paths for rank in path}
    circles = {rank: rank for cause in verdict.causes for rank in cause.circle}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(verdict.num_ranks):
        key = tuple(where.get(rank, -1) for where in (waits, accused, ends, circles))
        groups.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _place(ranks: tuple[int, ...], index: int, count: int) -> _Node:
    """Its place on a circle; a node alone is in the middle."""
    angle = 2 * math.pi * index / count - math.pi / 2
    wide, high = (1.6 * _RADIUS, _RADIUS) if count > 1 else (0.0, 0.0)
    name = ranks_text(ranks)
    name = name if len(name) <= _LONGEST else f"{len(ranks)} ranks"
    x, y = _WIDTH / 2 + wide * math.cos(angle), _HEIGHT / 2 - 8 + high * math.sin(angle)
    return _Node(ranks, name, x, y, max(30.0, 3.8 * len(name) + 12))


def _add_node(svg: Element, node: _Node, why: str) -> None:
    shape = {"rx": f"{node.half_width:.0f}", "ry": str(_NODE_HEIGHT)}
    at = {"x": f"{node.x:.0f}", "y": f"{node.y + 4:.0f}", "class": "name"}
    ellipse = add(
        svg,
        "ellipse",
        cx=f"{node.x:.0f}",
        cy=f"{node.y:.0f}",
        **shape,
        **{"class": "node accused" if why else "node"},
    )
    add(ellipse, "title", ranks_text(node.ranks))
    add(svg, "text", node.name, **at)
    if why:
        below = f"{node.y + _NODE_HEIGHT + 16:.0f}"
        add(svg, "text", why, x=f"{node.x:.0f}", y=below, **{"class": "why"})


def _add_arrow(svg: Element, begin: _Node, end: _Node, kind: str, label: str) -> None:
    """From the edge of one node to that of the other, bent so that the way back is another one."""
    dx, dy = end.x - begin.x, end.y - begin.y
    length = math.hypot(dx, dy)
    x, y = dx / length, dy / length
    out, into = begin.reach(x, y) + 2, end.reach(x, y) + 4
    first = begin.x + out * x - 6 * y, begin.y + out * y + 6 * x
    last = end.x - into * x - 6 * y, end.y - into * y + 6 * x
    middle = (begin.x + end.x) / 2 - 24 * y, (begin.y + end.y) / 2 + 24 * x
    way = f"M{_point(first)}Q{_point(middle)} {_point(last)}"
    add(svg, "path", d=way, **{"class": kind, "marker-end": "url(#end)"})
    if label:
        add(svg, "text", label, x=f"{middle[0]:.0f}", y=f"{middle[1]:.0f}")


def _point(at: tuple[float, float]) -> str:
    return f"{at[0]:.1f} {at[1]:.1f}"
