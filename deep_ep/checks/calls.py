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
)

if TYPE_CHECKING:
    import torch

    from deep_ep.observe.counters import RecvCounters
    from deep_ep.types.config import Config
    from deep_ep.types.event import EventOverlap

    Tensor = torch.Tensor


@dataclass(init=False, eq=False)
class BufferCall:
    """Any of them.

    Attributes:
        name: of the method.
    """

    name: ClassVar[str]

    def __init__(self, arguments: dict[str, Any]) -> None:
        """From `locals()` of the method, which has no other variables yet. The buffer itself is not kept."""
        vars(self).update(arguments)
        vars(self).pop("self", None)


@functools.cache
def flag_names(kind: type[BufferCall]) -> tuple[str, ...]:
    """The arguments that are true or false."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.type == "bool")


@dataclass(init=False, eq=False)
class OperationCall(BufferCall):
    """A dispatch or a combine."""

    recv_counters: RecvCounters | None


@dataclass(init=False, eq=False)
class LowLatencyDispatch(OperationCall):
    """`Buffer.low_latency_dispatch`."""

    name = DISPATCH
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
    topk_idx: Tensor
    num_experts: int


@dataclass(init=False, eq=False)
class MaskQuery(BufferCall):
    """`Buffer.low_latency_query_mask_buffer`."""

    name = QUERY_MASKS
    mask_status: Tensor


@dataclass(init=False, eq=False)
class NormalDispatch(StreamCall, OperationCall):
    """`Buffer.dispatch`.

    Attributes:
        x: its data.
        x_scales: its scales, or `None`.
    """

    name = NORMAL_DISPATCH
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
    x: Tensor
    handle: Any
    topk_weights: Tensor | None
    bias: Any
    config: Config
    combine_wait_recv_cost_stats: Tensor | None
