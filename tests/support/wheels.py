"""Classes of other kernels, which add waiting to tensors as those do. Written from what is public of their interfaces."""

from __future__ import annotations

import functools
from typing import Any

import torch

CYCLES_PER_US = 1000


class _Wheel:
    """What the fakes share: who waits for whom, and a record of the tensors that were passed.

    Attributes:
        waits_us: what a call adds, of each rank of the group.
        passed: by method.
    """

    def __init__(self, group: Any, **_options: Any) -> None:
        self.group = group
        self.rank, self.group_size = group.rank, group.size
        self.waits_us = [0.0] * group.size
        self.passed: dict[str, list[Any]] = {}

    def _add_cycles(self, method: str, tensor: Any, experts: int) -> None:
        """Each local expert adds what it waits; the own rank takes a poll."""
        self.passed.setdefault(method, []).append(tensor)
        if tensor is None:
            return
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        # Kernels without checks would write behind a shorter one.
        assert tensor.shape == (len(self.waits_us),)
        waits = torch.tensor([us * CYCLES_PER_US for us in self.waits_us]).to(torch.int64)
        waits[self.rank] += 1
        tensor += waits.to(tensor.device) * experts


class Buffer(_Wheel):
    """DeepEP V1, sgl-deep-ep, hybrid-ep's `Buffer`, UCCL's wrapper."""

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True,
    ) -> tuple[Any, int]:
        self._experts = num_experts // self.group_size
        self._add_cycles("dispatch", dispatch_wait_recv_cost_stats, self._experts)
        return x, use_fp8

    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        zero_copy: bool = False,
        combine_wait_recv_cost_stats: Any = None,
    ) -> Any:
        self._add_cycles("combine", combine_wait_recv_cost_stats, self._experts)
        return x


class MoriBuffer(Buffer):
    """Has the keyword, and takes no tensor."""

    @functools.wraps(Buffer.low_latency_dispatch)
    def low_latency_dispatch(self, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        if kwargs.get("dispatch_wait_recv_cost_stats") is not None:
            raise NotImplementedError("dispatch_wait_recv_cost_stats")
        return super().low_latency_dispatch(*args, **kwargs)


class NpuBuffer(_Wheel):
    """sgl-kernel-npu: normal operations, microseconds of each expert in 32 bits, which run over."""

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
    ) -> Any:
        self.passed.setdefault("dispatch", []).append(dispatch_wait_recv_cost_stats)
        stats = dispatch_wait_recv_cost_stats
        if stats is not None:
            assert stats.dtype == torch.int32
            waits = torch.tensor(self.waits_us).repeat_interleave(stats.numel() // self.group_size)
            stats += waits.to(stats)
        return x

    def combine(self, x: Any, handle: Any = None, combine_send_cost_stats: Any = None) -> Any:
        self.passed.setdefault("combine", []).append(combine_send_cost_stats)
        return x


class NixlBuffer(Buffer):
    """NIXL EP: ranks come and go, each call has as many as its experts say."""

    def __init__(self, rank: int, tcp_store_group: Any) -> None:
        self.rank, self.tcp_store_group, self.group = rank, tcp_store_group, None
        self.passed = {}

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int
    ) -> None:
        self._experts = num_experts_per_rank
        self.waits_us = [0.0] * num_ranks

    def dispatch(self, x: Any, topk_idx: Any, num_experts: int) -> tuple[Any, Any]:
        """Normal; counts nothing."""
        return x, None

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        dispatch_wait_recv_cost_stats: Any = None,
    ) -> tuple[Any, tuple[Any, Any]]:
        there = num_experts // self._experts
        self.waits_us = (self.waits_us + [0.0] * there)[:there]
        self._add_cycles("dispatch", dispatch_wait_recv_cost_stats, self._experts)
        return x, (None, torch.zeros(self._experts, there))


class ElasticBuffer(_Wheel):
    """DeepEP V2, and every other class that counts nothing."""

    def dispatch(self, x: Any) -> Any:
        return x


class OldBuffer(_Wheel):
    """DeepEP before it counted."""

    def low_latency_dispatch(
        self, x: Any, topk_idx: Any, num_max_dispatch_tokens_per_rank: int, num_experts: int
    ) -> Any:
        return x


def as_of(module: str, cls: type, name: str) -> type:
    """The class as a wheel has it; a new one each time, because methods of classes are patched."""
    methods = {name: value for name, value in vars(cls).items() if callable(value)}
    return type(name, (cls,), {"__module__": module, **methods})
