"""Low-latency dispatch and combine of ranks that share one GPU: latency, bandwidth, what counters cost.

Ranks are threads of this process with a stream each. Before a measured batch each keeps its stream busy until all
calls are queued, so the host's time is not in the figures: what is measured is the kernels, and in fused calls the
hand-over between two streams. A round's time is that of its slowest rank; figures are medians of rounds. Bandwidth
is the payload that all ranks send together, and its share of what a copy within the GPU moves of the same size in
the same time. All ranks share the memory of one GPU, so it says nothing of NVLink.

On the cpu backend the same program runs, to be tried out; its figures mean nothing.

    python benchmarks/low_latency_gpu.py [--num-ranks 1 2 4 8] [--blocks 0 4 16] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch  # noqa: E402
from _tables import Table, write_markdown  # noqa: E402
from rich.console import Console  # noqa: E402

import deep_ep  # noqa: E402
import reference  # noqa: E402
from deep_ep import backend  # noqa: E402
from launch import DEVICE, Ranks, keep_busy  # noqa: E402
from program import calc_diff  # noqa: E402
from test_low_latency import FP8_COMBINE_DIFF  # noqa: E402

WARM_UP_ROUNDS = 3
# Batches alternate between counters off and on, so that what else changes hits both.
NUM_BATCHES = 3
# What one rank's round may take to be queued, by a host that queues for one rank at a time.
QUEUE_NS = 400_000
WARPS = 8  # as automatic launches have
NUM_COPIES = 20


class Mark:
    """A moment of the current stream: an event on a GPU, the time of day on the cpu backend."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if DEVICE == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        else:
            self.at_s = time.perf_counter()

    def us_until(self, later: Mark) -> float:
        """Both have been reached."""
        if self.event is not None and later.event is not None:
            return self.event.elapsed_time(later.event) * 1e3
        return (later.at_s - self.at_s) * 1e6


@dataclass(frozen=True)
class Setting:
    """How operations are launched. `blocks`: of a rank, 0: automatic."""

    num_ranks: int
    blocks: int
    hooks: bool


@dataclass(frozen=True)
class Figures:
    """Microseconds of one operation: median, quartiles and least, per round the slowest rank's."""

    median: float
    lower: float
    upper: float
    least: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Figures:
        lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
        return cls(median, lower, upper, min(times))


@dataclass(frozen=True)
class Row:
    """What one setting gave, by operation and by whether counters were on ("off", "on")."""

    setting: Setting
    dispatch: dict[str, Figures]
    combine: dict[str, Figures]
    dispatch_bytes: int
    combine_bytes: int
    dispatch_copy_us: float
    combine_copy_us: float


class Problem(NamedTuple):
    """One rank's tokens, and what its experts return for them."""

    x: torch.Tensor  # [T, hidden] bfloat16
    topk_idx: torch.Tensor  # [T, K] int64
    topk_weights: torch.Tensor  # [T, K] float32
    ys: torch.Tensor  # [num_local_experts, num_ranks * T, hidden] bfloat16


def make_problem(rank: int, buffer: deep_ep.Buffer, args: argparse.Namespace) -> Problem:
    """Random tokens, distinct experts, which return the rows as they came. Collective; checks the sums."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(args.num_tokens, args.hidden, generator=generator).bfloat16().to(DEVICE)
    scores = torch.rand(args.num_tokens, args.num_experts, generator=generator)
    topk_idx = scores.topk(args.num_topk, dim=1).indices.to(DEVICE)
    weights = torch.rand(args.num_tokens, args.num_topk, generator=generator).to(DEVICE)
    (data, scales), recv_count, handle, _, _ = buffer.low_latency_dispatch(
        x, topk_idx, args.num_tokens, args.num_experts
    )
    ys = torch.empty(data.shape, dtype=torch.bfloat16, device=DEVICE)
    for i, count in enumerate(recv_count.tolist()):
        ys[i, :count] = reference.dequantise(data[i, :count], scales[i, :count])
    combined, _, _ = buffer.low_latency_combine(ys, topk_idx, weights, handle)
    difference = calc_diff(x * weights.sum(1, keepdim=True), combined)
    assert difference < FP8_COMBINE_DIFF, f"rank {rank}: sums are off by {difference}"
    return Problem(x, topk_idx, weights, ys)


def run_batch(
    buffer: deep_ep.Buffer, problem: Problem, hooks: bool, args: argparse.Namespace
) -> list[tuple[float, float]]:
    """(dispatch, combine) in us of each round of one rank, warm-up left out. Collective."""
    num_rounds = WARM_UP_ROUNDS + args.rounds
    if DEVICE == "cuda":
        keep_busy(buffer, QUEUE_NS * buffer.group_size * num_rounds)
    marks = []
    for _ in range(num_rounds):
        begin = Mark()
        *_, handle, _, receive = buffer.low_latency_dispatch(
            problem.x, problem.topk_idx, args.num_tokens, args.num_experts, return_recv_hook=hooks
        )
        if receive is not None:
            receive()
        between = Mark()
        *_, receive = buffer.low_latency_combine(
            problem.ys, problem.topk_idx, problem.topk_weights, handle, return_recv_hook=hooks
        )
        if receive is not None:
            receive()
        marks.append((begin, between, Mark()))
    backend.get().current_stream().synchronize()
    buffer.communicator.raise_failure()
    return [(a.us_until(b), b.us_until(c)) for a, b, c in marks[WARM_UP_ROUNDS:]]


def copy_us(num_bytes: int) -> float:
    """Median time of a copy within the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    marks = []
    for _ in range(WARM_UP_ROUNDS + NUM_COPIES):
        begin = Mark()
        target.copy_(source)
        marks.append((begin, Mark()))
    backend.get().synchronize()
    return statistics.median(begin.us_until(end) for begin, end in marks[WARM_UP_ROUNDS:])


def measure(
    ranks: Ranks, problems: list[Problem], setting: Setting, args: argparse.Namespace
) -> Row:
    """All batches of one setting."""
    rounds: dict[str, list[list[float]]] = {"off": [[], []], "on": [[], []]}
    for buffer in ranks.buffers:
        buffer.runtime.set_launch_shape(blocks=setting.blocks, warps=WARPS if setting.blocks else 0)
    for batch in range(2 * NUM_BATCHES):
        counters = "on" if batch % 2 else "off"
        for buffer in ranks.buffers:
            if counters == "on":
                buffer.enable_counters()
            else:
                buffer.disable_counters()
        by_rank = ranks.run(
            lambda rank, buffer: run_batch(buffer, problems[rank], setting.hooks, args)
        )
        for of_ranks in zip(*by_rank):
            for times, values in zip(rounds[counters], zip(*of_ranks)):
                times.append(max(values))
    selections = setting.num_ranks * args.num_tokens * args.num_topk
    num_scales = args.hidden // reference.FP8_GROUP
    dispatch_bytes = selections * (args.hidden + 4 * num_scales)
    combine_bytes = selections * 2 * args.hidden
    return Row(
        setting,
        {name: Figures.of(times) for name, (times, _) in rounds.items()},
        {name: Figures.of(times) for name, (_, times) in rounds.items()},
        dispatch_bytes,
        combine_bytes,
        copy_us(dispatch_bytes),
        copy_us(combine_bytes),
    )


def measure_group(num_ranks: int, args: argparse.Namespace) -> list[Row]:
    """All settings of one group size that fit the device."""
    settings = [
        Setting(num_ranks, blocks, hooks)
        for blocks in args.blocks
        for hooks in (False, True)
        if blocks * num_ranks <= num_multiprocessors()
    ]
    with Ranks(num_ranks, args.num_tokens, args.hidden, args.num_experts) as ranks:
        problems = ranks.run(lambda rank, buffer: make_problem(rank, buffer, args))
        return [measure(ranks, problems, setting, args) for setting in settings]


def num_multiprocessors() -> int:
    """How many blocks may wait for each other at once; without limit on the cpu backend."""
    if DEVICE != "cuda":
        return sys.maxsize
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def facts() -> dict[str, Any]:
    """The device, the step of its timer, and what a copy within it moves."""
    num_bytes = 1 << (30 if DEVICE == "cuda" else 22)
    with Ranks(2, 4, 512, 4) as ranks:

        def timer_step(rank: int, buffer: deep_ep.Buffer) -> int:
            buffer.enable_counters()
            x = torch.zeros(4, 512, dtype=torch.bfloat16, device=DEVICE)
            topk_idx = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
            buffer.low_latency_dispatch(x, topk_idx, 4, 4)
            snapshot = buffer.dispatch_counters.snapshot()
            (slot,) = snapshot.operations()
            return int(slot[-1, snapshot.ring_own_fields.index("timer_step")])

        step_ns = max(ranks.run(timer_step))
    found = {
        "backend": DEVICE,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "timer_step_ns": step_ns,
        "copy_gb_per_s": num_bytes / 1e3 / copy_us(num_bytes),
        "copy_bytes": num_bytes,
    }
    if DEVICE == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": properties.total_memory / 1e9,
        }
    return found


def latency_table(rows: list[Row], step_ns: int, title: str) -> Table:
    """A line per setting."""

    def cells(figures: dict[str, Figures], num_bytes: int, copied_us: float) -> list[str]:
        off = figures["off"]
        return [
            f"{off.median:.1f} ({off.lower:.1f} to {off.upper:.1f})",
            f"{figures['on'].median - off.median:+.2f}",
            f"{num_bytes / 1e3 / off.median:.0f}",
            f"{copied_us / off.median:.0%}",
        ]

    return Table(
        title,
        [
            "ranks, blocks of each, call",
            *("dispatch us", "counters us", "GB/s", "of a copy"),
            *("combine us", "counters us", "GB/s", "of a copy"),
        ],
        [
            [
                f"{row.setting.num_ranks}, {row.setting.blocks or 'automatic'}, "
                f"{'hooks' if row.setting.hooks else 'fused'}",
                *cells(row.dispatch, row.dispatch_bytes, row.dispatch_copy_us),
                *cells(row.combine, row.combine_bytes, row.combine_copy_us),
            ]
            for row in rows
        ],
        "Median (quartiles) of the slowest rank of each round, counters off; what counters add to it (the timer's "
        f"step is {step_ns / 1e3:.3f} us); payload of all ranks; share of a copy within the device.",
    )


def main() -> None:
    """Parses the options, measures, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 4, 16], help="0: automatic")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30, help="of a batch (30)")
    parser.add_argument("--facts", action="store_true", help="only what the device is")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = facts()
    console = Console(width=200)
    device = found.get("device", "the cpu backend, whose figures mean nothing")
    about = f"{device}: timer's step {found['timer_step_ns']} ns, a copy moves {found['copy_gb_per_s']:.0f} GB/s"
    console.print(about, highlight=False)
    rows: list[Row] = []
    shape = f"{args.num_tokens} x {args.hidden} x top-{args.num_topk} of {args.num_experts}"
    title = f"{shape}, FP8 dispatch, BF16 combine, {device}"
    if args.json is not None:
        write_json(args.json, found, rows)
    for num_ranks in () if args.facts else args.num_ranks:
        rows += measure_group(num_ranks, args)
        table = latency_table(rows, found["timer_step_ns"], title)
        # What has been measured is kept if a larger group fails.
        if args.json is not None:
            write_json(args.json, found, rows)
        if args.markdown is not None:
            write_markdown(args.markdown, "## Ranks that share one GPU", [table])
        console.print(f"{num_ranks} ranks measured", highlight=False)
    if rows:
        table.show(console)
        console.print(f"{len(rows)} settings measured; {about}", highlight=False)


def write_json(path: Path, found: dict[str, Any], rows: list[Row]) -> None:
    """The facts and all figures."""
    path.write_text(json.dumps({"facts": found, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
