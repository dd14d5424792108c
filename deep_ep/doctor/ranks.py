"""All ranks of a job: each publishes its findings in the job's store, and one reports what they say together.

Ranks that cannot start publish nothing. The others do not wait for them longer than they were told to, nor
once the launcher wants to end them because one has failed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Callable, NamedTuple, Optional

from deep_ep.base.printable_text import printable
from deep_ep.base.words import counted
from deep_ep.doctor import exchange
from deep_ep.doctor.finding import FAIL, OK, WARN, Finding, Status
from deep_ep.doctor.host import Host
from deep_ep.errors import ranks_text

_PREFIX = "deep_ep.doctor"
_LOOK_EVERY_S = 0.1
# For ranks that are about to publish when the launcher ends the job, and for a report that is being made.
_GRACE_S = 2.0
# Ranks that differ in these cannot make a Buffer.
_MUST_AGREE = {
    "deep_ep",
    "DEEP_EP_RANKS_PER_NODE",
    "DEEP_EP_VERIFY",
    "DEEP_EP_DIAGNOSE",
    "DEEP_EP_BACKEND",
}


class Job(NamedTuple):
    """This rank's place in a job, and address and port of the store where the ranks meet.

    The launcher serves it, or else rank 0; `local_rank` is the place among the ranks of its host.
    """

    rank: int
    size: int
    address: str
    port: int
    launcher_serves: bool
    local_rank: int = 0


@dataclass(frozen=True)
class RankReport:
    """What one rank has published: where it runs, what it found, and what it saw of the exchange, if one was tried."""

    host: str
    findings: Sequence[Finding]
    tried: Optional[exchange.Tried] = None  # noqa: UP045 - read by the codec, also in Python 3.9


def job_of(host: Host) -> Job | None:
    """The job that a launcher has made this process a rank of; `None` if there is none."""
    rank, size, port = map(host.variable, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    address = host.environment.get("MASTER_ADDR", "")
    if not address or rank is None or port is None or size is None or size < 2:
        return None
    served = host.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Job(rank, size, address, port, served, host.variable("LOCAL_RANK") or 0)


# ---- the meeting


def open_store(job: Job, patience_s: float) -> Any:
    """The store of the job, with a prefix of its own. Raises ImportError without torch, RuntimeError if nobody serves it."""
    from torch import distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        job.address,
        job.port,
        is_master=job.rank == 0 and not job.launcher_serves,
        timeout=timedelta(seconds=patience_s),
        wait_for_workers=False,
    )
    return dist.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]


class Meeting:
    """One rank's side of a job's findings, in a store that is the same for all ranks.

    It waits `patience_s` for ranks that do not come. Once `hurry` is set, the job is being ended, and it waits for
    a moment only.
    """

    def __init__(self, store: Any, job: Job, patience_s: float, hurry: threading.Event) -> None:
        self._store = store
        self._job = job
        self._patience_s = patience_s
        self._hurry = hurry

    def all_ready(self) -> bool:
        """Whether all ranks have come to this point, for which it waits."""
        self._store.add("ready", 1)
        return self._wait(lambda: self._count("ready") >= self._job.size)

    def gather(self, said: RankReport) -> dict[int, RankReport] | None:
        """Publishes, waits for the others, and returns what each rank has said; `None` on ranks that need not report."""
        self._store.set(self._key(self._job.rank), json.dumps(asdict(said)))
        self._store.add("came", 1)
        self._wait(lambda: self._count("came") >= self._job.size)
        came = [rank for rank in range(self._job.size) if self._store.check([self._key(rank)])]
        # The lowest one reports; another does it if that one has been ended meanwhile.
        if self._job.rank != min(came):
            self._wait(self._is_reported, self._patience_s + _GRACE_S)
        if self._is_reported() or self._store.add("reporters", 1) > 1:
            return None
        return {rank: _received(self._store.get(self._key(rank))) for rank in came}

    def leave(self, *, has_reported: bool) -> None:
        """Ends this rank's part, once this or another rank has reported: the launcher ends all ranks when one fails."""
        if has_reported:
            self._store.set("reported", "1")
        self._wait(self._is_reported, _GRACE_S)
        self._store.add("left", 1)
        if self._job.rank == 0 and not self._job.launcher_serves:
            self._wait(lambda: self._count("left") >= self._count("came"), _GRACE_S)

    def _is_reported(self) -> bool:
        return bool(self._store.check(["reported"]))

    def _count(self, name: str) -> int:
        return int(self._store.add(name, 0))

    def _wait(self, is_over: Callable[[], bool], patience_s: float | None = None) -> bool:
        """Whether it was over in time: `patience_s` seconds, or less once the job is being ended."""
        deadline = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        while not is_over():
            if self._hurry.is_set():
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def _key(self, rank: int) -> str:
        return f"rank {rank}"


def _received(published: bytes) -> RankReport:
    """What a rank has published: any program that reaches the store, or a doctor of another version."""
    try:
        return exchange.read(RankReport, published)
    except ValueError as error:
        begin = published[:80].decode(errors="replace")
        found = printable(
            f"it published {begin!r}, which this version does not understand: {error}"
        )
    why = "the doctors of a job must be of one version"
    return RankReport(
        "?", [Finding("other doctor", FAIL, found, why, "install one version of deep_ep")]
    )


# ---- the report


def together(said: Mapping[int, RankReport], size: int) -> list[Finding]:
    """What the ranks that came have found, as one list.

    Lines that are ok are those of the lowest rank; of the others each stands once, with its ranks.
    """
    findings = [_attendance(said, size), *_differences(said)]
    findings += [finding for finding in said[min(said)].findings if finding.status == OK]
    ranks_of: dict[tuple[str, Status, str, str, str], list[int]] = {}
    for rank in sorted(said):
        for one in said[rank].findings:
            if one.status != OK:
                texts = (one.name, one.status, one.found, one.why, one.repair)
                ranks_of.setdefault(texts, []).append(rank)
    for (name, status, found, why, repair), ranks in ranks_of.items():
        where = "" if len(ranks) == len(said) else f"{ranks_text(ranks)}: "
        findings.append(Finding(name, status, f"{where}{found}", why, repair))
    tried = {rank: one.tried for rank, one in said.items() if one.tried is not None}
    return findings + (exchange.judge(tried, size) if tried else [])


def _attendance(said: Mapping[int, RankReport], size: int) -> Finding:
    hosts = counted(len({one.host for one in said.values()}), "host")
    missing = [rank for rank in range(size) if rank not in said]
    why = "a job waits for all of its ranks"
    if not missing:
        return Finding("ranks", OK, f"all {size} came, on {hosts}", why)
    return Finding(
        "ranks",
        FAIL,
        f"{ranks_text(missing)} did not come; {ranks_text(said)} did, on {hosts}",
        f"{why}; those that did not come could not start, or cannot reach MASTER_ADDR and MASTER_PORT",
        "read what these ranks printed (torchrun --redirects 3 --log-dir DIR), and run "
        "python -m deep_ep.doctor on their hosts",
    )


def _differences(said: Mapping[int, RankReport]) -> list[Finding]:
    """What should be equal on all ranks and is not."""
    agreed = {
        rank: {name: text for one in said[rank].findings for name, text in one.agreed.items()}
        for rank in sorted(said)
    }
    of_rank = {rank: values for rank, values in agreed.items() if values}
    findings = []
    for name in sorted({name for values in of_rank.values() for name in values}):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in of_rank.items():
            ranks_of.setdefault(values.get(name, "not there"), []).append(rank)
        if len(ranks_of) > 1:
            texts = [f"{text} on {ranks_text(ranks)}" for text, ranks in ranks_of.items()]
            status = FAIL if name in _MUST_AGREE else WARN
            why, repair = (
                "ranks of one job must not differ in it",
                f"make {name} the same on all ranks",
            )
            found = f"{name}: {'; '.join(texts)}"
            findings.append(Finding("ranks differ", status, found, why, repair))
    return findings


def unreachable(job: Job, error: Exception) -> Finding:
    """What a rank says that cannot reach the others."""
    server = "the launcher" if job.launcher_serves else "rank 0"
    return Finding(
        "ranks",
        FAIL,
        f"rank {job.rank} cannot reach the store at {job.address}:{job.port}: {' '.join(str(error).split())}",
        f"{server} serves it, and all ranks meet there",
        "see that MASTER_ADDR and MASTER_PORT name the host that serves it, on all ranks, and that no firewall is between",
    )
