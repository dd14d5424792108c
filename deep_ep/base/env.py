"""Every environment variable of the package: declared once, read only here, at the time of use."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deep_ep.errors import EPArgumentError

# Chosen: a call takes 200 bytes.
MOST_RECORDED = 1 << 16
# Chosen: each takes about 0.2 us of a call.
MOST_FRAMES = 64

# Where variables are read.
_environment: Mapping[str, str] = os.environ


@dataclass(frozen=True)
class Variable:
    """One environment variable, as the documentation prints it."""

    name: str
    type: str
    default: str
    meaning: str

    def text(self) -> str:
        """The value given by the user, or the default."""
        return _environment.get(self.name, "").strip() or self.default

    def error(self, allowed: str) -> EPArgumentError:
        """The error for a value that cannot be used."""
        return EPArgumentError(
            f"environment: {self.name} is {self.text()!r}; it must be {allowed}. "
            f"Correct it or unset it (default: {self.default or 'unset'})."
        )


BACKEND = Variable(
    "DEEP_EP_BACKEND",
    "cpu | cuda",
    "",
    "backend to use; unset: cuda where there is a GPU, else cpu",
)
TIMEOUT_S = Variable(
    "DEEP_EP_TIMEOUT_S", "seconds", "100", "how long an operation waits for a rank before it raises"
)
RANKS_PER_NODE = Variable(
    "DEEP_EP_RANKS_PER_NODE", "int", "", "ranks of one NVLink domain; unset: from the host names"
)
CPU_CLOCK = Variable(
    "DEEP_EP_CPU_CLOCK",
    "rank | wall",
    "rank",
    "clock of the cpu backend: one core per rank, or wall",
)
CLOCK_INTERVAL_S = Variable(
    "DEEP_EP_CLOCK_INTERVAL_S",
    "seconds",
    "",
    "longest time between two measurements of clocks within operations, 0: none; unset: 20 on GPUs, "
    "0 on the cpu backend",
)
VERIFY = Variable(
    "DEEP_EP_VERIFY",
    "0 | 1",
    "0",
    "1: rows travel with their number and a checksum, and are compared on arrival, in normal operations on every "
    "hop",
)
RECORDER = Variable(
    "DEEP_EP_RECORDER",
    "int",
    "64",
    "calls that every Buffer remembers for the case of a hang, 0: none",
)
RECORDER_FRAMES = Variable(
    "DEEP_EP_RECORDER_FRAMES",
    "int",
    "1",
    "frames of the program's stack that are remembered with each call, from the line that called; 0: none",
)
WARN_S = Variable(
    "DEEP_EP_WARN_S",
    "seconds",
    "10",
    "how long an operation waits until one rank says for whom and why, 0: it does not",
)
DUMP_DIR = Variable(
    "DEEP_EP_DUMP_DIR",
    "folder",
    "",
    "where a dump of all ranks goes when an operation times out; unset: beside TORCH_FR_DUMP_TEMP_FILE, or nowhere",
)
BULK_COPIES = Variable(
    "DEEP_EP_BULK_COPIES",
    "0 | 1",
    "",
    "1: normal operations move whole rows through shared memory, on GPUs by bulk copies (TMA), where it "
    "suffices; unset: 1 on GPUs, 0 on the cpu backend",
)
SCHEDULE = Variable(
    "DEEP_EP_SCHEDULE",
    "round-robin | random:SEED",
    "round-robin",
    "order in which the cpu backend runs the fibers of a kernel",
)
DELIVERY = Variable(
    "DEEP_EP_DELIVERY",
    "in-order | random:SEED",
    "in-order",
    "order in which the cpu backend delivers puts that no fence orders",
)
LAUNCH_SHAPE = Variable(
    "DEEP_EP_LAUNCH_SHAPE",
    "BLOCKSxWARPS",
    "",
    "blocks of an operation and warps of a block; unset: automatic",
)
INJECT = Variable(
    "DEEP_EP_INJECT", "FAULT[,FAULT...]", "", "faults every Buffer injects, as --inject takes them"
)
DIAGNOSE = Variable(
    "DEEP_EP_DIAGNOSE",
    "0 | 1 | sync:STEPS | async:SECONDS",
    "0",
    "every Buffer watches itself: every STEPS operations, or every SECONDS; 1 is async:20",
)
DIAGNOSE_DIR = Variable(
    "DEEP_EP_DIAGNOSE_DIR", "folder", "", "where rank 0 appends a record per window; unset: nowhere"
)
PHASES = Variable(
    "DEEP_EP_PHASES",
    "0 | 1",
    "0",
    "1: every Buffer counts, and rank 0 logs where its time went when the buffer ends",
)
TUNED = Variable(
    "DEEP_EP_TUNED",
    "file",
    "~/.cache/deep_ep/tuned.json",
    "where `python -m deep_ep.tune` remembers what it measured",
)
NVSHMEM_QP_DEPTH = Variable(
    "NVSHMEM_QP_DEPTH", "int", "1024", "depth of NVSHMEM's queue pairs, as Buffer.nvshmem_qp_depth"
)
LOCAL_WORLD_SIZE = Variable(
    "LOCAL_WORLD_SIZE",
    "int",
    "",
    "ranks of this host, as torchrun says; Config's size hints allow for nodes of this size",
)
MASTER_ADDR = Variable(
    "MASTER_ADDR", "host", "127.0.0.1", "where the ranks of `deep_ep.utils.envs.init_dist` meet"
)
MASTER_PORT = Variable("MASTER_PORT", "int", "8361", "the port there")
WORLD_SIZE = Variable(
    "WORLD_SIZE", "int", "1", "nodes, not ranks, for `deep_ep.utils.envs.init_dist`"
)
RANK = Variable("RANK", "int", "0", "of the node, for `deep_ep.utils.envs.init_dist`")
# Of the existing analyser, with its names and defaults; `deep_ep.diagnose.Diagnose` follows them.
CLASSIC_ENABLE = Variable("DEEPEP_DIAGNOSE_ENABLE", "0 | 1", "1", "0: `Diagnose` does nothing")
CLASSIC_INTERVAL = Variable(
    "DEEPEP_DIAGNOSE_INTERVAL", "seconds", "20", "from one asynchronous diagnosis to the next"
)
CLASSIC_WARMING_TIME = Variable(
    "DEEPEP_DIAGNOSE_WARMING_TIME",
    "seconds",
    "",
    "what is measured this long is not judged; unset: the interval",
)
CLASSIC_SYNC_STEP = Variable(
    "DEEPEP_DIAGNOSE_SYNC_STEP", "int", "580", "calls from one synchronous diagnosis to the next"
)
CLASSIC_LOG_PATH = Variable(
    "DEEPEP_DIAGNOSE_LOG_PATH", "folder", ".", "where `diagnose_rank{N}.log` is written"
)
CLASSIC_LOG_DETAILS = Variable(
    "DEEPEP_DIAGNOSE_LOG_DETAILS", "0 | 1", "0", "1: the log of rank 0 has the matrices too"
)
CLASSIC_THRESHOLD_COL = Variable(
    "DEEPEP_DIAGNOSE_THRESHOLD_COL",
    "float",
    "3.0",
    "a column is abnormal above this, over the mean",
)
CLASSIC_THRESHOLD_ROW = Variable(
    "DEEPEP_DIAGNOSE_THRESHOLD_ROW", "float", "3.0", "a row is abnormal above this, over the mean"
)
CLASSIC_THRESHOLD_POINT = Variable(
    "DEEPEP_DIAGNOSE_THRESHOLD_POINT",
    "float",
    "5.0",
    "a cell is abnormal above this, over the mean",
)
CLASSIC_EXCLUDING_ZEROS = Variable(
    "DEEPEP_DIAGNOSE_EXCLUDING_ZEROS", "0 | 1", "0", "1: the mean for cells leaves zeros out"
)

DUMP_SIGNAL = Variable(
    "DEEP_EP_DUMP_SIGNAL",
    "signal | 0",
    "SIGUSR2",
    "signal on which a process with a Buffer writes a dump; 0: none",
)

VARIABLES = (
    BACKEND,
    TIMEOUT_S,
    RANKS_PER_NODE,
    CPU_CLOCK,
    CLOCK_INTERVAL_S,
    VERIFY,
    RECORDER,
    RECORDER_FRAMES,
    WARN_S,
    DUMP_DIR,
    BULK_COPIES,
    SCHEDULE,
    DELIVERY,
    LAUNCH_SHAPE,
    INJECT,
    DIAGNOSE,
    DIAGNOSE_DIR,
    PHASES,
    TUNED,
    NVSHMEM_QP_DEPTH,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    WORLD_SIZE,
    RANK,
    DUMP_SIGNAL,
    CLASSIC_ENABLE,
    CLASSIC_INTERVAL,
    CLASSIC_WARMING_TIME,
    CLASSIC_SYNC_STEP,
    CLASSIC_LOG_PATH,
    CLASSIC_LOG_DETAILS,
    CLASSIC_THRESHOLD_COL,
    CLASSIC_THRESHOLD_ROW,
    CLASSIC_THRESHOLD_POINT,
    CLASSIC_EXCLUDING_ZEROS,
)


@dataclass(frozen=True)
class ClassicSettings:
    """What `deep_ep.diagnose.Diagnose` follows.

    Attributes:
        enable: False: it does nothing.
        interval_s: seconds between asynchronous diagnoses.
        warming_time_s: seconds whose waiting is not judged; `None`: the interval.
        sync_step: calls between synchronous diagnoses.
        log_path: folder of the log files.
        log_details: whether matrices are logged.
        threshold_col, threshold_row, threshold_point: of `diagnose_matrix`.
        excluding_zeros: 0 or 1, of `diagnose_matrix`.
    """

    enable: bool
    interval_s: float
    warming_time_s: float | None
    sync_step: int
    log_path: Path
    log_details: bool
    threshold_col: float
    threshold_row: float
    threshold_point: float
    excluding_zeros: int


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


class Order(NamedTuple):
    """A policy of ordering and its seed (0 where the policy needs none)."""

    policy: str
    seed: int


def everything() -> dict[str, str]:
    """All variables of this process, whoever reads them."""
    return dict(os.environ)


@contextlib.contextmanager
def read_from(environment: Mapping[str, str]) -> Iterator[None]:
    """Lets every function here answer for another environment within a `with` block; not for threads."""
    global _environment
    before, _environment = _environment, environment
    try:
        yield
    finally:
        _environment = before


def backend() -> str:
    """The backend asked for, `""` if it may be chosen."""
    return _choice(BACKEND, ("", "cpu", "cuda"))


def timeout_s() -> float:
    """Seconds an operation waits for a rank; positive."""
    try:
        value = float(TIMEOUT_S.text())
    except ValueError:
        raise TIMEOUT_S.error("a number of seconds above 0") from None
    if not 0 < value < 1e9:
        raise TIMEOUT_S.error("a number of seconds above 0 (and below 1e9)")
    return value


def ranks_per_node() -> int | None:
    """Ranks of one NVLink domain, `None` to derive it from the host names."""
    return _positive_int(RANKS_PER_NODE) if RANKS_PER_NODE.text() else None


def cpu_clock() -> str:
    """`rank` or `wall`."""
    return _choice(CPU_CLOCK, ("rank", "wall"))


def clock_interval_s(default: float) -> float:
    """Longest time between two measurements of clocks within operations; 0: none."""
    return _number(CLOCK_INTERVAL_S) if CLOCK_INTERVAL_S.text() else default


def verify() -> bool:
    """Whether rows are verified on arrival."""
    return _choice(VERIFY, ("0", "1")) == "1"


def recorder_frames() -> int:
    """Frames that are remembered with each call."""
    text = RECORDER_FRAMES.text()
    if not _is_number(text) or int(text) > MOST_FRAMES:
        raise RECORDER_FRAMES.error(f"an integer from 0 to {MOST_FRAMES}")
    return int(text)


def recorder() -> int:
    """Calls that a buffer remembers; 0: none."""
    text = RECORDER.text()
    if not _is_number(text) or int(text) > MOST_RECORDED:
        raise RECORDER.error(f"an integer from 0 to {MOST_RECORDED}")
    return int(text)


def warn_s() -> float:
    """Seconds of waiting until one rank says why; 0: it does not."""
    return _number(WARN_S)


def dump_dir() -> Path | None:
    """Where dumps go, `None` if this variable does not say."""
    text = DUMP_DIR.text()
    return Path(text) if text else None


def bulk_copies(default: bool) -> bool:
    """Whether whole rows move through shared memory."""
    return _choice(BULK_COPIES, ("0", "1")) == "1" if BULK_COPIES.text() else default


def schedule() -> Order:
    """Fiber schedule of the cpu backend."""
    return _order(SCHEDULE, "round-robin")


def delivery() -> Order:
    """Delivery order of the cpu backend."""
    return _order(DELIVERY, "in-order")


def launch_shape(max_warps: int, max_threads: int) -> tuple[int, int]:
    """Blocks and warps per block; `(0, 0)` is automatic.

    Args:
        max_warps: what a block may have.
        max_threads: what a launch may have, 32 to a warp.
    """
    text = LAUNCH_SHAPE.text()
    if not text:
        return 0, 0
    given = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d?)", text, re.ASCII)
    blocks, warps = (int(number) for number in given.groups()) if given else (0, 0)
    if not 0 < warps <= max_warps or blocks * warps * 32 > max_threads:
        raise LAUNCH_SHAPE.error(
            f"BLOCKSxWARPS, such as 4x8, with at most {max_warps} warps per block and "
            f"{max_threads // 32} in all"
        )
    return blocks, warps


def inject() -> str:
    """Faults to inject, `""` for none."""
    return INJECT.text()


def diagnose() -> DiagnoseMode:
    """Whether and when every buffer compares its ranks."""
    text = DIAGNOSE.text()
    if text in ("0", "1"):
        return DiagnoseMode("async", seconds=20.0) if text == "1" else DiagnoseMode("off")
    mode, _, number = text.partition(":")
    if mode == "sync" and _is_number(number) and int(number):
        return DiagnoseMode("sync", steps=int(number))
    with contextlib.suppress(ValueError):
        if mode == "async" and 0 < float(number) < 1e9:
            return DiagnoseMode("async", seconds=float(number))
    raise DIAGNOSE.error("0, 1, sync:STEPS with STEPS at least 1, or async:SECONDS above 0")


def diagnose_dir() -> Path | None:
    """Where records go, `None` for nowhere."""
    text = DIAGNOSE_DIR.text()
    return Path(text) if text else None


def phases() -> bool:
    """Whether every buffer is to tell where its time goes."""
    return _choice(PHASES, ("0", "1")) == "1"


def tuned() -> Path:
    """The file of what was measured, whether it is there or not."""
    return Path(TUNED.text()).expanduser()


def classic() -> ClassicSettings:
    """The settings of the existing analyser."""
    return ClassicSettings(
        enable=_choice(CLASSIC_ENABLE, ("0", "1")) == "1",
        interval_s=_number(CLASSIC_INTERVAL, above=0.0),
        warming_time_s=_number(CLASSIC_WARMING_TIME) if CLASSIC_WARMING_TIME.text() else None,
        sync_step=_positive_int(CLASSIC_SYNC_STEP),
        log_path=Path(CLASSIC_LOG_PATH.text()),
        log_details=_choice(CLASSIC_LOG_DETAILS, ("0", "1")) == "1",
        threshold_col=_number(CLASSIC_THRESHOLD_COL),
        threshold_row=_number(CLASSIC_THRESHOLD_ROW),
        threshold_point=_number(CLASSIC_THRESHOLD_POINT),
        excluding_zeros=int(_choice(CLASSIC_EXCLUDING_ZEROS, ("0", "1"))),
    )


def nvshmem_qp_depth() -> int:
    """Depth of NVSHMEM's queue pairs."""
    return _positive_int(NVSHMEM_QP_DEPTH)


def local_world_size() -> int | None:
    """Ranks of this host, `None` where nobody says."""
    return _positive_int(LOCAL_WORLD_SIZE) if LOCAL_WORLD_SIZE.text() else None


class Nodes(NamedTuple):
    """What `deep_ep.utils.envs.init_dist` follows: where ranks meet, how many nodes there are, and which this is."""

    meet_at: str
    num_nodes: int
    node: int


def nodes() -> Nodes:
    """Of the program that has started this rank."""
    num_nodes, node = _positive_int(WORLD_SIZE), RANK.text()
    if not _is_number(node) or int(node) >= num_nodes:
        raise RANK.error(f"an integer of at least 0, below WORLD_SIZE = {num_nodes}")
    port = _positive_int(MASTER_PORT)
    return Nodes(f"tcp://{MASTER_ADDR.text()}:{port}", num_nodes, int(node))


def dump_signal() -> int:
    """Number of the signal that asks for a dump; 0: none."""
    text = DUMP_SIGNAL.text()
    number = int(text) if text.isdecimal() else getattr(signal.Signals, text, 0)
    if text != "0" and number not in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP}:
        raise DUMP_SIGNAL.error("the name or number of a signal that can be handled, or 0")
    return int(number)


def torch_dump_prefix() -> str:
    """Path, without the rank, of what torch's flight recorder writes; `""` if nobody says."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return next((_environment[name] for name in names if _environment.get(name)), "")


def _choice(variable: Variable, allowed: tuple[str, ...]) -> str:
    text = variable.text()
    if text not in allowed:
        raise variable.error(" or ".join(name for name in allowed if name))
    return text


def _positive_int(variable: Variable) -> int:
    text = variable.text()
    if not _is_number(text) or int(text) == 0:
        raise variable.error("a positive integer of at most 18 digits")
    return int(text)


def _is_number(text: str) -> bool:
    """Whether these are digits that fit every integer type they may come to."""
    return re.fullmatch(r"\d{1,18}", text, re.ASCII) is not None


def _number(variable: Variable, above: float | None = None) -> float:
    """A number of at least 0, or above `above`; below 1e9, so that it can be waited for."""
    least = "of at least 0" if above is None else f"above {above:g}"
    try:
        value = float(variable.text())
    except ValueError:
        raise variable.error(f"a number {least}") from None
    if not (0 <= value < 1e9 and (above is None or value > above)):
        raise variable.error(f"a number {least} (and below 1e9)")
    return value


def _order(variable: Variable, plain: str) -> Order:
    text = variable.text()
    if text == plain:
        return Order(plain, 0)
    policy, _, seed = text.partition(":")
    if policy != "random" or not _is_number(seed):
        raise variable.error(f"{plain} or random:SEED with a seed >= 0 of at most 18 digits")
    return Order("random", int(seed))
