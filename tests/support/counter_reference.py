"""The receive counters as a reader of counters.def would add them up, one operation and one source after the other."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any


def parts_of_wait(entered: Any, issued: Any, arrival: Any, begin: Any) -> dict[str, Any]:
    """What a wait from `begin` on is made of, all on one clock: it is cut where the source entered and where it had
    issued everything.
    """
    end = max(arrival, begin)
    cut_entered = min(max(entered, begin), end)
    cut_issued = min(max(issued, entered, begin), end)
    return {
        "wait_ns": end - begin,
        "late_ns": cut_entered - begin,
        "issue_ns": cut_issued - cut_entered,
        "path_ns": end - cut_issued,
    }


def add_operation(
    totals: Mapping[str, Any],
    own: MutableMapping[str, int],
    stamps: Mapping[str, Sequence[int]],
    begin: int,
    leave: int,
    row_bytes: int,
) -> None:
    """Adds one operation, but for what its rank did before it waited.

    Args:
        totals: by name, of each source.
        own: by name, of the rank that receives.
        stamps: entered, issued, arrival and tokens of each source.
        begin: when the rank began to wait.
        leave: when it left.
        row_bytes: of a token.
    """
    arrival = list(stamps["arrival"])
    for source, came in enumerate(arrival):
        issued, tokens = stamps["issued"][source], stamps["tokens"][source]
        parts = parts_of_wait(stamps["entered"][source], issued, came, begin)
        slack_ns = max(0, begin - issued)
        added = {"ops": 1, "tokens": tokens, "bytes": tokens * row_bytes, "slack_ns": slack_ns}
        for name, value in {**added, **parts}.items():
            totals[name][source] += value
        most = totals["max_wait_ns"]
        most[source] = max(most[source], parts["wait_ns"])
    last_arrival = max(arrival)
    last = arrival.index(last_arrival)
    if last_arrival > begin:
        totals["critical_ops"][last] += 1
        others = arrival[:last] + arrival[last + 1 :]
        totals["critical_ns"][last] += last_arrival - max([begin, *others])
    own["ops"] += 1
    own["wait_ns"] += max(0, last_arrival - begin)
    own["drain_ns"] += leave - max(begin, last_arrival)
