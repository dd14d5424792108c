"""The calls of `Buffer` that send or count tokens, each as one object, which checks and launches read.

A call has the arguments of the method that it is of, whose docstring says what they are. Checks put what they have found
in place of what was given: bools for flags, the two tensors of a pair.
"""

from __future__ import annotations

from types import SimpleNamespace
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
    from typing_extensions import Self

    from deep_ep.base.rules import TensorRule


class BufferCall(SimpleNamespace):
    """Any of them.

    Attributes:
        name: of the method.
        rules: of its tensors, in the order in which they are checked.
        flags: the arguments that are true or false.
        numbers: of low latency, those that are integers; within a handle as well.
    """

    name: ClassVar[str]
    rules: ClassVar[list[TensorRule]]
    flags: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, arguments: dict[str, Any]) -> None:
        """From `locals()` of the method, which has no other variables yet. The buffer itself is not kept."""
        vars(self).update(arguments)
        vars(self).pop("self", None)

    @classmethod
    def of(cls, **given: Any) -> Self:
        """One of our own; flags, tensors and what is optional in every call need not be given."""
        tensors = (rule.argument for rule in cls.rules)
        nothing = dict.fromkeys((*tensors, "handle", "previous_event", "recv_counters"))
        return cls({**nothing, **dict.fromkeys(cls.flags, False), **given})


class LowLatencyDispatch(BufferCall):
    """`Buffer.low_latency_dispatch`."""

    name = DISPATCH
    rules = TENSORS[DISPATCH]
    flags = ("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook")
    numbers = ("num_max_dispatch_tokens_per_rank", "num_experts")


class LowLatencyCombine(BufferCall):
    """`Buffer.low_latency_combine`."""

    name = COMBINE
    rules = TENSORS[COMBINE]
    flags = ("use_logfmt", "zero_copy", "async_finish", "return_recv_hook")
    numbers = (
        "handle.num_max_dispatch_tokens_per_rank",
        "handle.hidden",
        "handle.num_experts",
    )


class StreamCall(BufferCall):
    """A call that says what waits for what; see `StreamOrder`."""

    flags = ("async_finish", "allocate_on_comm_stream")


class DispatchLayout(StreamCall):
    """`Buffer.get_dispatch_layout`."""

    name = LAYOUT
    rules = TENSORS[LAYOUT]


class MaskQuery(BufferCall):
    """`Buffer.low_latency_query_mask_buffer`."""

    name = QUERY_MASKS
    rules = TENSORS[QUERY_MASKS]


class NormalDispatch(StreamCall):
    """`Buffer.dispatch`. Checks put the data of `x` into `x`, and its scales into `x_scales`."""

    name = NORMAL_DISPATCH
    rules = TENSORS[NORMAL_DISPATCH]


class NormalCombine(StreamCall):
    """`Buffer.combine`."""

    name = NORMAL_COMBINE
    rules = TENSORS[NORMAL_COMBINE]


class ElasticCall(BufferCall):
    """A dispatch or combine of `ElasticBuffer`."""

    flags: ClassVar[tuple[str, ...]] = ("async_with_compute_stream", "allocate_on_comm_stream")


class ElasticDispatch(ElasticCall):
    """`ElasticBuffer.dispatch`, with data and scales as `NormalDispatch`."""

    name = NORMAL_DISPATCH
    rules = TENSORS["elastic_dispatch"]
    flags = (
        *ElasticCall.flags,
        "do_handle_copy",
        "do_zero_padding",
        "use_tma_aligned_col_major_sf",
    )


class ElasticCombine(ElasticCall):
    """`ElasticBuffer.combine`."""

    name = NORMAL_COMBINE
    rules = TENSORS["elastic_combine"]
