"""`ElasticBuffer`: DeepEP V2's calls, what they take, return and raise. How they work is in dispatch.py and combine.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NoReturn

import torch

from deep_ep.base.rules import fail
from deep_ep.buffer import Buffer
from deep_ep.checks import arguments as checks
from deep_ep.checks import elastic as elastic_checks
from deep_ep.checks.calls import ElasticCall, ElasticCombine, ElasticDispatch
from deep_ep.elastic import combine as combining
from deep_ep.elastic import dispatch as dispatching
from deep_ep.elastic import domains
from deep_ep.elastic.dispatch import Setting
from deep_ep.elastic.handle import EPHandle
from deep_ep.elastic.streams import CallStreams
from deep_ep.errors import EPError, EPUsageError
from deep_ep.observe import profiled
from deep_ep.observe.counters import RecvCounters
from deep_ep.ops.communicator import Communicator
from deep_ep.types.config import Config, recommended_combine, recommended_dispatch
from deep_ep.types.event import EventHandle, EventOverlap

Tensor = torch.Tensor

_NAME = "ElasticBuffer"
# Of the host and of the device, unless the caller says otherwise.
_TIMEOUTS_S = (300, 100)
# Queue pairs per peer, as `Buffer` has them.
_NUM_QPS = 24


def _sizes(num_cpu_bytes: Any, **given: Any) -> dict[str, int]:
    """Arguments of the constructor that are numbers of at least 0."""
    if checks.not_negative_int(_NAME, "num_cpu_bytes", num_cpu_bytes):
        elastic_checks.unsupported(_NAME, "num_cpu_bytes, of Engram,")
    return {name: checks.not_negative_int(_NAME, name, value) for name, value in given.items()}


class _Absent:
    """A method that only says that it is not there."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Callable[..., NoReturn]:
        name, what = self._name, self._what

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            elastic_checks.unsupported(name, what)

        return refuse


class ElasticBuffer:
    """Expert-parallel dispatch and combine of DeepEP V2, on the normal kernels of `Buffer`.

    Usable from several threads of a rank, one operation at a time, but not in a fork of its process. Dispatch, combine and
    barrier are collective: every rank must call the same ones in the same order.

    Attributes:
        group: the process group, or `deep_ep.group.Group`, it was built on.
        rank_idx: this rank.
        num_ranks: size of the group.
        buffer: the `Buffer` that operations run on: what `deep_ep.diagnose` takes, with counters, phases and dumps.
        communicator: internal; what operations run on.
        num_bytes: size of the buffers, bytes.
        num_max_tokens_per_rank: of calls that do not say.
        allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute, deterministic, explicitly_destroy: as given.
        num_allocated_qps: queue pairs.
        num_scaleout_ranks, num_scaleup_ranks: logical domain sizes.
        scaleout_rank_idx, scaleup_rank_idx: place of this rank in them.
        num_rdma_ranks, num_nvlink_ranks: physical domain sizes.
        nccl_comm_handle: 0, since no communicator of NCCL is used.

    Compatibility: DeepEP V2 (2.1.0). Rows are always in order, so `deterministic` changes nothing. Engram, PP and AGRS are
        not there.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = _TIMEOUTS_S[0],
        num_gpu_timeout_secs: float = _TIMEOUTS_S[1],
        explicitly_destroy: bool = False,
    ) -> None:
        """Connects the ranks of a group. Collective.

        Args:
            group: a `torch.distributed.ProcessGroup` of any backend, or a `deep_ep.group.Group`; used for object exchange
                only.
            num_bytes: size of the buffers, a multiple of 2 MiB; what `get_buffer_size_hint` returns unless given.
            num_cpu_bytes: must be 0; what it is for upstream (Engram) is not there.
            num_max_tokens_per_rank: most tokens that a rank dispatches, for calls that do not say. The size does not
                depend on it, so calls may have more.
            hidden: channels of a row.
            num_topk: picks of a token; 32 unless given.
            use_fp8_dispatch: accepted; rows of two bytes a channel fit in any case, which combine needs.
            deterministic: accepted; rows come in order without it.
            allow_hybrid_mode: whether sums may be made node by node.
            allow_multiple_reduction: whether sums may be rounded before they are sent.
            prefer_overlap_with_compute: kept for the caller to read.
            sl_idx: accepted; NVSHMEM_IB_SL sets the service level.
            num_allocated_qps: queue pairs per peer between nodes; 24 unless given.
            num_cpu_timeout_secs: how long the host waits for other ranks, seconds.
            num_gpu_timeout_secs: how long an operation does. The smaller of the two ends an operation, with the names of
                the missing ranks; DEEP_EP_TIMEOUT_S counts where both are as by default.
            explicitly_destroy: `destroy()` will be called; otherwise memory is released with the object, by this rank
                alone.

        Raises:
            EPArgumentError: an argument is not allowed, or ranks passed different ones; names them.
            EPUnsupportedError: `num_cpu_bytes` is above 0.
            EPTransportError: some rank could not allocate or connect; raised on all ranks.
            EPTimeoutError: some ranks did not come.
        """
        try:
            sizes = _sizes(
                num_cpu_bytes=num_cpu_bytes,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                num_allocated_qps=num_allocated_qps,
            )
            flags = checks.flags(
                _NAME,
                deterministic=deterministic,
                allow_hybrid_mode=allow_hybrid_mode,
                allow_multiple_reduction=allow_multiple_reduction,
                prefer_overlap_with_compute=prefer_overlap_with_compute,
                explicitly_destroy=explicitly_destroy,
            )
            timeouts = (
                checks.timeout(_NAME, "num_cpu_timeout_secs", num_cpu_timeout_secs),
                checks.timeout(_NAME, "num_gpu_timeout_secs", num_gpu_timeout_secs),
            )
        except EPError as error:
            domains.meet_in(group, {}, error)  # so that all ranks raise
            raise
        self.deterministic, self.allow_hybrid_mode, self.allow_multiple_reduction, *rest = flags
        self.prefer_overlap_with_compute, self.explicitly_destroy = rest
        agreed = {
            **sizes,
            "num_bytes": num_bytes,
            "allow_hybrid_mode": self.allow_hybrid_mode,
            "allow_multiple_reduction": self.allow_multiple_reduction,
            "Buffer.num_sms": Buffer.num_sms,
        }
        self._place = place = domains.meet_in(group, agreed)
        self._most_sms = Buffer.num_sms
        self.num_max_tokens_per_rank = sizes["num_max_tokens_per_rank"]
        memory = domains.sized(
            *(place, self._most_sms, num_bytes, self.num_max_tokens_per_rank),
            *(sizes["hidden"], sizes["num_topk"]),
        )
        self.num_allocated_qps = sizes["num_allocated_qps"] or max(_NUM_QPS, self._most_sms)
        self.buffer = Buffer(
            group,
            memory.nvl,
            memory.rdma,
            num_qps_per_rank=self.num_allocated_qps,
            explicitly_destroy=self.explicitly_destroy,
            timeout_s=None if timeouts == _TIMEOUTS_S else min(timeouts),
        )
        self.group = group
        self.rank_idx, self.num_ranks = place.rank, place.num_ranks
        self.num_bytes = memory.total
        self.nccl_comm_handle = 0
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(place.rank, self.num_scaleup_ranks)
        self._setting = Setting(self.buffer, self.num_scaleout_ranks, self.allow_multiple_reduction)

    # ---- what it is

    @property
    def communicator(self) -> Communicator:
        return self.buffer.communicator

    @property
    def rank(self) -> int:
        """This rank, as `Buffer` calls it."""
        return self.rank_idx

    @property
    def group_size(self) -> int:
        """Size of the group, as `Buffer` calls it."""
        return self.num_ranks

    @property
    def runtime(self) -> Any:
        """The native runtime; `None` once destroyed."""
        return self.buffer.runtime

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Number of nodes, and ranks of a node."""
        return domains.physical(self._place)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Scale-out and scale-up ranks: the physical domain sizes, or (1, number of ranks) without hybrid mode."""
        return domains.logical(self._place, self.allow_hybrid_mode)

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that the constructor allocates with the same arguments. Collective when a group is first asked for.

        Args:
            group: as the constructor takes it.
            num_max_tokens_per_rank: above 0; the size does not depend on it, because rows pass through queues.
            hidden: channels of a row, above 0.
            num_topk: picks of a token; 32 unless given.
            use_fp8_dispatch: as in the constructor, like the rest.
            allow_hybrid_mode: likewise.
            allow_multiple_reduction: likewise.

        Returns:
            A multiple of 2 MiB.

        Raises:
            EPArgumentError: a size is not allowed.
        """
        where = "get_buffer_size_hint"
        tokens = checks.positive_int(where, "num_max_tokens_per_rank", num_max_tokens_per_rank)
        hidden = checks.positive_int(where, "hidden", hidden)
        num_topk = checks.not_negative_int(where, "num_topk", num_topk)
        place = domains.place_in(group)
        return domains.sized(place, Buffer.num_sms, None, tokens, hidden, num_topk).total

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs that a call uses which does not say how many, and the most that any call uses.

        Args:
            num_experts: not looked at, like the rest: `Buffer.num_sms` when this buffer was built is what counts.
            num_topk: likewise.
            num_scaleout_topk: likewise.
            rdma_gbs: likewise.
            nvlink_gbs: likewise.
            sm_read_gbs: likewise.
            sm_write_gbs: likewise.

        Compatibility: DeepEP V2 has a model of bandwidths, which asks `nvidia-smi` and `ibstat`.
        """
        return self._most_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs per peer that a call of so many SMs uses: one per channel of two SMs.

        Args:
            num_sms: of the call.
        """
        asked = checks.not_negative_int("get_theoretical_num_qps", "num_sms", num_sms)
        channels = max(1, min(asked, self._most_sms) // 2)
        return min(channels, self.num_allocated_qps)

    @staticmethod
    def capture() -> EventHandle:
        """An event after everything queued on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream operations run on: a `torch.cuda.Stream`, or an object of the cpu backend."""
        return self.buffer.get_comm_stream()

    # ---- operations

    @profiled.operator()
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool | None = None,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        *,
        expert_capacity: int | None = None,
        recv_counters: RecvCounters | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, EPHandle, EventOverlap
    ]:
        """Sends every token to the ranks of its experts, once to each. Collective.

        Args:
            x: [num_tokens, hidden] of any dtype and strides, rows of a multiple of 16 bytes, `num_tokens` 0 included; or a
                tuple of such data and its scales:
                x_scales: [num_tokens, num_scales] float32 or int32, of any strides.
            topk_idx: [num_tokens, num_topk] int64, contiguous, global experts or -1. Not with a handle.
            topk_weights: [num_tokens, num_topk] float32, any strides, or `None`.
            cumulative_local_expert_recv_stats: [num_local_experts] int32; picks received are added. Not with a handle.
            num_experts: in total, a multiple of the group size; needed without a handle.
            num_max_tokens_per_rank: most tokens that any rank has in this call, equal on all ranks.
            expert_alignment: rows of an expert are counted, and expanded begin, at multiples of it; 1 unless given.
            num_sms: as many are used, at most as many as `get_theoretical_num_sms` says, which is the default.
            num_qps: accepted.
            previous_event: what to wait for instead of the current stream; requires `allocate_on_comm_stream`.
            previous_event_before_epilogue: what the local part behind the communication waits for as well.
            async_with_compute_stream: do not make the current stream wait for the result.
            allocate_on_comm_stream: the call runs, and allocates, on the comm stream as a whole.
            handle: of an earlier dispatch: every row goes to the same place again, of any dtype and size.
            do_handle_copy: whether the handle has a copy of `topk_idx`, or the tensor itself, which must then stay as it is.
            do_cpu_sync: whether the host waits for the number of rows; True unless given, without a handle.
            do_expand: one row for each pick, by expert, instead of one for each token and rank; as in the dispatch of the
                handle unless given.
            do_zero_padding: zeros where expanded rows are padded.
            use_tma_aligned_col_major_sf: received scales lie by columns, which begin at multiples of 16 bytes.
            expert_capacity: expanded rows of each local expert begin at multiples of it, whatever comes, so that
                `recv_x.view(num_local_experts, expert_capacity, hidden)` is what a masked grouped GEMM takes, with
                `handle.num_unaligned_recv_tokens_per_expert`. Without `do_cpu_sync` at least the group size times
                `num_max_tokens_per_rank`.
            recv_counters: counters to use instead of `buffer.normal_dispatch_counters`.
            dispatch_wait_recv_cost_stats: [num_ranks] or [num_ranks, num_ranks] int64, nanoseconds; waiting per source rank
                is added, to this rank's own row if there are rows.

        Returns:
            recv_x: [num_rows, hidden] like `x`; with scales the tuple of data and [num_rows, num_scales]. Compact: by
                source rank and then by token. Expanded: by expert, and then likewise. `num_rows` is what comes, or without
                `do_cpu_sync` the most that can come.
            recv_topk_idx: [num_rows, num_topk] int64, number of the expert on this rank, or -1 where it is on another one
                and in rows that nobody fills; `None` if expanded.
            recv_topk_weights: [num_rows, num_topk] float32, 0 where `recv_topk_idx` is -1; expanded [num_rows], 0 where
                there is no pick; `None` if none were given.
            handle: for `combine` and later dispatches; with a handle the same object.
            event: to wait for, if `async_with_compute_stream`; else its `.event` is `None`.

        Raises:
            EPArgumentError: an argument is not allowed (nothing was sent), or ranks passed different ones.
            EPUsageError: the arguments do not go together (also an `AssertionError`).
            EPTimeoutError: some ranks did not come; names them.
            EPTransportError: other ranks gave the operation up.

        Compatibility: same as DeepEP V2, which has the rows within a source, or an expert, in any order, and leaves what
            nobody fills undefined.
        """
        call = ElasticDispatch(locals())
        limits = self.communicator.limits
        previous, before_epilogue = elastic_checks.streams(call)
        if handle is None:
            elastic_checks.fresh_dispatch(call, limits, self.num_max_tokens_per_rank)
            num_topk = call.topk_idx.shape[1]
        else:
            elastic_checks.handle_of(call, handle, EPHandle, self.buffer.number)
            elastic_checks.cached_dispatch(call, limits, handle)
            num_topk = handle.topk_idx.shape[1]
        config = recommended_dispatch(self.num_ranks, self._num_sms(call, handle))
        num_scales = 0 if call.x_scales is None else call.x_scales.shape[1]
        row_bytes = call.x.shape[1] * call.x.element_size()
        self._require_size(call, (row_bytes, num_topk, num_scales + num_topk), config)
        with self.communicator.lock:
            streams = CallStreams(call, self.communicator, previous, before_epilogue)
            stats = call.cumulative_local_expert_recv_stats
            inputs = call.x, call.x_scales, topk_idx, topk_weights, stats
            with streams.running(inputs, handle):
                if handle is None:
                    outputs, handle = dispatching.fresh(self._setting, call, config, streams)
                else:
                    outputs = dispatching.cached(self._setting, call, handle, config, streams)
            event = streams.finish(*outputs, *handle.tensors())
        recv_x = outputs.x if outputs.scales is None else (outputs.x, outputs.scales)
        return recv_x, outputs.topk_idx, outputs.topk_weights, handle, event

    @profiled.operator()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | Sequence[Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        recv_counters: RecvCounters | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sends rows back to where they came from and adds them up, unweighted, per token. Collective.

        Args:
            x: [num_rows, hidden] bfloat16, any strides, one row in the place of each row that the dispatch returned. `hidden`
                is a multiple of 8. Of expanded rows the padding is not looked at, and may be missing at the end.
            handle: of the dispatch; may be combined repeatedly.
            topk_weights: [num_rows, num_topk] or [num_rows] float32, compact or expanded, any strides; they go back to
                their picks.
            bias: added to the sums; a tensor, or two of which each may be `None`.
                bias[0]: [num_tokens, hidden] bfloat16, any strides.
                bias[1]: [num_tokens, hidden] bfloat16, any strides.
            num_sms: as in `dispatch`; as many as there unless given.
            num_qps: accepted.
            previous_event: as in `dispatch`, like the rest.
            previous_event_before_epilogue: likewise.
            async_with_compute_stream: likewise.
            allocate_on_comm_stream: likewise.
            recv_counters: counters to use instead of `buffer.normal_combine_counters`.
            combine_wait_recv_cost_stats: [num_ranks] or [num_ranks, num_ranks] int64, nanoseconds; waiting per source rank
                is added, to this rank's own row if there are rows.

        Returns:
            combined_x: [num_tokens, hidden] bfloat16, the sum of the biases and of the token's rows, in the order of its
                picks; zeros if there are none. How often it is rounded on the way, `allow_hybrid_mode` and
                `allow_multiple_reduction` say.
            combined_topk_weights: [num_tokens, num_topk] float32, what the rank of each pick passed for it, 0 for -1; `None`
                if none were given.
            event: to wait for, if `async_with_compute_stream`; else its `.event` is `None`.

        Raises:
            EPArgumentError: an argument is not allowed (nothing was sent), or ranks passed different ones.
            EPUsageError: the arguments do not go together (also an `AssertionError`).
            EPTimeoutError: some ranks did not come; names them.
            EPTransportError: other ranks gave the operation up.

        Compatibility: same as DeepEP V2; expanded weights need no `allow_multiple_reduction`, and a list of biases is taken.
        """
        call = ElasticCombine(locals())
        limits = self.communicator.limits
        previous, before_epilogue = elastic_checks.streams(call)
        elastic_checks.handle_of(call, handle, EPHandle, self.buffer.number)
        elastic_checks.combine(call, limits, handle)
        config = recommended_combine(self.num_ranks, self._num_sms(call, handle))
        num_topk = handle.topk_idx.shape[1]
        self._require_size(call, (x.shape[1] * x.element_size(), num_topk, 0), config)
        with self.communicator.lock:
            streams = CallStreams(call, self.communicator, previous, before_epilogue)
            with streams.running((x, topk_weights, *call.bias), handle):
                combined, weights = combining.combine(self._setting, call, handle, config, streams)
            event = streams.finish(combined, weights)
        return combined, weights, event

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Waits for all ranks, in the order of the current stream. Collective.

        Args:
            use_comm_stream: accepted; the barrier is ordered with the current stream in any case.
            with_cpu_sync: whether the host waits for the device before and after it.
            sequential: accepted; all ranks tell all others.

        Raises:
            EPTimeoutError: some ranks did not come; names them.
        """
        _, waits, _ = checks.flags(
            "barrier",
            use_comm_stream=use_comm_stream,
            with_cpu_sync=with_cpu_sync,
            sequential=sequential,
        )
        back = self.communicator.backend
        if waits:
            back.synchronize()
        self.communicator.barrier()
        if waits:
            back.synchronize()

    # ---- end of life

    def destroy(self) -> None:
        """Releases all memory. Collective: waits for all ranks first. A second call does nothing.

        Raises:
            EPUsageError: the buffer was not built with `explicitly_destroy=True` (also an `AssertionError`), or this is a
                fork of the process that built it.
        """
        if not self.explicitly_destroy:
            fail("destroy", "explicitly_destroy is False", "not_explicit", EPUsageError)
        self.buffer.destroy()

    # ---- steps of a call

    def _num_sms(self, call: ElasticCall, handle: EPHandle | None) -> int:
        asked = elastic_checks.num_sms(call, self._most_sms)
        # What is in a handle is by channel.
        return asked if handle is None else handle.num_sms

    def _require_size(self, call: ElasticCall, shape: tuple[int, int, int], config: Config) -> None:
        limits = self.communicator.limits
        elastic_checks.buffer_size(call.name, shape, config, self._place, limits)

    # ---- what is not there

    get_engram_storage_size_hint = _Absent("Engram")
    engram_write = _Absent("Engram")
    engram_fetch = _Absent("Engram")
    get_pp_buffer_size_hint = _Absent("the ring of pipeline stages")
    pp_set_config = _Absent("the ring of pipeline stages")
    pp_send = _Absent("the ring of pipeline stages")
    pp_recv = _Absent("the ring of pipeline stages")
    get_agrs_num_max_session_bytes = _Absent("AGRS")
    get_agrs_buffer_size_hint = _Absent("AGRS")
    agrs_set_config = _Absent("AGRS")
    create_agrs_session = _Absent("AGRS")
    destroy_agrs_session = _Absent("AGRS")
    agrs_new_session = _Absent("AGRS")
    agrs_get_inplace_tensor = _Absent("AGRS")
    all_gather = _Absent("AGRS")
