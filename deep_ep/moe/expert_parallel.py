"""`ExpertParallel`: dispatch, the experts of this rank, combine."""

from __future__ import annotations

from typing import Callable

import torch

from deep_ep.buffer import Buffer
from deep_ep.errors import EPArgumentError
from deep_ep.moe.exchange import combine, dispatch
from deep_ep.moe.overlap import two_micro_batches
from deep_ep.moe.steps import Options

Tensor = torch.Tensor
Experts = Callable[[Tensor, Tensor], Tensor]


class ExpertParallel(torch.nn.Module):
    """Experts that live on the ranks of a group: every token visits those it is routed to.

    Which expert is where: rank r has experts `r * n` to `(r + 1) * n - 1`, with n = num_experts / group size.

        layer = ExpertParallel(experts, num_experts=64, buffer=buffer)
        y = layer(x, topk_idx, topk_weights)
    """

    def __init__(
        self,
        experts: Experts,
        num_experts: int,
        buffer: Buffer,
        *,
        expert_alignment: int = 1,
        fp8: bool = False,
        async_combine: bool = False,
        micro_batches: int = 1,
    ) -> None:
        """Does not communicate.

        Args:
            experts: called with rows by expert, [num_rows, hidden], and the number of rows of each expert of this
                rank, [num_local_experts] int64 on the host; returns [num_rows, any width]. Called with no rows
                as well. A module becomes part of this one.
            num_experts: in total, a multiple of the group size.
            buffer: with room for normal operations.
            expert_alignment: see `deep_ep.moe.dispatch`.
            fp8: see `deep_ep.moe.dispatch`.
            async_combine: what follows runs while rows come back; the first use of the result waits.
            micro_batches: 2: the experts compute one half of the tokens while the rows of the other travel, forward
                and backward. They are called twice, and their gradients are added to `.grad`, where
                `torch.autograd.grad` does not see them. Without effect under `torch.compile`.

        Raises:
            EPArgumentError: `num_experts` is no multiple of the group size, or an option is not one of these.
        """
        super().__init__()
        if num_experts < 1 or num_experts % buffer.group_size:
            raise EPArgumentError(
                f"deep_ep.moe.ExpertParallel: num_experts is {num_experts}; it must be a multiple of the group "
                f"size, {buffer.group_size}. Every rank has equally many experts."
            )
        if micro_batches not in (1, 2) or (micro_batches == 2 and async_combine):
            raise EPArgumentError(
                f"deep_ep.moe.ExpertParallel: micro_batches is {micro_batches} and async_combine is {async_combine}; "
                "it must be 1, or 2 without async_combine. Leave one of them out."
            )
        self.experts = experts
        self.num_experts = num_experts
        self.buffer = buffer
        self.expert_alignment = expert_alignment
        self.fp8 = fp8
        self.async_combine = async_combine
        self.micro_batches = micro_batches

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Every token through its experts. Collective; so is its backward.

        Args:
            x: [..., hidden].
            topk_idx: [..., num_topk] of an integer dtype; -1: none.
            topk_weights: [..., num_topk] float32.

        Returns:
            [..., width of what the experts return], for each token the weighted sum of what its experts return.

        Raises:
            EPError: see `deep_ep.moe.dispatch` and `deep_ep.moe.combine`.
        """
        tokens = _rows(x), _rows(topk_idx), _rows(topk_weights)
        if self.micro_batches == 2 and not torch.compiler.is_compiling():
            options = Options(self.num_experts, self.fp8, True, self.expert_alignment)
            combined = two_micro_batches(self.experts, self.buffer, options, *tokens)
        else:
            arrived = dispatch(
                *tokens,
                self.buffer,
                self.num_experts,
                expert_alignment=self.expert_alignment,
                fp8=self.fp8,
            )
            y = self.experts(arrived.x, arrived.num_tokens_per_expert)
            combined = combine(y, arrived, async_finish=self.async_combine)
        return combined.view(*x.shape[:-1], combined.shape[-1])

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, ranks={self.buffer.group_size}, fp8={self.fp8}"


def _rows(given: Tensor) -> Tensor:
    """[num_tokens, ...]; one token may have no leading dimension."""
    return (given if given.dim() > 1 else given[None]).flatten(0, -2)
