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
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Union

from deep_ep.base import env
from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host
from deep_ep.errors import ranks_text

_WHY = "what fails here fails in a program, too"
_REPAIR = "read the lines above on NVLink, P2P, RDMA and GPUDirect RDMA for these ranks; NVSHMEM_DEBUG=INFO says more"
# Of ranks on a machine without GPUs.
_CPU_RANKS = 4
_LOOK_EVERY_S = 0.2

# What a rank printed (`preflight.Tried`), or why it printed nothing.
Outcome = Union[dict[str, Any], str]
_TYPES = {
    "bad_pairs": list,
    "missing": list,
    "awaited": list,
    "error": str,
    "operation": int,
    "verdicts": list,
}


class RankSetup(NamedTuple):
    """One rank of an exchange.

    Attributes:
        store: where the ranks meet: `tcp://ADDRESS:PORT` of a store that is served, or `file://PATH`.
        rank: the rank.
        size: number of ranks.
        local_rank: its place among those of its host.
    """

    store: str
    rank: int
    size: int
    local_rank: int


def on_this_machine(host: Host, seconds: int) -> list[Finding]:
    """Tries it between the GPUs of this machine, or between four ranks on its CPU.

    Args:
        host: this machine.
        seconds: how long a rank waits for another one.
    """
    from torch import cuda

    size = cuda.device_count() or _CPU_RANKS
    # Ranks of one machine need no network.
    local = {**host.environment, "GLOO_SOCKET_IFNAME": "lo"}
    never = threading.Event()
    with TemporaryDirectory(prefix="deep_ep_doctor_") as folder, ThreadPoolExecutor(size) as pool:
        places = [RankSetup(f"file://{folder}/store", rank, size, rank) for rank in range(size)]
        outcomes = pool.map(lambda place: try_rank(local, place, seconds, never), places)
        return judge(dict(enumerate(outcomes)), size)


def try_rank(
    environment: Mapping[str, str], place: RankSetup, seconds: int, hurry: threading.Event
) -> Outcome:
    """Runs one rank of the exchange in a process; what it printed, or why it printed nothing.

    Args:
        environment: of the process.
        place: of the rank.
        seconds: how long it waits for another one.
        hurry: once it is set, the process is ended.
    """
    settings = {
        env.TIMEOUT_S.name: str(seconds),
        env.VERIFY.name: "1",
        env.DIAGNOSE.name: "0",
    }
    command = [sys.executable, "-m", "deep_ep.doctor.preflight", *map(str, place), str(seconds)]
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
    lines = printed.splitlines()
    with contextlib.suppress(ValueError):
        said: Outcome = json.loads(lines[-1] if lines else "")
        if isinstance(said, dict) and is_outcome(said):
            return said
    last_words = complaints.strip().splitlines() or ["nothing was said"]
    return f"ended with status {process.returncode}: {last_words[-1]}"


def judge(outcomes: Mapping[int, Outcome], size: int) -> list[Finding]:
    """What the ranks of an exchange have seen, as findings.

    Args:
        outcomes: by rank, as `try_rank` returns them.
        size: number of ranks.
    """
    findings = []
    crashed = {rank: said for rank, said in outcomes.items() if isinstance(said, str)}
    for rank, said in crashed.items():
        findings.append(Finding("exchange", FAIL, f"rank {rank} {said}", _WHY, _REPAIR))
    ended = {rank: said for rank, said in outcomes.items() if not isinstance(said, str)}
    pairs = sorted(_broken_pairs(ended))
    if pairs:
        listed = ", ".join(f"rank {source} to rank {destination}" for source, destination in pairs)
        found = f"rows do not arrive, or arrive wrong: {listed}"
        findings.append(Finding("exchange", FAIL, found, _WHY, _REPAIR))
    # Who ends early is missed by the others.
    explained = {*crashed, *(rank for pair in pairs for rank in pair)}
    missing = {rank for said in ended.values() for rank in said["missing"]} - explained
    if missing:
        found = f"{ranks_text(missing)} did not take part in it"
        findings.append(Finding("exchange", FAIL, found, _WHY, "read what these ranks printed"))
    errors = [said["error"] for said in ended.values() if said["error"]]
    if errors and not findings:
        findings.append(Finding("exchange", FAIL, errors[0], _WHY, _REPAIR))
    if findings:
        return findings
    found = f"rows of all {size} ranks arrive at all ranks, and come back"
    return [Finding("exchange", OK, found, _WHY), _first_diagnosis(ended)]


def is_outcome(value: object) -> bool:
    """Whether this is what a rank of this version says of an exchange."""
    if isinstance(value, dict):
        return {name: type(item) for name, item in value.items()} == _TYPES
    return isinstance(value, str)


def _broken_pairs(ended: Mapping[int, dict[str, Any]]) -> set[tuple[int, int]]:
    """(source, destination) between which rows were lost or changed.

    Ranks that have failed in one operation are waited for in the next, so only the first one counts. There, who is
    waited for is at fault, unless it was in that operation too: then the path is.
    """
    failed = [said["operation"] for said in ended.values() if said["error"]]
    first = min(failed, default=0)
    pairs = set()
    for rank, said in ended.items():
        if said["error"] and said["operation"] > first:
            continue
        pairs |= {(source, destination) for source, destination in said["bad_pairs"]}
        for source in said["awaited"]:
            other = ended.get(source)
            if other and (
                other["operation"] > first or (other["operation"] == first and other["awaited"])
            ):
                pairs.add((source, rank))
    return pairs


def _first_diagnosis(ended: Mapping[int, dict[str, Any]]) -> Finding:
    verdicts = [text for said in ended.values() for text in said["verdicts"]]
    why = "these are a few small operations of idle ranks; in a program DEEP_EP_DIAGNOSE=1 looks all the time"
    if not verdicts:
        return Finding("first diagnosis", OK, "no rank and no path stands out", why)
    repair = (
        "run it again; what stays is real: python -m deep_ep.diagnose, docs/reading_a_verdict.md"
    )
    return Finding("first diagnosis", WARN, "; ".join(verdicts), why, repair)
