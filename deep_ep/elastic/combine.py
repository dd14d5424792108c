"""The combine of `ElasticBuffer`: rows go back, and each token's are added up in the order that the API promises.

Sums are in float32, biases first, then contributions by the last entry of top-k that is theirs, rounded once a level
(specification of V2, section 5.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep.checks.calls import NormalCombine
from deep_ep.elastic import slots as rows_by
from deep_ep.observe import parts
from deep_ep.ops import local_rows
from deep_ep.ops.normal import CombineOrder

if TYPE_CHECKING:
    from deep_ep.checks.calls import ElasticCombine
    from deep_ep.elastic.dispatch import Setting
    from deep_ep.elastic.handle import EPHandle
    from deep_ep.elastic.streams import CallStreams
    from deep_ep.types.config import Config
    from deep_ep.types.handles import NormalHandle

Tensor = torch.Tensor


def combine(
    setting: Setting, call: ElasticCombine, handle: EPHandle, config: Config, streams: CallStreams
) -> tuple[Tensor, Tensor | None]:
    """Within its streams: the sums, and the weights of each pick."""
    communicator, back = setting.buffer.communicator, handle.back
    goes_by_pick = back is not None and back.sources is not None
    x, weights = call.x, _weights_of_rows(call.topk_weights, handle)
    slots = handle.slots
    if slots is not None and not goes_by_pick:
        with parts.measured(communicator, "unpermute"):
            x = _sums(setting, x, slots, streams)
    if back is None:
        experts_per_rank = handle.num_experts // setting.buffer.group_size
        order = CombineOrder(handle.topk_idx, experts_per_rank, handle.relay_topk_idx)
        # The kernel that communicates adds the biases, too, which may be ready for the epilogue alone.
        streams.begin_epilogue()
        summing = _normal_call(call, config, x, weights, handle.way, call.bias)
        combined, combined_weights, _ = setting.buffer.normal.combine(summing, order)
        return combined, combined_weights
    if back.sources is not None:
        x = x.index_select(0, back.sources)
        if weights is not None and slots is not None:
            weights = rows_by.of_units(weights, slots, len(x)).unsqueeze(1)
    returning = _normal_call(call, config, x, weights, back.handle, (None, None))
    units, unit_weights, _ = setting.buffer.normal.combine(returning)
    streams.begin_epilogue()
    with parts.measured(communicator, "unpermute"):
        combined = _sums(setting, units, rows_by.entries(back.is_unit), streams, call.bias)
    if unit_weights is None:
        return combined, None
    num_tokens, num_topk = handle.topk_idx.shape
    by_unit = unit_weights.view(num_tokens, num_topk, unit_weights.shape[1])
    return combined, by_unit.squeeze(2) if goes_by_pick else by_unit.sum(1)


def _normal_call(
    call: ElasticCombine,
    config: Config,
    x: Tensor,
    topk_weights: Tensor | None,
    handle: NormalHandle,
    bias: tuple[Tensor | None, Tensor | None],
) -> NormalCombine:
    """A call of `Buffer.combine`; streams are those that are current."""
    return NormalCombine.of(
        x=x,
        handle=handle,
        topk_weights=topk_weights,
        bias=bias,
        config=config,
        recv_counters=call.recv_counters,
        combine_wait_recv_cost_stats=call.combine_wait_recv_cost_stats,
    )


def _weights_of_rows(weights: Tensor | None, handle: EPHandle) -> Tensor | None:
    """[num_recv_tokens, num_topk] float32, by compact row, 0 for picks of other ranks; `None` if there are none."""
    if weights is None:
        return None
    if handle.slots is not None:
        # One more, so that there is something to take where no row came.
        by_slot = torch.cat([weights, weights.new_zeros(1)])
        weights = by_slot[handle.slots.clamp(0, len(weights)).long()]
    return torch.where(handle.recv_topk_idx >= 0, weights, 0.0)


def _sums(
    setting: Setting,
    x: Tensor,
    rows: Tensor,
    streams: CallStreams,
    bias: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """[len(rows), hidden] bfloat16, the sum of the rows of x that each row of `rows` names; -1 names none."""
    communicator = setting.buffer.communicator
    size, device = (len(rows), x.shape[1]), communicator.limits.device
    out = communicator.backend.empty(size, x.dtype, device)
    first, second = (item if item is None else item.contiguous() for item in bias)
    rows = rows.contiguous()
    local_rows.sum_rows(communicator, x.contiguous(), rows, out, streams.handle, (first, second))
    return out
