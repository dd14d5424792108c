"""Sums of rows by expert are made in float32 and rounded once, and so are their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deep_ep.moe import permutation
from deep_ep.moe.permutation import Permutation

Tensor = torch.Tensor
NUM_EXPERTS, NUM_ROWS, NUM_TOPK, HIDDEN = 4, 6, 4, 256
# Of sums of so few numbers, in float32; one rounding to bfloat16 is up to 2**-9.
FLOAT32 = 1e-5


class Rows(NamedTuple):
    """Rows of which each is for all experts, in numbers that bfloat16 rounds."""

    by_expert: Permutation
    weights: Tensor
    y: Tensor
    grad: Tensor


@pytest.fixture(params=[1, 4], ids=["packed", "padded"])
def rows(request: pytest.FixtureRequest) -> Rows:
    random = torch.Generator().manual_seed(1)
    topk_idx = torch.stack([torch.randperm(NUM_EXPERTS, generator=random) for _ in range(NUM_ROWS)])
    counts = torch.full((NUM_EXPERTS,), NUM_ROWS)
    by_expert = permutation.by_expert(topk_idx, counts, request.param)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random)

    y = draw(by_expert.num_rows, HIDDEN).bfloat16()
    return Rows(by_expert, draw(NUM_ROWS, NUM_TOPK), y, draw(NUM_ROWS, HIDDEN).bfloat16())


def of_pairs(rows: Rows) -> Tensor:
    """[NUM_ROWS, NUM_TOPK, HIDDEN] float64: what the experts returned, by row and top-k entry."""
    places, entries = rows.by_expert.places, rows.by_expert.entries
    pairs = rows.y.double()[places] if places.numel() else rows.y.double()
    result = pairs.new_zeros(NUM_ROWS * NUM_TOPK, HIDDEN).index_copy(0, entries, pairs)
    return result.view(NUM_ROWS, NUM_TOPK, HIDDEN)


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """Within half a step of bfloat16, which has eight bits, and float32's own errors."""
    assert got.dtype is torch.bfloat16
    half_step = 2.0 ** (exact.abs().log2().floor() - 8)
    assert ((got.double() - exact).abs() <= half_step + FLOAT32 * exact.abs()).all()


class Sums(TorchDispatchMode):
    """Notes in which types sums are made: torch for CPUs rounds bfloat16 once all the same, torch for GPUs does not."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in str(func):
            self.dtypes |= {arg.dtype for arg in (args[0], args[3])}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_weighed", [True, False])
def test_what_experts_returned_is_added_up_in_float32(rows: Rows, is_weighed: bool) -> None:
    weights = rows.weights if is_weighed else None
    with Sums() as sums:
        got = permutation.add_up(rows.y, rows.by_expert, NUM_ROWS, weights)
    assert sums.dtypes == {torch.float32}
    factors = rows.weights.double() if is_weighed else torch.ones(NUM_ROWS, NUM_TOPK).double()
    assert_rounded_once(got, (of_pairs(rows) * factors.unsqueeze(-1)).sum(1))


def test_gradients_are_made_in_float32(rows: Rows) -> None:
    by_expert, weights, y, grad = rows
    grad_y, grad_weights = permutation.weighed_backward(grad, y, by_expert, weights)
    own = weights.double().unsqueeze(-1) * grad.double().unsqueeze(1)
    assert_rounded_once(of_pairs(rows._replace(y=grad_y)).bfloat16(), own)

    assert grad_weights.dtype is torch.float32
    exact = (of_pairs(rows) * grad.double().unsqueeze(1)).sum(-1)
    torch.testing.assert_close(grad_weights.double(), exact, rtol=FLOAT32, atol=0.0)
