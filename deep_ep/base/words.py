"""Words that depend on how many things a sentence is about."""

from __future__ import annotations

from collections.abc import Sequence, Sized

_PLURALS = {"is": "are", "has": "have", "was": "were", "does": "do"}


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
