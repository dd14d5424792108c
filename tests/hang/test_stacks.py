"""A process as another one of its host sees it: its stacks, whatever holds its GIL, and how it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deep_ep.hang import stacks
from deep_ep.hang.states import Process, Thread
from support.waiting import eventually

_BUSY = """
import json, sys
from deep_ep.hang import request, stacks
def holds_the_gil():
    print(json.dumps(stacks.offer()), flush=True)
    return sum(range(1 << 40))
holds_the_gil()
"""


def start(text: str) -> tuple[subprocess.Popen[str], Any]:
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def functions(seen: tuple[Process, tuple[Thread, ...]]) -> list[str]:
    """Of the main thread of a process that is busy."""
    state, threads = seen
    assert state == "busy"
    return [frame.function for thread in threads[:1] for frame in thread.frames]


@pytest.mark.exhaustive
def test_the_stack_of_a_process_that_holds_its_gil_is_seen_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine a process may answer late; here it is waited for.
    for name in ("_PATIENCE_S", "_LONGEST_TURN_S"):
        monkeypatch.setattr(stacks, name, 5.0)
    process, offered = start(_BUSY)
    try:
        held = ["holds_the_gil", "<module>"]
        assert eventually(lambda: functions(stacks.look_at(process.pid, offered)) == held)
        with ThreadPoolExecutor(4) as others:
            looks = list(others.map(lambda _: stacks.look_at(process.pid, offered), range(4)))
        assert all(functions(seen) == held for seen in looks)
        assert stacks.look_at(process.pid, {**offered, "started": 1}) == ("gone", ())
        assert stacks.look_at(process.pid, {**offered, "space": 1}) == ("silent", ())
        assert stacks.look_at(process.pid, {**offered, "fd": -1}) == ("busy", ())
        assert stacks.look_at(process.pid, None) == ("silent", ())
        process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: stacks.look_at(process.pid, offered)[0] == "stopped")
    finally:
        process.kill()
        process.wait()
    assert stacks.look_at(process.pid, offered)[0] == "gone"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("pass", "exit status 0"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    ],
)
def test_how_a_process_has_ended_is_seen_until_its_parent_asks(end: str, said: str) -> None:
    begin = "import json; from deep_ep.hang import stacks; print(json.dumps(stacks.offer()), flush=True); input()"
    process, offered = start(f"{begin}\n{end}")
    assert process.stdin is not None
    assert stacks.exit_of(process.pid, offered) == ""
    process.stdin.write("\n")
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert stacks.exit_of(process.pid, offered) == said
    assert stacks.exit_of(process.pid, {**offered, "started": 1}) == ""
    assert stacks.exit_of(process.pid, None) == ""
    process.wait()
    assert stacks.exit_of(process.pid, offered) == ""


@pytest.mark.exhaustive
def test_nobody_is_sent_the_signal_who_does_not_handle_it() -> None:
    text = """
import json, time
from deep_ep.hang import stacks
print(json.dumps({**stacks.offer(), "fd": 0}), flush=True)
stacks.forget()
print("forgot", flush=True)
time.sleep(60)
"""
    process, offered = start(text)
    assert process.stdout is not None
    assert process.stdout.readline() == "forgot\n"
    try:
        assert stacks.look_at(process.pid, offered) == ("busy", ())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive
def test_a_program_that_uses_the_signal_keeps_it() -> None:
    text = """
import json, signal
from deep_ep.hang import request, stacks
signal.signal(stacks.SIGNAL, lambda *_: None)
print(json.dumps(stacks.offer()), flush=True)
"""
    process, offered = start(text)
    process.wait()
    assert offered["fd"] == -1
