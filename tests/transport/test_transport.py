"""The transport's order, time and leftovers, and the protocol over it, one pytest case per C++ case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import native

PROGRAMS = {
    name: native.plain(name) for name in ("transport", "protocol", "normal", "normal_simulation")
}


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=case) for name in PROGRAMS for case in native.cases(name)],
)
def test_transport(
    name: str, case: str, replay: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    folder = native.folder_with(tuple(PROGRAMS.values()))
    native.check(PROGRAMS[name], folder, case, request.config.getoption("--schedule-seed"), replay)
