"""Where other programs of this user ask a rank for a dump of all (hang/request.py is their side); SIGUSR2 asks as well.

faulthandler handles the signal, in C, so that nobody's thread is interrupted for long, and writes into a pipe. That
wakes the threads that speak for ranks, of which the first one reads it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Callable

from deep_ep.errors import EPUsageError
from deep_ep.hang import request, traces
from deep_ep.hang.messages import InquiryRequest, InquiryVerdict
from deep_ep.membership.connection import NOT_UNDERSTOOD, Connection, ConnectionClosed

if TYPE_CHECKING:
    from deep_ep.hang.hang_watch import HangWatch
    from deep_ep.membership.loop import Loop

# Once for each signal. The rest of a stack follows in many pieces, of which each may wake a reader.
_HEADER = b"Stack (most recent call first):"
_MOST_BYTES = 1 << 16

_log = logging.getLogger("deep_ep")


class DumpRequests:
    """All of it runs in the thread of its loop."""

    def __init__(self, loop: Loop, watch: HangWatch) -> None:
        """Takes requests from now on.

        Args:
            loop: looks after the connections.
            watch: of the rank, which has the dumps written.
        """
        self._loop, self._watch = loop, watch
        self._folder = os.path.abspath(traces.default_folder() or "deep_ep_dump")
        _all.add(self)
        if _signal_end() >= 0:
            loop.read(_reading_end, _take_signal)
        self._asking: set[Connection] = set()
        self._server = socket.socket(socket.AF_UNIX)
        try:
            with request.meeting_place() as place:
                self._server.bind(str(place / self._name()))
            self._server.listen()
        except (OSError, EPUsageError) as error:
            _log.warning("deep_ep: nobody can ask this process for a dump: %s", error)
        else:
            loop.listen(self._server, self._let_in)

    def close(self) -> None:
        """Also in a forked child: what its parent has stays there."""
        _all.discard(self)
        self._server.close()
        for connection in self._asking:
            connection.close()
        with contextlib.suppress(OSError, EPUsageError), request.meeting_place() as place:
            (place / self._name()).unlink(missing_ok=True)

    def _name(self) -> str:
        of_rank = f"{os.getpid()}.{self._watch.buffer}.{self._watch.rank}"
        return f"{of_rank}.{request.short(self._folder)}"

    def _let_in(self, connection: Connection) -> None:
        self._asking.add(connection)
        self._await(connection)

    def _await(self, connection: Connection) -> None:
        self._loop.watch(connection, lambda: self._serve(connection))

    def _serve(self, connection: Connection) -> None:
        try:
            for asked in connection.exchange():
                if isinstance(asked, InquiryRequest):
                    self.ask(asked.dump_to, lambda found: self._answer(connection, found))
            self._await(connection)
        except (ConnectionClosed, *NOT_UNDERSTOOD):
            self._asking.discard(connection)
            self._loop.drop(connection)

    def ask(self, folder: str, answer: Callable[[InquiryVerdict], None] | None = None) -> None:
        """Has a dump written; in any thread. A buffer that is gone may have left one there, so each has a place of its own."""
        own = os.path.abspath(folder) if folder else self._folder
        self._watch.ask_for_dump(os.path.join(own, self._watch.buffer), answer)

    def _answer(self, connection: Connection, found: InquiryVerdict) -> None:
        with contextlib.suppress(ConnectionClosed):  # who asked has gone
            connection.send(found)
            self._await(connection)


# ---- the signal

_reading_end = -1
_tail = b""  # of what was read: a header may come in two pieces
_reading = threading.Lock()
_all: set[DumpRequests] = set()


def _signal_end() -> int:
    """What becomes readable with the signal; -1 if the program has it for itself."""
    global _reading_end
    with _reading:
        if _reading_end < 0 and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            _reading_end, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            faulthandler.register(signal.SIGUSR2, file=writing, all_threads=False, chain=False)
    return _reading_end


def _take_signal() -> None:
    global _tail
    with _reading:
        try:
            written = _tail + os.read(_reading_end, _MOST_BYTES)
        except BlockingIOError:  # another thread has read it
            return
        _tail = written[written.rfind(_HEADER) + len(_HEADER) :] if _HEADER in written else written
        _tail = _tail[1 - len(_HEADER) :]
    if _HEADER in written:
        for requests in list(_all):
            requests.ask("")


def _forget() -> None:
    """In a forked child, which has the pipe of its parent."""
    global _reading_end, _reading
    _reading = threading.Lock()
    if _reading_end >= 0:
        faulthandler.unregister(signal.SIGUSR2)
        _reading_end = -1
    _all.clear()


os.register_at_fork(after_in_child=_forget)
