"""The stub of the native module is what tools/stub.py makes of the lists of arguments."""

from __future__ import annotations

import stub


def test_the_stub_has_the_arguments_that_are_listed() -> None:
    text = stub.STUB.read_text(encoding="utf-8")
    assert stub.written(text) == text, "run python tools/stub.py"
