"""What tensors and counters are to the native module: pointers as ints, 0 where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deep_ep.observe.counters import RecvCounters


def of_tensor(tensor: torch.Tensor | None) -> int:
    """Where its elements begin."""
    return 0 if tensor is None else tensor.data_ptr()


def of_own_row(wait_stats: torch.Tensor | None, rank: int) -> int:
    """Where a wait tensor begins, or this rank's row where it has rows."""
    if wait_stats is not None and wait_stats.dim() == 2:
        wait_stats = wait_stats[rank]
    return of_tensor(wait_stats)


def of_counters(counters: RecvCounters | None) -> tuple[int, int, int, int]:
    """Totals, own, ring, and the ring's capacity."""
    return (0, 0, 0, 0) if counters is None else counters.pointers()


def tensors_of(*counters: RecvCounters | None) -> tuple[torch.Tensor, ...]:
    """What operations write that are given these."""
    given = [one for one in counters if one is not None]
    return tuple(tensor for one in given for tensor in (one.totals, one.own, one.ring))
