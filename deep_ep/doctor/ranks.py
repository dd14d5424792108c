"""All ranks of a job: each publishes its findings in the job's store, and one reports what they say together.

Ranks that cannot start publish nothing. The others do not wait for them longer than they were told to, nor
once the launcher wants to end them because one has failed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, Optional

from deep_ep.base.text import counted, printable
from deep_ep.doctor import exchange
from deep_ep.doctor.checks import OK, Finding, fail, ok, warn
from deep_ep.doctor.exchange import Job
from deep_ep.doctor.host import Host
from deep_ep.errors import ranks_text

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
    store = f"tcp://{address}:{port}"
    return Job(rank, size, store, served, host.variable("LOCAL_RANK") or 0)


# ---- the meeting


@dataclass(frozen=True)
class Meeting:
    """One rank's side of a job's findings.

    Attributes:
        store: the same for all ranks.
        job: this rank's place in it.
        patience_s: how long it waits for ranks that do not come.
        hurry: once it is set, the job is being ended, and it waits for a moment only.
    """

    store: Any
    job: Job
    patience_s: float
    hurry: threading.Event

    def all_ready(self) -> bool:
        """Whether all ranks have come to this point, for which it waits."""
        self.store.add("ready", 1)
        return self._wait(lambda: self._count("ready") >= self.job.size)

    def gather(self, said: RankReport) -> dict[int, RankReport] | None:
        """Publishes, waits for the others, and returns what each rank has said; `None` on ranks that need not report."""
        keys = [f"rank {rank}" for rank in range(self.job.size)]
        self.store.set(keys[self.job.rank], json.dumps(asdict(said)))
        self.store.add("came", 1)
        self._wait(lambda: self._count("came") >= self.job.size)
        came = [rank for rank, key in enumerate(keys) if self.store.check([key])]
        # The lowest one reports; another does it if that one has been ended meanwhile.
        if self.job.rank != min(came):
            self._wait(self._is_reported, self.patience_s + _GRACE_S)
        if self._is_reported() or self.store.add("reporters", 1) > 1:
            return None
        return {rank: _received(self.store.get(keys[rank])) for rank in came}

    def leave(self, *, has_reported: bool) -> None:
        """Ends this rank's part, once this or another rank has reported: the launcher ends all ranks when one fails."""
        if has_reported:
            self.store.set("reported", "1")
        self._wait(self._is_reported, _GRACE_S)
        self.store.add("left", 1)
        if self.job.rank == 0 and not self.job.is_served:
            self._wait(lambda: self._count("left") >= self._count("came"), _GRACE_S)

    def _is_reported(self) -> bool:
        return bool(self.store.check(["reported"]))

    def _count(self, name: str) -> int:
        return int(self.store.add(name, 0))

    def _wait(self, is_over: Callable[[], bool], patience_s: float | None = None) -> bool:
        """Whether it was over in time: `patience_s` seconds, or less once the job is being ended."""
        deadline = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        while not is_over():
            if self.hurry.is_set():
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True


def _received(published: bytes) -> RankReport:
    """What a rank has published: any program that reaches the store, or a doctor of another version."""
    try:
        return exchange.read(RankReport, published)
    except ValueError as error:
        begin = published[:80].decode(errors="replace")
        found = printable(
            f"it published {begin!r}, which this version does not understand: {error}"
        )
    why, repair = "the doctors of a job must be of one version", "install one version of deep_ep"
    return RankReport("?", [fail(found, why, repair, name="other doctor")])


# ---- the report


def together(said: Mapping[int, RankReport], size: int) -> list[Finding]:
    """What the ranks that came have found, as one list.

    Lines that are ok are those of the lowest rank; of the others each stands once, with its ranks.
    """
    findings = [_attendance(said, size), *_differences(said)]
    findings += [finding for finding in said[min(said)].findings if finding.status == OK]
    ranks_of: dict[Finding, list[int]] = {}
    for rank in sorted(said):
        for one in said[rank].findings:
            if one.status != OK:
                ranks_of.setdefault(one, []).append(rank)
    for one, ranks in ranks_of.items():
        where = "" if len(ranks) == len(said) else f"{ranks_text(ranks)}: "
        findings.append(replace(one, found=f"{where}{one.found}", agreed={}))
    tried = {rank: one.tried for rank, one in said.items() if one.tried is not None}
    return findings + (exchange.judge(tried, size) if tried else [])


def _attendance(said: Mapping[int, RankReport], size: int) -> Finding:
    hosts = counted(len({one.host for one in said.values()}), "host")
    missing = [rank for rank in range(size) if rank not in said]
    why = "a job waits for all of its ranks"
    if not missing:
        return ok(f"all {size} came, on {hosts}", why, name="ranks")
    return fail(
        f"{ranks_text(missing)} did not come; {ranks_text(said)} did, on {hosts}",
        f"{why}; those that did not come could not start, or cannot reach MASTER_ADDR and MASTER_PORT",
        "read what these ranks printed (torchrun --redirects 3 --log-dir DIR), and run "
        "python -m deep_ep.doctor on their hosts",
        name="ranks",
    )


def _differences(said: Mapping[int, RankReport]) -> list[Finding]:
    """What should be equal on all ranks and is not."""
    agreed: dict[int, dict[str, str]] = {}
    for rank in sorted(said):
        for one in said[rank].findings:
            if one.agreed:
                agreed.setdefault(rank, {}).update(one.agreed)
    findings = []
    for name in sorted({name for values in agreed.values() for name in values}):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in agreed.items():
            ranks_of.setdefault(values.get(name, "not there"), []).append(rank)
        if len(ranks_of) > 1:
            texts = [f"{text} on {ranks_text(ranks)}" for text, ranks in ranks_of.items()]
            found, why = f"{name}: {'; '.join(texts)}", "ranks of one job must not differ in it"
            repair = f"make {name} the same on all ranks"
            judge = fail if name in _MUST_AGREE else warn
            findings.append(judge(found, why, repair, name="ranks differ"))
    return findings


def unreachable(job: Job, error: Exception) -> Finding:
    """What a rank says that cannot reach the others."""
    server = "the launcher" if job.is_served else "rank 0"
    return fail(
        f"rank {job.rank} cannot reach the store at {job.store.removeprefix('tcp://')}: {' '.join(str(error).split())}",
        f"{server} serves it, and all ranks meet there",
        "see that MASTER_ADDR and MASTER_PORT name the host that serves it, on all ranks, and that no firewall is between",
        name="ranks",
    )
