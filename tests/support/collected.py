"""What a collection of all tests finds, in a process that has imported none of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def collected() -> dict[str, list[str]]:
    """By file, relative to the root, the names of its tests with their parameters. Takes some ten seconds.

    Of the cpu backend, without which some files have no tests.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    env = {**os.environ, "DEEP_EP_BACKEND": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = defaultdict(list)
    for file, name in re.findall(r"^(tests/\S+?\.py)::(.+)$", done.stdout, re.MULTILINE):
        names[file].append(name)
    return dict(names)
