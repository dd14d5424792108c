"""What a low-latency call takes on the host: everything up to the launch, which does nothing here.

The stand-in driver of tests/cuda takes the place of CUDA. Counted are Python, torch's allocations, the binding
and our half of the launch; left out are the driver and torch's streams and events. "Python alone" leaves out
allocations and binding as well. Times are medians, and beside them stands the ratio to one `torch.empty` of the
same run, because machines differ.

    python benchmarks/host_time.py [--quick] [--num-ranks 8 64] [--profile | --count]
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["DEEP_EP_BACKEND"] = "cpu"  # of what is not asked of the stand-in
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from _stand_in_gpu import buffer  # noqa: E402
from _tables import Table  # noqa: E402
from rich.console import Console  # noqa: E402

NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS = 128, 512, 8, 256  # times do not depend on them
PYTHON_ALONE = "Python alone"
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async_finish": {"async_finish": True},
    "return_recv_hook": {"return_recv_hook": True},
    PYTHON_ALONE: {},
}


class NoRuntime:
    """A native runtime that starts nothing."""

    def __init__(self, native: Any) -> None:
        self.handle_words = native.handle_words

    def low_latency_dispatch(self, **arguments: Any) -> None:
        """Starts nothing."""

    low_latency_combine = low_latency_dispatch

    def take_failure(self) -> None:
        """There is none."""


class Calls:
    """The calls of one rank, each with everything it needs."""

    def __init__(self, num_ranks: int, has_counters: bool) -> None:
        def new(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device="meta")

        self.buffer = buffer(num_ranks, NUM_EXPERTS, NUM_TOKENS, HIDDEN)
        if has_counters:
            self.buffer.enable_counters()
        self.x = new(NUM_TOKENS, HIDDEN)
        self.topk_idx = new(NUM_TOKENS, NUM_TOPK, dtype=torch.int64)
        self.weights = new(NUM_TOKENS, NUM_TOPK, dtype=torch.float32)
        self.ys = new(NUM_EXPERTS // num_ranks, num_ranks * NUM_TOKENS, HIDDEN)
        self.out: torch.Tensor | None = None
        self.handle = self.dispatch()[2]

    def dispatch(self, **mode: bool) -> Any:
        """One call; the hook, if it returns one, is not called."""
        return self.buffer.low_latency_dispatch(
            self.x, self.topk_idx, NUM_TOKENS, NUM_EXPERTS, **mode
        )

    def combine(self, **mode: bool) -> Any:
        """The same."""
        return self.buffer.low_latency_combine(
            self.ys, self.topk_idx, self.weights, self.handle, out=self.out, **mode
        )

    def leave_python_alone(self) -> None:
        """From now on nothing is launched, and all outputs are one tensor."""
        kept = self.handle[0]
        self.buffer.runtime.native = NoRuntime(self.buffer.runtime.native)
        self.buffer.communicator.backend.empty = lambda *_: kept
        self.out = self.x


def medians_us(operation: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Of a call, of its hook (0: it has none), and of one `torch.empty`, which all take turns."""
    calls, hooks, empties = [], [], []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        result = operation()
        called = time.perf_counter_ns()
        if result[-1] is not None:
            result[-1]()
        ended = time.perf_counter_ns()
        torch.empty((NUM_EXPERTS,), dtype=torch.int32)
        empties.append(time.perf_counter_ns() - ended)
        calls.append(called - begin)
        hooks.append(ended - called if result[-1] is not None else 0)
    call, hook, empty = (statistics.median(values) / 1e3 for values in (calls, hooks, empties))
    return call, hook, empty


def rows(num_ranks: int, has_counters: bool, rounds: int) -> list[list[str]]:
    """Rows of the table for one group."""
    calls = Calls(num_ranks, has_counters)
    result = []
    for mode, arguments in MODES.items():
        if mode == PYTHON_ALONE:
            calls.leave_python_alone()
        for name in ("dispatch", "combine"):
            operation = getattr(calls, name)
            call, hook, empty = medians_us(lambda: operation(**arguments), rounds)  # noqa: B023
            result.append(
                [
                    f"EP{num_ranks} {name}, {mode}",
                    "on" if has_counters else "off",
                    f"{call:.1f}",
                    f"{call / empty:.1f}",
                    f"{hook:.1f}" if hook else "-",
                ]
            )
    return result


def executed(operation: Callable[[], Any]) -> tuple[int, int]:
    """Bytecode instructions and Python functions of one call, whose time noise does not reach."""
    events: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        events[event] += 1
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return trace

    operation()  # what is done once
    sys.settrace(trace)
    operation()
    sys.settrace(None)
    return events["opcode"], events["call"]


def count() -> None:
    """What Python alone executes, whatever the machine is doing."""
    calls = Calls(8, has_counters=False)
    calls.leave_python_alone()
    for name in ("dispatch", "combine"):
        instructions, functions = executed(getattr(calls, name))
        print(f"{name}, {PYTHON_ALONE}: {instructions} instructions, {functions} functions")


def profile(rounds: int) -> None:
    """Where the time of plain calls goes, by function."""
    calls = Calls(8, has_counters=False)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(rounds):
        calls.dispatch()
        calls.combine()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help="does it still run?")
    parser.add_argument("--profile", action="store_true", help="functions instead of totals")
    parser.add_argument("--count", action="store_true", help="what Python executes, which repeats")
    args = parser.parse_args(arguments)
    rounds = 20 if args.quick else args.rounds
    if args.count:
        count()
        return 0
    if args.profile:
        profile(rounds)
        return 0
    table = Table(
        "Time of a call on the host",
        ("call", "counters", "us", "torch.empty", "hook us"),
        [
            row
            for num_ranks in args.num_ranks
            for has_counters in (False, True)
            for row in rows(num_ranks, has_counters, rounds)
        ],
    )
    table.show(Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
