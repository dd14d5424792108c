"""Programs of the system and packages that single tests need. tools/test_tools.sh installs the programs."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any, NoReturn

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
        _lack(f"needs {what}: {install} (or tools/test_tools.sh)")
    return present


def package(name: str) -> Any:
    """A module of a package; without it, the test or the whole file is skipped, or fails where that is not allowed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _lack(f"needs {name} ({error}): pip install -r third-party/requirements-dev.txt")


def _lack(message: str) -> NoReturn:
    if os.environ.get("CI_REQUIRE_TOOLS", "0") != "0":
        pytest.fail(f"CI_REQUIRE_TOOLS is set: {message}")
    pytest.skip(message, allow_module_level=True)
