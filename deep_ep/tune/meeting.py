"""The process group of a job that measures: ranks that do not come, or are lost later, are named in time.

By itself torch waits half an hour for a rank, and says an address where one has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from deep_ep.base import env
from deep_ep.base.text import printable
from deep_ep.doctor.job import Job, Meeting
from deep_ep.errors import EPError, EPTimeoutError, EPTransportError, ranks_text

# Chosen: how long a rank that has failed waits for what the others say.
_GRACE_S = 5.0


@contextlib.contextmanager
def joined(job: Job, backend: str) -> Iterator[None]:
    """Torch's default group of all ranks, for as long as this lasts. Collective.

    Raises:
        EPTimeoutError: ranks did not come within `DEEP_EP_TIMEOUT_S`, or were lost; names them.
        EPTransportError: another rank has failed, or rank 0, which serves the store, cannot be reached.
    """
    patience_s = env.timeout_s()
    try:
        store = job.open_store(patience_s, "deep_ep.tune")
        meeting = Meeting(store, job, patience_s)
        absent = meeting.absent("came")
        if absent:
            meeting.leave(absent, patience_s)
    except RuntimeError as error:
        raise _no_store(job, error) from None
    if absent:
        raise EPTimeoutError(
            f"{ranks_text(absent)} did not come within {patience_s:g} s. Read what is printed there; "
            f"{env.timeout_s.name} says how long ranks wait for each other.",
            missing_ranks=absent,
        )
    try:
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=job.rank,
                world_size=job.size,
                timeout=timedelta(seconds=patience_s),
            )
            yield
        finally:
            # Where this rank has failed, the others notice it now.
            if dist.is_initialized():
                dist.destroy_process_group()
    except RuntimeError as error:
        try:
            silent, first = _compared(meeting, printable(" ".join(str(error).split())))
        except RuntimeError as lost:
            silent, first = [], str(_no_store(job, lost))
        if isinstance(error, EPError):
            raise
        if silent:
            raise EPTimeoutError(
                f"{ranks_text(silent)} ended, or does not answer. Read what is printed there ({first})",
                missing_ranks=silent,
            ) from None
        raise EPTransportError(first) from None


def _compared(meeting: Meeting, said: str) -> tuple[list[int], str]:
    """Which ranks do not say that they failed, too, and what the first that did has said."""
    if meeting.store.add("failures", 1) == 1:
        meeting.store.set("first", f"rank {meeting.job.rank} failed first: {said}")
    silent = meeting.absent("failed", patience_s=_GRACE_S)
    first = printable(meeting.store.get("first").decode(errors="replace"))
    meeting.leave(silent, _GRACE_S)
    return silent, first


def _no_store(job: Job, error: Exception) -> EPTransportError:
    found, why, repair = job.unreachable(error)
    return EPTransportError(f"{found}; {why}. Read what is printed there, and {repair}.")
