"""`python -m deep_ep.diagnose hang`: reads dumps, and says why operations hang."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import safe_files
from ..core.package import folder as dumps
from ..core.package import ranks_text
from ..core.printable_text import printable
from ..render.hang_page import page
from ..render.hang_picture import svg_text
from ..render.hang_views import OperationTable, View, collective_lines, view
from ..render.output import standard_output

# Exit status when there is a cause and --check was given.
CAUSES = 3


def hang(given: argparse.Namespace) -> int:
    """Prints the verdict and what it rests on, and writes the files asked for.

    Returns:
        The exit status.

    Raises:
        EPArgumentError: nothing can be read.
        OSError: a file cannot be written.
    """
    folder = dumps.read_folder(given.path)
    views = [view(buffer) for buffer in folder.buffers]
    collectives = collective_lines(folder)
    remarks = [printable(remark) for remark in folder.remarks]
    found = any(shown.verdict.causes for shown in views) or bool(folder.collectives)
    status = CAUSES if given.check and found else 0
    if given.json:
        json.dump(_plain(views, collectives, remarks, status), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(standard_output(given.width), views, collectives, remarks)
    if given.svg is not None and views:
        _write(given.svg, svg_text(views[0].verdict).encode())
    if given.html is not None:
        title = f"Why it hangs: {printable(str(given.path))}"
        _write(given.html, page(title, views, collectives, remarks))
    return status


def _write(path: str, data: bytes) -> None:
    with safe_files.create(path) as file:
        file.write(data)


def _plain(
    views: list[View], collectives: list[str], remarks: list[str], status: int
) -> dict[str, object]:
    buffers = [
        {
            "causes": [paragraph.said for paragraph in shown.paragraphs],
            "advice": [paragraph.advice for paragraph in shown.paragraphs],
            "verdict": shown.verdict.plain(),
        }
        for shown in views
    ]
    return {
        "exit_status": status,
        "buffers": buffers,
        "collectives": collectives,
        "remarks": remarks,
    }


def _print(console: Console, views: list[View], collectives: list[str], remarks: list[str]) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    for shown in views:
        say(shown.title, "bold")
        for paragraph in shown.paragraphs:
            say(f"  {paragraph.said}", "red" if shown.verdict.causes else "")
            if paragraph.advice:
                say(f"  {paragraph.advice}")
        if shown.waits:
            say("\nwho waits for whom", "bold")
            for line in shown.waits:
                say(f"  {line}")
        if shown.table.rows:
            say("\nrecent operations", "bold")
            console.print(_operations(shown.table))
        if shown.stacks:
            say("\nPython stacks", "bold")
            for stack in shown.stacks:
                say(f"  {ranks_text(stack.ranks)}, thread {stack.thread}")
                for frame in stack.frames:
                    say(f"    {frame}")
        say("")
    if collectives:
        say("collectives of torch", "bold")
        for line in collectives:
            say(f"  {line}")
    for remark in remarks:
        say(f"note: {remark}", "yellow")


def _operations(table: OperationTable) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("  operation", justify="right", no_wrap=True)
    shown.add_column("name", overflow="fold")
    for ranks in table.columns:
        shown.add_column(ranks_text(ranks))
    shown.add_column("")
    for row in table.rows:
        cells = [str(row.number), row.name, *row.cells]
        cells.append("< first disagreement" if row.differs else "")
        shown.add_row(*map(Text, cells), style="bold" if row.differs else "")
    return shown
