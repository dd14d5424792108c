"""What dispatch and combine do, forward and backward, without autograd.

Dispatch sends rows, and its backward is a combine; combine brings rows back, and its backward is a dispatch
with the same handle. The functions of exchange.py and the operators of ops.py are wrappers of these four; overlap.py takes them
apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deep_ep.base.rules import VECTOR_BYTES
from deep_ep.buffer import Buffer
from deep_ep.moe import permutation as permuting
from deep_ep.moe.awaited import AwaitedTensor
from deep_ep.moe.permutation import Permutation
from deep_ep.observe import parts
from deep_ep.types.event import EventOverlap
from deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

Tensor = torch.Tensor


class Options(NamedTuple):
    """How to dispatch; see `deep_ep.moe.dispatch`."""

    num_experts: int
    fp8: bool
    permute: bool
    expert_alignment: int


class Way(NamedTuple):
    """The way that rows of a dispatch took, for all that goes the same way, or back.

    Attributes:
        handle: of the buffer's dispatch.
        num_rows: received rows.
        permutation: from received rows to rows by expert; `None`: rows stay as they came.
    """

    handle: tuple[Tensor, ...]
    num_rows: int
    permutation: Permutation | None


class Dispatched(NamedTuple):
    """What `dispatch` returns, and `combine` takes.

    Attributes:
        x: rows for the experts of this rank; gradients go back to the tokens. With `permute`
            [sum of num_tokens_per_expert, hidden]: expert by expert, within an expert by source rank and source
            token; rows of padding are 0. Without, [num_recv_rows, hidden] by source rank and source token.
        num_tokens_per_expert: [num_local_experts] int64 on the host; multiples of `expert_alignment`.
        topk_idx: [num_recv_rows, num_topk] int64, experts of this rank, -1 elsewhere.
        topk_weights: [num_recv_rows, num_topk] float32, 0 elsewhere; gradients go back to the routing weights.
        way: for `combine`.
        buffer: for `combine`.
    """

    x: Tensor
    num_tokens_per_expert: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    way: Way
    buffer: Buffer


class PendingDispatch(NamedTuple):
    """What `Buffer.dispatch` returned; the values are there after the event, if there is one."""

    received: Tensor | tuple[Tensor, Tensor]
    topk_idx: Tensor
    topk_weights: Tensor
    counts: list[int]
    handle: tuple[Tensor, ...]
    event: EventOverlap


def dispatch(
    buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, options: Options
) -> Dispatched:
    """Sends tokens to the ranks of their experts. Collective."""
    sent = send(buffer, prepare(buffer, x, topk_idx, topk_weights, options))
    return arrive(buffer, sent, options)


def prepare(
    buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, options: Options
) -> dict[str, Any]:
    """All of a dispatch that needs no other rank: what `Buffer.dispatch` takes, by name; rows as they travel."""
    rows = per_token_cast_to_fp8(x) if options.fp8 else _known(x)
    return {"x": rows, **routing(buffer, topk_idx, topk_weights, options.num_experts)}


def routing(
    buffer: Buffer, topk_idx: Tensor, topk_weights: Tensor, num_experts: int
) -> dict[str, Any]:
    """What `Buffer.dispatch` takes beside rows, by name."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
    }


def send(
    buffer: Buffer, prepared: dict[str, Any], after: EventOverlap | None = None
) -> PendingDispatch:
    """Sends what was prepared. Collective; the host waits until it knows how many rows come.

    Args:
        buffer: see `deep_ep.moe.dispatch`.
        prepared: what to send.
        after: given: only what comes before this event is waited for, and the current stream does not wait for rows.
    """
    # All are there after a dispatch with top-k tensors and without a handle.
    returned: Any = buffer.dispatch(
        **prepared, previous_event=after, async_finish=after is not None
    )
    return PendingDispatch(*returned)


def arrive(buffer: Buffer, sent: PendingDispatch, options: Options) -> Dispatched:
    """Waits, on the current stream, and puts the rows in order."""
    wait(sent.event)
    num_per_expert = torch.tensor(sent.counts, dtype=torch.int64, device="cpu")
    alignment = options.expert_alignment
    permutation = None
    received: list[Any] = [*sent.received] if options.fp8 else [sent.received]
    if options.permute:
        with parts.measured(buffer.communicator, "permute"):
            permutation = permuting.by_expert(sent.topk_idx, num_per_expert, alignment)
            # Still in FP8, which saves a copy of what is twice as large.
            received = [permuting.gather(each, permutation) for each in received]
    rows = per_token_cast_back(*received) if options.fp8 else received[0]
    way = Way(sent.handle, len(sent.topk_idx), permutation)
    padded = permuting.aligned(num_per_expert, alignment)
    return Dispatched(rows, padded, sent.topk_idx, sent.topk_weights, way, buffer)


def wait(event: EventOverlap) -> None:
    """Lets the current stream wait; for nothing if the call has waited itself."""
    if event.event is not None:
        event.current_stream_wait()


def dispatch_backward(
    buffer: Buffer,
    way: Way,
    topk_idx: Tensor,
    grad_x: Tensor,
    grad_weights: Tensor,
    async_finish: bool = False,
) -> tuple[Tensor, Tensor, EventOverlap]:
    """Gradients of what was dispatched: [num_tokens, hidden], [num_tokens, num_topk]. Collective."""
    # A weight arrived at the rank of its expert alone; elsewhere there is a constant in its place.
    grad_weights = grad_weights.masked_fill(topk_idx < 0, 0)
    if way.permutation is not None:
        with parts.measured(buffer.communicator, "unpermute"):
            grad_x = permuting.add_up(grad_x, way.permutation, way.num_rows, None)
    grads, weights, event = buffer.combine(
        aligned(grad_x), way.handle, topk_weights=grad_weights, async_finish=async_finish
    )
    assert weights is not None
    return grads, weights, event


def combine(
    buffer: Buffer, way: Way, y: Tensor, weights: Tensor, async_finish: bool = False
) -> tuple[Tensor, EventOverlap]:
    """Brings back one row for each token, [num_tokens, hidden]; rows by expert are weighed first. Collective."""
    if way.permutation is not None:
        with parts.measured(buffer.communicator, "unpermute"):
            y = permuting.add_up(y, way.permutation, way.num_rows, weights)
    combined, _, event = buffer.combine(_known(y), way.handle, async_finish=async_finish)
    return combined, event


def combine_backward(
    buffer: Buffer, way: Way, grad: Tensor, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of what was combined, like `y` and `weights`. Collective."""
    return weigh(buffer, way, *send_back(buffer, way, grad), y, weights)


def send_back(
    buffer: Buffer, way: Way, grad: Tensor, after: EventOverlap | None = None
) -> tuple[Tensor, EventOverlap]:
    """Sends the gradient of each token the way that the token went; `after` as in `send`. Collective."""
    received, _, _, _, _, event = buffer.dispatch(
        aligned(grad), handle=way.handle, previous_event=after, async_finish=after is not None
    )
    assert isinstance(received, Tensor)
    return received, event


def weigh(
    buffer: Buffer, way: Way, received: Tensor, event: EventOverlap, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Waits for what `send_back` sent, on the current stream; gradients like `y` and `weights`."""
    wait(event)
    if way.permutation is None:
        return received, torch.zeros_like(weights)
    with parts.measured(buffer.communicator, "unpermute"):
        return permuting.weighed_backward(received, y, way.permutation, weights)


def _known(rows: Tensor) -> Tensor:
    """The tensor itself, once the current stream waits for it."""
    return rows.wait() if isinstance(rows, AwaitedTensor) else rows


def aligned(grad: Tensor) -> Tensor:
    """Rows as kernels take them. Autograd may hand over a view that begins anywhere."""
    return grad.clone() if grad.data_ptr() % VECTOR_BYTES else grad
