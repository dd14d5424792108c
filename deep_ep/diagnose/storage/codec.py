"""How values are laid out in files: each kind of value is written, read and checked in one place.

Files may be damaged or hostile. What does not fit is refused with its path and with what was expected;
texts come out printable, numbers in ranges in which arithmetic does not overflow. JSON objects and
entries of archives are read alike.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from ..core.diagnosis import FloatArray
from ..core.package import EPArgumentError
from ..core.printable_text import printable

# Lengths of lists and of sides of arrays, by name: an object's first one with a name decides.
Sides = dict[str, int]

_MISSING = object()
_NUMBER_TYPES = {int, float, type(None)}
# Sums and products of what is measured stay far below the end of a double, integers fit int64.
_LARGEST = 1e20
_INTEGERS_END = 2**63


class Wrong(Exception):
    """A value that does not fit, and the way to it, which grows on its way out."""

    def __init__(self, what: str, advice: str | None = None) -> None:
        self.what = what
        self.advice = advice
        self.path: list[str | int] = []

    def at(self, key: str | int) -> Wrong:
        """Seen from outside of the object or list."""
        self.path.insert(0, key)
        return self

    def refusal(self, where: str, part: str, schema: str) -> EPArgumentError:
        """The error to raise.

        Args:
            where: the file, and the line.
            part: what its parts are called.
            schema: what it should have been written to.
        """
        name = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in self.path)
        name = f"{part} {name[1:]}" if name else "the line"
        if self.advice is not None:
            return EPArgumentError(printable(f"{where}: {name} {self.what}. ") + self.advice)
        return EPArgumentError(
            printable(f"{where}: {name} {self.what} ({schema}). ")
            + "The file is damaged or was written by something else."
        )


def not_as_expected(given: Any, expected: str) -> Wrong:
    """A value of another type, out of range, or none at all."""
    if given is _MISSING:
        return Wrong(f"is missing; expected {expected}")
    return Wrong(f"is {_shown(given)}; expected {expected}")


class Codec(ABC):
    """How values of one kind are written and read.

    Attributes:
        absent: what is read where a field of an object is not there; by default nothing that fits.
        left_out: whether a field that is None is not written.
    """

    absent: Any = _MISSING
    left_out = False

    @property
    @abstractmethod
    def type_name(self) -> str:
        """In words, as in docs/records.md."""

    @abstractmethod
    def expected(self, sides: Sides) -> str:
        """What is read, in words."""

    def write(self, value: Any) -> Any:
        """The value as it is stored."""
        return value

    @abstractmethod
    def read(self, value: Any, sides: Sides) -> Any:
        """The value that was stored; raises Wrong."""

    def read_many(self, keys: Iterable[str | int], values: Sequence[Any], sides: Sides) -> Any:
        """Several ones; the keys name them in errors."""
        read = []
        for key, value in zip(keys, values):
            try:
                read.append(self.read(value, sides))
            except Wrong as wrong:
                raise wrong.at(key) from None
        return read


@dataclass(frozen=True)
class Schema(Codec):
    """The name of the layout, with its version."""

    name: str
    type_name = "text"

    def expected(self, sides: Sides) -> str:
        return "a text"

    def read(self, value: Any, sides: Sides) -> str:
        if TEXT.read(value, sides) != self.name:
            raise Wrong(
                f"is {value!r}; this version reads {self.name!r} only",
                "Read the file with the version of deep_ep that wrote it.",
            )
        return self.name


class Text(Codec):
    """Any text; printable when it has been read."""

    type_name = "text"

    def expected(self, sides: Sides) -> str:
        return "a text"

    def read(self, value: Any, sides: Sides) -> str:
        if not isinstance(value, str):
            raise not_as_expected(value, "a text")
        return printable(value)


@dataclass(frozen=True)
class Word(Codec):
    """One of some words."""

    words: tuple[str, ...]
    type_name = "text"

    def expected(self, sides: Sides) -> str:
        return " or ".join(json.dumps(word) for word in self.words)

    def read(self, value: Any, sides: Sides) -> str:
        if value not in self.words:
            raise not_as_expected(value, self.expected(sides))
        return str(value)


@dataclass(frozen=True)
class Integer(Codec):
    """An integer in a range, which may end at the length of a side; it may be the length of some."""

    least: int = 0
    below: int | str = _INTEGERS_END
    length_of: tuple[str, ...] = ()
    type_name = "integer"

    def expected(self, sides: Sides) -> str:
        below = self._below(sides)
        end = f" and below {below}" if below < _INTEGERS_END else ""
        return f"an integer of at least {self.least}{end}"

    def read(self, value: Any, sides: Sides) -> int:
        below = self.below if type(self.below) is int else self._below(sides)
        # True is an integer to Python.
        if type(value) is not int or not self.least <= value < below:
            raise not_as_expected(value, self.expected(sides))
        for side in self.length_of:
            sides[side] = value
        return value

    def read_many(self, keys: Iterable[str | int], values: Sequence[Any], sides: Sides) -> Any:
        is_plain = not self.length_of and set(map(type, values)) == {int}
        if is_plain and self.least <= min(values) and max(values) < self._below(sides):
            return values
        return super().read_many(keys, values, sides)

    def _below(self, sides: Sides) -> int:
        return sides[self.below] if isinstance(self.below, str) else self.below


@dataclass(frozen=True)
class Number(Codec):
    """A float, rounded when it is written; NaN where it is not known.

    Attributes:
        digits: behind the point.
        least, below: range.
        words: for a range of its own.
        absent: see `Codec`; None is read as NaN.
    """

    digits: int
    least: float = -_LARGEST
    below: float = math.nextafter(_LARGEST, math.inf)
    words: str = f"a number that fits a double, up to {_LARGEST:.0e}, or null"
    absent: Any = _MISSING
    type_name = "number"

    def expected(self, sides: Sides) -> str:
        return "a number or null"

    def write(self, value: float) -> float | None:
        return round(float(value), self.digits) if math.isfinite(value) else None

    def read(self, value: Any, sides: Sides) -> float:
        if value is None:
            return math.nan
        if type(value) is float and self.least <= value < self.below:
            return value
        if type(value) not in _NUMBER_TYPES:
            raise not_as_expected(value, self.expected(sides))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not self.least <= number < self.below:
            raise not_as_expected(value, self.words)
        return number


@dataclass(frozen=True)
class Array(Codec):
    """float64 with one or two sides, rounded when it is written; NaN where it is not known."""

    digits: int
    sides: tuple[str, ...]

    @property
    def type_name(self) -> str:
        return f"[{', '.join(self.sides)}] number"

    def expected(self, sides: Sides) -> str:
        return f"a list of {sides.get(self.sides[0], 'numbers')}"

    def write(self, value: FloatArray) -> Any:
        rounded = np.round(np.asarray(value, dtype=np.float64), self.digits)
        cells = rounded.astype(object)
        cells[~np.isfinite(rounded)] = None
        return cells.tolist()

    def read(self, value: Any, sides: Sides) -> FloatArray:
        rows = _entries(self, value, self.sides[0], sides)
        if len(self.sides) == 1:
            return self._read(rows, sides, lambda at: (at,))
        num_columns = sides[self.sides[1]]
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != num_columns:
                given = f"{len(row)} entries" if isinstance(row, list) else _shown(row)
                raise Wrong(
                    f"is {given}; expected a row of {num_columns}, so that the matrix is "
                    f"{len(rows)} x {num_columns}"
                ).at(i)
        cells = [value for row in rows for value in row]
        values = self._read(cells, sides, lambda at: divmod(at, num_columns))
        return values.reshape(len(rows), num_columns)

    def read_many(self, keys: Iterable[str | int], values: Sequence[Any], sides: Sides) -> Any:
        """Rows are looked at together, which for few ranks takes a fraction of the time."""
        if len(self.sides) > 1:
            return super().read_many(keys, values, sides)
        length = sides[self.sides[0]]
        cells: list[Any] = []
        for key, value in zip(keys, values):
            if type(value) is not list or len(value) != length:
                try:
                    _entries(self, value, self.sides[0], sides)
                except Wrong as wrong:
                    raise wrong.at(key) from None
            cells += value
        found = self._read(cells, sides, lambda at: (list(keys)[at // length], at % length))
        return found.reshape(len(values), length)

    def _read(
        self, cells: Sequence[Any], sides: Sides, path_to: Callable[[int], tuple[str | int, ...]]
    ) -> FloatArray:
        values = _floats(cells)
        if values is not None:
            return values
        one = Number(self.digits)
        for at, cell in enumerate(cells):
            try:
                one.read(cell, sides)
            except Wrong as wrong:
                for key in reversed(path_to(at)):
                    wrong.at(key)
                raise
        raise AssertionError("a list of numbers, none of which is wrong")


@dataclass(frozen=True)
class Int64Array(Codec):
    """int64 in an archive; a side is named, as long as the longest of some that are, or any."""

    sides: tuple[str | tuple[str, ...] | None, ...]
    type_name = "int64"

    def expected(self, sides: Sides) -> str:
        return f"int64 of shape {self._shape(sides)}".replace("None", "any")

    def read(self, value: Any, sides: Sides) -> Any:
        shape = self._shape(sides)
        fits = (
            isinstance(value, np.ndarray)
            and value.dtype == np.int64
            and value.ndim == len(shape)
            and all(want in (None, have) for want, have in zip(shape, value.shape))
        )
        if not fits:
            raise not_as_expected(value, self.expected(sides))
        return value

    def _shape(self, sides: Sides) -> list[int | None]:
        names = [(side,) if isinstance(side, str) else side for side in self.sides]
        return [max(sides[name] for name in some) if some else None for some in names]


@dataclass(frozen=True)
class List(Codec):
    """Values of one kind.

    Attributes:
        inner: the kind.
        side: name of its length, or the names of its entries; None: of any length.
        make: of what was read.
        most: so many there may be.
    """

    inner: Codec
    side: str | tuple[str, ...] | None = None
    make: Callable[[Any], Any] = list
    most: int | None = None

    @property
    def type_name(self) -> str:
        of = self.inner.type_name
        if isinstance(self.side, tuple):
            return f"[{', '.join(self.side)}]"
        return f"list of {of}s" if self.side is None else f"[{self.side}] {of}"

    def expected(self, sides: Sides) -> str:
        if isinstance(self.side, tuple):
            return f"a list of {len(self.side)}"
        return f"a list of {sides.get(self.side or '', f'{self.inner.type_name}s')}"

    def write(self, value: Any) -> list[Any]:
        entries = value.tolist() if isinstance(value, np.ndarray) else value
        return [self.inner.write(entry) for entry in entries]

    def read(self, value: Any, sides: Sides) -> Any:
        side = len(self.side) if isinstance(self.side, tuple) else self.side
        entries = _entries(self, value, side, sides)
        if self.most is not None and len(entries) > self.most:
            raise not_as_expected(value, f"a list of at most {self.most}")
        return self.make(self.inner.read_many(range(len(entries)), entries, sides))


@dataclass(frozen=True)
class Numbering(List):
    """Integers from 0 on, each of which occurs; how many there are becomes the length of a side.

    Attributes:
        of: what is numbered.
    """

    of: str = ""

    def read(self, value: Any, sides: Sides) -> Any:
        numbers = super().read(value, sides)
        count = max(numbers, default=-1) + 1
        if not set(range(count)).issubset(numbers):
            raise not_as_expected(value, f"every {self.of} from 0 on to have a rank")
        sides[f"num_{self.of}s"] = count
        return numbers


@dataclass(frozen=True)
class Maybe(Codec):
    """A value or null.

    Attributes:
        inner: the value's kind.
        absent: see `Codec`; for fields that older files lack, and those that are left out.
        left_out: see `Codec`.
    """

    inner: Codec
    absent: Any = _MISSING
    left_out: bool = False

    @property
    def type_name(self) -> str:
        return f"{self.inner.type_name} or null"

    def expected(self, sides: Sides) -> str:
        return f"{self.inner.expected(sides)} or null"

    def write(self, value: Any) -> Any:
        return None if value is None else self.inner.write(value)

    def read(self, value: Any, sides: Sides) -> Any:
        if value is _MISSING:
            raise not_as_expected(value, self.expected(sides))
        return None if value is None else self.inner.read(value, sides)


@dataclass(frozen=True)
class MappingOf(Codec):
    """Values of one kind by a text."""

    inner: Codec
    type_name = "object"

    def expected(self, sides: Sides) -> str:
        return "an object"

    def write(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.inner.write(item) for name, item in value.items()}

    def read(self, value: Any, sides: Sides) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise not_as_expected(value, self.expected(sides))
        read = self.inner.read_many(value, list(value.values()), sides)
        return dict(zip(map(printable, value), read))


class Object(Codec):
    """Fields with names, in this order.

    Attributes:
        fields: the codec of each.
    """

    type_name = "object"

    def __init__(self, make: Callable[..., Any], *rows: tuple[Any, ...]) -> None:
        """Of rows.

        Args:
            make: what makes the value of its fields, which are passed by name.
            rows: a codec, and the names of the fields that it reads and writes.
        """
        self.fields: dict[str, Codec] = {name: codec for codec, *names in rows for name in names}
        self._make = make
        # Arrays of one row are read together.
        self._rows: list[tuple[Codec, str, list[str]]] = []
        for codec, *names in rows:
            together = isinstance(codec, Array)
            starts = names[:1] if together else names
            self._rows += [(codec, name, names[1:] if together else []) for name in starts]

    def expected(self, sides: Sides) -> str:
        return "an object"

    def write(self, value: Any) -> dict[str, Any]:
        """The fields of a dictionary, or of a data class."""
        given = value if isinstance(value, dict) else vars(value)
        return {
            name: codec.write(given[name])
            for name, codec in self.fields.items()
            if not (codec.left_out and given[name] is None)
        }

    def read(self, value: Any, sides: Sides) -> Any:
        if not isinstance(value, dict):
            raise not_as_expected(value, self.expected(sides))
        # Sides are of one length within an object, and another in the next.
        own = dict(sides)
        found: dict[str, Any] = {}
        for codec, name, others in self._rows:
            if others:
                names = (name, *others)
                given = [value.get(name, codec.absent) for name in names]
                found.update(zip(names, codec.read_many(names, given, own)))
                continue
            try:
                found[name] = codec.read(value.get(name, codec.absent), own)
            except Wrong as wrong:
                raise wrong.at(name) from None
        return self._make(**found)


TEXT = Text()


def _entries(codec: Codec, value: Any, side: str | int | None, sides: Sides) -> list[Any]:
    """A list of the side's length; if that is not known yet, it is from now on."""
    length = sides.get(side) if isinstance(side, str) else side
    if not isinstance(value, list):
        raise not_as_expected(value, codec.expected(sides))
    if length is not None and len(value) != length:
        raise Wrong(f"has {len(value)} entries; expected {length}")
    if isinstance(side, str):
        sides[side] = len(value)
    return value


def _floats(cells: Sequence[Any]) -> FloatArray | None:
    """All of them at once, null as NaN; None if one is no number, or too large."""
    types = set(map(type, cells))
    if not types <= _NUMBER_TYPES:
        return None
    try:
        if type(None) in types:
            cells = [math.nan if cell is None else cell for cell in cells]
        values = np.array(cells, np.float64)
    except OverflowError:
        return None
    return None if (np.abs(values) > _LARGEST).any() else values


def _shown(given: Any) -> str:
    """The begin of a value, as in the file."""
    if isinstance(given, np.ndarray):
        return f"{given.dtype} of shape {list(given.shape)}" if given.shape else str(given)
    try:
        text = json.dumps(given)
    except RecursionError:
        return "deeply nested"
    return text if len(text) <= 60 else text[:57] + "..."
