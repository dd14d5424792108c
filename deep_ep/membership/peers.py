"""Connections between ranks other than rank 0, made when one has something to say to the other."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from deep_ep.membership.connection import NOT_UNDERSTOOD, Address, Connection, ConnectionClosed
from deep_ep.membership.listener import ConnectionListener, greeting

if TYPE_CHECKING:
    from deep_ep.base.ranks import Message
    from deep_ep.membership.loop import Loop

_log = logging.getLogger("deep_ep")


class Peers:
    """Of one rank. All of it runs in the thread of its loop.

    Attributes:
        address: where others connect; `None`: nowhere.
    """

    def __init__(
        self,
        loop: Loop,
        rank: int,
        num_ranks: int,
        token: str,
        host: str,
        hear: Callable[[int, Message, Callable[[Message], None]], None],
    ) -> None:
        """Listens, where that can be done.

        Args:
            loop: looks after the connections.
            rank: this rank.
            num_ranks: size of the group.
            token: what a greeting must begin with.
            host: an address of this host.
            hear: takes what another rank says, and how to answer it.
        """
        self._loop, self._rank, self._token, self._hear = loop, rank, token, hear
        self._addresses: Sequence[Address | None] = ()
        self._called: dict[int, Connection] = {}  # by this rank
        self._callers: list[Connection] = []
        self._listener: ConnectionListener | None = None
        with contextlib.suppress(OSError):  # others go without this rank
            self._listener = ConnectionListener(
                loop, host, token, num_ranks, lambda _: True, self._accept
            )
        self.address = self._listener.address if self._listener is not None else None

    def introduce(self, addresses: Sequence[Address | None]) -> None:
        """Where all ranks listen."""
        self._addresses = addresses

    def can_reach(self, rank: int) -> bool:
        """Whether there is a way to a rank, as far as that is known."""
        return rank < len(self._addresses) and self._addresses[rank] is not None

    def send(self, rank: int, message: Message) -> None:
        """Says something to a rank, which may not arrive."""
        try:
            connection = self._called.get(rank) or self._call(rank)
            connection.send(message)
        except (OSError, ConnectionClosed):
            return  # of an open connection, heard of when it is read
        self._loop.watch(connection, lambda: self._serve(rank, connection))

    def close(self) -> None:
        """Also in a forked child: closes descriptors and nothing else."""
        if self._listener is not None:
            self._listener.forget()
        for connection in (*self._called.values(), *self._callers):
            connection.close()

    def _call(self, rank: int) -> Connection:
        """Begins to connect; what is said meanwhile is sent once that is done.

        Raises:
            OSError: there is no way to it.
        """
        address = self._addresses[rank] if self.can_reach(rank) else None
        if address is None:
            raise OSError(f"rank {rank} listens nowhere")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        problem = sock.connect_ex(address)
        if problem not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(problem, f"rank {rank} cannot be reached")
        connection = self._called[rank] = Connection(sock)
        connection.send_bytes(greeting(self._token, self._rank))
        return connection

    def _accept(self, rank: int, connection: Connection) -> None:
        self._callers.append(connection)
        self._loop.watch(connection, lambda: self._serve(rank, connection))

    def _serve(self, rank: int, connection: Connection) -> None:
        try:
            said = connection.exchange()
            self._loop.watch(connection, lambda: self._serve(rank, connection))
            for message in said:
                if message.get("type") != "welcome":
                    self._hear(rank, message, lambda answer: self._answer(rank, connection, answer))
        except ConnectionClosed:
            self._drop(rank, connection)
        except NOT_UNDERSTOOD as error:
            _log.warning("deep_ep: what rank %d says is not understood: %s", rank, error)
            self._drop(rank, connection)

    def _answer(self, rank: int, connection: Connection, message: Message) -> None:
        if connection.fileno() < 0:
            return
        with contextlib.suppress(ConnectionClosed):  # heard of when it is read
            connection.send(message)
            self._loop.watch(connection, lambda: self._serve(rank, connection))

    def _drop(self, rank: int, connection: Connection) -> None:
        self._loop.drop(connection)
        if self._called.get(rank) is connection:
            del self._called[rank]
        if connection in self._callers:
            self._callers.remove(connection)
