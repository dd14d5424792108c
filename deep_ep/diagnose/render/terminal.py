"""Words, heatmaps and a bandwidth table for a Diagnosis, on a terminal.

A heatmap has a row per waiting rank and a column per rank waited for. Up to about ten ranks in 80
columns a cell is a number; beyond, a shade; beyond 64 ranks a cell is a pair of nodes.
Every shade is a character, so that it reads the same without colour.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..core import quantities, rank_blocks
from ..core.causes import TITLES
from ..core.diagnosis import Diagnosis, Measured, Verdict
from ..core.rank_blocks import Blocks
from ..core.robust_stats import lowest, median_of
from ..render import bandwidths, wording

_SHADES = "·░▒▓█"
_ASCII_SHADES = ".-+*#"
_LABEL_WIDTH = 6
_WIDEST_LABEL = 17
_WIDEST_CELL = 8
# More ranks are shown per node: single columns are too many to find one's way.
_MOST_CELLS = 64
# Below this many microseconds a heatmap stays green: waiting of this size is everyday noise.
_CALM_US = {"cuda": 10.0, "cpu": 100.0, "": 10.0}
# Green, yellow, red, each dark enough for white and light enough for black text.
_RAMP = ((46, 160, 67), (219, 187, 40), (215, 58, 45))
# Of the ends of a list so many are named, and so many of single operations.
_NAMED, _MOST_OUTLIERS = 3, 5
# Of a pipe or file: more columns than any table has.
_UNBOUNDED = 100_000


def standard_output(width: int | None = None) -> Console:
    """The console of a program, as wide as the terminal or `COLUMNS` say, unless a width is given.

    Without a terminal lines are as long as what they say.
    """
    if width is None and not sys.stdout.isatty():
        width = shutil.get_terminal_size((_UNBOUNDED, 0)).columns
    return Console(width=width)


def report(
    diagnosis: Diagnosis, console: Console | None = None, *, with_paths: bool = True
) -> None:
    """Prints the heatmap of every operation, the verdicts, and what the wires did.

    Args:
        diagnosis: what `run` or `judge` returned.
        console: where to; standard output by default. Its width and its colours are respected.
        with_paths: whether the slowest paths are listed; of stored means over blocks of ranks none is known.
    """
    console = console or standard_output()
    console.print(render(diagnosis, console, with_paths=with_paths))


def render(diagnosis: Diagnosis, console: Console, *, with_paths: bool = True) -> RenderableType:
    """The report as something rich can print; sized for `console`. See `report`."""
    sections: list[list[RenderableType]] = []
    if diagnosis.num_ranks > 1:
        sections += [[_heatmap(diagnosis, m, console)] for m in diagnosis.measured.values()]
    sections += [
        *_causes(diagnosis),
        _outliers(diagnosis),
        _notes(diagnosis),
        _bandwidths(diagnosis, with_paths),
    ]
    parts: list[RenderableType] = []
    for section in sections:
        if section:
            parts += [Text(), *section] if parts else section
    return Group(*parts)


@dataclass(frozen=True)
class _Hanging:
    """Text that is wrapped so that the lines after the first stand further right."""

    text: Text
    rest: int
    first: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.wrap(console, max(options.max_width - self.rest, 8))
        for i, line in enumerate(lines):
            line.pad_left(self.rest if i else self.first)
            yield line


def _causes(diagnosis: Diagnosis) -> list[list[RenderableType]]:
    """A section per cause, the largest first; or why there is none."""
    if diagnosis.verdicts:
        causes = [_cause(diagnosis, verdicts) for verdicts in wording.causes(diagnosis)]
        return [*causes, [_Hanging(Text(text), 2) for text in wording.savings(diagnosis)]]
    style = "yellow" if diagnosis.remarks else "green"
    answers = wording.headlines(diagnosis)
    return [[_Hanging(Text(answer, style=f"bold {style}"), 2) for answer in answers]]


def _notes(diagnosis: Diagnosis) -> list[RenderableType]:
    return [
        _Hanging(Text(f"note: {remark}", style="yellow"), 6) for remark in wording.notes(diagnosis)
    ]


def _cause(diagnosis: Diagnosis, verdicts: Sequence[Verdict]) -> list[RenderableType]:
    largest = verdicts[0]
    head = Text()
    head.append(
        f"{TITLES[largest.kind]}  {wording.subject(largest)}",
        style="bold red",
    )
    head.append(f"  {largest.where}" if largest.where else "", style="bold")
    causes = dict.fromkeys(verdict.cause for verdict in verdicts)
    head.append(f"  ({', '.join(causes)})")
    lines = map(Text, wording.details(diagnosis, verdicts))
    return [_Hanging(head, 2), *(_Hanging(line, 6, first=2) for line in lines)]


def _outliers(diagnosis: Diagnosis) -> list[RenderableType]:
    if not diagnosis.events:
        return []
    told = wording.outliers(diagnosis, _MOST_OUTLIERS)
    heading = Text("single operations, not causes:", style="bold")
    return [heading, *(_Hanging(Text(text), 4, first=2) for text in told)]


def _bandwidths(diagnosis: Diagnosis, with_paths: bool) -> list[RenderableType]:
    rows = bandwidths.rows(diagnosis, with_paths=with_paths)
    if not rows or diagnosis.num_ranks < 2:
        return []
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        title=bandwidths.TITLE,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        collapse_padding=True,
    )
    for heading in bandwidths.COLUMNS:
        table.add_column("\n".join(heading), overflow="fold")
    for row in rows:
        table.add_row(*(Text("\n".join(cell)) for cell in row))
    return [table]


def _heatmap(diagnosis: Diagnosis, m: Measured, console: Console) -> Text:
    wait_us = np.array(m.wait_us)
    per = wording.per(diagnosis, m.operation)
    counted = f", {wording.operations(m)}" if m.num_operations else ""
    # A rank hardly waits for itself, and where it does it says nothing about the others.
    np.fill_diagonal(wait_us, np.nan)
    text = Text()
    text.append(f"{m.operation}", style="bold")
    text.append(f": microseconds waited {per}{counted}\n")
    if not np.isfinite(wait_us).any():
        text.append(_own_waiting(m))
        return text
    of = _blocks_for(diagnosis, console.width)
    labels = _row_labels(of)
    label_width = max(_LABEL_WIDTH, *(len(label) + 1 for label in labels))
    cells = of.largest(wait_us)
    width = max(1, min(_WIDEST_CELL, (console.width - label_width) // of.count))
    top = max(float(np.nanmax(cells, initial=0.0)), _CALM_US.get(diagnosis.device, 10.0))
    shades = _ASCII_SHADES if console.options.ascii_only else _SHADES

    text.append(f"rows wait, columns are waited for{_cell_meaning(of)}\n")
    _append_column_labels(text, of, width, label_width)
    # The shade leads the number, so that the picture is there without colour too.
    with_numbers = width >= 2 + max(len(_short(us)) for us in cells[np.isfinite(cells)])
    for row, label in enumerate(labels):
        text.append(f"{label:>{label_width - 1}} ", style="dim")
        for column in range(of.count):
            _append_cell(text, float(cells[row, column]), top, width, shades, with_numbers)
        text.append("\n")
    _append_legend(text, top, shades)
    return text


def _blocks_for(diagnosis: Diagnosis, width: int) -> Blocks:
    if diagnosis.num_ranks <= min(_MOST_CELLS, width - _LABEL_WIDTH):
        return rank_blocks.single(diagnosis.num_ranks)
    return rank_blocks.at_most(min(_MOST_CELLS, width - _WIDEST_LABEL), diagnosis)


def _own_waiting(m: Measured) -> str:
    longest = [
        f"{quantities.microseconds(-us)} rank {rank}" for rank, us in lowest(-m.own_wait_us, _NAMED)
    ]
    if not longest:
        return "not known for any pair of ranks"
    middle = quantities.microseconds(median_of(m.own_wait_us))
    return (
        f"no matrix stored for this window; a rank waits {middle} (median),\n"
        f"longest {', '.join(longest)}"
    )


def _cell_meaning(of: Blocks) -> str:
    if of.single:
        return ""
    size = of.first[1] - of.first[0] if of.count > 1 else of.of_rank.size
    if not of.by_node:
        return f"; a cell is the largest of {size} x {size} ranks"
    return "; a cell is the largest of " + ("two nodes" if size == 1 else f"{size} x {size} nodes")


def _row_labels(of: Blocks) -> list[str]:
    """The number that verdicts use, and what tells hosts apart."""
    numbers = [str(first) for first in of.first]
    if not of.by_node:
        return numbers
    digits = max(map(len, numbers))
    names = [_short_host(host, _WIDEST_LABEL - digits - 2) for host in of.hosts]
    return [f"{name} {number:>{digits}}" for name, number in zip(names, numbers)]


def _short_host(host: str, room: int) -> str:
    first = host.split(".")[0]
    name = host if first.isdecimal() else first
    return name if len(name) <= room else f"~{name[1 - room :]}"


def _append_column_labels(text: Text, of: Blocks, width: int, label_width: int) -> None:
    labels = [str(first) for first in of.first]
    if width > max(map(len, labels)):
        text.append(
            " " * label_width + "".join(f"{label:>{width}}" for label in labels), style="dim"
        )
        text.append("\n")
        return
    # Too narrow for labels side by side: mark every eighth column.
    line = [" "] * (of.count * width)
    for column in range(0, of.count, 8):
        marked = labels[column][: len(line) - column * width]
        line[column * width : column * width + len(marked)] = marked
    text.append(" " * label_width + "".join(line).rstrip() + "\n", style="dim")


def _append_cell(
    text: Text, value: float, top: float, width: int, shades: str, with_number: bool
) -> None:
    if not math.isfinite(value):
        text.append(" " * width)
        return
    level = min(max(value / top, 0.0), 1.0)
    shade = shades[min(int(level * len(shades)), len(shades) - 1)]
    if with_number:
        text.append(f"{shade}{_short(value):>{width - 2}} ", style=_style(level))
    else:
        text.append(f"{shade * max(width - 1, 1):{width}}", style=_style(level))


def _append_legend(text: Text, top: float, shades: str) -> None:
    text.append(" " * _LABEL_WIDTH)
    for i, shade in enumerate(shades):
        text.append(f" {shade} ", style=_style((i + 0.5) / len(shades)))
        text.append(f" {_short(i / len(shades) * top)}+  ", style="dim")
    text.append("us", style="dim")


def _style(level: float) -> Style:
    position = level * (len(_RAMP) - 1)
    low = min(int(position), len(_RAMP) - 2)
    part = position - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(_RAMP[low], _RAMP[low + 1]))
    return Style(color=Color.from_rgb(0, 0, 0), bgcolor=Color.from_rgb(red, green, blue))


def _short(us: float) -> str:
    """At most five characters: 12, 1234, 56.7k, 1.2M."""
    if us < 9_999.5:
        return f"{us:.0f}"
    if us < 999_950:
        return f"{us / 1e3:.1f}k" if us < 99_950 else f"{us / 1e3:.0f}k"
    return f"{us / 1e6:.1f}M" if us < 99_950_000 else f"{us / 1e6:.0f}M"
