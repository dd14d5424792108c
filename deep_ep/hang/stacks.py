"""Python stacks of a process from outside, whatever holds its GIL.

A signal makes faulthandler write the stacks of all threads into a pipe of that process, from within the signal
handler. Another process of the same user and host sends the signal and opens the reading end through /proc.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import time
from typing import Any

from deep_ep.hang.states import Frame, Process, Thread

# Real-time signals are free for programs; if this one is taken, stacks are not to be had. Chosen.
SIGNAL = signal.SIGRTMAX - 3
# How long a process may take to write its stacks, and the most that is read. A pipe holds 64 KiB.
_PATIENCE_S, _PAUSE_S, _MOST_BYTES = 0.4, 0.02, 1 << 16
# How long one waits for others that look at the same process. Chosen.
_LONGEST_TURN_S = 1.2

_HEAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

_reading_end = -1


def offer() -> dict[str, int]:
    """Lets others of this host see the stacks of this process.

    Returns:
        What they need for that, plain data; "fd" is -1 if the program has the signal for itself.
    """
    global _reading_end
    if _reading_end < 0 and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        faulthandler.register(SIGNAL, file=writing, all_threads=True, chain=False)
        _reading_end = reading
    return {"fd": _reading_end, "started": started(os.getpid()), "space": _space()}


def forget() -> None:
    """In a forked child, which has the pipe of its parent."""
    global _reading_end
    if _reading_end >= 0:
        faulthandler.unregister(SIGNAL)
        _reading_end = -1


def look_at(pid: int, offered: Any) -> tuple[Process, tuple[Thread, ...]]:
    """What another process of this host is doing that does not answer.

    Args:
        pid: its number.
        offered: what `offer` returned there.

    Returns:
        As `process_of`; and its threads, the main thread first, if it runs.
    """
    process = process_of(pid, offered)
    fd = int(offered["fd"]) if process == "busy" else -1
    return process, _threads(pid, fd) if fd >= 0 and _handles_signal(pid) else ()


def process_of(pid: int, offered: Any) -> Process:
    """ "gone", "stopped" or "busy", or "silent" where it cannot be seen; of a process as in `look_at`."""
    begun = _begun(offered)
    if begun is None:
        return "silent"
    state = _field(pid, 3)
    if state is None or state in "ZX" or started(pid) != begun:
        return "gone"
    return "stopped" if state in "Tt" else "busy"


def exit_of(pid: int, offered: Any) -> str:
    """How a process as in `look_at` has ended: "exit status 1", "signal 9".

    Returns:
        Empty if it lives, its parent has asked for that already, or it is another user's.
    """
    status = _field(pid, 52)
    if status is None or started(pid) != _begun(offered):
        return ""
    # It is set a little before the process is a zombie.
    if _field(pid, 3) not in ("Z", "X") and status == "0":
        return ""
    code = int(status)
    if os.WIFSIGNALED(code):
        return f"signal {os.WTERMSIG(code)}"
    return f"exit status {os.WEXITSTATUS(code)}"


def _begun(offered: Any) -> int | None:
    """When a process began; `None` if it does not say so, or is in a container, where numbers are of other processes."""
    try:
        _, begun, space = (int(offered[name]) for name in ("fd", "started", "space"))
    except (TypeError, ValueError, KeyError):
        return None
    return begun if space == _space() else None


def _handles_signal(pid: int) -> bool:
    """Whether the signal would end the process instead."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
    except OSError:
        return False
    return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)


def _threads(pid: int, fd: int) -> tuple[Thread, ...]:
    try:
        end = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        _take_turns(end)
        _read(end)  # what an earlier look has left
        os.kill(pid, SIGNAL)
        text, deadline = b"", time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            more = _read(end)
            text += more
            if text and not more:
                break
        return parse(text.decode(errors="replace"))
    except OSError:
        return ()
    finally:
        os.close(end)


def _take_turns(end: int) -> None:
    """Returns once nobody else looks at this process; or he would read what this one has asked for.

    Raises:
        OSError: others look for too long.
    """
    deadline = time.monotonic() + _LONGEST_TURN_S
    while True:
        try:
            fcntl.flock(end, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _read(end: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(end, _MOST_BYTES)
    return b""


def parse(text: str) -> tuple[Thread, ...]:
    """The threads of a text of faulthandler, which has the main thread last; the main thread first."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head, frame = _HEAD.match(line), _FRAME.match(line)
        if head:
            threads.append((head[1], []))
        elif frame and threads:
            threads[-1][1].append(Frame(frame[3], frame[1], int(frame[2])))
    if threads:
        threads[-1] = ("MainThread", threads[-1][1])
    return tuple(
        Thread(name, tuple(frames))
        for name, frames in reversed(threads)
        if not any(_is_ours(frame) for frame in frames[-4:])
    )


def _is_ours(frame: Frame) -> bool:
    """Whether a thread of this package has begun there."""
    return frame.function in ("_run", "_run_aside") and frame.file.endswith(
        ("deep_ep/membership/loop.py", "live/monitor.py")
    )


def started(pid: int) -> int:
    """When a process began, clock ticks since the host did: another one with its number has another one. 0: there is none."""
    return int(_field(pid, 22) or 0)


def _space() -> int:
    """In which numbers of processes mean what they mean here."""
    return os.stat("/proc/self/ns/pid").st_ino


def _field(pid: int, number: int) -> str | None:
    """A field of /proc/PID/stat, counted from 1; `None` without that process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            behind_name = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return behind_name[number - 3]
