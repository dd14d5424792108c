"""The layout of a dispatch: how many tokens go to each rank, node and expert. Local."""

from __future__ import annotations

import functools

import torch

from deep_ep import checks
from deep_ep.communicator import Communicator
from deep_ep.event import EventHandle, EventOverlap
from deep_ep.rules import LAYOUT, fail

Tensor = torch.Tensor


def dispatch_layout(
    communicator: Communicator,
    topk_idx: Tensor,
    num_experts: int,
    previous_event: EventOverlap | None,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
    """See `Buffer.get_dispatch_layout`."""
    limits, back = communicator.limits, communicator.backend
    checks.Tensors(LAYOUT, limits.device).check("topk_idx", topk_idx)
    num_tokens, num_topk = topk_idx.shape
    num_experts = checks.positive_int(LAYOUT, "num_experts", num_experts)
    checks.kernel_limit(LAYOUT, "num_experts", num_experts, limits.binding.MAX_EXPERTS)
    runtime = communicator.connected_runtime(LAYOUT)
    comm = runtime.get_comm_stream()
    waits_for = previous_event.event if previous_event is not None else None
    if allocate_on_comm_stream and not (waits_for is not None and async_finish):
        fail(LAYOUT, "allocate_on_comm_stream is True alone", "comm_stream_allocation")
    current = back.current_stream()
    num_nodes = runtime.topology.num_nodes
    # Behind an event the comm stream may run ahead of the current one, so memory of the current
    # stream's pool could still be in use by earlier work there.
    with back.use_stream(current if waits_for is None else comm):
        new = functools.partial(torch.empty, device=limits.device)
        per_rank = new(limits.num_ranks, dtype=torch.int32)
        per_node = new(num_nodes, dtype=torch.int32) if num_nodes > 1 else None
        per_expert = new(num_experts, dtype=torch.int32)
        in_rank = new((num_tokens, limits.num_ranks), dtype=torch.bool)
    if waits_for is not None:
        waits_for.stream_wait(comm)
    else:
        back.wait_stream(comm, current)
    runtime.native.dispatch_layout(
        topk_idx=topk_idx.data_ptr(),
        num_tokens=num_tokens,
        num_topk=num_topk,
        num_experts=num_experts,
        num_ranks=limits.num_ranks,
        ranks_per_node=runtime.topology.ranks_per_node,
        num_tokens_per_rank=per_rank.data_ptr(),
        num_tokens_per_rdma_rank=per_node.data_ptr() if per_node is not None else 0,
        num_tokens_per_expert=per_expert.data_ptr(),
        is_token_in_rank=in_rank.data_ptr(),
        stream=back.stream_handle(comm),
    )
    for tensor in (topk_idx, per_rank, per_node, per_expert, in_rank):
        if tensor is not None:
            back.record_use(tensor, comm)
            back.record_use(tensor, current)
    if async_finish:
        event = EventOverlap(EventHandle(comm, back))
    else:
        event = EventOverlap()
        back.wait_stream(current, comm)
    return per_rank, per_node, per_expert, in_rank, event
