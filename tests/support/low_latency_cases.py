"""The pytest half of test_low_latency.py, which imports it: any shape and mode equals the reference.

Apart, so that the program runs where neither pytest nor hypothesis is installed.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import deep_ep
from support import normal_reference, reference
from support.exchange import (
    Inputs,
    Mode,
    Received,
    Shape,
    assert_combined,
    assert_received,
    assert_received_one,
    assert_same_bytes,
    buffer_for,
    combine,
    dispatch,
    exchange_and_check,
    expected_combine,
    expected_dispatch,
    expected_experts,
    experts,
    make_inputs,
    ranks_for,
    round_trip,
)
from support.launch import (
    DEVICE,
    Ranks,
    raise_failures,
    run_processes,
    shared_memory_left,
    shared_memory_segments,
)
from support.normal_exchange import assert_layout, layout_of

PLAIN = Mode()
FP8 = Mode(use_fp8=True)
MODES = {
    "bf16": PLAIN,
    "bf16-hook": Mode(hook=True),
    "bf16-async": Mode(async_finish=True),
    "bf16-zero-copy": Mode(zero_copy=True),
    "bf16-zero-copy-hook": Mode(zero_copy=True, hook=True),
    "bf16-out": Mode(use_out=True),
    "logfmt": Mode(use_logfmt=True),
    "logfmt-hook": Mode(use_logfmt=True, hook=True),
    "fp8": FP8,
    "fp8-hook": Mode(use_fp8=True, hook=True),
    "fp8-async-out": Mode(use_fp8=True, async_finish=True, use_out=True),
    "fp8-round": Mode(use_fp8=True, round_scale=True),
    "fp8-ue8m0": Mode(use_fp8=True, round_scale=True, use_ue8m0=True),
    "fp8-ue8m0-hook-zero-copy": Mode(
        use_fp8=True, round_scale=True, use_ue8m0=True, hook=True, zero_copy=True
    ),
}
SMALL = Shape(
    num_tokens=(5, 0, 8, 3), num_max_tokens=8, hidden=512, num_experts=12, num_topk=4, dropped=0.2
)


def dispatch_all(
    ranks: Ranks, inputs: list[Inputs], shape: Shape = SMALL, mode: Mode = PLAIN
) -> tuple[list[Received], list[list[torch.Tensor]]]:
    """What all ranks receive, and what their experts make of it."""
    received = ranks.run(lambda rank, buffer: dispatch(buffer, inputs[rank], shape, mode))
    return received, [experts(one, rank) for rank, one in enumerate(received)]


def combine_all(
    ranks: Ranks,
    inputs: list[Inputs],
    received: list[Received],
    ys: list[list[torch.Tensor]],
    mode: Mode = PLAIN,
) -> list[torch.Tensor]:
    """What all ranks get back."""
    return ranks.run(
        lambda rank, buffer: combine(buffer, inputs[rank], received[rank].handle, ys[rank], mode)
    )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any group size up to 8, any tokens up to the maximum, any multiple of 128 channels, top-k up
    to 32.
    """
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    num_max_tokens = draw(st.integers(1, 12))
    tokens = st.one_of(st.just(0), st.just(num_max_tokens), st.integers(0, num_max_tokens))
    return Shape(
        num_tokens=tuple(draw(st.lists(tokens, min_size=num_ranks, max_size=num_ranks))),
        num_max_tokens=num_max_tokens,
        hidden=128 * draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16])),
        num_experts=num_ranks * draw(st.integers(1, 6)),
        num_topk=draw(st.sampled_from([1, 2, 3, 6, 8, 9, 11, 12, 31, 32])),
        routing=draw(st.sampled_from(["random", "repeats", "one-expert", "nowhere"])),
        dropped=draw(st.sampled_from([0.0, 0.1, 0.9])),
        seed=draw(st.integers(0, 2**20)),
    )


@given(shape=shapes(), mode=st.sampled_from(sorted(MODES)))
def test_any_exchange_equals_the_reference(shape: Shape, mode: str) -> None:
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_equals_the_reference(mode: str) -> None:
    with ranks_for(SMALL) as ranks:
        exchange_and_check(ranks, SMALL, MODES[mode])


FORMATS = ("bf16", "fp8", "fp8-ue8m0", "logfmt")
HIDDEN_SIZES = (128, 384, 896, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 8320)
FULL = replace(SMALL, num_tokens=(8, 8, 8, 8), dropped=0.0)
# Extreme value: its shape, and the modes to try.
EXTREMES = {
    **{
        f"{n}-ranks": (
            Shape(tuple((3 * rank) % 5 for rank in range(n)), 4, 1024, 2 * n, 2),
            FORMATS,
        )
        for n in range(1, 10)
    },
    **{f"{hidden}-channels": (Shape((3, 2), 4, hidden, 4, 2), FORMATS) for hidden in HIDDEN_SIZES},
    **{f"top-{k}": (Shape((6, 6), 6, 256, 64, k, dropped=0), ("fp8", "bf16")) for k in (1, 12, 32)},
    **{
        routing: (replace(FULL, routing=routing), ("bf16", "fp8"))
        for routing in ("one-expert", "nowhere", "repeats")
    },
    "512-experts": (Shape((9, 16), 16, 128, 512, 8), ("fp8",)),
    "no-token": (replace(SMALL, num_tokens=(0, 0, 0, 0)), ("fp8", "bf16")),
}


@pytest.mark.parametrize(
    ("extreme", "mode"), [(name, mode) for name, (_, modes) in EXTREMES.items() for mode in modes]
)
def test_extreme_shapes_equal_the_reference(extreme: str, mode: str) -> None:
    shape, _ = EXTREMES[extreme]
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, MODES[mode])


def test_two_dispatches_may_be_outstanding_and_combined_in_any_order() -> None:
    shapes = [SMALL, replace(SMALL, num_tokens=(8, 1, 0, 8), seed=7)]
    with ranks_for(SMALL) as ranks:
        inputs = [make_inputs(shape) for shape in shapes]
        dispatched = [dispatch_all(ranks, inputs[i], shapes[i], FP8) for i in range(2)]
        for i in (1, 0):
            received, ys = dispatched[i]
            want = expected_dispatch(inputs[i], shapes[i], FP8)
            assert_received(received, want, shapes[i], FP8)
            combined = combine_all(ranks, inputs[i], received, ys)
            assert_combined(combined, expected_combine(inputs[i], ys, want))


@pytest.mark.parametrize("mode", ["bf16", "bf16-zero-copy", "logfmt"])
def test_a_handle_can_be_combined_repeatedly(mode: str) -> None:
    inputs = make_inputs(SMALL)
    with ranks_for(SMALL) as ranks:
        received, ys = dispatch_all(ranks, inputs)
        first, second, third = (
            combine_all(ranks, inputs, received, ys, MODES[mode]) for _ in range(3)
        )
    assert_combined(second, first)
    assert_combined(third, first)


def test_entries_dropped_after_the_dispatch_contribute_nothing() -> None:
    inputs = make_inputs(SMALL)
    with ranks_for(SMALL) as ranks:
        received, ys = dispatch_all(ranks, inputs)
        generator = torch.Generator().manual_seed(3)
        fewer = [
            one._replace(
                topk_idx=one.topk_idx.masked_fill(
                    torch.rand(one.topk_idx.shape, generator=generator) < 0.5, -1
                )
            )
            for one in inputs
        ]
        combined = combine_all(ranks, fewer, received, ys)
    want = expected_combine(fewer, ys, expected_dispatch(inputs, SMALL, PLAIN))
    assert_combined(combined, want)


def test_combine_fuses_multiplication_and_addition() -> None:
    """Two nearly cancelling terms: what is left is mostly rounding, and tells how often it was
    done.
    """
    shape = Shape((8, 8), num_max_tokens=8, hidden=512, num_experts=14, num_topk=2)
    inputs = []
    for one in make_inputs(shape):
        weights = torch.rand(8, 1) + 0.5
        weights = torch.cat([weights, -weights * (1 + 2**-18)], dim=1)
        # Experts 0 and 7 make the same of a row, see apply_expert().
        inputs.append(one._replace(topk_idx=torch.tensor([[0, 7]] * 8), topk_weights=weights))
    with ranks_for(shape) as ranks:
        exchange_and_check(ranks, shape, PLAIN, inputs)


def test_bf16_dispatch_moves_bytes_unchanged() -> None:
    """NaN payloads, infinities, denormals, negative zero: clients send other types viewed as
    bfloat16.
    """
    patterns = torch.randint(-(2**15), 2**15, (8, SMALL.hidden), dtype=torch.int16)
    patterns[0, :6] = torch.tensor([0x7FC1, -1, 0x7F80, 1, -(2**15), 0x7F81], dtype=torch.int16)
    inputs = [
        one._replace(x=patterns[: len(one.x)].view(torch.bfloat16)) for one in make_inputs(SMALL)
    ]
    with ranks_for(SMALL) as ranks:
        received, _ = dispatch_all(ranks, inputs)
    assert_received(received, expected_dispatch(inputs, SMALL, PLAIN), SMALL, PLAIN)


def test_nan_columns_stay_nan_and_disturb_no_neighbour() -> None:
    inputs = make_inputs(SMALL)
    for one in inputs:
        one.x[:, 7] = torch.nan
    with ranks_for(SMALL) as ranks:
        exchanged = ranks.run(lambda rank, buffer: round_trip(buffer, inputs[rank], SMALL, PLAIN))
    for rank, combined in enumerate(exchanged):
        sent = (inputs[rank].topk_idx >= 0).any(1)
        assert combined.cpu()[sent, 7].isnan().all()
        assert not combined.cpu()[:, torch.arange(SMALL.hidden) != 7].isnan().any()


def test_cumulative_statistics_add_up() -> None:
    inputs = make_inputs(SMALL)
    stats = [
        torch.full((SMALL.num_local_experts,), 100, dtype=torch.int32, device=DEVICE)
        for _ in inputs
    ]
    with ranks_for(SMALL) as ranks:
        for _ in range(3):
            received = ranks.run(
                lambda rank, buffer: dispatch(
                    buffer,
                    inputs[rank],
                    SMALL,
                    FP8,
                    cumulative_local_expert_recv_stats=stats[rank],
                )
            )
    for one, total in zip(received, stats):
        assert torch.equal(total, 100 + 3 * one.recv_count)


@pytest.mark.parametrize("square", [False, True], ids=["R", "RxR"])
def test_wait_cost_tensors_grow_in_the_own_row_only(square: bool) -> None:
    num_ranks = SMALL.num_ranks
    size = (num_ranks, num_ranks) if square else (num_ranks,)
    inputs = make_inputs(SMALL)
    costs = [
        [torch.full(size, 5, dtype=torch.int64, device=DEVICE) for _ in range(2)] for _ in inputs
    ]

    def exchange(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 2 and DEVICE == "cpu":  # so that the others do wait
            buffer.runtime.delay(30_000_000)
        received = dispatch(
            buffer, inputs[rank], SMALL, FP8, dispatch_wait_recv_cost_stats=costs[rank][0]
        )
        combine(
            buffer, inputs[rank], received.handle, experts(received, rank), PLAIN,
            combine_wait_recv_cost_stats=costs[rank][1],
        )  # fmt: skip

    with ranks_for(SMALL) as ranks:
        for _ in range(2):
            ranks.run(exchange)
    for rank in range(num_ranks):
        for tensor in costs[rank]:
            own = tensor[rank] if square else tensor
            assert (own >= 5).all()
            if square:
                assert (tensor[torch.arange(num_ranks) != rank] == 5).all()
        if rank != 2 and DEVICE == "cpu":
            own = costs[rank][0][rank] if square else costs[rank][0]
            # Far less than the delay: a thread may start late, which is no waiting.
            assert own[2] > 5 + 1_000_000, "nobody seems to have waited for the delayed rank"


@pytest.mark.parametrize("context", ["inference_mode", "no_grad", "requires_grad"])
def test_autograd_state_does_not_matter(context: str) -> None:
    inputs = make_inputs(SMALL)

    def exchange(rank: int, buffer: deep_ep.Buffer) -> torch.Tensor:
        guard = nullcontext() if context == "requires_grad" else getattr(torch, context)()
        with guard:
            one = inputs[rank]
            if context == "requires_grad":
                one = one._replace(
                    x=one.x.clone().requires_grad_(),
                    topk_weights=one.topk_weights.clone().requires_grad_(),
                )
            return round_trip(buffer, one, SMALL, PLAIN).detach().clone()

    with ranks_for(SMALL) as ranks:
        combined = ranks.run(exchange)
        plain = ranks.run(lambda rank, buffer: round_trip(buffer, inputs[rank], SMALL, PLAIN))
    assert_combined(combined, plain)


def test_outputs_stay_valid_while_the_buffer_is_used_on() -> None:
    """Results are no aliases of the communication buffer."""
    inputs = make_inputs(SMALL)
    other = make_inputs(replace(SMALL, seed=9))
    with ranks_for(SMALL) as ranks:
        received, _ = dispatch_all(ranks, inputs, mode=FP8)
        for _ in range(4):
            ranks.run(lambda rank, buffer: round_trip(buffer, other[rank], SMALL, FP8))
    assert_received(received, expected_dispatch(inputs, SMALL, FP8), SMALL, FP8)


def test_nvlink_choice_does_not_change_results() -> None:
    with ranks_for(SMALL, allow_nvlink_for_low_latency_mode=False) as ranks:
        for mode in (FP8, PLAIN, Mode(zero_copy=True)):
            exchange_and_check(ranks, SMALL, mode)


@pytest.mark.parametrize("ranks_per_node", ["1", "2"])
def test_ranks_on_different_nodes_get_the_same_results(
    ranks_per_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", ranks_per_node)
    with ranks_for(SMALL) as ranks:
        for name in ("fp8", "bf16-hook", "bf16-zero-copy", "logfmt"):
            exchange_and_check(ranks, SMALL, MODES[name])


@pytest.mark.parametrize("ranks_per_node", ["1", "2", "4"])
def test_dispatch_layout_counts_tokens_and_selections(
    ranks_per_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated experts count a token once, a selection each time; -1 and experts of nobody count
    nowhere.
    """
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", ranks_per_node)
    num_experts = 12
    topk_idx = torch.randint(-1, num_experts, (50, 4))
    topk_idx[0] = -1
    topk_idx[1] = 5
    topk_idx[2, 0] = num_experts
    with ranks_for(SMALL) as ranks:
        for rows in (50, 0):
            got, event = layout_of(ranks.buffers[1], topk_idx[:rows].to(DEVICE), num_experts)
            assert event.event is None
            want = normal_reference.layout(topk_idx[:rows], num_experts, 4, int(ranks_per_node))
            assert_layout(tuple(got.values()), want, f"{rows} tokens")


def exchange_in_process(
    rank: int,
    group: dist.ProcessGroup,
    shape: Shape,
    modes: list[str],
    allow_nvlink: bool = True,
) -> None:
    """One rank that is a process: exchanges and compares. All ranks know all inputs."""
    buffer = buffer_for(
        shape, group, allow_nvlink_for_low_latency_mode=allow_nvlink, explicitly_destroy=True
    )
    inputs = make_inputs(shape)
    for name in modes:
        got = dispatch(buffer, inputs[rank], shape, MODES[name])
        want = expected_dispatch(inputs, shape, MODES[name])
        assert_received_one(got, want[rank], shape, MODES[name], f"rank {rank}, {name}")
        combined = combine(buffer, inputs[rank], got.handle, experts(got, rank), MODES[name])
        expected = reference.combine_one(
            rank, expected_experts(want), inputs[rank].topk_idx, inputs[rank].topk_weights, want
        )
        assert_same_bytes(combined.cpu(), expected, f"rank {rank}, {name}, combine")
    buffer.destroy()


def test_processes_equal_the_reference_and_leave_no_shared_memory() -> None:
    shape = Shape((5, 6, 7), num_max_tokens=8, hidden=1024, num_experts=12, num_topk=4)
    before = shared_memory_segments()
    modes = ["fp8", "bf16", "bf16-zero-copy-hook"]
    raise_failures(run_processes(exchange_in_process, 3, shape, modes))
    assert not shared_memory_left(before)


@pytest.mark.slow
def test_production_shape_equals_the_reference() -> None:
    """DeepSeek-V3's decoding step: 128 tokens, 7168 channels, top 8 of 256 experts, 8 ranks."""
    tokens = (128,) * 8
    shape = Shape(
        tokens, num_max_tokens=128, hidden=7168, num_experts=256, num_topk=8, dropped=0.01
    )
    raise_failures(run_processes(exchange_in_process, 8, shape, ["fp8", "bf16-hook"]))


# --- the reference -----------------------------------------------------------------------------


def test_reference_fma_rounds_once() -> None:
    """Against the C library's fmaf, on values whose exact sum lies next to a tie."""
    fmaf = ctypes.CDLL(None).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a = torch.randn(20_000).bfloat16()
    b = torch.ldexp(torch.randn(20_000), torch.randint(-30, 3, (20_000,)))
    c = torch.randn(20_000).bfloat16().float()
    want = torch.tensor([fmaf(*values) for values in zip(a.tolist(), b.tolist(), c.tolist())])
    assert torch.equal(reference.fma(a, b, c), want)
