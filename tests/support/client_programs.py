"""What the tests of programs that use this package share: who runs one, what it has, and what must come of it.

Rows and weights are small whole numbers and halves, so that every result and every gradient has one right value.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from support.launch import DEVICE, RankThreads
from support.normal_exchange import nodes_of

Tensor = torch.Tensor

HIDDEN, TOPK, EXPERTS_PER_RANK = 256, 3, 4


class Rank(NamedTuple):
    """Who runs a program: its place, and the group it gives to the buffer."""

    rank: int
    num_ranks: int
    ranks_per_node: int
    group: Any


class Problem(NamedTuple):
    """What a rank has. Some tokens have fewer experts, -1 anywhere in the row; some have none."""

    x: Tensor  # [T, HIDDEN] bfloat16
    topk_idx: Tensor  # [T, TOPK] int64
    weights: Tensor  # [T, TOPK] float32, 0 where topk_idx is -1
    num_experts: int


def problem_of(rank: Rank, num_tokens: int | None = None, seed: int = 0) -> Problem:
    """Equal calls give equal problems. Unless told otherwise ranks have different numbers of tokens, the last one none."""
    generator = torch.Generator().manual_seed(100 * seed + rank.rank)
    if num_tokens is None:
        num_tokens = 0 if rank.rank == rank.num_ranks - 1 else 9 + rank.rank
    num_experts = rank.num_ranks * EXPERTS_PER_RANK
    x = torch.randint(-2, 3, (num_tokens, HIDDEN), generator=generator).bfloat16()
    topk_idx = torch.rand(num_tokens, num_experts, generator=generator).topk(TOPK).indices
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.2] = -1
    topk_idx[3:4] = -1
    weights = torch.randint(1, 4, topk_idx.shape, generator=generator) / 2
    weights = weights.masked_fill(topk_idx < 0, 0)
    return Problem(x.to(DEVICE), topk_idx.to(DEVICE), weights.to(DEVICE), num_experts)


def assert_weighted(combined: Tensor, problem: Problem) -> None:
    """Every token times the sum of its weights."""
    assert combined.dtype == torch.bfloat16
    assert torch.equal(combined.float(), problem.x.float() * problem.weights.sum(1, keepdim=True))


def weigh_compact(recv_x: Tensor, recv_topk_idx: Tensor, recv_weights: Tensor) -> Tensor:
    """Each expert returns its rows; this rank weighs them and adds them up."""
    mine = recv_weights.masked_fill(recv_topk_idx < 0, 0)
    return recv_x * mine.sum(1, keepdim=True).to(recv_x.dtype)


def assert_counts(counts: Any, recv_topk_idx: Tensor, alignment: int = 1) -> None:
    """A list of ints with an entry per local expert, each rounded up."""
    used = torch.bincount(recv_topk_idx.flatten() + 1, minlength=EXPERTS_PER_RANK + 1)[1:]
    assert type(counts) is list
    assert counts == [-(-count // alignment) * alignment for count in used.tolist()]


def train(
    rank: Rank,
    dispatch: Callable[..., tuple[Any, ...]],
    combine: Callable[..., Tensor],
    num_tokens: int | None = None,
    seed: int = 0,
) -> None:
    """A step over compact rows: forward, and a backward whose gradients are known.

    dispatch: returns rows, local experts, weights, counts per expert, which in V2 are the handle's, and the handle.
    """
    problem = problem_of(rank, num_tokens, seed)
    x = problem.x.clone().requires_grad_()
    probs = problem.weights.clone().requires_grad_()
    recv_x, recv_idx, recv_probs, *counts, handle = dispatch(
        x, problem.topk_idx, probs, problem.num_experts
    )
    assert recv_idx.dtype == torch.int64
    assert recv_probs.dtype == torch.float32
    if counts:
        assert_counts(counts[0].tolist(), recv_idx)
    else:
        assert_counts(handle.num_recv_tokens_per_expert_list, recv_idx)
    combined = combine(weigh_compact(recv_x, recv_idx, recv_probs), handle)
    assert_weighted(combined.detach(), problem)
    backward_and_check(combined, x, probs, problem)


def backward_and_check(combined: Tensor, x: Tensor, probs: Tensor, problem: Problem) -> None:
    """d/dx of sum(g * x * sum(w)), and d/dw in the columns that were selected."""
    grad = torch.ones_like(combined)
    grad[:, 1::2] = -1
    combined.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad.float(), grad.float() * problem.weights.sum(1, keepdim=True))
    per_pick = (grad.float() * problem.x.float()).sum(1, keepdim=True).expand_as(probs)
    assert probs.grad is not None
    assert torch.equal(probs.grad, per_pick.masked_fill(problem.topk_idx < 0, 0))


def run_as_threads(program: Callable[[Rank], None], num_ranks: int, ranks_per_node: int) -> None:
    """The program on all ranks; raises the first error."""
    with nodes_of(ranks_per_node):
        ranks = RankThreads(
            num_ranks, lambda group: Rank(group.rank, num_ranks, ranks_per_node, group)
        )
        try:
            ranks.run(lambda _, who: program(who))
        finally:
            ranks.abandon()
    gc.collect()  # buffers that nobody destroys


on_nodes = pytest.mark.parametrize("nodes", [(4, 4), (4, 2)], ids=["one-node", "two-nodes"])


def own_file(variable: str, path: str) -> Path:
    """Of the checkout that a variable names; without one the test is skipped."""
    checkout = os.environ.get(variable)
    if not checkout:
        pytest.skip(f"{variable} names no checkout")
    return Path(checkout, path)


def imported(path: Path, parents: dict[str, types.ModuleType]) -> Any:
    """The file as a new module, where the packages that it imports are made up."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, parents):
        spec.loader.exec_module(own)
    return own


def megatron_parents() -> dict[str, types.ModuleType]:
    """The packages that Megatron's file imports, for `imported`."""
    names = "megatron", "megatron.core", "megatron.core.utils"
    parents = {name: types.ModuleType(name) for name in names}
    parents[names[-1]].internal_api = lambda decorated: decorated  # type: ignore[attr-defined]
    return parents
