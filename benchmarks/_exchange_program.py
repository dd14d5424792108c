"""An expert-parallel program as users have it: dispatch, experts, combine. Knows nothing of diagnosis.

What diagnoses it, and what makes it slow, comes from the environment alone. `--popular` makes the
experts of one rank popular, which is a property of the routing.

    DEEP_EP_DIAGNOSE=sync:64 DEEP_EP_INJECT=slow-rank=3:1ms python benchmarks/_exchange_program.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("DEEP_EP_BACKEND", "cpu")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import deep_ep  # noqa: E402
from deep_ep.testing.faults import HotRank  # noqa: E402
from support.hot_routing import skew_routing  # noqa: E402
from support.launch import raise_failures, run_processes  # noqa: E402

_TIMEOUT_S = 600.0


def run_rank(rank: int, group: dist.ProcessGroup, args: argparse.Namespace) -> tuple[float, float]:
    """One rank from start to end; returns the seconds its rounds took, the first few left out: of the
    wall clock, and of processor time.

    Nothing but dispatch and combine brings the ranks together while they are timed.
    """
    generator = torch.Generator().manual_seed(args.seed * 1000 + rank)
    num_local_experts = args.num_experts // group.size()
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        args.num_tokens, args.hidden, group.size(), args.num_experts
    )
    buffer = deep_ep.Buffer(
        group,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=num_local_experts,
        explicitly_destroy=True,
    )
    x = torch.randn((args.num_tokens, args.hidden), generator=generator).bfloat16()
    weights = torch.rand((args.num_tokens, args.num_topk), generator=generator)
    rows = group.size() * args.num_tokens
    expert_outputs = torch.empty((num_local_experts, rows, args.hidden), dtype=torch.bfloat16)
    popular = None
    if args.popular:
        popular_rank, _, share = args.popular.partition(":")
        popular = HotRank(int(popular_rank), float(share.rstrip("x")))
    began = began_cpu = 0.0
    for i in range(args.rounds):
        if i == args.warm_up:
            began, began_cpu = time.perf_counter(), time.process_time()
        scores = torch.rand((args.num_tokens, args.num_experts), generator=generator)
        topk_idx = scores.topk(args.num_topk, dim=1).indices
        if popular is not None:
            topk_idx = skew_routing(topk_idx, popular, args.num_experts, group.size(), generator)
        received, counts, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, args.num_tokens, args.num_experts, use_fp8=False
        )
        for expert, count in enumerate(counts.tolist()):
            torch.mul(received[expert, :count], 0.5, out=expert_outputs[expert, :count])
        buffer.low_latency_combine(expert_outputs, topk_idx, weights, handle)
    seconds = time.perf_counter() - began, time.process_time() - began_cpu
    buffer.destroy()
    return seconds


def main() -> None:
    """Spawns the ranks; prints as JSON how long the slowest took, and all processors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not timed")
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--num-topk", type=int, default=4)
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--popular", default="", metavar="RANK:SHAREx")
    args = parser.parse_args()
    results = raise_failures(
        run_processes(run_rank, args.num_processes, args, timeout_s=_TIMEOUT_S)
    )
    wall, cpu = zip(*results)
    rounds = args.rounds - args.warm_up
    print(json.dumps({"seconds": max(wall), "cpu_seconds": sum(cpu), "rounds": rounds}))


if __name__ == "__main__":
    main()
