"""JSON of anybody: nothing but a `ValueError` comes of what is none, or holds what the package never writes."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

# Of an integer: its absolute value is below, and it is not looked at beyond so many characters.
_LARGEST, _MOST_DIGITS = 1 << 63, 20


def loads(data: bytes | bytearray) -> Any:
    """The value of a text, in which numbers are finite and integers have 64 bits at most.

    Raises:
        ValueError: it is none; says where.
    """
    try:
        return json.loads(data, parse_int=_integer, parse_float=_finite, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start}: it is not UTF-8") from None
    except RecursionError:
        raise ValueError("byte 0: it is nested too deeply") from None


def _integer(text: str) -> int:
    value = int(text) if len(text) <= _MOST_DIGITS else _LARGEST
    if abs(value) >= _LARGEST:
        raise ValueError(f"it has a number of more than 64 bits: {text[:_MOST_DIGITS]}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"it has a number that is not finite: {text[:_MOST_DIGITS]}")
