"""Windows are judged in a process of their own, so that rank 0's program keeps its interpreter to itself.

A verdict takes tens of milliseconds, in groups of a thousand ranks a second. In a thread of rank 0 it would take the GIL
from the program meanwhile, and all ranks would wait for rank 0.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import multiprocessing
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..core.package import env
from .window_judge import WindowJudge, WindowShares
from .window_log import reason, say

# Run with a file descriptor and the places of modules. The program's own `__main__` is not imported, which would run a
# program that has no `if __name__ == "__main__"` once more. Nor are torch and what the packages around this module do
# with it: nothing that judges calls torch, which takes seconds and 200 MB to load. Terminals and schedulers signal all
# processes of a job, of which a program may handle what would end this one; it ends with the program.
_PROGRAM = """
import sys
sys.path[:] = sys.argv[2:]
import importlib.util, os, signal, types
os.nice({niceness})
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
sys.modules["torch"] = types.ModuleType("torch")
for package in {packages}:
    sys.modules[package] = importlib.util.module_from_spec(importlib.util.find_spec(package))
from {module} import serve
serve(int(sys.argv[1]))
"""
# The program goes first. Chosen, as is how often the end of the program is looked for while the process begins.
_NICENESS = 10
_LOOK_S = 0.05

_log = logging.getLogger("deep_ep.diagnose")


class JudgeProcess:
    """Has windows judged while the program runs; at its end, and where no process can be started, judges here."""

    def __init__(self, judge: WindowJudge) -> None:
        """Starts the process, and does not wait for it.

        Args:
            judge: of the group; the process goes on with it.
        """
        self._judge: WindowJudge | None = judge
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, theirs = multiprocessing.Pipe()
        try:
            self._process = _start(theirs)
        except OSError as error:
            self._stays_here(error)
        finally:
            theirs.close()

    def judge(
        self, window: WindowShares, has_ended: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """As `WindowJudge.judge`. Waits for it, and before the first window until the process has begun, without the GIL.

        Args:
            window: what was heard.
            has_ended: whether the program has. If so, a process that has not begun is not waited for.

        Raises:
            RuntimeError: the process has ended, or what it raised.
        """
        self._hand_over(has_ended)
        if self._judge is not None:
            return self._judge.judge(window)
        try:
            self._send(window)
            return self._answer()
        except (EOFError, OSError):
            assert self._process is not None
            self.close()
            raise RuntimeError(
                f"the process that judges windows (pid {self._process.pid}) has ended, with status "
                f"{self._process.returncode}"
            ) from None

    def close(self) -> None:
        """Ends the process, which has nothing to do between two windows."""
        self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _hand_over(self, has_ended: Callable[[], bool]) -> None:
        """To the process, once it has begun."""
        if self._judge is None or self._process is None:
            return
        while not self._connection.poll(_LOOK_S):
            if has_ended():
                return
        try:
            self._connection.recv()
            self._connection.send(self._judge)
        except (EOFError, OSError) as error:
            self.close()
            self._process = None
            self._stays_here(error)
        else:
            self._judge = None

    def _send(self, window: WindowShares) -> None:
        # Pickled, because both ends are of one program; what other ranks sent is bytes until `wire` reads it there.
        # Shares one by one: they are large in large groups, and pickling copies them with the GIL held.
        self._connection.send((replace(window, others={}), [*window.others]))
        for share in window.others.values():
            self._connection.send_bytes(share)

    def _answer(self) -> list[int]:
        said: Any
        while isinstance(said := self._connection.recv(), logging.LogRecord):
            if _log.isEnabledFor(said.levelno):
                _log.handle(said)
        if isinstance(said, list):
            return said
        raise RuntimeError(said)

    @staticmethod
    def _stays_here(error: Exception) -> None:
        say(f"windows are judged in rank 0's own process: {reason(error)}", logging.INFO)


def _start(connection: Connection) -> subprocess.Popen[bytes]:
    """A process that serves a connection.

    Raises:
        OSError: there can be none.
    """
    if getattr(sys, "frozen", False):
        raise OSError("a program with its own interpreter in it runs nothing else")
    file = connection.fileno()
    names = __name__.split(".")
    packages = [".".join(names[:n]) for n in range(1, len(names) - 1)]
    program = _PROGRAM.format(niceness=_NICENESS, packages=packages, module=__name__)
    return subprocess.Popen(
        [
            os.fsdecode(multiprocessing.spawn.get_executable() or ""),
            "-c",
            program,
            str(file),
            *(str(Path(place).absolute()) for place in sys.path),
        ],
        env=env.of_a_helper(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[file],
    )


def serve(file: int) -> None:
    """What the process does: judges windows until the other side closes the connection, or ends.

    Args:
        file: descriptor of the connection.
    """
    connection: Any = Connection(file)
    logging.raiseExceptions = False  # whoever would read a line may be gone
    # Lines go to the process that has handlers for them.
    queue: Any = SimpleNamespace(put_nowait=connection.send)
    _log.addHandler(logging.handlers.QueueHandler(queue))
    _log.propagate = False
    _log.setLevel(logging.INFO)
    with contextlib.suppress(EOFError, OSError):
        connection.send(os.getpid())
        judge = connection.recv()
        while True:
            window, ranks = connection.recv()
            others = {rank: connection.recv_bytes() for rank in ranks}
            connection.send(_answer(judge, replace(window, others=others)))


def _answer(judge: WindowJudge, window: WindowShares) -> list[int] | str:
    try:
        return judge.judge(window)
    except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 says it
        return reason(error)
