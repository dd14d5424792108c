"""Received rows in the order of experts, as grouped matrix products take them, and back.

Rows of an expert stay in the order in which they came: by source rank, then by source token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from deep_ep.observe import profiled

Tensor = torch.Tensor


class Permutation(NamedTuple):
    """Which received row each row by expert is.

    Attributes:
        entries: [num_pairs] int64, index of each (row, top-k entry) pair in the flattened top-k, by expert.
        rows: [num_pairs] int64, received row of each pair.
        places: [num_pairs] int64, row by expert of each pair; [0] where rows of experts follow each other
            without padding.
        num_rows: rows by expert, padding included.
    """

    entries: Tensor
    rows: Tensor
    places: Tensor
    num_rows: int


@profiled.part("permute")
def by_expert(topk_idx: Tensor, num_per_expert: Tensor, alignment: int) -> Permutation:
    """The permutation of what a dispatch received.

    Args:
        topk_idx: [num_rows, num_topk] int64, experts of this rank, -1 elsewhere.
        num_per_expert: [num_local_experts] int64 on the host, pairs of each expert.
        alignment: rows of an expert begin at a multiple of it.
    """
    flat = topk_idx.flatten()
    num_pairs = int(num_per_expert.sum())
    # Pairs without an expert of this rank come first.
    entries = flat.argsort(stable=True)[flat.numel() - num_pairs :]
    rows = entries // topk_idx.shape[1]
    if alignment == 1:
        return Permutation(entries, rows, rows.new_empty(0), num_pairs)
    padded = aligned(num_per_expert, alignment)
    shift = (padded.cumsum(0) - padded) - (num_per_expert.cumsum(0) - num_per_expert)
    places = torch.arange(num_pairs, device=shift.device) + shift.repeat_interleave(num_per_expert)
    return Permutation(entries, rows, places.to(rows.device), int(padded.sum()))


def aligned(num_per_expert: Tensor, alignment: int) -> Tensor:
    """[num_local_experts], rounded up to multiples of `alignment`."""
    return (num_per_expert + alignment - 1) // alignment * alignment


@profiled.part("permute")
def gather(x: Tensor, permutation: Permutation) -> Tensor:
    """Received rows, or what belongs to them, by expert; padding is 0.

    Args:
        x: [num_rows, ...], one per received row.
        permutation: of these rows.

    Returns:
        [permutation.num_rows, ...] like `x`.
    """
    rows = x.index_select(0, permutation.rows)
    if not permutation.places.numel():
        return rows
    padded = rows.new_zeros(permutation.num_rows, *rows.shape[1:])
    # torch has no index_copy for float8.
    kind = torch.uint8 if x.element_size() == 1 else x.dtype
    return padded.view(kind).index_copy(0, permutation.places, rows.view(kind)).view(x.dtype)


@profiled.part("unpermute")
def add_up(y: Tensor, permutation: Permutation, num_rows: int, weights: Tensor | None) -> Tensor:
    """Sums of what the experts of each received row returned.

    Added in float32 and rounded once. On a GPU the order of additions is not fixed, unless
    `torch.use_deterministic_algorithms(True)` says so.

    Args:
        y: [permutation.num_rows, hidden], by expert.
        permutation: of the received rows.
        num_rows: received rows.
        weights: [num_rows, num_topk] float32, of each pair; `None`: 1.

    Returns:
        [num_rows, hidden] like `y`.
    """
    pairs = (y.index_select(0, permutation.places) if permutation.places.numel() else y).float()
    if weights is not None:
        pairs = pairs * weights.flatten().index_select(0, permutation.entries).unsqueeze(-1)
    sums = pairs.new_zeros(num_rows, *y.shape[1:])
    return sums.index_add(0, permutation.rows, pairs).to(y.dtype)


@profiled.part("unpermute")
def weighed_backward(
    grad: Tensor, y: Tensor, permutation: Permutation, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_up`, like `y` and `weights`.

    Args:
        grad: [num_rows, hidden], of its result.
        y, permutation, weights: what it was given.
    """
    pairs = grad.index_select(0, permutation.rows)
    own = weights.flatten().index_select(0, permutation.entries).unsqueeze(-1)
    grad_y = (pairs.float() * own).to(y.dtype)
    if permutation.places.numel():
        grad_y = y.new_zeros(y.shape).index_copy(0, permutation.places, grad_y)
        y = y.index_select(0, permutation.places)
    products = (pairs.float() * y.float()).sum(-1)
    grad_weights = weights.new_zeros(weights.numel()).index_copy(0, permutation.entries, products)
    return grad_y, grad_weights.view_as(weights)
