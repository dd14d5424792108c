"""A rank of the cuda backend without a GPU: deep_ep._cuda as g++ compiles it against the stand-in driver of
tests/cuda, which launches nothing, and tensors without memory.

So a call does all that it does on the host, and no kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pybind11
import torch

import deep_ep
from deep_ep.base.topology import Topology
from deep_ep.checks.arguments import Limits
from deep_ep.membership.liveness import Liveness
from deep_ep.native.backend import CudaBackend
from deep_ep.native.runtime import Runtime
from deep_ep.ops.communicator import Communicator
from deep_ep.ops.low_latency import LowLatency

ROOT = Path(__file__).resolve().parent.parent
CSRC, DRIVER = ROOT / "csrc", ROOT / "tests" / "cuda"
FOLDER = ROOT / "build" / "stand_in_gpu"


def ninja_text() -> str:
    """The module, which is one source for nvcc as well, and what the stand-in takes the place of CUDA with."""
    includes = [DRIVER / "include", CSRC, DRIVER]
    system = [pybind11.get_include(), sysconfig.get_path("include")]
    compiler = os.environ.get("CXX", "g++")
    lines = [
        "rule compile",
        f"  command = {compiler} -x c++ -std=c++20 -O2 -fPIC -pthread -Wall -Wextra -Wno-psabi "
        "-fvisibility=hidden -DEP_CUDA_HOST_HALF=1 -DEP_FORGETFUL_DRIVER=1 -DEP_MODULE_NAME=_cuda "
        f"{' '.join(f'-I{path}' for path in includes)} "
        f"{' '.join(f'-isystem {path}' for path in system)} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler} -shared -pthread $in -o $out",
    ]
    sources = [
        CSRC / "cuda_module.cu",
        DRIVER / "driver.cpp",
        *sorted((CSRC / "device/host").glob("*.cpp")),
    ]
    lines += [f"build {source.name}.o: compile {source}" for source in sources]
    objects = " ".join(f"{source.name}.o" for source in sources)
    return "\n".join([*lines, f"build _cuda.so: link {objects}"]) + "\n"


@functools.cache
def binding() -> Any:
    """The module, compiled where its sources have changed: half a minute the first time."""
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if ninja is None:
        raise SystemExit("ninja not found. Install it: pip install ninja.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "build.ninja").write_text(ninja_text(), encoding="utf-8")
    subprocess.run([ninja, "-C", str(FOLDER), "--quiet"], check=True)
    spec = importlib.util.spec_from_file_location("_cuda", FOLDER / "_cuda.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Stream:
    """The driver's default stream, with what the backend asks of torch's."""

    cuda_stream = 0

    def record_event(self, event: object = None) -> object:
        """The event, which says nothing."""
        return event

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""


class Backend(CudaBackend):
    """Tensors of the device "meta" have shapes and no memory; as on a GPU, nobody looks into them."""

    def __init__(self) -> None:
        super().__init__(binding())
        self._current = Stream()

    def device(self) -> torch.device:
        return torch.device("meta")

    def current_stream(self) -> Any:
        return self._current

    def new_event(self) -> Any:
        return object()

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        yield


def buffer(num_ranks: int, num_experts: int, num_tokens: int, hidden: int) -> deep_ep.Buffer:
    """The buffer of rank 0 of a group whose other ranks do not exist."""
    backend = Backend()
    num_rdma_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_tokens, hidden, num_ranks, num_experts
    )
    native = backend.create_runtime(
        needs_rdma=False,
        spans_hosts=False,
        allow_nvlink=True,
        allow_mnnvl=False,
        rank=0,
        num_ranks=num_ranks,
        num_nvl_bytes=0,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=num_experts // num_ranks,
        timeout_ns=10**9,
        verify=False,
        ranks_per_node=num_ranks,
        device_index=0,
    )
    native.connect([native.local_handle()] * num_ranks)
    runtime = Runtime(native, backend, Topology(0, num_ranks, num_ranks), Stream())
    group: Any = SimpleNamespace(rank=0, size=num_ranks)
    limits = Limits(num_ranks, num_rdma_bytes, backend.device(), backend.binding)
    made = object.__new__(deep_ep.Buffer)  # its constructor connects ranks
    made.explicitly_destroy = False
    made.num_nvl_bytes = 0
    liveness = Liveness(0, native)
    made.communicator = Communicator(
        group, backend, runtime, limits, [], liveness=liveness, claims=None, may_mask=False
    )
    made._low_latency = LowLatency(made.communicator, made, True)
    return made
