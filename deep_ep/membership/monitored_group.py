"""A group whose exchanges say which ranks have not arrived, as torch's `monitored_barrier` does.

While a buffer is made (construction.py), its ranks have no connections yet: they wait for each other in exchanges of
the user's group, and such an exchange says nothing while a rank is missing. So `MonitoredGroup` numbers the
exchanges, and each rank notes on the board of the group (group.py; the store of torch's group) at which it has
arrived. A rank that waits for long reads there who has not, looks at the processes of those on its own host, and logs
whom it waits for; if the exchange fails, its exception says so as well.

Any program may write on a board. What stands there is checked and used for these texts only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deep_ep.base import codec, env
from deep_ep.base.group import Group, board_of
from deep_ep.errors import EPError, EPTimeoutError
from deep_ep.hang import recorder, stacks, wording
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.states import CONSTRUCTION, Process, RankState, Thread, Waits
from deep_ep.hang.verdict import judge

T = TypeVar("T")

# Chosen: after how many times the time before it says again that it waits; how long the end of an exchange that
# failed waits for the answer; and the most that is read of what is on a board.
_AGAIN = 4.0
_ANSWER_S = 2.0
_MOST_CHARACTERS = 1 << 12

_log = logging.getLogger("deep_ep")


@dataclass(frozen=True)
class Arrival:
    """What a rank notes on the board: the exchange at which it has arrived, and where it runs.

    Attributes:
        buffer: number of the buffer among those of the group, from 1.
        exchange: number of the exchange while that is made, from 1.
        host, pid, thread: where it is.
        offer: of `stacks.offer`, what lets others of its host see its stacks.
    """

    buffer: int = 0
    exchange: int = 0
    host: str = ""
    pid: int = 0
    thread: int = 0
    offer: Any = None

    @staticmethod
    def of(text: str | None) -> Arrival | None:
        """From the text on a board; `None` if that is none."""
        if text is None or len(text) > _MOST_CHARACTERS:
            return None
        try:
            return codec.from_plain(Arrival, codec.loads(text.encode()), is_strict=False)
        except ValueError:
            return None


class MonitoredGroup:
    """A `Group` for the time in which a buffer is made, whose exchanges are watched.

    Attributes:
        rank: this rank.
        size: number of ranks.
        called_ns: when it began, UTC.
    """

    def __init__(self, group: Group) -> None:
        """Waits for nobody.

        Args:
            group: the ranks.
        """
        self.rank, self.size = group.rank, group.size
        self.called_ns = time.time_ns()
        self._group, self._board = group, board_of(group)
        self._read_from = self._board
        earlier = self._read(self.rank)
        self._arrival = Arrival(
            buffer=1 if earlier is None else earlier.buffer + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            thread=threading.get_ident(),
            offer=stacks.offer(),
        )

    def all_gather_object(self, obj: T) -> list[T]:
        """Every rank's object, in rank order.

        Raises:
            EPTimeoutError: some ranks did not come; says what is known of them.
            RuntimeError: what the group raises, where nobody is missing or that cannot be known.
        """
        if self.size == 1:
            return self._group.all_gather_object(obj)
        self._arrive()
        watch = _ArrivalMonitor(self)
        watch.start()
        try:
            return self._group.all_gather_object(obj)
        except RuntimeError as error:
            verdict = watch.end(asks=True)
            if verdict is None or not verdict.causes:
                raise
            raise self._error(error, verdict, watch.waited_s()) from error
        finally:
            watch.end()

    def barrier(self) -> None:
        """Returns when all ranks have called it; raises like `all_gather_object`."""
        self.all_gather_object(None)

    def verdict(self, waited_s: float) -> HangVerdict | None:
        """Who has not arrived at this exchange, and what is known of them; `None` if the group has no board.

        Args:
            waited_s: how long this rank has been waiting.
        """
        if self._board is None:
            return None
        if self._read_from is self._board:  # in which the thread of the program may be waiting
            with contextlib.suppress(RuntimeError, OSError):
                self._read_from = self._board.apart()
        arrivals = {rank: self._read(rank) for rank in range(self.size)}
        mine = (self._arrival.buffer, self._arrival.exchange)
        missing = tuple(
            rank
            for rank, arrival in arrivals.items()
            if arrival is None or (arrival.buffer, arrival.exchange) < mine
        )
        waits = Waits(CONSTRUCTION, self._arrival.exchange, waited_s, {"entry": missing})
        states = {}
        for rank, arrival in arrivals.items():
            host, pid = (arrival.host, arrival.pid) if arrival else ("", 0)
            place = (rank, self.size, "", host, pid)
            if rank not in missing:
                states[rank] = RankState(*place, waits=waits)
                continue
            process, threads = self._look_at(arrival)
            is_inside = arrival is not None and arrival.buffer == self._arrival.buffer
            states[rank] = RankState(
                *place, process=process, threads=threads, in_call="Buffer" if is_inside else ""
            )
        return judge(states)

    def _arrive(self) -> None:
        self._arrival = replace(self._arrival, exchange=self._arrival.exchange + 1)
        if self._board is not None:
            try:
                self._board.put(self.rank, codec.encode(self._arrival).decode())
            except (RuntimeError, OSError):  # the exchange itself will say what is wrong
                self._board = None

    def _read(self, rank: int) -> Arrival | None:
        """What is on the board; raises nothing."""
        try:
            return Arrival.of(None if self._read_from is None else self._read_from.read(rank))
        except (RuntimeError, OSError, UnicodeDecodeError):
            return None

    def _look_at(self, arrival: Arrival | None) -> tuple[Process, tuple[Thread, ...]]:
        """What can be seen from here of a rank that has not come."""
        if arrival is None or arrival.host != self._arrival.host:
            return "unknown", ()
        if arrival.pid == self._arrival.pid:
            lives = arrival.thread in sys._current_frames()
            threads = recorder.threads_of_process(arrival.thread) if lives else ()
            return ("alive" if lives else "unknown"), threads
        process, threads = stacks.look_at(arrival.pid, arrival.offer)
        if process != "busy":
            return process, threads
        # Nobody has asked it: that it does not answer says nothing about its GIL.
        return ("alive" if threads else "unknown"), threads

    def _error(self, error: RuntimeError, verdict: HangVerdict, waited_s: float) -> EPTimeoutError:
        said, advice = wording.line(verdict), wording.advice(verdict.causes[0])
        first = str(error) if isinstance(error, EPError) else f"the group says: {error}."
        return EPTimeoutError(
            f"Buffer on rank {self.rank}: {said}. {advice} ({first})",
            missing_ranks=verdict.ranks,
            operation="Buffer",
            waited_s=waited_s,
            verdict=verdict,
        )


class _ArrivalMonitor(threading.Thread):
    """Reads the board while a rank waits in an exchange, and says for whom it waits."""

    def __init__(self, group: MonitoredGroup) -> None:
        super().__init__(name="deep_ep arrivals", daemon=True)
        self._group = group
        self._since_s = time.monotonic()
        self._over = threading.Event()
        self._is_asked = False
        self._verdict: HangVerdict | None = None

    def waited_s(self) -> float:
        """How long this rank has been in the exchange."""
        return time.monotonic() - self._since_s

    def end(self, asks: bool = False) -> HangVerdict | None:
        """The exchange is over. A thread that outlived it could end the last that holds the group, as a process ends.

        Returns:
            Who was missing at the last look: now, if that is asked for and the board answers.
        """
        self._is_asked = asks
        self._over.set()
        self.join(_ANSWER_S)
        return self._verdict

    def run(self) -> None:
        pause_s = _warn_s()
        while not self._over.wait(pause_s or None):
            pause_s = (_AGAIN - 1) * self.waited_s()
            self._look()
            if not self._over.is_set():
                self._say()
        if self._is_asked:
            self._look()

    def _look(self) -> None:
        self._verdict = self._group.verdict(self.waited_s())

    def _say(self) -> None:
        """The lowest of the ranks that wait does."""
        verdict, rank = self._verdict, self._group.rank
        if verdict is None and rank == 0:
            _log.warning(
                "deep_ep: rank 0 waits in Buffer(), for %.3g s, for ranks that have not come; who they are cannot be "
                "known, as this group has no store",
                self.waited_s(),
            )
        elif verdict is not None and verdict.causes and rank == min(verdict.waiting):
            _log.warning("deep_ep: %s", wording.line(verdict), extra={"verdict": verdict})


def _warn_s() -> float:
    """What is wrong with the variable is said by all ranks together, later."""
    try:
        return env.warn_s()
    except EPError:
        return 0.0
