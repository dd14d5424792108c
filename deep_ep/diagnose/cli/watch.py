"""`python -m deep_ep.diagnose watch`: follows a running job and tells what changes."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..core.package import EPArgumentError
from ..render import wording
from ..render.change_log import Changes
from ..render.terminal import render, report, standard_output
from ..storage.log_follower import Follower
from ..storage.record import Record
from ..storage.record_layout import FILE_PATTERN

# Above the heatmap a terminal shows so many of the latest changes.
_RECENT_CHANGES = 6


class _Watched:
    """What a running job has said so far; `latest` is the latest record of each group."""

    def __init__(self) -> None:
        self.latest: dict[str, Record] = {}
        self._changes: dict[str, Changes] = {}

    def take(self, record: Record) -> list[str]:
        """Lines that say what is new with this record."""
        is_first = record.group not in self.latest
        self.latest[record.group] = record
        lines = self._changes.setdefault(record.group, Changes()).verdicts(record.diagnosis)
        if is_first and not lines:
            lines = ["no verdict so far"]
        return [f"{_when(record)} {record.group} window {record.window}: {line}" for line in lines]


def watch(given: argparse.Namespace) -> int:
    """Follows a job until Ctrl-C, or prints what is there; returns the exit status."""
    follower = Follower(given.path)
    console = standard_output()
    if given.once:
        return _watch_once(given, follower, console)
    try:
        follow = _watch_live if console.is_terminal else _watch_lines
        follow(given, follower, console)
    except KeyboardInterrupt:
        pass
    return 0


def _watch_once(given: argparse.Namespace, follower: Follower, console: Console) -> int:
    latest: dict[str, Record] = {}
    spans: Spans = {}
    remarks: list[str] = []
    for found in follower.catch_up():
        if isinstance(found, str):
            remarks.append(found)
        else:
            spans.setdefault(found.group, []).append(found.window)
            latest[found.group] = found
    if not latest:
        raise EPArgumentError(
            f"{given.path}: no whole window in {FILE_PATTERN}"
            + "".join(f"; {remark}" for remark in remarks)
        )
    for record in latest.values():
        console.print(heading(record, position(spans, record), "the latest"))
        report(record.diagnosis, console)
    for remark in remarks:
        console.print(Text(f"note: {remark}", style="yellow"))
    return 0


def _watch_lines(given: argparse.Namespace, follower: Follower, console: Console) -> None:
    watched = _Watched()
    while True:
        for line in _changes(watched, follower):
            console.print(Text(line), soft_wrap=True)
        time.sleep(given.interval)


def _watch_live(given: argparse.Namespace, follower: Follower, console: Console) -> None:
    watched = _Watched()
    changes: list[str] = []
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            changes = [*changes, *_changes(watched, follower)][-_RECENT_CHANGES:]
            live.update(_screen(given, watched, changes, console), refresh=True)
            time.sleep(given.interval)


def _changes(watched: _Watched, follower: Follower) -> list[str]:
    lines: list[str] = []
    for found in follower.catch_up():
        lines += [f"note: {found}"] if isinstance(found, str) else watched.take(found)
    return lines


def _screen(
    given: argparse.Namespace, watched: _Watched, changes: Sequence[str], console: Console
) -> RenderableType:
    parts: list[RenderableType] = [Text(line) for line in changes]
    if not watched.latest:
        parts.append(Text(f"waiting for {given.path}/{FILE_PATTERN}"))
    for record in watched.latest.values():
        above = heading(record, f"{record.group}, window {record.window}")
        parts += [Text(), above, render(record.diagnosis, console)]
    return Group(*parts)


# The numbers of the windows of each group, in order.
Spans = dict[str, list[int]]


def position(spans: Spans, record: Record) -> str:
    """ "window 3 of 1-7", with the group where there are several."""
    numbers = spans[record.group]
    text = f"window {record.window}"
    if len(numbers) > 1:
        text += f" of {numbers[0]}-{numbers[-1]}"
    if len(spans) > 1:
        text += f", group {record.group}"
    return text


def heading(record: Record, which: str, why: str = "") -> Text:
    """The line above a report: which window, why this one, when, of how many ranks."""
    diagnosis = record.diagnosis
    text = f"{which}, {why}" if why else which
    text += f"; {_when(record)}; {wording.size(diagnosis)}"
    if record.block_of:
        text += "; matrices were stored as means over blocks of ranks"
    return Text(text, style="bold")


def _when(record: Record) -> str:
    if not math.isfinite(record.time_s):
        return "time unknown"
    return datetime.fromtimestamp(record.time_s).strftime("%Y-%m-%d %H:%M:%S")
