"""The native module of the cpu backend. All arguments are keywords; pointers are ints, 0 = absent.

tools/stub.py writes the calls that csrc/kernels/protocol/calls.def and csrc/runtime/options.def list.
"""

from typing import Any

COUNTER_FIELDS: list[str]
OWN_FIELDS: list[str]
RING_SOURCE_FIELDS: list[str]
RING_OWN_FIELDS: list[str]
NUM_RING_FIELDS: int
OPERATIONS: list[str]
FAILURE_REASONS: list[str]
HANDLE_FAULTS: list[str]
MAX_EXPERTS: int
MAX_TOPK: int
MAX_CHANNELS: int
MAX_NORMAL_TOPK: int
MAX_NORMAL_SCALES: int
MAX_RANKS_PER_NODE: int
MAX_TOKENS: int
MAX_HOST_THREADS: int
PHASE_SEND: int
PHASE_RECEIVE: int
CHANNELS_PER_SCALE: int
LOGFMT_GROUP: int
BUFFER_ALIGNMENT: int
SPENT_FIELDS: list[str]

def device_count() -> int: ...
def low_latency_rdma_size_hint(
    *, num_max_dispatch_tokens_per_rank: int, num_ranks: int, hidden: int, num_experts: int
) -> int: ...
def normal_pack_bytes(*, num_topk: int, num_scales: int) -> int: ...
def normal_bytes(
    *,
    num_ranks: int,
    ranks_per_node: int,
    num_channels: int,
    row_bytes: int,
    num_topk: int,
    num_scales: int,
    num_max_nvl_chunked_recv_tokens: int,
    num_max_rdma_chunked_recv_tokens: int,
) -> tuple[int, int]: ...

class Block:
    """Memory on loan from a HostPool, through the buffer protocol."""

class HostPool:
    def take(self, num_bytes: int) -> Block: ...

class RankDied(BaseException):
    """A simulated rank has died where it stood."""

class Simulation:
    """Ranks of one process in virtual time, one at a time; csrc/device/host/simulation.h."""

    def __init__(
        self,
        *,
        num_ranks: int,
        ranks_per_node: int,
        seed: int,
        points_per_step: int,
        step_ns: int,
        shortest_delivery_ns: int,
        longest_delivery_ns: int,
        end_ns: int,
    ) -> None: ...
    def set_costs(self, costs: dict[str, float]) -> None: ...
    def launches(self, rank: int) -> list[tuple[str, float, float, list[float], int, int]]: ...
    def enter(self, rank: int) -> None: ...
    def leave(self) -> None: ...
    def now_ns(self) -> int: ...
    def has_ended(self) -> bool: ...
    def sleep(self, ns: int) -> None: ...
    def stop_after(self, points: int, ns: int) -> None: ...
    def has_stopped(self) -> bool: ...
    def die_after(self, points: int) -> None: ...

class Runtime:
    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        low_latency_mode: bool,
        num_qps_per_rank: int,
        timeout_ns: int,
        ranks_per_node: int,
        device_index: int,
        allow_nvlink: bool = ...,
        allow_mnnvl: bool = ...,
        clock: str = ...,
        clock_interval_ns: int = ...,
        bulk_copies: bool = ...,
        verify: bool = ...,
        enable_shrink: bool = ...,
        num_recorded_calls: int = ...,
    ) -> None: ...
    def local_handle(self) -> bytes: ...
    def connect(self, handles: list[bytes]) -> None: ...
    def release_handle(self) -> None: ...
    def close(self, keeps_memory: bool = False) -> None: ...
    def local_buffer(self, use_rdma: bool) -> tuple[int, int]: ...
    def operation(self) -> int: ...
    def entered_operation(self) -> int: ...
    def low_latency_dispatch(
        self,
        *,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_tokens: int,
        num_topk: int,
        topk_idx: int,
        src_info: int,
        layout_range: int,
        x: int,
        recv_x: int,
        recv_scales: int,
        recv_count: int,
        cumulative_local_expert_recv_stats: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        wait_stats: int,
        counters: tuple[int, int, int, int],
        phases: int = ...,
        stream: int,
    ) -> None: ...
    def low_latency_combine(
        self,
        *,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_tokens: int,
        num_topk: int,
        topk_idx: int,
        src_info: int,
        layout_range: int,
        x: int,
        topk_weights: int,
        out: int,
        use_logfmt: bool,
        zero_copy: bool,
        wait_stats: int,
        counters: tuple[int, int, int, int],
        phases: int = ...,
        stream: int,
    ) -> None: ...
    def handle_words(
        self,
        *,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_tokens: int,
        num_topk: int,
    ) -> int: ...
    def find_handle_fault(
        self,
        *,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_tokens: int,
        num_topk: int,
        topk_idx: int,
        src_info: int,
        layout_range: int,
    ) -> tuple[str, int, int, int] | None: ...
    def next_combine_buffer(
        self,
        *,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
    ) -> tuple[int, int]: ...
    def clean_low_latency_buffer(self, *, stream: int = 0) -> None: ...
    def barrier(self, *, stream: int = 0) -> None: ...
    def measure_clock_offsets(
        self, *, samples: int = 16, stream: int = 0
    ) -> list[tuple[int, int]]: ...
    def dispatch_layout(
        self,
        *,
        topk_idx: int,
        num_tokens: int,
        num_topk: int,
        num_experts: int,
        num_ranks: int,
        ranks_per_node: int,
        num_tokens_per_rank: int,
        num_tokens_per_rdma_rank: int,
        num_tokens_per_expert: int,
        is_token_in_rank: int,
        stream: int,
    ) -> None: ...
    def copy_rows(
        self,
        *,
        x: int,
        slots: int,
        num_rows: int,
        width: int,
        row_bytes: int,
        num_out: int,
        out: int,
        stream: int,
    ) -> None: ...
    def sum_rows(
        self,
        *,
        x: int,
        rows: int,
        num_rows: int,
        num_sums: int,
        width: int,
        row_bytes: int,
        bias_0: int,
        bias_1: int,
        out: int,
        stream: int,
    ) -> None: ...
    def normal_notify(
        self,
        *,
        num_tokens: int,
        num_experts: int,
        num_topk: int,
        num_scales: int,
        row_bytes: int,
        num_channels: int,
        num_max_nvl_chunked_send_tokens: int,
        num_max_nvl_chunked_recv_tokens: int,
        num_max_rdma_chunked_send_tokens: int,
        num_max_rdma_chunked_recv_tokens: int,
        is_token_in_rank: int,
        source_prefix: int,
        source_stride: int,
        channel_prefix: int,
        recv_channel_prefix: int,
        node_channel_prefix: int,
        recv_node_channel_prefix: int,
        recv_node_prefix: int,
        node_head: int,
        nvl_head: int,
        dispatch_op: int,
        num_tokens_per_rank: int,
        num_tokens_per_expert: int,
        num_max_tokens_per_rank: int,
        wait_stats: int,
        notify_counters: tuple[int, int, int, int],
        stream: int,
    ) -> None: ...
    def normal_counts(self) -> tuple[int, int, list[int]] | None: ...
    def normal_dispatch(
        self,
        *,
        num_tokens: int,
        num_experts: int,
        num_topk: int,
        num_scales: int,
        row_bytes: int,
        num_channels: int,
        num_max_nvl_chunked_send_tokens: int,
        num_max_nvl_chunked_recv_tokens: int,
        num_max_rdma_chunked_send_tokens: int,
        num_max_rdma_chunked_recv_tokens: int,
        is_token_in_rank: int,
        source_prefix: int,
        source_stride: int,
        channel_prefix: int,
        recv_channel_prefix: int,
        node_channel_prefix: int,
        recv_node_channel_prefix: int,
        recv_node_prefix: int,
        node_head: int,
        nvl_head: int,
        dispatch_op: int,
        x: int,
        scales: int,
        scale_row_stride: int,
        scale_column_stride: int,
        topk_idx: int,
        topk_weights: int,
        packs: int,
        recv_x: int,
        recv_scales: int,
        recv_topk_idx: int,
        recv_topk_weights: int,
        recv_src_idx: int,
        recv_src_meta: int,
        relay_topk_idx: int,
        num_recv_rows: int,
        num_relay_rows: int,
        fresh: bool,
        abandon: bool,
        wait_stats: int,
        counters: tuple[int, int, int, int],
        relay_counters: tuple[int, int, int, int],
        stream: int,
    ) -> None: ...
    def normal_combine(
        self,
        *,
        num_tokens: int,
        num_experts: int,
        num_topk: int,
        num_scales: int,
        row_bytes: int,
        num_channels: int,
        num_max_nvl_chunked_send_tokens: int,
        num_max_nvl_chunked_recv_tokens: int,
        num_max_rdma_chunked_send_tokens: int,
        num_max_rdma_chunked_recv_tokens: int,
        is_token_in_rank: int,
        source_prefix: int,
        source_stride: int,
        channel_prefix: int,
        recv_channel_prefix: int,
        node_channel_prefix: int,
        recv_node_channel_prefix: int,
        recv_node_prefix: int,
        node_head: int,
        nvl_head: int,
        dispatch_op: int,
        x: int,
        topk_weights: int,
        recv_tokens: int,
        recv_token_stride: int,
        packs: int,
        bias_0: int,
        bias_1: int,
        order_topk_idx: int,
        order_relay_topk_idx: int,
        order_topk: int,
        order_experts_per_rank: int,
        combined_x: int,
        combined_topk_weights: int,
        num_rows: int,
        num_relay_rows: int,
        wait_stats: int,
        counters: tuple[int, int, int, int],
        relay_counters: tuple[int, int, int, int],
        stream: int,
    ) -> None: ...
    def take_failure(self) -> dict[str, Any] | None: ...
    def mark_gone(self, rank: int, is_gone: bool = True) -> None: ...
    def give_up(self, op: int) -> None: ...
    def mark_out(self, rank: int, op: int) -> None: ...
    def update_mask(self, *, rank: int, masked: bool, stream: int = ...) -> None: ...
    def query_masks(self, *, status: int, stream: int = ...) -> None: ...
    def clean_masks(self, *, stream: int = ...) -> None: ...
    def part(self, *, stream: int = ...) -> None: ...
    def take_masked(self) -> list[tuple[int, str, int]]: ...
    def progress(self) -> dict[str, Any]: ...
    def num_calls(self) -> int: ...
    def recorded_calls(self, *, most: int) -> list[dict[str, Any]]: ...
    def waits(self) -> dict[str, Any] | None: ...
    def traffic(self) -> dict[str, Any]: ...
    def write_clock(self, *, where: int, stream: int) -> None: ...
    def delay(self, ns: int) -> None: ...
    def block_stream(self, ns: int) -> None: ...
    def set_path_fault(self, *, dst: int, delay_ns: int, bytes_per_s: float) -> None: ...
    def set_receive_fault(self, *, delay_ns: int) -> None: ...
    def set_clock_fault(self, *, offset_ns: int, drift_ppm: float) -> None: ...
    def set_schedule(self, *, policy: str, seed: int) -> None: ...
    def set_delivery(self, *, policy: str, seed: int) -> None: ...
    def set_launch_shape(self, *, blocks: int, warps: int) -> None: ...
    def now_ns(self) -> int: ...
