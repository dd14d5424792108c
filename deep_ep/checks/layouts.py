"""Whether the tensors of a dispatch layout agree, where the host can read them.

On a GPU a look at them would stall the stream; there the kernels find out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_ep.base.rules import NORMAL_DISPATCH, fail

if TYPE_CHECKING:
    from deep_ep.base.topology import Topology
    from deep_ep.checks.calls import BufferCall

Tensor = torch.Tensor


def check(place: Topology, call: BufferCall) -> None:
    """Refuses a layout of a dispatch whose tensors contradict each other, or `topk_idx`, and names the place."""
    in_rank, per_expert = call.is_token_in_rank, call.num_tokens_per_expert
    topk_idx, num_experts = call.topk_idx, per_expert.numel()
    counted = "is_token_in_rank counts"
    _same("num_tokens_per_rank", call.num_tokens_per_rank, in_rank.sum(0), counted)
    if place.num_nodes > 1:
        in_node = in_rank.view(len(in_rank), place.num_nodes, place.ranks_per_node).any(2)
        _same("num_tokens_per_rdma_rank", call.num_tokens_per_rdma_rank, in_node.sum(0), counted)
    if topk_idx is None:
        _experts_of_ranks(per_expert.view(place.num_ranks, -1), in_rank.sum(0))
        return
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    selected = torch.bincount(topk_idx[is_expert], minlength=num_experts)
    _same("num_tokens_per_expert", per_expert, selected, "topk_idx counts")
    # A column more for entries that select nobody.
    ranks = torch.where(is_expert, topk_idx // (num_experts // place.num_ranks), place.num_ranks)
    wanted = in_rank.new_zeros(len(topk_idx), place.num_ranks + 1)
    wanted.scatter_(1, ranks, True)
    _same("is_token_in_rank", in_rank, wanted[:, :-1], "topk_idx makes it")


def _same(name: str, given: Tensor, wanted: Tensor, why: str) -> None:
    wrong = (given != wanted).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        at = tuple(place)
        got = f"{name}{place} is {given[at].item()}, and {why} {wanted[at].item()}"
        fail(NORMAL_DISPATCH, got, "layout_values")


def _experts_of_ranks(per_expert: Tensor, per_rank: Tensor) -> None:
    """A token for a rank selects at least one of its experts."""
    selections = per_expert.sum(1)
    is_wrong = (selections < per_rank) | ((per_rank == 0) & (selections > 0))
    is_wrong |= (per_expert < 0).any(1)
    if is_wrong.any():
        rank = int(is_wrong.nonzero()[0])
        got = (
            f"num_tokens_per_expert is {per_expert[rank].tolist()} for the experts of rank {rank}, and "
            f"is_token_in_rank counts {int(per_rank[rank])} tokens for it"
        )
        fail(NORMAL_DISPATCH, got, "layout_values")
