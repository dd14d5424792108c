"""The connections through which the ranks of a buffer learn who lives: one from every rank to rank 0.

Rank 0's process runs the `Coordinator`: it accepts the connections, passes on who has died or left, decides who is
missing (agreement.py) and leads inquiries (inquiry.py). Every other process runs a `CoordinatorClient` per rank,
which talks to rank 0 and, where rank 0 does not answer, to the other ranks (failover.py).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Sequence

from deep_ep.base.ranks import Message, RankPlace
from deep_ep.hang import inquiry
from deep_ep.hang.announcement import Announcer
from deep_ep.hang.inquiry import Inquiries, InquiryResult
from deep_ep.membership.agreement import Arbiter
from deep_ep.membership.connection import (
    NOT_UNDERSTOOD,
    Address,
    Connection,
    ConnectionClosed,
    descriptors_left,
)
from deep_ep.membership.failover import LAST_WORDS_S, InquiryFailover
from deep_ep.membership.leader_election import REQUESTS
from deep_ep.membership.listener import ConnectionListener, greeting
from deep_ep.membership.loop import Loop, Member

# How long a rank may take to connect, and descriptors that are left to the program. Chosen.
_CONNECT_S = 10.0
_SPARE_DESCRIPTORS = 64

_log = logging.getLogger("deep_ep")


class Coordinator(Loop):
    """Rank 0's end, a thread: the arbiter, the ranks of this process, and connections to all others.

    Attributes:
        listener: where the others connect, until all have.
        connections: to the others, by rank.
    """

    def __init__(
        self, places: Sequence[RankPlace], ranks_per_node: int, token: str, address: str
    ) -> None:
        num_ranks = len(places)
        if descriptors_left() < num_ranks + _SPARE_DESCRIPTORS:
            raise OSError(
                f"{num_ranks} connections are needed, and {descriptors_left()} more descriptors are "
                "allowed; raise RLIMIT_NOFILE (ulimit -n)"
            )
        super().__init__("deep_ep.liveness coordinator")
        self._arbiter = Arbiter(num_ranks, self._send, self.call_later, time.monotonic)
        self._inquiries = Inquiries(
            places, ranks_per_node, self._arbiter, self._send, self.call_later, self._tell
        )
        self._num_ranks = num_ranks
        self._members: dict[int, Member] = {}
        self.connections: dict[int, Connection] = {}
        self._announcer = Announcer()
        self.listener = ConnectionListener(
            self, address, token, num_ranks, self._is_free, self._accept
        )

    def take_in(self, member: Member) -> None:
        """A rank of this process joins; from any thread."""
        self.post(lambda: self._members.update({member.rank: member}))
        member.attach(self)

    def complete(self, unreachable: Sequence[int]) -> None:
        """All ranks have connected, but for these."""
        self.listener.stop()
        for rank in unreachable:
            self._arbiter.unwatch(rank)

    def members(self) -> Sequence[Member]:
        return list(self._members.values())

    def say(self, rank: int, message: Message) -> None:
        if message["type"] in inquiry.TYPES:
            self._inquiries.handle(rank, message)
        else:
            self._arbiter.handle(rank, message)

    def leave(self, rank: int, closed: int) -> None:
        self._members.pop(rank, None)
        self._arbiter.handle(rank, {"type": "left", "closed": closed})
        self._stop_if_last()

    def leave_all(self) -> None:
        for rank, member in list(self._members.items()):
            self.leave(rank, member.progress().closed)
        self._stop()

    def fail(self) -> None:
        for connection in list(self.connections.values()):
            with contextlib.suppress(ConnectionClosed):
                connection.send({"type": "off"})
        for member in self.members():
            member.lose("")

    def introduce(
        self, addresses: Sequence[Address | None], places: Sequence[RankPlace], ranks_per_node: int
    ) -> None:
        """Rank 0 leads, so its process asks nobody else to."""

    @property
    def address(self) -> Address | None:
        return None

    def lose_rank_0(self) -> None:
        """Its ranks are gone with it."""

    def forget(self) -> None:
        super().forget()
        self.listener.forget()
        for connection in self.connections.values():
            connection.close()

    def _tell(self, result: InquiryResult) -> None:
        """A verdict: to the log, to all ranks, and where dumps go."""
        self.aside(lambda: self._announcer.announce(result), self._send_all)

    def _send_all(self, message: Message) -> None:
        for rank in (*self._members, *self.connections):
            self._send(rank, message)

    def _is_free(self, rank: int) -> bool:
        return rank not in self.connections and rank not in self._members

    def _stop_if_last(self) -> None:
        if not self._members and not self.connections:
            self._stop()

    def _send(self, rank: int, message: Message) -> None:
        if rank in self._members:
            # Not at once: the arbiter is in the middle of something.
            self.post(lambda: self._hand(rank, message))
        elif rank in self.connections:
            connection = self.connections[rank]
            try:
                connection.send(message)
            except ConnectionClosed:
                return  # heard of when it is read, behind what it still sent
            self.watch(connection, lambda: self._serve(rank))

    def _hand(self, rank: int, message: Message) -> None:
        if rank in self._members:
            self._members[rank].handle(message)

    def _accept(self, rank: int, connection: Connection) -> None:
        self.connections[rank] = connection
        self.watch(connection, lambda: self._serve(rank))

    def _serve(self, rank: int) -> None:
        connection = self.connections.get(rank)
        if connection is None:
            return
        try:
            for message in connection.exchange():
                self.say(rank, message)
            self.watch(connection, lambda: self._serve(rank))
        except ConnectionClosed as closed:
            self._drop(rank)
            has_come_to_destroy = rank in self._arbiter.parting
            self._arbiter.lose(rank, closed.how)
            if not has_come_to_destroy:
                self.call_later(LAST_WORDS_S, lambda: self._inquiries.ask(is_final=True))
            self._stop_if_last()
        except NOT_UNDERSTOOD as error:
            _log.warning("deep_ep: what rank %d says is not understood: %s", rank, error)
            self._drop(rank)
            self._arbiter.unwatch(rank)

    def _drop(self, rank: int) -> None:
        self.drop(self.connections.pop(rank))


class CoordinatorClient(Loop):
    """Another rank's end, a thread: its connection to rank 0.

    Attributes:
        connection: to rank 0.
    """

    def __init__(self, member: Member, address: Address, token: str, num_ranks: int) -> None:
        super().__init__(f"deep_ep.liveness rank {member.rank}")
        self._member = member
        sock = socket.create_connection(address, _CONNECT_S)
        self.connection = Connection(sock)
        self.connection.send_bytes(greeting(token, member.rank))
        self._await_welcome(sock)
        host = str(sock.getsockname()[0])
        to_0 = self._say_to_rank_0, self._has_rank_0
        self._failover = InquiryFailover(self, member, num_ranks, token, host, *to_0)
        member.attach(self)
        self.watch(self.connection, self._serve)

    def members(self) -> Sequence[Member]:
        return [self._member]

    def introduce(
        self, addresses: Sequence[Address | None], places: Sequence[RankPlace], ranks_per_node: int
    ) -> None:
        self.post(lambda: self._failover.introduce(addresses, places, ranks_per_node))

    def say(self, rank: int, message: Message) -> None:
        if message["type"] in REQUESTS:
            self._failover.request(message)
        else:
            self._say_to_rank_0(message)

    def leave(self, rank: int, closed: int) -> None:
        with contextlib.suppress(ConnectionClosed):
            self.connection.send({"type": "left", "closed": closed})
        self._stop()

    def leave_all(self) -> None:
        self.leave(self._member.rank, self._member.progress().closed)

    def fail(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            self.connection.send({"type": "unwatched"})
        self._member.lose("")

    def forget(self) -> None:
        super().forget()
        self.connection.close()
        self._failover.close()

    @property
    def address(self) -> Address | None:
        return self._failover.address

    def _has_rank_0(self) -> bool:
        return self.connection.fileno() >= 0

    def _say_to_rank_0(self, message: Message) -> None:
        if not self._has_rank_0():
            return
        try:
            self.connection.send(message)
        except ConnectionClosed:
            return  # heard of when it is read
        self.watch(self.connection, self._serve)

    def _await_welcome(self, sock: socket.socket) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(sock, selectors.EVENT_READ)
            if not waiting.select(_CONNECT_S):
                raise OSError(f"rank 0 did not answer within {_CONNECT_S:g} s")
        try:
            self.connection.receive()
        except ConnectionClosed as error:
            raise OSError("rank 0 closed the connection") from error

    def _serve(self) -> None:
        try:
            for message in self.connection.exchange():
                if message.get("type") == "off":
                    self._end("")
                    return
                self._failover.hear_of(0, message)
                self._member.handle(message)
            self.watch(self.connection, self._serve)
        except ConnectionClosed as closed:
            self._end(closed.how)
        except NOT_UNDERSTOOD as error:
            _log.warning(
                "deep_ep: what rank 0 says is not understood: %s; missing ranks are found by the timeout only",
                error,
            )
            self.fail()
            self.drop(self.connection)

    def _end(self, how: str) -> None:
        """No more of rank 0; what the rank itself looks for goes on."""
        self.drop(self.connection)
        self._member.lose(how)

    def lose_rank_0(self) -> None:
        self._failover.lose_rank_0()
