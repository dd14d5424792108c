"""Bytes from rank to rank outside of the program's own groups, from a background thread.

A mailbox lives on a `torch.distributed` store: that of the process group where it can be used, else
one of its own. Connections are its own in any case, so that whoever waits here keeps nobody waiting.
A key has one reader and is deleted when read: a job of weeks does not fill the store. What nobody
reads stays until the store goes.

`Rounds` is how a background thread of every rank uses it: rank 0 calls, the others answer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed

from ..core.package import EPUsageError, Group, ThreadGroup, TorchGroup, rendezvous
from .stop_flag import StopFlag

# torch does not say that it exports its stores.
dist: Any = torch.distributed

_CONNECT_S = 30.0
# The longest that fits a TCPStore, whose timeouts are an int of milliseconds.
_LONGEST = timedelta(days=20)
# A wait that ends by timeout is loud in a TCPStore, so bounded waits look now and then: chosen.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05


def is_lost(error: Exception) -> bool:
    """Whether an error of a mailbox says that the store is gone, and with it the process that had it."""
    return isinstance(error, dist.DistNetworkError)


class Mailbox:
    """One rank's end. Any thread may post; one at a time may wait.

    Attributes:
        rank: this rank.
        size: number of ranks.
    """

    def __init__(
        self, rank: int, size: int, name: str, connect: Callable[[], Any], kept: object
    ) -> None:
        """Waits for nobody; `open_mailbox` finds a store that all ranks have.

        Args:
            rank: this rank.
            size: number of ranks.
            name: what the keys of this mailbox begin with; equal on all ranks, and of no other one in this store.
            connect: makes a connection to the store; one is for waiting, another for posting.
            kept: what must live as long as the mailbox, a store's server.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        self.rank = rank
        self.size = size
        self._inbox, self._outbox = (
            dist.PrefixStore(f"deep_ep/{name}", connect()) for _ in range(2)
        )
        self._kept = kept
        self._lock = threading.RLock()
        self._closed = StopFlag()
        self._awaited: str | None = None

    def post(self, key: str, data: bytes) -> None:
        """Leaves `data` under `key` for the one rank that waits for it; does not wait for that rank.

        Raises:
            EPUsageError: the mailbox is closed.
            RuntimeError: the store is gone.
        """
        if self._closed.is_set():
            raise EPUsageError(
                f"Mailbox.post: the mailbox of rank {self.rank} is closed, and {key!r} was posted; "
                "it must be open. Post before close()."
            )
        self._outbox.set(key, data)

    def wait(self, key: str, timeout_s: float | None) -> bytes | None:
        """What was posted under `key`, which is deleted; `None` if it did not come.

        Args:
            key: nobody else may wait for it.
            timeout_s: how long; 0: look once; `None`: until it comes or the mailbox is closed.

        Raises:
            RuntimeError: the store is gone.
        """
        came = self._wait_until_closed(key) if timeout_s is None else self._look(key, timeout_s)
        if not came:
            return None
        data: bytes = self._inbox.get(key)
        self._inbox.delete_key(key)
        return None if self._closed.is_set() else data

    def holds(self, key: str) -> bool:
        """Whether there is anything under `key`.

        Raises:
            RuntimeError: the store is gone.
        """
        return bool(self._outbox.check([key]))

    def close(self) -> None:
        """Ends every wait, on this rank, and closes this end. Not collective; may be repeated.

        May be called by a destructor, also in the thread that waits.
        """
        with self._lock:
            self._closed.set()
            if self._awaited is not None:
                with contextlib.suppress(RuntimeError):  # the store may be gone
                    self._outbox.set(self._awaited, b"")

    def _wait_until_closed(self, key: str) -> bool:
        with self._lock:
            self._awaited = key
        try:
            if self._closed.is_set():  # before, or by a destructor in this very place
                return False
            while not self._inbox.check([key]):
                with contextlib.suppress(dist.DistStoreError):  # that long passed
                    self._inbox.wait([key], _LONGEST)
        finally:
            with self._lock:
                self._awaited = None
        return True

    def _look(self, key: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_LOOK_S
        while not self._inbox.check([key]):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._closed.wait(min(pause_s, left_s)):
                return False
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return True


class Rounds:
    """Rank 0 calls, the others answer, round after round. Over a mailbox that serves nothing else.

    Attributes:
        silent: on rank 0, ranks that did not answer in time and have not since: number of the first
            round that they missed, and when that ended, seconds since the epoch.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.silent: dict[int, tuple[int, float]] = {}
        self._mailbox = mailbox
        # On rank 0: how many calls were posted for each of the others.
        self._posted = dict.fromkeys(range(1, mailbox.size), 0)
        # On the others: how many were taken, and the number of the round of the last one.
        self._taken, self._round = 0, b""

    def call(self, number: int, data: bytes) -> None:
        """Rank 0: begins a round. Who has not taken an earlier call keeps that one, so they do not pile up."""
        for rank, posted in self._posted.items():
            if not self._mailbox.holds(_call(posted, rank)):
                self._posted[rank] = posted + 1
                self._mailbox.post(_call(posted + 1, rank), b"%d %b" % (number, data))

    def end(self, data: bytes) -> None:
        """Rank 0: the last call, for who has taken the one before and who has not; another thread may call meanwhile."""
        for rank, posted in list(self._posted.items()):
            for each in range(posted, posted + 3):
                self._mailbox.post(_call(each, rank), b"0 %b" % data)

    def await_call(self) -> bytes | None:
        """Another rank: what its next round is about; `None` if the mailbox was closed."""
        said = self._mailbox.wait(_call(self._taken + 1, self._mailbox.rank), None)
        if said is None:
            return None
        self._taken += 1
        self._round, _, data = said.partition(b" ")
        return data

    def answer(self, data: bytes) -> None:
        """Another rank: says its part in the round that it was called for last, in the place of an answer not read."""
        self._mailbox.post(_answer(self._mailbox.rank), b"%b %b" % (self._round, data))

    def leave(self, data: bytes) -> None:
        """Another rank: answers whatever round comes next, which is its last."""
        self._mailbox.post(_goodbye(self._mailbox.rank), data)

    def collect(
        self,
        number: int,
        timeout_s: float,
        silent_s: float = math.inf,
        without: Collection[int] = (),
    ) -> dict[int, bytes]:
        """Rank 0: the answers that come in time, by rank; those of silent ranks are last.

        Args:
            number: of the round.
            timeout_s: for all ranks together.
            silent_s: and at most so long for all that were silent before.
            without: ranks that are neither waited for nor missed; what they say is dropped.
        """
        deadline = time.monotonic() + timeout_s
        answers = {}
        for rank in sorted(self._posted, key=lambda rank: (rank in self.silent, rank)):
            if rank in self.silent:
                deadline = min(deadline, time.monotonic() + silent_s)
            data = None if rank in without else self._answer_of(rank, number, deadline)
            if data is None:
                data = self._mailbox.wait(_goodbye(rank), 0)
                if data is not None:
                    self.dismiss([rank])
            if data is None and rank not in without:
                self.silent.setdefault(rank, (number, time.time()))
                continue
            self.silent.pop(rank, None)
            if data is not None and rank not in without:
                answers[rank] = data
        return answers

    def _answer_of(self, rank: int, number: int, deadline: float) -> bytes | None:
        """What a rank says in this round; what it said too late in an earlier one is dropped."""
        while True:
            said = self._mailbox.wait(_answer(rank), max(deadline - time.monotonic(), 0.0))
            if said is None:
                return None
            round_, _, data = said.partition(b" ")
            if round_ == b"%d" % number:
                return data

    def dismiss(self, ranks: Iterable[int]) -> None:
        """Rank 0: these ranks are not called any more."""
        for rank in ranks:
            self._posted.pop(rank, None)


def _call(number: int, rank: int) -> str:
    return f"call/{number}/{rank}"


def _answer(rank: int) -> str:
    return f"answer/{rank}"


def _goodbye(rank: int) -> str:
    return f"goodbye/{rank}"


def open_mailbox(group: Group, name: str) -> Mailbox:
    """Opens a mailbox between the ranks of a group. Collective; nothing after it is.

    Args:
        group: how the ranks find each other now.
        name: equal on all ranks; part of every key in the store, for who looks there. Mailboxes of
            equal name are different ones.

    Raises:
        EPTransportError: some rank could not reach the store; raised on all ranks, with the reason.
        EPTimeoutError: some ranks did not come.
    """
    if isinstance(group, ThreadGroup):
        made = dist.HashStore()
        # What ranks exchange is copied, but for functions.
        store = group.all_gather_object(lambda: made)[0]()
        return Mailbox(group.rank, group.size, name, lambda: store, store)
    store = store_of(group)
    said = group.all_gather_object((uuid.uuid4().hex, socket.gethostname(), store is not None))
    if all(usable for _, _, usable in said):
        connect, kept = store.clone, store
    else:
        connect, kept = _own_store(group, [host for _, host, _ in said])
    unique_name = f"{name}/{said[0][0]}"
    opened: list[Mailbox] = []

    def open_it() -> None:
        opened.append(Mailbox(group.rank, group.size, unique_name, connect, kept))

    rendezvous.together(group, "opening a mailbox", open_it)
    return opened[0]


def store_of(group: Group) -> Any:
    """The store of a process group, if connections of our own to it can be had; else `None`.

    A store in a file is out: it only grows, whatever is deleted.
    """
    if not isinstance(group, TorchGroup):
        return None
    try:
        store: Any = group.process_group.get_group_store()
        below: Any = store
        while hasattr(below, "underlying_store"):
            below = below.underlying_store
    except (AttributeError, RuntimeError):  # an older torch, or a group that was made without one
        return None
    return store if isinstance(below, dist.TCPStore) and hasattr(store, "clone") else None


def _own_store(group: Group, hosts: list[str]) -> tuple[Callable[[], Any], Any]:
    """A new TCPStore on rank 0: what connects to it, and its server there."""
    store = functools.partial(
        dist.TCPStore,
        world_size=None,
        timeout=timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
    )
    servers: list[Any] = []

    def serve() -> tuple[str, int] | None:
        if group.rank != 0:
            return None
        address = rendezvous.address(hosts)
        listener = socket.create_server((address if address.startswith("127.") else "", 0))
        port = listener.getsockname()[1]
        servers.append(store("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach()))
        return address, port

    where = rendezvous.together(group, "opening a mailbox", serve)[0]
    assert where is not None  # rank 0 always serves
    return functools.partial(store, *where, is_master=False), servers
