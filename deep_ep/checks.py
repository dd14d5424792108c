"""The argument table: for each call and argument the shape, dtype, rule and fix, and the code that applies it.

It runs before anything is sent. A message has four parts: where, what was given, what is allowed,
what to do. The docstrings of `Buffer` give the same shapes; a test compares the two.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from deep_ep.backend import Binding
from deep_ep.config import topk_idx_t
from deep_ep.counters import RecvCounters
from deep_ep.errors import EPArgumentError, EPTypeError, EPUsageError
from deep_ep.handles import LowLatencyHandle

CHANNELS_PER_SCALE = 128
SIZE_ALIGNMENT = 128
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
        "it must be a non-negative multiple of {alignment}",
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
    "pending_hook": ValueRule(
        "one call at a time may be waiting for its receive phase",
        "Call the hook of {pending} first.",
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


class Shape(NamedTuple):
    """Sizes of one low-latency call, checked."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_max_dispatch_tokens_per_rank: int
    num_experts: int
    num_ranks: int

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_recv_rows(self) -> int:
        """Rows per local expert."""
        return self.num_ranks * self.num_max_dispatch_tokens_per_rank


class Sizes(NamedTuple):
    """What all ranks must agree on in a low-latency call."""

    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int


class Limits(NamedTuple):
    """What a buffer allows; the checks need no more of it.

    Attributes:
        num_ranks: size of the group.
        num_rdma_bytes: size of its RDMA buffer.
        device: where tensors must be.
        binding: the native module; it knows the kernels' limits.
    """

    num_ranks: int
    num_rdma_bytes: int
    device: torch.device
    binding: Binding


class _Tensors:
    """Checks the tensors of one call and remembers what its dimensions were found to be."""

    def __init__(self, call: str, device: torch.device, **dimensions: int) -> None:
        self.call = call
        self.device = device
        self.dimensions = dimensions

    def check(self, argument: str, tensor: Any, contiguous: bool = True) -> None:
        rule = _rule(self.call, argument)
        if not isinstance(tensor, torch.Tensor):
            self._fail(
                rule,
                f"is a {type(tensor).__name__}",
                "be a tensor",
                EPTypeError,
                fix=f"Pass a tensor {rule.text}.",
            )
        given = list(tensor.shape)
        shapes = [shape for shape in rule.shapes if self._fits(shape, given)]
        if not shapes:
            self._fail(rule, f"has shape {given}", f"be {self._expected(rule)}")
        self.dimensions.update(zip(shapes[0], given))
        if tensor.dtype != rule.dtype:
            self._fail(rule, f"has dtype {tensor.dtype}", f"be {rule.dtype}")
        if tensor.device != self.device:
            self._fail(
                rule,
                f"is on {tensor.device}",
                f"be on {self.device}",
                fix=f'Move it with {argument}.to("{self.device}").',
            )
        if contiguous and not tensor.is_contiguous():
            self._fail(
                rule,
                f"has strides {list(tensor.stride())}",
                "be contiguous",
                fix=f"Pass {argument}.contiguous().",
            )

    def _fits(self, shape: Sequence[str], given: Sequence[int]) -> bool:
        return len(shape) == len(given) and all(
            self.dimensions.get(name, size) == size for name, size in zip(shape, given)
        )

    def _expected(self, rule: TensorRule) -> str:
        named = rule.text.rpartition(" ")[0]
        known = " or ".join(
            f"[{', '.join(str(self.dimensions.get(name, name)) for name in shape)}]"
            for shape in rule.shapes
        )
        return named if known == named else f"{named} = {known}"

    def _fail(
        self,
        rule: TensorRule,
        got: str,
        allowed: str,
        error: type[EPArgumentError] = EPArgumentError,
        fix: str = "",
    ) -> NoReturn:
        raise error(f"{self.call}: {rule.argument} {got}; it must {allowed}. {fix or rule.fix}")


@functools.cache
def _rule(call: str, argument: str) -> TensorRule:
    return next(rule for rule in TENSORS[call] if rule.argument == argument)


def positive_int(where: str, name: str, value: Any) -> int:
    """`value` as an int above 0."""
    try:
        number = operator.index(value)
    except TypeError:
        fail(where, f"{name} is {value!r}", "integer", EPTypeError)
    if number <= 0:
        fail(where, f"{name} is {number}", "positive")
    return number


def byte_size(name: str, value: Any) -> int:
    """`value` as the size of a buffer in bytes."""
    try:
        number = operator.index(value)
    except TypeError:
        fail("Buffer", f"{name} is {value!r}", "integer", EPTypeError)
    if number < 0 or number % SIZE_ALIGNMENT:
        fail("Buffer", f"{name} is {number}", "byte_size", alignment=SIZE_ALIGNMENT)
    return number


def low_latency_sizes(
    call: str,
    num_max_dispatch_tokens_per_rank: Any,
    hidden: Any,
    num_experts: Any,
    num_ranks: int,
    binding: Binding,
) -> Sizes:
    """The three sizes all ranks must agree on, as checked ints."""
    maximum = positive_int(
        call, "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank
    )
    num_channels = positive_int(call, "hidden", hidden)
    experts = positive_int(call, "num_experts", num_experts)
    if num_channels % CHANNELS_PER_SCALE:
        padded = -(-num_channels // CHANNELS_PER_SCALE) * CHANNELS_PER_SCALE
        fail(
            call,
            f"hidden is {num_channels}",
            "hidden",
            multiple=CHANNELS_PER_SCALE,
            padded=padded,
        )
    if experts % num_ranks:
        padded = -(-experts // num_ranks) * num_ranks
        fail(call, f"num_experts is {experts}", "num_experts", num_ranks=num_ranks, padded=padded)
    for name, value, most in (
        ("num_max_dispatch_tokens_per_rank", maximum, binding.MAX_TOKENS),
        ("num_experts", experts, binding.MAX_EXPERTS),
    ):
        if value > most:
            fail(call, f"{name} is {value}", "kernel_limit", maximum=most)
    return Sizes(maximum, num_channels, experts)


def low_latency_bytes(binding: Binding, num_ranks: int, sizes: Sizes) -> int:
    """Bytes of RDMA buffer a call of these sizes needs."""
    return binding.low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=sizes.num_max_dispatch_tokens_per_rank,
        num_ranks=num_ranks,
        hidden=sizes.hidden,
        num_experts=sizes.num_experts,
    )


def sizes_that_fit(
    call: str, num_max_dispatch_tokens_per_rank: Any, hidden: Any, num_experts: Any, limits: Limits
) -> Sizes:
    """The same, for a buffer that must hold a call of these sizes."""
    sizes = low_latency_sizes(
        call,
        num_max_dispatch_tokens_per_rank,
        hidden,
        num_experts,
        limits.num_ranks,
        limits.binding,
    )
    buffer_size(call, sizes, limits)
    return sizes


def buffer_size(call: str, sizes: Sizes, limits: Limits) -> None:
    """The RDMA buffer must hold a call of these sizes."""
    needed = low_latency_bytes(limits.binding, limits.num_ranks, sizes)
    if limits.num_rdma_bytes < needed:
        fail(
            call,
            f"the buffer has num_rdma_bytes = {limits.num_rdma_bytes}",
            "buffer_size",
            needed=needed,
            arguments=f"{sizes.num_max_dispatch_tokens_per_rank}, {sizes.hidden}, "
            f"{limits.num_ranks}, {sizes.num_experts}",
        )


def low_latency_dispatch(
    limits: Limits,
    x: Any,
    topk_idx: Any,
    num_max_dispatch_tokens_per_rank: Any,
    num_experts: Any,
    stats: Any,
    wait_stats: Any,
    recv_counters: Any,
    *,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    async_finish: bool,
    return_recv_hook: bool,
) -> Shape:
    """Checks a call of `Buffer.low_latency_dispatch` and returns its sizes."""
    tensors = _Tensors(DISPATCH, limits.device, num_ranks=limits.num_ranks)
    tensors.check("x", x)
    tensors.check("topk_idx", topk_idx)
    sizes = low_latency_sizes(
        DISPATCH,
        num_max_dispatch_tokens_per_rank,
        x.shape[1],
        num_experts,
        limits.num_ranks,
        limits.binding,
    )
    maximum, hidden, experts = sizes
    shape = Shape(x.shape[0], hidden, topk_idx.shape[1], maximum, experts, limits.num_ranks)
    tensors.dimensions["num_local_experts"] = shape.num_local_experts
    if stats is not None:
        tensors.check("cumulative_local_expert_recv_stats", stats)
    if wait_stats is not None:
        tensors.check("dispatch_wait_recv_cost_stats", wait_stats)
    _topk(DISPATCH, shape, topk_idx, limits.binding.MAX_TOPK)
    if use_ue8m0 and not round_scale:
        fail(DISPATCH, "use_ue8m0 is True and round_scale False", "round_scale")
    if use_ue8m0 and not use_fp8:
        fail(DISPATCH, "use_ue8m0 is True and use_fp8 False", "ue8m0_without_fp8")
    _finish(DISPATCH, async_finish, return_recv_hook)
    _counters(DISPATCH, recv_counters, limits)
    buffer_size(DISPATCH, sizes, limits)
    _expert_indices(DISPATCH, shape, topk_idx, rows_per_expert=True)
    return shape


def low_latency_combine(
    limits: Limits,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Any,
    out: Any,
    wait_stats: Any,
    recv_counters: Any,
    *,
    use_logfmt: bool,
    zero_copy: bool,
    async_finish: bool,
    return_recv_hook: bool,
) -> Shape:
    """Checks a call of `Buffer.low_latency_combine` and returns its sizes."""
    given = unpack_handle(COMBINE, handle)
    sizes = low_latency_sizes(
        COMBINE,
        given.num_max_dispatch_tokens_per_rank,
        given.hidden,
        given.num_experts,
        limits.num_ranks,
        limits.binding,
    )
    maximum, hidden, experts = sizes
    tensors = _Tensors(
        COMBINE,
        limits.device,
        num_ranks=limits.num_ranks,
        num_local_experts=experts // limits.num_ranks,
        num_recv_rows=limits.num_ranks * maximum,
        hidden=hidden,
    )
    tensors.check("handle[0]", given.src_info)
    tensors.check("handle[1]", given.layout_range)
    _src_info_storage(given.src_info)
    # With zero_copy the rows are already in the buffer; x gives the shape only.
    tensors.check("x", x, contiguous=not zero_copy)
    tensors.check("topk_idx", topk_idx)
    tensors.check("topk_weights", topk_weights)
    if out is not None:
        tensors.check("out", out)
    if wait_stats is not None:
        tensors.check("combine_wait_recv_cost_stats", wait_stats)
    num_tokens, num_topk = topk_idx.shape
    shape = Shape(num_tokens, hidden, num_topk, maximum, experts, limits.num_ranks)
    _topk(COMBINE, shape, topk_idx, limits.binding.MAX_TOPK)
    if use_logfmt and zero_copy:
        fail(COMBINE, "use_logfmt and zero_copy are both True", "logfmt_and_zero_copy")
    _finish(COMBINE, async_finish, return_recv_hook)
    _counters(COMBINE, recv_counters, limits)
    buffer_size(COMBINE, sizes, limits)
    _expert_indices(COMBINE, shape, topk_idx, rows_per_expert=False)
    return shape


def dispatch_layout(topk_idx: Any, num_experts: Any, device: torch.device) -> tuple[int, int, int]:
    """Checks a call of `Buffer.get_dispatch_layout`; returns tokens, top-k width and experts."""
    _Tensors(LAYOUT, device).check("topk_idx", topk_idx)
    experts = positive_int(LAYOUT, "num_experts", num_experts)
    return topk_idx.shape[0], topk_idx.shape[1], experts


def unpack_handle(call: str, handle: Any) -> LowLatencyHandle:
    """A low-latency handle from any tuple or list of its five values."""
    if not isinstance(handle, (tuple, list)):
        fail(call, f"handle is a {type(handle).__name__}", "handle", EPTypeError)
    if len(handle) != len(LowLatencyHandle._fields):
        fail(call, f"handle has {len(handle)} elements", "handle")
    return LowLatencyHandle(*handle)


def _src_info_storage(src_info: torch.Tensor) -> None:
    # The top-k slots lie behind src_info in the same storage; a copy has lost them.
    end = (src_info.storage_offset() + 2 * src_info.numel()) * src_info.element_size()
    if src_info.untyped_storage().nbytes() < end:
        fail(COMBINE, "handle[0] is a copy", "handle_copy")


def _topk(call: str, shape: Shape, topk_idx: torch.Tensor, most: int) -> None:
    if not 0 < shape.num_topk <= most:
        fail(call, f"topk_idx has shape {list(topk_idx.shape)}", "topk", maximum=most)
    maximum = shape.num_max_dispatch_tokens_per_rank
    if shape.num_tokens > maximum:
        fail(call, f"there are {shape.num_tokens} tokens", "num_tokens", maximum=maximum)


def _finish(call: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        fail(call, "async_finish and return_recv_hook are both True", "async_and_hook")


def _counters(call: str, counters: Any, limits: Limits) -> None:
    if counters is None:
        return
    got, error = repr(counters), EPArgumentError
    if not isinstance(counters, RecvCounters):
        got, error = f"a {type(counters).__name__}", EPTypeError
    elif counters.num_ranks == limits.num_ranks and counters.device == limits.device:
        return
    fail(
        call,
        f"recv_counters is {got}",
        "recv_counters",
        error,
        num_ranks=limits.num_ranks,
        device=limits.device,
    )


def _expert_indices(
    call: str, shape: Shape, topk_idx: torch.Tensor, *, rows_per_expert: bool
) -> None:
    # On the GPU a look at the values would stall the stream; there the kernel reports them.
    if topk_idx.device.type != "cpu" or topk_idx.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(topk_idx))
    if low < -1 or high >= shape.num_experts:
        wrong = high if high >= shape.num_experts else low
        token, column = (int(index) for index in (topk_idx == wrong).nonzero()[0])
        fail(
            call,
            f"topk_idx[{token}, {column}] is {wrong}",
            "expert_index",
            num_experts=shape.num_experts,
        )
    maximum = shape.num_max_dispatch_tokens_per_rank
    if rows_per_expert and topk_idx.numel() > maximum:
        rows = torch.bincount(topk_idx.flatten() + 1, minlength=2)[1:]
        most = int(rows.max())
        if most > maximum:
            got = f"topk_idx names expert {int(rows.argmax())} {most} times"
            fail(call, got, "expert_overflow", maximum=maximum)


def bias_pair(bias: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The two biases of normal combine."""
    given = bias if isinstance(bias, (tuple, list)) else (bias, None)
    types = ", ".join(type(item).__name__ for item in given)
    if len(given) != 2 or any(
        item is not None and not isinstance(item, torch.Tensor) for item in given
    ):
        fail("combine", f"bias holds {types or 'nothing'}", "bias", EPUsageError)
    return given[0], given[1]


def even_num_sms(value: Any) -> int:
    """The argument of `Buffer.set_num_sms`."""
    try:
        number = operator.index(value)
    except TypeError:
        fail("set_num_sms", f"num_sms is {value!r}", "integer", EPTypeError)
    if number < 0 or number % 2:
        fail(
            "set_num_sms", f"num_sms is {number}", "num_sms", EPUsageError, even=max(0, number + 1)
        )
    return number
