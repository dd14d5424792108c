"""What exchanges take and move: of each rank by operator, and of all ranks together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.diagnosis import FloatArray
from .kernels import PHASES, base_name, looks_like_exchange
from .operations import added_up
from .rank_trace import RankTrace, TracedExchange, covered_us


@dataclass(frozen=True)
class OperatorRow:
    """All exchanges of one operator on one rank.

    Attributes:
        rank: of the job, -1 if nobody says.
        name: of the operator, or of the kernel where there is none.
        operation: "dispatch" or "combine".
        count: exchanges.
        mean_us: time of its kernels, gaps between them left out; of the host where there is no GPU.
        share: of all time in which the GPU was busy; NaN without a GPU.
        exposed: of the time, the share in which the GPU did nothing else; NaN without a GPU.
        mean_bytes: rows of the first argument times their bytes; `None` if not all say so.
        mean_local_bytes, mean_nvlink_bytes, mean_rdma_bytes: what stayed on its rank and what crossed which link,
            exactly; `None` if not all calls say so.
        effective_tbps: what crossed links, or else `mean_bytes`, over that time, 1e12 bytes per second, waiting
            included; `None` if neither is known.
    """

    rank: int
    name: str
    operation: str
    count: int
    mean_us: float
    share: float
    exposed: float
    mean_bytes: float | None
    mean_local_bytes: float | None
    mean_nvlink_bytes: float | None
    mean_rdma_bytes: float | None
    effective_tbps: float | None


@dataclass(frozen=True)
class KernelsRow:
    """All kernels of one library, operation and phase, on all ranks.

    Attributes:
        library, operation, phase: as in `kernels.Kernel`.
        count: kernels.
        mean_us: of one kernel.
        share: of the time from the first to the last work on the GPU.
        exposed: of their time, the share in which the GPU did nothing else.
    """

    library: str
    operation: str
    phase: str
    count: int
    mean_us: float
    share: float
    exposed: float


@dataclass(frozen=True)
class UnknownRow:
    """A kernel that is named like an exchange and is in no row of the table, on all ranks; as in `KernelsRow`."""

    name: str
    count: int
    mean_us: float
    share: float


def operators(trace: RankTrace) -> list[OperatorRow]:
    """One row for each operator of a rank, the most expensive first."""
    names = by_name(trace.exchanges)
    rows = [_row(trace, name, exchanges) for name, exchanges in names.items()]
    return sorted(rows, key=lambda row: -row.count * row.mean_us)


def kernel_rows(traces: Sequence[RankTrace]) -> list[KernelsRow]:
    """One row for each library, operation and phase, in the order in which phases follow each other."""
    spans: dict[tuple[str, str, str], list[list[tuple[float, float]]]] = {}
    for place, trace in enumerate(traces):
        for each in trace.exchanges:
            for kernel in each.kernels:
                key = (kernel.row.library, each.operation, kernel.row.phase)
                spans.setdefault(key, [[] for _ in traces])[place].append(kernel.span)
    wall_us = sum(trace.wall_us for trace in traces)
    rows = []
    for (library, operation, phase), of_traces in spans.items():
        times = [_times(each) for each in of_traces]
        count, total_us = sum(map(len, times)), sum(map(_length_us, times))
        shared_us = sum(_shared_us(each, trace.other) for each, trace in zip(times, traces))
        share, exposed = _part(total_us, wall_us), 1 - _part(shared_us, total_us)
        rows.append(KernelsRow(library, operation, phase, count, total_us / count, share, exposed))
    return sorted(rows, key=lambda row: (row.library, row.operation, PHASES.index(row.phase)))


def unknown_rows(traces: Sequence[RankTrace]) -> list[UnknownRow]:
    """What looks like an exchange and is none that is known, the most expensive first."""
    counts: dict[str, int] = defaultdict(int)
    total_us: dict[str, float] = defaultdict(float)
    for trace in traces:
        for name, count, us in trace.work.total_us():
            if looks_like_exchange(name):
                counts[base_name(name)] += count
                total_us[base_name(name)] += us
    wall_us = sum(trace.wall_us for trace in traces)
    rows = [
        UnknownRow(name, count, total_us[name] / count, _part(total_us[name], wall_us))
        for name, count in counts.items()
    ]
    return sorted(rows, key=lambda row: -row.count * row.mean_us)


def by_name(exchanges: Iterable[TracedExchange]) -> dict[str, list[TracedExchange]]:
    """In the order in which names first come."""
    names: dict[str, list[TracedExchange]] = defaultdict(list)
    for exchange in exchanges:
        names[exchange.name].append(exchange)
    return names


def remarks(traces: Iterable[RankTrace]) -> list[str]:
    """What the numbers leave out, once for each reason, with the files that it holds for."""
    files: dict[str, list[str]] = defaultdict(list)
    for trace in traces:
        for reason in _left_out(trace):
            files[reason].append(str(trace.path))
    return [
        f"{first}{f' and {len(more)} more' * bool(more)}: {reason}"
        for reason, (first, *more) in files.items()
    ]


def _left_out(trace: RankTrace) -> Iterator[str]:
    if not trace.exchanges:
        yield "it has no dispatch and no combine"
    elif not trace.has_gpu:
        yield "it has no work on a GPU; times are the host's"
    for name, exchanges in by_name(trace.exchanges).items():
        reasons = [each.sent.why for each in exchanges if each.sent.why and each.links is None]
        for why in dict.fromkeys(reasons):
            yield f"{name} has no bytes: {why}"
        worst = max((each.sent.worst_tokens for each in exchanges), default=0)
        if worst:
            yield (
                f"{name} allocates {worst} rows for the worst case (num_worst_tokens); a combine of "
                "these rows counts all of them, whatever came"
            )


def _row(trace: RankTrace, name: str, exchanges: list[TracedExchange]) -> OperatorRow:
    kernels = _times([kernel.span for each in exchanges for kernel in each.kernels])
    if trace.has_gpu:
        total_us = _length_us(kernels)
        share = _part(total_us, _length_us(trace.busy))
        exposed = 1 - _part(_shared_us(kernels, trace.other), total_us)
    else:
        total_us = sum(each.host_us for each in exchanges)
        share = exposed = math.nan
    count, links = len(exchanges), added_up(each.links for each in exchanges)
    totals = _bytes(exchanges), *(links or [None] * 3)
    rows, local, nvlink, rdma = (None if each is None else each / count for each in totals)
    return OperatorRow(
        trace.rank,
        name,
        exchanges[0].operation,
        count,
        total_us / count,
        share,
        exposed,
        rows,
        local,
        nvlink,
        rdma,
        tbps(moved_bytes(exchanges), total_us),
    )


def _times(spans: Sequence[tuple[float, float]]) -> FloatArray:
    return np.array(spans, np.float64).reshape(-1, 2)


def _length_us(spans: FloatArray) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())


def _part(part: float, whole: float) -> float:
    """NaN of nothing."""
    return part / whole if whole else math.nan


def _shared_us(spans: FloatArray, other: FloatArray) -> float:
    """How long spans overlap others."""
    return float((covered_us(spans[:, 1], other) - covered_us(spans[:, 0], other)).sum())


def moved_bytes(exchanges: Sequence[TracedExchange]) -> int | None:
    """Exactly what crossed links, or else bytes of rows."""
    links = added_up(each.links for each in exchanges)
    return _bytes(exchanges) if links is None else links.crossing


def _bytes(exchanges: Iterable[TracedExchange]) -> int | None:
    """`None` if one of them does not say it."""
    found = [each.sent.num_bytes for each in exchanges]
    return None if None in found else sum(filter(None, found))


def tbps(num_bytes: int | None, us: float) -> float | None:
    return num_bytes / us / 1e6 if num_bytes is not None and us else None
