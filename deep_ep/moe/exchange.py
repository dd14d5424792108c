"""`dispatch` and `combine` with gradients, eager and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from deep_ep.buffer import Buffer
from deep_ep.checks import arguments as checks
from deep_ep.errors import EPArgumentError
from deep_ep.moe import ops, steps
from deep_ep.moe.awaited import AwaitedTensor
from deep_ep.moe.steps import Dispatched, Options, Way
from deep_ep.types.bounds import integer
from deep_ep.utils.math import GROUP

Tensor = torch.Tensor


_DISPATCH, _COMBINE = "deep_ep.moe.dispatch", "deep_ep.moe.combine"


def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: Buffer,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    fp8: bool = False,
    permute: bool = True,
) -> Dispatched:
    """Sends every token to the ranks of its experts. Collective; so is its backward.

    Args:
        x: [num_tokens, hidden] bfloat16, `num_tokens` 0 included.
        topk_idx: [num_tokens, num_topk] of an integer dtype, experts of each token; -1: none.
        topk_weights: [num_tokens, num_topk] float32, their weights.
        buffer: with room for normal operations.
        num_experts: in total, a multiple of the group size.
        expert_alignment: with `permute`, the rows of an expert are padded to a multiple of it.
        fp8: rows travel in float8_e4m3fn with a scale for every 128 channels; hidden must be a multiple of
            128. What arrives is bfloat16 again, and gradients travel as bfloat16.
        permute: return rows by expert, as grouped matrix products take them; then `combine` weighs what the
            experts return. Otherwise rows stay as they came, and their weights are the caller's to apply.

    Returns:
        Rows, and what `combine` needs. The host waits until it knows how many come.

    Raises:
        EPArgumentError: an argument is not allowed (nothing was sent), or ranks passed different ones.
        EPTimeoutError, EPTransportError: see `Buffer.dispatch`; backward raises those of `Buffer.combine`.

    Under `torch.compile` it is the operator `deep_ep::moe_dispatch`, without a graph break.
    """
    options = Options(num_experts, fp8, permute, expert_alignment)
    options = checked_options(x, topk_idx, topk_weights, buffer, options)
    topk_idx, topk_weights = topk_idx.to(torch.int64), topk_weights.to(torch.float32)
    if torch.compiler.is_compiling():
        return ops.dispatch(buffer, x, topk_idx, topk_weights, options)
    dispatched = MoEDispatch.apply(  # type: ignore[no-untyped-call]
        x, topk_idx, topk_weights, num_experts, options.fp8, options.permute, buffer, options
    )
    return Dispatched(*dispatched)


def combine(y: Tensor, dispatched: Dispatched, *, async_finish: bool = False) -> Tensor:
    """Brings back what the experts made of each token, summed up. Collective; so is its backward.

    Args:
        y: [rows of dispatched.x, any width] bfloat16, what the experts made of these rows.
        dispatched: of the dispatch. It may be combined repeatedly.
        async_finish: do not make the current stream wait; the first use of the result does. Without effect
            under `torch.compile`.

    Returns:
        [num_tokens, width of y] bfloat16. With `permute`, each row times its weight; sums on this rank and
        between ranks are in float32.

    Raises:
        EPArgumentError: `y` has another number of rows or dtype (nothing was sent).
        EPTimeoutError, EPTransportError: see `Buffer.combine`; backward raises those of `Buffer.dispatch`.
    """
    if not torch.compiler.is_compiling():
        fix = "Pass what deep_ep.moe.dispatch returned"
        checks.instance(_COMBINE, "dispatched", dispatched, Dispatched, fix)
        (async_finish,) = checks.flags(_COMBINE, async_finish=async_finish)
    check_combine(y, dispatched.x)
    weights, way, buffer = dispatched.topk_weights, dispatched.way, dispatched.buffer
    if torch.compiler.is_compiling():
        return ops.combine(buffer.number, way, y, weights)
    combined: Tensor = MoECombine.apply(  # type: ignore[no-untyped-call]
        y, weights, async_finish, way, buffer
    )
    return combined


class MoEDispatch(torch.autograd.Function):
    """The name and the first four arguments are those by which trace readers know a dispatch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        fp8: bool,
        permute: bool,
        buffer: Buffer,
        options: Options,
    ) -> Any:
        arrived = steps.dispatch(buffer, x, topk_idx, topk_weights, options)
        ctx.buffer, ctx.way = buffer, arrived.way
        ctx.save_for_backward(arrived.topk_idx)
        ctx.mark_non_differentiable(arrived.topk_idx, arrived.num_tokens_per_expert)
        return tuple(arrived)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(
        ctx: Any, grad_x: Tensor, _: Any, __: Any, grad_weights: Tensor, *others: Any
    ) -> Any:
        (topk_idx,) = ctx.saved_tensors
        grads = steps.dispatch_backward(ctx.buffer, ctx.way, topk_idx, grad_x, grad_weights)
        return (grads[0], None, grads[1], *(None,) * 5)


class MoECombine(torch.autograd.Function):
    """Named as `MoEDispatch` is."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor, async_finish: bool, way: Way, buffer: Buffer
    ) -> Tensor:
        ctx.buffer, ctx.way = buffer, way
        ctx.save_for_backward(y, weights)
        combined, event = steps.combine(buffer, way, y, weights, async_finish)
        return AwaitedTensor(combined, event) if event.event is not None else combined

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (
            *steps.combine_backward(ctx.buffer, ctx.way, grad, *ctx.saved_tensors),
            *(None,) * 3,
        )


def _check_types(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: Buffer, num_experts: int
) -> None:
    """Of what every step takes as it is."""
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        checks.instance(_DISPATCH, name, tensor, Tensor, "Pass one row per token")
    checks.instance(_DISPATCH, "buffer", buffer, Buffer, "Pass a deep_ep.Buffer")
    integer(_DISPATCH, "num_experts", num_experts, least=1)
    is_table = topk_idx.dim() == 2 and x.dim() > 0 and len(x) == len(topk_idx)
    if not is_table or topk_weights.shape != topk_idx.shape:
        raise EPArgumentError(
            f"{_DISPATCH}: x has shape {list(x.shape)}, topk_idx {list(topk_idx.shape)} and topk_weights "
            f"{list(topk_weights.shape)}; they must be [num_tokens, hidden] and twice [num_tokens, num_topk]. Pass one "
            "row per token."
        )
    has_integers = not topk_idx.is_floating_point() and not topk_idx.is_complex()
    for name, tensor, is_right, kind in (
        ("topk_idx", topk_idx, has_integers, "integers"),
        ("topk_weights", topk_weights, topk_weights.is_floating_point(), "torch.float32"),
    ):
        if not is_right or tensor.layout != torch.strided or tensor.device != x.device:
            raise EPArgumentError(
                f"{_DISPATCH}: {name} is {tensor.dtype} with layout {tensor.layout} on {tensor.device}; it must be dense, on "
                f"the device of x, {x.device}, and of {kind}. Cast it."
            )


def checked_options(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: Buffer, options: Options
) -> Options:
    """The options, as flags and integers. Raises what `dispatch` raises before anything is sent."""
    num_experts, fp8, permute, expert_alignment = options
    if not torch.compiler.is_compiling():
        _check_types(x, topk_idx, topk_weights, buffer, num_experts)
        expert_alignment = integer(_DISPATCH, "expert_alignment", expert_alignment)
        fp8, permute = checks.flags(_DISPATCH, fp8=fp8, permute=permute)
    _check_bfloat16(f"{_DISPATCH}: x", x)
    if expert_alignment < 1:
        raise EPArgumentError(
            f"{_DISPATCH}: expert_alignment is {expert_alignment}; it must be at least 1. Leave it out, "
            "or pass what the grouped matrix product asks for, such as 128."
        )
    if fp8 and x.shape[-1] % GROUP:
        raise EPArgumentError(
            f"{_DISPATCH}: x has {x.shape[-1]} channels; with fp8 they must be a multiple of {GROUP}, "
            "since so many share a scale. Pass fp8=False."
        )
    if expert_alignment != 1 and not permute:
        raise EPArgumentError(
            f"{_DISPATCH}: expert_alignment is {expert_alignment} and permute is False; only rows by "
            "expert can be padded. Pass permute=True, or leave expert_alignment out."
        )
    return Options(num_experts, fp8, permute, expert_alignment)


def check_combine(y: Tensor, rows: Tensor) -> None:
    """Raises what `combine` raises of what the experts made of these rows, before anything is sent."""
    if not torch.compiler.is_compiling():
        checks.instance(_COMBINE, "y", y, Tensor, "Pass the rows that the experts made")
    _check_bfloat16(f"{_COMBINE}: y", y)
    if torch.compiler.is_compiling():
        return
    if y.device != rows.device:
        raise EPArgumentError(
            f"{_COMBINE}: y is on {y.device}; it must be on {rows.device}, as dispatched.x is. Move it there."
        )
    if len(y) != len(rows):
        raise EPArgumentError(
            f"{_COMBINE}: y has {len(y)} rows; it must have {len(rows)}, one for each row of "
            "dispatched.x. Return a row for each row, padding included."
        )


def _check_bfloat16(what: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise EPArgumentError(
            f"{what} has layout {tensor.layout}; it must be dense. Pass it with .to_dense()."
        )
    if tensor.dtype != torch.bfloat16 or tensor.dim() != 2:
        raise EPArgumentError(
            f"{what} is {tensor.dtype} with {tensor.dim()} dimensions; it must be torch.bfloat16 with "
            "two, since sums between ranks are of such rows. Cast with .bfloat16(), flatten leading dimensions."
        )
