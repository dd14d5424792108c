"""The C++ tests under address, undefined and thread sanitizers, one pytest case per C++ case.

`make sanitize` runs the same programs without pytest, each in one go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sanitize
from support import native

PROGRAMS = tuple(sanitize.programs([]))
CLEAN = [program for program in PROGRAMS if not program.must_fail]
MUST_FAIL = [program for program in PROGRAMS if program.must_fail]

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("program", "case"),
    [
        pytest.param(program, case, id=f"{program.variant}-{case}")
        for program in CLEAN
        for case in native.cases(program.source.stem.removeprefix("test_"))
    ],
)
def test_sanitizer_is_content(
    program: Any, case: str, replay: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    folder = native.folder_with(PROGRAMS)
    native.check(program, folder, case, request.config.getoption("--schedule-seed"), replay)


@pytest.mark.parametrize(
    "program", MUST_FAIL, ids=lambda program: f"{program.variant}-{program.case}"
)
def test_sanitizer_objects_to_what_is_not_ordered(program: Any) -> None:
    folder = native.folder_with(PROGRAMS)
    case = program.case or "bf16_equals_the_reference"
    _, status, output = sanitize.execute(program, folder, [case])
    assert status != 0
    assert "WARNING: ThreadSanitizer: data race" in output
