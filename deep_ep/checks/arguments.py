"""Checks of single arguments against the table (rules.py), for every call.

They run before anything is sent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, strided

from deep_ep.base.rules import VECTOR_BYTES, TensorRule, fail
from deep_ep.errors import EPArgumentError, EPTypeError, EPUsageError
from deep_ep.native import backend
from deep_ep.native.backend import Binding
from deep_ep.observe.counters import RecvCounters
from deep_ep.types.bounds import integer
from deep_ep.types.config import Config

if TYPE_CHECKING:
    from deep_ep.checks.calls import BufferCall

MAX_BYTES = 1 << 46  # no process has addresses for more


class Limits(NamedTuple):
    """What a buffer allows, and where tensors must be. The kernels' limits are those of the binding."""

    num_ranks: int
    num_rdma_bytes: int
    device: torch.device
    binding: Binding
    num_nvl_bytes: int = 0


class Tensors:
    """Checks the tensors of one call in the order of their rules, and remembers what its dimensions were found to be."""

    def __init__(self, call: BufferCall, limits: Limits, **dimensions: int) -> None:
        self.dimensions = dimensions
        dimensions["num_ranks"] = limits.num_ranks
        self._call = call
        self._device = limits.device
        self._rest = iter(call.rules)

    def check(self, last: str = "", any_strides: bool = False) -> None:
        """The arguments that have not been checked, up to `last`; those that may be `None` if they are given."""
        call = self._call
        for rule in self._rest:
            tensor = rule.of(call)
            if tensor is not None or not rule.is_optional:
                self.check_rule(rule, tensor, any_strides)
            if rule.argument == last:
                return

    def check_rule(self, rule: TensorRule, tensor: Any, any_strides: bool = False) -> None:
        """Shape, dtype, device and strides of one argument."""
        argument = rule.argument
        if not isinstance(tensor, Tensor):
            fix = f"Pass a tensor {rule.text}."
            self._fail(rule, f"is a {type(tensor).__name__}", "be a tensor", fix, EPTypeError)
        given = tensor.shape
        for shape in rule.shapes:
            if self._fits(shape, given):
                break
        else:
            self._fail(rule, f"has shape {list(given)}", f"be {self._expected(rule)}")
        self.dimensions.update(zip(shape, given))
        if tensor.layout != strided:
            fix = f"Pass {argument}.to_dense()."
            self._fail(rule, f"has layout {tensor.layout}", "be dense", fix)
        if tensor.is_neg() or tensor.is_conj():
            fix = f"Pass {argument}.resolve_conj().resolve_neg()."
            self._fail(rule, "is a view that changes signs", "hold its elements itself", fix)
        if rule.dtypes and tensor.dtype not in rule.dtypes:
            allowed = " or ".join(str(dtype) for dtype in rule.dtypes)
            fix = f"Cast with {argument}.to({rule.dtypes[0]})." if rule.casts else ""
            self._fail(rule, f"has dtype {tensor.dtype}", f"be {allowed}", fix)
        if tensor.device != self._device:
            fix = f'Move it with {argument}.to("{self._device}").'
            self._fail(rule, f"is on {tensor.device}", f"be on {self._device}", fix)
        is_contiguous = tensor.is_contiguous()
        if not (is_contiguous or any_strides or rule.any_strides):
            fix = f"Pass {argument}.contiguous()."
            self._fail(rule, f"has strides {list(tensor.stride())}", "be contiguous", fix)
        pointer = tensor.data_ptr()
        # Of the device meta no tensor has memory; it is refused before, unless it is the buffer's.
        if not pointer and tensor.numel() and not tensor.is_meta:
            fix = f"Pass {argument}.to_local() of a DTensor, and no stand-in or memory that was freed."
            self._fail(rule, "has no memory", "hold its elements itself", fix)
        # What is not contiguous is copied, or not read.
        if rule.in_vectors and pointer % VECTOR_BYTES and is_contiguous:
            got = f"begins at address {pointer:#x}"
            fix = f"Pass {argument}.clone(), or allocate it by itself: it is a view into other memory."
            self._fail(rule, got, f"begin at a multiple of {VECTOR_BYTES} bytes", fix)

    def _fits(self, shape: list[str], given: torch.Size) -> bool:
        known = self.dimensions
        if len(shape) != len(given):
            return False
        for name, size in zip(shape, given):  # noqa: SIM110 - a generator costs more than the comparisons
            if known.get(name, size) != size:
                return False
        return True

    def _expected(self, rule: TensorRule) -> str:
        named = rule.text[: rule.text.rindex("]") + 1]
        known = re.sub(r"\w+", lambda name: str(self.dimensions.get(name[0], name[0])), named)
        return named if known == named else f"{named} = {known}"

    def _fail(
        self,
        rule: TensorRule,
        got: str,
        allowed: str,
        fix: str = "",
        error: type[EPArgumentError] = EPArgumentError,
    ) -> NoReturn:
        raise error(
            f"{self._call.name}: {rule.argument} {got}; it must {allowed}. {fix or rule.fix}"
        )


def positive_int(where: str, name: str, value: Any) -> int:
    """`value` as an int above 0."""
    return integer(where, name, value, least=1)


def not_negative_int(where: str, name: str, value: Any) -> int:
    """`value` as an int of at least 0."""
    return integer(where, name, value, least=0)


def instance(where: str, name: str, value: Any, kind: type, fix: str) -> None:
    """Whether `value` is of a type. `fix` says what to do, as a sentence without its stop."""
    if not isinstance(value, kind):
        got = f"{name} is a {type(value).__name__}"
        fail(where, got, "instance", EPTypeError, kind=kind.__name__, fix=fix)


def flags(where: str, **given: Any) -> tuple[bool, ...]:
    """Arguments that are true or false, by name."""
    return tuple(_flag(where, name, value) for name, value in given.items())


def flags_of(call: BufferCall) -> None:
    """Makes those of a call bools."""
    given = vars(call)
    for name in call.flags:
        value = given[name]
        if value is not True and value is not False:
            given[name] = _flag(call.name, name, value)


def _flag(where: str, name: str, value: Any) -> bool:
    """Anything but an array or tensor of many elements is one."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        fail(where, f"{name} is a {type(value).__name__}", "flag", EPTypeError)


def shape(where: str, name: str, value: Any) -> tuple[int, ...]:
    """`value` as the sizes of a tensor's dimensions."""
    if not isinstance(value, (tuple, list)):
        fail(where, f"{name} is a {type(value).__name__}", "shape", EPTypeError)
    return tuple(not_negative_int(where, f"{name}[{i}]", size) for i, size in enumerate(value))


def seconds(where: str, name: str, value: Any, rule: str = "seconds") -> float:
    """`value` as a time of at least 0; by the rule "timeout" above it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e9 or (value == 0 and rule == "timeout"):
        fail(where, f"{name} is {value!r}", rule)
    return float(value)


def timeout(where: str, name: str, value: Any) -> float:
    """`value` as a time above 0."""
    return seconds(where, name, value, "timeout")


def byte_size(name: str, value: Any) -> int:
    """`value` as the size of a buffer in bytes."""
    number = integer("Buffer", name, value)
    alignment = backend.get().binding.BUFFER_ALIGNMENT
    if not 0 <= number <= MAX_BYTES or number % alignment:
        got = f"{name} is {number}"
        fail("Buffer", got, "byte_size", alignment=alignment, maximum=MAX_BYTES)
    return number


def kernel_limit(call: str, name: str, value: int, most: int) -> None:
    """What the kernels allow at most."""
    if value > most:
        fail(call, f"{name} is {value}", "kernel_limit", maximum=most)


def num_experts(call: str, got: str, number: int, num_ranks: int, binding: Binding) -> None:
    """Experts, of which all ranks have as many, and some; not more than kernels know."""
    padded = max(1, -(-number // num_ranks)) * num_ranks
    if number == 0 or number % num_ranks:
        fail(call, got, "num_experts", num_ranks=num_ranks, padded=padded)
    kernel_limit(call, "num_experts", number, binding.MAX_EXPERTS)


def expert_indices(call: str, topk_idx: Tensor, number: int) -> None:
    """Entries name one of so many experts, or none. On a GPU a look would stall the stream; there kernels report them."""
    if not topk_idx.is_cpu or topk_idx.numel() == 0:
        return
    low, high = map(int, torch.aminmax(topk_idx))
    if low < -1 or high >= number:
        wrong = high if high >= number else low
        place = (topk_idx == wrong).nonzero()[0].tolist()
        fail(call, f"topk_idx{place} is {wrong}", "expert_index", num_experts=number)


def recv_counters(call: BufferCall, limits: Limits) -> None:
    """The counters of a call, if it is given any."""
    given = call.recv_counters
    wanted: dict[str, Any] = {"num_ranks": limits.num_ranks, "device": limits.device}
    if given is None:
        return
    if not isinstance(given, RecvCounters):
        got = f"recv_counters is a {type(given).__name__}"
        fail(call.name, got, "recv_counters", EPTypeError, **wanted)
    if (given.num_ranks, given.device) != (limits.num_ranks, limits.device):
        fail(call.name, f"recv_counters is {given!r}", "recv_counters", **wanted)


def bias_pair(bias: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The two biases of normal combine."""
    given = bias if isinstance(bias, (tuple, list)) else (bias, None)
    types = ", ".join(type(item).__name__ for item in given)
    if len(given) != 2 or any(
        item is not None and not isinstance(item, torch.Tensor) for item in given
    ):
        fail("combine", f"bias holds {types or 'nothing'}", "bias", EPUsageError)
    return given[0], given[1]


def given_config(call: str, config: Config | None) -> None:
    """The configuration of a call that takes no recommended one."""
    if config is None:
        fail(call, "config is None", "config", EPUsageError)


def even_num_sms(value: Any) -> int:
    """The argument of `Buffer.set_num_sms`."""
    number = integer("set_num_sms", "num_sms", value)
    if number < 0 or number % 2:
        even = max(0, number + 1)
        fail("set_num_sms", f"num_sms is {number}", "num_sms", EPUsageError, even=even)
    return number
