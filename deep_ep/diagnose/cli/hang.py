"""`python -m deep_ep.diagnose hang`: reads dumps and logs, and says why operations hang."""

from __future__ import annotations

import argparse
import json
import sys

from markupsafe import Markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..core import safe_files
from ..core.package import (
    EPArgumentError,
    HangVerdict,
    folder,
    hang_picture,
    hang_report,
    printable,
)
from ..render.page import page, part
from ..render.terminal import standard_output

# Exit status when there is a cause and --check was given.
CAUSES = 3


def hang(given: argparse.Namespace) -> int:
    """Prints the verdict and what it rests on, and writes the files asked for; returns the exit status."""
    found = folder.read_folder(*given.paths)
    if given.svg is not None and not found.buffers:
        raise EPArgumentError(
            "--svg: there is no graph of a buffer to draw; no dump of a buffer was found, and no log says that somebody "
            "waits. Leave --svg out to see the rest."
        )
    hangs = any(buffer.verdict.causes for buffer in found.buffers) or bool(found.collectives)
    status = CAUSES if given.check and hangs else 0
    if given.json:
        json.dump({"exit_status": status, **_plain(found)}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(standard_output(given.width), found)
    if given.svg is not None:
        safe_files.write(given.svg, svg_text(found.buffers[0].verdict).encode())
    if given.html is not None:
        title = f"Why it hangs: {', '.join(map(str, given.paths[:3]))}"
        safe_files.write(given.html, html(title, found))
    return status


def html(title: str, found: folder.Folder) -> bytes:
    """The text of an HTML file, UTF-8: no script, and nothing from the network."""
    return page("hang.html", title, found=found, report=hang_report, svg_text=svg_text)


def svg_text(verdict: HangVerdict) -> Markup:
    """The wait-for graph as the text of an SVG document, which needs nothing else."""
    return part(
        "picture.svg",
        picture=hang_picture.picture(verdict),
        width=hang_picture.WIDTH,
        height=hang_picture.HEIGHT,
        node_height=hang_picture.NODE_HEIGHT,
    )


def _plain(found: folder.Folder) -> dict[str, object]:
    buffers = []
    for buffer in found.buffers:
        causes, advice = zip(*hang_report.paragraphs(buffer.verdict))
        buffers.append(
            {
                "causes": list(map(printable, causes)),
                "advice": list(map(printable, advice)),
                "verdict": buffer.verdict.plain(),
            }
        )
    return {
        "buffers": buffers,
        "collectives": list(map(printable, hang_report.collective_lines(found))),
        "remarks": list(map(printable, found.remarks)),
    }


def _print(console: Console, found: folder.Folder) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    for buffer in found.buffers:
        say(buffer.title, "bold")
        for said, advice in hang_report.paragraphs(buffer.verdict):
            say(f"  {said}", "red" if buffer.verdict.causes else "")
            if advice:
                say(f"  {advice}")
        for section in hang_report.sections(buffer):
            say("")
            say(section.title, "bold")
            for line in section.lines:
                say(f"  {line}")
            if section.rows:
                console.print(Padding(_table(section), (0, 0, 0, 2), expand=False))
        say("")
    if found.collectives:
        say("collectives of torch", "bold")
        for line in hang_report.collective_lines(found):
            say(f"  {line}")
    for remark in found.remarks:
        say(f"note: {remark}", "yellow")


def _table(section: hang_report.Section) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    number, name, *columns = section.columns
    shown.add_column(number, justify="right", no_wrap=True)
    shown.add_column(name, overflow="fold")
    for title in columns:
        shown.add_column(title)
    for row in section.rows:
        shown.add_row(*map(Text, map(printable, row)), style="bold" if row[-1] else "")
    return shown
