"""What the phases of real operations must add up to, and the ranges in which Nsight shows them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import deep_ep
from deep_ep.native import backend
from deep_ep.native.backend import CudaBackend
from deep_ep.observe.parts import PARTS
from deep_ep.observe.phases import OperationPhases


def assert_complete(buffer: deep_ep.Buffer) -> None:
    """The phases of an operation add up to the time since the end of the one before."""
    lasted = {}
    for counters in (
        *(buffer.dispatch_counters, buffer.combine_counters),
        *(buffer.normal_dispatch_counters, buffer.normal_combine_counters),
    ):
        if counters is not None:
            used = counters.snapshot()
            place = {name: i for i, name in enumerate(used.ring_own_fields)}
            for own in used.operations()[:, -1]:
                lasted[int(own[place["op"]])] = int(
                    own[place["exit"]] - own[place["previous_exit"]]
                )
    found = buffer.phases().operations
    assert [each.operation for each in found] == sorted(lasted)
    for each in found[1:]:
        assert sum(each.ns.values()) == lasted[each.operation]
        assert min(each.ns.values()) >= 0


def parts_of(operation: OperationPhases) -> set[str]:
    """Which parts of the program lie before it."""
    return {name for name in PARTS if operation.ns[name]}


def nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets what NVTX is told from now on: names, indented by how deep they are."""
    seen: list[str] = []
    depth = 0

    def push(name: str) -> None:
        nonlocal depth
        seen.append("  " * depth + name)
        depth += 1

    def pop() -> None:
        nonlocal depth
        depth -= 1

    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range_push=push, range_pop=pop))
    for name in ("push_range", "pop_range"):
        monkeypatch.setattr(type(backend.get()), name, getattr(CudaBackend, name))
    return seen
