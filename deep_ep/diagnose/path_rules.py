"""Rules about paths: sides of a rank, pairs of nodes, rails, single paths, everything at once."""

from __future__ import annotations

import math

import numpy as np

from deep_ep.diagnose.found import Found, found_on_paths
from deep_ep.diagnose.history import History
from deep_ep.diagnose.paths import MIN_RANKS_TO_SPLIT_PATHS
from deep_ep.diagnose.stats import healthy
from deep_ep.diagnose.summary import MIN_SEEN
from deep_ep.diagnose.thresholds import JudgedKind

# Clocks that are not known well are taken to be off by so many `clock_ns`.
_CLOCKS = 3.0


def slow_paths(kind: JudgedKind, hot_ranks: set[int]) -> list[Found]:
    """Sides, node pairs, rails and single paths, where enough paths could be seen."""
    e, paths, limits = kind.e, kind.e.paths, kind.limits
    if kind.is_too_small_for_clocks:
        return []
    seen = np.isfinite(paths.time) | e.m.path_hidden
    if e.load.size < MIN_RANKS_TO_SPLIT_PATHS:
        # One fast path is all the others are compared with, so its time must be known.
        seen = np.isfinite(paths.time)
    if seen.sum() <= e.m.expected.sum() / 2:
        # Nothing to compare the few paths with that could be seen.
        return []
    floor = max(kind.floor, limits.path_fraction * float(np.median(paths.usual[seen])))
    found = []
    for cause, values, others in (
        ("ingress", paths.ingress, paths.egress),
        ("egress", paths.egress, paths.ingress),
    ):
        bar = max(floor, limits.spread * healthy(values)[1])
        # A clock that drifted is all it takes for one direction to look slow.
        certain = paths.both_sides | (limits.clock_ns == 0)
        for rank in np.flatnonzero((values > bar) & certain).tolist():
            # What is left of a wrong clock shows with opposite signs in row and column.
            if rank not in hot_ranks and values[rank] + others[rank] > bar:
                found.append(_slow_side(kind, cause, rank, float(values[rank])))
    bars = np.where(paths.both_sides, max(floor, limits.spread * healthy(paths.either)[1]), np.inf)
    for rank in np.flatnonzero(paths.either > bars).tolist():
        if rank not in hot_ranks:
            found.append(_slow_side(kind, "ingress or egress", rank, float(paths.either[rank])))
    found += _slow_groups(kind, floor)
    return found + _slow_cells(kind, floor)


def _slow_side(kind: JudgedKind, cause: str, rank: int, effect: float) -> Found:
    e = kind.e
    paths, way = {
        "ingress": ((rank, slice(None)), f"into rank {rank}"),
        "egress": ((slice(None), rank), f"out of rank {rank}"),
        # Clocks hide which; what is taken out for the savings is one of the two.
        "ingress or egress": ((rank, slice(None)), f"into rank {rank}, or every path out of it,"),
    }[cause]
    return found_on_paths(
        kind,
        cause,
        effect,
        paths,
        2 * e.load.size,
        rank=rank,
        evidence={
            "all paths over median us": effect / 1e3,
            "tokens over even share": float(e.load[rank]),
        },
        next_step=f"Every path {way} is slow: check its NIC, its PCIe link and its switch port.",
    )


def _slow_groups(kind: JudgedKind, floor: float) -> list[Found]:
    """Pairs of nodes and rails of which all paths are slow."""
    e, paths, limits = kind.e, kind.e.paths, kind.limits
    place = e.m.place
    found = []
    bar = max(floor, limits.spread * healthy(paths.node_pairs)[1])
    for dst, src in np.argwhere(paths.node_pairs > bar).tolist():
        pairs = np.ix_(np.flatnonzero(place.nodes == dst), np.flatnonzero(place.nodes == src))
        effect = float(paths.node_pairs[dst, src])
        found.append(
            found_on_paths(
                kind,
                "node pair",
                effect,
                pairs,
                place.num_nodes**2,
                nodes=(src, dst),
                evidence={"all paths between them over median us": effect / 1e3},
                next_step=f"Every path from node {src} to node {dst} is slow, others of both are "
                "not: check the switches and routes between the two.",
            )
        )
    devices = np.array(place.devices)
    bar = max(floor, limits.spread * healthy(paths.rails)[1])
    for rail in np.flatnonzero(paths.rails > bar).tolist():
        ranks = np.flatnonzero(devices == rail)
        effect = float(paths.rails[rail])
        found.append(
            found_on_paths(
                kind,
                "rail",
                effect,
                np.ix_(ranks, ranks),
                paths.rails.size,
                rail=rail,
                evidence={"all paths of this rail over median us": effect / 1e3},
                next_step=f"The paths between nodes among the devices number {rail} are slow, on "
                "all nodes: check the rail switch that joins their NICs.",
            )
        )
    return found


def _slow_cells(kind: JudgedKind, floor: float) -> list[Found]:
    e, paths, limits = kind.e, kind.e.paths, kind.limits
    found = []
    # Of a rank of which one direction is not known the clock is not known so well.
    unsure = ~(paths.both_sides[:, None] & paths.both_sides[None, :])
    bar = floor + np.where(unsure, _CLOCKS * limits.clock_ns, 0.0)
    for dst, src in np.argwhere(paths.excess > bar).tolist():
        effect, error = float(paths.excess[dst, src]), float(e.m.path_error[dst, src])
        usual = float(e.m.path[dst, src]) - effect
        # Most operations show it when even the quickest quarter does.
        mostly = e.m.path_count[dst, src] >= MIN_SEEN and e.m.path_low[dst, src] > usual
        if not mostly or effect <= math.hypot(kind.z_paths * error, limits.spread * paths.spread):
            continue
        found.append(
            found_on_paths(
                kind,
                "path",
                effect,
                (dst, src),
                paths.excess.size,
                paths.spread,
                edge=(src, dst),
                evidence={
                    "path us": float(paths.time[dst, src]) / 1e3,
                    "usual path us": float(paths.usual[dst, src]) / 1e3,
                    "error us": error / 1e3,
                    "tokens": float(e.m.tokens[dst, src]),
                    "operations seen": float(e.m.path_count[dst, src]),
                },
                next_step=f"Only this direction of this pair is slow: check link, NIC and route "
                f"from rank {src} to rank {dst} (error counters, speed, congestion).",
            )
        )
    return found


def slower_than_before(kind: JudgedKind, history: History) -> list[Found]:
    """What slows all paths alike, which shows against the group's own past only."""
    e = kind.e
    found = []
    for link, reference, shift, lasted in history.shifts(
        e, max(kind.floor, kind.limits.path_fraction * _finite_max(e.paths.level))
    ):
        same_node = e.m.place.nodes[:, None] == e.m.place.nodes[None, :]
        cells = same_node if link == 0 else ~same_node
        found.append(
            found_on_paths(
                kind,
                "everywhere",
                shift,
                cells,
                2,
                evidence={
                    "before us": reference / 1e3,
                    "now us": (reference + shift) / 1e3,
                    "windows since": float(lasted),
                },
                next_step=f"All paths {'within nodes' if link == 0 else 'between nodes'} are slower "
                "than they were: look for another job on the fabric, or a changed clock or setting.",
            )
        )
    return found


def _finite_max(values: tuple[float, float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=0.0)
