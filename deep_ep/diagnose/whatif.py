"""What the program would gain without a cause: its operations are replayed, with and without it.

A cause does not cost what it takes. A rank that is late by d starts ahead by one path time, since
the data of the others is there when it comes; three equally late ranks cost as much as one; a slow
path holds up its receiver, and that one everybody else in the next operation. So all ranks are run
through the recorded operations again, with their own times of each operation and the median paths:

    entered = exit + gap                    issued = entered + send
    ready_i = max(entered_i + span_i, max_j (issued_j + path_ij))        exit = ready + drain
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deep_ep.diagnose.estimate import Estimates
from deep_ep.diagnose.findings import FloatArray
from deep_ep.diagnose.stats import median

# Operations replayed at most, and cells looked at, which bounds the time for large groups.
_MOST_OPERATIONS = 48
_MOST_CELLS = 2e7
# Until the ranks have fallen into the step of the replay.
_FALLING_IN = 4


@dataclass(frozen=True)
class Gain:
    """What one cause adds to one operation kind; ns to be taken away.

    Attributes:
        operation: kind.
        rank: whose own time, or None.
        work_ns, drain_ns: of the time before waiting, after the last arrival.
        work_each: [n] of the time before waiting in each operation of the kind, or None.
        paths: index into [receiver, source], or None.
        path_ns: of these paths.
    """

    operation: str
    rank: int | None = None
    work_ns: float = 0.0
    work_each: FloatArray | None = None
    drain_ns: float = 0.0
    paths: Any = None
    path_ns: float = 0.0


@dataclass(frozen=True)
class _Step:
    """One recorded operation: which of its kind; and `[num_ranks]` each, ns."""

    kind: int
    at: int
    gap: FloatArray
    span: FloatArray
    drain: FloatArray


def savings_ns(estimates: Sequence[Estimates], sets: Sequence[Sequence[Gain]]) -> FloatArray:
    """[len(sets)]: by how much an operation would be shorter, on average, without each set.

    Args:
        estimates: of kinds that follow each other (dispatch and combine).
        sets: causes that are taken away together.

    Returns:
        Nanoseconds per operation, whatever its kind; NaN without raw stamps.
    """
    if not all(e.has_stamps for e in estimates) or not sets:
        return np.full(len(sets), np.nan)
    cells = estimates[0].load.size ** 2 * (len(sets) + 1)
    most = int(min(max(_MOST_CELLS // cells, _FALLING_IN + 2), _MOST_OPERATIONS))
    steps = _steps(estimates, most)
    if len(steps) <= _FALLING_IN:
        return np.full(len(sets), np.nan)
    position = {e.operation: i for i, e in enumerate(estimates)}
    ends = _end(estimates, steps, [(), *sets], position)
    saved: FloatArray = np.maximum(ends[0] - ends[1:], 0.0) / (len(steps) - _FALLING_IN)
    return saved


def _steps(estimates: Sequence[Estimates], most: int) -> list[_Step]:
    """The latest operations of all kinds in their order; what is not known is as usual."""
    order = sorted(
        (int(op), i, at) for i, e in enumerate(estimates) for at, op in enumerate(e.m.ops)
    )
    series = [[_filled(x) for x in (e.m.gap, e.m.span, e.m.drain)] for e in estimates]
    return [_Step(i, at, *(x[at] for x in series[i])) for _, i, at in order[-most:]]


def _filled(series: FloatArray) -> FloatArray:
    """`[n, num_ranks]` with each rank's median where nothing is known."""
    known = np.where(np.isfinite(series), series, median(series, 0))
    return np.where(np.isfinite(known), known, 0.0)


def _end(
    estimates: Sequence[Estimates],
    steps: Sequence[_Step],
    sets: Sequence[Sequence[Gain]],
    position: Mapping[str, int],
) -> FloatArray:
    """[len(sets)]: when the ranks are done with all steps but the first few, on average."""
    num_ranks, num_sets = estimates[0].load.size, len(sets)
    work = np.zeros((len(estimates), num_sets, num_ranks))
    drain = np.zeros(work.shape)
    at_times = [
        (s, position[gain.operation], gain.rank, gain.work_each)
        for s, gains in enumerate(sets)
        for gain in gains
        if gain.work_each is not None
    ]
    usual = [_paths(e) for e in estimates]
    # Most causes leave the paths as they are.
    paths = [[kind] * num_sets for kind in usual]
    for s, gains in enumerate(sets):
        for gain in gains:
            kind = position[gain.operation]
            if gain.rank is not None:
                work[kind, s, gain.rank] += gain.work_ns
                drain[kind, s, gain.rank] += gain.drain_ns
            if gain.paths is not None:
                if paths[kind][s] is usual[kind]:
                    paths[kind][s] = usual[kind].copy()
                paths[kind][s].T[gain.paths] -= gain.path_ns
    overlap = [np.maximum(np.nan_to_num(median(e.m.span, 0) - e.send_ns), 0.0) for e in estimates]

    on_the_way = np.empty((num_ranks, num_ranks))
    left, arrival = np.zeros((num_sets, num_ranks)), np.empty((num_sets, num_ranks))
    begin = left.mean(axis=1)
    for number, step in enumerate(steps):
        if number == _FALLING_IN:
            begin = left.mean(axis=1)
        k = step.kind
        less = work[k]
        if at_times:
            less = less.copy()
            for s, kind, rank, each in at_times:
                if kind == k:
                    less[s, rank] += each[step.at]
        entered = left + np.maximum(step.gap - less, 0.0)
        waits_from = entered + step.span
        issued = waits_from - overlap[k]
        for s in range(num_sets):
            np.add(issued[s][:, None], paths[k][s], out=on_the_way)
            np.max(on_the_way, axis=0, out=arrival[s])
        left = np.maximum(waits_from, arrival) + np.maximum(step.drain - drain[k], 0.0)
    return np.asarray(left.mean(axis=1) - begin)


def _paths(e: Estimates) -> FloatArray:
    """[source, receiver] median path times, the usual ones where none was seen; none to oneself."""
    clock = e.paths.clock
    seen = e.paths.time - clock[:, None] + clock[None, :]
    paths = np.where(np.isfinite(seen), seen, e.paths.usual)
    paths = np.where(np.isfinite(paths), paths, 0.0)
    paths = np.where(e.m.expected, paths, -np.inf)
    np.fill_diagonal(paths, 0.0)
    return np.ascontiguousarray(paths.T)
