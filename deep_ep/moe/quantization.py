"""Rows in float8 with a scale for every 128 channels, and back."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

GROUP = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Rows of zeros have a scale, too.
_SMALLEST_AMAX = 1e-4


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as dispatch sends them in FP8.

    Args:
        x: [num_tokens, hidden] of any floating dtype, hidden a multiple of 128.

    Returns:
        data: [num_tokens, hidden] float8_e4m3fn.
        scales: [num_tokens, hidden / 128] float32; data times its scale is x.
    """
    groups = _groups(x)
    scales = groups.abs().amax(-1).clamp(min=_SMALLEST_AMAX) / _LARGEST
    data = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return data.flatten(-2), scales


def dequantize(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What was quantized, [num_rows, hidden] of `dtype`, but for rounding."""
    groups = _groups(data)
    return (groups * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def _groups(x: Tensor) -> Tensor:
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
