"""What ranks say of themselves and of each other: where they run, how far they are, who is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from deep_ep.base import codec


class RankPlace(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: name of its host.
        pid: number of its process there.
    """

    host: str
    pid: int


@dataclass(frozen=True, order=True)
class Key:
    """What a decision is about.

    Attributes:
        series: "operation" for dispatch and combine, which are numbered together; else the name.
        op: number in that series.
    """

    series: str
    op: Annotated[int, codec.Range()]

    @property
    def is_operation(self) -> bool:
        """Whether `op` counts what `Progress` counts."""
        return self.series == "operation"


class Progress(NamedTuple):
    """Where a rank is.

    Attributes:
        closed: newest operation that it has finished.
        open: the one that it is in; 0: between operations.
        waiting: whether it waits there for others.
    """

    closed: int
    open: int
    waiting: bool

    @property
    def newest(self) -> int:
        """The newest operation that it has entered."""
        return max(self.closed, self.open)


@dataclass(frozen=True)
class Decision:
    """Who is the reason that an operation failed. The same on all ranks.

    Attributes:
        key: which operation.
        dead: ranks that are dead: "process" if that ended, "host" if that cannot be reached.
        left: ranks that ended in order, and the last operation they finished.
        silent: missing ranks that do not say where they are: stopped, or busy.
        elsewhere: missing ranks that live and are elsewhere.
        waiting: ranks that wait themselves, and in which operation.
        paths: if all others are empty but `waiting`: (source, destination) where nothing arrived.
    """

    key: Key
    dead: Mapping[int, str] = field(default_factory=dict)
    left: Mapping[int, int] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    elsewhere: Mapping[int, Progress] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)
    paths: tuple[tuple[int, int], ...] = ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """Everybody who is missing and does not wait, ascending."""
        return tuple(sorted({*self.dead, *self.left, *self.silent, *self.elsewhere}))


def rank_of(rank: int, num_ranks: int) -> int:
    """A rank that somebody has named.

    Raises:
        ValueError: the group has no such rank.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks} does not exist")
    return rank
