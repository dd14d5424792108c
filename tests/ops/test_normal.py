"""Normal dispatch and combine, any shape, dtype, routing, queue and node: everything equals the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_ep
from deep_ep.testing import faults
from support import exchange
from support import normal_reference as reference
from support.exchange import Shape, assert_same_bytes
from support.launch import DEVICE, Ranks
from support.normal_exchange import (
    SMALL,
    TINY,
    Expected,
    Inputs,
    Mode,
    Outputs,
    assert_dispatched,
    assert_outputs,
    assert_sums,
    exchange_and_check,
    expect,
    hidden_bytes_of,
    make_inputs,
    normal_ranks,
    run_dispatch,
    run_exchange,
    shape_of,
)

Tensor = torch.Tensor

PLAIN = Mode()
FP8 = Mode(dtype="float8_e4m3fn", scales="float32", scale_strides="columns")
WORST = Mode(spare_rows=3)
# Nodes x ranks per node: ranks, and ranks per node.
NODES = {
    "1x1": (1, 1),
    "1x3": (3, 3),
    "1x8": (8, 8),
    "2x2": (4, 2),
    "3x2": (6, 2),
    "2x4": (8, 4),
    "4x2": (8, 2),
    "8x1": (8, 1),
}
FOUR = shape_of((5, 0, 9, 3), 32, 12, 3)


def configs(num_nodes: int) -> st.SearchStrategy[deep_ep.Config]:
    """Any legal configuration, mostly with queues that are full at once."""

    def build(channels: int, nvl: tuple[int, int], rdma: tuple[int, int]) -> deep_ep.Config:
        nvl_send, nvl_spare = nvl
        rdma_send, rdma_spare = rdma
        return deep_ep.Config(
            2 * channels,
            nvl_send,
            max(nvl_send + nvl_spare, num_nodes),
            rdma_send,
            2 * rdma_send + rdma_spare,
        )

    send = st.sampled_from([1, 2, 3, 7])
    return st.builds(
        build,
        st.sampled_from([1, 2, 3, 5]),
        st.tuples(send, st.sampled_from([1, 2, 5, 31])),
        st.tuples(send, st.sampled_from([0, 1, 5])),
    )


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Shape, Mode, deep_ep.Config, int]:
    """Shape, mode, configuration and ranks per node."""
    num_ranks, ranks_per_node = draw(st.sampled_from(sorted(NODES.values())))
    tokens = st.sampled_from([0, 1, 2, 3, 7, 12, 25])
    dtype = draw(
        st.sampled_from(
            ["bfloat16", "float32", "float16", "int8", "uint8", "int64", "float8_e4m3fn"]
        )
    )
    itemsize = getattr(torch, dtype).itemsize
    cached_dtype = draw(st.sampled_from(["bfloat16", "uint8", "float32"]))
    previous = draw(st.sampled_from(["none", "empty", "event"]))
    async_finish = draw(st.booleans())
    has_topk = draw(st.booleans())
    shape = shape_of(
        draw(st.lists(tokens, min_size=num_ranks, max_size=num_ranks)),
        16 // itemsize * draw(st.sampled_from([1, 2, 3, 9, 32])),
        num_ranks * draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 3, 8, 33])),
        routing=draw(st.sampled_from(["random", "random", "repeats", "one-expert", "nowhere"])),
        dropped=draw(st.sampled_from([0.0, 0.1, 0.9])),
        seed=draw(st.integers(0, 2**20)),
    )
    mode = Mode(
        dtype=dtype,
        cached_dtype=cached_dtype,
        cached_hidden=16 // getattr(torch, cached_dtype).itemsize * draw(st.sampled_from([1, 5])),
        scales=draw(st.sampled_from(["float32", "int32", ""])) if itemsize == 1 else "",
        num_scales=draw(st.sampled_from([1, 2, 7, 56])),
        scale_strides=draw(st.sampled_from(["rows", "columns", "sparse", "same"])),
        has_topk=has_topk,
        spare_rows=draw(st.sampled_from([None, 0, 5])) if has_topk else None,
        expert_alignment=draw(st.sampled_from([1, 4, 128])),
        combine_hidden=8 * draw(st.sampled_from([1, 3, 20])),
        weights=draw(st.booleans()),
        num_biases=draw(st.integers(0, 2)),
        previous=previous,
        async_finish=async_finish,
        allocate_on_comm_stream=async_finish and previous == "event" and draw(st.booleans()),
    )
    return shape, mode, draw(configs(num_ranks // ranks_per_node)), ranks_per_node


on_nodes = pytest.mark.parametrize("ranks_per_node", [4, 2])


@given(exchanges())
def test_any_exchange_equals_the_reference(
    drawn: tuple[Shape, Mode, deep_ep.Config, int],
) -> None:
    shape, mode, config, ranks_per_node = drawn
    bytes_per_row = hidden_bytes_of(shape, mode)
    with normal_ranks(shape.num_ranks, ranks_per_node, [config], bytes_per_row) as ranks:
        exchange_and_check(ranks, shape, mode, config, ranks_per_node)


def four_ranks(ranks_per_node: int = 4, config: deep_ep.Config = SMALL) -> Any:
    """Buffers for FOUR and the modes of this file."""
    return normal_ranks(4, ranks_per_node, [config], 512)


def expect_four(ranks_per_node: int = 4) -> Expected:
    """FOUR in the plain mode."""
    return expect(make_inputs(FOUR, PLAIN), FOUR, PLAIN, ranks_per_node)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("mode", [PLAIN, FP8, WORST], ids=["bf16", "fp8", "worst"])
def test_each_node_shape_equals_the_reference(nodes: str, mode: Mode) -> None:
    num_ranks, ranks_per_node = NODES[nodes]
    tokens = [(7 * rank + 4) % 23 for rank in range(num_ranks)]
    shape = shape_of(tokens, 64, 3 * num_ranks, 4)
    config = deep_ep.Config(4, 2, max(4, num_ranks // ranks_per_node), 1, 3)
    with normal_ranks(num_ranks, ranks_per_node, [config], 512) as ranks:
        exchange_and_check(ranks, shape, mode, config, ranks_per_node)


@pytest.mark.parametrize("nodes", ["1x3", "2x2"])
@pytest.mark.parametrize("verify", ["0", "1"])
def test_rows_that_move_through_shared_memory_are_the_same(
    nodes: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row lies there until the next one; those too large for all warps together go without."""
    monkeypatch.setenv("DEEP_EP_BULK_COPIES", "1")
    monkeypatch.setenv("DEEP_EP_VERIFY", verify)
    monkeypatch.setenv("DEEP_EP_LAUNCH_SHAPE", "2x8")
    num_ranks, ranks_per_node = NODES[nodes]
    with normal_ranks(num_ranks, ranks_per_node, [SMALL], 4 * 65536) as ranks:
        for hidden in (512, 65536):
            shape = shape_of([7] * (num_ranks - 1) + [0], hidden, 4 * num_ranks, 3)
            exchange_and_check(ranks, shape, FP8, SMALL, ranks_per_node)
            exchange_and_check(ranks, shape, PLAIN, SMALL, ranks_per_node)


def test_the_recommended_configuration_is_used_where_none_is_given() -> None:
    config = deep_ep.Buffer.get_dispatch_config(4)
    combine_config = deep_ep.Buffer.get_combine_config(4)
    expected = expect_four()
    with normal_ranks(4, 4, [config, combine_config], 512) as ranks:
        for rank, got in enumerate(
            ranks.run(lambda _, buffer: run_exchange(buffer, expected, None))
        ):
            assert_dispatched(got, rank, expected)
            assert_sums(got.combined, rank, expected, f"rank {rank}")


@on_nodes
def test_a_group_without_any_token_exchanges_nothing(ranks_per_node: int) -> None:
    shape = replace(FOUR, num_tokens=(0, 0, 0, 0))
    with four_ranks(ranks_per_node) as ranks:
        for mode in (PLAIN, FP8, WORST):
            outputs = exchange_and_check(ranks, shape, mode, SMALL, ranks_per_node)
            assert all(len(got.combined) == 0 for got in outputs)


@on_nodes
def test_many_exchanges_of_changing_sizes_do_not_disturb_each_other(ranks_per_node: int) -> None:
    """Also with other queues, other channels and other modes each time."""
    modes = [
        PLAIN,
        FP8,
        WORST,
        replace(PLAIN, has_topk=False, num_biases=1, weights=False),
        replace(PLAIN, dtype="float32", previous="event", async_finish=True),
    ]
    chunks = [SMALL, TINY, deep_ep.Config(6, 1, 4, 3, 9), deep_ep.Config(2, 5, 6, 1, 8)]
    with normal_ranks(4, ranks_per_node, chunks, 512) as ranks:
        for number in range(20):
            tokens = tuple((number * (rank + 3)) % 17 for rank in range(4))
            shape = replace(FOUR, num_tokens=tokens, seed=number, hidden=16 + 16 * (number % 3))
            config = chunks[number % len(chunks)]
            exchange_and_check(ranks, shape, modes[number % len(modes)], config, ranks_per_node)


# --- handles --------------------------------------------------------------------------------------


def every_handle(
    ranks: Ranks, inputs: Sequence[Inputs], shape: Shape = FOUR
) -> list[tuple[Tensor, ...]]:
    """Handles of one dispatch, by rank."""
    return ranks.run(
        lambda rank, buffer: run_dispatch(buffer, inputs[rank], shape, PLAIN, SMALL)[1][4]
    )


def combine_all(
    ranks: Ranks, ys: Sequence[Tensor], handles: Sequence[tuple[Tensor, ...]]
) -> list[Tensor]:
    """What all ranks get back."""
    return ranks.run(
        lambda rank, buffer: buffer.combine(ys[rank].to(DEVICE), handles[rank], config=SMALL)[0]
    )


def exchange_all(ranks: Ranks, expected: Expected) -> list[Outputs]:
    """Layout, dispatch, cached dispatch and combine of all ranks."""
    return ranks.run(lambda _, buffer: run_exchange(buffer, expected, SMALL))


@on_nodes
@pytest.mark.parametrize(
    "rebuild",
    [lambda handle: (*handle,), lambda handle: tuple(save_for_backward(handle))],
    ids=["rebuilt", "saved"],
)
def test_a_handle_may_be_used_again_and_again_in_another_tuple(
    rebuild: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]], ranks_per_node: int
) -> None:
    expected = expect_four(ranks_per_node)
    with four_ranks(ranks_per_node) as ranks:
        handles = [rebuild(h) for h in every_handle(ranks, expected.inputs)]

        def use(rank: int, buffer: deep_ep.Buffer) -> list[tuple[Any, ...]]:
            rounds = []
            for width in (1, 5, 2):  # cached dispatches and combines of other widths
                x = expected.inputs[rank].cached_x.repeat(1, width)
                recv_x = buffer.dispatch(x.to(DEVICE), handle=handles[rank], config=SMALL)[0]
                y = expected.ys[rank].repeat(1, width).to(DEVICE)
                combined = buffer.combine(y, handles[rank], config=SMALL)[0]
                rounds.append((width, recv_x, combined))
            return rounds

        used = ranks.run(use)
    for rank, rounds in enumerate(used):
        for width, recv_x, combined in rounds:
            want = expected.cached[rank].x.repeat(1, width)
            assert_same_bytes(recv_x, want, f"rank {rank}, x {width}")
            assert torch.equal(combined, combined[:, :24].repeat(1, width))
            assert_sums(combined[:, :24], rank, expected, f"rank {rank}, x {width}")


def save_for_backward(handle: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The handle as a function's backward finds it."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(*handle)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.append(ctx.saved_tensors)
            return grad

    found: list[tuple[Tensor, ...]] = []
    Keep.apply(torch.zeros(1, requires_grad=True)).sum().backward()
    return found[0]


@on_nodes
def test_two_dispatches_may_be_outstanding_and_combined_in_any_order(ranks_per_node: int) -> None:
    shapes = [FOUR, replace(FOUR, num_tokens=(8, 1, 0, 8), seed=7)]
    inputs = [make_inputs(shape, PLAIN) for shape in shapes]
    expected = [expect(i, shape, PLAIN, ranks_per_node) for i, shape in zip(inputs, shapes)]
    with four_ranks(ranks_per_node) as ranks:
        handles = [every_handle(ranks, inputs[i], shapes[i]) for i in (0, 1)]
        for i in (1, 0):
            for rank, got in enumerate(combine_all(ranks, expected[i].ys, handles[i])):
                assert_sums(got, rank, expected[i], f"rank {rank}, dispatch {i}")


# --- what programs do around it -------------------------------------------------------------------


@pytest.mark.parametrize("context", ["inference_mode", "no_grad", "requires_grad"])
def test_outputs_are_leaves_whatever_autograd_does(context: str) -> None:
    expected = expect_four()
    if context == "requires_grad":
        for one in expected.inputs:
            one.x.requires_grad_()
            one.topk_weights.requires_grad_()
            one.cached_x.requires_grad_()

    def exchange_within(_: int, buffer: deep_ep.Buffer) -> Outputs:
        with nullcontext() if context == "requires_grad" else getattr(torch, context)():
            return run_exchange(buffer, expected, SMALL)

    with four_ranks() as ranks:
        outputs = ranks.run(exchange_within)
    for rank, got in enumerate(outputs):
        with torch.no_grad():
            assert_dispatched(got, rank, expected)
            assert_sums(got.combined, rank, expected, f"rank {rank}")
        for result in (got.recv_x, got.recv_topk_weights, got.combined, got.combined_weights):
            assert result.is_leaf
            assert not result.requires_grad


def test_outputs_are_nobody_else_s_memory() -> None:
    """Not the inputs', though there is one rank only, and not the buffer's, which is used on."""
    shape = shape_of((6,), 32, 4, 2, dropped=0.0)
    with normal_ranks(1, 1, [SMALL], 512) as ranks:
        (first,) = exchange_and_check(ranks, shape, PLAIN, SMALL, 1)
        kept = [t.clone() for t in (first.recv_x, first.recv_topk_idx, first.combined)]
        for seed in range(4):
            exchange_and_check(ranks, replace(shape, seed=seed), PLAIN, SMALL, 1)
    for now, then in zip((first.recv_x, first.recv_topk_idx, first.combined), kept):
        assert_same_bytes(now, then, "an output of an earlier call")
    inputs = make_inputs(shape, PLAIN)
    assert first.recv_x.data_ptr() != inputs[0].x.data_ptr()


def test_nan_columns_stay_nan_and_disturb_no_neighbour() -> None:
    inputs = make_inputs(FOUR, PLAIN)
    for one in inputs:
        one.values[:, 7] = torch.nan
    expected = expect(inputs, FOUR, PLAIN, 4)
    with four_ranks() as ranks:
        outputs = exchange_all(ranks, expected)
    for rank, got in enumerate(outputs):
        sent = expected.layouts[rank].is_token_in_rank.any(1)
        assert got.combined.cpu()[sent, 7].isnan().all()
        assert not got.combined.cpu()[:, torch.arange(24) != 7].isnan().any()


@on_nodes
def test_a_single_contributor_s_row_comes_back_unchanged(ranks_per_node: int) -> None:
    """Every finite bit pattern but the negative zero, to which a positive one is added."""
    patterns = torch.randint(-(2**15), 2**15, (64, 24), dtype=torch.int16)
    values = patterns.view(torch.bfloat16)
    values = values.masked_fill(~values.isfinite() | (values == 0), 1)
    shape = shape_of((16, 16, 16, 16), 32, 4, 1, dropped=0.0)
    inputs = [
        one._replace(values=values[16 * rank : 16 * rank + 16])
        for rank, one in enumerate(make_inputs(shape, PLAIN))
    ]
    layouts = [reference.layout(one.topk_idx, 4, 4, ranks_per_node) for one in inputs]
    received = reference.dispatch([one.values for one in inputs], layouts)
    with four_ranks(ranks_per_node) as ranks:
        handles = every_handle(ranks, inputs, shape)
        combined = combine_all(ranks, [one.x for one in received], handles)
    for rank, got in enumerate(combined):
        assert_same_bytes(got, inputs[rank].values, f"rank {rank}")


# --- what is counted ------------------------------------------------------------------------------


@on_nodes
@pytest.mark.parametrize("square", [False, True], ids=["R", "RxR"])
def test_wait_cost_tensors_grow_in_the_own_row_only(square: bool, ranks_per_node: int) -> None:
    shape = replace(FOUR, num_tokens=(5, 8, 9, 3))
    inputs = make_inputs(shape, PLAIN)
    expected = expect(inputs, shape, PLAIN, ranks_per_node)
    size = (4, 4) if square else (4,)
    costs = [[torch.full(size, 5, dtype=torch.int64, device=DEVICE) for _ in "fdc"] for _ in inputs]

    def be_late(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 2 and DEVICE == "cpu":  # so that the others do wait
            buffer.runtime.delay(200_000_000)

    def measured_exchange(rank: int, buffer: deep_ep.Buffer) -> None:
        fresh, cached, combine = costs[rank]
        be_late(rank, buffer)
        handle = run_dispatch(
            buffer, inputs[rank], shape, PLAIN, SMALL, dispatch_wait_recv_cost_stats=fresh
        )[1][4]
        be_late(rank, buffer)
        x = inputs[rank].cached_x.to(DEVICE)
        buffer.dispatch(x, handle, config=SMALL, dispatch_wait_recv_cost_stats=cached)
        be_late(rank, buffer)
        y = expected.ys[rank].to(DEVICE)
        buffer.combine(y, handle, config=SMALL, combine_wait_recv_cost_stats=combine)

    with four_ranks(ranks_per_node) as ranks:
        ranks.run(measured_exchange)
    for rank, tensors in enumerate(costs):
        for tensor in tensors:
            own = tensor[rank] if square else tensor
            assert (own >= 5).all()
            assert not square or (tensor[torch.arange(4) != rank] == 5).all()
            # Far less than the delay: a thread may start late, which is no waiting.
            if rank != 2 and DEVICE == "cpu":
                waited = own[2] if ranks_per_node == 4 else own.max()  # or for who relays for it
                assert waited > 5 + 1_000_000, "nobody seems to have waited for the delayed rank"


@on_nodes
def test_counters_count_rows_of_their_sources(ranks_per_node: int) -> None:
    shape = replace(FOUR, num_tokens=(5, 8, 9, 3))
    inputs = make_inputs(shape, PLAIN)
    expected = expect(inputs, shape, PLAIN, ranks_per_node)
    with four_ranks(ranks_per_node) as ranks:
        ranks.run(lambda _, buffer: buffer.enable_counters())
        for _ in range(3):
            exchange_all(ranks, expected)
        counted = ranks.run(lambda _, buffer: buffer.normal_dispatch_counters.snapshot())
        combined = ranks.run(lambda _, buffer: buffer.normal_combine_counters.snapshot())
    for rank, one in enumerate(counted):
        rows = torch.bincount(expected.received[rank].sources, minlength=4)
        assert one.ops == 6, "three fresh dispatches, three cached ones"
        assert combined[rank].ops == 3
        assert one["tokens"].tolist() == (6 * rows).tolist()


def all_to_rank_0(shape: Shape) -> list[Inputs]:
    return [
        one._replace(topk_idx=torch.zeros_like(one.topk_idx)) for one in make_inputs(shape, PLAIN)
    ]


@pytest.mark.skipif(
    DEVICE != "cpu", reason="on a GPU it is a matter of time whether a queue is full"
)
@pytest.mark.parametrize("is_narrow", [True, False], ids=["narrow", "wide"])
def test_back_pressure_is_counted_where_queues_are_narrow(is_narrow: bool) -> None:
    shape = replace(FOUR, num_tokens=(64, 64, 64, 64))
    config = deep_ep.Config(2, 1, 2, 1, 2) if is_narrow else deep_ep.Config(2, 1, 128, 1, 2)
    inputs = all_to_rank_0(shape)
    with four_ranks(4, config) as ranks:
        ranks.run(lambda _, buffer: buffer.enable_counters())
        ranks.run(
            lambda rank, buffer: run_dispatch(buffer, inputs[rank], shape, PLAIN, config) and None
        )
        counted = ranks.run(lambda _, buffer: buffer.normal_dispatch_counters.snapshot())
    assert (counted[0]["credit_ns"] <= counted[0]["issue_ns"]).all()
    assert (counted[0]["credit_ns"] > 0).any() == is_narrow
    assert not any(one["credit_ns"].any() for one in counted[1:])


@pytest.mark.skipif(DEVICE != "cpu", reason="injection is of the cpu backend")
def test_slots_that_a_gateway_waits_for_are_counted_though_the_source_has_issued() -> None:
    shape = replace(FOUR, num_tokens=(16, 16, 16, 16))
    config = deep_ep.Config(2, 1, 2, 1, 128)
    inputs = all_to_rank_0(shape)
    delay_s = 5e-3

    def dispatch(rank: int, buffer: deep_ep.Buffer) -> None:
        buffer.enable_counters()
        undo = faults.apply(buffer, [faults.SlowReceiver(0, delay_s)])
        run_dispatch(buffer, inputs[rank], shape, PLAIN, config)
        undo()

    with four_ranks(2, config) as ranks:
        ranks.run(dispatch)
        counted = ranks.run(lambda _, buffer: buffer.normal_dispatch_counters.snapshot())
    of_other_node = slice(2, None)
    waited, issuing, on_the_way = (
        counted[0][name][of_other_node] for name in ("credit_ns", "issue_ns", "path_ns")
    )
    assert (waited >= delay_s * 1e9).all()
    assert (waited > issuing).all()
    assert (waited <= issuing + on_the_way).all()


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["combine", "cached dispatch"])
def test_expanded_gradients_are_taken_as_they_come(call: str) -> None:
    """The gradient of a sum is one number that all elements share, without strides."""
    expected = expect_four()
    one = torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    with four_ranks() as ranks:
        handles = every_handle(ranks, expected.inputs)

        def give(rank: int, buffer: deep_ep.Buffer) -> Tensor:
            if call == "combine":
                y = one.expand(len(expected.ys[rank]), 24)
                return buffer.combine(y, handles[rank], config=SMALL)[0]
            x = one.expand(FOUR.num_tokens[rank], 24)
            return buffer.dispatch(x, handle=handles[rank], config=SMALL)[0]

        for rank, got in enumerate(ranks.run(give)):
            num_ranks = expected.layouts[rank].is_token_in_rank.sum(1, keepdim=True)
            rows = num_ranks if call == "combine" else torch.ones(len(expected.ys[rank]), 1)
            assert torch.equal(got.cpu().float(), rows.float().expand(-1, 24))


# --- memory and life ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, SMALL, deep_ep.Config(8, 3, 40, 4, 12)], ids=str)
def test_a_buffer_of_the_hinted_size_is_enough_and_nothing_behind_it_is_written(
    config: deep_ep.Config,
) -> None:
    """The memory of low latency lies behind it."""
    shape = shape_of((9, 30, 0, 14), 16, 8, 8)
    mode = Mode(
        dtype="uint8",
        scales="int32",
        num_scales=128,
        combine_hidden=8,
        cached_hidden=8,
        num_biases=1,
    )
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 128, 4, 4)
    pattern = 0x5A

    def behind(buffer: deep_ep.Buffer) -> Tensor:
        return buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)

    arguments = {"num_rdma_bytes": size, "low_latency_mode": True}
    with normal_ranks(4, 4, [config], hidden_bytes_of(shape, mode), **arguments) as ranks:
        ranks.run(lambda _, buffer: behind(buffer).fill_(pattern))
        for routing in ("random", "one-expert"):
            exchange_and_check(ranks, replace(shape, routing=routing), mode, config, 4)
        for left in ranks.run(lambda _, buffer: bool((behind(buffer) == pattern).all())):
            assert left


@on_nodes
def test_the_default_device_may_be_another_one(ranks_per_node: int) -> None:
    """As in programs that build a model on a device of their own; "meta" stands for any."""
    expected = expect_four(ranks_per_node)

    def run(_: int, buffer: deep_ep.Buffer) -> Outputs:
        with torch.device("meta"):
            buffer.enable_counters()
            for offsets in buffer.measure_clock_offsets():
                assert offsets.device.type == "cpu"
            return run_exchange(buffer, expected, SMALL)

    with four_ranks(ranks_per_node) as ranks:
        for rank, got in enumerate(ranks.run(run)):
            assert_outputs(got, rank, expected, SMALL)


def test_several_buffers_of_a_process_do_not_disturb_each_other() -> None:
    low = Shape((3, 0, 4, 2), 4, 128, 12, 3)
    with (
        four_ranks() as ranks,
        four_ranks(2) as others,
        normal_ranks(2, 2, [TINY], 512) as two,
        exchange.ranks_for(low) as low_latency,
    ):
        for seed in range(3):
            exchange_and_check(ranks, replace(FOUR, seed=seed), PLAIN, SMALL, 4)
            exchange_and_check(two, replace(FOUR, num_tokens=(3, 4)), PLAIN, TINY, 2)
            exchange.exchange_and_check(low_latency, replace(low, seed=seed), exchange.Mode())
            exchange_and_check(others, replace(FOUR, seed=seed), PLAIN, SMALL, 2)
