"""One table, shown in a terminal and written as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import rich.table
from rich.console import Console


@dataclass(frozen=True)
class Table:
    """Cells are texts; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def without(self, is_plain: Callable[[str], bool], what: str, named: int = 1) -> Table:
        """Leaves out rows of which all cells are plain; the note says what they are, and names them.

        Args:
            is_plain: of a cell.
            what: all cells of such rows are.
            named: columns that name a row.
        """
        plain = [row for row in self.rows if all(map(is_plain, row[named:]))]
        if not plain:
            return self
        names = "; ".join(", ".join(row[:named]) for row in plain)
        rows = [row for row in self.rows if row not in plain]
        return replace(self, rows=rows, note=f"{self.note} {what}: {names}.".strip())

    def show(self, console: Console) -> None:
        table = rich.table.Table(title=self.title, title_justify="left", caption=self.note or None)
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        """Heading, table, note."""
        lines = [
            f"### {self.title}",
            "",
            "| " + " | ".join(self.header) + " |",
            "|---" + "|---:" * (len(self.header) - 1) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        notes = [self.note, ""] if self.note else []
        return re.sub(r"\[/?[a-z ]+\]", "", "\n".join([*lines, "", *notes]))


def write_markdown(path: Path, heading: str, tables: Sequence[Table]) -> None:
    """All tables below a heading."""
    path.write_text("\n".join([heading, "", *(table.markdown() for table in tables)]))
