"""`ElasticBuffer`, any shape, layout, topology and kind of reduction: everything equals the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_ep.errors import EPArgumentError
from support import elastic_reference as reference
from support.elastic_exchange import (
    HIDDEN,
    MAX_TOKENS,
    Mode,
    Setup,
    assert_rows,
    assert_sums,
    elastic_ranks,
    exchange_and_check,
    exchange_of,
    run_cached_dispatch,
    run_combine,
    run_dispatch,
)
from support.elastic_groups import (
    COMPACT,
    EXPANDED,
    FOUR,
    FP8,
    ONE_NODE,
    REDUCTIONS,
    SETUPS,
    TWO_NODES,
    SharedGroups,
    assert_works,
    both_layouts,
    good_call,
)
from support.exchange import Shape, assert_same_bytes
from support.launch import DEVICE
from support.normal_exchange import make_inputs, shape_of

Tensor = torch.Tensor


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Setup, Shape, Mode]:
    """Anything that may be exchanged."""
    setup = draw(st.sampled_from(SETUPS))
    num_ranks = setup.num_ranks
    tokens = draw(
        st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 25]), min_size=num_ranks, max_size=num_ranks)
    )
    dtype = draw(st.sampled_from(["bfloat16", "float8_e4m3fn", "float32", "uint8"]))
    itemsize = getattr(torch, dtype).itemsize
    cached_dtype = draw(st.sampled_from(["bfloat16", "uint8", "float32"]))
    shape = shape_of(
        tokens,
        16 // itemsize * draw(st.sampled_from([1, 2, 3, 9, 32])),
        num_ranks * draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 3, 8])),
        routing=draw(st.sampled_from(["random", "random", "random", "one-expert", "nowhere"])),
        dropped=draw(st.sampled_from([0.0, 0.1, 0.9])),
        seed=draw(st.integers(0, 2**20)),
    )
    do_expand = draw(st.booleans())
    previous = draw(st.sampled_from(["none", "empty", "overlap", "handle"]))
    spare = st.sampled_from([0, 1, 5])
    mode = Mode(
        do_expand=do_expand,
        do_cpu_sync=draw(st.sampled_from([None, True, False])),
        expert_alignment=draw(st.sampled_from([None, 1, 4, 128])),
        spare_capacity=draw(st.sampled_from([None, None, 0, 3])) if do_expand else None,
        spare_tokens=draw(spare if max(tokens) > MAX_TOKENS else st.none() | spare),
        dtype=dtype,
        cached_dtype=cached_dtype,
        cached_hidden=16 // getattr(torch, cached_dtype).itemsize * draw(st.sampled_from([1, 5])),
        scales=draw(st.sampled_from(["float32", "int32", ""])),
        num_scales=draw(st.sampled_from([1, 2, 7, 56])),
        scale_strides=draw(st.sampled_from(["rows", "columns", "sparse", "same"])),
        is_tma_aligned=draw(st.booleans()),
        has_weights=draw(st.booleans()),
        do_zero_padding=do_expand and draw(st.booleans()),
        do_handle_copy=draw(st.booleans()),
        has_stats=draw(st.booleans()),
        cached_expand=draw(st.booleans()),
        cached_weights=draw(st.booleans()),
        combine_hidden=8 * draw(st.sampled_from([1, 3, 20])),
        combine_weights=draw(st.booleans()),
        num_biases=draw(st.integers(0, 2)),
        list_of_biases=draw(st.booleans()),
        previous=previous,
        previous_before_epilogue=draw(st.sampled_from(["none", "none", "empty", "handle"])),
        is_async=draw(st.booleans()),
        allocate_on_comm_stream=previous in ("overlap", "handle") or draw(st.booleans()),
    )
    if mode.do_zero_padding:
        mode = replace(mode, cached_expand=True)
    return setup, shape, mode


@given(exchanges())
def test_any_exchange_equals_the_reference(
    groups: SharedGroups, drawn: tuple[Setup, Shape, Mode]
) -> None:
    setup, shape, mode = drawn
    with groups.of(setup) as ranks:
        exchange_and_check(ranks, setup, shape, mode)


@pytest.mark.skipif(DEVICE != "cpu", reason="schedules are the host target's")
@pytest.mark.parametrize("setup", REDUCTIONS, ids=str)
def test_any_schedule_and_delivery_order_gives_the_reference(
    monkeypatch: pytest.MonkeyPatch, setup: Setup
) -> None:
    """Combines that sum on the way, on one node and on two, and those whose rows return one by one."""
    for seed in (1, 2):
        monkeypatch.setenv("DEEP_EP_SCHEDULE", f"random:{seed}")
        monkeypatch.setenv("DEEP_EP_DELIVERY", f"random:{seed}")
        ranks = elastic_ranks(setup, deterministic=True)
        for mode in (COMPACT, EXPANDED):
            exchange_and_check(ranks, setup, FOUR, mode)
        ranks.close()


@pytest.mark.parametrize("do_cpu_sync", [True, False], ids=["sync", "no-sync"])
@both_layouts
@pytest.mark.parametrize(
    "shape",
    [
        shape_of((0, 0, 0, 0), 32, 8, 2),
        shape_of((3, 0, 2, 1), 32, 8, 2, routing="nowhere"),
        shape_of((3, 0, 2, 1), 32, 8, 2, routing="one-expert", dropped=0.0),
    ],
    ids=["no-tokens", "no-experts", "one-rank-gets-all"],
)
def test_ranks_without_tokens_and_ranks_that_receive_none(
    groups: SharedGroups, shape: Shape, mode: Mode, do_cpu_sync: bool
) -> None:
    mode = replace(mode, do_cpu_sync=do_cpu_sync, expert_alignment=4, num_biases=1)
    with groups.of(TWO_NODES) as ranks:
        exchange_and_check(ranks, TWO_NODES, shape, mode)


@both_layouts
@pytest.mark.parametrize("is_multiple", [True, False], ids=["multiple", "single"])
@pytest.mark.parametrize("setup", [ONE_NODE, TWO_NODES], ids=["one-node", "two-nodes"])
def test_the_most_that_can_come_fits_where_nobody_waits_for_counts(
    groups: SharedGroups, setup: Setup, is_multiple: bool, mode: Mode
) -> None:
    """All tokens of all ranks select all experts of one of them."""
    setup = replace(setup, allow_multiple_reduction=is_multiple)
    shape = shape_of((5, 5, 5, 5), 32, 12, 3)
    mode = replace(mode, do_cpu_sync=False, spare_tokens=0, num_biases=1)
    inputs = [
        one._replace(topk_idx=torch.tensor([[4, 5, 3]] * 5)) for one in make_inputs(shape, mode)
    ]
    with groups.of(setup) as ranks:
        exchange_and_check(ranks, setup, shape, mode, inputs)


@pytest.mark.parametrize("num_biases", [0, 1, 2])
@both_layouts
@pytest.mark.parametrize("setup", REDUCTIONS, ids=str)
def test_sums_have_one_order_and_one_rounding_per_level(
    groups: SharedGroups, setup: Setup, mode: Mode, num_biases: int
) -> None:
    """Experts of a token alternate between ranks and domains, and its summands cancel."""
    shape = shape_of((7, 5, 8, 6), 32, 16, 6, dropped=0.1, seed=3)
    with groups.of(setup) as ranks:
        wide = replace(mode, num_biases=num_biases, combine_hidden=64)
        exchange_and_check(ranks, setup, shape, wide)


@pytest.mark.parametrize("setup", [ONE_NODE, TWO_NODES], ids=["one-node", "two-nodes"])
def test_handles_are_used_again_and_in_any_order(groups: SharedGroups, setup: Setup) -> None:
    """Two of each layout alive at once: cached dispatches and combines of each, forth and back."""
    modes = (COMPACT, EXPANDED, replace(EXPANDED, do_cpu_sync=False), COMPACT)
    shapes = [replace(FOUR, seed=seed) for seed in range(len(modes))]
    all_four = [exchange_of(setup, shape, mode) for shape, mode in zip(shapes, modes)]

    def run(rank: int, buffer: Any) -> list[tuple[Tensor, Tensor]]:
        handles = [run_dispatch(of, buffer)[-1] for of in all_four]
        out = []
        for i in (3, 0, 2, 1, 1, 2, 0, 3):
            recv_x, _, _ = run_cached_dispatch(all_four[i], buffer, handles[i])
            combined, _ = run_combine(all_four[i], buffer, handles[i], all_four[i].ys[rank])
            out.append((recv_x, combined))
        return out

    for forth_and_back in groups.run(setup, run):
        for first, again in zip(forth_and_back[:4], reversed(forth_and_back[4:])):
            assert_same_bytes(first[1], again[1], "combined")
    for rank, forth_and_back in enumerate(groups.run(setup, run)):
        for i, (recv_x, combined) in zip((3, 0, 2, 1), forth_and_back):
            of = all_four[i]
            assert_rows(of, recv_x, [o.cached_x for o in of.inputs], rank, f"{rank}, handle {i}")
            assert_sums(of, combined, rank)


@both_layouts
def test_cached_dispatch_moves_rows_with_scales(groups: SharedGroups, mode: Mode) -> None:
    """Of another kind than the rows of the first one."""
    of = exchange_of(ONE_NODE, FOUR, mode)
    fp8 = make_inputs(FOUR, FP8)

    def run(rank: int, buffer: Any) -> tuple[Tensor, Tensor]:
        *_, handle = run_dispatch(of, buffer)
        scales = fp8[rank].scales
        assert scales is not None
        (rows, recv_scales), *_ = buffer.dispatch(
            (fp8[rank].x.to(DEVICE), scales.to(DEVICE)),
            handle=handle,
            use_tma_aligned_col_major_sf=True,
        )
        if len(rows):
            assert recv_scales.stride() == (1, reference.align(len(rows), 4))
        return rows, recv_scales

    for rank, (rows, scales) in enumerate(groups.run(ONE_NODE, run)):
        assert_rows(of, rows, [one.x for one in fp8], rank, f"rank {rank}")
        sent = [one.scales for one in fp8 if one.scales is not None]
        assert_rows(of, scales, sent, rank, f"rank {rank}, scales")


@both_layouts
def test_cached_dispatch_may_repeat_what_its_handle_says(groups: SharedGroups, mode: Mode) -> None:
    of = exchange_of(ONE_NODE, FOUR, replace(mode, expert_alignment=4))
    padding = {"do_zero_padding": mode.do_expand}

    def run(rank: int, buffer: Any) -> None:
        *_, handle = run_dispatch(of, buffer)
        x = of.inputs[rank].x.to(DEVICE)
        agreeing = {
            "num_experts": FOUR.num_experts,
            "num_max_tokens_per_rank": MAX_TOKENS,
            "expert_alignment": 4,
            "do_expand": mode.do_expand,
            "do_cpu_sync": False,
            "num_sms": handle.num_sms,
        }
        plain = buffer.dispatch(x, handle=handle, **padding)[0]
        same = buffer.dispatch(x, handle=handle, **agreeing, **padding)[0]
        assert_same_bytes(same, plain, "rows")
        for wrong in (
            {"num_experts": 2 * FOUR.num_experts},
            {"num_max_tokens_per_rank": MAX_TOKENS + 1},
            {"expert_alignment": 8},
            {"do_cpu_sync": True},
            {"do_expand": not mode.do_expand},
            {"topk_idx": of.inputs[rank].topk_idx.to(DEVICE)},
        ):
            with pytest.raises(AssertionError, match=next(iter(wrong))):
                buffer.dispatch(x, handle=handle, **wrong)
        more = torch.cat([x, x[:0], x.new_zeros(1, x.shape[1])])
        with pytest.raises(EPArgumentError, match="tokens"):
            buffer.dispatch(more, handle=handle)
        same = buffer.dispatch(x, handle=handle, **padding)[0]
        assert_same_bytes(same, plain, "rows, after errors")

    groups.run(ONE_NODE, run)


def test_cached_dispatch_does_not_count_again(groups: SharedGroups) -> None:
    of = exchange_of(ONE_NODE, FOUR, EXPANDED)

    def run(rank: int, buffer: Any) -> None:
        stats = torch.zeros(FOUR.num_local_experts, dtype=torch.int32, device=DEVICE)
        *_, handle = run_dispatch(of, buffer, cumulative_local_expert_recv_stats=stats)
        counted = stats.tolist()
        x = of.inputs[rank].x.to(DEVICE)
        buffer.dispatch(x, handle=handle, cumulative_local_expert_recv_stats=stats)
        assert stats.tolist() == counted == handle.num_unaligned_recv_tokens_per_expert.tolist()

    groups.run(ONE_NODE, run)


def test_a_handle_can_be_changed_and_holds_no_rows(groups: SharedGroups) -> None:
    shape = shape_of((8, 8, 8, 8), HIDDEN, 8, 2, dropped=0.0)
    of = exchange_of(ONE_NODE, shape, EXPANDED)

    def run(rank: int, buffer: Any) -> None:
        recv_x, _, _, handle = run_dispatch(of, buffer)
        handle.recv_src_metadata = handle.recv_src_metadata[:1]
        assert len(handle.recv_src_metadata) == 1
        held = [value for value in vars(handle).values() if isinstance(value, Tensor)]
        assert all(value.nbytes < recv_x.nbytes // 4 for value in held)
        assert not hasattr(handle, "__len__")  # no tuple

    groups.run(ONE_NODE, run)


@pytest.mark.parametrize("do_cpu_sync", [True, False], ids=["sync", "no-sync"])
def test_rows_lie_in_slabs_where_experts_have_a_capacity(
    groups: SharedGroups, do_cpu_sync: bool
) -> None:
    """As a masked grouped GEMM takes them: a view, without copying."""
    of = exchange_of(ONE_NODE, FOUR, replace(EXPANDED, do_cpu_sync=do_cpu_sync))
    arrivals, inputs = of.arrivals, of.inputs
    capacity, num_experts = 4 * MAX_TOKENS, FOUR.num_local_experts

    def run(rank: int, buffer: Any) -> tuple[Tensor, Tensor]:
        recv_x, _, _, handle = run_dispatch(of, buffer, expert_capacity=capacity)
        x = inputs[rank].x.to(DEVICE)
        again = buffer.dispatch(x, handle=handle, expert_capacity=capacity)[0]
        assert again.shape == recv_x.shape
        with pytest.raises(AssertionError, match="expert_capacity"):
            buffer.dispatch(x, handle=handle, expert_capacity=capacity + 1)
        return recv_x.view(num_experts, capacity, -1), handle.num_unaligned_recv_tokens_per_expert

    for rank, (slabs, counts) in enumerate(groups.run(ONE_NODE, run)):
        rows = reference.rows_of([one.x for one in inputs], arrivals[rank])
        for expert, count in enumerate(counts.tolist()):
            mine = (arrivals[rank].topk_idx == expert).any(1)
            assert_same_bytes(slabs[expert, :count], rows[mine], f"expert {expert}")


def test_a_capacity_that_does_not_suffice_is_told_where_it_is_passed(groups: SharedGroups) -> None:
    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        call["topk_idx"] = torch.tensor([[0, 2]] * 3, device=DEVICE)
        more = {"do_expand": True, "expert_capacity": 11}
        if rank < 2:  # twelve rows come for an expert of each
            with pytest.raises(EPArgumentError, match="expert_capacity is 11.*received 12 rows"):
                buffer.dispatch(**call, **more)
        else:
            buffer.dispatch(**call, **more)
        for wrong in ({**more, "do_cpu_sync": False}, {"expert_capacity": 12}):
            with pytest.raises(EPArgumentError, match="expert_capacity"):
                buffer.dispatch(**call, **wrong)
        assert_works(buffer)

    groups.run(ONE_NODE, run)


@both_layouts
def test_what_a_caller_writes_over_changes_no_later_call(groups: SharedGroups, mode: Mode) -> None:
    """Top-k that went in and all that came out are the caller's; programs number experts anew in place."""
    of = exchange_of(TWO_NODES, FOUR, mode)
    inputs = of.inputs

    def run(rank: int, buffer: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        topk_idx = inputs[rank].topk_idx.to(DEVICE).clone()
        weights = inputs[rank].topk_weights.to(DEVICE).clone()
        recv_x, recv_topk_idx, recv_weights, handle, _ = buffer.dispatch(
            inputs[rank].x.to(DEVICE),
            topk_idx,
            weights,
            num_experts=FOUR.num_experts,
            do_expand=mode.do_expand,
        )
        for tensor in (topk_idx, weights, recv_x, recv_topk_idx, recv_weights):
            if tensor is not None:
                tensor.zero_()
        combined, _, _ = buffer.combine(of.ys[rank].to(DEVICE), handle)
        cached, recv_topk_idx, _, _, _ = buffer.dispatch(inputs[rank].x.to(DEVICE), handle=handle)
        return combined, cached, recv_topk_idx

    for rank, (combined, cached, recv_topk_idx) in enumerate(groups.run(TWO_NODES, run)):
        assert_sums(of, combined, rank)
        assert_rows(of, cached, [one.x for one in inputs], rank, f"rank {rank}")
        if recv_topk_idx is not None:
            assert recv_topk_idx.tolist() == of.arrivals[rank].topk_idx.tolist()


@both_layouts
@pytest.mark.parametrize("guard", ["inference_mode", "no_grad", "enable_grad"])
def test_calls_work_whatever_torch_records(groups: SharedGroups, mode: Mode, guard: str) -> None:
    """Outputs belong to no graph, also of inputs that require gradients."""
    of = exchange_of(ONE_NODE, FOUR, mode)
    inputs = of.inputs

    def run(rank: int, buffer: Any) -> None:
        with getattr(torch, guard)():
            x = inputs[rank].x.to(DEVICE).requires_grad_(guard == "enable_grad")
            weights = inputs[rank].topk_weights.to(DEVICE).requires_grad_(guard == "enable_grad")
            recv_x, _, recv_weights, handle, _ = buffer.dispatch(
                x,
                topk_idx=inputs[rank].topk_idx.to(DEVICE),
                topk_weights=weights,
                num_experts=FOUR.num_experts,
                do_expand=mode.do_expand,
            )
            y = of.ys[rank].to(DEVICE).requires_grad_(guard == "enable_grad")
            combined, back, _ = buffer.combine(y, handle, topk_weights=recv_weights)
            cached, *_ = buffer.dispatch(x, handle=handle)
        assert not any(t.requires_grad for t in (recv_x, recv_weights, combined, back, cached))
        sent = inputs[rank].topk_weights.masked_fill(inputs[rank].topk_idx < 0, 0)
        assert_same_bytes(back, sent, f"rank {rank}")
        assert_same_bytes(cached, recv_x, f"rank {rank}, cached")

    groups.run(ONE_NODE, run)


@pytest.mark.parametrize("setup", REDUCTIONS, ids=str)
@both_layouts
def test_a_handle_of_inference_mode_serves_outside_of_it(
    groups: SharedGroups, setup: Setup, mode: Mode
) -> None:
    of = exchange_of(setup, FOUR, mode)

    def run(rank: int, buffer: Any) -> Tensor:
        one = of.inputs[rank]
        with torch.inference_mode():
            *_, handle, _ = buffer.dispatch(
                one.x.to(DEVICE),
                topk_idx=one.topk_idx.to(DEVICE),
                num_experts=FOUR.num_experts,
                do_expand=mode.do_expand,
            )
        y = of.ys[rank].to(DEVICE).requires_grad_()
        weights = of.weights[rank].to(DEVICE).requires_grad_()
        return buffer.combine(y, handle, topk_weights=weights)[0]

    for rank, combined in enumerate(groups.run(setup, run)):
        assert_sums(of, combined, rank)


def test_statistics_of_inference_mode_are_added_to_outside_of_it(groups: SharedGroups) -> None:
    def run(rank: int, buffer: Any) -> list[int]:
        with torch.inference_mode():
            stats = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        buffer.dispatch(**good_call(rank), cumulative_local_expert_recv_stats=stats)
        counted: list[int] = stats.tolist()
        return counted

    picks = torch.cat([good_call(rank)["topk_idx"] for rank in range(4)]).flatten()
    assert sum(groups.run(ONE_NODE, run), []) == torch.bincount(picks, minlength=8).tolist()


def test_rows_with_scales_have_any_strides_also_where_there_are_none(groups: SharedGroups) -> None:
    """Without elements every tensor is contiguous, and yet torch does not take all for bytes."""

    def run(rank: int, buffer: Any) -> None:
        call = good_call(rank)
        num_tokens = 3 * (rank % 2)
        x = call["x"].t().contiguous().t()[:num_tokens]
        scales = torch.full((num_tokens, 1), 2.0, device=DEVICE)
        topk = {name: call[name][:num_tokens] for name in ("topk_idx", "topk_weights")}
        (recv_x, recv_scales), *_, handle, _ = buffer.dispatch((x, scales), **topk, num_experts=8)
        assert (recv_x == 1).all()
        assert (recv_scales == 2).all()
        (again, _), *_ = buffer.dispatch((x, scales), handle=handle)
        assert torch.equal(again, recv_x)

    groups.run(ONE_NODE, run)


def test_outputs_are_never_the_inputs() -> None:
    """Operators of torch.library may not return what they were given, even with one rank."""
    with elastic_ranks(Setup(1, 1)) as ranks:

        def run(_: int, buffer: Any) -> None:
            x = torch.ones(4, 32, dtype=torch.bfloat16, device=DEVICE)
            weights = torch.ones(4, 1, device=DEVICE)
            recv_x, _, recv_weights, handle, _ = buffer.dispatch(
                x, torch.zeros(4, 1, dtype=torch.int64, device=DEVICE), weights, num_experts=1
            )
            combined, back, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
            pointers = {t.data_ptr() for t in (x, weights, recv_x, recv_weights, combined, back)}
            assert len(pointers) == 6

        ranks.run(run)
