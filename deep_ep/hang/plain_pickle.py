"""Pickles of plain data: what could run code, or name a class, is refused before anything is loaded."""

from __future__ import annotations

import pickle
import pickletools
from io import BytesIO
from typing import Any, NoReturn

# All that dict, list, tuple, str, bytes, int, float, bool and None need.
_PLAIN = """
    PROTO FRAME STOP MARK POP POP_MARK
    MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
"""
_ALLOWED = frozenset(_PLAIN.split())
# Who goes through the data meets no more: a few hundred bytes can hold the same list 2**40 times.
_MOST_VALUES = 1 << 24


class _Plain(pickle.Unpickler):
    """The same again, should it read anything else than `_refusal` has seen."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it names {module}.{name}")


def loads(data: bytes) -> Any:
    """The data of a pickle.

    Raises:
        ValueError: it is damaged, or not of plain data, and says at which byte; or it has no end.
    """
    refusal = _refusal(data)
    if refusal:
        raise ValueError(refusal)
    try:
        plain = _Plain(BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001 - it raises whatever the objects of a damaged one do
        raise ValueError(f"the pickle is damaged: {error or type(error).__name__}") from None
    try:
        is_endless = _size(plain, {}) > _MOST_VALUES
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_endless:
        raise ValueError(f"it holds the same again and again, more than {_MOST_VALUES} values")
    return plain


def _size(value: Any, known: dict[int, int]) -> int:
    """How many values are in it and below, each as often as it is met; `known` has those of lists and the like by id."""
    if not isinstance(value, (list, tuple, dict)):
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_VALUES  # where it is met within itself
        inside = (*value, *value.values()) if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(one, known) for one in inside)
    return known[id(value)]


def _refusal(data: bytes) -> str:
    """Why a pickle may not be loaded; empty: it may."""
    at = 0
    try:
        for operation, argument, position in pickletools.genops(data):
            name, at = operation.name, position or 0
            if name not in _ALLOWED:
                return (
                    f"byte {at}: {name} is not of plain data; a dump from someone else must not be able "
                    "to run code"
                )
            # Loading takes memory for as many objects as the largest number names.
            if name in ("PUT", "LONG_BINPUT") and not 0 <= (argument or 0) <= len(data):
                return f"byte {at}: {name} {argument} is out of range"
    except Exception as error:  # noqa: BLE001 - pickletools raises whatever its decoders meet
        return f"behind byte {at}: the pickle is damaged or cut off: {error}"
    return ""
