#!/usr/bin/env python3
"""What slipcover measured of `make test` or `make test-all`, in one line: the share of deep_ep's lines that were run.

Lines that only child processes run (ranks that are processes, programs) are not counted.

Usage: tools/coverage.py build/coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def folder_of(file: str) -> str:
    """deep_ep, or the folder in it that a file is in."""
    inner = Path(file).parts[1:-1]
    return "/".join(inner[:2]) if inner else "deep_ep"


def summary(measured: dict[str, Any]) -> str:
    """The line.

    Args:
        measured: what slipcover wrote as JSON.
    """
    run, all_lines = Counter[str](), Counter[str]()
    for file, lines in measured["files"].items():
        for name in (folder_of(file), "all"):
            run[name] += len(lines["executed_lines"])
            all_lines[name] += len(lines["executed_lines"]) + len(lines["missing_lines"])
    share = {name: f"{100 * run[name] / all_lines[name]:.0f} %" for name in all_lines}
    total = share.pop("all")
    parts = ", ".join(f"{name} {share[name]}" for name in sorted(share))
    return f"coverage: {total} of {all_lines['all']} lines of deep_ep ({parts})"


if __name__ == "__main__":
    print(summary(json.loads(Path(sys.argv[1]).read_text())))
