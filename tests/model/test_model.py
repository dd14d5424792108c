"""Spin goes through all interleavings of the protocol's model (operation.pml), and through those of models that lack a part.

Each needs a C compiler for the checker that Spin writes, some seconds and half a gigabyte.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from support import system_tools

MODEL = Path(__file__).parent / "operation.pml"
# Sizes change while nobody is late; somebody is late when they change, and all meet again after it.
CHANGING = {"OPS": 4, "CHANGE": 3}
LATE = {"OPS": 3, "CHANGE": 2, "TIMEOUTS": 1, "FAULTY": 1}
DEEPEST = 10_000  # steps of a run; more is an error, not a smaller search

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def errors(folder: Path, settings: dict[str, int], left_out: str = "") -> tuple[int, str]:
    """How many runs Spin finds that break a check (it ends with the first), and what it says of it."""
    (spin,) = system_tools.paths("Spin", "spin", ("spin",))
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    if left_out:
        defines.append(f"-DWITHOUT_{left_out}")
    for command in (
        [spin, "-a", *defines, str(MODEL)],
        [
            os.environ.get("CC", "gcc"),
            *["-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4000", "-o", "pan", "pan.c"],
        ],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    checked = subprocess.run(
        ["./pan", f"-m{DEEPEST}"], cwd=folder, capture_output=True, text=True, check=False
    ).stdout
    assert "max search depth too small" not in checked, checked
    found = re.search(r"errors: (\d+)", checked)
    assert found is not None, checked
    assert found[1] != "0" or "Search not completed" not in checked, checked
    return int(found[1]), checked


@pytest.mark.parametrize("settings", [CHANGING, LATE], ids=["sizes-change", "a-rank-is-late"])
def test_every_interleaving_keeps_what_is_promised(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    count, output = errors(tmp_path, settings)
    assert count == 0, output


def parts() -> list[str]:
    """What the model can do without."""
    return sorted(set(re.findall(r"^#ifn?def WITHOUT_(\w+)", MODEL.read_text(), re.MULTILINE)))


@pytest.mark.parametrize("part", parts())
def test_no_part_of_the_protocol_can_be_left_out(tmp_path: Path, part: str) -> None:
    count, output = errors(tmp_path, LATE, part)
    assert count == 1, output
    assert "assertion violated" in output
