"""The routing of a group with a hot rank, as `deep_ep.testing.faults.HotRank` describes it."""

from __future__ import annotations

import torch

from deep_ep.testing.faults import HotRank


def skew_routing(
    topk_idx: torch.Tensor,
    fault: HotRank,
    num_experts: int,
    num_ranks: int,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Redirects selections to the experts of a hot rank; each row's experts stay distinct.

    Args:
        topk_idx: [num_tokens, num_topk] integer, experts per token, -1 where there is none.
        fault: the hot rank and its share. A row cannot select more of the rank's experts than the
            rank has, or than the row has selections; the share ends there.
        num_experts: experts of the group, a multiple of `num_ranks`.
        num_ranks: size of the group.
        generator: source of randomness on the device of `topk_idx`; the global one when None.

    Returns:
        A new tensor like `topk_idx`.
    """
    skewed = topk_idx.clone()
    if topk_idx.numel() == 0:
        return skewed
    num_local = num_experts // num_ranks
    first = fault.rank * num_local
    num_tokens = topk_idx.shape[0]

    def random(width: int) -> torch.Tensor:
        return torch.rand((num_tokens, width), device=topk_idx.device, generator=generator)

    valid = topk_idx >= 0
    is_hot = valid & (topk_idx >= first) & (topk_idx < first + num_local)
    even_share = valid.sum(dim=1, keepdim=True) / num_ranks
    # Rounded up as often as the fraction says, so that the mean over tokens is the share.
    wanted = torch.floor(fault.share * even_share + random(1)).long()
    lacking = wanted - is_hot.sum(dim=1, keepdim=True)

    # Candidates: the rank's experts that the row has not selected, in random order; taken ones last.
    taken = torch.zeros((num_tokens, num_local + 1), dtype=torch.bool, device=topk_idx.device)
    taken.scatter_(1, torch.where(is_hot, topk_idx.long() - first, num_local), True)
    candidates = (random(num_local) + taken[:, :num_local]).argsort(dim=1) + first
    num_candidates = num_local - is_hot.sum(dim=1, keepdim=True)

    # Selections to give up: those of other ranks, in random order.
    position = (random(topk_idx.shape[1]) + ~(valid & ~is_hot)).argsort(dim=1).argsort(dim=1)
    replace = valid & ~is_hot & (position < torch.minimum(lacking, num_candidates))
    chosen = candidates.gather(1, position.clamp(max=num_local - 1)).to(topk_idx.dtype)
    return torch.where(replace, chosen, skewed)
