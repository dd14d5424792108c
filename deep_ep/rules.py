"""The argument table: for each call and argument the shape, dtype, rule and fix.

A message has four parts: where, what was given, what is allowed, what to do. The docstrings of
`Buffer` give the same shapes; a test compares the two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NoReturn

import torch

from deep_ep.config import topk_idx_t
from deep_ep.errors import EPArgumentError

DISPATCH = "low_latency_dispatch"
COMBINE = "low_latency_combine"
LAYOUT = "get_dispatch_layout"


@dataclass(frozen=True)
class TensorRule:
    """What a tensor argument must look like.

    Attributes:
        argument: its name in the call.
        shapes: the shapes allowed, dimensions by name; names mean the same in all arguments of a call.
        dtype: the only dtype allowed.
        fix: what to do, as a sentence.
    """

    argument: str
    shapes: tuple[tuple[str, ...], ...]
    dtype: torch.dtype
    fix: str

    @property
    def text(self) -> str:
        """Shape and dtype as docstrings give them."""
        shapes = " or ".join(f"[{', '.join(shape)}]" for shape in self.shapes)
        return f"{shapes} {str(self.dtype).rpartition('.')[2]}"


@dataclass(frozen=True)
class ValueRule:
    """What another argument must satisfy: `allowed` and `fix`, both may hold `{placeholders}`."""

    allowed: str
    fix: str


_ROWS = ("num_local_experts", "num_recv_rows")
_WAIT_STATS = (("num_ranks",), ("num_ranks", "num_ranks"))
_WAIT_STATS_FIX = "Allocate torch.zeros(buffer.group_size, dtype=torch.int64)."
_HANDLE_FIX = "Pass the handle of the dispatch whose rows are combined, on the same buffer."

TENSORS: dict[str, tuple[TensorRule, ...]] = {
    DISPATCH: (
        TensorRule("x", (("num_tokens", "hidden"),), torch.bfloat16, "Cast with x.bfloat16()."),
        TensorRule(
            "topk_idx",
            (("num_tokens", "num_topk"),),
            topk_idx_t,
            "Give one row per token of x, cast with topk_idx.to(deep_ep.topk_idx_t).",
        ),
        TensorRule(
            "cumulative_local_expert_recv_stats",
            (("num_local_experts",),),
            torch.int32,
            "Allocate torch.zeros(num_experts // buffer.group_size, dtype=torch.int32).",
        ),
        TensorRule("dispatch_wait_recv_cost_stats", _WAIT_STATS, torch.int64, _WAIT_STATS_FIX),
    ),
    COMBINE: (
        TensorRule(
            "x",
            ((*_ROWS, "hidden"),),
            torch.bfloat16,
            "Pass the experts' output in the row layout of the dispatch, cast with x.bfloat16().",
        ),
        TensorRule(
            "topk_idx",
            (("num_tokens", "num_topk"),),
            topk_idx_t,
            "Pass the topk_idx of the dispatch, cast with topk_idx.to(deep_ep.topk_idx_t).",
        ),
        TensorRule(
            "topk_weights",
            (("num_tokens", "num_topk"),),
            torch.float32,
            "Give one weight per entry of topk_idx, cast with topk_weights.float().",
        ),
        TensorRule("handle[0]", (_ROWS,), torch.int32, _HANDLE_FIX),
        TensorRule("handle[1]", (("num_local_experts", "num_ranks"),), torch.int64, _HANDLE_FIX),
        TensorRule(
            "out",
            (("num_tokens", "hidden"),),
            torch.bfloat16,
            "Allocate torch.empty(topk_idx.shape[0], hidden, dtype=torch.bfloat16).",
        ),
        TensorRule("combine_wait_recv_cost_stats", _WAIT_STATS, torch.int64, _WAIT_STATS_FIX),
    ),
    LAYOUT: (
        TensorRule(
            "topk_idx",
            (("num_tokens", "num_topk"),),
            topk_idx_t,
            "Cast with topk_idx.to(deep_ep.topk_idx_t).",
        ),
    ),
}

VALUES: dict[str, ValueRule] = {
    "byte_size": ValueRule(
        "it must be a non-negative multiple of {alignment}, at most {maximum}",
        "Round it up, or use the size hints, which are multiples already.",
    ),
    "rdma_on_one_node": ValueRule(
        "it must be 0 for normal kernels on one node",
        "Pass num_rdma_bytes=0, or low_latency_mode=True.",
    ),
    "queue_pairs": ValueRule(
        "it must be above 0 with low_latency_mode or more than one node",
        "Pass num_experts // group_size for low latency.",
    ),
    "low_latency_mode": ValueRule(
        "the buffer must be built with low_latency_mode=True",
        "Build Buffer(..., low_latency_mode=True).",
    ),
    "destroyed": ValueRule("a destroyed buffer cannot be used", "Build a new Buffer."),
    "forked": ValueRule(
        "a buffer can be used only in the process that built it",
        "Build it after the fork, in the process that uses it.",
    ),
    "integer": ValueRule("it must be an integer", "Pass a Python int."),
    "positive": ValueRule("it must be above 0", "Pass the number all ranks agreed on."),
    "hidden": ValueRule("hidden must be a multiple of {multiple}", "Pad x to {padded}."),
    "kernel_limit": ValueRule(
        "the kernels allow at most {maximum}", "Send in parts, or over more groups."
    ),
    "topk": ValueRule(
        "at most {maximum} entries per token are allowed", "Select fewer experts per token."
    ),
    "num_experts": ValueRule(
        "it must be a multiple of the group size, {num_ranks}",
        "Use {padded} experts, the last ones unused.",
    ),
    "num_tokens": ValueRule(
        "at most num_max_dispatch_tokens_per_rank = {maximum} tokens are allowed",
        "Raise num_max_dispatch_tokens_per_rank on all ranks, or send the tokens in parts.",
    ),
    "expert_index": ValueRule(
        "entries must be -1 or in [0, {num_experts})", "Check the router's output, or num_experts."
    ),
    "expert_overflow": ValueRule(
        "one rank may send at most num_max_dispatch_tokens_per_rank = {maximum} rows to one expert",
        "Name an expert once per token, or raise num_max_dispatch_tokens_per_rank on all ranks.",
    ),
    "buffer_size": ValueRule(
        "this call needs {needed} bytes",
        "Build the Buffer with num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint({arguments}).",
    ),
    "round_scale": ValueRule(
        "use_ue8m0 requires round_scale=True", "Pass round_scale=True as well."
    ),
    "ue8m0_without_fp8": ValueRule(
        "scales exist only with use_fp8=True",
        "Pass use_fp8=True, or drop round_scale and use_ue8m0.",
    ),
    "async_and_hook": ValueRule(
        "only one of async_finish and return_recv_hook is allowed",
        "With a hook the receive phase is ordered by calling it; pass async_finish=False.",
    ),
    "logfmt_and_zero_copy": ValueRule(
        "only one of use_logfmt and zero_copy is allowed",
        "Pass use_logfmt=False: zero_copy sends the rows as they lie in the buffer.",
    ),
    "handle": ValueRule("it must be the 5-tuple that low_latency_dispatch returned", _HANDLE_FIX),
    "handle_copy": ValueRule(
        "it must be the very tensor that low_latency_dispatch returned",
        "Keep the handle as it is; do not clone or move its tensors.",
    ),
    "handle_not_received": ValueRule(
        "a handle can be used once the dispatch it is from has received its rows",
        "Call the hook of that dispatch first; if it raised an error, dispatch again.",
    ),
    "handle_values": ValueRule("dispatch left something else there", _HANDLE_FIX),
    "topk_of_dispatch": ValueRule(
        "it must be the topk_idx of the dispatch, where {expected} is, except that entries may have "
        "become -1",
        "Pass the topk_idx that was dispatched with this handle.",
    ),
    "combine_buffer": ValueRule(
        "get_next_low_latency_combine_buffer must have been called since the last combine",
        "Ask for that buffer and fill it before each combine, also after one that raised an error.",
    ),
    "pending_hook": ValueRule(
        "at most {most} calls may wait for their hooks",
        "Call the first of these hooks first, or abandon_hook() if their results are not wanted.",
    ),
    "shared_stream": ValueRule(
        "ranks that are threads of one process need a stream each on a GPU that they share, because "
        "kernels of one stream run in turn and these wait for each other",
        "Call torch.cuda.set_stream(torch.cuda.Stream()) in each rank's thread before it makes its buffer.",
    ),
    "mnnvl_without_nvlink": ValueRule(
        "NVLink between hosts takes allow_nvlink_for_low_latency_mode=True",
        "Pass that too, or allow_mnnvl=False to reach other hosts over RDMA.",
    ),
    "hook_twice": ValueRule("a hook may be called once", "Drop the second call."),
    "hook_after_destroy": ValueRule(
        "a destroyed buffer cannot receive", "Call the hook before destroy()."
    ),
    "comm_stream_allocation": ValueRule(
        "allocate_on_comm_stream requires previous_event with an event, and async_finish=True",
        "Pass previous_event=Buffer.capture() and async_finish=True, or leave it out.",
    ),
    "recv_counters": ValueRule(
        "it must be a RecvCounters of {num_ranks} ranks on {device}",
        "Make it with RecvCounters(buffer.group_size), or use Buffer.enable_counters().",
    ),
    "view_size": ValueRule(
        "offset and size must stay within the buffer's {available} elements",
        "Pass a smaller size or offset, counted in elements.",
    ),
    "num_sms": ValueRule(
        "it must be even and not negative", "Two SMs make one channel; pass {even}."
    ),
    "not_explicit": ValueRule(
        "it may be called only if explicitly_destroy=True was passed",
        "Build Buffer(..., explicitly_destroy=True), or drop the last reference to the buffer.",
    ),
    "bias": ValueRule(
        "it must be None, a tensor, or two of them in a tuple",
        "Pass (bias_0, bias_1) or one tensor.",
    ),
}


def fail(
    where: str,
    got: str,
    rule: str,
    error: type[EPArgumentError] = EPArgumentError,
    **values: object,
) -> NoReturn:
    """Raises `error` for a broken rule of `VALUES`; `values` fill its placeholders."""
    entry = VALUES[rule]
    allowed, fix = entry.allowed.format(**values), entry.fix.format(**values)
    raise error(f"{where}: {got}; {allowed}. {fix}")


@functools.cache
def tensor_rule(call: str, argument: str) -> TensorRule:
    """The entry of `TENSORS` for an argument of a call."""
    return next(rule for rule in TENSORS[call] if rule.argument == argument)
