"""Verdicts from cumulative waiting alone: tensors of any kernels that fill them, matrices of old logs.

Nobody knows when a source started, so a verdict takes several windows, and all kinds of operation to
tell a rank that loses the time itself from a link that does. A rank to which much is sent looks like
one that is late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core import quantities
from ...core.causes import Cause
from ...core.diagnosis import (
    BoolArray,
    Diagnosis,
    FloatArray,
    Measured,
    Verdict,
)
from ...core.package import EPArgumentError, ranks_text
from ...core.robust_stats import scale
from .lasting import (
    FLOOR_US,
    LEAST_RANKS,
    LEAST_WINDOWS,
    MOST_WINDOWS,
    Lasting,
    error_of_median,
    find_lasting,
)
from .square import wait_windows

# How near to a threshold, and how many errors from zero, an effect is told that is too small for a verdict.
_NEARLY, _NEARLY_ERRORS = 0.5, 6.0
_ONE_KIND = (
    "Pass all kinds of operation together: of one alone, a late rank, a slow link out of it and a slow "
    "path into it look the same."
)


def judge_waits(
    matrix: Any,
    *,
    operation: str = "dispatch",
    hosts: Sequence[str] | None = None,
    operations: int | None = None,
    unit_ns: float | None = None,
    delta_ns: float = 0.0,
) -> Diagnosis:
    """Verdicts from windows of summed waiting, of those who are waited for in nearly all of them.

    Args:
        matrix: [k, n, n] numbers >= 0 (list, array, tensor), k windows in order of time, rows wait,
            columns are waited for; the diagonal is ignored. A row of NaN is a rank that did not
            report. Or a mapping of kinds of operation to such, with equally many windows. [n, n] is
            one window, which is shown and not judged.
        operation: what to call it in the verdicts, where `matrix` is no mapping.
        hosts: [n] host names; without them links within nodes and between them count as one kind.
        operations: how many operations of each kind a window covers; effects are per operation then,
            otherwise of a window.
        unit_ns: nanoseconds of one unit of the matrix; nanoseconds are assumed unless given.
        delta_ns: the smallest effect of interest, in nanoseconds per operation (or of a window),
            summed over the kinds.

    Returns:
        A Diagnosis with source "waits". Verdicts rest on the latest `lasting.MOST_WINDOWS` windows,
        `measured` shows the last one; times are in microseconds. Without verdicts a note says
        what is undecided and what is missing.

    Raises:
        EPArgumentError: no square matrices of finite numbers >= 0, or another argument is wrong.
    """
    given = matrix if isinstance(matrix, Mapping) else {operation: matrix}
    windows = wait_windows("judge_waits", given)[:, -MOST_WINDOWS:]
    num_ranks = windows.shape[-1]
    _check_arguments(num_ranks, hosts, operations, unit_ns, delta_ns)
    missing: BoolArray = np.asarray(np.isnan(windows).all(axis=(0, 1, 3)))
    windows[..., np.arange(num_ranks), np.arange(num_ranks)] = np.nan
    windows = windows * ((1.0 if unit_ns is None else unit_ns) / (operations or 1) / 1e3)

    names = list(dict.fromkeys(hosts or ()))
    nodes = np.array([names.index(host) for host in hosts or ()] or [0] * num_ranks, np.int64)
    floor = max(delta_ns / 1e3, FLOOR_US if operations else 0.0)
    found = find_lasting(windows, nodes, floor)
    undecided = _undecided(windows, missing, found)
    named = [] if undecided else _named(found, len(given), hosts is not None)
    waits = {kind: _mean(of_kind) for kind, of_kind in zip(given, windows)}
    verdicts, savings = [], {}
    for i, (kind, wait) in enumerate(waits.items()):
        effects = [found.by_kind[one.side, i, :, one.rank] for one in named]
        shown = [(one, e) for one, e in zip(named, effects) if np.nanmedian(e) >= one.effect / 2]
        verdicts += [_verdict(one, e, kind, wait, hosts) for one, e in shown]
        savings[kind] = _saving(wait, [(one.cells, float(np.nanmedian(e))) for one, e in shown])
    if not verdicts:
        undecided = undecided or _nobody(found, windows.shape[1], hosts is not None)
    devices = _devices(hosts or [""] * num_ranks)
    return Diagnosis(
        measured={
            kind: _measured(of_kind[-1], kind, operations or 0)
            for kind, of_kind in zip(given, windows)
        },
        verdicts=sorted(verdicts, key=lambda v: -v.effect_us),
        remarks=_remarks(undecided, missing, hosts, unit_ns, operations),
        hosts=tuple("" if gone else n for n, gone in zip(hosts or ["?"] * num_ranks, missing)),
        devices=tuple(-1 if gone else d for d, gone in zip(devices, missing)),
        nodes=tuple(np.where(missing, -1, nodes).tolist()) if nodes.any() else (),
        savings_us=savings,
        source="waits",
    )


# ---- what is named


@dataclass(frozen=True)
class _Named:
    """Who is named, and for what.

    Attributes:
        side: 0: others wait for the rank; 1: the rank waits for others.
        source: of the slow path into the rank, if that is what makes it late.
        effect: mean over the kinds of operation, us.
        windows: in how many it shows.
        cells: [n, n], the waiting that is due to it.
        next_step: what to check.
    """

    cause: Cause
    side: int
    rank: int
    source: int | None
    effect: float
    windows: int
    cells: BoolArray
    next_step: str


def _named(found: Lasting, num_kinds: int, hosts_known: bool) -> list[_Named]:
    named = []
    for rank in map(int, np.flatnonzero(found.waited_for.named)):
        cause, source = _class(found, rank)
        # Where nodes are not known, the mates of an early rank look like ranks of slow links.
        if hosts_known or cause != Cause.LINK:
            named.append(_one(found, 0, rank, cause, source, num_kinds))
    # Whoever is waited for changes what all others wait; an early rank is early in every kind.
    for rank in (
        map(int, np.flatnonzero(found.waits.named)) if not found.waited_for.named.any() else ()
    ):
        effects = np.nanmedian(found.by_kind[1, :, :, rank], axis=1)
        if effects.min() >= effects.mean() / 2:
            named.append(_one(found, 1, rank, Cause.RECEIVER_SIDE, None, num_kinds))
    return named


def _class(found: Lasting, rank: int) -> tuple[Cause, int | None]:
    """What makes others wait for a rank: itself, a path into it, or its link."""
    effect = found.waited_for.effect[rank]
    if not found.shortfall[rank] < effect / 2:
        return Cause.SENDER_SIDE, None
    *_, second, longest = np.argsort(np.nan_to_num(found.cells[rank], nan=-np.inf))
    of_longest, of_second = found.cells[rank, longest], found.cells[rank, second]
    # Of equal cells one is the longest by chance.
    if of_longest > max(2 * of_second, effect / 2):
        return Cause.PAIR, int(longest)
    return Cause.LINK, None


def _one(
    found: Lasting, side: int, rank: int, cause: Cause, source: int | None, num_kinds: int
) -> _Named:
    of_side = (found.waited_for, found.waits)[side]
    cells = np.zeros(found.cells.shape, bool)
    cells.T[rank] |= side == 0
    cells[rank] |= side == 1
    if source is not None:
        cells[rank, source] = True
    unclear = num_kinds == 1 and side == 0
    return _Named(
        cause=cause,
        side=side,
        rank=rank,
        source=source,
        effect=float(of_side.effect[rank]) / num_kinds,
        windows=int(of_side.in_windows[rank]),
        cells=cells,
        next_step=_ONE_KIND if unclear else cause.row.next_step,
    )


def _verdict(
    one: _Named, effects: FloatArray, kind: str, wait: FloatArray, hosts: Sequence[str] | None
) -> Verdict:
    """Of one kind of operation; `effects` are [k], what it adds in every window."""
    effect, count = float(np.nanmedian(effects)), int(np.isfinite(effects).sum())
    half = 1.96 * float(error_of_median(scale(effects, 0), count)) or math.nan
    longest = np.nan_to_num(wait).max(axis=1)
    last = np.nan_to_num(wait).argmax(axis=1)
    due = one.cells[np.arange(last.size), last]
    ends = [one.rank] if one.source is None else [one.source, one.rank]
    devices = _devices(hosts or ())
    return Verdict(
        kind=one.cause.row.slow,
        cause=one.cause,
        operation=kind,
        rank=one.rank if one.source is None else None,
        edge=None if one.source is None else (one.source, one.rank),
        effect_us=effect,
        interval_us=(effect - half, effect + half),
        share=float(longest[due].sum() / longest.sum()) if longest.any() else 0.0,
        saving_us=_saving(wait, [(one.cells, effect)]),
        seen_in=math.nan,
        evidence={"windows": float(count), "windows_with_it": float(one.windows)},
        where=" > ".join(f"{hosts[end]} device:{devices[end]}" for end in ends) if hosts else "",
        next_step=one.next_step,
    )


def _saving(wait: FloatArray, causes: list[tuple[BoolArray, float]]) -> float:
    """What a receiver would wait less without these causes, us."""
    reported = max(int(np.isfinite(wait).any(axis=1).sum()), 1)
    rest = wait = np.nan_to_num(wait)
    for cells, effect in causes:
        rest = np.maximum(rest - effect * cells, 0.0)
    return float((wait.max(axis=1) - rest.max(axis=1)).sum()) / reported


# ---- what is not


def _undecided(windows: FloatArray, missing: BoolArray, found: Lasting) -> str:
    """Why nobody can be named; empty if somebody could be."""
    num_ranks, reported = missing.size, int((~missing).sum())
    if num_ranks == 1:
        return "one rank: nothing to compare"
    if reported < LEAST_RANKS:
        return (
            f"undecided: {reported} of {num_ranks} ranks reported; waiting alone needs {LEAST_RANKS}, "
            "of which most tell what is usual. Fewer can be judged by timestamps (DEEP_EP_DIAGNOSE)"
        )
    # Windows in which too few reported say nothing.
    there = (np.isfinite(windows).any(axis=3).sum(axis=2) >= LEAST_RANKS).all(axis=0)
    if there.sum() < LEAST_WINDOWS:
        count = "one window" if there.sum() == 1 else f"{there.sum()} windows"
        return (
            f"undecided: {count}; at least {LEAST_WINDOWS} that follow each other are needed to tell what "
            "lasts from what happens once"
        )
    if 2 * int(found.waited_for.named.sum()) >= reported:
        return (
            "undecided: half of the ranks or more are waited for, and nothing tells what is usual; "
            "timestamps (DEEP_EP_DIAGNOSE) can"
        )
    return ""


def _nobody(found: Lasting, num_windows: int, hosts_known: bool) -> str:
    """What is missing for a verdict, of the rank that is nearest to one."""
    if found.waited_for.named.any() and not hosts_known:
        ranks = ranks_text(map(int, np.flatnonzero(found.waited_for.named)))
        return (
            f"undecided: {ranks} seem to have slow links; pass hosts, because links of nodes differ"
        )
    sides = ("others wait for", found.waited_for), ("the waiting of", found.waits)
    for what, side in sides:
        rank = int(np.argmax(np.nan_to_num(side.effect, nan=-np.inf)))
        effect, often = float(side.effect[rank]), int(side.in_windows[rank])
        size = f"{what} rank {rank}, {quantities.microseconds(effect)} above the usual"
        needed = quantities.microseconds(side.threshold)
        if 2 * often > num_windows:
            return (
                f"undecided: {size}, exceeds {needed} in {often} of {num_windows} windows, which does not "
                "last or varies too much; later windows may decide"
            )
        if effect > max(_NEARLY * side.threshold, _NEARLY_ERRORS * side.error[rank]):
            return f"undecided: {size}, is too little; {needed} are needed in nearly all windows"
    needed = quantities.microseconds(max(found.waited_for.threshold, found.waits.threshold))
    return f"nobody stands out by {needed} in nearly all of {num_windows} windows"


def _remarks(
    undecided: str,
    missing: BoolArray,
    hosts: Sequence[str] | None,
    unit_ns: float | None,
    operations: int | None,
) -> list[str]:
    remarks = [undecided] if undecided else []
    if missing.size == 1:
        return remarks
    remarks.append(
        "only sums of waiting are known, no timestamps: a hot rank looks like a late one"
    )
    if missing.any():
        gone = ranks_text(int(rank) for rank in np.flatnonzero(missing))
        remarks.append(f"{gone} did not report: what they waited for is not known")
    if hosts is None:
        remarks.append(
            "hosts are not known: all links are compared as one kind, and what is small beside "
            "the difference between links is not seen"
        )
    if unit_ns is None:
        remarks.append("the unit of the matrix is not known and taken for nanoseconds")
    if operations is None:
        remarks.append(
            "the number of operations is not known: effects are of a window, and none is too small"
        )
    return remarks


# ---- the rest


def _check_arguments(
    num_ranks: int,
    hosts: Sequence[str] | None,
    operations: int | None,
    unit_ns: float | None,
    delta_ns: float,
) -> None:
    if hosts is not None and len(hosts) != num_ranks:
        raise EPArgumentError(
            f"judge_waits: hosts has {len(hosts)} entries, the matrix {num_ranks} ranks; there "
            "must be one host per rank. Pass them in rank order, or None."
        )
    if operations is not None and operations < 1:
        raise EPArgumentError(
            f"judge_waits: operations is {operations}; the sums must cover at least 1. "
            "Pass None if the number is not known."
        )
    if unit_ns is not None and not 0 < unit_ns < math.inf:
        raise EPArgumentError(
            f"judge_waits: unit_ns is {unit_ns}; it must be a number above 0. Pass 1 for "
            "nanoseconds, 1e9 / clock rate for cycles."
        )
    if not 0 <= delta_ns < math.inf:
        raise EPArgumentError(
            f"judge_waits: delta_ns is {delta_ns}; it must be 0 or more. Pass 0 for no floor."
        )


def _mean(of_windows: FloatArray) -> FloatArray:
    """Over windows, of what is known."""
    count = np.isfinite(of_windows).sum(axis=0)
    total = np.nansum(of_windows, axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _devices(hosts: Sequence[str]) -> list[int]:
    """Place of each rank among those of its host."""
    counted: Counter[str] = Counter()
    places = []
    for host in hosts:
        places.append(counted[host])
        counted[host] += 1
    return places


def _measured(wait_us: FloatArray, operation: str, operations: int) -> Measured:
    unknown, row = np.full(wait_us.shape, np.nan), np.full(len(wait_us), np.nan)
    return Measured(
        operation=operation,
        num_operations=operations,
        first_operation=0,
        last_operation=0,
        duration_us=float("nan"),
        wait_us=wait_us,
        late_us=unknown,
        issue_us=unknown,
        path_us=unknown,
        tokens=unknown,
        bytes=unknown,
        gap_us=row,
        send_us=row,
        drain_us=row,
        own_wait_us=np.fmax.reduce(wait_us, axis=1, initial=np.nan),
    )
