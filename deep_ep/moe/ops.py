"""Dispatch and combine as operators, which `torch.compile` traces without a graph break.

An operator takes tensors and numbers only: the buffer by its number, the way of the rows as a list of tensors.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from deep_ep.buffer import Buffer, numbered
from deep_ep.moe import steps
from deep_ep.moe.permutation import Permutation
from deep_ep.moe.steps import Dispatched, Options, Way
from deep_ep.types import handles

Tensor = torch.Tensor
# What a way is, as an operator has it: three index tensors of the permutation, or none; then the handle.
_Flat = list[Tensor]
_NUM_INDICES = 3


def dispatch(
    buffer: Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, options: Options
) -> Dispatched:
    """See `steps.dispatch`."""
    rows, num_per_expert, idx, weights, flat = torch.ops.deep_ep.moe_dispatch(
        x, topk_idx, topk_weights, *options, buffer.number
    )
    way = _way(flat, rows, idx, options.permute)
    return Dispatched(rows, num_per_expert, idx, weights, way, buffer)


def combine(number: int, way: Way, y: Tensor, weights: Tensor) -> Tensor:
    """See `steps.combine`; the buffer by its number."""
    is_permuted = way.permutation is not None
    combined: Tensor = torch.ops.deep_ep.moe_combine(y, weights, _flat(way), is_permuted, number)
    return combined


def _flat(way: Way) -> _Flat:
    if way.permutation is None:
        return list(way.handle)
    entries, rows, places, _ = way.permutation
    return [entries, rows, places, *way.handle]


def _way(flat: _Flat, rows: Tensor, received: Tensor, permute: bool) -> Way:
    """The way of these rows, by expert or not; `received` has one for each row that was received."""
    if not permute:
        return Way(tuple(flat), received.shape[0], None)
    entries, by_expert, places, *handle = flat
    permutation = Permutation(entries, by_expert, places, rows.shape[0])
    return Way(tuple(handle), received.shape[0], permutation)


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    operator = torch.library.custom_op(f"deep_ep::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


# ---- dispatch


def _dispatch(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *others: Any) -> tuple[Any, ...]:
    *options, number = others
    given = x, topk_idx, topk_weights, Options(*options)
    *arrived, way, _ = steps.dispatch(numbered(number), *given)
    return (*arrived, _flat(way))


def _dispatch_fake(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *others: Any
) -> tuple[Any, ...]:
    *given, number = others
    buffer, options = numbered(number), Options(*given)
    new_size = torch.library.get_ctx().new_dynamic_size
    num_recv = new_size()
    indices: list[Tensor] = []
    num_rows = num_recv
    if options.permute:
        num_pairs = new_size()
        is_padded = options.expert_alignment != 1
        num_rows = new_size() if is_padded else num_pairs
        num_places = num_pairs if is_padded else 0
        indices = [topk_idx.new_empty(size) for size in (num_pairs, num_pairs, num_places)]
    return (
        x.new_empty(num_rows, x.shape[1]),
        torch.empty(options.num_experts // buffer.group_size, dtype=torch.int64, device="cpu"),
        topk_idx.new_empty(num_recv, topk_idx.shape[1]),
        topk_weights.new_empty(num_recv, topk_idx.shape[1]),
        [*indices, *_handle_fake(buffer, x, num_recv)],
    )


def _handle_fake(buffer: Buffer, x: Tensor, num_recv: torch.SymInt) -> tuple[Tensor, ...]:
    place = buffer.communicator.connected_runtime("torch.compile").topology
    channels = Buffer.get_dispatch_config(place.num_ranks).num_sms // 2

    def empty(size: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        return x.new_empty(size, dtype=dtype)

    in_rank = empty((x.shape[0], place.num_ranks), torch.bool)
    handle = handles.new_handle(place, channels, in_rank, empty)
    num_sent = x.shape[0] if place.num_nodes == 1 else torch.library.get_ctx().new_dynamic_size()
    return tuple(handle.with_rows(num_recv, num_sent, empty))


def _dispatch_backward(
    topk_idx: Tensor, grad_x: Tensor, grad_weights: Tensor, flat: _Flat, permute: bool, buffer: int
) -> tuple[Tensor, Tensor]:
    way = _way(flat, grad_x, topk_idx, permute)
    return steps.dispatch_backward(numbered(buffer), way, topk_idx, grad_x, grad_weights)[:2]


def _dispatch_backward_fake(
    topk_idx: Tensor, grad_x: Tensor, grad_weights: Tensor, flat: _Flat, permute: bool, buffer: int
) -> tuple[Tensor, Tensor]:
    num_tokens = _num_tokens(flat, permute)
    return (
        grad_x.new_empty(num_tokens, grad_x.shape[1]),
        grad_weights.new_empty(num_tokens, grad_weights.shape[1]),
    )


def _num_tokens(flat: _Flat, permute: bool) -> int:
    handle = flat[_NUM_INDICES:] if permute else flat
    fields = len(handles.OneNodeHandle._fields)
    kind = handles.OneNodeHandle if len(handle) == fields else handles.SeveralNodesHandle
    return kind(*handle).is_token_in_rank.shape[0]


def _keep_of_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, _, _, *options, ctx.buffer = inputs
    ctx.permute = Options(*options).permute
    ctx.save_for_backward(output[2], *output[-1])


def _through_dispatch(
    ctx: Any, grad_x: Tensor, _: Any, __: Any, grad_weights: Tensor, *others: Any
) -> Any:
    topk_idx, *flat = ctx.saved_tensors
    grads = torch.ops.deep_ep.moe_dispatch_backward(
        topk_idx, grad_x, grad_weights, flat, ctx.permute, ctx.buffer
    )
    return (grads[0], None, grads[1], *(None,) * 5)


_define(
    "moe_dispatch",
    "(Tensor x, Tensor topk_idx, Tensor topk_weights, int num_experts, bool fp8, bool permute, "
    "int expert_alignment, int buffer) -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
    _dispatch,
    _dispatch_fake,
).register_autograd(_through_dispatch, setup_context=_keep_of_dispatch)
_define(
    "moe_dispatch_backward",
    "(Tensor topk_idx, Tensor grad_x, Tensor grad_weights, Tensor[] way, bool permute, int buffer) "
    "-> (Tensor, Tensor)",
    _dispatch_backward,
    _dispatch_backward_fake,
)


# ---- combine


def _combine(y: Tensor, weights: Tensor, flat: _Flat, permute: bool, buffer: int) -> Tensor:
    return steps.combine(numbered(buffer), _way(flat, y, weights, permute), y, weights)[0]


def _combine_fake(y: Tensor, weights: Tensor, flat: _Flat, permute: bool, buffer: int) -> Tensor:
    return y.new_empty(_num_tokens(flat, permute), y.shape[1])


def _combine_backward(
    grad: Tensor, y: Tensor, weights: Tensor, flat: _Flat, permute: bool, buffer: int
) -> tuple[Tensor, Tensor]:
    way = _way(flat, y, weights, permute)
    return steps.combine_backward(numbered(buffer), way, grad, y, weights)


def _combine_backward_fake(
    grad: Tensor, y: Tensor, weights: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(weights)


def _keep_of_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, flat, ctx.permute, ctx.buffer = inputs
    ctx.save_for_backward(y, weights, *flat)


def _through_combine(ctx: Any, grad: Tensor) -> Any:
    y, weights, *flat = ctx.saved_tensors
    grads = torch.ops.deep_ep.moe_combine_backward(grad, y, weights, flat, ctx.permute, ctx.buffer)
    return (*grads, [None] * len(flat), None, None)


_define(
    "moe_combine",
    "(Tensor y, Tensor weights, Tensor[] way, bool permute, int buffer) -> Tensor",
    _combine,
    _combine_fake,
).register_autograd(_through_combine, setup_context=_keep_of_combine)
_define(
    "moe_combine_backward",
    "(Tensor grad, Tensor y, Tensor weights, Tensor[] way, bool permute, int buffer) -> (Tensor, Tensor)",
    _combine_backward,
    _combine_backward_fake,
)
