"""The verdict on a hang: from the states of all ranks, who or what is the cause.

`judge` is a pure function. Each state says what its rank does and for whom it waits (hang/states.py); these waits
are the edges of a graph. The blame follows the edges: a rank that waits itself passes it on to those it waits for.
Where it arrives at a rank that does not wait, that rank is the cause, for instance because its process is dead or
has not called the operation. It may also end at a path on which nothing arrived, at a circle of ranks, or at ranks
that called different operations. How many wait for a rank is no evidence against it, nor is a late answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deep_ep.hang.activity import call_of, doing
from deep_ep.hang.cause import Edge, HangCause, HangVerdict, Kind, MismatchSide, edges_of
from deep_ep.hang.graph import attracting_components, reaching
from deep_ep.hang.mismatch import odd_ranks, sides_across, sides_at
from deep_ep.hang.states import (
    CONSTRUCTION,
    DESTRUCTION,
    NORMAL_COMBINE,
    NORMAL_DISPATCH,
    NOTIFY,
    OPERATIONS,
    Call,
    Owed,
    Process,
    RankState,
    calls_at,
    newest_entered,
    open_hook,
)

# What is a cause whatever the rank did before.
_OF_PROCESS: dict[Process, tuple[Kind, tuple[Kind, ...]]] = {
    "gone": ("gone", ()),
    "ended": ("ended", ()),
    "stopped": ("stopped", ()),
    "unreachable": ("unreachable", ()),
    "silent": ("unknown", ("stopped", "busy", "unreachable")),
    "unknown": ("unknown", ("gone", "stopped", "unreachable", "not_called")),
}
# These ranks can take part in nothing any more, whether or not anybody waits for them yet.
_LOST: tuple[Process, ...] = ("gone", "stopped", "unreachable")


def judge(
    states: Mapping[int, RankState],
    ranks_per_node: int = 0,
    elsewhere: Mapping[int, Sequence[RankState]] | None = None,
) -> HangVerdict:
    """The verdict on the ranks of one buffer.

    Args:
        states: by rank. Ranks without a state are unknown.
        ranks_per_node: if operations between nodes go by way of gateways; 0: they do not, or that is not known.
        elsewhere: what the processes of these ranks say of other buffers.

    Returns:
        All causes; none if nobody waits and no rank is lost.
    """
    return _Case(states, ranks_per_node, elsewhere or {}).verdict()


@dataclass(frozen=True)
class _Wait:
    """An edge to one rank."""

    waiter: int
    owed: int
    what: Owed
    series: str
    number: int


@dataclass
class _Draft:
    """A cause in the making, and who waits for it directly."""

    cause: HangCause
    waiters: set[int] = field(default_factory=set)


class _Case:
    """One judgement."""

    def __init__(
        self,
        states: Mapping[int, RankState],
        ranks_per_node: int,
        elsewhere: Mapping[int, Sequence[RankState]],
    ) -> None:
        self.states = states
        self.elsewhere = elsewhere
        self.num_ranks = max(
            (max(state.num_ranks, rank + 1) for rank, state in states.items()), default=0
        )
        self.ranks_per_node = ranks_per_node if ranks_per_node < self.num_ranks else 0
        self.waited_s: dict[int, float] = {}
        self.masked = self._masked_by_all()
        self.waits = self._find_waits()
        self.drafts: dict[tuple[object, ...], _Draft] = {}
        self.links: dict[int, set[int]] = {}
        # What is asked for each edge again.
        self._calls = functools.cache(lambda rank, *at: calls_at(states[rank], *at))
        self._entered = functools.cache(lambda rank, series: newest_entered(states[rank], series))
        # By series and number, the operation as the first says who waits in it.
        self.names: dict[tuple[str, int], str] = {}
        for edge in self.waits:
            place = edge.series, edge.number
            self.names[place] = self.names.get(place) or self._name_of(edge.waiter, *place)
        # By series and number in which not all did alike: the side of each rank, and the cause.
        self.side_of: dict[tuple[str, int], dict[int, int]] = {}
        self.mismatches: dict[tuple[str, int], _Draft] = {}
        for place in sorted(self.names):
            sides = sides_at(states, *place)
            if sides:
                self.side_of[place] = {r: i for i, side in enumerate(sides) for r in side.ranks}
                self.mismatches[place] = self._mismatch(sides)

    def verdict(self) -> HangVerdict:
        for edge in self.waits:
            self._follow(edge)
        self._close_circles()
        for rank, state in self.states.items():
            if state.process in _LOST and rank not in self.masked:
                self._blame(rank, None, *_OF_PROCESS[state.process])
        return HangVerdict(
            buffer=next((state.buffer for state in self.states.values()), ""),
            num_ranks=self.num_ranks,
            ranks_per_node=self.ranks_per_node,
            causes=tuple(self._causes()),
            edges=self._edges(),
            masked=tuple(sorted(self.masked)),
            missing=tuple(rank for rank in range(self.num_ranks) if rank not in self.states),
            taken_ns=max((state.taken_ns for state in self.states.values()), default=0),
        )

    # ---- what is known

    def _masked_by_all(self) -> set[int]:
        living = {
            r: set(s.masked) for r, s in self.states.items() if s.process in ("alive", "busy")
        }
        masked = set().union(*living.values())
        others = [s for r, s in living.items() if r not in masked]
        return {rank for rank in masked if others and all(rank in s for s in others)}

    def _find_waits(self) -> list[_Wait]:
        waits = []
        for waiter, state in sorted(self.states.items()):
            at = state.waits
            if at is None or waiter in self.masked or not _may_wait(state, at.series):
                continue
            for what, ranks in at.missing.items():
                for owed in set(ranks).difference(state.masked):
                    waits.append(_Wait(waiter, owed, what, at.series, at.number))
                    self.waited_s[waiter] = at.waited_s
        return sorted(waits, key=lambda wait: (wait.waiter, wait.owed, wait.what))

    def _edges(self) -> tuple[Edge, ...]:
        owed: dict[tuple[int, Owed, str, int], list[int]] = {}
        for wait in self.waits:
            at = (wait.waiter, wait.what, wait.series, wait.number)
            owed.setdefault(at, []).append(wait.owed)
        return edges_of(owed, self.waited_s)

    def _mismatch(self, sides: tuple[MismatchSide, ...]) -> _Draft:
        accused, first = self._all_accused(odd_ranks(sides)), sides[0]
        at = (first.series, first.number, first.name)
        draft = _Draft(HangCause("mismatch", accused, *at, sides=sides))
        return self.drafts.setdefault(("mismatch", sides), draft)

    def _all_accused(self, ranks: Iterable[int]) -> tuple[RankState, ...]:
        return tuple(map(self._accused, sorted(ranks)))

    def _accused(self, rank: int) -> RankState:
        state = self.states.get(rank) or RankState(rank, self.num_ranks, process="unknown")
        in_call = state.in_call or call_of(state.threads)
        return replace(state, in_call=in_call, calls=(), waits=None, threads=(), masked=())

    def _node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    # ---- one edge

    def _follow(self, edge: _Wait) -> None:
        """Finds where an edge leads: on to other ranks, or to a cause."""
        state = self.states.get(edge.owed)
        if state is None:
            self._blame(edge.owed, edge, *_OF_PROCESS["unknown"])
        elif edge.series == DESTRUCTION and state.waits and state.waits.series == DESTRUCTION:
            return  # it has come since, or rank 0, which passes on that it has, does not answer
        elif edge.series == CONSTRUCTION and state.process in ("silent", "unknown"):
            # That it has not come is known, and nothing else.
            kind: Kind = "host_in_call" if state.in_call else "not_called"
            self._blame(edge.owed, edge, kind, ("gone", "stopped", "unreachable"))
        elif state.process in _OF_PROCESS:
            self._blame(edge.owed, edge, *_OF_PROCESS[state.process])
        elif self._is_among_sides(edge) or self._is_stale(edge):
            return
        elif self._entered(edge.owed, edge.series) < edge.number:
            self._follow_behind(edge, state)
        elif edge.what == "slots":
            self._follow_slots(edge, state)
        elif edge.what == "entry":
            self._break_path(edge, edge.owed)
        else:
            self._follow_rows(edge, state)

    def _is_among_sides(self, edge: _Wait) -> bool:
        """Whether both ranks called this number, and not all did alike: then that is why anybody waits in it."""
        place = (edge.series, edge.number)
        side_of = self.side_of.get(place, {})
        if not {edge.waiter, edge.owed} <= side_of.keys():
            return False
        if side_of[edge.waiter] != side_of[edge.owed]:
            self.mismatches[place].waiters.update((edge.waiter, edge.owed))
        return True

    def _is_stale(self, edge: _Wait) -> bool:
        """Whether the operation was called only after the waiter had said that it waits."""
        said_ns = self.states[edge.waiter].taken_ns
        calls = self._calls(edge.owed, edge.series, edge.number)
        return said_ns > 0 and bool(calls) and calls[0].called_ns > said_ns

    def _follow_behind(self, edge: _Wait, state: RankState) -> None:
        """The rank has not entered the operation."""
        if state.waits is not None:
            self._pass_on(edge, edge.owed)
        elif state.process == "busy":
            self._blame(edge.owed, edge, "busy")
        elif open_hook(state):
            self._blame(edge.owed, edge, "not_called", hook=open_hook(state))
        elif state.opened:
            # It is in an operation before that one, and does not wait there.
            before = replace(edge, series=OPERATIONS, number=state.opened)
            self._blame_in(before, state, self._calls(edge.owed, OPERATIONS, state.opened))
        elif state.calls and state.calls[-1].is_pending:
            self._blame(edge.owed, edge, "not_started")
        else:
            self._blame_host(edge, state)

    def _blame_in(self, edge: _Wait, state: RankState, calls: Sequence[Call]) -> None:
        """It has entered, has not sent all, and does not wait."""
        last = calls[-1] if calls else None
        if last is not None and last.is_pending:
            self._blame(edge.owed, edge, "not_started")
        elif state.process == "busy":
            self._blame(edge.owed, edge, "busy")
        elif last is not None and last.name == NOTIFY and last.finished_ns:
            self._blame_host(edge, state)
        elif last is not None and last.sent_ns and edge.what != "slots":
            # It neither waits nor has ended: what it says of itself was not of one moment.
            self._blame(edge.owed, edge, "unknown", ("not_called", "not_sent"))
        else:
            self._blame(edge.owed, edge, "not_sent")

    def _blame_host(self, edge: _Wait, state: RankState) -> None:
        """No kernel of it runs; so it is the host that does not go on."""
        other = next(filter(_is_in_operation, self.elsewhere.get(edge.owed, ())), None)
        if other is not None:
            self._blame(edge.owed, edge, "other_buffer", elsewhere=_where(other))
        elif (state.in_call or call_of(state.threads)) and not state.raised:
            self._blame(edge.owed, edge, "host_in_call")
        else:
            self._blame(edge.owed, edge, "not_called")

    def _follow_slots(self, edge: _Wait, state: RankState) -> None:
        """It has entered, and does not empty its queues."""
        calls = self._calls(edge.owed, edge.series, edge.number)
        if _has_left(state, edge, calls):
            self._break_path(edge, edge.owed)
        elif state.waits is not None:
            self._pass_on(edge, edge.owed)
        elif open_hook(state) == edge.number:
            self._blame(edge.owed, edge, "not_called", hook=edge.number)
        else:
            self._blame_in(edge, state, calls)

    def _follow_rows(self, edge: _Wait, state: RankState) -> None:
        """It has entered, and its rows are not there. Between nodes a gateway passes rows of normal operations on."""
        calls = self._calls(edge.owed, edge.series, edge.number)
        name = self._name(edge.series, edge.number)
        has_left = _has_left(state, edge, calls)
        between_nodes = self.ranks_per_node and self._node(edge.owed) != self._node(edge.waiter)
        if calls and calls[-1].failed:
            self._blame(edge.owed, edge, "given_up")
        elif between_nodes and name == NORMAL_COMBINE and not has_left and self._needs_node(state):
            self._pass_on(edge, edge.owed)
        elif has_left or _has_sent(calls, name):
            is_passed_on = between_nodes and name == NORMAL_DISPATCH
            gateway = self._gateway(edge) if is_passed_on else edge.owed
            if gateway in (edge.waiter, edge.owed):
                self._break_path(edge, edge.owed)
            else:
                self._follow_gateway(edge, gateway)
        elif state.waits is not None:
            self._pass_on(edge, edge.owed)
        else:
            self._blame_in(edge, state, calls)

    def _needs_node(self, state: RankState) -> bool:
        """Whether it waits for rows of its own node, of which a gateway sends the sum."""
        needs = state.waits.ranks() if state.waits is not None else ()
        return any(self._node(rank) == self._node(state.rank) for rank in needs)

    def _gateway(self, edge: _Wait) -> int:
        """In dispatch rows go first to the rank of the other node that has the sender's place there."""
        place = edge.owed % self.ranks_per_node
        return self._node(edge.waiter) * self.ranks_per_node + place

    def _follow_gateway(self, edge: _Wait, gateway: int) -> None:
        state = self.states.get(gateway)
        through = replace(edge, owed=gateway)
        if state is None or state.process in _OF_PROCESS:
            self._follow(through)
        elif self._entered(gateway, edge.series) < edge.number:
            self._follow_behind(through, state)
        elif state.waits is not None and (
            edge.owed in state.waits.missing.get("rows", ()) or state.waits.missing.get("slots")
        ):
            self._pass_on(edge, gateway)
        elif state.process == "busy" and not _has_left(state, edge, ()):
            self._blame(gateway, edge, "busy")
        else:
            self._break_path(edge, gateway)

    # ---- what an edge leads to

    def _pass_on(self, edge: _Wait, rank: int) -> None:
        self.links.setdefault(edge.waiter, set()).add(rank)

    def _blame(
        self,
        rank: int,
        edge: _Wait | None,
        kind: Kind,
        between: tuple[Kind, ...] = (),
        hook: int = 0,
        elsewhere: str = "",
    ) -> None:
        """Accuses a rank: of the oldest operation in which anybody waits for it."""
        series, number = (edge.series, edge.number) if edge else ("", 0)
        draft = self.drafts.get((kind, rank))
        if draft is None or edge and not 0 < draft.cause.number <= number:
            state = self.states.get(rank)
            cause = HangCause(
                kind,
                (self._accused(rank),),
                series,
                number,
                self._name(series, number, rank),
                edge.what if edge else "",
                doing=doing(state.threads) if state is not None else None,
                hook=hook,
                elsewhere=elsewhere,
                between=between,
            )
            draft = _Draft(cause, draft.waiters if draft else set())
            self.drafts[kind, rank] = draft
        if edge:
            draft.waiters.add(edge.waiter)

    def _break_path(self, edge: _Wait, source: int) -> None:
        """Accuses the path to the waiter, from the rank that it waits for or from the gateway behind that."""
        hop = ""
        if self.ranks_per_node:
            hop = "NVLink" if self._node(source) == self._node(edge.waiter) else "network"
        at = (edge.series, edge.number, self._name(edge.series, edge.number))
        path = (source, edge.waiter)
        cause = HangCause("not_arrived", (), *at, edge.what, paths=(path,), hop=hop)
        key = ("not_arrived", path, edge.series, edge.number)
        draft = self.drafts.setdefault(key, _Draft(cause))
        if source != edge.owed:
            whose = tuple(sorted({*draft.cause.passed_on, edge.owed}))
            draft.cause = replace(draft.cause, passed_on=whose)
        draft.waiters.add(edge.waiter)

    def _close_circles(self) -> None:
        """Ranks that wait for each other, and for nothing else."""
        ends = set().union(*(draft.waiters for draft in self.drafts.values()))
        for ranks in attracting_components(self.links):
            if self.links.keys() >= {*ranks} and ends.isdisjoint(ranks):
                self._add_circle(ranks)

    def _add_circle(self, ranks: tuple[int, ...]) -> None:
        places = {w.waiter: (w.series, w.number) for w in self.waits if w.waiter in ranks}
        if len({series for series, _ in places.values()}) > 1:
            self._mismatch(sides_across(self.states, places)).waiters.update(ranks)
            return
        series, number = min(places.values())
        at = (series, number, self._name(series, number))
        links = {(rank, target) for rank in ranks for target in self.links[rank]}
        accused = self._all_accused(ranks)
        if any(edge.what == "slots" and (edge.waiter, edge.owed) in links for edge in self.waits):
            cause = HangCause("circle", accused, *at, "slots")
        else:
            cause = HangCause("unknown", accused, *at, "rows", between=("not_arrived", "circle"))
        self.drafts["circle", ranks] = _Draft(cause, set(ranks))

    # ---- the causes

    def _causes(self) -> Iterable[HangCause]:
        drafts = list(self.drafts.values())
        if any(draft.cause.kind != "given_up" for draft in drafts):
            # Who gave up did so because of somebody else.
            drafts = [draft for draft in drafts if draft.cause.kind != "given_up"]
        causes = [self._with_waiters(draft) for draft in _merged(drafts)]
        return sorted(
            causes, key=lambda cause: (-len(cause.waited_by), cause.ranks, cause.paths, cause.kind)
        )

    def _with_waiters(self, draft: _Draft) -> HangCause:
        """With all who wait for it, also because others do."""
        cause = draft.cause
        mine = () if cause.kind in ("circle", "mismatch", "unknown") else cause.ranks
        waiters = (reaching(self.links, draft.waiters) & self.waited_s.keys()) - set(mine)
        longest_s = max((self.waited_s[rank] for rank in waiters), default=0.0)
        return replace(cause, waited_by=tuple(sorted(waiters)), waited_s=longest_s)

    def _name(self, series: str, number: int, rank: int | None = None) -> str:
        """The operation's name as those say who wait in it, or else that rank."""
        own = self._name_of(rank, series, number) if rank is not None else ""
        return self.names.get((series, number)) or own or ("" if series == OPERATIONS else series)

    def _name_of(self, rank: int, series: str, number: int) -> str:
        """What that rank is in at this number."""
        calls = self._calls(rank, series, number) if rank in self.states else []
        return next((call.name for call in reversed(calls) if call.has_entered), "")


def _may_wait(state: RankState, series: str) -> bool:
    """Whether it waits there; who is in destroy() has ended for everybody else."""
    return state.process in ("alive", "busy") or (
        state.process == "ended" and series == DESTRUCTION
    )


def _has_left(state: RankState, edge: _Wait, calls: Sequence[Call]) -> bool:
    """Whether a rank has finished the operation, or is in a later one."""
    if edge.series == OPERATIONS:
        return state.closed >= edge.number or state.opened > edge.number
    return bool(calls and calls[-1].finished_ns)


def _has_sent(calls: Sequence[Call], name: str) -> bool:
    """Whether all was sent that a rank waits for in the kernel `name`."""
    if not calls:
        return False
    if name == NOTIFY:
        return len(calls) > 1 or calls[0].sent_ns > 0
    return calls[-1].name != NOTIFY and calls[-1].sent_ns > 0


def _is_in_operation(state: RankState) -> bool:
    # Its stack, and so `in_call`, is that of the process, whichever buffer the call is of.
    return state.waits is not None or bool(state.opened)


def _where(state: RankState) -> str:
    """In words: "operation 4 (low_latency_combine) of buffer b"."""
    calls = calls_at(state, OPERATIONS, state.opened) if state.opened else []
    name = calls[-1].name if calls else state.in_call
    what = f"operation {state.opened}" + (f" ({name})" if name else "") if state.opened else name
    return f"{what} of buffer {state.buffer}" if state.buffer else f"{what} of another buffer"


def _merged(drafts: Iterable[_Draft]) -> list[_Draft]:
    """Says once what is true of several ranks, and of several paths."""
    found: dict[object, _Draft] = {}
    for draft in drafts:
        cause = draft.cause
        key: object = cause
        if cause.kind == "not_arrived":
            key = (cause.kind, cause.series, cause.number, cause.hop, cause.passed_on == ())
        elif cause.kind not in ("circle", "mismatch") and len(cause.accused) == 1:
            key = _alike(cause)
        same = found.setdefault(key, _Draft(cause))
        same.waiters |= draft.waiters
        same.cause = _joined(same.cause, cause)
    return list(found.values())


def _alike(cause: HangCause) -> object:
    (accused,) = cause.accused
    owes_slots = cause.kind == "not_sent" and cause.what == "slots"
    at = (cause.kind, cause.series, cause.number, owes_slots)
    said = (accused.exit, accused.raised, accused.in_call, accused.last)
    does = cause.doing and (cause.doing.what, cause.doing.user)
    return at, cause.between, cause.hook, cause.elsewhere, said, does


def _joined(one: HangCause, other: HangCause) -> HangCause:
    accused = {accused.rank: accused for accused in (*one.accused, *other.accused)}
    return replace(
        one,
        accused=tuple(accused[rank] for rank in sorted(accused)),
        paths=tuple(sorted({*one.paths, *other.paths})),
        passed_on=tuple(sorted({*one.passed_on, *other.passed_on})),
    )
