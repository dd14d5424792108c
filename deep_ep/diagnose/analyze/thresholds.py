"""What an effect must exceed to become a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
