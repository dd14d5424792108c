"""JSON that no dataclass describes: a `ValueError` comes of what is none, or has numbers that the package never writes."""

from __future__ import annotations

import json
from typing import Any

from deep_ep.base import codec


def loads(data: bytes | bytearray) -> Any:
    """The value of a text, in which numbers are finite and integers have 64 bits at most.

    Raises:
        ValueError: it is none; says where.
    """
    anything: Any = Any
    try:
        return codec.from_plain(anything, codec.loads(data))
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start}: it is not UTF-8") from None
