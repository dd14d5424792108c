"""Normal dispatch and combine of ranks that share one GPU: bandwidth, and what counters cost.

Dispatch is that of FP8 rows with a handle, because a fresh one waits for the host; combine is of BF16 rows.
benchmarks/_gpu_rounds.py says how rounds are timed; figures are medians of rounds, and the share is that of what a
copy of the same bytes within the GPU takes. The bytes are those of the rows that all ranks receive together. A row
is written into a queue and copied from there, so half of a copy's speed is the most that can be reached. All ranks
share the memory of one GPU: this says nothing of NVLink.

Blocks of all ranks wait for each other, so together they may not be more than the GPU has multiprocessors.

On the cpu backend the same program runs, to be tried out; its figures mean nothing.

    python benchmarks/normal_gpu.py [--num-ranks 4 8] [--num-sms 8 16] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from _gpu_rounds import (
    Measured,
    Round,
    device_name,
    finish,
    measure,
    num_multiprocessors,
    options,
    title,
    write_rows,
)
from _tables import Table, write_markdown
from rich.console import Console

import deep_ep
from deep_ep.utils.math import calc_diff
from support import reference
from support.launch import DEVICE, reserve
from support.normal_exchange import normal_ranks

# Of a rank, for the tensors that its results are checked with.
_PROBLEM_BYTES = 4 << 30
# Of Config: tokens of a step and slots of a queue.
NVL_CHUNK, NVL_SLOTS = 32, 256


@dataclass(frozen=True)
class Row:
    """What one setting gave."""

    num_ranks: int
    num_sms: int
    dispatch: Measured
    combine: Measured


class Problem(NamedTuple):
    """One rank's rows, and what its experts return for them."""

    x: tuple[torch.Tensor, torch.Tensor]  # [T, hidden] float8_e4m3fn, [T, hidden / 128] float32
    handle: tuple[Any, ...]
    ys: torch.Tensor  # [received rows, hidden] bfloat16


class Inputs(NamedTuple):
    """One rank's tokens, where `Problem` has what they are sent as."""

    x: torch.Tensor  # [T, hidden] bfloat16
    topk_idx: torch.Tensor  # [T, K] int64
    rows: tuple[torch.Tensor, torch.Tensor]  # as `Problem.x`


def make_inputs(rank: int, args: argparse.Namespace) -> Inputs:
    """Random tokens, distinct experts."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(args.num_tokens, args.hidden, generator=generator).bfloat16()
    scores = torch.rand(args.num_tokens, args.num_experts, generator=generator)
    topk_idx = scores.topk(args.num_topk, dim=1).indices.to(DEVICE)
    data, scales = (part.to(DEVICE) for part in reference.cast_fp8(x))
    return Inputs(x.to(DEVICE), topk_idx, (data, scales))


def make_problem(
    rank: int,
    buffer: deep_ep.Buffer,
    inputs: Inputs,
    config: deep_ep.Config,
    args: argparse.Namespace,
) -> Problem:
    """The experts return the rows as they came. Collective; checks the sums.

    What torch does for the first time may wait for all kernels, so it comes when none waits for another rank.
    """
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        inputs.topk_idx, args.num_experts
    )
    (recv_data, recv_scales), _, _, _, handle, _ = buffer.dispatch(
        inputs.rows,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        config=config,
    )
    finish(buffer)
    ys = reference.dequantise(recv_data, recv_scales)
    combined = buffer.combine(ys, handle, config=config)[0]
    finish(buffer)
    difference = calc_diff(inputs.x * in_rank.sum(1, keepdim=True), combined)
    assert difference < reference.FP8_COMBINE_DIFF, f"rank {rank}: sums are off by {difference}"
    return Problem(inputs.rows, handle, ys)


def round_of(buffer: deep_ep.Buffer, problem: Problem, config: deep_ep.Config) -> Round:
    """What one rank does."""

    def dispatch() -> Any:
        buffer.dispatch(problem.x, handle=problem.handle, config=config)
        return problem.handle

    def combine(handle: Any) -> None:
        buffer.combine(problem.ys, handle, config=config)

    return Round(dispatch, combine)


def measure_setting(num_ranks: int, num_sms: int, args: argparse.Namespace) -> Row:
    """One setting on buffers of the hinted size."""
    config = deep_ep.Config(num_sms, NVL_CHUNK, NVL_SLOTS)
    with normal_ranks(num_ranks, num_ranks, [config], 2 * args.hidden) as ranks:
        # In float32, what a rank receives of 4096 tokens is more than it begins with.
        ranks.run(lambda rank, buffer: reserve(_PROBLEM_BYTES))
        # Tokens take seconds to make, and not all ranks take as long.
        inputs = ranks.run(lambda rank, buffer: make_inputs(rank, args))
        problems = ranks.run(
            lambda rank, buffer: make_problem(rank, buffer, inputs[rank], config, args)
        )
        dispatch, combine = measure(
            ranks,
            lambda rank, buffer: round_of(buffer, problems[rank], config),
            args.rounds,
            sum(len(problem.ys) for problem in problems),
            args.hidden,
        )
        return Row(num_ranks, num_sms, dispatch, combine)


def bandwidth_table(rows: list[Row], title: str) -> Table:
    """A line per setting."""

    def cells(measured: Measured) -> list[str]:
        off, on = measured.figures["off"].median, measured.figures["on"].median
        return [f"{off:.0f}", f"{on / off - 1:+.1%}", *measured.speed]

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
                *cells(row.dispatch),
                *cells(row.combine),
            ]
            for row in rows
        ],
        "Median of the slowest rank of each round, counters off; what counters add to it; rows that all ranks "
        "receive; share of a copy of the same bytes within the device.",
    )


def main() -> None:
    parser = options(__doc__, [4, 8], num_tokens=4096, rounds=5)
    parser.add_argument("--num-sms", type=int, nargs="+", default=[8, 16, 24], help="of each rank")
    args = parser.parse_args()
    console = Console(width=200)
    rows: list[Row] = []
    for num_ranks in args.num_ranks:
        for num_sms in args.num_sms:
            if num_ranks * num_sms > num_multiprocessors():
                continue
            rows.append(measure_setting(num_ranks, num_sms, args))
            table = bandwidth_table(rows, title(args, device_name()))
            # What has been measured is kept if a larger setting fails.
            if args.json is not None:
                write_rows(args, rows)
            if args.markdown is not None:
                write_markdown(args.markdown, "## Normal mode, ranks that share one GPU", [table])
            console.print(f"{num_ranks} ranks with {num_sms} SMs measured", highlight=False)
    if rows:
        table.show(console)
        console.print(f"{len(rows)} settings measured on {device_name()}", highlight=False)


if __name__ == "__main__":
    main()
