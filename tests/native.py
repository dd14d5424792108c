"""The C++ tests (tests/cpp) as pytest cases: tools/sanitize.py builds them once, here each case runs alone."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_tool() -> Any:
    """tools/sanitize.py as a module."""
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools" / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def cases(name: str) -> list[str]:
    """Names of the cases of tests/cpp/test_<name>.cpp."""
    text = (TOOL.TESTS / f"test_{name}.cpp").read_text()
    return re.findall(r"^TEST\((\w+)\)", text, re.MULTILINE)


def plain(name: str) -> Any:
    """The program of tests/cpp/test_<name>.cpp without a sanitizer."""
    return TOOL.plain(TOOL.TESTS / f"test_{name}.cpp")


@cache
def folder_with(programs: tuple[Any, ...]) -> Path:
    """Build `programs`, all at once so that the compiler uses every core, and return their folder."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++: apt-get install g++")
    folder: Path = TOOL.build(list(programs))
    return folder


def check(
    program: Any, folder: Path, case: str, seed: int | None, replay: Callable[..., None]
) -> None:
    """Run one case of a program; fail with what it, or its sanitizer, wrote."""
    seed = 1 if seed is None else seed
    replay("--schedule-seed", seed)
    command, status, output = TOOL.execute(program, folder, ["--seed", str(seed), case])
    if status != 0:
        text = "\n".join([*TOOL.telling(output.splitlines()), f"again: {shlex.join(command)}"])
        pytest.fail(text, pytrace=False)
