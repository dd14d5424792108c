"""Which backend is chosen, and what is said where there is a GPU that cannot be used; torch and the modules
are stand-ins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deep_ep import EPNotBuiltError
from deep_ep.errors import EPArgumentError, EPUsageError
from deep_ep.native import backend, host_memory, nvshmem
from deep_ep.types.event import EventHandle

TOO_OLD = (
    "cudaGetDeviceCount failed: CUDA driver version is insufficient for CUDA runtime version "
    "(cudaErrorInsufficientDriver)"
)


class Machine:
    """What torch and `deep_ep._cuda` find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.binding: Any = ModuleType("deep_ep._cuda")
        self.binding.MAX_WARPS = 8
        self.built = {"deep_ep._cpu", "deep_ep._cuda"}
        monkeypatch.delenv("DEEP_EP_BACKEND", raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in self.built or None)
        monkeypatch.setitem(sys.modules, "deep_ep._cuda", self.binding)
        monkeypatch.setattr(backend.glob, "glob", lambda pattern: [])
        self.gpus(torch_sees=1, module_finds=1)
        backend._select.cache_clear()

    def gpus(self, torch_sees: int, module_finds: int | Exception) -> None:
        """Sets both counts; the module may raise instead."""

        def device_count() -> int:
            if isinstance(module_finds, Exception):
                raise module_finds
            return module_finds

        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees > 0)
        self.binding.device_count = device_count


class Stream:
    """A stream that writes down what is queued on it."""

    def __init__(self, queued: list[tuple[str, Any, Any]]) -> None:
        self.queued = queued

    def record_event(self, event: Any) -> Any:
        self.queued.append(("record", self, event))
        return event

    def wait_event(self, event: Any) -> None:
        self.queued.append(("wait", self, event))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Machine(monkeypatch)
    backend._select.cache_clear()


def refusal() -> str:
    with pytest.raises(EPNotBuiltError) as raised:
        backend.get()
    return str(raised.value)


@pytest.mark.parametrize(("num_gpus", "name"), [(1, "cuda"), (0, "cpu")])
def test_a_gpu_that_both_find_is_used_and_else_the_cpu(
    machine: Machine, num_gpus: int, name: str
) -> None:
    machine.gpus(torch_sees=num_gpus, module_finds=num_gpus)
    assert backend.get().name == name


def test_the_cpu_is_used_where_torch_is_a_build_without_cuda(machine: Machine) -> None:
    machine.monkeypatch.setattr(torch.version, "cuda", None)
    assert backend.get().name == "cpu"
    machine.monkeypatch.setenv("DEEP_EP_BACKEND", "cuda")
    assert "this torch is a build without CUDA" in refusal()


@pytest.mark.parametrize(
    ("torch_sees", "module_finds", "words"),
    [
        (0, RuntimeError(TOO_OLD), TOO_OLD),
        (1, RuntimeError(TOO_OLD), TOO_OLD),
        (1, 0, "finds 0 GPU(s), torch some"),
        (0, 8, "finds 8 GPU(s), torch none"),
    ],
    ids=["error-unseen", "error-seen", "torch-alone", "module-alone"],
)
def test_a_gpu_that_cannot_be_used_is_an_error_and_not_taken_for_none(
    machine: Machine, torch_sees: int, module_finds: int | Exception, words: str
) -> None:
    machine.gpus(torch_sees, module_finds)
    said = refusal()
    assert words in said
    assert "DEEP_EP_BACKEND=cpu" in said


@pytest.mark.parametrize("is_built", [False, True])
def test_a_module_that_does_not_load_is_an_error_where_there_is_a_gpu(
    machine: Machine, is_built: bool
) -> None:
    machine.monkeypatch.setitem(sys.modules, "deep_ep._cuda", None)
    if not is_built:
        machine.built.remove("deep_ep._cuda")
    assert f"deep_ep._cuda {'does not load' if is_built else 'was not built'}" in refusal()
    machine.gpus(torch_sees=0, module_finds=0)
    assert backend.get().name == "cpu"


def test_a_device_that_may_not_be_opened_is_named(machine: Machine) -> None:
    machine.gpus(torch_sees=0, module_finds=0)
    files = ["/dev/nvidia0", "/dev/nvidia1"]
    machine.monkeypatch.setattr(backend.glob, "glob", lambda pattern: files)
    machine.monkeypatch.setattr(backend.os, "access", lambda path, mode: path != "/dev/nvidia1")
    assert "this process may not open /dev/nvidia1; give it the permission" in refusal()


@pytest.mark.parametrize("torch_sees", [0, 1])
def test_the_cpu_is_used_where_it_is_asked_for(machine: Machine, torch_sees: int) -> None:
    machine.gpus(torch_sees, RuntimeError(TOO_OLD))
    machine.monkeypatch.setenv("DEEP_EP_BACKEND", "cpu")
    assert backend.get().name == "cpu"


@pytest.mark.parametrize("found", [0, RuntimeError(TOO_OLD)], ids=["no-gpu", "error"])
def test_cuda_asked_for_is_never_the_cpu(machine: Machine, found: int | Exception) -> None:
    machine.gpus(0, found)
    machine.monkeypatch.setenv("DEEP_EP_BACKEND", "cuda")
    said = refusal()
    assert "DEEP_EP_BACKEND=cuda cannot be used" in said
    assert str(found or "CUDA finds no GPU") in said


# ---- NVSHMEM


class Runtime:
    """Writes down what it is made with and told."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def set_launch_shape(self, *, blocks: int, warps: int) -> None:
        self.shape = (blocks, warps)

    def set_schedule(self, *, policy: str, seed: int) -> None:
        self.schedule = (policy, seed)

    def set_delivery(self, *, policy: str, seed: int) -> None:
        self.delivery = (policy, seed)


def create(machine: Machine, **changed: Any) -> Any:
    arguments = {"spans_hosts": True, "allow_nvlink": True, "allow_mnnvl": False, **changed}
    machine.binding.Runtime = Runtime
    return backend.get().create_runtime(**{"needs_rdma": True, **arguments})


def test_an_nvshmem_that_does_not_serve_is_refused_before_the_module_is_loaded(
    machine: Machine,
) -> None:
    machine.binding.NVSHMEM_VERSION = "3.8.0"
    machine.binding.NVSHMEM_LIBRARY = "/ours/libnvshmem_host.so.3"
    machine.binding.CUDA_MAJOR = 13
    machine.built.add("deep_ep._cuda_nvshmem")
    machine.monkeypatch.setitem(sys.modules, "deep_ep._cuda_nvshmem", None)  # would not load
    found = nvshmem.HostLibrary("3.4.5", "/torch/libnvshmem_host.so.3")
    machine.monkeypatch.setattr(nvshmem, "in_process", lambda: found)
    with pytest.raises(EPNotBuiltError) as raised:
        create(machine)
    assert "NVSHMEM 3.4.5 (/torch/libnvshmem_host.so.3)" in str(raised.value)
    assert "does not load" not in str(raised.value)


def test_ranks_that_nvlink_reaches_do_not_look_for_nvshmem(machine: Machine) -> None:
    machine.monkeypatch.setattr(nvshmem, "in_process", lambda: pytest.fail("looked"))
    assert create(machine, needs_rdma=False).options["allow_nvlink"] is True


def test_the_launch_shape_that_errors_advise_is_read_on_the_gpu(machine: Machine) -> None:
    machine.monkeypatch.setenv("DEEP_EP_LAUNCH_SHAPE", "64x8")
    assert create(machine, needs_rdma=False).shape == (64, 8)
    machine.monkeypatch.setenv("DEEP_EP_LAUNCH_SHAPE", "64x9")
    with pytest.raises(ValueError, match="at most 8 warps per block"):
        create(machine, needs_rdma=False)


@pytest.mark.parametrize(
    ("option", "usual", "variable"),
    [("bulk_copies", True, "BULK_COPIES"), ("clock_interval_ns", 20_000_000_000, "CLOCK_INTERVAL_S")],
)  # fmt: skip
def test_on_the_gpu_rows_are_copied_in_bulk_and_clocks_are_measured_unless_that_is_switched_off(
    machine: Machine, option: str, usual: int, variable: str
) -> None:
    assert create(machine, needs_rdma=False).options[option] == usual
    machine.monkeypatch.setenv(f"DEEP_EP_{variable}", "0")
    assert create(machine, needs_rdma=False).options[option] == 0


def test_the_cpu_moves_rows_without_bulk_copies_and_measures_no_clocks_unless_asked_to(
    machine: Machine,
) -> None:
    machine.monkeypatch.setenv("DEEP_EP_BACKEND", "cpu")
    machine.monkeypatch.setattr(backend.get().binding, "Runtime", Runtime)
    machine.monkeypatch.setenv("DEEP_EP_SCHEDULE", "random:7")
    made = create(machine)
    assert (made.options["bulk_copies"], made.options["clock_interval_ns"]) == (False, 0)
    assert made.options["clock"] == "rank"
    assert (made.schedule, made.delivery) == (("random", 7), ("in-order", 0))


def test_an_order_that_is_none_is_refused_before_a_runtime_is_made(machine: Machine) -> None:
    machine.monkeypatch.setenv("DEEP_EP_BACKEND", "cpu")
    machine.monkeypatch.setattr(
        backend.get().binding, "Runtime", lambda **options: pytest.fail("made")
    )
    machine.monkeypatch.setenv("DEEP_EP_SCHEDULE", "random:x")
    with pytest.raises(EPArgumentError, match="DEEP_EP_SCHEDULE is 'random:x'"):
        create(machine)


def test_on_the_cpu_events_and_waits_ask_nothing_of_a_stream(machine: Machine) -> None:
    """A `torch.Stream` of the CPU refuses to record events."""
    machine.monkeypatch.setenv("DEEP_EP_BACKEND", "cpu")
    stream = object()
    event = EventHandle(stream)
    event.stream_wait(stream)
    event.current_stream_wait()
    backend.get().wait_stream(stream, object())
    assert isinstance(backend.get().record_event(stream), backend.CpuEvent)


def with_nvshmem(machine: Machine) -> Any:
    """The module with NVSHMEM, whose runtimes can be told from the other's."""
    module: Any = ModuleType("deep_ep._cuda_nvshmem")
    module.Runtime = type("RuntimeWithNvshmem", (Runtime,), {})
    machine.built.add("deep_ep._cuda_nvshmem")
    machine.monkeypatch.setitem(sys.modules, "deep_ep._cuda_nvshmem", module)
    return module


def test_nvlink_between_hosts_goes_through_nvshmem(machine: Machine) -> None:
    module = with_nvshmem(machine)
    made = create(machine, needs_rdma=False, allow_mnnvl=True)
    assert isinstance(made, module.Runtime)
    assert made.options["allow_mnnvl"] is True
    made = create(machine, needs_rdma=False, spans_hosts=False, allow_mnnvl=True)
    assert not isinstance(made, module.Runtime)


def test_nvlink_between_hosts_without_nvshmem_is_refused(machine: Machine) -> None:
    with pytest.raises(EPNotBuiltError, match="allow_mnnvl is True, which takes NVSHMEM, but"):
        create(machine, needs_rdma=False, allow_mnnvl=True)


def test_nvlink_between_hosts_and_none_at_all_exclude_each_other(machine: Machine) -> None:
    with pytest.raises(EPUsageError, match="allow_nvlink_for_low_latency_mode=True"):
        create(machine, allow_nvlink=False, allow_mnnvl=True)


def test_only_kernels_that_call_nvshmem_may_hang_in_it(machine: Machine) -> None:
    with_nvshmem(machine)
    cuda = backend.get()
    assert cuda.may_hang(create(machine))
    assert not cuda.may_hang(create(machine, needs_rdma=False))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_is_available_is_what_kernel_and_container_leave(tmp_path: Path, version: str) -> None:
    meminfo, groups = tmp_path / "meminfo", tmp_path / "groups"
    assert host_memory.available_bytes(meminfo, groups) is None
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    assert host_memory.available_bytes(meminfo, groups) == 5000 << 10
    (groups / "memory").mkdir(parents=True)
    names, prefix = {
        "v1": (("limit_in_bytes", "usage_in_bytes", "stat"), "total_"),
        "v2": (("max", "current", "stat"), ""),
    }[version]
    folder = groups / "memory" if version == "v1" else groups
    files = [folder / f"memory.{name}" for name in names]
    for file, text in zip(files, ("900", "800", f"anon 700\n{prefix}inactive_file 50\n")):
        file.write_text(text)
    assert host_memory.available_bytes(meminfo, groups) == 150
    files[0].write_text("max")
    assert host_memory.available_bytes(meminfo, groups) == 5000 << 10


def test_streams_wait_through_the_event_that_is_kept_and_never_for_themselves(machine: Any) -> None:
    cuda = backend.CudaBackend(machine.binding)
    queued: list[tuple[str, Any, Any]] = []
    mine, theirs, event = Stream(queued), Stream(queued), object()
    cuda.wait_stream(mine, mine, event)  # type: ignore[arg-type]
    assert queued == []
    cuda.wait_stream(mine, theirs, event)  # type: ignore[arg-type]
    assert queued == [("record", theirs, event), ("wait", mine, event)]
