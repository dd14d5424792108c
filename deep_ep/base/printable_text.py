"""Text that others wrote, made fit to be shown: on terminals, in pages, pictures, logs and metrics."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with everything that moves a cursor, changes direction, or cannot be encoded written out.

    Control characters, escape sequences, line ends, invisible and bidirectional marks and lone
    surrogates become what Python writes for them, such as `\\x1b`. It is called where text is read, or at the latest where it is shown.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
