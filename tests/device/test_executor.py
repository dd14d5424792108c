"""The SIMT executor and the number formats, one pytest case per C++ case: see tests/cpp."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import native

NAMES = ("executor", "collectives", "memory", "launch_errors", "numbers")
PROGRAMS = {name: native.plain(name) for name in NAMES}


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=case) for name in PROGRAMS for case in native.cases(name)],
)
def test_device(
    name: str, case: str, replay: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    folder = native.folder_with(tuple(PROGRAMS.values()))
    native.check(PROGRAMS[name], folder, case, request.config.getoption("--schedule-seed"), replay)
