"""A connection between two processes of a group, outside of its own collectives: messages as JSON, one to a line.

A `Connection` never waits: it sends and receives what the socket takes and has now, and a loop (loop.py) says when
there is more. It also notices that the other process has ended, or that its host cannot be reached any more. What
arrives is plain data of bounded size, in which every number is finite and an integer has 64 bits at most; it is not
trusted further than that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from deep_ep.hang import messages
from deep_ep.hang.messages import Message

# Of a message, bytes: what is told about 1024 ranks takes a twentieth of it.
_LONGEST = 1 << 20
# Of what waits to be sent, bytes.
_MOST_UNSENT = 8 << 20
# A host that does not answer is gone: looked for once a second, given up after so many looks, and
# after so long. Kernels answer each other, so a process may be stopped for any time.
_LOOKS, _LOOK_EVERY_S, _UNREACHABLE_MS = 3, 1, 3500
_NO_ROUTE = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
}

# What it can raise to read a message that is none. Whoever reads one drops the connection then, and nothing else.
NOT_UNDERSTOOD = (ValueError, LookupError)

# Host and port.
Address = tuple[str, int]


class ConnectionClosed(Exception):  # noqa: N818 - how a connection ends, not an error
    """The other end is gone: `how` is "process" if its process ended, "host" if that is unreachable."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Connection:
    """One end of a connection. One thread at a time.

    Attributes:
        socket: over which it goes.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes the connection over."""
        self.socket = sock
        self._unsent = bytearray()
        self._unread = bytearray()
        self._end: ConnectionClosed | None = None
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            _watch_host(sock)

    def fileno(self) -> int:
        """For a selector; -1 once closed."""
        return self.socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when the connection takes data again."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends a message; does not wait.

        Raises:
            ConnectionClosed: the other end is gone, or has read nothing for long.
        """
        self.send_bytes(messages.encode(message) + b"\n")

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes as they are; does not wait.

        Raises:
            ConnectionClosed: as `send`.
        """
        if len(self._unsent) + len(data) > _MOST_UNSENT:
            raise ConnectionClosed("process")
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Sends what has not been sent yet, as far as that is possible now.

        Raises:
            ConnectionClosed: the other end is gone.
        """
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise self._ended_by(error) from error

    def take(self, num_bytes: int) -> bytes | None:
        """The first bytes that arrive, before any message; nothing behind them is read yet.

        Returns:
            `None` until all of them are there.

        Raises:
            ConnectionClosed: the other end is gone.
        """
        self._read(num_bytes - len(self._unread))
        if len(self._unread) < num_bytes:
            return None
        taken, self._unread = bytes(self._unread), bytearray()
        return taken

    def exchange(self) -> list[Message]:
        """Sends what it can, and returns the messages that have arrived in full.

        Raises:
            ConnectionClosed: the other end is gone, and all it sent has been returned.
            ValueError: what came is no message.
        """
        with contextlib.suppress(ConnectionClosed):  # what it has sent before is still there
            self.flush()
        try:
            while self._read(1 << 16) and len(self._unread) <= _LONGEST:
                pass
        except ConnectionClosed:
            # Who closes with something unread resets the connection, behind its last words.
            messages = self._messages()
            if messages:
                return messages
            raise
        return self._messages()

    def close(self) -> None:
        """Closes this end. May be repeated."""
        self.socket.close()

    def _read(self, most: int) -> bool:
        """Reads so many bytes at most, and returns whether any were there."""
        try:
            data = self.socket.recv(most)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._ended_by(error) from error
        if not data:
            raise self._end or ConnectionClosed("process")
        self._unread += data
        return True

    def _ended_by(self, error: OSError) -> ConnectionClosed:
        """The first error says how; behind it the system says only that it is over."""
        if self._end is None:
            self._end = ConnectionClosed("host" if error.errno in _NO_ROUTE else "process")
        return self._end

    def _messages(self) -> list[Message]:
        *complete, rest = self._unread.split(b"\n")
        if any(len(line) > _LONGEST for line in (*complete, rest)):
            raise ValueError(f"a message has more than {_LONGEST} bytes")
        self._unread = bytearray(rest)
        return [messages.decode(line) for line in complete]


def _watch_host(sock: socket.socket) -> None:
    """Lets the kernels of both hosts find out that the other one is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _LOOK_EVERY_S),
        ("TCP_KEEPINTVL", _LOOK_EVERY_S),
        ("TCP_KEEPCNT", _LOOKS),
        ("TCP_USER_TIMEOUT", _UNREACHABLE_MS),
    ):
        if hasattr(socket, name):  # all of them on Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def descriptors_left() -> int:
    """How many more files and sockets this process may open."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(limit) - len(os.listdir("/proc/self/fd")) if limit >= 0 else 1 << 30
