"""Where reports are printed: a terminal, or a pipe or file, where nothing is cut."""

from __future__ import annotations

import shutil
import sys

from rich.console import Console

# Of a pipe or file: more columns than any table has.
_UNBOUNDED = 100_000


def standard_output(width: int | None = None) -> Console:
    """The console of a program, as wide as the terminal or `COLUMNS` say, unless a width is given.

    Without a terminal lines are as long as what they say.
    """
    if width is None and not sys.stdout.isatty():
        width = shutil.get_terminal_size((_UNBOUNDED, 0)).columns
    return Console(width=width)
