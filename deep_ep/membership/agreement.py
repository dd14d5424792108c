"""Who is missing: how the ranks that wait in an operation come to one answer.

The arbiter, on rank 0, hears of every failed operation. It asks all ranks where they are, decides
once per operation, and tells everybody. It does no input or output and reads no clock: it is given a
way to send and a timer, so that every order of messages can be tested.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Callable

from deep_ep.base.ranks import Decision, Key, Progress, rank_of
from deep_ep.hang import messages
from deep_ep.hang.messages import Handlers, Message

# All of these are chosen. How long rank 0 waits for ranks to say where they are: where that decides
# who is named, and where it does not; for others that die with the first; and for the report of the
# rank that gave up, where another one has seen that it did.
_ANSWERS_S, _OTHERS_S, _SETTLE_S, _ABANDONED_S = 1.0, 0.3, 0.1, 0.3
# Within this a decision is there, if it comes at all.
LONGEST_S = _ANSWERS_S + _SETTLE_S + _OTHERS_S + 1.0
# Decisions that are kept: ranks are a few operations apart.
_KEPT = 64


def decide(
    key: Key,
    missed: Mapping[int, Iterable[int]],
    progress: Mapping[int, Progress],
    dead: Mapping[int, str],
    left: Mapping[int, int],
    excused: Iterable[int] = (),
    unheard: Iterable[int] = (),
    masks: bool = False,
    masked: Iterable[int] = (),
) -> Decision:
    """The decision from what is known.

    Args:
        key: which operation.
        missed: by rank that gave it up, whom it missed.
        progress: where ranks say they are.
        dead: see `Decision`; all of them are named, since an operation needs all ranks.
        left: ranks that ended in order, and after which operation.
        excused: ranks that failed themselves because others were missing, and have not called since;
            they are named only if nobody else can be.
        unheard: ranks that do not say where they are, whether anybody missed them or not. Rows may come by
            way of others, who wait as well; so these are named if all who are missed wait themselves.
        masks: whom it names the others go on without: nobody who has come that far, or is excused.
        masked: named before, and not back: how far they have come says nothing.
    """
    waiting = dict.fromkeys(missed, key.op)
    if key.is_operation:  # else who waits in an operation is in the wrong place
        waiting = {rank: at.open for rank, at in progress.items() if at.waiting} | waiting
    gone = {rank: op for rank, op in left.items() if op < key.op or not key.is_operation}
    candidates = {rank for ranks in missed.values() for rank in ranks}
    candidates -= waiting.keys() | dead.keys() | left.keys()
    # Who is in the operation may wait where its progress does not show it; who is beyond it has sent its part.
    come = {rank for rank, at in progress.items() if key.is_operation and at.newest >= key.op}
    others = candidates - set(excused) - (come - set(masked))
    if masks or dead or gone or others:
        candidates = others
    decision = Decision(
        key,
        dict(dead),
        gone,
        tuple(sorted(candidates - progress.keys())),
        {rank: progress[rank] for rank in sorted(candidates & progress.keys())},
        {rank: op for rank, op in waiting.items() if rank not in dead and rank not in left},
    )
    if not decision.culprits:
        decision = replace(decision, silent=tuple(sorted(set(unheard) - waiting.keys())))
    if decision.culprits:
        return decision
    paths = sorted((source, rank) for rank, sources in missed.items() for source in sources)
    return Decision(key, waiting=decision.waiting, paths=tuple(paths))


@dataclass
class _Round:
    """One decision in the making."""

    number: int
    answers_by: float
    others_by: float
    missed: dict[int, set[int]] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    masks: bool = False  # those who report go on without whom they miss


def _may_report(key: Key, opened: _Round) -> bool:
    """Whether a rank that was in the operation, but did not wait, has yet to say how that ended. Ranks
    time out within moments of each other, so its report may be on its way behind its answer.
    """
    return key.is_operation and any(
        key.op in (at.open, at.closed) and not at.waiting and rank not in opened.missed
        for rank, at in opened.progress.items()
    )


def remember(
    decisions: OrderedDict[Key, Decision | None], key: Key, decision: Decision | None
) -> None:
    """Adds a decision to the newest ones; `None`: nobody was missing."""
    decisions[key] = decision
    if len(decisions) > _KEPT:
        decisions.popitem(last=False)


class Arbiter:
    """Rank 0's part. One thread at a time.

    Attributes:
        dead: ranks that are dead, see `Decision`.
        left: ranks that ended in order, and the last operation they finished.
        parting: those of them that wait in destroy() for the others.
    """

    def __init__(
        self,
        num_ranks: int,
        send: Callable[[int, Message], None],
        call_later: Callable[[float, Callable[[], None]], None],
        now: Callable[[], float],
    ) -> None:
        """Without any input or output of its own.

        Args:
            num_ranks: size of the group.
            send: hands a message to a rank; must not wait.
            call_later: calls a function after so many seconds.
            now: the time, seconds.
        """
        self.dead: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.parting: set[int] = set()
        self._num_ranks = num_ranks
        self._send, self._call_later, self._now = send, call_later, now
        self._numbers = itertools.count(1)
        self._rounds: dict[Key, _Round] = {}
        # Who gave up for another one's sake, before anybody said why.
        self._abandoned: dict[Key, set[int]] = {}
        self._decisions: OrderedDict[Key, Decision | None] = OrderedDict()
        # Decisions that those who wait are told once these others say that they have them.
        self._told_ahead: dict[int, tuple[Decision, set[int]]] = {}
        # Asked and not heard of since, and what they are told once they are.
        self._unanswered: dict[int, deque[Message]] = {}
        self._unwatched: set[int] = set()
        self._failed: set[int] = set()
        # Named by a decision after which the others have gone on without them.
        self._masked: set[int] = set()
        self._newest = 0
        self._settled = 0.0

    # ---- what it hears

    def handlers(self) -> Handlers[int]:
        """Of what ranks say to it."""
        return {
            messages.FailureReport: self._report,
            messages.ProgressAnswer: self._progress,
            messages.RankLeft: self.leave,
            messages.Unmasked: lambda rank, _: self._masked.discard(rank),
            messages.MonitoringFailed: lambda rank, _: self.unwatch(rank),
        }

    def lose(self, rank: int, how: str) -> None:
        """The connection to a rank has ended, although it had not said so before."""
        self.parting.discard(rank)
        if rank in self.dead or rank in self.left or rank in self._unwatched:
            return
        self.dead[rank] = how
        self._settled = self._now() + _SETTLE_S
        self._tell(messages.RankDied(rank, how))
        self._look()

    def unwatch(self, rank: int) -> None:
        """There is no connection to a rank, for a reason that says nothing about it."""
        self._unwatched.add(rank)
        self._look()

    def away(self) -> set[int]:
        """Ranks that are not there to be asked."""
        return (self.dead.keys() | self.left.keys()) - self.parting

    def leave(self, rank: int, message: messages.RankLeft) -> None:
        """A rank ends in order."""
        self.parting.discard(rank)
        if rank in self.left:  # it has come to the end of destroy()
            return
        if message.parts:
            self.parting.add(rank)
        self.left[rank] = message.closed
        self._tell(messages.RankLeft(rank, message.closed, message.parts))
        self._look()

    def _report(self, rank: int, report: messages.FailureReport) -> None:
        key, failure = report.key, report.failure
        missing = {rank_of(other, self._num_ranks) for other in report.missing}
        if report.masks and rank in self._masked:
            # Everybody goes on without it, so it misses everybody.
            self._send(rank, messages.Undecided(key))
            return
        if failure == "other":
            # Whoever asks because this rank gave up is told that nobody is missing.
            remember(self._decisions, key, self._decisions.get(key))
            return
        decision = self._decisions.get(key)
        if decision is not None:
            self._send(rank, decision)
            return
        if failure == "abandoned" and key not in self._rounds:
            self._abandoned.setdefault(key, set()).add(rank)
            delay_s = 0.0 if key in self._decisions else _ABANDONED_S
            self._call_later(delay_s, lambda: self._leave_undecided(rank, key))
            return
        opened = self._rounds.get(key) or self._open(key)
        opened.masks = opened.masks or report.masks
        # Of "abandoned" they are those who gave up before, who need not owe it anything.
        opened.missed.setdefault(rank, set()).update(
            missing - {rank} if failure == "timeout" else ()
        )
        self._look()

    def _progress(self, rank: int, answer: messages.ProgressAnswer) -> None:
        for owed in self._unanswered.pop(rank, ()):
            self._send(rank, owed)
        for opened in self._rounds.values():
            if opened.number == answer.round:
                opened.progress[rank] = answer.at
        if answer.round in self._told_ahead:
            _, asked = self._told_ahead[answer.round]
            asked.discard(rank)
            if not asked:
                self._tell_waiting(answer.round)
        self._look()

    # ---- rounds

    def _open(self, key: Key) -> _Round:
        now = self._now()
        opened = _Round(next(self._numbers), now + _ANSWERS_S, now + _OTHERS_S)
        opened.missed.update((rank, set()) for rank in self._abandoned.pop(key, ()))
        just_asked = set().union(*(other.asked for other in self._rounds.values()))
        self._rounds[key] = opened
        for rank in range(self._num_ranks):
            # A rank that did not answer before is not asked again: it may be stopped for long. One that was
            # asked for a decision that is still open may only not have had the time.
            if self._is_there(rank) and (rank not in self._unanswered or rank in just_asked):
                opened.asked.add(rank)
                self._unanswered.setdefault(rank, deque(maxlen=_KEPT))
        for rank in sorted(opened.asked):
            self._send(rank, messages.AskProgress(opened.number))
        for delay_s in (_SETTLE_S, _OTHERS_S, _ANSWERS_S):
            self._call_later(delay_s, self._look)
        return opened

    def _look(self) -> None:
        """Decides what can be decided now."""
        now = self._now()
        if self._rounds and now < self._settled:
            self._call_later(self._settled - now, self._look)
            return
        undecided = set()
        # In order, since who gave up one operation is excused in the next one.
        for key, opened in sorted(self._rounds.items(), key=lambda item: item[0]):
            if key.series not in undecided and self._is_complete(key, opened, now):
                del self._rounds[key]
                self._decide(key, opened)
            else:
                undecided.add(key.series)

    def _is_complete(self, key: Key, opened: _Round, now: float) -> bool:
        unheard = opened.asked & self._unheard(opened)
        if now >= opened.answers_by:
            return True
        if now >= opened.others_by:
            missed = set().union(*opened.missed.values())
            if unheard & missed:
                return False
            # Whatever the others say, somebody is named.
            return not unheard or bool(self._decision(key, opened).culprits)
        if _may_report(key, opened) or self._may_report_before(key, opened):
            return False
        return not unheard

    def _may_report_before(self, key: Key, opened: _Round) -> bool:
        """Whether somebody is gone, and a rank may have yet to say that the operation before failed for that:
        it is not missing then.
        """
        excused = self._excused(key, opened)
        return (
            key.is_operation
            and bool(self.dead or self.left)
            and any(
                at.newest == key.op - 1 and not at.waiting and rank not in excused
                for rank, at in opened.progress.items()
            )
        )

    def _unheard(self, opened: _Round) -> set[int]:
        """Ranks that live and have said nothing."""
        heard = opened.progress.keys() | opened.missed.keys()
        return {rank for rank in range(self._num_ranks) if self._is_there(rank)} - heard

    def _decision(self, key: Key, opened: _Round, unheard: Iterable[int] = ()) -> Decision:
        """From what is known now."""
        known = opened.missed, opened.progress, self.dead, self.left
        excused = self._excused(key, opened)
        return decide(key, *known, excused, unheard, opened.masks, self._masked)

    def _excused(self, key: Key, opened: _Round) -> set[int]:
        # Who is left behind by those who go on must be named at some time.
        oldest = key.op - 1 if opened.masks and key.is_operation else 0
        return {
            rank
            for rank, at in opened.progress.items()
            if rank in self._failed and oldest <= at.newest <= self._newest
        }

    def _decide(self, key: Key, opened: _Round) -> None:
        # Nobody is left out whom nobody has missed.
        unheard = () if opened.masks else self._unheard(opened)
        decision = self._decision(key, opened, unheard)
        remember(self._decisions, key, decision)
        if key.is_operation:
            if opened.masks:
                self._masked.update(decision.culprits)
            self._failed.update(decision.waiting)
            self._newest = max(self._newest, key.op)
        self._tell_ahead(decision)

    def _tell_ahead(self, decision: Decision) -> None:
        """First to those who do not wait: the others may call on them at once, and what they call next is to begin
        behind what has been given up.
        """
        others = set(range(self._num_ranks)) - decision.waiting.keys()
        self._tell(decision, others)
        asked = {r for r in others if self._is_there(r) and r not in self._unanswered}
        if not asked:
            self._tell(decision, decision.waiting)
            return
        number = next(self._numbers)
        self._told_ahead[number] = decision, asked
        for rank in sorted(asked):
            self._send(rank, messages.AskProgress(number))
        self._call_later(_OTHERS_S, lambda: self._tell_waiting(number))

    def _tell_waiting(self, number: int) -> None:
        told = self._told_ahead.pop(number, None)
        if told is not None:
            self._tell(told[0], told[0].waiting)

    def _leave_undecided(self, rank: int, key: Key) -> None:
        # If there was a reason after all, everybody is or will be told.
        if key not in self._rounds and self._decisions.get(key) is None:
            self._abandoned.pop(key, None)
            self._send(rank, messages.Undecided(key))

    def _tell(self, message: Message, ranks: Iterable[int] | None = None) -> None:
        """To all ranks, or to these; to those that do not answer, once they do, lest messages to a stopped one pile up."""
        for rank in range(self._num_ranks) if ranks is None else sorted(ranks):
            if not self._is_there(rank) and rank not in self.parting:
                continue
            if rank in self._unanswered:
                self._unanswered[rank].append(message)
            else:
                self._send(rank, message)

    def _is_there(self, rank: int) -> bool:
        return not (rank in self.dead or rank in self.left or rank in self._unwatched)
