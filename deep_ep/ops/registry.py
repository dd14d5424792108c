"""Buffers by number, for custom operators: these take numbers and tensors only."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from deep_ep.errors import EPUsageError

_numbers = itertools.count()
_buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def add(buffer: object) -> int:
    """The number of a new buffer, which no other buffer of the process gets."""
    number = next(_numbers)
    _buffers[number] = buffer
    return number


def get(number: int) -> Any:
    """The `Buffer` with this number.

    Raises:
        EPUsageError: it is gone.
    """
    buffer = _buffers.get(number)
    if buffer is None:
        raise EPUsageError(
            f"deep_ep::moe: there is no buffer {number}; the compiled function was made for one that still "
            "exists. Keep the Buffer as long as the functions that use it, or compile them again."
        )
    return buffer
