"""How fast `python -m deep_ep.diagnose trace` reads a large trace, and what memory it takes.

The trace is made up, of events as the profiler exports them for a rank of a trainer: steps of a dispatch, forty operators
with a kernel each, and a combine. The result is compared with what was written.

    python benchmarks/trace_time.py [--megabytes 2300] [--gzip]
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_OPERATORS = 40
STEP_US = 1500
# Operators, and their kernels: name, begin and length in the step.
NOTIFY = ("void deep_ep::intranode::notify_dispatch<8>(int const*, int*, int const*, int)", 20, 15)
DISPATCH = ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*)", 60, 200)
COMBINE = ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(float*)", 1210, 180)
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
DIMS = [[4096, 7168], [4096, 8], [4096, 8]]
# In the text of a step, what differs from one to the next.
VARIES = re.compile(r'"(time|number)\+(\d+)"')


def event(category: str, name: str, begin: int, lasts: int, thread: int, **arguments: Any) -> Any:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 4711,
        "tid": thread,
        "ts": f"time+{begin}",
        "dur": lasts,
        "args": arguments,
    }


def operator(name: str, begin: int, lasts: int, number: int) -> Any:
    arguments = {
        "External id": f"number+{number}",
        "Record function id": 0,
        "Concrete Inputs": ["", "", ""],
        "Input type": ["c10::BFloat16", "long int", "float"],
        "Input Strides": [[7168, 1], [8, 1], [8, 1]],
        "Input Dims": DIMS,
        "Fwd thread id": 0,
    }
    return event("cpu_op", name, begin, lasts, 4711, **arguments)


def launch(kernel: tuple[str, int, int], number: int) -> Iterator[Any]:
    """The call that launches a kernel, the kernel, and the arrow between them."""
    name, begin, lasts = kernel
    ids = {"External id": f"number+{number}", "correlation": f"number+{number}"}
    yield event("cuda_runtime", "cudaLaunchKernel", begin - 10, 5, 4711, cbid=211, **ids)
    shape: dict[str, Any] = {"device": 0, "context": 1, "stream": 7, "registers per thread": 168}
    shape |= {"shared memory": 233472, "grid": [132, 1, 1], "block": [384, 1, 1]}
    yield event("kernel", name, begin, lasts, 7, **shape, **ids)
    for end in ("s", "f"):
        arrow = {"ph": end, "id": f"number+{number}", "cat": "ac2g", "name": "ac2g"}
        yield {**arrow, "pid": 4711, "tid": 7, "ts": f"time+{begin}"}


def events_of_step() -> Iterator[Any]:
    yield operator("FusedDispatch", 0, 250, 0)
    for kernel in (NOTIFY, DISPATCH):
        yield from launch(kernel, 0)
    for i in range(1, NUM_OPERATORS + 1):
        begin = 300 + 20 * i
        yield event("python_function", f"layers/experts.py({i}): forward", begin - 12, 18, 4711)
        yield operator("aten::add_", begin - 12, 15, i)
        yield from launch((ELEMENTWISE, begin, 20), i)
    yield operator("FusedCombine", 1195, 250, NUM_OPERATORS + 1)
    yield from launch(COMBINE, NUM_OPERATORS + 1)


def write(path: Path, num_bytes: int) -> tuple[int, int]:
    """A trace of about that many bytes before it is packed; its steps, and its true size."""
    text = ",\n".join(json.dumps(each, indent=2) for each in events_of_step())
    parts = VARIES.split(text)
    num_steps, written = 0, 0
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        written += file.write('{"distributedInfo": {"rank": 0},\n"traceEvents": [\n')
        while written < num_bytes:
            first = {"time": num_steps * STEP_US, "number": num_steps * (NUM_OPERATORS + 2)}
            step = list(parts)
            for i in range(1, len(parts), 3):
                step[i], step[i + 1] = "", str(first[parts[i]] + int(parts[i + 1]))
            written += file.write((",\n" if num_steps else "") + "".join(step))
            num_steps += 1
        written += file.write("\n]}\n")
    return num_steps, written


def read_table(text: str) -> list[dict[str, str]]:
    """The first table of what `--csv` prints."""
    return list(csv.DictReader(text.split("\n\n")[0].splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2300, help="of the trace, not packed")
    parser.add_argument("--gzip", action="store_true", help="read it packed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deep_ep_trace_") as folder:
        path = Path(folder, "trace_rank0.json.gz" if args.gzip else "trace_rank0.json")
        num_steps, num_bytes = write(path, args.megabytes * 10**6)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "deep_ep.diagnose", "trace", str(path), "--csv"]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
    rows = [(row["name"], row["count"], row["mean_us"]) for row in read_table(done.stdout)]
    expected = [("FusedDispatch", NOTIFY[2] + DISPATCH[2]), ("FusedCombine", COMBINE[2])]
    assert rows == [(name, str(num_steps), f"{us:.1f}") for name, us in expected], rows
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    num_kernels = num_steps * (NUM_OPERATORS + 3)
    print(
        f"{num_bytes / 1e9:.2f} GB, {num_kernels} kernels, {2 * num_steps} exchanges: {seconds:.1f} s, "
        f"{num_bytes / 1e6 / seconds:.0f} MB/s, {peak / 1024:.0f} MiB at most"
    )


if __name__ == "__main__":
    main()
