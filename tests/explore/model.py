"""What every call had to return, given what all ranks passed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from explore import normal
from support import normal_reference, reference
from support.exchange import (
    Mode,
    Shape,
    assert_combined_from_logfmt,
    assert_received_one,
    assert_same_bytes,
    expected_combine,
    expected_dispatch,
)


@dataclass
class Record:
    """One call of one rank: what it passed, and how it ended.

    `op` is the operation's number, 0 if it was refused before it had one; `handle_of` the dispatch whose
    handle a combine, or a cached dispatch, passed. `lie` says what was wrong with it. `inputs` and `ys` are of
    the kind of operation.
    """

    rank: int
    kind: str  # "dispatch", "combine", "normal dispatch", "cached dispatch" or "normal combine"
    sizes: Shape | normal.Sizes
    mode: Mode
    inputs: Any
    began_ns: int
    handle_of: int = 0
    ys: Any = field(default_factory=list)
    lie: str = ""
    op: int = 0
    ended_ns: int = 0
    result: Any = None
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}, operation {self.op} ({self.kind})"


class Model:
    """All calls of a group, by operation."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.records: dict[int, dict[int, Record]] = {}  # by operation, then by rank
        self.calls: list[Record] = []
        self._dispatched: dict[int, list[reference.Dispatched]] = {}
        self._received: dict[int, list[normal_reference.Received]] = {}

    def begin(self, record: Record) -> None:
        """A call that is about to be made."""
        self.calls.append(record)

    def number(self, record: Record, op: int) -> None:
        """It has become this operation."""
        record.op = op
        self.records.setdefault(op, {})[record.rank] = record

    def calls_of(self, rank: int) -> list[Record]:
        """In the order in which they began."""
        return [record for record in self.calls if record.rank == rank]

    def check(self, record: Record) -> str | None:
        """What is wrong with the result of a call that returned; None when it is right."""
        if not record.op:
            return f"{record}: returned, though it entered no operation"
        others = self.records[record.op]
        absent = [rank for rank in range(self.num_ranks) if rank not in others]
        if absent:
            return f"{record}: returned, though ranks {absent} never called it"
        for other in others.values():
            if (other.kind, _agreed(other)) != (record.kind, _agreed(record)):
                return f"{record}: returned, though it does not agree with {other}"
            if other.lie:
                return f"{record}: returned, though the handle of {other} was changed ({other.lie})"
            if other.handle_of != record.handle_of:
                return f"{record}: returned, though {other} uses operation {other.handle_of}"
        check = {
            "dispatch": self._check_dispatch,
            "combine": self._check_combine,
            "normal dispatch": self._check_normal_dispatch,
            "cached dispatch": self._check_cached_dispatch,
            "normal combine": self._check_normal_combine,
        }
        try:
            check[record.kind](record)
        except AssertionError as error:
            return f"{record}: wrong result: {str(error).splitlines()[0]}"
        return None

    def _check_normal_dispatch(self, record: Record) -> None:
        assert isinstance(record.sizes, normal.Sizes)
        want = self._expected_received(record.op)[record.rank]
        normal.check_dispatch(record.result, want, record.sizes, str(record))

    def _check_cached_dispatch(self, record: Record) -> None:
        routed = [one.inputs for one in self._calls(record.handle_of)]
        calls = self._calls(record.op)
        want = normal.expected_dispatch(
            [one.inputs for one in calls], _normal(calls), False, routed
        )
        normal.check_cached(record.result, want[record.rank], str(record))

    def _check_normal_combine(self, record: Record) -> None:
        assert isinstance(record.sizes, normal.Sizes)
        normal.check_combine(
            record.result,
            [one.ys for one in self._calls(record.op)],
            self._expected_received(record.handle_of),
            *(record.rank, record.inputs, record.sizes, str(record)),
        )

    def _expected_received(self, op: int) -> list[normal_reference.Received]:
        if op not in self._received:
            calls = self._calls(op)
            inputs = [one.inputs for one in calls]
            self._received[op] = normal.expected_dispatch(inputs, _normal(calls), True, inputs)
        return self._received[op]

    def _calls(self, op: int) -> list[Record]:
        return [self.records[op][rank] for rank in range(self.num_ranks)]

    def _check_dispatch(self, record: Record) -> None:
        assert isinstance(record.sizes, Shape)
        want = self._expected_dispatch(record.op)[record.rank]
        assert_received_one(record.result, want, record.sizes, record.mode, str(record))

    def _check_combine(self, record: Record) -> None:
        calls = self._calls(record.op)
        dispatched = self._expected_dispatch(record.handle_of)
        ys, inputs = [one.ys for one in calls], [one.inputs for one in calls]
        if not record.mode.use_logfmt:
            want = reference.combine_one(
                record.rank, ys, record.inputs.topk_idx, record.inputs.topk_weights, dispatched
            )
            assert_same_bytes(record.result, want, str(record))
            return
        # Of the others' results nothing is known here.
        everybody = expected_combine(inputs, ys, dispatched)
        everybody[record.rank] = record.result
        assert_combined_from_logfmt(everybody, ys, inputs, dispatched)

    def _expected_dispatch(self, op: int) -> list[reference.Dispatched]:
        if op not in self._dispatched:
            calls = self._calls(op)
            assert isinstance(calls[0].sizes, Shape)
            self._dispatched[op] = expected_dispatch(
                [one.inputs for one in calls], calls[0].sizes, calls[0].mode
            )
        return self._dispatched[op]


def _agreed(record: Record) -> tuple[Any, ...]:
    sizes, mode = record.sizes, record.mode
    if isinstance(sizes, normal.Sizes):
        return sizes.agreed(record.kind)
    how = (mode.use_fp8, mode.round_scale, mode.use_ue8m0, mode.use_logfmt)
    return (sizes.num_max_tokens, sizes.hidden, sizes.num_experts, how)


def _normal(calls: list[Record]) -> list[normal.Sizes]:
    return [one.sizes for one in calls if isinstance(one.sizes, normal.Sizes)]
