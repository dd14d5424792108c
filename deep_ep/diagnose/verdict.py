"""The rules: estimates of all ranks become verdicts. Pure; prints nothing, measures nothing.

Order of the rules, each taking the ranks it explains away from the later ones:

1. Mixed-Slow, hot experts: far more tokens than the others *and* more time because of it.
2. Comp-Slow: the others see the rank late *and* its own clock says it worked longer.
3. Comm-Slow: a path slower than its receiver, its source and its tokens explain; or all paths
   into (ingress) or out of (egress) one rank.
4. Mixed-Slow, early receiver: a rank works clearly less than the others, and nothing else is
   the matter.

A cause is named when its effect is big enough to care about, far outside its own error, outside
of how healthy ranks differ from each other, and there in most operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

import numpy as np
import numpy.typing as npt

from deep_ep.diagnose.estimate import (
    MIN_OPERATIONS,
    MIN_RANKS_TO_SPLIT_PATHS,
    Effect,
    Estimates,
    estimate,
    healthy,
)
from deep_ep.diagnose.gather import Matrices
from deep_ep.errors import ranks_text

COMP_SLOW = "comp-slow"
COMM_SLOW = "comm-slow"
MIXED_SLOW = "mixed-slow"

Subject = Union[int, tuple[int, int]]


@dataclass(frozen=True)
class Thresholds:
    """What an effect must exceed to become a verdict.

    Attributes:
        delta_ns: the smallest effect of interest.
        fraction: and of the operation's duration.
        z: and in standard errors of the median over operations.
        rank_spread, path_spread: and in standard deviations between healthy ranks, paths.
        load: a rank is hot when it handles this many times the tokens of the median rank.
    """

    delta_ns: float
    fraction: float = 0.05
    z: float = 4.0
    rank_spread: float = 6.0
    path_spread: float = 6.0
    load: float = 1.5

    @classmethod
    def for_device(cls, device: str) -> Thresholds:
        """Chosen, not tuned: clocks of GPUs agree to about 1 us; CPU ranks are noisier."""
        return cls(delta_ns=3_000.0, fraction=0.02) if device == "cuda" else cls(delta_ns=50_000.0)

    def floor_ns(self, duration_ns: float) -> float:
        """The smallest effect worth a verdict in an operation of this duration."""
        relative = self.fraction * duration_ns if math.isfinite(duration_ns) else 0.0
        return max(self.delta_ns, relative)


@dataclass(frozen=True)
class Verdict:
    """One cause of waiting.

    Attributes:
        kind: COMP_SLOW, COMM_SLOW or MIXED_SLOW.
        cause: what kind of that kind: "late", "path", "ingress", "egress", "hot experts", "early".
        operation: "dispatch" or "combine".
        rank: the rank named, or None when a path is.
        edge: (source, destination) of the path named, or None when a rank is.
        effect_us: microseconds per operation.
        share: of all waiting in this operation, the part in which this cause came last, 0 to 1.
        seen_in: share of the operations that show the effect, 0 to 1.
        evidence: the numbers it rests on, by name with unit.
        next_step: one sentence: what to check next.
    """

    kind: str
    cause: str
    operation: str
    rank: int | None
    edge: tuple[int, int] | None
    effect_us: float
    share: float
    seen_in: float
    evidence: Mapping[str, float] = field(default_factory=dict)
    next_step: str = ""

    @property
    def subject(self) -> Subject:
        """The rank, or the edge (source, destination)."""
        if self.edge is not None:
            return self.edge
        assert self.rank is not None
        return self.rank

    @property
    def key(self) -> tuple[str, Subject]:
        """(kind, subject), to compare with `faults.expected_verdicts`."""
        return self.kind, self.subject


@dataclass(frozen=True)
class Diagnosis:
    """What is known about a group over one window.

    Attributes:
        matrices: per operation kind.
        verdicts: causes of waiting, the largest effect first; empty: no anomaly.
        remarks: what could not be judged, and why; a sentence each.
    """

    matrices: Mapping[str, Matrices]
    verdicts: list[Verdict]
    remarks: list[str]

    @property
    def keys(self) -> set[tuple[str, Subject]]:
        """(kind, subject) of every verdict, to compare with `faults.expected_verdicts`."""
        return {verdict.key for verdict in self.verdicts}


def judge(matrices: Mapping[str, Matrices], thresholds: Thresholds | None = None) -> Diagnosis:
    """Verdicts, with the matrices they rest on and what could not be judged."""
    return Diagnosis(matrices, verdicts(matrices, thresholds), _remarks(matrices))


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
    judged = []
    for m in by_kind.values():
        limits = thresholds or Thresholds.for_device(m.device)
        if m.num_ranks > 1 and _operations_counted(m) >= MIN_OPERATIONS:
            judged.append((estimate(m, limits.delta_ns / 2), limits))

    found = [v for e, limits in judged for v in _hot_experts(e, limits)]
    hot_ranks = {v.rank for v in found if v.rank is not None}
    for e, limits in judged:
        found += _late_ranks(e, limits, hot_ranks)
        found += _slow_paths(e, limits, hot_ranks)
    if not found:
        found = [v for e, limits in judged for v in _early_receivers(e, limits)]
    return sorted(found, key=lambda v: -v.effect_us)


def _remarks(matrices: Mapping[str, Matrices]) -> list[str]:
    if not matrices:
        return ["nothing was counted; call buffer.enable_counters() before the operations"]
    said: list[str] = []
    for kind, m in matrices.items():
        if m.num_ranks < 2:
            return ["one rank: nothing to compare"]
        missing = [rank for rank, host in enumerate(m.hosts) if not host]
        if missing:
            said.append(f"{kind}: no counters from {ranks_text(missing)}")
        counted = _operations_counted(m)
        if counted < MIN_OPERATIONS:
            said.append(
                f"{kind}: undecided, {counted} operations counted; {MIN_OPERATIONS} are needed"
            )
        elif m.num_operations == 0:
            said.append(f"{kind}: no ring of recent operations; judged by totals, which is weaker")
    return said


def _operations_counted(m: Matrices) -> int:
    if m.num_operations:
        return m.num_operations
    ops = m.own["ops"][np.isfinite(m.own["ops"])]
    return int(ops.max()) if ops.size else 0


def _hot_experts(e: Estimates, limits: Thresholds) -> list[Verdict]:
    found = []
    floor = _floor(e, limits)
    for rank in np.flatnonzero(e.load > limits.load).tolist():
        own_times = [
            effect for effect in (e.busy, e.drain) if _exceeds(effect, rank, floor, limits)
        ]
        # A wrong clock of the receiver raises its row and lowers its column by the same amount.
        inbound = min(e.paths.inbound[rank], e.paths.inbound[rank] + e.paths.egress[rank])
        incast = inbound > max(floor, limits.rank_spread * healthy(e.paths.inbound)[1])
        if not (own_times or incast):
            continue
        most = max(own_times, key=lambda effect: float(effect.value[rank]), default=None)
        own_ns, seen_in = (
            (0.0, 1.0) if most is None else (float(most.value[rank]), float(most.above[rank]))
        )
        cells = np.zeros(e.blame_ns.shape, dtype=bool)
        cells[:, rank] = True
        cells[rank, :] |= incast
        found.append(
            Verdict(
                MIXED_SLOW,
                "hot experts",
                e.operation,
                rank,
                None,
                max(own_ns, float(inbound) if incast else 0.0) / 1e3,
                _share(e, cells),
                seen_in,
                {
                    "tokens over median": float(e.load[rank]),
                    "own time over median us": float(e.busy.value[rank]) / 1e3,
                    "path into it over median us": float(e.paths.inbound[rank]) / 1e3,
                    **_own_times(e, rank),
                },
                f"Its experts get {e.load[rank]:.1f} times the usual tokens: look at the routing, "
                "and move or replicate its busiest experts.",
            )
        )
    return found


def _late_ranks(e: Estimates, limits: Thresholds, hot_ranks: set[int]) -> list[Verdict]:
    found = []
    floor = _floor(e, limits)
    for rank in range(e.load.size):
        # Inherited lateness has no counterpart in the rank's own work, and is not its fault. More
        # work that nobody sees, because the rank was done earlier before, costs nobody anything.
        late_ns = float(e.late.value[rank])
        seen_late = late_ns > max(limits.delta_ns, 2 * float(e.late.error[rank]))
        if rank in hot_ranks or not seen_late or not _exceeds(e.work, rank, floor, limits):
            continue
        effect = min(float(e.work.value[rank]), late_ns)
        cells = np.zeros(e.blame_ns.shape, dtype=bool)
        cells[:, rank] = True
        found.append(
            Verdict(
                COMP_SLOW,
                "late",
                e.operation,
                rank,
                None,
                effect / 1e3,
                _share(e, cells),
                float(e.work.above[rank]),
                {
                    "later than median us": float(e.late.value[rank]) / 1e3,
                    "own work over median us": float(e.work.value[rank]) / 1e3,
                    "error us": float(e.work.error[rank]) / 1e3,
                    **_own_times(e, rank),
                },
                _next_step_late(e, rank),
            )
        )
    return found


def _next_step_late(e: Estimates, rank: int) -> str:
    send_surplus = float(e.send_ns[rank]) - float(np.nanmedian(e.send_ns))
    if send_surplus > e.work.value[rank] / 2:
        return (
            f"It takes longer to send, not to get there: compare clocks, memory bandwidth and "
            f"num_sms of rank {rank} with the others."
        )
    return (
        f"The time passes before it calls {e.operation}: profile what rank {rank} runs there "
        "(clocks, throttling, other processes, host code)."
    )


def _slow_paths(e: Estimates, limits: Thresholds, hot_ranks: set[int]) -> list[Verdict]:
    floor = _floor(e, limits)
    paths = e.paths
    num_paths = e.load.size * (e.load.size - 1)
    if np.isfinite(paths.time).sum() < num_paths / 2:
        # Nothing to compare the few paths with that could be seen.
        return []
    sides = []
    for cause, values, others in (
        ("ingress", paths.ingress, paths.egress),
        ("egress", paths.egress, paths.ingress),
    ):
        bar = max(floor, limits.rank_spread * healthy(values)[1])
        for rank in np.flatnonzero(values > bar).tolist():
            # A wrong clock of the rank shows with opposite signs in its row and its column.
            if rank not in hot_ranks and values[rank] + others[rank] > bar:
                sides.append(_slow_side(e, cause, rank, float(values[rank])))

    found = []
    bar = max(floor, limits.path_spread * paths.excess.spread)
    for dst, src in np.argwhere(paths.excess.value > bar).tolist():
        if paths.excess.count[dst, src] < MIN_OPERATIONS:
            continue
        if paths.excess.value[dst, src] <= limits.z * paths.excess.error[dst, src]:
            continue
        if not _mostly(paths.excess.above[dst, src], paths.excess.count[dst, src]):
            continue
        cells = np.zeros(e.blame_ns.shape, dtype=bool)
        cells[dst, src] = True
        found.append(
            Verdict(
                COMM_SLOW,
                "path",
                e.operation,
                None,
                (src, dst),
                float(paths.excess.value[dst, src]) / 1e3,
                _share(e, cells),
                float(paths.excess.above[dst, src]),
                {
                    "path us": float(paths.time[dst, src]) / 1e3,
                    "usual path us": float(np.nanmedian(paths.time)) / 1e3,
                    "error us": float(paths.excess.error[dst, src]) / 1e3,
                    "tokens": float(paths.tokens[dst, src]),
                    "operations seen": float(paths.excess.count[dst, src]),
                },
                f"Only this direction of this pair is slow: check link, NIC and route from rank "
                f"{src} to rank {dst} (error counters, speed, congestion).",
            )
        )
    return sides + found


def _slow_side(e: Estimates, cause: str, rank: int, effect: float) -> Verdict:
    cells = np.zeros(e.blame_ns.shape, dtype=bool)
    into = cause == "ingress"
    cells[(rank, slice(None)) if into else (slice(None), rank)] = True
    return Verdict(
        COMM_SLOW,
        cause,
        e.operation,
        rank,
        None,
        effect / 1e3,
        _share(e, cells),
        1.0,
        {"all paths over median us": effect / 1e3, "tokens over median": float(e.load[rank])},
        f"Every path {'into' if into else 'out of'} rank {rank} is slow: check its NIC, its PCIe "
        "link and its switch port.",
    )


def _early_receivers(e: Estimates, limits: Thresholds) -> list[Verdict]:
    if e.load.size < MIN_RANKS_TO_SPLIT_PATHS:
        return []
    found = []
    for rank in range(e.load.size):
        effect = -float(max(e.work.value[rank], e.late.value[rank]))
        if not effect > _bar(e.work, rank, _floor(e, limits), limits):
            continue
        if not _mostly(e.work.below[rank], e.work.count[rank]):
            continue
        cells = np.zeros(e.blame_ns.shape, dtype=bool)
        cells[rank, :] = True
        found.append(
            Verdict(
                MIXED_SLOW,
                "early",
                e.operation,
                rank,
                None,
                effect / 1e3,
                _share(e, cells),
                float(e.work.below[rank]),
                {
                    "earlier than median us": -float(e.late.value[rank]) / 1e3,
                    "tokens over median": float(e.load[rank]),
                    **_own_times(e, rank),
                },
                f"Rank {rank} has less to do than the others and waits for them; that is no fault "
                "of its own: even out the work.",
            )
        )
    return found


def _floor(e: Estimates, limits: Thresholds) -> float:
    # Means carry every hiccup and have no error to compare with: ask for twice as much.
    return limits.floor_ns(e.duration_ns) * (2.0 if e.source == "totals" else 1.0)


def _exceeds(effect: Effect, rank: int, floor: float, limits: Thresholds) -> bool:
    """Whether a rank's effect is big, certain, out of the ordinary and usual for the rank."""
    return bool(
        effect.value[rank] > _bar(effect, rank, floor, limits)
        and effect.count[rank] >= MIN_OPERATIONS
        and _mostly(effect.above[rank], effect.count[rank])
    )


def _bar(effect: Effect, rank: int, floor: float, limits: Thresholds) -> float:
    error = float(effect.error[rank])
    return max(floor + 3 * error, limits.z * error, limits.rank_spread * effect.spread)


def _mostly(share: float, count: float) -> bool:
    """Two standard deviations more often than a fair coin would."""
    return bool(count > 0 and share >= 0.5 + 1.0 / math.sqrt(count))


def _own_times(e: Estimates, rank: int) -> dict[str, float]:
    return {
        "gap us": float(e.gap_ns[rank]) / 1e3,
        "send us": float(e.send_ns[rank]) / 1e3,
        "drain us": float(e.drain_ns[rank]) / 1e3,
    }


def _share(e: Estimates, cells: npt.NDArray[np.bool_]) -> float:
    total = float(np.sum(e.blame_ns))
    return float(np.sum(e.blame_ns[cells])) / total if total > 0 else 0.0
