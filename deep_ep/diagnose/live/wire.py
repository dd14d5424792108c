"""Messages between the ranks of a watched buffer: plain data, laid out by the fields of dataclasses.

A message is a mark that stands for the layout, and then the values in the order of the fields: little
endian numbers, texts and lists with their length, arrays with their shape, at multiples of 8 bytes.
Nothing in it is ever run. What does not fit the layout is refused before anything of its size is
allocated.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import typing
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Callable, NamedTuple, TypeVar, Union

import numpy as np

from ..core.package import EPArgumentError
from ..core.printable_text import printable

T = TypeVar("T")

# The most that a TCPStore takes. A share of 1,024 ranks with two kinds of operations is 0.4 MB.
LARGEST_MESSAGE = 8 * 2**20
# Ranks have few kinds of operations and remarks.
_MOST_ENTRIES = 64
_LONGEST_TEXT = 4096
_MARK_BYTES = 8
_DTYPES = {np.float64: "<f8", np.int64: "<i8", np.bool_: "|u1"}


class _NotOurs(Exception):
    """What does not fit, in words."""


class _Codec(NamedTuple):
    """How values of one type are written and read; `layout` tells types apart."""

    layout: str
    write: Callable[[bytearray, Any], None]
    read: Callable[[_Message, dict[str, int]], Any]


class _Message:
    """The bytes of a message while they are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> int:
        """Goes on by so many bytes; where they begin."""
        begin = self.at
        if count > len(self.data) - begin:
            raise _NotOurs(f"ends after {len(self.data)} bytes, in the middle of a value")
        self.at = begin + count
        return begin

    def numbers(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack_from(self.data, self.take(form.size))

    def count(self, most: int, what: str) -> int:
        (count,) = self.numbers(_COUNT)
        if count > most:
            raise _NotOurs(f"has {count} {what} where {most} are allowed")
        return int(count)


_COUNT = struct.Struct("<I")


def encode(message: Any) -> bytes:
    """The bytes of a dataclass.

    Args:
        message: its fields are numbers, texts, arrays, dataclasses, and tuples, mappings from text and
            optional ones of these. The sides of arrays are named by `Annotated[..., ("n", 2)]`.
    """
    codec = _codec(type(message))
    out = bytearray(_mark(codec))
    codec.write(out, message)
    return bytes(out)


def decode(cls: type[T], data: bytes, where: str, *, num_ranks: int) -> T:
    """What `encode` wrote. Arrays are read only; texts are printable.

    Args:
        cls: the dataclass.
        data: the bytes.
        where: whose message it is, for the error.
        num_ranks: length of sides of arrays that are called "num_ranks".

    Raises:
        EPArgumentError: the bytes are no such message, or too many.
    """
    try:
        value: T = _decode(_codec(cls), data, num_ranks)
    except _NotOurs as wrong:
        raise EPArgumentError(
            f"{where}: the message of {len(data)} bytes {wrong}; expected a {cls.__name__} of this version "
            f"of deep_ep, at most {LARGEST_MESSAGE} bytes. Run the same version on all ranks, and let "
            "nobody else write to the store of the job."
        ) from None
    return value


def _decode(codec: _Codec, data: bytes, num_ranks: int) -> Any:
    if len(data) > LARGEST_MESSAGE:
        raise _NotOurs("is too long")
    message = _Message(data)
    begin = message.take(_MARK_BYTES)
    if data[begin : message.at] != _mark(codec):
        raise _NotOurs("begins with another mark")
    value = codec.read(message, {"num_ranks": num_ranks})
    if message.at != len(data):
        raise _NotOurs(f"goes on after its {message.at} bytes")
    return value


def _mark(codec: _Codec) -> bytes:
    return hashlib.sha256(codec.layout.encode()).digest()[:_MARK_BYTES]


def _codec(hint: Any) -> _Codec:
    """Of a type; made once."""
    return _made_codec(hint)


@functools.cache
def _made_codec(hint: Hashable) -> _Codec:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if is_dataclass(hint):
        return _of_dataclass(hint)
    if origin is Annotated and typing.get_origin(arguments[0]) is np.ndarray:
        _, dtype = typing.get_args(arguments[0])
        return _of_array(typing.get_args(dtype)[0], arguments[1])
    if origin is Annotated:
        return _of_mapping(arguments[0], arguments[1])
    if origin is Union:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _of_optional(_codec(inner))
    if origin is tuple:
        return _of_tuple(_codec(arguments[0]))
    return _of_mapping(hint, None)


def _of_dataclass(cls: Any) -> _Codec:
    hints = typing.get_type_hints(cls, include_extras=True)
    inner = [(f.name, _codec(hints[f.name])) for f in fields(cls)]

    def write(out: bytearray, value: Any) -> None:
        for name, codec in inner:
            codec.write(out, getattr(value, name))

    def read(message: _Message, sides: dict[str, int]) -> Any:
        # Sides are of one length within an object, and another in the next.
        own = dict(sides)
        return cls(*(codec.read(message, own) for _, codec in inner))

    names = ", ".join(f"{name}: {codec.layout}" for name, codec in inner)
    return _Codec(f"{cls.__name__}({names})", write, read)


def _of_array(scalar: Any, sides: tuple[Any, ...]) -> _Codec:
    form = struct.Struct(f"<{len(sides)}I")
    dtype = np.dtype(_DTYPES[scalar])

    def write(out: bytearray, value: Any) -> None:
        out += form.pack(*value.shape)
        out += bytes(-len(out) % 8)
        out += np.ascontiguousarray(value).astype(dtype, copy=False).tobytes()

    def read(message: _Message, lengths: dict[str, int]) -> Any:
        shape = message.numbers(form)
        count = 1
        for side, length in zip(sides, shape):
            expected = lengths.setdefault(side, length) if isinstance(side, str) else side
            if length != expected:
                raise _NotOurs(f"has an array of shape {list(shape)} where it must be {sides}")
            count *= length
        message.take(-message.at % 8)
        begin = message.take(count * dtype.itemsize)
        values = np.frombuffer(message.data, dtype, count, begin).reshape(shape)
        if scalar is not np.bool_:
            return values
        if values.max(initial=0) > 1:
            raise _NotOurs("has truth values that are none")
        return values.view(np.bool_)

    return _Codec(f"{dtype.str}{list(sides)}", write, read)


def _of_mapping(hint: Any, keys: tuple[str, ...] | None) -> _Codec:
    of_values = _codec(typing.get_args(hint)[1])
    text = _PLAIN[str]

    def write(out: bytearray, value: Mapping[str, Any]) -> None:
        out += _COUNT.pack(len(value))
        for key, item in value.items():
            text.write(out, key)
            of_values.write(out, item)

    def read(message: _Message, sides: dict[str, int]) -> dict[str, Any]:
        value = {}
        for _ in range(message.count(_MOST_ENTRIES, "entries")):
            key = text.read(message, sides)
            value[key] = of_values.read(message, sides)
        if keys is not None and set(value) != set(keys):
            raise _NotOurs(f"has entries {sorted(value)} where they must be {sorted(keys)}")
        return value

    return _Codec(f"{{{keys or 'text'}: {of_values.layout}}}", write, read)


def _of_optional(inner: _Codec) -> _Codec:
    there = _PLAIN[bool]

    def write(out: bytearray, value: Any) -> None:
        there.write(out, value is not None)
        if value is not None:
            inner.write(out, value)

    def read(message: _Message, sides: dict[str, int]) -> Any:
        return inner.read(message, sides) if there.read(message, sides) else None

    return _Codec(f"{inner.layout}?", write, read)


def _of_tuple(inner: _Codec) -> _Codec:
    def write(out: bytearray, value: tuple[Any, ...]) -> None:
        out += _COUNT.pack(len(value))
        for item in value:
            inner.write(out, item)

    def read(message: _Message, sides: dict[str, int]) -> tuple[Any, ...]:
        count = message.count(_MOST_ENTRIES, "entries")
        return tuple(inner.read(message, sides) for _ in range(count))

    return _Codec(f"[{inner.layout}]", write, read)


def _of_number(form: str) -> _Codec:
    packed = struct.Struct(form)

    def write(out: bytearray, value: Any) -> None:
        out += packed.pack(value)

    def read(message: _Message, _: dict[str, int]) -> Any:
        return message.numbers(packed)[0]

    return _Codec(form, write, read)


def _of_text() -> _Codec:
    def write(out: bytearray, value: str) -> None:
        # A host name may hold what UTF-8 cannot.
        encoded = value.encode(errors="backslashreplace")[:_LONGEST_TEXT]
        out += _COUNT.pack(len(encoded))
        out += encoded

    def read(message: _Message, _: dict[str, int]) -> str:
        begin = message.take(message.count(_LONGEST_TEXT, "bytes of text"))
        return printable(message.data[begin : message.at].decode(errors="replace"))

    return _Codec("text", write, read)


_PLAIN = {
    bool: _of_number("<?"),
    int: _of_number("<q"),
    float: _of_number("<d"),
    str: _of_text(),
}
