"""The calls of `Buffer` that send or count tokens, each as one object, which checks and launches read.

A call has the arguments of the method that it is of, whose docstring says what they are. Checks put what they have found
in place of what was given: bools for flags, the two tensors of a pair.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from deep_ep.base.rules import (
    COMBINE,
    DISPATCH,
    LAYOUT,
    NORMAL_COMBINE,
    NORMAL_DISPATCH,
    QUERY_MASKS,
    TENSORS,
)

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from deep_ep.base.rules import TensorRule
    from deep_ep.observe.counters import RecvCounters
    from deep_ep.types.config import Config
    from deep_ep.types.event import EventOverlap

    Tensor = torch.Tensor


@dataclass(init=False, eq=False)
class BufferCall:
    """Any of them.

    Attributes:
        name: of the method.
        rules: of its tensors, in the order in which they are checked.
    """

    name: ClassVar[str]
    rules: ClassVar[list[TensorRule]]

    def __init__(self, arguments: dict[str, Any]) -> None:
        """From `locals()` of the method, which has no other variables yet. The buffer itself is not kept."""
        vars(self).update(arguments)
        vars(self).pop("self", None)

    @classmethod
    def of(cls, **given: Any) -> Self:
        """One of our own; what is not given is `None`, and flags are False."""
        kind: Any = cls
        return cls({**_nothing_given(kind), **given})


@functools.cache
def flag_names(kind: type[BufferCall]) -> tuple[str, ...]:
    """The arguments that are true or false."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.type == "bool")


@functools.cache
def _nothing_given(kind: type[BufferCall]) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    return {field.name: False if field.type == "bool" else None for field in fields}


@dataclass(init=False, eq=False)
class OperationCall(BufferCall):
    """A dispatch or a combine."""

    recv_counters: RecvCounters | None


@dataclass(init=False, eq=False)
class LowLatencyDispatch(OperationCall):
    """`Buffer.low_latency_dispatch`."""

    name = DISPATCH
    rules = TENSORS[DISPATCH]
    x: Tensor
    topk_idx: Tensor
    num_max_dispatch_tokens_per_rank: int
    num_experts: int
    cumulative_local_expert_recv_stats: Tensor | None
    dispatch_wait_recv_cost_stats: Tensor | None
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    async_finish: bool
    return_recv_hook: bool


@dataclass(init=False, eq=False)
class LowLatencyCombine(OperationCall):
    """`Buffer.low_latency_combine`."""

    name = COMBINE
    rules = TENSORS[COMBINE]
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    handle: Any
    use_logfmt: bool
    zero_copy: bool
    async_finish: bool
    return_recv_hook: bool
    out: Tensor | None
    combine_wait_recv_cost_stats: Tensor | None


@dataclass(init=False, eq=False)
class StreamCall(BufferCall):
    """A call that says what waits for what; see `StreamOrder`."""

    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool


@dataclass(init=False, eq=False)
class DispatchLayout(StreamCall):
    """`Buffer.get_dispatch_layout`."""

    name = LAYOUT
    rules = TENSORS[LAYOUT]
    topk_idx: Tensor
    num_experts: int


@dataclass(init=False, eq=False)
class MaskQuery(BufferCall):
    """`Buffer.low_latency_query_mask_buffer`."""

    name = QUERY_MASKS
    rules = TENSORS[QUERY_MASKS]
    mask_status: Tensor


@dataclass(init=False, eq=False)
class NormalDispatch(StreamCall, OperationCall):
    """`Buffer.dispatch`. Checks put the data of `x` into `x`, and its scales into `x_scales`."""

    name = NORMAL_DISPATCH
    rules = TENSORS[NORMAL_DISPATCH]
    x: Any
    handle: Any
    num_tokens_per_rank: Tensor | None
    num_tokens_per_rdma_rank: Tensor | None
    is_token_in_rank: Tensor | None
    num_tokens_per_expert: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    expert_alignment: int
    num_worst_tokens: int
    config: Config
    dispatch_wait_recv_cost_stats: Tensor | None
    x_scales: Tensor | None = None


@dataclass(init=False, eq=False)
class NormalCombine(StreamCall, OperationCall):
    """`Buffer.combine`."""

    name = NORMAL_COMBINE
    rules = TENSORS[NORMAL_COMBINE]
    x: Tensor
    handle: Any
    topk_weights: Tensor | None
    bias: Any
    config: Config
    combine_wait_recv_cost_stats: Tensor | None


@dataclass(init=False, eq=False)
class ElasticCall(OperationCall):
    """A dispatch or combine of `ElasticBuffer`."""

    num_sms: int
    num_qps: int
    previous_event: Any
    previous_event_before_epilogue: Any
    async_with_compute_stream: bool
    allocate_on_comm_stream: bool


@dataclass(init=False, eq=False)
class ElasticDispatch(ElasticCall):
    """`ElasticBuffer.dispatch`, with data and scales as `NormalDispatch`."""

    name = NORMAL_DISPATCH
    rules = TENSORS["elastic_dispatch"]
    x: Any
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    cumulative_local_expert_recv_stats: Tensor | None
    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    handle: Any
    do_handle_copy: bool
    do_cpu_sync: Any
    do_expand: Any
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool
    expert_capacity: int | None
    dispatch_wait_recv_cost_stats: Tensor | None
    x_scales: Tensor | None = None


@dataclass(init=False, eq=False)
class ElasticCombine(ElasticCall):
    """`ElasticBuffer.combine`."""

    name = NORMAL_COMBINE
    rules = TENSORS["elastic_combine"]
    x: Tensor
    handle: Any
    topk_weights: Tensor | None
    bias: Any
    combine_wait_recv_cost_stats: Tensor | None
