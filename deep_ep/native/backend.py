"""The two backends behind one face: the native module, and what streams and events are with it.

`Buffer` never asks which backend it has. On `cpu` an operation runs to its end inside the call, so
streams and events are objects that are always ready; on `cuda` they are torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import importlib
import importlib.util
import math
import os
import types
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from deep_ep.base import env
from deep_ep.base.rules import fail
from deep_ep.errors import EPNotBuiltError, EPUsageError
from deep_ep.native import host_memory, nvshmem

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime


# Outputs of at least this size come from the pool of the cpu backend; smaller ones the C library
# keeps mapped by itself.
_POOLED_BYTES = 1 << 20
# Of a block, as on a GPU.
_HOST_WARPS = 32
# Of a launch: grids are limited by what is resident, which the launch checks.
_GPU_THREADS = 1 << 31
# torch hands its streams out in turn, so that many different ones, of each priority.
_POOLED_STREAMS = 32


# A native module: `_cpu.pyi` has what they all offer.
Binding = types.ModuleType


class Backend(ABC):
    """Streams, events and memory of one target. A stream is an opaque object that can be stored.

    Attributes:
        name: of the backend.
        binding: its native module.
        runs_in_streams: whether an operation is queued on a stream, behind what is there.
    """

    name: str
    runs_in_streams: bool
    _default_clock_interval_s: float
    _copies_in_bulk: bool  # unless DEEP_EP_BULK_COPIES says otherwise
    _launch_limits: tuple[int, int]  # warps of a block, threads of a launch

    def __init__(self, binding: Binding) -> None:
        self.binding = binding

    def create_runtime(
        self,
        needs_rdma: bool,
        spans_hosts: bool,
        allow_nvlink: bool,
        allow_mnnvl: bool,
        **options: Any,
    ) -> Runtime:
        """The native runtime of one buffer.

        Args:
            needs_rdma: whether some ranks are out of reach of NVLink.
            spans_hosts: whether the ranks are on several hosts.
            allow_nvlink: whether the others may use it.
            allow_mnnvl: whether NVLink may reach beyond the host.
            options: the other arguments of the native constructor.

        Raises:
            EPNotBuiltError: ranks are out of reach, and the module for that is not built.
            EPUsageError: NVLink is to reach beyond the host, but must not be used at all.
        """
        blocks, warps = env.launch_shape(*self._launch_limits)
        binding = self._binding_for(needs_rdma, spans_hosts and allow_mnnvl, allow_nvlink)
        interval_s, in_bulk = env.clock_interval_s(), env.bulk_copies()
        runtime: Runtime = binding.Runtime(
            allow_nvlink=allow_nvlink,
            allow_mnnvl=allow_mnnvl,
            clock_interval_ns=round(
                (self._default_clock_interval_s if interval_s is None else interval_s) * 1e9
            ),
            bulk_copies=self._copies_in_bulk if in_bulk is None else in_bulk,
            **options,
        )
        runtime.set_launch_shape(blocks=blocks, warps=warps)
        return runtime

    def _binding_for(self, needs_rdma: bool, beyond_host: bool, allow_nvlink: bool) -> Binding:
        """The module whose runtime can do that."""
        return self.binding

    def may_hang(self, runtime: Runtime) -> bool:
        """Whether its kernels may wait within a library that knows no deadline."""
        return False

    @abstractmethod
    def device(self) -> torch.device:
        """The device on which the caller's tensors must be."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream the caller works on."""

    @abstractmethod
    def create_comm_stream(self, others: Collection[int] = ()) -> Any:
        """A stream of high priority for one buffer, none of those with these native handles."""

    def stream_handle(self, stream: Any) -> int:
        """The native handle of a stream."""
        return int(stream.cuda_stream)

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Makes a stream the current one within a `with` block."""
        return contextlib.nullcontext()

    @abstractmethod
    def new_event(self) -> Any:
        """An event that nothing has recorded yet."""

    @abstractmethod
    def wait_stream(self, waiting: Any, waited_for: Any, event: Any = None) -> None:
        """Orders what follows on `waiting` after what is queued on `waited_for`.

        Args:
            waiting: a stream.
            waited_for: another one.
            event: is recorded on the way, and may be used again at once, by one thread at a time; a new
                one unless given.
        """

    @abstractmethod
    def record_event(self, stream: Any) -> Any:
        """An event after what is queued on `stream`."""

    @abstractmethod
    def wait_event(self, stream: Any, event: Any) -> None:
        """Orders what follows on `stream` after `event`."""

    @abstractmethod
    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the memory of `tensor` from being reused before `stream` is done with it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything queued on the device."""

    @abstractmethod
    def push_range(self, name: str) -> None:
        """Begins an NVTX range of this thread, within those that have begun."""

    @abstractmethod
    def pop_range(self) -> None:
        """Ends the one that has begun last."""

    def empty(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        stride: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Uninitialised output tensor on the current stream.

        Args:
            size: of each dimension.
            dtype: of the elements.
            device: `device()`, which it takes time to find.
            stride: a permutation of the contiguous ones, which it has unless given.
        """
        if stride is None:
            return torch.empty(size, dtype=dtype, device=device)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    @abstractmethod
    def available_bytes(self) -> int | None:
        """Memory for tensors that can still be had; `None` if that is not known."""

    @abstractmethod
    def tensor_at(self, pointer: int, num_bytes: int, owner: object) -> torch.Tensor:
        """`[num_bytes]` uint8 over memory of `owner`, which it keeps alive."""


class CpuStream:
    """The stream of the cpu backend: whatever is queued on it is already done."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def wait_stream(self, stream: object) -> None:
        """Returns at once."""

    def wait_event(self, event: object) -> None:
        """Returns at once."""

    def record_event(self, event: object = None) -> object:
        """An event that has happened."""
        return event if event is not None else CpuEvent()

    def __repr__(self) -> str:
        return "<deep_ep cpu stream>"


class CpuEvent:
    """An event of the cpu backend: it has happened."""

    def query(self) -> bool:
        """True: it has happened."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


class CpuBackend(Backend):
    """Backend `cpu`: the kernels on the host target."""

    name = "cpu"
    runs_in_streams = False
    # All ranks of one machine read one clock, unless a fault bends it.
    _default_clock_interval_s = 0.0
    # A processor copies twice instead of once with them.
    _copies_in_bulk = False

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self._current = CpuStream()
        self._launch_limits = _HOST_WARPS, binding.MAX_HOST_THREADS
        self._pool = binding.HostPool()

    def create_runtime(self, *reach: Any, **options: Any) -> Runtime:
        schedule, delivery = env.schedule(), env.delivery()
        runtime = super().create_runtime(*reach, clock=env.cpu_clock(), **options)
        runtime.set_schedule(policy=schedule[0], seed=schedule[1])
        runtime.set_delivery(policy=delivery[0], seed=delivery[1])
        return runtime

    def device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self) -> CpuStream:
        return self._current

    def create_comm_stream(self, others: Collection[int] = ()) -> CpuStream:
        return CpuStream()

    def new_event(self) -> CpuEvent:
        return CpuEvent()

    def empty(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        stride: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        num_bytes = math.prod(size) * dtype.itemsize
        if num_bytes < _POOLED_BYTES:
            return super().empty(size, dtype, device, stride)
        block = self._pool.take(num_bytes)
        pooled = torch.frombuffer(block, dtype=torch.uint8, count=num_bytes).view(dtype)
        return pooled.view(size) if stride is None else pooled.as_strided(size, stride)

    def record_event(self, stream: Any) -> CpuEvent:
        return CpuEvent()

    def _nothing(self, *given: Any, **named: Any) -> None:
        """Operations end within calls. So a stream may be any object, such as a `torch.Stream` of another device."""

    wait_stream = wait_event = record_use = _nothing
    synchronize = push_range = pop_range = _nothing

    def available_bytes(self) -> int | None:
        return host_memory.available_bytes()

    def tensor_at(self, pointer: int, num_bytes: int, owner: object) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # torch keeps the ctypes array alive, and the array its owner.
        array = (ctypes.c_uint8 * num_bytes).from_address(pointer)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)


class CudaBackend(Backend):
    """Backend `cuda`: the kernels on the GPU that is current in torch."""

    name = "cuda"
    runs_in_streams = True
    # GPU timers drift apart by up to 40 us per second; csrc/kernels/protocol/clocks.cuh says what is done then.
    _default_clock_interval_s = 20.0
    # They save instructions.
    _copies_in_bulk = True

    def __init__(self, binding: Any) -> None:
        super().__init__(binding)
        self._launch_limits = binding.MAX_WARPS, _GPU_THREADS

    def _binding_for(self, needs_rdma: bool, beyond_host: bool, allow_nvlink: bool) -> Binding:
        if beyond_host and not allow_nvlink:
            fail("Buffer", "allow_mnnvl is True", "mnnvl_without_nvlink", EPUsageError)
        # Ranks that NVLink reaches within the host never load NVSHMEM, unless it is to be kept from using
        # NVLink. Between hosts it maps their memory.
        is_needed = needs_rdma or beyond_host
        if allow_nvlink and not is_needed:
            return self.binding
        try:
            return _load_with_nvshmem()
        except _UnusableError as obstacle:
            if not is_needed:
                return self.binding
            what = "some ranks are out of NVLink's reach" if needs_rdma else "allow_mnnvl is True"
            raise EPNotBuiltError(
                f"backend: {what}, which takes NVSHMEM, but {obstacle}."
            ) from None

    def may_hang(self, runtime: Runtime) -> bool:
        return type(runtime) is not self.binding.Runtime  # of the module with NVSHMEM

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def create_comm_stream(self, others: Collection[int] = ()) -> torch.cuda.Stream:
        for _ in range(_POOLED_STREAMS):
            stream: torch.cuda.Stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in others:
                break
        return stream

    def use_stream(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait_stream(
        self,
        waiting: torch.cuda.Stream,
        waited_for: torch.cuda.Stream,
        event: torch.cuda.Event | None = None,
    ) -> None:
        # torch hands out pooled streams, so the caller's may be the very same one.
        if waiting != waited_for:
            waiting.wait_event(waited_for.record_event(event))

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def record_use(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def push_range(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # torch may have been built without NVTX
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def pop_range(self) -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def available_bytes(self) -> int | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        free, _ = torch.cuda.mem_get_info()
        # Of what torch's allocator holds, tensors take a part.
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def tensor_at(self, pointer: int, num_bytes: int, owner: object) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device())
        layout = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
        # torch keeps what it was given, and with it the owner.
        memory = types.SimpleNamespace(__cuda_array_interface__=layout, owner=owner)
        return torch.as_tensor(memory, device=self.device())


def get() -> Backend:
    """The backend in use: `DEEP_EP_BACKEND`, else cuda where there is a GPU, else cpu.

    Raises:
        EPNotBuiltError: the backend asked for, or every backend, is unavailable, or there is a GPU that
            cannot be used; says why.
    """
    return _select(env.backend())


class _UnusableError(Exception):
    """A native module cannot be used here, and why.

    Attributes:
        is_fault: whether there is a GPU that ought to be used.
    """

    def __init__(self, reason: str, is_fault: bool = False) -> None:
        super().__init__(reason)
        self.is_fault = is_fault


@functools.cache
def _select(wanted: str) -> Backend:
    reasons = []
    for name in (wanted,) if wanted else ("cuda", "cpu"):
        try:
            binding = _load(name)
        except _UnusableError as obstacle:
            if obstacle.is_fault and not wanted:
                raise EPNotBuiltError(
                    f"backend: this machine has a GPU that cannot be used: {obstacle}. The CPU takes "
                    "over only where that is asked for. Correct it, or set DEEP_EP_BACKEND=cpu."
                ) from None
            reasons.append(f"{name}: {obstacle}")
        else:
            return CudaBackend(binding) if name == "cuda" else CpuBackend(binding)
    asked = f"DEEP_EP_BACKEND={wanted} cannot be used" if wanted else "no backend can be used"
    raise EPNotBuiltError(
        f"backend: {asked}: {'; '.join(reasons)}. Allowed is a backend that is built and finds its device. "
        "Build the package (`pip install .` in its source tree prints what it leaves out and why)"
        + (" or unset DEEP_EP_BACKEND." if wanted else ".")
    )


def _load(name: str) -> Binding:
    """The native module of a backend, if it can be used here."""
    if name == "cpu":
        return _import("deep_ep._cpu")
    if torch.version.cuda is None:
        raise _UnusableError("this torch is a build without CUDA")
    torch_sees_gpu = torch.cuda.is_available()
    binding = _import("deep_ep._cuda", is_fault=torch_sees_gpu)
    try:
        num_gpus = binding.device_count()
    except RuntimeError as error:  # CUDA's own words
        raise _UnusableError(str(error), is_fault=True) from None
    if num_gpus == 0 and (closed := _closed_device_files()):
        raise _UnusableError(
            f"CUDA finds no GPU, and this process may not open {', '.join(closed)}; give it the permission "
            "to read and write there",
            is_fault=True,
        )
    if (num_gpus > 0) != torch_sees_gpu:
        raise _UnusableError(
            f"deep_ep._cuda finds {num_gpus} GPU(s), torch {'some' if torch_sees_gpu else 'none'}; both must. "
            f"Build the package with the CUDA of torch, {torch.version.cuda}",
            is_fault=True,
        )
    if num_gpus == 0:
        raise _UnusableError("CUDA finds no GPU")
    return binding


def _closed_device_files() -> list[str]:
    """Of the files through which the driver gives access to GPUs, those that this process may not use."""
    files = sorted(glob.glob("/dev/nvidia[0-9]*"))
    return [path for path in files if not os.access(path, os.R_OK | os.W_OK)]


def _import(module: str, is_fault: bool = False) -> Binding:
    if importlib.util.find_spec(module) is None:
        raise _UnusableError(f"module {module} was not built", is_fault)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _UnusableError(f"module {module} does not load: {error}", is_fault) from None


def _load_with_nvshmem() -> Binding:
    """The module with NVSHMEM, for a process that has the one without."""
    build = nvshmem.built_with(vars(importlib.import_module("deep_ep._cuda")))
    _require_no_conflict(build and nvshmem.conflict(nvshmem.in_process(), *build))
    try:
        return _import("deep_ep._cuda_nvshmem")
    except _UnusableError as obstacle:
        _require_no_conflict(build and nvshmem.conflict(nvshmem.on_path(), *build))
        raise _UnusableError(
            f"{obstacle}; it must be built and load. Run install_nvshmem.sh and build again, or set "
            "DEEP_EP_RANKS_PER_NODE if NVLink reaches all ranks"
        ) from None


def _require_no_conflict(conflict: tuple[str, str] | None) -> None:
    if conflict:
        why, repair = conflict
        raise _UnusableError(f"{why}. torch may have brought it. Replace it: {repair}")
