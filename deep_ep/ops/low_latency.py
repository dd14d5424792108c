"""The low-latency operations: output tensors, the arguments of the kernels, launching, hooks."""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

import torch

from deep_ep.base.rules import COMBINE, DISPATCH, fail
from deep_ep.checks import arguments as checks
from deep_ep.checks import low_latency as low_latency_checks
from deep_ep.checks.calls import LowLatencyCombine, LowLatencyDispatch
from deep_ep.checks.known_calls import KnownCalls
from deep_ep.checks.low_latency import LowLatencyShape
from deep_ep.errors import EPUsageError
from deep_ep.native import backend
from deep_ep.observe import parts
from deep_ep.ops import pointers
from deep_ep.ops.hooks import PendingReceive
from deep_ep.types.event import EventHandle, EventOverlap
from deep_ep.types.handles import LowLatencyHandle

if TYPE_CHECKING:
    from deep_ep.checks.arguments import Limits
    from deep_ep.native.runtime import Runtime
    from deep_ep.ops.communicator import Communicator

Tensor = torch.Tensor
# What receives, where a call is asked for it; see `Buffer.low_latency_dispatch`.
Hook = Optional[Callable[[], None]]
# What one operation reads and writes, as the native runtime calls it: it lives until that is done.
Used = dict[str, Optional[Tensor]]
# Sizes and flags, as it takes them.
Numbers = dict[str, int]
# Arguments of `Backend.empty`. Strides are always among them: torch reads these arguments faster.
Memory = tuple[tuple[int, ...], torch.dtype, torch.device, tuple[int, ...]]


class _DispatchPlan(NamedTuple):
    """What follows from what a dispatch looks like.

    Attributes:
        shape: its sizes.
        numbers: of its launch.
        recv_x: memory of the rows.
        scales: of their scales; `None` without.
        recv_count: of the number of rows.
        handle_words: of `src_info`, behind whose tokens the kernel leaves where rows come back, and what shows a change.
        src_info: size and strides of it.
        layout_range: memory of it.
    """

    shape: LowLatencyShape
    numbers: Numbers
    recv_x: Memory
    scales: Memory | None
    recv_count: Memory
    handle_words: Memory
    src_info: tuple[tuple[int, int], tuple[int, int]]
    layout_range: Memory


def rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """See `Buffer.get_low_latency_rdma_size_hint`."""
    where = "get_low_latency_rdma_size_hint"
    num_ranks = checks.positive_int(where, "num_ranks", num_ranks)
    binding = backend.get().binding
    given = num_max_dispatch_tokens_per_rank, hidden, num_experts
    sizes = low_latency_checks.sizes_of(where, num_ranks, binding, *given)
    return low_latency_checks.num_bytes(binding, num_ranks, sizes)


class LowLatency:
    """The low-latency operations of one buffer."""

    def __init__(self, communicator: Communicator, owner: object, is_enabled: bool) -> None:
        """Does not communicate.

        Args:
            communicator: what they run on.
            owner: the buffer; hooks keep it alive.
            is_enabled: whether the buffer was built for them.
        """
        self._communicator = communicator
        self._owner = weakref.ref(owner)
        self._is_enabled = is_enabled
        self._is_staged = False  # the next combine's rows may be in its buffer
        self._sent: Numbers = {}  # of the newest operation
        self._dispatches = KnownCalls[_DispatchPlan](LowLatencyDispatch)
        self._combines = KnownCalls[tuple[LowLatencyShape, Numbers, int]](LowLatencyCombine)

    def dispatch(
        self, call: LowLatencyDispatch
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Hook]:
        """See `Buffer.low_latency_dispatch`."""
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, DISPATCH):
            runtime = self._idle_runtime(DISPATCH)
            plan = self._dispatches.find(call, self._plan_dispatch)
            low_latency_checks.dispatch_values(communicator.limits, call, plan.shape)
            new = communicator.backend.empty
            recv_x, recv_count = new(*plan.recv_x), new(*plan.recv_count)
            scales = None if plan.scales is None else new(*plan.scales)
            src_info = new(*plan.handle_words).as_strided(*plan.src_info)
            layout_range = new(*plan.layout_range)
            tensors = {
                "x": call.x,
                "topk_idx": call.topk_idx,
                "recv_x": recv_x,
                "recv_scales": scales,
                "recv_count": recv_count,
                "src_info": src_info,
                "layout_range": layout_range,
                "cumulative_local_expert_recv_stats": call.cumulative_local_expert_recv_stats,
                "wait_stats": pointers.own_row(
                    call.dispatch_wait_recv_cost_stats, communicator.rank
                ),
            }
            event, hook = self._launch(call, runtime, tensors, plan.numbers, src_info)
        handle = LowLatencyHandle(src_info, layout_range, *plan.shape.sizes)
        return recv_x if scales is None else (recv_x, scales), recv_count, handle, event, hook

    def combine(self, call: LowLatencyCombine) -> tuple[Tensor, EventOverlap, Hook]:
        """See `Buffer.low_latency_combine`."""
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, COMBINE):
            runtime = self._idle_runtime(COMBINE)
            call.handle = low_latency_checks.unpack_handle(COMBINE, call.handle)
            shape, numbers, num_words = self._combines.find(call, self._plan_combine)
            low_latency_checks.combine_values(
                communicator.limits, runtime.native, call, shape, num_words
            )
            src_info, layout_range = call.handle[:2]
            communicator.check_received(COMBINE, src_info)
            low_latency_checks.handle_values(runtime.native, shape, call)
            if call.zero_copy and not self._is_staged:
                fail(COMBINE, "zero_copy is True", "combine_buffer", EPUsageError)
            self._is_staged = False
            out = call.out
            if out is None:
                out = torch.empty(
                    (shape.num_tokens, shape.sizes.hidden),
                    dtype=torch.bfloat16,
                    device=communicator.limits.device,
                )
            tensors = {
                "x": call.x,
                "topk_idx": call.topk_idx,
                "topk_weights": call.topk_weights,
                "src_info": src_info,
                "layout_range": layout_range,
                "out": out,
                "wait_stats": pointers.own_row(
                    call.combine_wait_recv_cost_stats, communicator.rank
                ),
            }
            event, hook = self._launch(call, runtime, tensors, numbers)
        return out, event, hook

    def next_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """See `Buffer.get_next_low_latency_combine_buffer`."""
        where = "get_next_low_latency_combine_buffer"
        communicator = self._communicator
        self._check_enabled(where)
        runtime = communicator.connected_runtime(where)
        given = low_latency_checks.unpack_handle(where, handle)[2:]
        sizes = low_latency_checks.sizes_that_fit(where, communicator.limits, *given)
        with communicator.lock:
            # Rows of other sizes that are not received yet may lie where the caller will write.
            if not sizes._asdict().items() <= self._sent.items():
                communicator.receive_sent()
        maximum, hidden, num_experts = sizes
        self._is_staged = True
        pointer, stride_bytes = runtime.native.next_combine_buffer(**sizes._asdict())
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
        self._check_enabled(where)
        self._communicator.connected_runtime(where)
        given = num_max_dispatch_tokens_per_rank, hidden, num_experts
        low_latency_checks.sizes_that_fit(where, self._communicator.limits, *given)
        self._communicator.meet(where)

    def _launch(
        self,
        call: LowLatencyDispatch | LowLatencyCombine,
        runtime: Runtime,
        tensors: Used,
        numbers: Numbers,
        handle: Tensor | None = None,
    ) -> tuple[EventOverlap, Hook]:
        """Runs an operation, or its send phase.

        Args:
            call: what was asked for.
            runtime: that runs it.
            tensors: that its native method takes.
            numbers: the same, and flags.
            handle: `handle[0]` of a dispatch.
        """
        communicator, name = self._communicator, call.name
        counters = call.recv_counters or communicator.counters.get(name)
        arguments: dict[str, Any] = pointers.of_tensors(tensors)
        arguments.update(numbers, counters=pointers.of_counters(counters))
        run = getattr(runtime.native, name)
        current = communicator.calling_stream(name)
        communicator.receive_sent()
        self._sent = numbers
        for callback in communicator.before_operation:
            callback(name)
        back, binding = communicator.backend, communicator.backend.binding
        if call.return_recv_hook:
            arguments["stream"] = back.stream_handle(current)
            run(**arguments, phases=binding.PHASE_SEND)
            # What went wrong in it the hook raises, for its phase ends the operation.
            receive = functools.partial(run, **arguments, phases=binding.PHASE_RECEIVE)
            pending = PendingReceive(name, receive, (tensors, counters), handle)
            communicator.open_hooks.append(pending)
            return EventOverlap(), pending.hook_of(self._owner())
        comm = runtime.get_comm_stream()
        back.wait_stream(comm, current, communicator.stream_event)
        phases = binding.PHASE_SEND | binding.PHASE_RECEIVE
        run(**arguments, phases=phases, stream=back.stream_handle(comm))
        communicator.raise_failure()
        if call.async_finish:
            used = (*tensors.values(), *pointers.tensors_of(counters))
            kept = tuple(tensor for tensor in used if tensor is not None)
            return EventOverlap(EventHandle(comm, back), kept), None
        back.wait_stream(current, comm, communicator.stream_event)
        return EventOverlap(), None

    def _plan_dispatch(self, call: LowLatencyDispatch) -> _DispatchPlan:
        limits = self._communicator.limits
        shape = low_latency_checks.dispatch(limits, call)
        num_experts, num_rows = shape.num_local_experts, shape.num_recv_rows
        num_words = self._num_handle_words(DISPATCH, shape)
        flags = {name: getattr(call, name) for name in ("use_fp8", "round_scale", "use_ue8m0")}

        def memory(dtype: torch.dtype, *size: int) -> Memory:
            return size, dtype, limits.device, _contiguous(size)

        rows_dtype = torch.float8_e4m3fn if call.use_fp8 else torch.bfloat16
        return _DispatchPlan(
            shape,
            {**shape.keywords, **flags},
            recv_x=memory(rows_dtype, num_experts, num_rows, shape.sizes.hidden),
            scales=_scales(shape, limits, call.use_ue8m0) if call.use_fp8 else None,
            recv_count=memory(torch.int32, num_experts),
            handle_words=memory(torch.int32, num_words),
            src_info=((num_experts, num_rows), (num_rows, 1)),
            layout_range=memory(torch.int64, num_experts, shape.num_ranks),
        )

    def _plan_combine(self, call: LowLatencyCombine) -> tuple[LowLatencyShape, Numbers, int]:
        shape = low_latency_checks.combine(self._communicator.limits, call)
        flags = {"use_logfmt": call.use_logfmt, "zero_copy": call.zero_copy}
        return shape, {**shape.keywords, **flags}, self._num_handle_words(COMBINE, shape)

    def _num_handle_words(self, where: str, shape: LowLatencyShape) -> int:
        native = self._communicator.connected_runtime(where).native
        return native.handle_words(**shape.keywords)

    def _idle_runtime(self, where: str) -> Runtime:
        self._check_enabled(where)
        return self._communicator.idle_runtime(where)

    def _check_enabled(self, where: str) -> None:
        if not self._is_enabled:
            fail(where, "low_latency_mode is False", "low_latency_mode", EPUsageError)


def _scales(shape: LowLatencyShape, limits: Limits, use_ue8m0: bool) -> Memory:
    """Scales `[num_local_experts, num_recv_rows, columns]` with stride 1 along rows."""
    num_rows, columns = shape.num_recv_rows, shape.sizes.hidden // limits.binding.CHANNELS_PER_SCALE
    dtype = torch.float32
    if use_ue8m0:
        columns, dtype = -(-columns // 4), torch.int32
    size, stride = (shape.num_local_experts, num_rows, columns), (columns * num_rows, 1, num_rows)
    return size, dtype, limits.device, stride


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor of that size."""
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
