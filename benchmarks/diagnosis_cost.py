"""What a diagnosis costs: one window's verdict by group size, and a whole program with and without.

The verdict of a window has two parts: each rank condenses its own counters, and one rank judges
what all ranks report. The second stands beside the mean-normalised rule, written as the loops over
cells that it is usually written as, in the same run on the same window; each does both kinds of
operation. While a buffer watches itself, its rank 0 has a program to run as well, whose pace is
measured while a thread of the same process judges, and while a process of its own does. The program
runs alternate, so that whatever else the machine does hits both.

    python benchmarks/diagnosis_cost.py [--quick] [--num-ranks 8 64 256 1024] [--pairs 7]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# One core: before NumPy is imported.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "diagnose"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _tables import Table, write_markdown  # noqa: E402
from rich.console import Console  # noqa: E402

from deep_ep import diagnose  # noqa: E402
from deep_ep.base import codec  # noqa: E402
from deep_ep.diagnose.collect.rank_summary import Summary, summarize  # noqa: E402
from deep_ep.diagnose.live.judge_process import JudgeProcess  # noqa: E402
from deep_ep.diagnose.live.window_judge import Share, WindowJudge, WindowShares  # noqa: E402
from deep_ep.testing.faults import HotRank, SlowPath, SlowRank  # noqa: E402
from generator import simulate_windows  # noqa: E402
from generator.machines import GPU  # noqa: E402

KINDS = ("dispatch", "combine")
FAULTS = [SlowRank(3, 30e-6), SlowPath(1, 5, 30e-6), HotRank(6, 2.0)]
_LARGE_GROUP = 256
# The aims of the verdict, in seconds on one core.
AIMS_S = {64: 0.010, 1024: 0.4}
_WIDTH = 150


@dataclass(frozen=True)
class Subject:
    """A window to be judged.

    Attributes:
        snapshot: of one rank.
        summaries: of all ranks.
        waits: per kind nested lists, [receiver][source] nanoseconds, as a program without NumPy has
            them.
    """

    snapshot: diagnose.Snapshot
    summaries: list[Summary]
    waits: list[list[list[float]]]


@dataclass(frozen=True)
class Cost:
    """Medians in seconds, and bytes."""

    num_ranks: int
    judge_s: float
    loops_s: float
    summarize_s: float
    peak_bytes: int
    cells: int
    beside: dict[str, Pace]


@dataclass(frozen=True)
class Pace:
    """A program of small operators while another thread of it has a window judged.

    Attributes:
        share: of the pace that it has alone.
        verdict_s: until the window was judged.
    """

    share: float
    verdict_s: float


def mean_normalised_loops(matrix: list[list[float]]) -> tuple[list[int], list[int], list[Any]]:
    """Columns and rows above 3 times, cells above 5 times the mean of all: loops over all cells."""
    size = len(matrix)
    mean = sum(sum(row) for row in matrix) / (size * size) + 1e-8
    columns, rows, points = [], [], []
    for j in range(size):
        column = 0.0
        for i in range(size):
            column += matrix[i][j]
        if column / size / mean > 3.0:
            columns.append(j)
    for i in range(size):
        row = 0.0
        for j in range(size):
            row += matrix[i][j]
        if row / size / mean > 3.0:
            rows.append(i)
    for i in range(size):
        for j in range(size):
            normalised = matrix[i][j] / mean
            if normalised > 5.0 and j not in columns and i not in rows:
                points.append((i, j, normalised))
    return columns, rows, points


def window_operations(num_ranks: int) -> int:
    """Stamps of larger groups would take gigabytes."""
    return 128 if num_ranks <= _LARGE_GROUP else 32


def make_subject(num_ranks: int) -> Subject:
    """A window with three causes."""
    num_operations = window_operations(num_ranks)
    machine = replace(GPU, ranks_per_node=8)
    window = next(
        simulate_windows(
            machine, num_ranks, num_operations // len(KINDS), [FAULTS], 1, capacity=num_operations
        )
    )
    return Subject(
        snapshot=window.snapshot(0),
        summaries=[summarize(window.snapshot(rank)) for rank in range(num_ranks)],
        waits=[window.wait_matrix(kind).astype(np.float64).tolist() for kind in KINDS],
    )


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def steps_per_s(until: Callable[[], bool]) -> float:
    """Calls a small operator of torch, again and again."""
    x = torch.zeros(16)
    began = time.perf_counter()
    steps = 0
    while not until():
        x.add_(1)
        steps += 1
    return steps / (time.perf_counter() - began)


def paces(subject: Subject, repetitions: int) -> dict[str, Pace]:
    """By who judges; medians."""
    own, *others = (Share(summary) for summary in subject.summaries)
    encoded = {rank: codec.encode(share) for rank, share in enumerate(others, 1)}
    here, process = WindowJudge(None), JudgeProcess(WindowJudge(None))
    by_judge: dict[str, list[Pace]] = {"thread": [], "process": []}
    for number in range(1, repetitions + 2):
        for name, judge in (("thread", here.judge), ("process", process.judge)):
            window = WindowShares(number, 0.0, own, encoded)
            ends = time.perf_counter() + 0.2
            alone = steps_per_s(lambda ends=ends: time.perf_counter() > ends)
            took_s: list[float] = []
            thread = threading.Thread(
                target=lambda judge=judge, window=window, took_s=took_s: took_s.append(
                    timed(lambda: judge(window))
                )
            )
            thread.start()
            beside = steps_per_s(lambda took_s=took_s: bool(took_s))
            thread.join()
            # The first window is the one in which modules are loaded.
            if number > 1:
                by_judge[name].append(Pace(beside / alone, took_s[0]))
    process.close()
    return {
        name: Pace(
            statistics.median(p.share for p in of_judge),
            statistics.median(p.verdict_s for p in of_judge),
        )
        for name, of_judge in by_judge.items()
    }


def measure(num_ranks: int, args: argparse.Namespace) -> Cost:
    """Alternates the two judges; memory is measured in a call of its own."""
    subject = make_subject(num_ranks)

    def judge() -> diagnose.Diagnosis:
        return diagnose.judge(diagnose.gather(subject.summaries))

    def loops() -> None:
        for matrix in subject.waits:
            mean_normalised_loops(matrix)

    found = judge().keys
    assert ("comp-slow", 3) in found, (
        f"EP{num_ranks}: the window was not judged as expected: {found}"
    )
    repetitions = 3 if args.quick or num_ranks > _LARGE_GROUP else 15
    judge_s, loops_s, summarize_s = [], [], []
    gc.collect()
    for _ in range(repetitions):
        judge_s.append(timed(judge))
        loops_s.append(timed(loops))
        summarize_s.append(timed(lambda: summarize(subject.snapshot)))
    tracemalloc.start()
    judge()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Cost(
        num_ranks,
        statistics.median(judge_s),
        statistics.median(loops_s),
        statistics.median(summarize_s),
        peak_bytes,
        len(KINDS) * num_ranks**2,
        paces(subject, repetitions),
    )


def verdict_table(costs: Sequence[Cost]) -> Table:
    """A row per group size."""
    rows = []
    for cost in costs:
        aim_s = AIMS_S.get(cost.num_ranks)
        is_met = aim_s is not None and cost.judge_s < aim_s
        aim = "-" if aim_s is None else f"< {aim_s * 1e3:g} ms: {'met' if is_met else 'not met'}"
        rows.append(
            [
                f"EP{cost.num_ranks}",
                f"{window_operations(cost.num_ranks)}",
                f"{cost.judge_s * 1e3:.1f}",
                f"{cost.loops_s * 1e3:.1f}",
                f"{cost.judge_s / cost.loops_s:.2f}",
                f"{cost.summarize_s * 1e3:.2f}",
                f"{cost.peak_bytes / 1e6:.1f}",
                f"{cost.peak_bytes / cost.cells:.0f}",
                aim,
            ]
        )
    return Table(
        "One window, one core, medians",
        [
            "group",
            "operations",
            "verdict ms",
            "loops ms",
            "ratio",
            "each rank ms",
            "peak MB",
            "bytes per cell",
            "aim",
        ],
        rows,
        "Verdict: gather and judge the reports of all ranks. Loops: the mean-normalised rule. Each rank: "
        "condensing its own counters. Peak: of the verdict, over what the reports take; cells are those of the "
        "wait matrices of both kinds.",
    )


def pace_table(costs: Sequence[Cost]) -> Table:
    """A row per group size and who judges."""
    rows = [
        [f"EP{cost.num_ranks}", name, f"{pace.share:.2f}", f"{pace.verdict_s * 1e3:.0f}"]
        for cost in costs
        for name, pace in cost.beside.items()
    ]
    return Table(
        "Rank 0's program while a window is judged",
        ["group", "judged by a", "pace", "verdict ms"],
        rows,
        "Pace: small operators of torch per second over those that it takes alone. Verdict: from what came to lines "
        "in the log, reports decoded.",
    )


def run_program(setting: str, args: argparse.Namespace) -> dict[str, float]:
    """One run of the exchange program."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "_exchange_program.py"),
        f"--num-processes={args.program_ranks}",
        f"--rounds={args.rounds}",
        "--warm-up=20",
    ]
    env = {**os.environ, "DEEP_EP_DIAGNOSE": setting}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def program_table(args: argparse.Namespace, console: Console) -> Table:
    """The exchange program with and without, in turn."""
    settings = {"off": "0", "on": "async:1"}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for i in range(args.pairs):
        # Who comes first changes, so that a slow drift of the machine hits both.
        for name in sorted(settings, reverse=i % 2 == 1):
            runs[name].append(run_program(settings[name], args))
        console.print(f"{i + 1} of {args.pairs} pairs of programs", style="dim")
    rows = []
    for field, name in (("seconds", "wall clock"), ("cpu_seconds", "processor, all ranks")):
        per_round = {
            setting: [run[field] / run["rounds"] * 1e3 for run in of]
            for setting, of in runs.items()
        }
        off, on = (statistics.median(per_round[setting]) for setting in ("off", "on"))
        ratios = [b / a for a, b in zip(per_round["off"], per_round["on"])]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append([name, f"{off:.3f}", f"{on:.3f}", f"{on / off:.3f}", spread])
    return Table(
        f"A whole program on the cpu backend, {args.program_ranks} ranks, DEEP_EP_DIAGNOSE=async:1 or off",
        ["", "off: ms a round", "on: ms a round", "ratio of medians", "ratios of pairs"],
        rows,
        f"{args.pairs} pairs of runs of {args.rounds - 20} rounds of dispatch and combine.",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small groups, one pair of programs")
    parser.add_argument("--num-ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--pairs", type=int, default=7, help="of program runs, 0: none (7)")
    parser.add_argument("--program-ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=420)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--markdown", type=Path, metavar="OUT")
    args = parser.parse_args()
    if min(args.num_ranks) < 8:
        parser.error(f"--num-ranks {min(args.num_ranks)}: expected at least 8, for three causes")
    if args.quick:
        args.num_ranks, args.pairs = [8, 64], 1
        args.program_ranks, args.rounds = 2, 60
    logging.getLogger("deep_ep.diagnose").setLevel(logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    costs = [measure(n, args) for n in args.num_ranks]
    tables = [verdict_table(costs), pace_table(costs)]
    for table in tables:
        table.show(console)
    if args.pairs:
        tables.append(program_table(args, console))
        tables[-1].show(console)
    if args.json:
        stored = {t.title: [dict(zip(t.header, row)) for row in t.rows] for t in tables}
        args.json.write_text(json.dumps(stored))
    if args.markdown:
        write_markdown(args.markdown, "## Cost", tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
