"""Rules about paths: sides of a rank, pairs of nodes, rails, single paths, everything at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from deep_ep.diagnose.analyze.baseline import History
from deep_ep.diagnose.analyze.finding import Found, Size, found_on_paths
from deep_ep.diagnose.analyze.path_causes import (
    ALL_LINKS,
    DOWNLINK,
    EGRESS,
    EITHER_LINK,
    EITHER_SIDE,
    INGRESS,
    NIC,
    NVLINK,
    RAIL,
    UPLINK,
    Group,
)
from deep_ep.diagnose.analyze.thresholds import JudgedKind
from deep_ep.diagnose.collect.rank_summary import MIN_SEEN
from deep_ep.diagnose.core.diagnosis import FloatArray
from deep_ep.diagnose.core.robust_stats import MAD_TO_SIGMA, lower_median, median_of, or_zero

# Clocks that are not known well are taken to be off by so many `clock_ns`.
_CLOCKS = 3.0
_SIDES = (INGRESS, EGRESS)
# So many single paths are named whatever the size of the group; then a share of all, but no more
# than anybody reads.
_FEW_CELLS = 4
_CELLS_SHARE = 0.03
_MOST_CELLS = 12
# Several of which more than this share have something in common are its doing.
_SHARED = 0.7
# A path is seen in this share of the operations, and a lasting cause shows this share of itself in the
# quickest quarter of them.
_SEEN_OFTEN = 1.0 / 3.0
_LASTING = 1.0 / 3.0
# A slow path finds ports less busy than others do; by how much is known to this share of its time.
_OF_USUAL = 0.015
# What a port's load explains is known to this factor.
_LOAD_MARGIN = 1.3
# A path stands out from the others of its rank where there are more than so many, itself included.
_MIN_PEERS = 3


def slow_paths(kind: JudgedKind, hot_ranks: set[int]) -> list[Found]:
    """Rails, links of nodes, sides, node pairs and single paths, where enough paths could be seen."""
    if kind.is_too_small_for_clocks:
        return []
    found = [
        _slow_group(kind, group)
        for group in kind.explained.groups
        if _is_named(kind, group) and not (group.cause in _SIDES and group.number in hot_ranks)
    ]
    cells = _slow_cells(kind)
    if len(cells) <= _most_cells(kind) and not _in_common(kind, cells):
        found += [_slow_cell(kind, *cell) for cell in cells]
    return found + [_slow_both_ways(kind, *cell) for cell in _slow_there_or_back(kind)]


def path_remarks(kind: JudgedKind) -> list[str]:
    """What single paths say together that none of them says alone."""
    if kind.is_too_small_for_clocks:
        return []
    cells = _slow_cells(kind)
    common = _in_common(kind, cells)
    if len(cells) <= _most_cells(kind) and not common:
        return []
    residual = kind.explained.residual
    most = max(float(residual[cell]) for cell in cells) / 1e3
    why = f"most of them {common}, whose other paths are not" if common else "no common cause found"
    return [
        f"{kind.e.operation}: {len(cells)} single paths are slow, by up to {most:,.0f} us; {why}"
    ]


def _in_common(kind: JudgedKind, cells: Sequence[tuple[int, int]]) -> str:
    """What most of several slow paths share although it is not slow as a whole; nothing if nothing."""
    if len(cells) < _FEW_CELLS:
        return ""
    place = kind.e.m.place
    receivers, sources = np.array(cells).T
    shared = [("into rank", receivers), ("out of rank", sources)]
    if 2 < place.num_nodes < place.num_ranks:
        devices = np.array(place.devices)
        same = np.where(devices[receivers] == devices[sources], devices[sources], -1)
        shared += [
            ("on rail", same),
            ("into node", place.nodes[receivers]),
            ("out of node", place.nodes[sources]),
        ]
    for what, numbers in shared:
        known = numbers[numbers >= 0]
        if known.size and np.bincount(known).max() > _SHARED * len(cells):
            return f"{what} {int(np.bincount(known).argmax())}"
    return ""


def _is_named(kind: JudgedKind, group: Group) -> bool:
    """Whether what paths show together is big, certain, and not a clock's doing."""
    e, limits = kind.e, kind.limits
    bar = max(
        kind.path_floors[0 if group.link == NVLINK else 1],
        kind.z_ranks * group.error,
        limits.spread * group.spread,
    )
    by_load = _LOAD_MARGIN * _by_load(kind, group)
    if not (group.effect > bar and min(group.effect, group.reading) > by_load):
        return False
    quickest = group.reading - median_of((e.m.path - e.m.path_low)[group.paths])
    if not quickest > _LASTING * group.reading:
        return False
    if group.cause in (RAIL, EITHER_SIDE, EITHER_LINK):
        return True
    # A clock is all it takes for one direction to look slow.
    known = median_of(e.paths.clock_error[group.paths])
    if math.isfinite(known):
        return group.reading > known + kind.z_ranks * group.error
    sides = group.cause in _SIDES and kind.clocks_unknown
    return not sides or bool(e.paths.both_sides[group.number])


def _by_load(kind: JudgedKind, group: Group) -> float:
    """What the tokens through the ports of its ranks explain at most, ns: as if these did nothing else.

    Up to some load the ports of the other ranks are what takes the time, so what a token costs here is
    not seen elsewhere.
    """
    e = kind.e
    counted = np.where(e.m.expected, e.m.tokens, 0.0)
    if group.link != ALL_LINKS:
        counted = np.where(e.paths.between == (group.link == NIC), counted, 0.0)
    into, out_of = np.nansum(counted, axis=1), np.nansum(counted, axis=0)
    usual = max(float(np.median(into)), float(np.median(out_of)))
    if not usual > 0:
        return 0.0
    receivers, sources = group.paths
    more = np.maximum(into[receivers], out_of[sources]) / usual - 1.0
    if not more.max() > kind.limits.load - 1.0:
        return 0.0
    return float(np.mean(np.maximum(more, 0.0))) * or_zero(median_of(e.paths.usual[group.paths]))


def _slow_group(kind: JudgedKind, group: Group) -> Found:
    e = kind.e
    subject, way, check = _subject_of(group)
    links = {NVLINK: " within the node", NIC: " between nodes", ALL_LINKS: ""}[group.link]
    evidence = {"over other paths us": group.effect / 1e3, "error us": group.error / 1e3}
    if group.cause in (*_SIDES, EITHER_SIDE):
        evidence["tokens over even share"] = float(e.load[group.number])
        # Within one node nothing else is there.
        links = links if e.m.place.num_nodes > 1 else ""
    else:
        links = ""
    return found_on_paths(
        kind,
        group.cause,
        Size(
            group.effect,
            math.hypot(group.error, group.unknown),
            group.count,
            group.spread,
            group.peers,
        ),
        group.paths,
        **subject,
        evidence=evidence,
        next_step=f"Every path{links} {way} is slow: check {check[group.link]}.",
    )


def _subject_of(group: Group) -> tuple[dict[str, Any], str, dict[str, str]]:
    """The fields of a verdict that name it, which paths it is on, and by kind of link what to check."""
    number = group.number
    if isinstance(number, tuple):
        source, destination = number
        return (
            {"nodes": number},
            f"from node {source} to node {destination}",
            {NIC: "the switches and routes between the two"},
        )
    if group.cause == RAIL:
        return (
            {"rail": number},
            f"between nodes among the devices number {number}",
            {NIC: "the rail switch that joins their NICs"},
        )
    ways = {
        INGRESS: f"into rank {number}",
        EGRESS: f"out of rank {number}",
        # Clocks hide which; what is taken out for the savings is one of the two.
        EITHER_SIDE: f"into rank {number}, or every path out of it,",
        UPLINK: f"from node {number} to other nodes",
        DOWNLINK: f"from other nodes to node {number}",
        EITHER_LINK: f"from other nodes to node {number}, or every path out of it,",
    }
    if group.cause in (UPLINK, DOWNLINK, EITHER_LINK):
        check = {
            NIC: "what joins this node to the fabric: its switch, its cables, its NICs' settings"
        }
        return {"node": number}, ways[group.cause], check
    check = {
        NVLINK: "its NVLink port and the NVSwitch behind it",
        NIC: "its NIC, its PCIe link and its switch port",
        ALL_LINKS: "its PCIe link, its NVLink port, its NIC and its switch port",
    }
    return {"rank": number}, ways[group.cause], check


def _slow_cells(kind: JudgedKind) -> list[tuple[int, int]]:
    """(receiver, source) of paths that are slow by themselves."""
    e, paths, limits = kind.e, kind.e.paths, kind.limits
    explained = kind.explained
    # Most paths are far from that, and large groups have many.
    at = np.nonzero(explained.residual > min(kind.path_floors))
    residual = explained.residual[at]
    noise = kind.z_paths * e.m.path_error[at]
    floor = np.where(paths.between[at], kind.path_floors[1], kind.path_floors[0])
    bar = np.fmax(floor, np.hypot(noise, limits.spread * explained.spread[at]))
    bar = bar + explained.uneven[at]
    # Of a rank of which one direction is not known the clock is not known so well.
    unsure = ~(paths.both_sides[at[0]] & paths.both_sides[at[1]])
    unknown = np.where(unsure, _CLOCKS * limits.clock_ns, 0.0)
    known = paths.clock_error[at] * (2.0 if kind.is_small else 1.0)
    bar = np.where(np.isfinite(known), np.fmax(bar, known + noise), bar + unknown)
    # Who waits for a slow path sees it.
    often = max(MIN_SEEN, _SEEN_OFTEN * e.num_operations)
    quickest = residual - (e.m.path[at] - e.m.path_low[at])
    slow = (residual > bar) & (e.m.path_count[at] >= often) & (quickest > _LASTING * residual)
    return [
        (dst, src)
        for dst, src in zip(at[0][slow].tolist(), at[1][slow].tolist())
        if _stands_out(kind, dst, src) and _stands_out(kind, src, dst, of_source=True)
    ]


def _stands_out(kind: JudgedKind, rank: int, other: int, *, of_source: bool = False) -> bool:
    """Whether a path is slow among the other paths into its receiver, out of its source."""
    residual, between = kind.explained.residual, kind.e.paths.between
    if of_source:
        residual = residual.T
    peers = residual[rank, (between[rank] == between[rank, other])]
    peers = peers[np.isfinite(peers)]
    if peers.size <= _MIN_PEERS:
        return True
    apart = MAD_TO_SIGMA * median_of(np.abs(peers - median_of(peers)))
    floor = kind.path_floors[int(between[rank, other])]
    over = float(residual[rank, other]) - median_of(peers)
    return over > max(floor, kind.limits.spread * apart)


def _most_cells(kind: JudgedKind) -> float:
    """More single paths than this are one cause, whatever it is."""
    return min(max(_FEW_CELLS, _CELLS_SHARE * float(kind.e.m.expected.sum())), _MOST_CELLS)


def _slow_cell(kind: JudgedKind, dst: int, src: int) -> Found:
    e, explained = kind.e, kind.explained
    effect, error = float(explained.residual[dst, src]), float(e.m.path_error[dst, src])
    clock = float(e.paths.clock[dst] - e.paths.clock[src])
    time = float(e.paths.time[dst, src]) - clock
    return found_on_paths(
        kind,
        "path",
        Size(
            effect,
            error,
            e.load.size**2,
            math.hypot(
                float(explained.spread[dst, src]), _OF_USUAL * float(e.paths.usual[dst, src])
            ),
            int((e.m.expected & (e.paths.between == e.paths.between[dst, src])).sum()),
        ),
        (dst, src),
        edge=(src, dst),
        evidence={
            "path us": time / 1e3,
            "usual path us": (time - effect) / 1e3,
            "error us": error / 1e3,
            "tokens": float(e.m.tokens[dst, src]),
            "operations seen": float(e.m.path_count[dst, src]),
        },
        next_step=f"Only this direction of this pair is slow: check link, NIC and route "
        f"from rank {src} to rank {dst} (error counters, speed, congestion).",
    )


def _slow_there_or_back(kind: JudgedKind) -> list[tuple[int, int]]:
    """(receiver, source) of pairs that are slow there and back together, where clocks hide which it is.

    Clocks cancel in the sum of both directions. The receiver of a slow path comes so late that it
    sees little else.
    """
    e, paths = kind.e, kind.e.paths
    if not paths.drifted:
        return []
    both = _there_and_back(kind)
    unsure = ~(paths.both_sides[:, None] & paths.both_sides[None, :])
    error = np.hypot(e.m.path_error, e.m.path_error.T)
    spread = math.sqrt(2.0) * kind.limits.spread * kind.explained.spread
    floor = np.where(paths.between, kind.path_floors[1], kind.path_floors[0])
    slow = unsure & (both > np.fmax(floor, np.hypot(kind.z_paths * error, spread)))
    seen = np.isfinite(paths.time).sum(axis=1)
    # More than one of a rank is not a path's doing.
    alone = slow.sum(axis=1) == 1
    return [
        (dst, src)
        for dst, src in np.argwhere(slow & alone[:, None]).tolist()
        if 2 * seen[dst] <= seen[src]
    ]


def _there_and_back(kind: JudgedKind) -> FloatArray:
    """[receiver, source]: what both directions together take above other pairs, ns; clocks cancel."""
    e, paths = kind.e, kind.e.paths
    over = np.where(e.m.path_seen & e.m.path_seen.T, paths.time - paths.usual, np.nan)
    both = over + over.T
    for link in (~paths.between, paths.between):
        both[link] -= or_zero(lower_median(both[link]))
    return np.asarray(both)


def _slow_both_ways(kind: JudgedKind, dst: int, src: int) -> Found:
    e = kind.e
    effect = float(_there_and_back(kind)[dst, src])
    error = math.hypot(float(e.m.path_error[dst, src]), float(e.m.path_error[src, dst]))
    spread = math.sqrt(2.0) * float(kind.explained.spread[dst, src])
    waited = e.m.wait_parts.sum(axis=0) / 1e3
    return found_on_paths(
        kind,
        "path or back",
        Size(effect, error, e.load.size**2, spread),
        (dst, src),
        edge=(src, dst),
        evidence={
            "there and back over usual us": effect / 1e3,
            "error us": error / 1e3,
            f"rank {dst} waits for rank {src} us": float(waited[dst, src]),
            f"rank {src} waits for rank {dst} us": float(waited[src, dst]),
        },
        next_step=f"The way from rank {src} to rank {dst} is slow, or the way back: clocks have "
        "drifted too far to tell. Measure them again, buffer.measure_clock_offsets() on all ranks.",
    )


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
                Size(shift, _mean_error(e.m.path_error[cells]), 2),
                cells,
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


def _mean_error(errors: FloatArray) -> float:
    known = errors[np.isfinite(errors)]
    return float(np.sqrt(np.mean(known**2) / known.size)) if known.size else float("nan")
