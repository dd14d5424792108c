"""Buffers that watch themselves: one line per cause, a record per window, and never a failure."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import deep_ep
from deep_ep.base import codec
from deep_ep.diagnose.analyze.engine import judge
from deep_ep.diagnose.analyze.thresholds import Thresholds
from deep_ep.diagnose.collect.fields import FIELDS
from deep_ep.diagnose.collect.rank_summary import KindSummary, summarize
from deep_ep.diagnose.core.causes import COMM_SLOW, COMP_SLOW
from deep_ep.diagnose.core.diagnosis import Diagnosis, Verdict
from deep_ep.diagnose.live import judge_process, monitor, window_judge, window_log
from deep_ep.diagnose.live.mailbox import Mailbox, Rounds
from deep_ep.diagnose.render import change_log
from deep_ep.diagnose.render.change_log import Changes, verdict_line
from deep_ep.diagnose.storage import diagnosis_log
from deep_ep.diagnose.storage.log_writer import Writer
from deep_ep.diagnose.storage.record import Record
from deep_ep.errors import EPArgumentError
from deep_ep.group import thread_groups
from deep_ep.observe.counters import RecvCounters
from deep_ep.testing.faults import SlowRank
from fixtures import OF_TWO_RANKS, SHAPE, exchange
from generator import simulate
from generator.machines import GPU
from support.exchange import buffer_for, ranks_for
from support.launch import DEVICE, HANG_S, on_threads, raise_failures, run_processes
from support.waiting import eventually

SLOW = "slow-rank=2:20ms"
CLOSE = monitor.Monitor.close

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="delays are injected on the cpu backend only; unset DEEP_EP_BACKEND"
)


@pytest.fixture(autouse=True)
def _nobody_watches_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(window_log, "_numbers", itertools.count())
    yield
    left = [] if eventually(lambda: not monitor._running) else list(monitor._running)
    # A test that failed keeps its buffers in its traceback: the tests after it are not to blame.
    monitor._running.clear()
    assert not left, "a watching thread is left"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank may answer late; here none is silent for that, and no last window is left out."""
    for name in ("_SHARES_S", "_LAST_SHARES_S"):
        monkeypatch.setattr(monitor, name, HANG_S)
    close = monitor.Monitor.close

    def close_patiently(self: monitor.Monitor) -> None:
        close(self, HANG_S if self._mailbox.rank == 0 else monitor._END_S)

    monkeypatch.setattr(monitor.Monitor, "close", close_patiently)


@pytest.fixture(autouse=True)
def _judged_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What judges is patched in this process, unless a test uses `a_process_judges`."""
    if "a_process_judges" in request.fixturenames:
        return

    def none(_: Any) -> Any:
        raise OSError("not in this test")

    monkeypatch.setattr(judge_process, "_start", none)


@pytest.fixture
def a_process_judges() -> None:
    """As it is for users."""


def somebody_will_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far longer than the others take to answer, and far less than they take to give up waiting for rank 0."""
    monkeypatch.setattr(monitor, "_SHARES_S", 2.0)
    monkeypatch.setattr(monitor, "_END_S", 6.0)


class Watched:
    """Runs an unmodified program with buffers that watch themselves; then what was said and written."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
    ) -> None:
        self._monkeypatch, self._caplog = monkeypatch, caplog
        self.folder = folder
        # Ranks that are threads wait for each other's interpreter: what is injected is larger.
        limits = Thresholds(delta_ns=10e6)
        monkeypatch.setattr(window_judge, "judge", lambda m, _, history: judge(m, limits, history))
        caplog.set_level(logging.INFO, "deep_ep.diagnose")

    def run(
        self,
        when: str,
        program: Callable[[int, deep_ep.Buffer], Any],
        faults: str = "",
        **buffer_arguments: Any,
    ) -> list[Any]:
        self._monkeypatch.setenv("DEEP_EP_DIAGNOSE", when)
        self._monkeypatch.setenv("DEEP_EP_DIAGNOSE_DIR", str(self.folder))
        self._monkeypatch.setenv("DEEP_EP_INJECT", faults)
        with ranks_for(SHAPE, **buffer_arguments) as ranks:
            return ranks.run(program)

    def lines(self, level: int = logging.WARNING) -> list[str]:
        """What anybody sees, or with INFO what who asks for it sees."""
        return [r.getMessage() for r in self._caplog.records if r.levelno >= level]

    def assert_said(self, *texts: str) -> None:
        """Anybody sees as many lines as there are texts, and each text in exactly one of them."""
        lines = self.lines()
        assert len(lines) == len(texts), lines
        for text in texts:
            assert sum(text in line for line in lines) == 1, lines

    def records(self) -> list[Record]:
        """Those that are written so far."""
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        # A folder without a record is refused, and so is a file; both are there a moment before.
        if not any(file.stat().st_size for file in files):
            return []
        return list(diagnosis_log.read(self.folder))


@pytest.fixture
def watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Watched:
    return Watched(monkeypatch, caplog, tmp_path / "records")


def rounds(number: int) -> Callable[[int, deep_ep.Buffer], None]:
    return lambda _, buffer: exchange(buffer, number)


# ---- what a program shows


def test_a_share_imports_nothing_while_operations_run(tmp_path: Path) -> None:
    """Others would wait for the rank: modules that NumPy imports late take 30 ms."""
    stored = tmp_path / "snapshot"
    stored.write_bytes(pickle.dumps(simulate(GPU, 4, 32, [SlowRank(2, 50e-6)], seed=1)[0]))
    program = f"""
import pathlib, pickle, sys
from deep_ep.base import codec
from deep_ep.diagnose.live import monitor
snapshot = pickle.loads(pathlib.Path({str(stored)!r}).read_bytes())
before = set(sys.modules)
codec.encode(monitor.Share(monitor.summarize(snapshot)))
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert done.stdout == "[]\n"


@pytest.mark.usefixtures("a_process_judges")
def test_windows_are_judged_in_another_process_while_the_program_runs(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Rounds.answer

    def plant(self: Rounds, data: bytes) -> None:
        answer(self, b"no share" if (self._mailbox.rank, self._taken) == (3, 1) else data)

    monkeypatch.setattr(Rounds, "answer", plant)
    meet = threading.Barrier(SHAPE.num_ranks, timeout=HANG_S)

    def program(rank: int, buffer: deep_ep.Buffer) -> None:
        for number in (1, 2):
            exchange(buffer, 20)
            if rank == 0:
                assert eventually(lambda n=number: len(watched.records()) >= n)
            meet.wait()

    watched.run("sync:40", program, SLOW)
    said = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("Comp-Slow rank 2" in r.getMessage() for r in said)
    assert any("what came for rank 3 is left out" in r.getMessage() for r in said)
    assert {r.process for r in said}.isdisjoint({os.getpid()})
    records = watched.records()
    assert [bool(record.diagnosis.hosts[3]) for record in records] == [False, True]


@pytest.mark.parametrize("when", ["sync:40", "async:0.3", "1"])
def test_a_slow_rank_is_named_in_exactly_one_line(watched: Watched, when: str) -> None:
    watched.run(when, rounds(60), SLOW)
    (line,) = watched.lines()
    assert line.startswith("deep_ep.diagnose: Comp-Slow rank 2 (")
    assert "cpu:2): late, " in line
    assert " us (95 %: " in line
    assert " per operation" in line
    assert "; next: " in line
    written = watched.records()
    assert (COMP_SLOW, 2) in written[0].diagnosis.keys
    assert [record.window for record in written] == list(range(1, len(written) + 1))


def test_a_healthy_program_shows_nothing_but_has_its_records(watched: Watched) -> None:
    watched.run("sync:40", rounds(60))
    assert watched.lines() == []
    written = watched.records()
    assert len(written) == 3
    assert all(not record.diagnosis.verdicts for record in written)
    assert sum(r.diagnosis.measured["dispatch"].num_operations for r in written) == 60


def test_matrices_are_written_when_verdicts_change_and_seldom_else(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, bool]] = []

    def note(_: Any, record: Record, *, with_matrices: bool) -> None:
        written.append((record.window, with_matrices))

    monkeypatch.setattr(Writer, "write", note)
    monkeypatch.setattr(window_log, "_FULL_EVERY", 3)

    def program(_: int, buffer: deep_ep.Buffer) -> None:
        exchange(buffer, 20)
        buffer.communicator.before_operation.clear()
        exchange(buffer, 80)

    watched.run("sync:40", program, SLOW)
    found, gone = watched.lines()
    assert found.startswith("deep_ep.diagnose: Comp-Slow rank 2 (")
    assert gone.startswith("deep_ep.diagnose: resolved: Comp-Slow rank 2 (")
    assert written == [(1, True), (2, False), (3, True), (4, True), (5, False)]


def test_without_a_folder_nothing_is_written(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(monitor.env, "diagnose_dir", lambda: None)
    watched.run("sync:40", rounds(40), SLOW)
    assert len(watched.lines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["sync:30", "async:0.05"])
def test_windows_end_at_the_same_operation_on_every_rank(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Kinds of operation are copied one after the other, and operations go on meanwhile."""
    ends: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(SHAPE.num_ranks)}
    summarize, copy = monitor.summarize, RecvCounters.snapshot

    def note(window: Any) -> Any:
        counted = [c.ops for c in window.operations.values()]
        ends[window.rank].append((window.operation, *counted))
        return summarize(window)

    def copy_slowly(counters: RecvCounters, *, wait: bool = True) -> Any:
        time.sleep(0.01)
        return copy(counters, wait=wait)

    monkeypatch.setattr(monitor, "summarize", note)
    monkeypatch.setattr(RecvCounters, "snapshot", copy_slowly)
    watched.run(when, rounds(100))
    assert all(of_rank == ends[0] for of_rank in ends.values())
    for _, dispatches, combines in ends[0][:-1]:
        assert abs(dispatches - combines) <= 1
    if when == "sync:30":
        assert sum(dispatches for _, dispatches, _ in ends[0]) == 100
        assert all((dispatches + combines) % 30 == 0 for _, dispatches, combines in ends[0][:-1])


def test_too_few_operations_are_no_window(watched: Watched) -> None:
    watched.run("async:0.05", lambda _, buffer: (exchange(buffer, 7), time.sleep(0.3)), SLOW)
    assert watched.records() == []
    assert watched.lines() == []


def test_a_window_with_too_few_of_each_kind_is_looked_at_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normal mode counts more kinds than two; a thread that looks on and on takes the interpreter."""
    most = mock.Mock(return_value=0)
    monkeypatch.setattr(monitor, "_most_ops", most)
    watched.run("sync:16", lambda _, buffer: (exchange(buffer, 20), time.sleep(0.3)))
    assert most.call_count <= 3, "operations 16 and 32, and the end"


def test_a_buffer_that_is_dropped_is_judged_once_more(watched: Watched) -> None:
    watched._monkeypatch.setenv("DEEP_EP_DIAGNOSE", "async:600")
    watched._monkeypatch.setenv("DEEP_EP_INJECT", SLOW)

    def program(group: Any) -> None:
        buffer = buffer_for(SHAPE, group)
        exchange(buffer, 10)
        group.barrier()  # views of the others' memory must not go while they still write

    on_threads(program, thread_groups(SHAPE.num_ranks))
    gc.collect()
    assert eventually(lambda: not monitor._running)
    (line,) = watched.lines()
    assert "Comp-Slow rank 2" in line


def test_counters_made_anew_begin_a_new_window(watched: Watched) -> None:
    def program(_: int, buffer: deep_ep.Buffer) -> None:
        exchange(buffer, 30)
        buffer.enable_counters(ring=128)
        exchange(buffer, 50)

    watched.run("sync:40", program, SLOW)
    assert len(watched.lines()) == 1, watched.lines()
    assert watched.records()[-1].diagnosis.measured["dispatch"].num_operations > 0


def test_a_window_that_rings_hardly_tell_of_any_more_ends_later(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 looks late, a window of the operations that are left in the rings is too short to be judged."""
    looked, may_look = monitor.Monitor._pause_until_due, threading.Event()

    def late(self: monitor.Monitor) -> int:
        due = looked(self)
        may_look.wait(HANG_S)
        return due

    monkeypatch.setattr(monitor.Monitor, "_pause_until_due", late)

    def program(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.enable_counters(ring=64)
        # Of the first 40, the rings hold the last 4.
        exchange(buffer, 50)
        may_look.set()

    watched.run("sync:40", program, SLOW)
    assert watched.records()
    for record in watched.records():
        assert record.diagnosis.measured["dispatch"].num_operations >= 8


def test_a_rank_whose_ring_ended_too_soon_says_so(watched: Watched) -> None:
    def program(rank: int, buffer: deep_ep.Buffer) -> Any:
        buffer.enable_counters(ring=4)
        exchange(buffer, 20)
        (watching,) = buffer.communicator.watchers
        if rank == 3:
            return watching._share(watching._snapshot().operation - 20).remarks
        return ()

    remarks = watched.run("async:600", program)
    assert "its ring no longer held" in remarks[3][0]


# ---- failures


def stopped_once(watched: Watched, rank: int, reason: str) -> None:
    (line,) = watched.lines()
    assert line.startswith(f"deep_ep.diagnose: stopped on rank {rank}: ")
    assert reason in line
    assert "operations go on" in line


def test_a_judge_that_fails_is_reported_once_and_stops_watching(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such matrix")

    monkeypatch.setattr(window_judge, "judge", fail)
    watched.run("sync:40", rounds(80))
    stopped_once(watched, 0, "ValueError: no such matrix")


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
def test_a_store_that_is_gone_stops_the_rank_and_no_operation(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    post = Mailbox.post

    def fail(self: Mailbox, key: str, data: bytes) -> None:
        if self.rank == broken and not key.startswith("call/") == (broken != 0):
            raise RuntimeError("Broken pipe")
        post(self, key, data)

    monkeypatch.setattr(Mailbox, "post", fail)
    somebody_will_be_silent(monkeypatch)
    watched.run("sync:40", rounds(80))
    if broken == 0:
        stopped_once(watched, 0, "RuntimeError: Broken pipe")
    else:
        (line,) = watched.lines()
        assert "rank 3 has not reported since window 1" in line
        assert any("stopped on rank 3" in line for line in watched.lines(logging.INFO))


def test_a_rank_that_outlives_the_store_does_not_complain(watched: Watched) -> None:
    """Rank 0's process ends first and takes the store along; that is no fault of this one."""
    lost = torch.distributed.DistNetworkError("Failed to recv, got 0 bytes")

    def program(rank: int, buffer: deep_ep.Buffer) -> None:
        exchange(buffer, 4)
        (watching,) = buffer.communicator.watchers
        if rank == 2:
            watching._stop(lost)

    watched.run("async:600", program)
    assert watched.lines() == []


def test_a_program_that_does_not_wait_for_its_last_window_does_not_complain(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_of_window = monitor.Monitor._end_of_window

    def too_late(self: monitor.Monitor) -> Any:
        end = end_of_window(self)
        assert self._mailbox._closed.wait(HANG_S)
        return end

    monkeypatch.setattr(monitor.Monitor, "_end_of_window", too_late)
    monkeypatch.setattr(monitor.Monitor, "close", lambda self: CLOSE(self, 0.1))
    watched.run("async:600", rounds(20))
    assert watched.lines() == []
    assert any("stopped on rank 0" in line for line in watched.lines(logging.INFO))


def test_a_rank_that_fails_tells_rank_0_which_goes_on_with_the_others(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    summarize = monitor.summarize

    def fail(window: Any) -> Any:
        if window.rank == 3:
            raise MemoryError("no room")
        return summarize(window)

    monkeypatch.setattr(monitor, "summarize", fail)
    watched.run("sync:40", rounds(80), SLOW)
    watched.assert_said("stopped on rank 3: MemoryError: no room", "Comp-Slow rank 2")
    for record in watched.records():
        assert any("rank 3" in remark for remark in record.diagnosis.remarks)
        assert record.diagnosis.hosts[3] == ""


def test_windows_go_on_without_a_masked_rank_and_with_it_when_it_is_back(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and stands still; who waits for its share waits for ever."""
    answer, is_masked = monitor.Monitor._answer, threading.Event()

    def answer_unless_masked(self: Any, share: Any) -> None:
        if self._mailbox.rank != 3 or not is_masked.is_set():
            answer(self, share)

    monkeypatch.setattr(monitor.Monitor, "_answer", answer_unless_masked)
    monkeypatch.setattr(monitor, "_SHARES_S", 3600.0)
    meet = threading.Barrier(SHAPE.num_ranks, timeout=120)

    def window(rank: int, buffer: deep_ep.Buffer, number: int) -> None:
        """A monitor that is late skips windows, so each is waited for."""
        if rank != 3 or not is_masked.is_set():
            exchange(buffer, 20)
        if rank == 0:
            assert eventually(lambda: len(watched.records()) >= number)
        meet.wait()

    def program(rank: int, buffer: deep_ep.Buffer) -> None:
        window(rank, buffer, 1)
        is_masked.set()
        if rank != 3:
            buffer.low_latency_update_mask_buffer(3, True)
        for number in (2, 3, 4):
            window(rank, buffer, number)
        is_masked.clear()
        meet.wait()
        buffer.low_latency_clean_mask_buffer()
        for number in (5, 6):
            window(rank, buffer, number)

    watched.run("sync:40", program, SLOW, enable_shrink=True)
    lines = watched.lines()
    assert sum("rank 3 is masked; windows go on without it" in line for line in lines) == 1
    assert not any("has not reported" in line for line in lines)
    records = watched.records()
    has_rank_3 = [bool(record.diagnosis.hosts[3]) for record in records]
    assert has_rank_3 == [True, False, False, False, True, True]
    # Other programs on the machine may hide it from a window of twenty rounds, not from three.
    assert any((COMP_SLOW, 2) in record.diagnosis.keys for record in records[1:4])


def test_records_go_on_when_a_full_disk_has_room_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer.write

    def fail(self: Writer, record: Record, *, with_matrices: bool) -> None:
        if record.window in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, record, with_matrices=with_matrices)

    monkeypatch.setattr(Writer, "write", fail)
    watched.run("sync:40", rounds(100))
    full, again = watched.lines()
    assert "window 2 cannot be recorded: OSError: [Errno 28] No space left on device" in full
    assert again.endswith("windows are recorded again; 2 from window 2 to 3 are missing")
    written = watched.records()
    assert [record.window for record in written] == [1, 4, 5]
    assert np.isfinite(written[1].diagnosis.measured["dispatch"].wait_us).any(), "what was missed"


def test_a_folder_that_is_removed_is_made_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Writer.write

    def write_and_remove(self: Writer, record: Record, **how: Any) -> None:
        write(self, record, **how)
        if record.window == 1:
            shutil.rmtree(watched.folder)

    monkeypatch.setattr(Writer, "write", write_and_remove)
    watched.run("sync:40", rounds(60))
    assert watched.lines() == []
    assert [record.window for record in watched.records()] == [2, 3]


class Malicious:
    """What an outsider would have rank 0 run."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def test_what_was_planted_for_rank_0s_word_is_refused_and_the_rank_reports_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "it ran"
    wait = Mailbox.wait

    def plant(self: Mailbox, key: str, timeout_s: float | None) -> bytes | None:
        data = wait(self, key, timeout_s)
        return pickle.dumps(Malicious(mark)) if key in ("call/1/2", "call/2/2") else data

    monkeypatch.setattr(Mailbox, "wait", plant)
    somebody_will_be_silent(monkeypatch)
    watched.run("sync:40", rounds(60))
    assert not mark.exists()
    watched.assert_said(
        "rank 0's word on a window is left out: ", "rank 2 has not reported since window 1"
    )
    assert [record.diagnosis.hosts[2] == "" for record in watched.records()] == [True, True, False]


def test_a_share_of_another_rank_or_of_too_many_operations_is_refused() -> None:
    own, other = (summarize(snapshot) for snapshot in simulate(GPU, 2, 20, seed=1))
    limits = window_judge.ShareLimits(window_judge.Share(own))
    assert limits.share_of(1, codec.encode(window_judge.Share(other)), "here").summary is not None
    with pytest.raises(EPArgumentError, match="here: the share is of rank 1 of 2; it must be of"):
        limits.share_of(0, codec.encode(window_judge.Share(other)), "here")
    many = np.arange(window_judge._LEAST_OPERATIONS + 1)

    def repeated(of_kind: KindSummary) -> KindSummary:
        series = {row.name: getattr(of_kind, row.name) for row in FIELDS if row.is_per_operation}
        longer = {name: np.resize(x, (many.size, *x.shape[1:])) for name, x in series.items()}
        return replace(of_kind, ops=many, **longer)

    long = replace(other, kinds={kind: repeated(k) for kind, k in other.kinds.items()})
    with pytest.raises(EPArgumentError, match="2049 operations of one kind; at most 2048"):
        limits.share_of(1, codec.encode(window_judge.Share(long)), "here")


def test_a_mailbox_that_does_not_open_leaves_the_buffer_unwatched(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(monitor, "open_mailbox", fail)
    watched.run("sync:40", rounds(2))
    (line,) = watched.lines()
    assert line == "deep_ep.diagnose: off: RuntimeError: no route to host"


def test_ranks_that_disagree_about_watching_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        deep_ep.base.env.Variable,
        "text",
        lambda self, text=deep_ep.base.env.Variable.text: (
            "sync:7"
            if self.name == "DEEP_EP_DIAGNOSE" and "rank1" in threading.current_thread().name
            else text(self)
        ),
    )
    with pytest.raises(EPArgumentError, match="DEEP_EP_DIAGNOSE is '0' on rank.*'sync:7' on rank"):
        ranks_for(SHAPE)


# ---- the whole process

PROGRAM = """
import os, sys, time, torch, torch.distributed as dist, deep_ep
from deep_ep.diagnose.live import monitor
rank, num_ranks, store, destroys_group = int(sys.argv[1]), 3, sys.argv[2], sys.argv[3]
stays_s = float(sys.argv[4])
if sys.argv[5]:
    monitor._END_S, monitor._LAST_SHARES_S = 0.6, 0.2
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
size = deep_ep.Buffer.get_low_latency_rdma_size_hint(32, 512, num_ranks, 6)
buffer = deep_ep.Buffer(dist.group.WORLD, 0, size, low_latency_mode=True, num_qps_per_rank=2)
x = torch.ones(32, 512, dtype=torch.bfloat16)
topk_idx = torch.arange(64).reshape(32, 2) % 6
for _ in range(30):
    received, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 32, 6, use_fp8=False)
    buffer.low_latency_combine(received, topk_idx, torch.ones(32, 2), handle)
dist.barrier()
time.sleep(stays_s)
if destroys_group:
    dist.destroy_process_group()
print("end of program", flush=True)
"""


def run_program(
    folder: Path,
    *,
    destroys_group: bool,
    faults: str = "",
    stays_s: tuple[float, ...] = (0, 0, 0),
    in_haste: bool = False,
) -> list[str]:
    """Runs PROGRAM in three processes, the records into `folder`; what each wrote to standard error."""
    store = f"file://{folder}/store"
    if destroys_group:  # and with it, in rank 0, what other ranks are connected to
        with socket.create_server(("127.0.0.1", 0)) as free:
            store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "DEEP_EP_DIAGNOSE": "1",
        "DEEP_EP_DIAGNOSE_DIR": str(folder / "records"),
        "DEEP_EP_INJECT": faults,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), store, "destroy" * destroys_group]
            + [str(stays_s[rank]), "haste" * in_haste],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert [out for out, _ in outputs] == ["end of program\n"] * 3
    return [err for _, err in outputs]


@pytest.mark.exhaustive
@pytest.mark.parametrize("destroys_group", [False, True], ids=["as it is", "destroys its group"])
def test_a_process_that_never_destroys_its_buffer_reports_and_exits(
    tmp_path: Path, destroys_group: bool
) -> None:
    first, *others = run_program(tmp_path, destroys_group=destroys_group, faults="slow-rank=1:20ms")
    # A busy machine may make other ranks late, too, but nothing else is said.
    lines = first.splitlines()
    assert all(line.startswith("deep_ep.diagnose: Comp-Slow rank ") for line in lines), lines
    assert sum(line.startswith("deep_ep.diagnose: Comp-Slow rank 1 (") for line in lines) == 1
    assert others == ["", ""]
    (file,) = (tmp_path / "records").iterdir()
    assert json.loads(file.read_text())["window"] == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("stays_s", [(1.5, 0, 0), (0, 1, 1.5)], ids=["rank 0 last", "rank 0 first"])
def test_ranks_that_end_long_after_each_other_say_nothing_and_are_all_judged(
    tmp_path: Path, stays_s: tuple[float, ...]
) -> None:
    said = run_program(tmp_path, destroys_group=False, stays_s=stays_s, in_haste=True)
    lines = [line for err in said for line in err.splitlines()]
    # A busy machine may make ranks late.
    assert [line for line in lines if "-Slow " not in line] == []
    (record,) = diagnosis_log.read(tmp_path / "records")
    assert "" not in record.diagnosis.hosts
    assert record.diagnosis.measured["dispatch"].num_operations == 30


_kept: list[deep_ep.Buffer] = []


def _leave_a_buffer(rank: int, group: Any) -> None:
    torch.set_num_threads(1)
    buffer = buffer_for(OF_TWO_RANKS, group)
    exchange(buffer, 12)
    _kept.append(buffer)  # a reference that outlives the function, as in a module of a program


def test_a_process_of_multiprocessing_reports_at_its_end_too(tmp_path: Path) -> None:
    raise_failures(
        run_processes(
            _leave_a_buffer,
            2,
            env={"DEEP_EP_DIAGNOSE": "async:600", "DEEP_EP_DIAGNOSE_DIR": str(tmp_path)},
        )
    )
    (record,) = diagnosis_log.read(tmp_path)
    assert record.diagnosis.measured["dispatch"].num_operations == 12
    assert "" not in record.diagnosis.hosts


# ---- what is said


def verdict(**fields: Any) -> Verdict:
    given = {
        "kind": COMP_SLOW, "cause": "late", "operation": "dispatch", "rank": 3, "edge": None,
        "effect_us": 2013.0, "share": 0.98, "seen_in": 1.0, "where": "host7 cuda:3",
        "interval_us": (1990.0, 2040.0), "next_step": "Profile rank 3.", **fields,
    }  # fmt: skip
    return Verdict(**given)


def diagnosis(*verdicts: Verdict) -> Diagnosis:
    return Diagnosis({}, verdicts, [])


def test_the_line_of_a_cause() -> None:
    slow, in_combine = verdict(saving_us=1800.0), verdict(operation="combine", effect_us=12.0)
    assert verdict_line(diagnosis(), [slow, in_combine]) == (
        "Comp-Slow rank 3 (host7 cuda:3): late, dispatch +2,013 us (95 %: 1,990 to 2,040) per "
        "operation, 98 % of all waiting; combine +12 us (95 %: 1,990 to 2,040) per operation, 98 % "
        "of all waiting; without it: 1,800 us less per operation; next: Profile rank 3"
    )
    path = verdict(
        kind=COMM_SLOW, cause="path", rank=None, edge=(2, 5), where="", next_step="",
        interval_us=(float("nan"),) * 2, share=float("nan"),
    )  # fmt: skip
    assert verdict_line(diagnosis(), [path]) == (
        "Comm-Slow path 2 > 5: path, dispatch +2,013 us per operation"
    )


def test_a_cause_is_said_once_and_gone_when_it_stays_away() -> None:
    said = Changes()
    slow, other = verdict(), verdict(rank=1, where="")
    assert [line[:16] for line in said.verdicts(diagnosis(slow))] == ["Comp-Slow rank 3"]
    assert said.verdicts(diagnosis(replace(slow, effect_us=5.0, operation="combine"))) == []
    assert said.verdicts(diagnosis()) == [], "one window without it may be chance"
    assert said.verdicts(diagnosis(slow)) == []
    assert [line[:16] for line in said.verdicts(diagnosis(slow, other))] == ["Comp-Slow rank 1"]
    lines = [
        line for _ in range(change_log.WINDOWS_WITHOUT) for line in said.verdicts(diagnosis(other))
    ]
    assert lines == ["resolved: Comp-Slow rank 3 (host7 cuda:3): late"]
    assert len(said.verdicts(diagnosis(slow, other))) == 1, "it came back"


def test_remarks_are_made_once() -> None:
    said = Changes()
    assert said.remarks(["rank 3 is away since 12:30", "x"]) == ["rank 3 is away since 12:30", "x"]
    assert said.remarks(["rank 4 is away since 12:30", "x"]) == ["rank 4 is away since 12:30"]
    assert said.remarks(["only 7 operations"], whatever_the_numbers=True) == ["only 7 operations"]
    assert said.remarks(["only 12 operations"], whatever_the_numbers=True) == []
