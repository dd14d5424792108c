"""Failover of inquiries: who finds out why an operation hangs where rank 0 does not answer.

Whoever wants an inquiry (inquiry.py) asks rank 0. If none begins in time, it asks the next rank, and so on up to itself.
All go the same way, so they meet at the lowest rank that answers, which leads as rank 0 would. A lower one that answers
after all takes over again. As the arbiter (agreement.py), this does no input or output and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable

from deep_ep.hang import messages
from deep_ep.hang.inquiry import Inquiries
from deep_ep.hang.messages import Dispatcher, Message

if TYPE_CHECKING:
    from deep_ep.base.ranks import RankPlace
    from deep_ep.membership.liveness import Liveness
    from deep_ep.membership.loop import Loop

# How long a rank may take to begin an inquiry, and to come to a verdict. Chosen.
_BEGIN_S, _VERDICT_S = 0.5, 2.0
# Until those who are told of a death have ended what waited for that rank. Chosen.
LAST_WORDS_S = 0.2

# What ranks may say to each other: to the one that leads, and what that says.
_TO_LEADERS = (messages.InquiryRequest, messages.StateReport)
OF_LEADERS = (messages.AskState, messages.InquiryVerdict)


class InquiryFailover:
    """The part of one rank other than rank 0. All of it runs in the thread of its loop.

    Attributes:
        take: what a rank says to the one that leads; raises a `ValueError` if ranks do not say that to each other.
    """

    def __init__(
        self,
        loop: Loop,
        member: Liveness,
        places: Sequence[RankPlace],
        ranks_per_node: int,
        reaches: Callable[[int], bool],
        send: Callable[[int, Message], None],
    ) -> None:
        """Leads nothing yet.

        Args:
            loop: for what is to be done later, or takes long.
            member: this rank.
            places: where the ranks run.
            ranks_per_node: see `Inquiries`.
            reaches: whether there is a way to a rank.
            send: hands a message to a rank, which may be this one; must not wait, nor handle it at once.
        """
        self._loop, self._member, self._reaches, self._send = loop, member, reaches, send
        self._leader = 0
        self._is_led = False  # an inquiry has begun, and its verdict has not come
        self._pending: list[messages.InquiryRequest] = []
        self._turn = 0
        known = places, ranks_per_node, member
        self._inquiries = Inquiries(*known, self._lead, loop.call_later, loop.aside)
        own = self._inquiries.handlers()
        self.take = Dispatcher({class_: own[class_] for class_ in _TO_LEADERS})

    def _lead(self, rank: int, message: Message) -> None:
        # Rank 0 takes orders from nobody, and leads itself once it reads what it was asked.
        if rank != 0:
            self._send(rank, message)

    def request(self, message: messages.InquiryRequest) -> None:
        """Asks whoever leads for an inquiry."""
        self._pending.append(message)
        self._pass_over()
        self._send(self._leader, message)
        self._await(_VERDICT_S if self._is_led else _BEGIN_S)

    def lose_rank_0(self) -> None:
        """Its process or its host is gone, which all ranks learn at the same time: only who leads asks for an inquiry."""

        def ask() -> None:
            last = messages.InquiryRequest(final=True)
            self._pass_over()
            if self._leader == self._member.rank:
                self.request(last)
            else:
                self._pending.append(last)
                self._await(_BEGIN_S)

        self._loop.call_later(LAST_WORDS_S, ask)

    def hear_of(self, leader: int, message: Message) -> None:
        """What a rank says that may lead an inquiry."""
        begins = isinstance(message, messages.AskState) and message.rank == self._member.rank
        if not begins and not isinstance(message, messages.InquiryVerdict):
            return
        self._leader = min(self._leader, leader)
        self._is_led = begins
        if not begins:
            self._pending.clear()
            return
        if leader < self._member.rank:
            self._inquiries.drop()
        if self._pending:
            self._await(_VERDICT_S)

    def _await(self, seconds: float) -> None:
        self._turn += 1
        turn = self._turn
        self._loop.call_later(seconds, lambda: self._go_on(turn))

    def _go_on(self, turn: int) -> None:
        """Nothing has come in time."""
        if turn != self._turn or not self._pending:
            return
        self._is_led = False
        if self._leader >= self._member.rank:
            self._pending.clear()
            return
        self._leader += 1
        self._pass_over()
        for message in self._pending:
            self._send(self._leader, message)
        self._await(_BEGIN_S)

    def _pass_over(self) -> None:
        while self._leader < self._member.rank and not self._can_ask(self._leader):
            self._leader += 1

    def _can_ask(self, rank: int) -> bool:
        is_gone = rank in self._member.dead or rank in self._member.left
        return self._reaches(rank) and (rank == 0 or not is_gone)
