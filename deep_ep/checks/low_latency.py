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
    from deep_ep.checks.calls import BufferCall, LowLatencyCombine, LowLatencyDispatch

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


@dataclass(frozen=True, eq=False)
class LowLatencyShape:
    """Sizes of one low-latency call, checked; what follows from them is found once."""

    sizes: LowLatencySizes
    num_tokens: int
    num_topk: int
    num_ranks: int

    @functools.cached_property
    def keywords(self) -> dict[str, int]:
        """What all ranks must agree on and the shape of this rank's topk_idx, as the native runtime
        takes them.
        """
        tokens = {"num_tokens": self.num_tokens, "num_topk": self.num_topk}
        return {**self.sizes._asdict(), **tokens}

    @functools.cached_property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return self.sizes.num_experts // self.num_ranks

    @functools.cached_property
    def num_recv_rows(self) -> int:
        """Rows per local expert."""
        return self.num_ranks * self.sizes.num_max_dispatch_tokens_per_rank


def dispatch(limits: Limits, call: LowLatencyDispatch) -> LowLatencyShape:
    """Checks what a call of `Buffer.low_latency_dispatch` looks like (known_calls.py), and returns its sizes."""
    checks.flags_of(call)
    tensors = Tensors(call, limits)
    tensors.check("topk_idx")
    x, topk_idx = call.x, call.topk_idx
    sizes = sizes_of(
        DISPATCH,
        limits.num_ranks,
        limits.binding,
        call.num_max_dispatch_tokens_per_rank,
        x.shape[1],
        call.num_experts,
    )
    shape = LowLatencyShape(sizes, x.shape[0], topk_idx.shape[1], limits.num_ranks)
    tensors.dimensions["num_local_experts"] = shape.num_local_experts
    tensors.check()
    if call.use_ue8m0 and not (call.use_fp8 and call.round_scale):
        got = f"use_ue8m0 is True, use_fp8 {call.use_fp8} and round_scale {call.round_scale}"
        fail(DISPATCH, got, "ue8m0")
    _finish(call, shape, limits)
    if call.use_fp8:
        _say_what_consumers_refuse(shape.num_recv_rows, sizes.hidden, call.use_ue8m0)
    return shape


def dispatch_values(limits: Limits, call: LowLatencyDispatch, shape: LowLatencyShape) -> None:
    """Checks the rest of it, which calls that look the same may differ in."""
    checks.recv_counters(call, limits)
    checks.expert_indices(DISPATCH, call.topk_idx, shape.sizes.num_experts)
    if call.topk_idx.is_cpu:
        _rows_per_expert(call.topk_idx, shape.sizes.num_max_dispatch_tokens_per_rank)


@functools.lru_cache(maxsize=1024)
def _say_what_consumers_refuse(num_recv_rows: int, hidden: int, is_packed: bool) -> None:
    """Once for each size: scales come in a layout for TMA, whose descriptors do not allow all sizes that we do."""
    if num_recv_rows % _TMA_ROWS or (is_packed and hidden % _PACKED_CHANNELS):
        _log.warning(
            "deep_ep: %s: scales have %d rows, num_ranks * num_max_dispatch_tokens_per_rank, and hidden is %d; grouped "
            "GEMMs need multiples of %d and, with use_ue8m0, of %d. Raise num_max_dispatch_tokens_per_rank, pad hidden, or "
            "copy the scales.",
            *(DISPATCH, num_recv_rows, hidden, _TMA_ROWS, _PACKED_CHANNELS),
        )


def combine(limits: Limits, call: LowLatencyCombine) -> LowLatencyShape:
    """Checks what a call of `Buffer.low_latency_combine` looks like, its handle unpacked, and returns its sizes."""
    checks.flags_of(call)
    handle, num_ranks = call.handle, limits.num_ranks
    sizes = sizes_of(COMBINE, num_ranks, limits.binding, *handle[2:])
    tensors = Tensors(
        call,
        limits,
        num_local_experts=sizes.num_experts // num_ranks,
        num_recv_rows=num_ranks * sizes.num_max_dispatch_tokens_per_rank,
        hidden=sizes.hidden,
    )
    # With zero_copy the rows are already in the buffer; x gives the shape only.
    tensors.check("x", any_strides=call.zero_copy)
    tensors.check()
    num_tokens, num_topk = call.topk_idx.shape
    shape = LowLatencyShape(sizes, num_tokens, num_topk, num_ranks)
    if call.use_logfmt and call.zero_copy:
        fail(COMBINE, "use_logfmt and zero_copy are both True", "exclusive", name="use_logfmt")
    _finish(call, shape, limits)
    return shape


def combine_values(
    limits: Limits,
    native: Runtime,
    call: LowLatencyCombine,
    shape: LowLatencyShape,
    num_words: int,
) -> None:
    """Checks the rest of it but the values of its handle, of which the kernel may read `num_words`."""
    _handle_storage(native, shape, call, num_words)
    checks.recv_counters(call, limits)
    checks.expert_indices(COMBINE, call.topk_idx, shape.sizes.num_experts)


# Kernels and the sizes of buffers count channels in 32 bits.
_MAX_HIDDEN = (1 << 31) - 1


def sizes_of(
    call: str,
    num_ranks: int,
    binding: Binding,
    num_max_dispatch_tokens_per_rank: Any,
    hidden: Any,
    num_experts: Any,
) -> LowLatencySizes:
    """The three sizes all ranks must agree on, as checked ints."""
    given = LowLatencySizes(num_max_dispatch_tokens_per_rank, hidden, num_experts)
    sizes = (checks.positive_int(call, name, value) for name, value in given._asdict().items())
    maximum, hidden, num_experts = sizes
    checks.kernel_limit(call, "hidden", hidden, _MAX_HIDDEN)
    group = binding.CHANNELS_PER_SCALE
    if hidden % group:
        padded = -(-hidden // group) * group
        fail(call, f"hidden is {hidden}", "hidden", multiple=group, padded=padded)
    got = f"num_experts is {num_experts}"
    checks.num_experts(call, got, num_experts, num_ranks, binding)
    checks.kernel_limit(call, "num_max_dispatch_tokens_per_rank", maximum, binding.MAX_TOKENS)
    return LowLatencySizes(maximum, hidden, num_experts)


@functools.lru_cache(maxsize=64)
def num_bytes(binding: Binding, num_ranks: int, sizes: LowLatencySizes) -> int:
    """Bytes of RDMA buffer a call of these sizes needs."""
    needed: int = binding.low_latency_rdma_size_hint(num_ranks=num_ranks, **sizes._asdict())
    return needed


def sizes_that_fit(call: str, limits: Limits, *given: Any) -> LowLatencySizes:
    """The same, for a buffer that must hold a call of these sizes."""
    sizes = sizes_of(call, limits.num_ranks, limits.binding, *given)
    buffer_size(call, sizes, limits)
    return sizes


def buffer_size(call: str, sizes: LowLatencySizes, limits: Limits) -> None:
    """The RDMA buffer must hold a call of these sizes."""
    needed = num_bytes(limits.binding, limits.num_ranks, sizes)
    if limits.num_rdma_bytes < needed:
        maximum, hidden, num_experts = sizes
        arguments = f"{maximum}, {hidden}, {limits.num_ranks}, {num_experts}"
        got = f"the buffer has num_rdma_bytes = {limits.num_rdma_bytes}"
        fail(call, got, "buffer_size", needed=needed, arguments=arguments)


def _finish(call: BufferCall, shape: LowLatencyShape, limits: Limits) -> None:
    """Whether kernels take so many entries and tokens, the caller can know when they are done, and there is room."""
    most = limits.binding.MAX_TOPK
    if not 0 < shape.num_topk <= most:
        fail(call.name, f"topk_idx has shape {list(call.topk_idx.shape)}", "topk", maximum=most)
    maximum = shape.sizes.num_max_dispatch_tokens_per_rank
    if shape.num_tokens > maximum:
        got, name = f"there are {shape.num_tokens} tokens", "num_max_dispatch_tokens_per_rank"
        fail(call.name, got, "num_tokens", name=name, maximum=maximum)
    if call.async_finish and call.return_recv_hook:
        got = "async_finish and return_recv_hook are both True"
        fail(call.name, got, "exclusive", name="async_finish")
    buffer_size(call.name, shape.sizes, limits)


def _rows_per_expert(topk_idx: torch.Tensor, maximum: int) -> None:
    if topk_idx.numel() <= maximum:
        return
    rows = torch.bincount(topk_idx.flatten() + 1, minlength=2)[1:]
    most = int(rows.max())
    if most > maximum:
        got = f"topk_idx names expert {int(rows.argmax())} {most} times"
        fail(DISPATCH, got, "expert_overflow", maximum=maximum)


def unpack_handle(call: str, handle: Any) -> LowLatencyHandle:
    """A low-latency handle from any tuple or list of its five values."""
    if isinstance(handle, LowLatencyHandle):
        return handle
    if not isinstance(handle, (tuple, list)):
        fail(call, f"handle is a {type(handle).__name__}", "handle", EPTypeError)
    if len(handle) != len(LowLatencyHandle._fields):
        fail(call, f"handle has {len(handle)} elements", "handle")
    sizes = (checks.positive_int(call, f"handle[{i}]", handle[i]) for i in range(2, len(handle)))
    return LowLatencyHandle(handle[0], handle[1], *sizes)


# What dispatch leaves behind the tokens begins with a number of 64 bits.
_HANDLE_ALIGNMENT = 8


def _handle_storage(
    native: Runtime, shape: LowLatencyShape, call: LowLatencyCombine, num_words: int
) -> None:
    """What dispatch left for combine lies behind the tokens in the storage of `handle[0]`; a copy has lost it.

    The kernel may read `num_words` words of 32 bits from `handle[0]` on.
    """
    src_info = call.handle[0]
    num_stored = (
        src_info.untyped_storage().nbytes() // src_info.element_size() - src_info.storage_offset()
    )
    is_aligned = src_info.data_ptr() % _HANDLE_ALIGNMENT == 0
    if is_aligned and num_stored >= num_words:
        return
    of_no_tokens = native.handle_words(**{**shape.keywords, "num_tokens": 0})
    if not is_aligned or num_stored < of_no_tokens:
        fail(COMBINE, "handle[0] is a copy", "handle_copy")
    got = f"topk_idx has shape {list(call.topk_idx.shape)}"
    fail(COMBINE, got, "topk_of_dispatch", expected="a smaller shape")


def handle_values(native: Runtime, shape: LowLatencyShape, call: LowLatencyCombine) -> None:
    """A handle whose values cannot be right is refused before anything is sent; on a GPU the kernel refuses it."""
    if not call.topk_idx.is_cpu:
        return
    src_info, layout_range = call.handle[:2]
    fault = native.find_handle_fault(
        topk_idx=call.topk_idx.data_ptr(),
        src_info=src_info.data_ptr(),
        layout_range=layout_range.data_ptr(),
        **shape.keywords,
    )
    if fault is not None:
        fail_for(fault, call.topk_idx, layout_range)


def fail_for(
    fault: tuple[str, int, int, int], topk_idx: torch.Tensor, layout_range: torch.Tensor
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
    fail(COMBINE, f"what lies behind handle[0] for topk_idx{place} has changed", "handle_values")
