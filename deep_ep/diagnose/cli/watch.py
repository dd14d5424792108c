"""`python -m deep_ep.diagnose watch`: follows a running job and tells what changes."""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..render import wording
from ..render.change_log import Changes
from ..render.terminal import render, standard_output
from ..storage.log_follower import Follower
from ..storage.record import Record
from ..storage.record_layout import FILE_PATTERN

# Above the heatmap a terminal shows so many of the latest changes.
_RECENT_CHANGES = 6


def watch(given: argparse.Namespace) -> int:
    """Follows a job until Ctrl-C; returns the exit status."""
    follower = Follower(given.path)
    console = standard_output()
    latest: dict[str, Record] = {}
    changes: dict[str, Changes] = {}
    recent: list[str] = []
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else None
    if live is None and not given.path.exists():
        console.print(Text(f"waiting for {given.path}"), soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            lines = [
                line for found in follower.catch_up() for line in _news(found, latest, changes)
            ]
            if live is None:
                for line in lines:
                    console.print(Text(line), soft_wrap=True)
            else:
                recent = [*recent, *lines][-_RECENT_CHANGES:]
                nothing = f"waiting for {given.path}/{FILE_PATTERN}"
                above = recent if latest else [*recent, nothing]
                live.update(_screen(above, latest, console), refresh=True)
            time.sleep(given.interval)
    return 0


def _news(found: Record | str, latest: dict[str, Record], changes: dict[str, Changes]) -> list[str]:
    """Lines that say what is new with a record, which becomes the latest of its group, or with a remark."""
    if isinstance(found, str):
        return [f"note: {found}"]
    lines = changes.setdefault(found.group, Changes()).verdicts(found.diagnosis)
    if found.group not in latest and not lines:
        lines = ["no verdict so far"]
    latest[found.group] = found
    return [f"{_when(found)} {found.group} window {found.window}: {line}" for line in lines]


def _screen(above: Sequence[str], latest: Mapping[str, Record], console: Console) -> RenderableType:
    parts: list[RenderableType] = [Text(line) for line in above]
    for record in latest.values():
        which = heading(record, f"{record.group}, window {record.window}")
        parts += [Text(), which, render(record.diagnosis, console, with_paths=not record.block_of)]
    return Group(*parts)


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
