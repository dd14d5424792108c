"""What the receive counters of one rank were at one moment, and windows between two of them. Needs no native module.

Counters only grow; nobody resets them. A window is the difference of two snapshots, and `until`
puts these at the same operation on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt

from deep_ep.base import codec
from deep_ep.errors import EPArgumentError
from deep_ep.observe import stamps

Int64Array = npt.NDArray[np.int64]

# Fields that are not sums: a difference of snapshots keeps the later value.
_NOT_SUMS = ("max_wait_ns",)
# Own times are differences of stamps and may go back with a clock that is set back.
_LOWEST = np.iinfo(np.int64).min


def _in_proportion(total: Int64Array | np.int64, part: int, whole: int) -> Int64Array | np.int64:
    """`total * part / whole`, rounded down, for totals of any size."""
    return total // whole * part + total % whole * part // whole


def _ring_fields(names: tuple[str, ...], sides: codec.Sides) -> tuple[str, ...]:
    """A row of the ring holds the longer of the two lists."""
    sides["ring_fields"] = max(sides.get("ring_fields", 0), len(names))
    return names


@dataclass(frozen=True)
class CounterSnapshot:
    """The counters of one rank and one kind of operation, copied at one moment.

    Attributes:
        fields: names of the rows of `totals`.
        own_fields: names of the entries of `own`.
        ring_source_fields: names of the last dimension of `ring` for a source rank.
        ring_own_fields: the same for this rank's own row, the last one.
        totals: `[len(fields), num_ranks]` int64, per source rank; nanoseconds where the name ends in `_ns`.
        own: `[len(own_fields)]` int64, of this rank.
        ring: `[capacity, num_ranks + 1, num_ring_fields]` int64, the raw times of recent operations,
            ascending by operation number after `operations()`; unused slots are zeros.
        lost: largest operation number whose slot was overwritten while it was copied; 0: none.
        estimated: fields that `until` could not roll back exactly; of a window, at either of its ends.
    """

    fields: Annotated[tuple[str, ...], ("fields",)]
    own_fields: Annotated[tuple[str, ...], ("own_fields",)]
    ring_source_fields: Annotated[tuple[str, ...], _ring_fields]
    ring_own_fields: Annotated[tuple[str, ...], _ring_fields]
    totals: Annotated[Int64Array, ("fields", "num_ranks")]
    own: Annotated[Int64Array, ("own_fields",)]
    ring: Annotated[Int64Array, ("slots", "num_sources", "ring_fields")]
    lost: Annotated[int, codec.Range()] = 0
    estimated: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return int(self.totals.shape[1])

    @property
    def ops(self) -> int:
        """Operations counted so far, or within the window if this is a difference."""
        return self.own_value("ops")

    @property
    def operation(self) -> int:
        """Number of the latest operation in the ring (dispatch and combine count together); 0: none."""
        return int(self._ring_ops().max(initial=0))

    def __getitem__(self, field: str) -> Int64Array:
        """`[num_ranks]` int64: one field of the totals, per source rank."""
        if field not in self.fields:
            raise EPArgumentError(
                f"CounterSnapshot: there is no field {field!r}; the fields are {', '.join(self.fields)}. "
                "Fields of this rank itself are read with own_value()."
            )
        row: Int64Array = self.totals[self.fields.index(field)]
        return row

    def own_value(self, field: str) -> int:
        """One field of `own`."""
        if field not in self.own_fields:
            raise EPArgumentError(
                f"CounterSnapshot: there is no own field {field!r}; they are {', '.join(self.own_fields)}. "
                "Fields per source rank are read with snapshot[name]."
            )
        return int(self.own[self.own_fields.index(field)])

    def operations(self) -> Int64Array:
        """The used ring slots in order of operation: `[n, num_ranks + 1, num_ring_fields]` int64."""
        ops = self._ring_ops()
        order = np.argsort(ops, kind="stable")
        used: Int64Array = self.ring[order[ops[order] > 0]]
        return used

    def since(self, earlier: CounterSnapshot) -> CounterSnapshot:
        """The window from `earlier` to this snapshot: sums are subtracted, older ring slots are zero.

        Raises:
            EPArgumentError: the two are not of the same counters, or in the wrong order.
        """
        if earlier.fields != self.fields or earlier.totals.shape != self.totals.shape:
            raise EPArgumentError(
                f"CounterSnapshot: a snapshot of {earlier.num_ranks} ranks and one of {self.num_ranks} "
                "differ in shape or fields; a window needs two snapshots of the same counters. "
                "Take both from one RecvCounters."
            )
        estimated = sorted({*self.estimated, *earlier.estimated})
        # Counters grow; those that fell wrapped, were made anew or are another buffer's.
        exact = ~np.isin(self.fields, estimated)[:, None]
        fell = np.argwhere(exact & (self.totals < earlier.totals))
        if len(fell):
            row, source = fell[0]
            raise EPArgumentError(
                f"CounterSnapshot.since: {self.fields[row]} of source {source} is {self.totals[row, source]}, and "
                f"{earlier.totals[row, source]} in the earlier snapshot; it must not be less. Take both "
                "snapshots, in order, from one RecvCounters that was not made anew between them."
            )
        sums = ~np.isin(self.fields, _NOT_SUMS)[:, None]
        # Only what is estimated can come out below zero here.
        totals = np.where(sums, np.maximum(self.totals - earlier.totals, 0), self.totals)
        floor = [0 if field in estimated else _LOWEST for field in self.own_fields]
        own = np.maximum(self.own - earlier.own, floor)
        ring = self.ring.copy()
        ring[self._ring_ops() <= earlier.operation] = 0
        return replace(self, totals=totals, own=own, ring=ring, estimated=tuple(estimated))

    def until(self, operation: int, rank: int | None = None) -> CounterSnapshot:
        """This snapshot as it was when that operation had been counted, and none after it.

        The raw times of later operations are taken out of the sums, in the arithmetic of the
        kernels. Not exact are what they do not hold, and `estimated` names it: `send_ns` and
        `gap_ns` of this rank, unless `rank` is given and a source here, and `credit_ns` are cut in
        proportion to the operations, `bytes` in proportion to the tokens where rows were of several
        sizes. `max_wait_ns` stays.

        Args:
            operation: number of an operation of any kind.
            rank: whose counters these are.

        Raises:
            EPArgumentError: the ring does not hold all operations after it.
        """
        if not self.holds_all_after(operation):
            held = self.operations()[:, -1, self.ring_own_fields.index("op")]
            oldest = f"from {held[0]} on" if held.size else "none"
            raise EPArgumentError(
                f"CounterSnapshot.until: operation is {operation}, and the ring of "
                f"{self.ring.shape[0]} holds of the {self.ops} operations counted {oldest}, not all "
                "that came after it; it must. Take snapshots sooner, or pass a larger ring to "
                "enable_counters()."
            )
        later = self._ring_ops() > operation
        if not later.any():
            return self
        slots = self.ring[later]
        kept = self.ops - slots.shape[0]
        sources, own = self._counted(slots, rank)
        estimated = set(self.estimated)
        totals, own_totals = self.totals.copy(), self.own.copy()
        for total, field in zip(totals, self.fields):
            if field in sources:
                total -= sources[field]
            elif field == "bytes":
                row_bytes = total // np.maximum(self["tokens"], 1)
                if (row_bytes * self["tokens"] != total).any():
                    estimated.add(field)
                total -= row_bytes * sources["tokens"]
            elif field not in _NOT_SUMS:
                if total.any():
                    estimated.add(field)
                total[:] = _in_proportion(total, kept, self.ops)
        for place, field in enumerate(self.own_fields):
            if field in own:
                own_totals[place] -= own[field]
            else:
                own_totals[place] = _in_proportion(own_totals[place], kept, self.ops)
                estimated.add(field)
        ring = self.ring.copy()
        ring[later] = 0
        return replace(
            self, totals=totals, own=own_totals, ring=ring, estimated=tuple(sorted(estimated))
        )

    def holds_all_after(self, operation: int) -> bool:
        """Whether every counted operation with a larger number is in the ring."""
        if self.ops <= np.count_nonzero(self._ring_ops()):
            return True
        if not self.ring.shape[0]:
            return False
        # A slot is overwritten only by an operation with a number larger by the capacity.
        return bool(operation >= max(self.operation - self.ring.shape[0], self.lost))

    def _counted(
        self, slots: Int64Array, rank: int | None
    ) -> tuple[dict[str, Int64Array], dict[str, int]]:
        """What operations added to the counters, from their raw times.

        Args:
            slots: `[n, num_ranks + 1, num_ring_fields]`, n >= 1.
            rank: whose counters these are.
        """
        entered, issued, arrival, tokens = (
            slots[:, :-1, self.ring_source_fields.index(name)]
            for name in ("entered", "issued", "arrival", "tokens")
        )
        begin, leave, previous = (
            slots[:, -1, self.ring_own_fields.index(name)]
            for name in ("wait_begin", "exit", "previous_exit")
        )
        added = stamps.source_counters(entered, issued, arrival, begin)
        # Not every rank is a source of every hop.
        heard = arrival != 0
        sources = {name: np.where(heard, v, 0).sum(axis=0) for name, v in added.items()}
        sources["ops"] = heard.sum(axis=0)
        sources["tokens"] = tokens.sum(axis=0)
        own_added = stamps.own_counters(arrival, begin, leave)
        # A gateway that is no source of its own hop has no entry there.
        if rank is not None and (entered[:, rank] != 0).all():
            own_added["gap_ns"] = stamps.gap(entered[:, rank], previous)
            if "sent" in self.ring_own_fields:
                sent = slots[:, -1, self.ring_own_fields.index("sent")]
                own_added["send_ns"] = stamps.send(entered[:, rank], sent)
        own = {name: int(values.sum()) for name, values in own_added.items()}
        own["ops"] = slots.shape[0]
        return sources, own

    def __sub__(self, earlier: CounterSnapshot) -> CounterSnapshot:
        return self.since(earlier)

    def _ring_ops(self) -> Int64Array:
        ops: Int64Array = self.ring[:, self.num_ranks, self.ring_own_fields.index("op")]
        return ops
