"""Where other ranks connect: who says the token of the buffer comes in, and nobody else."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from deep_ep.lines import Line, LineClosed

if TYPE_CHECKING:
    from deep_ep.agreement import Message
    from deep_ep.loop import Loop


class Door:
    """Listens until it is shut. All of it runs in the thread of its loop.

    Attributes:
        listener: the socket.
        address: where others connect, host and port.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        token: str,
        num_ranks: int,
        may_enter: Callable[[int], bool],
        admit: Callable[[int, Line, Sequence[Message]], None],
    ) -> None:
        """Opens it.

        Args:
            loop: looks after it.
            host: an address of this host; only itself can reach it there if that is a loopback.
            token: what who comes must say.
            num_ranks: size of the group.
            may_enter: whether there is a place for a rank.
            admit: takes the connection of a rank, and what it has said already.

        Raises:
            OSError: nobody can listen here.
        """
        self._loop, self._token, self._num_ranks = loop, token, num_ranks
        self._may_enter, self._admit = may_enter, admit
        self._strangers: list[Line] = []
        at = host if host.startswith("127.") else ""
        self.listener = socket.create_server((at, 0), backlog=num_ranks)
        self.listener.setblocking(False)
        self.address = (host, int(self.listener.getsockname()[1]))
        loop.listen(self.listener.fileno(), self._accept)

    def shut(self) -> None:
        """Nobody comes in any more."""
        self._loop.ignore(self.listener.fileno())
        for line in self._strangers:
            self._loop.drop(line)
        self._strangers.clear()
        self.listener.close()

    def forget(self) -> None:
        """In a forked child: closes descriptors and nothing else."""
        self.listener.close()
        for line in self._strangers:
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line = Line(self.listener.accept()[0])
            self._strangers.append(line)
            if len(self._strangers) > 2 * self._num_ranks:
                self._loop.drop(self._strangers.pop(0))
            self._loop.watch(line, lambda: self._greet(line))

    def _greet(self, line: Line) -> None:
        """Lets a stranger in that knows the token."""
        try:
            messages = line.receive()
            if not messages:
                return
            rank = self._admitted(messages[0])
            line.send({"type": "welcome"})
        except (LineClosed, ValueError, TypeError, KeyError):
            with contextlib.suppress(ValueError):  # there were too many
                self._strangers.remove(line)
            self._loop.drop(line)
            return
        self._strangers.remove(line)
        self._admit(rank, line, messages[1:])

    def _admitted(self, message: Message) -> int:
        """The rank that says hello.

        Raises:
            ValueError, TypeError, KeyError: it may not come in.
        """
        token, rank = str(message["token"]), int(message["rank"])
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise ValueError("the token is wrong")
        if not 0 < rank < self._num_ranks or not self._may_enter(rank):
            raise ValueError(f"there is no place for rank {rank}")
        return rank
