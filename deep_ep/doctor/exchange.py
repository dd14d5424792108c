"""A small exchange between all ranks, each in a process that may hang or crash: what does not pass, and who stands out."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from deep_ep.base import env
from deep_ep.base.text import printable
from deep_ep.doctor.checks import Finding, fail, ok, warn
from deep_ep.doctor.host import Host
from deep_ep.doctor.job import Job

_WHY = "what fails here fails in a program, too"
_REPAIR = "read the lines above on NVLink, P2P, RDMA and GPUDirect RDMA for these ranks; NVSHMEM_DEBUG=INFO says more"
# Of ranks on a machine without GPUs.
_CPU_RANKS = 4
_LOOK_EVERY_S = 0.2

T = TypeVar("T")


@dataclass
class Tried:
    """What one rank has seen.

    Attributes:
        operation: how many operations this rank has begun.
        silence: why its process printed nothing, and all else here says nothing; empty if it did.
        bad_pairs: (source, destination) between which rows did not arrive, or arrived wrong.
        awaited: ranks that are missing, and from which nothing came to this one.
        error: what was raised, in words; empty if nothing was.
        verdicts: what the first diagnosis says; on rank 0 alone.
    """

    operation: int
    silence: str = ""
    bad_pairs: list[tuple[int, int]] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    error: str = ""
    verdicts: list[str] = field(default_factory=list)


def read(cls: type[T], written: bytes) -> T:
    """What another process has written, maybe one of another version; texts are such as terminals show. Raises ValueError."""
    # Without torch and NumPy the doctor runs, too.
    from deep_ep.base import codec

    return codec.decode(cls, written, text=printable, is_strict=False)


def on_this_machine(host: Host, seconds: int) -> list[Finding]:
    """Tries it between the GPUs of this machine, or between four ranks on its CPU, which wait so long for each other."""
    from torch import cuda
    from torch import distributed as dist

    size = cuda.device_count() or _CPU_RANKS
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    # Ranks of one machine need no network.
    local = {**host.environment, "GLOO_SOCKET_IFNAME": "lo"}
    never = threading.Event()
    with ThreadPoolExecutor(size) as pool:
        jobs = [Job(rank, size, store.host, store.port, local_rank=rank) for rank in range(size)]
        tried = pool.map(lambda job: try_rank(local, job, seconds, never), jobs)
        return judge(dict(enumerate(tried)), size)


def try_rank(
    environment: Mapping[str, str], job: Job, seconds: int, hurry: threading.Event
) -> Tried:
    """Runs one rank of the exchange in a process, which is ended once `hurry` is set; what it has seen."""
    settings = {env.timeout_s.name: str(seconds), env.verify.name: "1", env.diagnose.name: "0"}
    # Whoever serves the store, it is not that process.
    served = json.dumps([*job[:4], True, job.local_rank])
    command = [sys.executable, "-m", "deep_ep.doctor.preflight", served]
    # Longer than what waits inside: to meet, to connect, and in an operation.
    deadline = time.monotonic() + 4 * seconds + 120
    with subprocess.Popen(
        command,
        env={**environment, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        while True:
            try:
                printed, complaints = process.communicate(timeout=_LOOK_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                if hurry.is_set() or time.monotonic() > deadline:
                    process.kill()
    with contextlib.suppress(IndexError, ValueError):
        return read(Tried, printed.splitlines()[-1].encode())
    last_words = complaints.strip().splitlines() or ["nothing was said"]
    silence = f"ended with status {process.returncode}: {printable(last_words[-1])}"
    return Tried(operation=0, silence=silence)


def judge(tried: Mapping[int, Tried], size: int) -> list[Finding]:
    """What the ranks of an exchange have seen, as findings."""
    ended = {rank: one for rank, one in tried.items() if not one.silence}
    found = [f"rank {rank} {one.silence}" for rank, one in tried.items() if one.silence]
    # Ranks that have failed in one operation are waited for in the next, so only the first one counts.
    first = min((one.operation for one in ended.values() if one.error), default=0)
    failed = [one for one in ended.values() if one.error and one.operation == first]
    pairs = sorted(_broken_pairs(ended, first))
    if pairs:
        listed = ", ".join(f"rank {source} to rank {destination}" for source, destination in pairs)
        found.append(f"rows do not arrive, or arrive wrong: {listed}")
    elif failed and not found:
        # Who waited for most says who is missing; the others, that it gave up.
        found.append(max(failed, key=lambda one: len(one.awaited)).error)
    if found:
        return [fail(text, _WHY, _REPAIR, name="exchange") for text in found]
    passed = f"rows of all {size} ranks arrive at all ranks, and come back"
    lines = [ok(passed, _WHY, name="exchange")]
    verdicts = "; ".join(text for one in ended.values() for text in one.verdicts)
    why = "these are a few small operations of idle ranks; in a program DEEP_EP_DIAGNOSE=1 looks all the time"
    if verdicts:
        repair = "run it again; what stays is real: python -m deep_ep.diagnose, docs/reading_a_verdict.md"
        return [*lines, warn(verdicts, why, repair, name="first diagnosis")]
    return [*lines, ok("no rank and no path stands out", why, name="first diagnosis")]


def _broken_pairs(ended: Mapping[int, Tried], first: int) -> set[tuple[int, int]]:
    """(source, destination) between which rows were lost or changed, where the first operation that failed has a number.

    Who is waited for there is at fault, unless it was in that operation too: then the path is.
    """

    def took_part(rank: int) -> bool:
        one = ended.get(rank, Tried(operation=0))
        return one.operation > first or (one.operation == first and bool(one.awaited))

    pairs = set()
    for rank, one in ended.items():
        if not one.error or one.operation == first:
            pairs |= {(source, destination) for source, destination in one.bad_pairs}
            pairs |= {(source, rank) for source in one.awaited if took_part(source)}
    return pairs
