"""`deep_ep.utils.math`: what tests and benchmarks written for DeepEP compute with, and FP8 rows as `deep_ep.moe` sends them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

# The FP8 format of these helpers: channels that share a scale, the largest e4m3 value, and the least
# maximum of a group, which keeps the scale of zeros finite.
GROUP, _FP8_MAX, _LEAST_AMAX = 128, 448.0, 1e-4
# In float32 or float64 at a time: all rows at once would be several times their own size.
_ROWS, _ELEMENTS = 4096, 1 << 22


def align(x: int, alignment: int) -> int:
    """`x` rounded up to a multiple of `alignment`."""
    return ceil_div(x, alignment) * alignment


def ceil_div(x: int, y: int) -> int:
    """`x / y` rounded up."""
    return -(-x // y)


def safe_div(x: float, y: float) -> float:
    """`x / y`, 0 where `y` is 0."""
    return x / y if y else 0.0


def count_bytes(*values: Any) -> int:
    """Bytes of tensors, also of those in tuples and lists; `None` has none."""
    leaves = [leaf for leaf in tree_leaves(values) if leaf is not None]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)  # sparse ones have no nbytes


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """How far two tensors are apart: 1 - 2 uv / (uu + vv) with u = x + 1 and v = y + 1, in float64; 0 when equal."""
    if x.numel() == 0:
        return 0.0
    products, squares = 0.0, 0.0
    for u, v in zip(torch.split(x.flatten(), _ELEMENTS), torch.split(y.flatten(), _ELEMENTS)):
        u, v = u.double() + 1, v.double() + 1
        products += float((u * v).sum())
        squares += float((u * u + v * v).sum())
    # Without squares all of both is -1.
    return 1 - 2 * products / squares if squares else 0.0


def hash_tensor(t: torch.Tensor) -> int:
    """Sum of the tensor's 32-bit words: insensitive to the order of rows."""
    return int(t.contiguous().view(torch.int32).sum())


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3, and a scale for every 128 channels.

    Args:
        x: [num_tokens, hidden] of a floating type, any width.

    Returns:
        data: [num_tokens, hidden] float8_e4m3fn, contiguous.
        scales: [num_tokens, ceil(hidden / 128)] float32; `x` is about data * scale.
    """
    groups = _groups(x)
    amax = groups.abs().amax(2).clamp(min=_LEAST_AMAX)
    data = (groups * (_FP8_MAX / amax).unsqueeze(2)).to(torch.float8_e4m3fn)
    return data.flatten(1)[:, : x.shape[1]].contiguous(), amax / _FP8_MAX


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """The inverse, [num_tokens, hidden] bfloat16.

    Args:
        x_fp8: [num_tokens, hidden] float8_e4m3fn.
        x_scales: [num_tokens, ceil(hidden / 128)] float32, or [num_tokens, ceil(hidden / 512)] int32 of four
            exponents each (UE8M0).
    """
    if x_scales.dtype == torch.int32:
        x_scales = (x_scales.contiguous().view(torch.uint8).int() << 23).view(torch.float32)
    rows = torch.empty(x_fp8.shape, dtype=torch.bfloat16, device=x_fp8.device)
    for out, data, scales in zip(
        *(torch.split(of_all, _ROWS) for of_all in (rows, x_fp8, x_scales))
    ):
        groups = _groups(data)
        groups *= scales[:, : groups.shape[1], None]
        out.copy_(groups.flatten(1)[:, : x_fp8.shape[1]])
    return rows


def _groups(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, ceil(hidden / 128), 128] float32, a copy, with zeros behind the last channel."""
    missing = -x.shape[1] % GROUP
    padded = F.pad(x.float(), (0, missing)) if missing else x.to(torch.float32, copy=True)
    return torch.unflatten(padded, 1, (-1, GROUP))


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Leaves in each row its distinct numbers, descending, and -1 behind them.

    Args:
        x: [rows, columns] of an integer type; numbers below 0 are dropped.
        num_slots: all numbers are below it.
    """
    is_there = torch.zeros((x.shape[0], num_slots + 1), dtype=torch.bool, device=x.device)
    is_there.scatter_(1, x.clamp(min=-1).long() + 1, True)
    numbers = torch.arange(-1, num_slots, device=x.device).expand_as(is_there)
    found = torch.where(is_there, numbers, -1).sort(1, descending=True).values[:, : x.shape[1]]
    x.copy_(F.pad(found, (0, x.shape[1] - found.shape[1]), value=-1))


def create_grouped_scores(
    scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int
) -> torch.Tensor:
    """Scores of experts, 0 outside of the groups that each token may use.

    Args:
        scores: [num_tokens, num_experts]; experts of a group are neighbours.
        group_idx: [num_tokens, groups per token] int64.
        num_groups: divides `num_experts`.
    """
    groups = torch.unflatten(scores, 1, (num_groups, -1))
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device)
    allowed.scatter_(1, group_idx, True)
    return (groups * allowed.unsqueeze(2)).flatten(1)
