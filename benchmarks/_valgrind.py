"""Executed instructions of a program, as valgrind counts them: they repeat where times do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys


def require_valgrind() -> None:
    """Ends the program with what to do if valgrind is not installed."""
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed; on Debian or Ubuntu: apt-get install valgrind")


def instructions(program: str, *arguments: str) -> int:
    """Of one run of a Python program; ends this one if that fails."""
    command = [
        "valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null",
        sys.executable, program, *arguments,
    ]  # fmt: skip
    # A fixed hash seed, because Python's own instructions depend on it.
    env = {**os.environ, "PYTHONHASHSEED": "0", "DEEP_EP_CPU_CLOCK": "wall"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode or found is None:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return int(found[1].replace(",", ""))
