"""Messages between the ranks of a watched buffer: what is none is refused, with what to do."""

from __future__ import annotations

from typing import TypeVar

from ..core.package import EPArgumentError, codec, printable

T = TypeVar("T")


# Of a text, characters.
_LONGEST_TEXT = 4096


def decode(cls: type[T], data: bytes, where: str, sides: codec.Sides) -> T:
    """What `codec.encode` wrote. Arrays are read only; texts are printable, and cut off where they are too long.

    Args:
        cls: the dataclass.
        data: the bytes.
        where: whose message it is, for the error.
        sides: lengths of sides of arrays.

    Raises:
        EPArgumentError: the bytes are no such message, or too many.
    """
    try:
        return codec.decode(cls, data, sides=sides, text=_short)
    except codec.CodecError as error:
        raise EPArgumentError(
            printable(f"{where}: the message of {len(data)} bytes is no {cls.__name__}: {error}. ")
            + "Run the same version of deep_ep on all ranks, and let nobody else write to the store of the job."
        ) from None


def _short(text: str) -> str:
    return printable(text[:_LONGEST_TEXT])
