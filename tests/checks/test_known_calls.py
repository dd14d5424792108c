"""Calls that look like allowed ones. That all others are checked, `test_errors.py` shows for each argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_ep.checks import known_calls
from deep_ep.checks.calls import LowLatencyDispatch
from deep_ep.checks.known_calls import KnownCalls
from deep_ep.errors import EPArgumentError


def dispatch_call(**changes: Any) -> LowLatencyDispatch:
    """A call with new tensors."""
    arguments = {
        "x": torch.zeros(4, 128, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(4, 2, dtype=torch.int64),
        "num_max_dispatch_tokens_per_rank": 4,
        "num_experts": 8,
        "use_fp8": True,
    }
    return LowLatencyDispatch.of(**{**arguments, **changes})


class Check:
    """Allows calls, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _: LowLatencyDispatch) -> int:
        self.count += 1
        return self.count


@pytest.fixture
def known() -> KnownCalls[int]:
    return KnownCalls(LowLatencyDispatch)


def test_a_call_that_looks_like_an_allowed_one_is_not_checked(known: KnownCalls[int]) -> None:
    check = Check()
    assert [known.find(dispatch_call(), check) for _ in range(3)] == [1, 1, 1]
    assert known.find(dispatch_call(num_experts=16), check) == 2
    assert known.find(dispatch_call(), check) == 1


def test_a_call_that_was_refused_is_not_known(known: KnownCalls[int]) -> None:
    def refuse(_: LowLatencyDispatch) -> int:
        raise EPArgumentError("of a test")

    for _ in range(2):
        with pytest.raises(EPArgumentError):
            known.find(dispatch_call(), refuse)


@pytest.mark.parametrize(
    "odd",
    [{"num_experts": torch.tensor(8)}, {"num_experts": 8.0}, {"use_fp8": 1}, {"use_fp8": [1]}],
    ids=str,
)
def test_numbers_and_flags_of_other_types_are_checked_each_time(
    known: KnownCalls[int], odd: dict[str, Any]
) -> None:
    """They may be equal to what is allowed without being it, or change."""
    check = Check()
    known.find(dispatch_call(), check)
    assert [known.find(dispatch_call(**odd), check) for _ in range(2)] == [2, 3]


@pytest.mark.parametrize("name", ["x", "topk_idx"])
def test_a_tensor_whose_memory_was_freed_is_checked(known: KnownCalls[int], name: str) -> None:
    """As FSDP frees parameters: all else is as it was."""
    check = Check()
    known.find(dispatch_call(), check)
    call = dispatch_call()
    getattr(call, name).untyped_storage().resize_(0)
    found = known.find(call, check)
    assert found == 2  # which does not print the tensor: torch would read what was freed


def test_a_negated_view_is_checked_each_time(known: KnownCalls[int]) -> None:
    check = Check()
    known.find(dispatch_call(), check)
    call = dispatch_call(x=torch._neg_view(dispatch_call().x))
    assert [known.find(call, check) for _ in range(2)] == [2, 3]


def test_not_more_are_known_than_fit(
    known: KnownCalls[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_calls, "_MOST", 3)
    for num_experts in range(1, 9):
        known.find(dispatch_call(num_experts=num_experts), Check())
        assert len(known._found) <= 3
