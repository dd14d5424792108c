"""The same tables on a terminal and on a page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..core.package import printable
from .page import page


@dataclass(frozen=True)
class Sheet:
    """A table as text; `words` are the columns that are no numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()

    @property
    def numbers(self) -> list[int]:
        """The other columns."""
        return [place for place in range(len(self.columns)) if place not in self.words]


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
    return page("sheets.html", title, sheets=sheets, remarks=remarks)
