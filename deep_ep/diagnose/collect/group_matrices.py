"""Summaries of all ranks become N x N matrices: rows wait, columns are waited for.

What a rank did not report is NaN, never zero: a zero would read as "no waiting".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deep_ep.diagnose.collect.rank_summary import KindSummary, Summary, nothing_counted, summarize
from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.diagnose.collect.snapshot_checks import (
    latest_operation,
    require_place,
    require_snapshot,
)
from deep_ep.diagnose.core.diagnosis import (
    Bandwidth,
    BoolArray,
    FloatArray,
    IntArray,
    Measured,
    Timeline,
)
from deep_ep.diagnose.core.robust_stats import median, median_of
from deep_ep.errors import EPArgumentError, EPError, EPTypeError

if TYPE_CHECKING:
    from deep_ep.group import Group

# Kinds in the order in which they are shown; the low-latency kernels', then the normal kernels'.
LOW_LATENCY_KINDS = ("dispatch", "combine")
KINDS = (
    *LOW_LATENCY_KINDS,
    "notify",
    "gateway dispatch",
    "normal dispatch",
    "normal combine",
)
# What Matrices have of each KindSummary, with what stands for a rank that did not report.
_PER_OPERATION = dict.fromkeys(
    ("gap", "span", "held", "drain", "wait", "duration", "received", "last_arrival", "last_path"),
    np.nan,
) | {"last": -1}
_PER_PAIR = dict.fromkeys(
    (
        "wait_parts",
        "late",
        "late_error",
        "send",
        "path",
        "path_error",
        "path_low",
        "path_clock",
        "path_tokens",
        "tokens",
        "active",
    ),
    np.nan,
) | {"path_count": 0.0, "path_hidden": False, "path_seen": False, "path_moments": 0.0, "blame": 0.0}


@dataclass(frozen=True)
class Place:
    """Where the ranks are.

    Attributes:
        hosts: host name per rank, "" where the rank is missing.
        devices: local device index per rank, -1 where the rank is missing.
        nodes: [num_ranks] int64, NVLink domain per rank, numbered in order of rank; -1 if missing.
        device: "cpu" or "cuda", where the counters live.
    """

    hosts: tuple[str, ...]
    devices: tuple[int, ...]
    nodes: IntArray
    device: str

    @property
    def num_ranks(self) -> int:
        """Ranks in the group, the missing ones included."""
        return len(self.hosts)

    @property
    def num_nodes(self) -> int:
        """NVLink domains of which a rank reported."""
        return int(self.nodes.max(initial=-1)) + 1


@dataclass(frozen=True)
class Matrices:
    """One operation kind of all ranks; see `summary.KindSummary` for what the names mean.

    Attributes:
        operation: kind.
        place: where the ranks are.
        present: [num_ranks] bool, who reported.
        counted: operations counted, the most of any rank.
        ops: [n] int64, numbers of the operations with raw stamps; empty: only totals were there.
        gap, span, held, drain, wait, duration, received: [n, num_ranks]; one row of means without stamps.
        last, last_arrival, last_path: [n, num_ranks, 2], the two latest sources of each receiver, -1
            and NaN where there is none.
        wait_parts: [3, num_ranks, num_ranks], late, issue and path part of the waiting.
        path_hidden, path_seen: [num_ranks, num_ranks] bool.
        path_moments: [3, num_ranks, num_ranks].
        late, late_error, send, path, path_error, path_low, path_count, path_clock, path_tokens, tokens,
            blame, active: [num_ranks, num_ranks].
        busy: [num_ranks].
        stamps_arrivals: whether all ranks know true arrivals.
        totals, own: counters by name, [num_ranks, num_ranks] and [num_ranks].
        timeline: of the first rank that has one.
        spoilt: per rank whose counters contradict themselves, how.
    """

    operation: str
    place: Place
    present: BoolArray
    counted: int
    ops: IntArray
    gap: FloatArray
    span: FloatArray
    held: FloatArray
    drain: FloatArray
    wait: FloatArray
    duration: FloatArray
    received: FloatArray
    last: IntArray
    last_arrival: FloatArray
    last_path: FloatArray
    wait_parts: FloatArray
    late: FloatArray
    late_error: FloatArray
    send: FloatArray
    path: FloatArray
    path_error: FloatArray
    path_low: FloatArray
    path_clock: FloatArray
    path_tokens: FloatArray
    path_count: FloatArray
    path_hidden: BoolArray
    path_seen: BoolArray
    path_moments: FloatArray
    tokens: FloatArray
    blame: FloatArray
    active: FloatArray
    busy: FloatArray
    stamps_arrivals: bool
    totals: Mapping[str, FloatArray]
    own: Mapping[str, FloatArray]
    timeline: Timeline | None
    spoilt: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks in the group, the missing ones included."""
        return self.place.num_ranks

    @property
    def num_operations(self) -> int:
        """Operations with raw stamps."""
        return int(self.ops.size)

    @functools.cached_property
    def expected(self) -> BoolArray:
        """[num_ranks, num_ranks]: the paths between two ranks over which anything came."""
        came = self.totals["ops"] > 0
        np.fill_diagonal(came, False)
        return came

    def measured(self) -> Measured:
        """What people look at."""
        late, issue, path = self.wait_parts / 1e3
        ops = np.where(self.totals["ops"] > 0, self.totals["ops"], np.nan)
        return Measured(
            operation=self.operation,
            num_operations=self.num_operations or self.counted,
            first_operation=int(self.ops[0]) if self.ops.size else 0,
            last_operation=int(self.ops[-1]) if self.ops.size else 0,
            duration_us=median_of(self.duration) / 1e3,
            wait_us=late + issue + path,
            late_us=late,
            issue_us=issue,
            path_us=path,
            tokens=self.totals["tokens"] / ops,
            bytes=self.totals["bytes"] / ops,
            gap_us=median(self.gap, 0) / 1e3,
            send_us=self.send_ns() / 1e3,
            drain_us=median(self.drain, 0) / 1e3,
            own_wait_us=median(self.wait, 0) / 1e3,
            bandwidth=self._bandwidth(self.totals["bytes"] / ops) if self.num_operations else None,
            timeline=self.timeline,
        )

    def send_ns(self) -> FloatArray:
        """[num_ranks]: from entering to having issued to every destination, as receivers saw it."""
        seen = np.fmax.reduce(self.send, axis=0, initial=np.nan)
        return np.where(np.isfinite(seen), seen, median(self.span, 0))

    def _bandwidth(self, num_bytes: FloatArray) -> Bandwidth:
        # Bytes per nanosecond are GB/s.
        sent = np.where(np.eye(self.num_ranks, dtype=bool), 0.0, num_bytes)
        into = np.nansum(sent, axis=1)
        slowest = np.fmax.reduce(self.active, axis=0, initial=np.nan)
        return Bandwidth(
            edge=_ratio(sent, self.active),
            ingress=_ratio(into, self.busy),
            egress=_ratio(np.nansum(sent, axis=0), slowest),
            effective=_ratio(into, np.mean(self.wait, axis=0)),
        )


def gather(reports: Sequence[Summary | Snapshot]) -> dict[str, Matrices]:
    """Puts what the ranks of a group report side by side. Local; see `gather_group`.

    Args:
        reports: a Snapshot or Summary per rank, in any order; ranks may be missing.

    Returns:
        Matrices per operation kind, for the kinds that any rank counted.

    Raises:
        EPArgumentError: nothing, a rank twice, groups of different sizes, or a report whose rank,
            sizes and fields do not fit each other.
    """
    if not isinstance(reports, Iterable) or isinstance(reports, (str, bytes, Mapping)):
        raise EPTypeError(
            f"gather: reports is a {type(reports).__name__}; it must be a list with a Snapshot or Summary "
            "of each rank. Pass [diagnose.snapshot(buffer), ...] of all ranks."
        )
    summaries = [_checked(r) if isinstance(r, Summary) else summarize(r) for r in reports]
    summaries.sort(key=lambda s: s.rank)
    ranks = [s.rank for s in summaries]
    sizes = sorted({s.num_ranks for s in summaries})
    if len(sizes) != 1 or len(set(ranks)) != len(ranks):
        raise EPArgumentError(
            f"gather: snapshots are of ranks {ranks} in groups of sizes {sizes}; every rank may "
            "appear once, and all must be of one group. Pass one snapshot per rank."
        )
    place = _place(summaries, sizes[0])
    counted = {kind for s in summaries for kind in (*s.kinds, *s.spoilt)}
    kinds = [k for k in KINDS if k in counted] + sorted(counted.difference(KINDS))
    return {
        kind: replace(
            _gather_kind(
                kind,
                place,
                {s.rank: s.kinds[kind] for s in summaries if kind in s.kinds}
                # Something must say that nothing is known.
                or {ranks[0]: nothing_counted(sizes[0], ranks[0])},
            ),
            spoilt={s.rank: s.spoilt[kind] for s in summaries if kind in s.spoilt},
        )
        for kind in kinds
    }


def _checked(summary: Summary) -> Summary:
    require_place("gather", summary.rank, summary.num_ranks)
    for kind, of_kind in summary.kinds.items():
        size = of_kind.totals["ops"].size
        if size != summary.num_ranks:
            raise EPArgumentError(
                f"gather: the {kind} summary of rank {summary.rank} is of a group of {size} ranks, and its "
                f"num_ranks is {summary.num_ranks}; they must be the same. Pass what "
                "diagnose.summarize() returns."
            )
    return summary


def gather_group(group: Group, take: Callable[[], Snapshot]) -> dict[str, Matrices] | None:
    """Collective: condenses and gathers every rank's counters up to the operation that all have.

    Args:
        group: the ranks.
        take: this rank's snapshot, or window. What it raises on one rank is raised on all.

    Returns:
        The matrices on rank 0, None elsewhere.
    """
    local: Snapshot | None = None
    failure: EPError | None = None
    latest = 0
    try:
        local = take()
        require_snapshot("diagnose", local)
        latest = latest_operation(local)
    except EPError as error:
        failure = error
    told = group.all_gather_object((latest, failure))
    for rank, (_, reason) in enumerate(told):
        if reason is not None:
            raise failure or EPArgumentError(f"diagnose: rank {rank} has no counters: {reason}")
    assert local is not None
    # A ring that does not reach back so far leaves a window that is a little longer.
    with contextlib.suppress(EPArgumentError):
        local = local.until(min((number for number, _ in told if number), default=0))
    everyone = group.all_gather_object(summarize(local))
    return gather(everyone) if group.rank == 0 else None


def _place(summaries: Sequence[Summary], num_ranks: int) -> Place:
    hosts, devices = [""] * num_ranks, [-1] * num_ranks
    nodes = np.full(num_ranks, -1, np.int64)
    number: dict[tuple[str, int], int] = {}
    for s in summaries:
        hosts[s.rank], devices[s.rank] = s.host, s.device_index
        nodes[s.rank] = number.setdefault((s.host, s.node), len(number))
    return Place(tuple(hosts), tuple(devices), nodes, summaries[0].device)


def _gather_kind(kind: str, place: Place, by_rank: Mapping[int, KindSummary]) -> Matrices:
    # Means of ranks without stamps do not mix with medians of the others.
    with_stamps = {rank: s for rank, s in by_rank.items() if s.ops.size}
    used = with_stamps or by_rank
    ops = np.unique(np.concatenate([s.ops for s in used.values()]))
    ranks, counted = np.array(list(used)), np.array(list(by_rank))
    # Where the operations of each rank go, one after the other; means are one row.
    rows = [
        np.searchsorted(ops, s.ops) if ops.size else np.zeros(1, np.int64) for s in used.values()
    ]
    row, column = np.concatenate(rows), np.repeat(ranks, [r.size for r in rows])

    def per_operation(name: str, fill: float) -> FloatArray:
        values = np.concatenate([getattr(s, name) for s in used.values()])
        shape = (max(ops.size, 1), place.num_ranks, *values.shape[1:])
        series = np.full(shape, fill, values.dtype)
        series[row, column] = values
        return series

    def per_rank(reported: IntArray, values: Sequence[Any], fill: float) -> FloatArray:
        """[..., num_ranks, k] of a [..., k] from each rank."""
        stacked = np.moveaxis(np.array(values), 0, -2)
        if reported.size == place.num_ranks:
            return stacked
        shape = (*stacked.shape[:-2], place.num_ranks, stacked.shape[-1])
        matrix = np.full(shape, fill, stacked.dtype)
        matrix[..., reported, :] = stacked
        return matrix

    own = {
        name: per_rank(counted, [[s.own[name]] for s in by_rank.values()], np.nan)[:, 0]
        for name in next(iter(by_rank.values())).own
    }
    totals = {
        name: per_rank(counted, [s.totals[name] for s in by_rank.values()], np.nan)
        for name in next(iter(by_rank.values())).totals
    }
    stacked: dict[str, Any] = {
        **{name: per_operation(name, fill) for name, fill in _PER_OPERATION.items()},
        **{
            name: per_rank(ranks, [getattr(s, name) for s in used.values()], fill)
            for name, fill in _PER_PAIR.items()
        },
    }
    return Matrices(
        operation=kind,
        place=place,
        present=np.isin(np.arange(place.num_ranks), counted),
        counted=int(np.nanmax(own["ops"])),
        ops=ops,
        busy=per_rank(ranks, [[s.busy] for s in used.values()], np.nan)[:, 0],
        stamps_arrivals=all(s.stamps_arrivals for s in used.values()),
        totals=totals,
        own=own,
        timeline=_timeline(with_stamps),
        **stacked,
    )


def _timeline(with_stamps: Mapping[int, KindSummary]) -> Timeline | None:
    for rank, s in sorted(with_stamps.items()):
        recent = s.recent
        if recent is not None:
            arrival = np.where(np.isfinite(recent.arrival), recent.arrival, -np.inf)
            return Timeline(
                observer=rank,
                ops=recent.ops,
                begin_us=(recent.begin - recent.begin[0]) / 1e3,
                entered_us=recent.entered / 1e3,
                arrival_us=recent.arrival / 1e3,
                last=np.argmax(arrival, axis=1).astype(np.int64),
            )
    return None


def _ratio(amount: FloatArray, time: FloatArray) -> FloatArray:
    known = (time > 0) & (amount > 0)
    return np.asarray(np.divide(amount, time, out=np.full(amount.shape, np.nan), where=known))
