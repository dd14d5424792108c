"""Every buffer watches itself: windows, verdicts and records without a line in the program.

`DEEP_EP_DIAGNOSE` starts one background thread per rank and buffer. Rank 0 says at which operation a
window ends; every rank rolls its counters back to that operation and posts what it sees; rank 0
has that judged, in a process of its own. Only the construction is collective.

Nothing in here may stop an operation: what fails is logged once, and the buffer goes on unwatched.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from ..analyze.thresholds import MIN_OPERATIONS
from ..collect.rank_summary import summarize
from ..collect.snapshot import Observed, Snapshot, observe
from ..core.diagnosis import IntArray
from ..core.package import EPArgumentError, codec, env, rendezvous
from . import wire
from .judge_process import JudgeProcess
from .mailbox import Rounds, is_lost, open_mailbox
from .stop_flag import StopFlag
from .window_judge import Share, WindowJudge, WindowShares
from .window_log import reason, say, silence

if TYPE_CHECKING:
    from pathlib import Path

    from ..core.package import Group

# All of these are chosen. How long rank 0 waits for the others' shares of a window, of the last one,
# and for ranks that were silent before; and how long a rank waits to reach the end of a window.
_SHARES_S, _LAST_SHARES_S, _SILENT_S, _REACH_S = 5.0, 1.0, 0.1, 1.0
# How long the end of a buffer, or of the process, may take.
_END_S = 2.0
# How long a thread that has been told to end may take to hear of it.
_WAKE_S = 1.0
# Pauses between looks at the counters.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.02

_running: set[Monitor] = set()


@dataclass(frozen=True)
class _Call:
    """Rank 0 to another: a window ends with `operation`, or there is none; `last`: no more come."""

    operation: Optional[int]  # noqa: UP045 - read at run time, by Python 3.9 as well
    last: bool


def start(buffer: Any, group: Group, when: env.DiagnoseMode) -> Monitor | None:
    """Watches a buffer whose counters are on. Collective; `None`, and a line in the log, if it fails."""
    try:
        return Monitor(buffer, group, when, env.diagnose_dir())
    except Exception as error:  # noqa: BLE001 - whatever it is, the buffer works without
        say(f"off: {reason(error)}", logging.INFO if group.rank else logging.WARNING)
        return None


class Monitor:
    """The watching thread of one rank's buffer. It keeps the counters alive, never the buffer."""

    def __init__(
        self, buffer: Any, group: Group, when: env.DiagnoseMode, folder: Path | None
    ) -> None:
        """Starts the thread.

        Args:
            buffer: with counters enabled.
            group: its group.
            when: of mode "sync" or "async".
            folder: where records go; `None`: nowhere.

        Raises:
            EPError: the ranks cannot reach each other.
        """
        self._when = when
        # The fewest steps in which, of two kinds of operations, one occurs often enough.
        self._steps = -(-2 * MIN_OPERATIONS // max(when.steps, 1)) * when.steps
        self._folder = folder
        self._buffer = weakref.ref(buffer)
        self._observed = observe(buffer)
        self._window = 0
        # So many were counted when none of their kinds had occurred often enough.
        self._too_few = 0
        self._refused = False
        self._ended = StopFlag()
        # The program did not wait any longer for the last window.
        self._left_behind = False
        # On a GPU the first copy allocates, which must not happen while a graph is captured.
        rendezvous.together(group, "starting its diagnosis", lambda: self._snapshot().operation)
        self._before = self._snapshot()
        self._mailbox = open_mailbox(group, "diagnose")
        self._rounds = Rounds(self._mailbox)
        self._thread = threading.Thread(
            target=self._run, name=f"deep_ep.diagnose rank {group.rank}", daemon=True
        )
        weakref.finalize(buffer, self.end).atexit = False
        # At the end of a process of any kind; what multiprocessing starts may leave atexit out.
        self._at_exit = multiprocessing.util.Finalize(None, _end_all, exitpriority=1)
        _running.add(self)
        self._thread.start()

    def end(self) -> None:
        """Asks for the last window; returns at once. Rank 0 ends all ranks."""
        self._ended.set()

    def close(self, timeout_s: float = _END_S) -> None:
        """Ends this rank; waits at most so long for the last window."""
        self.end()
        self._thread.join(timeout_s)
        self._left_behind = self._thread.is_alive()
        if self._left_behind and self._mailbox.rank != 0:
            self._leave()
        self._mailbox.close()
        # A thread that wakes up in an interpreter that is gone would end the process.
        self._thread.join(_WAKE_S)

    # ---- the thread

    def _run(self) -> None:
        try:
            if self._mailbox.rank == 0:
                self._lead()
            else:
                self._follow()
        except Exception as error:  # noqa: BLE001 - whatever it is, operations go on
            self._stop(error)
        finally:
            self._mailbox.close()
            self._at_exit.cancel()
            _running.discard(self)

    def _lead(self) -> None:
        with contextlib.closing(JudgeProcess(WindowJudge(self._folder))) as judge:
            last = False
            while not last:
                now, operation, last = self._end_of_window()
                enough = _most_ops(now, self._before) >= MIN_OPERATIONS
                if not (enough or last):
                    self._too_few = _num_ops(now)
                    continue
                self._window += 1
                call = _Call(operation if enough else None, last)
                self._rounds.call(self._window, codec.encode(call))
                if enough:
                    window = self._heard(self._share(operation), last)
                    self._rounds.dismiss(judge.judge(window, self._ended.is_set))

    def _heard(self, own: Share, last: bool) -> WindowShares:
        """What comes in time from the others, but for ranks that are masked now."""
        masked = self._masked()
        patience_s = _LAST_SHARES_S if last else _SHARES_S
        others = self._rounds.collect(self._window, patience_s, _SILENT_S, without=masked)
        absent = silence(self._rounds.silent)
        absent += [f"rank {rank} is masked; windows go on without it" for rank in masked]
        return WindowShares(self._window, time.time(), own, others, absent)

    def _follow(self) -> None:
        last = False
        while not last:
            data = self._rounds.await_call()
            if data is None:
                return
            try:
                sides = {"num_ranks": self._mailbox.size}
                call = wire.decode(_Call, data, "diagnose: from rank 0", sides)
            except EPArgumentError as error:
                if not self._refused:
                    say(f"rank 0's word on a window is left out: {error}")
                self._refused = True
                continue
            last = call.last
            if call.operation is not None:
                self._reach(call.operation)
                self._answer(self._share(call.operation))

    def _end_of_window(self) -> tuple[Snapshot, int, bool]:
        """Waits for the end of a window: the counters then, its last operation, whether it is the last."""
        if self._when.mode == "async":
            self._ended.wait(self._when.seconds)
            now, last = self._snapshot(), self._ended.is_set()
            return now, now.operation, last
        due = self._pause_until_due()
        now = self._snapshot()
        num_ops = _num_ops(now)
        if num_ops < due:
            return now, now.operation, self._ended.is_set()
        # So many may have come meanwhile that the rings tell hardly anything of the window that was due.
        for num_later in (num_ops - due, num_ops % self._steps):
            operation = _operation_before(now, num_later)
            if operation is not None and self._held(now, operation) >= 2 * MIN_OPERATIONS:
                return now, operation, False
        return now, now.operation, False

    def _held(self, now: Snapshot, operation: int) -> int:
        """How many operations of the window that ends there are in the rings."""
        numbers = _ring_numbers(now)
        return int(np.count_nonzero((numbers > self._before.operation) & (numbers <= operation)))

    def _pause_until_due(self) -> int:
        """Until the operations counted pass the next multiple of the steps, or `end()`; that multiple."""
        began = time.monotonic()
        first = num_ops = self._observe().num_ops()
        while True:
            before = max(_num_ops(self._before), self._too_few)
            if num_ops < before:  # counters were made anew
                before = 0
            due = (before // self._steps + 1) * self._steps
            if num_ops >= due or self._ended.is_set():
                return due
            # Half of the time that it takes at the pace so far.
            done, passed_s = num_ops - first, time.monotonic() - began
            pause_s = (due - num_ops) * passed_s / (2 * done) if done > 0 else _LONGEST_LOOK_S
            self._ended.wait(min(max(pause_s, _SHORTEST_LOOK_S), _LONGEST_LOOK_S))
            num_ops = self._observe().num_ops()

    def _reach(self, operation: int) -> None:
        """Waits until that operation has ended here, if it comes to its end."""
        deadline = time.monotonic() + _REACH_S
        pause_s = _SHORTEST_LOOK_S
        while self._snapshot().operation < operation and time.monotonic() <= deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _share(self, operation: int) -> Share:
        """What this rank saw in the window that ends with `operation`, which has ended; the next one begins there.

        Kinds are copied one after the other, so the copy that told of the operation may lack earlier ones of another kind.
        """
        rank, remarks, now = self._mailbox.rank, [], self._snapshot()
        if now.operation < operation:
            remarks.append(
                f"rank {rank} had ended operation {now.operation} when rank 0 had ended {operation}"
            )
        try:
            now = now.until(operation)
        except EPArgumentError:
            remarks.append(
                f"rank {rank} was at operation {now.operation} before it heard that the window ends "
                f"with {operation}, which its ring no longer held; its window is longer"
            )
        try:
            window = now.since(self._before)
        except EPArgumentError:  # counters were made anew, so all that they hold is of this window
            window = now
        self._before = now
        return Share(summarize(window), tuple(remarks))

    def _observe(self) -> Observed:
        buffer = self._buffer()
        if buffer is not None:
            self._observed = replace(self._observed, counters=observe(buffer).counters)
        return self._observed

    def _snapshot(self) -> Snapshot:
        return self._observe().snapshot(wait=False)

    def _masked(self) -> tuple[int, ...]:
        """Whom the operations of this rank go on without."""
        buffer = self._buffer()
        return () if buffer is None else tuple(sorted(buffer.communicator.masks.known()))

    def _answer(self, share: Share) -> None:
        self._rounds.answer(codec.encode(share))

    def _leave(self) -> None:
        """This rank ends before the others; rank 0 is not to miss it."""
        try:
            self._rounds.leave(codec.encode(self._share(self._snapshot().operation)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the program ends
            say(
                f"rank {self._mailbox.rank} left without a last share: {reason(error)}",
                logging.INFO,
            )

    def _stop(self, error: Exception) -> None:
        """Says why; tells whoever would wait for this rank."""
        rank, level, why = self._mailbox.rank, logging.WARNING, reason(error)
        # The program did not wait for its last window, or rank 0's process ended a little earlier than this one.
        if self._left_behind or (rank != 0 and is_lost(error)):
            level = logging.INFO
        try:
            if rank != 0:
                self._answer(Share(None, (f"rank {rank} stopped: {why}",)))
            else:
                self._rounds.end(codec.encode(_Call(None, last=True)))
        except RuntimeError:
            # The store is gone and with it rank 0's process, or that says so itself.
            level = logging.INFO if rank else level
        say(f"stopped on rank {rank}: {why}; operations go on unwatched", level)


def _num_ops(snapshot: Snapshot) -> int:
    return sum(counters.ops for counters in snapshot.operations.values())


def _most_ops(now: Snapshot, before: Snapshot) -> int:
    """Operations of the kind of which there were most since `before`; all, if counters are new."""
    most = 0
    for kind, counters in now.operations.items():
        counted = before.operations[kind].ops if kind in before.operations else 0
        most = max(most, counters.ops - (counted if counted <= counters.ops else 0))
    return most


def _operation_before(snapshot: Snapshot, num_later: int) -> int | None:
    """Number of the operation that was followed by so many; `None` if the rings do not tell."""
    numbers = _ring_numbers(snapshot)
    if num_later >= numbers.size:
        return None
    operation = int(numbers[-1 - num_later])
    return operation if snapshot.holds_all_after(operation) else None


def _ring_numbers(snapshot: Snapshot) -> IntArray:
    """Numbers of the operations in the rings, ascending."""
    rings = [
        c.operations()[:, -1, c.ring_own_fields.index("op")] for c in snapshot.operations.values()
    ]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *rings]))


def _end_all() -> None:
    """The last windows of buffers that nobody destroyed, within the time for one."""
    ending = list(_running)
    deadline = time.monotonic() + _END_S
    for monitor in ending:
        monitor.end()
    for monitor in ending:
        monitor.close(max(0.0, deadline - time.monotonic()))
