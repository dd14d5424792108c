"""One face for the groups of ranks a `Buffer` can be built on.

A group is used for object exchange only, at construction and destruction; so gloo and NCCL process
groups, mpi4py communicators and threads of one process serve alike.
"""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from deep_ep.base import env
from deep_ep.errors import EPArgumentError, EPTimeoutError, EPTypeError, ranks_text

T = TypeVar("T")


class Group(Protocol):
    """What a `Buffer` needs of a group. Every method is collective."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather_object(self, obj: T) -> list[T]:
        """Every rank's object, in rank order."""

    def barrier(self) -> None:
        """Returns when all ranks have called it."""


class Board(Protocol):
    """What ranks can write down beside the exchanges of their group, and read while these wait. Text only."""

    def put(self, rank: int, text: str) -> None:
        """Replaces what this rank has written."""

    def read(self, rank: int) -> str | None:
        """What a rank has written last; `None`: nothing."""

    def apart(self) -> Board:
        """The same board for another thread, which must not wait for what the program does with this one."""


class _StoreBoard:
    """In the store of a process group. Any program that reaches the store can write there."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, rank: int, text: str) -> None:
        self._store.set(self._key(rank), text)

    def read(self, rank: int) -> str | None:
        key = self._key(rank)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def apart(self) -> Board:
        # A connection of its own: who waits for a key keeps all others of a connection waiting. Older versions
        # of torch have no `clone`.
        return _StoreBoard(self._store.clone()) if hasattr(self._store, "clone") else self

    def _key(self, rank: int) -> str:
        return f"deep_ep/{rank}"


class _ThreadBoard:
    """In this process."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def put(self, rank: int, text: str) -> None:
        self._texts[rank] = text

    def read(self, rank: int) -> str | None:
        return self._texts.get(rank)

    def apart(self) -> Board:
        return self


def board_of(group: Group) -> Board | None:
    """The board of a group; `None` where it has none, as a communicator of MPI."""
    return getattr(group, "board", None)


class TorchGroup:
    """A `torch.distributed.ProcessGroup`, of any backend that can gather objects.

    torch pickles the objects and sends them through the group's own collectives, never through its
    store: what another program writes into the store is not unpickled. Ranks must trust each other.
    """

    def __init__(self, group: Any) -> None:
        self.process_group = group
        self.rank = int(group.rank())
        self.size = int(group.size())
        self.board = self._find_board()

    def _find_board(self) -> Board | None:
        """torch does not say where the store of a group is, but for this function of its own."""
        from torch.distributed import distributed_c10d

        store_of = getattr(distributed_c10d, "_get_process_group_store", None)
        try:
            return None if store_of is None else _StoreBoard(store_of(self.process_group))
        except (KeyError, TypeError):  # a group that torch does not know
            return None

    def all_gather_object(self, obj: T) -> list[T]:
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self.process_group)
        return gathered

    def barrier(self) -> None:
        # Not dist.barrier(), which needs to guess a device with NCCL.
        self.all_gather_object(None)


class MpiGroup:
    """An mpi4py communicator. It pickles objects, like torch; ranks must trust each other."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank = int(comm.Get_rank())
        self.size = int(comm.Get_size())

    def all_gather_object(self, obj: T) -> list[T]:
        return list(self._comm.allgather(obj))

    def barrier(self) -> None:
        self._comm.allgather(None)


@dataclass
class _Meeting:
    """One exchange of a thread group: what was brought, taken back (when), and how often taken."""

    brought: dict[int, Any] = field(default_factory=dict)
    withdrawn: dict[int, float] = field(default_factory=dict)
    num_taken: int = 0


@dataclass
class _Meetings:
    """The exchanges of one thread group, by number."""

    size: int
    timeout_s: float
    board: _ThreadBoard = field(default_factory=_ThreadBoard)
    changed: threading.Condition = field(default_factory=threading.Condition)
    by_number: dict[int, _Meeting] = field(default_factory=dict)


class ThreadGroup:
    """One rank of a group whose ranks are threads of this process; made by `thread_groups()`.

    Objects are copied on their way, as between processes. After a timeout the group stays usable:
    who gives an exchange up takes back what it brought, and all meet in the next try.
    """

    def __init__(self, rank: int, meetings: _Meetings) -> None:
        self.rank = rank
        self.size = meetings.size
        self.board = meetings.board
        self._meetings = meetings
        self._number = 0

    def all_gather_object(self, obj: T) -> list[T]:
        """Every rank's object, in rank order.

        Raises:
            EPTimeoutError: some threads did not come in time.
        """
        meetings = self._meetings
        number = self._number
        started = time.monotonic()
        mine = copy.deepcopy(obj)
        with meetings.changed:
            meeting = meetings.by_number.setdefault(number, _Meeting())
            meeting.brought[self.rank] = mine
            meetings.changed.notify_all()
            complete = meetings.changed.wait_for(
                lambda: len(meeting.brought) == self.size, meetings.timeout_s
            )
            brought = dict(meeting.brought)
            came = brought.keys() | {r for r, when in meeting.withdrawn.items() if when >= started}
            if complete:
                self._number += 1
                meeting.num_taken += 1
                if meeting.num_taken == self.size:
                    del meetings.by_number[number]
            else:
                del meeting.brought[self.rank]
                meeting.withdrawn[self.rank] = time.monotonic()
        if not complete:
            missing = [rank for rank in range(self.size) if rank not in came]
            raise EPTimeoutError(
                f"ThreadGroup on rank {self.rank}: {ranks_text(missing)} did not come to exchange "
                f"{number} within {meetings.timeout_s:g} s; every rank's thread must. "
                "Read that thread's error, or raise DEEP_EP_TIMEOUT_S if it is only slow.",
                missing_ranks=missing,
                operation="all_gather_object",
                waited_s=time.monotonic() - started,
            )
        return [copy.deepcopy(brought[rank]) for rank in range(self.size)]

    def barrier(self) -> None:
        """Returns when all threads have called it; raises like `all_gather_object`."""
        self.all_gather_object(None)

    def __repr__(self) -> str:
        return f"ThreadGroup(rank={self.rank}, size={self.size})"


def thread_groups(num_ranks: int, timeout_s: float | None = None) -> list[ThreadGroup]:
    """The ranks of a new in-process group; give each to one thread.

    Args:
        num_ranks: size of the group, >= 1.
        timeout_s: how long an exchange waits for a thread, seconds; `DEEP_EP_TIMEOUT_S` unless given.

    Raises:
        EPArgumentError: `num_ranks` below 1.
    """
    if num_ranks < 1:
        raise EPArgumentError(
            f"thread_groups: num_ranks is {num_ranks}; it must be at least 1. "
            "Pass the number of threads."
        )
    meetings = _Meetings(num_ranks, env.timeout_s() if timeout_s is None else timeout_s)
    return [ThreadGroup(rank, meetings) for rank in range(num_ranks)]


def as_group(group: Any, comm: Any = None) -> Group:
    """The `Group` for what a caller passed to `Buffer`; `comm` counts only if `group` is None.

    Raises:
        EPArgumentError: both are None.
        EPTypeError: neither a process group, nor a communicator, nor a `Group`; or `comm` is a bool.
    """
    if isinstance(comm, bool):
        raise EPTypeError(
            f"Buffer: comm is {comm}; allowed are None and an mpi4py communicator. The ninth argument is "
            "comm as in DeepEP v1.2.1, and enable_shrink in later revisions. Pass comm and enable_shrink by name."
        )
    given = comm if group is None else group
    if given is None:
        raise EPArgumentError(
            "Buffer: group and comm are both None; one of them must be given. "
            "Pass a torch.distributed.ProcessGroup, or an mpi4py communicator as comm."
        )
    if hasattr(given, "all_gather_object") and isinstance(given.rank, int):
        adapted: Group = given
        return adapted
    if hasattr(given, "Get_rank") and hasattr(given, "allgather"):
        return MpiGroup(given)
    if callable(getattr(given, "rank", None)) and callable(getattr(given, "size", None)):
        return TorchGroup(given)
    raise EPTypeError(
        f"Buffer: group is a {type(given).__name__}; allowed are a torch.distributed.ProcessGroup, "
        "an mpi4py communicator and a deep_ep.group.Group. Pass one of them."
    )
