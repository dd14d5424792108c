"""The same tables on a terminal and on a page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..core.printable_text import printable
from .page_parts import add, add_list, add_table, start_page, text_of


@dataclass(frozen=True)
class Sheet:
    """A table as text.

    Attributes:
        title: above it.
        columns: their titles.
        rows: of as many cells.
        words: columns that are no numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()


def as_table(sheet: Sheet) -> Table:
    """For a terminal."""
    shown = Table(title=sheet.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for place, title in enumerate(sheet.columns):
        is_word = place in sheet.words
        shown.add_column(title, justify="left" if is_word else "right", overflow="fold")
    for row in sheet.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown


def as_page(title: str, sheets: Sequence[Sheet], remarks: Sequence[str]) -> bytes:
    """The text of an HTML file."""
    root, body = start_page(title)
    for sheet in sheets:
        add(body, "h2", sheet.title)
        numbers = [place for place in range(len(sheet.columns)) if place not in sheet.words]
        add_table(body, sheet.columns, sheet.rows, css_class="sheet", numbers=numbers)
    add_list(body, "Notes", remarks)
    return text_of(root)
