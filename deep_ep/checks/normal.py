"""Checks of the normal calls: arguments and sizes here, values of layouts and handles in layouts.py and handles.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep_ep.base import rules
from deep_ep.base.rules import VECTOR_BYTES, fail
from deep_ep.base.topology import Topology
from deep_ep.checks import arguments as checks
from deep_ep.checks import handles as handle_values
from deep_ep.checks import layouts as layout_values
from deep_ep.checks.arguments import Limits, Tensors
from deep_ep.errors import EPTypeError, EPUnsupportedError, EPUsageError
from deep_ep.native.backend import Binding
from deep_ep.types.config import Config
from deep_ep.types.handles import (
    NormalHandle,
    OneNodeHandle,
    SeveralNodesHandle,
    hidden_word,
    name_of,
)

if TYPE_CHECKING:
    from deep_ep.checks.calls import ElasticDispatch, NormalCombine, NormalDispatch, StreamCall

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
        sizes, config = dict(vars(self)), dict(vars(self.config))
        del sizes["config"], config["num_sms"]
        return {**sizes, **config, "num_channels": self.num_channels}


# A program calls with few sizes, again and again; only its number of tokens varies.
_shape = functools.lru_cache(maxsize=1024)(NormalShape)


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


# What get_dispatch_layout returns; without a handle it must be given, that of nodes where there are several.
_LAYOUT = (
    *("num_tokens_per_rank", "num_tokens_per_rdma_rank"),
    *("is_token_in_rank", "num_tokens_per_expert"),
)


def fresh_dispatch(limits: Limits, place: Topology, call: NormalDispatch) -> NormalShape:
    """Checks a call of `Buffer.dispatch` without handle and returns its sizes."""
    take_scales(call)
    config, tensors = _begin(call, place, limits)
    if place.num_nodes == 1:
        call.num_tokens_per_rdma_rank = None
    row_bytes, num_scales = _rows(tensors, call, limits)
    for name in _LAYOUT:
        is_needed = place.num_nodes > 1 or name != "num_tokens_per_rdma_rank"
        if is_needed and getattr(call, name) is None:
            what = "what get_dispatch_layout returned"
            fail(call.name, f"{name} is None", "no_handle", EPUsageError, what=what)
        tensors.check(name)
    num_experts = tensors.dimensions["num_experts"]
    got = f"num_tokens_per_expert has {num_experts} experts"
    checks.num_experts(call.name, got, num_experts, limits.num_ranks, limits.binding)
    if (call.topk_idx is None) != (call.topk_weights is None):
        missing = "topk_idx" if call.topk_idx is None else "topk_weights"
        fail(call.name, f"{missing} alone is None", "topk_pair", EPUsageError)
    tensors.check("topk_weights")
    checks.positive_int(call.name, "expert_alignment", call.expert_alignment)
    worst = checks.not_negative_int(call.name, "num_worst_tokens", call.num_worst_tokens)
    if worst and call.topk_idx is None:
        got = f"num_worst_tokens is {worst} and topk_idx is None"
        fail(call.name, got, "worst_tokens_topk", EPUsageError)
    checks.kernel_limit(call.name, "num_worst_tokens", worst, _MAX_ROWS)
    num_topk = _num_topk(call.name, call.topk_idx, limits)
    tensors.check()
    shape = _shape(call.x.shape[0], row_bytes, num_topk, num_scales, num_experts, config)
    _finish(call, shape, place, limits, None)
    return shape


def worst_bytes(shape: NormalShape, place: Topology, num_worst_tokens: int) -> int:
    """What a dispatch allocates for so many rows that it may receive and, between nodes, relay."""
    of_scales = 4 * shape.num_scales
    of_topk = (8 + 4) * shape.num_topk  # an index and a weight
    of_source = 4 if place.num_nodes == 1 else 8
    of_relay = 0 if place.num_nodes == 1 else 4 * place.ranks_per_node
    return int(num_worst_tokens) * (shape.row_bytes + of_scales + of_topk + of_source + of_relay)


def cached_dispatch(
    limits: Limits, place: Topology, call: NormalDispatch
) -> tuple[NormalShape, NormalHandle]:
    """Checks a call of `Buffer.dispatch` with a handle and returns its sizes."""
    take_scales(call)
    for name in ("topk_idx", "topk_weights"):
        if getattr(call, name) is not None:
            got = f"handle and {name} are both given"
            fail(call.name, got, "topk_with_handle", EPUsageError)
    config, tensors = _begin(call, place, limits)
    given = _handle(tensors, call, place)
    for name in _LAYOUT:
        setattr(call, name, None)
    num_tokens = tensors.dimensions.pop("num_tokens")
    row_bytes, num_scales = _rows(tensors, call, limits)
    if call.x.shape[0] != num_tokens:
        got = f"x has {call.x.shape[0]} rows"
        fail(call.name, got, "normal_handle_tokens", num_tokens=num_tokens)
    tensors.check()
    shape = _shape(num_tokens, row_bytes, 0, num_scales, 0, config)
    _finish(call, shape, place, limits, given)
    return shape, given


def combine(
    limits: Limits, place: Topology, call: NormalCombine
) -> tuple[NormalShape, NormalHandle]:
    """Checks a call of `Buffer.combine` and returns its sizes."""
    call.bias = checks.bias_pair(call.bias)
    config, tensors = _begin(call, place, limits)
    given = _handle(tensors, call, place)
    tensors.check("x")
    row_bytes = bytes_of_row(call.name, call.x)
    tensors.check()
    num_tokens = tensors.dimensions["num_tokens"]
    num_topk = _num_topk(call.name, call.topk_weights, limits)
    shape = _shape(num_tokens, row_bytes, num_topk, 0, 0, config)
    _finish(call, shape, place, limits, given)
    return shape, given


def _finish(
    call: StreamCall,
    shape: NormalShape,
    place: Topology,
    limits: Limits,
    handle: NormalHandle | None,
) -> None:
    """Whether there are counters, room, and on the CPU a layout or handle that can be right."""
    checks.recv_counters(call, limits)
    row = shape.row_bytes, shape.num_topk, shape.num_scales
    nvl_bytes, rdma_bytes = num_bytes(
        limits.binding, place.num_ranks, place.ranks_per_node, shape.config, *row
    )
    if limits.num_nvl_bytes < nvl_bytes or limits.num_rdma_bytes < rdma_bytes:
        fail(
            call.name,
            f"the buffer has num_nvl_bytes = {limits.num_nvl_bytes} and num_rdma_bytes = "
            f"{limits.num_rdma_bytes}",
            "normal_buffer_size",
            nvl_bytes=nvl_bytes,
            rdma_bytes=rdma_bytes,
            row_bytes=shape.row_bytes,
            num_ranks=place.num_ranks,
            ranks_per_node=place.ranks_per_node,
        )
    if not call.x.is_cpu:
        return
    if handle is None:
        layout_values.check(place, call)
    else:
        handle_values.check(call.name, handle, place, shape.num_tokens, shape.num_channels)


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
    needed: tuple[int, int] = binding.normal_bytes(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        num_channels=config.num_sms // 2,
        row_bytes=row_bytes,
        num_topk=num_topk,
        num_scales=num_scales,
        num_max_nvl_chunked_recv_tokens=config.num_max_nvl_chunked_recv_tokens,
        num_max_rdma_chunked_recv_tokens=config.num_max_rdma_chunked_recv_tokens,
    )
    return needed


# Rows are counted in int32.
_MAX_ROWS = (1 << 31) - 1


def _begin(call: StreamCall, place: Topology, limits: Limits) -> tuple[Config, Tensors]:
    """The configuration of a call, if it is one that the kernels can follow, and what its tensors are checked with."""
    config: Any = call.config
    if not isinstance(config, Config):
        fail(call.name, f"config is a {type(config).__name__}", "config", EPTypeError)
    most = limits.binding.MAX_CHANNELS
    if config.num_sms % 2 or not 1 <= config.num_sms // 2 <= most:
        got = f"config.num_sms is {config.num_sms}"
        fail(call.name, got, "config_sms", maximum=most, most_sms=2 * most)
    depth, num_nodes = config.num_max_nvl_chunked_recv_tokens, place.num_nodes
    if depth < num_nodes:
        got = f"config.num_max_nvl_chunked_recv_tokens is {depth}"
        fail(call.name, got, "config_queues", num_nodes=num_nodes)
    nodes = {"num_nodes": num_nodes, "ranks_per_node": place.ranks_per_node}
    return config, Tensors(call, limits, **nodes)


def take_scales(call: NormalDispatch | ElasticDispatch) -> None:
    """Data and scales from `x`. What they look like is not checked yet."""
    x, call.x_scales = call.x, None
    if not isinstance(x, (tuple, list)):
        return
    if len(x) != 2 or x[1] is None:
        types = ", ".join(type(item).__name__ for item in x)
        fail(call.name, f"x holds {types or 'nothing'}", "x_pair", EPTypeError)
    call.x, call.x_scales = x


def _rows(tensors: Tensors, call: NormalDispatch, limits: Limits) -> tuple[int, int]:
    """Bytes of a row, and its number of scales."""
    tensors.check("x")
    row_bytes = bytes_of_row(call.name, call.x)
    checks.kernel_limit(call.name, "num_tokens", call.x.shape[0], limits.binding.MAX_TOKENS)
    if call.x_scales is None:
        return row_bytes, 0
    if call.x.element_size() != 1:
        fail(call.name, f"x has scales and dtype {call.x.dtype}", "scaled_item")
    tensors.check("x_scales")
    num_scales = call.x_scales.shape[1]
    checks.kernel_limit(call.name, "num_scales", num_scales, limits.binding.MAX_NORMAL_SCALES)
    return row_bytes, num_scales


def bytes_of_row(call: str, x: Tensor) -> int:
    """Of rows that kernels can move."""
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


def _handle(tensors: Tensors, call: StreamCall, place: Topology) -> NormalHandle:
    """The handle of a dispatch from any tuple or list of its tensors."""
    kind: type[NormalHandle] = OneNodeHandle
    table = rules.ONE_NODE_HANDLE
    if place.num_nodes > 1:
        kind, table = SeveralNodesHandle, rules.SEVERAL_NODES_HANDLE
    handle = call.handle
    if not isinstance(handle, (tuple, list)):
        got = f"handle is a {type(handle).__name__}"
        fail(call.name, got, "normal_handle", EPTypeError, length=len(table))
    if len(handle) != len(table):
        got = f"handle has {len(handle)} elements"
        fail(call.name, got, "normal_handle", length=len(table))
    tensors.dimensions |= {"num_channels": call.config.num_sms // 2, "8": 8}
    for rule, item in zip(table, handle):
        tensors.check_rule(rule, item)
    given = kind(*handle)
    if given.num_relay_rows < 0:
        got = f"{name_of(given, 'nvl_head')} has {given.nvl_head.shape[0]} rows"
        fail(call.name, got, "normal_handle_values")
    if hidden_word(given.channel_prefix) is None:
        got = f"{name_of(given, 'channel_prefix')} is a copy"
        fail(call.name, got, "handle_copy")
    return given
