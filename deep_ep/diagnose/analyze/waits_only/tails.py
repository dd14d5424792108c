"""What happens by chance, with tails as heavy as those of an exponential distribution.

A sum of waiting over many operations has lighter ones, so these bounds are on the safe side.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from deep_ep.diagnose.core.diagnosis import FloatArray
from deep_ep.diagnose.core.robust_stats import MAD_TO_SIGMA, lower_median, quantile_of

# Degrees of freedom up to which both sides of the noise are looked at, and the fewest that tell
# anything about it: those of 4 ranks.
_FEW, _FEWEST = 12.0, 5.0
# More cells than this know no better how noisy they are.
_SAMPLE = 50_000


def noise(residual: FloatArray) -> tuple[float, float]:
    """Of cells: decay length of the upper tail if it is exponential, and standard deviation.

    Args:
        residual: what fitted rows and columns leave over, NaN where unknown.
    """
    cells = np.isfinite(residual)
    known = residual[cells]
    if known.size < 2:
        return 0.0, 0.0
    # Rows and columns were fitted to the same cells, which makes them look quieter.
    rows, columns = np.sum(cells.any(axis=1)), np.sum(cells.any(axis=0))
    free = max(known.size - rows - columns + 1, 1)
    fitted = math.sqrt(known.size / free) * max(1.0, _FEWEST / free)
    known = known[:: known.size // _SAMPLE + 1]
    middle = lower_median(known)
    away = np.abs(known - middle)
    tail = (quantile_of(known, 0.9) - middle) / math.log(5.0)
    # The upper tenth of a few cells says little; what lies below the middle helps out.
    tail = max(tail, quantile_of(away, 0.75) / math.log(2.0) * min(_FEW / free, 1.0))
    # Of a few cells many may be slow: the lower median, where `stats.scale` takes the mean of two.
    return fitted * tail, fitted * MAD_TO_SIGMA * lower_median(away)


def tail_of_median(count: npt.NDArray[Any], chance: float) -> FloatArray:
    """How far the median of `count` exponential values exceeds ln 2 that rarely (Chernoff)."""
    rest = np.exp(2 * math.log(chance) / np.maximum(count, 1))
    return np.asarray(-np.log((1 - np.sqrt(1 - rest)) / 2) - math.log(2.0))


def chance_of_median(effect: FloatArray, tail: Any, count: npt.NDArray[Any]) -> FloatArray:
    """The inverse of `tail_of_median`: a bound on the probability of such a median.

    Args:
        effect: how far medians lie above what is usual.
        tail: decay length of the cells, a number or as many as there are effects.
        count: cells under each median.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.minimum(np.exp(-np.maximum(effect / tail, 0.0)) / 2, 0.5)
    return np.asarray(np.where(effect > 0, np.sqrt(4 * share * (1 - share)) ** count, 1.0))


def chance_of_one(excess: float, tail: float) -> float:
    """Probability that a single cell exceeds what is usual so far."""
    return math.exp(-excess / tail) if tail > 0 else 0.0
