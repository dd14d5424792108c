"""Warnings show the line of the program, not one of the package."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

IN_THE_PACKAGE = """
import contextlib
from deep_ep.base.warning import warn

@contextlib.contextmanager
def context():
    warn("something")
    yield

def operation():
    with context():
        pass
"""


def test_it_shows_the_innermost_line_that_is_not_of_the_package() -> None:
    module: dict[str, Any] = {"__name__": "deep_ep.ops.somewhere"}
    exec(IN_THE_PACKAGE, module)  # noqa: S102 - the frames of a module of the package
    frame = inspect.currentframe()
    assert frame is not None
    with pytest.warns(RuntimeWarning, match="something") as caught:
        line, _ = frame.f_lineno, module["operation"]()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]
