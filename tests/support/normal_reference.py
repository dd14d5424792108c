"""Normal dispatch and combine in plain torch, for all ranks at once.

Written from the API specification alone; the judge of the kernel tests. It moves no bytes and knows
no protocol: inputs of all ranks go in, what every rank must hold afterwards comes out. Rows are in
the order that is promised: source ranks ascending, a source's tokens ascending. Sums are in the order
that is promised, so that results have one right value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """Where the tokens of one rank go.

    num_tokens_per_rank: [num_ranks] int32. num_tokens_per_rdma_rank: [num_nodes] int32, or None on
    one node. num_tokens_per_expert: [num_experts] int32, every selection counted.
    is_token_in_rank: [T, num_ranks] bool.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_rdma_rank: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


class Received(NamedTuple):
    """What one rank holds after a dispatch; `n` rows.

    x: [n, hidden]. scales: [n, num_scales], or None. topk_idx: [n, num_topk] int64, experts of this
    rank by their local number, -1 for those of others. topk_weights: [n, num_topk] float32, 0 where
    topk_idx is -1. Both None if there are none. sources, tokens: [n] int64, where each row is from.
    prefix: [num_ranks] int32, rows of that source and all before it. counts: selections per local
    expert.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    sources: torch.Tensor
    tokens: torch.Tensor
    prefix: torch.Tensor
    counts: list[int]


def layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int) -> Layout:
    """topk_idx [T, K], -1 for none."""
    num_tokens = len(topk_idx)
    experts = torch.arange(num_experts, device=topk_idx.device)
    selected = topk_idx[:, :, None] == experts  # [T, K, E]
    in_rank = selected.any(1).view(num_tokens, num_ranks, num_experts // num_ranks).any(2)
    in_node = in_rank.view(num_tokens, num_ranks // ranks_per_node, ranks_per_node).any(2)
    return Layout(
        in_rank.sum(0).int(),
        in_node.sum(0).int() if ranks_per_node < num_ranks else None,
        selected.sum((0, 1)).int(),
        in_rank,
    )


def dispatch(
    xs: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    scales: Sequence[torch.Tensor] | None = None,
    topk_idxs: Sequence[torch.Tensor] | None = None,
    topk_weights: Sequence[torch.Tensor] | None = None,
) -> list[Received]:
    """Per rank xs [T, hidden] of any dtype, scales [T, num_scales], topk_idxs [T, K] -> per rank what
    arrives."""
    num_ranks = len(xs)
    num_local_experts = len(layouts[0].num_tokens_per_expert) // num_ranks
    result = []
    for rank in range(num_ranks):
        tokens = [one.is_token_in_rank[:, rank].nonzero()[:, 0] for one in layouts]
        mine = slice(rank * num_local_experts, (rank + 1) * num_local_experts)
        idx = weights = None
        if topk_idxs is not None and topk_weights is not None:
            idx = rows_of(topk_idxs, tokens) - mine.start
            elsewhere = (idx < 0) | (idx >= num_local_experts)
            idx = idx.masked_fill(elsewhere, -1)
            weights = rows_of(topk_weights, tokens).masked_fill(elsewhere, 0)
        counts = torch.stack([one.num_tokens_per_expert[mine] for one in layouts]).sum(0)
        result.append(
            Received(
                rows_of(xs, tokens),
                None if scales is None else rows_of(scales, tokens),
                idx,
                weights,
                torch.cat([torch.full_like(rows, s) for s, rows in enumerate(tokens)]),
                torch.cat(tokens),
                torch.tensor([len(rows) for rows in tokens]).cumsum(0).int(),
                counts.tolist(),
            )
        )
    return result


def rows_of(tensors: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those tokens of each rank, one rank after the other."""
    dtype = tensors[0].dtype
    if dtype == torch.float8_e4m3fn:  # which older versions of torch do not index
        tensors = [tensor.view(torch.uint8) for tensor in tensors]
    return torch.cat([tensor[rows] for tensor, rows in zip(tensors, tokens)]).view(dtype)


def combine(
    ys: Sequence[torch.Tensor],
    received: Sequence[Received],
    rank: int,
    num_tokens: int,
    biases: Sequence[torch.Tensor | None] = (),
    ranks_per_node: int | None = None,
) -> torch.Tensor:
    """What `rank` gets back: [num_tokens, width] of the dtype of ys, bfloat16 or float32.

    ys[r]: [n, width], rows as received[r]. In float32: biases first, then ranks ascending, rounded
    once. Of another node than the rank's own, the sum of its ranks is added, rounded as it travels.
    """
    ranks_per_node = ranks_per_node or len(ys)
    total = torch.zeros(num_tokens, ys[0].shape[1])
    for bias in biases:
        if bias is not None:
            total += bias
    for first in range(0, len(ys), ranks_per_node):
        is_own_node = first == rank // ranks_per_node * ranks_per_node
        part = total if is_own_node else torch.zeros_like(total)
        for r in range(first, first + ranks_per_node):
            mine = received[r].sources == rank
            part.index_add_(0, received[r].tokens[mine], ys[r][mine].float())
        if not is_own_node:
            total += part.to(ys[0].dtype)
    return total.to(ys[0].dtype)
