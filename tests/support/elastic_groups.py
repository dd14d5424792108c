"""Groups of ranks that tests of `ElasticBuffer` share, and what they exchange most often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.elastic_exchange import Mode, Setup, elastic_ranks
from support.launch import DEVICE, RankThreads
from support.normal_exchange import shape_of

Tensor = torch.Tensor


COMPACT, EXPANDED = Mode(), Mode(do_expand=True)


FP8 = Mode(dtype="float8_e4m3fn", scales="float32", scale_strides="columns")


# Ranks and nodes; the two arguments that decide how combine rounds.
ONE_NODE, TWO_NODES, DIRECT = Setup(4, 4), Setup(4, 2), Setup(4, 2, allow_hybrid_mode=False)


# All ways in which four ranks add up.
REDUCTIONS = [
    replace(setup, allow_multiple_reduction=is_multiple)
    for setup in (ONE_NODE, TWO_NODES, DIRECT)
    for is_multiple in (True, False)
]
SETUPS = [
    *(Setup(1, 1), Setup(2, 1), Setup(3, 3), *REDUCTIONS, Setup(6, 2)),
    *(Setup(8, 4), Setup(8, 4, allow_multiple_reduction=False)),
]


FOUR = shape_of((5, 0, 8, 3), 32, 12, 3)


class SharedGroups:
    """Groups of ranks that tests share. One in which an error was raised is not used again."""

    def __init__(self) -> None:
        self._ranks: dict[Setup, RankThreads] = {}

    @contextlib.contextmanager
    def of(self, setup: Setup) -> Iterator[RankThreads]:
        if setup not in self._ranks:
            self._ranks[setup] = elastic_ranks(setup)
        try:
            yield self._ranks[setup]
        except BaseException:
            self._ranks.pop(setup).abandon()
            raise

    def run(self, setup: Setup, fn: Callable[[int, Any], Any]) -> list[Any]:
        """fn(rank, buffer) on all ranks of a group; see `RankThreads.run`."""
        with self.of(setup) as ranks:
            return ranks.run(fn)

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


both_layouts = pytest.mark.parametrize("mode", [COMPACT, EXPANDED], ids=["compact", "expanded"])


def good_call(rank: int) -> dict[str, Any]:
    """A dispatch of four ranks with eight experts that is right."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "x": torch.ones(3, 32, dtype=torch.bfloat16, device=DEVICE),
        "topk_idx": torch.rand(3, 8, generator=generator).topk(2).indices.to(DEVICE),
        "topk_weights": torch.ones(3, 2, device=DEVICE),
        "num_experts": 8,
    }


def assert_works(buffer: Any) -> None:
    """A dispatch and a combine, whose sum is known."""
    call = good_call(buffer.rank_idx)
    recv_x, _, _, handle, _ = buffer.dispatch(**call, do_expand=True)
    combined, _, _ = buffer.combine(recv_x, handle)
    assert torch.equal(combined, 2 * call["x"])
