"""What an effect must exceed to become a verdict, and the estimates of a kind measured against it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..collect.hops import GATEWAY_HOPS, ROW_HOPS
from ..core.diagnosis import FloatArray
from ..core.robust_stats import FAR, or_zero, student, z_for
from .estimates import Estimates
from .own_work import Effect

# Fewer operations say nothing.
MIN_OPERATIONS = 8
# Nobody reads a report of more verdicts, or paths, to its end.
MOST_READ = 12
# What is certain of one kind of operation must show in another one by this share, and is then named there, too.
BORNE_OUT = 0.4
# Clocks that are off by more tell nothing of single ranks that others must speak for, ns.
CLOCKS_KNOWN_NS = 5_000.0


@dataclass(frozen=True)
class Thresholds:
    """What an effect must exceed to become a verdict.

    Attributes:
        delta_ns: the smallest effect of interest.
        fraction: and of the operation's duration; for ranks of a healthy rank's own time around an operation, too.
        false_alarms: chance of any false verdict in a healthy window, by noise; for paths it is the price of a cause.
        spread: and in standard deviations by which healthy ranks, sides, nodes differ for good.
        load: a rank may be hot when it handles this many times an even share of the tokens.
    """

    delta_ns: float
    fraction: float = 0.02
    false_alarms: float = 1e-6
    spread: float = 5.0
    load: float = 1.09

    @classmethod
    def of(cls, device: str, stamps_arrivals: bool = True) -> Thresholds:
        """Chosen on generated windows of other seeds than those reported; CPU ranks are noisier.

        Args:
            device: where the counters live.
            stamps_arrivals: whether true arrivals are known. CPU ranks that do not know them run in
                wall time, which mostly shows the operating system's scheduler.
        """
        if device == "cuda":
            return cls(delta_ns=3_000.0, spread=4.0)
        return cls(delta_ns=200_000.0 if stamps_arrivals else 5_000_000.0, false_alarms=1e-9)

    def floor_ns(self, duration_ns: float) -> float:
        """The smallest effect worth a verdict in an operation of this duration."""
        relative = self.fraction * duration_ns if math.isfinite(duration_ns) else 0.0
        return max(self.delta_ns, relative)


@dataclass(frozen=True)
class JudgedKind:
    """One operation kind with its thresholds, while causes are looked for."""

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
        return max(self.floor, self.limits.fraction * or_zero(self.e.own_ns))

    def z(self, size: int) -> float:
        """Standard errors that no rank or node of a healthy group of so many exceeds."""
        return z_for(4 * size, self.limits.false_alarms)

    def bar(self, effect: Effect) -> FloatArray:
        """[num_ranks]: what a rank's effect must exceed: be of interest, beyond noise, and beyond what ranks differ by."""
        own, common = (
            student(self.z(noise.error.size), noise.degrees) * noise.usual
            for noise in (effect.own, effect.common)
        )
        alone = math.hypot(own, self.limits.spread * effect.spread)
        # Who is late beside its mates is so whatever its node does.
        of_node = np.where(effect.over_mates > max(self.rank_floor, alone), 0.0, common)
        noise = np.hypot(alone, of_node)
        return np.maximum(self.rank_floor, np.hypot(noise, FAR * effect.by_tokens))
