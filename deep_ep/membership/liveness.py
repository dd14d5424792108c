"""Who lives: every rank is connected with rank 0, which tells all of a death at once.

A rank has one connection, and one thread that sleeps on it (coordinator.py); operations know nothing of
it. A process that ends closes its connections, whatever ends it, and kernels answer for a process
that is stopped or busy, so nobody who lives is called dead. Who ends in order says so first.

When an operation fails because ranks are missing, `Liveness.agree` asks rank 0's arbiter
(agreement.py), so that all ranks raise one answer. Ranks that are threads of one process share the
thread and need no connection.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable

from deep_ep.base.ranks import Decision, Key, Progress, RankPlace
from deep_ep.base.rules import NUMBERED_TOGETHER
from deep_ep.hang import messages
from deep_ep.hang.hang_watch import HangWatch
from deep_ep.hang.messages import Dispatcher, Failure, Message
from deep_ep.membership import agreement
from deep_ep.membership.channel import Channel
from deep_ep.membership.connection import Address
from deep_ep.membership.dump_requests import DumpRequests
from deep_ep.membership.loop import Loop

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime as NativeRuntime
    from deep_ep.hang.recorder import Recorder

# Pauses between looks whether this rank has finished what another one finished before it ended. Chosen.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 0.4

# Says something to the rank that sent a message.
Answer = Callable[[Message], None]


class Liveness:
    """One rank's part.

    Attributes:
        rank: this rank.
        endpoint: the thread that speaks for it; `None` before it is connected, where it is the only rank, and in a fork.
        alone: whether rank 0 cannot be asked.
        dead: ranks that are dead, see `Decision`.
        left: ranks that ended in order, and the last operation they finished.
        parted: those of them that have come to destroy().
        may_mask: whether operations go on without ranks that a decision names.
        handle: takes what rank 0 says, or who leads an inquiry in its place, and what answers that rank.
    """

    def __init__(self, rank: int, native: NativeRuntime, may_mask: bool = False) -> None:
        """Internal: use `coordinator.join`. The runtime of the buffer is let go with `close`."""
        self.rank = rank
        # Held for calls that do not wait; again by a destructor that runs in the midst of one.
        self._native_lock = threading.RLock()
        self._native: NativeRuntime | None = native
        self._has_parted = False
        self._is_closed = False
        self.endpoint: Endpoint | None = None
        self._changed = threading.Condition()
        self._decisions: OrderedDict[Key, Decision | None] = OrderedDict()
        self.dead: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.parted: set[int] = set()
        self.alone = True
        self.hangs = HangWatch(rank, self._say)
        self.handle: Dispatcher[Answer] = Dispatcher(
            {
                messages.AskProgress: lambda answer, asked: answer(
                    messages.ProgressAnswer(asked.round, self.progress())
                ),
                Decision: lambda _, decision: self._take(decision),
                messages.Undecided: lambda _, message: self._remember(message.key, None),
                messages.RankDied: lambda _, message: self._take_death(message),
                messages.RankLeft: lambda _, message: self._take_leave(message),
                messages.AskState: self._say_state,
                messages.InquiryVerdict: lambda _, found: self.hangs.take_verdict(found),
                messages.RankRaised: lambda _, message: self.hangs.raised.update(
                    {message.rank: message.text}
                ),
            }
        )
        self.may_mask = may_mask

    def agree(self, failure: Mapping[str, Any]) -> Decision | None:
        """Who is the reason for a failure; the same on all ranks.

        Args:
            failure: of `Runtime.take_failure()`.

        Returns:
            `None` if nobody is missing, or if nothing is known beyond the failure itself.
        """
        missing = tuple(rank for rank in failure["ranks"] if rank != self.rank)
        reason: Failure = "other"
        if failure["reason"] in ("timeout", "abandoned"):
            reason = failure["reason"]
        report = messages.FailureReport(_key_of(failure), reason, missing)
        if reason == "other":
            self._say(report)
        if reason == "other" or not missing:
            return None
        decision = self._ask(report)
        if decision is None and (reason == "timeout" or self.alone):
            decision = self._own_view(report.key, missing)
        return decision

    def agree_on_masked(self, key: Key, missing: Sequence[int]) -> Decision | None:
        """Who is the reason that an operation went on without ranks. The others mask those whom it names, and nobody
        else.

        Args:
            key: which operation.
            missing: whom this rank has left out.

        Returns:
            `None` if nobody can be asked, or the others go on without this rank: then it decides for itself.
        """
        if set(missing) <= self.dead.keys() | self.left.keys():
            return agreement.decide(key, {self.rank: missing}, {}, self.dead, self.left)
        decision = self._ask(messages.FailureReport(key, "timeout", tuple(missing), masks=True))
        if self.alone or key in self._decisions:
            return decision if decision is None or self.rank not in decision.culprits else None
        return self._own_view(key, missing)

    def come_back(self) -> None:
        """This rank masks nobody any more, and others may wait for it again."""
        self._say(messages.Unmasked())

    def _ask(self, report: messages.FailureReport) -> Decision | None:
        """Reports to rank 0, and waits for what it decides."""
        key = report.key
        with self._changed:
            if self._decisions.get(key) is None:
                self._decisions.pop(key, None)
                self._say(report)
                self._changed.wait_for(
                    lambda: self.alone or key in self._decisions, agreement.LONGEST_S
                )
            return self._decisions.get(key)

    def part(self) -> None:
        """Says that this rank calls nothing any more but what ends the buffer, where it meets those who have said so
        before; then `close`.
        """
        with self._native_lock:
            closed = self.progress().closed
            self._has_parted = True
            for rank in self.parted - self.dead.keys():
                self._mark_gone(rank, is_gone=False)
        self._say(messages.RankLeft(self.rank, closed, parts=True))

    def close(self) -> None:
        """Says goodbye; does not wait. May be repeated, and be called by a destructor."""
        endpoint = self.endpoint
        with self._native_lock:
            closed = 0 if endpoint is None else self.progress().closed
            was_closed, self._is_closed = self._is_closed, True
            self._native = None
            self.hangs.close()
        if not was_closed and endpoint is not None:
            endpoint.post(lambda: endpoint.leave(self.rank, closed))

    def forget(self) -> None:
        """In a forked child, where a thread that is not there any more may hold the lock."""
        self._native_lock = threading.RLock()
        self._native, self._is_closed, self.endpoint, self.alone = None, True, None, True
        self.hangs.close()

    # ---- called by the endpoint

    def away(self) -> set[int]:
        """Ranks that are not there to be asked."""
        return self.dead.keys() | self.left.keys()

    def attach(self, endpoint: Endpoint) -> None:
        """From now on that thread speaks for this rank."""
        self.endpoint, self.alone = endpoint, False

    def watch(
        self,
        recorder: Recorder,
        warn_s: float,
        timeout_s: float,
        places: Sequence[RankPlace],
        offers: Sequence[Any],
    ) -> None:
        """Says from now on when this rank waits for long; see `HangWatch.begin`. By the program's thread."""
        endpoint = self.endpoint
        if endpoint is not None:
            self.hangs.begin(recorder, warn_s, timeout_s, places, offers)
            endpoint.post(lambda: endpoint.take_dump_requests(self.hangs))
            endpoint.post(lambda: self._look_at_own_waits(endpoint))

    def progress(self) -> Progress:
        """Where this rank is; all zero once it has ended, or waits in destroy()."""
        with self._native_lock:
            if self._native is None or self._has_parted:
                return Progress(0, 0, False)
            return Progress(**self._native.progress())

    @property
    def address(self) -> Address | None:
        """See `Endpoint.address`."""
        return self.endpoint.address if self.endpoint is not None else None

    def _say_state(self, answer: Answer, asked: messages.AskState) -> None:
        if asked.rank == self.rank:
            with self._native_lock:
                self.hangs.say_state(answer, asked)
        elif self.endpoint is not None:
            self.endpoint.aside(lambda: self.hangs.inspect(asked), answer)

    def _take_death(self, message: messages.RankDied) -> None:
        self.dead[message.rank] = message.how
        self.hangs.look_at_end(message.rank)
        self._mark_gone(message.rank)

    def _take_leave(self, message: messages.RankLeft) -> None:
        self.left[message.rank] = message.closed
        if message.parts:
            self.parted.add(message.rank)
        self._mark_left_later(message.rank, _FIRST_LOOK_S)

    def lose(self, how: str) -> None:
        """The connection to rank 0 has ended; `how` as in `Decision.dead`, empty if that tells nothing."""
        if how and 0 not in self.left:
            with self._native_lock:
                self.hangs.lose_rank_0("unreachable" if how == "host" else "gone", self.left)
            self._take_death(messages.RankDied(0, how))
        # Last: who waits for rank 0's answer goes by what is known here then.
        with self._changed:
            self.alone = True
            self._changed.notify_all()

    def _look_at_own_waits(self, endpoint: Endpoint) -> None:
        with self._native_lock:
            pause_s = self.hangs.look()
        if pause_s is not None:
            endpoint.call_later(pause_s, lambda: self._look_at_own_waits(endpoint))

    def _take(self, decision: Decision) -> None:
        key, culprits = decision.key, decision.culprits
        with self._native_lock:
            native = self._native
            if native is not None and key.is_operation:
                if not self.may_mask:
                    native.give_up(key.op)
                elif self.rank not in culprits:  # one that is named itself is out of it
                    for rank in culprits:
                        native.mark_out(rank, key.op)
        # Who waits for it goes on when all ranks of this process know, so that simulated ones repeat exactly.
        if self.endpoint is not None:
            self.endpoint.post(lambda: self._remember(key, decision))

    def _remember(self, key: Key, decision: Decision | None) -> None:
        with self._changed:
            agreement.remember(self._decisions, key, decision)
            self._changed.notify_all()

    def _mark_left_later(self, rank: int, pause_s: float) -> None:
        """Once nothing can be missing that the rank sent before it ended, barriers included; in destroy() at once,
        unless it has come there too.
        """
        endpoint, closed = self.endpoint, self.left[rank]

        def look() -> None:
            with self._native_lock:
                if self._native is None or (self._has_parted and rank in self.parted):
                    return
                at = self.progress()
                has_finished = at.open > closed or (at.open == 0 and at.closed >= closed)
                if has_finished or self._has_parted:
                    self._mark_gone(rank)
                else:
                    self._mark_left_later(rank, min(2 * pause_s, _LAST_LOOK_S))

        if endpoint is not None:
            endpoint.call_later(pause_s, look)

    def _mark_gone(self, rank: int, is_gone: bool = True) -> None:
        with self._native_lock:
            if self._native is not None:
                self._native.mark_gone(rank, is_gone)

    def _say(self, message: Message) -> None:
        endpoint = self.endpoint
        if endpoint is not None:
            endpoint.post(lambda: endpoint.say(self.rank, message))

    def _own_view(self, key: Key, missing: Sequence[int]) -> Decision | None:
        """Without rank 0: who is known to be gone, or else rank 0 itself, so that all say the same."""
        silent = set() if self.alone else {0} & set(missing)
        decision = agreement.decide(key, {self.rank: silent}, {}, self.dead, self.left)
        return replace(decision, waiting={}) if decision.culprits else None


class Endpoint(Loop):
    """The thread that speaks for the ranks of a process; coordinator.py has the one of rank 0's process and that of the others.

    Attributes:
        channel: its connections.
        address: where other ranks reach this one if rank 0 does not answer; `None`: nowhere.
    """

    channel: Channel
    address: Address | None = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._members: dict[int, Liveness] = {}
        self._dump_requests: DumpRequests | None = None

    @abstractmethod
    def say(self, rank: int, message: Message) -> None:
        """Takes a message of a rank of this process to the arbiter."""

    @abstractmethod
    def leave(self, rank: int, closed: int) -> None:
        """A rank of this process ends in order."""

    @abstractmethod
    def _hand(self, rank: int, message: Message) -> None:
        """Takes what this process has to say to one of its own ranks there."""

    def take_dump_requests(self, watch: HangWatch) -> None:
        """Other programs may ask from now on; the first rank of this process has the dumps written."""
        self._dump_requests = self._dump_requests or DumpRequests(self, watch)

    def leave_all(self) -> None:
        for member in list(self._members.values()):
            self.leave(member.rank, member.progress().closed)
        self._stop()

    def close(self) -> None:
        super().close()
        self.channel.close()
        if self._dump_requests is not None:
            self._dump_requests.close()

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


def _key_of(failure: Mapping[str, Any]) -> Key:
    """What a decision on a failure is about; ranks that were given up count by who gave them up."""
    operation = failure["operation"]
    if operation not in NUMBERED_TOGETHER:
        return Key(operation, failure["op"])
    newest: int = failure["op"]
    if failure["reason"] == "abandoned":
        newest = max([newest, *failure["given_up"].values()])
    return Key("operation", newest)
