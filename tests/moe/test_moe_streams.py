"""`deep_ep.moe` on several streams: results are right, and waits order all uses of memory, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep import moe
from deep_ep.native import backend
from layers import Sizes, Tokens, assert_exact, expected, experts_of, module_of, on_ranks, tokens_of
from support.stream_tracker import Program, Way, tracked, use_tracked

pytestmark = pytest.mark.skipif(backend.get().name != "cpu", reason="runs on the host target")

Tensor = torch.Tensor
SIZES = Sizes((7, 4))
HERE, ELSEWHERE = Way(), Way(elsewhere=True)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"async_combine": True},
    {"micro_batches": 2},
    {"expert_alignment": 8, "async_combine": True},
    {"fp8": True, "async_combine": True},
    {"fp8": True, "micro_batches": 2},
]


def tokens_on(program: Program, rank: int) -> Tokens:
    """The rank's, in memory of the current stream."""
    kept = tokens_of(SIZES, rank)
    x, topk_idx, weights, grad = program.copies(
        [kept.x.detach(), kept.topk_idx, kept.weights.detach(), kept.grad]
    )
    return Tokens(x.requires_grad_(), topk_idx, weights.requires_grad_(), grad)


def in_a_layer(
    program: Program,
    buffer: deep_ep.Buffer,
    options: dict[str, Any],
    made: Way,
    used: Way,
) -> tuple[Tensor, ...]:
    """Forward and backward on one stream, results read on another; inputs and results are dropped at once.

    Autograd runs a backward on the stream of its forward, and orders it between its caller's work."""
    program.go_to(made)
    tokens = tokens_on(program, buffer.rank)
    layer = module_of(buffer, SIZES, **options)
    combined = program.own(layer(*tokens.given))
    del layer
    program.go_to(used)
    result = program.copies(combined.detach())
    program.go_to(made)
    combined.backward(tokens.grad)
    del combined
    grads = program.own([tokens.x.grad, tokens.weights.grad])
    program.go_to(used)
    return (result, *program.copies(grads))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks_per_node", [2, 1], ids=["one node", "two nodes"])
def test_a_layer_whose_results_are_used_on_any_stream(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], ranks_per_node: int
) -> None:
    selected = use_tracked(monkeypatch)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        for made, used in itertools.product((HERE, ELSEWHERE), repeat=2):
            with tracked(selected, buffer) as tracker:
                program = Program(selected, tracker)
                results = in_a_layer(program, buffer, options, made, used)
            assert not tracker.races
            tokens = tokens_of(SIZES, rank)
            assert_exact(results, expected(tokens, SIZES))

    on_ranks(SIZES, run, ranks_per_node)


def in_calls(
    program: Program, buffer: deep_ep.Buffer, is_async: bool, ways: tuple[Way, ...]
) -> Tensor:
    """Dispatch, experts, combine and the use of what comes back, each on a stream."""
    program.go_to(ways[0])
    tokens = tokens_on(program, buffer.rank)
    sent = program.own(
        moe.dispatch(
            *(tokens.x.detach(), tokens.topk_idx, tokens.weights.detach()),
            *(buffer, SIZES.num_experts),
        )
    )
    del tokens
    program.go_to(ways[1])
    program.use(sent)
    y = program.own(experts_of(buffer.rank, SIZES)(sent.x, sent.num_tokens_per_expert))
    program.go_to(ways[2])
    program.use([sent, y])
    combined = program.own(moe.combine(y, sent, async_finish=is_async))
    del sent, y
    program.go_to(ways[3])
    result: Tensor = program.copies(combined)
    return result


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_on_any_streams(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    selected = use_tracked(monkeypatch)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        for ways in itertools.product((HERE, ELSEWHERE), repeat=4):
            with tracked(selected, buffer) as tracker:
                result = in_calls(Program(selected, tracker), buffer, is_async, ways)
            assert not tracker.races
            assert torch.equal(result.double(), expected(tokens_of(SIZES, rank), SIZES)[0])

    on_ranks(SIZES, run)
