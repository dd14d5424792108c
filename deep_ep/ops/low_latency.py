"""The low-latency operations: output tensors, the arguments of the kernels, launching, hooks."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from deep_ep.base.rules import COMBINE, DISPATCH, fail
from deep_ep.checks import arguments as checks
from deep_ep.checks import low_latency as low_latency_checks
from deep_ep.checks.low_latency import LowLatencyShape
from deep_ep.errors import EPUsageError
from deep_ep.native import backend
from deep_ep.observe import parts
from deep_ep.observe.counters import RecvCounters
from deep_ep.ops import pointers
from deep_ep.ops.hooks import PendingReceive, ReceiveHook
from deep_ep.types.event import EventHandle, EventOverlap
from deep_ep.types.handles import LowLatencyHandle

if TYPE_CHECKING:
    from deep_ep.native.runtime import Runtime
    from deep_ep.ops.communicator import Communicator

Tensor = torch.Tensor
# What one operation reads and writes: it lives until that is done.
Used = tuple[tuple[Optional[Tensor], ...], Optional[RecvCounters]]


def rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """See `Buffer.get_low_latency_rdma_size_hint`."""
    where = "get_low_latency_rdma_size_hint"
    num_ranks = checks.positive_int(where, "num_ranks", num_ranks)
    binding = backend.get().binding
    sizes = low_latency_checks.sizes_of(
        where, num_max_dispatch_tokens_per_rank, hidden, num_experts, num_ranks, binding
    )
    return low_latency_checks.num_bytes(binding, num_ranks, sizes)


class LowLatency:
    """The low-latency operations of one buffer.

    Attributes:
        dispatch_counters: used where a dispatch is given none of its own; or `None`.
        combine_counters: the same for a combine.
    """

    def __init__(self, communicator: Communicator, owner: object, is_enabled: bool) -> None:
        """Does not communicate.

        Args:
            communicator: what they run on.
            owner: the buffer; hooks keep it alive.
            is_enabled: whether the buffer was built for them.
        """
        self.dispatch_counters: RecvCounters | None = None
        self.combine_counters: RecvCounters | None = None
        self._communicator = communicator
        self._owner = weakref.ref(owner)
        self._is_enabled = is_enabled
        self._is_staged = False  # the next combine's rows may be in its buffer
        self._handle_words: dict[LowLatencyShape, int] = {}

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None,
        dispatch_wait_recv_cost_stats: Tensor | None,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        async_finish: bool,
        return_recv_hook: bool,
        recv_counters: RecvCounters | None,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, ReceiveHook | None
    ]:
        """See `Buffer.low_latency_dispatch`."""
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, DISPATCH):
            runtime = self._idle_runtime(DISPATCH)
            use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook = checks.flags(
                DISPATCH,
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
                async_finish=async_finish,
                return_recv_hook=return_recv_hook,
            )
            shape = low_latency_checks.dispatch(
                communicator.limits,
                x,
                topk_idx,
                num_max_dispatch_tokens_per_rank,
                num_experts,
                cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats,
                recv_counters,
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
                async_finish=async_finish,
                return_recv_hook=return_recv_hook,
            )
            new, device = communicator.backend.empty, communicator.limits.device
            num_experts, num_rows = shape.num_local_experts, shape.num_recv_rows
            recv_x = new(
                (num_experts, num_rows, shape.hidden),
                torch.float8_e4m3fn if use_fp8 else torch.bfloat16,
                device,
            )
            scales = _new_scales(shape, use_ue8m0, communicator) if use_fp8 else None
            recv_count = new((num_experts,), torch.int32, device)
            # Behind it the kernel leaves what combine checks the handle against.
            src_info = new((self._num_handle_words(runtime, shape),), torch.int32, device)
            src_info = src_info.as_strided((num_experts, num_rows), (num_rows, 1))
            layout_range = new((num_experts, shape.num_ranks), torch.int64, device)
            counters = recv_counters or self.dispatch_counters
            run = functools.partial(
                runtime.native.low_latency_dispatch,
                x=x.data_ptr(),
                topk_idx=topk_idx.data_ptr(),
                **shape.keywords,
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
                recv_x=recv_x.data_ptr(),
                recv_scales=pointers.of_tensor(scales),
                recv_count=recv_count.data_ptr(),
                src_info=src_info.data_ptr(),
                layout_range=layout_range.data_ptr(),
                cumulative_local_expert_recv_stats=pointers.of_tensor(
                    cumulative_local_expert_recv_stats
                ),
                wait_stats=pointers.of_own_row(dispatch_wait_recv_cost_stats, communicator.rank),
                counters=pointers.of_counters(counters),
            )
            used = (
                *(x, topk_idx, recv_x, scales, recv_count, src_info, layout_range),
                *(cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats),
            )
            event, hook = self._launch(
                DISPATCH, runtime, run, (used, counters), async_finish, return_recv_hook, src_info
            )
        handle = LowLatencyHandle(
            src_info,
            layout_range,
            shape.num_max_dispatch_tokens_per_rank,
            shape.hidden,
            shape.num_experts,
        )
        return recv_x if scales is None else (recv_x, scales), recv_count, handle, event, hook

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool,
        zero_copy: bool,
        async_finish: bool,
        return_recv_hook: bool,
        out: Tensor | None,
        combine_wait_recv_cost_stats: Tensor | None,
        recv_counters: RecvCounters | None,
    ) -> tuple[Tensor, EventOverlap, ReceiveHook | None]:
        """See `Buffer.low_latency_combine`."""
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, COMBINE):
            runtime = self._idle_runtime(COMBINE)
            use_logfmt, zero_copy, async_finish, return_recv_hook = checks.flags(
                COMBINE,
                use_logfmt=use_logfmt,
                zero_copy=zero_copy,
                async_finish=async_finish,
                return_recv_hook=return_recv_hook,
            )
            shape = low_latency_checks.combine(
                communicator.limits,
                x,
                topk_idx,
                topk_weights,
                handle,
                out,
                combine_wait_recv_cost_stats,
                recv_counters,
                use_logfmt=use_logfmt,
                zero_copy=zero_copy,
                async_finish=async_finish,
                return_recv_hook=return_recv_hook,
            )
            src_info, layout_range = handle[0], handle[1]
            communicator.check_received(COMBINE, src_info)
            low_latency_checks.handle_values(
                runtime.native, shape, topk_idx, src_info, layout_range
            )
            if zero_copy and not self._is_staged:
                fail(COMBINE, "zero_copy is True", "combine_buffer", EPUsageError)
            self._is_staged = False
            if out is None:
                out = torch.empty(
                    (shape.num_tokens, shape.hidden),
                    dtype=torch.bfloat16,
                    device=communicator.limits.device,
                )
            counters = recv_counters or self.combine_counters
            run = functools.partial(
                runtime.native.low_latency_combine,
                x=x.data_ptr(),
                topk_idx=topk_idx.data_ptr(),
                topk_weights=topk_weights.data_ptr(),
                src_info=src_info.data_ptr(),
                layout_range=layout_range.data_ptr(),
                out=out.data_ptr(),
                **shape.keywords,
                use_logfmt=use_logfmt,
                zero_copy=zero_copy,
                wait_stats=pointers.of_own_row(combine_wait_recv_cost_stats, communicator.rank),
                counters=pointers.of_counters(counters),
            )
            used = (
                *(x, topk_idx, topk_weights, src_info, layout_range),
                *(out, combine_wait_recv_cost_stats),
            )
            event, hook = self._launch(
                COMBINE, runtime, run, (used, counters), async_finish, return_recv_hook
            )
        return out, event, hook

    def next_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """See `Buffer.get_next_low_latency_combine_buffer`."""
        where = "get_next_low_latency_combine_buffer"
        communicator = self._communicator
        self._check_enabled(where)
        runtime = communicator.connected_runtime(where)
        given = low_latency_checks.unpack_handle(where, handle)
        maximum, hidden, num_experts = low_latency_checks.sizes_that_fit(
            where,
            given.num_max_dispatch_tokens_per_rank,
            given.hidden,
            given.num_experts,
            communicator.limits,
        )
        self._is_staged = True
        pointer, stride_bytes = runtime.native.next_combine_buffer(
            num_max_dispatch_tokens_per_rank=maximum, hidden=hidden, num_experts=num_experts
        )
        item = torch.bfloat16.itemsize
        num_ranks = communicator.num_ranks
        shape = (num_experts // num_ranks, num_ranks * maximum, hidden)
        num_bytes = (shape[0] * shape[1] - 1) * stride_bytes + hidden * item
        memory = communicator.backend.tensor_at(pointer, num_bytes, runtime.native)
        stride = stride_bytes // item
        return memory.view(torch.bfloat16).as_strided(shape, (shape[1] * stride, stride, 1))

    def clean(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """See `Buffer.clean_low_latency_buffer`."""
        where = "clean_low_latency_buffer"
        communicator = self._communicator
        with communicator.lock:
            runtime = self._idle_runtime(where)
            low_latency_checks.sizes_that_fit(
                where, num_max_dispatch_tokens_per_rank, hidden, num_experts, communicator.limits
            )
            stream = communicator.backend.stream_handle(communicator.calling_stream(where))
            communicator.receive_sent()
            runtime.native.clean_low_latency_buffer(stream=stream)
            communicator.raise_failure(called=where)

    def enable_counters(self, ring: int) -> None:
        """See `Buffer.enable_counters`."""
        communicator = self._communicator
        communicator.check_process("enable_counters")
        ring = checks.not_negative_int("enable_counters", "ring", ring)
        limits = communicator.limits
        with communicator.lock:
            if self.dispatch_counters is None or self.dispatch_counters.capacity != ring:
                self.dispatch_counters = RecvCounters(limits.num_ranks, ring, limits.device)
            if self.combine_counters is None or self.combine_counters.capacity != ring:
                self.combine_counters = RecvCounters(limits.num_ranks, ring, limits.device)

    def disable_counters(self) -> None:
        """See `Buffer.disable_counters`."""
        self._communicator.check_process("disable_counters")
        with self._communicator.lock:
            self.dispatch_counters = None
            self.combine_counters = None

    def _launch(
        self,
        name: str,
        runtime: Runtime,
        run: Callable[..., None],
        used: Used,
        async_finish: bool,
        return_recv_hook: bool,
        handle: Tensor | None = None,
    ) -> tuple[EventOverlap, ReceiveHook | None]:
        """Runs an operation, or its send phase. `handle` is `handle[0]` of a dispatch."""
        communicator = self._communicator
        current = communicator.calling_stream(name)
        communicator.receive_sent()
        for callback in communicator.before_operation:
            callback(name)
        back, binding = communicator.backend, communicator.backend.binding
        if return_recv_hook:
            stream = back.stream_handle(current)
            run(phases=binding.PHASE_SEND, stream=stream)
            # What went wrong in it the hook raises, for its phase ends the operation.
            receive = functools.partial(run, phases=binding.PHASE_RECEIVE, stream=stream)
            pending = PendingReceive(name, receive, used, handle)
            communicator.open_hooks.append(pending)
            return EventOverlap(), pending.hook_for(communicator, self._owner())
        comm = runtime.get_comm_stream()
        back.wait_stream(comm, current, communicator.stream_event)
        phases = binding.PHASE_SEND | binding.PHASE_RECEIVE
        run(phases=phases, stream=back.stream_handle(comm))
        communicator.raise_failure()
        if async_finish:
            tensors, counters = used
            counted = pointers.tensors_of(counters)
            kept = tuple(tensor for tensor in (*tensors, *counted) if tensor is not None)
            return EventOverlap(EventHandle(comm, back), kept), None
        back.wait_stream(current, comm, communicator.stream_event)
        return EventOverlap(), None

    def _num_handle_words(self, runtime: Runtime, shape: LowLatencyShape) -> int:
        num_words = self._handle_words.get(shape)
        if num_words is None:
            num_words = runtime.native.handle_words(**shape.keywords)
            self._handle_words[shape] = num_words
        return num_words

    def _idle_runtime(self, where: str) -> Runtime:
        self._check_enabled(where)
        return self._communicator.idle_runtime(where)

    def _check_enabled(self, where: str) -> None:
        if not self._is_enabled:
            fail(where, "low_latency_mode is False", "low_latency_mode", EPUsageError)


def _new_scales(shape: LowLatencyShape, use_ue8m0: bool, communicator: Communicator) -> Tensor:
    """Scales `[num_local_experts, num_recv_rows, columns]` with stride 1 along rows."""
    selected, num_rows = communicator.backend, shape.num_recv_rows
    columns = shape.hidden // selected.binding.CHANNELS_PER_SCALE
    dtype = torch.float32
    if use_ue8m0:
        columns, dtype = -(-columns // 4), torch.int32
    size, stride = (shape.num_local_experts, num_rows, columns), (columns * num_rows, 1, num_rows)
    return selected.empty(size, dtype, communicator.limits.device, stride)
