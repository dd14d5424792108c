"""Connections between ranks other than rank 0, made when one has something to say to the other."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from deep_ep.membership.lines import NOT_UNDERSTOOD, Address, Line, LineClosed
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
        self._called: dict[int, Line] = {}  # by this rank
        self._callers: list[Line] = []
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
            line = self._called.get(rank) or self._call(rank)
            line.send(message)
        except (OSError, LineClosed):
            return  # of an open line, heard of when it is read
        self._loop.watch(line, lambda: self._serve(rank, line))

    def close(self) -> None:
        """Also in a forked child: closes descriptors and nothing else."""
        if self._listener is not None:
            self._listener.forget()
        for line in (*self._called.values(), *self._callers):
            line.close()

    def _call(self, rank: int) -> Line:
        """Begins to connect; what is said meanwhile is sent once that is done.

        Raises:
            OSError: there is no way to it.
        """
        address = self._addresses[rank] if self.can_reach(rank) else None
        if address is None:
            raise OSError(f"rank {rank} listens nowhere")
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        problem = connection.connect_ex(address)
        if problem not in (0, errno.EINPROGRESS):
            connection.close()
            raise OSError(problem, f"rank {rank} cannot be reached")
        line = self._called[rank] = Line(connection)
        line.send_bytes(greeting(self._token, self._rank))
        return line

    def _accept(self, rank: int, line: Line) -> None:
        self._callers.append(line)
        self._loop.watch(line, lambda: self._serve(rank, line))

    def _serve(self, rank: int, line: Line) -> None:
        try:
            said = line.exchange()
            self._loop.watch(line, lambda: self._serve(rank, line))
            for message in said:
                if message.get("type") != "welcome":
                    self._hear(rank, message, lambda answer: self._answer(rank, line, answer))
        except LineClosed:
            self._drop(rank, line)
        except NOT_UNDERSTOOD as error:
            _log.warning("deep_ep: what rank %d says is not understood: %s", rank, error)
            self._drop(rank, line)

    def _answer(self, rank: int, line: Line, message: Message) -> None:
        if line.fileno() < 0:
            return
        with contextlib.suppress(LineClosed):  # heard of when it is read
            line.send(message)
            self._loop.watch(line, lambda: self._serve(rank, line))

    def _drop(self, rank: int, line: Line) -> None:
        self._loop.drop(line)
        if self._called.get(rank) is line:
            del self._called[rank]
        if line in self._callers:
            self._callers.remove(line)
