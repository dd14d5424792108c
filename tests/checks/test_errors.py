"""Every bad input: its own clear exception, nothing sent, and the group usable afterwards."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.checks import low_latency as low_latency_checks
from deep_ep.errors import EPArgumentError, EPTypeError, EPUsageError
from support.bad_calls import (
    Arguments,
    Change,
    assert_raises,
    case,
    of,
    tensor_cases,
    to,
    with_value,
)
from support.exchange import (
    Mode,
    Shape,
    begin_dispatch,
    dispatch,
    exchange_and_check,
    make_inputs,
    misaligned,
    ranks_for,
    send_back,
)
from support.launch import DEVICE, Ranks

SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=512, num_experts=6, num_topk=3)
LARGER = replace(SHAPE, num_max_tokens=8, hidden=1024, num_experts=12)
PLAIN = Mode()
FP8 = Mode(use_fp8=True)
BAD_RANK = 1


def good_dispatch_arguments() -> Arguments:
    """A correct call of the rank that will call badly."""
    inputs = make_inputs(SHAPE)[BAD_RANK]
    return {
        "x": inputs.x.to(DEVICE),
        "topk_idx": inputs.topk_idx.to(DEVICE),
        "num_max_dispatch_tokens_per_rank": SHAPE.num_max_tokens,
        "num_experts": SHAPE.num_experts,
        "cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.int32, device=DEVICE),
        "dispatch_wait_recv_cost_stats": torch.zeros(3, dtype=torch.int64, device=DEVICE),
    }


def good_combine_arguments(handle: tuple[Any, ...]) -> Arguments:
    """A correct call of the rank that will call badly, for a handle of its own."""
    inputs = make_inputs(SHAPE)[BAD_RANK]
    rows = (2, 3 * SHAPE.num_max_tokens, SHAPE.hidden)
    return {
        "x": torch.zeros(rows, dtype=torch.bfloat16, device=DEVICE),
        "topk_idx": inputs.topk_idx.to(DEVICE),
        "topk_weights": inputs.topk_weights.to(DEVICE),
        "handle": handle,
        "out": torch.zeros_like(inputs.x, device=DEVICE),
        "combine_wait_recv_cost_stats": torch.zeros(3, dtype=torch.int64, device=DEVICE),
    }


def transposed(t: torch.Tensor) -> torch.Tensor:
    """Equal shape and values, other strides."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def moved_by_a_word(src_info: torch.Tensor) -> torch.Tensor:
    """With all that lies behind it, where no number of 64 bits can be read."""
    stored = torch.empty(0, dtype=torch.int32, device=DEVICE).set_(src_info.untyped_storage())
    moved = torch.cat((stored[:1], stored))
    return moved.as_strided(src_info.shape, src_info.stride(), 1)


def low_latency_cases(name: str, dtype: torch.dtype, advice: str) -> list[Any]:
    return tensor_cases(name, dtype, advice, size=(name[:4], "2"))


DISPATCH_CASES = [
    *low_latency_cases("x", torch.float16, "x.to(torch.bfloat16)"),
    *low_latency_cases("topk_idx", torch.float32, "topk_idx.to(torch.int64)"),
    case("x-address", of("x", misaligned), "x begins at address", "16 bytes", "x.clone()"),
    *low_latency_cases("cumulative_local_expert_recv_stats", torch.int64, "torch.zeros("),
    *low_latency_cases("dispatch_wait_recv_cost_stats", torch.int32, "torch.zeros("),
    case("x-transposed", of("x", transposed), "x", "strides", "x.contiguous()"),
    case("x-negated", of("x", torch._neg_view), "x is a view that changes signs", "resolve_neg()"),
    case(
        "hidden-not-a-multiple-of-128", of("x", lambda x: x[:, :500].contiguous()),
        "hidden is 500", "multiple of 128", "512",
    ),
    case("expert-too-large", of("topk_idx", with_value((1, 2), 6)), "topk_idx[1, 2] is 6", "[0, 6)"),
    case("expert-below-minus-one", of("topk_idx", with_value((1, 2), -2)), "topk_idx[1, 2] is -2", "-1"),
    case("num-experts-7-of-3", to(num_experts=7), "num_experts is 7", "multiple", "9"),
    case("no-experts", to(num_experts=0), "num_experts is 0"),
    case("num-experts-text", to(num_experts="6"), "num_experts", "'6'", error=EPTypeError),
    case(
        "more-tokens-than-the-maximum", to(num_max_dispatch_tokens_per_rank=2),
        "3 tokens", "num_max_dispatch_tokens_per_rank = 2", "Raise",
    ),
    case(
        "buffer-too-small", to(num_max_dispatch_tokens_per_rank=4096),
        "num_rdma_bytes", "get_low_latency_rdma_size_hint(4096, 512, 3, 6)",
    ),
    case("top-k-above-32", of("topk_idx", lambda t: torch.zeros(3, 33, dtype=t.dtype, device=t.device)), "at most 32"),
    case(
        "more-rows-for-an-expert-than-fit", of("topk_idx", torch.zeros_like),
        "expert 0 9 times", "Name an expert once per token",
    ),
    case("ue8m0-without-round-scale", to(use_ue8m0=True), "use_ue8m0", "round_scale=True"),
    case(
        "async-and-hook", to(async_finish=True, return_recv_hook=True),
        "async_finish and return_recv_hook", "async_finish=False",
    ),
    case("recv-counters-type", to(recv_counters=3), "recv_counters", "int", error=EPTypeError),
    case(
        "recv-counters-of-another-group",
        lambda arguments: {**arguments, "recv_counters": deep_ep.observe.counters.RecvCounters(2)},
        "recv_counters", "3 ranks", "buffer.group_size",
    ),
]  # fmt: skip

COMBINE_CASES = [
    *low_latency_cases("x", torch.float32, "x.to(torch.bfloat16)"),
    *low_latency_cases("topk_idx", torch.float32, "topk_idx.to(torch.int64)"),
    *low_latency_cases("topk_weights", torch.float64, "topk_weights.to(torch.float32)"),
    *low_latency_cases("out", torch.float32, "torch.empty("),
    *(
        case(f"{name}-address", of(name, misaligned), f"{name} begins at address", "16 bytes")
        for name in ("x", "out")
    ),
    *low_latency_cases("combine_wait_recv_cost_stats", torch.int32, "torch.zeros("),
    case(
        "handle-with-other-rows", of("handle", lambda h: (h[0][:, :6].contiguous(), *h[1:])),
        "handle[0]", "shape", "handle of the dispatch",
    ),
    case(
        "handle-of-another-group", of("handle", lambda h: (h[0], h[1][:, :2].contiguous(), *h[2:])),
        "handle[1]", "shape", "handle of the dispatch",
    ),
    case(
        "handle-dtype", of("handle", lambda h: (h[0].long(), *h[1:])),
        "handle[0]", "torch.int64", "handle of the dispatch",
    ),
    case("handle-of-another-hidden", of("handle", lambda h: (*h[:3], 1024, h[4])), "1024", "shape"),
    case("handle-of-another-maximum", of("handle", lambda h: (*h[:2], 8, *h[3:])), "handle[0]", "24"),
    case("handle-of-other-experts", of("handle", lambda h: (*h[:4], 12)), "handle[0]", "4"),
    case("handle-length", of("handle", lambda h: h[:4]), "4 elements", "5-tuple"),
    case("handle-copied", of("handle", lambda h: (h[0].clone(), *h[1:])), "handle[0] is a copy"),
    case("handle-moved-by-a-word", of("handle", lambda h: (moved_by_a_word(h[0]), *h[1:])), "handle[0] is a copy"),
    case("no-handle", to(handle=None), "handle", "NoneType", error=EPTypeError),
    case("expert-too-large", of("topk_idx", with_value((1, 2), 6)), "topk_idx[1, 2] is 6", "[0, 6)"),
    case("logfmt-and-zero-copy", to(use_logfmt=True, zero_copy=True), "use_logfmt and zero_copy", "use_logfmt=False"),
    case(
        "async-and-hook", to(async_finish=True, return_recv_hook=True),
        "async_finish and return_recv_hook", "async_finish=False",
    ),
]  # fmt: skip


def assert_still_usable(ranks: Ranks) -> None:
    """The group works as though nothing had happened."""
    for mode in (FP8, PLAIN):
        exchange_and_check(ranks, SHAPE, mode)


@pytest.mark.parametrize(("change", "error", "words"), DISPATCH_CASES)
def test_a_bad_dispatch_raises_and_sends_nothing(
    change: Change, error: type[Exception], words: list[str]
) -> None:
    """Also after a good one, which is known then."""
    with ranks_for(SHAPE) as ranks:
        ranks.run(lambda _, buffer: buffer.low_latency_dispatch(**good_dispatch_arguments()))
        arguments = change(good_dispatch_arguments())
        buffer = ranks.buffers[BAD_RANK]
        assert_raises(
            lambda: buffer.low_latency_dispatch(**arguments),
            error,
            ["low_latency_dispatch", *words],
        )
        assert_still_usable(ranks)


@pytest.mark.parametrize(("change", "error", "words"), COMBINE_CASES)
def test_a_bad_combine_raises_and_sends_nothing(
    change: Change, error: type[Exception], words: list[str]
) -> None:
    """Also after a good one, which is known then."""
    inputs = make_inputs(SHAPE)[BAD_RANK]
    with ranks_for(SHAPE) as ranks:
        received = ranks.run(lambda _, buffer: dispatch(buffer, inputs, SHAPE, PLAIN))
        good = [good_combine_arguments(one.handle) for one in received]
        ranks.run(lambda rank, buffer: buffer.low_latency_combine(**good[rank]))
        arguments = change(good[BAD_RANK])
        buffer = ranks.buffers[BAD_RANK]
        assert_raises(
            lambda: buffer.low_latency_combine(**arguments), error, ["low_latency_combine", *words]
        )
        assert_still_usable(ranks)


def test_a_buffer_that_is_a_little_too_small_is_refused() -> None:
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        SHAPE.num_max_tokens, SHAPE.hidden, SHAPE.num_ranks, SHAPE.num_experts
    )
    with ranks_for(SHAPE, num_rdma_bytes=size - 128) as ranks:
        assert_raises(
            lambda: ranks.buffers[BAD_RANK].low_latency_dispatch(**good_dispatch_arguments()),
            EPArgumentError,
            ["low_latency_dispatch", f"num_rdma_bytes = {size - 128}", f"needs {size} bytes"],
        )


def test_a_wrong_shape_is_not_answered_with_a_cast() -> None:
    with Ranks(1, 8, 256, 2) as ranks:
        topk_idx = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        with pytest.raises(EPArgumentError, match=r"has shape \[4\]; .* Give one row per token\.$"):
            ranks.buffers[0].get_dispatch_layout(topk_idx, 2)


@pytest.mark.parametrize("num_experts", [4097, 2**31 - 1, 2**31, 2**63])
def test_a_layout_of_more_experts_than_the_kernels_know_is_refused(num_experts: int) -> None:
    with ranks_for(SHAPE) as ranks:
        topk_idx = make_inputs(SHAPE)[0].topk_idx.to(DEVICE)
        assert_raises(
            lambda: ranks.buffers[0].get_dispatch_layout(topk_idx, num_experts),
            EPArgumentError,
            ["get_dispatch_layout", f"num_experts is {num_experts}", "at most 4096"],
        )
        per_expert = ranks.buffers[0].get_dispatch_layout(topk_idx, 4096)[2]
        assert per_expert.shape == (4096,)


@pytest.mark.skipif(deep_ep.native.backend.get().name != "cpu", reason="shapes a launch of fibers")
@pytest.mark.parametrize(("blocks", "warps"), [(1_000_000, 1), (513, 1), (1, 33), (2**31 - 1, 32)])
def test_a_launch_of_more_threads_than_fit_is_refused(blocks: int, warps: int) -> None:
    with Ranks(1, 4, 512, 2) as ranks:
        ranks.buffers[0].runtime.set_launch_shape(blocks=blocks, warps=warps)
        x, topk_idx = (
            torch.zeros(1, 512, dtype=torch.bfloat16),
            torch.zeros(1, 1, dtype=torch.int64),
        )
        with pytest.raises(RuntimeError, match=f"launch shape {blocks} blocks x {32 * warps} thr"):
            ranks.buffers[0].low_latency_dispatch(x, topk_idx, 4, 2)


def test_a_buffer_that_is_not_low_latency_says_so() -> None:
    with Ranks(2, 4, 512, 6, low_latency_mode=False, num_rdma_bytes=0) as ranks:
        arguments = {**good_dispatch_arguments(), "num_experts": 6}
        del (
            arguments["dispatch_wait_recv_cost_stats"],
            arguments["cumulative_local_expert_recv_stats"],
        )
        for call in (
            lambda: ranks.buffers[0].low_latency_dispatch(**arguments),
            lambda: ranks.buffers[0].clean_low_latency_buffer(4, 512, 6),
        ):
            assert_raises(call, EPUsageError, ["low_latency_mode=True"])


def test_a_third_call_before_the_hooks_raises_and_the_hooks_still_work() -> None:
    inputs = make_inputs(SHAPE)

    def exchange(rank: int, buffer: deep_ep.Buffer) -> None:
        one = inputs[rank]
        hooks = [begin_dispatch(buffer, one, SHAPE, Mode(hook=True))[2] for _ in range(2)]
        if rank == BAD_RANK:
            assert_raises(
                lambda: dispatch(buffer, one, SHAPE, PLAIN),
                EPUsageError,
                ["the hooks of low_latency_dispatch and low_latency_dispatch", "at most 2 calls"],
            )
        for hook in hooks:
            hook()
            assert_raises(hook, EPUsageError, ["once"])

    with ranks_for(SHAPE) as ranks:
        ranks.run(exchange)
        assert_still_usable(ranks)


def test_a_handle_is_refused_until_its_hook_was_called() -> None:
    inputs = make_inputs(SHAPE)

    def exchange(rank: int, buffer: deep_ep.Buffer) -> None:
        one = inputs[rank]
        received, _, hook = begin_dispatch(buffer, one, SHAPE, Mode(hook=True))
        assert_raises(
            lambda: send_back(buffer, one, received),
            EPUsageError,
            ["the hook of the dispatch that returned handle has not been called"],
        )
        hook()

    with ranks_for(SHAPE) as ranks:
        ranks.run(exchange)
        assert_still_usable(ranks)


def test_use_after_destroy_says_so() -> None:
    ranks = ranks_for(SHAPE)
    buffer, arguments = ranks.buffers[0], good_dispatch_arguments()
    ranks.close()
    for call in (
        lambda: buffer.low_latency_dispatch(**arguments),
        lambda: buffer.dispatch(arguments["x"]),
        lambda: buffer.combine(arguments["x"], ()),
    ):
        assert_raises(call, EPUsageError, ["destroy() was called", "Build a new Buffer"])


# What rank 1 does differently, the field that tells, its value there and here.
DISAGREEMENTS = [
    pytest.param(replace(SHAPE, num_max_tokens=8), FP8, "M", 8, 4, id="maximum"),
    pytest.param(replace(SHAPE, hidden=1024), FP8, "hidden", 1024, 512, id="hidden"),
    pytest.param(replace(SHAPE, num_experts=12), FP8, "num_experts", 12, 6, id="num-experts"),
    pytest.param(SHAPE, PLAIN, "dtype", "", "", id="dtype"),
]


@pytest.mark.parametrize(("other", "mode", "field", "there", "here"), DISAGREEMENTS)
def test_ranks_that_disagree_are_named_with_the_field(
    other: Shape, mode: Mode, field: str, there: object, here: object
) -> None:
    shapes = [other if rank == BAD_RANK else SHAPE for rank in range(3)]
    modes = [mode if rank == BAD_RANK else FP8 for rank in range(3)]
    with ranks_for(LARGER) as ranks:
        outcomes = ranks.outcomes(
            lambda rank, buffer: dispatch(
                buffer, make_inputs(shapes[rank])[rank], shapes[rank], modes[rank]
            )
        )
        for rank, error in enumerate(outcomes):
            assert type(error) is EPArgumentError, f"rank {rank}: {error!r}"
            assert field in str(error), error
            if rank != BAD_RANK:
                assert f"rank {BAD_RANK}" in str(error), error
                assert str(there) in str(error), error
                assert str(here) in str(error), error
                assert str(error).count("(here ") == 1, "fields that agree are not named"
        assert_still_usable(ranks)


def test_a_rank_in_another_operation_is_named() -> None:
    inputs = make_inputs(SHAPE)

    def disagree(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == BAD_RANK:
            buffer.low_latency_combine(**good_combine_arguments(received[rank].handle))
        else:
            dispatch(buffer, inputs[rank], SHAPE, PLAIN)

    with ranks_for(SHAPE) as ranks:
        received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], SHAPE, PLAIN))
        for rank, error in enumerate(ranks.outcomes(disagree)):
            assert type(error) is EPArgumentError, f"rank {rank}: {error!r}"
            assert "operation" in str(error)
            assert rank == BAD_RANK or f"rank {BAD_RANK}" in str(error), error
        assert_still_usable(ranks)


@pytest.mark.parametrize(
    ("mode", "num_max_tokens", "hidden", "said"),
    [
        (Mode(use_fp8=True), 4, 640, False),
        (Mode(use_fp8=True), 3, 512, True),
        (Mode(), 3, 640, False),
        (Mode(use_fp8=True, round_scale=True, use_ue8m0=True), 4, 512, False),
        (Mode(use_fp8=True, round_scale=True, use_ue8m0=True), 4, 640, True),
    ],
    ids=str,
)
def test_scales_that_tma_descriptors_do_not_allow_are_said_once(
    mode: Mode, num_max_tokens: int, hidden: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    low_latency_checks._say_what_consumers_refuse.cache_clear()
    shape = Shape((3,), num_max_tokens, hidden, num_experts=2, num_topk=1)
    inputs = make_inputs(shape)
    with caplog.at_level(logging.WARNING, "deep_ep"), ranks_for(shape) as ranks:
        for _ in range(2):
            ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], shape, mode))
    words = f"scales have {num_max_tokens} rows, num_ranks * num_max_dispatch_tokens_per_rank, and hidden is {hidden};"
    assert len([text for text in caplog.messages if words in text]) == said
