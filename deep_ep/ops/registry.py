"""Buffers by number, for custom operators: these take numbers and tensors only."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from deep_ep.errors import EPUsageError

if TYPE_CHECKING:
    from deep_ep.buffer import Buffer

_numbers = itertools.count()
_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()


def add(buffer: Buffer) -> int:
    """The number of a new buffer, which no other buffer of the process gets."""
    number = next(_numbers)
    _buffers[number] = buffer
    return number


def get(number: int) -> Buffer:
    """The buffer with this number.

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
