"""Every environment variable of the package: a row each, read only here, at the time of use.

A row is called for its value, as in `env.timeout_s()`. The line below it is its meaning, as the documentation prints it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Generic, NamedTuple, TypeVar

from deep_ep.errors import EPArgumentError

# Chosen: a call takes 200 bytes.
MOST_RECORDED = 1 << 16
# Chosen: each takes about 0.2 us of a call.
MOST_FRAMES = 64

T = TypeVar("T")
# Where variables are read.
_environment: Mapping[str, str] = os.environ


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a text may be.

    Attributes:
        words: as the documentation prints it.
        parse: makes the value; a `ValueError` says what is allowed.
    """

    words: str
    parse: Callable[[str], T]


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Attributes:
        name: as users write it.
        kind: what it may be.
        default: what an unset one stands for; `""` if that is no value.
    """

    name: str
    kind: Kind[T]
    default: str = ""

    def __call__(self) -> T:
        """The value.

        Raises:
            EPArgumentError: a text that is not allowed.
        """
        try:
            return self.kind.parse(self.text())
        except ValueError as error:
            raise self.error(str(error)) from None

    def text(self) -> str:
        """The text given by the user, or the default."""
        return _environment.get(self.name, "").strip() or self.default

    def error(self, allowed: str) -> EPArgumentError:
        """The error for a text that cannot be used."""
        return EPArgumentError(
            f"environment: {self.name} is {self.text()!r}; it must be {allowed}. "
            f"Correct it or unset it (default: {self.default or 'unset'})."
        )


# In the order of the documentation.
VARIABLES: list[Variable[Any]] = []


def _row(name: str, kind: Kind[T], default: str = "") -> Variable[T]:
    """One more of `VARIABLES`."""
    row = Variable(name, kind, default)
    VARIABLES.append(row)
    return row


def everything() -> dict[str, str]:
    """All variables of this process, whoever reads them."""
    return dict(os.environ)


@contextlib.contextmanager
def read_from(environment: Mapping[str, str]) -> Iterator[None]:
    """Lets everything here answer for another environment within a `with` block; not for threads."""
    global _environment
    before, _environment = _environment, environment
    try:
        yield
    finally:
        _environment = before


class Order(NamedTuple):
    """A policy of ordering and its seed (0 where the policy needs none)."""

    policy: str
    seed: int


@dataclass(frozen=True)
class DiagnoseMode:
    """When the ranks of a buffer are compared.

    Attributes:
        mode: "off", "sync" (every `steps` operations) or "async" (every `seconds`).
        steps: operations of a window.
        seconds: length of a window.
    """

    mode: str
    steps: int = 0
    seconds: float = 0.0


# ---- what a text may be


def _choice(*allowed: str) -> Kind[str]:
    def parse(text: str) -> str:
        if text and text not in allowed:
            raise ValueError(" or ".join(allowed))
        return text

    return Kind(" | ".join(allowed), parse)


def _optional(kind: Kind[T]) -> Kind[T | None]:
    return Kind(kind.words, lambda text: kind.parse(text) if text else None)


def _is_number(text: str) -> bool:
    """Whether these are digits that fit every integer type they may come to."""
    return re.fullmatch(r"\d{1,18}", text, re.ASCII) is not None


def _count(text: str) -> int:
    if not _is_number(text) or int(text) == 0:
        raise ValueError("a positive integer of at most 18 digits")
    return int(text)


def _up_to(most: int) -> Kind[int]:
    def parse(text: str) -> int:
        if not _is_number(text) or int(text) > most:
            raise ValueError(f"an integer from 0 to {most}")
        return int(text)

    return Kind("int", parse)


def _finite(text: str) -> float:
    """A number of at least 0 that can be waited for, or nan."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0 <= value < 1e9 else math.nan


def _at_least_0(text: str) -> float:
    value = _finite(text)
    if math.isnan(value):
        raise ValueError("a number of at least 0 (and below 1e9)")
    return value


def _above_0(text: str) -> float:
    value = _finite(text)
    if not value > 0:
        raise ValueError("a number of seconds above 0 (and below 1e9)")
    return value


def _order(plain: str) -> Kind[Order]:
    def parse(text: str) -> Order:
        policy, _, seed = text.partition(":")
        if text == plain:
            return Order(plain, 0)
        if policy != "random" or not _is_number(seed):
            raise ValueError(f"{plain} or random:SEED with a seed >= 0 of at most 18 digits")
        return Order("random", int(seed))

    return Kind(f"{plain} | random:SEED", parse)


def _shape(max_warps: int, max_threads: int) -> Kind[tuple[int, int]]:
    def parse(text: str) -> tuple[int, int]:
        given = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d?)", text, re.ASCII)
        blocks, warps = map(int, given.groups()) if given else (0, 0)
        if text and not (0 < warps <= max_warps and blocks * warps * 32 <= max_threads):
            raise ValueError(
                f"BLOCKSxWARPS, such as 4x8, with at most {max_warps} warps per block and "
                f"{max_threads // 32} in all"
            )
        return blocks, warps

    return Kind("BLOCKSxWARPS", parse)


def _diagnose_mode(text: str) -> DiagnoseMode:
    mode, _, number = ("async:20" if text == "1" else text).partition(":")
    if text == "0":
        return DiagnoseMode("off")
    if mode == "sync" and _is_number(number) and int(number):
        return DiagnoseMode("sync", steps=int(number))
    if mode == "async" and _finite(number) > 0:
        return DiagnoseMode("async", seconds=float(number))
    raise ValueError("0, 1, sync:STEPS with STEPS at least 1, or async:SECONDS above 0")


def _signal(text: str) -> int:
    number = int(text) if text.isdecimal() else getattr(signal.Signals, text, 0)
    if text != "0" and number not in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP}:
        raise ValueError("the name or number of a signal that can be handled, or 0")
    return int(number)


_SWITCH = Kind("0 | 1", lambda text: _choice("0", "1").parse(text) == "1")
_COUNT = Kind("int", _count)
_SECONDS, _SOME_SECONDS = Kind("seconds", _at_least_0), Kind("seconds", _above_0)
_LIMIT = Kind("float", _at_least_0)
_FOLDER = Kind("folder", Path)


# ---- the variables

backend = _row("DEEP_EP_BACKEND", _choice("cpu", "cuda"))
"""backend to use; unset: cuda where there is a GPU, else cpu"""

timeout_s = _row("DEEP_EP_TIMEOUT_S", _SOME_SECONDS, "100")
"""how long an operation waits for a rank before it raises"""

ranks_per_node = _row("DEEP_EP_RANKS_PER_NODE", _optional(_COUNT))
"""ranks of one NVLink domain; unset: from the host names"""

cpu_clock = _row("DEEP_EP_CPU_CLOCK", _choice("rank", "wall"), "rank")
"""clock of the cpu backend: one core per rank, or wall"""

clock_interval_s = _row("DEEP_EP_CLOCK_INTERVAL_S", _optional(_SECONDS))
"""longest time between two measurements of clocks within operations, 0: none; unset: 20 on GPUs, 0 on the cpu backend"""

verify = _row("DEEP_EP_VERIFY", _SWITCH, "0")
"""1: rows travel with their number and a checksum, and are compared on arrival, in normal operations on every hop"""

recorder = _row("DEEP_EP_RECORDER", _up_to(MOST_RECORDED), "64")
"""calls that every Buffer remembers for the case of a hang, 0: none"""

recorder_frames = _row("DEEP_EP_RECORDER_FRAMES", _up_to(MOST_FRAMES), "1")
"""frames of the program's stack that are remembered with each call, from the line that called; 0: none"""

warn_s = _row("DEEP_EP_WARN_S", _SECONDS, "10")
"""how long an operation waits until one rank says for whom and why, 0: it does not"""

dump_dir = _row("DEEP_EP_DUMP_DIR", _optional(_FOLDER))
"""where a dump of all ranks goes when an operation times out; unset: beside TORCH_FR_DUMP_TEMP_FILE, or nowhere"""

bulk_copies = _row("DEEP_EP_BULK_COPIES", _optional(_SWITCH))
"""1: normal operations move whole rows through shared memory, on GPUs by bulk copies (TMA), where it suffices; unset: 1 on GPUs, 0 on the cpu backend"""

schedule = _row("DEEP_EP_SCHEDULE", _order("round-robin"), "round-robin")
"""order in which the cpu backend runs the fibers of a kernel"""

delivery = _row("DEEP_EP_DELIVERY", _order("in-order"), "in-order")
"""order in which the cpu backend delivers puts that no fence orders"""

any_launch_shape = _row("DEEP_EP_LAUNCH_SHAPE", _shape(max_warps=32, max_threads=1 << 31))
"""blocks of an operation and warps of a block; unset: automatic"""

inject = _row("DEEP_EP_INJECT", Kind("FAULT[,FAULT...]", str))
"""faults every Buffer injects, as --inject takes them"""

diagnose = _row("DEEP_EP_DIAGNOSE", Kind("0 | 1 | sync:STEPS | async:SECONDS", _diagnose_mode), "0")
"""every Buffer watches itself: every STEPS operations, or every SECONDS; 1 is async:20"""

diagnose_dir = _row("DEEP_EP_DIAGNOSE_DIR", _optional(_FOLDER))
"""where rank 0 appends a record per window; unset: nowhere"""

export_v2 = _row("DEEP_EP_EXPORT_V2", _SWITCH, "1")
"""0: `deep_ep` has no `ElasticBuffer`, for programs that prefer it wherever it is"""

phases = _row("DEEP_EP_PHASES", _SWITCH, "0")
"""1: every Buffer counts, and rank 0 logs where its time went when the buffer ends"""

tuned = _row(
    "DEEP_EP_TUNED",
    Kind("file", lambda text: Path(os.path.expanduser(text))),
    "~/.cache/deep_ep/tuned.json",
)
"""where `python -m deep_ep.tune` remembers what it measured"""

dump_signal = _row("DEEP_EP_DUMP_SIGNAL", Kind("signal | 0", _signal), "SIGUSR2")
"""signal on which a process with a Buffer writes a dump; 0: none"""

nvshmem_qp_depth = _row("NVSHMEM_QP_DEPTH", _COUNT, "1024")
"""depth of NVSHMEM's queue pairs, as Buffer.nvshmem_qp_depth"""

local_world_size = _row("LOCAL_WORLD_SIZE", _optional(_COUNT))
"""ranks of this host, as torchrun says; Config's size hints allow for nodes of this size"""

master_addr = _row("MASTER_ADDR", Kind("host", str), "127.0.0.1")
"""where the ranks of `deep_ep.utils.envs.init_dist` meet"""

master_port = _row("MASTER_PORT", _COUNT, "8361")
"""the port there"""

world_size = _row("WORLD_SIZE", _COUNT, "1")
"""nodes, not ranks, for `deep_ep.utils.envs.init_dist`"""

node_rank = _row("RANK", Kind("int", str), "0")
"""of the node, for `deep_ep.utils.envs.init_dist`"""

# Of the existing analyser, with its names and defaults.
classic_enable = _row("DEEPEP_DIAGNOSE_ENABLE", _SWITCH, "1")
"""0: `Diagnose` does nothing"""

classic_interval_s = _row("DEEPEP_DIAGNOSE_INTERVAL", _SOME_SECONDS, "20")
"""from one asynchronous diagnosis to the next"""

classic_warming_time_s = _row("DEEPEP_DIAGNOSE_WARMING_TIME", _optional(_SECONDS))
"""what is measured this long is not judged; unset: the interval"""

classic_sync_step = _row("DEEPEP_DIAGNOSE_SYNC_STEP", _COUNT, "580")
"""calls from one synchronous diagnosis to the next"""

classic_log_path = _row("DEEPEP_DIAGNOSE_LOG_PATH", _FOLDER, ".")
"""where `diagnose_rank{N}.log` is written"""

classic_log_details = _row("DEEPEP_DIAGNOSE_LOG_DETAILS", _SWITCH, "0")
"""1: the log of rank 0 has the matrices too"""

classic_threshold_col = _row("DEEPEP_DIAGNOSE_THRESHOLD_COL", _LIMIT, "3.0")
"""a column is abnormal above this, over the mean"""

classic_threshold_row = _row("DEEPEP_DIAGNOSE_THRESHOLD_ROW", _LIMIT, "3.0")
"""a row is abnormal above this, over the mean"""

classic_threshold_point = _row("DEEPEP_DIAGNOSE_THRESHOLD_POINT", _LIMIT, "5.0")
"""a cell is abnormal above this, over the mean"""

classic_excluding_zeros = _row("DEEPEP_DIAGNOSE_EXCLUDING_ZEROS", _SWITCH, "0")
"""1: the mean for cells leaves zeros out"""


def launch_shape(max_warps: int, max_threads: int) -> tuple[int, int]:
    """Blocks and warps per block; `(0, 0)` is automatic.

    Args:
        max_warps: what a block may have.
        max_threads: what a launch may have, 32 to a warp.
    """
    return dataclasses.replace(any_launch_shape, kind=_shape(max_warps, max_threads))()


def nodes() -> tuple[str, int, int]:
    """Where ranks meet, how many nodes there are, and which this is, for `deep_ep.utils.envs.init_dist`."""
    num_nodes, node = world_size(), node_rank()
    if not _is_number(node) or int(node) >= num_nodes:
        raise node_rank.error(f"an integer of at least 0, below WORLD_SIZE = {num_nodes}")
    return f"tcp://{master_addr()}:{master_port()}", num_nodes, int(node)


def torch_dump_prefix() -> str:
    """Path, without the rank, of what torch's flight recorder writes; `""` if nobody says."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return next((_environment[name] for name in names if _environment.get(name)), "")


def of_a_helper() -> dict[str, str]:
    """The environment for a process that helps this one: NumPy there takes one core."""
    threads = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(threads, "1")}
