"""Low-latency dispatch + combine on the cpu backend, side by side with the same exchange over gloo.

Both exchanges run in the same processes and alternate round by round, so that whatever else the
machine does hits both: FP8 dispatch of every selected row, BF16 rows back, weighted sum. The gloo
version casts, permutes by destination, exchanges with torch.distributed.all_to_all_single, groups
what came by local expert, takes the same way back, and sums. A round's time is that of its slowest rank; the ratio is that of the medians.

    python benchmarks/low_latency_cpu.py [--num-processes 4 8] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DEEP_EP_BACKEND", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import deep_ep  # noqa: E402
from support import reference  # noqa: E402
from support.launch import raise_failures, run_processes  # noqa: E402

WARM_UP_ROUNDS = 2


class Problem(NamedTuple):
    """One rank's tokens and their routing."""

    x: torch.Tensor  # [T, hidden] bfloat16
    topk_idx: torch.Tensor  # [T, K] int64, all selected
    topk_weights: torch.Tensor  # [T, K] float32
    num_experts: int


class Gloo:
    """The exchange as one would write it with collectives: rows sorted by expert, one all-to-all
    each way.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()

    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows [sum(sent), ...] of bytes, in the order of their destinations."""
        result = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype)
        dist.all_to_all_single(result, rows, received, sent, group=self.group)
        return result

    def dispatch(self, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
        """FP8 data and scales, one row per selection, and what combine needs."""
        data, scales = reference.cast_fp8(problem.x)
        order = problem.topk_idx.flatten().argsort(stable=True)
        tokens = order // problem.topk_idx.shape[1]
        owners = problem.topk_idx.flatten() // (problem.num_experts // self.num_ranks)
        sent = torch.bincount(owners, minlength=self.num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        splits = sent.tolist(), received.tolist()
        experts = problem.topk_idx.flatten().to(torch.int32)[:, None].view(torch.uint8)
        rows = torch.cat([data.view(torch.uint8), scales.view(torch.uint8)], dim=1)[tokens]
        arrived = self.all_to_all(torch.cat([rows, experts[order]], dim=1), *splits)
        # Grouped by local expert, sources ascending, as the experts need them.
        by_expert = arrived[:, -4:].contiguous().view(torch.int32).flatten().argsort(stable=True)
        grouped = arrived[by_expert]
        hidden = problem.x.shape[1]
        data = grouped[:, :hidden].view(torch.float8_e4m3fn)
        return data, grouped[:, hidden:-4], (order, by_expert, *splits)

    def combine(self, ys: torch.Tensor, problem: Problem, state: tuple[Any, ...]) -> torch.Tensor:
        """ys [received rows, hidden] bfloat16 -> [T, hidden] bfloat16."""
        order, by_expert, sent, received = state
        by_source = torch.empty_like(ys)
        by_source[by_expert] = ys
        returned = self.all_to_all(by_source.view(torch.uint8), received, sent)
        returned = returned.view(torch.bfloat16)
        rows = torch.empty_like(returned)
        rows[order] = returned
        by_slot = rows.view(*problem.topk_idx.shape, -1)
        total = torch.zeros(problem.x.shape)
        for k in range(problem.topk_idx.shape[1]):
            total.addcmul_(by_slot[:, k].float(), problem.topk_weights[:, k, None])
        return total.bfloat16()


def make_problem(rank: int, args: argparse.Namespace) -> Problem:
    """Random tokens, distinct experts."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(args.num_tokens, args.hidden, generator=generator).bfloat16()
    scores = torch.rand(args.num_tokens, args.num_experts, generator=generator)
    topk_idx = scores.topk(args.num_topk, dim=1).indices
    weights = torch.rand(args.num_tokens, args.num_topk, generator=generator)
    return Problem(x, topk_idx, weights, args.num_experts)


def memory_mb() -> dict[str, float]:
    """This process's peak and present resident memory and its share of shared memory, in MB."""
    fields = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, value = line.partition(":")
            if value.strip().endswith("kB"):
                fields[key] = int(value.split()[0]) / 1e3
    return {
        "peak": fields["VmHWM"],
        "private": fields["Private_Clean"] + fields["Private_Dirty"],
        "shared": fields.get("Pss_Shmem", 0.0),
    }


def run_rank(rank: int, group: dist.ProcessGroup, args: argparse.Namespace) -> dict[str, Any]:
    """One rank: alternating rounds of both exchanges. Returns seconds per round and phase, and
    memory.
    """
    problem = make_problem(rank, args)
    before = memory_mb()
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        args.num_tokens, args.hidden, group.size(), args.num_experts
    )
    buffer = deep_ep.Buffer(
        group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=args.num_experts // group.size(),
        explicitly_destroy=True,
    )
    gloo = Gloo(group)
    times: dict[str, list[float]] = {name: [] for name in ("ours", "dispatch", "combine", "gloo")}

    def timed(name: str, fn: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = fn()
        times[name].append(time.perf_counter() - begin)
        return result

    def ours_dispatch() -> Any:
        return buffer.low_latency_dispatch(
            problem.x, problem.topk_idx, args.num_tokens, args.num_experts
        )

    # What the experts would return is made once; only the exchange is timed.
    (data, scales), recv_count, handle, _, _ = ours_dispatch()
    ours_ys = torch.empty(data.shape, dtype=torch.bfloat16)
    for i, count in enumerate(recv_count.tolist()):
        ours_ys[i, :count] = reference.dequantise(data[i, :count], scales[i, :count])
    del data, scales
    rows, row_scales, state = gloo.dispatch(problem)
    gloo_ys = reference.dequantise(rows, row_scales.contiguous().view(torch.float32))

    def ours() -> torch.Tensor:
        *_, new_handle, _, _ = timed("dispatch", ours_dispatch)
        return timed(
            "combine",
            lambda: buffer.low_latency_combine(
                ours_ys, problem.topk_idx, problem.topk_weights, new_handle
            )[0],
        )

    def theirs() -> torch.Tensor:
        _, _, new_state = gloo.dispatch(problem)
        return gloo.combine(gloo_ys, problem, new_state)

    for _ in range(WARM_UP_ROUNDS + args.rounds):
        dist.barrier(group)
        mine = timed("ours", ours)
        dist.barrier(group)
        reference_result = timed("gloo", theirs)
    difference = (mine.float() - reference_result.float()).abs().max()
    assert difference <= 2**-6 * reference_result.float().abs().max(), "the two exchanges disagree"
    after = memory_mb()
    buffer.destroy()
    return {
        "times": {name: values[WARM_UP_ROUNDS:] for name, values in times.items()},
        "memory": after,
        "before": before,
        "buffer_mb": size / 1e6,
    }


def report(num_ranks: int, results: list[dict[str, Any]]) -> None:
    """Prints one line per exchange, and the ratio."""

    def slowest(name: str) -> list[float]:
        return [max(values) for values in zip(*(result["times"][name] for result in results))]

    medians = {name: statistics.median(slowest(name)) * 1e3 for name in results[0]["times"]}
    print(f"EP{num_ranks}")
    print(
        f"  deep_ep  {medians['ours']:8.1f} ms a round (median of the slowest rank; "
        f"dispatch {medians['dispatch']:.1f}, combine {medians['combine']:.1f})"
    )
    print(f"  gloo     {medians['gloo']:8.1f} ms a round")
    print(f"  ratio    {medians['gloo'] / medians['ours']:8.2f} x")
    peak = max(result["memory"]["peak"] for result in results)
    private = max(result["memory"]["private"] for result in results)
    start = max(result["before"]["private"] for result in results)
    shared = sum(result["memory"]["shared"] for result in results)
    print(
        f"  memory   {peak:8.0f} MB peak per rank, peers' mapped memory it touched included; "
        f"{private:.0f} MB private ({start:.0f} before the buffer was made)"
    )
    print(
        f"           {shared:8.0f} MB of shared memory touched by all ranks together, of "
        f"{num_ranks * results[0]['buffer_mb']:.0f} MB reserved"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-processes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(
        f"{args.num_tokens} tokens x {args.hidden} x top-{args.num_topk} of {args.num_experts} experts, FP8 dispatch, "
        f"BF16 combine; {os.cpu_count()} cores; torch {torch.__version__}"
    )
    for num_ranks in args.num_processes:
        report(num_ranks, raise_failures(run_processes(run_rank, num_ranks, args, timeout_s=600)))


if __name__ == "__main__":
    main()
