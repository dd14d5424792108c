"""What savings are worked out from: kinds of operation as they were recorded, and what causes add to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..collect.group_matrices import Matrices
from ..core.diagnosis import FloatArray


class PathTimes(Protocol):
    """The path matrix `[receiver, source]`, ns.

    Attributes:
        time: median of arrival minus issue with clocks set, NaN where not known.
        usual: what a healthy path of this kind, and with these tokens, takes.
        clock: [num_ranks], by what the clock of each rank was set in `time`.
    """

    @property
    def time(self) -> FloatArray: ...
    @property
    def usual(self) -> FloatArray: ...
    @property
    def clock(self) -> FloatArray: ...


class Replayed(Protocol):
    """One kind of operation, ns.

    Attributes:
        m: as it was recorded.
        has_stamps: whether single operations were.
        load: [num_ranks], tokens that the rank's experts handle, over an even share.
        gap_ns, span_ns, send_ns, drain_ns: [num_ranks], medians of what each rank does by itself.
        paths: between ranks.
    """

    @property
    def m(self) -> Matrices: ...
    @property
    def has_stamps(self) -> bool: ...
    @property
    def load(self) -> FloatArray: ...
    @property
    def gap_ns(self) -> FloatArray: ...
    @property
    def span_ns(self) -> FloatArray: ...
    @property
    def send_ns(self) -> FloatArray: ...
    @property
    def drain_ns(self) -> FloatArray: ...
    @property
    def paths(self) -> PathTimes: ...


@dataclass(frozen=True)
class Gain:
    """What one cause adds to one operation kind; ns to be taken away.

    Attributes:
        operation: kind.
        rank: whose own time, or None.
        work_ns, drain_ns: of the time before waiting, after the last arrival.
        work_each: [n] of the time before waiting in each operation of the kind, or None.
        is_recorded: False where the rank did not report. By how much it is later than the others is then
            what these saw; `work_ns` stands where they saw nothing.
        is_shared: whether the rank has far more tokens than the others, which all have together then.
            What that takes follows from what was recorded, in all kinds.
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
