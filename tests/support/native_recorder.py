"""What a buffer asks of its native runtime."""

from __future__ import annotations

from typing import Any


class NativeRecorder:
    """A native runtime that writes down what it is asked."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.native, name)
