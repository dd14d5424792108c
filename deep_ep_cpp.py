"""The compiled module of older DeepEP wheels: the names that programs take from it directly."""

from __future__ import annotations

from deep_ep.buffer import Buffer as _Buffer
from deep_ep.native.runtime import Runtime as Buffer
from deep_ep.types.config import Config, topk_idx_t
from deep_ep.types.event import EventHandle

get_low_latency_rdma_size_hint = _Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = _Buffer.is_sm90_compiled

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "get_low_latency_rdma_size_hint",
    "is_sm90_compiled",
    "topk_idx_t",
]
