"""Reading JSON objects that may be damaged: every access checks the type and knows where it is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from deep_ep.diagnose.core.diagnosis import FloatArray
from deep_ep.errors import EPArgumentError

_NUMBER_TYPES = {int, float, type(None)}


class Fields:
    """One JSON object while it is read.

    Attributes:
        where: file and line, or whatever else errors should begin with.
        schema: what the object should have been written to.
        path: of this object within the outermost one, "" for that.
        value: the object.

    Every access raises EPArgumentError when the field is missing or of another type.
    """

    def __init__(self, where: str, schema: str, value: Any, path: str = "") -> None:
        self.where = where
        self.schema = schema
        self.path = path
        if not isinstance(value, dict):
            raise self.error(path or "the line", "an object", value)
        self.value = value

    def error(self, name: str, expected: str, given: Any) -> EPArgumentError:
        """The error for a field that is not as expected."""
        text = json.dumps(given)
        shown = text if len(text) <= 60 else text[:57] + "..."
        return EPArgumentError(
            f"{self.where}: {name} is {shown}; expected {expected} ({self.schema}). "
            "The file is damaged or was written by something else."
        )

    def name(self, key: str) -> str:
        """The field as errors name it."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str, expected: str) -> Any:
        """Any field."""
        if key not in self.value:
            raise EPArgumentError(
                f"{self.where}: field {self.name(key)} is missing; expected {expected} ({self.schema}). "
                "The file is damaged or was written by something else."
            )
        return self.value[key]

    def text(self, key: str) -> str:
        """A text."""
        value = self.get(key, "a text")
        if not isinstance(value, str):
            raise self.error(self.name(key), "a text", value)
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        """One of some words."""
        expected = " or ".join(json.dumps(word) for word in allowed)
        value = self.get(key, expected)
        if value not in allowed:
            raise self.error(self.name(key), expected, value)
        return str(value)

    def count(self, key: str, least: int = 0, below: float = math.inf) -> int:
        """An integer in a range."""
        expected = f"an integer of at least {least}"
        if below < math.inf:
            expected += f" and below {below}"
        return self._integer(self.name(key), self.get(key, expected), expected, least, below)

    def optional_count(self, key: str, below: float = math.inf) -> int | None:
        """An integer from 0 on, or null."""
        return None if self.get(key, "an integer or null") is None else self.count(key, below=below)

    def number(self, key: str) -> float:
        """A number; null is NaN."""
        return self._number(self.name(key), self.get(key, "a number or null"))

    def items(self, key: str, length: int | None = None) -> list[Any]:
        """A list, of a length."""
        expected = "a list" if length is None else f"a list of {length}"
        value = self.get(key, expected)
        if not isinstance(value, list):
            raise self.error(self.name(key), expected, value)
        if length is not None and len(value) != length:
            raise EPArgumentError(
                f"{self.where}: {self.name(key)} has {len(value)} entries; expected {length} "
                f"({self.schema}). The file is damaged or was written by something else."
            )
        return value

    def counts(
        self, key: str, length: int | None = None, least: int = 0, below: float = math.inf
    ) -> list[int]:
        """A list of integers in a range."""
        return [
            self._integer(f"{self.name(key)}[{i}]", item, "an integer in range", least, below)
            for i, item in enumerate(self.items(key, length))
        ]

    def texts(self, key: str, length: int | None = None) -> list[str]:
        """A list of texts."""
        values = self.items(key, length)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self.error(f"{self.name(key)}[{i}]", "a text", value)
        return values

    def numbers(self, key: str, length: int) -> FloatArray:
        """[length], null as NaN."""
        values = self.items(key, length)
        return np.array(
            [self._number(f"{self.name(key)}[{i}]", value) for i, value in enumerate(values)],
            dtype=np.float64,
        )

    def matrix(self, key: str, num_rows: int, num_columns: int) -> FloatArray:
        """[num_rows, num_columns], null as NaN."""
        rows = self.items(key, num_rows)
        name = self.name(key)
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != num_columns:
                given = f"{len(row)} entries" if isinstance(row, list) else json.dumps(row)[:60]
                raise EPArgumentError(
                    f"{self.where}: {name}[{i}] is {given}; expected a row of {num_columns}, so "
                    f"that the matrix is {num_rows} x {num_columns} ({self.schema}). "
                    "The file is damaged or was written by something else."
                )
        cells = [value for row in rows for value in row]
        values = _floats(cells)
        if values is None:
            values = np.array(
                [
                    self._number(f"{name}[{at // num_columns}][{at % num_columns}]", value)
                    for at, value in enumerate(cells)
                ]
            )
        return values.reshape(num_rows, num_columns)

    def mapping(self, key: str) -> dict[str, float]:
        """An object of numbers."""
        inner = self.object(key)
        return {name: inner.number(name) for name in inner.value}

    def object(self, key: str) -> Fields:
        """An object."""
        return Fields(self.where, self.schema, self.get(key, "an object"), self.name(key))

    def optional_object(self, key: str) -> Fields | None:
        """An object or null."""
        return None if self.get(key, "an object or null") is None else self.object(key)

    def objects(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [
            Fields(self.where, self.schema, value, f"{self.name(key)}[{i}]")
            for i, value in enumerate(self.items(key))
        ]

    def _number(self, name: str, value: Any) -> float:
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, "a number or null", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.error(name, "a number that fits a double, or null", value)
        return number

    def _integer(self, name: str, value: Any, expected: str, least: int, below: float) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
            raise self.error(name, expected, value)
        return value


def _floats(cells: Sequence[Any]) -> FloatArray | None:
    """All of them at once, null as NaN; None if one is no number, or too large for a double."""
    if not set(map(type, cells)) <= _NUMBER_TYPES:
        return None
    try:
        values = np.array([math.nan if cell is None else cell for cell in cells], np.float64)
    except OverflowError:
        return None
    return None if np.isinf(values).any() else values
