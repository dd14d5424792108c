"""Windows judged by a process of its own: the same lines and records, and one sentence when it is gone."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.spawn
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deep_ep.base import codec
from deep_ep.diagnose.collect.rank_summary import summarize
from deep_ep.diagnose.live import window_log
from deep_ep.diagnose.live.judge_process import JudgeProcess
from deep_ep.diagnose.live.window_judge import Share, WindowJudge, WindowShares
from deep_ep.diagnose.storage import diagnosis_log
from deep_ep.testing.faults import SlowRank
from generator import simulate
from generator.machines import GPU
from support.launch import HANG_S

NUM_RANKS = 4


def window(number: int, slow: int | None = 2) -> WindowShares:
    faults = [] if slow is None else [SlowRank(slow, 50e-6)]
    own, *others = (Share(summarize(s)) for s in simulate(GPU, NUM_RANKS, 32, faults, seed=number))
    encoded = {rank: codec.encode(share) for rank, share in enumerate(others, 1)}
    return WindowShares(number, 100.0 + number, own, encoded, ["rank 9 is away"])


def judging(begun: WindowJudge) -> contextlib.closing[JudgeProcess]:
    return contextlib.closing(JudgeProcess(begun))


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "deep_ep.diagnose")
    # The label of a buffer is a number of those that this process has watched.
    monkeypatch.setattr(window_log, "_numbers", iter(range(100, 200)))


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return [(level, text.replace("buffer 101", "buffer 100")) for level, text in said]


def test_it_goes_on_where_a_judge_in_this_process_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    windows = [window(1), window(2), *(window(n, slow=None) for n in (3, 4))]
    here = WindowJudge(tmp_path / "here")
    outcomes = [here.judge(w) for w in windows]
    expected = lines(caplog)
    assert sum("Comp-Slow rank 2" in text for _, text in expected) == 2, "found, and resolved"
    begun = WindowJudge(tmp_path / "there")
    assert begun.judge(windows[0]) == outcomes[0]
    with judging(begun) as there:
        assert [there.judge(w) for w in windows[1:]] == outcomes[1:]
        assert there._process is not None
        maps = Path(f"/proc/{there._process.pid}/maps").read_text()
    assert there._judge is None, "it was judged in this process"
    assert "libtorch" not in maps, "it takes seconds and 200 MB to load"
    assert lines(caplog) == expected
    of_here, of_there = (list(diagnosis_log.read(tmp_path / name)) for name in ("here", "there"))
    assert [r.diagnosis.keys for r in of_here] == [r.diagnosis.keys for r in of_there]
    assert [(r.window, r.time_s) for r in of_there] == [(w.number, w.time_s) for w in windows]


def test_what_is_refused_or_fails_is_told_and_the_next_window_judged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = window(1)
    stopped = codec.encode(Share(None, ("rank 3 stopped",)))
    with judging(WindowJudge(None)) as judge:
        caplog.set_level(logging.WARNING, "deep_ep.diagnose")
        others = {**given.others, 1: b"no share", 3: stopped}
        assert judge.judge(replace(given, others=others)) == [3]
        with pytest.raises(RuntimeError, match="^AttributeError: .*summary"):
            judge.judge(replace(given, own=None))  # type: ignore[arg-type]
        assert judge.judge(window(2)) == []
    assert {level for level, _ in lines(caplog)} == {logging.WARNING}, "nobody asked for others"


def test_signals_to_all_processes_of_a_job_leave_it_alone() -> None:
    """A program may handle them, and go on."""
    with judging(WindowJudge(None)) as judge:
        judge.judge(window(1))
        assert judge._process is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            judge._process.send_signal(number)
        assert judge.judge(window(2)) == []


def test_a_process_that_was_killed_is_told_by_its_number() -> None:
    with judging(WindowJudge(None)) as judge:
        judge.judge(window(1))
        assert judge._process is not None
        judge._process.kill()
        said = f"the process that judges windows \\(pid {judge._process.pid}\\) has ended, with status -9"
        with pytest.raises(RuntimeError, match=said):
            judge.judge(window(2))


@pytest.mark.parametrize("interpreter", ["", "/nowhere/python", "/bin/false"])
def test_without_a_process_windows_are_judged_here(
    interpreter: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(multiprocessing.spawn, "get_executable", lambda: interpreter)
    with judging(WindowJudge(None)) as judge:
        judge.judge(window(1))
        said = [text for _, text in lines(caplog)]
        assert sum("judged in rank 0's own process: " in text for text in said) == 1, said
        assert any("Comp-Slow rank 2" in text for text in said)


def test_a_program_with_its_own_interpreter_in_it_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with judging(WindowJudge(None)) as judge:
        assert judge._process is None


def test_it_is_not_waited_for_at_the_end_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    with judging(WindowJudge(None)) as judge:
        judge.judge(window(1), lambda: True)
        assert judge._judge is not None, "the process had begun, which takes longer than this test"
    assert any("Comp-Slow rank 2" in text for _, text in lines(caplog))


def test_it_ends_when_the_program_has_ended() -> None:
    judge = JudgeProcess(WindowJudge(None))
    judge.judge(window(1))
    assert judge._process is not None
    judge._connection.close()
    assert judge._process.wait(HANG_S) == 0


def test_closing_leaves_no_process() -> None:
    """Also of one that has not begun yet."""
    judge = JudgeProcess(WindowJudge(None))
    assert judge._process is not None
    judge.close()
    with pytest.raises(ProcessLookupError):
        os.kill(judge._process.pid, 0)


def test_a_record_is_written_although_the_program_ended_meanwhile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge = JudgeProcess(WindowJudge(tmp_path))
    assert judge._process is not None
    judge._hand_over(lambda: False)
    judge._send(window(1))
    judge._connection.close()
    assert judge._process.wait(HANG_S) == 0
    assert [record.window for record in diagnosis_log.read(tmp_path)] == [1]
    assert capfd.readouterr().err == ""
