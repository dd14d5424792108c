"""Verdicts on paths: which of the causes that were found are big enough, and not the doing of anything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..collect.hops import NOTIFY, ROW_HOPS
from ..core.causes import Cause
from ..core.diagnosis import EvidenceKey
from ..core.robust_stats import median_of, or_zero
from .back_pressure import NOBODY, UNEVEN
from .baseline import History
from .finding import Found, Named, Size, found_on_paths
from .judged_kind import JudgedKind
from .judged_paths import LEAST_SHARE, JudgedPaths
from .path_causes import PathCause
from .path_groups import ALL_LINKS, NIC, NVLINK
from .path_model import MOSTLY_BUSY, OTHERWISE_BUSY
from .thresholds import BORNE_OUT, MOST_READ

_SIDES = (Cause.INGRESS, Cause.EGRESS, Cause.INGRESS_OR_EGRESS)
# What joins a rank to others, by kind of link.
_LINKS = {NVLINK: " within the node", NIC: " between nodes", ALL_LINKS: ""}
_CHECKS = {
    NVLINK: "its NVLink port and the NVSwitch behind it",
    NIC: "its NIC, its PCIe link and its switch port",
    ALL_LINKS: "its PCIe link, its NVLink port, its NIC and its switch port",
}
# Loads that differ may make this share of it of what paths take. Effects exceed their errors so many times.
_BY_LOAD, _CERTAIN = 0.7, 2.5
# What a slow port adds to its paths differs by this share of it: they queue there.
_UNEQUAL = 0.2


def slow_paths(
    judged: JudgedPaths,
    kinds: Sequence[JudgedKind],
    hot_ranks: set[int],
    holding_up: Mapping[int, float] = NOBODY,
) -> tuple[list[Found], list[str]]:
    """Verdicts, and remarks on what single paths say together that none of them says alone.

    Args:
        judged: the paths.
        kinds: of operation, as there.
        hot_ranks: whose sides are slow for their tokens.
        holding_up: receivers that empty their queues slowly, and by how much they hold up others, ns. They
            see late what has come, and who waits for slots finds its port less busy than others do.
    """
    for_slots = UNEVEN * max(holding_up.values(), default=0.0)
    found, remarks = [], []
    for k, kind in enumerate(kinds):
        cells = []
        for cause in judged.causes:
            if not _is_worth_it(judged, kind, k, cause):
                continue
            if cause.is_single:
                _, dst = cause.group.edge
                if dst in holding_up or (kind.carries_rows and dst in hot_ranks):
                    continue
                cells.append(cause)
                continue
            if cause.cause in _SIDES and cause.group.number in hot_ranks:
                continue
            if cause.cause == Cause.INGRESS and cause.group.number in holding_up:
                continue
            if kind.e.operation == NOTIFY or cause.effect[k] > for_slots:
                found.append(_found(judged, kind, k, cause))
        if len(cells) <= MOST_READ:
            found += [_found(judged, kind, k, cause) for cause in cells]
        else:
            most = max(float(cause.effect[k]) for cause in cells) / 1e3
            remarks.append(
                f"{kind.e.operation}: {len(cells)} single paths are slow, by up to {most:,.0f} us; no "
                "common cause found"
            )
    return found, remarks


def _is_worth_it(judged: JudgedPaths, kind: JudgedKind, k: int, cause: PathCause) -> bool:
    """Whether a cause is big in this kind, unlike healthy groups, and on other hops as well."""
    unlike = kind.limits.spread * cause.spread[k]
    if _is_told_by_time(judged, cause):
        error = _own_error(kind, k, cause)
        return bool(cause.effect[k] > max(kind.floor, unlike, _CERTAIN * error))
    paths = (cause.group.receivers, cause.group.sources)
    bar = max(
        kind.floor,
        unlike,
        _CERTAIN * _size(judged, kind, k, cause).error,
        _CERTAIN * or_zero(median_of(judged.model.noise[k][paths])),
        _by_load(judged, k, cause),
        _UNEQUAL * _in_common(judged, k, cause),
    )
    return bool(cause.effect[k] > bar) and _is_borne_out(judged, k, cause)


def _by_load(judged: JudgedPaths, k: int, cause: PathCause) -> float:
    """What loads that differ may make of the paths of a cause, ns."""
    by_load = judged.model.by_load[k, cause.group.receivers, cause.group.sources]
    return _BY_LOAD * or_zero(median_of(by_load))


def _in_common(judged: JudgedPaths, k: int, cause: PathCause) -> float:
    """What larger causes add to a single path, ns."""
    larger = [one for one in judged.causes if cause.is_single and not one.is_single]
    path = cause.group.paths
    return sum(float(one.effect[k]) for one in larger if np.isin(path, one.group.paths).all())


def _is_told_by_time(judged: JudgedPaths, cause: PathCause) -> bool:
    """Whether paths are compared with themselves at other times only, so that what they differ by for good does not matter.

    Those of a rank are: rails are congested now and then, and where each rank is a node, all paths are one rail.
    """
    place = judged.model.place
    return cause.at_times and cause.cause in _SIDES and place.num_nodes < place.num_ranks


def _is_borne_out(judged: JudgedPaths, k: int, cause: PathCause) -> bool:
    """Whether paths are slow in another kind of operation as well, or are seen in no other.

    How long a port has been busy when the last row comes to it depends on when its rank could begin, and
    that on others. A slow path is slow whatever came before. Of a normal operation the hops tell that carry rows.
    """
    hops = [o for o, name in enumerate(judged.operations) if name in ROW_HOPS]
    others = hops or list(range(len(judged.operations)))
    if hops and k not in hops:
        return True
    paths = (cause.group.receivers, cause.group.sources)
    shown = [
        median_of(judged.model.rest[o][paths]) + cause.effect[o] - _by_load(judged, o, cause)
        for o in others
        if o != k
    ]
    known = [value for value in shown if math.isfinite(value)]
    return not known or max(known) > BORNE_OUT * cause.effect[k]


def _own_error(kind: JudgedKind, k: int, cause: PathCause) -> float:
    """Of its mean over all operations, ns: noise, and that of some operations nobody knows whether they were in a burst.

    The data of those was there at the first look.
    """
    paths = (cause.group.receivers, cause.group.sources)
    effect, share = float(cause.effect[k]), float(cause.share[k])
    seen = max(or_zero(median_of(kind.e.m.path_count[paths])), 1.0)
    hidden = max(1.0 - seen / kind.e.m.num_operations, 0.0)
    unknown = effect * math.sqrt(hidden * (1.0 - share) / (max(share, LEAST_SHARE) * seen))
    return math.hypot(float(cause.error[k]), unknown)


def _size(judged: JudgedPaths, kind: JudgedKind, k: int, cause: PathCause) -> Size:
    usual = or_zero(median_of(kind.e.paths.usual[cause.group.receivers, cause.group.sources]))
    effect = float(cause.effect[k])
    takes = usual + effect
    return Size(
        effect,
        math.hypot(_own_error(kind, k, cause), MOSTLY_BUSY * takes),
        judged.model.place.num_ranks,
        math.hypot(float(cause.spread[k]), OTHERWISE_BUSY * takes),
    )


def _found(judged: JudgedPaths, kind: JudgedKind, k: int, cause: PathCause) -> Found:
    e, group, size = kind.e, cause.group, _size(judged, kind, k, cause)
    number, words = group.number, {}
    error: dict[EvidenceKey, float] = {"error_us": size.error / 1e3}
    evidence: dict[EvidenceKey, float] = {"over_other_paths_us": size.effect / 1e3, **error}
    if cause.is_single:
        src, dst = group.edge
        time, named = float(e.paths.time[dst, src]), Named(edge=group.edge)
        evidence = {
            "path_us": time / 1e3,
            "usual_path_us": (time - size.effect) / 1e3,
            **error,
            "tokens": float(e.m.tokens[dst, src]),
            "operations_seen": float(e.m.path_count[dst, src]),
        }
    elif isinstance(number, tuple):
        named = Named(nodes=number)
    elif cause.cause == Cause.RAIL:
        named = Named(rail=number)
    elif cause.cause in _SIDES:
        named = Named(rank=number)
        evidence["tokens_over_even_share"] = float(e.load[number])
        # Within one node nothing else is there.
        links = _LINKS[group.link] if e.m.place.num_nodes > 1 else ""
        words = {"links": links, "check": _CHECKS[group.link]}
    else:
        named = Named(node=number)
    return found_on_paths(
        kind,
        cause.cause,
        named,
        size,
        (group.receivers, group.sources),
        evidence=evidence,
        words=words,
        seen_in=float(cause.share[k]) if cause.at_times else math.nan,
    )


def slower_than_before(kind: JudgedKind, history: History) -> list[Found]:
    """What slows all paths alike, which shows against the group's own past only."""
    e = kind.e
    found = []
    for link, reference, shift, lasted in history.shifts(e, kind.floor):
        same_node = e.m.place.nodes[:, None] == e.m.place.nodes[None, :]
        cells = same_node if link == 0 else ~same_node
        errors = e.m.path_error[cells]
        known = errors[np.isfinite(errors)]
        error = float(np.sqrt(np.mean(known**2) / known.size)) if known.size else math.nan
        found.append(
            found_on_paths(
                kind,
                Cause.EVERYWHERE,
                Named(),
                Size(shift, error, 2),
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
