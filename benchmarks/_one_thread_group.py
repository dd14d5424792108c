"""All ranks of a group in one thread, straight on the native module: first every rank sends, then every
rank receives, so nobody ever waits, and what is counted repeats.

Ranks need no torch, which would be long under valgrind.
"""

from __future__ import annotations

import array
import ctypes
import importlib.util
import mmap
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# That have experts of a token, as DeepSeek-V3 limits its routes.
MOST_NODES = 4
# Operations whose stamps are kept.
RING = 256


@dataclass(frozen=True)
class GroupShape:
    """What is exchanged."""

    num_ranks: int
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    num_recorded_calls: int = 0


def load_native(folder: Path = ROOT / "deep_ep") -> Any:
    """deep_ep._cpu without its package, which would import torch: long under valgrind."""
    if (loaded := sys.modules.get("deep_ep._cpu")) is not None:
        return loaded  # by a test; a module can be loaded once
    (path,) = folder.glob("_cpu.*.so")
    spec = importlib.util.spec_from_file_location("_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def zeros(kind: type[Any], count: int) -> Any:
    """An array whose pages exist once they are written: of the rows that a rank has room for, a large
    group uses few, and those that are only read are one page of zeros.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return (kind * count).from_buffer(mmap.mmap(-1, ctypes.sizeof(kind) * count, flags=private))


class Counters:
    """Memory for the counters of one kind of operation; none where they are not kept."""

    def __init__(self, native: Any, num_ranks: int, are_kept: bool) -> None:
        self.are_kept = are_kept
        self.totals = zeros(ctypes.c_int64, len(native.COUNTER_FIELDS) * num_ranks)
        self.own = zeros(ctypes.c_int64, len(native.OWN_FIELDS))
        self.ring = zeros(ctypes.c_int64, RING * (num_ranks + 1) * native.NUM_RING_FIELDS)

    def pointers(self) -> tuple[int, int, int, int]:
        """As calls take them."""
        if not self.are_kept:
            return (0, 0, 0, 0)
        totals, own, ring = map(ctypes.addressof, (self.totals, self.own, self.ring))
        return totals, own, ring, RING


class Rank:
    """One rank's runtime and the memory its calls work on. `experts` are the rank's routes, `num_topk`
    a token; `counters` says whether it keeps counters.
    """

    def __init__(
        self, native: Any, rank: int, args: GroupShape, experts: Sequence[int], counters: bool
    ) -> None:
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
            num_recorded_calls=args.num_recorded_calls,
            clock="wall",  # in rank time a signal may be there and not to be seen yet
        )
        group = array.array("H", (0x3F80 + (i * 37 + rank) % 128 for i in range(128)))
        values = args.num_tokens * args.hidden
        self.x = (ctypes.c_uint16 * values).from_buffer(group * (values // 128))  # between 1 and 2
        self.topk_idx = (ctypes.c_int64 * len(experts))(*experts)
        self.weights = (ctypes.c_float * len(self.topk_idx))(*[0.125] * len(self.topk_idx))
        self.recv_x = zeros(ctypes.c_uint8, num_rows * args.hidden)
        self.recv_scales = zeros(ctypes.c_float, num_rows * num_scales)
        self.recv_count = zeros(ctypes.c_int32, num_local_experts)
        num_words = self.runtime.handle_words(
            num_max_dispatch_tokens_per_rank=args.num_tokens,
            hidden=args.hidden,
            num_experts=args.num_experts,
            num_tokens=args.num_tokens,
            num_topk=args.num_topk,
        )
        self.src_info = zeros(ctypes.c_int32, num_words)
        self.layout_range = zeros(ctypes.c_int64, num_local_experts * args.num_ranks)
        # What both operations take.
        self.common = {
            "topk_idx": ctypes.addressof(self.topk_idx),
            "src_info": ctypes.addressof(self.src_info),
            "layout_range": ctypes.addressof(self.layout_range),
            "num_tokens": args.num_tokens,
            "hidden": args.hidden,
            "num_topk": args.num_topk,
            "num_max_dispatch_tokens_per_rank": args.num_tokens,
            "num_experts": args.num_experts,
        }
        self.ys = zeros(ctypes.c_uint16, num_rows * args.hidden)
        self.out = zeros(ctypes.c_uint16, args.num_tokens * args.hidden)
        self.counters = {
            kind: Counters(native, args.num_ranks, counters) for kind in ("dispatch", "combine")
        }

    def dispatch(self, phases: int) -> None:
        """One phase of an FP8 dispatch."""
        self.runtime.low_latency_dispatch(
            **self.common,
            x=ctypes.addressof(self.x),
            use_fp8=True,
            round_scale=False,
            use_ue8m0=False,
            recv_x=ctypes.addressof(self.recv_x),
            recv_scales=ctypes.addressof(self.recv_scales),
            recv_count=ctypes.addressof(self.recv_count),
            cumulative_local_expert_recv_stats=0,
            wait_stats=0,
            counters=self.counters["dispatch"].pointers(),
            phases=phases,
            stream=0,
        )

    def combine(self, phases: int) -> None:
        """One phase of a combine; before the first, the look at the handle that `Buffer` takes."""
        is_first = phases & self.phase_send
        if is_first and self.runtime.find_handle_fault(**self.common) is not None:
            raise SystemExit("the handle is refused")
        self.runtime.low_latency_combine(
            **self.common,
            x=ctypes.addressof(self.ys),
            topk_weights=ctypes.addressof(self.weights),
            out=ctypes.addressof(self.out),
            use_logfmt=False,
            zero_copy=False,
            wait_stats=0,
            counters=self.counters["combine"].pointers(),
            phases=phases,
            stream=0,
        )


class Group:
    """Ranks that know each other. `experts[rank]` are the routes of a rank."""

    def __init__(
        self, args: GroupShape, experts: Sequence[Sequence[int]], counters: bool = False
    ) -> None:
        native = load_native()
        self.phases = (native.PHASE_SEND, native.PHASE_RECEIVE)
        self.ranks = [
            Rank(native, rank, args, routes, counters) for rank, routes in enumerate(experts)
        ]
        handles = [rank.runtime.local_handle() for rank in self.ranks]
        for rank in self.ranks:
            rank.runtime.connect(handles)
        for rank in self.ranks:
            rank.runtime.release_handle()

    def dispatch(self) -> None:
        for phase in self.phases:
            for rank in self.ranks:
                rank.dispatch(phase)

    def combine(self) -> None:
        """One combine of all ranks, of the dispatch before."""
        for phase in self.phases:
            for rank in self.ranks:
                rank.combine(phase)

    def close(self) -> None:
        """Ends the group; raises if an operation has failed."""
        failures = [rank.runtime.take_failure() for rank in self.ranks]
        assert not any(failures), failures
        for rank in self.ranks:
            rank.runtime.close()


def random_routes(args: GroupShape, num_nodes: int = 1) -> list[list[int]]:
    """Different experts for each token, all equally likely but on 4 nodes at most; always the same."""
    generator = random.Random(1)
    experts = range(args.num_experts)
    per_node = args.num_experts // num_nodes

    def of_token() -> list[int]:
        if num_nodes <= MOST_NODES:
            return generator.sample(experts, args.num_topk)
        nodes = generator.sample(range(num_nodes), MOST_NODES)
        here = [e for node in nodes for e in experts[node * per_node : (node + 1) * per_node]]
        return generator.sample(here, args.num_topk)

    return [
        [expert for _ in range(args.num_tokens) for expert in of_token()]
        for _ in range(args.num_ranks)
    ]
