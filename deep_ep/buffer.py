"""`Buffer`: checks arguments, allocates outputs, calls the runtime, raises what it reports.

Each communication method is the same short story: check everything before anything is sent,
allocate with torch, pass pointers, and turn a failure record into an exception.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NoReturn

import torch

from deep_ep import backend, checks, config, env, rendezvous
from deep_ep.checks import Limits, Shape
from deep_ep.config import Config
from deep_ep.counters import RecvCounters
from deep_ep.errors import (
    EPError,
    EPUnsupportedError,
    EPUsageError,
    error_from_failure,
)
from deep_ep.event import EventHandle, EventOverlap
from deep_ep.group import as_group
from deep_ep.handles import LowLatencyHandle
from deep_ep.runtime import Runtime
from deep_ep.topology import Topology, ranks_per_node

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime as NativeRuntime
    from deep_ep.diagnose.live.monitor import Monitor

Tensor = torch.Tensor
_NO_COUNTERS = (0, 0, 0, 0)


class ReceiveHook:
    """The receive phase of a low-latency call made with `return_recv_hook=True`; call it once."""

    def __init__(
        self, buffer: Buffer, name: str, receive: Callable[[], None], kept: object
    ) -> None:
        self.name = name
        self._buffer = buffer
        self._receive: Callable[[], None] | None = receive
        self._kept = kept

    def __call__(self) -> None:
        """Enqueues the receive phase on the stream that was current at the call.

        Raises:
            EPUsageError: called before, or after the buffer was destroyed.
            EPTimeoutError, EPArgumentError, EPTransportError: like the call itself.
        """
        with self._buffer._lock:
            receive, self._receive = self._receive, None
            if receive is None:
                checks.fail(self.name, "its hook was called again", "hook_twice", EPUsageError)
            self._buffer._pending_hook = None
            if self._buffer.runtime is None:
                checks.fail(
                    self.name,
                    "its hook was called after destroy()",
                    "hook_after_destroy",
                    EPUsageError,
                )
            receive()
            self._kept = None
            self._buffer._raise_failure()


class Buffer:
    """Communication buffers of one rank, and the expert-parallel operations on them.

    Usable from several threads of a rank, one operation at a time. All operations but
    `get_dispatch_layout` are collective: every rank must call the same ones in the same order.

    Attributes:
        group: the group, or the communicator, it was built on.
        rank: this rank.
        group_size: number of ranks.
        num_nvl_bytes: size of the NVLink buffer, bytes.
        num_rdma_bytes: size of the RDMA buffer, bytes.
        low_latency_mode: whether low-latency operations are enabled.
        explicitly_destroy: whether `destroy()` is to be called.
        enable_shrink: whether ranks may be masked.
        nvshmem_qp_depth: depth of queue pairs; only with `low_latency_mode` or several nodes.
        runtime: the native runtime; `None` once destroyed.
        dispatch_counters: what `low_latency_dispatch` counts, see `enable_counters`; or `None`.
        combine_counters: what `low_latency_combine` counts; or `None`.
        num_sms: class attribute, SMs in the recommended configurations.

    Compatibility: the constructor and all methods of DeepEP, of every V1 revision.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        *,
        use_fabric: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """Connects the ranks of a group. Collective.

        Args:
            group: a `torch.distributed.ProcessGroup` of any backend, or a `deep_ep.group.Group`; used
                for object exchange only. `None` if `comm` is given.
            num_nvl_bytes: bytes for normal operations within a node, a multiple of 128.
            num_rdma_bytes: bytes for low latency and between nodes, a multiple of 128.
            low_latency_mode: enable the low-latency operations.
            num_qps_per_rank: queue pairs per peer; experts per rank for low latency.
            allow_nvlink_for_low_latency_mode: whether low latency may use NVLink. Results are equal.
            allow_mnnvl: whether NVLink may reach beyond the host.
            explicitly_destroy: `destroy()` will be called; otherwise memory is released with the object.
            use_fabric: as `allow_mnnvl`; the name some revisions of DeepEP use.
            enable_shrink: allow ranks to be masked.
            comm: an mpi4py communicator, used if `group` is `None`.

        Raises:
            EPArgumentError: an argument is not allowed, or ranks passed different ones; names them.
            EPNotBuiltError: the backend asked for is not available.
            EPTransportError: some rank could not allocate or connect; raised on all ranks.
            EPTimeoutError: some ranks did not come.

        Compatibility: any group size. Seven arguments may be positional in every revision of DeepEP,
            eight in ours; the rest are keywords.
        """
        self.runtime: Runtime | None = None
        self.group = comm if group is None else group
        self._group = as_group(group, comm)
        self.rank = self._group.rank
        self.group_size = self._group.size
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = bool(low_latency_mode)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.enable_shrink = bool(enable_shrink)
        self.dispatch_counters: RecvCounters | None = None
        self.combine_counters: RecvCounters | None = None
        self._before_operation: list[Callable[[str], None]] = []
        self._lock = threading.RLock()
        self._pending_hook: ReceiveHook | None = None
        self._monitor: Monitor | None = None
        self._num_qps_per_rank = num_qps_per_rank
        self._allow_nvlink = bool(allow_nvlink_for_low_latency_mode)
        self._allow_fabric = bool(allow_mnnvl or use_fabric)
        self._backend, topology = self._agree()
        if topology.num_nodes > 1 or self.low_latency_mode:
            self.nvshmem_qp_depth = env.nvshmem_qp_depth()
        self.runtime = self._connect(topology)
        self._limits = Limits(
            self.group_size, self.num_rdma_bytes, self._backend.device(), self._backend.binding
        )
        try:
            self._start()
        except RuntimeError:
            self.runtime.native.close()
            self.runtime = None
            raise

    # ---- construction

    def _agree(self) -> tuple[backend.Backend, Topology]:
        """Checks the arguments here and against the other ranks'."""
        selected: backend.Backend | None = None
        error: EPError | None = None
        asked_ranks_per_node = None
        try:
            selected = backend.get()
            asked_ranks_per_node = env.ranks_per_node()
            env.diagnose()  # is needed later, when an error would be this rank's alone
            self.num_nvl_bytes = checks.byte_size("num_nvl_bytes", self.num_nvl_bytes)
            self.num_rdma_bytes = checks.byte_size("num_rdma_bytes", self.num_rdma_bytes)
        except EPError as raised:
            error = raised
        facts = rendezvous.exchange_facts(
            self._group,
            {
                "the group size": self.group_size,
                "the backend": selected.name if selected else None,
                "DEEP_EP_RANKS_PER_NODE": asked_ranks_per_node,
                "DEEP_EP_DIAGNOSE": env.DIAGNOSE.text(),
                "num_nvl_bytes": self.num_nvl_bytes,
                "num_rdma_bytes": self.num_rdma_bytes,
                "low_latency_mode": self.low_latency_mode,
                "num_qps_per_rank": self._num_qps_per_rank,
                "allow_nvlink_for_low_latency_mode": self._allow_nvlink,
                "allow_mnnvl": self._allow_fabric,
                "enable_shrink": self.enable_shrink,
            },
            error,
        )
        assert selected is not None  # otherwise there was an error, and the exchange raised it
        hosts = [fact.host for fact in facts]
        topology = Topology(self.rank, self.group_size, ranks_per_node(hosts, asked_ranks_per_node))
        self._check_topology(topology)
        return selected, topology

    def _check_topology(self, topology: Topology) -> None:
        """Rules that depend on the number of nodes; the same on all ranks, so all of them raise."""
        uses_rdma = self.low_latency_mode or topology.num_nodes > 1
        if self.num_rdma_bytes and not uses_rdma and self.group_size <= 8:
            checks.fail("Buffer", f"num_rdma_bytes is {self.num_rdma_bytes}", "rdma_on_one_node")
        if uses_rdma and not self._num_qps_per_rank > 0:
            got = f"num_qps_per_rank is {self._num_qps_per_rank}"
            checks.fail("Buffer", got, "queue_pairs", EPUsageError)

    def _connect(self, topology: Topology) -> Runtime:
        """Allocates and maps the memory of all ranks."""
        natives: list[NativeRuntime] = []

        def allocate() -> bytes:
            native = self._backend.create_runtime(
                needs_rdma=topology.num_nodes > 1,
                allow_nvlink=self._allow_nvlink,
                allow_mnnvl=self._allow_fabric,
                rank=self.rank,
                num_ranks=self.group_size,
                num_nvl_bytes=self.num_nvl_bytes,
                num_rdma_bytes=self.num_rdma_bytes,
                low_latency_mode=self.low_latency_mode,
                num_qps_per_rank=self._num_qps_per_rank,
                timeout_ns=round(env.timeout_s() * 1e9),
                ranks_per_node=topology.ranks_per_node,
                device_index=self._backend.device().index or 0,
            )
            natives.append(native)
            return native.local_handle()

        try:
            handles = rendezvous.together(self._group, "allocating memory", allocate)
            rendezvous.together(
                self._group, "connecting", functools.partial(natives[0].connect, handles)
            )
        except EPError:
            for native in natives:
                native.close()
            raise
        natives[0].release_handle()
        return Runtime(natives[0], self._backend, topology)

    def _start(self) -> None:
        """What a connected buffer does first."""
        if self.low_latency_mode:
            self.measure_clock_offsets()
        watch = env.diagnose()
        if watch.mode != "off":
            self.enable_counters()
        if env.inject() and self.low_latency_mode:
            from deep_ep import faults

            faults.apply(self, faults.parse_list(env.inject(), self.group_size))
        if watch.mode != "off" and self.low_latency_mode:
            from deep_ep.diagnose.live import monitor

            self._monitor = monitor.start(self, self._group, watch)

    # ---- end of life

    def destroy(self) -> None:
        """Releases all memory. Collective: waits for all ranks first, so that none still writes here.

        Local memory is released even if a rank is gone; then a `RuntimeWarning` says so. A second
        call does nothing.

        Raises:
            EPUsageError: the buffer was not built with `explicitly_destroy=True` (also an
                `AssertionError`).
        """
        if not self.explicitly_destroy:
            checks.fail("destroy", "explicitly_destroy is False", "not_explicit", EPUsageError)
        with self._lock:
            if self.runtime is None:
                return
            runtime, self.runtime = self.runtime, None
            self._pending_hook = None
            monitor, self._monitor = self._monitor, None
            try:
                self._backend.synchronize()
                if monitor is not None:
                    monitor.end()
                self._group.barrier()
            except RuntimeError as error:
                warnings.warn(
                    f"destroy on rank {self.rank}: not all ranks came ({error}); local memory is "
                    "released all the same",
                    RuntimeWarning,
                    stacklevel=2,
                )
            finally:
                runtime.native.close()
                if monitor is not None:
                    monitor.close()

    def __del__(self) -> None:
        # Memory goes with the native object, without any collective: nothing can keep an
        # interpreter from exiting, and views of the buffer stay valid as long as they live.
        if getattr(self, "runtime", None) is not None and self.explicitly_destroy:
            warnings.warn(
                f"Buffer on rank {self.rank} was built with explicitly_destroy=True and dropped "
                "without destroy()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # ---- streams, events, views, settings

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 and every other feature is there on both backends."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets `Buffer.num_sms`, from which the recommended configurations are made.

        Args:
            new_num_sms: even, >= 0.

        Raises:
            EPUsageError: an odd or negative number (also an `AssertionError`).

        Compatibility: same as DeepEP; may be called on the class and on an object.
        """
        Buffer.num_sms = checks.even_num_sms(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event after everything queued on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The recommended configuration of normal dispatch.

        Compatibility: sizes DeepEP does not tabulate get the values of the nearest one.
        """
        return config.recommended_dispatch(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The recommended configuration of normal combine.

        Compatibility: sizes DeepEP does not tabulate get the values of the nearest one.
        """
        return config.recommended_combine(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of RDMA buffer with which every low-latency call of these or smaller sizes fits.

        Args:
            num_max_dispatch_tokens_per_rank: most tokens a rank sends in one call.
            hidden: channels of a row, a multiple of 128.
            num_ranks: size of the group.
            num_experts: experts in total, a multiple of `num_ranks`.

        Returns:
            A multiple of 128.

        Raises:
            EPArgumentError: a size is not allowed.
        """
        where = "get_low_latency_rdma_size_hint"
        num_ranks = checks.positive_int(where, "num_ranks", num_ranks)
        binding = backend.get().binding
        sizes = checks.low_latency_sizes(
            where, num_max_dispatch_tokens_per_rank, hidden, num_experts, num_ranks, binding
        )
        return checks.low_latency_bytes(binding, num_ranks, sizes)

    def get_comm_stream(self) -> Any:
        """The stream operations run on: a `torch.cuda.Stream`, or an object of the cpu backend."""
        return self._runtime("get_comm_stream").get_comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """A view of this rank's buffer.

        Args:
            dtype: of the elements.
            size: shape of the view; everything from `offset` on, 1-D, unless given.
            offset: where the view begins, in elements.
            use_rdma_buffer: the RDMA buffer instead of the NVLink buffer.

        Raises:
            EPArgumentError: the view would leave the buffer.

        Compatibility: DeepEP documents `offset` in elements but applies bytes, and lets the view run
            past the end; ours does what is documented.
        """
        runtime = self._runtime("get_local_buffer_tensor")
        memory = runtime.get_local_buffer_tensor(dtype, 0, use_rdma_buffer)
        wanted = torch.Size(size).numel() if size is not None else memory.numel() - offset
        if offset < 0 or wanted < 0 or offset + wanted > memory.numel():
            checks.fail(
                "get_local_buffer_tensor",
                f"offset is {offset} and size {size if size is None else list(size)}",
                "view_size",
                available=memory.numel(),
            )
        view = memory[offset : offset + wanted]
        return view if size is None else view.view(torch.Size(size))

    @staticmethod
    def _unpack_bias(bias: Any) -> tuple[Tensor | None, Tensor | None]:
        """The two biases of normal combine from `None`, a tensor, or a pair.

        Compatibility: a list counts as a tuple; DeepEP ignores it.
        """
        if bias is None or isinstance(bias, torch.Tensor):
            return bias, None
        return checks.bias_pair(bias)

    # ---- counters and clocks

    def enable_counters(self, ring: int = 256) -> None:
        """Counts every low-latency operation that is given no counters of its own, from now on.

        The counters are `dispatch_counters` and `combine_counters`. Calling it again keeps them,
        unless the ring changes.

        Args:
            ring: how many recent operations keep their raw times.
        """
        with self._lock:
            if self.dispatch_counters is None or self.dispatch_counters.capacity != ring:
                self.dispatch_counters = RecvCounters(self.group_size, ring, self._limits.device)
            if self.combine_counters is None or self.combine_counters.capacity != ring:
                self.combine_counters = RecvCounters(self.group_size, ring, self._limits.device)

    def disable_counters(self) -> None:
        """Counts no longer, and drops `dispatch_counters` and `combine_counters`."""
        with self._lock:
            self.dispatch_counters = None
            self.combine_counters = None

    def measure_clock_offsets(self, samples: int = 16) -> tuple[Tensor, Tensor]:
        """Measures all clocks against this rank's, for the counters. Collective.

        Args:
            samples: round trips per pair; the shortest one counts.

        Returns:
            offset_ns: [num_ranks] int64, nanoseconds; that rank's clock minus this rank's.
            round_trip_ns: [num_ranks] int64, nanoseconds; the offset is right to half of it.

        Raises:
            EPTimeoutError: some ranks did not come.
        """
        where = "measure_clock_offsets"
        checks.positive_int(where, "samples", samples)
        with self._lock:
            runtime = self._idle_runtime(where)
            stream = self._backend.stream_handle(self._backend.current_stream())
            measured = runtime.native.measure_clock_offsets(samples=samples, stream=stream)
            self._raise_failure()
        pairs = torch.tensor(measured, dtype=torch.int64).reshape(self.group_size, 2)
        return pairs[:, 0].clone(), pairs[:, 1].clone()

    # ---- layout

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts where tokens go. Local, not collective.

        Args:
            topk_idx: [num_tokens, num_topk] int64, selected experts; others than [0, num_experts)
                are ignored.
            num_experts: experts in total.
            previous_event: what to wait for instead of the current stream.
            async_finish: do not make the current stream wait for the result.
            allocate_on_comm_stream: allocate outputs on the comm stream, as is done with every
                `previous_event`; requires `previous_event` and `async_finish`.

        Returns:
            num_tokens_per_rank: [num_ranks] int32, tokens with an expert on that rank.
            num_tokens_per_rdma_rank: [num_nodes] int32, tokens with an expert on that node; `None` on
                one node.
            num_tokens_per_expert: [num_experts] int32, selections of that expert.
            is_token_in_rank: [num_tokens, num_ranks] bool, whether the token has an expert there.
            event: to wait for, if `async_finish`.

        Raises:
            EPArgumentError: an argument is not allowed.

        Compatibility: same as DeepEP.
        """
        limits = self._limits
        num_tokens, num_topk, num_experts = checks.dispatch_layout(
            topk_idx, num_experts, limits.device
        )
        runtime = self._runtime(checks.LAYOUT)
        comm, back = runtime.get_comm_stream(), self._backend
        waits_for = previous_event.event if previous_event is not None else None
        if allocate_on_comm_stream and not (waits_for is not None and async_finish):
            checks.fail(
                checks.LAYOUT, "allocate_on_comm_stream is True alone", "comm_stream_allocation"
            )
        current = back.current_stream()
        num_nodes = runtime.topology.num_nodes
        # Behind an event the comm stream may run ahead of the current one, so memory of the current
        # stream's pool could still be in use by earlier work there.
        with back.use_stream(current if waits_for is None else comm):
            new = functools.partial(torch.empty, device=limits.device)
            per_rank = new(self.group_size, dtype=torch.int32)
            per_node = new(num_nodes, dtype=torch.int32) if num_nodes > 1 else None
            per_expert = new(num_experts, dtype=torch.int32)
            in_rank = new((num_tokens, self.group_size), dtype=torch.bool)
        if waits_for is not None:
            waits_for.stream_wait(comm)
        else:
            back.wait_stream(comm, current)
        runtime.native.dispatch_layout(
            topk_idx=topk_idx.data_ptr(),
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=num_experts,
            num_ranks=self.group_size,
            ranks_per_node=runtime.topology.ranks_per_node,
            num_tokens_per_rank=per_rank.data_ptr(),
            num_tokens_per_rdma_rank=_pointer(per_node),
            num_tokens_per_expert=per_expert.data_ptr(),
            is_token_in_rank=in_rank.data_ptr(),
            stream=back.stream_handle(comm),
        )
        for tensor in (topk_idx, per_rank, per_node, per_expert, in_rank):
            if tensor is not None:
                back.record_use(tensor, comm)
                back.record_use(tensor, current)
        if async_finish:
            event = EventOverlap(EventHandle.on_stream(comm))
        else:
            event = EventOverlap()
            back.wait_stream(current, comm)
        return per_rank, per_node, per_expert, in_rank, event

    # ---- low latency

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        recv_counters: RecvCounters | None = None,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor],
        Tensor,
        LowLatencyHandle,
        EventOverlap,
        Callable[[], None] | None,
    ]:
        """Sends every token to the experts it selects. Collective.

        Args:
            x: [num_tokens, hidden] bfloat16, contiguous; `hidden` a multiple of 128, `num_tokens` at most
                `num_max_dispatch_tokens_per_rank`, 0 included.
            topk_idx: [num_tokens, num_topk] int64, contiguous; experts in [0, num_experts), -1 = none;
                at most 32 per token.
            num_max_dispatch_tokens_per_rank: most tokens any rank sends; equal on all ranks.
            num_experts: experts in total, a multiple of the group size; expert e lives on rank
                `e // (num_experts // num_ranks)`.
            cumulative_local_expert_recv_stats: [num_local_experts] int32; rows received are added.
            dispatch_wait_recv_cost_stats: [num_ranks] or [num_ranks, num_ranks] int64, nanoseconds;
                waiting per source rank is added, to this rank's own row if there are rows.
            use_fp8: send e4m3 with a scale per 128 channels, else bfloat16.
            round_scale: round scales up to powers of two.
            use_ue8m0: store scales as exponent bytes, four to an int32; requires `round_scale`.
            async_finish: do not make the current stream wait for the result.
            return_recv_hook: send only; the hook receives. Excludes `async_finish`.
            recv_counters: counters to use instead of `dispatch_counters`.

        Returns:
            recv_x: [num_local_experts, num_recv_rows, hidden] bfloat16, num_recv_rows = num_ranks *
                num_max_dispatch_tokens_per_rank; with `use_fp8` the pair of data, float8_e4m3fn in that
                shape, and scales, [num_local_experts, num_recv_rows, hidden / 128] float32 or
                [num_local_experts, num_recv_rows, ceil(hidden / 512)] int32, rows with stride 1.
            recv_count: [num_local_experts] int32, valid rows per expert; the rows after are undefined.
            handle: for `low_latency_combine`; unpacks as (src_info, layout_range,
                num_max_dispatch_tokens_per_rank, hidden, num_experts).
            event: to wait for, if `async_finish`; else its `.event` is `None`.
            hook: to be called once, if `return_recv_hook`; else `None`.

        Raises:
            EPArgumentError: an argument is not allowed (nothing was sent), or ranks passed different
                sizes; names them.
            EPTimeoutError: some ranks did not come; names them.
            EPTransportError: other ranks gave the operation up.

        Compatibility: same as DeepEP, with any `hidden` that is a multiple of 128, `num_topk` up to 32
            and any group size. Waiting times are nanoseconds, not clock cycles.
        """
        with self._lock:
            runtime = self._low_latency_runtime(checks.DISPATCH)
            shape = checks.low_latency_dispatch(
                self._limits,
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
            new = self._backend.empty
            rows = (shape.num_local_experts, shape.num_recv_rows)
            recv_x = new(
                (*rows, shape.hidden), dtype=torch.float8_e4m3fn if use_fp8 else torch.bfloat16
            )
            scales = _new_scales(shape, use_ue8m0, new) if use_fp8 else None
            recv_count = new((shape.num_local_experts,), dtype=torch.int32)
            # The kernel writes a second plane after it, the top-k slots, which combine reads back.
            src_info = new((2, *rows), dtype=torch.int32)[0]
            layout_range = new((shape.num_local_experts, shape.num_ranks), dtype=torch.int64)
            counters = recv_counters or self.dispatch_counters
            run = functools.partial(
                runtime.native.low_latency_dispatch,
                x=x.data_ptr(),
                num_tokens=shape.num_tokens,
                hidden=shape.hidden,
                topk_idx=topk_idx.data_ptr(),
                num_topk=shape.num_topk,
                num_max_dispatch_tokens_per_rank=shape.num_max_dispatch_tokens_per_rank,
                num_experts=shape.num_experts,
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
                recv_x=recv_x.data_ptr(),
                recv_scales=_pointer(scales),
                recv_count=recv_count.data_ptr(),
                src_info=src_info.data_ptr(),
                layout_range=layout_range.data_ptr(),
                cumulative_local_expert_recv_stats=_pointer(cumulative_local_expert_recv_stats),
                wait_stats=_own_row(dispatch_wait_recv_cost_stats, self.rank),
                counters=counters.pointers() if counters else _NO_COUNTERS,
            )
            used = (
                *(x, topk_idx, recv_x, scales, recv_count, src_info, layout_range),
                *(cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats),
            )
            event, hook = self._launch(
                checks.DISPATCH, run, (used, counters), async_finish, return_recv_hook
            )
        handle = LowLatencyHandle(
            src_info,
            layout_range,
            shape.num_max_dispatch_tokens_per_rank,
            shape.hidden,
            shape.num_experts,
        )
        return recv_x if scales is None else (recv_x, scales), recv_count, handle, event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        recv_counters: RecvCounters | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Sends the experts' rows back and adds them up, weighted, per token. Collective.

        Args:
            x: [num_local_experts, num_recv_rows, hidden] bfloat16, contiguous; rows as dispatched. With
                `zero_copy` it is not read.
            topk_idx: [num_tokens, num_topk] int64, contiguous; as dispatched, entries may have become -1.
            topk_weights: [num_tokens, num_topk] float32, contiguous.
            handle: of the dispatch; may be a plain tuple, and may be combined repeatedly.
                handle[0]: [num_local_experts, num_recv_rows] int32, contiguous.
                handle[1]: [num_local_experts, num_ranks] int64, contiguous.
            use_logfmt: send groups of 128 channels in a lossy 10-bit format where it fits.
            zero_copy: the rows are already in `get_next_low_latency_combine_buffer(handle)`.
            async_finish: do not make the current stream wait for the result.
            return_recv_hook: send only; the hook receives. Excludes `async_finish`.
            out: [num_tokens, hidden] bfloat16, contiguous; written and returned.
            combine_wait_recv_cost_stats: [num_ranks] or [num_ranks, num_ranks] int64, nanoseconds;
                waiting per source rank is added, to this rank's own row if there are rows.
            recv_counters: counters to use instead of `combine_counters`.

        Returns:
            combined_x: [num_tokens, hidden] bfloat16; the weighted sum, in float32 in the order of top-k,
                rounded once.
            event: to wait for, if `async_finish`; else its `.event` is `None`.
            hook: to be called once, if `return_recv_hook`; else `None`.

        Raises:
            EPArgumentError: an argument is not allowed (nothing was sent), or ranks passed different
                sizes; names them.
            EPTimeoutError: some ranks did not come; names them.
            EPTransportError: other ranks gave the operation up.

        Compatibility: same as DeepEP. Waiting times are nanoseconds, not clock cycles.
        """
        with self._lock:
            runtime = self._low_latency_runtime(checks.COMBINE)
            shape = checks.low_latency_combine(
                self._limits,
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
            if out is None:
                out = torch.empty(
                    (shape.num_tokens, shape.hidden),
                    dtype=torch.bfloat16,
                    device=self._limits.device,
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
                num_tokens=shape.num_tokens,
                hidden=shape.hidden,
                num_topk=shape.num_topk,
                num_max_dispatch_tokens_per_rank=shape.num_max_dispatch_tokens_per_rank,
                num_experts=shape.num_experts,
                use_logfmt=use_logfmt,
                zero_copy=zero_copy,
                wait_stats=_own_row(combine_wait_recv_cost_stats, self.rank),
                counters=counters.pointers() if counters else _NO_COUNTERS,
            )
            used = (
                *(x, topk_idx, topk_weights, src_info, layout_range),
                *(out, combine_wait_recv_cost_stats),
            )
            event, hook = self._launch(
                checks.COMBINE, run, (used, counters), async_finish, return_recv_hook
            )
        return out, event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Where the next combine with `zero_copy=True` takes its rows from.

        Call it after the dispatch and before the combine, with no other low-latency call between,
        and fill the valid rows.

        Args:
            handle: of the dispatch.

        Returns:
            [num_local_experts, num_recv_rows, hidden] bfloat16, a view; rows need not be adjacent.

        Raises:
            EPArgumentError: the handle does not fit this buffer.
        """
        where = "get_next_low_latency_combine_buffer"
        runtime = self._low_latency_mode_runtime(where)
        given = checks.unpack_handle(where, handle)
        maximum, hidden, num_experts = checks.sizes_that_fit(
            where,
            given.num_max_dispatch_tokens_per_rank,
            given.hidden,
            given.num_experts,
            self._limits,
        )
        pointer, stride_bytes = runtime.native.next_combine_buffer(
            num_max_dispatch_tokens_per_rank=maximum, hidden=hidden, num_experts=num_experts
        )
        item = torch.bfloat16.itemsize
        shape = (num_experts // self.group_size, self.group_size * maximum, hidden)
        num_bytes = (shape[0] * shape[1] - 1) * stride_bytes + hidden * item
        memory = self._backend.tensor_at(pointer, num_bytes, runtime.native).view(torch.bfloat16)
        stride = stride_bytes // item
        return memory.as_strided(shape, (shape[1] * stride, stride, 1))

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Prepares the RDMA buffer for low-latency calls after normal ones used it. Collective.

        Args:
            num_max_dispatch_tokens_per_rank: as in the calls to come.
            hidden: as in the calls to come.
            num_experts: as in the calls to come.

        Raises:
            EPArgumentError: calls of these sizes do not fit this buffer.
            EPTimeoutError: some ranks did not come; names them.
        """
        where = "clean_low_latency_buffer"
        with self._lock:
            runtime = self._low_latency_runtime(where)
            checks.sizes_that_fit(
                where, num_max_dispatch_tokens_per_rank, hidden, num_experts, self._limits
            )
            stream = self._backend.stream_handle(self._backend.current_stream())
            runtime.native.clean_low_latency_buffer(stream=stream)
            self._raise_failure(called=where)

    def _launch(
        self,
        name: str,
        run: Callable[..., None],
        kept: tuple[tuple[Tensor | None, ...], RecvCounters | None],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[EventOverlap, ReceiveHook | None]:
        """Runs a low-latency operation, or its send phase; `kept` lives until it is done."""
        for callback in self._before_operation:
            callback(name)
        back, binding = self._backend, self._backend.binding
        current = back.current_stream()
        if return_recv_hook:
            handle = back.stream_handle(current)
            run(phases=binding.PHASE_SEND, stream=handle)
            self._raise_failure()
            receive = functools.partial(run, phases=binding.PHASE_RECEIVE, stream=handle)
            self._pending_hook = ReceiveHook(self, name, receive, kept)
            return EventOverlap(), self._pending_hook
        comm = self._runtime(name).get_comm_stream()
        back.wait_stream(comm, current)
        phases = binding.PHASE_SEND | binding.PHASE_RECEIVE
        run(phases=phases, stream=back.stream_handle(comm))
        self._raise_failure()
        if async_finish:
            counters = (kept[1].totals, kept[1].own, kept[1].ring) if kept[1] else ()
            tensors = tuple(tensor for tensor in (*kept[0], *counters) if tensor is not None)
            return EventOverlap(EventHandle.on_stream(comm), tensors), None
        back.wait_stream(current, comm)
        return EventOverlap(), None

    def _raise_failure(self, called: str | None = None) -> None:
        """Raises what the runtime recorded, if it did; the buffer stays usable.

        Args:
            called: what the user called, where the runtime only knows it as a barrier.
        """
        failure = self.runtime.native.take_failure() if self.runtime is not None else None
        if failure is None:
            return
        if called is not None and failure["operation"] == "barrier":
            failure = {**failure, "operation": called}
        raise error_from_failure(failure, self.rank)

    def _runtime(self, where: str) -> Runtime:
        if self.runtime is None:
            checks.fail(where, "destroy() was called", "destroyed", EPUsageError)
        return self.runtime

    def _idle_runtime(self, where: str) -> Runtime:
        if self._pending_hook is not None:
            name = self._pending_hook.name
            got = f"the hook of {name} has not been called"
            checks.fail(where, got, "pending_hook", EPUsageError, pending=name)
        return self._runtime(where)

    def _low_latency_mode_runtime(self, where: str) -> Runtime:
        if not self.low_latency_mode:
            checks.fail(where, "low_latency_mode is False", "low_latency_mode", EPUsageError)
        return self._runtime(where)

    def _low_latency_runtime(self, where: str) -> Runtime:
        self._low_latency_mode_runtime(where)
        return self._idle_runtime(where)

    # ---- not in this version

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NoReturn:
        """Normal dispatch.

        Raises:
            EPUnsupportedError: always, in this version.
        """
        _unsupported("dispatch")

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NoReturn:
        """Normal combine.

        Raises:
            EPUnsupportedError: always, in this version.
        """
        _unsupported("combine")

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Normal dispatch between nodes.

        Raises:
            EPUnsupportedError: always, in this version.
        """
        _unsupported("internode_dispatch")

    def internode_combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Normal combine between nodes.

        Raises:
            EPUnsupportedError: always, in this version.
        """
        _unsupported("internode_combine")

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> NoReturn:
        """Masks a rank.

        Raises:
            EPUnsupportedError: always, in this version.
        """
        _unsupported("low_latency_update_mask_buffer")

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> NoReturn:
        """Reads which ranks are masked.

        Raises:
            EPUnsupportedError: always, in this version.
        """
        _unsupported("low_latency_query_mask_buffer")

    def low_latency_clean_mask_buffer(self) -> NoReturn:
        """Masks no rank.

        Raises:
            EPUnsupportedError: always, in this version.
        """
        _unsupported("low_latency_clean_mask_buffer")


def _unsupported(name: str) -> NoReturn:
    what = "masks" if "mask" in name else "normal kernels"
    raise EPUnsupportedError(
        f"{name}: this version has no {what}; low_latency_dispatch, low_latency_combine and "
        "get_dispatch_layout are there. Use those, or a version that lists it in CHANGELOG.md."
    )


def _new_scales(
    shape: Shape,
    use_ue8m0: bool,
    new: Callable[[tuple[int, ...], torch.dtype], Tensor],
) -> Tensor:
    """Scales `[num_local_experts, num_recv_rows, columns]` with stride 1 along rows."""
    columns = shape.hidden // checks.CHANNELS_PER_SCALE
    dtype = torch.float32
    if use_ue8m0:
        columns, dtype = -(-columns // 4), torch.int32
    size = (shape.num_local_experts, columns, shape.num_recv_rows)
    return new(size, dtype).transpose(1, 2)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _own_row(wait_stats: Tensor | None, rank: int) -> int:
    """Pointer of a wait tensor, or of this rank's row where it has rows."""
    if wait_stats is not None and wait_stats.dim() == 2:
        wait_stats = wait_stats[rank]
    return _pointer(wait_stats)
