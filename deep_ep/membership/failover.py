"""Failover of inquiries: who finds out why an operation hangs where rank 0 does not answer.

Rank 0 leads inquiries (inquiry.py) as long as it answers; then nothing of this runs. Otherwise each other rank asks
the lowest rank that answers to lead (leader_election.py), and answers what that rank asks. A rank that turns out to be
the lowest leads itself, as rank 0 would. As the arbiter (agreement.py), this does no input or output and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from deep_ep.hang import messages
from deep_ep.hang.announcement import Announcer
from deep_ep.hang.inquiry import Inquiries
from deep_ep.hang.messages import Dispatcher, Message
from deep_ep.membership.leader_election import LeaderElection

if TYPE_CHECKING:
    from deep_ep.base.ranks import RankPlace
    from deep_ep.membership.liveness import Liveness
    from deep_ep.membership.loop import Loop

# Until those who are told of a death have ended what waited for that rank. Chosen.
LAST_WORDS_S = 0.2

# What ranks may say to each other: to the one that leads, and what that says.
_TO_LEADERS = (
    messages.InquiryRequest,
    messages.DumpRequest,
    messages.StateAnswer,
    messages.InspectionAnswer,
)
OF_LEADERS = (messages.AskState, messages.Inspect, messages.InquiryVerdict)


class InquiryFailover:
    """The part of one rank other than rank 0. All of it runs in the thread of its loop."""

    def __init__(
        self,
        loop: Loop,
        member: Liveness,
        reaches: Callable[[int], bool],
        send: Callable[[int, Message], None],
    ) -> None:
        """Leads nothing yet.

        Args:
            loop: for what is to be done later, or takes long.
            member: this rank.
            reaches: whether there is a way to a rank.
            send: hands a message to a rank, which may be this one; must not wait, nor handle it at once.
        """
        self._loop, self._member, self._reaches, self._send = loop, member, reaches, send
        self._election = LeaderElection(member.rank, self._can_ask, send, loop.call_later)
        self._inquiries: Inquiries | None = None
        self._take: Dispatcher[int] = Dispatcher()
        self._announcer = Announcer()

    def introduce(self, places: Sequence[RankPlace], ranks_per_node: int) -> None:
        """All ranks have connected with rank 0; see `Loop.introduce`."""
        known = places, ranks_per_node, self._member
        loop, announce = self._loop, self._announcer.announce
        self._inquiries = Inquiries(*known, self._send, loop.call_later, loop.aside, announce)
        own = self._inquiries.handlers()
        self._take = Dispatcher({class_: own[class_] for class_ in _TO_LEADERS})

    def request(self, message: Message) -> None:
        """Asks whoever leads."""
        self._election.request(message)

    def lose_rank_0(self) -> None:
        """Its process or its host is gone, which all ranks learn at the same time."""
        last = messages.InquiryRequest(final=True)
        self._loop.call_later(LAST_WORDS_S, lambda: self._election.request_together(last))

    def hear_of(self, leader: int, message: Message) -> None:
        """What a rank says that may lead an inquiry."""
        if isinstance(message, messages.InquiryVerdict):
            self._election.hear(leader, has_verdict=True)
        elif isinstance(message, messages.AskState):
            if leader < self._member.rank and self._inquiries is not None:
                self._inquiries.drop()
            self._election.hear(leader, has_verdict=False)

    def take(self, rank: int, message: Message) -> None:
        """What a rank says to the one that leads.

        Raises:
            ValueError: ranks do not say that to each other.
        """
        if self._inquiries is not None:
            self._take(rank, message)

    def _can_ask(self, rank: int) -> bool:
        is_gone = rank in self._member.dead or rank in self._member.left
        return self._reaches(rank) and (rank == 0 or not is_gone)
