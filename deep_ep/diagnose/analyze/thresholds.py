"""What an effect must exceed to become a verdict, and the estimates of a kind measured against it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from ..collect.hops import GATEWAY_HOPS, ROW_HOPS
from ..core.robust_stats import median_of, or_zero, z_for
from .estimates import Effect, Estimates
from .path_causes import Explained, explain
from .path_model import MIN_RANKS_TO_SPLIT_PATHS

# Fewer operations say nothing.
MIN_OPERATIONS = 8
# Beyond so many `clock_ns` it is said that clocks are off.
_CLOCKS_OFF = 10.0
# That a rank takes longer is certain before its tokens are asked; standard errors of their part.
_EXPLAINED = 3.0


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
        clock_ns: how far measured clock offsets may be wrong soon after; 0: ranks have one clock.
    """

    delta_ns: float
    fraction: float = 0.02
    own_fraction: float = 0.02
    path_fraction: float = 0.15
    false_alarms: float = 1e-7
    spread: float = 6.0
    load: float = 1.12
    high_load: float = 1.35
    clock_ns: float = 0.0

    @classmethod
    def of(cls, device: str, stamps_arrivals: bool = True) -> Thresholds:
        """Chosen on generated windows of other seeds than those reported; CPU ranks are noisier.

        Args:
            device: where the counters live.
            stamps_arrivals: whether true arrivals are known. CPU ranks that do not know them run in
                wall time, which mostly shows the operating system's scheduler.
        """
        if device == "cuda":
            return cls(delta_ns=3_000.0, path_fraction=0.07, spread=4.0, clock_ns=4_000.0)
        return cls(delta_ns=100_000.0 if stamps_arrivals else 5_000_000.0)

    def floor_ns(self, duration_ns: float) -> float:
        """The smallest effect worth a verdict in an operation of this duration."""
        relative = self.fraction * duration_ns if math.isfinite(duration_ns) else 0.0
        return max(self.delta_ns, relative)


@dataclass(frozen=True)
class JudgedKind:
    """One operation kind with its thresholds, while the rules run."""

    e: Estimates
    limits: Thresholds

    @property
    def shows_ranks(self) -> bool:
        """Whether ranks spend time of their own here; on the hop of gateways only paths do."""
        return self.e.operation not in GATEWAY_HOPS

    @property
    def carries_rows(self) -> bool:
        """Whether it is a hop of a normal operation that rows travel on."""
        return self.e.operation in ROW_HOPS

    @property
    def floor(self) -> float:
        """The smallest effect worth a verdict, ns."""
        # Means carry every hiccup and have no error to compare with: ask for twice as much.
        return self.limits.floor_ns(self.e.duration_ns) * (1.0 if self.e.has_stamps else 2.0)

    @property
    def rank_floor(self) -> float:
        """And of a rank's own time."""
        return max(self.floor, self.limits.own_fraction * or_zero(self.e.own_ns))

    @property
    def clocks_off_us(self) -> float:
        """How far clocks have drifted since they were measured, where that is worth a word; else 0."""
        off_ns = float(np.abs(self.e.paths.clock).max(initial=0.0))
        worth_ns = _CLOCKS_OFF * self.limits.clock_ns
        return off_ns / 1e3 if 0 < worth_ns < off_ns else 0.0

    @property
    def is_too_small_for_clocks(self) -> bool:
        """Whether nobody knows how far clocks are off and there are too few ranks to find out."""
        known = np.isfinite(self.e.paths.clock_error[self.e.m.expected]).any()
        return self.clocks_unknown and not known and self.is_small

    @property
    def is_small(self) -> bool:
        """Whether the fastest path is what all others are compared with."""
        return bool(self.e.load.size < MIN_RANKS_TO_SPLIT_PATHS)

    @property
    def clocks_unknown(self) -> bool:
        """Whether ranks have clocks of their own, of which rings need not tell how far they are off."""
        return self.limits.clock_ns > 0

    @functools.cached_property
    def path_floors(self) -> tuple[float, float]:
        """The smallest effects on paths that are worth a verdict, within nodes and between, ns."""
        usual, between = self.e.paths.usual, self.e.paths.between
        within, far = (
            max(self.floor, self.limits.path_fraction * or_zero(median_of(usual[kind])))
            for kind in (self.e.m.expected & ~between, self.e.m.expected & between)
        )
        return within, far

    @functools.cached_property
    def explained(self) -> Explained:
        """What slow paths have in common."""
        # What is too small for a verdict on a group is still the cause of what its paths have.
        return explain(self.e.m, self.e.paths, self.floor, self.limits.spread)

    @property
    def z_ranks(self) -> float:
        """Standard errors that no rank of a healthy group exceeds."""
        return z_for(4 * self.e.load.size, self.limits.false_alarms)

    @property
    def z_paths(self) -> float:
        """And no path."""
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
            and mostly(effect.above[rank], effect.count[rank])
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
            and mostly(e.busy.above[rank], e.busy.count[rank])
        )


def mostly(share: float, count: float) -> bool:
    """Two standard deviations more often than a fair coin would."""
    return bool(count > 0 and share >= 0.5 + 1.0 / math.sqrt(count))
