"""Verdicts on paths: which of the causes that were found are big enough, and not the doing of anything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..collect.group_matrices import Matrices
from ..collect.hops import NOTIFY, ROW_HOPS
from ..core.causes import Cause
from ..core.diagnosis import EvidenceKey, FloatArray
from ..core.robust_stats import healthy, median, median_of, or_zero, quantile
from .back_pressure import NOBODY, UNEVEN
from .baseline import History
from .finding import Found, Named, Size, found_on_paths
from .path_causes import Contest, PathCause
from .path_groups import ALL_LINKS, NIC, NVLINK
from .path_model import (
    MIN_RANKS_TO_SPLIT_PATHS,
    MOSTLY_BUSY,
    OTHERWISE_BUSY,
    PathModel,
    fit_paths,
    flat,
)
from .thresholds import BORNE_OUT, CLOCKS_KNOWN_NS, MOST_READ, JudgedKind, Thresholds

_SIDES = (Cause.INGRESS, Cause.EGRESS, Cause.INGRESS_OR_EGRESS)
_SINGLE = (Cause.PATH, Cause.PATH_OR_BACK)
# What joins a rank to others, by kind of link.
_LINKS = {NVLINK: " within the node", NIC: " between nodes", ALL_LINKS: ""}
_CHECKS = {
    NVLINK: "its NVLink port and the NVSwitch behind it",
    NIC: "its NIC, its PCIe link and its switch port",
    ALL_LINKS: "its PCIe link, its NVLink port, its NIC and its switch port",
}
# Bursts are in more operations.
_LEAST_SHARE = 0.05
# Clocks that are off by more are said.
_CLOCKS_OFF_NS = 40_000.0
# Loads that differ may make this share of it of what paths take. Effects exceed their errors so many times.
_BY_LOAD, _CERTAIN = 0.7, 2.5


@dataclass(frozen=True)
class JudgedPaths:
    """The paths of kinds that follow each other.

    Attributes:
        operations: kinds, in the order of the model's.
        model: with clocks as the causes leave them.
        causes: that were found.
    """

    operations: Sequence[str]
    model: PathModel
    causes: Sequence[PathCause]

    @property
    def clocks_off_us(self) -> float:
        """How far clocks have drifted since they were measured, where that is worth a word; else 0."""
        off_ns = float(np.abs(self.model.clock).max(initial=0.0))
        return off_ns / 1e3 if off_ns > _CLOCKS_OFF_NS else 0.0

    @property
    def is_too_small_for_clocks(self) -> bool:
        """Whether there are too few ranks to find out how far clocks are off, and nobody knows."""
        few = self.model.place.num_ranks < MIN_RANKS_TO_SPLIT_PATHS
        return few and bool((self.model.prior.sigma > CLOCKS_KNOWN_NS / 2).any())

    def held_up(self, kind: str, m: Matrices) -> FloatArray:
        """[n, num_ranks] ns: of the time before waiting, what a rank waited at its fence for slow paths out of it."""
        k = self.operations.index(kind)
        slow = np.zeros(self.model.time.shape[1:])
        for cause in self.causes:
            when_slow = cause.effect[k] / max(cause.share[k], _LEAST_SHARE)
            slow[cause.group.receivers, cause.group.sources] += when_slow
            if cause.cause != cause.group.cause:
                slow[cause.group.sources, cause.group.receivers] += when_slow
        slowest = np.where(self.model.classes == 0, slow, 0.0).max(axis=0)
        usual = or_zero(healthy(median(m.held, 0))[0])
        return np.asarray(np.clip(np.nan_to_num(m.held - usual), 0.0, slowest))


def judge_paths(matrices: Mapping[str, Matrices], limits: Mapping[str, Thresholds]) -> JudgedPaths:
    """Fits the model to kinds of a group of at least two ranks, and looks for causes."""
    kinds = list(matrices.values())
    floors = np.array(
        [limits[kind].floor_ns(median_of(m.duration)) for kind, m in matrices.items()]
    )
    model = fit_paths(kinds, min(limits[kind].delta_ns for kind in matrices))
    judged = JudgedPaths(list(matrices), model, [])
    if judged.is_too_small_for_clocks:
        return judged
    false_alarms = next(iter(limits.values())).false_alarms
    lasting = Contest(model, model.rest, floors, false_alarms, fits_clocks=True)
    causes = lasting.run()
    model = replace(model, rest=lasting.rest, clock=lasting.clock)
    is_known = np.isfinite(model.time)
    bursts, share = (
        np.where(is_known, np.stack(of_kinds), np.nan)
        for of_kinds in ([m.path_burst for m in kinds], [m.path_burst_share for m in kinds])
    )
    least = floors / 2
    if ((share > 0) & (bursts > least[:, None, None])).any():
        named = {(cause.group.cause, cause.group.number) for cause in causes}
        recurring, lasts = flat(np.where(share > 0, bursts, 0.0 * bursts)), flat(model.rest)
        # What all paths of a class have is nobody's.
        for number in range(3):
            of_class = model.classes == number
            bursts[:, of_class] -= median(bursts[:, of_class], 1)[:, None]
        at_times = Contest(model, bursts, floors, false_alarms, fits_clocks=False).run(share)
        causes += [
            one
            for one in at_times
            if (one.group.cause, one.group.number) not in named
            and _comes_and_goes(
                list(matrices),
                one,
                recurring[:, one.group.paths],
                lasts[:, one.group.paths],
                least,
            )
        ]
    return JudgedPaths(list(matrices), model, causes)


def _comes_and_goes(
    kinds: Sequence[str],
    cause: PathCause,
    recurring: FloatArray,
    lasts: FloatArray,
    least: FloatArray,
) -> bool:
    """Whether bursts that recur show in all kinds of operation in which they must, and about as much as in the others.

    Experts that are in demand in some layers slow the way into their rank in dispatch, and out of it in combine. So the
    other kind tells a link from them.

    Args:
        kinds: of operation.
        cause: that explains bursts.
        recurring: [kinds, paths] ns, what those that recur add to each of its paths.
        lasts: likewise, by how much the median is longer; of a path's bursts that noise hides it shows a part.
        least: [kinds] ns.
    """
    is_combine = np.array(["combine" in kind for kind in kinds])
    tells = {Cause.INGRESS: is_combine, Cause.EGRESS: ~is_combine}.get(cause.group.cause)
    told = cause.is_known if tells is None or not tells.any() else cause.is_known & tells
    # Of two paths both must.
    shown = np.fmin(cause.effect, quantile(recurring, 0.5, 1))
    if cause.cause in _SINGLE:
        shown = np.where(cause.effect > 0, shown, np.nan_to_num(lasts[:, 0]))
    enough = shown > np.maximum(least, BORNE_OUT * cause.effect.max())
    return bool(told.any() and enough[told].all())


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
            if cause.cause in _SINGLE:
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
    uneven = float(np.mean(judged.model.uneven(k, *paths))) * or_zero(
        median_of(kind.e.paths.usual[paths])
    )
    bar = max(
        kind.floor,
        unlike,
        _CERTAIN * _size(judged, kind, k, cause).error,
        _CERTAIN * or_zero(median_of(judged.model.noise[k][paths])),
        _BY_LOAD * uneven,
    )
    return bool(cause.effect[k] > bar) and _is_borne_out(judged, k, cause)


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
    shown = [
        median_of(judged.model.rest[o, cause.group.receivers, cause.group.sources])
        + cause.effect[o]
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
    hidden = max(1.0 - seen / max(kind.e.num_operations, 1), 0.0)
    unknown = effect * math.sqrt(hidden * (1.0 - share) / (max(share, _LEAST_SHARE) * seen))
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
    if cause.cause in _SINGLE:
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
