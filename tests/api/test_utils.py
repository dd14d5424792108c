"""`deep_ep.utils`: names that tests and benchmarks written for DeepEP import, and what they do."""

from __future__ import annotations

import importlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.errors import EPArgumentError
from deep_ep.group import thread_groups
from deep_ep.utils import envs, math, testing
from support.launch import DEVICE, Ranks, raise_failures, run_processes

# As public programs import them, none of them DeepEP's.
NAMES = {
    "envs": ("init_dist", "dist_print"),
    "math": (
        *("align", "calc_diff", "ceil_div", "count_bytes", "create_grouped_scores", "hash_tensor"),
        *("inplace_unique", "per_token_cast_back", "per_token_cast_to_fp8", "safe_div"),
    ),
    "testing": ("bench", "bench_kineto"),
}


@pytest.mark.parametrize("module", NAMES)
def test_names_in_public_use_are_there(module: str) -> None:
    found = importlib.import_module(f"deep_ep.utils.{module}")
    assert getattr(deep_ep.utils, module) is found
    for name in NAMES[module]:
        assert callable(getattr(found, name)), name


@pytest.mark.parametrize("hidden", [1, 128, 200, 512])
def test_rows_survive_fp8(hidden: int) -> None:
    x = torch.randn(5, hidden, dtype=torch.bfloat16)
    x[1] = 0
    data, scales = math.per_token_cast_to_fp8(x)
    assert (data.dtype, data.shape, data.is_contiguous()) == (torch.float8_e4m3fn, x.shape, True)
    assert (scales.dtype, scales.shape) == (torch.float32, (5, -(-hidden // 128)))
    assert scales[0, 0] == pytest.approx(float(x[0, :128].abs().max()) / 448)
    assert scales[1].tolist() == pytest.approx([1e-4 / 448] * scales.shape[1])
    assert data[0, :128].float().abs().max() == 448
    back = math.per_token_cast_back(data, scales)
    assert back.dtype == torch.bfloat16
    assert torch.allclose(back.float(), x.float(), rtol=0.07, atol=0.01)
    assert not back[1].any()
    assert math.per_token_cast_back(*math.per_token_cast_to_fp8(x[:0])).shape == (0, hidden)


def test_exponents_are_scales() -> None:
    data = torch.ones(3, 5 * 128).to(torch.float8_e4m3fn)
    exponents = torch.tensor([127, 128, 126, 130, 120, 0, 0, 0], dtype=torch.uint8)
    scales = exponents.view(torch.int32).expand(3, 2).t().contiguous().t()
    back = math.per_token_cast_back(data, scales)
    assert back[:, ::128].tolist() == [[1, 2, 0.5, 8, 2**-7]] * 3


def test_differences() -> None:
    x = torch.randn(100, 7)
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-12)
    y = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    assert math.calc_diff(*y) == pytest.approx(1 - 2 * (1 * 2 + 2 * 2) / (1 + 4 + 4 + 4))
    assert math.calc_diff(x[:0], x[:0]) == 0
    assert math.calc_diff(-torch.ones(4), -torch.ones(4)) == 0
    assert math.hash_tensor(x) == math.hash_tensor(x.flip(0)) != math.hash_tensor(x + 1)
    assert math.hash_tensor(torch.tensor([3, 4], dtype=torch.int32)) == 7


def test_numbers() -> None:
    assert [math.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [math.align(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert (math.safe_div(3, 2), math.safe_div(3, 0)) == (1.5, 0)
    half = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert math.count_bytes(half, None, (half, [half.float()])) == 30 + 30 + 60
    assert math.count_bytes(half.to_sparse(), half.t()) == 30 + 30


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0, 3, 3, -1], [3, 0, -1, -1]),
        ([-1, -1, -1, -1], [-1] * 4),
        ([3, 2, 1, 0], [3, 2, 1, 0]),
        ([0, 0, 0, 0], [0, -1, -1, -1]),
    ],
)
@pytest.mark.parametrize("num_slots", [4, 16])
def test_numbers_of_a_row_become_distinct(
    row: list[int], expected: list[int], num_slots: int
) -> None:
    x = torch.tensor([row, row])
    math.inplace_unique(x, num_slots)
    assert x.tolist() == [expected, expected]


def test_more_columns_than_slots() -> None:
    x = torch.tensor([[1, 0, 1, 0, -1]], dtype=torch.int32)
    math.inplace_unique(x, 2)
    assert x.tolist() == [[1, 0, -1, -1, -1]]


def test_scores_outside_of_groups_are_zero() -> None:
    scores = torch.arange(1.0, 13.0).view(2, 6)
    grouped = math.create_grouped_scores(scores, torch.tensor([[0, 2], [1, 1]]), 3)
    assert grouped.tolist() == [[1, 2, 0, 0, 5, 6], [0, 0, 9, 10, 0, 0]]


def test_calls_are_measured() -> None:
    calls: list[str] = []
    mean, least, most = testing.bench(
        lambda: calls.append("call"), 2, 4, post_fn=lambda: calls.append("after")
    )
    assert calls == ["call"] * 2 + ["call", "after"] * 4
    assert 0 <= least <= mean <= most
    assert testing.bench(lambda: None, 0, 1)[0] >= 0


def test_operations_are_measured_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_BACKEND", "cpu")  # whose operations have one name each

    def measure(rank: int, buffer: deep_ep.Buffer) -> dict[str, Any]:
        x, topk_idx = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)

        def exchange() -> None:
            got = buffer.low_latency_dispatch(x, topk_idx, 2, 2, use_fp8=False)
            for _ in range(2):
                buffer.low_latency_combine(got[0], topk_idx, torch.ones(2, 1), got[2])

        trace = str(tmp_path / "trace.json")
        one = testing.bench_kineto(exchange, "dispatch", 3, trace_path=trace)
        several = testing.bench_kineto(exchange, ("dispatch", "combine", "notify"), 3)
        periods = testing.bench_kineto(exchange, "combine", 3, num_kernels_per_period=2)
        with pytest.raises(EPArgumentError, match="low_latency_combine, .*low_latency_dispatch"):
            testing.bench_kineto(exchange, "low_latency", 1)
        return {"one": one, "several": several, "periods": periods}

    with Ranks(1, 2, 128, 2) as ranks:
        (measured,) = ranks.run(measure)
    assert measured["one"] > 0
    dispatch, combine, notify = measured["several"]
    assert min(dispatch, combine) > notify == 0
    assert [time > 0 for time in measured["periods"]] == [True, True]
    traced = [
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ]
    assert traced.count("deep_ep::low_latency_dispatch") == 3


def join(rank: int, group: Any) -> dict[str, Any]:
    """What a rank that a program starts has after `init_dist`."""
    torch.distributed.destroy_process_group()
    mine, num_ranks, made = envs.init_dist(rank % 2, 2, seed=5)
    assert torch.initial_seed() == 5 + mine
    envs.dist_print(f"rank {mine}", once_in_node=True)
    return {
        "rank": mine,
        "num_ranks": num_ranks,
        "group": torch.distributed.get_world_size(made),
        "dtype": torch.empty(1).dtype,
        "device": torch.empty(1).device.type,
    }


def test_ranks_join() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}
    found = raise_failures(run_processes(join, 2, env=environment))
    assert [one["rank"] for one in found] == [0, 1]
    for one in found:
        assert (one["num_ranks"], one["group"]) == (2, 2)
        assert (one["dtype"], one["device"]) == (torch.bfloat16, DEVICE)


def test_a_buffer_answers_what_programs_ask_its_runtime() -> None:
    made = deep_ep.Buffer(thread_groups(1)[0], num_nvl_bytes=128)
    assert made.nvshmem_qp_depth == 1024
    runtime = made.runtime
    assert runtime is not None
    assert runtime.is_available()
    assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (1, 0)
    assert (runtime.get_root_rdma_rank(False), runtime.get_local_device_id()) == (0, 0)
    assert runtime.get_comm_stream() is made.get_comm_stream()
    assert len(runtime.get_local_ipc_handle()) > 0
    assert runtime.get_local_buffer_tensor(torch.int8).numel() == 128
    for name in ("sync", "get_local_nvshmem_unique_id", "intranode_dispatch"):
        with pytest.raises(AttributeError, match=f"Buffer.runtime has no '{name}'.*call Buffer,"):
            getattr(runtime, name)
