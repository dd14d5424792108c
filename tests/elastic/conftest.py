"""Groups of ranks that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.elastic_groups import SharedGroups


@pytest.fixture(scope="module")
def groups() -> Iterator[SharedGroups]:
    shared = SharedGroups()
    yield shared
    shared.close()
