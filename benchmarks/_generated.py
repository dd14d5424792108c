"""Three judges on generated windows. Each task is self-contained, so that processes share the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from _scenarios import (
    SCENARIOS,
    Cell,
    Score,
    grade,
    grade_subjects,
    meant,
)

from deep_ep import diagnose
from deep_ep.diagnose.analyze.waits_only.judge import judge_waits
from deep_ep.diagnose.analyze.waits_only.lasting import LEAST_WINDOWS, MOST_WINDOWS
from deep_ep.diagnose.collect.rank_summary import summarize
from deep_ep.diagnose.compat import Diagnose
from deep_ep.diagnose.core.diagnosis import IntArray
from generator import Window, simulate_windows
from generator.faults import Key, Truth

OURS, MEAN_NORMALISED, WAITS_ONLY = "deep_ep", "mean-normalised rule", "waits only"
JUDGES = (OURS, MEAN_NORMALISED, WAITS_ONLY)
KINDS = ("dispatch", "combine")
# Lengths of windows, dispatches and combines counted together, for "until the first right verdict".
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)
# Operations of each kind in a window of waits.
WAITS_OPERATIONS = 32
HOSTS_UNKNOWN, IN_DEMAND = "waits only, hosts unknown", ", ranks in demand too"
WAITS_JUDGES = (WAITS_ONLY, HOSTS_UNKNOWN, MEAN_NORMALISED)
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
        scores, subject_scores: per judge, by (class, subject) and by subject alone.
        alarms: per judge, windows with any verdict that is neither injected nor tolerated.
        all_right: windows in which ours named all that was injected and nothing else.
        tolerated: verdicts of ours that are true without being injected.
        mistakes: of ours, how often: "false " or "missed " and what.
        effects: (injected, named, lower, upper end of its interval) us of the single cause in every
            kind of operation that named it.
        savings: (true, named) us per operation of the single cause, or of all causes together.
        operations: length of the shortest window whose verdicts held all that was injected; inf.
        wrong: seeds of windows that ours got wrong, with what it named.
    """

    task: Task
    scores: dict[str, Score] = field(default_factory=dict)
    subject_scores: dict[str, Score] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)
    all_right: int = 0
    tolerated: int = 0
    mistakes: dict[str, int] = field(default_factory=dict)
    effects: list[tuple[float, float, float, float]] = field(default_factory=list)
    savings: list[tuple[float, float]] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def windows(task: Task, num_operations: int) -> Sequence[Window]:
    """The task's windows, an iterator in fact: only a batch of them is held."""
    faults = [task.cell.faults(task.first_seed + i) for i in range(task.num_windows)]
    return simulate_windows(
        task.cell.machine(),
        task.cell.group.num_ranks,
        num_operations // len(KINDS),
        faults,
        task.first_seed,
        num_operations,
        task.cell.kinds,
    )


def ours(window: Window) -> diagnose.Diagnosis:
    """All that users get from stamps, without a history."""
    return diagnose.judge(diagnose.gather([summarize(s) for s in window.snapshots]))


def mean_normalised(window: Window, _per_node: int) -> Named:
    """The rule on the sums of the window."""
    return _by_mean(window.wait_matrix(kind) for kind in KINDS)


def _by_mean(matrices: Iterable[IntArray]) -> Named:
    """Column: late rank. Row: receiver. Point: path."""
    named: set[Key] = set()
    for matrix in matrices:
        found = Diagnose.diagnose_matrix(matrix)
        named |= {(diagnose.COMP_SLOW, int(column)) for column, *_ in found["abnormal_cols"]}
        named |= {(diagnose.MIXED_SLOW, int(row)) for row, *_ in found["abnormal_rows"]}
        named |= {
            (diagnose.COMM_SLOW, (int(source), int(receiver)))
            for receiver, source, *_ in found["abnormal_points"]
        }
    return frozenset(named)


def waits_only(window: Window, per_node: int) -> Named:
    """Sums of waiting over equal parts of the window, with number of operations."""
    parts = np.linspace(0, window.num_operations, MOST_WINDOWS + 1).astype(int)
    operations = window.num_operations // len(KINDS) // MOST_WINDOWS
    ends = parts // len(KINDS) * len(KINDS)
    return _lasting(_parts(window, ends), per_node, True, operations)


def _parts(window: Window, ends: npt.NDArray[np.int64]) -> dict[str, IntArray]:
    """By kind [k, receiver, source], what was waited from one end to the next."""
    totals = [window.first(int(end)) for end in ends]
    return {kind: np.diff([t.wait_matrix(kind) for t in totals], axis=0) for kind in KINDS}


def _lasting(
    parts: dict[str, IntArray],
    per_node: int,
    hosts_known: bool,
    operations: int = WAITS_OPERATIONS,
) -> Named:
    num_ranks = parts[KINDS[0]].shape[-1]
    hosts = [f"host{rank // per_node}" for rank in range(num_ranks)] if hosts_known else None
    return frozenset(judge_waits(parts, hosts=hosts, operations=operations).keys)


def waits_runs(task: Task) -> Result:
    """Runs of windows as programs sample them, judged by waiting alone whenever one has ended."""
    result = Result(task)
    length = WAITS_OPERATIONS * len(KINDS)
    per_node = task.cell.group.per_node
    for window in windows(task, task.cell.num_operations):
        parts = _parts(window, np.arange(0, task.cell.num_operations + 1, length))
        num_windows = task.cell.num_operations // length
        judged: dict[str, list[Named]] = {judge: [] for judge in WAITS_JUDGES}
        for end in range(LEAST_WINDOWS, num_windows + 1):
            latest = {k: w[max(0, end - MOST_WINDOWS) : end] for k, w in parts.items()}
            judged[WAITS_ONLY].append(_lasting(latest, per_node, True))
            judged[HOSTS_UNKNOWN].append(_lasting(latest, per_node, False))
            judged[MEAN_NORMALISED].append(_by_mean(w.sum(axis=0) for w in latest.values()))
        demanded = {subject for _, subject in window.truth.tolerated}
        for judge, named in judged.items():
            others = frozenset().union(*named) - window.truth.keys
            for what, wrong in (
                (judge, any(subject not in demanded for _, subject in others)),
                (f"{judge}{IN_DEMAND}", bool(others)),
            ):
                result.alarms[what] = result.alarms.get(what, 0) + wrong
            score = grade(named[-1], window.truth)
            result.scores[judge] = result.scores.get(judge, Score()) + score
    return result


OTHERS: dict[str, Callable[[Window, int], Named]] = {
    MEAN_NORMALISED: mean_normalised,
    WAITS_ONLY: waits_only,
}


def judge_windows(task: Task) -> Result:
    """Verdicts of full windows."""
    result = Result(task)
    shape = task.cell.group
    for window in windows(task, task.cell.num_operations):
        for name in task.judges:
            if name == OURS:
                diagnosis = ours(window)
                named = named_keys(diagnosis, window.truth, task)
                _add_ours(result, window, diagnosis, named)
            else:
                named = OTHERS[name](window, shape.per_node)
            score = grade(named, window.truth)
            result.scores[name] = result.scores.get(name, Score()) + score
            subjects = result.subject_scores.get(name, Score())
            result.subject_scores[name] = subjects + grade_subjects(named, window.truth)
            result.alarms[name] = result.alarms.get(name, 0) + (score.false > 0)
    return result


def named_keys(diagnosis: diagnose.Diagnosis, truth: Truth, task: Task) -> Named:
    """What the verdicts say, to be compared with the truth."""
    return frozenset(meant(v, truth, task.cell.group) for v in diagnosis.verdicts)


def _add_ours(result: Result, window: Window, diagnosis: diagnose.Diagnosis, named: Named) -> None:
    truth, cell = window.truth, result.task.cell
    result.tolerated += len(named & truth.tolerated)
    score = grade(named, truth)
    result.all_right += not score.false + score.missed
    if score.false + score.missed:
        _add_mistakes(result, window, diagnosis, named)
    if not truth.keys or cell.is_normal:
        return
    if not SCENARIOS[cell.scenario].single:
        if truth.keys <= named:
            together_us = max(diagnosis.savings_us.values())
            result.savings.append((window.saving_us, float(np.nan_to_num(together_us))))
        return
    (key,) = truth.keys
    verdicts = [v for v in diagnosis.verdicts if meant(v, truth, cell.group) == key]
    if not verdicts:
        return
    # Each of them says what all of them together would save.
    saving_us = max(float(np.nan_to_num(v.saving_us)) for v in verdicts)
    result.savings.append((window.saving_us, saving_us))
    injected = truth.effects_us[key]
    if "hot" in cell.scenario or not np.isfinite(injected):  # differs by kind of operation
        return
    for v in verdicts:
        low, high = sorted(np.sign(v.effect_us) * np.asarray(v.interval_us))
        result.effects.append((injected, abs(v.effect_us), float(low), float(high)))


def _add_mistakes(
    result: Result, window: Window, diagnosis: diagnose.Diagnosis, named: Named
) -> None:
    truth, group = window.truth, result.task.cell.group
    false = {
        (meant(v, truth, group), v.cause)
        for v in diagnosis.verdicts
        if meant(v, truth, group) not in truth.keys | truth.tolerated
    }
    mistakes = [f"false {cause}" for _, cause in false]
    score = grade(named, truth)
    if score.missed:
        mistakes += [f"missed {_class_of(key)}" for key in truth.keys - named]
    result.mistakes = dict(Counter(result.mistakes) + Counter(mistakes))
    if len(result.wrong) < _WRONG_SHOWN:
        texts = [sorted(keys, key=str) for keys in (named, truth.keys)]
        result.wrong.append(f"seed {window.seed}: named {texts[0]}, injected {texts[1]}")


def _class_of(key: Key) -> str:
    """The class of the verdict, and what its subject is."""
    verdict_class, subject = key
    if isinstance(subject, tuple):
        return f"{verdict_class} {subject[0] if isinstance(subject[0], str) else 'path'}"
    return f"{verdict_class} rank"


def first_right_verdicts(task: Task) -> Result:
    """How long a window must be before ours names what was injected."""
    result = Result(task)
    for window in windows(task, LENGTHS[-1]):
        right = (
            length
            for length in LENGTHS
            if window.truth.keys <= named_keys(ours(window.first(length)), window.truth, task)
        )
        result.operations.append(float(next(right, np.inf)))
    return result
