"""Text for people: made fit to be shown, worded by how many things it is about, and kept in tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

_PLURALS = {"is": "are", "has": "have", "was": "were", "does": "do", "empties": "empty"}


def printable(text: str) -> str:
    """Text that others wrote, with everything that moves a cursor, changes direction, or cannot be encoded written out.

    Control characters, escape sequences, line ends, invisible and bidirectional marks and lone
    surrogates become what Python writes for them, such as `\\x1b`. It is called where text is read, or at the latest where it is shown.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def verb(subject: Sized, singular: str) -> str:
    """The form of "is" or "waits" for so many."""
    if len(subject) == 1:
        return singular
    return _PLURALS.get(singular) or singular.removesuffix("s")


def counted(number: int, what: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def listed(words: Sequence[str], joint: str) -> str:
    """ "a, b or c", where `joint` is "or"."""
    return f" {joint} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def rows_of(table: str) -> Iterator[list[str]]:
    """The cells of each row of a table that is written as text, so that sentences stand in it as they are said.

    A row is a line of cells with bars between them. Below one row or several stands a sentence, the last cell of each, and
    below that an empty line.
    """
    for block in table.strip().split("\n\n"):
        *rows, sentence = block.split("\n")
        for row in rows:
            yield [*(cell.strip() for cell in row.split("|")), sentence]
