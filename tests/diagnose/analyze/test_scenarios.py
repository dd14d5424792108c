"""What the accuracy benchmark injects and calls right: every cell can be run, every subject compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures import LATE, NODE_PAIR, SLOW_PATH

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import _real_kernels  # noqa: E402
import diagnosis_accuracy  # noqa: E402
from _generated import Task, windows  # noqa: E402
from _scenarios import (  # noqa: E402
    CLOCKS,
    FAMILIES,
    FAULTY,
    FIELD_FAULTY,
    NORMAL_FAULTY,
    RE_MEASURED,
    SCENARIOS,
    SHAPES,
    Cell,
    Score,
    Shape,
    grade,
    meant,
)
from diagnosis_rules import RULES, without  # noqa: E402

from deep_ep import diagnose  # noqa: E402
from deep_ep.diagnose.collect.rank_summary import summarize  # noqa: E402
from deep_ep.diagnose.storage.log_writer import Writer  # noqa: E402
from deep_ep.diagnose.storage.record import Record  # noqa: E402
from generator.faults import Truth  # noqa: E402

SMALL = [name for name, shape in SHAPES.items() if shape.num_ranks <= 16]


def truth(*keys: tuple) -> Truth:
    return Truth(frozenset(keys), dict.fromkeys(keys, 20.0))


@pytest.mark.parametrize("name", [*FAULTY, *FIELD_FAULTY])
def test_every_fault_is_injected_where_it_fits(name: str) -> None:
    for shape in SMALL:
        if not SCENARIOS[name].fits(SHAPES[shape], 200.0):
            continue
        (window,) = windows(Task(Cell(name, shape, 200.0), 1, 1), 4)
        keys = window.truth.keys
        # A rank that is late in bursts may be between two of them.
        assert keys or window.truth.tolerated
        if SCENARIOS[name].single:
            assert len(keys) <= 1


@pytest.mark.parametrize("name", NORMAL_FAULTY)
def test_every_fault_of_normal_operations_is_injected_where_it_fits(name: str) -> None:
    for shape in ("1x4", "2x4", "4x2"):
        if not SCENARIOS[name].fits(SHAPES[shape], 200.0):
            continue
        (window,) = windows(Task(Cell(name, shape, 200.0, is_normal=True), 1, 1), 4)
        assert len(window.truth.keys) == 1
        hops = window.snapshots[0].operations
        assert ("gateway combine" in hops) == (SHAPES[shape].nodes > 1)
        assert {counters.ops for counters in hops.values()} == {2}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_machine_runs_with_clocks_of_every_age(family: str) -> None:
    for shape in SMALL:
        for clock in CLOCKS if shape == "3x4" else (RE_MEASURED,):
            cell = Cell("healthy", shape, 0.0, family, clock)
            (window,) = windows(Task(cell, cell.seed, 1), 4)
            assert len(window.snapshots) == SHAPES[shape].num_ranks
            assert window.truth.keys == frozenset()


def test_the_only_rank_of_a_node_is_its_node() -> None:
    alone, shared = Shape(8, 1), Shape(3, 4)
    pair = truth(("comm-slow", (0, 1)))
    assert meant(NODE_PAIR, pair, alone) == ("comm-slow", (0, 1))
    assert meant(NODE_PAIR, pair, shared) == ("comm-slow", ("nodes", 0, 1))
    assert meant(LATE, pair, alone) == LATE.key
    assert meant(SLOW_PATH, pair, alone) == ("comm-slow", (2, 5))


def test_what_is_true_and_not_injected_counts_neither_way() -> None:
    tolerated = Truth(frozenset(), {}, frozenset({("mixed-slow", 3)}))
    assert grade({("mixed-slow", 3)}, tolerated) == Score(0, 0, 0)
    assert grade({("mixed-slow", 2)}, tolerated) == Score(0, 1, 0)
    late = Truth(frozenset({("comp-slow", 3)}), {}, frozenset({("mixed-slow", 3)}))
    assert grade({("mixed-slow", 3)}, late) == Score(1, 0, 0)
    assert grade(set(), late) == Score(0, 0, 1)


@pytest.mark.parametrize(("args", "num_runs"), [([], 90), (["--quick"], 4), (["--runs", "1"], 30)])
def test_real_kernels_are_run_with_the_options_that_there_are(
    args: list[str], num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["diagnosis_accuracy.py", "--real", *args])
    runs = _real_kernels.plan(diagnosis_accuracy.parse_arguments(), 0)
    assert len(runs) == num_runs
    assert len({run.text() for run in runs}) == num_runs


def test_windows_of_real_kernels_are_graded_though_their_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records are read when they are looked at."""

    def program(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        writer = Writer(Path(env["DEEP_EP_DIAGNOSE_DIR"]), "group")
        for window in (1, 2):
            writer.write(Record(diagnose.judge({}), 0.0, window, "group"), with_matrices=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(_real_kernels.subprocess, "run", program)
    outcome = _real_kernels.carry_out(_real_kernels.Run("EP4", "none", (), 1, "small"))
    assert (outcome.num_windows, outcome.said) == (2, [])


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_taken_out(rule: str) -> None:
    cell = Cell("slow path", "3x4", 200.0)
    (window,) = windows(Task(cell, cell.seed, 1), 64)
    matrices = diagnose.gather([summarize(s) for s in window.snapshots])
    whole = diagnose.judge(matrices)
    with without(RULES[rule]):
        diagnose.judge(matrices)
    assert diagnose.judge(matrices).keys == whole.keys == window.truth.keys
