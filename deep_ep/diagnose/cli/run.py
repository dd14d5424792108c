"""`run`: starts a program whose buffers, of other kernels, are watched."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..core.package import EPArgumentError, env

_ROOM = Path(__file__).parent.parent / "other_kernels"


def run(given: argparse.Namespace) -> int:
    """Becomes the program; does not return.

    Raises:
        EPArgumentError: there is no such program, or the folder for records is a file.
    """
    program = [part for i, part in enumerate(given.program) if i or part != "--"]
    if not (program and program[0]):
        raise EPArgumentError("run: no program was given; one must be. Write it behind `--`.")
    if given.dir is not None and given.dir.exists() and not given.dir.is_dir():
        raise EPArgumentError(
            f"run: --dir is {str(given.dir)!r}, a file; it must be a folder. Name one; it is made."
        )
    if program[0].endswith(".py"):
        program.insert(0, sys.executable)
    try:
        os.execvpe(program[0], program, environment(env.everything(), given.interval, given.dir))
    except OSError as error:
        raise EPArgumentError(
            f"run: {program[0]!r} cannot be started ({error.strerror}); it must be a program, or a file of "
            "Python. Write what you write without `run`."
        ) from None


def environment(
    before: Mapping[str, str], interval_s: float | None, folder: Path | None
) -> dict[str, str]:
    """What the program finds, of what it would find without `run`.

    Windows last what `DEEP_EP_DIAGNOSE` says, or 1 s, and records go where `DEEP_EP_DIAGNOSE_DIR` says, unless given here.
    """
    made = dict(before)
    if interval_s is not None:
        made["DEEP_EP_DIAGNOSE"] = f"async:{interval_s:g}"
    elif made.get("DEEP_EP_DIAGNOSE", "").strip() in ("", "0"):
        made["DEEP_EP_DIAGNOSE"] = "1"
    if folder is not None:
        made["DEEP_EP_DIAGNOSE_DIR"] = str(folder.absolute())
    path = [str(_ROOM / "at_start"), made.get("PYTHONPATH", "")]
    made["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return made
