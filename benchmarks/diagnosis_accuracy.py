"""Who is right about injected faults, how often: our verdicts, the mean-normalised rule, waits only.

Two parts. The first judges generated timestamps of groups of 2 to 144 ranks; the second runs the
real low-latency kernels of the cpu backend as users run them, with DEEP_EP_DIAGNOSE and
DEEP_EP_INJECT in the environment of a program that knows nothing of either.

    python benchmarks/diagnosis_accuracy.py                  generated, under an hour on 2 cores
    python benchmarks/diagnosis_accuracy.py --quick          the same in small, a few minutes
    python benchmarks/diagnosis_accuracy.py --real           real kernels
    python benchmarks/diagnosis_accuracy.py --seeds tuning --part faults --scenario "late rank" --group 1x8

Seeds: thresholds may be chosen on `--seeds tuning`; what is reported comes from `--seeds report`, and
any number starts a set that nobody has seen. Results do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A terminal's width is used where there is one.
_WIDTH = 180
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "diagnose"), str(ROOT / "benchmarks")]

import _accuracy_tables as tables  # noqa: E402
import _generated as generated  # noqa: E402
import _real_kernels as real_kernels  # noqa: E402
from _generated import JUDGES, OURS, Result, Task  # noqa: E402
from _scenarios import (  # noqa: E402
    ALTERNATING,
    CLOCKS,
    FAMILIES,
    FAULTY,
    FENCED,
    FIELD_FAULTY,
    HEALTHY,
    KERNEL_CLOCKS,
    LATE,
    NORMAL_FAULTY,
    NVLINK_SIDES,
    PATH,
    PAUSES,
    RE_MEASURED,
    SCENARIOS,
    SEED_SETS,
    SHAPES,
    STEPPED,
    STEPPED_WITHIN,
    USUAL,
    WHILE_SLOW,
    Cell,
    first_seed,
)
from _tables import Table, write_markdown  # noqa: E402
from rich.console import Console  # noqa: E402

_WINDOWS_PER_TASK = {
    2: 500,
    3: 300,
    4: 250,
    8: 200,
    12: 100,
    16: 100,
    32: 30,
    48: 15,
    64: 10,
    72: 8,
}
_WINDOWS_PER_TASK |= {128: 2, 144: 2, 256: 1}
_WRONG_SHOWN = 12


# --- what is run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Cells of every combination.

    Attributes:
        windows: of each cell, by shape.
        run: what is done with them.
        judges: who judges them.
        is_normal: whether operations are normal ones; else of low latency.
    """

    scenarios: Sequence[str]
    effects_us: Sequence[float]
    windows: dict[str, int]
    families: Sequence[str] = (USUAL,)
    clocks: Sequence[str] = (RE_MEASURED,)
    num_operations: int = 128
    run: Callable[[Task], Result] = generated.judge_windows
    judges: tuple[str, ...] = (OURS,)
    is_normal: bool = False

    def cells(self) -> list[Cell]:
        """Those that there can be."""
        combined = itertools.product(
            self.scenarios, self.windows, self.effects_us, self.families, self.clocks
        )
        cells = (Cell(*values, self.num_operations, self.is_normal) for values in combined)
        return [cell for cell in cells if cell.can_be]


_EFFECTS = (10.0, 20.0, 50.0, 200.0)
_SIDES = (LATE, PATH, "slow ingress", "slow egress")
_AGED = ["fresh", "2 s old", "10 min old"]
_MEASURED_ONCE = [RE_MEASURED, *_AGED]
_SPECIAL = [family for family in FAMILIES if family != USUAL]
_SINGLE = [
    name for name in FAULTY if SCENARIOS[name].single and SCENARIOS[name].least_effect_us <= 5.0
]
_MANY = {"1x2": 100, "1x4": 300, "1x8": 400, "8x1": 100, "3x4": 150, "2x8": 150}
_MANY |= {"6x8": 10, "8x8": 6, "1x72": 5, "18x8": 2}
_FEW = {"1x2": 20, "1x4": 20, "1x8": 20, "8x1": 20, "3x4": 16, "2x8": 12}
_FEW |= {"6x8": 3, "8x8": 3, "1x72": 2, "18x8": 1}
# Runs of five windows of 64 operations for waiting alone: the first verdict. Three hundred healthy runs
# without a mistake show less than one in a hundred.
_WAITS_OPERATIONS = 320
_WAITS_HEALTHY = {"1x2": 2, "1x3": 2, "1x4": 24, "1x8": 24, "8x1": 20, "3x4": 20, "1x16": 24}
_WAITS_HEALTHY |= {"2x8": 20, "4x8": 20, "8x8": 20, "16x8": 20}
_WAITS_FAULTY = {"1x4": 5, "1x8": 20, "1x16": 20, "2x8": 20, "4x8": 10, "8x8": 5, "16x8": 2}


def _some(windows: int, *shapes: str) -> dict[str, int]:
    """As many of each shape, fewer of large ones."""
    return {s: min(windows, 2) if SHAPES[s].num_ranks > 16 else windows for s in shapes}


_NORMAL = {"1x8": 8, "2x4": 8, "4x2": 8, "2x8": 6, "4x8": 2}
_LARGE = {"8x8": 2, "32x8": 1}
_FIELD = {"1x8": 8, "3x4": 8, "2x8": 6, "4x8": 3}
# Healthy windows are the same whether clocks were measured while something was slow or not.
_FIELD_CLOCKS = [*KERNEL_CLOCKS, STEPPED, STEPPED_WITHIN]
_FIELD_HEALTHY = {"1x4": 150, "1x8": 200, "3x4": 150, "2x8": 100, "4x8": 20}
_ONE_SIDED = (PATH, "slow ingress", "slow egress", "slow uplink", "slow downlink", "slow node pair")


def _normal(
    scenarios: Sequence[str],
    effects_us: Sequence[float],
    windows: dict[str, int],
    num_operations: int = 128,
) -> Part:
    return Part(scenarios, effects_us, windows, num_operations=num_operations, is_normal=True)


def _field(
    effects_us: Sequence[float], windows: dict[str, int], clocks: Sequence[str]
) -> list[Part]:
    """Faults that come and go, clocks whose errors are stated as kernels state them, and what is wrong with both."""
    return [
        Part(FIELD_FAULTY, effects_us, windows, clocks=clocks),
        Part(NVLINK_SIDES, effects_us, windows, families=(FENCED,), clocks=clocks),
        Part(_ONE_SIDED, (50.0,), windows, clocks=(WHILE_SLOW,)),
        Part((LATE, *_ONE_SIDED), (50.0,), windows, clocks=(STEPPED, STEPPED_WITHIN)),
        Part((LATE, PATH, "hot rank"), effects_us, windows, (ALTERNATING,), clocks[:1]),
        Part(("bursts at a NIC", "paused sender"), (50.0,), windows, (PAUSES,), clocks[:1]),
        Part(FAULTY, (50.0,), windows, clocks=clocks),
    ]


FULL = {
    "faults": [Part(FAULTY, _EFFECTS, _FEW, judges=JUDGES)],
    "clocks": [
        Part(
            _SIDES,
            (20.0, 50.0, 200.0, 2000.0),
            _some(8, "1x2", "1x4", "1x8", "3x4", "2x8", "6x8"),
            clocks=_MEASURED_ONCE,
        ),
        Part(
            [scenario for scenario in FAULTY if scenario not in _SIDES],
            (20.0, 50.0),
            _some(8, "1x8", "3x4", "2x8", "6x8", "8x1"),
            clocks=_AGED,
        ),
    ],
    "families": [
        Part(
            (LATE, PATH),
            (20.0, 50.0, 200.0),
            _some(8, "1x8", "3x4", "2x8", "6x8"),
            families=_SPECIAL,
        )
    ],
    "small": [Part(_SINGLE, (5.0,), _some(6, "1x4", "1x8", "3x4", "2x8"), num_operations=512)],
    "healthy": [
        Part((HEALTHY,), (0.0,), _MANY, families=list(FAMILIES)),
        Part((HEALTHY,), (0.0,), _MANY, clocks=_AGED),
        Part((HEALTHY,), (0.0,), _FIELD_HEALTHY, clocks=_FIELD_CLOCKS),
    ],
    "waits": [
        Part(
            (HEALTHY,),
            (0.0,),
            _WAITS_HEALTHY,
            families=list(FAMILIES),
            num_operations=_WAITS_OPERATIONS,
            run=generated.waits_runs,
        ),
        Part(
            (LATE, PATH, "slow egress", "early rank"),
            (20.0, 50.0, 200.0),
            _WAITS_FAULTY,
            num_operations=_WAITS_OPERATIONS,
            run=generated.waits_runs,
        ),
    ],
    "first": [
        Part(
            (LATE, PATH),
            (10.0, 50.0),
            _some(20, "1x2", "1x4", "1x8", "3x4", "2x8", "6x8"),
            families=(USUAL, "noise of 10 us"),
            run=generated.first_right_verdicts,
        )
    ],
    "normal": [
        _normal(NORMAL_FAULTY, (10.0, 20.0, 50.0, 200.0), _NORMAL),
        # A window of 256 ranks takes half a minute.
        _normal(NORMAL_FAULTY, (20.0,), _LARGE, 32),
        _normal((HEALTHY,), (0.0,), {shape: 10 * count for shape, count in _NORMAL.items()}),
        _normal((HEALTHY,), (0.0,), _LARGE, 32),
    ],
}
FULL["field"] = _field((20.0, 50.0, 200.0), _FIELD, KERNEL_CLOCKS)
_QUICK_SHAPES = ("1x8", "3x4")
QUICK = {
    "faults": [Part(FAULTY, (20.0, 100.0), _some(2, *_QUICK_SHAPES, "2x8"), judges=JUDGES)],
    "clocks": [Part(_SIDES, (50.0, 2000.0), _some(2, *_QUICK_SHAPES), clocks=_MEASURED_ONCE)],
    "families": [Part((LATE, PATH), (20.0,), _some(2, *_QUICK_SHAPES), families=_SPECIAL)],
    "small": [Part((LATE, PATH), (5.0,), _some(2, *_QUICK_SHAPES), num_operations=512)],
    "healthy": [
        Part((HEALTHY,), (0.0,), _some(20, *_QUICK_SHAPES), families=list(FAMILIES)),
        Part((HEALTHY,), (0.0,), _some(20, *_QUICK_SHAPES), clocks=[*_AGED, *_FIELD_CLOCKS]),
    ],
    "waits": [
        Part(
            scenarios,
            (effect_us,),
            _some(2, *_QUICK_SHAPES),
            num_operations=_WAITS_OPERATIONS,
            run=generated.waits_runs,
        )
        for scenarios, effect_us in (((HEALTHY,), 0.0), ((LATE, PATH), 50.0))
    ],
    "first": [
        Part((LATE, PATH), (50.0,), _some(3, *_QUICK_SHAPES), run=generated.first_right_verdicts)
    ],
    "normal": [
        _normal(NORMAL_FAULTY, (20.0, 100.0), _some(2, "1x8", "2x4", "4x2")),
        _normal((HEALTHY,), (0.0,), _some(4, "1x8", "2x4", "4x2")),
    ],
    "field": _field((50.0, 200.0), _some(1, *_QUICK_SHAPES, "2x8"), KERNEL_CLOCKS[:3]),
}


# --- the work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A task with the function that does it; `part` says in which tables it counts."""

    part: str
    run: Callable[[Task], Result]
    task: Task


def plan(parts: dict[str, list[Part]], args: argparse.Namespace) -> list[Job]:
    """All jobs, those of large groups first, so that no process is left with them at the end."""
    wanted = {
        "scenario": args.scenario,
        "shape": args.group,
        "effect_us": args.effects,
        "family": args.family,
        "clock": args.clock,
    }
    jobs = []
    for name, of_name in parts.items():
        for part in of_name if not args.part or name in args.part else []:
            for cell in part.cells():
                if all(not values or getattr(cell, k) in values for k, values in wanted.items()):
                    jobs += pieces(name, part, cell, args)
    return sorted(jobs, key=lambda job: -_weight(job.task))


def _weight(task: Task) -> float:
    """About how long it takes."""
    return task.num_windows * task.cell.num_operations * (task.cell.group.num_ranks + 5) ** 2


def pieces(name: str, part: Part, cell: Cell, args: argparse.Namespace) -> list[Job]:
    """The windows of a cell in tasks of a few seconds."""
    first = cell.seed + first_seed(args.seeds)
    count = max(1, round(part.windows[cell.shape] * args.windows))
    step = max(1, _WINDOWS_PER_TASK[cell.group.num_ranks] * 128 // cell.num_operations)
    return [
        Job(name, part.run, Task(cell, first + begin, min(step, count - begin), part.judges))
        for begin in range(0, count, step)
    ]


def run_all(jobs: Sequence[Job], num_processes: int, console: Console) -> dict[str, list[Result]]:
    """Results by part, in the order of the jobs; of tasks that fail only what they say is shown."""
    results: dict[int, Result] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        running = {pool.submit(job.run, job.task): i for i, job in enumerate(jobs)}
        for done in as_completed(running):
            failure = done.exception()
            if failure is not None:
                console.print(f"{jobs[running[done]].task}: {failure!r}", style="red", markup=False)
                continue
            results[running[done]] = done.result()
            if len(results) % max(1, len(jobs) // 20) == 0:
                console.print(f"{len(results)} of {len(jobs)} tasks", style="dim")
    by_part: dict[str, list[Result]] = {part: [] for part in FULL}
    for i in sorted(results):
        by_part[jobs[i].part].append(results[i])
    return by_part


# --- the program ----------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Options; the filters are for work on one thing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few windows of small groups")
    parser.add_argument(
        "--seeds", default="report", help="report, tuning, or a number >= 0 (report)"
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, metavar="OUT", help="every cell, with wrong seeds")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="all tables")
    some = parser.add_argument_group("only some of it")
    some.add_argument("--part", nargs="+", choices=list(FULL), metavar="PART", help=", ".join(FULL))
    some.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), metavar="NAME")
    some.add_argument("--group", nargs="+", choices=list(SHAPES), metavar="SHAPE")
    some.add_argument("--effects", type=float, nargs="+", metavar="US")
    some.add_argument("--family", nargs="+", choices=list(FAMILIES), metavar="NAME")
    some.add_argument("--clock", nargs="+", choices=list(CLOCKS), metavar="AGE")
    some.add_argument("--windows", type=float, default=1.0, help="times as many windows (1)")
    real_kernels.add_arguments(parser)
    args = parser.parse_args()
    if args.seeds not in SEED_SETS and not args.seeds.isdecimal():
        parser.error(f"--seeds {args.seeds}: expected {', '.join(SEED_SETS)} or a number")
    return args


def run_generated(args: argparse.Namespace, console: Console) -> int:
    """The first part; 1 where tasks failed."""
    jobs = plan(QUICK if args.quick else FULL, args)
    console.print(f"{sum(job.task.num_windows for job in jobs)} windows, seeds: {args.seeds}")
    results = run_all(jobs, args.processes, console)
    shown = all_tables(results)
    for table in shown:
        table.show(console)
    wrong = [r for of_part in results.values() for r in of_part if r.wrong]
    for result in wrong[:_WRONG_SHOWN]:
        console.print(f"{result.task.cell.text}: {result.wrong[0]}", style="dim", markup=False)
    if wrong:
        console.print(f"{OURS} was wrong in {len(wrong)} tasks; --json has the seeds", style="dim")
    if args.json:
        stored = {name: [stored_result(r) for r in rs] for name, rs in results.items()}
        args.json.write_text(json.dumps({"seeds": args.seeds, **stored}))
    if args.markdown:
        write_markdown(args.markdown, f"## Generated timestamps, seeds: {args.seeds}", shown)
    return int(sum(len(of_part) for of_part in results.values()) < len(jobs))


def all_tables(results: dict[str, list[Result]]) -> list[Table]:
    """Of the parts that were run; the aims last."""
    made: list[Table] = []
    if results["faults"]:
        faulty = results["faults"]
        made += [tables.overall_table(faulty), *tables.fault_tables(faulty)]
        made += [tables.interval_table("scenario", faulty), tables.savings_table(faulty)]
    if results["small"]:
        made.append(tables.small_table(results["small"]))
    for part, field in (("clocks", "clock"), ("families", "family")):
        if results[part]:
            made.append(tables.surroundings_table(field, results[part]))
    if results["families"]:
        made.append(tables.interval_table("family", results["families"]))
    if results["healthy"]:
        made.append(tables.alarm_table(results["healthy"]))
    if results["waits"]:
        made += tables.waits_tables(results["waits"])
    if results["first"]:
        made.append(tables.operations_table(results["first"]))
    if results["field"]:
        made += [*tables.field_tables(results["field"]), tables.savings_table(results["field"])]
    if results["normal"]:
        made.append(tables.normal_table(results["normal"]))
    return [*made, tables.aim_table(results)]


def stored_result(result: Result) -> dict[str, Any]:
    """As JSON has it: what was never named, or is not known, is null."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [known(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: known(value) for name, value in asdict(result).items()}


def main() -> int:
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if args.real:
        return real_kernels.run(args, first_seed(args.seeds), console)
    return run_generated(args, console)


if __name__ == "__main__":
    sys.exit(main())
