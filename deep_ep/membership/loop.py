"""A thread that sleeps until a connection, a timer or another thread has something for it.

The threads of a process end with it, in order, and a fork has none of them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing.util
import os
import queue
import selectors
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Callable, Protocol, TypeVar

from deep_ep.base.ranks import Progress, RankPlace
from deep_ep.hang.messages import Message
from deep_ep.membership.connection import Address, Connection, Wakeup

# How long the end of a process waits for its last words to be sent; chosen.
_END_S = 1.0

T = TypeVar("T")

_log = logging.getLogger("deep_ep")
_loops: set[Loop] = set()


class Member(Protocol):
    """A rank of this process, as the thread that speaks for it sees it."""

    rank: int
    dead: dict[int, str]
    left: dict[int, int]

    def attach(self, loop: Loop) -> None:
        """From now on that thread speaks for this rank."""

    def away(self) -> set[int]:
        """Ranks that are not there to be asked."""

    def progress(self) -> Progress:
        """Where this rank is."""

    def handle(self, message: Message, answer: Callable[[Message], None]) -> None:
        """What rank 0 says, or who leads in its place; `answer` says something to that rank."""

    def lose(self, how: str) -> None:
        """The connection to rank 0 has ended."""

    def forget(self) -> None:
        """This is a forked child."""


class Loop(ABC):
    """A thread that sleeps until a connection, a timer or another thread has something for it.

    What takes long, such as a look at another process or a file, runs in a second thread: who waits for news of
    other ranks must not wait for that.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._running = True
        self._is_over = False
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.drain)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._slow: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._slow_thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        # At the end of a process of any kind; what multiprocessing starts may leave atexit out.
        self._at_exit = multiprocessing.util.Finalize(None, _end_all, exitpriority=1)
        _loops.add(self)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Has the thread call it. From any thread, also from a destructor."""
        if not self._is_over:
            self._posted.put(action)
            self._wakeup.wake()

    def aside(self, action: Callable[[], T], then: Callable[[T], None]) -> None:
        """Has the second thread call `action`, one at a time, and then this one `then`. From this thread only."""

        def run() -> None:
            result = action()
            self.post(lambda: then(result))

        self._slow.put(run)
        if self._slow_thread is None:
            name = f"{self._thread.name} aside"
            self._slow_thread = threading.Thread(target=self._run_aside, name=name, daemon=True)
            self._slow_thread.start()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Has the thread call it after a while. From that thread only."""
        self._timers.append((time.monotonic() + delay_s, next(self._timer_numbers), action))
        self._timers.sort()

    def listen(self, descriptor: int, action: Callable[[], None]) -> None:
        """Has the thread call it when there is something to read. From that thread only; -1: never."""
        if descriptor >= 0 and descriptor not in self._selector.get_map():
            self._selector.register(descriptor, selectors.EVENT_READ, action)

    def ignore(self, descriptor: int) -> None:
        """The opposite of `listen`, and of `watch`. From that thread only."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def watch(self, connection: Connection, on_ready: Callable[[], None]) -> None:
        """Has the thread call it when a connection has something, or takes what is unsent. From that thread only."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        try:
            self._selector.get_key(connection)
        except KeyError:
            self._selector.register(connection, events, on_ready)
        else:
            self._selector.modify(connection, events, on_ready)

    def drop(self, connection: Connection) -> None:
        """Closes a connection. From that thread only."""
        self.ignore(connection.fileno())
        connection.close()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_s)

    def forget(self) -> None:
        """In a forked child: closes descriptors and nothing else; the connections are the parent's."""
        self._is_over = True
        self._selector.close()
        self._wakeup.close()

    @abstractmethod
    def members(self) -> Sequence[Member]:
        """The ranks of this process that this thread speaks for."""

    @abstractmethod
    def say(self, rank: int, message: Message) -> None:
        """Takes a message of a rank of this process to the arbiter."""

    @abstractmethod
    def leave(self, rank: int, closed: int) -> None:
        """A rank of this process ends in order."""

    @abstractmethod
    def leave_all(self) -> None:
        """The process ends in order."""

    @property
    @abstractmethod
    def address(self) -> Address | None:
        """Where ranks of other processes connect; `None`: nowhere."""

    @abstractmethod
    def introduce(
        self, addresses: Sequence[Address | None], places: Sequence[RankPlace], ranks_per_node: int
    ) -> None:
        """All ranks have joined: where they listen and run, see `InquiryFailover.introduce`. From any thread."""

    @abstractmethod
    def lose_rank_0(self) -> None:
        """A rank of this process has learnt that rank 0 is gone, and did not say goodbye."""

    @abstractmethod
    def fail(self) -> None:
        """Something in here is wrong: tells the others that this end of the connections says nothing."""

    def _stop(self) -> None:
        self._running = False

    def _run(self) -> None:
        try:
            while self._running:
                self._turn()
        except Exception:  # noqa: BLE001 - whatever it is, operations go on
            if not sys.is_finalizing():
                _log.exception("deep_ep: missing ranks are found by the timeout only from now on")
            with contextlib.suppress(Exception):
                self.fail()
        finally:
            self._slow.put(None)
            if self._slow_thread is not None:
                self._slow_thread.join(_END_S)
            self._at_exit.cancel()
            _loops.discard(self)
            self.forget()

    def _run_aside(self) -> None:
        for action in iter(self._slow.get, None):
            try:
                action()
            except Exception:  # noqa: BLE001 - an inquiry that ends without it is no harm
                _log.exception("deep_ep: a part of an inquiry failed")

    def _turn(self) -> None:
        timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout_s):
            key.data()
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._timers.pop(0)[2]()
        with contextlib.suppress(queue.Empty):
            while self._running:
                self._posted.get_nowait()()


def _end_all() -> None:
    """The end of the process: all its ranks say goodbye."""
    ending = list(_loops)
    deadline = time.monotonic() + _END_S
    for loop in ending:
        loop.post(loop.leave_all)
    for loop in ending:
        loop.join(max(0.0, deadline - time.monotonic()))


def _forget_all() -> None:
    """In a forked child, which has the connections of its parent, but not its threads."""
    for loop in list(_loops):
        loop.forget()
        for member in loop.members():
            member.forget()
    _loops.clear()


os.register_at_fork(after_in_child=_forget_all)
