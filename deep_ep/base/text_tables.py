"""Tables that are written as text, so that sentences stand in them as they are said.

A row is two lines: cells with bars between them, and below them a sentence. An empty line is between rows.
"""

from __future__ import annotations

from collections.abc import Iterator


def rows_of(table: str) -> Iterator[list[str]]:
    """The cells of each row; the last one is its sentence."""
    for row in table.strip().split("\n\n"):
        head, sentence = row.split("\n")
        yield [*(cell.strip() for cell in head.split("|")), sentence]
