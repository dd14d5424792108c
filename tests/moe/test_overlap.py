"""`ExpertParallel` in two micro-batches: what experts learn, and the order that overlaps. `test_exchange.py` has its results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deep_ep
from deep_ep import moe
from deep_ep.errors import EPArgumentError, EPUsageError
from layers import Scale, Sizes, expected, experts_of, module_of, on_ranks, tokens_of

Tensor = torch.Tensor

# Ranks with none, one and an odd number of tokens.
SIZES = Sizes((0, 1, 7, 12))


def test_in_fp8_it_is_the_layer_of_one_batch() -> None:
    sizes = Sizes((6, 9), 256)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        results = []
        for micro_batches in (1, 2):
            tokens = tokens_of(sizes, rank)
            tokens.x.data += 0.37
            layer = module_of(buffer, sizes, fp8=True, micro_batches=micro_batches)
            results.append(tokens.results(layer(*tokens.given)))
        for one, two in zip(*results):
            assert torch.equal(one, two)

    on_ranks(sizes, run)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("x_learns", [False, True])
def test_experts_learn_what_they_learn_of_one_batch(x_learns: bool, checkpointed: bool) -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        learnt = []
        for micro_batches in (1, 2):
            tokens = tokens_of(SIZES, rank)
            experts = Scale(SIZES.hidden)
            layer = moe.ExpertParallel(
                experts, SIZES.num_experts, buffer, micro_batches=micro_batches
            )
            x = tokens.x.detach().requires_grad_(x_learns)
            given = (x, tokens.topk_idx, tokens.weights.detach())
            y = checkpoint(layer, *given, use_reentrant=False) if checkpointed else layer(*given)
            y.backward(tokens.grad)
            assert (x.grad is not None) == x_learns
            assert experts.weight.grad is not None
            learnt.append(experts.weight.grad.float())
        torch.testing.assert_close(learnt[1], learnt[0], rtol=2**-6, atol=1.0)

    on_ranks(SIZES, run)


def test_without_gradients_nothing_is_kept_for_them() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(SIZES, rank)
        graphs = []

        def experts(rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            graphs.append(rows.requires_grad)
            return experts_of(rank, SIZES)(rows, num_tokens_per_expert)

        layer = moe.ExpertParallel(experts, SIZES.num_experts, buffer, micro_batches=2)
        with torch.no_grad():
            combined = layer(*tokens.given)
        assert not combined.requires_grad
        assert graphs == [False, False]
        assert torch.equal(combined.double(), expected(tokens, SIZES)[0])

    on_ranks(SIZES, run)


class Noted(torch.autograd.Function):
    """Experts that double rows, and say when."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        log.append("experts")
        return rows * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.log.append("experts backward")
        return grad * 2, None


def test_rows_of_one_half_travel_while_the_experts_compute_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is queued, in order. An exchange waits for what was queued before its event, or else for everything."""
    log: list[str] = []
    events: list[Any] = []
    capture = deep_ep.Buffer.capture

    def noted_capture() -> Any:
        events.append(capture())
        events[-1].queued_before = len(log)
        return events[-1]

    def noted(buffer: deep_ep.Buffer, name: str) -> None:
        call = getattr(buffer, name)

        def note(*args: Any, **options: Any) -> Any:
            after = options.get("previous_event")
            waits = "all" if after is None else f"the first {after.queued_before}"
            finish = "async" if options.get("async_finish") else "waited for"
            log.append(f"{name} after {waits}, {finish}")
            return call(*args, **options)

        monkeypatch.setattr(buffer, name, note)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        noted(buffer, "dispatch")
        noted(buffer, "combine")
        tokens = tokens_of(sizes, rank)
        layer = moe.ExpertParallel(
            lambda rows, _: Noted.apply(rows, log), sizes.num_experts, buffer, micro_batches=2
        )
        layer(*tokens.given).sum().backward()

    monkeypatch.setattr(deep_ep.Buffer, "capture", staticmethod(noted_capture))
    sizes = Sizes((6,))
    on_ranks(sizes, run)
    assert log == [
        "dispatch after all, waited for",
        "experts",
        "dispatch after the first 1, async",
        "combine after all, async",
        "experts",
        "combine after all, async",
        "dispatch after all, waited for",
        "dispatch after the first 6, async",
        "experts backward",
        "combine after all, async",
        "experts backward",
        "combine after all, async",
    ]


def test_a_second_backward_is_refused_by_name() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(Sizes((4,)), rank)
        combined = module_of(buffer, Sizes((4,)), micro_batches=2)(*tokens.given)
        combined.backward(tokens.grad, retain_graph=True)
        with pytest.raises(EPUsageError, match="backward was called again"):
            combined.backward(tokens.grad)

    on_ranks(Sizes((4,)), run)


def test_what_is_refused() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        for wrong in ({"micro_batches": 3}, {"micro_batches": 2, "async_combine": True}):
            with pytest.raises(EPArgumentError, match="it must be 1, or 2 without async_combine"):
                moe.ExpertParallel(lambda rows, _: rows, 2, buffer, **wrong)
        tokens = tokens_of(Sizes((4,)), rank)
        layer = moe.ExpertParallel(lambda rows, _: rows[1:], 2, buffer, micro_batches=2)
        with pytest.raises(EPArgumentError, match=r"y has \d+ rows; it must have \d+"):
            layer(tokens.x, tokens.topk_idx % 2, tokens.weights)
        for given, said in (
            ((tokens.x.float(), tokens.topk_idx, tokens.weights), "dispatch: x is torch.float32"),
            (
                (tokens.x, tokens.topk_idx / 2, tokens.weights),
                "topk_idx is torch.float32 .* integers",
            ),
            ((tokens.x, tokens.topk_idx[1:], tokens.weights[1:]), "Pass one row per token"),
        ):
            with pytest.raises(EPArgumentError, match=said):
                layer(*given)
        layer = moe.ExpertParallel(
            experts_of(0, SIZES), 2, buffer, micro_batches=2, expert_alignment=8.0
        )
        with pytest.raises(EPArgumentError, match="expert_alignment is 8.0"):
            layer(*tokens.given)

    on_ranks(Sizes((4,)), run)
