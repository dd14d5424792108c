"""Rules about paths: sides of a rank, pairs of nodes, rails, single paths, everything at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..collect.hops import NOTIFY
from ..collect.rank_summary import MIN_SEEN
from ..core.causes import Cause
from ..core.diagnosis import EvidenceKey, FloatArray
from ..core.robust_stats import MAD_TO_SIGMA, median_of, or_zero
from .back_pressure import NOBODY, UNEVEN
from .baseline import History
from .finding import Found, Named, Size, found_on_paths
from .path_causes import ALL_LINKS, NIC, NVLINK, Group
from .thresholds import JudgedKind

# Clocks that are not known well are taken to be off by so many `clock_ns`.
_CLOCKS = 3.0
_SIDES = (Cause.INGRESS, Cause.EGRESS)
# What joins a rank to others, by kind of link.
_LINKS = {NVLINK: " within the node", NIC: " between nodes", ALL_LINKS: ""}
_CHECKS = {
    NVLINK: "its NVLink port and the NVSwitch behind it",
    NIC: "its NIC, its PCIe link and its switch port",
    ALL_LINKS: "its PCIe link, its NVLink port, its NIC and its switch port",
}
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
# Another hop must show this share of what is slow on one.
_BORNE_OUT = 0.4


def slow_paths(
    kind: JudgedKind,
    hot_ranks: set[int],
    holding_up: Mapping[int, float] = NOBODY,
    others: Sequence[JudgedKind] = (),
) -> list[Found]:
    """Rails, links of nodes, sides, node pairs and single paths, where enough paths could be seen.

    Args:
        kind: of operation.
        hot_ranks: whose sides are slow for their tokens.
        holding_up: receivers that empty their queues slowly, and by how much they hold up others, ns. They
            see late what has come, and who waits for slots finds its port less busy than others do.
        others: hops on which rows take some of the same paths, which must bear out what is slow.
    """
    if kind.is_too_small_for_clocks:
        return []
    for_slots = UNEVEN * max(holding_up.values(), default=0.0)
    found = [
        _slow_group(kind, group)
        for group in kind.explained.groups
        if _is_named(kind, group)
        and not (group.cause in _SIDES and group.number in hot_ranks)
        and not (group.cause == Cause.INGRESS and group.number in holding_up)
        and (kind.e.operation == NOTIFY or group.effect > for_slots)
        and _is_borne_out(group.paths, group.effect, others)
    ]
    cells = [
        cell
        for cell in _slow_cells(kind)
        if cell[0] not in holding_up
        and not (kind.carries_rows and cell[0] in hot_ranks)
        and _is_borne_out(cell, float(kind.explained.residual[cell]), others)
    ]
    if len(cells) <= _most_cells(kind) and not _in_common(kind, cells):
        found += [_slow_cell(kind, *cell) for cell in cells]
    return found


def _is_borne_out(paths: Any, effect: float, others: Sequence[JudgedKind]) -> bool:
    """Whether paths are slow on another hop as well, or are seen on no other.

    How long a port has been busy when the last row comes to it depends on when its rank could begin, and
    that on others. A slow path is slow whatever came before.
    """
    seen = [median_of(np.atleast_1d(kind.e.paths.excess[paths])) for kind in others]
    known = [excess for excess in seen if math.isfinite(excess)]
    return not known or max(known) > _BORNE_OUT * effect


def without_parts(found: Sequence[Found]) -> list[Found]:
    """Of what is slow on the hops of an operation, not the paths of a NIC, link or side that is slow on
    another one: between two nodes rows take one path of a NIC, and notices all of them.
    """
    return [f for f in found if not any(_is_part(f, of) for of in found)]


def _is_part(found: Found, of: Found) -> bool:
    if found.verdict.edge is None or not found.kind.carries_rows:
        return False
    if of.gain.paths is None or of.verdict.edge is not None or of.verdict.cause == Cause.EVERYWHERE:
        return False
    src, dst = found.verdict.edge
    covered = np.zeros(of.kind.e.blame.shape, dtype=bool)
    covered[of.gain.paths] = True
    return bool(covered[dst, src]) and of.verdict.effect_us > _BORNE_OUT * found.verdict.effect_us


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
    either = group.cause in (Cause.INGRESS_OR_EGRESS, Cause.UPLINK_OR_DOWNLINK)
    bar = max(
        # Of both directions together there is more noise.
        kind.path_floors[0 if group.link == NVLINK else 1] * (math.sqrt(2.0) if either else 1.0),
        kind.z_ranks * group.error,
        limits.spread * group.spread,
    )
    by_load = _LOAD_MARGIN * _by_load(kind, group)
    if not (group.effect > bar and min(group.effect, group.reading) > by_load):
        return False
    quickest = group.reading - median_of((e.m.path - e.m.path_low)[group.paths])
    if not quickest > _LASTING * group.reading:
        return False
    if either or group.cause == Cause.RAIL:
        return True
    # A clock is all it takes for one direction to look slow.
    known = median_of(e.paths.clock_error[group.paths])
    error = kind.z_ranks * group.error
    if math.isfinite(known):
        return group.reading > known + error
    if e.paths.drifted and not group.reading > error:
        return False
    if not kind.clocks_unknown:
        return True
    # Between two nodes there is nothing to compare with but the way back.
    if group.cause == Cause.NODE_PAIR and e.m.place.num_nodes == 2:
        return False
    return group.cause not in _SIDES or bool(e.paths.both_sides[group.number])


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
    evidence: dict[EvidenceKey, float] = {
        "over_other_paths_us": group.effect / 1e3,
        "error_us": group.error / 1e3,
    }
    words = {}
    if group.cause in (*_SIDES, Cause.INGRESS_OR_EGRESS):
        evidence["tokens_over_even_share"] = float(e.load[group.number])
        # Within one node nothing else is there.
        links = _LINKS[group.link] if e.m.place.num_nodes > 1 else ""
        words = {"links": links, "check": _CHECKS[group.link]}
    return found_on_paths(
        kind,
        group.cause,
        _named(group),
        Size(
            group.effect,
            math.hypot(group.error, group.unknown),
            group.count,
            group.spread,
            group.peers,
        ),
        group.paths,
        evidence=evidence,
        words=words,
    )


def _named(group: Group) -> Named:
    number = group.number
    if isinstance(number, tuple):
        return Named(nodes=number)
    if group.cause == Cause.RAIL:
        return Named(rail=number)
    if group.cause in (Cause.UPLINK, Cause.DOWNLINK, Cause.UPLINK_OR_DOWNLINK):
        return Named(node=number)
    return Named(rank=number)


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
    time = float(e.paths.time[dst, src])
    is_known = e.paths.both_sides[dst] and e.paths.both_sides[src]
    return found_on_paths(
        kind,
        # Of a rank of which few paths are seen one way, the clock rests on the paths of the other.
        Cause.PATH if is_known or not e.paths.drifted else Cause.PATH_OR_BACK,
        Named(edge=(src, dst)),
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
        evidence={
            "path_us": time / 1e3,
            "usual_path_us": (time - effect) / 1e3,
            "error_us": error / 1e3,
            "tokens": float(e.m.tokens[dst, src]),
            "operations_seen": float(e.m.path_count[dst, src]),
        },
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
                Cause.EVERYWHERE,
                Named(),
                Size(shift, _mean_error(e.m.path_error[cells]), 2),
                cells,
                evidence={
                    "before_us": reference / 1e3,
                    "now_us": (reference + shift) / 1e3,
                    "windows_since": float(lasted),
                },
                words={"links": "within nodes" if link == 0 else "between nodes"},
            )
        )
    return found


def _finite_max(values: tuple[float, float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=0.0)


def _mean_error(errors: FloatArray) -> float:
    known = errors[np.isfinite(errors)]
    return float(np.sqrt(np.mean(known**2) / known.size)) if known.size else float("nan")
