"""Programs that use `ElasticBuffer`, each in our own words: the same calls, argument forms, dtypes and reads.

From construction to the end, on ranks that are threads, on one node and on two. Rows and weights are
small whole numbers, so that every result and every gradient has one right value. Where a checkout is
given, the program's own file runs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import deep_ep
from support import reference
from support.client_programs import (
    EXPERTS_PER_RANK,
    HIDDEN,
    TOPK,
    Rank,
    assert_counts,
    assert_weighted,
    on_nodes,
    problem_of,
    run_as_threads,
    train,
    weigh_compact,
)

Tensor = torch.Tensor

MAX_TOKENS = 16


# --- vLLM -----------------------------------------------------------------------------------------


def vllm(rank: Rank) -> None:
    """Forward only. Rows are compact without counts on the host, or expanded with them."""
    buffer = deep_ep.ElasticBuffer(
        group=rank.group,
        num_max_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        use_fp8_dispatch=True,
        allow_hybrid_mode=True,
        allow_multiple_reduction=False,
        prefer_overlap_with_compute=False,
        explicitly_destroy=True,
    )
    problem = problem_of(rank)
    num_sms = buffer.get_theoretical_num_sms(num_experts=problem.num_experts, num_topk=TOPK)
    assert num_sms > 0
    data, scales = reference.cast_fp8(problem.x)
    packed = scales.view(torch.int32)[:, : -(-HIDDEN // 512)]
    for is_eager in (True, False):
        for x, num_max_tokens in ((problem.x, 32), ((data, scales), None), ((data, packed), 32)):
            recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
                x=x,
                topk_idx=problem.topk_idx,
                topk_weights=problem.weights,
                num_experts=problem.num_experts,
                num_max_tokens_per_rank=num_max_tokens,
                do_expand=is_eager,
                do_cpu_sync=is_eager,
            )
            assert event.event is None
            rows = recv_x[0] if isinstance(x, tuple) else recv_x
            assert isinstance(handle, deep_ep.EPHandle)
            num_recv = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            if is_eager:
                counts = handle.num_recv_tokens_per_expert_list
                assert sum(counts) == len(rows)
                assert recv_idx is None
                y = back_to_bfloat16(recv_x, x is not problem.x and x[1] is scales)
                y = y * recv_weights[:, None].bfloat16()
            else:
                assert handle.num_recv_tokens_per_expert_list == []
                assert len(rows) == rank.num_ranks * (num_max_tokens or MAX_TOKENS)
                assert (recv_idx[int(num_recv) :] == -1).all()
                y = back_to_bfloat16(recv_x, x is not problem.x and x[1] is scales)
                y = weigh_compact(y, recv_idx, recv_weights)
            combined, nothing, event = buffer.combine(
                x=y,
                handle=handle,
                topk_weights=None,
                async_with_compute_stream=True,
                allocate_on_comm_stream=True,
            )
            if event.event is not None:
                event.current_stream_wait()
            assert nothing is None
            if x is problem.x or x[1] is scales:  # the packed ones are no scales of these rows
                assert_weighted(combined, problem)
    buffer.destroy()


def back_to_bfloat16(received: Any, has_scales: bool) -> Tensor:
    """What an expert reads."""
    if isinstance(received, Tensor):
        return received
    rows, scales = received
    return reference.dequantise(rows, scales) if has_scales else rows.bfloat16()


# --- SGLang ---------------------------------------------------------------------------------------


def sglang(rank: Rank) -> None:
    """Decoding expanded without counts on the host; prefill compact or expanded with them."""
    for allow_hybrid_mode in (False, True):
        buffer = deep_ep.ElasticBuffer(
            rank.group,
            num_max_tokens_per_rank=MAX_TOKENS,
            hidden=HIDDEN,
            num_topk=TOPK,
            use_fp8_dispatch=True,
            allow_hybrid_mode=allow_hybrid_mode,
            prefer_overlap_with_compute=False,
            sl_idx=0,
            explicitly_destroy=False,
        )
        assert buffer.num_bytes > 0
        problem = problem_of(rank)
        data, scales = reference.cast_fp8(problem.x)
        for do_expand, do_cpu_sync in ((True, False), (True, True), (False, True)):
            (rows, recv_scales), recv_idx, recv_weights, handle, _ = buffer.dispatch(
                (data, scales),
                topk_idx=problem.topk_idx,
                topk_weights=problem.weights,
                num_experts=problem.num_experts,
                num_max_tokens_per_rank=MAX_TOKENS,
                expert_alignment=128,
                num_sms=0,
                do_expand=do_expand,
                do_cpu_sync=do_cpu_sync,
                use_tma_aligned_col_major_sf=True,
            )
            if len(rows):
                assert recv_scales.stride() == (1, -(-len(rows) // 4) * 4)
            y = reference.dequantise(rows, recv_scales.contiguous())
            if do_expand:
                assert recv_weights.shape == (rows.shape[0],)
                y = scatter_into_slabs(y, handle) * recv_weights[:, None].bfloat16()
                returned = recv_weights if do_cpu_sync else None
            else:
                assert_counts(handle.num_recv_tokens_per_expert_list, recv_idx, alignment=128)
                assert handle.psum_num_recv_tokens_per_scaleup_rank[-1].item() == len(rows)
                y = weigh_compact(y, recv_idx, recv_weights)
                returned = None
            combined, back, _ = buffer.combine(y, handle, topk_weights=returned)
            assert_weighted(combined, problem)
            assert back is None or torch.equal(back, problem.weights)
        del buffer  # and with it, when nobody refers to it, its memory


def scatter_into_slabs(rows: Tensor, handle: Any) -> Tensor:
    """What a masked GEMM reads, [experts, most rows, hidden], and its result in the slots again."""
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    starts = [0, *(-(-end // 128) * 128 for end in ends[:-1])]
    most = max(1, *(end - start for start, end in zip(starts, ends)))
    slabs = rows.new_zeros(len(ends), most, rows.shape[1])
    result = torch.full_like(rows, torch.nan)
    for expert, (start, end) in enumerate(zip(starts, ends)):
        slabs[expert, : end - start] = rows[start:end]
        result[start:end] = slabs[expert, : end - start]
    return result


# --- torchtitan -----------------------------------------------------------------------------------


class Calls(NamedTuple):
    """How a trainer calls: what every call is given, a fresh dispatch, and one with a handle."""

    buffer: Any
    dispatch: dict[str, Any]
    again: dict[str, Any]
    timing: dict[str, Any]

    def __call__(self, name: str, *args: Any, **given: Any) -> list[Any]:
        """What a call returns without its event, which is waited for."""
        *returned, event = getattr(self.buffer, name)(*args, **given, **self.timing)
        if event.event is not None:
            event.current_stream_wait()
        return returned


class Dispatch(torch.autograd.Function):
    """Its backward is a combine."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, idx: Tensor, weights: Tensor, num_experts: int, calls: Calls
    ) -> Any:
        routed = {"topk_idx": idx, "topk_weights": weights, "num_experts": num_experts}
        *received, handle = calls("dispatch", x, **routed, **calls.dispatch)
        ctx.calls, ctx.handle = calls, handle
        return *received, handle

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, _: Any, grad_weights: Tensor, __: Any) -> Any:
        weights = grad_weights.float().contiguous()
        grad_x, grad_weights = ctx.calls(
            *("combine", grad_x.contiguous(), ctx.handle),
            topk_weights=weights,
            num_sms=ctx.handle.num_sms,
        )
        return grad_x, None, grad_weights, None, None


class Combine(torch.autograd.Function):
    """Its backward is a dispatch with the handle, which says nothing of the layout: the handle's is meant."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, calls: Calls, handle: Any) -> Tensor:
        ctx.calls, ctx.handle = calls, handle
        combined: Tensor = calls("combine", y, handle=handle, topk_weights=None)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = {"handle": ctx.handle, "num_sms": ctx.handle.num_sms, **ctx.calls.again}
        grad_y, _, nothing, _ = ctx.calls("dispatch", grad.contiguous(), **given)
        assert nothing is None
        return grad_y, None, None


def torchtitan(rank: Rank) -> None:
    """Trains on compact rows, and infers from expanded ones without counts on the host."""
    sizes = {
        "num_max_tokens_per_rank": MAX_TOKENS,
        "hidden": HIDDEN,
        "num_topk": TOPK,
        "use_fp8_dispatch": False,
    }
    of = deep_ep.ElasticBuffer
    num_bytes = of.get_buffer_size_hint(rank.group, **sizes)
    buffer = of(
        rank.group, num_bytes=num_bytes, **sizes, deterministic=True, explicitly_destroy=True
    )
    assert buffer.group == rank.group
    assert buffer.num_bytes >= num_bytes  # nothing is rebuilt
    assert buffer.num_max_tokens_per_rank >= MAX_TOKENS
    given = {
        "num_max_tokens_per_rank": buffer.num_max_tokens_per_rank,
        "num_sms": buffer.get_theoretical_num_sms(rank.num_ranks * EXPERTS_PER_RANK, TOPK),
        "do_expand": False,
        "do_cpu_sync": True,
    }
    calls = Calls(buffer, given, {"do_cpu_sync": False}, {"async_with_compute_stream": True})
    train(
        rank,
        lambda *routed: Dispatch.apply(*routed, calls),
        lambda y, handle: Combine.apply(y, calls, handle),
    )
    problem = problem_of(rank)
    expanding = calls._replace(dispatch={**given, "do_expand": True, "do_cpu_sync": False})
    with torch.inference_mode():
        routed = problem.x, problem.topk_idx, problem.weights, problem.num_experts
        recv_x, recv_idx, weights, handle = Dispatch.apply(*routed, expanding)
        assert recv_idx is None
        assert handle.num_recv_tokens_per_expert_list == []
        used = handle.psum_num_recv_tokens_per_expert[-1]  # without alignment nothing lies between
        y = recv_x * weights[:, None].bfloat16()
        y[int(used) :] = torch.nan
        assert_weighted(Combine.apply(y, calls, handle), problem)
    buffer.destroy()


PROGRAMS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program for program in (vllm, sglang, torchtitan)
}


# --- the tests ------------------------------------------------------------------------------------


@on_nodes
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_s_calls_do_what_it_expects(program: str, nodes: tuple[int, int]) -> None:
    run_as_threads(PROGRAMS[program], *nodes)
