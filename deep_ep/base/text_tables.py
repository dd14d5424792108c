"""Tables that are written as text, so that sentences stand in them as they are said.

A row is two lines, with an empty line between rows: cells, with bars between them, and a sentence, in which bars are no ends.
"""

from __future__ import annotations

from collections.abc import Iterator


def rows_of(table: str) -> Iterator[list[str]]:
    """The cells of each row; the last one is its sentence."""
    for row in table.strip().split("\n\n"):
        head, sentence = row.split("\n")
        yield [*(cell.strip() for cell in head.split("|")), sentence]
