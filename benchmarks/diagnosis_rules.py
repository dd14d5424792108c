"""What each rule of `deep_ep.diagnose.analyze` is worth: F1 and false verdicts without it, on the same windows.

    python benchmarks/diagnosis_rules.py                    a quarter of an hour on one core
    python benchmarks/diagnosis_rules.py --rules clocks     only those whose name has it

A rule that is worth less than 0.003 of F1 and prevents no false verdict should not be there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "diagnose"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from _accuracy_tables import Table  # noqa: E402
from _generated import Task, named_keys, windows  # noqa: E402
from _scenarios import Cell, Score, first_seed, grade  # noqa: E402
from diagnosis_accuracy import FULL  # noqa: E402
from rich.console import Console  # noqa: E402

from deep_ep import diagnose  # noqa: E402
from deep_ep.diagnose.analyze import (  # noqa: E402
    clocks,
    engine,
    estimates,
    intermittent,
    judged_paths,
    own_work,
    path_causes,
    path_model,
    path_verdicts,
    rank_causes,
)
from deep_ep.diagnose.analyze.path_groups import ALL_LINKS, Look  # noqa: E402
from deep_ep.diagnose.collect.rank_summary import summarize  # noqa: E402
from deep_ep.diagnose.core.causes import Cause  # noqa: E402

PARTS = ("faults", "field", "normal", "healthy")
# Windows of each part, of groups of so many ranks at most.
_WINDOWS, _RANKS = 320, 32
# What is replaced: (module or class, name, by what).
Patch = tuple[Any, str, Any]


def _nothing(*_args: Any, **_named: Any) -> list[Any]:
    return []


def _first(first: Any, *_args: Any) -> Any:
    return first


def _without(*unwanted: Cause | str) -> Patch:
    """Groups of a cause, or over a kind of link, are not looked at."""
    all_looks = path_causes.looks

    def looks(model: path_model.PathModel, *, at_times: bool) -> Iterator[Look]:
        found = all_looks(model, at_times=at_times)
        return (look for look in found if not {look.cause, look.link} & {*unwanted})

    return path_causes, "looks", looks


RULES: dict[str, list[Patch]] = {
    "clocks: fitted": [(path_model, "joint_clocks", lambda t, *_: (np.zeros(t.shape[1]), 1.0))],
    "clocks: readings that contradict count less": [(clocks, "_doubt", _nothing)],
    "clocks: nodes are moved together": [(clocks, "_set_nodes", _nothing)],
    "clocks: drawn to what was measured": [(clocks.Prior, "drawn", lambda _, clock, __: clock)],
    "clocks: a side seen alone": [(path_model, "_without_slow_sides", _first)],
    "clocks: a slow pair of two nodes": [(path_model, "_without_slow_pair", _first)],
    "clocks: ranks hardly connected": [
        (path_model, "_are_connected", lambda time, *_: np.ones(time.shape[1:], bool))
    ],
    "paths: loads of ports": [(path_model, "_costs", lambda _, __, level, ___: np.zeros((len(level), 2)))],
    "paths: order of sending": [(path_model, "queued_in_ports", lambda _, __, classes, ___: np.zeros(classes.shape))],
    "paths: bounds by fences": [
        (path_model, "_by_fence", lambda _, classes, __: np.full(classes.shape, np.inf))
    ],
    "paths: ingress by fences of mates": [
        (path_model, "_into_by_fence", lambda f, c, _: np.zeros((len(f), *c.shape)))
    ],
    "paths: time at fences is theirs": [
        (judged_paths.JudgedPaths, "held_up", lambda _, __, m: np.zeros(m.held.shape))
    ],
    "contest: rails": [_without(Cause.RAIL)],
    "contest: pairs of nodes": [_without(Cause.NODE_PAIR)],
    "contest: links of nodes": [_without(Cause.UPLINK, Cause.DOWNLINK)],
    "contest: sides over all links": [_without(ALL_LINKS)],
    "contest: both where undecided": [(path_causes, "_UNDECIDED", 0.0)],
    "contest: ports otherwise busy": [(path_causes, "MOSTLY_BUSY", 0.0)],
    "verdicts on paths: sizes are certain": [(path_verdicts, "_CERTAIN", 0.0)],
    "verdicts on paths: borne out on another hop": [(path_verdicts, "BORNE_OUT", -np.inf)],
    "verdicts on paths: loads that differ": [(path_verdicts, "_BY_LOAD", 0.0)],
    "verdicts on paths: what queues in a slow port": [(path_verdicts, "_UNEQUAL", 0.0)],
    "verdicts on paths: not for slots": [(path_verdicts, "UNEVEN", 0.0)],
    "verdicts on paths: a few single ones": [(path_verdicts, "MOST_READ", 10**6)],
    "bursts on paths: by other times alone": [(path_verdicts, "_is_told_by_time", lambda *_: False)],
    "bursts on paths: not of experts in demand": [
        (judged_paths, "_comes_and_goes", lambda _, cause, __, ___, least: (cause.effect > least).any())
    ],
    "ranks: late at times": [(engine, "late_at_times", _nothing)],
    "ranks: ticks of the system": [(intermittent, "_is_regular", lambda *_: False)],
    "ranks: hot experts": [(engine, "hot_experts", _nothing)],
    "ranks: slow receivers": [(engine, "slow_receivers", _nothing)],
    "ranks: early receivers": [(engine, "early_receivers", _nothing)],
    "ranks: kinds together": [(rank_causes, "compare", lambda x, nodes: own_work.compare(0 * x, nodes))],
    "ranks: borne out by another kind": [(rank_causes, "BORNE_OUT", 1.0)],
    "ranks: what follows of rows that are late": [(rank_causes, "UNEVEN", 0.0)],
    "own work: what tokens cost": [(own_work, "_cost_of_a_token", lambda *_: (0.0, np.inf))],
    "own work: waiting for slots": [(estimates, "_held_up_by_slots", lambda _: 0.0)],
    "own work: noise that lasts": [(own_work, "_MANY", 10**6)],
    "own work: noise beyond stretches": [(own_work, "_together", lambda _: 0.0)],
    "own work: noise of nodes": [(own_work, "members", lambda _: np.zeros((1, 1), int))],
}  # fmt: skip


@contextlib.contextmanager
def without(rule: Sequence[Patch]) -> Iterator[None]:
    kept = [(where, name, getattr(where, name)) for where, name, _ in rule]
    try:
        for where, name, by in rule:
            setattr(where, name, by)
        yield
    finally:
        for where, name, was in kept:
            setattr(where, name, was)


def cells_of(part: str) -> list[Cell]:
    """Evenly among all of a part."""
    cells = [c for of in FULL[part] for c in of.cells() if c.group.num_ranks <= _RANKS]
    count = min(_WINDOWS, len(cells))
    return [cells[i * len(cells) // count] for i in range(count)]


def judged(part: str, rules: dict[str, list[Patch]], seed: int) -> dict[str, Score]:
    """By rule, the score without it."""
    scores = {name: Score() for name in rules}
    for cell in cells_of(part):
        task = Task(cell, cell.seed + seed, 1)
        for window in windows(task, cell.num_operations):
            matrices = diagnose.gather([summarize(s) for s in window.snapshots])
            for name, rule in rules.items():
                with without(rule):
                    diagnosis = diagnose.judge(matrices)
                scores[name] += grade(named_keys(diagnosis, window.truth, task), window.truth)
    return scores


def table(scores: dict[str, dict[str, Score]]) -> Table:
    """One row per rule: what is lost without it."""
    rows = []
    for rule in next(iter(scores.values())):
        row = [rule or "all rules"]
        for part, of_part in scores.items():
            mine, all_rules = of_part[rule], of_part[""]
            if part == "healthy":
                row.append(f"{mine.false - all_rules.false:+d}" if rule else f"{mine.false}")
            else:
                row.append(f"{mine.f1 - all_rules.f1:+.3f}" if rule else f"{mine.f1:.3f}")
                row.append(f"{mine.false - all_rules.false:+d}" if rule else f"{mine.false}")
        rows.append(row)
    names = [
        n for p in scores for n in ([f"{p}: F1", "false"] if p != "healthy" else ["healthy: false"])
    ]
    return Table("Without each rule", ["rule", *names], rows, "Differences on the same windows.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rules", default="", metavar="TEXT", help="those whose name has it")
    parser.add_argument("--seeds", default="tuning")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    rules = {"": [], **{name: rule for name, rule in RULES.items() if args.rules in name}}
    scores = {part: judged(part, rules, first_seed(args.seeds)) for part in args.part}
    table(scores).show(Console(width=None if sys.stdout.isatty() else 180, highlight=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
