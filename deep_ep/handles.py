"""What dispatch hands to combine: named tuples that unpack like DeepEP's plain ones."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LowLatencyHandle(NamedTuple):
    """The handle of `low_latency_dispatch`. A plain tuple of the same five values serves as well.

    Attributes:
        src_info: [num_local_experts, num_recv_rows] int32, source token of each valid row.
        layout_range: [num_local_experts, num_ranks] int64, low 32 bits: rows from that source; high 32
            bits: its first row.
        num_max_dispatch_tokens_per_rank: as passed to dispatch.
        hidden: channels of a row.
        num_experts: experts in total.
    """

    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int

    @classmethod
    def num_values(cls) -> int:
        """How many values any tuple must have that is to serve as one."""
        return len(cls._fields)
