"""The dispatch of `ElasticBuffer`: a normal dispatch, whose rows then lie where the API has them.

Rows come by source rank and then by token, so compact rows are in the order of the API already, and expanded rows
need one local pass. Nothing here waits for the device but what the caller asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from deep_ep.base.rules import VECTOR_BYTES
from deep_ep.checks import elastic as elastic_checks
from deep_ep.checks.calls import DispatchLayout, NormalDispatch
from deep_ep.elastic import slots as rows_by
from deep_ep.elastic.handle import EPHandle, Return
from deep_ep.observe import parts
from deep_ep.ops import layout, local_rows
from deep_ep.types.handles import NormalHandle

if TYPE_CHECKING:
    from deep_ep.buffer import Buffer
    from deep_ep.checks.calls import ElasticDispatch
    from deep_ep.elastic.streams import CallStreams
    from deep_ep.ops.normal import Received
    from deep_ep.types.config import Config

Tensor = torch.Tensor


class Setting(NamedTuple):
    """How a buffer dispatches.

    Attributes:
        buffer: on which normal operations run.
        num_domains: into how many the ranks are divided where sums are made in each first.
        reduces_early: whether the rows of a rank may be summed, and rounded, before they go back.
    """

    buffer: Buffer
    num_domains: int
    reduces_early: bool

    def returns_units(self, expands: bool) -> bool:
        """Whether rows go back one by one. Else one kernel returns and sums them, in the promised order."""
        if self.sums_by_domain:
            return False
        topology = self.buffer.communicator.connected_runtime("dispatch").topology
        return topology.num_nodes > 1 or (expands and not self.reduces_early)

    @property
    def sums_by_domain(self) -> bool:
        """Whether the sums of each node are rounded, and then added up."""
        return self.num_domains > 1 and self.reduces_early


class Outputs(NamedTuple):
    """What a dispatch returns, but for the handle and the event."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None


def fresh(
    setting: Setting, call: ElasticDispatch, config: Config, streams: CallStreams
) -> tuple[Outputs, EPHandle]:
    """A dispatch without a handle, within its streams."""
    topk_idx = call.topk_idx
    weights = call.topk_weights
    if weights is None:
        weights = topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32)
    worst = 0 if call.do_cpu_sync else setting.buffer.group_size * call.num_max_tokens_per_rank
    received, per_expert, way = _dispatch(
        setting, call, topk_idx, weights, _sent(call.x, call.x_scales), config, worst
    )
    back = None
    if setting.returns_units(call.do_expand):
        back = _way_back(setting, call, topk_idx, config)
    if call.expert_capacity is not None and call.do_cpu_sync:
        elastic_checks.capacity_suffices(call, call.expert_capacity, per_expert)
    streams.begin_epilogue()
    communicator = setting.buffer.communicator
    with parts.measured(communicator, "permute"):
        handle = _new_handle(setting, call, config, received, per_expert, way, back)
        if call.cumulative_local_expert_recv_stats is not None:
            # Tensors that were made in it may be written to in it alone.
            with torch.inference_mode():
                call.cumulative_local_expert_recv_stats += (
                    handle.num_unaligned_recv_tokens_per_expert
                )
        recv_x, recv_scales = _as_sent(call.x, received)
        recv_weights = None if call.topk_weights is None else received.recv_topk_weights
        if recv_weights is not None and worst:
            recv_weights.masked_fill_(handle.recv_topk_idx < 0, 0.0)
        outputs = Outputs(recv_x, recv_scales, handle.recv_topk_idx, recv_weights)
        return _laid_out(setting, call, handle, outputs, streams), handle


def cached(
    setting: Setting, call: ElasticDispatch, handle: EPHandle, config: Config, streams: CallStreams
) -> Outputs:
    """A dispatch with a handle, within its streams. Weights travel as scales."""
    scales = call.x_scales
    weights = None if call.topk_weights is None else call.topk_weights.view(torch.int32)
    num_own = 0 if scales is None else scales.shape[1]
    both = [item.view(torch.int32) for item in (scales, weights) if item is not None]
    extra = torch.cat([item.contiguous() for item in both], 1) if both else None
    again = NormalDispatch.of(
        x=_sent(call.x, extra),
        handle=handle.way,
        config=config,
        recv_counters=call.recv_counters,
        dispatch_wait_recv_cost_stats=call.dispatch_wait_recv_cost_stats,
    )
    received, _ = setting.buffer.normal.dispatch_again(again)
    streams.begin_epilogue()
    recv_x, recv_extra = _as_sent(call.x, received)
    recv_scales = recv_weights = None
    if recv_extra is not None and scales is not None:
        recv_scales = recv_extra[:, :num_own].contiguous().view(scales.dtype)
    if recv_extra is not None and weights is not None:
        recv_weights = recv_extra[:, num_own:].contiguous().view(torch.float32)
        recv_weights.masked_fill_(handle.recv_topk_idx < 0, 0.0)
    outputs = Outputs(recv_x, recv_scales, handle.recv_topk_idx, recv_weights)
    with parts.measured(setting.buffer.communicator, "permute"):
        return _laid_out(setting, call, handle, outputs, streams)


# ---- the normal operations that it is made of


def _dispatch(
    setting: Setting,
    call: ElasticDispatch,
    topk_idx: Tensor,
    topk_weights: Tensor,
    x: Tensor | tuple[Tensor, Tensor],
    config: Config,
    worst: int,
) -> tuple[Received, list[int], NormalHandle]:
    """Layout and normal dispatch of rows by the experts of their tokens."""
    communicator = setting.buffer.communicator
    counted = DispatchLayout.of(topk_idx=topk_idx, num_experts=call.num_experts)
    per_rank, per_node, per_expert, in_rank, _ = layout.dispatch_layout(communicator, counted)
    routed = NormalDispatch.of(
        x=x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        expert_alignment=1,
        num_worst_tokens=worst,
        config=config,
        recv_counters=call.recv_counters,
        dispatch_wait_recv_cost_stats=call.dispatch_wait_recv_cost_stats,
    )
    received, counts, way, _ = setting.buffer.normal.dispatch(
        routed, most_tokens=call.num_max_tokens_per_rank, keeps_experts=setting.sums_by_domain
    )
    return received, counts, way


def _way_back(setting: Setting, call: ElasticDispatch, topk_idx: Tensor, config: Config) -> Return:
    """Tells the ranks which units they will send back, in rows of the least size, and keeps the handle."""
    num_ranks = setting.buffer.group_size
    num_local = call.num_experts // num_ranks
    goes_by_pick = call.do_expand and not setting.reduces_early
    owner = torch.div(topk_idx, num_local, rounding_mode="floor")
    is_unit = topk_idx >= 0 if goes_by_pick else rows_by.is_last(owner)
    units = torch.where(is_unit, topk_idx, -1).view(-1, 1)
    rows = torch.zeros((len(units), VECTOR_BYTES), dtype=torch.uint8, device=units.device)
    most_units = min(topk_idx.shape[1], num_local) if goes_by_pick else 1
    worst = 0 if call.do_cpu_sync else num_ranks * call.num_max_tokens_per_rank * most_units
    weights = torch.zeros_like(units, dtype=torch.float32)
    _, _, way = _dispatch(setting, call, units, weights, rows, config, worst)
    return Return(way, None, is_unit)


def _sent(x: Tensor, scales: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """As a normal dispatch takes it, where only rows of bytes have scales."""
    if scales is None:
        return x
    # Flat first: without rows, or with one column, what is contiguous may have any strides.
    size = len(x), x.shape[1] * x.element_size()
    return x.contiguous().flatten().view(torch.uint8).view(size), scales


def _as_sent(x: Tensor, received: Received) -> tuple[Tensor, Tensor | None]:
    assert received.recv_x is not None
    return received.recv_x.view(x.dtype), received.recv_scales


# ---- what lies where


def _new_handle(
    setting: Setting,
    call: ElasticDispatch,
    config: Config,
    received: Received,
    per_expert: list[int],
    way: NormalHandle,
    back: Return | None,
) -> EPHandle:
    buffer = setting.buffer
    num_local, alignment = call.num_experts // buffer.group_size, call.expert_alignment
    recv_topk_idx = received.recv_topk_idx
    assert recv_topk_idx is not None
    prefix = way.source_prefix(buffer.rank)
    slots = None
    if call.do_expand:
        slots, picks, ends = rows_by.by_expert(
            recv_topk_idx, num_local, alignment, call.expert_capacity
        )
    else:
        picks = rows_by.picks_per_expert(recv_topk_idx, num_local)
        ends = rows_by.aligned_ends(picks, alignment)
    if back is not None and slots is not None and not setting.reduces_early:
        back.sources = rows_by.of_units(slots.long(), slots, back.handle.num_rows)
    padded = [-(-rows // alignment) * alignment for rows in per_expert]
    return EPHandle(
        do_expand=call.do_expand,
        num_experts=call.num_experts,
        expert_alignment=alignment,
        expert_capacity=call.expert_capacity,
        num_max_tokens_per_rank=call.num_max_tokens_per_rank,
        num_sms=config.num_sms,
        topk_idx=call.topk_idx.clone() if call.do_handle_copy else call.topk_idx,
        num_recv_tokens=len(recv_topk_idx),
        num_expanded_tokens=_num_expanded(call, buffer.group_size, num_local, padded),
        num_recv_tokens_per_expert_list=padded,
        psum_num_recv_tokens_per_scaleup_rank=rows_by.by_place(prefix, setting.num_domains),
        psum_num_recv_tokens_per_expert=ends,
        num_unaligned_recv_tokens_per_expert=picks,
        buffer_number=buffer.number,
        way=way,
        source_prefix=prefix,
        slots=slots,
        recv_topk_idx=recv_topk_idx,
        relay_topk_idx=received.relay_topk_idx,
        back=back,
    )


def _num_expanded(call: ElasticDispatch, num_ranks: int, num_local: int, padded: list[int]) -> int:
    """Rows in expanded layout, as many as there can be where the host does not know how many come."""
    if call.expert_capacity is not None:
        return int(call.expert_capacity) * num_local
    if call.do_cpu_sync:
        return sum(padded)
    alignment: int = call.expert_alignment
    most_picks: int = (
        num_ranks * call.num_max_tokens_per_rank * min(call.topk_idx.shape[1], num_local)
    )
    return -(-(most_picks + (alignment - 1) * num_local) // alignment) * alignment


def _laid_out(
    setting: Setting,
    call: ElasticDispatch,
    handle: EPHandle,
    compact: Outputs,
    streams: CallStreams,
) -> Outputs:
    """The rows in the layout that was asked for."""
    slots = handle.slots
    if slots is None:
        # The handle keeps the indices; what the caller gets is the caller's.
        topk_idx = handle.recv_topk_idx.clone()
        scales = _scales_laid_out(call, compact.scales)
        return Outputs(compact.x, scales, topk_idx, compact.topk_weights)
    communicator = setting.buffer.communicator
    num_rows = handle.num_expanded_tokens

    def expanded(rows: Tensor) -> Tensor:
        """[num_rows, ...], copied where picks are."""
        size, device = (num_rows, *rows.shape[1:]), communicator.limits.device
        out = communicator.backend.empty(size, rows.dtype, device)
        if call.do_zero_padding:
            out.view(torch.uint8).zero_()
        return out

    x = expanded(compact.x)
    local_rows.copy_rows(communicator, compact.x, slots, x, streams.handle)
    scales, weights = compact.scales, compact.topk_weights
    places = torch.where(slots < 0, num_rows, slots).long()
    if scales is not None:
        num_topk = slots.shape[1]
        out = scales.new_zeros(num_rows + 1, scales.shape[1])
        rows = scales.unsqueeze(1).expand(-1, num_topk, -1).reshape(-1, scales.shape[1])
        scales = out.index_copy_(0, places.flatten(), rows)[:-1]
    if weights is not None:
        out = weights.new_zeros(num_rows + 1)
        weights = out.index_copy_(0, places.flatten(), weights.flatten())[:-1]
    return Outputs(x, _scales_laid_out(call, scales), None, weights)


def _scales_laid_out(call: ElasticDispatch, scales: Tensor | None) -> Tensor | None:
    """By rows, or by columns that begin at multiples of 16 bytes."""
    if scales is None or not call.use_tma_aligned_col_major_sf:
        return scales
    num_rows, num_scales = scales.shape
    stride = -(-num_rows // 4) * 4
    columns = scales.new_zeros(num_scales, stride)
    columns[:, :num_rows] = scales.t()
    return columns.as_strided((num_rows, num_scales), (1, stride))
