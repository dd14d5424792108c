"""Appends records to a log: a line each, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ..core import safe_files
from ..core.package import EPArgumentError, printable
from . import record_layout
from .record import Record


class Writer:
    """Appends records of one group to `FOLDER/diagnose-GROUP.jsonl`; what a file name cannot hold becomes "-"."""

    def __init__(self, folder: Path | str, group: str) -> None:
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", group) or "group"
        self.path = Path(folder) / f"diagnose-{name}.jsonl"

    def write(self, record: Record, *, with_matrices: bool) -> None:
        """Appends one line, in one write, so that who follows the file meets whole lines.

        Raises:
            EPArgumentError: the name of the file is a link, or the record is longer than a line may be.
            OSError: the file cannot be written; nothing of the line is left in it.
        """
        line = record_layout.to_line(record, with_matrices=with_matrices).encode() + b"\n"
        if len(line) > record_layout.LONGEST_LINE:
            raise EPArgumentError(
                f"{printable(str(self.path))}: a record of {len(line)} bytes; a line has at most "
                f"{record_layout.LONGEST_LINE}, beyond which no reader goes. Write it without matrices."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with safe_files.open_to_append(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                # The program before this one was stopped in the middle of a line.
                line = b"\n" + line
            try:
                # A disk that is full takes a part of a line, and says so at the next one.
                while line:
                    line = line[file.write(line) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
