"""Warnings that show the program's line, however deep in the package they come from."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# Between two frames of the package: context managers and decorators.
_BETWEEN = {"contextlib", "functools"}


def warn(text: str) -> None:
    """Warns (RuntimeWarning) at the innermost line that is not of this package."""
    package, _, _ = __name__.partition(".")
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and _package_of(frame) in (package, *_BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
