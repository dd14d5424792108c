"""Directed graphs of ranks: what can be reached, and circles that no edge leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# By vertex, where its edges lead. Vertices without edges may be left out.
Graph = Mapping[int, Iterable[int]]


def reachable(graph: Graph, sources: Iterable[int]) -> set[int]:
    """All vertices to which a way leads from one of `sources`, these included."""
    found = set(sources)
    left = list(found)
    while left:
        new = set(graph.get(left.pop(), ())) - found
        found |= new
        left.extend(new)
    return found


def reaching(graph: Graph, targets: Iterable[int]) -> set[int]:
    """All vertices from which a way leads to one of `targets`, these included."""
    return reachable(_reversed(graph), targets)


def attracting_components(graph: Graph) -> list[tuple[int, ...]]:
    """Strongly connected components that no edge leaves, each ascending."""
    backwards = _reversed(graph)
    left, found = {*graph, *backwards}, []
    while left:
        vertex = min(left)
        while True:
            ahead, behind = reachable(graph, [vertex]), reachable(backwards, [vertex])
            if ahead <= behind:
                break
            # Further on, and with few edges probably near the end.
            vertex = min(ahead - behind, key=lambda v: len(set(graph.get(v, ()))))
        found.append(tuple(sorted(ahead)))
        left -= behind
    return found


def _reversed(graph: Graph) -> dict[int, set[int]]:
    backwards: dict[int, set[int]] = {}
    for vertex, edges in graph.items():
        for target in edges:
            backwards.setdefault(target, set()).add(vertex)
    return backwards
