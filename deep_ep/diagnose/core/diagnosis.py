"""What a diagnosis says: verdicts, outliers, notes, and the measured numbers beside them. Plain data.

Rows of every matrix wait, columns are waited for. What is not known is NaN, never zero. The types of fields say how
records store them, see `deep_ep/base/codec.py`. A field that is added to a verdict is stored; what a record lays out in
another way stands in `storage/record_layout.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional, Union

import numpy as np
import numpy.typing as npt

from .causes import Slow
from .package import codec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Times are stored to nanoseconds.
TIME = codec.Digits(3)
OTHER = codec.Digits(6)
Microseconds = Annotated[float, TIME]
Ratio = Annotated[float, OTHER]
# Certainties differ in how far they are from 1.
Certainty = Annotated[float, codec.Digits(12)]
Count = Annotated[int, codec.Range()]
Rank = Annotated[int, codec.Range(below="num_ranks")]
RankOrNone = Optional[Rank]
RankPairOrNone = Optional[Annotated[tuple[Rank, Rank], ("source", "destination")]]
CountOrNone = Optional[Count]
PerRankUs = Annotated[FloatArray, ("num_ranks",), TIME]
PerOperationUs = Annotated[FloatArray, ("n", "num_ranks"), TIME]

# Evidence of verdicts; times per operation, and without a unit in the name: counts.
EvidenceKey = Literal[
    "error_us",  # standard error of the effect
    # Of a rank: its own times, and how they and its entry compare with the others'.
    "gap_us",
    "send_us",
    "drain_us",
    "own_time_over_median_us",
    "later_than_median_us",
    "earlier_than_median_us",
    "ranks_that_waited_for_it",
    "tokens_over_even_share",  # a ratio
    "explained_by_tokens_us",
    "sources_wait_for_its_slots_us",
    # Of a rank that is late at times.
    "lateness_when_late_us",
    "mean_over_all_us",
    "longest_burst_operations",
    # Of paths: one alone, several that have something in common, a pair of ranks, and all of them.
    "path_us",
    "usual_path_us",
    "tokens",
    "operations_seen",
    "over_other_paths_us",
    "before_us",
    "now_us",
    "windows_since",
    # Of sums of waiting alone.
    "windows",
    "windows_with_it",
]

Subject = Union[int, tuple[Any, ...], None]


@dataclass(frozen=True)
class Verdict:
    """One cause of waiting.

    Exactly one of `rank`, `edge`, `node`, `nodes` and `rail` is set, or none where everything is slow.

    Attributes:
        kind: its class: COMP_SLOW, COMM_SLOW or MIXED_SLOW.
        cause: one of `causes.Cause`; from a record of a later version, any text.
        operation: "dispatch", "combine", or a kind of the normal kernels.
        rank: the rank named, or None.
        edge: (source, destination) of the path named, or None.
        node: the node named for its links to other nodes, see `Diagnosis.nodes`, or None.
        nodes: (source, destination) of the pair of nodes named, see `Diagnosis.nodes`, or None.
        rail: the local device index of the rail named, or None.
        where: host and local device of the subject: "node3 cuda:5", "node3 cuda:5 > node4 cuda:1".
        effect_us: microseconds per operation above the healthy ones.
        interval_us: 95 % interval of the effect; NaN where it is not known.
        share: of all waiting in this operation, the part in which this cause came last, 0 to 1.
        saving_us: microseconds per operation that the program would gain without this cause alone,
            in all kinds of operation that it shows in; from a replay of the recorded operations.
            Without timestamps: what a rank would wait less.
        alone_us: likewise, once all other causes are gone; more than `saving_us` where they hide it. NaN where it
            is not known.
        duration_us: what the operation takes now.
        certainty: 1 - probability of such an effect anywhere in the group by chance, 0 to 1.
        seen_in: share of the operations that show the effect, 0 to 1; NaN where it was not counted.
        evidence: the numbers it rests on, by `EvidenceKey`; records of other versions have other names.
        next_step: one sentence: what to check next.
    """

    kind: Slow
    cause: str
    operation: str
    rank: RankOrNone
    edge: RankPairOrNone
    effect_us: Microseconds
    share: Ratio
    seen_in: Ratio
    evidence: Mapping[str, Ratio] = field(default_factory=dict)
    next_step: str = ""
    nodes: RankPairOrNone = None
    rail: CountOrNone = None
    node: CountOrNone = None
    where: str = ""
    interval_us: Annotated[tuple[Microseconds, Microseconds], ("low", "high")] = (
        math.nan,
        math.nan,
    )
    saving_us: Microseconds = math.nan
    alone_us: Microseconds = math.nan
    duration_us: Microseconds = math.nan
    certainty: Certainty = math.nan

    @property
    def subject(self) -> Subject:
        """The rank, the edge, ("node", index, cause), ("nodes", source, destination), ("rail", index),
        or None: everything."""
        if self.edge is not None:
            return self.edge
        if self.nodes is not None:
            return ("nodes", *self.nodes)
        if self.node is not None:
            return ("node", self.node, self.cause)
        if self.rail is not None:
            return ("rail", self.rail)
        return self.rank

    @property
    def key(self) -> tuple[str, Subject]:
        """(class, subject), to compare with `faults.expected_verdicts`."""
        return self.kind, self.subject


@dataclass(frozen=True)
class Outlier:
    """One operation in which everybody waited for one rank: a single hiccup, not a cause.

    Attributes:
        operation: kind of operation.
        number: its operation number.
        rank: the rank that came last.
        effect_us: how much later than the second to last.
    """

    operation: str
    number: Count
    rank: Rank
    effect_us: Microseconds


@dataclass(frozen=True)
class Bandwidth:
    """GB/s (10^9 bytes). Tokens that stay on their rank do not count; bytes are the counted ones.

    Attributes:
        edge: [receiver, source], what the wire did while this source's data was on its way.
        ingress: [num_ranks], bytes into a rank over the time in which anything was on its way to it.
        egress: [num_ranks], the same for what leaves a rank, as its receivers saw it.
        effective: [num_ranks], bytes into a rank over all its waiting: what the program gets.
    """

    edge: FloatArray
    ingress: FloatArray
    egress: FloatArray
    effective: FloatArray


@dataclass(frozen=True)
class Timeline:
    """Recent operations as one rank saw them, on its clock.

    Attributes:
        observer: the rank whose clock it is.
        ops: [n] int64, operation numbers, ascending.
        begin_us: [n], when the observer began to wait, since the first one here.
        entered_us, arrival_us: [n, num_ranks], relative to `begin_us`: when each source entered the
            operation, and when its data was there.
        last: [n] int64, the source whose data came last.
    """

    observer: Rank
    ops: Annotated[IntArray, ("n",), codec.Range(), codec.Digits(0)]
    begin_us: Annotated[FloatArray, ("n",), TIME]
    entered_us: PerOperationUs
    arrival_us: PerOperationUs
    last: Annotated[IntArray, ("n",), codec.Range(below="num_ranks"), codec.Digits(0)]


@dataclass(frozen=True)
class MeasuredOfRanks:
    """The numbers of one operation kind over one window, without those between ranks; times in microseconds per operation.

    Attributes:
        operation: "dispatch", "combine", or a kind of the normal kernels.
        num_operations: operations the numbers rest on; 0 where unknown: all times, effects and savings
            are of the whole window then.
        first_operation, last_operation: their numbers; 0 where unknown.
        duration_us: what a rank spends in the operation, median.
        gap_us, send_us, drain_us, own_wait_us: [num_ranks], a rank's own time between the operation
            before and this one, while sending, after the last arrival; and all its waiting. In a fresh normal
            dispatch all are since the last notice: what was before is in "notify".
    """

    operation: str
    num_operations: Count
    first_operation: Count
    last_operation: Count
    duration_us: Microseconds
    gap_us: PerRankUs
    send_us: PerRankUs
    drain_us: PerRankUs
    own_wait_us: PerRankUs


@dataclass(frozen=True)
class Measured(MeasuredOfRanks):
    """All numbers of one operation kind over one window. Fields as in `MeasuredOfRanks`, and

    Attributes:
        wait_us: [receiver, source] = late_us + issue_us + path_us; means without the tenth of
            operations at either end, so that a hiccup does not paint a column.
        late_us: the part before the source entered.
        issue_us: the part while the source was sending.
        path_us: the part after the source had issued everything.
        tokens, bytes: [receiver, source] per operation.
        bandwidth: what the wires did, or None where nothing was stamped.
        timeline: recent operations, or None.
    """

    wait_us: FloatArray
    late_us: FloatArray
    issue_us: FloatArray
    path_us: FloatArray
    tokens: FloatArray
    bytes: FloatArray
    bandwidth: Bandwidth | None = None
    timeline: Timeline | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What is known about a group over one window.

    Attributes:
        measured: per operation kind.
        verdicts: causes of waiting, the largest effect first; empty: no anomaly.
        remarks: notes on what could not be judged, and why; a sentence each.
        events: outliers, the largest first.
        hosts: host name per rank, "" where the rank is missing, "?" where it is not known (matrices
            from elsewhere).
        devices: local device index per rank, -1 where the rank is missing.
        nodes: NVLink domain per rank, numbered in order of rank, -1 where the rank is missing; the
            indices that `Verdict.nodes` speaks of. Empty where unknown.
        device: "cpu" or "cuda", where the counters live; "" where unknown.
        savings_us: per operation kind, like `saving_us`, without all causes together.
        source: "stamps", or "waits" when only cumulative waiting was known (classes are weaker then).
    """

    measured: Mapping[str, Measured]
    verdicts: Sequence[Verdict]
    remarks: Sequence[str]
    events: Sequence[Outlier] = ()
    hosts: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    device: str = ""
    savings_us: Mapping[str, float] = field(default_factory=dict)
    source: str = "stamps"

    @property
    def num_ranks(self) -> int:
        """Ranks in the group, the missing ones included."""
        return len(self.hosts)

    @property
    def keys(self) -> set[tuple[str, Subject]]:
        """(class, subject) of every verdict, to compare with `faults.expected_verdicts`."""
        return {verdict.key for verdict in self.verdicts}
