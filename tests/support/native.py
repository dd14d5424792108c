"""The C++ tests (tests/cpp) as pytest cases: tools/sanitize.py builds them once, here each case runs alone."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import sanitize


def cases(name: str) -> list[str]:
    """Names of the cases of tests/cpp/test_<name>.cpp."""
    text = (sanitize.TESTS / f"test_{name}.cpp").read_text()
    return re.findall(r"^TEST\((\w+)\)", text, re.MULTILINE)


@cache
def folder_with(programs: tuple[Any, ...]) -> Path:
    """Build `programs`, all at once so that the compiler uses every core, and return their folder."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++: apt-get install g++")
    folder: Path = sanitize.build(list(programs))
    return folder


def check(
    program: Any, folder: Path, case: str, seed: int | None, replay: Callable[..., None]
) -> None:
    """Run one case of a program; fail with what it, or its sanitizer, wrote."""
    seed = 1 if seed is None else seed
    replay("--schedule-seed", seed)
    command, status, output = sanitize.execute(program, folder, ["--seed", str(seed), case])
    if status != 0:
        text = "\n".join([*sanitize.telling(output.splitlines()), f"again: {shlex.join(command)}"])
        pytest.fail(text, pytrace=False)
