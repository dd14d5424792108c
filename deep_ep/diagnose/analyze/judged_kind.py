"""The estimates of a kind of operation, measured against its thresholds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..collect.hops import GATEWAY_HOPS, ROW_HOPS
from ..core.diagnosis import FloatArray
from ..core.robust_stats import FAR, or_zero, student, z_for
from .estimates import Estimates
from .own_work import Effect
from .thresholds import Thresholds


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
        return self.limits.floor_ns(self.e.duration_ns)

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
