"""Events of a torch profiler trace, read one after the other: memory does not grow with the file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core import safe_files
from ..core.package import EPArgumentError

_CHUNK = 1 << 20  # characters
# One event, or one other value of the file. Real ones have some kilobytes.
_LARGEST_VALUE = 16 << 20
_GZIP = b"\x1f\x8b"
_SPACE = " \t\r\n"
_EVENTS = "traceEvents"


class TraceStream:
    """One trace, JSON or gzip of it: an object with `traceEvents`, or the events alone.

    `header` is what else the file says, as far as it has been read; `distributedInfo` has the rank.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._file: Any = None
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0  # of _text
        self._passed = 0  # characters before _text
        self._ended = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The events; entries that are no objects are passed over.

        Raises:
            EPArgumentError: the trace is damaged, with the character; or it is a pipe, which can be read only once.
            OSError: the file cannot be read.
        """
        safe_files.require_regular(self.path)
        with open(self.path, "rb") as file:
            is_packed = file.read(len(_GZIP)) == _GZIP
        with (gzip.open if is_packed else open)(self.path, "rt", encoding="utf-8") as self._file:
            if self._peek() == "[":
                yield from self._array()
                return
            self._pass("{", "it is neither a JSON object nor a JSON array, so it is no trace")
            found = False
            for _ in self._items("}"):
                name = self._value()
                if not isinstance(name, str):
                    raise self._damage("a name is no text")
                self._pass(":", "':' is missing behind a name")
                if name == _EVENTS:
                    found = True
                    yield from self._array()
                else:
                    self.header[name] = self._value()
            if not found:
                raise self._damage(f"it has no {_EVENTS}, so it is no trace of the torch profiler")

    def _array(self) -> Iterator[dict[str, Any]]:
        self._pass("[", f"{_EVENTS} is no array")
        for _ in self._items("]"):
            event = self._value()
            if isinstance(event, dict):
                yield event

    def _items(self, end: str) -> Iterator[None]:
        """Stops before each item, until behind the sign that ends them."""
        if self._peek() != end:
            yield
            while self._peek() == ",":
                self._at += 1
                yield
        self._pass(end, f"',' or '{end}' is missing")

    def _value(self) -> Any:
        """The next value, of which all may have to be read first."""
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > _LARGEST_VALUE:
                    raise self._damage(error.msg, ahead=max(0, error.pos - self._at)) from None
            except (RecursionError, ValueError):  # the latter of Python's int
                raise self._damage("too deep, or a number of thousands of digits") from None
            else:
                # A number may go on in the next chunk, behind a part of "e-5".
                if end + len("e-") < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._read()

    def _pass(self, sign: str, otherwise: str) -> None:
        """Goes behind the sign that must come next."""
        if self._peek() != sign:
            raise self._damage(otherwise)
        self._at += 1

    def _peek(self) -> str:
        """The next character that is no space; `""` at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read()

    def _read(self) -> None:
        try:
            more = self._file.read(_CHUNK)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._damage(f"the gzip data is damaged: {error}") from None
        except UnicodeDecodeError as error:
            raise self._damage(f"it is not UTF-8: {error.reason}") from None
        self._passed += self._at
        self._text, self._at = self._text[self._at :] + more, 0
        self._ended = not more

    def _damage(self, why: str, ahead: int = 0) -> EPArgumentError:
        place = self._passed + self._at + ahead
        if self._ended and self._at + ahead >= len(self._text):
            why = f"{why}; the file ends here"
        return EPArgumentError(
            f"{self.path}: character {place}: {why}. Export it again, or leave this file out."
        )
