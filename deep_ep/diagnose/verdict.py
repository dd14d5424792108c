"""The rules: estimates of all ranks become verdicts. Pure; prints nothing, measures nothing.

Order of the rules, each taking the ranks it explains away from the later ones:

1. Mixed-Slow, hot experts: far more tokens than the others *and* more time because of it.
2. Comp-Slow: a rank's own clock says it worked longer *and* the others see it late.
3. Comm-Slow: all paths into (ingress) or out of (egress) one rank, between two nodes, on one rail;
   or one path slower than all that explains.
4. Mixed-Slow, early receiver: a rank works clearly less than the others, and nothing else is
   the matter.

A cause is named when its effect is big enough to care about, far outside its own error, outside
of how healthy ranks differ from each other, and there in most operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deep_ep.diagnose.estimate import Effect, Estimates, estimate_kinds
from deep_ep.diagnose.events import events
from deep_ep.diagnose.findings import (
    COMM_SLOW,
    COMP_SLOW,
    MIXED_SLOW,
    Diagnosis,
    FloatArray,
    Subject,
    Verdict,
)
from deep_ep.diagnose.gather import LOW_LATENCY_KINDS, Matrices, Place
from deep_ep.diagnose.history import History
from deep_ep.diagnose.paths import MIN_RANKS_TO_SPLIT_PATHS
from deep_ep.diagnose.stats import certainty, healthy, scale, z_for
from deep_ep.diagnose.summary import MIN_SEEN
from deep_ep.diagnose.whatif import Gain, savings_ns
from deep_ep.errors import ranks_text

# Fewer operations say nothing.
MIN_OPERATIONS = 8
# A late rank is seen late by at least this share of its own extra time; what it shows to depends
# on when it left the operation before, and ranks in lockstep take it in by halves.
_SEEN_LATE = 0.2
# A load stands out from loads that differ by so many of their standard deviations.
_LOAD_SPREADS = 3.0
# Where clocks cannot be told from slow sides, they are taken to be off by so many `clock_ns`.
_CLOCKS = 3.0
# Beyond so many `clock_ns` no path is judged.
_CLOCKS_LOST = 10.0
# That a rank takes longer is certain before its tokens are asked; standard errors of their part.
_EXPLAINED = 3.0
_NORMAL_95 = 1.96
# Single savings are computed for this many verdicts; a report of more is not read to its end.
_MOST_SAVINGS = 12


Cells = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Thresholds:
    """What an effect must exceed to become a verdict.

    Attributes:
        delta_ns: the smallest effect of interest.
        fraction: and of the operation's duration.
        own_fraction: and, for ranks, of a healthy rank's own time around an operation.
        path_fraction: and, for paths, of what a healthy path takes.
        false_alarms: chance of any false verdict in a healthy window, from which follows how many
            standard errors an effect must exceed.
        spread: and in standard deviations by which healthy ranks, paths differ for good.
        load: a rank may be hot when it handles this many times an even share of the tokens, and
            what a token costs is known.
        high_load: and when it is not known.
        clock_ns: how far measured clock offsets may be wrong; matters where too few ranks are there
            to find it out.
    """

    delta_ns: float
    fraction: float = 0.02
    own_fraction: float = 0.03
    path_fraction: float = 0.15
    false_alarms: float = 1e-8
    spread: float = 6.0
    load: float = 1.12
    high_load: float = 1.35
    clock_ns: float = 0.0

    @classmethod
    def for_device(cls, device: str) -> Thresholds:
        """Chosen on generated windows of other seeds than those reported; CPU ranks are noisier."""
        if device == "cuda":
            return cls(delta_ns=3_000.0, spread=4.0, clock_ns=4_000.0)
        return cls(delta_ns=100_000.0)

    def floor_ns(self, duration_ns: float) -> float:
        """The smallest effect worth a verdict in an operation of this duration."""
        relative = self.fraction * duration_ns if math.isfinite(duration_ns) else 0.0
        return max(self.delta_ns, relative)


@dataclass(frozen=True)
class _Kind:
    """One operation kind with its thresholds, while the rules run."""

    e: Estimates
    limits: Thresholds

    @property
    def floor(self) -> float:
        # Means carry every hiccup and have no error to compare with: ask for twice as much.
        return self.limits.floor_ns(self.e.duration_ns) * (1.0 if self.e.has_stamps else 2.0)

    @property
    def rank_floor(self) -> float:
        return max(self.floor, self.limits.own_fraction * float(np.nan_to_num(self.e.own_ns)))

    @property
    def clocks_are_lost(self) -> bool:
        """Whether clocks have drifted so far that it is not known which paths could be seen."""
        lost_ns = _CLOCKS_LOST * self.limits.clock_ns
        return bool(lost_ns > 0 and np.abs(self.e.paths.clock).max(initial=0.0) > lost_ns)

    @property
    def z_ranks(self) -> float:
        return z_for(4 * self.e.load.size, self.limits.false_alarms)

    @property
    def z_paths(self) -> float:
        return z_for(self.e.load.size**2, self.limits.false_alarms)

    def bar(self, effect: Effect, rank: int) -> float:
        """What a rank's effect must exceed."""
        noise = math.hypot(
            self.z_ranks * float(effect.error[rank]), self.limits.spread * effect.spread
        )
        return max(self.rank_floor + float(effect.error[rank]), noise)

    def exceeds(self, effect: Effect, rank: int) -> bool:
        """Whether an effect is big, certain, out of the ordinary and usual for the rank."""
        return bool(
            effect.value[rank] > self.bar(effect, rank)
            and effect.count[rank] >= MIN_OPERATIONS
            and _mostly(effect.above[rank], effect.count[rank])
        )

    def costs(self, rank: int) -> bool:
        """Whether a rank certainly takes longer, and what its tokens explain is much of it."""
        e = self.e
        error = float(e.busy.error[rank])
        longer = e.busy.value[rank] > max(self.rank_floor + error, self.z_ranks * error)
        explained = e.token_time[rank] > max(self.floor, _EXPLAINED * float(e.token_error[rank]))
        return bool(
            e.cost_known
            and longer
            and explained
            and e.busy.count[rank] >= MIN_OPERATIONS
            and _mostly(e.busy.above[rank], e.busy.count[rank])
        )


@dataclass(frozen=True)
class _Found:
    """A verdict while savings are still to be worked out, with what its cause adds."""

    verdict: Verdict
    kind: _Kind
    gain: Gain


def judge(
    matrices: Mapping[str, Matrices],
    thresholds: Thresholds | None = None,
    history: History | None = None,
) -> Diagnosis:
    """Verdicts, with the numbers they rest on and what could not be judged.

    Args:
        matrices: per operation kind, as `gather` returns them.
        thresholds: by default according to the device of the counters.
        history: of the same group, to find what slows everything alike; it is brought up to date.
    """
    kinds = _estimate(matrices, thresholds)
    found = _causes(kinds, history)
    judged, savings_us = _savings(kinds, found)
    seen = [event for kind in kinds for event in events(kind.e, kind.floor)]
    place = next(iter(matrices.values())).place if matrices else None
    return Diagnosis(
        measured={kind: m.measured() for kind, m in matrices.items()},
        verdicts=judged,
        remarks=[*_remarks(matrices), *_clock_remarks(kinds)],
        events=sorted(seen, key=lambda event: -event.effect_us),
        hosts=place.hosts if place else (),
        devices=place.devices if place else (),
        nodes=tuple(place.nodes.tolist()) if place else (),
        device=place.device if place else "",
        savings_us=savings_us,
    )


def verdicts(
    matrices: Matrices | Mapping[str, Matrices], thresholds: Thresholds | None = None
) -> list[Verdict]:
    """Names the causes of waiting, the largest effect first; an empty list is "no anomaly".

    Args:
        matrices: of one operation kind, or per kind as `gather` returns them. Kinds are judged
            together: a rank that is hot in one kind is explained by it in the other.
        thresholds: by default according to the device of the counters.
    """
    by_kind = {matrices.operation: matrices} if isinstance(matrices, Matrices) else matrices
    kinds = _estimate(by_kind, thresholds)
    return _savings(kinds, _causes(kinds, None))[0]


def _estimate(matrices: Mapping[str, Matrices], thresholds: Thresholds | None) -> list[_Kind]:
    usable = {
        kind: m
        for kind, m in matrices.items()
        if m.num_ranks > 1 and (m.num_operations or m.counted) >= MIN_OPERATIONS
    }
    return [
        _Kind(e, thresholds or Thresholds.for_device(e.m.place.device))
        for e in estimate_kinds(usable)
    ]


def _causes(kinds: Sequence[_Kind], history: History | None) -> list[_Found]:
    found = [f for kind in kinds for f in _hot_experts(kind)]
    hot_ranks = {f.verdict.rank for f in found if f.verdict.rank is not None}
    found += _late_ranks(kinds, hot_ranks)
    for kind in kinds:
        found += _slow_paths(kind, hot_ranks)
        if history is not None:
            found += _slower_than_before(kind, history)
    if not found:
        found = [f for kind in kinds for f in _early_receivers(kind)]
    if history is not None:
        history.windows += 1
    return sorted(found, key=lambda f: -f.verdict.effect_us)


def _remarks(matrices: Mapping[str, Matrices]) -> list[str]:
    if not matrices:
        return ["nothing was counted; call buffer.enable_counters() before the operations"]
    said: list[str] = []
    for kind, m in matrices.items():
        if m.num_ranks < 2:
            return ["one rank: nothing to compare"]
        missing = np.flatnonzero(~m.present).tolist()
        if missing:
            said.append(f"{kind}: no counters from {ranks_text(missing)}")
        counted = m.num_operations or m.counted
        if counted < MIN_OPERATIONS:
            said.append(
                f"{kind}: undecided, {counted} operations counted; {MIN_OPERATIONS} are needed"
            )
        elif m.num_operations == 0:
            said.append(f"{kind}: no ring of recent operations; judged by totals, which is weaker")
        reported = np.isfinite(m.span)
        common = reported[reported.sum(axis=1) > m.present.sum() / 2]
        partly = np.flatnonzero(m.present & (common.sum(axis=0) < common.shape[0] / 2)).tolist()
        if partly:
            said.append(
                f"{kind}: {ranks_text(partly)} reported other operations than the rest, at most "
                f"{int(common.sum(axis=0)[partly].max())} of {common.shape[0]} the same; take the "
                "snapshots of all ranks at the same time"
            )
    return said


def _clock_remarks(kinds: Sequence[_Kind]) -> list[str]:
    for kind in kinds:
        off_us = float(np.abs(kind.e.paths.clock).max(initial=0.0)) / 1e3
        if kind.clocks_are_lost:
            return [
                f"clocks are off by up to {off_us:,.0f} us from what was measured, so paths are not "
                "judged; call buffer.measure_clock_offsets() on all ranks"
            ]
    return []


def _hot_experts(kind: _Kind) -> list[_Found]:
    """Ranks whose tokens cost them time: by what a token costs, or by far too many of them."""
    e, limits = kind.e, kind.limits
    found = []
    # Where all loads differ, a rank is hot when its own stands out.
    usual = 1.0 + _LOAD_SPREADS * float(scale(e.load, 0)) if e.load.size > 3 else 1.0
    for rank in np.flatnonzero(e.load > max(limits.load, usual)).tolist():
        inbound_ns = float(e.paths.inbound[rank])
        incast = inbound_ns > max(kind.floor, limits.spread * healthy(e.paths.inbound)[1])
        many = e.load[rank] > limits.high_load
        longer = many and kind.exceeds(e.busy, rank) or kind.costs(rank)
        if not (longer or (many and incast)):
            continue
        cells = np.zeros(e.blame.shape, dtype=bool)
        cells[:, rank] = True
        cells[rank, :] |= incast
        own_ns = float(e.busy.value[rank]) if longer else 0.0
        found.append(
            _found(
                kind,
                MIXED_SLOW,
                "hot experts",
                max(own_ns, inbound_ns if incast else 0.0),
                float(e.busy.error[rank]),
                cells,
                Gain(
                    e.operation,
                    rank,
                    work_ns=max(own_ns, 0.0),
                    paths=(rank, slice(None)) if incast else None,
                    path_ns=inbound_ns,
                ),
                e.load.size,
                rank=rank,
                seen_in=float(e.busy.above[rank]) if longer else float("nan"),
                evidence={
                    "tokens over even share": float(e.load[rank]),
                    "own time over median us": float(e.busy.value[rank]) / 1e3,
                    "explained by tokens us": float(e.token_time[rank]) / 1e3,
                    "path into it over median us": inbound_ns / 1e3,
                    **_own_times(e, rank),
                },
                next_step=f"Its experts get {e.load[rank]:.1f} times an even share of the tokens: look at the "
                "routing, and move or replicate its busiest experts.",
            )
        )
    return found


def _late_ranks(kinds: Sequence[_Kind], hot_ranks: set[int]) -> list[_Found]:
    """Ranks that work longer by their own clock and are seen late; kinds bear each other out."""
    found = []
    for kind in kinds:
        for cause, effect in (("late", kind.e.work), ("slow receive", kind.e.drain)):
            for rank in np.flatnonzero(effect.value > kind.floor).tolist():
                # Far more tokens than usual, or of unknown cost, may explain any lateness.
                known = kind.e.cost_known and kind.e.load[rank] <= kind.limits.high_load
                if rank in hot_ranks and not known:
                    continue
                big = kind.exceeds(effect, rank) or _borne_out(kinds, cause, kind, rank)
                # Inherited lateness has no counterpart in the rank's own work and is not its
                # fault; work that shows nowhere, in no kind, keeps nobody waiting.
                if big and any(_seen_late(k.e, rank, float(effect.value[rank])) for k in kinds):
                    found.append(_late_rank(kind, cause, effect, rank))
    return found


def _seen_late(e: Estimates, rank: int, effect_ns: float) -> bool:
    return bool(e.late[rank] > max(2 * float(e.late_error[rank]), _SEEN_LATE * effect_ns))


def _borne_out(kinds: Sequence[_Kind], cause: str, kind: _Kind, rank: int) -> bool:
    """Whether all kinds together are as certain as one would have to be alone."""
    effects = [k.e.work if cause == "late" else k.e.drain for k in kinds]
    if any(not k.e.has_stamps for k in kinds) or len(kinds) < 2:
        return False
    value, error = _pooled([(float(x.value[rank]), float(x.error[rank])) for x in effects])
    spread = max(x.spread for x in effects)
    this = kind.e.work if cause == "late" else kind.e.drain
    noise = math.hypot(kind.z_ranks * error, kind.limits.spread * spread)
    return bool(
        value > max(kind.rank_floor + error, noise)
        and this.value[rank] > max(kind.floor, 2 * float(this.error[rank]))
        and _mostly(this.above[rank], this.count[rank])
    )


def _pooled(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean and its error of independent values with errors; unknown ones are left out."""
    known = [(value, error) for value, error in values if math.isfinite(value + error)]
    if not known:
        return float("nan"), float("nan")
    mean = sum(value for value, _ in known) / len(known)
    return mean, math.sqrt(sum(error**2 for _, error in known)) / len(known)


def _late_rank(kind: _Kind, cause: str, effect: Effect, rank: int) -> _Found:
    e = kind.e
    cells = np.zeros(e.blame.shape, dtype=bool)
    cells[:, rank] = True
    extra = float(effect.value[rank])
    gain = Gain(
        e.operation,
        rank,
        work_ns=extra if cause == "late" else 0.0,
        drain_ns=extra if cause == "slow receive" else 0.0,
    )
    send_surplus = float(e.send_ns[rank]) - float(np.nanmedian(e.send_ns))
    if cause == "late" and send_surplus > effect.value[rank] / 2:
        cause = "slow send"
    next_step = {
        "late": f"The time passes before it calls {e.operation}, or before its hook: profile what "
        f"rank {rank} runs there (clocks, throttling, other processes, host code).",
        "slow send": "It takes longer to send, not to get there: compare clocks, memory bandwidth "
        f"and num_sms of rank {rank} with the others.",
        "slow receive": "It takes longer to store what has arrived: compare clocks, memory "
        f"bandwidth and num_sms of rank {rank} with the others.",
    }[cause]
    return _found(
        kind,
        COMP_SLOW,
        cause,
        extra,
        float(effect.error[rank]),
        cells,
        gain,
        e.load.size,
        effect.spread,
        rank=rank,
        seen_in=float(effect.above[rank]),
        evidence={
            "later than median us": float(e.late[rank]) / 1e3,
            "own time over median us": float(effect.value[rank]) / 1e3,
            "error us": float(effect.error[rank]) / 1e3,
            **_own_times(e, rank),
        },
        next_step=next_step,
    )


def _slow_paths(kind: _Kind, hot_ranks: set[int]) -> list[_Found]:
    e, paths, limits = kind.e, kind.e.paths, kind.limits
    if kind.clocks_are_lost:
        return []
    seen = np.isfinite(paths.time) | e.m.path_hidden
    expected = np.nan_to_num(e.m.totals["ops"]) > 0
    np.fill_diagonal(expected, False)
    if e.load.size < MIN_RANKS_TO_SPLIT_PATHS:
        # One fast path is all the others are compared with, so its time must be known.
        seen = np.isfinite(paths.time)
    if seen.sum() <= expected.sum() / 2:
        # Nothing to compare the few paths with that could be seen.
        return []
    floor = max(kind.floor, limits.path_fraction * float(np.median(paths.usual[seen])))
    if e.load.size < MIN_RANKS_TO_SPLIT_PATHS:
        # Both directions of a path differ by twice what the clocks are wrong by.
        floor += 2 * limits.clock_ns
    found = []
    for cause, values, others in (
        ("ingress", paths.ingress, paths.egress),
        ("egress", paths.egress, paths.ingress),
    ):
        bar = max(floor, limits.spread * healthy(values)[1])
        bars = np.where(paths.both_sides, bar, bar + _CLOCKS * limits.clock_ns)
        for rank in np.flatnonzero(values > bars).tolist():
            # What is left of a wrong clock shows with opposite signs in row and column.
            if rank not in hot_ranks and values[rank] + others[rank] > bar:
                found.append(_slow_side(kind, cause, rank, float(values[rank])))
    found += _slow_groups(kind, floor)
    return found + _slow_cells(kind, floor)


def _slow_side(kind: _Kind, cause: str, rank: int, effect: float) -> _Found:
    e = kind.e
    into = cause == "ingress"
    return _found_paths(
        kind,
        cause,
        effect,
        (rank, slice(None)) if into else (slice(None), rank),
        2 * e.load.size,
        rank=rank,
        evidence={
            "all paths over median us": effect / 1e3,
            "tokens over even share": float(e.load[rank]),
        },
        next_step=f"Every path {'into' if into else 'out of'} rank {rank} is slow: check its NIC, "
        "its PCIe link and its switch port.",
    )


def _slow_groups(kind: _Kind, floor: float) -> list[_Found]:
    """Pairs of nodes and rails of which all paths are slow."""
    e, paths, limits = kind.e, kind.e.paths, kind.limits
    place = e.m.place
    found = []
    bar = max(floor, limits.spread * healthy(paths.node_pairs)[1])
    for dst, src in np.argwhere(paths.node_pairs > bar).tolist():
        pairs = np.ix_(np.flatnonzero(place.nodes == dst), np.flatnonzero(place.nodes == src))
        effect = float(paths.node_pairs[dst, src])
        found.append(
            _found_paths(
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
            _found_paths(
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


def _slow_cells(kind: _Kind, floor: float) -> list[_Found]:
    e, paths, limits = kind.e, kind.e.paths, kind.limits
    excess = paths.excess
    noise = np.hypot(kind.z_paths * e.m.path_error, limits.spread * paths.spread)
    bar = np.maximum(floor, noise)
    # Most operations show it when even the quickest quarter does.
    above = e.m.path_low - (e.m.path - excess) > 0
    found = []
    for dst, src in np.argwhere((excess > bar) & above).tolist():
        if e.m.path_count[dst, src] < MIN_SEEN:
            continue
        effect = float(excess[dst, src])
        found.append(
            _found_paths(
                kind,
                "path",
                effect,
                (dst, src),
                excess.size,
                paths.spread,
                edge=(src, dst),
                evidence={
                    "path us": float(paths.time[dst, src]) / 1e3,
                    "usual path us": float(paths.usual[dst, src]) / 1e3,
                    "error us": float(e.m.path_error[dst, src]) / 1e3,
                    "tokens": float(e.m.tokens[dst, src]),
                    "operations seen": float(e.m.path_count[dst, src]),
                },
                next_step=f"Only this direction of this pair is slow: check link, NIC and route "
                f"from rank {src} to rank {dst} (error counters, speed, congestion).",
            )
        )
    return found


def _slower_than_before(kind: _Kind, history: History) -> list[_Found]:
    e = kind.e
    found = []
    for link, reference, shift, lasted in history.shifts(
        e, max(kind.floor, kind.limits.path_fraction * _finite_max(e.paths.level))
    ):
        same_node = e.m.place.nodes[:, None] == e.m.place.nodes[None, :]
        cells = same_node if link == 0 else ~same_node
        found.append(
            _found_paths(
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


def _early_receivers(kind: _Kind) -> list[_Found]:
    e = kind.e
    if e.load.size < MIN_RANKS_TO_SPLIT_PATHS:
        return []
    found = []
    early = e.work.reversed()
    for rank in range(e.load.size):
        effect = float(early.value[rank])
        seen = -float(e.late[rank]) > max(2 * float(e.late_error[rank]), _SEEN_LATE * effect)
        if not (kind.exceeds(early, rank) and seen):
            continue
        cells = np.zeros(e.blame.shape, dtype=bool)
        cells[rank, :] = True
        found.append(
            _found(
                kind,
                MIXED_SLOW,
                "early",
                effect,
                float(early.error[rank]),
                cells,
                # Nothing ends earlier when it comes later.
                Gain(e.operation),
                e.load.size,
                early.spread,
                rank=rank,
                seen_in=float(early.above[rank]),
                evidence={
                    "earlier than median us": -float(e.late[rank]) / 1e3,
                    "tokens over even share": float(e.load[rank]),
                    **_own_times(e, rank),
                },
                next_step=f"Rank {rank} has less to do than the others and waits for them; that is "
                "no fault of its own: even out the work.",
            )
        )
    return found


def _found_paths(
    kind: _Kind,
    cause: str,
    effect_ns: float,
    paths: Any,
    num_tests: int,
    spread_ns: float = 0.0,
    **rest: Any,
) -> _Found:
    """A verdict on `paths`, an index into [receiver, source]."""
    cells = np.zeros(kind.e.blame.shape, dtype=bool)
    cells[paths] = True
    np.fill_diagonal(cells, False)
    return _found(
        kind,
        COMM_SLOW,
        cause,
        effect_ns,
        _mean_error(kind.e.m.path_error[cells]),
        cells,
        Gain(kind.e.operation, paths=paths, path_ns=effect_ns),
        num_tests,
        spread_ns,
        **rest,
    )


def _found(
    kind: _Kind,
    verdict_kind: str,
    cause: str,
    effect_ns: float,
    error_ns: float,
    cells: Cells,
    gain: Gain,
    num_tests: int,
    spread_ns: float = 0.0,
    **rest: Any,
) -> _Found:
    e = kind.e
    half = _NORMAL_95 * math.hypot(error_ns, spread_ns)
    verdict = Verdict(
        kind=verdict_kind,
        cause=cause,
        operation=e.operation,
        effect_us=effect_ns / 1e3,
        interval_us=((effect_ns - half) / 1e3, (effect_ns + half) / 1e3)
        if half > 0
        else (float("nan"), float("nan")),
        share=_share(e, cells),
        duration_us=e.duration_ns / 1e3,
        certainty=certainty(effect_ns, error_ns, num_tests) if e.has_stamps else float("nan"),
        **{"rank": None, "edge": None, "seen_in": float("nan"), **rest},
    )
    return _Found(replace(verdict, where=_where(verdict, e.m.place)), kind, gain)


def _where(verdict: Verdict, place: Place) -> str:
    def at(rank: int) -> str:
        return f"{place.hosts[rank]} {place.device}:{place.devices[rank]}".strip()

    def on(node: int) -> str:
        return place.hosts[int(np.flatnonzero(place.nodes == node)[0])]

    if verdict.rank is not None:
        return at(verdict.rank)
    if verdict.edge is not None:
        return f"{at(verdict.edge[0])} > {at(verdict.edge[1])}"
    if verdict.nodes is not None:
        return f"{on(verdict.nodes[0])} > {on(verdict.nodes[1])}"
    return "" if verdict.rail is None else f"all hosts {place.device}:{verdict.rail}"


def _savings(
    kinds: Sequence[_Kind], found: Sequence[_Found]
) -> tuple[list[Verdict], dict[str, float]]:
    """Verdicts with what each cause alone would save, and per kind what all causes would.

    A cause is taken out of all kinds that it shows in: ranks in lockstep make up in one operation
    for what they lost in another.
    """
    judged = [f.verdict for f in found]
    together: dict[str, float] = {}
    for low_latency in (True, False):
        family = [k.e for k in kinds if (k.e.operation in LOW_LATENCY_KINDS) == low_latency]
        operations = [e.operation for e in family]
        causes: dict[tuple[str, Subject], list[int]] = {}
        for i, verdict in enumerate(judged):
            if verdict.operation in operations:
                causes.setdefault(verdict.key, []).append(i)
        if not causes:
            continue
        # A long list is not read to its end.
        alone = list(causes.values())[:_MOST_SAVINGS]
        everything = [i for places in causes.values() for i in places]
        sets = [[found[i].gain for i in places] for places in (*alone, everything)]
        saved = (savings_ns(family, sets) / 1e3).tolist()
        for places, saving_us in zip(alone, saved):
            for i in places:
                judged[i] = replace(judged[i], saving_us=saving_us)
        together.update(dict.fromkeys(operations, saved[-1]))
    return judged, together


def _mean_error(errors: FloatArray) -> float:
    known = errors[np.isfinite(errors)]
    return float(np.sqrt(np.mean(known**2) / known.size)) if known.size else float("nan")


def _finite_max(values: tuple[float, float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=0.0)


def _mostly(share: float, count: float) -> bool:
    """Two standard deviations more often than a fair coin would."""
    return bool(count > 0 and share >= 0.5 + 1.0 / math.sqrt(count))


def _own_times(e: Estimates, rank: int) -> dict[str, float]:
    return {
        "gap us": float(e.gap_ns[rank]) / 1e3,
        "send us": float(e.send_ns[rank]) / 1e3,
        "drain us": float(e.drain_ns[rank]) / 1e3,
    }


def _share(e: Estimates, cells: Cells) -> float:
    total = float(np.sum(e.blame))
    return float(np.sum(e.blame[cells])) / total if total > 0 else 0.0
