"""What rank 0 says of the windows of one group: lines in the log when something changes, and records."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.diagnosis import Diagnosis
from ..core.package import EPError
from ..render.change_log import Changes
from ..storage.log_writer import Writer
from ..storage.record import Record

# Matrices are recorded when verdicts change, and in every so manieth window.
_FULL_EVERY = 30

_log = logging.getLogger("deep_ep.diagnose")
_numbers = itertools.count()


class WindowLog:
    """Of one group, on its rank 0."""

    def __init__(self, folder: Path | None) -> None:
        """Nothing is written yet.

        Args:
            folder: where records go; `None`: nowhere.
        """
        number = next(_numbers)
        self._group = f"{socket.gethostname()}-{os.getpid()}-{number}"
        self._label = f"buffer {number}: " if number else ""
        self._folder = folder
        self._unwritten: list[int] = []
        self._writer: Writer | None = None
        self._changes = Changes()

    def tell(
        self,
        window: int,
        time_s: float,
        diagnosis: Diagnosis,
        *,
        refused: Sequence[str] = (),
        absent: Sequence[str] = (),
    ) -> None:
        """One window: what is new in it.

        Args:
            window: its number, from 1.
            time_s: when it ended, seconds since the epoch.
            diagnosis: of the window.
            refused: why answers of ranks were left out.
            absent: which ranks are not in it, and why.
        """
        remarks = [*diagnosis.remarks, *refused, *absent]
        diagnosis = replace(diagnosis, remarks=remarks)
        news = self._changes.verdicts(diagnosis)
        for line in news:
            say(self._label + line)
        self.tell_missing(refused, absent)
        for line in self._changes.remarks(remarks, whatever_the_numbers=True):
            say(self._label + line, logging.INFO)
        full = bool(news or self._unwritten) or window % _FULL_EVERY == 1
        self._write(Record(diagnosis, time_s, window, self._group), full)

    def tell_missing(self, refused: Sequence[str], absent: Sequence[str]) -> None:
        """What is new of the ranks that are left out or missing; also where there is nothing to judge."""
        refused = self._changes.remarks(refused, whatever_the_numbers=True)
        for line in (*refused, *self._changes.remarks(absent)):
            say(self._label + line)

    def _write(self, record: Record, with_matrices: bool) -> None:
        if self._folder is None:
            return
        try:
            if self._writer is None:
                self._writer = Writer(self._folder, self._group)
            self._writer.write(record, with_matrices=with_matrices)
        except (OSError, EPError) as error:
            if not self._unwritten:
                say(
                    f"{self._label}window {record.window} cannot be recorded: {reason(error)}; "
                    "tried again with every window"
                )
            self._unwritten.append(record.window)
            return
        if self._unwritten:
            say(
                f"{self._label}windows are recorded again; {len(self._unwritten)} from window "
                f"{self._unwritten[0]} to {self._unwritten[-1]} are missing"
            )
            self._unwritten = []


def silence(silent: Mapping[int, tuple[int, float]]) -> list[str]:
    """Which ranks have not answered, and since when; of `mailbox.Rounds.silent`."""
    return [
        f"rank {rank} has not reported since window {missed} "
        f"({time.strftime('%X', time.localtime(since))})"
        for rank, (missed, since) in silent.items()
    ]


def say(line: str, level: int = logging.WARNING) -> None:
    """Warnings are for everybody: where nothing handles the logger, Python prints them to stderr."""
    if not sys.is_finalizing():
        _log.log(level, "deep_ep.diagnose: %s", line)


def reason(error: Exception) -> str:
    """One line of an error."""
    text = str(error).splitlines()[0] if str(error) else "no message"
    return f"{type(error).__name__}: {text}"
