"""The connections through which the ranks of a buffer learn who lives: one from every rank to rank 0.

Rank 0's process runs the `Coordinator`: it passes on who has died or left, decides who is missing (agreement.py) and
leads inquiries (inquiry.py). Every other process runs a `CoordinatorClient` per rank, which talks to rank 0 and, where
rank 0 does not answer, to the other ranks (failover.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from deep_ep.base import codec
from deep_ep.base.ranks import RankPlace
from deep_ep.base.warning import warn
from deep_ep.errors import ranks_text
from deep_ep.hang import messages
from deep_ep.hang.inquiry import Inquiries
from deep_ep.hang.messages import Dispatcher, Message
from deep_ep.membership import rendezvous
from deep_ep.membership.agreement import Arbiter
from deep_ep.membership.channel import Channel
from deep_ep.membership.connection import Address, descriptors_left
from deep_ep.membership.failover import LAST_WORDS_S, OF_LEADERS, InquiryFailover
from deep_ep.membership.liveness import Endpoint, Liveness

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime as NativeRuntime

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
        self._inquiries = Inquiries(*known, self._send, self.call_later, self.aside)
        self._take = Dispatcher(self._arbiter.handlers(), self._inquiries.handlers())
        self.channel = Channel(self, 0, num_ranks, token, self._take, self._lose)
        self.channel.listen(address, self._is_free)

    def take_in(self, member: Liveness) -> None:
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
        self._arbiter.leave(rank, messages.RankLeft(rank, closed))
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
        member: Liveness,
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
            self.address = self.channel.address
        known = member, places, ranks_per_node
        self._failover = InquiryFailover(self, *known, self.channel.reaches, self._send)
        member.attach(self)

    def say(self, rank: int, message: Message) -> None:
        if isinstance(message, messages.InquiryRequest):
            self._failover.request(message)
        else:
            self.channel.send(0, message)

    def leave(self, rank: int, closed: int) -> None:
        self.channel.send(0, messages.RankLeft(rank, closed))
        self._stop()

    def fail(self) -> None:
        self.channel.send(0, messages.MonitoringFailed())
        self._member.lose("")

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
            if 0 in self._member.dead:  # it did not say goodbye
                self._failover.lose_rank_0()


# ---- how the ranks of a buffer are connected

# Coordinators of ranks in this process, from the moment rank 0 makes one until all have joined.
_coordinators: dict[str, Coordinator] = {}


class Offer(NamedTuple):
    """How ranks reach rank 0. Plain data.

    Attributes:
        address: host and port; `None` if there is none, for the reason `problem`.
        token: what who comes must know.
    """

    address: Optional[Address]  # noqa: UP045 - read by the codec, also in Python 3.9
    token: str
    problem: str = ""


def offer(rank: int, places: Sequence[RankPlace], ranks_per_node: int = 0) -> Offer | None:
    """First step of connecting the ranks of a buffer: rank 0's offer, for all ranks.

    Args:
        rank: this rank.
        places: of all ranks.
        ranks_per_node: where normal operations go by way of gateways; 0: they do not.
    """
    if rank != 0 or len(places) == 1:
        return None
    token = secrets.token_hex(16)
    try:
        address = rendezvous.address([place.host for place in places])
        coordinator = Coordinator(places, ranks_per_node, token, address)
    except OSError as error:
        return Offer(None, token, str(error))
    _coordinators[token] = coordinator
    coordinator.start()
    return Offer(coordinator.channel.address, token)


def join(
    buffer: Any,
    rank: int,
    places: Sequence[RankPlace],
    native: NativeRuntime,
    offered: Any,
    ranks_per_node: int = 0,
    may_mask: bool = False,
) -> tuple[Liveness, str | None]:
    """Second step: takes rank 0's offer.

    Args:
        buffer: says goodbye when it is collected.
        rank: this rank.
        places: of all ranks.
        native: runtime of the buffer, connected.
        offered: by rank 0, plain data; `None`: there is no other rank.
        ranks_per_node: as of `offer`.
        may_mask: see `Liveness`.

    Returns:
        This rank's part, and why it is not connected, if it is not.

    Raises:
        ValueError: what is offered is no `Offer`.
    """
    member = Liveness(rank, native, may_mask)
    weakref.finalize(buffer, member.close).atexit = False
    if offered is None:
        return member, None
    accepted = codec.from_plain(Offer, offered)
    if accepted.address is None:
        return member, accepted.problem
    coordinator = _coordinators.get(accepted.token)
    try:
        if coordinator is not None:
            coordinator.take_in(member)
        else:
            known = places, ranks_per_node, accepted.token, accepted.address
            CoordinatorClient(member, *known).start()
    except (OSError, ValueError) as error:
        return member, f"{type(error).__name__}: {error}"
    return member, None


def complete(own: Offer | None, member: Liveness, joined: Sequence[tuple[str | None, Any]]) -> None:
    """Last step: what the second one said on all ranks is known.

    Without a connection the buffer works, and ranks that are missing are found by the timeout: a
    `RuntimeWarning` on rank 0 says so.

    Args:
        own: this rank's offer.
        member: this rank's part.
        joined: by rank, why it is not connected, and where it listens; plain data.

    Raises:
        ValueError: where a rank listens is no `Address`.
    """
    problems, addresses = zip(*joined)
    kind: Any = Optional[Address]
    known = [codec.from_plain(kind, address) for address in addresses]
    endpoint = member.endpoint
    if isinstance(endpoint, CoordinatorClient):
        endpoint.channel.addresses = known
    if own is None:
        return
    unreachable = [rank for rank, problem in enumerate(problems) if problem is not None]
    coordinator = _coordinators.pop(own.token, None)
    if coordinator is not None:
        coordinator.post(lambda: coordinator.complete(unreachable))
    if unreachable:
        warn(
            f"Buffer: {ranks_text(unreachable)} cannot be watched ({problems[unreachable[0]]}); "
            "all ranks must reach rank 0 over TCP. Operations work; a rank that dies is found after "
            "DEEP_EP_TIMEOUT_S only."
        )


def withdraw(own: Offer | None) -> None:
    """Instead of the last step: there will be no buffer, and this rank's offer is void."""
    coordinator = _coordinators.pop(own.token, None) if own is not None else None
    if coordinator is not None:
        coordinator.post(coordinator.leave_all)


os.register_at_fork(after_in_child=_coordinators.clear)
