"""Where other programs of this user ask a rank for a dump of all (hang/request.py is their side)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING

from deep_ep.errors import EPUsageError
from deep_ep.hang import request, traces
from deep_ep.hang.messages import InquiryRequest, InquiryVerdict
from deep_ep.membership.connection import NOT_UNDERSTOOD, Connection, ConnectionClosed

if TYPE_CHECKING:
    from deep_ep.hang.hang_watch import HangWatch
    from deep_ep.membership.loop import Loop

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
        self._server.close()
        for connection in self._asking:
            connection.close()
        with contextlib.suppress(OSError, EPUsageError), request.meeting_place() as place:
            (place / self._name()).unlink(missing_ok=True)

    def _name(self) -> str:
        return f"{os.getpid()}.{self._watch.buffer}.{self._watch.rank}"

    def _let_in(self, connection: Connection) -> None:
        self._asking.add(connection)
        self._await(connection)

    def _await(self, connection: Connection) -> None:
        self._loop.watch(connection, lambda: self._serve(connection))

    def _serve(self, connection: Connection) -> None:
        try:
            for asked in connection.exchange():
                if isinstance(asked, InquiryRequest):
                    self._ask(connection, asked.dump_to)
            self._await(connection)
        except (ConnectionClosed, *NOT_UNDERSTOOD):
            self._asking.discard(connection)
            self._loop.drop(connection)

    def _ask(self, connection: Connection, folder: str) -> None:
        # A buffer that is gone may have left a dump there, so each has a place of its own.
        own = os.path.abspath(folder or traces.default_folder() or "deep_ep_dump")
        folder = os.path.join(own, self._watch.buffer)
        self._watch.ask_for_dump(folder, lambda found: self._answer(connection, found))

    def _answer(self, connection: Connection, found: InquiryVerdict) -> None:
        with contextlib.suppress(ConnectionClosed):  # who asked has gone
            connection.send(found)
            self._await(connection)
