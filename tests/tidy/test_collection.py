"""A collection of all tests, made once: it has tests of every file, those that are to notice a mutant, and those that
`make gpu` runs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

import gpu
import mutants
from support import native
from tidy.test_tidy import files, report

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).resolve().parents[2]
# Test files of which nothing is collected without a package.
NEEDS = {
    "tests/diagnose/render/test_html.py": "selenium",
    "tests/diagnose/render/test_prometheus.py": "prometheus_client",
    "tests/hang/test_traces.py": "torch.distributed.flight_recorder",
    "tests/memory_order/test_litmus.py": "z3",
    "tests/memory_order/test_machine_code.py": "z3",
    "tests/memory_order/test_ptx_model.py": "z3",
}


@cache
def collected() -> dict[str, list[str]]:
    """By file, relative to the root, the names of its tests with their parameters, in a process that has imported none.

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


def test_a_run_of_everything_has_tests_of_every_file() -> None:
    tests = {path for path in files() if re.match(r"tests/(.+/)?test_\w+\.py$", path)}
    skipped = {path for path, name in NEEDS.items() if importlib.util.find_spec(name) is None}
    report(
        sorted(tests - skipped - collected().keys()),
        "See what norecursedirs leaves out, and who imports the file before pytest does.",
    )


def test_every_test_that_is_to_notice_a_mutant_is_there() -> None:
    """Cases, files and tests that a list names; a renamed test would let its mutants survive."""
    for each in mutants.all_mutants():
        for killer in (*each.killers, *each.others):
            first, *rest = killer.arguments
            if killer.runner == "pytest":
                names = collected().get(f"tests/{first}", [])
                assert any(selects(rest, name) for name in names), (each.name, str(killer))
            else:
                assert set(rest) <= set(native.cases(first)), (each.name, str(killer))


def selected(words: list[str]) -> list[str]:
    """Of files and tests that pytest is given with these words, what it runs; every place must have a test."""
    found: list[str] = []
    key = words[words.index("-k") : words.index("-k") + 2] if "-k" in words else []
    for place in words:
        file, _, test = place.partition("::")
        if not file.endswith(".py"):
            continue
        names = collected().get(file, [])
        there = [name for name in names if not test or name == test or name.startswith(f"{test}[")]
        assert there, place
        found += [name for name in there if selects(key, name)]
    return found


def test_every_step_on_a_gpu_has_tests_to_run(tmp_path: Path) -> None:
    commands = [
        (step.name, list(command[command.index("pytest") :]))
        for step in gpu.all_steps(tmp_path)
        for command in step.commands
        if "pytest" in command
    ]
    assert len(commands) > 8
    for name, words in commands:
        assert selected(words), name


def selects(options: list[str], name: str) -> bool:
    """Whether pytest with these options, none or a `-k`, runs a test of that name."""
    if not options:
        return True
    key, words = options
    assert key == "-k"
    return Expression.compile(words).evaluate(lambda word: word.lower() in name.lower())
