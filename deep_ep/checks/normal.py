"""Checks of the normal calls: arguments and sizes here, values of layouts and handles in layouts.py and handles.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deep_ep.base import rules
from deep_ep.base.rules import NORMAL_COMBINE, NORMAL_DISPATCH, VECTOR_BYTES, fail
from deep_ep.base.topology import Topology
from deep_ep.checks import arguments as checks
from deep_ep.checks import handles as handle_values
from deep_ep.checks import layouts as layout_values
from deep_ep.checks.arguments import Limits, Tensors
from deep_ep.checks.layouts import Layout
from deep_ep.errors import EPArgumentError, EPTypeError, EPUnsupportedError, EPUsageError
from deep_ep.native.backend import Binding
from deep_ep.types.config import Config
from deep_ep.types.handles import NormalHandle, OneNodeHandle, SeveralNodesHandle, hidden_word

Tensor = torch.Tensor


@dataclass(frozen=True)
class NormalShape:
    """Sizes of one normal call, checked; what follows from them is found once."""

    num_tokens: int
    row_bytes: int
    num_topk: int
    num_scales: int
    num_experts: int
    config: Config

    @property
    def num_channels(self) -> int:
        """Into how many parts the tokens are divided."""
        return self.config.num_sms // 2

    @functools.cached_property
    def keywords(self) -> dict[str, int]:
        """The same as the native runtime takes it."""
        config = self.config
        return {
            "num_tokens": self.num_tokens,
            "num_experts": self.num_experts,
            "num_topk": self.num_topk,
            "num_scales": self.num_scales,
            "row_bytes": self.row_bytes,
            "num_channels": self.num_channels,
            "num_max_nvl_chunked_send_tokens": config.num_max_nvl_chunked_send_tokens,
            "num_max_nvl_chunked_recv_tokens": config.num_max_nvl_chunked_recv_tokens,
            "num_max_rdma_chunked_send_tokens": config.num_max_rdma_chunked_send_tokens,
            "num_max_rdma_chunked_recv_tokens": config.num_max_rdma_chunked_recv_tokens,
        }


# A program calls with few sizes, again and again; only its number of tokens varies.
_shape = functools.lru_cache(maxsize=1024)(NormalShape)


class Rows(NamedTuple):
    """The argument `x` of a dispatch.

    Attributes:
        data: [num_tokens, hidden].
        scales: [num_tokens, num_scales] of 4 bytes, or `None`.
    """

    data: Tensor
    scales: Tensor | None

    @classmethod
    def of(cls, x: Any) -> Rows:
        """From a tensor, or data and scales. What they look like is not checked yet."""
        if not isinstance(x, (tuple, list)):
            return cls(x, None)
        if len(x) != 2 or x[1] is None:
            types = ", ".join(type(item).__name__ for item in x)
            fail(NORMAL_DISPATCH, f"x holds {types or 'nothing'}", "x_pair", EPTypeError)
        return cls(*x)


def topology(call: str, place: Topology, binding: Binding) -> None:
    """Nodes must be equal: a gateway stands for the rank of its place on every other node."""
    checks.kernel_limit(
        call, "the number of ranks of a node", place.ranks_per_node, binding.MAX_RANKS_PER_NODE
    )
    if place.num_ranks % place.ranks_per_node:
        fail(
            call,
            f"{place.num_ranks} ranks are on nodes of {place.ranks_per_node}",
            "uneven_nodes",
            EPUnsupportedError,
            num_ranks=place.num_ranks,
            ranks_per_node=place.ranks_per_node,
        )


def fresh_dispatch(
    limits: Limits,
    place: Topology,
    rows: Rows,
    layout: Layout,
    topk_idx: Any,
    topk_weights: Any,
    expert_alignment: Any,
    num_worst_tokens: Any,
    config: Any,
    wait_stats: Any,
    recv_counters: Any,
) -> NormalShape:
    """Checks a call of `Buffer.dispatch` without handle and returns its sizes."""
    call = NORMAL_DISPATCH
    config = _usable(call, config, place, limits)
    tensors = _tensors(call, limits, place)
    row_bytes, num_scales = _rows(tensors, rows, limits)
    for name, tensor in layout.named(place.num_nodes):
        if tensor is None:
            fail(call, f"{name} is None", "layout_missing", EPUsageError)
        tensors.check(name, tensor)
    num_experts = tensors.dimensions["num_experts"]
    if num_experts == 0 or num_experts % limits.num_ranks:
        padded = max(1, -(-num_experts // limits.num_ranks)) * limits.num_ranks
        got = f"num_tokens_per_expert has {num_experts} experts"
        fail(call, got, "num_experts", num_ranks=limits.num_ranks, padded=padded)
    checks.kernel_limit(call, "num_experts", num_experts, limits.binding.MAX_EXPERTS)
    if (topk_idx is None) != (topk_weights is None):
        missing = "topk_idx" if topk_idx is None else "topk_weights"
        fail(call, f"{missing} alone is None", "topk_pair", EPUsageError)
    if topk_idx is not None:
        tensors.check("topk_idx", topk_idx)
        tensors.check("topk_weights", topk_weights, contiguous=False)
    elif checks.not_negative_int(call, "num_worst_tokens", num_worst_tokens):
        got = f"num_worst_tokens is {num_worst_tokens} and topk_idx is None"
        fail(call, got, "worst_tokens_topk", EPUsageError)
    checks.positive_int(call, "expert_alignment", expert_alignment)
    worst = checks.not_negative_int(call, "num_worst_tokens", num_worst_tokens)
    checks.kernel_limit(call, "num_worst_tokens", worst, _MAX_ROWS)
    num_topk = _num_topk(call, topk_idx, limits)
    shape = _shape(rows.data.shape[0], row_bytes, num_topk, num_scales, num_experts, config)
    _finish(tensors, "dispatch_wait_recv_cost_stats", wait_stats, recv_counters, limits)
    buffer_size(call, shape, place, limits)
    if rows.data.is_cpu:
        layout_values.check(place, layout, topk_idx)
    return shape


def worst_bytes(shape: NormalShape, place: Topology, num_worst_tokens: int) -> int:
    """What a dispatch allocates for so many rows that it may receive and, between nodes, relay."""
    of_scales = 4 * shape.num_scales
    of_topk = (8 + 4) * shape.num_topk  # an index and a weight
    of_source = 4 if place.num_nodes == 1 else 8
    of_relay = 0 if place.num_nodes == 1 else 4 * place.ranks_per_node
    return int(num_worst_tokens) * (shape.row_bytes + of_scales + of_topk + of_source + of_relay)


def cached_dispatch(
    limits: Limits,
    place: Topology,
    rows: Rows,
    handle: Any,
    topk_idx: Any,
    topk_weights: Any,
    config: Any,
    wait_stats: Any,
    recv_counters: Any,
) -> tuple[NormalShape, NormalHandle]:
    """Checks a call of `Buffer.dispatch` with a handle and returns its sizes."""
    call = NORMAL_DISPATCH
    for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if tensor is not None:
            got = f"handle and {name} are both given"
            fail(call, got, "topk_with_handle", EPUsageError)
    config = _usable(call, config, place, limits)
    tensors = _tensors(call, limits, place)
    given = _handle(tensors, handle, place, config)
    num_tokens = tensors.dimensions.pop("num_tokens")
    row_bytes, num_scales = _rows(tensors, rows, limits)
    if rows.data.shape[0] != num_tokens:
        got = f"x has {rows.data.shape[0]} rows"
        fail(call, got, "normal_handle_tokens", num_tokens=num_tokens)
    shape = _shape(num_tokens, row_bytes, 0, num_scales, 0, config)
    _finish(tensors, "dispatch_wait_recv_cost_stats", wait_stats, recv_counters, limits)
    buffer_size(call, shape, place, limits)
    if rows.data.is_cpu:
        handle_values.check(call, given, place, num_tokens, shape.num_channels)
    return shape, given


def combine(
    limits: Limits,
    place: Topology,
    x: Any,
    handle: Any,
    topk_weights: Any,
    biases: tuple[Any, Any],
    config: Any,
    wait_stats: Any,
    recv_counters: Any,
) -> tuple[NormalShape, NormalHandle]:
    """Checks a call of `Buffer.combine` and returns its sizes."""
    call = NORMAL_COMBINE
    config = _usable(call, config, place, limits)
    tensors = _tensors(call, limits, place)
    given = _handle(tensors, handle, place, config)
    tensors.check("x", x, contiguous=False)
    row_bytes = _row_bytes(call, x)
    if topk_weights is not None:
        tensors.check("topk_weights", topk_weights, contiguous=False)
    for i, bias in enumerate(biases):
        if bias is not None:
            tensors.check(f"bias[{i}]", bias, contiguous=False)
    num_tokens = tensors.dimensions["num_tokens"]
    num_topk = _num_topk(call, topk_weights, limits)
    shape = _shape(num_tokens, row_bytes, num_topk, 0, 0, config)
    _finish(tensors, "combine_wait_recv_cost_stats", wait_stats, recv_counters, limits)
    buffer_size(call, shape, place, limits)
    if x.is_cpu:
        handle_values.check(call, given, place, num_tokens, shape.num_channels)
    return shape, given


def buffer_size(call: str, shape: NormalShape, place: Topology, limits: Limits) -> None:
    """The buffers must hold a call of these sizes."""
    nvl_bytes, rdma_bytes = num_bytes(
        limits.binding,
        place.num_ranks,
        place.ranks_per_node,
        shape.config,
        shape.row_bytes,
        shape.num_topk,
        shape.num_scales,
    )
    if limits.num_nvl_bytes < nvl_bytes or limits.num_rdma_bytes < rdma_bytes:
        fail(
            call,
            f"the buffer has num_nvl_bytes = {limits.num_nvl_bytes} and num_rdma_bytes = "
            f"{limits.num_rdma_bytes}",
            "normal_buffer_size",
            nvl_bytes=nvl_bytes,
            rdma_bytes=rdma_bytes,
            row_bytes=shape.row_bytes,
            num_ranks=place.num_ranks,
            ranks_per_node=place.ranks_per_node,
        )


@functools.lru_cache(maxsize=64)
def num_bytes(
    binding: Binding,
    num_ranks: int,
    ranks_per_node: int,
    config: Config,
    row_bytes: int,
    num_topk: int,
    num_scales: int,
) -> tuple[int, int]:
    """Bytes of NVLink and RDMA buffer that a call needs."""
    return binding.normal_bytes(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        num_channels=config.num_sms // 2,
        row_bytes=row_bytes,
        num_topk=num_topk,
        num_scales=num_scales,
        num_max_nvl_chunked_recv_tokens=config.num_max_nvl_chunked_recv_tokens,
        num_max_rdma_chunked_recv_tokens=config.num_max_rdma_chunked_recv_tokens,
    )


# Rows are counted in int32.
_MAX_ROWS = (1 << 31) - 1


def _usable(call: str, config: Any, place: Topology, limits: Limits) -> Config:
    """The configuration of a call, if it is one that the kernels can follow."""
    if not isinstance(config, Config):
        fail(call, f"config is a {type(config).__name__}", "config", EPTypeError)
    most = limits.binding.MAX_CHANNELS
    if config.num_sms % 2 or not 1 <= config.num_sms // 2 <= most:
        got = f"config.num_sms is {config.num_sms}"
        fail(call, got, "config_sms", maximum=most, most_sms=2 * most)
    if config.num_max_nvl_chunked_recv_tokens < place.num_nodes:
        depth = config.num_max_nvl_chunked_recv_tokens
        got = f"config.num_max_nvl_chunked_recv_tokens is {depth}"
        fail(call, got, "config_queues", num_nodes=place.num_nodes)
    return config


def _tensors(call: str, limits: Limits, place: Topology) -> Tensors:
    return Tensors(
        call,
        limits.device,
        num_ranks=limits.num_ranks,
        num_nodes=place.num_nodes,
        ranks_per_node=place.ranks_per_node,
    )


def _rows(tensors: Tensors, rows: Rows, limits: Limits) -> tuple[int, int]:
    """Bytes of a row, and its number of scales."""
    data, scales = rows
    tensors.check("x", data, contiguous=False)
    row_bytes = _row_bytes(tensors.call, data)
    checks.kernel_limit(tensors.call, "num_tokens", data.shape[0], limits.binding.MAX_TOKENS)
    if scales is None:
        return row_bytes, 0
    if data.element_size() != 1:
        fail(tensors.call, f"x has scales and dtype {data.dtype}", "scaled_item")
    tensors.check("x_scales", scales, contiguous=False)
    num_scales = scales.shape[1]
    checks.kernel_limit(tensors.call, "num_scales", num_scales, limits.binding.MAX_NORMAL_SCALES)
    return row_bytes, num_scales


def _row_bytes(call: str, x: Tensor) -> int:
    item, hidden = x.element_size(), x.shape[1]
    if hidden == 0 or hidden * item % VECTOR_BYTES:
        padded = max(1, -(-hidden * item // VECTOR_BYTES)) * VECTOR_BYTES // item
        got = f"x has rows of {hidden * item} bytes"
        fail(call, got, "row_bytes", padded=padded)
    return hidden * item


def _num_topk(call: str, tensor: Tensor | None, limits: Limits) -> int:
    if tensor is None:
        return 0
    num_topk, most = tensor.shape[1], limits.binding.MAX_NORMAL_TOPK
    if not 0 < num_topk <= most:
        fail(call, f"num_topk is {num_topk}", "topk", maximum=most)
    return num_topk


def _finish(
    tensors: Tensors, name: str, wait_stats: Any, recv_counters: Any, limits: Limits
) -> None:
    if wait_stats is not None:
        tensors.check(name, wait_stats)
    checks.recv_counters(tensors.call, recv_counters, limits)


def _handle(tensors: Tensors, handle: Any, place: Topology, config: Config) -> NormalHandle:
    """The handle of a dispatch from any tuple or list of its tensors."""
    call = tensors.call
    kind: type[NormalHandle] = OneNodeHandle
    table = rules.ONE_NODE_HANDLE
    if place.num_nodes > 1:
        kind, table = SeveralNodesHandle, rules.SEVERAL_NODES_HANDLE
    if not isinstance(handle, (tuple, list)):
        got = f"handle is a {type(handle).__name__}"
        fail(call, got, "normal_handle", EPTypeError, length=len(table))
    if len(handle) != len(table):
        got = f"handle has {len(handle)} elements"
        fail(call, got, "normal_handle", EPArgumentError, length=len(table))
    tensors.dimensions["num_channels"] = config.num_sms // 2
    tensors.dimensions["8"] = 8
    for rule, item in zip(table, handle):
        tensors.check_rule(rule, item)
    given = kind(*handle)
    if given.num_relay_rows < 0:
        got = f"{given.name_of('nvl_head')} has {given.nvl_head.shape[0]} rows"
        fail(call, got, "normal_handle_values")
    if hidden_word(given.channel_prefix) is None:
        got = f"{given.name_of('channel_prefix')} is a copy"
        fail(call, got, "normal_handle_copy")
    return given
