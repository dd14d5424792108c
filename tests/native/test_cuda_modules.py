"""The CUDA modules on a machine without a GPU: they load beside each other and say what is missing.

What their kernels do is not tested here: the host target runs the same source.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

MODULES = ("deep_ep._cuda", "deep_ep._cuda_nvshmem")


def load(name: str) -> ModuleType:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not built; setup.py says why")
    return importlib.import_module(name)


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


@pytest.fixture
def module_without_gpu(module: ModuleType) -> ModuleType:
    if module.device_count() > 0:
        pytest.skip("this machine has a GPU")
    return module


def options(**changed: int) -> dict[str, int]:
    defaults = {
        "rank": 0,
        "num_ranks": 1,
        "num_nvl_bytes": 0,
        "num_rdma_bytes": 128,
        "low_latency_mode": True,
        "num_qps_per_rank": 1,
        "timeout_ns": 1,
        "ranks_per_node": 1,
        "device_index": 0,
    }
    return {**defaults, **changed}


def test_a_module_offers_what_the_cpu_module_offers(module: ModuleType) -> None:
    cpu = importlib.import_module("deep_ep._cpu")
    for name in ("COUNTER_FIELDS", "OWN_FIELDS", "RING_SOURCE_FIELDS", "RING_OWN_FIELDS"):
        assert getattr(module, name) == getattr(cpu, name)
    public = {name for name in dir(cpu.Runtime) if not name.startswith("_")}
    assert public <= set(dir(module.Runtime))


def test_a_buffer_needs_as_many_bytes_as_on_the_cpu(module: ModuleType) -> None:
    cpu = importlib.import_module("deep_ep._cpu")
    size = {
        "num_max_dispatch_tokens_per_rank": 128,
        "num_ranks": 8,
        "hidden": 7168,
        "num_experts": 288,
    }
    assert module.low_latency_rdma_size_hint(**size) == cpu.low_latency_rdma_size_hint(**size)


def test_a_runtime_without_a_gpu_says_so(module_without_gpu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"GPU 0 was asked for; this process can use 0"):
        module_without_gpu.Runtime(**options())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_loads_in_a_fresh_process_and_starts_no_driver(name: str) -> None:
    load(name)
    code = f"import sys, {name}; sys.exit('libcuda.so' in open('/proc/self/maps').read())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
