"""Why an operation hangs: how rank 0, or who leads in its place, comes to a verdict while ranks still wait.

A rank that has been waiting for long says so. Who leads then asks all ranks where they are, lets a rank of the
same host look at those that do not answer, and judges the states (hang/verdict.py). The verdict goes to all
ranks, so that their exceptions carry it. As the arbiter (agreement.py), `Inquiries` does no input or output, but for
`announce`, which logs verdicts and writes dumps.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Callable, Protocol

from deep_ep.hang import messages, traces, wording
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.messages import Handlers, Message
from deep_ep.hang.states import Process, RankState
from deep_ep.hang.verdict import judge

if TYPE_CHECKING:
    from deep_ep.base.ranks import RankPlace

# How long ranks may take to say where they are, and others of their hosts to look at them. Chosen.
_ANSWERS_S, _LOOKS_S = 0.8, 0.8

_log = logging.getLogger("deep_ep")


class DepartedRanks(Protocol):
    """Which ranks take part in nothing any more."""

    @property
    def dead(self) -> Mapping[int, str]:
        """See `Decision.dead`."""

    @property
    def left(self) -> Mapping[int, int]:
        """Ranks that ended in order, and the last operation they finished."""

    def away(self) -> set[int]:
        """Ranks that are not there to be asked."""


@dataclass
class Inquiry:
    """One that is open.

    Attributes:
        number: of it.
        asked: ranks.
        is_final: whether an operation is about to time out.
        dump_to: folders for dumps that were asked for.
        states: of ranks that have answered.
        seen: of others, as ranks of their hosts see their processes.
    """

    number: int
    asked: set[int]
    is_final: bool = False
    dump_to: list[str] = field(default_factory=list)
    states: dict[int, RankState] = field(default_factory=dict)
    seen: dict[int, RankState] = field(default_factory=dict)


class Inquiries:
    """The part of who leads. One thread at a time."""

    def __init__(
        self,
        places: Sequence[RankPlace],
        ranks_per_node: int,
        departed: DepartedRanks,
        send: Callable[[int, Message], None],
        call_later: Callable[[float, Callable[[], None]], None],
        aside: Callable[
            [Callable[[], messages.InquiryVerdict], Callable[[messages.InquiryVerdict], None]], None
        ],
    ) -> None:
        """Dumps of failed operations go where the environment says now.

        Args:
            places: where the ranks run.
            ranks_per_node: where operations go by way of gateways.
            departed: knows who is dead, and who has left.
            send: hands a message to a rank; must not wait.
            call_later: calls a function after so many seconds.
            aside: calls a function that may take long, and then the second one with what it returned.
        """
        self._places = places
        self._ranks_per_node = ranks_per_node
        self._departed = departed
        self._send, self._call_later = send, call_later
        self._aside = aside
        self._said: Sequence[object] = ()
        self._dumps_to = traces.default_folder()
        self._reported: dict[int, RankState] = {}
        self._raised: dict[int, str] = {}
        self._number = 0
        self._open: Inquiry | None = None

    def handlers(self) -> Handlers[int]:
        """Of what ranks say to it."""
        return {
            messages.RankRaised: self._raise,
            messages.InquiryRequest: lambda _, request: self.ask(request.final, request.dump_to),
            messages.StateReport: self._take_state,
        }

    def _raise(self, rank: int, message: messages.RankRaised) -> None:
        self._raised[rank] = message.text
        self._send_all(messages.RankRaised(rank, message.text))

    def _take_state(self, by: int, report: messages.StateReport) -> None:
        state, places, opened = report.state, self._places, self._open
        rank = state.rank  # below `num_ranks`, or it would not have been read
        if state.num_ranks != len(places) or places[rank].host != places[by].host:
            raise ValueError(
                f"rank {by} of {len(places)} tells of rank {rank} of {state.num_ranks}, which does not run beside it"
            )
        if rank != by:
            seen = replace(self._said_of(rank, state.process), threads=state.threads)
            state = replace(seen, exit=state.exit, written_by=by, taken_ns=time.time_ns())
        if rank == by or state.exit:
            self._reported[rank] = state
        if opened is not None and report.inquiry == opened.number:
            (opened.states if rank == by else opened.seen)[rank] = state
            self._conclude_if_heard(opened)

    def ask(self, is_final: bool, dump_to: str = "") -> None:
        """Opens an inquiry, unless one is open.

        Args:
            is_final: whether the operation is about to time out.
            dump_to: a folder for a dump; empty: none is asked for.
        """
        opened = self._open or self._begin()
        opened.is_final = opened.is_final or is_final
        if dump_to:
            opened.dump_to.append(dump_to)

    def _begin(self) -> Inquiry:
        self._number += 1
        asked = set(range(len(self._places))) - self._departed.away()
        opened = self._open = Inquiry(self._number, asked)
        for rank in sorted(asked):
            self._send(rank, messages.AskState(opened.number, rank))
        self._call_later(_ANSWERS_S, lambda: self._have_looked_at(opened))
        return opened

    def drop(self) -> None:
        """Another rank leads."""
        self._open = None

    def _send_all(self, message: Message) -> None:
        for rank in range(len(self._places)):
            self._send(rank, message)

    def _have_looked_at(self, opened: Inquiry) -> None:
        """Others of their hosts look at the ranks that do not answer."""
        if self._open is not opened:
            return
        looks = False
        for rank in sorted(opened.asked - opened.states.keys()):
            place = self._places[rank]
            near = [r for r in sorted(opened.states) if self._places[r].host == place.host]
            if near:
                looks = True
                self._send(near[0], messages.AskState(opened.number, rank))
        if looks:
            self._call_later(_LOOKS_S, lambda: self._conclude(opened))
        else:
            self._conclude(opened)

    def _conclude_if_heard(self, opened: Inquiry) -> None:
        heard = opened.states.keys() | opened.seen.keys()
        if opened.asked - self._departed.away() <= heard:
            self._conclude(opened)

    def _conclude(self, opened: Inquiry) -> None:
        if self._open is not opened:
            return
        self._open = None
        states = {rank: self._state(rank, opened) for rank in range(len(self._places))}
        verdict = judge(states, self._ranks_per_node)
        self._aside(lambda: self.announce(opened, states, verdict), self._send_all)

    def _state(self, rank: int, opened: Inquiry) -> RankState:
        if rank in self._departed.left:
            # One that waits in destroy() answers, and takes part in nothing else any more.
            ended = opened.states.get(rank) or self._said_of(rank, "ended")
            state = replace(ended, process="ended", closed=self._departed.left[rank], opened=0)
        elif rank in opened.states and rank not in self._departed.dead:
            state = opened.states[rank]
        elif rank in self._departed.dead:
            process: Process = "unreachable" if self._departed.dead[rank] == "host" else "gone"
            state = self._said_of(rank, process)
        else:
            state = opened.seen.get(rank) or self._said_of(rank, "silent")
        return replace(state, raised=state.raised or self._raised.get(rank, ""))

    def _said_of(self, rank: int, process: Process) -> RankState:
        """The state of a rank that does not say where it is."""
        place = self._places[rank]
        unheard = RankState(rank, len(self._places), host=place.host, pid=place.pid)
        said = self._reported.get(rank, unheard)
        return replace(said, process=process, in_call="", waits=None, threads=(), written_by=0)

    def announce(
        self, ended: Inquiry, states: Mapping[int, RankState], verdict: HangVerdict
    ) -> messages.InquiryVerdict:
        """Logs what is new, and writes the dumps that are due. In the thread for what takes long.

        Returns:
            What all ranks are to hear.
        """
        # What makes it another one than the last.
        said = [(c.kind, c.ranks, c.series, c.number, c.paths) for c in verdict.causes]
        if said and said != self._said:
            self._said = said
            _log.warning("deep_ep: %s", wording.line(verdict), extra={"verdict": verdict})
        folders = [*ended.dump_to]
        if ended.is_final and self._dumps_to is not None:
            folders.append(str(self._dumps_to / verdict.buffer))
        dumped = {folder: _dump(folder, states, verdict) for folder in dict.fromkeys(folders)}
        return messages.InquiryVerdict(verdict, dumped)


def _dump(folder: str, states: Mapping[int, RankState], verdict: HangVerdict) -> tuple[str, ...]:
    """The files that were written; none if that failed."""
    try:
        files = traces.write_dump(folder, states, verdict)
    except (OSError, ValueError) as error:  # a name that no folder can have is a ValueError
        _log.warning("deep_ep: no dump in %s: %s", folder, error)
        return ()
    else:
        read = f"python -m deep_ep.diagnose hang {shlex.quote(folder)}"
        _log.warning("deep_ep: %d files in %s; %s", len(files), folder, read)
        return tuple(str(file) for file in files)
