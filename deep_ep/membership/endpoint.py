"""One process's end of the connections between ranks: a thread that speaks for the ranks of the process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Callable, Protocol

from deep_ep.base.ranks import Progress
from deep_ep.hang.inquiry import DepartedRanks
from deep_ep.hang.messages import Dispatcher, Message
from deep_ep.membership.channel import Channel
from deep_ep.membership.connection import Address
from deep_ep.membership.loop import Loop

# Says something to the rank that sent a message.
Answer = Callable[[Message], None]


class Member(DepartedRanks, Protocol):
    """A rank of this process: its `Liveness`."""

    rank: int
    handle: Dispatcher[Answer]

    def attach(self, endpoint: Endpoint) -> None:
        """See `Liveness`."""

    def progress(self) -> Progress:
        """See `Liveness`."""

    def lose(self, how: str) -> None:
        """See `Liveness`."""

    def forget(self) -> None:
        """See `Liveness`."""


class Endpoint(Loop):
    """The thread; coordinator.py has the one of rank 0's process and that of the others.

    Attributes:
        channel: its connections.
    """

    channel: Channel

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._members: dict[int, Member] = {}

    @abstractmethod
    def say(self, rank: int, message: Message) -> None:
        """Takes a message of a rank of this process to the arbiter."""

    @abstractmethod
    def leave(self, rank: int, closed: int) -> None:
        """A rank of this process ends in order."""

    @abstractmethod
    def _hand(self, rank: int, message: Message) -> None:
        """Takes what this process has to say to one of its own ranks there."""

    @abstractmethod
    def fail(self) -> None:
        """Something in here is wrong: tells the others that this end of the connections says nothing."""

    # What only other processes than rank 0's need.

    @property
    def address(self) -> Address | None:
        """Where other ranks reach this one if rank 0 does not answer; `None`: nowhere."""
        return None

    def introduce(self, addresses: Sequence[Address | None]) -> None:  # noqa: B027
        """All ranks have joined, and this is where they listen. From any thread."""

    def lose_rank_0(self) -> None:  # noqa: B027
        """A rank of this process has learnt that rank 0 is gone, and did not say goodbye."""

    # The end.

    def leave_all(self) -> None:
        for member in list(self._members.values()):
            self.leave(member.rank, member.progress().closed)
        self._stop()

    def close(self) -> None:
        super().close()
        self.channel.close()

    def forget(self) -> None:
        self.close()
        for member in self._members.values():
            member.forget()

    def _send(self, rank: int, message: Message) -> None:
        """Says something to a rank, which may be one of this process."""
        if rank in self._members:
            # Not at once: who says it is in the middle of something.
            self.post(lambda: self._hand(rank, message))
        else:
            self.channel.send(rank, message)
