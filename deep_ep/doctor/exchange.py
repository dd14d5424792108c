"""A small exchange between all ranks, each in a process that may hang or crash: what does not pass, and who stands out."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from deep_ep.base import env
from deep_ep.base.text import printable
from deep_ep.doctor.checks import Finding, fail, ok, warn
from deep_ep.doctor.host import Host
from deep_ep.errors import ranks_text

_WHY = "what fails here fails in a program, too"
_REPAIR = "read the lines above on NVLink, P2P, RDMA and GPUDirect RDMA for these ranks; NVSHMEM_DEBUG=INFO says more"
# Of ranks on a machine without GPUs.
_CPU_RANKS = 4
_LOOK_EVERY_S = 0.2

T = TypeVar("T")


class Job(NamedTuple):
    """A rank's place in a job.

    Attributes:
        rank: its number.
        size: of the job.
        store: where the ranks meet: `tcp://ADDRESS:PORT`, or `file://PATH`.
        is_served: whether the launcher serves that store; else rank 0 does.
        local_rank: its place among the ranks of its host.
    """

    rank: int
    size: int
    store: str
    is_served: bool = True
    local_rank: int = 0

    def open_store(self, patience_s: float, prefix: str) -> Any:
        """That store, for keys with a prefix. Raises ImportError without torch, RuntimeError if nobody serves it."""
        from torch import distributed as dist

        kind, _, place = self.store.partition("://")
        if kind == "file":
            return dist.FileStore(place, self.size)  # type: ignore[attr-defined]
        address, _, port = place.rpartition(":")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            int(port),
            is_master=self.rank == 0 and not self.is_served,
            timeout=timedelta(seconds=patience_s),
            wait_for_workers=False,
        )
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


@dataclass
class Tried:
    """What one rank has seen.

    Attributes:
        operation: how many operations this rank has begun.
        silence: why its process printed nothing, and all else here says nothing; empty if it did.
        bad_pairs: (source, destination) between which rows did not arrive, or arrived wrong.
        missing: ranks that all who waited, waited for.
        awaited: those of them from which nothing came to this rank.
        error: what was raised, in words; empty if nothing was.
        verdicts: what the first diagnosis says; on rank 0 alone.
    """

    operation: int
    silence: str = ""
    bad_pairs: list[tuple[int, int]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
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

    size = cuda.device_count() or _CPU_RANKS
    # Ranks of one machine need no network.
    local = {**host.environment, "GLOO_SOCKET_IFNAME": "lo"}
    never = threading.Event()
    with TemporaryDirectory(prefix="deep_ep_doctor_") as folder, ThreadPoolExecutor(size) as pool:
        jobs = [Job(rank, size, f"file://{folder}/store", True, rank) for rank in range(size)]
        tried = pool.map(lambda job: try_rank(local, job, seconds, never), jobs)
        return judge(dict(enumerate(tried)), size)


def try_rank(
    environment: Mapping[str, str], job: Job, seconds: int, hurry: threading.Event
) -> Tried:
    """Runs one rank of the exchange in a process, which is ended once `hurry` is set; what it has seen."""
    settings = {env.timeout_s.name: str(seconds), env.verify.name: "1", env.diagnose.name: "0"}
    arguments = map(str, (job.store, job.rank, job.size, job.local_rank, seconds))
    command = [sys.executable, "-m", "deep_ep.doctor.preflight", *arguments]
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
    crashed = {rank: one.silence for rank, one in tried.items() if one.silence}
    ended = {rank: one for rank, one in tried.items() if not one.silence}
    found = [(f"rank {rank} {silence}", _REPAIR) for rank, silence in crashed.items()]
    pairs = sorted(_broken_pairs(ended))
    if pairs:
        listed = ", ".join(f"rank {source} to rank {destination}" for source, destination in pairs)
        found.append((f"rows do not arrive, or arrive wrong: {listed}", _REPAIR))
    # Who ends early is missed by the others.
    explained = {*crashed, *(rank for pair in pairs for rank in pair)}
    missing = {rank for one in ended.values() for rank in one.missing} - explained
    if missing:
        text = f"{ranks_text(missing)} did not take part in it"
        found.append((text, "read what these ranks printed"))
    errors = [one.error for one in ended.values() if one.error]
    if errors and not found:
        found.append((errors[0], _REPAIR))
    if found:
        return [fail(text, _WHY, repair, name="exchange") for text, repair in found]
    text = f"rows of all {size} ranks arrive at all ranks, and come back"
    return [ok(text, _WHY, name="exchange"), _first_diagnosis(ended)]


def _broken_pairs(ended: Mapping[int, Tried]) -> set[tuple[int, int]]:
    """(source, destination) between which rows were lost or changed.

    Ranks that have failed in one operation are waited for in the next, so only the first one counts. There, who is
    waited for is at fault, unless it was in that operation too: then the path is.
    """
    first = min((tried.operation for tried in ended.values() if tried.error), default=0)

    def took_part(tried: Tried) -> bool:
        return tried.operation > first or (tried.operation == first and bool(tried.awaited))

    pairs = set()
    for rank, tried in ended.items():
        if not tried.error or tried.operation <= first:
            pairs |= {(source, destination) for source, destination in tried.bad_pairs}
            awaited = [source for source in tried.awaited if source in ended]
            pairs |= {(source, rank) for source in awaited if took_part(ended[source])}
    return pairs


def _first_diagnosis(ended: Mapping[int, Tried]) -> Finding:
    verdicts = "; ".join(text for tried in ended.values() for text in tried.verdicts)
    why = "these are a few small operations of idle ranks; in a program DEEP_EP_DIAGNOSE=1 looks all the time"
    if not verdicts:
        return ok("no rank and no path stands out", why, name="first diagnosis")
    repair = (
        "run it again; what stays is real: python -m deep_ep.diagnose, docs/reading_a_verdict.md"
    )
    return warn(verdicts, why, repair, name="first diagnosis")
