"""Ranks for tests and benchmarks: threads of this process, or processes joined by gloo; and work on all cores.

Used by every test file and by the benchmarks. Everything binds to the loopback interface only, and
nothing that is started here outlives the call or the `with` block that started it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deep_ep
from deep_ep.group import ThreadGroup, thread_groups
from deep_ep.native import backend
from deep_ep.native.backend import CudaBackend
from support import cuda_settings  # noqa: F401 - before CUDA starts

if TYPE_CHECKING:
    from typing_extensions import Self

# Where the tensors of the backend under test live: "cpu" or "cuda".
DEVICE = backend.get().name
# Longer than any DEEP_EP_TIMEOUT_S the tests set: an operation that hangs is reported by the
# library first.
HANG_S = 120.0
# A timeout that no healthy rank meets is so many times what an exchange takes; chosen.
_LONGER = 20.0
SHARED_MEMORY = Path("/dev/shm")
Item, Result = TypeVar("Item"), TypeVar("Result")


def package_under_test() -> str:
    """The line that programs and pytest begin with: which package this process tests, and which native module."""
    module = sys.modules[backend.get().binding.__name__].__file__
    return f"deep_ep {deep_ep.__version__} of {Path(deep_ep.__file__).parent}, module {module}"


_STARTING = threading.Lock()


@functools.cache
def start_method() -> str:
    """How processes start. They import what this one has imported.

    Forked from a process that has imported the package, ranks start at once; CUDA survives no fork.
    """
    if DEVICE == "cuda":
        return "spawn"
    # Trials start groups from several threads at once; the environment is everybody's.
    with _STARTING:
        mp.set_forkserver_preload(["support.preloaded"])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before
    return "forkserver"


_THIS_THREAD = threading.local()


def _copies_wait_first() -> None:
    """Torch's copies from and to pageable memory wait for the stream with a lock of the driver in hand.

    Then no other thread launches a kernel, and what the copy waits for may wait for a kernel of another rank. So the
    threads of ranks wait first, without the lock. One rank to a process, as users have it, needs none of this.
    """

    def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_rank = getattr(_THIS_THREAD, "is_rank", False)
            if is_rank and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            return method(*args, **kwargs)

        return call

    for name in ("__bool__", "copy_", "cpu", "item", "to", "tolist"):
        setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name)))


if DEVICE == "cuda":
    _copies_wait_first()


def _own_stream() -> None:
    """On a GPU each rank works on a stream of its own: kernels of two ranks wait for each other.

    An allocation may wait for all kernels, also for one that waits for the rank that allocates; of pinned memory it
    always does. So the stream begins with memory that torch keeps for it, in both of its pools, up to 1 MiB and more,
    and with pinned memory of each size that torch rounds to.
    """
    if DEVICE == "cuda":
        _THIS_THREAD.is_rank = True
        torch.cuda.set_stream(torch.cuda.Stream())
        free_bytes, _ = torch.cuda.mem_get_info()
        reserve(min(1 << 30, free_bytes // 64))
        _ = [torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE) for _ in range(32)]
        _ = [torch.empty(1 << power, dtype=torch.uint8, pin_memory=True) for power in range(24)]


def reserve(num_bytes: int) -> None:
    """Memory of a GPU that torch keeps for the current stream, for what this rank allocates beside other ranks' kernels."""
    if DEVICE == "cuda":
        torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)


def sleep_kernel(duration_ns: int) -> None:
    """A kernel on the current stream of the GPU that takes that long."""
    torch.cuda._sleep(round(duration_ns * _cycles_per_ns()))


def keep_busy(buffer: deep_ep.Buffer, duration_ns: int) -> None:
    """Delays what this rank calls next: a kernel on its current stream, or a delay of the cpu backend."""
    if DEVICE == "cuda":
        sleep_kernel(duration_ns)
    else:
        buffer.runtime.delay(duration_ns)


def before_next_operation(buffer: Any, work: Callable[[], object]) -> None:
    """Has this rank do something just before what it calls next: what it does now a GPU may be done with by then."""
    callbacks = buffer.communicator.before_operation

    def once(_: str) -> None:
        callbacks.remove(once)
        work()

    callbacks.append(once)


@functools.cache
def _cycles_per_ns() -> float:
    """Of the GPU's clock under load, measured once."""
    num_cycles = 50_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(num_cycles)  # an idle GPU clocks low
        begin.record()
        torch.cuda._sleep(num_cycles)
        end.record()
    stream.synchronize()
    return num_cycles / (begin.elapsed_time(end) * 1e6)


def _all_in_reach() -> contextlib.AbstractContextManager[object]:
    """On a GPU, ranks of one process reach each other's memory, whatever nodes they are said to be on."""
    if DEVICE != "cuda":
        return contextlib.nullcontext()
    create = CudaBackend.create_runtime

    def create_in_reach(self: CudaBackend, needs_rdma: bool, **options: Any) -> Any:
        return create(self, needs_rdma=False, **options)

    return mock.patch.object(CudaBackend, "create_runtime", create_in_reach)


class RankThreads:
    """A group whose ranks are threads of this process, each with a buffer of its own.

    A rank keeps its thread for life, as a rank that is a process does.
    """

    def __init__(self, num_ranks: int, make_buffer: Callable[[ThreadGroup], Any]) -> None:
        groups = thread_groups(num_ranks)
        self.num_ranks = num_ranks
        self._threads = [
            ThreadPoolExecutor(1, f"rank{rank}", _own_stream) for rank in range(num_ranks)
        ]
        self.buffers: list[Any] = [None] * num_ranks
        with _all_in_reach():
            self.buffers = self.run(lambda rank, _: make_buffer(groups[rank]))

    def outcomes(self, fn: Callable[[int, Any], Any]) -> list[Any]:
        """Runs fn(rank, buffer) on all ranks at once; per rank its result, or its exception."""
        futures: list[Future[Any]] = [
            thread.submit(fn, rank, self.buffers[rank]) for rank, thread in enumerate(self._threads)
        ]
        running = wait(futures, timeout=HANG_S).not_done
        backend.get().synchronize()
        if running:
            faulthandler.dump_traceback(file=sys.__stderr__)
            hung = [rank for rank, future in enumerate(futures) if future in running]
            raise TimeoutError(f"ranks {hung} are still running after {HANG_S:.0f} s")
        return [future.exception() or future.result() for future in futures]

    def run(self, fn: Callable[[int, Any], Any]) -> list[Any]:
        """Runs fn(rank, buffer) on all ranks; raises the first error that is no mere timeout."""
        outcomes = self.outcomes(fn)
        errors = {rank: e for rank, e in enumerate(outcomes) if isinstance(e, BaseException)}
        for rank, error in errors.items():
            print(f"rank {rank} raised {type(error).__name__}: {error}", file=sys.stderr)
        for error in errors.values():
            if not isinstance(error, deep_ep.errors.EPTimeoutError):
                raise error
        for error in errors.values():
            raise error
        return outcomes

    def close(self) -> None:
        """Destroys the buffers and ends the threads."""
        if all(buffer is not None for buffer in self.buffers):
            self.run(lambda _, buffer: buffer.destroy())
        self.abandon()

    def abandon(self) -> None:
        """Ends the threads of ranks that may be out of step, without any collective."""
        for thread in self._threads:
            thread.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error_type is None:
            self.close()
        else:
            self.abandon()


class Ranks(RankThreads):
    """A low-latency group. The buffers fit operations of the given sizes and of all smaller ones."""

    buffers: list[deep_ep.Buffer]

    def __init__(
        self,
        num_ranks: int,
        num_max_tokens: int,
        hidden: int,
        num_experts: int,
        **buffer_arguments: Any,
    ) -> None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_tokens, hidden, num_ranks, num_experts
        )
        arguments = {
            "num_rdma_bytes": size,
            "low_latency_mode": True,
            "num_qps_per_rank": max(1, num_experts // num_ranks),
            "explicitly_destroy": True,
            **buffer_arguments,
        }
        super().__init__(num_ranks, lambda group: deep_ep.Buffer(group, **arguments))


@dataclass
class Outcome:
    """How a rank that was a process ended: its exit code, and what it returned or raised."""

    exit_code: int | None
    value: Any = None
    error_type: str = ""
    error: str = ""


def init_gloo(rank: int, num_ranks: int, store: str) -> dist.ProcessGroup:
    """Joins `num_ranks` processes through a file; returns a gloo group of all of them."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return dist.new_group(list(range(num_ranks)))


def _process(
    rank: int,
    num_ranks: int,
    store: str,
    env: dict[str, str],
    pipe: Connection,
    fn: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    # A shell's background job, as `make test &`, ignores it, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    try:
        group = init_gloo(rank, num_ranks, store)
        pipe.send(Outcome(None, value=fn(rank, group, *args)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - handed to the parent, whatever it is
        traceback.print_exc()
        pipe.send(Outcome(None, error_type=type(error).__name__, error=str(error)))
        raise SystemExit(1) from error


def run_processes(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    env: dict[str, str] | None = None,
    timeout_s: float = HANG_S,
) -> list[Outcome]:
    """Runs fn(rank, group, *args) in `num_ranks` processes; fn must be a module's function.

    Returns one Outcome per rank. Processes still alive after `timeout_s` are killed; theirs has
    exit code None.
    """
    context = mp.get_context(start_method())
    with tempfile.TemporaryDirectory(prefix="deep_ep_test_") as folder:
        store = str(Path(folder, "store"))
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_process,
                args=(rank, num_ranks, store, dict(env or {}), sender, fn, args),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for pipe, process in zip(pipes, processes):
            outcome = Outcome(None)
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    outcome = pipe.recv()
            except EOFError:  # it was killed
                pass
            process.join(max(0.1, deadline - time.monotonic()))
            outcome.exit_code = process.exitcode
            outcomes.append(outcome)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        return outcomes


def outcomes(fn: Callable[[Item], Any], items: Iterable[Item]) -> list[Any]:
    """fn of every item, in order, all at the same time on threads; of each its result, or its exception."""
    each = list(items)
    with ThreadPoolExecutor(len(each)) as threads:
        futures = [threads.submit(fn, item) for item in each]
        return [future.exception() or future.result() for future in futures]


def on_threads(fn: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The same; raises the first error once all have ended."""
    found = outcomes(fn, items)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


@functools.cache
def _cores() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp.get_context(start_method()))


def on_all_cores(fn: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """fn of every item, in order, each in one of as many processes as there are cores.

    For computations that take long and do not depend on each other; fn must be a module's function
    (or a partial of one). The processes are kept until the program ends.
    """
    return list(_cores().map(fn, items))


def measured_again(test: Callable[..., None]) -> Callable[..., None]:
    """A test of times that real clocks measure, or of verdicts from them, which has three attempts.

    Where cores are shared with others, also by a hypervisor, which counts as a rank's own time what it takes away, all
    of these tests may fail in one minute and pass in the next. What is wrong stays wrong.
    """

    @functools.wraps(test)
    def attempts(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                time.sleep(1.0)
        return test(*args, **kwargs)

    return attempts


def short_timeout_s(exchange: Callable[[], None], least_s: float) -> float:
    """For tests that provoke timeouts: `least_s`, or on a busy machine many times what a healthy exchange takes."""
    longest_s = 0.0
    for _ in range(5):
        begin = time.monotonic()
        exchange()
        longest_s = max(longest_s, time.monotonic() - begin)
    return max(least_s, _LONGER * longest_s)


def raise_failures(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values of all ranks, or AssertionError naming every rank that failed."""
    failed = [
        f"rank {rank}: exit code {outcome.exit_code}, {outcome.error_type}: {outcome.error}"
        for rank, outcome in enumerate(outcomes)
        if outcome.exit_code != 0
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


class Held(NamedTuple):
    """What this process has of the system."""

    descriptors: int
    threads: int
    mappings: int  # of buffers' memory
    resident_kb: int

    @staticmethod
    def now() -> Held:
        """Once garbage is collected."""
        gc.collect()
        return Held(
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            Path("/proc/self/maps").read_text().count("memfd:deep_ep"),
            int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]),
        )


def assert_no_more_held(later: Held, warm: Held) -> None:
    """Of what forty buffers of each rank would have left at least one each, had they left any."""
    for what in ("descriptors", "threads", "mappings"):
        assert getattr(later, what) < getattr(warm, what) + 10, what
    assert later.resident_kb <= warm.resident_kb + 16_000, "memory"  # allocators keep some


def shared_memory_segments() -> set[str]:
    """Names in /dev/shm, without semaphores: process pools of other programs keep theirs for long."""
    found = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    return {name for name in found if not name.startswith("sem.")}


def shared_memory_left(before: set[str], grace_s: float = 5.0) -> set[str]:
    """Names that appeared in /dev/shm since `before` and stay there.

    The grace is for other programs of this machine, whose segments come and go.
    """
    left = shared_memory_segments() - before
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= shared_memory_segments()
    return left
