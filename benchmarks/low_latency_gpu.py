"""Low-latency dispatch and combine of ranks that share one GPU: latency, bandwidth, what counters cost.

benchmarks/_gpu_rounds.py says how rounds are timed: what is measured is the kernels, and in fused calls the
hand-over between two streams. Figures are medians of rounds. Bandwidth is the payload that all ranks send together,
and its share of what a copy within the GPU moves of the same size in the same time. All ranks share the memory of
one GPU, so it says nothing of NVLink.

On the cpu backend the same program runs, to be tried out; its figures mean nothing.

    python benchmarks/low_latency_gpu.py [--num-ranks 1 2 4 8] [--blocks 0 4 16] [--json FILE] [--markdown FILE]
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
from gpu_facts import timer_step_ns
from rich.console import Console

import deep_ep
from deep_ep.utils.math import calc_diff
from support import reference
from support.launch import DEVICE, Ranks

WARPS = 8  # as automatic launches have


@dataclass(frozen=True)
class Setting:
    """How operations are launched. `blocks`: of a rank, 0: automatic."""

    num_ranks: int
    blocks: int
    hooks: bool


@dataclass(frozen=True)
class Row:
    """What one setting gave."""

    setting: Setting
    dispatch: Measured
    combine: Measured


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
    finish(buffer)
    difference = calc_diff(x * weights.sum(1, keepdim=True), combined)
    assert difference < reference.FP8_COMBINE_DIFF, f"rank {rank}: sums are off by {difference}"
    return Problem(x, topk_idx, weights, ys)


def round_of(
    buffer: deep_ep.Buffer, problem: Problem, hooks: bool, args: argparse.Namespace
) -> Round:
    """What one rank does."""

    def dispatch() -> Any:
        *_, handle, _, receive = buffer.low_latency_dispatch(
            problem.x, problem.topk_idx, args.num_tokens, args.num_experts, return_recv_hook=hooks
        )
        if receive is not None:
            receive()
        return handle

    def combine(handle: Any) -> None:
        *_, receive = buffer.low_latency_combine(
            problem.ys, problem.topk_idx, problem.topk_weights, handle, return_recv_hook=hooks
        )
        if receive is not None:
            receive()

    return Round(dispatch, combine)


def measure_setting(
    ranks: Ranks, problems: list[Problem], setting: Setting, args: argparse.Namespace
) -> Row:
    for buffer in ranks.buffers:
        buffer.runtime.set_launch_shape(blocks=setting.blocks, warps=WARPS if setting.blocks else 0)
    dispatch, combine = measure(
        ranks,
        lambda rank, buffer: round_of(buffer, problems[rank], setting.hooks, args),
        args.rounds,
        setting.num_ranks * args.num_tokens * args.num_topk,
        args.hidden,
    )
    return Row(setting, dispatch, combine)


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
        return [measure_setting(ranks, problems, setting, args) for setting in settings]


def latency_table(rows: list[Row], step_ns: int, title: str) -> Table:
    """A line per setting."""

    def cells(measured: Measured) -> list[str]:
        off, on = measured.figures["off"], measured.figures["on"]
        return [
            f"{off.median:.1f} ({off.lower:.1f} to {off.upper:.1f})",
            f"{on.median - off.median:+.2f}",
            *measured.speed,
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
                *cells(row.dispatch),
                *cells(row.combine),
            ]
            for row in rows
        ],
        "Median (quartiles) of the slowest rank of each round, counters off; what counters add to it (the timer's "
        f"step is {step_ns / 1e3:.3f} us); payload of all ranks; share of a copy within the device.",
    )


def main() -> None:
    parser = options(__doc__, [1, 2, 4, 8], num_tokens=128, rounds=30)
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 4, 16], help="0: automatic")
    args = parser.parse_args()
    console = Console(width=200)
    step_ns = timer_step_ns()
    rows: list[Row] = []
    for num_ranks in args.num_ranks:
        rows += measure_group(num_ranks, args)
        table = latency_table(rows, step_ns, title(args, device_name()))
        # What has been measured is kept if a larger group fails.
        if args.json is not None:
            write_rows(args, rows)
        if args.markdown is not None:
            write_markdown(args.markdown, "## Ranks that share one GPU", [table])
        console.print(f"{num_ranks} ranks measured", highlight=False)
    if rows:
        table.show(console)
        console.print(f"{len(rows)} settings measured on {device_name()}", highlight=False)


if __name__ == "__main__":
    main()
