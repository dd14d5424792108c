"""What ranks that are processes find imported already: launch.py has this imported by the process that they are forked from."""

from __future__ import annotations

import sys

# Before all others comes the current folder, where another deep_ep may be than the one under test.
if sys.path[0] == "":
    del sys.path[0]

import deep_ep.diagnose  # noqa: E402, F401
