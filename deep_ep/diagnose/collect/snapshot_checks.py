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
from ..core.package import CounterSnapshot, EPArgumentError, EPTypeError, codec
from .snapshot import NEEDED_FIELDS, Snapshot, columns

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
        EPTypeError: no Snapshot.
        EPArgumentError: rank, sizes, names, types or shapes that do not fit each other.
    """
    if not isinstance(given, Snapshot):
        raise EPTypeError(
            f"{where}: a report is a {type(given).__name__}; it must be a Snapshot or a Summary. "
            "Pass what diagnose.snapshot(buffer) returns on each rank."
        )
    plain = dict(vars(given))
    if isinstance(given.operations, Mapping):
        plain["operations"] = {
            kind: vars(c) if isinstance(c, CounterSnapshot) else c
            for kind, c in given.operations.items()
        }
    try:
        codec.from_plain(Snapshot, plain)
    except codec.CodecError as error:
        raise EPArgumentError(
            f"{where}: of the snapshot of rank {given.rank} of {given.num_ranks}, {error}. Pass what "
            "diagnose.snapshot(buffer) of this version returns, of every rank of one group."
        ) from None


def contradictions(counters: CounterSnapshot, rank: int) -> tuple[BoolArray, str]:
    """Which operations of the ring cannot have happened like that.

    Args:
        counters: of one kind, of the right shapes.
        rank: whose they are.

    Returns:
        `[n]` bool, one for each of `counters.operations()`; and what is wrong with the most of them.
    """
    sources, own = columns(counters, counters.operations())
    op, begin, leave, previous = (own[x] for x in ("op", "wait_begin", "exit", "previous_exit"))
    entered, issued, arrival = (sources[x] for x in ("entered", "issued", "arrival"))
    mine, heard, tokens = entered[:, rank], arrival != 0, sources["tokens"]
    stamps = np.concatenate([entered, issued, arrival, begin[:, None], leave[:, None]], axis=1)
    extreme = (np.abs(np.where(stamps < -_LARGEST, _LARGEST + 1, stamps)) > _LARGEST).any(axis=1)
    far = heard & (_apart(entered, begin[:, None]) | _apart(arrival, begin[:, None]))
    grows = (op[1:] > op[:-1]) & (begin[1:] >= leave[:-1] - _AGREE_NS)
    after_end = heard & (arrival > (leave + _AGREE_NS)[:, None])
    begins_late = (previous != 0) & (mine != 0) & (previous > mine + _AGREE_NS)
    wrong = {
        "stamps that no clock has": extreme | (np.abs(previous // 2) > _LARGEST // 2),
        "an end before the begin of waiting": leave < begin - _AGREE_NS,
        "waiting that began before the rank entered": (mine != 0) & (begin < mine - _AGREE_NS),
        "stamps hours apart": far.any(axis=1) | _apart(leave, begin),
        "data issued before its source entered": heard & (issued < entered - _AGREE_NS),
        "data that came after the end": after_end,
        "an end of the operation before that lies after the beginning": begins_late,
        "tokens that no rank has": (tokens < 0) | (tokens > _MOST_TOKENS),
        "operations that overlap or do not grow": np.append(False, ~grows)[: len(op)],
    }
    by_operation = [each.any(axis=tuple(range(1, each.ndim))) for each in wrong.values()]
    most = [*wrong][int(np.argmax([each.sum() for each in by_operation]))]
    return np.asarray(np.logical_or.reduce(by_operation)), most


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
    op = counters.ring_own_fields.index("op")
    bad = np.isin(counters.ring[:, -1, op], counters.operations()[spoilt][:, -1, op])
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
    below = [x for x in NEEDED_FIELDS["fields"] if (total[x] < 0).any()]
    times = [x for x in NEEDED_FIELDS["own_fields"] if x != "ops"]
    too_long = [x for x in times if abs(own[x]) > _LONGEST_NS * most]
    too_many = {
        "ops": own["ops"] < 0 or (total["ops"] > own["ops"]).any(),
        "tokens": (total["tokens"] > _MOST_TOKENS * most).any(),
        "wait_ns": (total["wait_ns"] > _LONGEST_NS * most).any(),
    }
    wrong = [*below, *too_long, *(name for name, is_wrong in too_many.items() if is_wrong)]
    return wrong[0] if wrong else None
