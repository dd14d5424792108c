"""Every environment variable of the package: a row each, read only here, at the time of use.

A row is called for its value, as in `env.timeout_s()`. The line below it is its meaning, as the documentation prints it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Generic, NamedTuple, TypeVar

from deep_ep.errors import EPArgumentError

T = TypeVar("T")
# Where variables are read.
_environment: Mapping[str, str] = os.environ
# In the order of the documentation.
VARIABLES: list[Variable[Any]] = []


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a text may be.

    Attributes:
        words: as the documentation prints it.
        allowed: as errors say it.
        parse: makes the value; a `ValueError` or `KeyError` means that it is not allowed.
        holds: whether that value is.
    """

    words: str
    allowed: str
    parse: Callable[[str], T]
    holds: Callable[[T], bool] = lambda value: True

    def read(self, text: str) -> T:
        """The value; raises `ValueError` or `KeyError`."""
        value = self.parse(text)
        if not self.holds(value):
            raise ValueError
        return value


@dataclass(frozen=True, eq=False)
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

    def __post_init__(self) -> None:
        VARIABLES.append(self)

    def __call__(self) -> T:
        """The value.

        Raises:
            EPArgumentError: a text that is not allowed.
        """
        try:
            return self.kind.read(self.text())
        except (ValueError, KeyError):
            raise self.error(self.kind.allowed) from None

    def text(self) -> str:
        """The text given by the user, or the default."""
        return _environment.get(self.name, "").strip() or self.default

    def error(self, allowed: str) -> EPArgumentError:
        """The error for a text that cannot be used."""
        return EPArgumentError(
            f"environment: {self.name} is {self.text()!r}; it must be {allowed}. "
            f"Correct it or unset it (default: {self.default or 'unset'})."
        )


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


class DiagnoseMode(NamedTuple):
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


def _digits(text: str) -> int:
    """A number of at least 0 that fits every integer type it may come to."""
    if re.fullmatch(r"\d{1,18}", text, re.ASCII) is None:
        raise ValueError
    return int(text)


_SWITCH = Kind("0 | 1", "0 or 1", lambda text: ("0", "1").index(text) == 1)
_COUNT = Kind("int", "a positive integer of at most 18 digits", _digits, lambda n: n > 0)
# Numbers that can be waited for.
_SECONDS = Kind("seconds", "a number of at least 0 (and below 1e9)", float, lambda s: 0 <= s < 1e9)
_SOME_SECONDS = Kind(
    "seconds", "a number of seconds above 0 (and below 1e9)", float, lambda s: 0 < s < 1e9
)
_LIMIT = Kind("float", _SECONDS.allowed, float, _SECONDS.holds)
_FOLDER = Kind("folder", "a path", Path)


def _choice(*allowed: str) -> Kind[str]:
    return Kind(" | ".join(allowed), " or ".join(allowed), str, ("", *allowed).__contains__)


def _optional(kind: Kind[T]) -> Kind[T | None]:
    return Kind(kind.words, kind.allowed, lambda text: kind.read(text) if text else None)


def _up_to(most: int) -> Kind[int]:
    return Kind("int", f"an integer from 0 to {most}", _digits, lambda n: n <= most)


def _order(plain: str) -> Kind[tuple[str, int]]:
    """A policy of ordering and its seed (0 where the policy needs none)."""

    def parse(text: str) -> tuple[str, int]:
        policy, _, seed = text.partition(":")
        return (policy, _digits(seed)) if policy == "random" else (text, 0)

    allowed = f"{plain} or random:SEED with a seed >= 0 of at most 18 digits"
    return Kind(
        f"{plain} | random:SEED", allowed, parse, lambda order: order[0] in (plain, "random")
    )


def _shape(text: str) -> tuple[int, int]:
    given = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d?)", text or "1x1", re.ASCII)
    if given is None:
        raise ValueError
    return (int(given[1]), int(given[2])) if text else (0, 0)


def _diagnose_mode(text: str) -> DiagnoseMode:
    mode, _, number = ("async:20" if text == "1" else text).partition(":")
    if text == "0":
        return DiagnoseMode("off")
    if mode == "sync":
        return DiagnoseMode(mode, steps=_COUNT.read(number))
    if mode == "async":
        return DiagnoseMode(mode, seconds=_SOME_SECONDS.read(number))
    raise ValueError


_DIAGNOSE_MODE = Kind(
    "0 | 1 | sync:STEPS | async:SECONDS",
    "0, 1, sync:STEPS with STEPS at least 1, or async:SECONDS above 0",
    _diagnose_mode,
)


# ---- the variables

backend = Variable("DEEP_EP_BACKEND", _choice("cpu", "cuda"))
"""backend to use; unset: cuda where there is a GPU, else cpu"""

timeout_s = Variable("DEEP_EP_TIMEOUT_S", _SOME_SECONDS, "100")
"""how long an operation waits for a rank before it raises"""

ranks_per_node = Variable("DEEP_EP_RANKS_PER_NODE", _optional(_COUNT))
"""ranks of one NVLink domain; unset: from the host names"""

cpu_clock = Variable("DEEP_EP_CPU_CLOCK", _choice("rank", "wall"), "rank")
"""clock of the cpu backend: one core per rank, or wall"""

clock_interval_s = Variable("DEEP_EP_CLOCK_INTERVAL_S", _optional(_SECONDS))
"""longest time between two measurements of clocks within operations, 0: none; unset: 20 on GPUs, 0 on the cpu backend"""

verify = Variable("DEEP_EP_VERIFY", _SWITCH, "0")
"""1: rows travel with their number and a checksum, and are compared on arrival, in normal operations on every hop"""

# Chosen: a call takes 200 bytes, and each frame about 0.2 us of it.
recorder = Variable("DEEP_EP_RECORDER", _up_to(1 << 16), "64")
"""calls that every Buffer remembers for the case of a hang, 0: none, and no lines or dumps of hangs"""

recorder_frames = Variable("DEEP_EP_RECORDER_FRAMES", _up_to(64), "1")
"""frames of the program's stack that are remembered with each call, from the line that called; 0: none"""

warn_s = Variable("DEEP_EP_WARN_S", _SECONDS, "10")
"""how long an operation waits until one rank says for whom and why, 0: until shortly before it times out"""

dump_dir = Variable("DEEP_EP_DUMP_DIR", _optional(_FOLDER))
"""where a dump of all ranks goes when an operation times out; unset: beside TORCH_FR_DUMP_TEMP_FILE, or nowhere"""

bulk_copies = Variable("DEEP_EP_BULK_COPIES", _optional(_SWITCH))
"""1: normal operations move whole rows through shared memory, on GPUs by bulk copies (TMA), where it suffices; unset: 1 on GPUs, 0 on the cpu backend"""

schedule = Variable("DEEP_EP_SCHEDULE", _order("round-robin"), "round-robin")
"""order in which the cpu backend runs the fibers of a kernel"""

delivery = Variable("DEEP_EP_DELIVERY", _order("in-order"), "in-order")
"""order in which the cpu backend delivers puts that no fence orders"""

any_launch_shape = Variable(
    "DEEP_EP_LAUNCH_SHAPE", Kind("BLOCKSxWARPS", "BLOCKSxWARPS, such as 4x8", _shape)
)
"""blocks of an operation and warps of a block; unset: automatic"""

inject = Variable("DEEP_EP_INJECT", Kind("FAULT[,FAULT...]", "faults", str))
"""faults every Buffer injects, as --inject takes them"""

diagnose = Variable("DEEP_EP_DIAGNOSE", _DIAGNOSE_MODE, "0")
"""every Buffer watches itself: every STEPS operations, or every SECONDS; 1 is async:20, with kernels of other packages async:1"""

diagnose_dir = Variable("DEEP_EP_DIAGNOSE_DIR", _optional(_FOLDER))
"""where rank 0 appends a record per window; unset: nowhere"""

export_v2 = Variable("DEEP_EP_EXPORT_V2", _SWITCH, "1")
"""0: `deep_ep` has no `ElasticBuffer`, for programs that prefer it wherever it is"""

phases = Variable("DEEP_EP_PHASES", _SWITCH, "0")
"""1: every Buffer counts, and rank 0 logs where its time went when the buffer ends"""

tuned = Variable(
    "DEEP_EP_TUNED",
    Kind("file", "a path", lambda text: Path(os.path.expanduser(text))),
    "~/.cache/deep_ep/tuned.json",
)
"""where `python -m deep_ep.tune` remembers what it measured"""

nvshmem_qp_depth = Variable("NVSHMEM_QP_DEPTH", _COUNT, "1024")
"""depth of NVSHMEM's queue pairs, as Buffer.nvshmem_qp_depth"""

local_world_size = Variable("LOCAL_WORLD_SIZE", _optional(_COUNT))
"""ranks of this host, as torchrun says; Config's size hints allow for nodes of this size"""

master_addr = Variable("MASTER_ADDR", Kind("host", "a host", str), "127.0.0.1")
"""where the ranks of `deep_ep.utils.envs.init_dist` meet"""

master_port = Variable("MASTER_PORT", _COUNT, "8361")
"""the port there"""

world_size = Variable("WORLD_SIZE", _COUNT, "1")
"""nodes, not ranks, for `deep_ep.utils.envs.init_dist`"""

node_rank = Variable("RANK", Kind("int", "an integer of at least 0", _digits), "0")
"""of the node, for `deep_ep.utils.envs.init_dist`"""

# Of the existing analyser, with its names and defaults.
classic_enable = Variable("DEEPEP_DIAGNOSE_ENABLE", _SWITCH, "1")
"""0: `Diagnose` does nothing"""

classic_interval_s = Variable("DEEPEP_DIAGNOSE_INTERVAL", _SOME_SECONDS, "20")
"""from one asynchronous diagnosis to the next"""

classic_warming_time_s = Variable("DEEPEP_DIAGNOSE_WARMING_TIME", _optional(_SECONDS))
"""what is measured this long is not judged; unset: the interval"""

classic_sync_step = Variable("DEEPEP_DIAGNOSE_SYNC_STEP", _COUNT, "580")
"""calls from one synchronous diagnosis to the next"""

classic_log_path = Variable("DEEPEP_DIAGNOSE_LOG_PATH", _FOLDER, ".")
"""where `diagnose_rank{N}.log` is written"""

classic_log_details = Variable("DEEPEP_DIAGNOSE_LOG_DETAILS", _SWITCH, "0")
"""1: the log of rank 0 has the matrices too"""

classic_threshold_col = Variable("DEEPEP_DIAGNOSE_THRESHOLD_COL", _LIMIT, "3.0")
"""a column is abnormal above this, over the mean"""

classic_threshold_row = Variable("DEEPEP_DIAGNOSE_THRESHOLD_ROW", _LIMIT, "3.0")
"""a row is abnormal above this, over the mean"""

classic_threshold_point = Variable("DEEPEP_DIAGNOSE_THRESHOLD_POINT", _LIMIT, "5.0")
"""a cell is abnormal above this, over the mean"""

classic_excluding_zeros = Variable("DEEPEP_DIAGNOSE_EXCLUDING_ZEROS", _SWITCH, "0")
"""1: the mean for cells leaves zeros out"""


def launch_shape(max_warps: int, max_threads: int) -> tuple[int, int]:
    """Blocks and warps per block; `(0, 0)` is automatic.

    Args:
        max_warps: what a block may have.
        max_threads: what a launch may have, 32 to a warp.
    """
    blocks, warps = any_launch_shape()
    if warps > max_warps or blocks * warps * 32 > max_threads:
        most = f"at most {max_warps} warps per block and {max_threads // 32} in all"
        raise any_launch_shape.error(f"{any_launch_shape.kind.allowed}, with {most}")
    return blocks, warps


def nodes() -> tuple[str, int, int]:
    """Where ranks meet, how many nodes there are, and which this is, for `deep_ep.utils.envs.init_dist`."""
    num_nodes, node = world_size(), node_rank()
    if node >= num_nodes:
        raise node_rank.error(f"below WORLD_SIZE = {num_nodes}")
    return f"tcp://{master_addr()}:{master_port()}", num_nodes, node


def torch_dump_prefix() -> str:
    """Path, without the rank, of what torch's flight recorder writes; `""` if nobody says."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return next((_environment[name] for name in names if _environment.get(name)), "")


def of_a_helper() -> dict[str, str]:
    """The environment for a process that helps this one: NumPy there takes one core."""
    threads = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(threads, "1")}
