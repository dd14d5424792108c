"""The stub of the native module is what tools/stub.py makes of the lists of arguments."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_stub_has_the_arguments_that_are_listed() -> None:
    spec = importlib.util.spec_from_file_location("stub", ROOT / "tools" / "stub.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    stub = tool.STUB.read_text(encoding="utf-8")
    assert tool.written(stub) == stub, "run python tools/stub.py"
