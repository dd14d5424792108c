"""The real kernels of the cpu backend with injected faults, diagnosed the way users have it.

Each run is a process of its own: `_exchange_program.py` with DEEP_EP_DIAGNOSE, DEEP_EP_DIAGNOSE_DIR and
DEEP_EP_INJECT in its environment. Verdicts are read from the records that rank 0 left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from _scenarios import Score
from _tables import Table, write_markdown
from rich.console import Console

from deep_ep.diagnose.storage import diagnosis_log
from deep_ep.errors import EPArgumentError
from deep_ep.testing import faults

PROGRAM = Path(__file__).resolve().with_name("_exchange_program.py")
# Operations of a window, dispatches and combines together; a run is so many windows.
WINDOW_OPERATIONS, NUM_WINDOWS = 64, 2
SHAPES = {
    "small": {"num-tokens": 32, "hidden": 1024, "num-topk": 4, "num-experts": 32},
    "production": {"num-tokens": 128, "hidden": 7168, "num-topk": 8, "num-experts": 256},
}
# (ranks, ranks per node), by name.
LAYOUTS = {"EP4": (4, 4), "EP8": (8, 8), "EP8 as 2 x 4": (8, 4)}
QUICK_CASES = ("none", "slow-rank 1ms", "slow-path 1ms", "wrong clock")
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Run:
    """One program: `injected` are faults as texts, a hot rank among them if there is one."""

    layout: str
    case: str
    injected: tuple[str, ...]
    seed: int
    shape: str

    @property
    def faults(self) -> list[faults.Fault]:
        """What must be named."""
        return [faults.parse(text) for text in self.injected]

    def environment(self, folder: str) -> dict[str, str]:
        """What makes the program diagnosed, and slow."""
        by_environment = [f for f in self.injected if not f.startswith("hot-rank")]
        chosen = {
            "DEEP_EP_DIAGNOSE": f"sync:{WINDOW_OPERATIONS}",
            "DEEP_EP_DIAGNOSE_DIR": folder,
            "DEEP_EP_RANKS_PER_NODE": str(LAYOUTS[self.layout][1]),
        }
        return {**chosen, "DEEP_EP_INJECT": ",".join(by_environment)} if by_environment else chosen

    def command(self) -> list[str]:
        popular = [f.partition("=")[2] for f in self.injected if f.startswith("hot-rank")]
        return [
            sys.executable,
            str(PROGRAM),
            f"--num-processes={LAYOUTS[self.layout][0]}",
            f"--rounds={WINDOW_OPERATIONS * NUM_WINDOWS // 2}",
            *(f"--{name}={value}" for name, value in SHAPES[self.shape].items()),
            f"--seed={self.seed}",
            *(f"--popular={text}" for text in popular),
        ]

    def text(self) -> str:
        """A line that repeats it."""
        settings = self.environment("verdicts")
        words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
        return " ".join([*words, *(shlex.quote(word) for word in self.command())])


@dataclass
class Outcome:
    """What one run said.

    Attributes:
        score: over its windows.
        num_windows: how many there were; fewer where the watching thread came late, which then are
            longer.
        said: of the windows that were wrong, what was named; or why the run failed.
    """

    run: Run
    score: Score = field(default_factory=Score)
    num_windows: int = 0
    said: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    real = parser.add_argument_group("real kernels")
    real.add_argument("--real", action="store_true", help="run them instead of generated windows")
    real.add_argument("--shape", choices=list(SHAPES), default="small", help="sizes (small)")
    real.add_argument("--runs", type=int, default=3, help="runs of each case, other seeds each (3)")


def cases(num_ranks: int, generator: np.random.Generator) -> dict[str, tuple[str, ...]]:
    """Faults by name, at random places."""
    slow, src, dst, hot = (int(rank) for rank in generator.permutation(num_ranks)[:4])
    # Of four ranks, three times as much is three quarters of everything.
    share = 3 if num_ranks <= 4 else 4
    found: dict[str, tuple[str, ...]] = {"none": ()}
    for delay in ("500us", "1ms", "2ms"):
        found[f"slow-rank {delay}"] = (f"slow-rank={slow}:{delay}",)
    for delay in ("500us", "1ms", "2ms"):
        found[f"slow-path {delay}"] = (f"slow-path={src}>{dst}:{delay}",)
    found[f"hot-rank {share}x"] = (f"hot-rank={hot}:{share}x",)
    found["slow-rank 1ms + slow-path 1ms"] = (
        f"slow-rank={slow}:1ms",
        f"slow-path={src}>{dst}:1ms",
    )
    found["wrong clock"] = (f"clock={slow}:1.5s,20ppm",)
    return found


def plan(args: argparse.Namespace, first_seed: int) -> list[Run]:
    runs = []
    layouts = {name: LAYOUTS[name] for name in (["EP4"] if args.quick else LAYOUTS)}
    for layout, (num_ranks, _) in layouts.items():
        for i in range(1 if args.quick else args.runs):
            seed = first_seed + i
            for case, injected in cases(num_ranks, np.random.default_rng(seed)).items():
                if not args.quick or case in QUICK_CASES:
                    runs.append(Run(layout, case, injected, seed % 2**20, args.shape))
    return runs


def carry_out(run: Run) -> Outcome:
    """Runs one program and grades its windows."""
    outcome = Outcome(run)
    expected = faults.expected_verdicts(run.faults)
    missed_all = Score(missed=NUM_WINDOWS * len(expected))
    with tempfile.TemporaryDirectory(prefix="deep_ep_accuracy_") as folder:
        env = {k: v for k, v in os.environ.items() if not k.startswith("DEEP_EP_")}
        try:
            done = subprocess.run(
                run.command(),
                env={**env, **run.environment(folder)},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            # Records are read when they are looked at.
            found = list(diagnosis_log.read(folder)) if done.returncode == 0 else []
        except (subprocess.TimeoutExpired, EPArgumentError) as error:
            return Outcome(run, missed_all, said=[str(error)])
    if done.returncode:
        return Outcome(
            run, missed_all, said=[f"exit status {done.returncode}: {done.stderr[-500:]}"]
        )
    if not found:
        return Outcome(run, missed_all, said=[f"no window: {done.stderr[-500:]}"])
    outcome.num_windows = len(found)
    for record in found:
        named = record.diagnosis.keys
        right = len(named & expected)
        outcome.score += Score(right, len(named) - right, len(expected) - right)
        if named != expected:
            verdicts = "; ".join(
                f"{v.kind} {v.cause} {v.subject} {v.operation} {v.effect_us:.0f} us"
                for v in record.diagnosis.verdicts
            )
            remarks = " ".join(record.diagnosis.remarks)
            outcome.said.append(f"window {record.window}: {verdicts or 'nothing'}. {remarks}")
    return outcome


def table(outcomes: Sequence[Outcome]) -> Table:
    """Precision, recall, F1 by layout and case."""
    rows = []
    for layout in [*dict.fromkeys(o.run.layout for o in outcomes), "all"]:
        of_layout = [o for o in outcomes if layout in (o.run.layout, "all")]
        for case in [*dict.fromkeys(o.run.case for o in of_layout), "all"]:
            chosen = [o for o in of_layout if case in (o.run.case, "all")]
            score = sum((o.score for o in chosen), Score())
            right = sum(not o.said for o in chosen)
            windows = sum(o.num_windows for o in chosen)
            numbers = (score.precision, score.recall, score.f1)
            texts = [f"{right} of {len(chosen)}", f"{windows}", *(f"{n:.3f}" for n in numbers)]
            rows.append([layout, case, *texts])
    return Table(
        "Real kernels on the cpu backend",
        ["layout", "injected", "runs right throughout", "windows", "precision", "recall", "F1"],
        rows,
        f"Windows of {WINDOW_OPERATIONS} operations, {NUM_WINDOWS} in each run; a run is right throughout when "
        "every window names what was injected and nothing else.",
    )


def run(args: argparse.Namespace, first_seed: int, console: Console) -> int:
    """Runs everything, prints and writes the tables. The exit status says nothing about them."""
    runs = plan(args, first_seed)
    outcomes = []
    for i, one in enumerate(runs):
        outcome = carry_out(one)
        outcomes.append(outcome)
        verdict = "right" if not outcome.said else "[red]wrong[/red]"
        console.print(
            f"{i + 1} of {len(runs)}: {one.layout}, {one.case}, seed {one.seed}: {verdict}"
        )
        for said in outcome.said:
            console.print(f"  {said}", markup=False)
        if outcome.said:
            console.print(f"  {one.text()}", markup=False, soft_wrap=True)
    tables = [table(outcomes), aim_table(outcomes)]
    for each in tables:
        each.show(console)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    if args.markdown:
        heading = f"## Real kernels, shape: {args.shape}"
        write_markdown(args.markdown, heading, tables)
    return 0


def aim_table(outcomes: Sequence[Outcome]) -> Table:
    """Every injected fault of 500 us and more named, and nothing else."""
    wrong = [o for o in outcomes if o.said]
    met = "[red]not met[/red]" if wrong else "[green]met[/green]"
    row = [
        "every fault of 500 us and more named, nothing else",
        "all runs",
        f"{len(outcomes) - len(wrong)} of {len(outcomes)}",
        met,
    ]
    return Table("Aim", ["what", "aim", "deep_ep", ""], [row])
