"""The PTX memory consistency model, as its documentation states it, for programs of a few threads.

Modelled: strong and weak operations, scopes, morally strong pairs, release and acquire patterns,
observation order through read-modify-writes, barriers, base causality and causality order, and the axioms
Coherence, Atomicity, Causality and No-Thin-Air. SC-per-location follows from Causality here, because every
thread's program order is causality order. Left out, as the kernels have none: fence.sc, proxies other than the
generic one, accesses of different sizes to one place.

z3 chooses what each read returns and the coherence order, and looks for an execution in which what a
program forbids happens, or two accesses race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any

import z3

SCOPES = ("cta", "gpu", "sys")

Value = Any  # a number, or a function of the registers that makes one
Registers = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """How strong an operation is; the default is a weak access. `sites` says which source lines make it so."""

    acquires: bool = False
    releases: bool = False
    scope: str = ""  # empty: weak
    sites: tuple[str, ...] = ()


WEAK = Order()


@dataclass(eq=False)
class Event:
    """One operation of one thread."""

    kind: str  # read, write, rmw, fence, meet
    thread: Thread
    place: str = ""
    order: Order = WEAK
    register: str = ""
    value: Value = None
    expects: Callable[[Any], Any] | None = None
    meeting: str = ""  # meet: threads that name the same one wait for each other

    def reads(self) -> bool:
        return self.kind in ("read", "rmw")

    def writes(self) -> bool:
        return self.kind in ("write", "rmw")


@dataclass(eq=False)
class Thread:
    """A thread of a block of a rank."""

    rank: str
    block: str
    events: list[Event] = field(default_factory=list)

    def shares(self, scope: str, other: Thread) -> bool:
        """Whether `scope`, seen from this thread, includes the other."""
        if scope == "sys":
            return True
        if scope == "gpu":
            return self.rank == other.rank
        return scope == "cta" and (self.rank, self.block) == (other.rank, other.block)


@dataclass
class Execution:
    """What went wrong, for people."""

    reason: str
    registers: dict[str, int]


def morally_strong(a: Event, b: Event) -> bool:
    """Both are strong and each one's scope includes the other's thread, or one thread has both."""
    if a.thread is b.thread:
        return True
    return a.thread.shares(a.order.scope, b.thread) and b.thread.shares(b.order.scope, a.thread)


def closure(pairs: Iterable[tuple[Any, Any]], nodes: list[Any]) -> set[tuple[Any, Any]]:
    """Reflexive and transitive."""
    after: dict[Any, set[Any]] = {node: {node} for node in nodes}
    edges: dict[Any, list[Any]] = {node: [] for node in nodes}
    for a, b in pairs:
        edges[a].append(b)
    for node in nodes:
        todo = [node]
        while todo:
            for successor in edges[todo.pop()]:
                if successor not in after[node]:
                    after[node].add(successor)
                    todo.append(successor)
    return {(a, b) for a in nodes for b in after[a]}


class Encoding:
    """The executions of one program, as constraints."""

    def __init__(self, threads: list[Thread], initial: dict[str, int]) -> None:
        self.solver = z3.Solver()
        self.registers: Registers = {}
        places = {event.place for thread in threads for event in thread.events if event.place}
        start = Thread("", "")
        start.events = [
            Event("write", start, place, value=initial.get(place, 0)) for place in sorted(places)
        ]
        self.initial = set(start.events)
        self.events = start.events + [event for thread in threads for event in thread.events]
        self.accesses = [event for event in self.events if event.place]
        self.fixed = self.program_order(threads)
        self.names = {event: f"e{number}" for number, event in enumerate(self.events)}
        self.values()
        self.observation()
        self.synchronisation()
        self.axioms()

    def program_order(self, threads: list[Thread]) -> set[tuple[Any, Any]]:
        """Program order, barriers, and the initial values before everything: in every execution."""
        pairs: list[tuple[Any, Any]] = []
        for thread in threads:
            nodes = [event.meeting or event for event in thread.events]
            pairs += zip(nodes, nodes[1:])
            pairs += [(event, nodes[0]) for event in self.initial if nodes]
        nodes = [event for event in self.events if not event.meeting]
        return closure(pairs, [*nodes, *{event.meeting for event in self.events if event.meeting}])

    def pairs(self, first: str, second: str) -> list[tuple[Event, Event]]:
        """All pairs of different accesses to one place, of which the first reads or writes and the second too."""
        return [
            (a, b)
            for a, b in product(self.accesses, self.accesses)
            if a is not b and a.place == b.place and getattr(a, first)() and getattr(b, second)()
        ]

    def bool(self, relation: str, *events: Event) -> Any:
        return z3.Bool(f"{relation}({','.join(self.names[event] for event in events)})")

    def values(self) -> None:
        """Every read returns what one write to its place has written; no value comes out of thin air."""
        add = self.solver.add
        self.read = {}
        self.written = {}
        for event in self.accesses:
            if event.reads():
                self.read[event] = z3.Int(f"read({self.names[event]})")
                if event.register:
                    self.registers[event.register] = self.read[event]
                if event.expects is not None:
                    add(event.expects(self.read[event]))
        depends = any(callable(event.value) and event.kind == "write" for event in self.accesses)
        for event in self.accesses:
            if event.kind == "rmw":
                self.written[event] = event.value(self.read[event])
            elif event.kind == "write":
                value = event.value
                self.written[event] = value(self.registers) if callable(value) else z3.IntVal(value)
        sources: dict[Event, list[Any]] = {event: [] for event in self.read}
        self.from_ = {}
        for write, read in self.pairs("writes", "reads"):
            choice = self.bool("rf", write, read)
            self.from_[write, read] = choice
            sources[read].append(choice)
            add(z3.Implies(choice, self.read[read] == self.written[write]))
            if depends:
                add(z3.Implies(choice, self.time(write) < self.time(read)))
        for choices in sources.values():
            add(z3.PbEq([(choice, 1) for choice in choices], 1))
        for event in self.accesses if depends else ():
            if callable(event.value) and event.kind == "write":
                earlier = event.thread.events[: event.thread.events.index(event)]
                for read in earlier:
                    if read.reads():
                        add(self.time(read) < self.time(event))

    def time(self, event: Event) -> Any:
        return z3.Int(f"time({self.names[event]})")

    def observation(self) -> None:
        """A write precedes a read that returns it, or that returns what read-modify-writes made of it."""
        self.observed = {
            (write, read): self.bool("obs", write, read)
            for write, read in self.pairs("writes", "reads")
            if write not in self.initial
        }
        for (write, read), before in self.observed.items():
            if morally_strong(write, read):
                self.solver.add(z3.Implies(self.from_[write, read], before))
            for middle in self.accesses:
                steps = [(write, middle), (middle, read)]
                if middle.kind == "rmw" and all(step in self.observed for step in steps):
                    both = z3.And(*[self.observed[step] for step in steps])
                    self.solver.add(z3.Implies(both, before))

    def patterns(self, releases: bool) -> list[tuple[Event, Event]]:
        """(first operation, write) of release patterns, or (last operation, read) of acquire patterns."""
        found = []
        for event in self.events:
            if not (event.order.releases if releases else event.order.acquires):
                continue
            line = event.thread.events
            here = line.index(event)
            if event.kind != "fence":
                found.append((event, event))
            for other in line[here + 1 :] if releases else line[:here]:
                fits = other.writes() if releases else other.reads()
                same = event.kind == "fence" or other.place == event.place
                if fits and other.order.scope and same:
                    found.append((event, other))
        return found

    def synchronisation(self) -> None:
        """Edges from release to acquire patterns, and what they join."""
        self.edges: list[tuple[Event, Event, Any]] = []
        for first, write in self.patterns(releases=True):
            for last, read in self.patterns(releases=False):
                reads = (write, read) in self.observed and first.thread is not last.thread
                if reads and morally_strong(first, last):
                    self.edges.append((first, last, self.observed[write, read]))
        count = len(self.edges)
        self.joins = [[z3.Bool(f"join({i},{j})") for j in range(count)] for i in range(count)]
        for i in range(count):
            self.solver.add(z3.Implies(self.edges[i][2], self.joins[i][i]))
        for i, j in permutations(range(count), 2):
            if (self.edges[i][1], self.edges[j][0]) in self.fixed:
                for k, last in product(range(count), repeat=2):
                    steps = z3.And(self.joins[k][i], self.joins[j][last])
                    self.solver.add(z3.Implies(steps, self.joins[k][last]))

    def base(self, a: Event, b: Event) -> Any:
        """Base causality order."""
        if (a, b) in self.fixed:
            return z3.BoolVal(True)
        ways = [
            self.joins[i][j]
            for i, (first, _, _) in enumerate(self.edges)
            if (a, first) in self.fixed
            for j, (_, last, _) in enumerate(self.edges)
            if (last, b) in self.fixed
        ]
        return z3.Or(*ways) if ways else z3.BoolVal(False)

    def precedes(self, a: Event, b: Event) -> Any:
        """Causality order."""
        ways = [
            z3.And(observed, self.base(read, b))
            for (write, read), observed in self.observed.items()
            if write is a and read is not b
        ]
        return z3.Or(self.base(a, b), *ways)

    def axioms(self) -> None:
        add = self.solver.add
        coherent = {pair: self.bool("co", *pair) for pair in self.pairs("writes", "writes")}
        causes = {}
        for pair in {
            *self.pairs("writes", "writes"),
            *self.pairs("writes", "reads"),
            *self.pairs("reads", "writes"),
        }:
            causes[pair] = self.precedes(*pair)
        self.causes = causes
        for (a, b), before in coherent.items():
            add(z3.Implies(causes[a, b], before))  # Coherence
            add(z3.Not(z3.And(before, coherent[b, a])))
            if morally_strong(a, b):
                add(z3.Or(before, coherent[b, a]))
            for c in self.accesses:
                if (b, c) in coherent and c is not a:
                    add(z3.Implies(z3.And(before, coherent[b, c]), coherent[a, c]))
        for (write, read), choice in self.from_.items():
            if (read, write) in causes:
                add(z3.Implies(choice, z3.Not(causes[read, write])))  # Causality, 1
            for other in self.accesses:
                if (write, other) not in coherent:
                    continue
                if (other, read) in causes:  # Causality, 2
                    add(
                        z3.Implies(
                            z3.And(choice, causes[other, read]), z3.Not(coherent[write, other])
                        )
                    )
                if read.kind == "rmw" and other is not read and morally_strong(read, other):
                    between = z3.And(coherent[write, other], coherent[other, read])
                    add(z3.Implies(choice, z3.Not(between)))  # Atomicity
            if read.kind == "rmw":
                add(z3.Implies(choice, coherent[write, read]))

    def race(self, allowed: set[str]) -> Any:
        """Whether two accesses conflict, are not morally strong, and are not ordered."""
        found = []
        for a, b in {*self.pairs("writes", "writes"), *self.pairs("writes", "reads")}:
            if a in self.initial or b in self.initial or a.place in allowed:
                continue
            if not morally_strong(a, b) and (a, b) not in self.fixed and (b, a) not in self.fixed:
                ordered = [self.causes[pair] for pair in ((a, b), (b, a)) if pair in self.causes]
                found.append(z3.Not(z3.Or(*ordered)))
        return z3.Or(*found) if found else z3.BoolVal(False)


def find_execution(
    threads: list[Thread],
    initial: dict[str, int],
    forbidden: Callable[[Registers], Any] | None,
    racing: set[str] | None,
) -> Execution | None:
    """An execution that does what is forbidden or, unless `racing` is None, races in another place than those."""
    encoding = Encoding(threads, initial)
    questions = []
    if forbidden is not None:
        questions.append(("what is forbidden happens", forbidden(encoding.registers)))
    if racing is not None:
        questions.append(("two accesses race", encoding.race(racing)))
    for reason, question in questions:
        encoding.solver.push()
        encoding.solver.add(question)
        answer = encoding.solver.check()
        if answer == z3.unknown:
            raise RuntimeError(f"z3 gave up: {encoding.solver.reason_unknown()}")
        if answer == z3.sat:
            model = encoding.solver.model()
            values = {name: model.eval(read).as_long() for name, read in encoding.registers.items()}
            return Execution(reason, values)
        encoding.solver.pop()
    return None
