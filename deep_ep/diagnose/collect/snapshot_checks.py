"""What a snapshot must be like, before anything is concluded from it.

What cannot be a snapshot of this group is refused. Stamps that contradict each other are found per
operation; a rank most of whose operations are fine goes on without the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.diagnosis import BoolArray, IntArray
from ..core.package import CounterSnapshot, EPArgumentError, EPTypeError
from .snapshot import Snapshot

# What the rules read; counters may have more.
_NEEDED = {
    "fields": (
        "ops",
        "tokens",
        "bytes",
        "wait_ns",
        "late_ns",
        "issue_ns",
        "path_ns",
        "critical_ns",
    ),
    "own_fields": ("ops", "gap_ns", "send_ns", "wait_ns", "drain_ns"),
    "ring_source_fields": ("entered", "issued", "arrival", "tokens"),
    "ring_own_fields": ("op", "wait_begin", "exit", "previous_exit"),
}
# Nothing that happened in one operation is further apart than an hour.
_LONGEST_NS = 3_600 * 10**9
# Stamps of one clock are in order, whatever its step, but for what is lost where they are computed.
_AGREE_NS = 100
# Beyond these, differences would overflow.
_LARGEST = 2**62 - 1
_MOST_TOKENS = 2**40
# With more contradictions than this share, nothing of a rank is believed.
_MOST_SPOILT = 0.1


def require_snapshot(where: str, given: Any) -> None:
    """Refuses what is no snapshot, or not of the group that it says.

    Raises:
        EPTypeError: no Snapshot, or parts of it of other types.
        EPArgumentError: rank, sizes, names or shapes that do not fit each other.
    """
    if not isinstance(given, Snapshot):
        raise EPTypeError(
            f"{where}: a report is a {type(given).__name__}; it must be a Snapshot or a Summary. "
            "Pass what diagnose.snapshot(buffer) returns on each rank."
        )
    require_place(where, given.rank, given.num_ranks)
    if not isinstance(given.operations, Mapping):
        raise EPTypeError(
            f"{where}: operations of rank {given.rank} are a {type(given.operations).__name__}; they must "
            "be counters by kind of operation. Pass what diagnose.snapshot(buffer) returns."
        )
    for kind, counters in given.operations.items():
        _require_counters(
            f"{where}: {kind} counters of rank {given.rank}", counters, given.num_ranks
        )


def require_place(where: str, rank: Any, num_ranks: Any) -> None:
    """Refuses a rank that is not one of a group of `num_ranks`.

    Raises:
        EPArgumentError: it is not, or either is no integer.
    """
    integers = isinstance(rank, (int, np.integer)) and isinstance(num_ranks, (int, np.integer))
    if not integers or not 0 <= rank < num_ranks:
        raise EPArgumentError(
            f"{where}: a report is of rank {rank!r} of {num_ranks!r}; it must be an integer from 0 to "
            "num_ranks - 1. Pass snapshots as diagnose.snapshot(buffer) returns them."
        )


def _require_counters(what: str, counters: Any, num_ranks: int) -> None:
    if not isinstance(counters, CounterSnapshot):
        raise EPTypeError(
            f"{what} are a {type(counters).__name__}; they must be a CounterSnapshot. Leave the kind out "
            "where nothing was counted."
        )
    for names, needed in _NEEDED.items():
        missing = [name for name in needed if name not in getattr(counters, names)]
        if missing:
            raise EPArgumentError(
                f"{what} have no {', '.join(missing)} in {names}, which are "
                f"{', '.join(getattr(counters, names))}; it is needed. Take snapshots and judge them "
                "with the same version of deep_ep."
            )
    columns = max(len(counters.ring_source_fields), len(counters.ring_own_fields))
    for name, shape in (
        ("totals", (len(counters.fields), num_ranks)),
        ("own", (len(counters.own_fields),)),
        ("ring", (None, num_ranks + 1, columns)),
    ):
        array = getattr(counters, name)
        given = f"{getattr(array, 'dtype', type(array).__name__)} of {list(np.shape(array))}"
        fits = len(np.shape(array)) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, np.shape(array))
        )
        if not fits or getattr(array, "dtype", None) != np.int64:
            expected = f"int64 of {list(shape)}".replace("None", "any")
            raise EPArgumentError(
                f"{what}: {name} is {given}; it must be {expected} for a group of {num_ranks} ranks. Pass "
                "counters of this group, and num_ranks as in them."
            )


def contradictions(counters: CounterSnapshot, rank: int) -> tuple[BoolArray, str]:
    """Which operations of the ring cannot have happened like that.

    Args:
        counters: of one kind, of the right shapes.
        rank: whose they are.

    Returns:
        `[n]` bool, one for each of `counters.operations()`; and what is wrong with the most of them.
    """
    used = counters.operations()
    if not used.shape[0]:
        return np.zeros(0, dtype=bool), ""

    def own(name: str) -> IntArray:
        column: IntArray = used[:, -1, counters.ring_own_fields.index(name)]
        return column

    def source(name: str) -> IntArray:
        column: IntArray = used[:, :-1, counters.ring_source_fields.index(name)]
        return column

    op, begin, leave, previous = (own(x) for x in ("op", "wait_begin", "exit", "previous_exit"))
    entered, issued, arrival, tokens = (source(x) for x in _NEEDED["ring_source_fields"])
    mine, heard = entered[:, rank], arrival != 0
    stamps = np.concatenate([entered, issued, arrival, begin[:, None], leave[:, None]], axis=1)
    extreme = (np.abs(np.where(stamps < -_LARGEST, _LARGEST + 1, stamps)) > _LARGEST).any(axis=1)
    far = heard & (_apart(entered, begin[:, None]) | _apart(arrival, begin[:, None]))
    earlier = np.concatenate([[False], (op[1:] <= op[:-1]) | (begin[1:] < leave[:-1] - _AGREE_NS)])
    wrong = {
        "stamps that no clock has": extreme | (np.abs(previous // 2) > _LARGEST // 2),
        "an end before the begin of waiting": leave < begin - _AGREE_NS,
        "waiting that began before the rank entered": (mine != 0) & (begin < mine - _AGREE_NS),
        "stamps hours apart": far.any(axis=1) | _apart(leave, begin),
        "data issued before its source entered": (heard & (issued < entered - _AGREE_NS)).any(
            axis=1
        ),
        "data that came after the end": (heard & (arrival > (leave + _AGREE_NS)[:, None])).any(
            axis=1
        ),
        "an end of the operation before that lies after the beginning": (previous != 0)
        & (mine != 0)
        & (previous > mine + _AGREE_NS),
        "tokens that no rank has": ((tokens < 0) | (tokens > _MOST_TOKENS)).any(axis=1),
        "operations that overlap or do not grow": earlier,
    }
    most = max(wrong, key=lambda name: int(wrong[name].sum()))
    spoilt: BoolArray = np.logical_or.reduce(list(wrong.values()))
    return spoilt, most


def _apart(a: IntArray, b: IntArray) -> BoolArray:
    """Whether more than an hour lies between."""
    difference = a - b
    return (difference > _LONGEST_NS) | (difference < -_LONGEST_NS)


def without_contradictions(
    counters: CounterSnapshot, rank: int
) -> tuple[CounterSnapshot | None, str]:
    """The counters without operations that cannot have happened, and what was wrong with these.

    Returns:
        None where so many contradict themselves that the others are not believed, or sums do; and
        a note, "" where all is well.
    """
    if (why := _impossible_sums(counters)) is not None:
        return None, f"its sums are impossible ({why}); left out"
    spoilt, most = contradictions(counters, rank)
    count = int(spoilt.sum())
    if not count:
        return counters, ""
    said = f"{count} of {spoilt.size} operations contradict themselves ({most}); "
    if count > _MOST_SPOILT * spoilt.size and count > 1:
        return None, said + "left out"
    ops = counters.ring[:, -1, counters.ring_own_fields.index("op")]
    bad = np.isin(ops, counters.operations()[spoilt][:, -1, counters.ring_own_fields.index("op")])
    ring = np.where(bad[:, None, None], 0, counters.ring)
    return replace(counters, ring=ring), said + "these were left out"


def latest_operation(snapshot: Snapshot) -> int:
    """`snapshot.operation` of the kinds that can be believed; 0: none, or no ring."""
    usable = (
        without_contradictions(counters, snapshot.rank)[0]
        for counters in snapshot.operations.values()
    )
    return max((counters.operation for counters in usable if counters is not None), default=0)


def _impossible_sums(counters: CounterSnapshot) -> str | None:
    """The field that is wrong, if any."""
    total = dict(zip(counters.fields, counters.totals))
    own = dict(zip(counters.own_fields, counters.own.tolist()))
    most = max(own["ops"], 1)
    too_long = [x for x in _NEEDED["own_fields"][1:] if abs(own[x]) > _LONGEST_NS * most]
    below = [x for x in _NEEDED["fields"] if (total[x] < 0).any()]
    if below or too_long:
        return (below + too_long)[0]
    if own["ops"] < 0 or (total["ops"] > own["ops"]).any():
        return "ops"
    if (total["tokens"] > _MOST_TOKENS * most).any():
        return "tokens"
    return "wait_ns" if (total["wait_ns"] > _LONGEST_NS * most).any() else None
