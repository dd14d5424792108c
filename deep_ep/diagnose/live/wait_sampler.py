"""Sums of waiting of all ranks, window after window, from a background thread of each rank.

Rank 0 asks, the others answer. Tensors are read from aside and never set to zero, which would lose what a kernel
adds meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from ..core.diagnosis import FloatArray, IntArray
from ..core.package import EPArgumentError, codec
from ..core.robust_stats import median
from . import wire
from .mailbox import Mailbox, Rounds
from .stop_flag import StopFlag

# What ranks may take to answer rank 0, those that were silent before, and a thread to end. Chosen.
_ANSWER_S, _SILENT_S, _JOIN_S = 30.0, 1.0, 10.0
# Of a host name, that is shown; the longest that Linux allows has 64.
_LONGEST_HOST = 256
UNKNOWN = -1
_NEXT, _LAST = b"", b"last"


def _not_below_0(waits: IntArray, _: codec.Sides) -> IntArray:
    if (waits < 0).any():
        raise codec.CodecError("has numbers below 0")
    return waits


@dataclass(frozen=True)
class Waited:
    """What one rank waited in a window.

    Attributes:
        waits: [rows, num_ranks], for each rank, ns; a row for each kind of operation.
        operations: [rows], how many operations that is; `UNKNOWN`.
        host: where the rank runs.
    """

    waits: Annotated[IntArray, ("rows", "num_ranks"), _not_below_0]
    operations: Annotated[IntArray, ("rows",)]
    host: str = ""


@dataclass(frozen=True)
class Window:
    """What all ranks waited.

    Attributes:
        number: from 1.
        waits: [rows, num_ranks, num_ranks], rows wait, ns; NaN rows: that rank did not answer.
        operations: [rows], the median of the ranks that answered; NaN: some do not know.
        hosts: [num_ranks], as ranks last said; "" where the rank has never answered.
        silent: ranks that do not answer, as in `mailbox.Rounds.silent`.
        refused: why answers were left out.
    """

    number: int
    waits: FloatArray
    operations: FloatArray
    hosts: list[str]
    silent: dict[int, tuple[int, float]]
    refused: list[str]


class WaitSampler:
    """The thread of one rank."""

    def __init__(
        self,
        mailbox: Mailbox,
        take: Callable[[], Waited],
        judge: Callable[[Window], None],
        failed: Callable[[Exception], None],
        interval_s: float,
        warming_time_s: float,
    ) -> None:
        """Starts the thread. It knows nothing of who made it, so that this can go while the thread runs.

        Args:
            mailbox: between the ranks; closed at the end.
            take: what this rank waited since the last call.
            judge: called on rank 0 with each window but the first, which ends the time of warming up.
            failed: called if the thread fails, which ends it.
            interval_s: length of a window.
            warming_time_s: what is before the first window.
        """
        self._mailbox = mailbox
        self._rounds = Rounds(mailbox)
        self._take, self._judge, self._failed = take, judge, failed
        self._interval_s = interval_s
        self._warming_time_s = warming_time_s
        self._hosts = [""] * mailbox.size
        self._stopped = StopFlag()
        self._pid = os.getpid()
        # The thread closes the mailbox after what `stop` has to say. A destructor may call that within the thread.
        self._ending = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="deep_ep diagnose", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it. May be called by a destructor. Rank 0 ends those of the others, too.

        Does nothing in a fork of this process, which has its connections and not its thread.
        """
        if os.getpid() != self._pid:
            return
        with self._ending:
            self._stopped.set()
            if self._mailbox.rank == 0:
                with contextlib.suppress(RuntimeError):  # closed, or the store is gone
                    self._rounds.end(_LAST)
            self._mailbox.close()
        # Garbage is collected in any thread, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            if self._mailbox.rank == 0:
                self._ask()
            else:
                self._answer()
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            if not self._stopped.is_set():
                self._failed(error)
        finally:
            with self._ending:
                self._mailbox.close()

    def _ask(self) -> None:
        for number in itertools.count():
            if self._stopped.wait(self._interval_s if number else self._warming_time_s):
                return
            self._rounds.call(number, _NEXT)
            answers = {0: self._mine()}
            answer_s = max(self._interval_s, _ANSWER_S)
            answers.update(self._rounds.collect(number, answer_s, _SILENT_S))
            if number and not self._stopped.is_set():
                self._judge(self._window(number, answers))

    def _answer(self) -> None:
        while self._rounds.await_call() == _NEXT:
            self._rounds.answer(self._mine())

    def _mine(self) -> bytes:
        return codec.encode(replace(self._take(), host=socket.gethostname()))

    def _window(self, number: int, answers: dict[int, bytes]) -> Window:
        """From what came; rank 0 was asked first, and is always there."""
        size = self._mailbox.size
        sides = {"num_ranks": size}
        of_ranks, refused = {}, []
        for rank, data in sorted(answers.items()):
            try:
                of_ranks[rank] = wire.decode(Waited, data, f"rank {rank}", sides)
            except EPArgumentError as error:
                refused.append(str(error))
            sides["rows"] = len(of_ranks[0].operations)
        waits = np.full((sides["rows"], size, size), np.nan)
        operations = np.full((sides["rows"], size), np.nan)
        for rank, waited in of_ranks.items():
            waits[:, rank] = waited.waits
            operations[:, rank] = waited.operations
            self._hosts[rank] = waited.host[:_LONGEST_HOST]
        silent = dict(self._rounds.silent)
        count = np.where((operations == UNKNOWN).any(axis=1), np.nan, median(operations, 1))
        return Window(number, waits, count, [*self._hosts], silent, refused)
