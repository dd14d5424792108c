"""Calls with something wrong in them: changes of correct arguments, and what must be raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_ep.errors import EPArgumentError, EPTypeError

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def of(name: str, change: Callable[[Any], Any]) -> Change:
    """Changes one argument."""
    return lambda arguments: {**arguments, name: change(arguments[name])}


def to(**values: Any) -> Change:
    """Sets arguments."""
    return lambda arguments: {**arguments, **values}


def strided(t: torch.Tensor) -> torch.Tensor:
    """Equal shape, every second element of a larger tensor."""
    return torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)[..., ::2]


def elsewhere(t: torch.Tensor) -> torch.Tensor:
    """Equal shape and dtype on a device of another kind."""
    return torch.empty_like(t, device="meta")


class StandIn(torch.Tensor):
    """A tensor whose elements are elsewhere, as those of a DTensor are."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(function)


def without_memory(t: torch.Tensor) -> torch.Tensor:
    """Equal shape, dtype and device, and no elements."""
    stand_in: torch.Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        StandIn, t.shape, dtype=t.dtype, device=t.device
    )
    return stand_in


def with_value(place: Any, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with another value at one place."""

    def change(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[place] = value
        return t

    return change


def case(
    name: str,
    change: Change,
    *words: str,
    error: type[Exception] = EPArgumentError,
    marks: Any = (),
) -> Any:
    """One bad call: what is changed in a correct one, and the error with all its words."""
    return pytest.param(change, error, list(words), id=name, marks=marks)


def tensor_cases(
    name: str,
    dtype: torch.dtype | None,
    advice: str = "",
    size: tuple[str, ...] = ("shape",),
    any_strides: bool = False,
) -> list[Any]:
    """Wrong type, dtype, rank, size, strides and device of one tensor argument.

    Args:
        name: of the argument.
        dtype: a wrong one; `None`: none is.
        advice: that the error of a wrong dtype gives.
        size: words of the error of a wrong size, which may name another argument.
        any_strides: whether any are right.
    """
    cases = [
        case(f"{name}-type", of(name, lambda _: "text"), name, "str", error=EPTypeError),
        case(f"{name}-list", of(name, lambda _: [[1, 2]]), name, "list", error=EPTypeError),
        case(f"{name}-rank", of(name, lambda t: t[None]), name, "shape"),
        case(f"{name}-size", of(name, lambda t: t[:-1]), *size),
        case(f"{name}-device", of(name, elsewhere), name, "meta", ".to("),
        case(f"{name}-memory", of(name, without_memory), name, "to_local()"),
    ]
    if not any_strides:
        cases.append(case(f"{name}-strides", of(name, strided), name, "contiguous()"))
    if dtype is not None:
        change = of(name, lambda t: t.to(dtype))
        cases.append(case(f"{name}-dtype", change, name, str(dtype), advice))
    return cases


def assert_raises(call: Callable[[], Any], error: type[Exception], words: list[str]) -> None:
    """`call` raises exactly `error`, and its text holds all `words`."""
    with pytest.raises(error) as caught:
        call()
    assert_says(caught.value, error, words)


def assert_says(raised: object, error: type[Exception], words: list[str]) -> None:
    """`raised` is exactly `error`, and its text holds all `words`."""
    assert type(raised) is error, repr(raised)
    for word in words:
        assert word in str(raised), f"{word!r} is not in: {raised}"
