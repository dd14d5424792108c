"""Directed graphs of ranks: their strongly connected components, and a circle within one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

Graph = Mapping[int, Iterable[int]]


def components(graph: Graph) -> list[tuple[int, ...]]:
    """Strongly connected components by Tarjan's method, each ascending; one before those that lead to it.

    Args:
        graph: by vertex, where its edges lead. Vertices without edges may be left out.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[tuple[int, ...]] = []
    for root in sorted(graph):
        work = [] if root in index else [(root, iter(sorted(graph[root])))]
        while work:
            vertex, edges = work[-1]
            if vertex not in index:
                index[vertex] = low[vertex] = len(index)
                stack.append(vertex)
                on_stack.add(vertex)
            target = next(edges, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[vertex])
                if low[vertex] == index[vertex]:
                    at = stack.index(vertex)
                    found.append(tuple(sorted(stack[at:])))
                    on_stack.difference_update(stack[at:])
                    del stack[at:]
            elif target not in index:
                work.append((target, iter(sorted(graph.get(target, ())))))
            elif target in on_stack:
                low[vertex] = min(low[vertex], index[target])
    return found


def shortest_path(graph: Graph, source: int, destination: int) -> tuple[int, ...]:
    """The vertices from one to the other, both included; empty if there is no way."""
    before: dict[int, int] = {source: source}
    queue = deque([source])
    while queue and destination not in before:
        vertex = queue.popleft()
        for target in sorted(graph.get(vertex, ())):
            if target not in before:
                before[target] = vertex
                queue.append(target)
    if destination not in before:
        return ()
    way = [destination]
    while way[-1] != source:
        way.append(before[way[-1]])
    return tuple(reversed(way))


def reaching(graph: Graph, targets: Iterable[int]) -> set[int]:
    """All vertices from which a way leads to one of `targets`, these included."""
    backwards: dict[int, set[int]] = {}
    for vertex, edges in graph.items():
        for target in edges:
            backwards.setdefault(target, set()).add(vertex)
    found = set(targets)
    left = list(found)
    while left:
        for vertex in backwards.get(left.pop(), ()):
            if vertex not in found:
                found.add(vertex)
                left.append(vertex)
    return found
