"""`deep_ep.utils.testing`: how benchmarks written for DeepEP measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from deep_ep.errors import EPArgumentError
from deep_ep.native import backend

# More than the second-level cache of a GPU.
_FLUSHED_BYTES = 256 << 20


def bench(
    fn: Callable[[], object],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], object] | None = None,
) -> tuple[float, float, float]:
    """Mean, least and most seconds of a call. On a GPU, caches are flushed before each.

    Args:
        fn: what is measured, its work on the device included.
        num_warmups: calls that are not measured.
        num_tests: measured calls; the first of several does not count.
        post_fn: is called after each measured call, and is not measured.
    """
    for _ in range(num_warmups):
        fn()
    is_cuda = backend.get().name == "cuda"
    times = []
    for _ in range(num_tests):
        if is_cuda:
            torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda").zero_()
        times.append(seconds(fn))
        if post_fn is not None:
            post_fn()
    times = times[1:] or times
    return statistics.fmean(times), min(times), max(times)


def seconds(fn: Callable[[], object]) -> float:
    """How long `fn` takes, its work on the device included. Not in DeepEP."""
    selected = backend.get()
    if selected.name != "cuda":
        begin_s = time.perf_counter()
        fn()
        selected.synchronize()
        return time.perf_counter() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
) -> Any:
    """Mean seconds of kernels, from the torch profiler; without a GPU of the operators that `Buffer` records.

    Args:
        fn: what is profiled.
        kernel_names: a part of a kernel's name, as "dispatch", or several.
        num_tests: calls.
        suppress_kineto_output: of no effect; nothing is printed.
        trace_path: where the trace is written, if anywhere.
        barrier_comm_profiling: lets the ranks of the default group meet before each call.
        num_kernels_per_period: how many launches of a kernel belong to a call, as the two of an operation with
            a receive hook.

    Returns:
        For a name a number, for several names a tuple of them, 0 where no kernel matches; a list instead of a
        number if there are several launches in a period, with one mean for each.

    Raises:
        EPArgumentError: kernels of different names match.
    """
    selected = backend.get()
    is_cuda = selected.name == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    fn()
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(num_tests):
            if barrier_comm_profiling:
                dist.all_reduce(torch.ones(1, device=selected.device()))
            fn()
        selected.synchronize()
    if trace_path is not None:
        profiled.export_chrome_trace(trace_path)
    of_device = DeviceType.CUDA if is_cuda else DeviceType.CPU
    events = [
        (event.time_range.start, event.name, event.time_range.elapsed_us() / 1e6)
        for event in profiled.events() or ()
        if event.device_type == of_device and (is_cuda or event.name.startswith("deep_ep::"))
    ]

    def mean_of(part: str) -> float | list[float]:
        found = sorted(event for event in events if part in event[1])
        names = sorted({name for _, name, _ in found})
        if len(names) > 1:
            raise EPArgumentError(
                f"bench_kineto: kernel_names has {part!r}; it must be part of one kernel's name, and is part of "
                f"{', '.join(names)}. Write more of the name."
            )
        times = [seconds for _, _, seconds in found]
        period = num_kernels_per_period
        means = [statistics.fmean(times[i::period] or [0.0]) for i in range(period)]
        return means if period > 1 else means[0]

    if isinstance(kernel_names, str):
        return mean_of(kernel_names)
    return tuple(mean_of(name) for name in kernel_names)
