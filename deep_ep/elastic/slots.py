"""Which row goes where: integer arithmetic on what was routed and received, by torch, without waiting for the device."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def by_expert(
    recv_topk_idx: Tensor, num_local_experts: int, alignment: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where expanded rows lie: by expert, then as compact rows.

    Args:
        recv_topk_idx: [num_rows, num_topk] int64, local experts or -1.
        num_local_experts: of this rank.
        alignment: experts follow each other, and begin at multiples of it.
        capacity: rows that each expert has room for, whatever it receives; `None`: as many as it receives.

    Returns:
        slots: [num_rows, num_topk] int32, expanded row of each pick of this rank, -1 elsewhere.
        num_per_expert: [num_local_experts] int32, picks.
        ends: [num_local_experts] int32, where the rows of each expert end, without its padding.
    """
    device = recv_topk_idx.device
    experts, order = recv_topk_idx.flatten().sort(stable=True)  # -1 comes first
    bounds = torch.searchsorted(experts, torch.arange(num_local_experts + 1, device=device))
    num_per_expert = bounds.diff()
    if capacity is None:
        padded = _aligned(num_per_expert, alignment)
        starts = padded.cumsum(0) - padded
    else:
        starts = torch.arange(num_local_experts, device=device) * capacity
    places = torch.arange(experts.numel(), device=device)
    shifted = places + (starts - bounds[:-1])[experts.clamp_min(0)]
    slots = torch.empty_like(recv_topk_idx, dtype=torch.int32)
    slots.view(-1)[order] = torch.where(experts < 0, -1, shifted).int()
    return slots, num_per_expert.int(), (starts + num_per_expert).int()


def picks_per_expert(recv_topk_idx: Tensor, num_local_experts: int) -> Tensor:
    """[num_local_experts] int32, entries that name each expert.

    Args:
        recv_topk_idx: as in `by_expert`.
        num_local_experts: likewise.
    """
    flat = recv_topk_idx.flatten()
    counts = flat.new_zeros(num_local_experts + 1, dtype=torch.int32)
    ones = torch.ones_like(flat, dtype=torch.int32)
    return counts.scatter_add_(0, flat.remainder(num_local_experts + 1), ones)[:-1]


def aligned_ends(num_per_expert: Tensor, alignment: int) -> Tensor:
    """[num_local_experts] int32, rows of each expert and all before it, each rounded up."""
    if alignment == 1:
        return num_per_expert.cumsum(0, dtype=torch.int32)
    return _aligned(num_per_expert, alignment).cumsum(0, dtype=torch.int32)


def source_ranks(source_prefix: Tensor, num_rows: int) -> Tensor:
    """[num_rows] int64, rank that each received row is from; the number of ranks where there is none.

    Args:
        source_prefix: [num_ranks] int32, rows received from each rank and all before it.
        num_rows: that were allocated.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=source_prefix.device)
    return torch.searchsorted(source_prefix.contiguous(), rows, right=True)


def by_place(source_prefix: Tensor, num_domains: int) -> Tensor:
    """[num_ranks / num_domains] int32, rows from all ranks of a place in their domains, and of the places before it.

    Args:
        source_prefix: as in `source_ranks`.
        num_domains: into how many the ranks are divided.
    """
    if num_domains == 1:
        return source_prefix.clone()
    per_source = source_prefix.diff(prepend=source_prefix.new_zeros(1))
    return per_source.view(num_domains, -1).sum(0).cumsum(0, dtype=torch.int32)


def is_last(group: Tensor) -> Tensor:
    """[num_tokens, num_topk] bool, whether an entry is the last one of its token that names its group.

    Args:
        group: [num_tokens, num_topk] int64, -1: none.
    """
    num_topk = group.shape[1]
    is_later = torch.ones(num_topk, num_topk, dtype=torch.bool, device=group.device).triu(1)
    is_same = group.unsqueeze(2) == group.unsqueeze(1)
    return (group >= 0) & ~(is_same & is_later).any(2)


def entries(is_there: Tensor) -> Tensor:
    """[num_tokens, num_topk] int32, the number of each entry, -1 where it is not there.

    Args:
        is_there: [num_tokens, num_topk] bool.
    """
    numbers = torch.arange(is_there.numel(), dtype=torch.int32, device=is_there.device)
    return torch.where(is_there, numbers.view(is_there.shape), -1)


def of_units(values: Tensor, slots: Tensor, num_units: int) -> Tensor:
    """[num_units] like `values`, those of all picks by compact row, then by entry; 0 behind them.

    Args:
        values: [num_rows, num_topk].
        slots: [num_rows, num_topk] int32, -1 where there is no pick.
        num_units: that were allocated, at least as many as there are.
    """
    is_there = (slots >= 0).flatten()
    places = torch.where(is_there, is_there.cumsum(0) - 1, num_units)
    return values.new_zeros(num_units + 1).scatter_(0, places, values.flatten())[:-1]


def _aligned(num_per_expert: Tensor, alignment: int) -> Tensor:
    return (num_per_expert + alignment - 1) // alignment * alignment
