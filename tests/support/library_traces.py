"""Traces as other libraries' kernels would leave them, of the operations that our counters recorded on real or generated ranks.

An operation becomes the kernels of that library, at the times at which the rank entered, the last rank had entered and the rank
was done; between two operations a matrix product runs. So who was slow in these traces is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from deep_ep.diagnose.collect.snapshot import Snapshot

# What a kernel of an exchange covers: a short time before it, waiting until all have come, the rest, a short time after it.
BEFORE, MEET, MOVE, BOTH, AFTER = "before", "meet", "move", "both", "after"
EXPERTS = "void cutlass::device_kernel<sm90::grouped_gemm>(cutlass::Params)"
_SHORT_US = 2.0
_LEAVE_US = 1.5


class Names(NamedTuple):
    """Of the kernels of one library: (name, what it covers), in their order."""

    dispatch: Sequence[tuple[str, str]]
    combine: Sequence[tuple[str, str]]


LIBRARIES = {
    "DeepEP V1": Names(
        [
            ("void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int)", BEFORE),
            ("void deep_ep::internode::notify_dispatch<false, 8>(int const*, int)", MEET),
            ("void deep_ep::internode::dispatch<false, 8, false, 8>(int4*, float*)", MOVE),
        ],
        [
            ("void dpsk::ep::internode::cached_notify<false>(int, int, int, void**)", MEET),
            ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*)", MOVE),
        ],
    ),
    "DeepEP V1, low latency": Names(
        [("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, void*)", BOTH)],
        [("void deep_ep::internode_ll::combine<false, 7168, 9>(void*, void*)", BOTH)],
    ),
    "DeepEP V2": Names(
        [
            ("void deep_ep::elastic::dispatch_impl<true, 8>(void*, int)", BOTH),
            ("void deep_ep::elastic::dispatch_copy_epilogue_impl<8>(void*)", AFTER),
        ],
        [
            ("void deep_ep::elastic::combine_impl<true, 8>(void*, int)", BOTH),
            ("void deep_ep::elastic::combine_reduce_epilogue_impl<8>(void*)", AFTER),
        ],
    ),
    "Hybrid-EP": Names(
        [("void hybrid_ep::dispatch_kernel<unsigned char, 4>(hybrid_ep::Param)", BOTH)],
        [("void hybrid_ep::combine_kernel<4, 64>(hybrid_ep::Param)", BOTH)],
    ),
    "UCCL": Names(
        [("void uccl::internode_ll::dispatch<true>(void*)", BOTH)],
        [("void uccl::internode_ll::combine<true>(void*)", BOTH)],
    ),
    "MORI": Names(
        [("void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::Args)", BOTH)],
        [("void mori::moe::EpCombineIntraNodeKernel<hip_bfloat16>(mori::moe::Args)", BOTH)],
    ),
    "NCCL EP": Names(
        [("void nccl_ep::internode_ll::dispatch<true>(void*)", BOTH)],
        [("void nccl_ep::internode_ll::combine<true>(void*)", BOTH)],
    ),
    "TensorRT-LLM one-sided": Names(
        [
            ("void tensorrt_llm::moeA2APrepareDispatchKernel(int*, int*, int, unsigned*)", BEFORE),
            ("void tensorrt_llm::moeA2ADispatchKernel<8>(DispatchKernelPointers)", BOTH),
        ],
        [("void tensorrt_llm::moeA2ACombineKernel<__nv_bfloat16, 8>(CombinePointers)", BOTH)],
    ),
    "TensorRT-LLM two-sided": Names(
        [
            ("void tensorrt_llm::kernels::moe_prepare::computeCumsumDevice(int*, int*)", BEFORE),
            ("void tensorrt_llm::kernels::moeAllToAllKernel<true>(Params)", BOTH),
        ],
        [("void tensorrt_llm::kernels::moeAllToAllKernel<false>(Params)", BOTH)],
    ),
    "NIXL EP": Names(
        [("void nixl_ep::internode_ll::dispatch<true>(void*)", BOTH)],
        [("void nixl_ep::internode_ll::combine<true>(void*)", BOTH)],
    ),
}


def events_of(snapshot: Snapshot, names: Names, clock_us: float = 0.0) -> list[dict[str, Any]]:
    """Kernels of one rank, as the profiler writes them.

    Args:
        snapshot: with dispatches and combines of low latency.
        names: of the library.
        clock_us: what the clock of its host is ahead.
    """
    found = []
    for kind in ("dispatch", "combine"):
        counters = snapshot.operations[kind]
        entered = counters.ring_source_fields.index("entered")
        fields = [counters.ring_own_fields.index(name) for name in ("op", "exit", "previous_exit")]
        for slot in counters.operations():
            op, leave, previous = (int(slot[-1, field]) for field in fields)
            came = slot[:-1, entered]
            times = [int(ns) / 1e3 for ns in (previous, came[snapshot.rank], came.max(), leave)]
            found.append((op, kind, times))
    first_us = min(times[1] for _, _, times in found)
    events = []
    for _, kind, times in sorted(found):
        previous, begin, all_came, leave = (us - first_us + 1e6 + clock_us for us in times)
        if times[0] > 0 and begin > previous:
            events.append(_kernel(EXPERTS, previous, begin - _SHORT_US - 0.5, 7))
        for name, begins, ends in _spans(getattr(names, kind), begin, all_came, leave):
            events.append(_kernel(name, begins, ends, 20))
    return events


def _spans(
    kernels: Sequence[tuple[str, str]], begin: float, all_came: float, leave: float
) -> Iterator[tuple[str, float, float]]:
    met = min(max(all_came, begin) + _LEAVE_US, leave)
    for name, covers in kernels:
        yield {
            BEFORE: (name, begin - _SHORT_US, begin - 0.1),
            MEET: (name, begin, met),
            MOVE: (name, met, leave),
            BOTH: (name, begin, leave),
            AFTER: (name, leave + 0.1, leave + 0.5),
        }[covers]


def _kernel(name: str, begin: float, end: float, stream: int) -> dict[str, Any]:
    span = {"ts": begin, "dur": max(end - begin, 0.01)}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, **span, "args": {}}
