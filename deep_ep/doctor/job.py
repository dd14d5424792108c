"""A rank's place in a job, and the store where its ranks meet: who has come so far, and what each has said.

Ranks that cannot start write nothing down. The others do not wait for them longer than they were told to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from deep_ep.doctor.host import Host

_LOOK_EVERY_S = 0.1
# For ranks that are about to write when the launcher ends the job, and for those that still read when rank 0 is done.
_GRACE_S = 2.0


class Job(NamedTuple):
    """A rank's place in a job.

    Attributes:
        rank: its number.
        size: of the job.
        address: of the store where the ranks meet.
        port: of that store.
        is_served: whether the launcher serves it; else rank 0 does.
        local_rank: its place among the ranks of its host.
    """

    rank: int
    size: int
    address: str
    port: int
    is_served: bool = True
    local_rank: int = 0

    def open_store(self, patience_s: float, prefix: str) -> Any:
        """That store, for keys with a prefix. Raises ImportError without torch, RuntimeError if nobody serves it."""
        from torch import distributed as dist

        store = dist.TCPStore(  # type: ignore[attr-defined]
            self.address,
            self.port,
            is_master=self.rank == 0 and not self.is_served,
            timeout=timedelta(seconds=patience_s),
            wait_for_workers=False,
        )
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def unreachable(self, error: Exception) -> tuple[str, str, str]:
        """Why this rank cannot reach the others: what happened, what follows from it, and what to do."""
        server = "the launcher" if self.is_served else "rank 0"
        return (
            f"rank {self.rank} cannot reach the store at {self.address}:{self.port}: {' '.join(str(error).split())}",
            f"{server} serves it, and all ranks meet there",
            "see that MASTER_ADDR and MASTER_PORT name the host that serves it, on all ranks, and that no firewall is "
            "between",
        )


def job_of(host: Host) -> Job | None:
    """The job that a launcher has made this process a rank of; `None` if there is none."""
    rank, size, port = map(host.variable, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    address = host.environment.get("MASTER_ADDR", "")
    if not address or rank is None or port is None or size is None or size < 2:
        return None
    served = host.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Job(rank, size, address, port, served, host.variable("LOCAL_RANK") or 0)


@dataclass(frozen=True)
class Meeting:
    """One rank's use of that store.

    Attributes:
        store: the same for all ranks.
        job: this rank's place.
        patience_s: how long it waits for ranks that do not come.
        hurry: once it is set, the job is being ended, and it waits for a moment only.
    """

    store: Any
    job: Job
    patience_s: float
    hurry: threading.Event = field(default_factory=threading.Event)

    def absent(self, what: str, text: str = "", patience_s: float | None = None) -> list[int]:
        """Writes this rank's text down under `what`, and waits for the others; the ranks that did not come so far."""
        self.store.set(f"{what} {self.job.rank}", text)
        patience_s = self.patience_s if patience_s is None else patience_s
        return self._wait(what, range(self.job.size), patience_s)

    def text(self, what: str, rank: int) -> bytes:
        """What a rank has written, which may be any program that reaches the store."""
        return bytes(self.store.get(f"{what} {rank}"))

    def leave(self, absent: Collection[int], patience_s: float = _GRACE_S) -> None:
        """Ends this rank's use of the store. If it serves the store, it waits for those who are there."""
        self.store.set(f"left {self.job.rank}", "")
        if self.job.rank == 0 and not self.job.is_served:
            there = [rank for rank in range(self.job.size) if rank not in absent]
            self._wait("left", there, patience_s)

    def _wait(self, what: str, ranks: Sequence[int], patience_s: float) -> list[int]:
        keys = {rank: f"{what} {rank}" for rank in ranks}
        deadline = time.monotonic() + patience_s
        while not self.store.check(list(keys.values())):
            if self.hurry.is_set():
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                return [rank for rank, key in keys.items() if not self.store.check([key])]
            time.sleep(_LOOK_EVERY_S)
        return []
