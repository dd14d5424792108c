"""Links that hold up their sender: stores into a slow NVLink wait, and show as sending, not as a path.

A rank that sends slowly takes longer for every destination. One whose stores wait on one link takes
longer for that destination only; those that come after it are handed over later by as much, but none
of them takes longer.
"""

from __future__ import annotations

import numpy as np

from ..collect.group_matrices import Matrices
from ..core.diagnosis import FloatArray, IntArray
from ..core.robust_stats import median, median_of

# A stall is at least so long, ns, and so many times as long as the next longest step from one
# destination to the next.
_LEAST_NS = 3_000.0
_TIMES_LONGER = 5.0
# Of a source so many destinations are known.
_MIN_DESTINATIONS = 4


def stalls(m: Matrices, classes: IntArray) -> FloatArray:
    """[receiver, source]: by how much a link within the node held up its sender, ns; mostly 0.

    Args:
        m: the kind.
        classes: [receiver, source], kind of link, 0 within a node.
    """
    found = np.zeros(classes.shape)
    # A source that waits for slots is held up by its receiver.
    handed_over = m.send - m.credit
    for source in _suspects(handed_over, classes).tolist():
        when = handed_over[:, source]
        order = np.argsort(when)[: int(np.isfinite(when).sum())]
        steps = np.diff(when[order])
        if order.size < _MIN_DESTINATIONS:
            continue
        longest = int(np.argmax(steps))
        others = np.delete(steps, longest)
        held_up = order[longest + 1]
        stall = float(steps[longest] - np.median(others))
        if longest + 2 == order.size:
            # None waited for it, and its usual place may be any other.
            usual = handed_over[held_up] - median(handed_over, 0)
            stall = float(usual[source]) - median_of(np.delete(usual, source))
        alone = steps[longest] > _TIMES_LONGER * max(float(others.max()), _LEAST_NS / _TIMES_LONGER)
        if alone and stall > _LEAST_NS and classes[held_up, source] == 0:
            found[held_up, source] = stall
    return found


def _suspects(handed_over: FloatArray, classes: IntArray) -> IntArray:
    """Sources that hand over to one rank of their node much later than to the others."""
    when = np.where(classes == 0, handed_over, np.nan)
    with_known = np.isfinite(when).any(axis=0)
    last = np.nanmax(when[:, with_known], axis=0)
    first = np.nanmin(when[:, with_known], axis=0)
    return np.asarray(np.flatnonzero(with_known)[last - first > _LEAST_NS])
