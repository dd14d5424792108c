"""Programs that use `ElasticBuffer`: their own files, unmodified, of checkouts that variables name.

The packages that they import are made up, as far as they are needed; without a checkout a test is skipped.
"""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import deep_ep
from support.client_programs import (
    EXPERTS_PER_RANK,
    HIDDEN,
    TOPK,
    Rank,
    assert_weighted,
    backward_and_check,
    imported,
    megatron_parents,
    on_nodes,
    own_file,
    problem_of,
    run_as_threads,
    train,
)
from support.launch import DEVICE, raise_failures, run_processes

Tensor = torch.Tensor

MAX_TOKENS = 16


@on_nodes
def test_deepspeed_s_own_file_runs(nodes: tuple[int, int]) -> None:
    path = own_file("CLIENT_DEEPSPEED", "deepspeed/module_inject/auto_ep_comm.py")
    utils = types.ModuleType("deepspeed.utils")
    utils.logger = logging.getLogger("deepspeed")  # type: ignore[attr-defined]
    own = imported(path, {"deepspeed": types.ModuleType("deepspeed"), "deepspeed.utils": utils})

    def program(rank: Rank) -> None:
        problem = problem_of(rank)
        exchange = own.DeepEPExchange(rank.group, problem.num_experts, TOPK, HIDDEN, MAX_TOKENS)
        x, weights = problem.x.clone().requires_grad_(), problem.weights.clone().requires_grad_()
        recv_x, recv_weights, _ = own.deepep_dispatch(exchange, x, problem.topk_idx, weights)
        y = recv_x * recv_weights[:, None].bfloat16()
        combined = own.deepep_combine(exchange, y, exchange.last_handle)
        assert_weighted(combined.detach(), problem)
        backward_and_check(combined, x, weights, problem)
        exchange.destroy()

    run_as_threads(program, *nodes)


@on_nodes
def test_megatron_core_s_own_file_runs(nodes: tuple[int, int]) -> None:
    """Of its branch `dev`. Each rank has a module of its own, which keeps the buffer."""
    path = own_file("CLIENT_MEGATRON_CORE_DEV", "megatron/core/transformer/moe/fused_a2a.py")
    modules = [imported(path, megatron_parents()) for _ in range(nodes[0])]
    num_tokens = 9

    def program(rank: Rank) -> None:
        own = modules[rank.rank]
        for asynchronous in (False, True):
            buffer = own.get_elastic_buffer(rank.group, num_tokens, HIDDEN, TOPK)
            assert buffer is own.get_elastic_buffer(rank.group, num_tokens, HIDDEN, TOPK)
            timing = asynchronous, asynchronous

            def dispatch(
                *routed: Any, buffer: Any = buffer, timing: Any = timing
            ) -> tuple[Any, ...]:
                recv_x, idx, probs, counts, handle = own.deepepv2_dispatch(
                    buffer, *routed, num_tokens, 1, 0, *timing
                )
                assert counts.tolist() == handle.num_recv_tokens_per_expert_list
                return recv_x, idx, probs, handle

            def combine(
                x: Tensor, handle: Any, buffer: Any = buffer, timing: Any = timing
            ) -> Tensor:
                combined: Tensor = own.deepepv2_combine(buffer, x, handle, 0, *timing)[0]
                return combined

            train(rank, dispatch, combine, num_tokens)

    run_as_threads(program, *nodes)


class MadeUp(types.ModuleType):
    """A module that has every name, and is a package: what a file imports and does not use here."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def made_up(names: str, **given: dict[str, Any]) -> dict[str, types.ModuleType]:
    """The modules of these names and all their parents, some with attributes by the last part of their name."""
    modules: dict[str, types.ModuleType] = {}
    for name in names.split():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), MadeUp(parts[end - 1]))
        vars(modules[name]).update(given.get(parts[-1], {}))
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    return modules


@on_nodes
def test_vllm_s_own_file_runs(nodes: tuple[int, int]) -> None:
    """Both of its modes, synchronous and not. Its Triton kernel is replaced by what it computes."""
    path = own_file(
        "CLIENT_VLLM", "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_v2.py"
    )
    moe = "vllm.model_executor.layers.fused_moe"

    class Counts(types.SimpleNamespace):
        @staticmethod
        def make_from_list(counts: list[int], device: Any) -> Counts:
            return Counts(expert_num_tokens=torch.tensor(counts, device=device))

    def reduce_rows(**given: Any) -> Tensor:
        return given["fused_expert_output"]

    context = types.SimpleNamespace(dp_metadata=None)
    parents = made_up(
        f"vllm.forward_context vllm.triton_utils vllm.utils.math_utils vllm.v1.worker.ubatching "
        f"{moe}.modular_kernel {moe}.config {moe}.topk_weight_and_reduce {moe}.utils "
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils",
        modular_kernel={
            "FusedMoEPrepareAndFinalizeModular": object,
            "ExpertTokensMetadata": Counts,
        },
        topk_weight_and_reduce={
            "TopKWeightAndReduceDelegate": type("Delegate", (), {}),
            "TopKWeightAndReduceContiguous": type("Contiguous", (), {}),
        },
        forward_context={"get_forward_context": lambda: context},
        math_utils={"cdiv": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b},
        ubatching={"dbo_current_ubatch_id": lambda: 0, "dbo_enabled": lambda: False},
    )
    own = imported(path, parents)

    def globalize(recv_topk_idx: Tensor, psum: Tensor, offset: int, num_experts: int) -> Tensor:
        is_row = torch.arange(len(recv_topk_idx), device=psum.device) < psum[-1]
        is_valid = (recv_topk_idx >= 0) & is_row[:, None]
        return torch.where(is_valid, recv_topk_idx + offset, -1)

    own._globalize_recv_topk_idx = globalize
    quantized = types.SimpleNamespace(is_block_quantized=False, quant_dtype=None, a1_scale=None)

    def program(rank: Rank) -> None:
        # It takes the tokens of the rank for the most of any, where there is no data parallelism.
        problem = problem_of(rank, num_tokens=8)
        buffer = deep_ep.ElasticBuffer(
            group=rank.group,
            num_max_tokens_per_rank=MAX_TOKENS,
            hidden=HIDDEN,
            num_topk=TOPK,
            allow_multiple_reduction=False,
            explicitly_destroy=True,
        )
        first = rank.rank * EXPERTS_PER_RANK
        for captures in (False, True):
            layer = own.DeepEPV2PrepareAndFinalize(
                *(buffer, rank.num_ranks, rank.num_ranks, first, problem.num_experts, TOPK),
                use_cudagraph=captures,
            )
            given = problem.x, problem.weights, problem.topk_idx, problem.num_experts
            x, _, _, topk_idx, weights = layer.prepare(
                *given, None, False, quantized, defer_input_quant=True
            )
            is_mine = (topk_idx >= first) & (topk_idx < first + EXPERTS_PER_RANK)
            rows = torch.where(is_mine, weights, 0).sum(1, keepdim=True).bfloat16()
            y = torch.where(rows > 0, x, 0) * rows
            for finalize in (layer.finalize, layer.finalize_async):
                output = torch.empty_like(problem.x)
                receive = finalize(
                    *(output, y, problem.weights, problem.topk_idx, False),
                    types.SimpleNamespace(apply=reduce_rows),
                )
                if receive is not None:
                    receive()
                assert_weighted(output, problem)
        buffer.destroy()

    run_as_threads(program, *nodes)


@on_nodes
def test_sglang_s_own_file_runs(nodes: tuple[int, int]) -> None:
    """Prefill with and without tokens, and decode, whose rows lie by expert."""
    path = own_file("CLIENT_SGLANG", "sglang/srt/layers/moe/token_dispatcher/deepep_v2.py")
    is_extend = [True]

    def setting(value: Any) -> Any:
        return types.SimpleNamespace(get=lambda: value)

    envs = types.SimpleNamespace(
        SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=setting(MAX_TOKENS),
        SGLANG_DEEPEP_V2_NUM_SMS=setting(0),
        SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=setting(False),
    )
    parallel = types.SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
    scales = types.SimpleNamespace(ue8m0=False, tma_aligned=False)

    def modules() -> Any:
        """Of one rank, since the buffer belongs to the process."""
        resources = types.SimpleNamespace(buffers={})
        mode = types.SimpleNamespace(moe=types.SimpleNamespace(deepep_v2_mode="hybrid"))
        moe = "sglang.srt.layers.moe"
        return imported(
            path,
            made_up(
                f"sglang.srt.environ sglang.srt.layers.dp_attention {moe}.token_dispatcher.base {moe}.topk "
                f"{moe}.utils sglang.srt.runtime_context sglang.kernels.ops.quantization.fp8_kernel",
                environ={"envs": envs},
                dp_attention={"get_is_extend_in_batch": lambda: is_extend[0]},
                base={
                    "BaseDispatcher": object,
                    "DispatchOutput": object,
                    "CombineInput": object,
                    "CombineInputFormat": types.SimpleNamespace(DEEPEP_V2="v2"),
                    "DispatchOutputFormat": types.SimpleNamespace(DEEPEP_V2="v2"),
                },
                utils={"get_deepep_v2_fp8_scale_format": lambda: scales},
                runtime_context={
                    "get_exec": lambda: mode,
                    "get_parallel": lambda: parallel,
                    "get_resources": lambda: resources,
                },
            ),
        )

    own_of = [modules() for _ in range(nodes[0])]

    def program(rank: Rank) -> None:
        own, problem = own_of[rank.rank], problem_of(rank)
        dispatcher = own.DeepEPv2Dispatcher(
            *(rank.group, TOPK, problem.num_experts, EXPERTS_PER_RANK, HIDDEN, torch.bfloat16),
            use_fp8_dispatch=False,
        )
        routed = types.SimpleNamespace(topk_weights=problem.weights, topk_ids=problem.topk_idx)
        came = dispatcher.dispatch(problem.x, routed)
        if came.is_expanded:
            assert came.total_expanded == len(came.hidden_states)
            weights = came.topk_weights[:, None]
        else:
            weights = came.topk_weights.masked_fill(came.topk_ids < 0, 0).sum(1, keepdim=True)
        y = torch.where(weights > 0, came.hidden_states, 0) * weights.bfloat16()
        combined = dispatcher.combine(own.DeepEPv2CombineInput(y, None))
        assert_weighted(combined, problem)

    for extends in (True, False):
        is_extend[0] = extends
        with mock.patch("torch.distributed.get_world_size", return_value=nodes[0]):
            run_as_threads(program, *nodes)
        for own in own_of:
            own.DeepEPv2Buffer.destroy()


def torchtitan_rank(rank: int, group: Any, path: Path) -> None:
    """One process, since the file keeps buffer and handles for all of it. Its operators are for CUDA only."""
    real = torch.library.impl

    def impl(library: Any, name: str, key: str) -> Any:
        return real(library, name, "CPU" if key == "CUDA" else key)

    with mock.patch("torch.library.impl", impl):
        own = imported(path, {})
    own.get_buffer(group, hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS, num_topk=TOPK)
    problem = problem_of(Rank(rank, group.size(), group.size(), group))
    x, weights = problem.x.clone().requires_grad_(), problem.weights.clone().requires_grad_()
    given = problem.topk_idx, weights, EXPERTS_PER_RANK, problem.num_experts
    routed, counts, state = own.dispatch_tokens(x, *given, num_tokens_per_rank=MAX_TOKENS)
    assert len(routed) == int(counts.sum())
    combined = own.combine_tokens(routed, state)
    own.sync_combine()
    assert_weighted(combined.detach(), problem)
    backward_and_check(combined, x, weights, problem)
    with torch.no_grad():
        routed, _, state = own.dispatch_tokens(
            problem.x, *given, num_tokens_per_rank=MAX_TOKENS, cudagraphable=True
        )
        combined = own.combine_tokens(routed, state)
        own.sync_combine()
    assert_weighted(combined, problem)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU for each process")
@pytest.mark.parametrize("ranks_per_node", [4, 2], ids=["one-node", "two-nodes"])
def test_torchtitan_s_own_file_runs(ranks_per_node: int) -> None:
    path = own_file("CLIENT_TORCHTITAN", "torchtitan/distributed/deepep/deepep.py")
    env = {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node)}
    raise_failures(run_processes(torchtitan_rank, 4, path, env=env))
