"""Three judges on generated windows. Each task is self-contained, so that processes share the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from _scenarios import (
    RANKS_PER_NODE,
    SCENARIOS,
    TOKENS_PER_RANK,
    Cell,
    Score,
    grade,
    grade_subjects,
)
from generator import Window, simulate_windows
from generator_faults import Key

from deep_ep import diagnose
from deep_ep.diagnose.classic import Diagnose
from deep_ep.diagnose.waits.judge import judge_waits

OURS, MEAN_NORMALISED, WAITS_ONLY = "deep_ep", "mean-normalised rule", "waits only"
JUDGES = (OURS, MEAN_NORMALISED, WAITS_ONLY)
KINDS = ("dispatch", "combine")
# Lengths of windows, dispatches and combines counted together, for "until the first right verdict".
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)
WINDOW_OPERATIONS = 128
LARGE_GROUP, LARGE_GROUP_OPERATIONS = 128, 64
# The waits-only method gets the floor that ours has on GPUs.
_FLOOR_NS = 3_000.0
_WRONG_SHOWN = 3

Named = frozenset[Key]


@dataclass(frozen=True)
class Task:
    """Windows of one cell: seeds `first_seed` to `first_seed + num_windows - 1`."""

    cell: Cell
    first_seed: int
    num_windows: int
    judges: tuple[str, ...] = JUDGES


@dataclass
class Result:
    """What came out of one task.

    Attributes:
        scores, subject_scores: per judge, by (kind, subject) and by subject alone.
        alarms: per judge, windows with any verdict that is neither injected nor tolerated.
        tolerated: verdicts of ours that are true without being injected.
        effects: (injected, named) us of the single cause in every kind of operation that named it.
        savings: (true, named) us per operation of the single cause.
        operations: length of the shortest window whose verdicts held all that was injected; inf.
        wrong: seeds of windows that ours got wrong, with what it named.
    """

    task: Task
    scores: dict[str, Score] = field(default_factory=dict)
    subject_scores: dict[str, Score] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)
    tolerated: int = 0
    effects: list[tuple[float, float]] = field(default_factory=list)
    savings: list[tuple[float, float]] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def window_operations(num_ranks: int) -> int:
    """Length of the windows of a group of this size."""
    return LARGE_GROUP_OPERATIONS if num_ranks > LARGE_GROUP else WINDOW_OPERATIONS


def windows(task: Task, num_operations: int) -> Sequence[Window]:
    """The task's windows, an iterator in fact: only a batch of them is held."""
    faults = [task.cell.faults(task.first_seed + i) for i in range(task.num_windows)]
    return simulate_windows(
        task.cell.machine(),
        task.cell.num_ranks,
        num_operations // len(KINDS),
        faults,
        task.first_seed,
        TOKENS_PER_RANK,
        num_operations,
    )


def ours(window: Window) -> diagnose.Diagnosis:
    """All that users get from stamps, without a history."""
    return diagnose.judge(diagnose.gather([diagnose.summarize(s) for s in window.snapshots]))


def mean_normalised(window: Window) -> Named:
    """Column: late rank. Row: receiver. Point: path."""
    named: set[Key] = set()
    for kind in KINDS:
        found = Diagnose.diagnose_matrix(window.wait_matrix(kind))
        named |= {(diagnose.COMP_SLOW, int(column)) for column, *_ in found["abnormal_cols"]}
        named |= {(diagnose.MIXED_SLOW, int(row)) for row, *_ in found["abnormal_rows"]}
        named |= {
            (diagnose.COMM_SLOW, (int(source), int(receiver)))
            for receiver, source, *_ in found["abnormal_points"]
        }
    return frozenset(named)


def waits_only(window: Window) -> Named:
    """Sums of waiting, with host names, number of operations and our floor."""
    num_ranks = len(window.wait_matrix(KINDS[0]))
    hosts = [f"host{rank // RANKS_PER_NODE}" for rank in range(num_ranks)]
    named: set[Key] = set()
    for kind in KINDS:
        found = judge_waits(
            window.wait_matrix(kind),
            operation=kind,
            hosts=hosts,
            operations=window.num_operations // len(KINDS),
            delta_ns=_FLOOR_NS,
        )
        named |= found.keys
    return frozenset(named)


OTHERS: dict[str, Callable[[Window], Named]] = {
    MEAN_NORMALISED: mean_normalised,
    WAITS_ONLY: waits_only,
}


def judge_windows(task: Task) -> Result:
    """Verdicts of full windows."""
    result = Result(task)
    single = SCENARIOS[task.cell.scenario].single and task.cell.effect_us > 0
    for window in windows(task, window_operations(task.cell.num_ranks)):
        for name in task.judges:
            if name == OURS:
                diagnosis = ours(window)
                named = frozenset(diagnosis.keys)
                _add_ours(result, window, diagnosis, single)
            else:
                named = OTHERS[name](window)
            score = grade(named, window.truth)
            result.scores[name] = result.scores.get(name, Score()) + score
            subjects = result.subject_scores.get(name, Score())
            result.subject_scores[name] = subjects + grade_subjects(named, window.truth)
            result.alarms[name] = result.alarms.get(name, 0) + (score.false > 0)
    return result


def _add_ours(result: Result, window: Window, diagnosis: diagnose.Diagnosis, single: bool) -> None:
    truth = window.truth
    result.tolerated += len(diagnosis.keys & truth.tolerated)
    score = grade(diagnosis.keys, truth)
    if score.false + score.missed and len(result.wrong) < _WRONG_SHOWN:
        named, expected = (sorted(keys, key=str) for keys in (diagnosis.keys, truth.keys))
        result.wrong.append(f"seed {window.seed}: named {named}, injected {expected}")
    if not single:
        return
    (key,) = truth.keys
    verdicts = [v for v in diagnosis.verdicts if v.key == key]
    if not verdicts:
        return
    saving_us = sum(np.nan_to_num(v.saving_us) for v in verdicts) / len(KINDS)
    result.savings.append((window.saving_us, float(saving_us)))
    if "hot" not in result.task.cell.scenario:  # what a hot rank costs differs by kind
        injected = truth.effects_us[key]
        result.effects += [(injected, abs(v.effect_us)) for v in verdicts]


def first_right_verdicts(task: Task) -> Result:
    """How long a window must be before ours names what was injected."""
    result = Result(task)
    for window in windows(task, LENGTHS[-1]):
        right = (
            length for length in LENGTHS if window.truth.keys <= ours(window.first(length)).keys
        )
        result.operations.append(float(next(right, np.inf)))
    return result
