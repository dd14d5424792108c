"""The layout of a dispatch: how many tokens go to each rank, node and expert. Local."""

from __future__ import annotations

import functools

import torch

from deep_ep.base.rules import LAYOUT
from deep_ep.checks import arguments as checks
from deep_ep.checks.calls import DispatchLayout
from deep_ep.observe import parts
from deep_ep.ops import pointers
from deep_ep.ops.communicator import Communicator
from deep_ep.ops.stream_order import StreamOrder
from deep_ep.types.event import EventOverlap

Tensor = torch.Tensor


def dispatch_layout(
    communicator: Communicator, call: DispatchLayout
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
    """See `Buffer.get_dispatch_layout`."""
    limits, topk_idx = communicator.limits, call.topk_idx
    checks.Tensors(call, limits).check()
    num_tokens, num_topk = topk_idx.shape
    num_experts = checks.positive_int(LAYOUT, "num_experts", call.num_experts)
    checks.kernel_limit(LAYOUT, "num_experts", num_experts, limits.binding.MAX_EXPERTS)
    runtime = communicator.connected_runtime(LAYOUT)
    comm = runtime.get_comm_stream()
    order = StreamOrder(call, communicator.backend, comm)
    num_nodes = runtime.topology.num_nodes
    with order.allocating():
        new = functools.partial(torch.empty, device=limits.device)
        per_rank = new(limits.num_ranks, dtype=torch.int32)
        per_node = new(num_nodes, dtype=torch.int32) if num_nodes > 1 else None
        per_expert = new(num_experts, dtype=torch.int32)
        in_rank = new((num_tokens, limits.num_ranks), dtype=torch.bool)
    tensors = {
        "topk_idx": topk_idx,
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }
    order.begin()
    with parts.measured(communicator, "layout", comm):
        runtime.native.dispatch_layout(
            **pointers.of_tensors(tensors),
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=num_experts,
            num_ranks=limits.num_ranks,
            ranks_per_node=runtime.topology.ranks_per_node,
            stream=order.handle,
        )
    event = order.finish(*tensors.values())
    return per_rank, per_node, per_expert, in_rank, event
