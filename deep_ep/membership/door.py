"""Where other ranks connect: who says the token of the buffer comes in, and nobody else.

A greeting has a fixed length. Its bytes are compared with the token before anything in them is looked at, and
nothing behind them is read before.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from typing import TYPE_CHECKING, Callable

from deep_ep.membership.lines import Line, LineClosed

if TYPE_CHECKING:
    from deep_ep.membership.loop import Loop

# How long a stranger may take to greet. Chosen.
PATIENCE_S = 5.0
# The rank in a greeting, decimal.
_RANK_DIGITS = 8


def greeting(token: str, rank: int) -> bytes:
    """What a rank says first, at any door of its buffer."""
    return f"{token}{rank:0{_RANK_DIGITS}d}".encode()


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
        admit: Callable[[int, Line], None],
    ) -> None:
        """Opens it.

        Args:
            loop: looks after it.
            host: an address of this host; only itself can reach it there if that is a loopback.
            token: what who comes must say.
            num_ranks: size of the group.
            may_enter: whether there is a place for a rank.
            admit: takes the connection of a rank.

        Raises:
            OSError: nobody can listen here.
        """
        self._loop, self._token, self._num_ranks = loop, token.encode(), num_ranks
        self._may_enter, self._admit = may_enter, admit
        self._strangers: dict[Line, float] = {}  # and until when they may greet; the oldest first
        self._sends_away = False
        at = host if host.startswith("127.") else ""
        self.listener = socket.create_server((at, 0), backlog=max(num_ranks, socket.SOMAXCONN))
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
            self._strangers[line] = time.monotonic() + PATIENCE_S
            if len(self._strangers) > 2 * self._num_ranks:
                self._send_away(next(iter(self._strangers)))
            self._loop.watch(line, lambda: self._greet(line))
            if not self._sends_away:
                self._sends_away = True
                self._loop.call_later(PATIENCE_S, self._send_late_ones_away)

    def _greet(self, line: Line) -> None:
        """Lets a stranger in that knows the token."""
        try:
            said = line.take(len(self._token) + _RANK_DIGITS)
            if said is None:
                return
            rank = self._admitted(said)
            line.send({"type": "welcome"})
        except (LineClosed, ValueError):
            self._send_away(line)
            return
        self._strangers.pop(line, None)
        self._admit(rank, line)

    def _send_late_ones_away(self) -> None:
        now = time.monotonic()
        for line in [line for line, until in self._strangers.items() if until <= now]:
            self._send_away(line)
        self._sends_away = bool(self._strangers)
        if self._sends_away:
            self._loop.call_later(min(self._strangers.values()) - now, self._send_late_ones_away)

    def _send_away(self, line: Line) -> None:
        self._strangers.pop(line, None)
        self._loop.drop(line)

    def _admitted(self, said: bytes) -> int:
        """The rank that greets.

        Raises:
            ValueError: it may not come in.
        """
        token, rank_text = said[: len(self._token)], said[len(self._token) :]
        if not hmac.compare_digest(token, self._token):
            raise ValueError("the token is wrong")
        rank = int(rank_text) if rank_text.isdigit() else -1
        if not 0 < rank < self._num_ranks or not self._may_enter(rank):
            raise ValueError(f"there is no place for rank {rank}")
        return rank
