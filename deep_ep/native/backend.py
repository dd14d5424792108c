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
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from deep_ep.base import env
from deep_ep.base.rules import fail
from deep_ep.errors import EPNotBuiltError, EPUsageError
from deep_ep.native import host_memory, nvshmem

if TYPE_CHECKING:
    from deep_ep._cpu import HostPool, Runtime


# Outputs of at least this size come from the pool of the cpu backend; smaller ones the C library
# keeps mapped by itself.
_POOLED_BYTES = 1 << 20
# Of a block, as on a GPU.
_HOST_WARPS = 32
# Of a launch: grids are limited by what is resident, which the launch checks.
_GPU_THREADS = 1 << 31
# torch hands its streams out in turn, so that many different ones, of each priority.
_POOLED_STREAMS = 32
# GPU timers drift apart by up to 40 us per second; csrc/kernels/clocks.cuh says what is done then.
_GPU_CLOCK_INTERVAL_S = 20.0


class Binding(Protocol):
    """What a native module offers; see `_cpu.pyi`."""

    COUNTER_FIELDS: list[str]
    OWN_FIELDS: list[str]
    RING_SOURCE_FIELDS: list[str]
    RING_OWN_FIELDS: list[str]
    NUM_RING_FIELDS: int
    MAX_EXPERTS: int
    MAX_TOPK: int
    MAX_TOKENS: int
    MAX_CHANNELS: int
    MAX_NORMAL_TOPK: int
    MAX_NORMAL_SCALES: int
    MAX_RANKS_PER_NODE: int
    MAX_HOST_THREADS: int
    PHASE_SEND: int
    PHASE_RECEIVE: int
    CHANNELS_PER_SCALE: int
    BUFFER_ALIGNMENT: int
    Runtime: type[Runtime]
    HostPool: type[HostPool]

    def __hash__(self) -> int: ...  # as of every module

    def device_count(self) -> int: ...

    def low_latency_rdma_size_hint(
        self,
        *,
        num_max_dispatch_tokens_per_rank: int,
        num_ranks: int,
        hidden: int,
        num_experts: int,
    ) -> int: ...

    def normal_bytes(
        self,
        *,
        num_ranks: int,
        ranks_per_node: int,
        num_channels: int,
        row_bytes: int,
        num_topk: int,
        num_scales: int,
        num_max_nvl_chunked_recv_tokens: int,
        num_max_rdma_chunked_recv_tokens: int,
    ) -> tuple[int, int]: ...

    def normal_pack_bytes(self, *, num_topk: int, num_scales: int) -> int: ...


class CudaBinding(Binding, Protocol):
    """What a CUDA module offers besides; see `_cuda.pyi`."""

    MAX_WARPS: int


class Backend(Protocol):
    """Streams, events and memory of one target. A stream is an opaque object that can be stored.

    Attributes:
        name: of the backend.
        binding: its native module.
        runs_in_streams: whether an operation is queued on a stream, behind what is there.
    """

    name: str
    binding: Binding
    runs_in_streams: bool

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

    def may_hang(self, runtime: Runtime) -> bool:
        """Whether its kernels may wait within a library that knows no deadline."""

    def device(self) -> torch.device:
        """The device on which the caller's tensors must be."""

    def current_stream(self) -> Any:
        """The stream the caller works on."""

    def create_comm_stream(self, others: Collection[int] = ()) -> Any:
        """A stream of high priority for one buffer, none of those with these native handles."""

    def stream_handle(self, stream: Any) -> int:
        """The native handle of a stream."""

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Makes a stream the current one within a `with` block."""

    def new_event(self) -> Any:
        """An event that nothing has recorded yet."""

    def wait_stream(self, waiting: Any, waited_for: Any, event: Any = None) -> None:
        """Orders what follows on `waiting` after what is queued on `waited_for`.

        Args:
            waiting: a stream.
            waited_for: another one.
            event: is recorded on the way, and may be used again at once, by one thread at a time; a new
                one unless given.
        """

    def record_event(self, stream: Any) -> Any:
        """An event after what is queued on `stream`."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Orders what follows on `stream` after `event`."""

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the memory of `tensor` from being reused before `stream` is done with it."""

    def synchronize(self) -> None:
        """Waits for everything queued on the device."""

    def push_range(self, name: str) -> None:
        """Begins an NVTX range of this thread, within those that have begun."""

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

    def available_bytes(self) -> int | None:
        """Memory for tensors that can still be had; `None` if that is not known."""

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


class CpuBackend:
    """Backend `cpu`: the kernels on the host target."""

    name = "cpu"
    runs_in_streams = False

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._current = CpuStream()
        self._pool = binding.HostPool()

    def create_runtime(
        self,
        needs_rdma: bool,
        spans_hosts: bool,
        allow_nvlink: bool,
        allow_mnnvl: bool,
        **options: Any,
    ) -> Runtime:
        schedule, delivery = env.schedule(), env.delivery()
        blocks, warps = env.launch_shape(_HOST_WARPS, self.binding.MAX_HOST_THREADS)
        runtime = self.binding.Runtime(
            allow_nvlink=allow_nvlink,
            clock=env.cpu_clock(),
            # All ranks of one machine read one clock, unless a fault bends it.
            clock_interval_ns=round(env.clock_interval_s(0.0) * 1e9),
            # They save a GPU instructions; the processor copies once instead of twice without them.
            bulk_copies=env.bulk_copies(default=False),
            **options,
        )
        runtime.set_schedule(policy=schedule.policy, seed=schedule.seed)
        runtime.set_delivery(policy=delivery.policy, seed=delivery.seed)
        runtime.set_launch_shape(blocks=blocks, warps=warps)
        return runtime

    def may_hang(self, runtime: Runtime) -> bool:
        return False

    def device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self) -> CpuStream:
        return self._current

    def create_comm_stream(self, others: Collection[int] = ()) -> CpuStream:
        return CpuStream()

    def stream_handle(self, stream: CpuStream) -> int:
        return stream.cuda_stream

    @contextlib.contextmanager
    def use_stream(self, stream: CpuStream) -> Iterator[None]:
        yield

    def new_event(self) -> CpuEvent:
        return CpuEvent()

    def wait_stream(
        self, waiting: CpuStream, waited_for: CpuStream, event: CpuEvent | None = None
    ) -> None:
        """Nothing to wait for."""

    def record_event(self, stream: CpuStream) -> CpuEvent:
        return CpuEvent()

    def wait_event(self, stream: CpuStream, event: CpuEvent) -> None:
        """Nothing to wait for."""

    def record_use(self, tensor: torch.Tensor, stream: CpuStream) -> None:
        """Nothing is running that could still use the memory."""

    def synchronize(self) -> None:
        """Nothing is running."""

    def push_range(self, name: str) -> None:
        """Nobody would see it."""

    def pop_range(self) -> None:
        """There is none."""

    def empty(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        stride: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        num_bytes = math.prod(size) * dtype.itemsize
        if num_bytes < _POOLED_BYTES:
            tensor = torch.empty(size, dtype=dtype)
        else:
            block = self._pool.take(num_bytes)
            pooled = torch.frombuffer(block, dtype=torch.uint8, count=num_bytes)
            tensor = pooled.view(dtype).view(size)
        return tensor if stride is None else tensor.as_strided(size, stride)

    def available_bytes(self) -> int | None:
        return host_memory.available_bytes()

    def tensor_at(self, pointer: int, num_bytes: int, owner: object) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # torch keeps the ctypes array alive, and the array its owner.
        array = (ctypes.c_uint8 * num_bytes).from_address(pointer)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)


class _CudaMemory:
    """Device memory of an owner, in the form `torch.as_tensor` takes."""

    def __init__(self, pointer: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaBackend:
    """Backend `cuda`: the kernels on the GPU that is current in torch."""

    name = "cuda"
    runs_in_streams = True

    def __init__(self, binding: CudaBinding) -> None:
        self.binding: Binding = binding
        self._max_warps = binding.MAX_WARPS

    def create_runtime(
        self,
        needs_rdma: bool,
        spans_hosts: bool,
        allow_nvlink: bool,
        allow_mnnvl: bool,
        **options: Any,
    ) -> Runtime:
        binding = self.binding
        blocks, warps = env.launch_shape(self._max_warps, _GPU_THREADS)
        beyond_host = spans_hosts and allow_mnnvl
        if beyond_host and not allow_nvlink:
            fail("Buffer", "allow_mnnvl is True", "mnnvl_without_nvlink", EPUsageError)
        # Ranks that NVLink reaches within the host never load NVSHMEM, unless it is to be kept from using
        # NVLink. Between hosts it maps their memory.
        if needs_rdma or beyond_host or not allow_nvlink:
            found, reason = _load_with_nvshmem()
            if found is None and (needs_rdma or beyond_host):
                what = (
                    "some ranks are out of NVLink's reach" if needs_rdma else "allow_mnnvl is True"
                )
                raise EPNotBuiltError(f"backend: {what}, which takes NVSHMEM, but {reason}.")
            binding = found or binding
        runtime = binding.Runtime(
            allow_nvlink=allow_nvlink,
            allow_mnnvl=allow_mnnvl,
            clock_interval_ns=round(env.clock_interval_s(_GPU_CLOCK_INTERVAL_S) * 1e9),
            bulk_copies=env.bulk_copies(default=True),
            **options,
        )
        runtime.set_launch_shape(blocks=blocks, warps=warps)
        return runtime

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

    def stream_handle(self, stream: torch.cuda.Stream) -> int:
        return int(stream.cuda_stream)

    @contextlib.contextmanager
    def use_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

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

    def empty(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        stride: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        if stride is None:
            return torch.empty(size, dtype=dtype, device=device)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def available_bytes(self) -> int | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        free, _ = torch.cuda.mem_get_info()
        # Of what torch's allocator holds, tensors take a part.
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def tensor_at(self, pointer: int, num_bytes: int, owner: object) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device())
        memory = _CudaMemory(pointer, num_bytes, owner)
        return torch.as_tensor(memory, device=self.device())


def get() -> Backend:
    """The backend in use: `DEEP_EP_BACKEND`, else cuda where there is a GPU, else cpu.

    Raises:
        EPNotBuiltError: the backend asked for, or every backend, is unavailable, or there is a GPU that
            cannot be used; says why.
    """
    return _select(env.backend())


def unavailable_reason(name: str) -> str | None:
    """Why backend `name` cannot be used here, `None` if it can."""
    _, obstacle = _load(name)
    return None if obstacle is None else obstacle.reason


class _Obstacle(NamedTuple):
    """Why a module cannot be used.

    Attributes:
        reason: in words.
        is_fault: whether there is a GPU that ought to be used.
    """

    reason: str
    is_fault: bool = False


@functools.cache
def _select(wanted: str) -> Backend:
    reasons = {}
    for name in (wanted,) if wanted else ("cuda", "cpu"):
        binding, obstacle = _load(name)
        if obstacle is None:
            return CudaBackend(binding) if name == "cuda" else CpuBackend(binding)
        if obstacle.is_fault and not wanted:
            raise EPNotBuiltError(
                f"backend: this machine has a GPU that cannot be used: {obstacle.reason}. The CPU takes "
                "over only where that is asked for. Correct it, or set DEEP_EP_BACKEND=cpu."
            )
        reasons[name] = obstacle.reason
    asked = f"DEEP_EP_BACKEND={wanted} cannot be used" if wanted else "no backend can be used"
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise EPNotBuiltError(
        f"backend: {asked}: {why}. Allowed is a backend that is built and finds its device. "
        "Build the package (`pip install .` in its source tree prints what it leaves out and why)"
        + (" or unset DEEP_EP_BACKEND." if wanted else ".")
    )


def _load(name: str) -> tuple[Any, _Obstacle | None]:
    """The native module of a backend, or why it cannot be used here."""
    if name == "cpu":
        return _import(f"deep_ep._{name}")
    if torch.version.cuda is None:
        return None, _Obstacle("this torch is a build without CUDA")
    torch_sees_gpu = torch.cuda.is_available()
    binding, obstacle = _import(f"deep_ep._{name}")
    if obstacle is not None:
        return None, _Obstacle(obstacle.reason, is_fault=torch_sees_gpu)
    try:
        num_gpus = binding.device_count()
    except RuntimeError as error:  # CUDA's own words
        return None, _Obstacle(str(error), is_fault=True)
    if num_gpus == 0:
        closed = [path for path in _device_files() if not os.access(path, os.R_OK | os.W_OK)]
        if closed:
            files = ", ".join(closed)
            return None, _Obstacle(
                f"CUDA finds no GPU, and this process may not open {files}; give it the permission "
                "to read and write there",
                is_fault=True,
            )
    if (num_gpus > 0) != torch_sees_gpu:
        finds = (
            f"deep_ep._{name} finds {num_gpus} GPU(s), torch {'some' if torch_sees_gpu else 'none'}"
        )
        return None, _Obstacle(
            f"{finds}; both must. Build the package with the CUDA of torch, {torch.version.cuda}",
            is_fault=True,
        )
    return (binding, None) if num_gpus else (None, _Obstacle("CUDA finds no GPU"))


def _device_files() -> list[str]:
    """The files through which the driver gives access to GPUs."""
    return sorted(glob.glob("/dev/nvidia[0-9]*"))


def _import(module: str) -> tuple[Any, _Obstacle | None]:
    if importlib.util.find_spec(module) is None:
        return None, _Obstacle(f"module {module} was not built")
    try:
        return importlib.import_module(module), None
    except ImportError as error:
        return None, _Obstacle(f"module {module} does not load: {error}")


def _load_with_nvshmem() -> tuple[Any, str | None]:
    """The module with NVSHMEM, for a process that has the one without; or why it cannot be used."""
    build = nvshmem.built_with(vars(importlib.import_module("deep_ep._cuda")))
    if build is not None:
        conflict = nvshmem.conflict(*build)
        if conflict is not None:
            return None, conflict
    binding, obstacle = _import("deep_ep._cuda_nvshmem")
    if obstacle is None:
        return binding, None
    conflict = nvshmem.conflict_on_path(*build) if build is not None else None
    return None, conflict or (
        f"{obstacle.reason}; it must be built and load. Run install_nvshmem.sh and build again, or set "
        "DEEP_EP_RANKS_PER_NODE if NVLink reaches all ranks"
    )
