"""`deep_ep.moe`: results and gradients against a layer without exchange; what it refuses; what it repeats."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import deep_ep
from deep_ep import moe
from deep_ep.base.group import thread_groups
from deep_ep.errors import EPArgumentError, EPTransportError, EPUsageError
from deep_ep.moe.awaited import AwaitedTensor
from deep_ep.types.event import EventOverlap
from layers import (
    Scale,
    Sizes,
    assert_exact,
    expected,
    experts_of,
    layer,
    on_ranks,
    ranks_of,
    tokens_of,
)
from support import reference
from support.launch import raise_failures, run_processes

Tensor = torch.Tensor

UNEVEN = Sizes((7, 0, 12))
SQUARE = Sizes((9, 4, 6, 11))
FEW = Sizes((0, 1, 7, 12))
ONE_EXPERT = Sizes((5, 6, 7, 8), routing="one-expert")


def assert_as_without_exchange(
    sizes: Sizes, alignment: int, nodes: int | None = None, micro_batches: int = 1
) -> None:
    """Results and gradients of the module are those of a layer that has all experts."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(sizes, rank)
        experts = experts_of(rank, sizes)

        def aligned(rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            assert not (num_tokens_per_expert % alignment).any()
            return experts(rows, num_tokens_per_expert)

        options = {"expert_alignment": alignment, "micro_batches": micro_batches}
        module = moe.ExpertParallel(aligned, sizes.num_experts, buffer, **options)
        assert_exact(tokens.results(module(*tokens.given)), expected(tokens, sizes))

    on_ranks(sizes, run, nodes)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(
    ("sizes", "nodes"), [(UNEVEN, 3), (SQUARE, 2), (FEW, 4), (ONE_EXPERT, 2), (ONE_EXPERT, 4)]
)
def test_results_and_gradients_are_those_of_a_layer_without_exchange(
    sizes: Sizes, nodes: int, alignment: int, micro_batches: int
) -> None:
    assert_as_without_exchange(sizes, alignment, nodes, micro_batches)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Sizes,
        num_tokens=st.lists(st.integers(0, 20), min_size=1, max_size=4).map(tuple),
        hidden=st.sampled_from([128, 256]),
        experts_per_rank=st.sampled_from([1, 2, 5]),
        topk=st.sampled_from([1, 2, 8]),
        routing=st.sampled_from(["random", "one-expert", "nowhere"]),
        seed=st.integers(0, 99),
    ),
    st.sampled_from([1, 4, 128]),
)
def test_any_sizes_and_routings(sizes: Sizes, alignment: int) -> None:
    assert_as_without_exchange(sizes, alignment)


def test_rows_are_by_expert_then_by_source_and_padding_is_zero() -> None:
    everybody = [tokens_of(SQUARE, rank) for rank in range(SQUARE.num_ranks)]

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = everybody[rank]
        sent = moe.dispatch(*tokens.given, buffer, SQUARE.num_experts, expert_alignment=8)
        want = []
        for number in range(rank * SQUARE.experts_per_rank, (rank + 1) * SQUARE.experts_per_rank):
            mine = [each.x[(each.topk_idx == number).nonzero()[:, 0]] for each in everybody]
            rows = torch.cat(mine)
            want += [rows, rows.new_zeros(-len(rows) % 8, SQUARE.hidden)]
        assert torch.equal(sent.x, torch.cat(want))

    on_ranks(SQUARE, run)


def test_the_default_device_may_be_another_one() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(SQUARE, rank)
        with torch.device("meta"):
            moe.preflight(buffer)
            sent = moe.dispatch(*tokens.given, buffer, SQUARE.num_experts, expert_alignment=8)
            combined = moe.combine(sent.x, sent)
        assert sent.num_tokens_per_expert.device.type == "cpu"
        assert combined.device == tokens.x.device

    on_ranks(SQUARE, run)


def test_rows_that_stay_as_they_came_are_the_caller_s_to_weigh() -> None:
    """What a trainer with a layer of its own does: received rows and weights, with gradients to both."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(SQUARE, rank)
        sent = moe.dispatch(*tokens.given, buffer, SQUARE.num_experts, permute=False)
        assert len(sent.x) == len(sent.topk_idx)
        weight = sent.topk_weights.sum(1, keepdim=True)
        got = tokens.results(moe.combine((sent.x * weight).bfloat16(), sent))
        total = torch.where(tokens.topk_idx >= 0, tokens.weights.detach(), 0).sum(1, keepdim=True)
        x, grad = tokens.x.detach().double(), tokens.grad.double()
        per_weight = (x * grad).sum(1, keepdim=True) * (tokens.topk_idx >= 0)
        assert_exact(got, (x * total, grad * total, per_weight))

    on_ranks(SQUARE, run)


def test_what_is_done_around_the_exchange_has_ranges_in_a_profile() -> None:
    sizes = Sizes((6,))

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(sizes, rank)
        with torch.profiler.profile() as profile:
            tokens.results(layer(tokens, buffer, sizes)[1])
        found = [event.name for event in profile.events() if event.name.startswith("deep_ep::")]
        count = {name: found.count(name) for name in found}
        # Forward: indices and rows, sums. Backward: gradients of rows and weights, sums.
        assert count == {
            "deep_ep::layout": 1,
            "deep_ep::permute": 2,
            "deep_ep::unpermute": 3,
            "deep_ep::dispatch": 2,
            "deep_ep::combine": 2,
            "deep_ep::traffic": 4,
            "deep_ep::tokens_per_rank": 4,
        }

    on_ranks(sizes, run)


def test_a_hang_shows_the_line_of_the_program_and_none_of_torch() -> None:
    """In forward, where an autograd function calls, and in backward, where the engine does."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(SQUARE, rank)
        _, combined = layer(tokens, buffer, SQUARE)
        tokens.results(combined)
        recorder = buffer.communicator.recorder
        assert recorder is not None
        calls = [call for call in recorder.state(99, False).calls if call.frames]
        assert {call.frames[0].file.rsplit("/", 1)[1] for call in calls[-4:]} == {"layers.py"}
        assert [call.frames[0].function for call in calls[-4:]] == [
            *("layer", "layer"),
            *("results", "results"),
        ]

    on_ranks(SQUARE, run)


@pytest.mark.parametrize("alignment", [1, 16])
def test_fp8_goes_there_and_bfloat16_comes_back(alignment: int) -> None:
    sizes = Sizes((6, 9), 256)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(sizes, rank)
        tokens.x.data += 0.37  # no longer exact
        sent, combined = layer(tokens, buffer, sizes, fp8=True, expert_alignment=alignment)
        assert sent.x.dtype == torch.bfloat16
        rounded = tokens_of(sizes, rank)
        rounded.x.data = reference.dequantise(*reference.cast_fp8(tokens.x.detach()))
        got, want = tokens.results(combined), expected(rounded, sizes)
        torch.testing.assert_close(got[0].double(), want[0], rtol=2**-7, atol=0.1)
        assert torch.equal(got[1].double(), want[1])  # does not depend on what was rounded

    on_ranks(sizes, run)


def test_gradients_of_gradients_are_refused_and_not_left_out() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(SQUARE, rank)
        _, combined = layer(tokens, buffer, SQUARE)
        (grad,) = torch.autograd.grad((combined**2).sum(), tokens.x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    on_ranks(SQUARE, run)


def test_a_checkpointed_layer_sends_again_and_has_the_same_gradients() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(SQUARE, rank)

        def forward(x: Tensor, weights: Tensor) -> Tensor:
            tokens.x, tokens.weights = x, weights
            return layer(tokens, buffer, SQUARE)[1]

        x, weights = tokens.x, tokens.weights
        combined = checkpoint(forward, x, weights, use_reentrant=False)
        tokens.x, tokens.weights = x, weights
        assert_exact(tokens.results(combined), expected(tokens, SQUARE))

    on_ranks(SQUARE, run)


@pytest.mark.parametrize("async_combine", [False, True])
def test_the_module_takes_any_leading_dimensions_and_its_experts_learn(async_combine: bool) -> None:
    sizes = Sizes((6, 6), 128)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(sizes, rank)
        layer = moe.ExpertParallel(
            Scale(sizes.hidden), sizes.num_experts, buffer, async_combine=async_combine
        )
        shaped = [t.detach().unflatten(0, (2, 3)) for t in (tokens.topk_idx, tokens.weights)]
        x = tokens.x.detach().unflatten(0, (2, 3)).requires_grad_()
        combined = layer(x, *shaped)
        assert combined.shape == x.shape
        assert torch.equal(layer(x[0, 0], *(t[0, 0] for t in shaped)), combined[0, 0])
        total = torch.where(shaped[0] >= 0, shaped[1], 0).sum(-1, keepdim=True)
        residual = x + combined
        assert torch.equal(residual.float(), (x + (2 * x * total).bfloat16()).float())
        residual.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.float(), (1 + 2 * total).expand_as(x))
        (weight,) = layer.parameters()
        assert weight.grad is not None
        assert weight.grad.any()

    on_ranks(sizes, run)


def test_a_copy_of_the_module_exchanges_on_the_same_buffer() -> None:
    """As torch.optim.swa_utils.AveragedModel makes one; what goes into a file is the state_dict()."""
    sizes = Sizes((6, 6), 128)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(sizes, rank)
        given = tokens.x.detach(), tokens.topk_idx, tokens.weights.detach()
        layer = moe.ExpertParallel(Scale(sizes.hidden), sizes.num_experts, buffer)
        same = copy.deepcopy(layer)
        assert same.buffer is buffer
        assert same.experts is not layer.experts
        assert torch.equal(same(*given), layer(*given))
        with pytest.raises(EPUsageError, match=r"pickled.*state_dict\(\)"):
            pickle.dumps(layer)

    on_ranks(sizes, run)


class Filling(EventOverlap):
    """An event that fills a tensor when it is waited for, as another stream would have done by then."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.event: Any = self
        self.num_waits = 0
        self._tensor = tensor

    def current_stream_wait(self, release_handle: bool = False) -> None:
        self.num_waits += 1
        self._tensor.fill_(3)


def test_who_uses_values_of_an_awaited_tensor_waits_and_who_looks_at_its_shape_does_not() -> None:
    late = torch.zeros(4, 2)
    event = Filling(late)
    awaited = AwaitedTensor(late, event)
    assert awaited.shape == (4, 2)
    viewed = awaited.view(2, 4).detach()
    assert event.num_waits == 0
    residual = torch.ones(2, 4) + viewed
    assert torch.equal(residual, torch.full((2, 4), 4.0))
    assert type(residual) is torch.Tensor
    assert torch.equal(awaited * 2, torch.full((4, 2), 6.0))
    assert event.num_waits == 2  # the second may be on another stream
    assert "3." in repr(awaited)


def test_layers_whose_results_are_awaited_follow_each_other() -> None:
    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        results = []
        for async_combine in (False, True):
            tokens = tokens_of(SQUARE, rank)
            of_layer = {"buffer": buffer, "async_combine": async_combine}
            twice = moe.ExpertParallel(experts_of(rank, SQUARE), SQUARE.num_experts, **of_layer)
            once = twice(*tokens.given)
            results.append(tokens.results(twice(once, tokens.topk_idx, tokens.weights)))
        assert_exact(results[1], tuple(each.double() for each in results[0]))

    on_ranks(SQUARE, run, 2)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_may_begin_anywhere(micro_batches: int) -> None:
    """Of what is put behind one number, autograd hands over views that kernels cannot take."""

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens, experts = tokens_of(SQUARE, rank), experts_of(rank, SQUARE)
        of_layer = {"buffer": buffer, "micro_batches": micro_batches}
        combined = moe.ExpertParallel(experts, SQUARE.num_experts, **of_layer)(*tokens.given)
        behind = torch.cat([combined.new_ones(1), combined.flatten()])
        behind.backward(torch.cat([combined.new_ones(1), tokens.grad.flatten()]))
        got = combined.detach(), tokens.x.grad, tokens.weights.grad
        assert_exact(got, expected(tokens_of(SQUARE, rank), SQUARE))

    on_ranks(SQUARE, run, 2)


def compare_compiled(rank: int, group: dist.ProcessGroup) -> list[int]:
    """Graphs that were compiled, on one node and on two."""
    found = []
    for ranks_per_node in ("2", "1"):
        os.environ["DEEP_EP_RANKS_PER_NODE"] = ranks_per_node
        needed = deep_ep.sizes(hidden=128, tokens=16, topk=3, experts=4, ranks=2)
        buffer = deep_ep.Buffer(
            group, needed.num_nvl_bytes, needed.num_rdma_bytes, explicitly_destroy=True
        )
        found.append(compare_compiled_on(buffer))
        buffer.destroy()
    return found


def compare_compiled_on(buffer: deep_ep.Buffer) -> int:
    """Graphs that were compiled; raises if one breaks, or computes something else."""
    rank, sizes, num_graphs = buffer.rank, Sizes((7, 5), 128), 0
    torch.compiler.reset()  # which keeps few graphs of one function

    def counted(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for options in ({}, {"expert_alignment": 8}, {"permute": False}, {"fp8": True}):

        def forward(x: Tensor, topk_idx: Tensor, weights: Tensor, kw: Any = options) -> Tensor:
            sent = moe.dispatch(x, topk_idx, weights, buffer, sizes.num_experts, **kw)
            return moe.combine(torch.nn.functional.silu(sent.x), sent)

        eager, compiled = (tokens_of(sizes, rank) for _ in range(2))
        want = eager.results(forward(*eager.given))
        once = torch.compile(forward, fullgraph=True, backend=counted)
        got = compiled.results(once(*compiled.given))
        assert_exact(got, tuple(each.double() for each in want))
    return num_graphs


@pytest.mark.exhaustive
def test_compiled_it_is_one_graph_with_the_same_results() -> None:
    """On one node and on two, in the same processes: most of the time they import the compiler."""
    env = {"DEEP_EP_TIMEOUT_S": "100"}
    assert raise_failures(run_processes(compare_compiled, 2, env=env)) == [[4, 4]] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": torch.float32}, r"dispatch: x is torch.float32 .* Cast with .bfloat16\(\)"),
        ({"hidden": 64, "fp8": True}, "x has 64 channels; with fp8"),
        ({"expert_alignment": 0}, "expert_alignment is 0"),
        ({"expert_alignment": 8, "permute": False}, "only rows by expert can be padded"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_sent(
    given: dict[str, Any], said: str
) -> None:
    sizes = Sizes((3,), given.pop("hidden", 128))
    dtype = given.pop("dtype", torch.bfloat16)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        tokens = tokens_of(sizes, rank)
        with pytest.raises(EPArgumentError, match=said):
            moe.dispatch(
                *(tokens.x.to(dtype), tokens.topk_idx, tokens.weights, buffer, sizes.num_experts),
                **given,
            )
        sent, _ = layer(tokens, buffer, sizes)
        with pytest.raises(EPArgumentError, match=r"y has \d+ rows; it must have \d+"):
            moe.combine(sent.x.new_zeros(len(sent.x) + 1, 128), sent)
        with pytest.raises(EPArgumentError, match="combine: y is torch.float32"):
            moe.combine(sent.x.float(), sent)
        with pytest.raises(EPArgumentError, match="combine: y is on meta; it must be on cpu"):
            moe.combine(sent.x.to("meta"), sent)
        for micro_batches in (1, 2):
            of_layer = {"buffer": buffer, "micro_batches": micro_batches}
            several = moe.ExpertParallel(lambda rows, _: (rows,), sizes.num_experts, **of_layer)
            with pytest.raises(EPArgumentError, match="combine: y is a tuple"):
                several(tokens.x.to(torch.bfloat16), tokens.topk_idx, tokens.weights)
        with pytest.raises(EPArgumentError, match="num_experts is 0"):
            moe.ExpertParallel(lambda rows, _: rows, 0, buffer)

    on_ranks(sizes, run)


def test_sizes_are_those_that_buffers_and_the_doctor_count() -> None:
    needed = deep_ep.sizes(hidden=7168, tokens=128, topk=8, experts=256, ranks=8)
    assert needed.low_latency_rdma_bytes == deep_ep.Buffer.get_low_latency_rdma_size_hint(
        128, 7168, 8, 256
    )
    config = deep_ep.Buffer.get_dispatch_config(8)
    assert needed.num_nvl_bytes >= config.get_nvl_buffer_size_hint(2 * 7168, 8)
    assert (needed.num_rdma_bytes, needed.num_qps_per_rank) == (0, 32)
    with pytest.raises(EPArgumentError, match="topk is 0"):
        deep_ep.sizes(hidden=7168, tokens=128, topk=0, experts=256, ranks=8)


def test_a_group_goes_with_its_shared_buffer() -> None:
    (group,) = thread_groups(1)
    kept = weakref.ref(group)
    assert moe.shared_buffer(group, 128).group is group
    del group
    gc.collect()
    assert kept() is None


def test_layers_share_a_buffer_which_is_made_larger_when_it_must_be() -> None:
    def run(rank: int, small: deep_ep.Buffer) -> None:
        group = small.group
        first = moe.shared_buffer(group, 256)
        assert moe.shared_buffer(group, 128) is first
        wide = moe.shared_buffer(group, 1024)
        assert wide.num_nvl_bytes > first.num_nvl_bytes
        assert moe.shared_buffer(group, 256) is wide
        # What has the old one goes on with it.
        for buffer in (first, wide):
            tokens = tokens_of(SQUARE, rank)
            assert_exact(tokens.results(layer(tokens, buffer, SQUARE)[1]), expected(tokens, SQUARE))

    on_ranks(SQUARE, run, 2)


def test_a_first_exchange_names_the_pair_whose_rows_come_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damaged(x: Tensor, topk_idx: Tensor, *others: Any, **more: Any) -> moe.Dispatched:
        arrived = moe.dispatch(x, topk_idx, *others, **more)
        if arrived.buffer.rank == 1:
            arrived.x[-1] += 1  # from the last rank
        return arrived

    with ranks_of(Sizes((1, 1, 1))) as ranks:
        ranks.run(lambda _, buffer: moe.preflight(buffer))
        monkeypatch.setattr(sys.modules[moe.preflight.__module__], "dispatch", damaged)
        for error in ranks.outcomes(lambda _, buffer: moe.preflight(buffer)):
            assert isinstance(error, EPTransportError)
            assert "2 to 1" in str(error)
