"""`python -m deep_ep.diagnose hang`: reads dumps and logs, and says why operations hang."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import safe_files
from ..core.package import HangVerdict, folder, hang_picture, hang_views, printable
from ..render.page import page, part
from ..render.terminal import standard_output

# Exit status when there is a cause and --check was given.
CAUSES = 3


def hang(given: argparse.Namespace) -> int:
    """Prints the verdict and what it rests on, and writes the files asked for; returns the exit status."""
    report = hang_views.report(folder.read_folder(*given.paths))
    found = any(shown.verdict.causes for shown in report.buffers) or bool(report.collectives)
    status = CAUSES if given.check and found else 0
    if given.json:
        json.dump({"exit_status": status, **_plain(report)}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(standard_output(given.width), report)
    if given.svg is not None and report.buffers:
        safe_files.write(given.svg, svg_text(report.buffers[0].verdict).encode())
    if given.html is not None:
        title = f"Why it hangs: {', '.join(map(str, given.paths[:3]))}"
        safe_files.write(given.html, html(title, report))
    return status


def html(title: str, report: hang_views.Report) -> bytes:
    """The text of an HTML file, UTF-8: no script, and nothing from the network."""
    return page("hang.html", title, report=report, svg_text=svg_text)


def svg_text(verdict: HangVerdict) -> Markup:
    """The wait-for graph as the text of an SVG document, which needs nothing else."""
    return part(
        "picture.svg",
        picture=hang_picture.picture(verdict),
        width=hang_picture.WIDTH,
        height=hang_picture.HEIGHT,
        node_height=hang_picture.NODE_HEIGHT,
    )


def _plain(report: hang_views.Report) -> dict[str, object]:
    buffers = [
        {
            "causes": [printable(paragraph.said) for paragraph in shown.paragraphs],
            "advice": [printable(paragraph.advice) for paragraph in shown.paragraphs],
            "verdict": shown.verdict.plain(),
        }
        for shown in report.buffers
    ]
    return {
        "buffers": buffers,
        "collectives": list(map(printable, report.collectives)),
        "remarks": list(map(printable, report.remarks)),
    }


def _print(console: Console, report: hang_views.Report) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    def say_all(title: str, lines: Iterable[str]) -> None:
        say(title, "bold")
        for line in lines:
            say(f"  {line}")

    for shown in report.buffers:
        say(shown.title, "bold")
        for paragraph in shown.paragraphs:
            say(f"  {paragraph.said}", "red" if shown.verdict.causes else "")
            if paragraph.advice:
                say(f"  {paragraph.advice}")
        if shown.waits:
            say("")
            say_all("who waits for whom", shown.waits)
        if shown.table.rows:
            say("")
            say("recent operations", "bold")
            console.print(_operations(shown.table))
        if shown.stacks:
            say("")
            say_all("Python stacks", [line for stack in shown.stacks for line in stack.lines])
        say("")
    if report.collectives:
        say_all("collectives of torch", report.collectives)
    for remark in report.remarks:
        say(f"note: {remark}", "yellow")


def _operations(table: hang_views.OperationTable) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    number, name, *columns = table.titles
    shown.add_column(f"  {number}", justify="right", no_wrap=True)
    shown.add_column(name, overflow="fold")
    for title in columns:
        shown.add_column(title)
    for row in table.rows:
        *cells, remark = map(printable, row)
        cells.append(f"< {remark}" if remark else "")
        shown.add_row(*map(Text, cells), style="bold" if remark else "")
    return shown
