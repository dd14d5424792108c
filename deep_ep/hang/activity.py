"""What a rank is doing, read off its Python stack: a table of patterns over frames."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from deep_ep.hang.states import Frame, Thread


@dataclass(frozen=True)
class ThreadActivity:
    """What a thread is doing.

    Attributes:
        what: key of `PHRASES`; "runs" if no pattern fits.
        thread: its name.
        frame: the one that shows it; `None` if there is no Python frame.
        user: the innermost frame outside of libraries; `None` if there is none.
    """

    what: str
    thread: str = ""
    frame: Optional[Frame] = None  # noqa: UP045 - read at run time, by Python 3.9 as well
    user: Optional[Frame] = None  # noqa: UP045


# What each of them is in words, behind the name of a thread.
PHRASES = {
    "compiling": "is compiling",
    "initialising": "is initialising",
    "collective": "is in another collective",
    "optimiser": "is in the optimiser",
    "checkpoint": "is saving or loading a checkpoint",
    "data": "is loading data",
    "debugger": "is in a debugger",
    "importing": "is importing modules",
    "gpu": "waits for its GPU",
    "process": "waits for a program that it has started",
    "thread": "waits for another thread",
    "network": "waits for the network",
    "sleeping": "sleeps",
    "runs": "runs",
}


class _Pattern(NamedTuple):
    """A frame that shows what its thread does. All parts must be found; file names have forward slashes."""

    what: str
    file: str
    function: str = ""
    text: str = ""


def _patterns(table: str) -> tuple[_Pattern, ...]:
    return tuple(_Pattern(*row.split()) for row in table.strip().splitlines())


_COLLECTIVES = (
    r"^(_?(all_|reduce|broadcast|(monitored_)?barrier|gather|scatter|(batch_)?i?(send|recv))|wait)"
)
# What a thread does, and patterns of the file, the function and the line, with blanks between them. Where several frames fit,
# the innermost one says it. What is specific is looked for first: whoever compiles may wait for a thread while he does.
_SPECIFIC = _patterns(rf"""
debugger      (^|/)(pdb|bdb|ipdb/\w+|debugpy/.*)\.py$
compiling     /torch/_(inductor|dynamo|functorch)/
compiling     /triton/(compiler|backends|runtime/(build|autotuner))
compiling     /triton/runtime/jit\.py$                            ^(_do_compile|compile|warmup|create_binder)
compiling     /torch/utils/cpp_extension\.py$
compiling     /(deep_gemm|flashinfer|tilelang|tvm|cutlass|numba)/(.*/)?(jit|compile)
collective    /torch/distributed/distributed_c10d\.py$            {_COLLECTIVES}
collective    /torch/distributed/(_functional_collectives|nn/functional)\.py$
collective    /(pynccl|communicator|mpi4py)[\w/]*\.py$            {_COLLECTIVES}
initialising  /torch/distributed/distributed_c10d\.py$            init_process_group|new_group
initialising  /torch/distributed/(rendezvous|elastic/rendezvous/.*)\.py$
initialising  /deep_ep/(\w+/)?(construction|rendezvous|nvshmem)\.py$
initialising  /torch/cuda/__init__\.py$                           ^(_lazy_init|init|set_device)$
initialising  /(model_loader|modeling_utils|weight_utils)[\w/]*\.py$
checkpoint    /torch/(serialization|distributed/checkpoint/.*)\.py$
checkpoint    /safetensors/
data          /torch/utils/data/
data          /(datasets|webdataset|streaming)/\w
optimiser     /torch/optim/
optimiser     /torch/nn/utils/clip_grad\.py$
optimiser     /(optimizer|optimizers)/\w|/(distrib_)?optimizer\.py$
""")
_GENERAL = _patterns(r"""
gpu           /torch/cuda/(__init__|streams|graphs)\.py$          ^(synchronize|wait)
process       (^|/)subprocess\.py$                                ^(_?wait|communicate|_try_wait|run|_communicate)$
network       (^|/)(socket|ssl|http/client|urllib/request|urllib3/.*)\.py$
thread        (^|/)(threading|queue)\.py$                         ^(wait|join|get|put|acquire|_wait|__enter__)
sleeping      .*                                                  .*  \bsleep\(
sleeping      .*                                                  ^_?sleep$
""")
_IMPORT = re.compile(r"<frozen importlib")
# An import that is under way shows near the innermost frame; all that a module does when it is imported
# has such frames further out.
_NEAR = 4
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python[\d.]+/|^<")


def doing(threads: Sequence[Thread]) -> ThreadActivity | None:
    """What the main thread does.

    Args:
        threads: of a process, the main thread first.

    Returns:
        What it does; `None` if nothing is known of its threads.
    """
    thread = next((thread for thread in threads if thread.frames), None)
    if thread is None:
        return None
    frames, user = thread.frames, user_frame(thread.frames)
    for table in (_SPECIFIC, _GENERAL):
        for frame in frames:
            for pattern in table:
                if _fits(pattern, frame):
                    return ThreadActivity(pattern.what, thread.name, frame, user)
    if any(_IMPORT.match(frame.file) for frame in frames[:_NEAR]):
        imported = next((frame for frame in frames if not _IMPORT.match(frame.file)), frames[0])
        return ThreadActivity("importing", thread.name, imported, user)
    return ThreadActivity("runs", thread.name, user or frames[0], user)


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame outside of libraries; `None` if all are inside."""
    return next((frame for frame in frames if not _is_library(frame)), None)


def call_of(threads: Sequence[Thread]) -> str:
    """The call of this package in which the main thread is, by its stack; empty: in none that has a kernel."""
    thread = next((thread for thread in threads if thread.frames), None)
    inside = itertools.takewhile(_is_library, thread.frames if thread is not None else ())
    # What profiles a method stands around it, with a name of its own.
    ours = [f.function for f in inside if _is_ours(f) and not f.file.endswith("profiled.py")]
    return ours[-1] if ours and ours[-1] != "__init__" else ""


def _is_library(frame: Frame) -> bool:
    return _LIBRARY.search(_slashes(frame.file)) is not None or _is_ours(frame)


def _is_ours(frame: Frame) -> bool:
    """By the names of our modules: a program may lie in a folder of that name as well."""
    return _slashes(frame.file).rpartition("/deep_ep/")[2] in _our_modules()


@functools.cache
def _our_modules() -> frozenset[str]:
    package = Path(__file__).parents[1]
    # deep_ep_diagnose has some of them, and a list of all: programs whose stacks are read have all.
    listed = package / "modules.txt"
    if listed.is_file():
        return frozenset(listed.read_text(encoding="utf-8").split())
    return frozenset(path.relative_to(package).as_posix() for path in package.rglob("*.py"))


def _fits(pattern: _Pattern, frame: Frame) -> bool:
    return (
        re.search(pattern.file, _slashes(frame.file)) is not None
        and re.search(pattern.function, frame.function) is not None
        and re.search(pattern.text, frame.text) is not None
    )


def _slashes(file: str) -> str:
    return file.replace("\\", "/")
