"""What measured clock offsets contradict each other by, from what all pairs of ranks measured together.

A path that is slow while clocks are measured puts half of its delay into the offset of its pair; the path then
looks half as slow, and its way back as slow. The offsets of N ranks are known N (N - 1) / 2 times, so the one
clock of each rank that most pairs agree on tells which pair is wrong.
"""

from __future__ import annotations

import numpy as np

from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import median

# Fewer ranks cannot outvote a pair.
_MIN_RANKS = 4
# The first sweep finds the clocks, the second what the reference was wrong by.
_SWEEPS = 2


def contradictions(op: IntArray, entered: IntArray) -> FloatArray:
    """`[receiver, source]` ns: offset as measured between two ranks minus that of the joint fit; NaN where unknown.

    Args:
        op: [num_ranks], the operation that each rank tells of; -1: none.
        entered: [receiver, source] ns, when the sources entered it: on the receiver's clock, by the offset that it
            had measured, and on the diagonal on their own; 0: not known.

    Each rank's clock is the median of what its pairs say of it.
    """
    own = np.diagonal(entered)
    known = (op[:, None] == op[None, :]) & (entered != 0) & (own != 0)
    np.fill_diagonal(known, False)
    if np.count_nonzero(known.any(axis=0)) < _MIN_RANKS:
        return np.full(entered.shape, np.nan)
    # Clocks may be days apart: subtracted as integers, which are exact.
    offset = np.where(known, own[None, :] - entered, 0)
    near = offset[np.argmax(known.sum(axis=1))]
    left = np.where(known, (offset - near[None, :] + near[:, None]).astype(np.float64), np.nan)
    clock = np.zeros(op.size)
    for _ in range(_SWEEPS):
        clock = np.nan_to_num(median(left + clock[:, None], 0))
    return left - (clock[None, :] - clock[:, None])
