"""Checks of the calls of `ElasticBuffer`: what the normal operations that they are made of do not check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from deep_ep.base.rules import fail
from deep_ep.base.topology import Topology
from deep_ep.checks import arguments as checks
from deep_ep.checks import normal as normal_checks
from deep_ep.checks.arguments import Limits, Tensors
from deep_ep.errors import EPTypeError, EPUnsupportedError, EPUsageError
from deep_ep.types.config import Config
from deep_ep.types.event import EventHandle, EventOverlap

if TYPE_CHECKING:
    from deep_ep.checks.calls import ElasticCall, ElasticCombine, ElasticDispatch

# What a dispatch with a handle may repeat.
_OF_HANDLE = (
    *("do_expand", "num_experts", "expert_alignment", "expert_capacity"),
    "num_max_tokens_per_rank",
)


def streams(call: ElasticCall) -> tuple[EventHandle | None, EventHandle | None]:
    """The events that a call waits for, before it and before its last, local part."""
    checks.flags_of(call)
    previous = _event(call, "previous_event")
    if previous is not None and not call.allocate_on_comm_stream:
        fail(call.name, "previous_event is given alone", "elastic_event", EPUsageError)
    return previous, _event(call, "previous_event_before_epilogue")


def num_sms(call: ElasticCall, most: int) -> int:
    """An even number of SMs: as many as the buffers are made for, or fewer where fewer are asked for."""
    asked = checks.not_negative_int(call.name, "num_sms", call.num_sms) or most
    checks.not_negative_int(call.name, "num_qps", call.num_qps)
    return max(2, min(asked, most) // 2 * 2)


def fresh_dispatch(call: ElasticDispatch, limits: Limits, most_tokens: int) -> None:
    """Checks a dispatch without a handle, and puts what stands for `None` in its place.

    A rank may have `most_tokens` where the call does not say; 0: nobody has said.
    """
    call.do_expand = bool(call.do_expand)
    call.do_cpu_sync = True if call.do_cpu_sync is None else bool(call.do_cpu_sync)
    if call.expert_alignment is None:
        call.expert_alignment = 1
    if call.num_max_tokens_per_rank is None:
        call.num_max_tokens_per_rank = most_tokens
    where = call.name
    _refuse_padding(call, call.do_expand)
    needed = {"topk_idx": "the experts of each token", "num_experts": "the number of all experts"}
    for name, what in needed.items():
        if getattr(call, name) is None:
            fail(where, f"{name} is None", "no_handle", EPUsageError, what=what)
    call.num_experts = checks.positive_int(where, "num_experts", call.num_experts)
    got = f"num_experts is {call.num_experts}"
    checks.num_experts(where, got, call.num_experts, limits.num_ranks, limits.binding)
    tensors = Tensors(call, limits, num_local_experts=call.num_experts // limits.num_ranks)
    _rows(call, tensors)
    tensors.check()
    checks.expert_indices(where, call.topk_idx, call.num_experts)
    name = "num_max_tokens_per_rank"
    most = checks.not_negative_int(where, name, call.num_max_tokens_per_rank)
    if call.x.shape[0] > most:
        fail(where, f"x has {call.x.shape[0]} rows", "num_tokens", name=name, maximum=most)
    call.num_max_tokens_per_rank = most
    call.expert_alignment = checks.positive_int(where, "expert_alignment", call.expert_alignment)
    if call.expert_capacity is not None:
        call.expert_capacity = _capacity(call, limits.num_ranks * most)


def cached_dispatch(call: ElasticDispatch, limits: Limits, handle: Any) -> None:
    """Checks a dispatch with a handle."""
    where = call.name
    if call.topk_idx is not None:
        fail(where, "handle and topk_idx are both given", "topk_with_handle", EPUsageError)
    if call.do_cpu_sync:
        fail(
            where, "do_cpu_sync is True and a handle is given", "elastic_handle_sync", EPUsageError
        )
    for name in _OF_HANDLE:
        given, expected = getattr(call, name), getattr(handle, name)
        if given is not None and given != expected:
            got = f"{name} is {given}"
            fail(where, got, "elastic_handle_value", EPUsageError, expected=expected)
    _refuse_padding(call, handle.do_expand)
    num_tokens, num_topk = handle.topk_idx.shape
    tensors = Tensors(call, limits, num_topk=num_topk)
    _rows(call, tensors)
    if call.x.shape[0] != num_tokens:
        got = f"x has {call.x.shape[0]} rows"
        fail(where, got, "normal_handle_tokens", num_tokens=num_tokens)
    tensors.check()


def combine(call: ElasticCombine, limits: Limits, handle: Any) -> None:
    """Checks a combine. Of expanded rows there may be more than were received, or fewer where these are padding."""
    call.bias = checks.bias_pair(call.bias)
    num_tokens, num_topk = handle.topk_idx.shape
    tensors = Tensors(call, limits, num_tokens=num_tokens, num_topk=num_topk)
    if not handle.do_expand:
        tensors.dimensions["num_rows"] = handle.num_recv_tokens
    tensors.check()
    normal_checks.bytes_of_row(call.name, call.x)
    if handle.do_expand and call.x.is_cpu:
        needed = int(handle.slots.max()) + 1 if handle.slots.numel() else 0
        if call.x.shape[0] < needed:
            got = f"x has {call.x.shape[0]} rows"
            fail(call.name, got, "elastic_rows", needed=needed)
    weights = call.topk_weights
    layout, dimensions = ("expanded", 1) if handle.do_expand else ("compact", 2)
    if weights is not None and weights.dim() != dimensions:
        got = f"topk_weights has shape {list(weights.shape)}"
        fail(call.name, got, "elastic_weights", layout=layout, dimensions=dimensions)


def buffer_size(
    where: str, shape: tuple[int, int, int], config: Config, place: Topology, limits: Limits
) -> None:
    """The buffers must hold rows of so many bytes, picks and scales."""
    nvl, rdma = normal_checks.num_bytes(
        limits.binding, place.num_ranks, place.ranks_per_node, config, *shape
    )
    if limits.num_nvl_bytes < nvl or limits.num_rdma_bytes < rdma:
        got = f"the buffer has {limits.num_nvl_bytes + limits.num_rdma_bytes} bytes"
        fail(where, got, "elastic_buffer_size", row_bytes=shape[0], needed=nvl + rdma)


def handle_of(call: ElasticCall, handle: Any, kind: type[Any], buffer_number: int) -> None:
    """The handle must be one, of this buffer."""
    if not isinstance(handle, kind):
        fail(call.name, f"handle is a {type(handle).__name__}", "elastic_handle", EPTypeError)
    if handle.buffer_number != buffer_number:
        fail(call.name, "handle is of another buffer", "elastic_handle")


def unsupported(name: str, what: str) -> NoReturn:
    """There is no such call."""
    fail(name, f"{what} is not part of this package", "elastic_absent", EPUnsupportedError)


def _event(call: ElasticCall, name: str) -> EventHandle | None:
    given = getattr(call, name)
    event: EventHandle | None = given.event if isinstance(given, EventOverlap) else given
    if event is not None:
        fix = "Pass what ElasticBuffer.capture() or an earlier call returned"
        checks.instance(call.name, name, event, EventHandle, fix)
    return event


def _capacity(call: ElasticDispatch, most_rows: int) -> int:
    """Rows that each expert has room for. Where the host does not wait, nobody could say that they are too few."""
    capacity = checks.positive_int(call.name, "expert_capacity", call.expert_capacity)
    got = f"expert_capacity is {capacity}"
    if not call.do_expand:
        fail(call.name, f"{got} and do_expand is False", "elastic_compact", EPUsageError)
    if not call.do_cpu_sync and capacity < most_rows:
        fail(call.name, got, "elastic_capacity_least", needed=most_rows)
    return capacity


def capacity_suffices(call: ElasticDispatch, capacity: int, per_expert: list[int]) -> None:
    """What has come must fit: rows of each local expert."""
    if max(per_expert) > capacity:
        expert = per_expert.index(max(per_expert))
        got = f"expert_capacity is {capacity} and local expert {expert} received {max(per_expert)} rows"
        fail(call.name, got, "elastic_capacity")


def _refuse_padding(call: ElasticDispatch, expands: bool) -> None:
    if call.do_zero_padding and not expands:
        got = "do_zero_padding is True and do_expand is False"
        fail(call.name, got, "elastic_compact", EPUsageError)


def _rows(call: ElasticDispatch, tensors: Tensors) -> None:
    """Data and scales. Rows of any dtype may have these, because they travel as bytes."""
    normal_checks.take_scales(call)
    tensors.check("x")
    normal_checks.bytes_of_row(call.name, call.x)
