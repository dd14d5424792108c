"""Pickles of plain data: what could run code, or name a class, is refused before anything is loaded."""

from __future__ import annotations

import pickle
import pickletools
from io import BytesIO
from typing import Any, NoReturn

# All that dict, list, tuple, str, bytes, int, float, bool and None need.
_ALLOWED = frozenset(
    [
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "POP",
        "POP_MARK",
        "MEMOIZE",
        "PUT",
        "BINPUT",
        "LONG_BINPUT",
        "GET",
        "BINGET",
        "LONG_BINGET",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "EMPTY_DICT",
        "DICT",
        "SETITEM",
        "SETITEMS",
        "EMPTY_LIST",
        "LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
    ]
)


def loads(data: bytes) -> Any:
    """The data of a pickle.

    Raises:
        ValueError: it is damaged, or not of plain data; says at which byte.
    """
    _check(data)
    try:
        return _Plain(BytesIO(data)).load()
    except (pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError, EOFError) as error:
        raise ValueError(f"the pickle is damaged: {error}") from None
    except (AttributeError, MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(f"the pickle is damaged: {error or type(error).__name__}") from None


class _Plain(pickle.Unpickler):
    """The same again, should a check be missing above."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ValueError("it refers to something outside")


def _check(data: bytes) -> None:
    at = 0
    operations = pickletools.genops(data)
    while True:
        try:
            operation, argument, position = next(operations)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - pickletools raises whatever its decoders meet
            raise ValueError(
                f"behind byte {at}: the pickle is damaged or cut off: {error}"
            ) from None
        at = position or 0
        if operation.name not in _ALLOWED:
            raise ValueError(
                f"byte {at}: {operation.name} is not of plain data; a dump from someone else must not be able "
                "to run code"
            )
        # Loading takes memory for as many objects as the largest number names.
        is_number = operation.name in ("PUT", "LONG_BINPUT")
        if is_number and not (isinstance(argument, int) and 0 <= argument <= len(data)):
            raise ValueError(f"byte {at}: {operation.name} {argument} is out of range")
