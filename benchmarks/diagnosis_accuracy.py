"""Who is right about injected faults, how often: our verdicts, the mean-normalised rule, waits only.

Two parts. The first judges generated timestamps of groups of 2 to 256 ranks; the second runs the
real low-latency kernels of the cpu backend as users run them, with DEEP_EP_DIAGNOSE and
DEEP_EP_INJECT in the environment of a program that knows nothing of either.

    python benchmarks/diagnosis_accuracy.py                  generated, about half an hour on 2 cores
    python benchmarks/diagnosis_accuracy.py --quick          the same in small, under a minute
    python benchmarks/diagnosis_accuracy.py --real           real kernels
    python benchmarks/diagnosis_accuracy.py --seeds tuning --scenario "late rank" --num-ranks 8

Seeds: thresholds may be chosen on `--seeds tuning`; what is reported comes from `--seeds report`, and
any number starts a set that nobody has seen. Results do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A terminal's width is used where there is one.
_WIDTH = 150
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "diagnose"), str(ROOT / "benchmarks")]

import _generated as generated  # noqa: E402
import _real_kernels as real_kernels  # noqa: E402
import numpy as np  # noqa: E402
from _generated import JUDGES, OURS, Result, Task  # noqa: E402
from _scenarios import (  # noqa: E402
    HALF_LATE,
    HEALTHY,
    LATE,
    MIXED_CLASSES,
    SCENARIOS,
    SEED_SETS,
    Cell,
    Score,
    first_seed,
)
from _tables import Table, write_markdown  # noqa: E402
from rich.console import Console  # noqa: E402

FIRST_VERDICT_SCENARIOS, FIRST_VERDICT_EFFECTS = (LATE, "slow path"), (10.0, 50.0)
# Effects below this are shown, but no aim is set for them.
AIM_EFFECT_US = 10.0
_WINDOWS_PER_TASK = {2: 500, 4: 250, 8: 200, 16: 100, 32: 30, 64: 10, 256: 2}
_WRONG_SHOWN = 12


@dataclass(frozen=True)
class Amount:
    """How much is run; windows per group size."""

    num_ranks: tuple[int, ...]
    effects_us: tuple[float, ...]
    jitters_us: tuple[float, ...]
    faulty: dict[int, int]
    healthy: dict[int, int]
    first_verdicts: dict[int, int]


FULL = Amount(
    num_ranks=(2, 4, 8, 16, 32, 64, 256),
    effects_us=(5.0, 10.0, 20.0, 50.0, 100.0),
    jitters_us=(3.0, 10.0),
    faulty={2: 100, 4: 60, 8: 40, 16: 24, 32: 12, 64: 6, 256: 1},
    healthy={2: 10_000, 4: 10_000, 8: 10_000, 16: 2_000, 32: 500, 64: 200, 256: 16},
    first_verdicts={2: 60, 4: 60, 8: 40, 16: 20, 32: 10, 64: 6, 256: 1},
)
QUICK = Amount(
    num_ranks=(2, 4, 8, 16),
    effects_us=(10.0, 50.0),
    jitters_us=(3.0,),
    faulty={2: 6, 4: 6, 8: 6, 16: 3},
    healthy={2: 200, 4: 200, 8: 200, 16: 40},
    first_verdicts={2: 6, 4: 6, 8: 6, 16: 2},
)


# --- the work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A task with the function that does it; `name` says in which table it counts."""

    name: str
    run: Callable[[Task], Result]
    task: Task


def plan(amount: Amount, args: argparse.Namespace) -> list[Job]:
    """All jobs, those of large groups first, so that no process is left with them at the end."""
    jobs: list[Job] = []
    sizes = [n for n in amount.num_ranks if not args.num_ranks or n in args.num_ranks]
    jitters = args.jitters or amount.jitters_us
    scenarios = args.scenario or list(SCENARIOS)
    for num_ranks in sorted(sizes, reverse=True):
        for jitter_us in jitters:
            for name in scenarios:
                if name in HEALTHY:
                    each = math.ceil(amount.healthy[num_ranks] / len(HEALTHY) / len(jitters))
                    cell = Cell(name, num_ranks, 0.0, jitter_us)
                    jobs += pieces("healthy", generated.judge_windows, cell, each, args)
                    continue
                for effect_us in args.effects or amount.effects_us:
                    if not SCENARIOS[name].fits(num_ranks, effect_us):
                        continue
                    cell = Cell(name, num_ranks, effect_us, jitter_us)
                    count = amount.faulty[num_ranks]
                    jobs += pieces("faulty", generated.judge_windows, cell, count, args)
                    if name in FIRST_VERDICT_SCENARIOS and effect_us in FIRST_VERDICT_EFFECTS:
                        count = amount.first_verdicts[num_ranks]
                        jobs += pieces("first", generated.first_right_verdicts, cell, count, args)
    return jobs


def pieces(
    name: str, run: Callable[[Task], Result], cell: Cell, count: int, args: argparse.Namespace
) -> list[Job]:
    """The windows of a cell in tasks of a few seconds."""
    first = cell.seed + first_seed(args.seeds)
    count = max(1, round(count * args.windows))
    step = _WINDOWS_PER_TASK.get(cell.num_ranks, 1)
    return [
        Job(name, run, Task(cell, first + begin, min(step, count - begin)))
        for begin in range(0, count, step)
    ]


def run_all(jobs: Sequence[Job], num_processes: int, console: Console) -> list[tuple[str, Result]]:
    """Results in the order of the jobs."""
    results: dict[int, Result] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        running = {pool.submit(job.run, job.task): i for i, job in enumerate(jobs)}
        for done in as_completed(running):
            results[running[done]] = done.result()
            if len(results) % max(1, len(jobs) // 20) == 0:
                console.print(f"{len(results)} of {len(jobs)} tasks", style="dim")
    return [(job.name, results[i]) for i, job in enumerate(jobs)]


# --- tables ---------------------------------------------------------------------------------------


def total(results: Iterable[Result], judge: str, subjects: bool = False) -> Score:
    """Counts of all windows together."""
    score = Score()
    for result in results:
        score += (result.subject_scores if subjects else result.scores).get(judge, Score())
    return score


def by(results: Iterable[Result], field: str) -> dict[Any, list[Result]]:
    """Results by one property of their cell, ascending or in the order of the scenarios."""
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        groups[getattr(result.task.cell, field)].append(result)
    order = list(SCENARIOS) if field == "scenario" else sorted(groups)
    return {key: groups[key] for key in order if key in groups}


def select(results: Iterable[Result], **wanted: Any) -> list[Result]:
    """Results whose cell has the given properties."""
    return [
        r for r in results if all(getattr(r.task.cell, k) == value for k, value in wanted.items())
    ]


def overall_table(faulty: Sequence[Result]) -> Table:
    """Every judge on everything."""
    rows = []
    for judge in JUDGES:
        for jitter_us, results in by(faulty, "jitter_us").items():
            counted = [r for r in results if r.task.cell.effect_us >= AIM_EFFECT_US]
            score, subjects = total(counted, judge), total(counted, judge, subjects=True)
            rows.append(
                [
                    judge,
                    f"{jitter_us:g}",
                    *(f"{x:.3f}" for x in (score.precision, score.recall, score.f1, subjects.f1)),
                ]
            )
    return Table(
        f"All faults of {AIM_EFFECT_US:g} us and more",
        ["judge", "jitter us", "precision", "recall", "F1", "F1 of the subject alone"],
        rows,
        "F1 asks for the kind (comp-slow, comm-slow, mixed-slow) and the rank or path; the last column for "
        "the rank or path only.",
    )


def f1_tables(faulty: Sequence[Result]) -> list[Table]:
    """F1 by fault and group size, then by effect and group size; each judge."""
    sizes = list(by(faulty, "num_ranks"))
    header = [f"EP{n}" for n in sizes]
    tables = []
    for jitter_us, at_jitter in by(faulty, "jitter_us").items():
        counted = [r for r in at_jitter if r.task.cell.effect_us >= AIM_EFFECT_US]
        rows = [
            [name, judge, *(_f1(select(results, num_ranks=n), judge) for n in sizes)]
            for name, results in by(counted, "scenario").items()
            for judge in JUDGES
        ]
        title = f"F1 by fault, {AIM_EFFECT_US:g} us and more, jitter {jitter_us:g} us"
        tables.append(Table(title, ["fault", "judge", *header], rows))
        rows = [
            [f"{effect_us:g} us", judge, *(_f1(select(results, num_ranks=n), judge) for n in sizes)]
            for effect_us, results in by(at_jitter, "effect_us").items()
            for judge in JUDGES
        ]
        title = f"F1 by size of effect, all faults, jitter {jitter_us:g} us"
        tables.append(Table(title, ["effect", "judge", *header], rows))
    return tables


def _f1(results: Sequence[Result], judge: str) -> str:
    return f"{total(results, judge).f1:.2f}" if results else "-"


def cell_tables(faulty: Sequence[Result]) -> list[Table]:
    """Every cell: precision, recall, F1 of each judge."""
    tables = []
    for name, results in by(faulty, "scenario").items():
        effects = list(by(results, "effect_us"))
        rows = []
        for num_ranks, of_size in by(results, "num_ranks").items():
            for jitter_us, of_jitter in by(of_size, "jitter_us").items():
                for judge in JUDGES:
                    scores = [total(select(of_jitter, effect_us=e), judge) for e in effects]
                    texts = [f"{s.precision:.2f} {s.recall:.2f} {s.f1:.2f}" for s in scores]
                    rows.append([f"EP{num_ranks}", f"{jitter_us:g}", judge, *texts])
        header = ["group", "jitter us", "judge", *(f"{e:g} us" for e in effects)]
        tables.append(Table(f"{name}: precision, recall, F1", header, rows))
    return tables


def alarm_table(healthy: Sequence[Result]) -> Table:
    """False alarms per 10,000 healthy windows."""
    rows = []
    for num_ranks, results in by(healthy, "num_ranks").items():
        count = sum(r.task.num_windows for r in results)
        alarms = [sum(r.alarms[judge] for r in results) for judge in JUDGES]
        bounds = f"{_at_most(alarms[0], count) * 1e4:.1f}"
        rates = [f"{alarm / count * 1e4:.1f}" for alarm in alarms]
        tolerated = sum(r.tolerated for r in results) / count * 1e4
        rows.append([f"EP{num_ranks}", f"{count}", *rates, bounds, f"{tolerated:.1f}"])
    return Table(
        "False alarms per 10,000 healthy windows",
        ["group", "windows", *JUDGES, f"{OURS}, 95 % sure below", f"{OURS}, tolerated"],
        rows,
        "A fifth each: usual, wrong clocks, drifted clocks, heavy tails, skewed loads. Tolerated: verdicts on ranks whose "
        "experts truly are in demand.",
    )


def _at_most(count: int, of: int) -> float:
    """Upper 95 % bound of a share seen `count` times (Poisson)."""
    low, high = float(count), count + 10.0 + 10.0 * math.sqrt(count + 1)
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(
            math.exp(-middle + k * math.log(middle) - math.lgamma(k + 1)) for k in range(count + 1)
        )
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return min(high / of, 1.0)


def operations_table(first: Sequence[Result]) -> Table:
    """How long a window must be."""
    sizes = list(by(first, "num_ranks"))
    rows = []
    for name, of_name in by(first, "scenario").items():
        for effect_us, of_effect in by(of_name, "effect_us").items():
            for jitter_us, of_jitter in by(of_effect, "jitter_us").items():
                texts = []
                for size in sizes:
                    needed = [n for r in select(of_jitter, num_ranks=size) for n in r.operations]
                    quantiles = (_operations(_quantile(needed, q)) for q in (0.5, 0.9))
                    texts.append(" / ".join(quantiles) if needed else "-")
                rows.append([name, f"{effect_us:g}", f"{jitter_us:g}", *texts])
    header = [f"EP{n}" for n in sizes]
    return Table(
        "Operations until all that was injected is named, p50 / p90",
        ["fault", "effect us", "jitter us", *header],
        rows,
        "Dispatches and combines counted together; windows of "
        f"{', '.join(str(n) for n in generated.LENGTHS)} operations were judged.",
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share, method="higher")) if values else math.nan


def _operations(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else f"> {generated.LENGTHS[-1]}"


def error_table(faulty: Sequence[Result]) -> Table:
    """How far effects and savings are from the truth, by fault."""
    rows = []
    for name, results in by(faulty, "scenario").items():
        counted = [r for r in results if r.task.cell.effect_us >= AIM_EFFECT_US]
        effects = [pair for r in counted for pair in r.effects]
        savings = [pair for r in counted for pair in r.savings]
        if effects or savings:
            rows.append([name, *_errors(effects), *_errors(savings)])
    return Table(
        f"Errors of single causes of {AIM_EFFECT_US:g} us and more",
        [
            "fault",
            "effect: median us",
            "p90 us",
            "within max(1 us, 10 %)",
            "saving: median us",
            "p90 us",
            "within max(1 us, 10 %)",
        ],
        rows,
        "True saving: mean operation with the fault minus without it, in the same run with the same random "
        "numbers.",
    )


def _errors(pairs: Sequence[tuple[float, float]]) -> list[str]:
    if not pairs:
        return ["-", "-", "-"]
    errors = [abs(named - true) for true, named in pairs]
    return [
        f"{_quantile(errors, 0.5):.2f}",
        f"{_quantile(errors, 0.9):.2f}",
        f"{share_within(pairs):.2f}",
    ]


def share_within(pairs: Sequence[tuple[float, float]]) -> float:
    """Share of (true, named) that agree to 1 us or 10 %."""
    close = [abs(named - true) <= max(1.0, 0.1 * abs(true)) for true, named in pairs]
    return sum(close) / len(close) if close else math.nan


# --- aims -----------------------------------------------------------------------------------------


def aim_table(results: dict[str, list[Result]]) -> Table:
    """What was aimed at, what came out. A program's exit status does not depend on it."""
    faulty = [r for r in results["faulty"] if r.task.cell.effect_us >= AIM_EFFECT_US]
    rows = []
    for jitter_us, aim in ((3.0, 0.97), (10.0, 0.92)):
        counted = select(faulty, jitter_us=jitter_us)
        rows.append(
            _aim_f1(f"F1, {AIM_EFFECT_US:g} us and more, jitter {jitter_us:g} us", counted, aim)
        )
    rows.append(_aim_f1("F1 at EP2", select(faulty, num_ranks=2), 0.95))
    half = select(faulty, scenario=HALF_LATE)
    if half:
        recall = total(half, OURS).recall
        rows.append(_aim("recall, N/2-1 late ranks", recall, 0.95, _lowest_recall(half)))
    mixed = [r for r in faulty if r.task.cell.scenario in MIXED_CLASSES]
    rows.append(_aim_f1("F1, causes of different class at once", mixed, 0.95))
    healthy = results["healthy"]
    count = sum(r.task.num_windows for r in healthy)
    if count:
        alarms = sum(r.alarms[OURS] for r in healthy)
        rate = alarms / count * 1e4
        bound = _at_most(alarms, count) * 1e4
        rows.append(
            [
                "false alarms per 10,000 healthy windows",
                "at most 1",
                f"{rate:.2f}",
                f"{alarms} in {count}; 95 % sure: below {bound:.1f}",
                _met(rate <= 1),
            ]
        )
    late = select(results["first"], scenario=LATE, effect_us=AIM_EFFECT_US)
    for jitter_us, at_jitter in by(late, "jitter_us").items():
        needed = _quantile([n for r in at_jitter for n in r.operations], 0.9)
        worst = max(
            (_quantile([n for r in of for n in r.operations], 0.9), f"EP{size}")
            for size, of in by(at_jitter, "num_ranks").items()
        )
        rows.append(
            [
                f"operations to a late rank of 10 us, p90, jitter {jitter_us:g} us",
                "at most 32",
                _operations(needed),
                f"most: {_operations(worst[0])} at {worst[1]}",
                _met(needed <= 32),
            ]
        )
    effects = [pair for r in faulty for pair in r.effects]
    if effects:
        share = share_within(effects)
        rows.append(
            [
                "effects within max(1 us, 10 %)",
                "90 % of verdicts",
                f"{share:.3f}",
                f"{len(effects)} verdicts",
                _met(share >= 0.9),
            ]
        )
    return Table("Aims", ["what", "aim", OURS, "where it is worst", ""], [r for r in rows if r])


def _aim_f1(what: str, results: Sequence[Result], aim: float) -> list[str]:
    worst = min(
        ((total(of, OURS).f1, f"EP{size}") for size, of in by(results, "num_ranks").items()),
        default=(1.0, "-"),
    )
    return (
        _aim(what, total(results, OURS).f1, aim, f"{worst[0]:.3f} at {worst[1]}") if results else []
    )


def _lowest_recall(results: Sequence[Result]) -> str:
    recalls = [(total(of, OURS).recall, f"EP{n}") for n, of in by(results, "num_ranks").items()]
    return "{:.3f} at {}".format(*min(recalls))


def _aim(what: str, value: float, aim: float, worst: str) -> list[str]:
    return [what, f"at least {aim:g}", f"{value:.3f}", worst, _met(value >= aim)]


def _met(is_met: bool) -> str:
    return "[green]met[/green]" if is_met else "[red]not met[/red]"


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
    parser.add_argument("--cells", action="store_true", help="print every cell, too")
    some = parser.add_argument_group("only some of it")
    some.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), metavar="NAME")
    some.add_argument("--num-ranks", type=int, nargs="+")
    some.add_argument("--effects", type=float, nargs="+", metavar="US")
    some.add_argument("--jitters", type=float, nargs="+", metavar="US")
    some.add_argument("--windows", type=float, default=1.0, help="times as many windows (1)")
    real_kernels.add_arguments(parser)
    args = parser.parse_args()
    if args.seeds not in SEED_SETS and not args.seeds.isdecimal():
        parser.error(f"--seeds {args.seeds}: expected {', '.join(SEED_SETS)} or a number")
    return args


def run_generated(args: argparse.Namespace, console: Console) -> None:
    """The first part."""
    jobs = plan(QUICK if args.quick else FULL, args)
    console.print(f"{sum(job.task.num_windows for job in jobs)} windows, seeds: {args.seeds}")
    results: dict[str, list[Result]] = {"faulty": [], "healthy": [], "first": []}
    for name, result in run_all(jobs, args.processes, console):
        results[name].append(result)
    faulty = results["faulty"]
    tables = []
    if faulty:
        tables += [overall_table(faulty), *f1_tables(faulty), error_table(faulty)]
    if results["healthy"]:
        tables.append(alarm_table(results["healthy"]))
    if results["first"]:
        tables.append(operations_table(results["first"]))
    tables.append(aim_table(results))
    cells = cell_tables(faulty)
    for table in [*(cells if args.cells else []), *tables]:
        table.show(console)
    wrong = [r for r in [*results["healthy"], *faulty] if r.wrong]
    for result in wrong[:_WRONG_SHOWN]:
        console.print(f"{result.task.cell.text}: {result.wrong[0]}", style="dim", markup=False)
    if wrong:
        console.print(f"{OURS} was wrong in {len(wrong)} tasks; --json has the seeds", style="dim")
    if args.json:
        stored = {name: [stored_result(r) for r in rs] for name, rs in results.items()}
        args.json.write_text(json.dumps({"seeds": args.seeds, **stored}, allow_nan=False))
    if args.markdown:
        heading = f"Generated timestamps, seeds: {args.seeds}"
        write_markdown(args.markdown, f"## {heading}", [*tables, *cells])


def stored_result(result: Result) -> dict[str, Any]:
    """As JSON has it: what was never named is null."""
    operations = [n if math.isfinite(n) else None for n in result.operations]
    return {**asdict(result), "operations": operations}


def main() -> int:
    """Runs the part asked for."""
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if args.real:
        return real_kernels.run(args, first_seed(args.seeds), console)
    run_generated(args, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
