"""Election of the rank that leads an inquiry where rank 0 does not answer: the lowest rank that does.

Whoever wants one asks rank 0. If no inquiry begins in time, it asks the next rank, and so on up to itself. All
go the same way, so they meet at the same rank. A lower one that answers after all takes over again. As the
arbiter (agreement.py), this does no input or output and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from deep_ep.hang.messages import Message

# How long a rank may take to begin an inquiry, and to come to a verdict. Chosen.
_BEGIN_S, _VERDICT_S = 0.5, 2.0


class LeaderElection:
    """One rank's view. One thread at a time."""

    def __init__(
        self,
        rank: int,
        can_ask: Callable[[int], bool],
        ask: Callable[[int, Message], None],
        call_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """Without any input or output of its own.

        Args:
            rank: this rank.
            can_ask: whether there is a way to a rank below this one.
            ask: hands a request to a rank, which may be this one; must not wait.
            call_later: calls a function after so many seconds.
        """
        self._rank = rank
        self._can_ask, self._ask, self._call_later = can_ask, ask, call_later
        self._leader = 0
        self._is_led = False  # an inquiry has begun, and its verdict has not come
        self._pending: list[Message] = []
        self._turn = 0

    def request(self, message: Message) -> None:
        """Asks for an inquiry, with an `InquiryRequest` or a `DumpRequest`."""
        self._pending.append(message)
        self._pass_over()
        self._ask(self._leader, message)
        self._await(_VERDICT_S if self._is_led else _BEGIN_S)

    def request_together(self, message: Message) -> None:
        """The same, where all ranks know that there is to be one: only who leads it begins."""
        self._pass_over()
        if self._leader == self._rank:
            self.request(message)
        else:
            self._pending.append(message)
            self._await(_BEGIN_S)

    def hear(self, leader: int, has_verdict: bool) -> None:
        """A rank leads an inquiry, or has come to its verdict."""
        self._leader = min(self._leader, leader)
        self._is_led = not has_verdict
        if has_verdict:
            self._pending.clear()
        elif self._pending:
            self._await(_VERDICT_S)

    def _await(self, seconds: float) -> None:
        self._turn += 1
        turn = self._turn
        self._call_later(seconds, lambda: self._go_on(turn))

    def _go_on(self, turn: int) -> None:
        """Nothing has come in time."""
        if turn != self._turn or not self._pending:
            return
        self._is_led = False
        if self._leader >= self._rank:
            self._pending.clear()
            return
        self._leader += 1
        self._pass_over()
        for message in self._pending:
            self._ask(self._leader, message)
        self._await(_BEGIN_S)

    def _pass_over(self) -> None:
        while self._leader < self._rank and not self._can_ask(self._leader):
            self._leader += 1
