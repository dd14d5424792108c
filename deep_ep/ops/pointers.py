"""What tensors and counters are to the native module: pointers as ints, 0 where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deep_ep.observe.counters import RecvCounters


def of_tensors(tensors: dict[str, torch.Tensor | None]) -> dict[str, int]:
    """Where the elements of each begin, by name."""
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def own_row(wait_stats: torch.Tensor | None, rank: int) -> torch.Tensor | None:
    """A wait tensor, or this rank's row of one that has rows."""
    if wait_stats is not None and wait_stats.dim() == 2:
        wait_stats = wait_stats[rank]
    return wait_stats


def of_counters(counters: RecvCounters | None) -> tuple[int, int, int, int]:
    """Totals, own, ring, and the ring's capacity."""
    return (0, 0, 0, 0) if counters is None else counters.pointers()


def tensors_of(*counters: RecvCounters | None) -> tuple[torch.Tensor, ...]:
    """What operations write that are given these."""
    given = [one for one in counters if one is not None]
    return tuple(tensor for one in given for tensor in (one.totals, one.own, one.ring))
