"""The connections of one process with ranks of other processes: a rank is connected with when it has something to say.

Rank 0's process is connected with all others from the start, so that each end notices the other's death. It listens
for them while a buffer is made, and every other rank listens for as long as the buffer lives (coordinator.py). Any
program that reaches such a port can connect, so whoever connects must first send a greeting: the buffer's secret token
and its rank, in a fixed number of bytes. The token is compared before anything else in the greeting is read, and
nothing behind it is read before. Who sends a wrong greeting, or none within `GREETING_TIMEOUT_S`, is disconnected.
"""

from __future__ import annotations

import errno
import hmac
import logging
import socket
from collections.abc import Sequence
from typing import Callable

from deep_ep.hang import messages
from deep_ep.hang.messages import Message, Welcome
from deep_ep.membership.connection import NOT_UNDERSTOOD, Address, Connection, ConnectionClosed
from deep_ep.membership.loop import Loop

# How long a rank may take to connect, and a new connection to send its greeting. Chosen.
_CONNECT_S, GREETING_TIMEOUT_S = 10.0, 5.0
# The rank in a greeting, decimal.
_RANK_DIGITS = 8

_log = logging.getLogger("deep_ep")


def greeting(token: str, rank: int) -> bytes:
    """What a rank sends first, to any other of its buffer."""
    return f"{token}{rank:0{_RANK_DIGITS}d}".encode()


class Channel:
    """All of it runs in the thread of its loop, unless a method says otherwise.

    Attributes:
        connections: over which a rank is spoken to, by rank.
        addresses: where others listen, by rank; `None`: nowhere, as far as that is known.
        server: the socket on which it listens; `None`: it never did.
        address: where others connect, host and port; `None`: nowhere.
    """

    def __init__(
        self,
        loop: Loop,
        rank: int,
        num_ranks: int,
        token: str,
        hear: Callable[[int, Message], None],
        lose: Callable[[int, str], None],
    ) -> None:
        """Connects with nobody yet.

        Args:
            loop: looks after the connections.
            rank: that speaks.
            num_ranks: size of the group.
            token: what a greeting must begin with.
            hear: takes what a rank says; raises one of `NOT_UNDERSTOOD` if it may not say that.
            lose: told of a rank that is not connected any more, and how that ended, see `ConnectionClosed`; empty if it
                was not understood.
        """
        self._loop, self._rank, self._num_ranks, self._token = loop, rank, num_ranks, token
        self._hear, self._lose = hear, lose
        self.addresses: Sequence[Address | None] = (None,) * num_ranks
        self._open: set[Connection] = set()
        self.connections: dict[int, Connection] = {}
        self.server: socket.socket | None = None
        self.address: Address | None = None
        self._ungreeted: list[Connection] = []
        self._said: Message = None
        self._line = b""

    def listen(self, host: str, is_free: Callable[[int], bool]) -> None:
        """Lets ranks connect from now on. By any thread, before the loop starts.

        Args:
            host: an address of this host; only itself can connect there if that is a loopback.
            is_free: whether a rank may connect: it has no connection yet.

        Raises:
            OSError: nobody can listen here.
        """
        self._is_free = is_free
        at = host if host.startswith("127.") else ""
        backlog = max(self._num_ranks, socket.SOMAXCONN)
        self.server = server = socket.create_server((at, 0), backlog=backlog)
        self.address = (host, int(server.getsockname()[1]))
        self._loop.listen(server, self._let_in)

    def stop_listening(self) -> None:
        """Takes no further connections."""
        if self.server is not None:
            self._loop.ignore(self.server.fileno())
            self.server.close()
        for connection in list(self._ungreeted):
            self._send_away(connection)

    def connect(self, rank: int, address: Address) -> str:
        """Connects with a rank, and waits until it has answered. By any thread, before the loop starts.

        Returns:
            The address from which this process reaches it.

        Raises:
            OSError: it does not answer.
        """
        sock = socket.create_connection(address, _CONNECT_S)
        sock.sendall(greeting(self._token, self._rank))
        try:
            # The loop reads the answer, and what may stand behind it.
            has_answered = bool(sock.recv(1, socket.MSG_PEEK))
        except socket.timeout:
            raise OSError(f"rank {rank} did not answer within {_CONNECT_S:g} s") from None
        except ConnectionError:
            has_answered = False
        if not has_answered:
            raise OSError(f"rank {rank} closed the connection")
        self._accept(rank, Connection(sock))
        return str(sock.getsockname()[0])

    def reaches(self, rank: int) -> bool:
        """Whether there is a way to a rank, as far as that is known."""
        return rank in self.connections or self.addresses[rank] is not None

    def send(self, rank: int, message: Message) -> None:
        """Says something to a rank, which may not arrive."""
        try:
            connection = self.connections.get(rank) or self._call(rank)
            # All ranks are told a verdict, and one on 1024 ranks takes milliseconds.
            if message is not self._said:
                self._said, self._line = message, messages.encode(message) + b"\n"
            connection.send_bytes(self._line)
        except (OSError, ConnectionClosed):
            return  # of an open connection, heard of when it is read
        self._watch(rank, connection)

    def drop(self, rank: int) -> None:
        """Ends the connection with a rank, if there is one."""
        connection = self.connections.get(rank)
        if connection is not None:
            self._drop(rank, connection)

    def close(self) -> None:
        """Also in a forked child: closes descriptors and nothing else."""
        if self.server is not None:
            self.server.close()
        for connection in (*self._ungreeted, *self._open):
            connection.close()

    # ---- who connects

    def _let_in(self, connection: Connection) -> None:
        self._ungreeted.append(connection)
        if len(self._ungreeted) > 2 * self._num_ranks:
            self._send_away(self._ungreeted[0])
        self._loop.watch(connection, lambda: self._read_greeting(connection))
        self._loop.call_later(GREETING_TIMEOUT_S, lambda: self._send_away(connection))

    def _read_greeting(self, connection: Connection) -> None:
        try:
            received = connection.take(len(self._token) + _RANK_DIGITS)
            if received is None:
                return
            rank = self._greeting_rank(received)
            connection.send(Welcome())
        except (ConnectionClosed, ValueError):
            self._send_away(connection)
            return
        self._ungreeted.remove(connection)
        self._accept(rank, connection)

    def _greeting_rank(self, received: bytes) -> int:
        """The rank that greets.

        Raises:
            ValueError: the token is wrong, or that rank may not connect.
        """
        token, rank_text = received[:-_RANK_DIGITS], received[-_RANK_DIGITS:]
        if not hmac.compare_digest(token, self._token.encode()):
            raise ValueError("the token is wrong")
        rank = int(rank_text) if rank_text.isdigit() else -1
        if not 0 < rank < self._num_ranks or not self._is_free(rank):
            raise ValueError(f"rank {rank} may not connect")
        return rank

    def _send_away(self, connection: Connection) -> None:
        """Unless it has greeted, or been sent away before."""
        if connection in self._ungreeted:
            self._ungreeted.remove(connection)
            self._loop.drop(connection)

    # ---- who is connected

    def _call(self, rank: int) -> Connection:
        """Begins to connect; what is said meanwhile is sent once that is done.

        Raises:
            OSError: there is no way to it.
        """
        address = self.addresses[rank]
        if address is None:
            raise OSError(f"rank {rank} listens nowhere")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        problem = sock.connect_ex(address)
        if problem not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(problem, f"rank {rank} cannot be reached")
        connection = Connection(sock)
        connection.send_bytes(greeting(self._token, self._rank))
        self._accept(rank, connection)
        return connection

    def _accept(self, rank: int, connection: Connection) -> None:
        self._open.add(connection)
        self.connections.setdefault(rank, connection)
        self._watch(rank, connection)

    def _watch(self, rank: int, connection: Connection) -> None:
        self._loop.watch(connection, lambda: self._serve(rank, connection))

    def _serve(self, rank: int, connection: Connection) -> None:
        if connection not in self._open:  # dropped in this turn of the loop
            return
        try:
            said = connection.exchange()
            self._watch(rank, connection)
            for message in said:
                if not isinstance(message, Welcome):
                    self._hear(rank, message)
        except ConnectionClosed as closed:
            self._drop(rank, connection)
            if rank not in self.connections:
                self._lose(rank, closed.how)
        except NOT_UNDERSTOOD as error:
            _log.warning("deep_ep: what rank %d says is not understood: %s", rank, error)
            self._lose(rank, "")
            self._drop(rank, connection)

    def _drop(self, rank: int, connection: Connection) -> None:
        self._loop.drop(connection)
        self._open.discard(connection)
        if self.connections.get(rank) is connection:
            del self.connections[rank]
