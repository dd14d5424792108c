"""The parts of a training step in `buffer.phases()`: layout and order of rows are phases of the operation after them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import deep_ep
from layers import Sizes, Tokens, layer, module_of, on_ranks, tokens_of
from support.launch import DEVICE
from support.phase_sums import assert_complete, nvtx_ranges, parts_of

SIZES = Sizes((6, 0, 9, 4))
# Forward: dispatch, combine. Backward: dispatch of the combine, combine of the dispatch.
STEP: list[set[str]] = [{"layout"}, {"permute", "unpermute"}, set(), {"unpermute"}]
KINDS = ["normal dispatch", "normal combine"] * 2


def plainly(tokens: Tokens, buffer: deep_ep.Buffer) -> torch.Tensor:
    return layer(tokens, buffer, SIZES)[1]


def awaited_late(tokens: Tokens, buffer: deep_ep.Buffer) -> torch.Tensor:
    return module_of(buffer, SIZES, async_combine=True)(*tokens.given)


@pytest.mark.parametrize("forward", [plainly, awaited_late])
@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_each_part_of_a_step_is_a_phase_of_the_operation_after_it(
    ranks_per_node: int, forward: Callable[[Tokens, deep_ep.Buffer], torch.Tensor]
) -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.enable_counters()
        for _ in range(2):
            tokens = tokens_of(SIZES, rank)
            tokens.results(forward(tokens, buffer))
        assert_complete(buffer)
        found = buffer.phases().operations
        assert [each.kind for each in found] == KINDS * 2
        # The first operation of a buffer follows none.
        assert [parts_of(each) for each in found] == [set(), *STEP[1:], *STEP]

    on_ranks(SIZES, run, ranks_per_node)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="there parts run while the rows of the other batch travel"
)
def test_of_two_micro_batches_no_part_is_lost_or_counted_twice() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.enable_counters()
        plainly(tokens_of(SIZES, rank), buffer)
        with torch.no_grad():
            module_of(buffer, SIZES, micro_batches=2)(*tokens_of(SIZES, rank).given)
        assert_complete(buffer)
        assert [parts_of(each) for each in buffer.phases().operations[2:]] == [
            {"layout"},  # of both
            {"permute"},
            {"unpermute"},
            {"permute", "unpermute"},
        ]

    on_ranks(SIZES, run)


def test_a_step_is_a_row_of_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes((6,))
    seen = nvtx_ranges(monkeypatch)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.enable_counters()
        tokens = tokens_of(sizes, rank)
        tokens.results(layer(tokens, buffer, sizes)[1])

    on_ranks(sizes, run)
    assert [name.replace("deep_ep::", "") for name in seen] == [
        *("layout", "dispatch", "  notify", "  host", "permute", "unpermute", "combine"),
        *("dispatch", "unpermute", "unpermute", "combine"),
    ]
