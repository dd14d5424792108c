"""What the counters cost: executed instructions of the host target with counters on and off.

valgrind counts the instructions of a program that drives all ranks of a group from one thread:
first every rank sends, then every rank receives, so nobody ever waits and the count repeats to the
instruction or nearly so. Start-up is taken out by the difference of a long and a short run.

    python benchmarks/counters_overhead.py [--num-ranks 4] [--num-tokens 32]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHORT_RUN, LONG_RUN = 2, 8  # rounds of dispatch + combine
LIMIT = 1.01


def load_native() -> Any:
    """deep_ep._cpu without its package, which would import torch: long under valgrind."""
    (path,) = (ROOT / "deep_ep").glob("_cpu.*.so")
    spec = importlib.util.spec_from_file_location("_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rank:
    """One rank's runtime and the memory its calls work on."""

    def __init__(self, native: Any, rank: int, args: argparse.Namespace) -> None:
        self.args = args
        self.phase_send = native.PHASE_SEND
        num_local_experts = args.num_experts // args.num_ranks
        num_rows = num_local_experts * args.num_ranks * args.num_tokens
        num_scales = args.hidden // native.CHANNELS_PER_SCALE
        self.runtime = native.Runtime(
            rank=rank,
            num_ranks=args.num_ranks,
            num_nvl_bytes=0,
            num_rdma_bytes=native.low_latency_rdma_size_hint(
                num_max_dispatch_tokens_per_rank=args.num_tokens,
                num_ranks=args.num_ranks,
                hidden=args.hidden,
                num_experts=args.num_experts,
            ),
            low_latency_mode=True,
            num_qps_per_rank=num_local_experts,
            timeout_ns=10**12,
            ranks_per_node=args.num_ranks,
            device_index=0,
        )
        self.x = (ctypes.c_uint16 * (args.num_tokens * args.hidden))()
        for i in range(len(self.x)):
            self.x[i] = 0x3F80 + (i * 37 + rank) % 128  # bfloat16 between 1 and 2
        self.topk_idx = (ctypes.c_int64 * (args.num_tokens * args.num_topk))()
        for i in range(len(self.topk_idx)):
            token, slot = divmod(i, args.num_topk)
            self.topk_idx[i] = (token * 7 + slot * 11 + rank) % args.num_experts
        self.weights = (ctypes.c_float * len(self.topk_idx))(*[0.125] * len(self.topk_idx))
        self.recv_x = (ctypes.c_uint8 * (num_rows * args.hidden))()
        self.recv_scales = (ctypes.c_float * (num_rows * num_scales))()
        self.recv_count = (ctypes.c_int32 * num_local_experts)()
        num_words = self.runtime.handle_words(
            num_max_dispatch_tokens_per_rank=args.num_tokens,
            hidden=args.hidden,
            num_experts=args.num_experts,
            num_tokens=args.num_tokens,
            num_topk=args.num_topk,
        )
        self.src_info = (ctypes.c_int32 * num_words)()
        self.layout_range = (ctypes.c_int64 * (num_local_experts * args.num_ranks))()
        self.ys = (ctypes.c_uint16 * (num_rows * args.hidden))()
        self.out = (ctypes.c_uint16 * (args.num_tokens * args.hidden))()
        self.counters = {}
        for operation in ("dispatch", "combine"):
            capacity = 256
            memory = (
                (ctypes.c_int64 * (len(native.COUNTER_FIELDS) * args.num_ranks))(),
                (ctypes.c_int64 * len(native.OWN_FIELDS))(),
                (ctypes.c_int64 * (capacity * (args.num_ranks + 1) * native.NUM_RING_FIELDS))(),
            )
            self.counters[operation] = (memory, capacity)

    def pointers(self, operation: str) -> tuple[int, int, int, int]:
        """The counters of one kind of operation, or none."""
        if not self.args.counters:
            return (0, 0, 0, 0)
        (totals, own, ring), capacity = self.counters[operation]
        return (*(ctypes.addressof(memory) for memory in (totals, own, ring)), capacity)

    def dispatch(self, phases: int) -> None:
        """One phase of an FP8 dispatch."""
        args = self.args
        self.runtime.low_latency_dispatch(
            x=ctypes.addressof(self.x),
            num_tokens=args.num_tokens,
            hidden=args.hidden,
            topk_idx=ctypes.addressof(self.topk_idx),
            num_topk=args.num_topk,
            num_max_dispatch_tokens_per_rank=args.num_tokens,
            num_experts=args.num_experts,
            use_fp8=True,
            round_scale=False,
            use_ue8m0=False,
            recv_x=ctypes.addressof(self.recv_x),
            recv_scales=ctypes.addressof(self.recv_scales),
            recv_count=ctypes.addressof(self.recv_count),
            src_info=ctypes.addressof(self.src_info),
            layout_range=ctypes.addressof(self.layout_range),
            cumulative_local_expert_recv_stats=0,
            wait_stats=0,
            counters=self.pointers("dispatch"),
            phases=phases,
            stream=0,
        )

    def combine(self, phases: int) -> None:
        """One phase of a combine; before the first, the look at the handle that `Buffer` takes."""
        args = self.args
        common = {
            "topk_idx": ctypes.addressof(self.topk_idx),
            "src_info": ctypes.addressof(self.src_info),
            "layout_range": ctypes.addressof(self.layout_range),
            "num_tokens": args.num_tokens,
            "hidden": args.hidden,
            "num_topk": args.num_topk,
            "num_max_dispatch_tokens_per_rank": args.num_tokens,
            "num_experts": args.num_experts,
        }
        if phases & self.phase_send and self.runtime.find_handle_fault(**common) is not None:
            raise SystemExit("the handle is refused")
        self.runtime.low_latency_combine(
            **common,
            x=ctypes.addressof(self.ys),
            topk_weights=ctypes.addressof(self.weights),
            out=ctypes.addressof(self.out),
            use_logfmt=False,
            zero_copy=False,
            wait_stats=0,
            counters=self.pointers("combine"),
            phases=phases,
            stream=0,
        )


def run_rounds(args: argparse.Namespace) -> None:
    """The measured program: all ranks in one thread, one phase after the other."""
    native = load_native()
    ranks = [Rank(native, rank, args) for rank in range(args.num_ranks)]
    handles = [rank.runtime.local_handle() for rank in ranks]
    for rank in ranks:
        rank.runtime.connect(handles)
    for rank in ranks:
        rank.runtime.release_handle()
    for _ in range(args.rounds):
        for operation in (Rank.dispatch, Rank.combine):
            for phase in (native.PHASE_SEND, native.PHASE_RECEIVE):
                for rank in ranks:
                    operation(rank, phase)
    for rank in ranks:
        assert rank.runtime.take_failure() is None
        if args.counters:
            (totals, _, _), _ = rank.counters["dispatch"]
            assert totals[0] == args.rounds, "nothing was counted"
        rank.runtime.close()


def instructions(args: argparse.Namespace, rounds: int, counters: bool) -> int:
    """Executed by one run, as valgrind counts them."""
    command = [
        "valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null",
        sys.executable, __file__, "--run", "--rounds", str(rounds),
        *(["--counters"] if counters else []),
        *(word for name in ("num_ranks", "num_tokens", "hidden", "num_topk", "num_experts")
          for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))),
    ]  # fmt: skip
    # A fixed hash seed, because Python's own instructions depend on it.
    env = {**os.environ, "PYTHONHASHSEED": "0", "DEEP_EP_CPU_CLOCK": "wall"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode or found is None:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return int(found[1].replace(",", ""))


def main() -> int:
    """Measures, prints, and fails where the counters cost more than the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--run", action="store_true", help="be the measured program")
    parser.add_argument("--rounds", type=int, default=LONG_RUN)
    parser.add_argument("--counters", action="store_true", help="with --run: keep counters")
    args = parser.parse_args()
    if args.run:
        run_rounds(args)
        return 0
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not installed; on Debian or Ubuntu: apt-get install valgrind")
    per_round = {}
    for counters in (False, True):
        short, long = (instructions(args, rounds, counters) for rounds in (SHORT_RUN, LONG_RUN))
        per_round[counters] = (long - short) / (LONG_RUN - SHORT_RUN)
        print(
            f"counters {'on ' if counters else 'off'}  {per_round[counters]:15,.0f} instructions a round"
        )
    ratio = per_round[True] / per_round[False]
    print(
        f"ratio         {ratio:15.4f}  ({args.num_ranks} ranks, {args.num_tokens} tokens x {args.hidden} x "
        f"top-{args.num_topk} of {args.num_experts} experts; a round is a dispatch and a combine of all ranks)"
    )
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
