"""A TCP listener that lets in only ranks of its own buffer.

Rank 0 opens one while a buffer is made, and every other rank opens one for as long as the buffer lives
(coordinator.py). Any program that reaches the port can connect, so whoever connects must first send a greeting:
the buffer's secret token and its rank, in a fixed number of bytes. The token is compared before anything else in
the greeting is read, and nothing behind it is read before. Who sends a wrong greeting, or none within
`GREETING_TIMEOUT_S`, is disconnected.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from typing import TYPE_CHECKING, Callable

from deep_ep.hang.messages import Welcome
from deep_ep.membership.connection import Connection, ConnectionClosed

if TYPE_CHECKING:
    from deep_ep.membership.loop import Loop

# How long a new connection may take to send its greeting. Chosen.
GREETING_TIMEOUT_S = 5.0
# The rank in a greeting, decimal.
_RANK_DIGITS = 8


def greeting(token: str, rank: int) -> bytes:
    """What a rank sends first, to any listener of its buffer."""
    return f"{token}{rank:0{_RANK_DIGITS}d}".encode()


class ConnectionListener:
    """Accepts connections until it is stopped. All of it runs in the thread of its loop.

    Attributes:
        socket: on which it listens.
        address: where others connect, host and port.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        token: str,
        num_ranks: int,
        is_free: Callable[[int], bool],
        accept: Callable[[int, Connection], None],
    ) -> None:
        """Begins to listen.

        Args:
            loop: looks after the connections.
            host: an address of this host; only itself can connect there if that is a loopback.
            token: what a greeting must begin with.
            num_ranks: size of the group.
            is_free: whether a rank may connect: it has no connection yet.
            accept: takes the connection of a rank whose greeting was right.

        Raises:
            OSError: nobody can listen here.
        """
        self._loop, self._token, self._num_ranks = loop, token.encode(), num_ranks
        self._is_free, self._accept = is_free, accept
        # And until when they may greet; the oldest first.
        self._ungreeted: dict[Connection, float] = {}
        self._expiry_is_due = False
        at = host if host.startswith("127.") else ""
        self.socket = socket.create_server((at, 0), backlog=max(num_ranks, socket.SOMAXCONN))
        self.socket.setblocking(False)
        self.address = (host, int(self.socket.getsockname()[1]))
        loop.listen(self.socket.fileno(), self._connect)

    def stop(self) -> None:
        """Takes no further connections."""
        self._loop.ignore(self.socket.fileno())
        for connection in self._ungreeted:
            self._loop.drop(connection)
        self._ungreeted.clear()
        self.socket.close()

    def forget(self) -> None:
        """In a forked child: closes descriptors and nothing else."""
        self.socket.close()
        for connection in self._ungreeted:
            connection.close()

    def _connect(self) -> None:
        with contextlib.suppress(OSError):
            connection = Connection(self.socket.accept()[0])
            self._ungreeted[connection] = time.monotonic() + GREETING_TIMEOUT_S
            if len(self._ungreeted) > 2 * self._num_ranks:
                self._disconnect(next(iter(self._ungreeted)))
            self._loop.watch(connection, lambda: self._read_greeting(connection))
            if not self._expiry_is_due:
                self._expiry_is_due = True
                self._loop.call_later(GREETING_TIMEOUT_S, self._disconnect_expired)

    def _read_greeting(self, connection: Connection) -> None:
        try:
            received = connection.take(len(self._token) + _RANK_DIGITS)
            if received is None:
                return
            rank = self._greeting_rank(received)
            connection.send(Welcome())
        except (ConnectionClosed, ValueError):
            self._disconnect(connection)
            return
        self._ungreeted.pop(connection, None)
        self._accept(rank, connection)

    def _disconnect_expired(self) -> None:
        now = time.monotonic()
        expired = [connection for connection, until in self._ungreeted.items() if until <= now]
        for connection in expired:
            self._disconnect(connection)
        self._expiry_is_due = bool(self._ungreeted)
        if self._expiry_is_due:
            self._loop.call_later(min(self._ungreeted.values()) - now, self._disconnect_expired)

    def _disconnect(self, connection: Connection) -> None:
        self._ungreeted.pop(connection, None)
        self._loop.drop(connection)

    def _greeting_rank(self, received: bytes) -> int:
        """The rank that greets.

        Raises:
            ValueError: the token is wrong, or that rank may not connect.
        """
        token, rank_text = received[: len(self._token)], received[len(self._token) :]
        if not hmac.compare_digest(token, self._token):
            raise ValueError("the token is wrong")
        rank = int(rank_text) if rank_text.isdigit() else -1
        if not 0 < rank < self._num_ranks or not self._is_free(rank):
            raise ValueError(f"rank {rank} may not connect")
        return rank
