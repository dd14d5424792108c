"""Kernels of dispatch and combine by name: whose they are, of which operation, and in which phase they stand.

A new kernel is a row in `KERNELS`, and nothing else. Names are facts from profiles, threads and documents that are public;
above each group of rows stands where. What no row has and still looks like an exchange is listed by name.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

DISPATCH, COMBINE = "dispatch", "combine"
# A transfer whose name tells no direction; and of waiting, whatever it stands in front of.
ALL_TO_ALL = "all-to-all"
# In a kernel of this phase nothing moves: ranks meet, and those that are early wait.
WAITING = "waiting"
TRANSFER = "transfer"
# Before: it is counted where tokens go. Afterwards: rows are put where they belong, or summed up.
LAYOUT, PACK = "layout", "pack"
PHASES = (LAYOUT, WAITING, TRANSFER, PACK)


class Kernel(NamedTuple):
    """One row of the table.

    Attributes:
        library: whose it is.
        pattern: searched in the kernel's name, without its type and what stands in <> and ().
        operation: `DISPATCH`, `COMBINE`, or `ALL_TO_ALL`.
        phase: one of `PHASES`.
    """

    library: str
    pattern: str
    operation: str
    phase: str


_V1, _V2, _OURS = "DeepEP V1", "DeepEP V2", "this package"
_ONE_SIDED, _TWO_SIDED = "TensorRT-LLM one-sided", "TensorRT-LLM two-sided"
# Namespaces of V1 and whatever was made from it, this package included, whatever stands around them.
_EP = r"\b(?:(?:deep|nixl|nccl)_ep|ep|uccl|intranode|internode|internode_ll)::(?:\w+::)*"
_HYBRID = r"\bhybrid_ep::(?:\w+::)*"
_ELASTIC = r"\belastic::(?:\w+::)*"

# The first that fits counts.
KERNELS = (
    # github.com/mlc-ai/TIRx-kernels/pull/55 and 56
    Kernel(_V2, r"\bdispatch_\w*epilogue_impl$", DISPATCH, PACK),
    Kernel(_V2, r"\bcombine_\w*epilogue_impl$", COMBINE, PACK),
    Kernel(_V2, r"\b(?:hybrid_)?dispatch_impl$", DISPATCH, TRANSFER),
    Kernel(_V2, r"\b(?:hybrid_)?combine_impl$", COMBINE, TRANSFER),
    # By namespace.
    Kernel(_V2, _ELASTIC + r"\w*dispatch\w*epilogue\w*", DISPATCH, PACK),
    Kernel(_V2, _ELASTIC + r"\w*combine\w*epilogue\w*", COMBINE, PACK),
    Kernel(_V2, _ELASTIC + r"\w*dispatch\w*", DISPATCH, TRANSFER),
    Kernel(_V2, _ELASTIC + r"\w*combine\w*", COMBINE, TRANSFER),
    Kernel(_V2, _ELASTIC + r"\w*barrier\w*", ALL_TO_ALL, WAITING),
    # github.com/deepseek-ai/DeepEP/pull/588
    Kernel("Hybrid-EP", r"\bfused_permute_dispatch_kernel$", DISPATCH, TRANSFER),
    Kernel("Hybrid-EP", r"\bfused_combine_unpermute_kernel$", COMBINE, TRANSFER),
    Kernel("Hybrid-EP", _HYBRID + r"\w*dispatch\w*", DISPATCH, TRANSFER),
    Kernel("Hybrid-EP", _HYBRID + r"\w*combine\w*", COMBINE, TRANSFER),
    Kernel("Hybrid-EP", _HYBRID + r"unpermute\w*", COMBINE, LAYOUT),
    Kernel("Hybrid-EP", _HYBRID + r"permute\w*", DISPATCH, PACK),
    # github.com/ROCm/mori/pull/285
    Kernel("MORI", r"\bEpDispatch\w*", DISPATCH, TRANSFER),
    Kernel("MORI", r"\bEpCombine\w*", COMBINE, TRANSFER),
    # github.com/ROCm/mori/pull/487
    Kernel("MORI", r"\bep_combine(?:_s)?$", COMBINE, TRANSFER),
    # github.com/NVIDIA/TensorRT-LLM/pull/10591
    Kernel(_ONE_SIDED, r"\bmoeA2APrepareDispatch\w*", DISPATCH, LAYOUT),
    # github.com/flashinfer-ai/flashinfer/pull/3697
    Kernel(_ONE_SIDED, r"\bmoeA2ASanitizeExpertIds\w*", DISPATCH, PACK),
    # By their prefix.
    Kernel(_ONE_SIDED, r"\bmoeA2APrepareCombine\w*", COMBINE, LAYOUT),
    Kernel(_ONE_SIDED, r"\bmoeA2A\w*Dispatch\w*", DISPATCH, TRANSFER),
    Kernel(_ONE_SIDED, r"\bmoeA2A\w*Combine\w*", COMBINE, TRANSFER),
    # github.com/NVIDIA/TensorRT-LLM/pull/18799
    Kernel(_TWO_SIDED, r"\bmoeAllToAllKernel$", ALL_TO_ALL, TRANSFER),
    Kernel(_TWO_SIDED, r"\bmoe_prepare::\w+$", DISPATCH, LAYOUT),
    # csrc/kernels
    Kernel(_OURS, r"\bep::dispatch_layout$", DISPATCH, LAYOUT),
    Kernel(_OURS, r"\bep::copy_rows$", DISPATCH, PACK),
    Kernel(_OURS, r"\bep::sum_rows$", COMBINE, PACK),
    Kernel(_OURS, r"\bep::normal_(?:pack|prove)$", ALL_TO_ALL, LAYOUT),
    Kernel(_OURS, r"\bep::normal_notify$", DISPATCH, WAITING),
    Kernel(_OURS, r"\bep::(?:low_latency|normal)_dispatch$", DISPATCH, TRANSFER),
    Kernel(_OURS, r"\bep::(?:low_latency|normal)_combine$", COMBINE, TRANSFER),
    # github.com/deepseek-ai/profile-data
    Kernel(_V1, r"\bget_dispatch_layout$", DISPATCH, LAYOUT),
    Kernel(_V1, _EP + r"(?:cached_)?notify_dispatch$", DISPATCH, WAITING),
    # github.com/deepseek-ai/DeepEP/issues/575
    Kernel(_V1, _EP + r"cached_notify_combine$", COMBINE, WAITING),
    # github.com/deepseek-ai/profile-data
    Kernel(_V1, _EP + r"cached_notify$", ALL_TO_ALL, WAITING),
    Kernel(_V1, _EP + r"\w*dispatch\w*", DISPATCH, TRANSFER),
    Kernel(_V1, _EP + r"\w*combine\w*", COMBINE, TRANSFER),
)
# Made from V1, and of its names: whose they are says a namespace, after the Python module of that library.
_MADE_FROM_V1 = {"uccl::": "UCCL", "nixl_ep::": "NIXL EP", "nccl_ep::": "NCCL EP"}
_ROWS = [(row, re.compile(row.pattern)) for row in KERNELS]
_LOOKS_LIKE = re.compile(r"dispatch|combine|all_?to_?all|alltoall|a2a", re.IGNORECASE)
# Attention that is split over blocks of keys sums up its parts, which is called combining; ATen dispatches to types.
_IS_NONE = re.compile(
    r"attn|attention|flash|fmha|mla|split|softmax|at::native|cub::", re.IGNORECASE
)


def base_name(name: str) -> str:
    """A kernel's name without its type, and without what stands in <> and ()."""
    name = name.replace("(anonymous namespace)::", "")
    return re.sub(r"^void |<.*|\(.*", "", name, flags=re.DOTALL).strip()


@functools.cache
def kernel_of(name: str) -> Kernel | None:
    """The row of a kernel; `None`: it is no part of a dispatch or combine, as far as is known."""
    base = base_name(name)
    for row, pattern in _ROWS:
        if pattern.search(base):
            made = [library for space, library in _MADE_FROM_V1.items() if space in base]
            if made and row.library == _V1:
                return Kernel(made[0], *row[1:])
            return row
    return None


def looks_like_exchange(name: str) -> bool:
    """Whether a kernel that is in no row is named like a dispatch, a combine or an all-to-all."""
    base = base_name(name)
    return bool(_LOOKS_LIKE.search(base)) and not _IS_NONE.search(base)
