"""Low-latency dispatch and combine in plain torch, for all ranks at once.

Written from the API specification alone; the judge of the kernel tests. It moves no bytes and knows
no protocol: inputs of all ranks go in, what every rank must hold afterwards comes out. Rows are in
the order the kernels promise: source ranks ascending, a source's tokens ascending, its top-k slots
ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from deep_ep.native import backend
from support import cuda_settings  # noqa: F401 - before CUDA starts
from support.normal_reference import rows_of

FP8_MAX = 448.0  # largest finite e4m3 value
FP8_GROUP = backend.get().binding.CHANNELS_PER_SCALE  # channels that share one scale
MIN_AMAX = 1e-4  # keeps the scale of an all-zero group finite

# Bounds on calc_diff of what was rounded, all those of the original's test.
ROUNDED_SCALE_DIFF = 0.007
FP8_COMBINE_DIFF = 9e-4
BF16_COMBINE_DIFF = 1e-5


class Dispatched(NamedTuple):
    """What one rank holds after a dispatch; lists are indexed by local expert.

    data: [count, hidden] bfloat16, or float8_e4m3fn. scales: [count, hidden/128] float32, or
    [count, hidden/512] int32 (four UE8M0 bytes, group 4c in the lowest), or None in BF16 mode.
    src_info: [count] int32. layout_range: [num_local_experts, num_ranks] int64, first row << 32 |
    rows. recv_count: [num_local_experts] int32.
    """

    data: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    src_info: list[torch.Tensor]
    layout_range: torch.Tensor
    recv_count: torch.Tensor


def cast_fp8(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, hidden] -> e4m3 [rows, hidden], float32 scales [rows, hidden/128]; x ~ data * scale."""
    groups = x.float().unflatten(-1, (-1, FP8_GROUP))
    amax = groups.abs().amax(-1).clamp(min=MIN_AMAX)
    scale = amax * torch.tensor(1 / FP8_MAX)
    if round_scale:
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()  # ceil(log2(scale)), exactly
        scale = torch.ldexp(torch.ones_like(amax), exponent)
        factor = torch.ldexp(torch.ones_like(amax), -exponent)
    else:
        factor = torch.div(
            torch.full_like(amax, FP8_MAX), amax
        )  # 448 / amax would go through a rounded reciprocal
    scaled = (groups * factor.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), scale


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two [rows, groups] float32 -> their exponent bytes, four to an int32.

    [rows, ceil(groups/4)]; where the groups do not fill the last one, its upper bytes are zero.
    """
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % 4))
    return exponents.contiguous().view(torch.int32)


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_ue8m0, [rows, 4 * columns]."""
    exponents = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8).int()
    return (exponents << 23).view(torch.float32)


def dequantise(data: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows of a dispatch -> bfloat16 [rows, hidden], whatever mode they were dispatched in."""
    if scales is None:
        return data
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales)
    groups = data.float().unflatten(-1, (-1, FP8_GROUP))
    return (groups * scales[:, : groups.shape[1], None]).flatten(-2).bfloat16()


def dispatch(
    xs: Sequence[torch.Tensor],
    topk_idxs: Sequence[torch.Tensor],
    num_experts: int,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> list[Dispatched]:
    """Per rank xs [T, hidden] bfloat16 and topk_idxs [T, K], -1 for none -> per rank Dispatched."""
    num_ranks = len(xs)
    num_local_experts = num_experts // num_ranks
    casts = [cast_fp8(x, round_scale) if use_fp8 else (x, None) for x in xs]
    results = []
    for rank in range(num_ranks):
        data, scales, src_info = [], [], []
        layout_range = torch.zeros(num_local_experts, num_ranks, dtype=torch.int64)
        for i in range(num_local_experts):
            expert = rank * num_local_experts + i
            tokens = [(topk_idx == expert).nonzero()[:, 0] for topk_idx in topk_idxs]
            begin = 0
            for source in range(num_ranks):
                layout_range[i, source] = begin << 32 | len(tokens[source])
                begin += len(tokens[source])
            data.append(rows_of([cast[0] for cast in casts], tokens))
            src_info.append(torch.cat(tokens).int())
            if use_fp8:
                rows = torch.cat([cast[1][t] for cast, t in zip(casts, tokens)])
                scales.append(pack_ue8m0(rows) if use_ue8m0 else rows)
        recv_count = torch.tensor([len(rows) for rows in data], dtype=torch.int32)
        results.append(
            Dispatched(data, scales if use_fp8 else None, src_info, layout_range, recv_count)
        )
    return results


def combine(
    ys: Sequence[Sequence[torch.Tensor]],
    topk_idxs: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
) -> list[torch.Tensor]:
    """ys[rank][local expert]: at least recv_count rows of bfloat16, in the order of `dispatched`.

    Returns per rank [T, hidden] bfloat16. topk_idxs may have entries of the dispatch changed to -1.
    """
    return [
        combine_one(rank, ys, topk_idxs[rank], topk_weights[rank], dispatched)
        for rank in range(len(ys))
    ]


def combine_one(
    rank: int,
    ys: Sequence[Sequence[torch.Tensor]],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    dispatched: Sequence[Dispatched],
) -> torch.Tensor:
    """The tokens of one rank: float32 accumulator, slots ascending, a fused multiply-add per slot.

    Slots with -1 are skipped; there is one rounding, at the end.
    """
    num_local_experts, hidden = len(ys[0]), ys[0][0].shape[-1]
    num_tokens, num_topk = topk_idx.shape
    rows = torch.zeros(num_tokens, num_topk, hidden, dtype=torch.bfloat16)
    for expert in topk_idx[topk_idx >= 0].unique().tolist():
        owner, i = divmod(expert, num_local_experts)
        begin, count = divmod(int(dispatched[owner].layout_range[i, rank]), 1 << 32)
        row_of_token = torch.zeros(num_tokens, dtype=torch.int64)
        tokens_sent = dispatched[owner].src_info[i][begin : begin + count].long()
        row_of_token[tokens_sent] = torch.arange(begin, begin + count)
        tokens, slots = (topk_idx == expert).nonzero(as_tuple=True)
        rows[tokens, slots] = ys[owner][i][row_of_token[tokens]]
    acc = torch.zeros(num_tokens, hidden)
    for k in range(num_topk):
        selected = topk_idx[:, k] >= 0
        acc[selected] = fma(rows[selected, k], topk_weights[selected, k, None], acc[selected])
    return acc.bfloat16()


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32(a * b + c) rounded once, for bfloat16 a and float32 b, c.

    The product is exact in float64 (8 + 24 significant bits). The float64 sum is not, and rounding
    it again to float32 could err in a tie; so it is first rounded to odd (the neighbour whose last
    bit is set), after which the second rounding is the correct one.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)  # exact: Knuth's two-sum
    towards = torch.where(error > 0, torch.inf, -torch.inf)
    inexact_even = (
        (error != 0) & error.isfinite() & ((total.contiguous().view(torch.int64) & 1) == 0)
    )
    return torch.where(inexact_even, torch.nextafter(total, towards), total).float()
