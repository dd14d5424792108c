"""What Python writes down of the native module is what the module says of itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.base.rules import DISPATCH
from deep_ep.checks import low_latency as low_latency_checks
from deep_ep.errors import EPArgumentError
from deep_ep.native import backend
from deep_ep.ops.failures import error_from_failure

BINDING = backend.get().binding


def test_stubs_name_what_the_module_offers_and_the_arguments_that_it_takes() -> None:
    stub = ast.parse(Path(deep_ep.__file__).with_name("_cpu.pyi").read_text(encoding="utf-8"))
    for node in stub.body:
        if isinstance(node, ast.AnnAssign):
            assert hasattr(BINDING, ast.unparse(node.target))
        elif isinstance(node, ast.FunctionDef):
            assert hasattr(BINDING, node.name)
        elif isinstance(node, ast.ClassDef):
            native = getattr(BINDING, node.name)
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            offered = {name for name in vars(native) if not name.startswith("_")}
            assert {method.name for method in methods} - {"__init__"} == offered
            for method in methods:
                # pybind11 begins a docstring with the signature: f(self: module.Class, *, x: int) -> None
                signature = (getattr(native, method.name).__doc__ or "").splitlines()[0]
                taken = re.findall(r"(?<=, )(\w+): ", signature)
                assert [arg.arg for arg in method.args.args[1:] + method.args.kwonlyargs] == taken


def test_operations_are_named_after_the_calls_that_start_them() -> None:
    for name in BINDING.OPERATIONS[1:]:
        assert hasattr(BINDING.Runtime, name) or hasattr(deep_ep.Buffer, name)


def test_every_reason_of_a_failure_is_told_in_words_of_its_own() -> None:
    failure: dict[str, Any] = {
        "operation": DISPATCH,
        "op": 17,
        "ranks": [1],
        "last_op": {1: 16},
        "given_up": {1: 17},
        "expected": {},
        "seen": {},
        "waited_ns": 1,
        "row": {"token": 2, "owner": 1, "sender": 3, "hop": "network"},
    }
    reasons = BINDING.FAILURE_REASONS[1:]
    texts = {str(error_from_failure({**failure, "reason": reason}, 0)) for reason in reasons}
    assert len(texts) == len(reasons)


def test_every_fault_of_a_handle_is_told_in_words_of_its_own() -> None:
    def text(raises: Callable[..., Any], reason: str) -> str:
        with pytest.raises(EPArgumentError) as caught:
            raises((reason, 0, 0, 0), *(torch.zeros(1, 1, dtype=torch.int64),) * 2)
        return str(caught.value)

    reasons = BINDING.HANDLE_FAULTS[1:]
    assert len({text(low_latency_checks.fail_for, reason) for reason in reasons}) == len(reasons)
