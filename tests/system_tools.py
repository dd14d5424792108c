"""Programs of the system that single tests need. tools/test_tools.sh installs them."""

from __future__ import annotations

import os
import shutil

import pytest


def paths(what: str, packages: str, *programs: tuple[str, ...]) -> list[str]:
    """Where programs are; without one, the test is skipped, or fails where that is not allowed.

    Args:
        what: what they are, for the message.
        packages: what Debian calls them.
        programs: the names that each may have.
    """
    found = [next(filter(None, map(shutil.which, names)), None) for names in programs]
    present = [path for path in found if path is not None]
    if len(present) < len(found):
        install = f"apt-get install -y --no-install-recommends {packages}"
        message = f"needs {what}: {install} (or tools/test_tools.sh)"
        if os.environ.get("CI_REQUIRE_TOOLS", "0") != "0":
            pytest.fail(f"CI_REQUIRE_TOOLS is set: {message}")
        pytest.skip(message)
    return present
