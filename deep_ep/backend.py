"""The two backends behind one face: the native module, and what streams and events are with it.

`Buffer` never asks which backend it has. On `cpu` an operation runs to its end inside the call, so
streams and events are objects that are always ready; on `cuda` they are torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deep_ep import env
from deep_ep.errors import EPNotBuiltError

if TYPE_CHECKING:
    from deep_ep._cpu import HostPool, Runtime


# Outputs of at least this size come from the pool of the cpu backend; smaller ones the C library
# keeps mapped by itself.
_POOLED_BYTES = 1 << 20
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
    MAX_HOST_THREADS: int
    PHASE_SEND: int
    PHASE_RECEIVE: int
    CHANNELS_PER_SCALE: int
    BUFFER_ALIGNMENT: int
    Runtime: type[Runtime]
    HostPool: type[HostPool]

    def device_count(self) -> int: ...

    def low_latency_rdma_size_hint(
        self,
        *,
        num_max_dispatch_tokens_per_rank: int,
        num_ranks: int,
        hidden: int,
        num_experts: int,
    ) -> int: ...


class Backend(Protocol):
    """Streams, events and memory of one target. A stream is an opaque object that can be stored."""

    name: str
    binding: Binding

    def create_runtime(
        self, needs_rdma: bool, allow_nvlink: bool, allow_mnnvl: bool, **options: Any
    ) -> Runtime:
        """The native runtime of one buffer.

        Args:
            needs_rdma: whether some ranks are out of reach of NVLink.
            allow_nvlink: whether the others may use it.
            allow_mnnvl: whether NVLink may reach beyond the host.
            options: the other arguments of the native constructor.

        Raises:
            EPNotBuiltError: ranks are out of reach, and the module for that is not built.
        """

    def device(self) -> torch.device:
        """The device on which the caller's tensors must be."""

    def current_stream(self) -> Any:
        """The stream the caller works on."""

    def create_comm_stream(self) -> Any:
        """A stream of high priority for one buffer."""

    def stream_handle(self, stream: Any) -> int:
        """The native handle of a stream."""

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Makes a stream the current one within a `with` block."""

    def wait_stream(self, waiting: Any, waited_for: Any) -> None:
        """Orders what follows on `waiting` after what is queued on `waited_for`."""

    def record_event(self, stream: Any) -> Any:
        """An event after what is queued on `stream`."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Orders what follows on `stream` after `event`."""

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the memory of `tensor` from being reused before `stream` is done with it."""

    def synchronize(self) -> None:
        """Waits for everything queued on the device."""

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised output tensor on the current stream."""

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

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._current = CpuStream()
        self._pool = binding.HostPool()

    def create_runtime(
        self, needs_rdma: bool, allow_nvlink: bool, allow_mnnvl: bool, **options: Any
    ) -> Runtime:
        schedule, delivery = env.schedule(), env.delivery()
        blocks, warps = env.launch_shape(self.binding.MAX_HOST_THREADS)
        runtime = self.binding.Runtime(
            allow_nvlink=allow_nvlink,
            clock=env.cpu_clock(),
            # All ranks of one machine read one clock, unless a fault bends it.
            clock_interval_ns=round(env.clock_interval_s(0.0) * 1e9),
            **options,
        )
        runtime.set_schedule(kind=schedule.kind, seed=schedule.seed)
        runtime.set_delivery(kind=delivery.kind, seed=delivery.seed)
        runtime.set_launch_shape(blocks=blocks, warps=warps)
        return runtime

    def device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self) -> CpuStream:
        return self._current

    def create_comm_stream(self) -> CpuStream:
        return CpuStream()

    def stream_handle(self, stream: CpuStream) -> int:
        return stream.cuda_stream

    @contextlib.contextmanager
    def use_stream(self, stream: CpuStream) -> Iterator[None]:
        yield

    def wait_stream(self, waiting: CpuStream, waited_for: CpuStream) -> None:
        """Nothing to wait for."""

    def record_event(self, stream: CpuStream) -> CpuEvent:
        return CpuEvent()

    def wait_event(self, stream: CpuStream, event: CpuEvent) -> None:
        """Nothing to wait for."""

    def record_use(self, tensor: torch.Tensor, stream: CpuStream) -> None:
        """Nothing is running that could still use the memory."""

    def synchronize(self) -> None:
        """Nothing is running."""

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(size) * dtype.itemsize
        if num_bytes < _POOLED_BYTES:
            return torch.empty(size, dtype=dtype)
        block = self._pool.take(num_bytes)
        return torch.frombuffer(block, dtype=torch.uint8, count=num_bytes).view(dtype).view(size)

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

    def __init__(self, binding: Binding) -> None:
        self.binding = binding

    def create_runtime(
        self, needs_rdma: bool, allow_nvlink: bool, allow_mnnvl: bool, **options: Any
    ) -> Runtime:
        binding = self.binding
        # Ranks that NVLink reaches never load NVSHMEM, unless it is to be kept from using NVLink.
        if needs_rdma or not allow_nvlink:
            found, reason = _load("cuda_nvshmem")
            if found is None and needs_rdma:
                raise EPNotBuiltError(
                    "backend: some ranks are out of NVLink's reach, which takes NVSHMEM, but "
                    f"{reason}; it must be built and load. Run install_nvshmem.sh and build again, "
                    "or set DEEP_EP_RANKS_PER_NODE if NVLink reaches all ranks."
                )
            binding = found or binding
        return binding.Runtime(
            allow_nvlink=allow_nvlink,
            allow_mnnvl=allow_mnnvl,
            clock_interval_ns=round(env.clock_interval_s(_GPU_CLOCK_INTERVAL_S) * 1e9),
            **options,
        )

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def create_comm_stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        return stream

    def stream_handle(self, stream: torch.cuda.Stream) -> int:
        return int(stream.cuda_stream)

    @contextlib.contextmanager
    def use_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    def wait_stream(self, waiting: torch.cuda.Stream, waited_for: torch.cuda.Stream) -> None:
        # torch hands out pooled streams, so the caller's may be the very same one.
        if waiting != waited_for:
            waiting.wait_stream(waited_for)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def record_use(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device())

    def tensor_at(self, pointer: int, num_bytes: int, owner: object) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device())
        memory = _CudaMemory(pointer, num_bytes, owner)
        return torch.as_tensor(memory, device=self.device())


def get() -> Backend:
    """The backend in use: `DEEP_EP_BACKEND`, else cuda where its module and a GPU are there, else cpu.

    Raises:
        EPNotBuiltError: the backend asked for, or every backend, is unavailable; says why.
    """
    return _select(env.backend())


def unavailable_reason(name: str) -> str | None:
    """Why backend `name` cannot be used here, `None` if it can."""
    _, reason = _load(name)
    return reason


@functools.cache
def _select(wanted: str) -> Backend:
    reasons = {}
    for name in (wanted,) if wanted else ("cuda", "cpu"):
        binding, reason = _load(name)
        if binding is not None:
            return CudaBackend(binding) if name == "cuda" else CpuBackend(binding)
        reasons[name] = reason
    asked = f"DEEP_EP_BACKEND={wanted} cannot be used" if wanted else "no backend can be used"
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise EPNotBuiltError(
        f"backend: {asked}: {why}. Allowed is a backend that is built and finds its device. "
        "Build the package (`pip install .` in its source tree prints what it leaves out and why)"
        + (" or unset DEEP_EP_BACKEND." if wanted else ".")
    )


def _load(name: str) -> tuple[Binding | None, str | None]:
    """The native module, or why it cannot be used here."""
    module = f"deep_ep._{name}"
    if importlib.util.find_spec(module) is None:
        return None, f"module {module} was not built"
    on_gpu = name != "cpu"
    if on_gpu and not torch.cuda.is_available():
        return None, "torch finds no GPU, or is a build without CUDA"
    try:
        binding: Any = importlib.import_module(module)
    except ImportError as error:
        return None, f"module {module} does not load: {error}"
    if on_gpu and binding.device_count() == 0:
        return None, f"module {module} finds no GPU"
    return binding, None
