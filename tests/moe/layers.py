"""A layer of experts whose results and gradients have one right value, and its reference in float64.

Rows, weights and gradients are small whole numbers and halves, and each expert permutes the channels, turns
the signs of some and multiplies by a whole number: every sum is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import deep_ep
from deep_ep import moe
from support.launch import DEVICE, Ranks
from support.normal_exchange import normal_ranks

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sizes:
    """How many of what: num_tokens per rank, then as in a model."""

    num_tokens: tuple[int, ...]
    hidden: int = 128
    experts_per_rank: int = 2
    topk: int = 3
    routing: str = "random"
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.experts_per_rank


@dataclass
class Tokens:
    """Of one rank; `grad` is that of the result."""

    x: Tensor  # [T, hidden] bfloat16, requires grad
    topk_idx: Tensor  # [T, K] int64
    weights: Tensor  # [T, K] float32, requires grad
    grad: Tensor  # [T, hidden] bfloat16

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer takes."""
        return self.x, self.topk_idx, self.weights

    def results(self, combined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes out, and the gradients of what went in."""
        combined.backward(self.grad)
        assert self.x.grad is not None
        assert self.weights.grad is not None
        return combined.detach(), self.x.grad, self.weights.grad


def tokens_of(sizes: Sizes, rank: int) -> Tokens:
    """Equal calls give equal tokens. Some entries are -1, some tokens go nowhere.

    Routing is "random" (an expert may be selected twice), "one-expert" or "nowhere".
    """
    generator = torch.Generator().manual_seed(1000 * sizes.seed + rank)
    num_tokens = sizes.num_tokens[rank]
    size = (num_tokens, sizes.hidden)
    topk_idx = torch.randint(sizes.num_experts, (num_tokens, sizes.topk), generator=generator)
    if sizes.routing == "one-expert":
        topk_idx[:] = sizes.num_experts // 2
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.2] = -1
    topk_idx[2:3] = -1
    if sizes.routing == "nowhere":
        topk_idx[:] = -1
    weights = torch.randint(1, 4, topk_idx.shape, generator=generator) / 2
    return Tokens(
        torch.randint(-2, 3, size, generator=generator).bfloat16().to(DEVICE).requires_grad_(),
        topk_idx.to(DEVICE),
        weights.to(DEVICE).requires_grad_(),
        torch.randint(-2, 3, size, generator=generator).bfloat16().to(DEVICE),
    )


def expert(number: int, rows: Tensor) -> Tensor:
    """[n, hidden] of any dtype; its gradient is as exact as it is."""
    generator = torch.Generator().manual_seed(number)
    channels = torch.randperm(rows.shape[1], generator=generator).to(rows.device)
    factors = torch.randint(0, 2, (rows.shape[1],), generator=generator).to(rows.device) * 2 - 1
    return rows[:, channels] * (factors * (1 + number % 3)).to(rows.dtype)


def experts_of(rank: int, sizes: Sizes) -> Callable[[Tensor, Tensor], Tensor]:
    """All experts of a rank, on rows by expert."""

    def run(rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        first = rank * sizes.experts_per_rank
        parts = rows.split(num_tokens_per_expert.tolist())
        return torch.cat([expert(first + i, part) for i, part in enumerate(parts)])

    return run


class Scale(torch.nn.Module):
    """All experts of a rank; what it learns from does not depend on how tokens are divided."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.full((width,), 2.0, dtype=torch.bfloat16, device=DEVICE)
        )

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        assert len(rows) == int(num_tokens_per_expert.sum())
        return rows * self.weight


def expected(tokens: Tokens, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """`Tokens.results` of a layer that has all experts, in float64 and without any exchange."""
    x = tokens.x.detach().double().requires_grad_()
    weights = tokens.weights.detach().double().requires_grad_()
    combined = torch.zeros_like(x)
    for number in range(sizes.num_experts):
        weight = torch.where(tokens.topk_idx == number, weights, 0).sum(1, keepdim=True)
        combined = combined + weight * expert(number, x)
    combined.backward(tokens.grad.double())
    assert x.grad is not None
    assert weights.grad is not None
    return combined.detach(), x.grad, weights.grad


def assert_exact(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(("result", "gradient of x", "gradient of weights"), got, want):
        assert torch.equal(one.double(), other), name


@contextmanager
def ranks_of(sizes: Sizes, ranks_per_node: int | None = None) -> Iterator[Ranks]:
    """A group of threads whose buffers fit."""
    configs = [deep_ep.Buffer.get_dispatch_config(2), deep_ep.Buffer.get_combine_config(2)]
    nodes = ranks_per_node or sizes.num_ranks
    with normal_ranks(sizes.num_ranks, nodes, configs, 2 * sizes.hidden) as ranks:
        yield ranks


def on_ranks(
    sizes: Sizes, run: Callable[[int, deep_ep.Buffer], Any], ranks_per_node: int | None = None
) -> None:
    """Has each rank of such a group do something."""
    with ranks_of(sizes, ranks_per_node) as ranks:
        ranks.run(run)


def module_of(buffer: deep_ep.Buffer, sizes: Sizes, **options: Any) -> moe.ExpertParallel:
    """The layer as a module."""
    experts = experts_of(buffer.rank, sizes)
    return moe.ExpertParallel(experts, sizes.num_experts, buffer, **options)


def layer(
    tokens: Tokens, buffer: deep_ep.Buffer, sizes: Sizes, **options: Any
) -> tuple[moe.Dispatched, Tensor]:
    """One pass through the layer, from the calls that `ExpertParallel` makes."""
    sent = moe.dispatch(*tokens.given, buffer, sizes.num_experts, **options)
    y = experts_of(buffer.rank, sizes)(sent.x, sent.num_tokens_per_expert)
    return sent, moe.combine(y, sent)
