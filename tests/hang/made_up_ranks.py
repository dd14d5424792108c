"""Ranks of a made-up group: what each says of itself when some of them are stuck in a given way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deep_ep.hang.states import Call, Frame, Owed, RankState, Thread, Waits

S = 1_000_000_000
NOW_NS = 1_800_000_000 * S
TRAIN = Frame("step", "/home/user/train.py", 41)
COMPILING = (
    Frame("compile_fx", "/usr/lib/python3/site-packages/torch/_inductor/compile_fx.py", 712),
    TRAIN,
)
# Who is in the middle of an operation has entered it; all else has not, and does not enter.
BEFORE = (
    *("gone", "stopped", "unreachable", "ended", "silent", "unknown", "busy"),
    *("not_called", "not_started", "host_in_call", "hook"),
)


def thread(*frames: Frame) -> tuple[Thread, ...]:
    """The main thread alone."""
    return (Thread("MainThread", frames),)


def with_last_call(state: RankState, **values: object) -> RankState:
    """That state, but for some values of its newest call."""
    *before, last = state.calls
    return replace(state, calls=(*before, replace(last, **values)))  # type: ignore[arg-type]


@dataclass
class Group:
    """Ranks that are in operation `number`, all of them healthy until something is done to them.

    A rank is stuck in one way; what the others wait for follows from that (`states`).
    """

    num_ranks: int
    number: int = 12
    name: str = "low_latency_dispatch"
    ranks_per_node: int = 0
    stuck: dict[int, str] = field(default_factory=dict)
    lost: set[tuple[int, int]] = field(default_factory=set)
    # Senders that wait for slots, and of whom; they have not sent to anybody else behind that.
    blocked: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def states(self) -> dict[int, RankState]:
        """What each rank says."""
        ranks = range(self.num_ranks)
        missing = {
            rank: self._missing(rank)
            for rank in ranks
            if self.stuck.get(rank) is None or self.stuck[rank] == "mismatch"
        }
        done = {rank for rank, owed in missing.items() if not owed}
        found = {}
        for rank in ranks:
            how = self.stuck.get(rank)
            if how is not None and how != "mismatch":
                found[rank] = self._stuck(rank, how)
            elif rank in done:
                found[rank] = self._ahead(rank, [other for other in ranks if other not in done])
            else:
                found[rank] = self._waiting(rank, missing[rank])
        return found

    def call(self, at: int, **values: object) -> Call:
        """One that has been sent."""
        known = Call(
            at,
            "operation",
            at,
            self.name,
            {"hidden": 7168},
            ("hidden",),
            "BFloat16",
            called_ns=NOW_NS - 20 * S,
            entered_ns=at * S,
            sent_ns=at * S + 1,
            frames=(TRAIN,),
        )
        return replace(known, **values)  # type: ignore[arg-type]

    def done_calls(self, until: int) -> tuple[Call, ...]:
        """The last ones before and with `until`, finished."""
        first = max(1, until - 3)
        return tuple(self.call(n, finished_ns=n * S + 2) for n in range(first, until + 1))

    def state(self, rank: int, **values: object) -> RankState:
        """A rank that is between operations, in front of this one."""
        known = RankState(
            rank,
            self.num_ranks,
            buffer="b0",
            host=f"node{rank // self.ranks_per_node if self.ranks_per_node else 0}",
            pid=1000 + rank,
            global_rank=rank,
            taken_ns=NOW_NS,
            closed=self.number - 1,
            calls=self.done_calls(self.number - 1),
            threads=thread(TRAIN),
        )
        return replace(known, **values)  # type: ignore[arg-type]

    def _stuck(self, rank: int, how: str) -> RankState:
        done = self.done_calls(self.number - 1)
        if how == "not_sent":
            call = self.call(self.number, sent_ns=0)
            return self.state(rank, opened=self.number, calls=(*done, call), in_call=self.name)
        if how == "not_started":
            call = self.call(self.number, number=0, entered_ns=0, sent_ns=0)
            return self.state(rank, calls=(*done, call))
        if how == "hook":
            call = self.call(self.number - 1, has_hook=True)
            return self.state(
                rank, closed=self.number - 2, opened=self.number - 1, calls=(*done[:-1], call)
            )
        if how == "host_in_call":
            return self.state(rank, in_call=self.name)
        if how == "not_called":
            return self.state(rank, threads=thread(*COMPILING))
        return self.state(rank, process=how)

    def _missing(self, rank: int) -> dict[Owed, tuple[int, ...]]:
        if rank in self.blocked:
            return {"slots": self.blocked[rank]}
        entry = [other for other, how in self.stuck.items() if how in BEFORE]
        rows = {source for source, destination in self.lost if destination == rank}
        rows |= {other for other, how in self.stuck.items() if how == "not_sent"}
        rows |= {other for other in self.blocked if other != rank}
        odd = {other for other, how in self.stuck.items() if how == "mismatch"}
        rows |= (set(range(self.num_ranks)) - odd - {rank}) if rank in odd else odd
        rows -= set(entry)
        owed: dict[Owed, Iterable[int]] = {"entry": entry, "rows": rows}
        return {what: tuple(sorted(ranks)) for what, ranks in owed.items() if ranks}

    def _waiting(self, rank: int, missing: Mapping[Owed, tuple[int, ...]]) -> RankState:
        is_odd = self.stuck.get(rank) == "mismatch"
        call = self.call(self.number, sent_ns=0 if rank in self.blocked else self.number * S)
        if is_odd:
            call = replace(call, name="low_latency_combine")
        return self.state(
            rank,
            opened=self.number,
            calls=(*self.done_calls(self.number - 1), call),
            waits=Waits("operation", self.number, 12.0, missing),
        )

    def _ahead(self, rank: int, behind: list[int]) -> RankState:
        """One that misses nothing has gone on to the next operation, and waits there."""
        number = self.number + 1
        waits = Waits("operation", number, 11.0, {"entry": tuple(behind)}) if behind else None
        done = self.done_calls(self.number)
        return self.state(
            rank,
            closed=self.number,
            opened=number,
            calls=(*done, self.call(number)),
            waits=waits,
        )
