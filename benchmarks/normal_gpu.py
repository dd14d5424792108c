"""Normal dispatch and combine of ranks that share one GPU: bandwidth, and what counters cost.

Dispatch is that of FP8 rows with a handle, because a fresh one waits for the host; combine is of BF16 rows. Ranks
are threads with a stream each, as in benchmarks/low_latency_gpu.py: a round's time is that of its slowest rank,
figures are medians of rounds, and the share is that of what a copy of the same bytes within the GPU takes. The bytes
are those of the rows that all ranks receive together. A row is written into a queue and copied from there, so half
of a copy's speed is the most that can be reached. All ranks share the memory of one GPU: this says nothing of NVLink.

Blocks of all ranks wait for each other, so together they may not be more than the GPU has multiprocessors.

On the cpu backend the same program runs, to be tried out; its figures mean nothing.

    python benchmarks/normal_gpu.py [--num-ranks 4 8] [--num-sms 8 16] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _tables import Table, write_markdown
from low_latency_gpu import (
    NUM_BATCHES,
    QUEUE_NS,
    WARM_UP_ROUNDS,
    Figures,
    Mark,
    copy_us,
    num_multiprocessors,
)
from rich.console import Console

import deep_ep
import reference
from deep_ep import backend
from launch import DEVICE, Ranks, keep_busy
from normal_exchange import normal_ranks
from program import calc_diff
from test_low_latency import FP8_COMBINE_DIFF

# Of Config: tokens of a step and slots of a queue.
NVL_CHUNK, NVL_SLOTS = 32, 256


@dataclass(frozen=True)
class Row:
    """What one setting gave, by operation and by whether counters were on ("off", "on")."""

    num_ranks: int
    num_sms: int
    dispatch: dict[str, Figures]
    combine: dict[str, Figures]
    dispatch_bytes: int
    combine_bytes: int
    dispatch_copy_us: float
    combine_copy_us: float


class Problem(NamedTuple):
    """One rank's rows, and what its experts return for them."""

    x: tuple[torch.Tensor, torch.Tensor]  # [T, hidden] float8_e4m3fn, [T, hidden / 128] float32
    handle: tuple[Any, ...]
    ys: torch.Tensor  # [received rows, hidden] bfloat16


def make_problem(
    rank: int, buffer: deep_ep.Buffer, config: deep_ep.Config, args: argparse.Namespace
) -> Problem:
    """Random tokens, distinct experts, which return the rows as they came. Collective; checks the sums."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(args.num_tokens, args.hidden, generator=generator).bfloat16()
    scores = torch.rand(args.num_tokens, args.num_experts, generator=generator)
    topk_idx = scores.topk(args.num_topk, dim=1).indices.to(DEVICE)
    data, scales = (part.to(DEVICE) for part in reference.cast_fp8(x))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, args.num_experts)
    (recv_data, recv_scales), _, _, _, handle, _ = buffer.dispatch(
        (data, scales),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        config=config,
    )
    ys = reference.dequantise(recv_data, recv_scales)
    combined = buffer.combine(ys, handle, config=config)[0]
    difference = calc_diff(x.to(DEVICE) * in_rank.sum(1, keepdim=True), combined)
    assert difference < FP8_COMBINE_DIFF, f"rank {rank}: sums are off by {difference}"
    return Problem((data, scales), handle, ys)


def run_batch(
    buffer: deep_ep.Buffer, problem: Problem, config: deep_ep.Config, num_rounds: int
) -> list[tuple[float, float]]:
    """(dispatch, combine) in us of each round of one rank, warm-up left out. Collective."""
    num_rounds += WARM_UP_ROUNDS
    if DEVICE == "cuda":
        keep_busy(buffer, QUEUE_NS * buffer.group_size * num_rounds)
    marks = []
    for _ in range(num_rounds):
        begin = Mark()
        buffer.dispatch(problem.x, handle=problem.handle, config=config)
        between = Mark()
        buffer.combine(problem.ys, problem.handle, config=config)
        marks.append((begin, between, Mark()))
    backend.get().current_stream().synchronize()
    buffer.communicator.raise_failure()
    return [(a.us_until(b), b.us_until(c)) for a, b, c in marks[WARM_UP_ROUNDS:]]


def measure(ranks: Ranks, config: deep_ep.Config, num_sms: int, args: argparse.Namespace) -> Row:
    """All batches of one setting."""
    problems = ranks.run(lambda rank, buffer: make_problem(rank, buffer, config, args))
    rounds: dict[str, list[list[float]]] = {"off": [[], []], "on": [[], []]}
    for batch in range(2 * NUM_BATCHES):
        counters = "on" if batch % 2 else "off"
        for buffer in ranks.buffers:
            if counters == "on":
                buffer.enable_counters()
            else:
                buffer.disable_counters()
        by_rank = ranks.run(
            lambda rank, buffer: run_batch(buffer, problems[rank], config, args.rounds)
        )
        for of_ranks in zip(*by_rank):
            for times, values in zip(rounds[counters], zip(*of_ranks)):
                times.append(max(values))
    num_rows = sum(len(problem.ys) for problem in problems)
    dispatch_bytes = num_rows * (args.hidden + 4 * (args.hidden // reference.FP8_GROUP))
    combine_bytes = num_rows * 2 * args.hidden
    return Row(
        ranks.num_ranks,
        num_sms,
        {name: Figures.of(times) for name, (times, _) in rounds.items()},
        {name: Figures.of(times) for name, (_, times) in rounds.items()},
        dispatch_bytes,
        combine_bytes,
        copy_us(dispatch_bytes),
        copy_us(combine_bytes),
    )


def measure_group(num_ranks: int, num_sms: int, args: argparse.Namespace) -> Row:
    """One setting on buffers of the hinted size."""
    config = deep_ep.Config(num_sms, NVL_CHUNK, NVL_SLOTS)
    with normal_ranks(num_ranks, num_ranks, [config], 2 * args.hidden) as ranks:
        return measure(ranks, config, num_sms, args)


def bandwidth_table(rows: list[Row], title: str) -> Table:
    """A line per setting."""

    def cells(figures: dict[str, Figures], num_bytes: int, copied_us: float) -> list[str]:
        off = figures["off"].median
        return [
            f"{off:.0f}",
            f"{figures['on'].median / off - 1:+.1%}",
            f"{num_bytes / 1e3 / off:.0f}",
            f"{copied_us / off:.0%}",
        ]

    return Table(
        title,
        [
            "ranks, SMs of each",
            *("dispatch us", "counters", "GB/s", "of a copy"),
            *("combine us", "counters", "GB/s", "of a copy"),
        ],
        [
            [
                f"{row.num_ranks}, {row.num_sms}",
                *cells(row.dispatch, row.dispatch_bytes, row.dispatch_copy_us),
                *cells(row.combine, row.combine_bytes, row.combine_copy_us),
            ]
            for row in rows
        ],
        "Median of the slowest rank of each round, counters off; what counters add to it; rows that all ranks "
        "receive; share of a copy of the same bytes within the device.",
    )


def main() -> None:
    """Parses the options, measures, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--num-sms", type=int, nargs="+", default=[8, 16, 24], help="of each rank")
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="of a batch (5)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    console = Console(width=200)
    device = "the cpu backend, whose figures mean nothing"
    if DEVICE == "cuda":
        device = torch.cuda.get_device_name()
    shape = f"{args.num_tokens} x {args.hidden} x top-{args.num_topk} of {args.num_experts}"
    rows: list[Row] = []
    for num_ranks in args.num_ranks:
        for num_sms in args.num_sms:
            if num_ranks * num_sms > num_multiprocessors():
                continue
            rows.append(measure_group(num_ranks, num_sms, args))
            table = bandwidth_table(rows, f"{shape}, FP8 dispatch, BF16 combine, {device}")
            # What has been measured is kept if a larger setting fails.
            if args.json is not None:
                args.json.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
            if args.markdown is not None:
                write_markdown(args.markdown, "## Normal mode, ranks that share one GPU", [table])
            console.print(f"{num_ranks} ranks with {num_sms} SMs measured", highlight=False)
    if rows:
        table.show(console)
        console.print(f"{len(rows)} settings measured on {device}", highlight=False)


if __name__ == "__main__":
    main()
