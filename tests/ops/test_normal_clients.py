"""Programs that use normal mode, each in our own words: the same calls, argument forms, dtypes and reads.

From import to destroy, on ranks that are threads, on one node and on two; once all of them in
processes joined by gloo. Rows and weights are small whole numbers and halves, so that every result
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
from support.launch import DEVICE, raise_failures, run_processes
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


# --- Megatron-Core, and Automodel, which has the same file with an end -----------------------------


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

    with pytest.raises(ImportError):
        from deep_ep import HybridEPBuffer  # noqa: F401
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


def automodel(rank: Rank) -> None:
    from deep_ep import Buffer

    assert Buffer.is_sm90_compiled() is True
    nvl, rdma = recommended_sizes(rank)
    buffer = Buffer(rank.group, nvl, rdma, explicitly_destroy=True)
    train_on(rank, buffer, asynchronous=True)
    buffer.destroy()


# --- xorl ------------------------------------------------------------------------------------------


def xorl(rank: Rank) -> None:
    from deep_ep import Buffer

    Buffer.set_num_sms(20)
    configs = Buffer.get_dispatch_config(rank.num_ranks), Buffer.get_combine_config(rank.num_ranks)
    hidden = 9 * HIDDEN
    nvl, rdma = hints(*configs, hidden_bytes=hidden * 2, num_ranks=rank.num_ranks)
    buffer = Buffer(
        group=rank.group,
        num_nvl_bytes=max(int(0.1 * 1e9), nvl) // 128 * 128,
        num_rdma_bytes=rdma // 128 * 128,
        low_latency_mode=False,
        explicitly_destroy=True,
    )

    def dispatch(x: Tensor, idx: Tensor, weights: Tensor, num_experts: int) -> tuple[Any, ...]:
        layout, _ = layout_of(buffer, idx, num_experts)
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
            x=x,
            topk_idx=idx,
            topk_weights=weights,
            **layout,
            config=configs[0],
            **timing(),
        )
        assert getattr(event, "event", None) is not None
        event.current_stream_wait()
        return recv_x, recv_idx, recv_weights, counts, handle

    def combine(x: Tensor, handle: Any) -> Tensor:
        combined, _, event = buffer.combine(
            x=x,
            handle=handle,
            config=configs[1],
            **timing(),
        )
        event.current_stream_wait()
        return combined

    # Before training: token i to expert i, one expert per rank, weight 1.
    identity = torch.arange(rank.num_ranks, device=DEVICE).to(deep_ep.topk_idx_t)[:, None]
    x = torch.randn(rank.num_ranks, 64, device=DEVICE).bfloat16()
    ones = torch.ones(rank.num_ranks, 1, device=DEVICE)
    recv_x, _, _, _, handle = dispatch(x, identity, ones, rank.num_ranks)
    assert torch.equal(combine(recv_x, handle), x)

    problem = problem_of(rank)
    recv_x, idx, weights, counts, handle = dispatch(
        problem.x, problem.topk_idx, problem.weights, problem.num_experts
    )
    assert sum(counts) == int((idx >= 0).sum())
    assert isinstance(handle, tuple)
    assert len(handle) == (6 if rank.ranks_per_node == rank.num_ranks else 10)
    assert_weighted(combine(weigh_compact(recv_x, idx, weights), handle), problem)

    # A row per slot, marked with its origin and poisoned behind; results are wider than that.
    num_slots = problem.topk_idx.numel()
    payload = torch.full((num_slots, HIDDEN), torch.nan, device=DEVICE).bfloat16()
    number = torch.arange(num_slots, device=DEVICE)
    payload[:, 0], payload[:, 1] = rank.rank, number
    slot_weights = problem.weights.reshape(-1, 1)
    slots = problem.topk_idx.reshape(-1, 1)
    recv, recv_idx, recv_weights, _, slot_handle = dispatch(
        payload, slots, slot_weights, problem.num_experts
    )
    assert recv[:, 2:].isnan().all()
    order = recv[:, 0].long() * 1000 + recv[:, 1].long()
    assert (order.diff() > 0).all(), "rows are not in the order of their sources"
    if len(slot_handle) == 6:
        assert torch.equal(slot_handle[3].long(), recv[:, 1].long())
    wide = recv[:, :1].expand(-1, hidden).contiguous() * 2
    returned = combine(wide, slot_handle)
    assert returned.shape == (num_slots, hidden)
    assert torch.equal(returned.float(), (slots >= 0).float() * 2 * rank.rank * torch.ones(hidden))
    for begin in range(0, hidden, 3 * HIDDEN):  # in chunks of columns, both ways
        part = slice(begin, begin + 3 * HIDDEN)
        assert torch.equal(combine(wide[:, part].contiguous(), slot_handle), returned[:, part])
        again = buffer.dispatch(x=returned[:, part].contiguous(), handle=slot_handle)[0]
        assert torch.equal(again, wide[:, part] * (recv_idx >= 0).to(wide.dtype))
    buffer.destroy()


# --- Primus-Turbo ----------------------------------------------------------------------------------


def primus_turbo(rank: Rank) -> None:
    """Room for the worst case, so that nothing waits for counts."""
    assert "is_intranode" not in inspect.signature(deep_ep.Buffer).parameters
    deep_ep.Buffer.set_num_sms(32)
    configs = (
        deep_ep.Buffer.get_dispatch_config(rank.num_ranks),
        deep_ep.Buffer.get_combine_config(rank.num_ranks),
    )
    nvl, rdma = hints(*configs, hidden_bytes=HIDDEN * 2, num_ranks=rank.num_ranks)
    buffer = deep_ep.Buffer(rank.group, nvl, rdma)
    assert isinstance(buffer, deep_ep.Buffer)
    problem = problem_of(rank)
    num_worst_tokens = (9 + rank.num_ranks) * rank.num_ranks
    handles = {}
    for worst in (0, num_worst_tokens):
        layout, event = layout_of(buffer, problem.topk_idx, problem.num_experts, **timing())
        in_rank = layout["is_token_in_rank"]
        recv_x, idx, weights, counts, handle, event = buffer.dispatch(
            problem.x,
            topk_idx=problem.topk_idx,
            topk_weights=problem.weights,
            **layout,
            num_worst_tokens=worst,
            config=configs[0],
            **timing(behind=event),
        )
        event.current_stream_wait()
        handles[worst] = handle
        if worst:
            assert torch.tensor(counts).numel() == 0
            assert len(recv_x) == len(idx) == len(weights) == worst
        else:
            assert_counts(counts, idx)
            num_rows = len(recv_x)
        valid = (idx >= 0).any(1)
        assert int(valid.sum()) == int(valid[:num_rows].sum())
        y = torch.where(valid[:, None], weigh_compact(recv_x, idx, weights), torch.nan)
        combined, back, event = buffer.combine(
            y, handle=handle, topk_weights=weights.float(), config=configs[1]
        )
        assert event.event is None
        assert_weighted(combined, problem)
        assert torch.equal(back, problem.weights)
        # The gradient of combine, which nobody makes contiguous.
        grad = torch.ones((), dtype=torch.bfloat16, device=DEVICE).expand(problem.x.shape)
        grad_y = buffer.dispatch(grad, handle=handle, config=configs[0])[0]
        assert (grad_y[:num_rows] == 1).all()
        if not worst:
            grad = torch.ones((), dtype=torch.bfloat16, device=DEVICE).expand(recv_x.shape)
            returned = buffer.combine(grad, handle=handle, topk_weights=None, config=configs[1])[0]
            times = in_rank.sum(1, keepdim=True).float()
            assert torch.equal(returned.float(), times.expand(-1, HIDDEN))

    # What its reference test reads of a handle.
    handle = handles[0]
    one_node = len(handle) == 6
    prefix = handle[0][:, rank.rank] if one_node else handle[-4]
    assert prefix[-1].item() == num_rows
    assert torch.equal(handle[4] if one_node else handle[0], in_rank)
    # Without top-k the list of counts comes all the same.
    counts = buffer.dispatch(
        problem.x,
        **layout,
        config=configs[0],
    )[3]
    assert_counts(counts, idx)


# --- inference: lmdeploy, vLLM, SGLang -------------------------------------------------------------


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

    # All tokens to the first rank: the others get none, and combine nothing.
    problem = problems[0]
    only = torch.where(problem.topk_idx >= 0, problem.topk_idx % EXPERTS_PER_RANK, -1)
    layout, _ = layout_of(buffer, topk_idx=only, num_experts=problem.num_experts)
    recv_x, idx, weights, counts, handle, _ = buffer.dispatch(
        x=problem.x,
        **layout,
        topk_idx=only,
        topk_weights=problem.weights,
        config=config,
    )
    assert rank.rank == 0 or len(recv_x) == sum(counts) == 0
    y = weigh_compact(recv_x, idx, weights)
    assert_weighted(
        buffer.combine(x=y, handle=handle, topk_weights=None, config=config)[0], problem
    )
    buffer.destroy()
    del buffer


def sglang(rank: Rank) -> None:
    """One buffer for prefill and decoding, cleaned in between."""
    from deep_ep import Buffer, Config

    problem = problem_of(rank)
    config = Config(20, 6, 256)
    nvl, rdma = recommended_sizes(rank, 16)
    buffer = Buffer(
        rank.group,
        nvl,
        rdma,
        low_latency_mode=True,
        num_qps_per_rank=max(Buffer.num_sms, EXPERTS_PER_RANK),
        allow_mnnvl=False,
    )
    data, scales = reference.cast_fp8(problem.x)
    for asynchronous, chosen in ((False, None), (True, config), (True, None)):
        previous_event = Buffer.capture() if asynchronous else None
        layout, previous_event = layout_of(
            buffer,
            problem.topk_idx,
            problem.num_experts,
            previous_event=previous_event,
            async_finish=asynchronous,
            allocate_on_comm_stream=previous_event is not None,
        )
        (recv_x, recv_scales), idx, weights, counts, handle, event = buffer.dispatch(
            (data, scales),
            topk_idx=problem.topk_idx,
            topk_weights=problem.weights,
            **layout,
            previous_event=previous_event,
            async_finish=asynchronous,
            allocate_on_comm_stream=previous_event is not None and asynchronous,
            expert_alignment=128,
            config=chosen,
        )
        # What its recorder of experts reads.
        per_rank, per_node, per_expert, in_rank = layout.values()
        assert sum(per_expert.cpu().tolist()) == int((problem.topk_idx >= 0).sum())
        assert sum(per_rank.cpu().tolist()) == int(in_rank.sum())
        assert per_node is None or len(per_node.cpu().tolist()) > 1
        if asynchronous:
            event.current_stream_wait()
        used = torch.bincount(idx.flatten() + 1, minlength=EXPERTS_PER_RANK + 1)[1:].tolist()
        assert counts == [-(-count // 128) * 128 for count in used]
        y = weigh_compact(reference.dequantise(recv_x, recv_scales), idx, weights)
        previous_event = Buffer.capture() if asynchronous else None
        combined, _, event = buffer.combine(
            y,
            handle,
            async_finish=asynchronous,
            previous_event=previous_event,
            allocate_on_comm_stream=previous_event is not None,
            config=chosen,
        )
        if asynchronous:
            event.current_stream_wait()
        assert_weighted(combined, problem)
        if buffer.low_latency_mode:
            buffer.clean_low_latency_buffer(16, HIDDEN, problem.num_experts)
        low_latency(buffer, problem)


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program
    for program in (
        megatron_core,
        automodel,
        xorl,
        primus_turbo,
        lmdeploy,
        vllm_high_throughput,
        sglang,
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


def run_in_process(rank: int, group: dist.ProcessGroup) -> None:
    """All programs, one after the other, on one gloo group."""
    for program in PROGRAMS.values():
        program(Rank(rank, group.size(), group.size(), group))


@pytest.mark.exhaustive
def test_programs_run_in_processes_of_a_gloo_group() -> None:
    raise_failures(run_processes(run_in_process, 2))


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
