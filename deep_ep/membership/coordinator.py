"""The connections through which the ranks of a buffer learn who lives: one from every rank to rank 0.

Rank 0's process runs the `Coordinator`: it passes on who has died or left, decides who is missing (agreement.py) and
leads inquiries (inquiry.py). Every other process runs a `CoordinatorClient` per rank, which talks to rank 0 and, where
rank 0 does not answer, to the other ranks (failover.py).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from deep_ep.base.ranks import RankPlace
from deep_ep.hang import messages
from deep_ep.hang.inquiry import Announcer, Inquiries
from deep_ep.hang.messages import Dispatcher, Message
from deep_ep.membership.agreement import Arbiter
from deep_ep.membership.channel import Channel
from deep_ep.membership.connection import Address, descriptors_left
from deep_ep.membership.endpoint import Endpoint, Member
from deep_ep.membership.failover import LAST_WORDS_S, OF_LEADERS, InquiryFailover

# Descriptors that are left to the program. Chosen.
_SPARE_DESCRIPTORS = 64

_log = logging.getLogger("deep_ep")


class Coordinator(Endpoint):
    """Rank 0's end, a thread: the arbiter, the ranks of this process, and connections to all others."""

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
        known = places, ranks_per_node, self._arbiter
        announce = Announcer().announce
        self._inquiries = Inquiries(*known, self._send, self.call_later, self.aside, announce)
        self._take = Dispatcher(self._arbiter.handlers(), self._inquiries.handlers())
        self.channel = Channel(self, 0, num_ranks, token, self._take, self._lose)
        self.channel.listen(address, self._is_free)

    def take_in(self, member: Member) -> None:
        """A rank of this process joins; from any thread."""
        self.post(lambda: self._members.update({member.rank: member}))
        member.attach(self)

    def complete(self, unreachable: Sequence[int]) -> None:
        """All ranks have connected, but for these."""
        self.channel.stop_listening()
        for rank in unreachable:
            self._arbiter.unwatch(rank)

    def say(self, rank: int, message: Message) -> None:
        self._take(rank, message)

    def leave(self, rank: int, closed: int) -> None:
        self._members.pop(rank, None)
        self._arbiter.leave(rank, messages.Leaving(closed))
        self._stop_if_last()

    def fail(self) -> None:
        for rank in list(self.channel.connections):
            self.channel.send(rank, messages.MonitoringFailed())
        for member in self._members.values():
            member.lose("")

    def _is_free(self, rank: int) -> bool:
        return rank not in self.channel.connections and rank not in self._members

    def _stop_if_last(self) -> None:
        if not self._members and not self.channel.connections:
            self._stop()

    def _hand(self, rank: int, message: Message) -> None:
        if rank in self._members:
            self._members[rank].handle(lambda said: self._take(rank, said), message)

    def _lose(self, rank: int, how: str) -> None:
        if not how:
            self._arbiter.unwatch(rank)
            return
        has_come_to_destroy = rank in self._arbiter.parting
        self._arbiter.lose(rank, how)
        if not has_come_to_destroy:
            self.call_later(LAST_WORDS_S, lambda: self._inquiries.ask(is_final=True))
        self._stop_if_last()


class CoordinatorClient(Endpoint):
    """Another rank's end, a thread: its connections to rank 0 and, where that does not answer, to other ranks."""

    def __init__(
        self,
        member: Member,
        places: Sequence[RankPlace],
        ranks_per_node: int,
        token: str,
        address: Address,
    ) -> None:
        super().__init__(f"deep_ep.liveness rank {member.rank}")
        self._member = self._members[member.rank] = member
        self.channel = Channel(self, member.rank, len(places), token, self._hand, self._lose)
        host = self.channel.connect(0, address)
        with contextlib.suppress(OSError):  # others go without this rank
            self.channel.listen(host, lambda _: True)
        known = member, places, ranks_per_node
        self._failover = InquiryFailover(self, *known, self.channel.reaches, self._send)
        member.attach(self)

    def introduce(self, addresses: Sequence[Address | None]) -> None:
        self.post(lambda: self.channel.introduce(addresses))

    def say(self, rank: int, message: Message) -> None:
        if isinstance(message, messages.InquiryRequest):
            self._failover.request(message)
        else:
            self.channel.send(0, message)

    def leave(self, rank: int, closed: int) -> None:
        self.channel.send(0, messages.Leaving(closed))
        self._stop()

    def fail(self) -> None:
        self.channel.send(0, messages.MonitoringFailed())
        self._member.lose("")

    @property
    def address(self) -> Address | None:
        return self.channel.address

    def lose_rank_0(self) -> None:
        self._failover.lose_rank_0()

    def _hand(self, rank: int, message: Message) -> None:
        """What a rank says, this one included."""
        if rank == 0 and isinstance(message, messages.MonitoringFailed):
            self.channel.drop(0)
            self._member.lose("")
        elif rank == 0 or isinstance(message, OF_LEADERS):
            self._failover.hear_of(rank, message)
            self._member.handle(lambda said: self._send(rank, said), message)
        else:
            self._failover.take(rank, message)

    def _lose(self, rank: int, how: str) -> None:
        """What the rank itself looks for goes on without rank 0."""
        if rank == 0 and not how:
            _log.warning("deep_ep: missing ranks are found by the timeout only from now on")
            self.fail()
        elif rank == 0:
            self._member.lose(how)
