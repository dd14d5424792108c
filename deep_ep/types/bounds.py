"""Arguments that are integers, and the memory that they take: for every call, and for what is made without one."""

from __future__ import annotations

import operator
from typing import Any

from deep_ep.base.rules import fail
from deep_ep.errors import EPTypeError
from deep_ep.native import backend


def integer(where: str, name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int.

    Args:
        where: the call.
        name: of the argument.
        value: that was given; anything with `__index__` but a tensor or array of several elements.
        least: what it must be at least; 0 or 1, or `None`: there is no bound.

    Raises:
        EPTypeError: it is no integer.
        EPArgumentError: it is below `least`.
    """
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # of torch, where a tensor holds nothing
        fail(where, f"{name} is {_short(value)}", "integer", EPTypeError)
    if least is not None and number < least:
        fail(where, f"{name} is {number}", "positive" if least else "not_negative")
    return number


def memory(call: str, got: str, num_bytes: int, fix: str) -> None:
    """Bytes that an argument has allocated on each rank: what is left must hold them.

    Args:
        call: that has the argument.
        got: the argument, and what was given.
        num_bytes: that it takes.
        fix: what to do, as a sentence without its stop.
    """
    available = backend.get().available_bytes()
    if available is not None and num_bytes > available:
        fail(call, got, "memory", needed=num_bytes, available=available, fix=fix)


def _short(value: Any) -> str:
    """Of a value of any size."""
    text = repr(value) if isinstance(value, (str, bytes, int, float, type(None))) else ""
    return text if 0 < len(text) < 100 else f"a {type(value).__name__}"
