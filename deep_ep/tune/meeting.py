"""The process group of a job that measures: ranks that do not come, or are lost later, are named in time.

By itself torch waits half an hour for a rank, and says an address where one has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from deep_ep.base import env
from deep_ep.base.text import printable
from deep_ep.doctor import ranks
from deep_ep.doctor.exchange import Job
from deep_ep.errors import EPError, EPTimeoutError, EPTransportError, ranks_text

T = TypeVar("T")

_LOOK_EVERY_S = 0.1
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
        store.set(f"came {job.rank}", "")
        absent = _absent(store, "came", range(job.size), patience_s)
        if absent:
            _leave(store, job, absent, patience_s)
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
        said = printable(" ".join(str(error).split()))
        try:
            silent, first = _within(3 * _GRACE_S, lambda: _compared(store, job, said))
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


def _compared(store: Any, job: Job, said: str) -> tuple[list[int], str]:
    """Which ranks do not say that they failed, too, and what the first that did has said."""
    if store.add("failures", 1) == 1:
        store.set("first", f"rank {job.rank} failed first: {said}")
    store.set(f"failed {job.rank}", "")
    silent = _absent(store, "failed", range(job.size), _GRACE_S)
    first = printable(store.get("first").decode(errors="replace"))
    _leave(store, job, silent, _GRACE_S)
    return silent, first


def _leave(store: Any, job: Job, absent: Collection[int], patience_s: float) -> None:
    """Ends this rank's use of the store. If this rank serves it, it waits for those who are there."""
    store.set(f"left {job.rank}", "")
    if job.rank == 0 and not job.is_served:
        others = [rank for rank in range(job.size) if rank not in absent]
        _absent(store, "left", others, patience_s)


def _absent(store: Any, what: str, expected: Iterable[int], patience_s: float) -> list[int]:
    """Those of these ranks that have not written this down within a time."""
    keys = {rank: f"{what} {rank}" for rank in expected}
    deadline = time.monotonic() + patience_s
    while not store.check(list(keys.values())):
        if time.monotonic() > deadline:
            return [rank for rank, key in keys.items() if not store.check([key])]
        time.sleep(_LOOK_EVERY_S)
    return []


def _within(patience_s: float, call: Callable[[], T]) -> T:
    """What a call returns or raises; RuntimeError if it takes longer, as with a store whose process is stopped."""
    done: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            done.set_result(call())
        except RuntimeError as error:
            done.set_exception(error)

    # The process does not wait for a thread of this kind.
    threading.Thread(target=work, daemon=True).start()
    try:
        return done.result(patience_s)
    except futures.TimeoutError:
        raise RuntimeError(f"no answer within {patience_s:g} s") from None


def _no_store(job: Job, error: Exception) -> EPTransportError:
    why = ranks.unreachable(job, error)
    return EPTransportError(
        f"{why.found}; {why.why}. Read what is printed there, and {why.repair}."
    )
