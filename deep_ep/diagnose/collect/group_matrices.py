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

from ..core.diagnosis import Bandwidth, BoolArray, FloatArray, IntArray, Measured, Timeline
from ..core.package import EPArgumentError, EPError, EPTypeError
from ..core.robust_stats import median, median_of
from .fields import FIELDS, Field, Numbers
from .hops import NORMAL_DISPATCH, NORMAL_KINDS, NOTIFY
from .joint_clocks import contradictions
from .rank_summary import KindSummary, Summary, nothing_counted, summarize
from .snapshot import Snapshot
from .snapshot_checks import latest_operation, require_snapshot

if TYPE_CHECKING:
    from ..core.package import Group

# Kinds in the order in which they are shown; the low-latency kernels', then the normal kernels'.
LOW_LATENCY_KINDS = ("dispatch", "combine")
KINDS = (*LOW_LATENCY_KINDS, *NORMAL_KINDS)
# Kinds in which every source tells when it entered; on the other hops a gateway may.
_SAYS_WHO_ENTERED = (*LOW_LATENCY_KINDS, NOTIFY)


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
class Matrices(Numbers):
    """One operation kind of all ranks.

    Attributes:
        operation: kind.
        place: where the ranks are.
        present: [num_ranks] bool, who reported.
        ops: [n] int64, numbers of the operations with raw stamps; empty: only totals were there.
        stamps_arrivals: whether all ranks know true arrivals.
        timeline: of the first rank that has one.
        spoilt: per rank whose counters contradict themselves, how.
        noticed: numbers of the operations that began with notices, which are a hop of their own.
    """

    operation: str
    place: Place
    present: BoolArray
    ops: IntArray
    stamps_arrivals: bool
    timeline: Timeline | None
    spoilt: Mapping[int, str] = field(default_factory=dict)
    noticed: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_ranks(self) -> int:
        """Ranks in the group, the missing ones included."""
        return self.place.num_ranks

    @property
    def num_operations(self) -> int:
        """Operations with raw stamps."""
        return int(self.ops.size)

    @property
    def counted(self) -> int:
        """Operations counted, the most of any source."""
        return int(self.heard.max(initial=0))

    @functools.cached_property
    def expected(self) -> BoolArray:
        """[num_ranks, num_ranks]: the paths between two ranks over which anything came in this hop."""
        came = self.has_sources & ~self.is_relayed
        np.fill_diagonal(came, False)
        return came

    @property
    def has_sources(self) -> BoolArray:
        """[num_ranks, num_ranks]: whose rows came to whom, whichever way."""
        return np.asarray(self.heard > 0)

    @property
    def is_relayed(self) -> BoolArray:
        """[num_ranks, num_ranks]: rows that came by way of a gateway, which has a hop of its own."""
        return _is_relayed(self.operation, self.place)

    def measured(self) -> Measured:
        """What people look at."""
        late, issue, path = self.wait_parts / 1e3
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
            tokens=self.mean_tokens,
            bytes=self.mean_bytes,
            gap_us=median(self.gap, 0) / 1e3,
            send_us=self._handing_over_ns() / 1e3,
            drain_us=median(self.drain, 0) / 1e3,
            own_wait_us=median(self.wait, 0) / 1e3,
            bandwidth=self._bandwidth() if self.num_operations else None,
            timeline=self.timeline,
        )

    def send_ns(self) -> FloatArray:
        """[num_ranks]: from entering to having issued to every destination, as receivers saw it."""
        seen = np.fmax.reduce(self.send, axis=0, initial=np.nan)
        return np.where(np.isfinite(seen), seen, median(self.span, 0))

    def _handing_over_ns(self) -> FloatArray:
        """[num_ranks]: the same, without the exchange of notices and the waiting for them."""
        if not self.noticed.size or not self.ops.size:
            return self.send_ns()
        fresh = median(self.span[np.isin(self.ops, self.noticed)], 0)
        return np.where(np.isfinite(fresh), fresh, self.send_ns())

    def _bandwidth(self) -> Bandwidth:
        # Bytes per nanosecond are GB/s.
        sent = np.nan_to_num(self.mean_bytes)
        np.fill_diagonal(sent, 0.0)
        into = sent.sum(axis=1)
        slowest = np.fmax.reduce(self.active, axis=0, initial=np.nan)
        return Bandwidth(
            edge=_ratio(sent, self.active),
            ingress=_ratio(into, self.busy),
            egress=_ratio(sent.sum(axis=0), slowest),
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
    summaries = [r if isinstance(r, Summary) else summarize(r) for r in reports]
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
    by_kind = {
        kind: replace(
            _gather_kind(
                kind,
                place,
                {s.rank: s.kinds[kind] for s in summaries if kind in s.kinds}
                # Something must say that nothing is known.
                or {ranks[0]: nothing_counted(sizes[0])},
            ),
            spoilt={s.rank: s.spoilt[kind] for s in summaries if kind in s.spoilt},
        )
        for kind in kinds
    }
    if NOTIFY in by_kind and NORMAL_DISPATCH in by_kind:
        noticed = by_kind[NOTIFY].ops
        by_kind[NORMAL_DISPATCH] = replace(by_kind[NORMAL_DISPATCH], noticed=noticed)
    return _with_joint_clocks(by_kind)


def _with_joint_clocks(kinds: Mapping[str, Matrices]) -> dict[str, Matrices]:
    """Times that compare two clocks, by the offsets that all pairs of ranks agree on."""
    # Clocks are the same in all kinds, so one tells for all.
    telling = next((kinds[kind] for kind in _SAYS_WHO_ENTERED if kind in kinds), None)
    if telling is None:
        return dict(kinds)
    wrong = np.nan_to_num(contradictions(telling.anchor, telling.anchor_entered))
    return (
        {kind: _set_offsets(m, wrong) for kind, m in kinds.items()} if wrong.any() else dict(kinds)
    )


def _set_offsets(m: Matrices, wrong: FloatArray) -> Matrices:
    """Without what offsets were wrong by, `[receiver, source]` ns."""
    receiver = np.arange(m.num_ranks)[None, :, None]
    of_last = np.where(m.last >= 0, wrong[receiver, m.last], 0.0)
    return replace(
        m,
        late=m.late + wrong,
        path=m.path - wrong,
        path_bound=m.path_bound - wrong,
        last_path=m.last_path - of_last,
    )


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
    summaries, reported = list(by_rank.values()), np.array(list(by_rank))
    ops = np.unique(np.concatenate([s.ops for s in summaries]))
    # Where the operations of each rank go, one after the other.
    row = np.concatenate([np.searchsorted(ops, s.ops) for s in summaries])
    column = np.repeat(reported, [s.ops.size for s in summaries])
    relayed = _is_relayed(kind, place)

    def group_of(number: Field) -> Any:
        values = [getattr(s, number.name) for s in summaries]
        if number.is_per_operation:
            joined = np.concatenate(values)
            shape = (ops.size, place.num_ranks, *joined.shape[1:])
            series = np.full(shape, number.missing, joined.dtype)
            series[row, column] = joined
            return series
        shape = (place.num_ranks, *values[0].shape)
        stacked = np.full(shape, number.missing, values[0].dtype)
        stacked[reported] = values
        if not number.is_per_source:
            return stacked
        # Receivers stand beside their sources, behind what there are three of.
        beside = np.moveaxis(stacked, 0, -2)
        # Path times of rows that a gateway has passed on are its own hop's.
        is_of_path = number.name.startswith("path")
        return np.where(relayed, number.missing, beside) if is_of_path else beside

    return Matrices(
        operation=kind,
        place=place,
        present=np.isin(np.arange(place.num_ranks), reported),
        ops=ops,
        stamps_arrivals=all(s.stamps_arrivals for s in summaries),
        timeline=next((s.timeline for s in summaries if s.timeline is not None), None),
        **{number.name: group_of(number) for number in FIELDS},
    )


def _is_relayed(kind: str, place: Place) -> BoolArray:
    between = place.nodes[:, None] != place.nodes[None, :]
    return np.asarray(between & (kind == NORMAL_DISPATCH))


def _ratio(amount: FloatArray, time: FloatArray) -> FloatArray:
    known = (time > 0) & (amount > 0)
    return np.asarray(np.divide(amount, time, out=np.full(amount.shape, np.nan), where=known))
