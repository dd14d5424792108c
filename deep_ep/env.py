"""Every environment variable of the package: declared once, read only here, at the time of use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from deep_ep.errors import EPArgumentError


@dataclass(frozen=True)
class Variable:
    """One environment variable, as the documentation prints it."""

    name: str
    type: str
    default: str
    meaning: str

    def text(self) -> str:
        """The value given by the user, or the default."""
        return os.environ.get(self.name, "").strip() or self.default

    def error(self, allowed: str) -> EPArgumentError:
        """The error for a value that cannot be used."""
        return EPArgumentError(
            f"environment: {self.name} is {self.text()!r}; it must be {allowed}. "
            f"Correct it or unset it (default: {self.default or 'unset'})."
        )


BACKEND = Variable(
    "DEEP_EP_BACKEND", "cpu | cuda", "", "backend to use; unset: cuda where module and GPU exist"
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
    "DEEP_EP_LAUNCH_SHAPE", "BLOCKSxWARPS", "", "launch shape on the cpu backend; unset: automatic"
)
INJECT = Variable(
    "DEEP_EP_INJECT", "FAULT[,FAULT...]", "", "faults every Buffer injects, as --inject takes them"
)
DIAGNOSE = Variable(
    "DEEP_EP_DIAGNOSE", "0 | 1", "0", "1: every Buffer keeps counters from its construction on"
)
NVSHMEM_QP_DEPTH = Variable(
    "NVSHMEM_QP_DEPTH", "int", "1024", "depth of NVSHMEM's queue pairs, as Buffer.nvshmem_qp_depth"
)

VARIABLES = (
    BACKEND,
    TIMEOUT_S,
    RANKS_PER_NODE,
    CPU_CLOCK,
    SCHEDULE,
    DELIVERY,
    LAUNCH_SHAPE,
    INJECT,
    DIAGNOSE,
    NVSHMEM_QP_DEPTH,
)


class Order(NamedTuple):
    """A kind of order and its seed (0 where the kind needs none)."""

    kind: str
    seed: int


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


def schedule() -> Order:
    """Fiber schedule of the cpu backend."""
    return _order(SCHEDULE, "round-robin")


def delivery() -> Order:
    """Delivery order of the cpu backend."""
    return _order(DELIVERY, "in-order")


def launch_shape() -> tuple[int, int]:
    """Blocks and warps per block on the cpu backend; `(0, 0)` is automatic."""
    text = LAUNCH_SHAPE.text()
    if not text:
        return 0, 0
    blocks, separator, warps = text.partition("x")
    if not (separator and blocks.isdecimal() and warps.isdecimal() and int(blocks) and int(warps)):
        raise LAUNCH_SHAPE.error("BLOCKSxWARPS with two positive numbers, such as 4x8")
    return int(blocks), int(warps)


def inject() -> str:
    """Faults to inject, `""` for none."""
    return INJECT.text()


def diagnose() -> bool:
    """Whether every buffer keeps counters."""
    return _choice(DIAGNOSE, ("0", "1")) == "1"


def nvshmem_qp_depth() -> int:
    """Depth of NVSHMEM's queue pairs."""
    return _positive_int(NVSHMEM_QP_DEPTH)


def allow_multi_node_nvlink() -> None:
    """Tells NVSHMEM, which reads its variables when it starts, to use NVLink between hosts."""
    os.environ["NVSHMEM_DISABLE_MNNVL"] = "0"


def _choice(variable: Variable, allowed: tuple[str, ...]) -> str:
    text = variable.text()
    if text not in allowed:
        raise variable.error(" or ".join(name for name in allowed if name))
    return text


def _positive_int(variable: Variable) -> int:
    text = variable.text()
    if not text.isdecimal() or int(text) == 0:
        raise variable.error("a positive integer")
    return int(text)


def _order(variable: Variable, plain: str) -> Order:
    text = variable.text()
    if text == plain:
        return Order(plain, 0)
    kind, _, seed = text.partition(":")
    if kind != "random" or not seed.isdecimal():
        raise variable.error(f"{plain} or random:SEED with a seed >= 0")
    return Order("random", int(seed))
