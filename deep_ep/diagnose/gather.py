"""Snapshots of all ranks become N x N matrices: rows wait, columns are waited for.

What a rank did not report is NaN, never zero: a zero would read as "no waiting".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deep_ep.diagnose.snapshot import Snapshot
from deep_ep.errors import EPArgumentError

if TYPE_CHECKING:
    from deep_ep.counters import CounterSnapshot
    from deep_ep.group import Group

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# `previous_exit` is stamped at the very end, `exit` before the counters are written; chosen.
_EXIT_STAMPS_APART_NS = 100_000


@dataclass(frozen=True)
class Matrices:
    """One operation kind of all ranks. Index order is always [operation, receiver, source].

    Stamps are float64 nanoseconds relative to the moment the *receiver* began to wait in that
    operation. So stamps of one receiver compare with each other; two receivers' do not.

    Attributes:
        operation: "dispatch" or "combine".
        device: "cpu" or "cuda", where the counters live.
        hosts: host name per rank, "" where the rank is missing.
        totals: per counter field float64 [num_ranks, num_ranks], NaN where the rank is missing.
        own: per field of a rank's own counters float64 [num_ranks].
        ops: [n] int64, the operation numbers in the rings of any rank.
        entered, issued, arrival, tokens: [n, num_ranks, num_ranks].
        exit, previous_exit: [n, num_ranks].
        send_ns: [n, num_ranks], from entering to having issued to every destination.
        overlap_ns: [n, num_ranks], in the operation *before* this one, the time between having
            issued and beginning to wait: what the rank does between send and hook.
    """

    operation: str
    device: str
    hosts: tuple[str, ...]
    totals: Mapping[str, FloatArray]
    own: Mapping[str, FloatArray]
    ops: IntArray
    entered: FloatArray
    issued: FloatArray
    arrival: FloatArray
    tokens: FloatArray
    exit: FloatArray
    previous_exit: FloatArray
    send_ns: FloatArray
    overlap_ns: FloatArray

    @property
    def num_ranks(self) -> int:
        """Ranks in the group, the missing ones included."""
        return len(self.hosts)

    @property
    def num_operations(self) -> int:
        """Operations with raw stamps."""
        return int(self.ops.size)

    def mean_wait_ns(self) -> FloatArray:
        """[num_ranks, num_ranks]: nanoseconds per operation that the row waited for the column.

        From the ring without the tenth of operations at either end, so that a single hiccup (the
        first operation, say) does not paint a column; from the totals where there is no ring.
        """
        if self.num_operations:
            wait = np.sort(np.maximum(self.arrival, 0.0), axis=0)
            count = np.sum(np.isfinite(wait), axis=0)
            position = np.arange(wait.shape[0])[:, None, None]
            keep = (position >= count // 10) & (position < count - count // 10)
            total = np.sum(np.where(keep, wait, 0.0), axis=0, where=np.isfinite(wait))
            return _divide(total, (count - 2 * (count // 10)).astype(np.float64))
        return _divide(self.totals["wait_ns"], self.totals["ops"])


@dataclass(frozen=True)
class _Ring:
    """One rank's ring by name. `[n]` for its own stamps, `[n, num_ranks]` per source; int64 ns."""

    op: IntArray
    wait_begin: IntArray
    exit: IntArray
    previous_exit: IntArray
    entered: IntArray
    issued: IntArray
    arrival: IntArray
    tokens: IntArray


def gather(snapshots: Sequence[Snapshot]) -> dict[str, Matrices]:
    """Aligns the snapshots of a group by operation number. Local; see `gather_group`.

    Args:
        snapshots: of any ranks of one group, in any order; ranks may be missing.

    Returns:
        Matrices per operation kind, for the kinds that any rank counted.

    Raises:
        EPArgumentError: no snapshots, a rank twice, or groups of different sizes.
    """
    ranks = sorted(s.rank for s in snapshots)
    sizes = sorted({s.num_ranks for s in snapshots})
    if len(sizes) != 1 or len(set(ranks)) != len(ranks):
        raise EPArgumentError(
            f"gather: snapshots are of ranks {ranks} in groups of sizes {sizes}; every rank may "
            "appear once, and all must be of one group. Pass one snapshot per rank."
        )
    rings = {
        (s.rank, kind): _read_ring(counters)
        for s in snapshots
        for kind, counters in s.operations.items()
    }
    kinds = [k for k in ("dispatch", "combine") if any(k in s.operations for s in snapshots)]
    matrices = {kind: _gather_kind(kind, snapshots, sizes[0], rings) for kind in kinds}
    return {kind: _with_overlap(m, matrices, rings) for kind, m in matrices.items()}


def gather_group(group: Group, local: Snapshot) -> dict[str, Matrices] | None:
    """Collective: gathers every rank's snapshot; the matrices on rank 0, None elsewhere."""
    everyone = group.all_gather_object(local)
    return gather(everyone) if group.rank == 0 else None


def _gather_kind(
    kind: str,
    snapshots: Sequence[Snapshot],
    num_ranks: int,
    rings: Mapping[tuple[int, str], _Ring],
) -> Matrices:
    present = [s for s in snapshots if kind in s.operations]
    hosts = [""] * num_ranks
    totals: dict[str, FloatArray] = {}
    own: dict[str, FloatArray] = {}
    for s in present:
        hosts[s.rank] = s.host
        counters = s.operations[kind]
        for name, row in zip(counters.fields, counters.totals):
            totals.setdefault(name, np.full((num_ranks, num_ranks), np.nan))[s.rank] = row
        for name, value in zip(counters.own_fields, counters.own):
            own.setdefault(name, np.full(num_ranks, np.nan))[s.rank] = value

    ops = np.unique(np.concatenate([rings[s.rank, kind].op for s in present]))
    pairs = {
        name: np.full((ops.size, num_ranks, num_ranks), np.nan)
        for name in ("entered", "issued", "arrival", "tokens")
    }
    ends = {name: np.full((ops.size, num_ranks), np.nan) for name in ("exit", "previous_exit")}
    for s in present:
        ring = rings[s.rank, kind]
        at = np.searchsorted(ops, ring.op)
        for name in ("entered", "issued", "arrival"):
            pairs[name][at, s.rank] = _relative(getattr(ring, name), ring.wait_begin[:, None])
        pairs["tokens"][at, s.rank] = np.where(ring.arrival != 0, ring.tokens, np.nan)
        ends["exit"][at, s.rank] = _relative(ring.exit, ring.wait_begin)
        ends["previous_exit"][at, s.rank] = _relative(ring.previous_exit, ring.wait_begin)
    # Each receiver knows when its own share was issued; both stamps are on the source's clock.
    send_ns = np.fmax.reduce(pairs["issued"] - pairs["entered"], axis=1)
    overlap_ns = np.zeros(send_ns.shape)
    return Matrices(
        kind,
        present[0].device,
        tuple(hosts),
        totals,
        own,
        ops,
        send_ns=send_ns,
        overlap_ns=overlap_ns,
        **pairs,
        **ends,
    )


def _read_ring(counters: CounterSnapshot) -> _Ring:
    used = counters.operations()
    values = {name: used[:, -1, i] for i, name in enumerate(counters.ring_own_fields)}
    values.update({name: used[:, :-1, i] for i, name in enumerate(counters.ring_source_fields)})
    return _Ring(**values)


def _with_overlap(
    m: Matrices, kinds: Mapping[str, Matrices], rings: Mapping[tuple[int, str], _Ring]
) -> Matrices:
    """Fills in what each rank did between send and wait in the operation that it ended before."""
    overlap_ns = m.overlap_ns.copy()
    for rank in range(m.num_ranks):
        ring = rings.get((rank, m.operation))
        if ring is None:
            continue
        exits, overlaps = _ends_of_operations(rank, kinds, rings)
        before = np.searchsorted(exits, ring.previous_exit, side="right") - 1
        # An operation that was not counted leaves no exit just before the stamp.
        found = (before >= 0) & (ring.previous_exit - exits[before] <= _EXIT_STAMPS_APART_NS)
        at = np.searchsorted(m.ops, ring.op)
        overlap_ns[at, rank] = np.where(found, overlaps[before], 0.0)
    return replace(m, overlap_ns=overlap_ns)


def _ends_of_operations(
    rank: int, kinds: Mapping[str, Matrices], rings: Mapping[tuple[int, str], _Ring]
) -> tuple[IntArray, FloatArray]:
    """Exit stamps of a rank's operations of all kinds, ascending, and the overlap of each."""
    exits, overlaps = [], []
    for kind, m in kinds.items():
        ring = rings.get((rank, kind))
        if ring is not None:
            at = np.searchsorted(m.ops, ring.op)
            # Relative to the begin of waiting, which is therefore 0.
            issued = m.entered[at, rank, rank] + m.send_ns[at, rank]
            exits.append(ring.exit)
            overlaps.append(np.maximum(np.nan_to_num(-issued), 0.0))
    order = np.argsort(np.concatenate(exits), kind="stable")
    return np.concatenate(exits)[order], np.concatenate(overlaps)[order]


def _relative(stamps: IntArray, origin: IntArray) -> FloatArray:
    """Subtracts in int64, where it is exact; a stamp of 0 means that there is none."""
    return np.where(stamps != 0, (stamps - origin).astype(np.float64), np.nan)


def _divide(total: FloatArray, count: FloatArray) -> FloatArray:
    return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))
