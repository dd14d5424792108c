"""The normal operations: output tensors, the arguments of the kernels, launching.

A fresh dispatch goes in two steps. In the first one the ranks tell each other how many rows will come, so
that the host knows how much to allocate; in the second one the rows travel. A dispatch with a handle or
with num_worst_tokens, and a combine, know their sizes from the start and never make the host wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deep_ep.base.rules import NORMAL_COMBINE, NORMAL_DISPATCH, WORST_TOKENS_FIX, fail
from deep_ep.checks import normal as normal_checks
from deep_ep.checks.normal import NormalShape
from deep_ep.errors import EPTransportError
from deep_ep.observe import parts
from deep_ep.ops import pointers
from deep_ep.ops.communicator import NOTIFY, RELAY_COMBINE, RELAY_DISPATCH
from deep_ep.ops.stream_order import StreamOrder
from deep_ep.types.bounds import memory
from deep_ep.types.handles import NormalHandle, new_handle

if TYPE_CHECKING:
    from deep_ep.checks.calls import NormalCombine, NormalDispatch
    from deep_ep.native.runtime import Runtime
    from deep_ep.observe.counters import RecvCounters
    from deep_ep.ops.communicator import Communicator
    from deep_ep.types.event import EventOverlap

Tensor = torch.Tensor

# What num_worst_tokens may have allocated without a look at what is left, bytes.
_SMALL_BYTES = 1 << 26


class Received(NamedTuple):
    """What a dispatch writes, with one row per received row; by the names of the native runtime.

    Attributes:
        recv_x: [num_recv_rows, hidden], of the dtype that was sent.
        recv_scales: [num_recv_rows, num_scales], likewise.
        recv_topk_idx: [num_recv_rows, num_topk] int64.
        recv_topk_weights: [num_recv_rows, num_topk] float32.
        relay_topk_idx: [num_relay_rows, num_topk] int32, global experts of the rows that this rank relays; only where a
            fresh dispatch keeps them.
    """

    recv_x: Tensor | None = None
    recv_scales: Tensor | None = None
    recv_topk_idx: Tensor | None = None
    recv_topk_weights: Tensor | None = None
    relay_topk_idx: Tensor | None = None

    @property
    def rows(self) -> Any:
        """As the rows were sent: with scales, if these had any."""
        return self.recv_x if self.recv_scales is None else (self.recv_x, self.recv_scales)


# Of a dispatch, by the names of the native runtime.
_NO_TENSORS: dict[str, Tensor | None] = dict.fromkeys(
    ("x", "scales", "topk_idx", "topk_weights", "packs", "wait_stats", *Received._fields)
)


class CombineOrder(NamedTuple):
    """In which order a combine adds up the rows of a token, if not by rank.

    A rank stands where the last column of the token names one of its experts; columns ascend. On several nodes the ranks
    of each are added up like that, and rounded; then the nodes, each of which stands where the last column names one of
    its experts. Entries that are no experts are skipped; rows of a rank or node that no column names are not added.

    Attributes:
        topk_idx: [num_tokens, num_topk] int64, contiguous, of the tokens of the dispatch; global experts, -1 for none.
        experts_per_rank: how many each rank has.
        relay_topk_idx: as the dispatch kept them, see `Received`; needed on several nodes.
    """

    topk_idx: Tensor
    experts_per_rank: int
    relay_topk_idx: Tensor | None = None

    def check(self, num_tokens: int, num_relay_rows: int) -> None:
        """The kernel reads as many rows of either as the handle says.

        Raises:
            EPArgumentError: there are others.
        """
        size = (num_tokens, *self.topk_idx.shape[1:])
        if self.topk_idx.shape != size or self.topk_idx.dim() != 2:
            got = f"topk_idx of the handle is {list(self.topk_idx.shape)}"
            fail(NORMAL_COMBINE, got, "order", num_rows=num_tokens)
        relayed = self.relay_topk_idx
        if num_relay_rows and (relayed is None or relayed.shape != (num_relay_rows, size[1])):
            got = f"what is known of relayed tokens is {relayed if relayed is None else list(relayed.shape)}"
            fail(NORMAL_COMBINE, got, "order", num_rows=num_relay_rows)


class Normal:
    """The normal operations of one buffer."""

    def __init__(self, communicator: Communicator) -> None:
        """Does not communicate. The operations run on `communicator`."""
        self._communicator = communicator
        self._place = communicator.connected_runtime("Buffer").topology
        self._most_worst_bytes = _SMALL_BYTES  # that num_worst_tokens could have allocated

    def dispatch(
        self, call: NormalDispatch, *, most_tokens: int = -1, keeps_experts: bool = False
    ) -> tuple[Received, list[int], NormalHandle, EventOverlap]:
        """See `Buffer.dispatch`, without a handle.

        Args:
            call: what it takes.
            most_tokens: that a rank may have, as all ranks must have been told; -1: they need not.
            keeps_experts: whether to keep what a `CombineOrder` needs to know of rows that this rank relays.

        Returns:
            What was received, its rows per local expert, the handle, the event.
        """
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, NORMAL_DISPATCH):
            runtime = self._idle_runtime(NORMAL_DISPATCH)
            shape = normal_checks.fresh_dispatch(communicator.limits, self._place, call)
            num_worst_tokens = call.num_worst_tokens
            self._require_memory(shape, num_worst_tokens)
            order = self._order(call, runtime)
            in_rank = call.is_token_in_rank
            assert in_rank is not None
            with order.allocating():
                handle = new_handle(self._place, shape.num_channels, in_rank, self._empty)
                packs = self._packs(shape, shape.num_tokens)
            counted = {
                "num_tokens_per_rank": call.num_tokens_per_rank,
                "num_tokens_per_expert": call.num_tokens_per_expert,
            }
            wait_stats = pointers.own_row(call.dispatch_wait_recv_cost_stats, communicator.rank)
            order.begin()
            with parts.marked(communicator, "notify"):
                runtime.native.normal_notify(
                    **self._common(shape, handle),
                    **pointers.of_tensors({**counted, "wait_stats": wait_stats}),
                    num_max_tokens_per_rank=most_tokens,
                    notify_counters=pointers.of_counters(communicator.counters.get(NOTIFY)),
                    stream=order.handle,
                )
            order.reads(*counted.values())
            # This rank is in the operation now, and ends it whatever happens.
            allocated = None
            try:
                with parts.marked(communicator, "host"):
                    counts = self._counts(runtime, num_worst_tokens)
                if counts is not None:
                    num_recv, num_relayed, per_expert = counts
                    with order.allocating():
                        num_kept = num_relayed if keeps_experts else 0
                        received = self._new_received(call, shape, num_recv, num_kept)
                        num_sent = shape.num_tokens + num_relayed
                        allocated = handle.with_rows(num_recv, num_sent, self._empty), received
                        if num_worst_tokens and received.recv_topk_idx is not None:
                            received.recv_topk_idx.fill_(-1)
                    self._begin(call, order)
            except BaseException:
                self._abandon(runtime, call, shape, handle, order)
                runtime.native.take_failure()  # that this rank gave it up
                raise
            if allocated is None:
                self._abandon(runtime, call, shape, handle, order)
                communicator.raise_failure()
                raise EPTransportError(f"dispatch on rank {communicator.rank}: it was given up.")
            handle, received = allocated
            event = self._run_dispatch(runtime, call, shape, handle, order, packs, received)
        aligned = [-(-rows // call.expert_alignment) * call.expert_alignment for rows in per_expert]
        return received, aligned, handle, event

    def dispatch_again(self, call: NormalDispatch) -> tuple[Received, EventOverlap]:
        """See `Buffer.dispatch`, with a handle.

        Returns:
            What was received, the event.
        """
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, NORMAL_DISPATCH):
            runtime = self._idle_runtime(NORMAL_DISPATCH)
            shape, given = normal_checks.cached_dispatch(communicator.limits, self._place, call)
            order = self._order(call, runtime)
            with order.allocating():
                received = self._new_received(call, shape, given.num_rows)
                packs = self._packs(shape, shape.num_tokens)
            self._begin(call, order)
            event = self._run_dispatch(runtime, call, shape, given, order, packs, received)
        return received, event

    def combine(
        self, call: NormalCombine, order: CombineOrder | None = None
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """See `Buffer.combine`.

        Args:
            call: what it takes.
            order: of the sums; by rank unless given.
        """
        communicator = self._communicator
        with communicator.lock, parts.marked(communicator, NORMAL_COMBINE):
            runtime = self._idle_runtime(NORMAL_COMBINE)
            shape, given = normal_checks.combine(communicator.limits, self._place, call)
            if order is not None:
                order.check(shape.num_tokens, given.num_relay_rows)
            num_rows, hidden = call.x.shape
            streams = self._order(call, runtime)
            with streams.allocating():
                combined_x = self._empty((shape.num_tokens, hidden), call.x.dtype)
                combined_weights = None
                if call.topk_weights is not None:
                    size = shape.num_tokens, shape.num_topk
                    combined_weights = self._empty(size, torch.float32)
                packs = self._packs(shape, num_rows)
            streams.begin()
            x, topk_weights, bias_0, bias_1 = streams.contiguous(
                call.x, call.topk_weights, *call.bias
            )
            tensors = {
                "x": x,
                "topk_weights": topk_weights,
                "packs": packs,
                "bias_0": bias_0,
                "bias_1": bias_1,
                "order_topk_idx": None if order is None else order.topk_idx,
                "order_relay_topk_idx": None if order is None else order.relay_topk_idx,
                "combined_x": combined_x,
                "combined_topk_weights": combined_weights,
                "wait_stats": pointers.own_row(
                    call.combine_wait_recv_cost_stats, communicator.rank
                ),
            }
            counters = call.recv_counters or communicator.counters.get(NORMAL_COMBINE)
            relay_counters = communicator.counters.get(RELAY_COMBINE)
            runtime.native.normal_combine(
                **self._common(shape, given),
                **given.token_pointers(),
                **pointers.of_tensors(tensors),
                order_topk=0 if order is None else order.topk_idx.shape[1],
                order_experts_per_rank=0 if order is None else order.experts_per_rank,
                num_rows=num_rows,
                num_relay_rows=given.num_relay_rows,
                counters=pointers.of_counters(counters),
                relay_counters=pointers.of_counters(relay_counters),
                stream=streams.handle,
            )
            written = pointers.tensors_of(counters, relay_counters)
            event = streams.finish(*tensors.values(), *given, *written)
            communicator.raise_failure()
        return combined_x, combined_weights, event

    # ---- steps of an operation

    def _idle_runtime(self, where: str) -> Runtime:
        runtime = self._communicator.idle_runtime(where)
        normal_checks.topology(where, self._place, self._communicator.limits.binding)
        self._communicator.masks.require_none(where)
        return runtime

    def _order(self, call: NormalDispatch | NormalCombine, runtime: Runtime) -> StreamOrder:
        """The streams of an operation, once all that must come before it has been queued."""
        communicator = self._communicator
        communicator.calling_stream(call.name)
        order = StreamOrder(call, communicator.backend, runtime.get_comm_stream())
        communicator.receive_sent()
        for callback in communicator.before_operation:
            callback(call.name)
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

    def _begin(self, call: NormalDispatch, order: StreamOrder) -> None:
        """Before rows travel: the comm stream waits, and copies what is not contiguous."""
        order.begin()
        call.x, call.topk_weights = order.contiguous(call.x, call.topk_weights)

    def _run_dispatch(
        self,
        runtime: Runtime,
        call: NormalDispatch,
        shape: NormalShape,
        handle: NormalHandle,
        order: StreamOrder,
        packs: Tensor,
        received: Received,
    ) -> EventOverlap:
        communicator = self._communicator
        tensors = {
            "x": call.x,
            "scales": call.x_scales,
            "topk_idx": call.topk_idx,
            "topk_weights": call.topk_weights,
            "packs": packs,
            "wait_stats": pointers.own_row(call.dispatch_wait_recv_cost_stats, communicator.rank),
            **received._asdict(),
        }
        counters = communicator.counters
        counted = call.recv_counters or counters.get(NORMAL_DISPATCH), counters.get(RELAY_DISPATCH)
        self._launch_dispatch(runtime, call, shape, handle, order, tensors, counted)
        noticed = counters.get(NOTIFY) if call.handle is None else None
        written = pointers.tensors_of(*counted, noticed)
        event = order.finish(*tensors.values(), *handle, *written)
        communicator.raise_failure()
        return event

    def _abandon(
        self,
        runtime: Runtime,
        call: NormalDispatch,
        shape: NormalShape,
        handle: NormalHandle,
        order: StreamOrder,
    ) -> None:
        """Ends the operation that the first step of a dispatch began, so that the group meets again."""
        self._launch_dispatch(runtime, call, shape, handle, order, {}, (None, None))
        runtime.get_comm_stream().synchronize()

    def _launch_dispatch(
        self,
        runtime: Runtime,
        call: NormalDispatch,
        shape: NormalShape,
        handle: NormalHandle,
        order: StreamOrder,
        tensors: dict[str, Tensor | None],
        counters: tuple[RecvCounters | None, RecvCounters | None],
    ) -> None:
        """The step in which rows travel; without tensors none do, and the operation ends."""
        scales = tensors.get("scales")
        row_stride, column_stride = (0, 0) if scales is None else scales.stride()
        runtime.native.normal_dispatch(
            **self._common(shape, handle),
            **pointers.of_tensors(tensors or _NO_TENSORS),
            **handle.source_pointers(call.handle is None),
            scale_row_stride=row_stride,
            scale_column_stride=column_stride,
            num_recv_rows=handle.num_rows if tensors else 0,
            num_relay_rows=handle.num_relay_rows if tensors else 0,
            fresh=call.handle is None,
            abandon=not tensors,
            counters=pointers.of_counters(counters[0]),
            relay_counters=pointers.of_counters(counters[1]),
            stream=order.handle,
        )

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

    def _new_received(
        self, call: NormalDispatch, shape: NormalShape, num_rows: int, num_kept: int = 0
    ) -> Received:
        """Memory for the rows of a dispatch.

        Args:
            call: what it takes.
            shape: of the rows.
            num_rows: that are received.
            num_kept: rows that are relayed, and of which the experts are kept.
        """
        x, scales, num_topk = call.x, call.x_scales, shape.num_topk

        def new(width: int, dtype: torch.dtype) -> Tensor:
            return self._empty((num_rows, width), dtype)

        return Received(
            recv_x=new(x.shape[1], x.dtype),
            recv_scales=None if scales is None else new(shape.num_scales, scales.dtype),
            recv_topk_idx=new(num_topk, torch.int64) if num_topk else None,
            recv_topk_weights=new(num_topk, torch.float32) if num_topk else None,
            relay_topk_idx=self._empty((num_kept, num_topk), torch.int32) if num_kept else None,
        )
