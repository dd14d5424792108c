"""What follows from the stamps of operations: in Python once, and as csrc/kernels/protocol/counters.cuh has it.

Stamps are nanoseconds on the receiver's clock, int64 or float64. The last dimension of `entered`,
`issued` and `arrival` is the source; dimensions before it are free. `begin`, when waiting began, and the
other times of the receiver itself have these alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Stamps = npt.NDArray[Any]


class Waiting(NamedTuple):
    """The waiting for each source, `[..., num_ranks]`: `wait = late + issue + path`, exactly.

    Attributes:
        wait: from the begin of waiting to the source's arrival, where positive.
        late: the part before it entered.
        issue: the part from there until it had issued everything.
        path: the rest.
    """

    wait: Stamps
    late: Stamps
    issue: Stamps
    path: Stamps


def waiting(entered: Stamps, issued: Stamps, arrival: Stamps, begin: Stamps) -> Waiting:
    """Takes the waiting apart; NaN where the arrival is NaN."""
    start = begin[..., None]
    end = np.maximum(arrival, start)
    # Cut into the waiting, so that the parts add up whatever the clocks say.
    until_entered = np.clip(entered, start, end)
    until_issued = np.clip(np.maximum(issued, entered), start, end)
    return Waiting(
        end - start, until_entered - start, until_issued - until_entered, end - until_issued
    )


def ready(arrival: Stamps, begin: Stamps) -> Stamps:
    """`[...]`: the last arrival, or the begin of waiting if that is later; arrivals of NaN are left out."""
    end: Stamps = np.fmax(np.fmax.reduce(arrival, axis=-1), begin)
    return end


def source_counters(
    entered: Stamps, issued: Stamps, arrival: Stamps, begin: Stamps
) -> dict[str, Stamps]:
    """`[..., num_ranks]` of int64 stamps: what each operation adds to the counters of a source, by name."""
    parts = waiting(entered, issued, arrival, begin)
    start, end = begin[..., None], ready(arrival, begin)
    came_last = np.arange(arrival.shape[-1]) == np.argmax(arrival, axis=-1)[..., None]
    runner_up = np.where(came_last, start, np.maximum(arrival, start)).max(axis=-1)
    critical = came_last & (end > begin)[..., None]
    return {
        "wait_ns": parts.wait,
        "late_ns": parts.late,
        "issue_ns": parts.issue,
        "path_ns": parts.path,
        "slack_ns": np.maximum(start - issued, 0),
        "critical_ops": critical.astype(np.int64),
        "critical_ns": np.where(critical, (end - runner_up)[..., None], 0),
    }


def own_counters(arrival: Stamps, begin: Stamps, leave: Stamps) -> dict[str, Stamps]:
    """`[...]`: what each operation adds to the receiver's own waiting and to what follows it, by name."""
    end = ready(arrival, begin)
    return {"wait_ns": end - begin, "drain_ns": leave - end}


def send(entered: Stamps, sent: Stamps) -> Stamps:
    """`[...]`: from the receiver's own entry until it had handed over its last row."""
    time: Stamps = np.maximum(sent - entered, 0)
    return time


def gap(entered: Stamps, previous_exit: Stamps) -> Stamps:
    """`[...]`: from the end of the operation before to the receiver's own entry; 0 for the first one."""
    since: Stamps = np.where(previous_exit != 0, entered - previous_exit, 0)
    return since
