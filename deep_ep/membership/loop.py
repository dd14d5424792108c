"""A thread that sleeps until a connection, a timer or another thread has something for it.

The threads of a process end with it, in order, and a fork has none of them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing.util
import os
import queue
import sched
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Callable, TypeVar

from deep_ep.membership.connection import Connection

# How long the end of a process waits for its last words to be sent; chosen.
_END_S = 1.0
# What accept() raises where no descriptors or no memory are left, and when it is tried again; chosen.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 1.0

T = TypeVar("T")

_log = logging.getLogger("deep_ep")
_loops: set[Loop] = set()


class Loop(ABC):
    """A thread that sleeps until a connection, a timer or another thread has something for it.

    What takes long, such as a look at another process or a file, runs in a second thread: who waits for news of
    other ranks must not wait for that.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        # One byte wakes the thread.
        self._inner, self._outer = socket.socketpair()
        self._inner.setblocking(False)
        self._outer.setblocking(False)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers = sched.scheduler(time.monotonic)
        self._pause_s: float | None = None  # until the next timer
        self._running = True
        self._is_over = False
        self._selector.register(self._inner, selectors.EVENT_READ, lambda: self._inner.recv(4096))
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
            with contextlib.suppress(OSError):  # it is awake already, or has ended
                self._outer.send(b"\0")

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
        self._timers.enter(delay_s, 0, action)

    def listen(self, server: socket.socket, take: Callable[[Connection], None]) -> None:
        """Has the thread call it with each connection that is made to a server. From that thread, or before it starts."""

        def accept() -> None:
            try:
                connection = Connection(server.accept()[0])
            except OSError as error:
                if error.errno in _EXHAUSTED:  # who waits would wake the loop again at once
                    self.ignore(server.fileno())
                    self.call_later(_PAUSE_S, lambda: self.listen(server, take))
            else:
                take(connection)

        if server.fileno() >= 0:  # it may have been closed meanwhile
            server.setblocking(False)
            self.read(server.fileno(), accept)

    def read(self, descriptor: int, action: Callable[[], None]) -> None:
        """Has the thread call it when there is something to read. From that thread, or before it starts."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def ignore(self, descriptor: int) -> None:
        """The opposite of `listen`, and of `watch`. From that thread only."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def watch(self, connection: Connection, on_ready: Callable[[], None]) -> None:
        """Has the thread call it when a connection has something, or takes what is unsent. From that thread only."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        is_known = connection in self._selector.get_map()
        change = self._selector.modify if is_known else self._selector.register
        change(connection, events, on_ready)

    def drop(self, connection: Connection) -> None:
        """Closes a connection. From that thread only."""
        self.ignore(connection.fileno())
        connection.close()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Closes descriptors and nothing else. At the end of the thread, or in a forked child, which has none."""
        self._is_over = True
        self._selector.close()
        self._inner.close()
        self._outer.close()

    @abstractmethod
    def forget(self) -> None:
        """Called in a forked child, where the connections are the parent's."""

    @abstractmethod
    def leave_all(self) -> None:
        """The process ends in order."""

    @abstractmethod
    def fail(self) -> None:
        """Something in here is wrong, and the thread ends: tells the others that this end says nothing more."""

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
            self.close()

    def _run_aside(self) -> None:
        for action in iter(self._slow.get, None):
            try:
                action()
            except Exception:  # noqa: BLE001 - an inquiry that ends without it is no harm
                _log.exception("deep_ep: a part of an inquiry failed")

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._pause_s):
            key.data()
        with contextlib.suppress(queue.Empty):
            while self._running:
                self._posted.get_nowait()()
        self._pause_s = self._timers.run(blocking=False)


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
    _loops.clear()


os.register_at_fork(after_in_child=_forget_all)
