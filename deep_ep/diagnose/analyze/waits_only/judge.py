"""Verdicts from cumulative waiting alone: tensors of any kernels that fill them, matrices of old logs.

Nobody knows when a source started, so a verdict takes several windows, and all kinds of operation to
tell a rank that loses the time itself from a link that does, and from one to which more is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...core import quantities
from ...core.causes import Cause
from ...core.diagnosis import BoolArray, Diagnosis, FloatArray, IntArray, Measured, Verdict
from ...core.package import EPArgumentError, ranks_text
from ...core.robust_stats import median, median_of, scale
from .lasting import (
    FLOOR_US,
    LEAST_RANKS,
    LEAST_WINDOWS,
    MOST_WINDOWS,
    SPREADS,
    Lasting,
    error_of_median,
    find_lasting,
)
from .square import wait_windows

# How near to a threshold, and how many errors from zero, an effect is told that is too small for a verdict.
_NEARLY, _NEARLY_ERRORS = 0.5, 6.0
# Kinds of operation before which experts work, by the ends of their names.
_AFTER_EXPERTS = "combine"
# What others wait in other kinds is more than load does to them from this share of the whole on (load: a fifth
# at most on generated data, a late rank: half as a rule), or beyond the spread of the ranks.
_ELSEWHERE = 1 / 3
_ONE_KIND = (
    "Pass all kinds of operation together: of one alone, a late rank, a slow link out of it and a slow "
    "path into it look the same."
)
# Ranks of a node that wait less for each other than `FLOOR_US` (17 us on generated data; behind fences 4 to 7)
# may wait at fences instead. There who has a slow way out begins to wait late, as who is late does.
_UNTOLD = ("late, if only at times, or a slow way out", "early, if only at times, or a slow way in")
# Standard deviation of single operations over the effect: late in 30 % of them about 1, a slow way out 0.1.
_VARIES = 1 / 3
# Where operations, nodes or other kinds are not known, nothing tells, and the likelier is named.
_LIKELIER = (
    " A slow way out of it may look the same: hosts and numbers of operations tell as a rule, timestamps "
    "(DEEP_EP_DIAGNOSE) always."
)


def judge_waits(
    matrix: Any,
    *,
    operation: str = "dispatch",
    hosts: Sequence[str] | None = None,
    operations: int | None = None,
    unit_ns: float | None = None,
    delta_ns: float = 0.0,
    name_likelier: bool = False,
    within_nodes: bool = False,
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
        name_likelier: a rank that is late, or has a slow way out, where waiting cannot tell, is named as late, and
            its next step says so; by default that is undecided.
        within_nodes: what ranks of different hosts wait for each other is not counted, and left out; needs hosts.

    Returns:
        A Diagnosis with source "waits". Verdicts rest on the latest `lasting.MOST_WINDOWS` windows,
        `measured` shows the last one; times are in microseconds. Without verdicts a note says
        what is undecided and what is missing.

    Raises:
        EPArgumentError: no square matrices of finite numbers >= 0, or another argument is wrong.
    """
    given = matrix if isinstance(matrix, Mapping) else {operation: matrix}
    windows = wait_windows(given)[:, -MOST_WINDOWS:]
    num_ranks = windows.shape[-1]
    for name, value, is_right, allowed in (
        ("hosts", hosts, hosts is None or len(hosts) == num_ranks, f"None, or {num_ranks} names"),
        ("operations", operations, operations is None or operations >= 1, "None, or 1 or more"),
        ("unit_ns", unit_ns, unit_ns is None or 0 < unit_ns < math.inf, "None, or above 0"),
        ("delta_ns", delta_ns, 0 <= delta_ns < math.inf, "0 or more"),
        (
            "within_nodes",
            within_nodes,
            hosts is not None or not within_nodes,
            "False without hosts",
        ),
    ):
        if not is_right:
            raise EPArgumentError(
                f"judge_waits: {name} is {value!r}, of windows of {num_ranks} ranks; it must be {allowed}. "
                "Pass it as described there, or leave it out."
            )
    missing: BoolArray = np.asarray(np.isnan(windows).all(axis=(0, 1, 3)))
    windows[..., np.arange(num_ranks), np.arange(num_ranks)] = np.nan
    names = list(dict.fromkeys(hosts or ()))
    nodes = np.array([names.index(host) for host in hosts or ()] or [0] * num_ranks, np.int64)
    if within_nodes:
        windows[..., nodes[:, None] != nodes] = np.nan
    windows = windows * ((1.0 if unit_ns is None else unit_ns) / (operations or 1) / 1e3)

    floor = max(delta_ns / 1e3, FLOOR_US if operations else 0.0)
    found = find_lasting(windows, nodes, floor)
    unexplained = _unexplained(found, list(given), floor)
    undecided = _undecided(windows, missing, found)
    tells = hosts is not None and len(given) > 1 and not name_likelier
    counted = operations if tells else None
    named, untold = _named(found, unexplained, counted) if not undecided else ([], "")
    # Where nodes are not known, the mates of an early rank look like ranks of slow links.
    named = [one for one in named if one.cause != Cause.LINK or hosts is not None]
    verdicts, savings = [], {}
    for i, (kind, of_kind) in enumerate(zip(given, windows)):
        wait = _mean(of_kind)
        effects = [found.by_kind[one.side, i, :, one.rank] for one in named]
        shown = [(o, e) for o, e in zip(named, effects) if np.nanmedian(e) >= o.effect(found) / 2]
        verdicts += [
            replace(
                verdict_of(found, one, kind, wait, e),
                saving_us=_saving(wait, [(one.cells(num_ranks), e)]),
                where=_where(one, hosts or ()),
                next_step=_next_step(one, len(given), counted),
            )
            for one, e in shown
        ]
        savings[kind] = _saving(wait, [(one.cells(num_ranks), e) for one, e in shown])
    undecided = undecided or untold or _explained(found, unexplained)
    if not verdicts:
        undecided = undecided or _nobody(found, windows.shape[1], hosts is not None)
    latest = zip(given, windows[:, -1])
    devices = _devices(hosts or [""] * num_ranks)
    return Diagnosis(
        measured={kind: measured_waits(wait, kind, operations or 0) for kind, wait in latest},
        verdicts=sorted(verdicts, key=lambda v: -v.effect_us),
        remarks=_remarks(undecided, missing, hosts, unit_ns, operations, floor),
        hosts=tuple("" if gone else n for n, gone in zip(hosts or ["?"] * num_ranks, missing)),
        devices=tuple(-1 if gone else d for d, gone in zip(devices, missing)),
        nodes=_numbered(nodes, missing) if nodes.any() else (),
        savings_us=savings,
        source="waits",
    )


def _numbered(nodes: IntArray, missing: BoolArray) -> tuple[int, ...]:
    """As in `Diagnosis.nodes`: -1 of ranks that did not report, the others from 0 on without gaps."""
    order = list(dict.fromkeys(nodes[~missing].tolist()))
    return tuple(-1 if gone else order.index(node) for node, gone in zip(nodes.tolist(), missing))


# ---- what is named


class NamedRank(NamedTuple):
    """For whom others wait (side 0), or who waits for others (1).

    `source`: of the slow path into the rank, if that is what makes it late.
    """

    cause: Cause
    side: int
    rank: int
    source: int | None = None

    def effect(self, found: Lasting) -> float:
        """Mean over the kinds of operation, us."""
        return float(found.sides[self.side].effect[self.rank] / found.by_kind.shape[1])

    def cells(self, num_ranks: int) -> BoolArray:
        """[n, n], the waiting that is due to it."""
        cells = np.zeros((num_ranks, num_ranks), bool)
        (cells if self.side else cells.T)[self.rank] = True
        if self.source is not None:
            cells[self.rank, self.source] = True
        return cells


def _unexplained(found: Lasting, kinds: Sequence[str], floor: float) -> BoolArray:
    """[n]: of whom others wait for more than a larger share of the tokens can explain.

    Tokens take their experts' rank time between dispatch and combine: a rank in demand comes late to
    combines, and not to dispatches.
    """
    others = [i for i, kind in enumerate(kinds) if not kind.endswith(_AFTER_EXPERTS)]
    elsewhere = median(found.by_kind[0, others].sum(axis=0), 0)
    spread = np.nan_to_num(median_of(np.abs(elsewhere)))
    least = np.fmin(_ELSEWHERE * found.waited_for.effect, SPREADS * spread)
    unexplained: BoolArray = elsewhere > np.maximum(least, floor / len(kinds))
    return unexplained


def _named(
    found: Lasting, unexplained: BoolArray, counted: int | None
) -> tuple[list[NamedRank], str]:
    """Who is named; and who may as well have a slow link as be late or early, empty if nobody."""
    late = np.flatnonzero(found.waited_for.named & unexplained)
    early = np.flatnonzero(found.waits.named & _waits_in_all_kinds(found))
    of_sides = [
        {rank: _waited_for(found, rank, counted) for rank in map(int, late)},
        {rank: _waits(found, rank) for rank in map(int, early)},
    ]
    named = [one for of_side in of_sides for one in of_side.values() if one]
    untold = [[rank for rank, one in of_side.items() if not one] for of_side in of_sides]
    said = [f"{what}: {ranks_text(ranks)}" for what, ranks in zip(_UNTOLD, untold) if ranks]
    tell = "waiting alone looks the same, timestamps (DEEP_EP_DIAGNOSE) tell"
    return named, f"undecided: {'; '.join(said)}; {tell}" if said else ""


def _waits_in_all_kinds(found: Lasting) -> BoolArray:
    """[n]: not as a rank with another load does, nor because somebody is waited for."""
    waited_for, waits = median(found.by_kind, 2)
    longest = np.fmax(np.nanmax(waited_for), np.fmax.reduce(found.cells, axis=0) / len(waits))
    nobody_else = (longest < waits.mean(axis=0) / 2) & ~found.waited_for.named
    return np.asarray(nobody_else & found.wait_in_all_kinds)


def _in_return(found: Lasting, side: int, rank: int) -> int:
    """Whether a rank that is waited for (side 0) waits longer than others do for each other (1), or less (-1).

    Of a rank that waits (side 1): whether it is waited for. Who is late finds what others have sent, and
    nobody waits for who is early; a slow link shortens neither.
    """
    least = min(float(found.sides[side].effect[rank]), found.mutual) / 2
    other = float(found.sides[1 - side].effect[rank])
    return int(other > least) - int(other < -least)


def _waits(found: Lasting, rank: int) -> NamedRank | None:
    """Why a rank waits for all others: it is early, or its link is slow; None: it is not told."""
    cause = (None, Cause.LINK, Cause.RECEIVER_SIDE)[_in_return(found, 1, rank)]
    return NamedRank(cause, 1, rank) if cause else None


def _waited_for(found: Lasting, rank: int, counted: int | None) -> NamedRank | None:
    """What makes others wait for a rank: itself, a path into it, or its link; None: it is not told."""
    effect, error = found.waited_for.effect[rank], found.waited_for.error[rank]
    own = _in_return(found, 0, rank)
    if own <= 0 and not found.shortfall[rank] < effect / 2:
        # Who is late at times only waits as long as the others, and so does, where a slow host hides what
        # others wait for it, who has a slow way out; but that does not vary.
        varies = error * math.sqrt(found.by_kind.shape[2] * (counted or 0)) > _VARIES * effect
        if counted and (found.mutual < FLOOR_US or (own == 0 and not varies)):
            return None
        return NamedRank(Cause.SENDER_SIDE, 0, rank)
    *_, second, longest = np.argsort(np.nan_to_num(found.cells[rank], nan=-np.inf))
    of_longest, of_second = found.cells[rank, longest], found.cells[rank, second]
    # Of equal cells one is the longest by chance.
    if of_longest > max(2 * of_second, effect / 2):
        return NamedRank(Cause.PAIR, 0, rank, int(longest))
    return NamedRank(Cause.LINK, 0, rank)


def verdict_of(
    found: Lasting, one: NamedRank, operation: str, wait: FloatArray, effects: FloatArray
) -> Verdict:
    """Of one kind of operation: [n, n] mean waiting, and [k] what it adds in every window; what else is known may be put in."""
    effect, count = float(np.nanmedian(effects)), int(np.isfinite(effects).sum())
    half = 1.96 * float(error_of_median(scale(effects, 0), count)) or math.nan
    longest, last = np.nan_to_num(wait).max(axis=1), np.nan_to_num(wait).argmax(axis=1)
    due = one.cells(last.size)[np.arange(last.size), last]
    windows_with_it = float(found.sides[one.side].in_windows[one.rank])
    return Verdict(
        kind=one.cause.row.slow,
        cause=one.cause,
        operation=operation,
        rank=one.rank if one.source is None else None,
        edge=None if one.source is None else (one.source, one.rank),
        effect_us=effect,
        interval_us=(effect - half, effect + half),
        share=float(longest[due].sum() / longest.sum()) if longest.any() else 0.0,
        seen_in=math.nan,
        evidence={"windows": float(count), "windows_with_it": windows_with_it},
    )


def _next_step(one: NamedRank, num_kinds: int, counted: int | None) -> str:
    if num_kinds == 1 and one.side == 0:
        return _ONE_KIND
    also = "" if counted or one.cause != Cause.SENDER_SIDE else _LIKELIER
    return one.cause.row.next_step + also


def _where(one: NamedRank, hosts: Sequence[str]) -> str:
    devices = _devices(hosts)
    ends = [one.rank] if one.source is None else [one.source, one.rank]
    return " > ".join(f"{hosts[end]} device:{devices[end]}" for end in ends) if hosts else ""


def _saving(wait: FloatArray, causes: list[tuple[BoolArray, FloatArray]]) -> float:
    """What a receiver would wait less without these causes, us; each: cells, and [k] effects."""
    reported = max(int(np.isfinite(wait).any(axis=1).sum()), 1)
    rest = wait = np.nan_to_num(wait)
    for cells, effects in causes:
        rest = np.maximum(rest - float(np.nanmedian(effects)) * cells, 0.0)
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


def _explained(found: Lasting, unexplained: BoolArray) -> str:
    """Who is waited for as a rank with more tokens would be; empty if nobody is."""
    explained = list(map(int, np.flatnonzero(found.waited_for.named & ~unexplained)))
    if not explained:
        return ""
    return (
        f"undecided: others wait for {ranks_text(explained)} in combines only, "
        "as for a rank to which more tokens are sent; use timestamps (DEEP_EP_DIAGNOSE)"
    )


def _nobody(found: Lasting, num_windows: int, hosts_known: bool) -> str:
    """What is missing for a verdict, of the rank that is nearest to one."""
    if found.waited_for.named.any() and not hosts_known:
        ranks = ranks_text(map(int, np.flatnonzero(found.waited_for.named)))
        return (
            f"undecided: {ranks} seem to have slow links; pass hosts, because links of nodes differ"
        )
    for what, side in zip(("others wait for", "the waiting of"), found.sides):
        rank = int(np.argmax(np.nan_to_num(side.effect, nan=-np.inf)))
        effect, often = float(side.effect[rank]), int(side.in_windows[rank])
        is_near = effect > max(_NEARLY * side.threshold, _NEARLY_ERRORS * side.error[rank])
        if is_near or 2 * often > num_windows:
            return (
                f"undecided: {what} rank {rank}, {quantities.microseconds(effect)} above the usual, exceeds "
                f"{quantities.microseconds(side.threshold)} in {often} of {num_windows} windows, which is needed "
                "in nearly all; later windows may decide"
            )
    needed = quantities.microseconds(max(side.threshold for side in found.sides))
    return f"nobody stands out by {needed} in nearly all of {num_windows} windows"


def _remarks(
    undecided: str,
    missing: BoolArray,
    hosts: Sequence[str] | None,
    unit_ns: float | None,
    operations: int | None,
    floor: float,
) -> list[str]:
    gone = ranks_text(map(int, np.flatnonzero(missing)))
    remarks = {
        "only sums of waiting are known, no timestamps: what a larger load explains is not decided": True,
        f"{gone} did not report: what they waited for is not known": missing.any(),
        "hosts are not known: all links are compared as one kind, and what is small beside "
        "the difference between links is not seen": hosts is None,
        "the unit of the matrix is not known and taken for nanoseconds": unit_ns is None,
        "the number of operations is not known: effects are of a window"
        + ("" if floor else ", and none is too small"): operations is None,
    }
    said = [undecided] if undecided else []
    return said + [text for text, holds in remarks.items() if holds and missing.size > 1]


# ---- the rest


def _mean(of_windows: FloatArray) -> FloatArray:
    """Over windows, of what is known."""
    count = np.isfinite(of_windows).sum(axis=0)
    return np.where(count > 0, np.nansum(of_windows, axis=0) / np.maximum(count, 1), np.nan)


def _devices(hosts: Sequence[str]) -> list[int]:
    """Place of each rank among those of its host."""
    return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]


def measured_waits(wait_us: FloatArray, operation: str, operations: int) -> Measured:
    """What is known of a window: its waiting, [n, n]; NaN where it is not known."""
    cell, rank = np.full(wait_us.shape, np.nan), np.full(len(wait_us), np.nan)
    longest = np.fmax.reduce(wait_us, axis=1, initial=np.nan)
    times = (rank, rank, rank, longest, wait_us, cell, cell, cell, cell, cell)
    return Measured(operation, operations, 0, 0, math.nan, *times)
