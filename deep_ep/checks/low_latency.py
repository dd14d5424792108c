"""Checks of the low-latency calls: sizes, routing, handles."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from deep_ep.base.rules import COMBINE, DISPATCH, fail
from deep_ep.checks import arguments as checks
from deep_ep.checks.arguments import Limits, Tensors
from deep_ep.errors import EPTypeError, EPUsageError
from deep_ep.native.backend import Binding
from deep_ep.types.handles import LowLatencyHandle

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime


_log = logging.getLogger("deep_ep")

# TMA descriptors take columns of scales that are a multiple of 16 bytes apart.
_TMA_ROWS = 4
# Channels whose scales share an int32.
_PACKED_CHANNELS = 512


class LowLatencySizes(NamedTuple):
    """What all ranks must agree on in a low-latency call."""

    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


@dataclass(frozen=True)
class LowLatencyShape:
    """Sizes of one low-latency call, checked; what follows from them is found once."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_max_dispatch_tokens_per_rank: int
    num_experts: int
    num_ranks: int

    @functools.cached_property
    def keywords(self) -> dict[str, int]:
        """What all ranks must agree on and the shape of this rank's topk_idx, as the native runtime
        takes them.
        """
        return {
            "num_max_dispatch_tokens_per_rank": self.num_max_dispatch_tokens_per_rank,
            "hidden": self.hidden,
            "num_experts": self.num_experts,
            "num_tokens": self.num_tokens,
            "num_topk": self.num_topk,
        }

    @functools.cached_property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return self.num_experts // self.num_ranks

    @functools.cached_property
    def num_recv_rows(self) -> int:
        """Rows per local expert."""
        return self.num_ranks * self.num_max_dispatch_tokens_per_rank


# A program calls with few sizes, again and again; only its number of tokens varies.
_shape = functools.lru_cache(maxsize=1024)(LowLatencyShape)


def dispatch(
    limits: Limits,
    x: Any,
    topk_idx: Any,
    num_max_dispatch_tokens_per_rank: Any,
    num_experts: Any,
    stats: Any,
    wait_stats: Any,
    recv_counters: Any,
    *,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    async_finish: bool,
    return_recv_hook: bool,
) -> LowLatencyShape:
    """Checks a call of `Buffer.low_latency_dispatch` and returns its sizes."""
    tensors = Tensors(DISPATCH, limits.device, num_ranks=limits.num_ranks)
    tensors.check("x", x)
    tensors.check("topk_idx", topk_idx)
    sizes = sizes_of(
        DISPATCH,
        num_max_dispatch_tokens_per_rank,
        x.shape[1],
        num_experts,
        limits.num_ranks,
        limits.binding,
    )
    maximum, hidden, experts = sizes
    shape = _shape(x.shape[0], hidden, topk_idx.shape[1], maximum, experts, limits.num_ranks)
    tensors.dimensions["num_local_experts"] = shape.num_local_experts
    if stats is not None:
        tensors.check("cumulative_local_expert_recv_stats", stats)
    if wait_stats is not None:
        tensors.check("dispatch_wait_recv_cost_stats", wait_stats)
    _topk(DISPATCH, shape, topk_idx, limits.binding.MAX_TOPK)
    if use_ue8m0 and not round_scale:
        fail(DISPATCH, "use_ue8m0 is True and round_scale False", "round_scale")
    if use_ue8m0 and not use_fp8:
        fail(DISPATCH, "use_ue8m0 is True and use_fp8 False", "ue8m0_without_fp8")
    _finish(DISPATCH, async_finish, return_recv_hook)
    checks.recv_counters(DISPATCH, recv_counters, limits)
    buffer_size(DISPATCH, sizes, limits)
    _expert_indices(DISPATCH, shape, topk_idx, rows_per_expert=True)
    if use_fp8:
        _say_what_consumers_refuse(shape.num_recv_rows, hidden, use_ue8m0)
    return shape


@functools.lru_cache(maxsize=1024)
def _say_what_consumers_refuse(num_recv_rows: int, hidden: int, is_packed: bool) -> None:
    """Once for each size: scales come in a layout for TMA, whose descriptors do not allow all sizes that we do."""
    if num_recv_rows % _TMA_ROWS:
        _log.warning(
            "deep_ep: %s: scales have %d rows, num_ranks * num_max_dispatch_tokens_per_rank; TMA descriptors of "
            "grouped GEMMs need a multiple of %d. Raise num_max_dispatch_tokens_per_rank to a multiple of %d, or "
            "copy the scales.",
            *(DISPATCH, num_recv_rows, _TMA_ROWS, _TMA_ROWS),
        )
    if is_packed and hidden % _PACKED_CHANNELS:
        _log.warning(
            "deep_ep: %s: hidden is %d; with use_ue8m0 grouped GEMMs need a multiple of %d, or the last int32 of a "
            "row's scales is not full. Pad hidden, or pass use_ue8m0=False.",
            *(DISPATCH, hidden, _PACKED_CHANNELS),
        )


def combine(
    limits: Limits,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Any,
    out: Any,
    wait_stats: Any,
    recv_counters: Any,
    *,
    use_logfmt: bool,
    zero_copy: bool,
    async_finish: bool,
    return_recv_hook: bool,
) -> LowLatencyShape:
    """Checks a call of `Buffer.low_latency_combine` and returns its sizes."""
    given = unpack_handle(COMBINE, handle)
    sizes = sizes_of(
        COMBINE,
        given.num_max_dispatch_tokens_per_rank,
        given.hidden,
        given.num_experts,
        limits.num_ranks,
        limits.binding,
    )
    maximum, hidden, experts = sizes
    tensors = Tensors(
        COMBINE,
        limits.device,
        num_ranks=limits.num_ranks,
        num_local_experts=experts // limits.num_ranks,
        num_recv_rows=limits.num_ranks * maximum,
        hidden=hidden,
    )
    tensors.check("handle[0]", given.src_info)
    tensors.check("handle[1]", given.layout_range)
    _src_info_storage(given.src_info, experts)
    # With zero_copy the rows are already in the buffer; x gives the shape only.
    tensors.check("x", x, contiguous=not zero_copy)
    tensors.check("topk_idx", topk_idx)
    tensors.check("topk_weights", topk_weights)
    if out is not None:
        tensors.check("out", out)
    if wait_stats is not None:
        tensors.check("combine_wait_recv_cost_stats", wait_stats)
    num_tokens, num_topk = topk_idx.shape
    shape = _shape(num_tokens, hidden, num_topk, maximum, experts, limits.num_ranks)
    _topk(COMBINE, shape, topk_idx, limits.binding.MAX_TOPK)
    if use_logfmt and zero_copy:
        fail(COMBINE, "use_logfmt and zero_copy are both True", "logfmt_and_zero_copy")
    _finish(COMBINE, async_finish, return_recv_hook)
    checks.recv_counters(COMBINE, recv_counters, limits)
    buffer_size(COMBINE, sizes, limits)
    _expert_indices(COMBINE, shape, topk_idx, rows_per_expert=False)
    return shape


# Kernels and the sizes of buffers count channels in 32 bits.
_MAX_HIDDEN = (1 << 31) - 1


def sizes_of(
    call: str,
    num_max_dispatch_tokens_per_rank: Any,
    hidden: Any,
    num_experts: Any,
    num_ranks: int,
    binding: Binding,
) -> LowLatencySizes:
    """The three sizes all ranks must agree on, as checked ints."""
    maximum = checks.positive_int(
        call, "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank
    )
    num_channels = checks.positive_int(call, "hidden", hidden)
    experts = checks.positive_int(call, "num_experts", num_experts)
    checks.kernel_limit(call, "hidden", num_channels, _MAX_HIDDEN)
    group = binding.CHANNELS_PER_SCALE
    if num_channels % group:
        padded = -(-num_channels // group) * group
        fail(
            call,
            f"hidden is {num_channels}",
            "hidden",
            multiple=group,
            padded=padded,
        )
    if experts % num_ranks:
        padded = -(-experts // num_ranks) * num_ranks
        fail(call, f"num_experts is {experts}", "num_experts", num_ranks=num_ranks, padded=padded)
    checks.kernel_limit(call, "num_max_dispatch_tokens_per_rank", maximum, binding.MAX_TOKENS)
    checks.kernel_limit(call, "num_experts", experts, binding.MAX_EXPERTS)
    return LowLatencySizes(maximum, num_channels, experts)


@functools.lru_cache(maxsize=64)
def num_bytes(binding: Binding, num_ranks: int, sizes: LowLatencySizes) -> int:
    """Bytes of RDMA buffer a call of these sizes needs."""
    return binding.low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=sizes.num_max_dispatch_tokens_per_rank,
        num_ranks=num_ranks,
        hidden=sizes.hidden,
        num_experts=sizes.num_experts,
    )


def sizes_that_fit(
    call: str, num_max_dispatch_tokens_per_rank: Any, hidden: Any, num_experts: Any, limits: Limits
) -> LowLatencySizes:
    """The same, for a buffer that must hold a call of these sizes."""
    sizes = sizes_of(
        call,
        num_max_dispatch_tokens_per_rank,
        hidden,
        num_experts,
        limits.num_ranks,
        limits.binding,
    )
    buffer_size(call, sizes, limits)
    return sizes


def buffer_size(call: str, sizes: LowLatencySizes, limits: Limits) -> None:
    """The RDMA buffer must hold a call of these sizes."""
    needed = num_bytes(limits.binding, limits.num_ranks, sizes)
    if limits.num_rdma_bytes < needed:
        fail(
            call,
            f"the buffer has num_rdma_bytes = {limits.num_rdma_bytes}",
            "buffer_size",
            needed=needed,
            arguments=f"{sizes.num_max_dispatch_tokens_per_rank}, {sizes.hidden}, "
            f"{limits.num_ranks}, {sizes.num_experts}",
        )


def _topk(call: str, shape: LowLatencyShape, topk_idx: torch.Tensor, most: int) -> None:
    if not 0 < shape.num_topk <= most:
        fail(call, f"topk_idx has shape {list(topk_idx.shape)}", "topk", maximum=most)
    maximum = shape.num_max_dispatch_tokens_per_rank
    if shape.num_tokens > maximum:
        fail(call, f"there are {shape.num_tokens} tokens", "num_tokens", maximum=maximum)


def _finish(call: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        fail(call, "async_finish and return_recv_hook are both True", "async_and_hook")


def _is_readable(tensor: torch.Tensor) -> bool:
    # On the GPU a look at the values would stall the stream; there the kernel reports them.
    return tensor.is_cpu


def _expert_indices(
    call: str, shape: LowLatencyShape, topk_idx: torch.Tensor, *, rows_per_expert: bool
) -> None:
    if not _is_readable(topk_idx) or topk_idx.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(topk_idx))
    if low < -1 or high >= shape.num_experts:
        wrong = high if high >= shape.num_experts else low
        token, column = (int(index) for index in (topk_idx == wrong).nonzero()[0])
        fail(
            call,
            f"topk_idx[{token}, {column}] is {wrong}",
            "expert_index",
            num_experts=shape.num_experts,
        )
    maximum = shape.num_max_dispatch_tokens_per_rank
    if rows_per_expert and topk_idx.numel() > maximum:
        rows = torch.bincount(topk_idx.flatten() + 1, minlength=2)[1:]
        most = int(rows.max())
        if most > maximum:
            got = f"topk_idx names expert {int(rows.argmax())} {most} times"
            fail(call, got, "expert_overflow", maximum=maximum)


def unpack_handle(call: str, handle: Any) -> LowLatencyHandle:
    """A low-latency handle from any tuple or list of its five values."""
    if isinstance(handle, LowLatencyHandle):
        return handle
    if not isinstance(handle, (tuple, list)):
        fail(call, f"handle is a {type(handle).__name__}", "handle", EPTypeError)
    if len(handle) != LowLatencyHandle.num_values():
        fail(call, f"handle has {len(handle)} elements", "handle")
    sizes = (checks.positive_int(call, f"handle[{i}]", handle[i]) for i in range(2, len(handle)))
    return LowLatencyHandle(handle[0], handle[1], *sizes)


def _src_info_storage(src_info: torch.Tensor, num_experts: int) -> None:
    # What checks the handle lies behind src_info in the same storage; a copy has lost it.
    num_words = src_info.storage_offset() + 2 * src_info.numel() + 2 * num_experts
    if src_info.untyped_storage().nbytes() <= num_words * src_info.element_size():
        fail(COMBINE, "handle[0] is a copy", "handle_copy")


def handle_values(
    native: Runtime,
    shape: LowLatencyShape,
    topk_idx: torch.Tensor,
    src_info: torch.Tensor,
    layout_range: torch.Tensor,
) -> None:
    """A handle whose values cannot be right is refused before anything is sent."""
    if not _is_readable(topk_idx):
        return
    fault = native.find_handle_fault(
        topk_idx=topk_idx.data_ptr(),
        src_info=src_info.data_ptr(),
        layout_range=layout_range.data_ptr(),
        **shape.keywords,
    )
    if fault is not None:
        fail_for(fault, topk_idx, src_info, layout_range)


def fail_for(
    fault: tuple[str, int, int, int],
    topk_idx: torch.Tensor,
    src_info: torch.Tensor,
    layout_range: torch.Tensor,
) -> NoReturn:
    """Raises for what the native runtime found wrong in the handle of a combine."""
    reason, *place, expected = fault
    where = tuple(place)
    if reason == "not received":
        fail(COMBINE, "handle is empty", "handle_not_received", EPUsageError)
    if reason == "topk shape":
        got = f"topk_idx has shape {list(topk_idx.shape)}"
        fail(COMBINE, got, "topk_of_dispatch", expected=f"shape {place}")
    if reason == "topk entry":
        got = f"topk_idx{place} is {int(topk_idx[where])}"
        fail(COMBINE, got, "topk_of_dispatch", expected=expected)
    if reason == "range":
        begin, count = divmod(int(layout_range[where]), 1 << 32)
        fail(COMBINE, f"handle[1]{place} is row {begin}, {count} rows", "handle_values")
    fail(COMBINE, f"handle[0]{place} is {int(src_info[where])}", "handle_values")
