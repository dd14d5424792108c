"""`Buffer`: the calls of one rank, what they take, return and raise. How they work is elsewhere.

construction.py connects the ranks into a communicator (communicator.py); on it run the normal operations
(normal.py), the layout of a dispatch (layout.py) and the low-latency operations (low_latency.py).
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Callable, NoReturn

import torch

from deep_ep.base import env
from deep_ep.base.group import as_group
from deep_ep.base.rules import COMBINE, DISPATCH, NORMAL_COMBINE, NORMAL_DISPATCH, fail
from deep_ep.checks import arguments as checks
from deep_ep.checks.calls import (
    DispatchLayout,
    LowLatencyCombine,
    LowLatencyDispatch,
    MaskQuery,
    NormalCombine,
    NormalDispatch,
)
from deep_ep.errors import EPUsageError
from deep_ep.native.runtime import Runtime
from deep_ep.observe import phases, profiled
from deep_ep.observe.counters import RecvCounters
from deep_ep.observe.phases import Phases
from deep_ep.ops import construction, layout, low_latency
from deep_ep.ops.communicator import NOTIFY, RELAY_COMBINE, RELAY_DISPATCH
from deep_ep.ops.construction import BufferSettings
from deep_ep.ops.low_latency import LowLatency
from deep_ep.ops.normal import Normal
from deep_ep.types import config
from deep_ep.types.config import Config
from deep_ep.types.event import EventHandle, EventOverlap
from deep_ep.types.handles import LowLatencyHandle

Tensor = torch.Tensor

# Custom operators take numbers and tensors only. No other buffer of the process gets the number of one.
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()


class Buffer:
    """Communication buffers of one rank, and the expert-parallel operations on them.

    Usable from several threads of a rank, one operation at a time, but not in a fork of its process.
    All operations but `get_dispatch_layout` are collective: every rank must call the same ones in
    the same order.

    Attributes:
        group: the group, or the communicator, it was built on.
        rank: this rank.
        group_size: number of ranks.
        num_nvl_bytes: size of the NVLink buffer, bytes.
        num_rdma_bytes: size of the RDMA buffer, bytes.
        low_latency_mode: whether low-latency operations are enabled.
        explicitly_destroy: whether `destroy()` is to be called.
        enable_shrink: whether ranks may be masked.
        nvshmem_qp_depth: depth of queue pairs, `NVSHMEM_QP_DEPTH`.
        runtime: the native runtime; `None` once destroyed.
        communicator: internal; what operations run on.
        normal: internal; the normal operations.
        number: of this buffer in its process, for operators that take numbers.
        dispatch_counters: what `low_latency_dispatch` counts, see `enable_counters`; or `None`.
        combine_counters: what `low_latency_combine` counts; or `None`.
        normal_dispatch_counters: what `dispatch` counts, by source of the rows; or `None`.
        normal_combine_counters: what `combine` counts, by the rank that the rows come from; or `None`.
        normal_notify_counters: what `dispatch` without a handle counts before rows travel, when ranks
            tell each other how many will come; or `None`.
        normal_relay_dispatch_counters: what `dispatch` counts of rows that this rank relays from other
            nodes, by the rank that it has them from; `None` on one node.
        normal_relay_combine_counters: the same for `combine`.
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
        comm: Any = None,
        *,
        use_fabric: bool = False,
        enable_shrink: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Connects the ranks of a group. Collective.

        Args:
            group: a `torch.distributed.ProcessGroup` of any backend, or a `deep_ep.group.Group`; used
                for object exchange only. `None` if `comm` is given.
            num_nvl_bytes: bytes for normal operations, a multiple of 128; see the hints of `Config`.
            num_rdma_bytes: bytes for low latency, and for normal operations between nodes; a multiple of
                128.
            low_latency_mode: enable the low-latency operations.
            num_qps_per_rank: queue pairs per peer; experts per rank for low latency.
            allow_nvlink_for_low_latency_mode: whether low latency may use NVLink. Results are equal.
            allow_mnnvl: use NVLink between hosts, through NVSHMEM; refused where it reaches no other
                host. Without effect on one host.
            explicitly_destroy: `destroy()` will be called; otherwise memory is released with the object.
            comm: an mpi4py communicator, used if `group` is `None`.
            use_fabric: as `allow_mnnvl`; the name some revisions of DeepEP use.
            enable_shrink: allow ranks to be masked, if there is an RDMA buffer; a rank that does not arrive in
                time is masked then. Rows are verified on arrival, as with `DEEP_EP_VERIFY=1`.
            timeout_s: how long an operation waits for other ranks, above 0; DEEP_EP_TIMEOUT_S unless given.

        Raises:
            EPArgumentError: an argument is not allowed, or ranks passed different ones; names them.
            EPNotBuiltError: the backend asked for is not available.
            EPTransportError: some rank could not allocate or connect; raised on all ranks.
            EPTimeoutError: some ranks did not come.

        Compatibility: any group size. Positional arguments are those of DeepEP v1.2.1, of which all revisions
            agree on seven; what it does not have is taken by name, here and in every method.
        """
        ranks = as_group(group, comm)
        is_low_latency, may_use_nvlink, is_mnnvl, is_fabric, may_shrink, is_explicit = checks.flags(
            "Buffer",
            low_latency_mode=low_latency_mode,
            allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
            allow_mnnvl=allow_mnnvl,
            use_fabric=use_fabric,
            enable_shrink=enable_shrink,
            explicitly_destroy=explicitly_destroy,
        )
        settings = BufferSettings(
            num_nvl_bytes,
            num_rdma_bytes,
            is_low_latency,
            num_qps_per_rank,
            may_use_nvlink,
            is_mnnvl or is_fabric,
            may_shrink,
            timeout_s,
        )
        agreed = construction.agree(ranks, settings)
        self.group = comm if group is None else group
        self.rank = ranks.rank
        self.group_size = ranks.size
        self.num_nvl_bytes = agreed.settings.num_nvl_bytes
        self.num_rdma_bytes = agreed.settings.num_rdma_bytes
        self.low_latency_mode = agreed.settings.low_latency_mode
        self.explicitly_destroy = is_explicit
        self.enable_shrink = agreed.settings.enable_shrink
        self.nvshmem_qp_depth = env.nvshmem_qp_depth()
        self.communicator = construction.connect(self, ranks, agreed)
        self._low_latency = LowLatency(self.communicator, self, self.low_latency_mode)
        self.normal = Normal(self.communicator)
        self.number = next(_numbers)
        _by_number[self.number] = self
        construction.start(self, agreed.settings.wait_s)

    @property
    def runtime(self) -> Runtime | None:
        return self.communicator.runtime

    # ---- end of life

    def destroy(self) -> None:
        """Releases all memory. Collective: waits for all ranks first, so that none still writes here.

        Local memory is released even if a rank is gone, or does not come within `DEEP_EP_TIMEOUT_S`; then a
        `RuntimeWarning` says so. On a GPU, what a rank that does not come may still write to is kept until the process
        ends. A second call does nothing.

        Raises:
            EPUsageError: the buffer was not built with `explicitly_destroy=True` (also an
                `AssertionError`), or this is a fork of the process that built it.
        """
        if not self.explicitly_destroy:
            fail("destroy", "explicitly_destroy is False", "not_explicit", EPUsageError)
        self.communicator.destroy()

    def set_hang_warning(self, seconds: float) -> None:
        """Changes how long this rank waits in an operation until one rank logs for whom and why.

        Args:
            seconds: at least 0; 0: shortly before it times out. DEEP_EP_WARN_S is what it is at first.

        Raises:
            EPArgumentError: that is no such number.
        """
        self.communicator.hangs.warn_after(checks.seconds("set_hang_warning", "seconds", seconds))

    def dump_state(self, directory: str | os.PathLike[str]) -> None:
        """Has rank 0 write what all ranks are doing into a folder, for `python -m deep_ep.diagnose hang`.

        Where rank 0 does not answer, the lowest rank that does writes them. Does not wait: the files are there about
        a second later. Any rank may call it, at any time, also while operations hang.

        Args:
            directory: on the host of that rank; is made if it is not there. A dump that lies there is replaced, so
                each buffer needs its own.
        """
        self.communicator.hangs.ask_for_dump(os.fspath(directory))

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        """This buffer: a copy of a module, as those of averaged weights, exchanges on it as the module does."""
        return self

    def __reduce__(self) -> NoReturn:
        fail("Buffer", "it is to be pickled, saved or copied", "pickled", EPUsageError)

    def __del__(self) -> None:
        # Memory goes with the native object, without any collective: nothing can keep an
        # interpreter from exiting, and views of the buffer stay valid as long as they live.
        if (
            getattr(self, "runtime", None) is not None
            and self.explicitly_destroy
            and not self.communicator.is_in_a_fork
        ):
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
        return low_latency.rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    def get_comm_stream(self) -> Any:
        """The stream operations run on: a `torch.cuda.Stream`, or an object of the cpu backend."""
        return self.communicator.connected_runtime("get_comm_stream").get_comm_stream()

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
        return self.communicator.local_buffer_tensor(dtype, size, offset, use_rdma_buffer)

    @staticmethod
    def _unpack_bias(bias: Any) -> tuple[Tensor | None, Tensor | None]:
        """The two biases of normal combine from `None`, a tensor, or a pair.

        Compatibility: a list counts as a tuple; DeepEP ignores it.
        """
        return checks.bias_pair(bias)

    # ---- counters and clocks

    @property
    def dispatch_counters(self) -> RecvCounters | None:
        return self.communicator.counters.get(DISPATCH)

    @property
    def combine_counters(self) -> RecvCounters | None:
        return self.communicator.counters.get(COMBINE)

    @property
    def normal_dispatch_counters(self) -> RecvCounters | None:
        return self.communicator.counters.get(NORMAL_DISPATCH)

    @property
    def normal_combine_counters(self) -> RecvCounters | None:
        return self.communicator.counters.get(NORMAL_COMBINE)

    @property
    def normal_notify_counters(self) -> RecvCounters | None:
        return self.communicator.counters.get(NOTIFY)

    @property
    def normal_relay_dispatch_counters(self) -> RecvCounters | None:
        return self.communicator.counters.get(RELAY_DISPATCH)

    @property
    def normal_relay_combine_counters(self) -> RecvCounters | None:
        return self.communicator.counters.get(RELAY_COMBINE)

    def enable_counters(self, ring: int = 256) -> None:
        """Counts every operation that is given no counters of its own, from now on.

        The counters are `dispatch_counters` and `combine_counters` of low latency, and those whose names
        begin with `normal_` if there is an NVLink buffer, which normal operations need. Calling it again
        keeps them, unless the ring changes. Layout and what `deep_ep.moe` does around the calls are stamped for
        `phases()`; on a GPU they and the calls are NVTX ranges.

        Args:
            ring: how many recent operations keep their raw times, and how many layouts and permutations.
        """
        self.communicator.enable_counters(ring)

    def disable_counters(self) -> None:
        """Counts no longer, and drops all counters."""
        self.communicator.disable_counters()

    def phases(self) -> Phases:
        """Where the time of this rank went in its recent operations, as many as the ring of its counters holds.

        Local; waits until the operations that were queued have ended. `DEEP_EP_PHASES=1` counts from the beginning, and
        logs the phases of rank 0 when the buffer ends.

        Returns:
            For each operation nanoseconds by phase, and for whom this rank waited; `print` shows a table.

        Raises:
            EPUsageError: nothing is counted; see `enable_counters`.
        """
        return phases.of(self)

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
        return self.communicator.measure_clock_offsets(samples)

    # ---- layout

    @profiled.part("layout")
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
            num_experts: experts in total, at most 4096.
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
        return layout.dispatch_layout(self.communicator, DispatchLayout(locals()))

    # ---- low latency

    @profiled.operator()
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
        *,
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
                [num_local_experts, num_recv_rows, ceil(hidden / 512)] int32, rows with stride 1. TMA descriptors of
                consumers need num_recv_rows % 4 == 0, and hidden % 512 == 0 with `use_ue8m0`; else it is logged once.
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
        return self._low_latency.dispatch(LowLatencyDispatch(locals()))

    @profiled.operator()
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
        *,
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
        return self._low_latency.combine(LowLatencyCombine(locals()))

    def abandon_hook(self) -> None:
        """Gives up the receive hooks that have not been called, so that the next call is allowed.

        What the hooks would have received is received, because the others have sent it, and dropped;
        the results must not be used. For programs that went on after an exception between a call
        and its hook. Where the program has lost the hook, the next call does this by itself and
        warns. Does nothing if no hook is pending.

        Raises:
            EPUsageError: this is a fork of the process that built the buffer.
            EPTimeoutError, EPArgumentError, EPTransportError: like the first of the hooks that fails; all of
                them are given up all the same.
        """
        self.communicator.abandon_hook()

    def raise_failure(self) -> None:
        """Raises what went wrong in the operations that have ended, unless a call has done so.

        On a GPU, calls return before their kernels have run. What an operation that fails there returned is undefined,
        and so is what later ones did until a call of this rank raises, which is the next one that finds it. Before
        results are used for what cannot be undone, as the step of an optimizer, wait for the stream, then ask.
        Without a failure it neither waits nor communicates.

        Raises:
            EPUsageError: this is a fork of the process that built the buffer, or it was destroyed.
            EPTimeoutError, EPArgumentError, EPTransportError: an operation failed.
        """
        communicator = self.communicator
        with communicator.lock:
            communicator.connected_runtime("raise_failure")
            communicator.raise_failure()

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
        return self._low_latency.next_combine_buffer(handle)

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
        self._low_latency.clean(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    # ---- normal mode

    @profiled.operator(is_combine=False)
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
        *,
        recv_counters: RecvCounters | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor],
        Tensor | None,
        Tensor | None,
        list[int] | None,
        tuple[Tensor, ...] | None,
        EventOverlap,
    ]:
        """Sends every token to the ranks of its experts, once to each. Collective.

        The host waits until it knows how many rows come, unless there is a handle or `num_worst_tokens`.

        Args:
            x: [num_tokens, hidden] of any dtype and strides, rows of a multiple of 16 bytes, `num_tokens` 0
                included; or a tuple of such data, of one byte per element, and its scales:
                x_scales: [num_tokens, num_scales] float32 or int32, of any strides, at most 255 per token.
            handle: of an earlier dispatch: sends to the same ranks again, with rows of any kind. Then the
                next six arguments are not used, and top-k tensors not allowed.
            num_tokens_per_rank: [num_ranks] int32, contiguous, like all that `get_dispatch_layout` returns.
            num_tokens_per_rdma_rank: [num_nodes] int32; not used on one node.
            is_token_in_rank: [num_tokens, num_ranks] bool.
            num_tokens_per_expert: [num_experts] int32, a multiple of the group size.
            topk_idx: [num_tokens, num_topk] int64, contiguous; at most 128 entries per token.
            topk_weights: [num_tokens, num_topk] float32, any strides; given if `topk_idx` is.
            expert_alignment: rows per expert are returned rounded up to multiples of it.
            num_worst_tokens: if above 0, allocate as many rows and do not wait for the number of rows;
                requires `topk_idx`. No more rows than these may come to this rank, for itself or to
                relay; the group size times the most tokens of a rank is always enough. A row takes `hidden`
                elements, its scales, 12 bytes an entry of `topk_idx`, and 4 (one node) or 8 + 4 * ranks per node.
            config: sizes of queues and number of channels; `get_dispatch_config` unless given. Equal on all
                ranks, with the `num_sms` of the dispatch that `handle` is of.
            previous_event: what to wait for instead of the current stream.
            async_finish: do not make the current stream wait for the result.
            allocate_on_comm_stream: allocate outputs on the comm stream, as is done with every
                `previous_event`; requires `previous_event` and `async_finish`.
            recv_counters: counters to use instead of `normal_dispatch_counters`.
            dispatch_wait_recv_cost_stats: [num_ranks] or [num_ranks, num_ranks] int64, nanoseconds;
                waiting per source rank is added, to this rank's own row if there are rows.

        Returns:
            recv_x: [num_recv_rows, hidden] like `x`, by source rank and then by source token; with scales
                the tuple of data and [num_recv_rows, num_scales], contiguous.
            recv_topk_idx: [num_recv_rows, num_topk] int64, number of the expert on this rank, or -1 where it
                is on another one; in all rows that `num_worst_tokens` allocates and nobody fills.
            recv_topk_weights: [num_recv_rows, num_topk] float32, 0 where `recv_topk_idx` is -1; undefined in
                rows that nobody fills.
            num_recv_tokens_per_expert_list: rows per expert of this rank, rounded up; empty with
                `num_worst_tokens`.
            handle: tuple of tensors for `combine` and later dispatches, see handles.py. It may be put
                together again from the same tensors, but not from copies.
            event: to wait for, if `async_finish`; else its `.event` is `None`.

            With a handle all but the first and the last are `None`, without `topk_idx` the second and third.

        Raises:
            EPArgumentError: an argument is not allowed (nothing was sent), ranks passed different ones, or
                more than `num_worst_tokens` rows come. What `num_worst_tokens` takes cannot be had (nothing was sent).
            EPUsageError: the arguments do not go together (also an `AssertionError`).
            EPUnsupportedError: nodes have different numbers of ranks.
            EPTimeoutError: some ranks did not come; names them.
            EPTransportError: other ranks gave the operation up.

        Compatibility: same as DeepEP, with any group size, row size and number of experts per rank, and
            with `num_worst_tokens` on several nodes too. A list serves as a tuple.
        """
        call = NormalDispatch(locals())
        if config is None:
            call.config = Buffer.get_dispatch_config(self.group_size)
        if handle is not None:
            received, event = self.normal.dispatch_again(call)
            return received.rows, None, None, None, None, event
        received, per_expert, new_handle, event = self.normal.dispatch(call)
        recv_topk = received.recv_topk_idx, received.recv_topk_weights
        return received.rows, *recv_topk, per_expert, tuple(new_handle), event

    @profiled.operator(is_combine=True)
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
        *,
        recv_counters: RecvCounters | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sends rows back to where they came from and adds them up, unweighted, per token. Collective.

        Args:
            x: [num_recv_rows, hidden] bfloat16, any strides; one row per row that the dispatch returned, in
                their order. `hidden` is a multiple of 8 and may differ from the dispatch's.
            handle: of the dispatch; may be combined repeatedly.
            topk_weights: [num_recv_rows, num_topk] float32, any strides; added up likewise, at most 128 per
                row.
            bias: added to the sums; a tensor, or a tuple of two of which each may be `None`.
                bias[0]: [num_tokens, hidden] bfloat16, any strides.
                bias[1]: [num_tokens, hidden] bfloat16, any strides.
            config: as in `dispatch`; `get_combine_config` unless given.
            previous_event: what to wait for instead of the current stream.
            async_finish: do not make the current stream wait for the result.
            allocate_on_comm_stream: as in `dispatch`.
            recv_counters: counters to use instead of `normal_combine_counters`.
            combine_wait_recv_cost_stats: [num_ranks] or [num_ranks, num_ranks] int64, nanoseconds;
                waiting per source rank is added, to this rank's own row if there are rows.

        Returns:
            combined_x: [num_tokens, hidden] bfloat16, the sum of the biases and of the token's rows on all
                ranks that it was sent to; zeros if there are none.
            combined_topk_weights: [num_tokens, num_topk] float32, the sum of the weights of these rows;
                `None` if none were given.
            event: to wait for, if `async_finish`; else its `.event` is `None`.

        Raises:
            EPArgumentError: an argument is not allowed (nothing was sent), or ranks passed different ones.
            EPUsageError: the handle's dispatch raised an error (also an `AssertionError`).
            EPUnsupportedError: nodes have different numbers of ranks.
            EPTimeoutError: some ranks did not come; names them.
            EPTransportError: other ranks gave the operation up.

        Compatibility: same as DeepEP. A list of biases serves as a tuple.
        """
        call = NormalCombine(locals())
        if config is None:
            call.config = Buffer.get_combine_config(self.group_size)
        return self.normal.combine(call)

    def internode_dispatch(
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
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        num_worst_tokens: int = 0,
        recv_counters: RecvCounters | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor],
        Tensor | None,
        Tensor | None,
        list[int] | None,
        tuple[Tensor, ...] | None,
        EventOverlap,
    ]:
        """`dispatch`, which goes between nodes as well. Collective.

        Args:
            config: must be given; the other arguments are those of `dispatch`.

        Raises:
            EPUsageError: `config` is `None` (also an `AssertionError`); else as `dispatch`.

        Compatibility: same as DeepEP; works on one node, too. Some revisions have `num_worst_tokens` in the place
            of `config`.
        """
        checks.given_config("internode_dispatch", config)
        return self.dispatch(**_without_self(locals()))

    def internode_combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        recv_counters: RecvCounters | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """`combine`, which goes between nodes as well. Collective.

        Args:
            config: must be given; the other arguments are those of `combine`.

        Raises:
            EPUsageError: `config` is `None` (also an `AssertionError`); else as `combine`.

        Compatibility: same as DeepEP; works on one node, too.
        """
        checks.given_config("internode_combine", config)
        return self.combine(**_without_self(locals()))

    # ---- masks

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or no longer. Local, in the order of the current stream; does not wait.

        A masked rank is neither sent to nor waited for by low-latency operations,
        `clean_low_latency_buffer` and `measure_clock_offsets` of this rank. docs/masks.md says what all
        ranks must do alike.

        Args:
            rank_to_mask: another rank; a rank cannot mask itself.
            mask: whether it is masked from now on.

        Raises:
            EPUsageError: the buffer was built without `enable_shrink` or RDMA buffer.
            EPArgumentError: there is no such rank, or it is this one.

        Compatibility: same as DeepEP, which lets a rank mask itself.
        """
        self.communicator.masks.update(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Copies which ranks are masked. Local, in the order of the current stream; does not wait.

        Args:
            mask_status: [num_ranks] int32, overwritten: 1 where the rank is masked, else 0.

        Raises:
            EPUsageError: the buffer was built without `enable_shrink` or RDMA buffer.
            EPArgumentError: another shape or dtype.

        Compatibility: same as DeepEP.
        """
        self.communicator.masks.query(MaskQuery(locals()))

    def low_latency_clean_mask_buffer(self) -> None:
        """Masks no rank any more. In the order of the current stream; does not wait.

        All ranks that are to go on together call it, those that were masked too: in its next operation, every
        rank waits until all others have called it, and all go on from the same number. A rank that does not
        come is masked again, after the timeout; one whose process has ended at once.

        Raises:
            EPUsageError: the buffer was built without `enable_shrink` or RDMA buffer.

        Compatibility: DeepEP only sets the masks to 0, so that a rank that was away must not come back.
        """
        self.communicator.masks.clean()

    def why_masked(self) -> dict[int, str]:
        """Which ranks are masked as far as the host knows, and why.

        Returns:
            By rank: that the program asked for it, or in which operation it did not arrive and what was
            found then: its process ended, is stopped or busy, or is elsewhere.

        Raises:
            EPUsageError: the buffer was built without `enable_shrink` or RDMA buffer.

        Compatibility: not in DeepEP.
        """
        return self.communicator.masks.why()


def numbered(number: int) -> Buffer:
    """The buffer with this number.

    Raises:
        EPUsageError: it is gone.
    """
    buffer = _by_number.get(number)
    if buffer is None:
        raise EPUsageError(
            f"deep_ep::moe: there is no buffer {number}; the compiled function was made for one that still "
            "exists. Keep the Buffer as long as the functions that use it, or compile them again."
        )
    return buffer


def _without_self(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "self"}
