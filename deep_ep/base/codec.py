"""Typed objects to plain data and bytes, and back: one codec for records, messages and dumps.

The types of a dataclass's fields say all: bool, int, float, str, `Literal`, `Optional`, lists and tuples, mappings,
NumPy arrays, and dataclasses of these; `Any` is JSON. Beside a type stand in `Annotated`

- names: of a list's or array's sides, which have one length each within an object; of a pair's parts; a mapping's keys;
- `Range`, `Words`, `Digits`, `Most`, `Length` and `OR_EMPTY`;
- functions of the value and the lengths of sides, which return the value or raise `CodecError`.

What is read may be damaged or hostile. Nothing in it is run; what does not fit is refused with the way to it and what
was expected; nothing larger than the bytes themselves is allocated.
"""

from __future__ import annotations

import io
import json
from typing import Any, Callable, NoReturn, TypeVar

import numpy as np

from deep_ep.base.field_types import OR_EMPTY as OR_EMPTY
from deep_ep.base.field_types import CodecError as CodecError
from deep_ep.base.field_types import Decoding, codec_of
from deep_ep.base.field_types import Digits as Digits
from deep_ep.base.field_types import Length as Length
from deep_ep.base.field_types import Most as Most
from deep_ep.base.field_types import Range as Range
from deep_ep.base.field_types import Sides as Sides
from deep_ep.base.field_types import Words as Words

T = TypeVar("T")

# The most that a TCPStore takes. What a rank of 1,024 tells of two kinds of operations is half a MiB.
LARGEST_MESSAGE = 8 << 20


def loads(data: bytes | bytearray) -> Any:
    """JSON of anybody. Which numbers may stand in it types say, see `from_plain`.

    Raises:
        ValueError: it is none; says where.
    """
    try:
        return _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("byte 0: it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; unknown numbers are null")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def encode(value: Any) -> bytes:
    """The bytes of a dataclass: a line of JSON, and behind its end the arrays, if it has any."""
    arrays: list[bytes] = []

    def packed(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} cannot be written")
        arrays.append(value.tobytes())
        return list(value.shape)

    plain = to_plain(value)
    line = json.dumps(plain, default=packed, allow_nan=False, separators=(",", ":"))
    return b"".join([line.encode(), b"\n" * bool(arrays), *arrays])


def decode(cls: type[T], data: bytes, **how: Any) -> T:
    """What `encode` wrote, of 8 MiB at most; arrays are read only. Arguments and errors as of `from_plain`."""
    if len(data) > LARGEST_MESSAGE:
        raise CodecError(f"has {len(data)} bytes; expected at most {LARGEST_MESSAGE}")
    line, _, packed = data.partition(b"\n")
    arrays = io.BytesIO(packed)
    try:
        plain = loads(line)
    except ValueError as error:
        raise CodecError(f"is not JSON ({error})") from None
    value = from_plain(cls, plain, arrays=arrays, **how)
    if arrays.read(1):
        raise CodecError(f"has {len(packed)} bytes of arrays; expected {arrays.tell() - 1}")
    return value


def to_plain(value: Any, cls: Any = None) -> Any:
    """Data for JSON, but for arrays that are to be packed.

    Args:
        value: an object.
        cls: a dataclass that says which of its attributes, and of which types; `None`: its own.
    """
    hint: Any = cls or type(value)
    return codec_of(hint).write(value)


def from_plain(
    cls: type[T],
    plain: Any,
    *,
    sides: Sides | None = None,
    text: Callable[[str], str] = str,
    is_strict: bool = True,
    arrays: io.BytesIO | None = None,
) -> T:
    """The object of plain data. Fields that are missing get their defaults.

    Args:
        cls: its dataclass.
        plain: what `to_plain` made, or JSON of anybody.
        sides: lengths that are known.
        text: is applied to every text.
        is_strict: whether fields that the class does not have are refused, or left out.
        arrays: the bytes of those of which only the shapes stand in `plain`.

    Raises:
        CodecError: it is nothing of the kind.
    """
    hint: Any = cls
    how = Decoding(dict(sides or {}), text, is_strict, arrays or io.BytesIO())
    read: T = codec_of(hint).read(plain, how)
    return read
