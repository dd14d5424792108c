"""Programs that use normal mode, each in our own words: the same calls, argument forms, dtypes and reads.

From import to destroy, on ranks that are threads, on one node and on two. Rows and weights are small whole numbers and halves, so that every result
and every gradient has one right value. Where a checkout is given, the program's own file runs too.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from support import reference
from support.client_programs import (
    EXPERTS_PER_RANK,
    HIDDEN,
    Problem,
    Rank,
    assert_counts,
    assert_weighted,
    imported,
    megatron_parents,
    on_nodes,
    own_file,
    problem_of,
    run_as_threads,
    train,
    weigh_compact,
)
from support.launch import raise_failures, run_processes
from support.normal_exchange import layout_of

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn


def hints(*configs: Any, hidden_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Sizes as most programs compute them: the larger one of dispatch and combine, never negative."""
    nvl = rdma = 0
    for config in configs:
        nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks), rdma)
    return nvl, rdma


def recommended_sizes(rank: Rank, num_max_tokens: int = 0) -> tuple[int, int]:
    """Buffer sizes for the recommended configs; with num_max_tokens, enough for low latency as well."""
    of, num_ranks = deep_ep.Buffer, rank.num_ranks
    configs = of.get_dispatch_config(num_ranks), of.get_combine_config(num_ranks)
    nvl, rdma = hints(*configs, hidden_bytes=HIDDEN * 2, num_ranks=num_ranks)
    if num_max_tokens:
        num_experts = num_ranks * EXPERTS_PER_RANK
        low_latency = of.get_low_latency_rdma_size_hint(
            num_max_tokens, HIDDEN, num_ranks, num_experts
        )
        rdma = max(rdma, low_latency)
    return nvl, rdma


def timing(asynchronous: bool = True, behind: Any = None) -> dict[str, Any]:
    """Keywords of a call; asynchronous ones wait for `behind`, by default an empty event."""
    if asynchronous and behind is None:
        behind = deep_ep.utils.EventOverlap(deep_ep.utils.EventHandle())
    return {
        "previous_event": behind,
        "async_finish": asynchronous,
        "allocate_on_comm_stream": asynchronous,
    }


# --- Megatron-Core -----------------------------------------------------------------------------------


def wait_for(event: Any, asynchronous: bool) -> None:
    if asynchronous:
        event.current_stream_wait()


class FusedDispatch(torch.autograd.Function):
    """The layout's event goes on to the dispatch, though it may hold none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_idx: Tensor,
        weights: Tensor,
        num_experts: int,
        buffer: deep_ep.Buffer,
        asynchronous: bool,
    ) -> tuple[Any, ...]:
        layout, event = layout_of(buffer, topk_idx, num_experts, **timing(asynchronous))
        recv_x, idx, probs, counts, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, **layout, **timing(asynchronous, event)
        )
        wait_for(event, asynchronous)
        ctx.buffer, ctx.handle, ctx.asynchronous = buffer, handle, asynchronous
        ctx.mark_non_differentiable(idx)
        return recv_x, idx, probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, _idx: Any, grad_probs: Tensor, *_: Any) -> Any:
        grad_x, grad_probs, event = ctx.buffer.combine(
            grad_x.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            **timing(ctx.asynchronous),
        )
        wait_for(event, ctx.asynchronous)
        return grad_x, None, grad_probs, None, None, None


class FusedCombine(torch.autograd.Function):
    """Combine without weights, whose backward is the cached dispatch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, buffer: deep_ep.Buffer, handle: Any, asynchronous: bool
    ) -> Tensor:
        combined, _, event = buffer.combine(x, handle=handle, **timing(asynchronous))
        wait_for(event, asynchronous)
        ctx.buffer, ctx.handle, ctx.asynchronous = buffer, handle, asynchronous
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad_x, _, _, _, _, event = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, **timing(ctx.asynchronous)
        )
        wait_for(event, ctx.asynchronous)
        return grad_x, None, None, None


def train_on(rank: Rank, buffer: deep_ep.Buffer, asynchronous: bool) -> None:
    """A step with the functions above."""

    def dispatch(x: Tensor, idx: Tensor, probs: Tensor, num_experts: int) -> tuple[Any, ...]:
        return FusedDispatch.apply(x, idx, probs, num_experts, buffer, asynchronous)

    def combine(x: Tensor, handle: Any) -> Tensor:
        return FusedCombine.apply(x, buffer, handle, asynchronous)

    train(rank, dispatch, combine, seed=int(asynchronous))


def megatron_core(rank: Rank) -> None:
    from deep_ep import Buffer

    Buffer.set_num_sms(20)

    def get_buffer(cached: deep_ep.Buffer | None, hidden_bytes: int) -> deep_ep.Buffer:
        nvl, rdma = recommended_sizes(rank)
        if (
            cached is None
            or cached.group != rank.group
            or cached.num_nvl_bytes < nvl
            or cached.num_rdma_bytes < rdma
        ):
            return Buffer(rank.group, nvl, rdma)
        return cached

    buffer = get_buffer(None, HIDDEN * 2)
    for asynchronous in (True, False):
        assert get_buffer(buffer, HIDDEN * 2) is buffer  # nothing is rebuilt
        train_on(rank, buffer, asynchronous)


# --- inference: lmdeploy, vLLM ------------------------------------------------------------------------


def lmdeploy(rank: Rank) -> None:
    from deep_ep import Buffer

    problem = problem_of(rank)
    nvl, rdma = recommended_sizes(rank, 16)
    arguments = {
        "num_nvl_bytes": nvl,
        "num_rdma_bytes": rdma,
        "low_latency_mode": True,
        "num_qps_per_rank": max(EXPERTS_PER_RANK, Buffer.num_sms // 2),
    }
    with pytest.raises(TypeError):
        Buffer(rank.group, **arguments, no_such_keyword=True)
    buffer = Buffer(rank.group, **arguments, allow_mnnvl=True, explicitly_destroy=True)
    buffer.set_num_sms(24)
    assert Buffer.num_sms == 24
    assert buffer.group_size == rank.num_ranks

    topk_idx = problem.topk_idx.int().to(torch.int64)
    layout, previous_event = layout_of(buffer, topk_idx, problem.num_experts)
    data, scales = reference.cast_fp8(problem.x)
    for x, alignment in ((problem.x, 1), ((data, scales), 128)):
        recv_x, idx, weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=problem.weights,
            **layout,
            previous_event=previous_event,
            async_finish=False,
            allocate_on_comm_stream=False,
            expert_alignment=alignment,
        )
        assert event.event is None
        assert all(count % alignment == 0 for count in counts)
        assert sum(counts) >= int((idx >= 0).sum())
        rows = recv_x if isinstance(recv_x, Tensor) else reference.dequantise(*recv_x)
        released = weakref.ref(recv_x if isinstance(recv_x, Tensor) else recv_x[0])
        combined, _, event = buffer.combine(
            weigh_compact(rows, idx, weights),
            handle,
            previous_event=previous_event,
            async_finish=False,
        )
        assert event.event is None
        assert_weighted(combined, problem)
        del recv_x, rows
        gc.collect()
        assert released() is None, "somebody keeps what was received"
    buffer.clean_low_latency_buffer(16, HIDDEN, problem.num_experts)
    low_latency(buffer, problem)
    buffer.destroy()


def low_latency(buffer: deep_ep.Buffer, problem: Problem) -> None:
    """What decoding does on the same buffer."""
    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
        problem.x, problem.topk_idx, 16, problem.num_experts,
        use_fp8=False, async_finish=False, return_recv_hook=True,
    )  # fmt: skip
    hook()
    y = torch.zeros_like(recv_x)
    for i, count in enumerate(recv_count.tolist()):
        y[i, :count] = recv_x[i, :count]
    combined, event, hook = buffer.low_latency_combine(
        y, problem.topk_idx, problem.weights, handle, async_finish=False, return_recv_hook=True
    )
    hook()
    assert event.event is None
    assert_weighted(combined, problem)


def vllm_high_throughput(rank: Rank) -> None:
    """Two micro-batches share a buffer: both are dispatched before one is combined."""

    class Kept:
        """Annotations, which are evaluated at import."""

        config: deep_ep.Config | None
        event: deep_ep.EventOverlap | None
        buffer: deep_ep.Buffer

    assert inspect.get_annotations(Kept, eval_str=True)["buffer"] is deep_ep.Buffer
    config = deep_ep.Config(
        num_sms=20,
        num_max_nvl_chunked_send_tokens=6,
        num_max_nvl_chunked_recv_tokens=256,
        num_max_rdma_chunked_send_tokens=6,
        num_max_rdma_chunked_recv_tokens=128,
    )
    nvl, rdma = hints(config, hidden_bytes=HIDDEN * 2, num_ranks=rank.num_ranks)
    several_nodes = rank.ranks_per_node < rank.num_ranks
    buffer = deep_ep.Buffer(
        group=rank.group,
        num_nvl_bytes=max(nvl, 1 << 26),
        num_rdma_bytes=max(rdma, 1 << 26) if several_nodes else 0,
        low_latency_mode=False,
        num_qps_per_rank=10 if several_nodes else 1,
        explicitly_destroy=True,
    )
    cache: Any = weakref.WeakValueDictionary()
    cache["arguments"] = buffer
    buffer.set_num_sms(20)

    problems = [problem_of(rank, seed=seed) for seed in (5, 6)]
    kept = []
    for number, problem in enumerate(problems):
        capture = buffer.capture
        previous_event = capture() if number else None
        layout, event = layout_of(
            buffer,
            topk_idx=problem.topk_idx,
            num_experts=problem.num_experts,
            previous_event=previous_event,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        data, scales = reference.cast_fp8(problem.x)
        recv, idx, weights, counts, handle, event = buffer.dispatch(
            x=(data, scales) if number else problem.x,
            handle=None,
            **layout,
            topk_idx=problem.topk_idx,
            topk_weights=problem.weights,
            expert_alignment=1,
            config=config,
            previous_event=previous_event,
            async_finish=True,
            allocate_on_comm_stream=False,
        )
        kept.append((recv, idx, weights, counts, handle, event))
    for problem, (recv, idx, weights, counts, handle, event) in zip(problems, kept):
        if event.event is not None:
            event.current_stream_wait()
        assert_counts(counts, idx)
        rows = reference.dequantise(*recv) if isinstance(recv, tuple) else recv
        y = weigh_compact(rows, idx, weights)
        assert y.dtype == torch.bfloat16
        combined, _, event = buffer.combine(
            x=y,
            handle=handle,
            topk_weights=None,
            config=config,
            previous_event=None,
            async_finish=True,
            allocate_on_comm_stream=False,
        )
        if event.event is not None:
            event.current_stream_wait()
        output = torch.empty_like(problem.x)
        output.copy_(combined)
        assert_weighted(output, problem)
    buffer.destroy()
    del buffer


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program
    for program in (
        megatron_core,
        lmdeploy,
        vllm_high_throughput,
    )
}


# --- the tests -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def same_num_sms() -> Iterator[None]:
    """Programs set it for their whole process."""
    before = deep_ep.Buffer.num_sms
    yield
    deep_ep.Buffer.set_num_sms(before)


@on_nodes
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_s_calls_do_what_it_expects(program: str, nodes: tuple[int, int]) -> None:
    run_as_threads(PROGRAMS[program], *nodes)


# The programs' own files, of checkouts that these variables name.
OWN_FILES = {
    "CLIENT_MEGATRON_CORE": "megatron/core/transformer/moe/fused_a2a.py",
    "CLIENT_AUTOMODEL": "nemo_automodel/components/moe/megatron/fused_a2a.py",
}


def train_with_own_file(rank: int, group: dist.ProcessGroup, path: Path) -> None:
    """Steps with the functions of that file, which keeps its buffer for itself."""
    own = imported(path, megatron_parents())
    own.set_deepep_num_sms(20)
    who = Rank(rank, group.size(), group.size(), group)
    for asynchronous in (False, True):
        timing = asynchronous, asynchronous

        def dispatch(*routed: Any, timing: Any = timing) -> tuple[Any, ...]:
            return own.fused_dispatch(*routed, group, *timing)

        def combine(x: Tensor, handle: Any, timing: Any = timing) -> Tensor:
            return own.fused_combine(x, group, handle, *timing)[0]

        train(who, dispatch, combine, seed=int(asynchronous))
    if hasattr(own, "free_buffer"):
        own.free_buffer()


@pytest.mark.parametrize("variable", OWN_FILES)
def test_a_program_s_own_file_runs(variable: str) -> None:
    path = own_file(variable, OWN_FILES[variable])
    raise_failures(run_processes(train_with_own_file, 2, path))
