"""Checks of single arguments against the table (rules.py), for every call.

They run before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from deep_ep.base.rules import VECTOR_BYTES, TensorRule, fail, tensor_rule
from deep_ep.errors import EPArgumentError, EPTypeError, EPUsageError
from deep_ep.native import backend
from deep_ep.native.backend import Binding
from deep_ep.observe.counters import RecvCounters
from deep_ep.types.bounds import integer
from deep_ep.types.config import Config

MAX_BYTES = 1 << 46  # no process has addresses for more


class Limits(NamedTuple):
    """What a buffer allows; the checks need no more of it.

    Attributes:
        num_ranks: size of the group.
        num_rdma_bytes: size of its RDMA buffer.
        device: where tensors must be.
        binding: the native module; it knows the kernels' limits.
        num_nvl_bytes: size of its NVLink buffer.
    """

    num_ranks: int
    num_rdma_bytes: int
    device: torch.device
    binding: Binding
    num_nvl_bytes: int = 0


class Tensors:
    """Checks the tensors of one call and remembers what its dimensions were found to be."""

    def __init__(self, call: str, device: torch.device, **dimensions: int) -> None:
        self.call = call
        self.device = device
        self.dimensions = dimensions

    def check(self, argument: str, tensor: Any, contiguous: bool = True) -> None:
        """Shape, dtype, device and strides of one argument."""
        self.check_rule(tensor_rule(self.call, argument), tensor, contiguous)

    def check_rule(self, rule: TensorRule, tensor: Any, contiguous: bool = True) -> None:
        """The same, by a rule that is not in the table of the call."""
        argument = rule.argument
        if not isinstance(tensor, torch.Tensor):
            self._fail(
                rule,
                f"is a {type(tensor).__name__}",
                "be a tensor",
                EPTypeError,
                fix=f"Pass a tensor {rule.text}.",
            )
        given = tensor.shape
        for shape in rule.shapes:
            if self._fits(shape, given):
                break
        else:
            self._fail(rule, f"has shape {list(given)}", f"be {self._expected(rule)}")
        self.dimensions.update(zip(shape, given))
        if tensor.layout != torch.strided:
            self._fail(
                rule,
                f"has layout {tensor.layout}",
                "be dense",
                fix=f"Pass {argument}.to_dense().",
            )
        if rule.dtypes and tensor.dtype not in rule.dtypes:
            allowed = " or ".join(str(dtype) for dtype in rule.dtypes)
            self._fail(rule, f"has dtype {tensor.dtype}", f"be {allowed}")
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
        # What is not contiguous is copied, or not read.
        if rule.in_vectors and tensor.data_ptr() % VECTOR_BYTES and tensor.is_contiguous():
            self._fail(
                rule,
                f"begins at address {tensor.data_ptr():#x}",
                f"begin at a multiple of {VECTOR_BYTES} bytes",
                fix=f"Pass {argument}.clone(), or allocate it by itself: it is a view into other memory.",
            )

    def _fits(self, shape: Sequence[str], given: Sequence[int]) -> bool:
        if len(shape) != len(given):
            return False
        for name, size in zip(shape, given):  # noqa: SIM110 - a generator costs more than the comparisons
            if self.dimensions.get(name, size) != size:
                return False
        return True

    def _expected(self, rule: TensorRule) -> str:
        named = rule.shape_text
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


def positive_int(where: str, name: str, value: Any) -> int:
    """`value` as an int above 0."""
    return integer(where, name, value, least=1)


def not_negative_int(where: str, name: str, value: Any) -> int:
    """`value` as an int of at least 0."""
    return integer(where, name, value, least=0)


def instance(where: str, name: str, value: Any, kind: type, fix: str) -> None:
    """Whether `value` is of a type.

    Args:
        where: the call.
        name: of the argument.
        value: that was given.
        kind: the type.
        fix: what to do, as a sentence without its stop.
    """
    if not isinstance(value, kind):
        got = f"{name} is a {type(value).__name__}"
        fail(where, got, "instance", EPTypeError, kind=kind.__name__, fix=fix)


def flags(where: str, **given: Any) -> tuple[bool, ...]:
    """Arguments that are true or false, by name. Anything but an array or tensor of many elements is one."""
    found = []
    for name, value in given.items():
        try:
            found.append(bool(value))
        except (TypeError, ValueError, RuntimeError):
            fail(where, f"{name} is a {type(value).__name__}", "flag", EPTypeError)
    return tuple(found)


def shape(where: str, name: str, value: Any) -> tuple[int, ...]:
    """`value` as the sizes of a tensor's dimensions."""
    if not isinstance(value, (tuple, list)):
        fail(where, f"{name} is a {type(value).__name__}", "shape", EPTypeError)
    return tuple(not_negative_int(where, f"{name}[{i}]", size) for i, size in enumerate(value))


def seconds(where: str, name: str, value: Any) -> float:
    """`value` as a time of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        fail(where, f"{name} is {value!r}", "seconds")
    return float(value)


def byte_size(name: str, value: Any) -> int:
    """`value` as the size of a buffer in bytes."""
    number = integer("Buffer", name, value)
    alignment = backend.get().binding.BUFFER_ALIGNMENT
    if not 0 <= number <= MAX_BYTES or number % alignment:
        fail(
            "Buffer",
            f"{name} is {number}",
            "byte_size",
            alignment=alignment,
            maximum=MAX_BYTES,
        )
    return number


def kernel_limit(call: str, name: str, value: int, most: int) -> None:
    """What the kernels allow at most."""
    if value > most:
        fail(call, f"{name} is {value}", "kernel_limit", maximum=most)


def recv_counters(call: str, counters: Any, limits: Limits) -> None:
    """The counters of a call, if it is given any."""
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


def bias_pair(bias: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The two biases of normal combine."""
    given = bias if isinstance(bias, (tuple, list)) else (bias, None)
    types = ", ".join(type(item).__name__ for item in given)
    if len(given) != 2 or any(
        item is not None and not isinstance(item, torch.Tensor) for item in given
    ):
        fail("combine", f"bias holds {types or 'nothing'}", "bias", EPUsageError)
    return given[0], given[1]


def given_config(call: str, config: Config | None) -> Config:
    """The configuration of a call that takes no recommended one."""
    if config is None:
        fail(call, "config is None", "config_needed", EPUsageError)
    return config


def even_num_sms(value: Any) -> int:
    """The argument of `Buffer.set_num_sms`."""
    number = integer("set_num_sms", "num_sms", value)
    if number < 0 or number % 2:
        fail(
            "set_num_sms", f"num_sms is {number}", "num_sms", EPUsageError, even=max(0, number + 1)
        )
    return number
