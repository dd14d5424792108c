"""Every buffer watches itself: windows, verdicts and records without a line in the program.

`DEEP_EP_DIAGNOSE` starts one background thread per rank and buffer. Rank 0 says at which operation a
window ends; every rank rolls its counters back to that operation and posts what it sees; rank 0
judges, logs what changed and appends a record. Only the construction is collective.

Nothing in here may stop an operation: what fails is logged once, and the buffer goes on unwatched.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing.util
import os
import pickle
import queue
import socket
import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deep_ep import env, rendezvous
from deep_ep.diagnose.analyze.baseline import History
from deep_ep.diagnose.analyze.engine import judge
from deep_ep.diagnose.analyze.thresholds import MIN_OPERATIONS
from deep_ep.diagnose.collect.group_matrices import gather
from deep_ep.diagnose.collect.rank_summary import Summary, summarize
from deep_ep.diagnose.collect.snapshot import Observed, Snapshot, observe
from deep_ep.diagnose.live.mailbox import Rounds, is_lost, open_mailbox
from deep_ep.diagnose.render.change_log import Changes
from deep_ep.diagnose.storage.diagnosis_log import Record, Writer
from deep_ep.errors import EPArgumentError

if TYPE_CHECKING:
    from pathlib import Path

    from deep_ep.group import Group

# All of these are chosen. How long rank 0 waits for the others' shares of a window, of the last one,
# and for a rank that was silent before; and how long a rank waits to reach the end of a window.
_SHARES_S, _LAST_SHARES_S, _SILENT_S, _REACH_S = 5.0, 1.0, 0.1, 1.0
# How long the end of a buffer, or of the process, may take.
_END_S = 2.0
# Pauses between looks at the counters.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.02
# Matrices are recorded when verdicts change, and in every so manieth window.
_FULL_EVERY = 30

_log = logging.getLogger("deep_ep.diagnose")
_numbers = itertools.count()
_running: set[Monitor] = set()


@dataclass(frozen=True)
class _Call:
    """Rank 0 to another: a window ends with `operation`, or there is none; `last`: no more come."""

    operation: int | None
    last: bool


@dataclass(frozen=True)
class _Share:
    """A rank to rank 0: what it saw in a window, or nothing, because it stopped."""

    summary: Summary | None
    remarks: tuple[str, ...] = ()


def start(buffer: Any, group: Group, when: env.Diagnose) -> Monitor | None:
    """Watches a buffer whose counters are on. Collective; `None`, and a line in the log, if it fails."""
    try:
        return Monitor(buffer, group, when, env.diagnose_dir())
    except Exception as error:  # noqa: BLE001 - whatever it is, the buffer works without
        _say(f"off: {_reason(error)}", logging.INFO if group.rank else logging.WARNING)
        return None


class Monitor:
    """The watching thread of one rank's buffer. It keeps the counters alive, never the buffer."""

    def __init__(self, buffer: Any, group: Group, when: env.Diagnose, folder: Path | None) -> None:
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
        self._ended = False
        # Its put() may be called by a destructor; an Event's set() may not.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
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
        self._ended = True
        self._bell.put(None)

    def close(self, timeout_s: float = _END_S) -> None:
        """Ends this rank; waits at most so long for the last window."""
        self.end()
        self._thread.join(timeout_s)
        self._mailbox.close()

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
        jury = _Jury(self._rounds, self._folder)
        last = False
        while not last:
            now, operation, last = self._end_of_window()
            enough = _most_ops(now, self._before) >= MIN_OPERATIONS
            if not (enough or last):
                continue
            self._window += 1
            self._call(_Call(operation if enough else None, last))
            if enough:
                share = self._share(operation, now)
                jury.judge(self._window, share, _LAST_SHARES_S if last else _SHARES_S)

    def _follow(self) -> None:
        last = False
        while not last:
            self._window += 1
            data = self._rounds.await_call(self._window)
            if data is None:
                return
            call: _Call = pickle.loads(data)
            last = call.last
            if call.operation is not None:
                self._answer(self._share(call.operation, self._reach(call.operation)))

    def _end_of_window(self) -> tuple[Snapshot, int, bool]:
        """Waits for the end of a window: the counters then, its last operation, whether it is the last."""
        if self._when.mode == "async":
            self._pause(self._when.seconds)
            now, last = self._snapshot(), self._ended
            return now, now.operation, last
        due = self._pause_until_due()
        now = self._snapshot()
        num_ops = _num_ops(now)
        if num_ops < due:
            return now, now.operation, self._ended
        # So many may have come meanwhile that the rings no longer tell which one was due.
        operation = _operation_before(now, num_ops - due)
        if operation is None:
            operation = _operation_before(now, num_ops % self._steps)
        return now, now.operation if operation is None else operation, False

    def _pause_until_due(self) -> int:
        """Until the operations counted pass the next multiple of the steps, or `end()`; that multiple."""
        began = time.monotonic()
        first = num_ops = self._observe().num_ops()
        while True:
            before = _num_ops(self._before)
            if num_ops < before:  # counters were made anew
                before = 0
            due = (before // self._steps + 1) * self._steps
            if num_ops >= due or self._ended:
                return due
            # Half of the time that it takes at the pace so far.
            done, passed_s = num_ops - first, time.monotonic() - began
            pause_s = (due - num_ops) * passed_s / (2 * done) if done > 0 else _LONGEST_LOOK_S
            self._pause(min(max(pause_s, _SHORTEST_LOOK_S), _LONGEST_LOOK_S))
            num_ops = self._observe().num_ops()

    def _reach(self, operation: int) -> Snapshot:
        """The counters when that operation has ended here; earlier if it does not come to its end."""
        deadline = time.monotonic() + _REACH_S
        pause_s = _SHORTEST_LOOK_S
        while True:
            now = self._snapshot()
            if now.operation >= operation or time.monotonic() > deadline:
                return now
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _share(self, operation: int, now: Snapshot) -> _Share:
        """What this rank saw in the window that ends with `operation`; the next one begins there."""
        rank, remarks = self._mailbox.rank, []
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
        return _Share(summarize(window), tuple(remarks))

    def _observe(self) -> Observed:
        buffer = self._buffer()
        if buffer is not None:
            self._observed = replace(self._observed, counters=observe(buffer).counters)
        return self._observed

    def _snapshot(self) -> Snapshot:
        return self._observe().snapshot(wait=False)

    def _pause(self, seconds: float) -> None:
        if not self._ended:
            try:
                self._bell.get(timeout=seconds)
            except queue.Empty:
                return

    def _call(self, call: _Call) -> None:
        self._rounds.call(self._window, pickle.dumps(call))

    def _answer(self, share: _Share) -> None:
        self._rounds.answer(self._window, pickle.dumps(share))

    def _stop(self, error: Exception) -> None:
        """Says why; tells whoever would wait for this rank."""
        rank, level, reason = self._mailbox.rank, logging.WARNING, _reason(error)
        if rank != 0 and is_lost(error):
            # Its process is over, which happens a little earlier than that of the others.
            level = logging.INFO
        try:
            if rank != 0:
                self._answer(_Share(None, (f"rank {rank} stopped: {reason}",)))
            else:
                # The others wait for this call, or have had it and wait for the next.
                for _ in range(2):
                    self._call(_Call(None, last=True))
                    self._window += 1
        except RuntimeError:
            # The store is gone and with it rank 0's process, or that says so itself.
            level = logging.INFO if rank else level
        _say(f"stopped on rank {rank}: {reason}; operations go on unwatched", level)


class _Jury:
    """Rank 0: collects the shares of a window, judges, logs what changed, writes records."""

    def __init__(self, rounds: Rounds, folder: Path | None) -> None:
        number = next(_numbers)
        self._rounds = rounds
        self._group = f"{socket.gethostname()}-{os.getpid()}-{number}"
        self._label = f"buffer {number}: " if number else ""
        self._folder = folder
        self._writer: Writer | None = None
        self._changes = Changes()
        self._history = History()

    def judge(self, window: int, own: _Share, timeout_s: float) -> None:
        """One window, from this rank's share on."""
        shares = [own, *self._collect(window, timeout_s)]
        time_s = time.time()
        summaries = [share.summary for share in shares if share.summary is not None]
        diagnosis = judge(gather(summaries), None, self._history)
        silent = [
            f"rank {rank} has not reported since window {missed} "
            f"({time.strftime('%X', time.localtime(since))})"
            for rank, (missed, since) in self._rounds.silent.items()
        ]
        said = [remark for share in shares for remark in share.remarks]
        diagnosis = replace(diagnosis, remarks=[*diagnosis.remarks, *said, *silent])
        news = self._changes.verdicts(diagnosis)
        for line in (*news, *self._changes.remarks(silent)):
            _say(self._label + line)
        for line in self._changes.remarks(diagnosis.remarks, whatever_the_numbers=True):
            _say(self._label + line, logging.INFO)
        full = bool(news) or window % _FULL_EVERY == 1
        self._write(Record(diagnosis, time_s, window, self._group), full)

    def _collect(self, window: int, timeout_s: float) -> list[_Share]:
        """Shares of the other ranks, of those that come in time."""
        shares: list[_Share] = []
        for rank, data in self._rounds.collect(window, timeout_s, _SILENT_S).items():
            shares.append(pickle.loads(data))
            if shares[-1].summary is None:
                self._rounds.dismiss(rank)
        return shares

    def _write(self, record: Record, with_matrices: bool) -> None:
        if self._folder is None:
            return
        try:
            if self._writer is None:
                self._writer = Writer(self._folder, self._group)
            self._writer.write(record, with_matrices=with_matrices)
        except OSError as error:
            _say(f"{self._label}no more records: {_reason(error)}")
            self._folder = None


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
    rings = [
        c.operations()[:, -1, c.ring_own_fields.index("op")] for c in snapshot.operations.values()
    ]
    numbers = np.sort(np.concatenate([np.zeros(0, np.int64), *rings]))
    if num_later >= numbers.size:
        return None
    operation = int(numbers[-1 - num_later])
    return operation if snapshot.holds_all_after(operation) else None


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else "no message"
    return f"{type(error).__name__}: {text}"


def _say(line: str, level: int = logging.WARNING) -> None:
    """Warnings are for everybody: where nothing handles the logger, Python prints them to stderr."""
    if not sys.is_finalizing():
        _log.log(level, "deep_ep.diagnose: %s", line)


def _end_all() -> None:
    """The last windows of buffers that nobody destroyed, within the time for one."""
    ending = list(_running)
    deadline = time.monotonic() + _END_S
    for monitor in ending:
        monitor.end()
    for monitor in ending:
        monitor.close(max(0.0, deadline - time.monotonic()))
