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

from ..core.diagnosis import FloatArray, IntArray

# The latest arrivals of an operation that are kept: who held it up, and by how much.
KEPT_ARRIVALS = 2


@dataclass(frozen=True)
class Field:
    """What is said about a number.

    Attributes:
        missing: what stands for a rank, or an operation of it, that was not reported; its type is that
            of the number.
        may_be_infinite: whether infinity says that nothing is known.
        name, sides: of the number and of its array on one rank, taken from where it is declared.
    """

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
        lengths = {"rows": 0, "num_ranks": num_ranks}
        return np.full([lengths.get(str(side), side) for side in self.sides], self.missing)


# Arrays with the lengths of their sides on one rank, to which the codec holds what other ranks send: `rows`
# are operations with stamps.
PerOperation = Annotated[FloatArray, ("rows",)]
Latest = Annotated[FloatArray, ("rows", KEPT_ARRIVALS)]
LatestSources = Annotated[IntArray, ("rows", KEPT_ARRIVALS), Field(missing=-1)]
PerSource = Annotated[FloatArray, ("num_ranks",)]
ZeroIfMissing = Annotated[FloatArray, ("num_ranks",), Field(missing=0.0)]
ErrorPerSource = Annotated[FloatArray, ("num_ranks",), Field(may_be_infinite=True)]
ThreePerSource = Annotated[FloatArray, (3, "num_ranks")]
PerRank = Annotated[FloatArray, ()]


@dataclass(frozen=True)
class Numbers:
    """What is known of one operation kind: of one rank (`KindSummary`), or of all (`Matrices`).

    One rank has `[rows]` or `[rows, 2]` per operation, `[num_ranks]` or `[3, num_ranks]` per source, and
    scalars. All ranks together have `[rows, num_ranks]` or `[rows, num_ranks, 2]`,
    `[num_ranks, num_ranks]` or `[3, num_ranks, num_ranks]` as [receiver, source], and `[num_ranks]`.

    Attributes:
        gap: ns, this rank's own time since its operation before.
        span: ns, from entering to the begin of waiting.
        held: ns, of `span`, the part since this rank's last row was handed over.
        drain: ns, from the last arrival to the end.
        wait: ns, from the begin of waiting to the last arrival.
        duration: ns, the whole operation.
        received: tokens from all sources.
        last: the latest sources, the last one first.
        last_arrival: ns, when `last` came, after the begin of waiting.
        last_path: ns, how long `last` came after they had issued; NaN where they were there before.
        wait_parts: ns, late, issue and path part of the waiting per operation, without the tenth of operations at
            either end.
        late: ns, issue stamps against the median source, median over operations.
        late_error: ns, standard error of `late`.
        send: ns, issued minus entered, median.
        credit: ns, of the waiting while the source issued, or a gateway passed its rows on, what neither could go
            on because this rank had given no slots back; mean.
        path: ns, arrival minus issued, median; NaN where it was not seen often enough.
        path_error: ns, standard error of `path`.
        path_count: operations in which the path time was seen.
        path_bound: ns, of a path without a median, what it takes at most: the data was there at the first look.
        path_burst: ns, what bursts add to `path` on average, also where they do not recur.
        path_burst_share: operations in bursts that recur, over all of which that is known.
        path_clock: ns, how far path times may be wrong because of the two clocks; NaN where nobody knows.
        anchor: number of the operation that `anchor_entered` tells of.
        anchor_entered: ns, when each source entered that operation, on this rank's clock; 0 where it is not known.
        tokens: median per operation.
        heard: operations in which anything of this source came, of all that are counted.
        mean_tokens: per operation of these.
        mean_bytes: likewise.
        blame: ns, waiting per operation in which this source came last.
        active: ns per operation in which this source's data was on its way and this rank waited.
        busy: ns, the union over all sources of what `active` is, per operation.
    """

    gap: PerOperation
    span: PerOperation
    held: PerOperation
    drain: PerOperation
    wait: PerOperation
    duration: PerOperation
    received: PerOperation
    last: LatestSources
    last_arrival: Latest
    last_path: Latest
    wait_parts: ThreePerSource
    late: PerSource
    late_error: ErrorPerSource
    send: PerSource
    credit: ZeroIfMissing
    path: PerSource
    path_error: ErrorPerSource
    path_count: ZeroIfMissing
    path_bound: Annotated[FloatArray, ("num_ranks",), Field(missing=math.inf, may_be_infinite=True)]
    path_burst: ZeroIfMissing
    path_burst_share: ZeroIfMissing
    path_clock: PerSource
    anchor: Annotated[IntArray, (), Field(missing=-1)]
    anchor_entered: Annotated[IntArray, ("num_ranks",), Field(missing=0)]
    tokens: PerSource
    heard: ZeroIfMissing
    mean_tokens: PerSource
    mean_bytes: PerSource
    blame: ZeroIfMissing
    active: PerSource
    busy: PerRank


def _declared() -> tuple[Field, ...]:
    hints = typing.get_type_hints(Numbers, include_extras=True)
    rows = []
    for number in fields(Numbers):
        _, sides, *said = typing.get_args(hints[number.name])
        rows.append(replace(said[0] if said else Field(), name=number.name, sides=sides))
    return tuple(rows)


FIELDS = _declared()
