"""A layer of experts in two micro-batches: while the experts compute one, the rows of the other travel.

    comm stream       dispatch A   dispatch B   combine A    combine B
    current stream                 experts A    experts B

    backward:         dispatch A   dispatch B   combine A    combine B      of gradients
                                   experts A    experts B                   their backwards

Autograd would run the backward of each micro-batch from end to end, so the whole layer is one function, which
keeps the graphs of its experts and runs them in this order.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from deep_ep.buffer import Buffer
from deep_ep.errors import EPUsageError
from deep_ep.moe import steps
from deep_ep.moe.exchange import check_combine, checked_options
from deep_ep.moe.steps import Dispatched, Options
from deep_ep.types.event import EventOverlap

Tensor = torch.Tensor
Experts = Callable[[Tensor, Tensor], Tensor]


class _Computed(NamedTuple):
    """A micro-batch that its experts have computed, with what its backward needs.

    Attributes:
        arrived: its rows.
        rows: the same as a leaf of the graph of `y`.
        y: what the experts returned, with its graph if gradients are wanted.
    """

    arrived: Dispatched
    rows: Tensor
    y: Tensor


def two_micro_batches(
    experts: Experts,
    buffer: Buffer,
    options: Options,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
) -> Tensor:
    """Every token through its experts, as `ExpertParallel` does it. Collective; so is its backward.

    Args:
        experts: called twice, with the rows of each half of the tokens.
        buffer: with room for normal operations.
        options: how to dispatch, with rows by expert.
        x: [num_tokens, hidden] bfloat16; 0 and 1 tokens included.
        topk_idx: [num_tokens, num_topk] of an integer dtype.
        topk_weights: [num_tokens, num_topk] of a floating dtype.

    Returns:
        [num_tokens, width of what the experts return].

    Raises:
        EPArgumentError: see `deep_ep.moe.dispatch` and `deep_ep.moe.combine`.
    """
    options = checked_options(x, topk_idx, topk_weights, buffer, options)
    records = torch.is_grad_enabled()
    if records and not (x.requires_grad or topk_weights.requires_grad):
        # Otherwise autograd would not ask for the gradients of the experts.
        x = x.detach().requires_grad_()
    combined: Tensor = MoEOverlapped.apply(  # type: ignore[no-untyped-call]
        *(x, topk_idx.to(torch.int64), topk_weights.to(torch.float32)),
        *(experts, buffer, options, records),
    )
    return combined


class MoEOverlapped(torch.autograd.Function):
    """The layer as one function. Gradients of the experts' parameters are added to their `.grad`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        experts: Experts,
        buffer: Buffer,
        options: Options,
        records: bool,
    ) -> Tensor:
        middle = (len(x) + 1) // 2
        first, second = (
            steps.prepare(buffer, x[half], topk_idx[half], topk_weights[half], options)
            for half in (slice(middle), slice(middle, None))
        )

        def compute(arrived: Dispatched) -> _Computed:
            rows = arrived.x.detach().requires_grad_(records)
            with torch.set_grad_enabled(records):
                y = experts(rows, arrived.num_tokens_per_expert)
            check_combine(y, rows)
            return _Computed(arrived, rows, y)

        def combine(part: _Computed) -> tuple[Tensor, EventOverlap]:
            arrived = part.arrived
            return steps.combine(
                buffer, arrived.way, part.y.detach(), arrived.topk_weights, async_finish=True
            )

        rows_of_first = steps.arrive(buffer, steps.send(buffer, first), options)
        # What the second dispatch waits for: not for the experts, which are launched before the host waits for it.
        prepared = Buffer.capture()
        computed = [compute(rows_of_first)]
        on_its_way = steps.send(buffer, second, after=prepared)
        returning = [combine(computed[0])]
        computed.append(compute(steps.arrive(buffer, on_its_way, options)))
        returning.append(combine(computed[1]))
        ctx.buffer, ctx.middle, ctx.computed = buffer, middle, computed if records else None
        for _, event in returning:
            steps.wait(event)
        return torch.cat([combined for combined, _ in returning])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> Any:
        buffer, computed = ctx.buffer, ctx.computed
        if computed is None:
            raise EPUsageError(
                "deep_ep.moe.ExpertParallel: backward was called again; with micro_batches=2 the graph of the experts is "
                "kept for one backward. Call forward again, or leave micro_batches out."
            )
        ways = [part.arrived.way for part in computed]
        halves = grad[: ctx.middle], grad[ctx.middle :]
        grads = [steps.aligned(half.contiguous()) for half in halves]
        ready = Buffer.capture()
        came = [
            steps.send_back(buffer, ways[0], grads[0]),
            steps.send_back(buffer, ways[1], grads[1], after=ready),
        ]
        returning = []
        for part, (received, event) in zip(computed, came):
            arrived = part.arrived
            grad_y, grad_weights = steps.weigh(
                buffer, arrived.way, received, event, part.y.detach(), arrived.topk_weights
            )
            if part.y.requires_grad:
                torch.autograd.backward(part.y, grad_y)
            grad_x = part.rows.grad
            returning.append(
                steps.dispatch_backward(
                    buffer,
                    arrived.way,
                    arrived.topk_idx,
                    torch.zeros_like(part.rows) if grad_x is None else grad_x,
                    grad_weights,
                    async_finish=True,
                )
            )
        for *_, event in returning:
            steps.wait(event)
        ctx.computed = None
        return (
            torch.cat([each[0] for each in returning]),
            None,
            torch.cat([each[1] for each in returning]),
            *(None,) * 4,
        )
