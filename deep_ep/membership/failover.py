"""Failover of inquiries: who finds out why an operation hangs where rank 0 does not answer.

Rank 0 leads inquiries (inquiry.py) as long as it answers; then nothing of this runs. Otherwise each other rank asks
the lowest rank that answers to lead (leader_election.py), over connections that are made only then (peers.py), and
answers what that rank asks. A rank that turns out to be the lowest leads itself, as rank 0 would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from deep_ep.hang.announcement import Announcer
from deep_ep.hang.inquiry import Inquiries, InquiryResult
from deep_ep.membership.leader_election import REQUESTS, LeaderElection
from deep_ep.membership.peers import Peers

if TYPE_CHECKING:
    from deep_ep.base.ranks import Message, RankPlace
    from deep_ep.membership.connection import Address
    from deep_ep.membership.loop import Loop, Member

# Until those who are told of a death have ended what waited for that rank. Chosen.
LAST_WORDS_S = 0.2

_OF_LEADERS, _ANSWERS = ("ask_state", "look", "verdict"), ("state", "seen")


class InquiryFailover:
    """The part of one rank other than rank 0. All of it runs in the thread of its loop.

    Attributes:
        address: where other ranks connect; `None`: nowhere.
    """

    def __init__(
        self,
        loop: Loop,
        member: Member,
        num_ranks: int,
        token: str,
        host: str,
        ask_rank_0: Callable[[Message], None],
        has_rank_0: Callable[[], bool],
    ) -> None:
        """Listens for other ranks.

        Args:
            loop: looks after the connections.
            member: this rank.
            num_ranks: size of the group.
            token: what a greeting must begin with.
            host: an address of this host.
            ask_rank_0: says something to rank 0.
            has_rank_0: whether there is still a connection to it.
        """
        self._loop, self._member = loop, member
        self._ask_rank_0, self._has_rank_0 = ask_rank_0, has_rank_0
        self._peers = Peers(loop, member.rank, num_ranks, token, host, self._hear)
        self._election = LeaderElection(member.rank, self._can_ask, self._ask, loop.call_later)
        self._num_ranks = num_ranks
        self._inquiries: Inquiries | None = None
        self._announcer = Announcer()
        self.address = self._peers.address

    def introduce(
        self, addresses: Sequence[Address | None], places: Sequence[RankPlace], ranks_per_node: int
    ) -> None:
        """All ranks have connected with rank 0.

        Args:
            addresses: where they listen.
            places: where they run.
            ranks_per_node: where normal operations go by way of gateways; 0: they do not.
        """
        self._peers.introduce(addresses)
        known = places, ranks_per_node, self._member
        self._inquiries = Inquiries(*known, self._send, self._loop.call_later, self._tell)

    def request(self, message: Message) -> None:
        """Asks whoever leads; `type` is one of `REQUESTS`."""
        self._election.request(message)

    def lose_rank_0(self) -> None:
        """Its process or its host is gone, which all ranks learn at the same time."""
        last = {"type": "stuck", "final": True}
        self._loop.call_later(LAST_WORDS_S, lambda: self._election.request_together(last))

    def hear_of(self, leader: int, message: Message) -> None:
        """What a rank says that may lead an inquiry."""
        if message.get("type") == "verdict":
            self._election.hear(leader, has_verdict=True)
        elif message.get("type") == "ask_state":
            if leader < self._member.rank and self._inquiries is not None:
                self._inquiries.drop()
            self._election.hear(leader, has_verdict=False)

    def close(self) -> None:
        """Also in a forked child: closes descriptors and nothing else."""
        self._peers.close()

    # ---- steps

    def _can_ask(self, rank: int) -> bool:
        if rank == 0:
            return self._has_rank_0()
        is_gone = rank in self._member.dead or rank in self._member.left
        return self._peers.can_reach(rank) and not is_gone

    def _ask(self, rank: int, request: Message) -> None:
        if rank == 0:
            self._ask_rank_0(request)
        elif rank != self._member.rank:
            self._peers.send(rank, request)
        elif self._inquiries is not None:
            self._inquiries.handle(rank, request)

    def _hear(self, rank: int, message: Message, answer: Callable[[Message], None]) -> None:
        """What another rank says, or this one to itself.

        Raises:
            ValueError, TypeError, KeyError: that is none of the messages there are.
        """
        type_ = message["type"]
        if type_ in _OF_LEADERS:
            self.hear_of(rank, message)
            self._member.handle(message, answer)
        elif type_ not in (*REQUESTS, *_ANSWERS):
            raise ValueError(f"type is {type_!r}")
        elif self._inquiries is not None:
            self._inquiries.handle(rank, message)

    def _send(self, rank: int, message: Message) -> None:
        own = self._member.rank
        if rank != own:
            self._peers.send(rank, message)
            return

        def answer(said: Message) -> None:
            self._hear(own, said, answer)

        # Not at once: the inquiry is in the middle of something.
        self._loop.post(lambda: self._hear(own, message, answer))

    def _tell(self, result: InquiryResult) -> None:
        """A verdict: to the log, to the ranks, and where dumps go."""
        self._loop.aside(lambda: self._announcer.announce(result), self._send_all)

    def _send_all(self, message: Message) -> None:
        for rank in range(self._num_ranks):
            self._send(rank, message)
