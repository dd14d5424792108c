"""The argument table: for each call and argument the shape, dtype, rule and fix.

A message has four parts: where, what was given, what is allowed, what to do. The docstrings of
`Buffer` give the same shapes; a test compares the two.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, NoReturn

import torch

from deep_ep.base.text import rows_of
from deep_ep.errors import EPArgumentError, EPError

topk_idx_t = torch.int64

DISPATCH = "low_latency_dispatch"
COMBINE = "low_latency_combine"
NORMAL_DISPATCH = "dispatch"
NORMAL_COMBINE = "combine"
LAYOUT = "get_dispatch_layout"
QUERY_MASKS = "low_latency_query_mask_buffer"
# Operations of both modes are one series; the others are numbered each by itself.
NUMBERED_TOGETHER = (DISPATCH, COMBINE, NORMAL_DISPATCH, NORMAL_COMBINE)


# Of the widest load and store of a lane. On a GPU one that is not aligned ends the CUDA context.
VECTOR_BYTES = 16


@dataclass(eq=False)
class TensorRule:
    """What a tensor argument must look like.

    Attributes:
        argument: its name in the call; `handle[0]` is an item of one.
        text: shapes and dtypes allowed, as docstrings give them; names of dimensions mean the same in all
            arguments of a call.
        fix: what to do, as a sentence.
        is_optional: whether it may be `None`.
        in_vectors: whether kernels move its rows `VECTOR_BYTES` at a time, so that it must begin at a multiple of them.
        any_strides: whether it is copied where it is not contiguous.
        casts: whether another dtype is to be cast; else `fix` says what to do there as well.
        shapes: those allowed, dimensions by name.
        dtypes: those allowed; none if all are.
        of: finds the argument in a call.
    """

    argument: str
    text: str
    fix: str
    is_optional: bool = False
    in_vectors: bool = False
    any_strides: bool = False
    casts: bool = False

    def __post_init__(self) -> None:
        shapes, _, dtypes = self.text.rpartition("] ")
        self.shapes = [shape.split(", ") for shape in shapes.lstrip("[").split("] or [")]
        self.dtypes = [
            getattr(torch, name) for name in dtypes.split(" or ") if name != "of any dtype"
        ]
        name, _, index = self.argument.rstrip("]").partition("[")
        self.of: Callable[[Any], Any] = operator.attrgetter(name)
        if index:
            argument, item = self.of, int(index)
            self.of = lambda call: argument(call)[item]


_HANDLE_FIX = "Pass the handle of the dispatch whose rows are combined, on the same buffer."
_NORMAL_HANDLE_FIX = (
    "Pass the handle of a dispatch on this buffer, with a config of the num_sms of that dispatch."
)
WORST_TOKENS_FIX = (
    "Pass the group size times the most tokens that a rank has; that is always enough"
)

# Of each tensor: the calls that take it | its name | its shapes and dtypes | what of `TensorRule` holds for it. Below, what
# to do. A call checks its tensors in this order. What is optional in `dispatch` is so beside a handle.
_TABLE = """
low_latency_dispatch | x | [num_tokens, hidden] bfloat16 | in_vectors casts
Give one row per token.

low_latency_dispatch | topk_idx | [num_tokens, num_topk] int64 | casts
Give one row per token of x.

low_latency_combine | handle[0] | [num_local_experts, num_recv_rows] int32 |
low_latency_combine | handle[1] | [num_local_experts, num_ranks] int64 |
Pass the handle of the dispatch whose rows are combined, on the same buffer.

low_latency_combine | x | [num_local_experts, num_recv_rows, hidden] bfloat16 | in_vectors casts
Pass the experts' output in the row layout of the dispatch.

low_latency_combine | topk_idx | [num_tokens, num_topk] int64 | casts
Pass the topk_idx of the dispatch.

low_latency_combine | topk_weights | [num_tokens, num_topk] float32 | casts
Give one weight per entry of topk_idx.

low_latency_combine | out | [num_tokens, hidden] bfloat16 | is_optional in_vectors
Allocate torch.empty(topk_idx.shape[0], hidden, dtype=torch.bfloat16).

get_dispatch_layout | topk_idx | [num_tokens, num_topk] int64 | casts
Give one row per token.

low_latency_query_mask_buffer | mask_status | [num_ranks] int32 |
Allocate torch.empty(buffer.group_size, dtype=torch.int32).

dispatch elastic_dispatch | x | [num_tokens, hidden] of any dtype | in_vectors any_strides
Pass one row per token.

dispatch elastic_dispatch | x_scales | [num_tokens, num_scales] float32 or int32 | is_optional any_strides
Pass one row of scales per token, as float32 or packed into int32.

dispatch | num_tokens_per_rank | [num_ranks] int32 | is_optional
dispatch | num_tokens_per_rdma_rank | [num_nodes] int32 | is_optional
dispatch | is_token_in_rank | [num_tokens, num_ranks] bool | is_optional
dispatch | num_tokens_per_expert | [num_experts] int32 | is_optional
Pass what get_dispatch_layout returned for these tokens.

dispatch elastic_dispatch | topk_idx | [num_tokens, num_topk] int64 | is_optional casts
Give one row per token of x.

dispatch elastic_dispatch | topk_weights | [num_tokens, num_topk] float32 | is_optional any_strides casts
Give one weight per entry of topk_idx.

low_latency_dispatch elastic_dispatch | cumulative_local_expert_recv_stats | [num_local_experts] int32 | is_optional
Allocate torch.zeros(num_experts // buffer.group_size, dtype=torch.int32).

combine | x | [num_recv_rows, hidden] bfloat16 | in_vectors any_strides casts
elastic_combine | x | [num_rows, hidden] bfloat16 | in_vectors any_strides casts
Give one row per row that the dispatch returned.

combine | topk_weights | [num_recv_rows, num_topk] float32 | is_optional any_strides casts
Give one row per row of x.

elastic_combine | topk_weights | [num_rows, num_topk] or [num_rows] float32 | is_optional any_strides casts
Give one value in the place of each weight that the dispatch returned.

combine elastic_combine | bias[0] | [num_tokens, hidden] bfloat16 | is_optional in_vectors any_strides casts
combine elastic_combine | bias[1] | [num_tokens, hidden] bfloat16 | is_optional in_vectors any_strides casts
Give one row per dispatched token.

low_latency_dispatch dispatch elastic_dispatch | dispatch_wait_recv_cost_stats | [num_ranks] or [num_ranks, num_ranks] int64 | is_optional
low_latency_combine combine elastic_combine | combine_wait_recv_cost_stats | [num_ranks] or [num_ranks, num_ranks] int64 | is_optional
Allocate torch.zeros(buffer.group_size, dtype=torch.int64).
"""

# By call; `elastic_` before those of `ElasticBuffer`.
TENSORS: dict[str, list[TensorRule]] = {}
for _calls, _argument, _text, _traits, _fix in rows_of(_TABLE):
    _rule = TensorRule(_argument, _text, _fix, **dict.fromkeys(_traits.split(), True))
    for _call in _calls.split():
        TENSORS.setdefault(_call, []).append(_rule)


def _handle_rules(*items: str) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(f"handle[{i}]", text, _NORMAL_HANDLE_FIX) for i, text in enumerate(items)
    )


# The items of a handle of `dispatch`, in order: handles.py says what they are. A receiving rank may have
# sliced the one that has a row per received row.
ONE_NODE_HANDLE = _handle_rules(
    "[num_ranks, num_ranks] int32",
    "[num_ranks, num_channels] int32",
    "[num_ranks, num_channels] int32",
    "[num_recv_rows] int32",
    "[num_tokens, num_ranks] bool",
    "[num_tokens, num_ranks] int32",
)
SEVERAL_NODES_HANDLE = _handle_rules(
    "[num_tokens, num_ranks] bool",
    "[num_nodes, num_channels] int32",
    "[num_ranks, num_channels] int32",
    "[num_nodes, num_channels] int32",
    "[num_nodes] int32",
    "[num_ranks, num_channels] int32",
    "[num_ranks] int32",
    "[num_recv_rows, 8] uint8",
    "[num_tokens, num_nodes] int32",
    "[num_sent_rows, ranks_per_node] int32",
)

# Of all else: what is allowed, and then what to do.
VALUES = {
    "byte_size": "it must be a non-negative multiple of {alignment}, at most {maximum}. "
    "Round it up, or use the size hints, which are multiples already.",
    "queue_pairs": "it must be above 0 with low_latency_mode or more than one node. "
    "Pass num_experts // group_size for low latency.",
    "low_latency_mode": "the buffer must be built with low_latency_mode=True. "
    "Build Buffer(..., low_latency_mode=True).",
    "enable_shrink": "it must be built with enable_shrink=True and num_rdma_bytes above 0. "
    "Build Buffer(..., enable_shrink=True) on all ranks.",
    "rank_to_mask": "it must be a rank of the group, 0 to {last}. "
    "Pass the rank's number in the group.",
    "mask_itself": "a rank can mask others only. "
    "Mask it on the other ranks, and let this one call no operation.",
    "masked_ranks": "normal operations need all ranks. "
    "Call low_latency_clean_mask_buffer() on all ranks once they are back, or build a new Buffer on those "
    "that live.",
    "destroyed": "a destroyed buffer cannot be used. Build a new Buffer.",
    "pickled": "it is connected with those of the other ranks, and there is one of it. "
    "Save the state_dict() of a module, and build a Buffer where it is loaded.",
    "forked": "a buffer can be used only in the process that built it. "
    "Build it after the fork, in the process that uses it.",
    "instance": "it must be a {kind}. {fix}.",
    "flag": "it must be True or False. Pass a bool.",
    "shape": "it must be a torch.Size, tuple or list. Pass the size of each dimension.",
    "integer": "it must be an integer. Pass a Python int.",
    "seconds": "it must be a number of at least 0, below 1e9. Pass seconds; 0 is never.",
    "timeout": "it must be a number above 0, below 1e9. Pass seconds, as DEEP_EP_TIMEOUT_S has them.",
    "positive": "it must be above 0. Pass the number all ranks agreed on.",
    "not_negative": "it must not be negative. Pass 0 or more.",
    "hidden": "hidden must be a multiple of {multiple}. Pad x to {padded}.",
    "kernel_limit": "the kernels allow at most {maximum}. Send in parts, or over more groups.",
    "memory": "it takes {needed} bytes on each rank, and {available} are available. {fix}.",
    "topk": "at most {maximum} entries per token are allowed. Select fewer experts per token.",
    "num_experts": "it must be a multiple of the group size, {num_ranks}. "
    "Use {padded} experts, the last ones unused.",
    "num_tokens": "at most {name} = {maximum} tokens are allowed. "
    "Raise {name} on all ranks, or send the tokens in parts.",
    "expert_index": "entries must be -1 or in [0, {num_experts}). "
    "Check the router's output, or num_experts.",
    "expert_overflow": "one rank may send at most num_max_dispatch_tokens_per_rank = {maximum} rows to one "
    "expert. Name an expert once per token, or raise num_max_dispatch_tokens_per_rank on all ranks.",
    "buffer_size": "this call needs {needed} bytes. "
    "Build the Buffer with num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint({arguments}).",
    "ue8m0": "it is a format of the scales of use_fp8=True, with round_scale=True. "
    "Pass both as well, or leave use_ue8m0 out.",
    "exclusive": "only one of the two is allowed. Pass {name}=False.",
    "handle": f"it must be the 5-tuple that low_latency_dispatch returned. {_HANDLE_FIX}",
    "handle_copy": "it must be the very tensor that dispatch returned. "
    "Keep the handle as it is; do not clone, move or convert its tensors.",
    "handle_not_received": "a handle can be used once the dispatch it is from has received its rows. "
    "Call the hook of that dispatch first, if it has one; if it raised an error, dispatch again.",
    "handle_values": f"dispatch left something else there. {_HANDLE_FIX}",
    "topk_of_dispatch": "it must be the topk_idx of the dispatch, where {expected} is, except that entries "
    "may have become -1. Pass the topk_idx that was dispatched with this handle.",
    "combine_buffer": "get_next_low_latency_combine_buffer must have been called since the last combine. "
    "Ask for that buffer and fill it before each combine, also after one that raised an error.",
    "pending_hook": "at most {most} calls may wait for their hooks. "
    "Call the first of these hooks first, or abandon_hook() if their results are not wanted.",
    "shared_stream": "ranks that are threads of one process need a stream each on a GPU that they share, "
    "because kernels of one stream run in turn and these wait for each other. "
    "Call torch.cuda.set_stream(torch.cuda.Stream()) in each rank's thread before it makes its buffer.",
    "mnnvl_without_nvlink": "NVLink between hosts takes allow_nvlink_for_low_latency_mode=True. "
    "Pass that too, or allow_mnnvl=False to reach other hosts over RDMA.",
    "hook_twice": "a hook may be called once. Drop the second call.",
    "hook_after_destroy": "a destroyed buffer cannot receive. Call the hook before destroy().",
    "comm_stream_allocation": "allocate_on_comm_stream requires previous_event with an event, and "
    "async_finish=True. Pass previous_event=Buffer.capture() and async_finish=True, or leave it out.",
    "recv_counters": "it must be a RecvCounters of {num_ranks} ranks on {device}. "
    "Make it with RecvCounters(buffer.group_size), or use Buffer.enable_counters().",
    "view_size": "offset and size must stay within the buffer's {available} elements. "
    "Pass a smaller size or offset, counted in elements.",
    "num_sms": "it must be even and not negative. Two SMs make one channel; pass {even}.",
    "uneven_nodes": "normal kernels need nodes of equal size. "
    "Use a multiple of {ranks_per_node} ranks, or set DEEP_EP_RANKS_PER_NODE on all ranks to a divisor of "
    "{num_ranks}.",
    "config": "it must be a Config. "
    "Pass Buffer.get_dispatch_config(buffer.group_size), or a Config of your own.",
    "config_sms": "two SMs make one channel, and normal kernels need from 1 to {maximum} of them. "
    "Pass an even num_sms from 2 to {most_sms}, as in Config(num_sms=20).",
    "config_queues": "a queue is shared by {num_nodes} nodes and needs a place for each. "
    "Pass at least num_max_nvl_chunked_recv_tokens={num_nodes}.",
    "normal_buffer_size": "this call needs {nvl_bytes} and {rdma_bytes} bytes. "
    "Build the Buffer with config.get_nvl_buffer_size_hint({row_bytes}, {num_ranks}) and "
    "config.get_rdma_buffer_size_hint({row_bytes}, {num_ranks}), of this config; where nodes have "
    "{ranks_per_node} ranks, DEEP_EP_RANKS_PER_NODE={ranks_per_node} tells the hints.",
    "row_bytes": "rows must be multiples of 16 bytes, at least one. Pad x to {padded} columns.",
    "x_pair": "it must be a tensor, or a tuple of data and scales. Pass x, or (x, x_scales).",
    "scaled_item": "data that has scales must have elements of one byte. "
    "Quantise x, for example to torch.float8_e4m3fn, or pass it without scales.",
    "no_handle": "a dispatch that is given no handle needs it. "
    "Pass {what}, or the handle of an earlier dispatch.",
    "topk_pair": "only both or neither of the two may be given. Pass both.",
    "topk_with_handle": "a dispatch with a handle takes no top-k tensors. "
    "Pass None, or leave the handle out to route anew.",
    "worst_tokens_topk": "it requires topk_idx and topk_weights, which tell the rows that are there from the "
    "rest. Pass both, or num_worst_tokens=0.",
    "worst_tokens": f"{{needed}} rows come to this rank and must fit. {WORST_TOKENS_FIX}.",
    "layout_values": "the tensors of a layout must agree with each other and with topk_idx. "
    "Pass them as one call of get_dispatch_layout returned them, with its topk_idx.",
    "normal_handle": "it must be the tuple of {length} tensors that dispatch returned. "
    f"{_NORMAL_HANDLE_FIX}",
    "normal_handle_values": f"dispatch left something else there. {_NORMAL_HANDLE_FIX}",
    "normal_handle_tokens": "its dispatch had {num_tokens} tokens. "
    "Pass one row of x per token of that dispatch.",
    "not_explicit": "it may be called only if explicitly_destroy=True was passed. "
    "Build Buffer(..., explicitly_destroy=True), or drop the last reference to the buffer.",
    "elastic_size": "what the buffer is for must be known. "
    "Pass num_max_tokens_per_rank and hidden, or num_bytes=ElasticBuffer.get_buffer_size_hint(...).",
    "elastic_pages": "it must be a multiple of 2 MiB. Pass {padded}, or what get_buffer_size_hint returns.",
    "elastic_bytes": "rows of these sizes need {needed} bytes. "
    "Pass at least as many, or leave num_bytes out.",
    "elastic_buffer_size": "rows of {row_bytes} bytes need {needed}. "
    "Build ElasticBuffer with the hidden and num_topk of these calls.",
    "elastic_event": "it requires allocate_on_comm_stream=True. Pass that too, or leave the event out.",
    "elastic_handle": "it must be an EPHandle. Pass what dispatch of this buffer returned as its fourth value.",
    "elastic_handle_sync": "with a handle the number of rows is known. Pass do_cpu_sync=None or False.",
    "elastic_handle_value": "the dispatch of the handle had {expected}. Leave it out, or pass that.",
    "order": "the handle's dispatch had {num_rows} such rows. Leave the handle as dispatch returned it.",
    "elastic_weights": "of {layout} rows they have {dimensions}. Pass weights in the layout of the handle's dispatch.",
    "elastic_rows": "this rank received rows up to number {needed}. "
    "Pass one row per row that the dispatch returned, in their places.",
    "elastic_compact": "only expanded rows lie by expert, with padding. Pass do_expand=True, or leave it out.",
    "elastic_capacity_least": "without do_cpu_sync it must be at least {needed}, the most that can come. "
    "Pass that, or do_cpu_sync=True.",
    "elastic_capacity": "all rows of an expert must fit. Pass a larger expert_capacity on all ranks, at most the group "
    "size times num_max_tokens_per_rank, and dispatch again.",
    "elastic_absent": "of ElasticBuffer there are dispatch, combine, barrier and what belongs to them. "
    "Use torch.distributed for it.",
    "bias": "it must be None, a tensor, or two of them in a tuple. "
    "Pass (bias_0, bias_1) or one tensor.",
}


def fail(
    where: str,
    got: str,
    rule: str,
    error: type[EPError] = EPArgumentError,
    **values: object,
) -> NoReturn:
    """Raises `error` for a broken rule of `VALUES`; `values` fill its placeholders."""
    raise error(f"{where}: {got}; {VALUES[rule].format(**values)}")
