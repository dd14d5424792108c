"""Words and heatmaps for a Diagnosis. The only module of the package that prints.

A heatmap has a row per waiting rank and a column per rank waited for. Up to about ten ranks in 80
columns a cell is a number; beyond, a shade; beyond the width of the console, a block of ranks.
Every shade is a character, so that it reads the same without colour.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import numpy as np
from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from deep_ep.diagnose.gather import FloatArray, Matrices
from deep_ep.diagnose.verdict import COMM_SLOW, COMP_SLOW, MIXED_SLOW, Diagnosis, Subject, Verdict

_TITLES = {COMP_SLOW: "Comp-Slow", COMM_SLOW: "Comm-Slow", MIXED_SLOW: "Mixed-Slow"}
_SHADES = "·░▒▓█"
_ASCII_SHADES = ".-+*#"
_LABEL_WIDTH = 6
_WIDEST_CELL = 8
_NARROWEST_NUMBER = 5
# Below this many microseconds a heatmap stays green: waiting of this size is everyday noise.
_CALM_US = 100.0
# Green, yellow, red, each dark enough for white and light enough for black text.
_RAMP = ((46, 160, 67), (219, 187, 40), (215, 58, 45))


def report(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Prints the heatmap of every operation and the verdicts.

    Args:
        diagnosis: what `run` or `judge` returned.
        console: where to; standard output by default. Its width and its colours are respected.
    """
    console = console or Console()
    console.print(render(diagnosis, console))


def heatmap_svg(
    diagnosis: Diagnosis,
    path: str | Path,
    *,
    width: int = 88,
    title: str = "deep_ep.diagnose",
) -> None:
    """Writes what `report` prints, in colour, to an SVG file.

    Args:
        diagnosis: what `run` or `judge` returned.
        path: the file to write.
        width: columns of the picture.
        title: words in its title bar.
    """
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    report(diagnosis, console)
    save_svg(console, path, title=title)


def save_svg(console: Console, path: str | Path, *, title: str = "deep_ep.diagnose") -> None:
    """Writes what a recording console has printed to an SVG file that refers to nothing outside.

    Args:
        console: made with `record=True`.
        path: the file to write.
        title: words in its title bar.
    """
    picture = console.export_svg(title=title)
    # rich names a web font; pictures go into tickets and are read offline.
    picture = re.sub(r"@font-face \{.*?\n *\}\n", "", picture, flags=re.DOTALL)
    Path(path).write_text(picture, encoding="utf-8")


def render(diagnosis: Diagnosis, console: Console) -> RenderableType:
    """The report as something rich can print; sized for `console`."""
    parts: list[RenderableType] = []
    for matrices in diagnosis.matrices.values():
        if matrices.num_ranks > 1:
            parts += [_heatmap(matrices, console), Text()]
    parts += [_cause_text(verdicts) for verdicts in _by_cause(diagnosis.verdicts)]
    if not diagnosis.verdicts and not diagnosis.remarks:
        parts.append(Text("no anomaly: nothing stands out of the noise", style="bold green"))
    elif not diagnosis.verdicts:
        parts.append(Text("no anomaly found", style="bold"))
    parts += [Text(f"note: {remark}", style="yellow") for remark in diagnosis.remarks]
    return Group(*parts)


def _by_cause(verdicts: list[Verdict]) -> list[list[Verdict]]:
    """Verdicts of both operations that name the same thing together, in order of their largest."""
    causes: dict[tuple[str, Subject], list[Verdict]] = {}
    for verdict in verdicts:
        causes.setdefault(verdict.key, []).append(verdict)
    return list(causes.values())


def _cause_text(verdicts: list[Verdict]) -> Text:
    largest = verdicts[0]
    text = Text()
    text.append(f"{_TITLES[largest.kind]}  {_subject(largest)}", style="bold red")
    text.append(f"  ({largest.cause})\n")
    for verdict in verdicts:
        text.append(
            f"  {verdict.operation:8} {verdict.effect_us:,.0f} us per operation, "
            f"{verdict.share:.0%} of all waiting, in {verdict.seen_in:.0%} of operations\n"
        )
    numbers = ", ".join(
        f"{name} {value:,.1f}" for name, value in largest.evidence.items() if math.isfinite(value)
    )
    text.append(f"  in {largest.operation}: {numbers}\n", style="dim")
    text.append(f"  next: {largest.next_step}\n")
    return text


def _subject(verdict: Verdict) -> str:
    if verdict.edge is not None:
        return f"path {verdict.edge[0]} > {verdict.edge[1]}"
    return f"rank {verdict.rank}"


def _heatmap(m: Matrices, console: Console) -> Text:
    ascii_only = console.encoding.lower().replace("-", "") not in ("utf8", "utf16", "utf32")
    room = console.width - _LABEL_WIDTH
    wait_us = m.mean_wait_ns() / 1e3
    # A rank hardly waits for itself, and where it does it says nothing about the others.
    np.fill_diagonal(wait_us, np.nan)
    block = math.ceil(m.num_ranks / room)
    cells = _largest_of_blocks(wait_us, block)
    width = max(1, min(_WIDEST_CELL, room // cells.shape[0]))
    top = max(float(np.nanmax(cells, initial=0.0)), _CALM_US)

    operations = m.num_operations or int(np.nanmax(m.own["ops"], initial=0.0))
    text = Text(no_wrap=True)
    text.append(f"{m.operation}", style="bold")
    text.append(f": microseconds waited per operation, {operations} operations\n")
    text.append("rows wait, columns are waited for")
    text.append(f"; a cell is the largest of {block} x {block} ranks\n" if block > 1 else "\n")
    _append_column_labels(text, cells.shape[0], block, width)
    for row in range(cells.shape[0]):
        text.append(f"{row * block:>{_LABEL_WIDTH - 1}} ", style="dim")
        for column in range(cells.shape[0]):
            _append_cell(text, float(cells[row, column]), top, width, ascii_only)
        text.append("\n")
    _append_legend(text, top, ascii_only)
    return text


def _append_column_labels(text: Text, num_columns: int, block: int, width: int) -> None:
    labels = [str(column * block) for column in range(num_columns)]
    if width > max(map(len, labels)):
        text.append(
            " " * _LABEL_WIDTH + "".join(f"{label:>{width}}" for label in labels), style="dim"
        )
        text.append("\n")
        return
    # Too narrow for labels side by side: mark every eighth column.
    line = [" "] * (num_columns * width + len(labels[-1]))
    for column in range(0, num_columns, 8):
        line[column * width : column * width + len(labels[column])] = labels[column]
    text.append(" " * _LABEL_WIDTH + "".join(line).rstrip() + "\n", style="dim")


def _append_cell(text: Text, value: float, top: float, width: int, ascii_only: bool) -> None:
    if not math.isfinite(value):
        text.append(" " * width)
        return
    level = min(max(value / top, 0.0), 1.0)
    shades = _ASCII_SHADES if ascii_only else _SHADES
    shade = shades[min(int(level * len(shades)), len(shades) - 1)]
    style = _style(level)
    if width >= _NARROWEST_NUMBER:
        # The shade leads the number, so that the picture is there without colour too.
        text.append(f"{shade}{_short(value):>{width - 2}} ", style=style)
    else:
        text.append(shade * max(width - 1, 1) + " " * (width - max(width - 1, 1)), style=style)


def _append_legend(text: Text, top: float, ascii_only: bool) -> None:
    shades = _ASCII_SHADES if ascii_only else _SHADES
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


def _largest_of_blocks(cells: FloatArray, block: int) -> FloatArray:
    """[n, n] to [ceil(n / block), same]; NaN only where a whole block is unknown."""
    if block == 1:
        return cells
    count = math.ceil(cells.shape[0] / block)
    padded = np.full((count * block, count * block), np.nan)
    padded[: cells.shape[0], : cells.shape[1]] = cells
    blocks = padded.reshape(count, block, count, block)
    return np.asarray(np.fmax.reduce(np.fmax.reduce(blocks, axis=3), axis=1))
