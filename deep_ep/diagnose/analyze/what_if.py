"""What the program would gain without a cause: its operations are replayed, with and without it.

A cause does not cost what it takes. A rank that is late by d starts ahead by one path time, since
the data of the others is there when it comes; three equally late ranks cost as much as one; a slow
path holds up its receiver, and that one everybody else in the next operation. So all ranks are run
through the recorded operations again, with their own times of each operation:

    entered = exit + gap                    issued = entered + send
    ready_i = max(entered_i + span_i, max_j (issued_j + path_ij))        exit = ready + drain

Paths take their median, but the two latest in each operation what they took: the latest of many
is late by chance, also when nothing is the matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import median
from .estimates import Estimates

# Operations replayed at most, and cells looked at, which bounds the time for large groups. What is
# there now and then only takes more operations.
_MOST_OPERATIONS, _MOST_AT_TIMES = 40, 192
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
        is_recorded: False where the rank did not report, so that its time is in no recorded operation.
        is_shared: whether what is taken away from the rank has to be done by all ranks together.
        paths: index into [receiver, source], or None.
        path_ns: of these paths; one number, or one for each.
    """

    operation: str
    rank: int | None = None
    work_ns: float = 0.0
    work_each: FloatArray | None = None
    drain_ns: float = 0.0
    is_recorded: bool = True
    is_shared: bool = False
    paths: Any = None
    path_ns: float | FloatArray = 0.0


@dataclass(frozen=True)
class _Step:
    """One recorded operation: which of its kind; `[num_ranks]` each, ns.

    Attributes:
        kind: of the operations.
        at: its number among them.
        gap, span, drain: own times of the ranks.
        paths, longer: [k] each, paths (index into all of [source, receiver], one after the other) that
            took longer than usual, or shorter, by ns.
    """

    kind: int
    at: int
    gap: FloatArray
    span: FloatArray
    drain: FloatArray
    paths: IntArray
    longer: FloatArray


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
    wanted = (
        _MOST_AT_TIMES
        if any(gain.work_each is not None for gains in sets for gain in gains)
        else _MOST_OPERATIONS
    )
    most = int(min(max(_MOST_CELLS // cells, _FALLING_IN + 2), wanted))
    usual = [_paths(e) for e in estimates]
    steps = _steps(estimates, usual, most)
    if len(steps) <= _FALLING_IN:
        return np.full(len(sets), np.nan)
    ends = _end(estimates, usual, steps, [(), *sets])
    saved: FloatArray = np.maximum(ends[0] - ends[1:], 0.0) / (len(steps) - _FALLING_IN)
    return saved


def _steps(estimates: Sequence[Estimates], usual: Sequence[FloatArray], most: int) -> list[_Step]:
    """The latest operations of all kinds in their order; what is not known is as usual."""
    order = sorted(
        (int(op), i, at) for i, e in enumerate(estimates) for at, op in enumerate(e.m.ops)
    )
    latest = order[-most:]
    steps: list[_Step] = []
    own, longer = [], []
    for i, (e, paths) in enumerate(zip(estimates, usual)):
        m = e.m
        own.append(
            [_filled(m.gap, e.gap_ns), _filled(m.span, e.span_ns), _filled(m.drain, e.drain_ns)]
        )
        longer.append(_longer(e, paths, [at for _, kind, at in latest if kind == i]))
    for _, i, at in latest:
        gap, span, drain = (x[at] for x in own[i])
        steps.append(_Step(i, at, gap, span, drain, *next(longer[i])))
    return steps


def _filled(series: FloatArray, usual: FloatArray) -> FloatArray:
    """`[n, num_ranks]` with what is usual for each rank where nothing is known; of silent ones the others'."""
    known = np.where(np.isfinite(series), series, usual)
    if not np.isfinite(usual).all():
        known = np.where(np.isfinite(known), known, median(known, 1)[:, None])
    return np.where(np.isfinite(known), known, 0.0)


def _longer(
    e: Estimates, usual: FloatArray, at: Sequence[int]
) -> Iterator[tuple[IntArray, FloatArray]]:
    """The latest sources' paths of some operations, and how much longer than usual; as in `_Step`."""
    last, took = e.m.last[at], e.m.last_path[at]
    clock = e.paths.clock
    receiver = np.arange(last.shape[1])[None, :, None]
    longer = took - clock[receiver] + clock[last] - usual[last, receiver]
    known = np.isfinite(longer) & (last != receiver) & (last >= 0)
    # What is not known is nothing on a path to oneself.
    paths = np.where(known, last, receiver) * last.shape[1] + receiver
    values = np.where(known, longer, 0.0)
    shape = len(at), int(np.prod(last.shape[1:]))
    return zip(paths.reshape(shape), values.reshape(shape))


def _end(
    estimates: Sequence[Estimates],
    usual: Sequence[FloatArray],
    steps: Sequence[_Step],
    sets: Sequence[Sequence[Gain]],
) -> FloatArray:
    """[len(sets)]: when the ranks are done with all steps but the first few, on average."""
    position = {e.operation: i for i, e in enumerate(estimates)}
    num_ranks, num_sets = estimates[0].load.size, len(sets)
    work, drain, at_times = _own_gains(sets, position, num_ranks)
    healed = [_healed_elsewhere(sets, e.operation, num_ranks) for e in estimates]
    paths = [_paths_of_sets(*each, sets) for each in zip(estimates, usual, healed)]
    overlap = [np.maximum(np.nan_to_num(e.span_ns - e.send_ns), 0.0) for e in estimates]

    on_the_way = np.empty((num_ranks, num_ranks))
    of_all = on_the_way.reshape(-1)
    left, arrival = np.zeros((num_sets, num_ranks)), np.empty((num_sets, num_ranks))
    begin = left.mean(axis=1)
    for number, step in enumerate(steps):
        if number == _FALLING_IN:
            begin = left.mean(axis=1)
        k = step.kind
        less = work[k]
        for s, rank, each in at_times[k]:
            less = less.copy() if less is work[k] else less
            less[s, rank] += each[step.at]
        entered = left + np.maximum(step.gap - less, 0.0)
        waits_from = entered + step.span
        issued = waits_from - overlap[k]
        for s in range(num_sets):
            np.add(issued[s][:, None], paths[k][s], out=on_the_way)
            longer = step.longer
            mask = healed[k][s]
            if mask is not None:
                cut = mask.reshape(-1)[step.paths]
                longer = np.where(cut, np.minimum(longer, 0.0), longer)
            of_all[step.paths] += longer
            np.max(on_the_way, axis=0, out=arrival[s])
        left = np.maximum(waits_from, arrival) + np.maximum(step.drain - drain[k], 0.0)
    return np.asarray(left.mean(axis=1) - begin)


def _own_gains(
    sets: Sequence[Sequence[Gain]], position: Mapping[str, int], num_ranks: int
) -> tuple[FloatArray, FloatArray, list[list[tuple[int, int, FloatArray]]]]:
    """What ranks need less, per kind: [kinds, sets, num_ranks] of work, of drain; and in some operations.

    The last is a list of (set, rank, [n]) for each kind.
    """
    work = np.zeros((len(position), len(sets), num_ranks))
    drain = np.zeros(work.shape)
    at_times: list[list[tuple[int, int, FloatArray]]] = [[] for _ in position]
    recorded: set[tuple[int, int]] = set()
    for s, gains in enumerate(sets):
        for gain in gains:
            if gain.rank is None:
                continue
            kind = position[gain.operation]
            if not gain.is_recorded and (kind, gain.rank) not in recorded:
                recorded.add((kind, gain.rank))
                work[kind, :, gain.rank] -= gain.work_ns
            work[kind, s, gain.rank] += gain.work_ns
            drain[kind, s, gain.rank] += gain.drain_ns
            if gain.is_shared:
                work[kind, s] -= gain.work_ns / num_ranks
                drain[kind, s] -= gain.drain_ns / num_ranks
            if gain.work_each is not None:
                at_times[kind].append((s, gain.rank, gain.work_each))
    return work, drain, at_times


def _paths_of_sets(
    e: Estimates,
    usual: FloatArray,
    healed: Sequence[BoolArray | None],
    sets: Sequence[Sequence[Gain]],
) -> list[FloatArray]:
    """[source, receiver] for each set; most causes leave the paths as they are."""
    paths = [usual] * len(sets)
    for s, gains in enumerate(sets):
        mask = healed[s]
        if mask is not None:
            paths[s] = np.where(mask, np.fmin(usual, e.paths.usual.T), usual)
        for gain in gains:
            if gain.paths is not None and gain.operation == e.operation:
                if paths[s] is usual:
                    paths[s] = usual.copy()
                paths[s].T[gain.paths] -= gain.path_ns
                if gain.is_shared:
                    paths[s] += (np.mean(gain.path_ns) / usual.shape[0]) * ~np.eye(
                        len(usual), dtype=bool
                    )
    return paths


def _healed_elsewhere(
    sets: Sequence[Sequence[Gain]], operation: str, num_ranks: int
) -> list[BoolArray | None]:
    """[source, receiver] for each set: paths with a cause in another kind, and none in this one.

    Where a path is hardly ever waited for, nothing is found; but it is the same path.
    """
    healed: list[BoolArray | None] = []
    for gains in sets:
        here, elsewhere = np.zeros((2, num_ranks, num_ranks), dtype=bool)
        for gain in gains:
            if gain.paths is not None:
                (here if gain.operation == operation else elsewhere).T[gain.paths] = True
        only_elsewhere = elsewhere & ~here
        healed.append(only_elsewhere if only_elsewhere.any() else None)
    return healed


def _paths(e: Estimates) -> FloatArray:
    """[source, receiver] median path times, the usual ones where none was seen; none to oneself."""
    seen = e.paths.time
    expected, present = e.m.expected, e.m.present[:, None]
    # Of what comes into a rank that did not report the way back is the best guess.
    seen, expected = (np.where(present, x, x.T) for x in (seen, expected))
    paths = np.where(np.isfinite(seen), seen, e.paths.usual)
    paths = np.where(np.isfinite(paths), paths, 0.0)
    paths = np.where(expected, paths, -np.inf)
    np.fill_diagonal(paths, 0.0)
    return np.ascontiguousarray(paths.T)
