"""The connections of one process with ranks of other processes: a rank is connected with when it has something to say.

Rank 0's process is connected with all others from the start, so that each end notices the other's death.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from deep_ep.hang.messages import Message, Welcome
from deep_ep.membership.connection import NOT_UNDERSTOOD, Address, Connection, ConnectionClosed
from deep_ep.membership.listener import ConnectionListener, greeting

if TYPE_CHECKING:
    from deep_ep.membership.loop import Loop

# How long a rank may take to connect. Chosen.
_CONNECT_S = 10.0

_log = logging.getLogger("deep_ep")


class Channel:
    """All of it runs in the thread of its loop, unless a method says otherwise.

    Attributes:
        connections: over which a rank is spoken to, by rank.
        listener: where others connect; `None`: nowhere.
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
        self._addresses: Sequence[Address | None] = ()
        self._open: set[Connection] = set()
        self.connections: dict[int, Connection] = {}
        self.listener: ConnectionListener | None = None

    def listen(self, host: str, is_free: Callable[[int], bool]) -> ConnectionListener:
        """Lets ranks connect from now on; see `ConnectionListener`. By any thread, before the loop starts."""
        known = self._loop, host, self._token, self._num_ranks
        self.listener = ConnectionListener(*known, is_free, self._accept)
        return self.listener

    def connect(self, rank: int, address: Address) -> str:
        """Connects with a rank, and waits until it has answered. By any thread, before the loop starts.

        Returns:
            The address from which this process reaches it.

        Raises:
            OSError: it does not answer.
        """
        sock = socket.create_connection(address, _CONNECT_S)
        connection = Connection(sock)
        connection.send_bytes(greeting(self._token, self._rank))
        with selectors.DefaultSelector() as waiting:
            waiting.register(sock, selectors.EVENT_READ)
            if not waiting.select(_CONNECT_S):
                raise OSError(f"rank {rank} did not answer within {_CONNECT_S:g} s")
        try:
            connection.receive()
        except ConnectionClosed as error:
            raise OSError(f"rank {rank} closed the connection") from error
        self._accept(rank, connection)
        return str(sock.getsockname()[0])

    def introduce(self, addresses: Sequence[Address | None]) -> None:
        """Where all ranks listen."""
        self._addresses = addresses

    def reaches(self, rank: int) -> bool:
        """Whether there is a way to a rank, as far as that is known."""
        return rank in self.connections or self._address_of(rank) is not None

    def send(self, rank: int, message: Message) -> None:
        """Says something to a rank, which may not arrive."""
        try:
            connection = self.connections.get(rank) or self._call(rank)
            connection.send(message)
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
        if self.listener is not None:
            self.listener.forget()
        for connection in self._open:
            connection.close()

    # ---- steps

    def _address_of(self, rank: int) -> Address | None:
        return self._addresses[rank] if rank < len(self._addresses) else None

    def _call(self, rank: int) -> Connection:
        """Begins to connect; what is said meanwhile is sent once that is done.

        Raises:
            OSError: there is no way to it.
        """
        address = self._address_of(rank)
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
