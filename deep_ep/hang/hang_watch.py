"""One rank's part in finding out why an operation hangs: it says when it waits for long, answers where it is,
and keeps the verdict (inquiry.py is the part of who leads).

All but what is marked runs in the thread that speaks for the rank (liveness.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable

from deep_ep.base.ranks import rank_of
from deep_ep.base.rules import NUMBERED_TOGETHER
from deep_ep.hang import messages, recorder, stacks
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.messages import InquiryVerdict, Message
from deep_ep.hang.states import Process, RankState
from deep_ep.hang.verdict import judge

if TYPE_CHECKING:
    from deep_ep.base.ranks import RankPlace
    from deep_ep.hang.recorder import Recorder

# All of these are chosen. Looks at the own waits, seconds, at least and at most; how often a rank says where it
# is while all is well; calls that it tells then, and where somebody asks; after how many times the time before it
# says again that it waits.
_SHORTEST_S, _LONGEST_S = 0.05, 1.0
_PUBLISH_S = 2.0
_CALLS_PUBLISHED, _CALLS_TOLD = 8, 64
_AGAIN = 4.0
# Before an operation times out, there is a last inquiry: so long before, but not before half of the time.
_FINAL_S, _SHORTEST_TIMEOUT_S = 3.0, 2.0


class HangWatch:
    """Of one rank of one buffer.

    Attributes:
        rank: this rank.
        buffer: names it.
        raised: by rank, the exception that ended its program.
    """

    def __init__(self, rank: int, say: Callable[[Message], None]) -> None:
        """Does nothing yet.

        Args:
            rank: this rank.
            say: takes a message to rank 0, or who leads in its place; from any thread.
        """
        self.buffer = ""
        self.raised: dict[int, str] = {}
        self.rank, self._say = rank, say
        self._recorder: Recorder | None = None
        self._warn_s = 0.0
        self._final_s = float("inf")
        self._waits_in: tuple[str, int] = ("", 0)
        self._next_warning_s = 0.0
        self._said_final = False
        self._published_s = 0.0
        self._published: tuple[int, int] | None = None
        self._verdict: HangVerdict | None = None
        self._stop_watching: Callable[[], None] | None = None
        self._places: Sequence[RankPlace] = ()
        self._offers: Sequence[Any] = ()
        self._dump_askers: dict[str, list[Callable[[InquiryVerdict], None]]] = {}  # by folder
        # Who was already gone when rank 0 was found to be; empty: it is not.
        self._gone_with_0: set[int] = set()

    # ---- called by the program's threads

    def begin(
        self,
        own: Recorder,
        warn_s: float,
        timeout_s: float,
        places: Sequence[RankPlace],
        offers: Sequence[Any],
    ) -> None:
        """Before the first `look`.

        Args:
            own: what this rank can say of itself.
            warn_s: after how long it says that it waits; 0: never.
            timeout_s: how long an operation may wait.
            places: where the ranks run.
            offers: what lets others see their stacks, of `stacks.offer`.
        """
        self._recorder, self._warn_s = own, warn_s
        if timeout_s >= _SHORTEST_TIMEOUT_S:  # else operations time out too soon for a last inquiry
            self._final_s = max(timeout_s / 2, timeout_s - _FINAL_S)
        self._places, self._offers = places, offers
        self.buffer = own.buffer
        self._stop_watching = recorder.watch_exceptions(
            lambda text: self._say(messages.RankRaised(self.rank, text))
        )

    def close(self) -> None:
        """The buffer ends. May be repeated, and be called by a destructor."""
        self._recorder = None
        stop, self._stop_watching = self._stop_watching, None
        if stop is not None:
            stop()

    def warn_after(self, seconds: float) -> None:
        """Changes when it says that it waits; 0: never."""
        self._warn_s = seconds
        self._waits_in = ("", 0)

    def ask_for_dump(
        self, directory: str, answer: Callable[[InquiryVerdict], None] | None = None
    ) -> None:
        """Has rank 0, or who leads in its place, write a dump of all ranks into a folder of its host.

        Args:
            directory: the folder.
            answer: is told, by the thread that speaks for the rank, which files were written there; none if that failed.
        """
        if answer is not None:
            self._dump_askers.setdefault(directory, []).append(answer)
        self._say(messages.InquiryRequest(False, directory))

    def verdict_on(self, operation: str, number: int) -> HangVerdict | None:
        """What ranks that waited in an operation were found to wait for; `None` if that is not known."""
        series = "operation" if operation in NUMBERED_TOGETHER else operation
        verdict = self._verdict
        if verdict is None or not verdict.causes:
            return None
        at = {(edge.series, edge.number) for edge in verdict.edges}
        return verdict if (series, number) in at else None

    # ---- called by the thread that speaks for the rank

    def look(self) -> float | None:
        """Says that this rank waits, where that is due.

        Returns:
            When to look again, seconds from now; `None`: never.
        """
        own = self._recorder
        if own is None:
            return None
        waits = own.waits()
        if waits is not None:
            place = waits.series, waits.number
            if place != self._waits_in:
                self._waits_in, self._next_warning_s = place, self._warn_s
                self._said_final = False
            is_final = waits.waited_s >= self._final_s and not self._said_final
            if is_final or 0 < self._next_warning_s <= waits.waited_s:
                self._said_final = self._said_final or is_final
                self._next_warning_s = max(self._next_warning_s, waits.waited_s) * _AGAIN
                self._say(messages.InquiryRequest(is_final))
        self._publish(own)
        wanted = min(self._warn_s or _LONGEST_S, self._final_s) / 8
        return min(max(wanted, _SHORTEST_S), _LONGEST_S)

    def take_verdict(self, found: messages.InquiryVerdict) -> None:
        """Of an inquiry. Also tells who has asked for dumps."""
        self._verdict = found.verdict
        for folder in self._dump_askers.keys() & found.dumped.keys():
            for answer in self._dump_askers.pop(folder):
                answer(replace(found, dumped={folder: found.dumped[folder]}))

    def say_state(self, answer: Callable[[Message], None], asked: messages.AskState) -> None:
        """Where this rank is."""
        if self._recorder is not None:
            state = self._recorder.state(_CALLS_TOLD, with_threads=True)
            answer(messages.StateReport(asked.inquiry, state))

    def inspect(self, asked: messages.AskState) -> messages.StateReport:
        """What another process of this host is doing, which does not answer. Takes up to seconds; in any thread.

        Args:
            asked: by who leads an inquiry: the rank. Whom this rank may send a signal to follows from what the
                ranks said when the buffer was made.

        Raises:
            ValueError: there is no such rank.
        """
        rank = rank_of(asked.rank, len(self._places))
        process, threads = stacks.look_at(self._places[rank].pid, self._offers[rank])
        if process == "gone" and self._gone_with_0 and rank not in self._gone_with_0:
            process = "silent"  # its program may have ended because rank 0 is gone
        seen = replace(self._seen(rank, process), threads=threads)
        return messages.StateReport(asked.inquiry, seen)

    def look_at_end(self, rank: int) -> None:
        """Tells how the process of a rank has ended, if that can be seen from here."""
        if self._places:
            seen = self._seen(rank, "gone")
            if seen.exit:
                self._say(messages.StateReport(0, seen))

    def lose_rank_0(self, process: Process, left: Container[int] = ()) -> None:
        """Rank 0 is gone, which ends operations before anybody can be asked.

        Of other ranks only those are known that are dead or stopped, on this host.

        Args:
            process: "gone" or "unreachable".
            left: ranks that ended in order.
        """
        own = self._recorder
        if own is None:
            return
        state = own.state(_CALLS_TOLD, with_threads=False)
        states = {self.rank: state, 0: self._seen(0, process)}
        for rank, place in enumerate(self._places):
            if rank not in states and rank not in left and place.host == state.host:
                seen = stacks.process_of(place.pid, self._offers[rank])
                if seen in ("gone", "stopped"):
                    states[rank] = self._seen(rank, seen)
        self._gone_with_0 = {rank for rank in states if states[rank].process == "gone"}
        verdict = judge(states)
        known = tuple(cause for cause in verdict.causes if {*cause.ranks} <= states.keys())
        self._verdict = replace(verdict, causes=known)

    def _seen(self, rank: int, process: Process) -> RankState:
        """What is known here of another rank's process."""
        place, exit_ = self._places[rank], ""
        if process == "gone" and place.host == self._places[self.rank].host:
            exit_ = stacks.exit_of(place.pid, self._offers[rank])
        of_rank = rank, len(self._places), self.buffer, place.host, place.pid
        return RankState(*of_rank, written_by=self.rank, process=process, exit=exit_)

    def _publish(self, own: Recorder) -> None:
        """So that something is known of this rank when it does not answer any more."""
        now = time.monotonic()
        if self._published is not None and now - self._published_s < _PUBLISH_S:
            return
        place = own.place()
        if place == self._published:
            return
        self._published_s, self._published = now, place
        self._say(messages.StateReport(0, own.state(_CALLS_PUBLISHED, with_threads=False)))


os.register_at_fork(after_in_child=stacks.forget)
