"""`python -m deep_ep.diagnose show`: chooses windows, prints them, writes pages and pictures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.text import Text

from deep_ep.diagnose.cli.watch import heading, position
from deep_ep.diagnose.core.diagnosis import Diagnosis
from deep_ep.diagnose.render.terminal import report
from deep_ep.diagnose.storage.diagnosis_log import Log, Record
from deep_ep.diagnose.storage.loader import read_any
from deep_ep.errors import EPArgumentError

# Exit status when a window shown has verdicts and --check was given.
VERDICTS = 3


def show(given: argparse.Namespace) -> int:
    """Prints the windows asked for, and writes them to files.

    Returns:
        The exit status.

    Raises:
        EPArgumentError: nothing can be read, or what was asked for is not there.
        OSError: a file cannot be read or written.
    """
    log = read_any(given.path)
    chosen, why = _choose(given, log)
    if given.operation is not None:
        chosen = [_only_operation(record, given.operation) for record in chosen]
    console = Console(width=given.width)
    for record in chosen:
        console.print(heading(record, position(log, record), why))
        report(record.diagnosis, console)
        console.print()
    for remark in log.remarks:
        console.print(Text(f"note: {remark}", style="yellow"))
    _write_files(given, log, chosen, console)
    found = any(record.diagnosis.verdicts for record in chosen)
    return VERDICTS if given.check and found else 0


def _choose(given: argparse.Namespace, log: Log) -> tuple[list[Record], str]:
    """The windows to show, and why these in words."""
    records = list(log)
    if given.group is not None:
        records = [record for record in records if record.group == given.group]
    if not records:
        groups = ", ".join(sorted({record.group for record in log})) or "; ".join(log.remarks)
        raise EPArgumentError(
            f"{given.path}: no whole window of group {given.group!r}; there are: {groups}."
            if given.group is not None
            else f"{given.path}: no whole window: {groups}"
        )
    if given.window is None and len(records) > 1:
        with_verdicts = [record for record in records if record.diagnosis.verdicts]
        if with_verdicts:
            # Matrices are not in every record; those of the same verdicts will do.
            latest = with_verdicts[-1]
            drawn = [r for r in with_verdicts if _same_verdicts(r, latest) and _has_matrices(r)]
            if drawn and drawn[-1] is not latest:
                return drawn[-1:], "the last with matrices"
            return [latest], "the last with a verdict"
        return records[-1:], "the last; none has a verdict"
    if given.window == "last":
        return records[-1:], ""
    if given.window in (None, "all"):
        return records, ""
    numbered = [record for record in records if str(record.window) == given.window]
    if not numbered:
        numbers = sorted({record.window for record in records})
        raise EPArgumentError(
            f"{given.path}: --window is {given.window!r}; it must be last, all, or one of the "
            f"{len(numbers)} windows from {numbers[0]} to {numbers[-1]}."
        )
    return numbered, ""


def _same_verdicts(one: Record, other: Record) -> bool:
    """Whether they name the same; not counting in which operations."""
    return one.group == other.group and one.diagnosis.keys == other.diagnosis.keys


def _has_matrices(record: Record) -> bool:
    return any(np.isfinite(m.wait_us).any() for m in record.diagnosis.measured.values())


def _only_operation(record: Record, operation: str) -> Record:
    diagnosis = record.diagnosis
    if operation not in diagnosis.measured:
        there = ", ".join(diagnosis.measured) or "none"
        raise EPArgumentError(
            f"--operation is {operation!r}; window {record.window} has these: {there}."
        )
    return replace(
        record,
        diagnosis=replace(
            diagnosis,
            measured={operation: diagnosis.measured[operation]},
            verdicts=[v for v in diagnosis.verdicts if v.operation == operation],
            events=[e for e in diagnosis.events if e.operation == operation],
        ),
    )


def _write_files(
    given: argparse.Namespace, log: Log, chosen: Sequence[Record], console: Console
) -> None:
    if given.html is not None:
        from deep_ep.diagnose.render.html import write_page

        write_page(
            [_with_remarks(record.diagnosis, log) for record in chosen],
            given.html,
            title=chosen[-1].group,
            times=[record.time_s for record in chosen],
            block_of=[record.block_of for record in chosen],
        )
        console.print(Text(f"wrote {given.html}"))
    for picture in (given.png, given.svg):
        if picture is not None:
            from deep_ep.diagnose.render.figure import write_picture

            write_picture(_with_remarks(chosen[-1].diagnosis, log), picture)
            console.print(Text(f"wrote {picture}"))


def _with_remarks(diagnosis: Diagnosis, log: Log) -> Diagnosis:
    return replace(diagnosis, remarks=[*diagnosis.remarks, *log.remarks])
