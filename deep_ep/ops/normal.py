"""The normal operations: output tensors, the arguments of the kernels, launching.

A fresh dispatch goes in two steps. In the first one the ranks tell each other how many rows will come, so
that the host knows how much to allocate; in the second one the rows travel. A dispatch with a handle or
with num_worst_tokens, and a combine, know their sizes from the start and never make the host wait.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deep_ep.base.rules import NORMAL_COMBINE, NORMAL_DISPATCH, WORST_TOKENS_FIX, fail
from deep_ep.checks import normal as normal_checks
from deep_ep.checks.layouts import Layout
from deep_ep.checks.normal import NormalShape, Rows
from deep_ep.checks.queue_turns import QueueTurns
from deep_ep.errors import EPTransportError
from deep_ep.observe import parts
from deep_ep.observe.counters import RecvCounters
from deep_ep.ops import pointers
from deep_ep.ops.stream_order import StreamOrder
from deep_ep.types.bounds import memory
from deep_ep.types.handles import NormalHandle, new_handle

if TYPE_CHECKING:
    from deep_ep.native.runtime import Runtime
    from deep_ep.ops.communicator import Communicator
    from deep_ep.types.config import Config
    from deep_ep.types.event import EventOverlap

Tensor = torch.Tensor

# What num_worst_tokens may have allocated without a look at what is left, bytes.
_SMALL_BYTES = 1 << 26


class Streams(NamedTuple):
    """The arguments of a call that say what waits for what; see `StreamOrder`."""

    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool


@dataclass
class NormalCounters:
    """What normal operations count; `None` where nothing is counted. `Buffer` has each of them.

    Attributes:
        dispatch: of dispatches.
        combine: of combines.
        notify: of the first step of fresh dispatches.
        relay_dispatch: of what this rank relays in dispatches; only with several nodes.
        relay_combine: the same in combines.
    """

    dispatch: RecvCounters | None = None
    combine: RecvCounters | None = None
    notify: RecvCounters | None = None
    relay_dispatch: RecvCounters | None = None
    relay_combine: RecvCounters | None = None


class DispatchInputs(NamedTuple):
    """What a dispatch reads.

    Attributes:
        rows: of this rank's tokens.
        topk_idx: [num_tokens, num_topk] int64.
        topk_weights: [num_tokens, num_topk] float32.
    """

    rows: Rows
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None


class Received(NamedTuple):
    """What a dispatch writes, with one row per received row.

    Attributes:
        data: [num_recv_rows, hidden], of the dtype that was sent.
        scales: [num_recv_rows, num_scales], likewise.
        topk_idx: [num_recv_rows, num_topk] int64.
        topk_weights: [num_recv_rows, num_topk] float32.
        src_idx: [num_recv_rows] int32, source tokens; only in a fresh dispatch on one node.
        src_meta: [num_recv_rows, 2] int32, source nodes and tokens; only in a fresh one on several.
    """

    data: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None = None
    topk_weights: Tensor | None = None
    src_idx: Tensor | None = None
    src_meta: Tensor | None = None

    @property
    def rows(self) -> Tensor | tuple[Tensor, Tensor]:
        """As the rows were sent: with scales, if these had any."""
        return self.data if self.scales is None else (self.data, self.scales)


class Normal:
    """The normal operations of one buffer.

    Attributes:
        counters: used where a call is given none of its own.
    """

    def __init__(self, communicator: Communicator) -> None:
        """Does not communicate.

        Args:
            communicator: what they run on.
        """
        self.counters = NormalCounters()
        self._communicator = communicator
        self._place = communicator.connected_runtime("Buffer").topology
        self._turns = QueueTurns(communicator.limits, self._place)
        self._most_worst_bytes = _SMALL_BYTES  # that num_worst_tokens could have allocated

    def dispatch(
        self,
        x: Any,
        layout: Layout,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
        config: Config,
        streams: Streams,
        recv_counters: RecvCounters | None,
        wait_stats: Tensor | None,
    ) -> tuple[Received, list[int], tuple[Tensor, ...], EventOverlap]:
        """See `Buffer.dispatch`, without a handle.

        Returns:
            What was received, its rows per local expert, the handle, the event.
        """
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, NORMAL_DISPATCH):
            runtime = self._idle_runtime(NORMAL_DISPATCH)
            sent = DispatchInputs(Rows.of(x), topk_idx, topk_weights)
            shape = normal_checks.fresh_dispatch(
                *(communicator.limits, self._place, sent.rows, layout, topk_idx, topk_weights),
                *(expert_alignment, num_worst_tokens, config, wait_stats, recv_counters),
            )
            self._require_memory(shape, num_worst_tokens)
            order = self._order(NORMAL_DISPATCH, runtime, streams)
            with order.allocating():
                handle = self._new_handle(shape, layout)
                packs = self._packs(shape, shape.num_tokens)
            order.begin()
            with parts.marked(communicator, "notify"):
                runtime.native.normal_notify(
                    **self._common(shape, handle),
                    num_tokens_per_rank=pointers.of_tensor(layout.num_tokens_per_rank),
                    num_tokens_per_expert=pointers.of_tensor(layout.num_tokens_per_expert),
                    wait_stats=pointers.of_own_row(wait_stats, communicator.rank),
                    notify_counters=pointers.of_counters(self.counters.notify),
                    stream=order.handle,
                )
            order.reads(layout.num_tokens_per_rank, layout.num_tokens_per_expert)
            # This rank is in the operation now, and ends it whatever happens.
            allocated = None
            try:
                with parts.marked(communicator, "host"):
                    counts = self._counts(runtime, num_worst_tokens)
                if counts is not None:
                    num_recv, num_relayed, per_expert = counts
                    with order.allocating():
                        received = self._new_received(shape, sent, num_recv)
                        allocated = self._fill(handle, received, num_relayed), received
                        if num_worst_tokens and received.topk_idx is not None:
                            received.topk_idx.fill_(-1)
            except BaseException:
                self._abandon(runtime, shape, handle, order)
                runtime.native.take_failure()  # that this rank gave it up
                raise
            if allocated is None:
                self._abandon(runtime, shape, handle, order)
                communicator.raise_failure()
                raise EPTransportError(f"dispatch on rank {communicator.rank}: it was given up.")
            handle, received = allocated
            event = self._run_dispatch(
                *(runtime, shape, handle, order, sent, packs, received),
                *(recv_counters or self.counters.dispatch, wait_stats),
                is_fresh=True,
            )
            if num_worst_tokens:
                self._turns.forget_rows()
            self._turns.look(NORMAL_DISPATCH, shape, num_recv, num_relayed)
        aligned = [-(-rows // expert_alignment) * expert_alignment for rows in per_expert]
        return received, aligned, tuple(handle), event

    def dispatch_again(
        self,
        x: Any,
        handle: Any,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        config: Config,
        streams: Streams,
        recv_counters: RecvCounters | None,
        wait_stats: Tensor | None,
    ) -> tuple[Received, EventOverlap]:
        """See `Buffer.dispatch`, with a handle.

        Returns:
            What was received, the event.
        """
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, NORMAL_DISPATCH):
            runtime = self._idle_runtime(NORMAL_DISPATCH)
            sent = DispatchInputs(Rows.of(x))
            shape, given = normal_checks.cached_dispatch(
                *(communicator.limits, self._place, sent.rows, handle, topk_idx, topk_weights),
                *(config, wait_stats, recv_counters),
            )
            order = self._order(NORMAL_DISPATCH, runtime, streams)
            with order.allocating():
                received = self._new_received(shape, sent, given.num_rows)
                packs = self._packs(shape, shape.num_tokens)
            event = self._run_dispatch(
                *(runtime, shape, given, order, sent, packs, received),
                *(recv_counters or self.counters.dispatch, wait_stats),
                is_fresh=False,
            )
            self._turns.look(NORMAL_DISPATCH, shape, given.num_rows, given.num_relay_rows)
        return received, event

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None,
        biases: tuple[Tensor | None, Tensor | None],
        config: Config,
        streams: Streams,
        recv_counters: RecvCounters | None,
        wait_stats: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """See `Buffer.combine`."""
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, NORMAL_COMBINE):
            runtime = self._idle_runtime(NORMAL_COMBINE)
            shape, given = normal_checks.combine(
                *(communicator.limits, self._place, x, handle, topk_weights, biases),
                *(config, wait_stats, recv_counters),
            )
            order = self._order(NORMAL_COMBINE, runtime, streams)
            with order.allocating():
                combined_x = self._empty((shape.num_tokens, x.shape[1]), x.dtype)
                combined_weights = None
                if topk_weights is not None:
                    combined_weights = self._empty(
                        (shape.num_tokens, shape.num_topk), torch.float32
                    )
                packs = self._packs(shape, len(x))
            counters = recv_counters or self.counters.combine
            order.begin()
            rows, topk_weights, *biases_read = order.contiguous(x, topk_weights, *biases)
            runtime.native.normal_combine(
                **self._common(shape, given),
                **given.token_pointers(),
                x=pointers.of_tensor(rows),
                topk_weights=pointers.of_tensor(topk_weights),
                packs=packs.data_ptr(),
                bias_0=pointers.of_tensor(biases_read[0]),
                bias_1=pointers.of_tensor(biases_read[1]),
                combined_x=combined_x.data_ptr(),
                combined_topk_weights=pointers.of_tensor(combined_weights),
                num_rows=len(x),
                num_relay_rows=given.num_relay_rows,
                wait_stats=pointers.of_own_row(wait_stats, communicator.rank),
                counters=pointers.of_counters(counters),
                relay_counters=pointers.of_counters(self.counters.relay_combine),
                stream=order.handle,
            )
            event = order.finish(
                *(
                    rows,
                    topk_weights,
                    packs,
                    *biases_read,
                    combined_x,
                    combined_weights,
                    wait_stats,
                ),
                *given,
                *pointers.tensors_of(counters, self.counters.relay_combine),
            )
            communicator.raise_failure()
            self._turns.look(NORMAL_COMBINE, shape, given.num_rows, given.num_relay_rows)
        return combined_x, combined_weights, event

    def enable_counters(self, ring: int) -> None:
        """See `Buffer.enable_counters`."""
        communicator = self._communicator
        limits = communicator.limits
        with communicator.lock:
            for field in fields(NormalCounters):
                if field.name.startswith("relay") and self._place.num_nodes == 1:
                    continue
                counters = getattr(self.counters, field.name)
                if counters is None or counters.capacity != ring:
                    counters = RecvCounters(limits.num_ranks, ring, limits.device)
                    setattr(self.counters, field.name, counters)

    def disable_counters(self) -> None:
        """See `Buffer.disable_counters`."""
        with self._communicator.lock:
            self.counters = NormalCounters()

    # ---- steps of an operation

    def _idle_runtime(self, where: str) -> Runtime:
        runtime = self._communicator.idle_runtime(where)
        normal_checks.topology(where, self._place, self._communicator.limits.binding)
        self._communicator.masks.require_none(where)
        return runtime

    def _order(self, name: str, runtime: Runtime, streams: Streams) -> StreamOrder:
        """The streams of an operation, once all that must come before it has been queued."""
        communicator = self._communicator
        communicator.calling_stream(name)
        order = StreamOrder(name, communicator.backend, runtime.get_comm_stream(), *streams)
        communicator.receive_sent()
        for callback in communicator.before_operation:
            callback(name)
        return order

    def _require_memory(self, shape: NormalShape, num_worst_tokens: int) -> None:
        """Refuses what cannot be allocated. To ask what is left takes time, so what was there once is there again."""
        needed = normal_checks.worst_bytes(shape, self._place, num_worst_tokens)
        if needed > self._most_worst_bytes:
            got = f"num_worst_tokens is {num_worst_tokens}"
            memory(NORMAL_DISPATCH, got, needed, WORST_TOKENS_FIX)
            self._most_worst_bytes = needed

    def _counts(self, runtime: Runtime, num_worst_tokens: int) -> tuple[int, int, list[int]] | None:
        """Rows to be received, rows to be relayed, rows per local expert; `None` if ranks disagree.

        Raises:
            EPArgumentError: more than `num_worst_tokens`, if that is given.
        """
        is_relaying = self._place.num_nodes > 1
        worst = num_worst_tokens, num_worst_tokens if is_relaying else 0, list[int]()
        if num_worst_tokens and self._communicator.backend.runs_in_streams:
            return worst
        counts = runtime.native.normal_counts()
        if counts is None or not num_worst_tokens:
            return counts
        needed = max(counts[:2])
        if needed > num_worst_tokens:
            got = f"num_worst_tokens is {num_worst_tokens}"
            fail(NORMAL_DISPATCH, got, "worst_tokens", needed=needed)
        return worst

    def _run_dispatch(
        self,
        runtime: Runtime,
        shape: NormalShape,
        handle: NormalHandle,
        order: StreamOrder,
        sent: DispatchInputs,
        packs: Tensor,
        received: Received,
        counters: RecvCounters | None,
        wait_stats: Tensor | None,
        *,
        is_fresh: bool,
    ) -> EventOverlap:
        communicator = self._communicator
        notify = self.counters.notify if is_fresh else None
        order.begin()
        data, weights = order.contiguous(sent.rows.data, sent.topk_weights)
        assert data is not None
        scales = sent.rows.scales
        sent = DispatchInputs(Rows(data, scales), sent.topk_idx, weights)
        runtime.native.normal_dispatch(
            **self._common(shape, handle),
            **_pointers(sent, received),
            packs=packs.data_ptr(),
            scale_row_stride=0 if scales is None else scales.stride(0),
            scale_column_stride=0 if scales is None else scales.stride(1),
            num_recv_rows=handle.num_rows,
            num_relay_rows=handle.num_relay_rows,
            fresh=is_fresh,
            abandon=False,
            wait_stats=pointers.of_own_row(wait_stats, communicator.rank),
            counters=pointers.of_counters(counters),
            relay_counters=pointers.of_counters(self.counters.relay_dispatch),
            stream=order.handle,
        )
        event = order.finish(
            *(data, scales, sent.topk_idx, sent.topk_weights, packs, wait_stats),
            *received,
            *handle,
            *pointers.tensors_of(counters, self.counters.relay_dispatch, notify),
        )
        communicator.raise_failure()
        return event

    def _abandon(
        self, runtime: Runtime, shape: NormalShape, handle: NormalHandle, order: StreamOrder
    ) -> None:
        """Ends the operation that the first step of a dispatch began, so that the group meets again."""
        nothing = pointers.of_counters(None)
        runtime.native.normal_dispatch(
            **self._common(shape, handle),
            **dict.fromkeys(_SENT + _RECEIVED, 0),
            packs=0,
            scale_row_stride=0,
            scale_column_stride=0,
            num_recv_rows=0,
            num_relay_rows=0,
            fresh=True,
            abandon=True,
            wait_stats=0,
            counters=nothing,
            relay_counters=nothing,
            stream=order.handle,
        )
        runtime.get_comm_stream().synchronize()

    def _common(self, shape: NormalShape, handle: NormalHandle) -> dict[str, int]:
        """What all normal calls of the native runtime take."""
        return {**shape.keywords, **handle.pointers(self._communicator.rank)}

    # ---- memory

    def _empty(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        communicator = self._communicator
        return communicator.backend.empty(size, dtype, communicator.limits.device)

    def _packs(self, shape: NormalShape, num_rows: int) -> Tensor:
        """Scratch memory of the kernels, for what travels with each row."""
        binding = self._communicator.limits.binding
        num_bytes = binding.normal_pack_bytes(num_topk=shape.num_topk, num_scales=shape.num_scales)
        return self._empty((max(num_rows, 1) * num_bytes,), torch.uint8)

    def _new_handle(self, shape: NormalShape, layout: Layout) -> NormalHandle:
        """The handle of a fresh dispatch, without what has a row per received or relayed row."""
        assert layout.is_token_in_rank is not None
        return new_handle(self._place, shape.num_channels, layout.is_token_in_rank, self._empty)

    def _fill(self, handle: NormalHandle, received: Received, num_relayed: int) -> NormalHandle:
        """The handle with a row per received and relayed row."""
        num_sent = len(handle.is_token_in_rank) + num_relayed
        nvl_head = self._empty((num_sent, self._place.ranks_per_node), torch.int32).fill_(-1)
        sources = received.src_idx
        if sources is None:
            assert received.src_meta is not None
            sources = received.src_meta.view(torch.uint8)
        return handle.with_rows(sources, nvl_head)

    def _new_received(self, shape: NormalShape, sent: DispatchInputs, num_rows: int) -> Received:
        """Memory for the rows of a dispatch; where they come from is written by a fresh one."""
        data, scales = sent.rows
        is_fresh = shape.num_experts > 0
        num_topk, num_scales = shape.num_topk, shape.num_scales
        is_one_node = self._place.num_nodes == 1
        has_topk = sent.topk_idx is not None
        return Received(
            data=self._empty((num_rows, data.shape[1]), data.dtype),
            scales=None if scales is None else self._empty((num_rows, num_scales), scales.dtype),
            topk_idx=self._empty((num_rows, num_topk), torch.int64) if has_topk else None,
            topk_weights=self._empty((num_rows, num_topk), torch.float32) if has_topk else None,
            src_idx=self._empty((num_rows,), torch.int32) if is_fresh and is_one_node else None,
            src_meta=self._empty((num_rows, 2), torch.int32)
            if is_fresh and not is_one_node
            else None,
        )


_SENT = ("x", "scales", "topk_idx", "topk_weights")
_RECEIVED = tuple(
    f"recv_{name}" for name in ("x", "scales", "topk_idx", "topk_weights", "src_idx", "src_meta")
)


def _pointers(sent: DispatchInputs, received: Received) -> dict[str, int]:
    """The tensors of a dispatch as the native runtime takes them."""
    tensors = (*sent.rows, sent.topk_idx, sent.topk_weights)
    named = zip(_SENT + _RECEIVED, (*tensors, *received))
    return {name: pointers.of_tensor(tensor) for name, tensor in named}
