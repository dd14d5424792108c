"""Why operations hang, as plain data: causes, who waits for whom, and the verdict that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Optional

from deep_ep.hang.activity import ThreadActivity
from deep_ep.hang.states import Frame, InDump, Owed, RankState

# docs/hang.md says what each of them means.
Kind = Literal[
    "gone",
    "ended",
    "stopped",
    "unreachable",
    "busy",
    "not_called",
    "host_in_call",
    "other_buffer",
    "not_started",
    "not_sent",
    "not_arrived",
    "circle",
    "mismatch",
    "given_up",
    "unknown",
    "not_come",
    "undecided",
]


@dataclass(frozen=True)
class Edge:
    """Ranks wait for others.

    Attributes:
        waiters: all ranks that wait for just this, ascending.
        what: they need of the others.
        series, number: of the operation in which they wait.
        owed: the others, ascending.
        waited_s: the longest of their kernels, seconds.
    """

    waiters: tuple[int, ...]
    what: Owed
    series: str
    number: int
    owed: tuple[int, ...]
    waited_s: float = 0.0


def edges_of(
    owed: Mapping[tuple[int, Owed, str, int], Iterable[int]], waited_s: Mapping[int, float]
) -> tuple[Edge, ...]:
    """The edges of all who wait: ranks that wait for the same share one, or 1024 of them would fill no message.

    Args:
        owed: by waiter, what, series and number, for whom; who waits for nobody is left out.
        waited_s: by waiter.
    """
    alike: dict[tuple[Owed, str, int, tuple[int, ...]], list[int]] = {}
    for (waiter, what, series, number), ranks in sorted(owed.items()):
        if ranks:
            alike.setdefault((what, series, number, tuple(sorted(ranks))), []).append(waiter)
    found = [
        Edge(tuple(waiters), *wait, max(waited_s.get(rank, 0.0) for rank in waiters))
        for wait, waiters in alike.items()
    ]
    return tuple(sorted(found, key=lambda edge: (edge.waiters, edge.owed, edge.what)))


@dataclass(frozen=True)
class MismatchSide:
    """Ranks that called the same thing, where others called something else.

    Attributes:
        ranks: ascending.
        series, number, name: of their operation.
        values: sizes and dtype in which the sides differ.
        frame: where one of them called it; `None` if that is not known.
    """

    ranks: tuple[int, ...]
    series: str
    number: int
    name: str
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    frame: Optional[Frame] = None  # noqa: UP045 - read at run time, by Python 3.9 as well


@dataclass(frozen=True)
class HangCause:
    """One reason why ranks wait. Independent causes stand beside each other in a verdict.

    Attributes:
        kind: see `Kind`.
        accused: the ranks that are the reason, ascending; none where paths are. Calls and stacks are left out.
        series, number, name: of the operation that is concerned; "" and 0 if there is none.
        what: others wait for; empty if nobody does.
        waited_by: all ranks that wait for it, directly or because others do, ascending.
        waited_s: the longest of them, seconds.
        doing: what the main thread of the first of the accused does; `None` if that is not known.
        hook: operation whose receive hook they have not called; 0: none.
        elsewhere: where they are instead, for "other_buffer".
        paths: (source, destination) on which something did not arrive.
        hop: of these paths: "NVLink" or "network"; empty if there is only one kind.
        passed_on: whose rows the sources of these paths had to pass on; empty: their own.
        sides: of a mismatch, the largest first.
        between: the kinds between which it cannot be decided.
        report: what lines of a log say, where they name nobody.
        check: what to look at, instead of what the kind advises.
    """

    kind: Kind
    accused: tuple[RankState, ...] = ()
    series: str = ""
    number: int = 0
    name: str = ""
    what: Literal[Owed, ""] = ""
    waited_by: tuple[int, ...] = ()
    waited_s: float = 0.0
    doing: Optional[ThreadActivity] = None  # noqa: UP045
    hook: int = 0
    elsewhere: str = ""
    paths: tuple[tuple[int, int], ...] = ()
    hop: str = ""
    passed_on: tuple[int, ...] = ()
    sides: tuple[MismatchSide, ...] = ()
    between: tuple[Kind, ...] = ()
    report: str = ""
    check: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The accused ranks, ascending. Empty where paths are the reason: neither end is at fault."""
        return tuple(accused.rank for accused in self.accused)


@dataclass(frozen=True)
class HangVerdict(InDump):
    """Why the ranks of a buffer wait.

    Attributes:
        buffer: names it.
        num_ranks: size of its group.
        ranks_per_node: where operations between nodes go by way of gateways; 0: they do not.
        causes: independent of each other, what most ranks wait for first.
        edges: who waits for whom, by waiters.
        masked: ranks that all others have masked out.
        missing: ranks of which no state was there.
        taken_ns: time of the newest state, UTC, ns since 1970.
    """

    buffer: str = ""
    num_ranks: int = 0
    ranks_per_node: int = 0
    causes: tuple[HangCause, ...] = ()
    edges: tuple[Edge, ...] = ()
    masked: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    taken_ns: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """All accused ranks, ascending."""
        return tuple(sorted({rank for cause in self.causes for rank in cause.ranks}))

    @property
    def waiting(self) -> tuple[int, ...]:
        """All ranks that wait, ascending."""
        return tuple(sorted({rank for edge in self.edges for rank in edge.waiters}))
