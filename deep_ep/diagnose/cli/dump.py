"""`python -m deep_ep.diagnose dump`: asks running processes for a dump."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..core.package import EPArgumentError, EPError, printable, request

# Exit status when a process that was asked has written nothing.
NO_ANSWER = 4


def dump(given: argparse.Namespace) -> int:
    """Asks, waits, and prints what was written; returns the exit status."""
    console = Console()
    failed = False
    # Who leads writes the files of all, and each process answers with all of them: each is named once.
    said: set[str] = set()
    for asked in [request.request_dump(pid, given.into) for pid in _pids(given.whom)]:
        try:
            answer = request.wait_for_answer(asked, given.timeout)
        except EPError as error:
            answer = request.Answer(asked.name, error=str(error))
        failed = failed or bool(answer.error)
        lines = (answer.error or "\n".join([*answer.files, answer.line])).splitlines()
        for line in [line for line in lines if line not in said] or ["the same"]:
            console.print(Text(f"process {asked.pid}: {printable(line)}"), soft_wrap=True)
        said.update(lines)
    return NO_ANSWER if failed else 0


def _pids(whom: str) -> list[int]:
    if whom.isdecimal() and not Path(whom).is_dir():
        return [int(whom)]
    found = [process.pid for process in request.processes(whom)]
    if not found:
        raise EPArgumentError(
            f"dump: no process of this user and host writes dumps into {whom!r}; name a process, or the "
            "directory of dumps of a running job (DEEP_EP_DUMP_SIGNAL must not be 0 there)."
        )
    return found
