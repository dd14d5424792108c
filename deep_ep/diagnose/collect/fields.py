"""The numbers to which a rank condenses its counters, and which rank 0 stacks: one row for each.

A new number needs its row here, its line in `rank_summary` where it is computed, and whoever uses it.
Messages, matrices, checks and what stands for a missing rank follow from the row.
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np

from ..core.diagnosis import BoolArray, FloatArray, IntArray

# The latest arrivals of an operation that are kept: who held it up, and by how much.
KEPT_ARRIVALS = 2

# Arrays with the lengths of their sides on one rank, to which the codec holds what other ranks send: `rows`
# are operations with stamps, or 1 where there are none; a row of means stands there then.
PerOperation = Annotated[FloatArray, ("rows",)]
Latest = Annotated[FloatArray, ("rows", KEPT_ARRIVALS)]
LatestSources = Annotated[IntArray, ("rows", KEPT_ARRIVALS)]
PerSource = Annotated[FloatArray, ("num_ranks",)]
SourceFlags = Annotated[BoolArray, ("num_ranks",)]
ThreePerSource = Annotated[FloatArray, (3, "num_ranks")]
TimePerSource = Annotated[IntArray, ("num_ranks",)]
PerRank = Annotated[FloatArray, ()]
NumberPerRank = Annotated[IntArray, ()]


@dataclass(frozen=True)
class Field:
    """What is said about a number.

    Attributes:
        unit: "ns", "tokens", ...; "" where there is none.
        meaning: one sentence.
        missing: what stands for a rank, or an operation of it, that was not reported; its type is that
            of the number.
        may_be_infinite: whether infinity says that nothing is known.
        name, sides: of the number and of its array on one rank, taken from where it is declared.
    """

    unit: str
    meaning: str
    missing: float = math.nan
    may_be_infinite: bool = False
    name: str = ""
    sides: tuple[str | int, ...] = ()

    @property
    def is_per_operation(self) -> bool:
        """A series; the others are per source, or one number of the rank."""
        return "rows" in self.sides

    @property
    def is_per_source(self) -> bool:
        """One number, or three, for each rank that sends."""
        return "num_ranks" in self.sides

    def unknown(self, num_ranks: int) -> Any:
        """The array of a rank in a group of so many that knows nothing, not even stamps."""
        lengths = {"rows": 1, "num_ranks": num_ranks}
        return np.full([lengths.get(str(side), side) for side in self.sides], self.missing)


@dataclass(frozen=True)
class Numbers:
    """What is known of one operation kind: of one rank (`KindSummary`), or of all (`Matrices`).

    One rank has `[rows]` or `[rows, 2]` per operation, `[num_ranks]` or `[3, num_ranks]` per source, and
    scalars. All ranks together have `[rows, num_ranks]` or `[rows, num_ranks, 2]`,
    `[num_ranks, num_ranks]` or `[3, num_ranks, num_ranks]` as [receiver, source], and `[num_ranks]`.
    Meanings and units are beside the fields, and in `FIELDS`.
    """

    gap: Annotated[PerOperation, Field("ns", "This rank's own time since its operation before.")]
    span: Annotated[PerOperation, Field("ns", "From entering to the begin of waiting.")]
    held: Annotated[
        PerOperation,
        Field("ns", "Of `span`, the part since this rank's last row was handed over."),
    ]
    drain: Annotated[PerOperation, Field("ns", "From the last arrival to the end.")]
    wait: Annotated[PerOperation, Field("ns", "From the begin of waiting to the last arrival.")]
    duration: Annotated[PerOperation, Field("ns", "The whole operation.")]
    received: Annotated[PerOperation, Field("tokens", "Tokens received from all sources.")]
    last: Annotated[
        LatestSources, Field("rank", "The latest sources, the last one first.", missing=-1)
    ]
    last_arrival: Annotated[Latest, Field("ns", "When `last` came, after the begin of waiting.")]
    last_path: Annotated[
        Latest,
        Field(
            "ns", "How long `last` came after they had issued; NaN where they were there before."
        ),
    ]
    wait_parts: Annotated[
        ThreePerSource,
        Field(
            "ns",
            "Late, issue and path part of the waiting per operation, without the tenth of operations "
            "at either end.",
        ),
    ]
    late: Annotated[
        PerSource, Field("ns", "Issue stamps against the median source, median over operations.")
    ]
    late_error: Annotated[PerSource, Field("ns", "Standard error of `late`.", may_be_infinite=True)]
    send: Annotated[PerSource, Field("ns", "Issued minus entered, median.")]
    credit: Annotated[
        PerSource,
        Field(
            "ns",
            "Of the waiting while the source issued, or a gateway passed its rows on, what neither could go "
            "on because this rank had given no slots back; mean.",
            missing=0.0,
        ),
    ]
    path: Annotated[
        PerSource,
        Field("ns", "Arrival minus issued, median; NaN where it was not seen often enough."),
    ]
    path_error: Annotated[PerSource, Field("ns", "Standard error of `path`.", may_be_infinite=True)]
    path_count: Annotated[
        PerSource,
        Field("operations", "Operations in which the path time was seen.", missing=0.0),
    ]
    path_bound: Annotated[
        PerSource,
        Field(
            "ns",
            "Of a path without a median, what it takes at most: the data was there at the first look.",
            missing=math.inf,
            may_be_infinite=True,
        ),
    ]
    path_burst: Annotated[
        PerSource,
        Field(
            "ns", "What bursts add to `path` on average, also where they do not recur.", missing=0.0
        ),
    ]
    path_burst_share: Annotated[
        PerSource,
        Field(
            "share",
            "Operations in bursts that recur, over all of which that is known.",
            missing=0.0,
        ),
    ]
    path_clock: Annotated[
        PerSource,
        Field(
            "ns",
            "How far path times may be wrong because of the two clocks; NaN where nobody knows.",
        ),
    ]
    anchor: Annotated[
        NumberPerRank,
        Field("operation", "Number of the one that `anchor_entered` tells of.", missing=-1),
    ]
    anchor_entered: Annotated[
        TimePerSource,
        Field(
            "ns",
            "When each source entered that operation, on this rank's clock; 0 where it is not known.",
            missing=0,
        ),
    ]
    tokens: Annotated[PerSource, Field("tokens", "Median per operation.")]
    blame: Annotated[
        PerSource,
        Field("ns", "Waiting per operation in which this source came last.", missing=0.0),
    ]
    active: Annotated[
        PerSource,
        Field(
            "ns",
            "Time per operation in which this source's data was on its way and this rank waited.",
        ),
    ]
    busy: Annotated[
        PerRank, Field("ns", "The union over all sources of what `active` is, per operation.")
    ]


def _declared() -> tuple[Field, ...]:
    hints = typing.get_type_hints(Numbers, include_extras=True)
    rows = []
    for number in fields(Numbers):
        _, sides, row = typing.get_args(hints[number.name])
        rows.append(replace(row, name=number.name, sides=sides))
    return tuple(rows)


FIELDS = _declared()
