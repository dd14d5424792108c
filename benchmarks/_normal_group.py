"""The ranks of a group for normal operations, in the midst of which a rank waits for others. They are simulated, so
what is counted repeats.

Ranks need no torch, which would be long under valgrind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from _one_thread_group import Counters, GroupShape, load_native, zeros
from _simulated_ranks import SimulatedRanks

if TYPE_CHECKING:
    from deep_ep import Config


@dataclass(frozen=True)
class Queues:
    """What a `Config` says, as `normal_bytes` and the operations take it; the values of 8 ranks and 20 SMs."""

    num_channels: int = 10
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 128

    @classmethod
    def of(cls, config: Config) -> Queues:
        """Those of a `Config`."""
        values = asdict(config)
        return cls(num_channels=values.pop("num_sms") // 2, **values)


KINDS = ("notify", "dispatch", "relay_dispatch", "combine", "relay_combine")


class Rank:
    """One rank's runtime and the memory its calls work on; `experts` are its routes. Its thread makes it."""

    def __init__(
        self,
        native: Any,
        rank: int,
        shape: GroupShape,
        ranks_per_node: int,
        experts: Sequence[int],
        keeps_counters: bool,
        queues: Queues = Queues(),
        combine_queues: Queues = Queues(),
        bulk_copies: bool = False,
        sums_by_pick: bool = False,
    ) -> None:
        self.shape = shape
        self.queues, self.combine_queues = queues, combine_queues
        num_channels = queues.num_channels
        self.is_one_node = ranks_per_node == shape.num_ranks
        num_ranks, num_nodes = shape.num_ranks, shape.num_ranks // ranks_per_node
        num_tokens, num_rows = shape.num_tokens, shape.num_ranks * shape.num_tokens
        self.num_scales = num_scales = shape.hidden // native.CHANNELS_PER_SCALE
        self.size = {
            "num_tokens": num_tokens,
            "num_topk": shape.num_topk,
        }
        num_nvl_bytes, num_rdma_bytes = map(
            max,
            *(
                native.normal_bytes(
                    num_ranks=num_ranks,
                    ranks_per_node=ranks_per_node,
                    row_bytes=2 * shape.hidden,
                    num_topk=shape.num_topk,
                    num_scales=num_scales,
                    num_channels=num_channels,
                    num_max_nvl_chunked_recv_tokens=of.num_max_nvl_chunked_recv_tokens,
                    num_max_rdma_chunked_recv_tokens=of.num_max_rdma_chunked_recv_tokens,
                )
                for of in (queues, combine_queues)
            ),
        )
        self.runtime = native.Runtime(
            rank=rank,
            num_ranks=num_ranks,
            num_nvl_bytes=num_nvl_bytes,
            num_rdma_bytes=num_rdma_bytes,
            low_latency_mode=False,
            num_qps_per_rank=2 * num_channels,
            timeout_ns=10**12,
            ranks_per_node=ranks_per_node,
            device_index=0,
            num_recorded_calls=shape.num_recorded_calls,
            bulk_copies=bulk_copies,
        )
        pack_bytes = native.normal_pack_bytes(num_topk=shape.num_topk, num_scales=num_scales)
        self.topk_idx = (ctypes.c_int64 * len(experts))(*experts)
        # What the calls read and write, by the names of their arguments; some calls take part of it.
        self.sent = {
            "x": zeros(ctypes.c_uint8, num_tokens * shape.hidden),
            "scales": zeros(ctypes.c_float, num_tokens * num_scales),
            "topk_idx": self.topk_idx,
            "topk_weights": zeros(ctypes.c_float, len(experts)),
        }
        self.received = {
            "recv_x": zeros(ctypes.c_uint8, num_rows * shape.hidden),
            "recv_scales": zeros(ctypes.c_float, num_rows * num_scales),
            "recv_topk_idx": zeros(ctypes.c_int64, num_rows * shape.num_topk),
            "recv_topk_weights": zeros(ctypes.c_float, num_rows * shape.num_topk),
            "recv_src_idx": zeros(ctypes.c_int32, num_rows),
            "recv_src_meta": zeros(ctypes.c_int32, num_rows * 2),
        }
        self.layout = {
            "num_tokens_per_rank": zeros(ctypes.c_int32, num_ranks),
            "num_tokens_per_rdma_rank": zeros(ctypes.c_int32, num_nodes),
            "num_tokens_per_expert": zeros(ctypes.c_int32, shape.num_experts),
            "is_token_in_rank": zeros(ctypes.c_uint8, num_tokens * num_ranks),
        }
        self.handle = {
            "is_token_in_rank": self.layout["is_token_in_rank"],
            "source_prefix": zeros(ctypes.c_int32, num_ranks),
            "channel_prefix": zeros(ctypes.c_int32, num_ranks * num_channels),
            "recv_channel_prefix": zeros(ctypes.c_int32, num_ranks * num_channels),
            "node_channel_prefix": zeros(ctypes.c_int32, num_nodes * num_channels),
            "recv_node_channel_prefix": zeros(ctypes.c_int32, num_nodes * num_channels),
            "recv_node_prefix": zeros(ctypes.c_int32, num_nodes),
            "node_head": zeros(ctypes.c_int32, num_tokens * num_nodes),
            "nvl_head": zeros(ctypes.c_int32, (num_tokens + num_rows) * ranks_per_node),
            "dispatch_op": zeros(ctypes.c_uint64, 1),
        }
        self.packs = zeros(ctypes.c_uint8, num_rows * pack_bytes)
        self.ys = zeros(ctypes.c_uint16, num_rows * shape.hidden)
        self.combined_x = zeros(ctypes.c_uint16, num_tokens * shape.hidden)
        self.combined_weights = zeros(ctypes.c_float, len(experts))
        self.num_recv_rows = 0
        self.relayed_experts = zeros(ctypes.c_int32, num_rows * shape.num_topk)
        self.relay_topk_idx = ctypes.addressof(self.relayed_experts) if sums_by_pick else 0
        self.order = {
            "order_topk_idx": ctypes.addressof(self.topk_idx) if sums_by_pick else 0,
            "order_relay_topk_idx": self.relay_topk_idx,
            "order_topk": shape.num_topk if sums_by_pick else 0,
            "order_experts_per_rank": shape.num_experts // num_ranks if sums_by_pick else 0,
        }
        relays = keeps_counters and not self.is_one_node
        self.counters = {
            kind: Counters(
                native, num_ranks, relays if kind.startswith("relay") else keeps_counters
            )
            for kind in KINDS
        }
        self.runtime.dispatch_layout(
            topk_idx=ctypes.addressof(self.topk_idx),
            num_tokens=num_tokens,
            num_topk=shape.num_topk,
            num_experts=shape.num_experts,
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            **_addresses(self.layout),
            stream=0,
        )

    def dispatch(self) -> None:
        """A fresh dispatch of FP8 rows, with scales and top-k entries."""
        for name in ("node_head", "nvl_head"):
            ctypes.memset(self.handle[name], 0xFF, ctypes.sizeof(self.handle[name]))
        common = {
            **self.size,
            **asdict(self.queues),
            "num_experts": self.shape.num_experts,
            "num_scales": self.num_scales,
            "row_bytes": self.shape.hidden,
            "source_stride": 1,
            **_addresses(self.handle),
            "stream": 0,
        }
        self.runtime.normal_notify(
            **common,
            num_tokens_per_rank=ctypes.addressof(self.layout["num_tokens_per_rank"]),
            num_tokens_per_expert=ctypes.addressof(self.layout["num_tokens_per_expert"]),
            num_max_tokens_per_rank=-1,
            wait_stats=0,
            notify_counters=self.counters["notify"].pointers(),
        )
        self.num_recv_rows, self.num_relay_rows, _ = self.runtime.normal_counts()
        received = _addresses(self.received)
        received["recv_src_meta" if self.is_one_node else "recv_src_idx"] = 0
        self.runtime.normal_dispatch(
            **common,
            **_addresses(self.sent),
            **received,
            relay_topk_idx=self.relay_topk_idx,
            scale_row_stride=self.num_scales,
            scale_column_stride=1,
            packs=ctypes.addressof(self.packs),
            num_recv_rows=self.num_recv_rows,
            num_relay_rows=self.num_relay_rows,
            fresh=True,
            abandon=False,
            wait_stats=0,
            counters=self.counters["dispatch"].pointers(),
            relay_counters=self.counters["relay_dispatch"].pointers(),
        )

    def combine(self) -> None:
        """Of bf16 rows and weights."""
        self.runtime.normal_combine(
            **self.size,
            **asdict(self.combine_queues),
            num_experts=0,
            num_scales=0,
            row_bytes=2 * self.shape.hidden,
            source_stride=1,
            **_addresses(self.handle),
            x=ctypes.addressof(self.ys),
            topk_weights=ctypes.addressof(self.received["recv_topk_weights"]),
            recv_tokens=0,  # rows are not verified
            recv_token_stride=0,
            packs=ctypes.addressof(self.packs),
            bias_0=0,
            bias_1=0,
            **self.order,
            combined_x=ctypes.addressof(self.combined_x),
            combined_topk_weights=ctypes.addressof(self.combined_weights),
            num_rows=self.num_recv_rows,
            num_relay_rows=self.num_relay_rows,
            wait_stats=0,
            counters=self.counters["combine"].pointers(),
            relay_counters=self.counters["relay_combine"].pointers(),
            stream=0,
        )


def _addresses(arrays: dict[str, Any]) -> dict[str, int]:
    return {name: ctypes.addressof(array) for name, array in arrays.items()}


def run_rounds(
    shape: GroupShape,
    ranks_per_node: int,
    experts: Sequence[Sequence[int]],
    rounds: int,
    keeps_counters: bool,
) -> None:
    """Rounds of a dispatch and a combine of all ranks. `experts[rank]` are the routes of a rank."""
    native = load_native()
    ranks = SimulatedRanks(native, shape.num_ranks, ranks_per_node, 16, 500, 2_000)
    handles: dict[int, bytes] = {}

    def run_rank(rank: int) -> None:
        this = Rank(native, rank, shape, ranks_per_node, experts[rank], keeps_counters)
        ranks.connect(rank, this.runtime, handles)
        for _ in range(rounds):
            this.dispatch()
            this.combine()
        failure = this.runtime.take_failure()
        assert failure is None, failure
        if keeps_counters:
            assert this.counters["dispatch"].totals[0] == rounds, "nothing was counted"
        ranks.meet("ended", rank)
        this.runtime.close()

    ranks.run(run_rank)
