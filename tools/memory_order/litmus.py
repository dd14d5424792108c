"""Litmus tests: what they are made of, and the variants of the source that they must tell apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .ptx import SCOPES, WEAK, Event, Execution, Order, Thread, find_execution
from .sources import ATOMICS, CALLS, DEVICE, FENCE, ROW_COPIES, Source

# What the kernels' scopes mean, in device.cuh.
DEVICE_SCOPES = tuple(f"device.{scope}" for scope in SCOPES)
# Meetings whose only purpose is to order, as far as the model goes; the result of the others is needed.
REMOVABLE_MEETINGS = ("block_sync", "warp_sync", "team_sync", "leader_sync", *ROW_COPIES)


@dataclass(frozen=True)
class Variant:
    """The source with one thing weaker: removed, no acquire, no release, or a narrower scope."""

    site: str
    change: str

    def __str__(self) -> str:
        words = f"narrowed to {self.change}" if self.change in SCOPES else self.change
        return f"{self.site}: {words}"


AS_IT_IS = Variant("", "")


def weaker(order: Order, variant: Variant) -> Order:
    """The order with a variant's change, if it concerns it."""
    if variant.site not in order.sites:
        return order
    if variant.change in SCOPES:
        scope = min(order.scope, variant.change, key=SCOPES.index)
        return Order(order.acquires, order.releases, scope, order.sites)
    acquires = order.acquires and variant.change != "no acquire"
    releases = order.releases and variant.change != "no release"
    return Order(acquires, releases, order.scope, order.sites)


def inner(source: Source, primitive: str) -> str:
    """The site of a transport's function that serves ranks in reach."""
    own = [
        name
        for name in source.sites
        if name.rpartition(".")[0] == f"Transport.{primitive}" and "queue_pairs" not in name
    ]
    if len(own) != 1:
        raise ValueError(f"Transport::{primitive} has the sites {own}; one is expected.")
    return own[0]


def order_of(source: Source, name: str) -> Order:
    """Order and scope of a site, as the source has them, through all functions that it calls."""
    site = source.site(name)
    sites = [name]
    while site.primitive in CALLS:
        site = source.site(inner(source, site.primitive))
        sites.append(site.name)
    word, scope = site.order, site.scope
    if site.primitive in ATOMICS:
        word = source.device.orders[site.primitive]
        scope = source.device.widths[site.scope]
        sites += [f"device.{site.primitive}", f"device.{site.scope}"]
    return Order(
        word in ("acquire", "acq_rel"), word in ("release", "acq_rel"), scope, tuple(sites)
    )


@dataclass(eq=False)
class Actor:
    """A thread of a litmus test. `at` names the site that an operation stands for; without, it is weak."""

    program: Program
    thread: Thread

    def add(self, kind: str, at: str, **rest: Any) -> None:
        given = rest.pop("order", WEAK)
        order = self.program.order(at) if at else given
        if order is not None:
            self.thread.events.append(Event(kind, self.thread, order=order, **rest))

    def write(self, place: str, value: Any = 1, at: str = "", order: Order = WEAK) -> None:
        """`value` may be a function of the registers that this thread has read."""
        self.add("write", at, place=place, value=value, order=order)

    def read(
        self,
        place: str,
        register: str = "",
        at: str = "",
        sees: int | None = None,
        order: Order = WEAK,
    ) -> None:
        """`sees`: only executions in which it returns this; a wait that ends."""
        expects = None if sees is None else lambda value: value == sees
        self.add("read", at, place=place, register=register, expects=expects, order=order)

    def update(
        self,
        place: str,
        new: Callable[[Any], Any],
        at: str,
        register: str = "",
        sees: int | None = None,
    ) -> None:
        """A read-modify-write; `sees` is the value before."""
        expects = None if sees is None else lambda value: value == sees
        self.add("rmw", at, place=place, register=register, value=new, expects=expects)

    def fence(self, at: str) -> None:
        self.add("fence", at)


@dataclass
class Program:
    """One litmus test, with one variant of the source."""

    source: Source
    variant: Variant = AS_IT_IS
    threads: list[Thread] = field(default_factory=list)
    initial: dict[str, int] = field(default_factory=dict)
    forbidden: Callable[[dict[str, Any]], Any] | None = None
    racing: set[str] | None = field(default_factory=set)
    sites: set[str] = field(default_factory=set)
    orders: list[Order] = field(default_factory=list)
    num_meetings: int = 0

    def thread(self, rank: str, block: str = "0") -> Actor:
        """A new thread of a block; blocks of different launches have different names."""
        self.threads.append(Thread(rank, block))
        return Actor(self, self.threads[-1])

    def meet(self, *actors: Actor, at: str = "") -> None:
        """A barrier of these threads; without `at`, the end of a launch and the begin of the next."""
        self.num_meetings += 1
        for actor in actors:
            actor.add("meet", at, meeting=str(self.num_meetings))

    def forbid(self, outcome: Callable[[dict[str, Any]], Any]) -> None:
        self.forbidden = outcome

    def order(self, at: str) -> Order | None:
        """None: the variant has removed it."""
        order = order_of(self.source, at)
        self.sites.update(order.sites)
        self.orders.append(order)
        if self.variant.change == "removed" and self.variant.site in order.sites:
            return None
        return weaker(order, self.variant)


@dataclass(frozen=True)
class Litmus:
    """A named claim about the protocol, and the program that would break it."""

    name: str
    claim: str
    build: Callable[[Program], None]

    def program(self, source: Source, variant: Variant = AS_IT_IS) -> Program:
        program = Program(source, variant)
        self.build(program)
        return program

    def check(self, source: Source, variant: Variant = AS_IT_IS) -> Execution | None:
        """An execution that breaks the claim."""
        program = self.program(source, variant)
        return find_execution(program.threads, program.initial, program.forbidden, program.racing)


ALL: list[Litmus] = []


def litmus(claim: str) -> Callable[[Callable[[Program], None]], Litmus]:
    """Makes a litmus test of a function that builds a program."""

    def make(build: Callable[[Program], None]) -> Litmus:
        test = Litmus(build.__name__, claim, build)
        ALL.append(test)
        return test

    return make


def variants(source: Source, test: Litmus) -> list[Variant]:
    """What can be weaker in the lines that a test stands for."""
    made = []
    for order in test.program(source).orders:
        primitives = {
            name: source.sites[name].primitive if name in source.sites else name
            for name in order.sites
        }
        for name, primitive in primitives.items():
            if primitive in (FENCE, "fence", "quiet", *REMOVABLE_MEETINGS):
                made.append(Variant(name, "removed"))
            is_scope = name in DEVICE_SCOPES
            # What the transport calls has no order of its own. A fence is there for its release; libcu++
            # makes the same instruction of acq_rel and release.
            has_order = name == order.sites[0] or primitive not in CALLS
            if has_order and not is_scope and primitive not in (FENCE, "fence", "quiet"):
                made += [Variant(name, "no acquire")] if order.acquires else []
                made += [Variant(name, "no release")] if order.releases else []
            if is_scope or (name in source.sites and source.sites[name].scope):
                narrower = SCOPES[: SCOPES.index(order.scope)]
                made += [Variant(name, scope) for scope in narrower]
    return list(dict.fromkeys(made))


def site_line(source: Source, name: str) -> str:
    """Where a site is, for people."""
    if name in source.sites:
        site = source.sites[name]
        return f"{site.path}: {site.text}"
    return f"{DEVICE}: {name.removeprefix('device.')}"
