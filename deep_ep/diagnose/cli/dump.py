"""`python -m deep_ep.diagnose dump`: asks running processes for a dump."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.text import Text

from ..core.package import EPTransportError, hang_line, printable, request

# Exit status when a process that was asked has written nothing.
NO_ANSWER = 4


def dump(given: argparse.Namespace) -> int:
    """Asks, waits, and prints what was written; returns the exit status."""
    console = Console()
    failed = False
    # Who leads writes the files of all, and each process answers with all of them: each is named once.
    said: set[str] = set()
    for pid, connection in request.ask(given.whom, given.into):
        try:
            found = request.answer(pid, connection, given.timeout)
        except EPTransportError as error:
            lines, failed = [str(error)], True
        else:
            lines = []
            for folder, files in found.dumped.items():
                lines += files or [f"{folder} cannot be written; see the logs"]
                failed = failed or not files
            lines.append(hang_line(found.verdict))
        for line in [line for line in lines if line not in said] or ["the same"]:
            console.print(Text(f"process {pid}: {printable(line)}"), soft_wrap=True)
        said.update(lines)
    return NO_ANSWER if failed else 0
