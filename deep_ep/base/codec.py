"""Typed objects to plain data and bytes, and back: one codec for records, messages and dumps.

The types of a dataclass's fields say all: bool, int, float, str, `Literal`, `Optional`, lists and tuples, mappings,
NumPy arrays, and dataclasses of these; `Any` is JSON. Beside a type stand in `Annotated`

- names: of a list's or array's sides, which have one length each within an object; of a pair's parts; a mapping's keys;
- `Range`, `Digits`, `Most`, `Length` and `OR_EMPTY`;
- functions of the value and the lengths of sides, which return the value or raise `CodecError`.

What is read may be damaged or hostile. Nothing in it is run; what does not fit is refused with the way to it and what
was expected; nothing larger than the bytes themselves is allocated.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import re
import typing
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Callable, Literal, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

Sides = dict[str, int]

# The most that a TCPStore takes. What a rank of 1,024 tells of two kinds of operations is half a MiB.
LARGEST_MESSAGE = 8 << 20
# Sums and products of what is measured stay far below the end of a double; integers fit int64.
_LARGEST, _INTEGERS_END = 1e20, 2**63
# As a key; each has one.
_INTEGER = re.compile("0|-?[1-9][0-9]{0,18}")
# A list may be empty, whatever the length of its side.
OR_EMPTY = object()


@dataclass(frozen=True)
class Range:
    """Of a number: `least` or more, and less than `below`, which may be a side."""

    least: int = 0
    below: int | str = _INTEGERS_END


@dataclass(frozen=True)
class Digits:
    """Numbers are rounded to so many behind the point. Arrays with this are written as lists, others packed."""

    count: int


@dataclass(frozen=True)
class Most:
    """So many entries may a list or mapping have."""

    entries: int


@dataclass(frozen=True)
class Length:
    """Of an integer: it is the length of these sides."""

    sides: tuple[str, ...]


class CodecError(ValueError):
    """What does not fit.

    Attributes:
        what: is wrong.
        path: the way to it; empty: all of it.
        advice: what to do, where something better is known than that the data is damaged.
    """

    def __init__(self, what: str, *path: str | int, advice: str = "") -> None:
        super().__init__(what)
        self.what, self.path, self.advice = what, list(path), advice

    @classmethod
    def of(cls, given: Any, expected: str) -> CodecError:
        """A value of another type, or out of range."""
        return cls(f"is {_shown(given)}; expected {expected}")

    @property
    def name(self) -> str:
        """The path in words: "calls[0].number"."""
        # In a pickle keys may be anything.
        keys = (f".{_cut(k)}" if isinstance(k, str) else f"[{_shown(k)}]" for k in self.path)
        return "".join(keys).removeprefix(".")

    def __str__(self) -> str:
        return f"{self.name or 'it'} {self.what}"


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


# ---- the codecs of types


@dataclass(frozen=True)
class Decoding:
    """See `from_plain`; `sides` grows while an object is read."""

    sides: Sides
    text: Callable[[str], str]
    is_strict: bool
    arrays: io.BytesIO

    def inside(self, key: str | int, codec: Codec, value: Any) -> Any:
        """Reads what stands at that key of an object or list."""
        try:
            return codec.read(value, self)
        except CodecError as error:
            error.path.insert(0, key)
            raise


@dataclass(frozen=True)
class Codec:
    """How values of a type are read and written; `name` and `expected` say so in words.

    Attributes:
        sets_sides: whether it is the length of sides, and so is read before what has them.
    """

    name: str
    expected: str
    read: Callable[[Any, Decoding], Any]
    write: Callable[[Any], Any] = lambda value: value
    sets_sides: bool = False


@functools.cache
def codec_of(hint: Any) -> Codec:
    """The codec of a type."""
    rules: list[Any] = []
    if typing.get_origin(hint) is Annotated:
        hint, *rules = typing.get_args(hint)
    codec = _unchecked(hint, {type(rule): rule for rule in rules}, OR_EMPTY in rules)
    checks = [rule for rule in rules if callable(rule)]
    if not checks:
        return codec

    def read(value: Any, how: Decoding) -> Any:
        value = codec.read(value, how)
        for check in checks:
            value = check(value, how.sides)
        return value

    return replace(codec, read=read)


def _unchecked(hint: Any, rules: dict[type, Any], or_empty: bool) -> Codec:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    names: tuple[Any, ...] = rules.get(tuple, ())
    most = rules.get(Most, Most(_INTEGERS_END)).entries
    if hint is bool or origin is Literal:
        return _word(inner or (False, True))
    if hint is Any:
        return Codec("JSON", "JSON", _read_json)
    if hint is str:
        return Codec("text", "a text", _read_text)
    if hint is int:
        return _integer(rules.get(Range, Range(-_INTEGERS_END)), rules.get(Length, Length(())))
    if hint is float:
        return _number(rules.get(Digits))
    if is_dataclass(hint):
        return _object(hint)
    # With NumPy 2.5 on Python 3.12 an NDArray is an alias that has its own name.
    if origin is np.ndarray or origin is npt.NDArray:
        scalar = typing.get_args(inner[1])[0] if origin is np.ndarray else inner[0]
        dtype = np.dtype(scalar).newbyteorder("<")
        if Digits not in rules:
            return _packed_array(names, dtype)
        cell = codec_of(Annotated[int, rules[Range]]) if Range in rules else codec_of(float)
        return _listed_array(names, rules[Digits].count, cell, dtype)
    if type(None) in inner:
        return _optional(codec_of(next(one for one in inner if one is not type(None))))
    if hasattr(hint, "_fields"):  # of a NamedTuple
        parts = typing.get_type_hints(hint, include_extras=True).values()
        return _list([*map(codec_of, parts)], hint._fields, lambda found: hint(*found))
    if origin is tuple and inner[-1] is not ...:
        return _list([*map(codec_of, inner)], names, tuple)
    if origin is not tuple and len(inner) == 2:
        is_word = typing.get_origin(inner[0]) is Literal
        words = typing.get_args(inner[0]) if is_word else ()
        return _mapping(codec_of(inner[0]), words, codec_of(inner[1]), names, most)
    make = tuple if origin is tuple else list
    return _list(codec_of(inner[0]), (*names, "")[0], make, most, or_empty)


def _read_json(value: Any, how: Decoding) -> Any:
    try:
        _check_numbers(value)
    except RecursionError:
        raise CodecError("is nested too deeply") from None
    return value


def _check_numbers(value: Any) -> None:
    """Of JSON: they are finite, and integers have 64 bits."""
    if isinstance(value, (list, dict)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            try:
                _check_numbers(one)
            except CodecError as error:
                error.path.insert(0, key)
                raise
    elif isinstance(value, float) and not math.isfinite(value):
        raise CodecError("is a number that is not finite")
    elif type(value) is int and not -_INTEGERS_END < value < _INTEGERS_END:
        raise CodecError("is a number of more than 64 bits")


def _read_text(value: Any, how: Decoding) -> str:
    if type(value) is not str:
        raise CodecError.of(value, "a text")
    return how.text(value)


def _word(words: tuple[Any, ...]) -> Codec:
    expected = " or ".join(map(json.dumps, words))

    def read(value: Any, how: Decoding) -> Any:
        # 1 is True to Python.
        if type(value) is not type(words[0]) or value not in words:
            raise CodecError.of(value, expected)
        return value

    return Codec("text", expected, read)


def _integer(allowed: Range, length: Length) -> Codec:
    least, below = allowed.least, allowed.below
    expected = f"an integer of at least {least}" if least > -_INTEGERS_END else "an integer"

    def read(value: Any, how: Decoding) -> int:
        most = how.sides.get(below, _INTEGERS_END) if isinstance(below, str) else below
        if type(value) is not int or not least <= value < most:
            raise CodecError.of(value, expected + f" and below {most}" * (most < _INTEGERS_END))
        how.sides.update(dict.fromkeys(length.sides, value))
        return value

    return Codec("integer", expected, read, sets_sides=bool(length.sides))


def _number(digits: Digits | None) -> Codec:
    """NaN, and what is no number, is null."""

    def read(value: Any, how: Decoding) -> float:
        if value is None:
            return math.nan
        if type(value) not in (int, float):
            raise CodecError.of(value, "a number or null")
        if not abs(value) <= _LARGEST:
            raise CodecError.of(
                value, f"a number that fits a double, up to {_LARGEST:.0e}, or null"
            )
        return float(value)

    def write(value: float) -> float | None:
        number = float(value) if digits is None else round(float(value), digits.count)
        return number if math.isfinite(number) else None

    return Codec("number", "a number or null", read, write)


def _optional(inner: Codec) -> Codec:
    return Codec(
        f"{inner.name} or null",
        f"{inner.expected} or null",
        lambda value, how: None if value is None else inner.read(value, how),
        lambda value: None if value is None else inner.write(value),
    )


def _list(
    inner: Codec | list[Codec],
    side: str | tuple[str, ...],
    make: Callable[[Iterable[Any]], Any],
    most: int = _INTEGERS_END,
    or_empty: bool = False,
) -> Codec:
    """Of any length, or that of a side; of so many values, each of a type of its own, where `inner` is a list."""
    codecs: Iterable[Codec]
    if isinstance(inner, list):
        codecs, name = inner, f"[{', '.join(side)}]"
        expected = f"a list of {name}"
    else:
        codecs = itertools.repeat(inner)
        name = f"[{side}] {inner.name}" if side else f"list of {inner.name}s"
        expected = f"a list of {inner.name}s"

    def read(value: Any, how: Decoding) -> Any:
        wanted = len(inner) if isinstance(inner, list) else how.sides.get(str(side))
        # In a pickle there are tuples.
        if not isinstance(value, (list, tuple)):
            raise CodecError.of(value, expected)
        if len(value) > most:
            raise CodecError.of(value, f"a list of at most {most}")
        if wanted not in (None, len(value)) and (value or not or_empty):
            raise CodecError(f"has {len(value)} entries; expected {wanted}")
        if isinstance(side, str) and side and (value or not or_empty):
            how.sides[side] = len(value)
        return make([how.inside(at, *pair) for at, pair in enumerate(zip(codecs, value))])

    def write(value: Iterable[Any]) -> list[Any]:
        return [codec.write(entry) for codec, entry in zip(codecs, value)]

    return Codec(name + ", or empty" * or_empty, expected, read, write)


def _mapping(
    key: Codec, words: tuple[str, ...], inner: Codec, keys: tuple[str, ...], most: int
) -> Codec:
    """By any text, some words, or integers; or with an entry for each of `keys`."""
    known = set(keys or words)

    def read(value: Any, how: Decoding) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise CodecError.of(value, "an object")
        if len(value) > most:
            raise CodecError(f"has {len(value)} entries; expected at most {most}")
        missing = [name for name in keys if name not in value]
        if missing:
            raise CodecError(f"is missing; expected {inner.expected}", missing[0])
        found = {}
        for name, one in value.items():
            if known and name not in known:
                if not how.is_strict:
                    continue
                raise CodecError(f"is not known; expected {_shown(sorted(known))}", name)
            is_number = key.name == "integer" and _INTEGER.fullmatch(name)
            number = int(name) if is_number else name
            found[how.inside(name, key, number)] = how.inside(name, inner, one)
        return found

    def write(value: Any) -> dict[str, Any]:
        return {str(name): inner.write(value[name]) for name in keys or value}

    return Codec("object", "an object", read, write)


def _object(cls: Any) -> Codec:
    hints = typing.get_type_hints(cls, include_extras=True)
    codecs = {field.name: codec_of(hints[field.name]) for field in fields(cls)}
    defaults = {f.name for f in fields(cls) if not f.default is f.default_factory is MISSING}
    in_order = sorted(codecs, key=lambda name: not codecs[name].sets_sides)

    def read(value: Any, how: Decoding) -> Any:
        if not isinstance(value, dict):
            raise CodecError.of(value, "an object")
        own = Decoding(dict(how.sides), how.text, how.is_strict, how.arrays)
        missing = [name for name in codecs if name not in value and name not in defaults]
        if missing:
            raise CodecError(f"is missing; expected {codecs[missing[0]].expected}", missing[0])
        unknown = value.keys() - codecs.keys() if how.is_strict else ()
        if unknown:
            raise CodecError(f"is no field of {cls.__name__}", min(unknown))
        found = {n: own.inside(n, codecs[n], value[n]) for n in in_order if n in value}
        return cls(**found)

    def write(value: Any) -> dict[str, Any]:
        return {name: codec.write(getattr(value, name)) for name, codec in codecs.items()}

    return Codec("object", "an object", read, write)


def _listed_array(sides: tuple[str, ...], digits: int, cell: Codec, dtype: Any) -> Codec:
    """A list of numbers, or one of rows, in as many digits; null is NaN."""
    rows = cell
    for side in reversed(sides):
        rows = _list(rows, side, list)

    def read(value: Any, how: Decoding) -> Any:
        found = _floats(value, len(sides)) if dtype == np.float64 else None
        if found is not None and [how.sides.get(side) for side in sides] == [*found.shape]:
            return found
        cells = np.array(rows.read(value, how), dtype)
        return cells.reshape([how.sides.get(side, 0) for side in sides])

    def write(value: Any) -> Any:
        rounded = np.round(value, digits)
        cells = rounded.astype(object)
        cells[~np.isfinite(rounded)] = None
        return cells.tolist()

    name = f"[{', '.join(sides)}] {cell.name}"
    return Codec(name, rows.expected, read, write)


def _floats(value: Any, ndim: int) -> Any:
    """All numbers of a list, or of rows, at once; `None` where anything is wrong with one of them."""
    try:
        cells = value if ndim == 1 else [*itertools.chain.from_iterable(value)]
        kinds = set(map(type, cells))
        if not kinds <= {int, float, type(None)}:
            return None
        numbers = [cell for cell in cells if cell is not None] if type(None) in kinds else cells
        if numbers and not -_LARGEST <= min(numbers) <= max(numbers) <= _LARGEST:
            return None
        return np.array(value, np.float64)
    except (TypeError, ValueError):
        return None


def _packed_array(sides: tuple[Any, ...], dtype: Any) -> Codec:
    """The bytes of an array, behind the JSON where its shape stands; in archives the array itself."""

    def expected(lengths: Sides) -> str:
        shape = [str(side if isinstance(side, int) else lengths.get(side, "any")) for side in sides]
        return f"{dtype.name} of shape [{', '.join(shape)}]"

    def read(value: Any, how: Decoding) -> Any:
        shape = list(value.shape) if isinstance(value, np.ndarray) else value
        lengths = dict(how.sides)
        fits = (
            isinstance(shape, list)
            and len(shape) == len(sides)
            and all(type(length) is int and length >= 0 for length in shape)
            and shape
            == [s if isinstance(s, int) else lengths.setdefault(s, n) for s, n in zip(sides, shape)]
        )
        if not fits or getattr(value, "dtype", dtype) != dtype:
            raise CodecError.of(value, expected(how.sides))
        how.sides.update(lengths)
        return value if isinstance(value, np.ndarray) else _unpacked(shape, dtype, how.arrays)

    return Codec(dtype.name, expected({}), read, lambda value: np.asarray(value, dtype))


def _unpacked(shape: list[int], dtype: Any, arrays: io.BytesIO) -> Any:
    size = math.prod(shape) * dtype.itemsize
    data = arrays.read(min(size, arrays.getbuffer().nbytes))
    if len(data) != size:
        raise CodecError(
            f"has {len(data)} bytes; expected {size}, for {dtype.name} of shape {shape}"
        )
    if dtype == np.bool_ and max(data, default=0) > 1:
        raise CodecError("has truth values that are none")
    try:
        return np.ndarray(shape, dtype, data)
    except (ValueError, OverflowError):  # empty, but for one side that no array has
        raise CodecError.of(shape, "the shape of an array") from None


def _shown(given: Any) -> str:
    """The begin of a value, as in the file."""
    if isinstance(given, np.ndarray):
        return f"{given.dtype} of shape {list(given.shape)}" if given.shape else _cut(str(given))
    try:
        text = json.dumps(given)
    except RecursionError:
        return "deeply nested"
    except (TypeError, ValueError):  # from a pickle
        return f"of type {type(given).__name__}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
