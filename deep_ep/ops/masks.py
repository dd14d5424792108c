"""The masks of a buffer: whom its low-latency operations go on without, and why.

The masks themselves are in device memory, where kernels read them and add ranks that do not arrive
(csrc/kernels/protocol/masks.cuh). Here are the program's calls, and what the host knows: it learns of a rank that
a kernel has masked, tells the others by way of rank 0 (liveness.py), and keeps the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Protocol

from deep_ep.base.ranks import Key
from deep_ep.base.rules import QUERY_MASKS, fail
from deep_ep.base.text import verb
from deep_ep.base.warning import warn
from deep_ep.checks import arguments as checks
from deep_ep.errors import EPUsageError, ranks_text
from deep_ep.ops.failures import state_of
from deep_ep.types.bounds import integer

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from deep_ep.base.ranks import Decision, RankPlace
    from deep_ep.checks.arguments import Limits
    from deep_ep.checks.calls import MaskQuery
    from deep_ep.membership.liveness import Liveness
    from deep_ep.native.backend import Backend
    from deep_ep.native.runtime import Runtime

ASKED = "the program asked for it"


class ConnectedRank(Protocol):
    """The rank's `Communicator`, as far as masks need it."""

    rank: int
    num_ranks: int
    backend: Backend
    limits: Limits
    runtime: Runtime | None
    lock: threading.RLock
    stream_event: Any

    def connected_runtime(self, where: str) -> Runtime:
        """See `Communicator`."""

    def calling_stream(self, where: str) -> Any:
        """See `Communicator`."""

    def receive_sent(self) -> None:
        """See `Communicator`."""


class Masks:
    """Whom one rank goes on without.

    Attributes:
        is_enabled: whether the buffer was built for that.
    """

    def __init__(
        self,
        communicator: ConnectedRank,
        is_enabled: bool,
        liveness: Liveness,
        places: Sequence[RankPlace],
    ) -> None:
        """Does not communicate.

        Args:
            communicator: what the operations run on.
            is_enabled: whether the buffer was built for masks.
            liveness: this rank's part in who lives.
            places: where the ranks run.
        """
        self.is_enabled = is_enabled
        self._communicator = communicator
        self._liveness = liveness
        self._places = places
        self._why: dict[int, str] = {}

    # ---- calls

    def update(self, rank_to_mask: int, mask: bool) -> None:
        """See `Buffer.low_latency_update_mask_buffer`."""
        where = "low_latency_update_mask_buffer"
        communicator = self._communicator
        with communicator.lock:
            self._runtime(where)
            rank = integer(where, "rank_to_mask", rank_to_mask)
            (mask,) = checks.flags(where, mask=mask)
            if not 0 <= rank < communicator.num_ranks:
                got = f"rank_to_mask is {rank}"
                fail(where, got, "rank_to_mask", last=communicator.num_ranks - 1)
            if rank == communicator.rank and mask:
                fail(where, f"rank_to_mask is {rank}, this rank", "mask_itself")
            self._set(where, rank, mask)
            self.notice()
            if mask:
                self._why[rank] = ASKED
            else:
                self._why.pop(rank, None)

    def query(self, call: MaskQuery) -> None:
        """See `Buffer.low_latency_query_mask_buffer`."""
        communicator = self._communicator
        with communicator.lock:
            runtime = self._runtime(QUERY_MASKS)
            checks.Tensors(call, communicator.limits).check()
            native, status = runtime.native, call.mask_status.data_ptr()
            self._run(QUERY_MASKS, lambda on: native.query_masks(status=status, stream=on))

    def clean(self) -> None:
        """See `Buffer.low_latency_clean_mask_buffer`."""
        where = "low_latency_clean_mask_buffer"
        communicator = self._communicator
        with communicator.lock:
            runtime = self._runtime(where)
            communicator.receive_sent()
            self.notice()
            self._liveness.come_back()
            native = runtime.native
            self._run(where, lambda on: native.clean_masks(stream=on))
            self._why.clear()

    def why(self) -> dict[int, str]:
        """See `Buffer.why_masked`."""
        with self._communicator.lock:
            self._runtime("why_masked")
            self.notice()
            return dict(sorted(self._why.items()))

    def known(self) -> tuple[int, ...]:
        """Whom it goes on without, as far as the host knows; from any thread."""
        return tuple(self._why)

    def require_none(self, where: str) -> None:
        """Refuses an operation that needs all ranks.

        Raises:
            EPUsageError: some are masked.
        """
        self.notice()
        if self._why:
            who = f"{ranks_text(self._why)} {verb(self._why, 'is')}"
            fail(where, f"{who} masked", "masked_ranks", EPUsageError)

    # ---- what kernels have masked

    def notice(self) -> None:
        """Takes up whom kernels have masked since, tells the others, and warns."""
        communicator = self._communicator
        runtime = communicator.runtime
        if not self.is_enabled or runtime is None:
            return
        by_key: dict[Key, list[int]] = {}
        for rank, series, number in runtime.native.take_masked():
            by_key.setdefault(Key(series, number), []).append(rank)
        for key, ranks in sorted(by_key.items()):
            decision = self._liveness.agree_on_masked(key, ranks)
            missing = [rank for rank in ranks if decision is None or rank in decision.culprits]
            late = [rank for rank in ranks if rank not in missing]
            went_on = f"{_name(key)} on rank {communicator.rank} went on without"
            if missing:
                found = {rank: _reason(rank, key, decision, self._places) for rank in missing}
                self._why.update(found)
                _warn(
                    f"{went_on} {ranks_text(missing)}, now masked: {'; '.join(found.values())}",
                    "low_latency_query_mask_buffer tells who is masked",
                )
            if late:
                for rank in late:
                    self._set(_name(key), rank, masked=False)
                _warn(
                    f"{went_on} {ranks_text(late)}: what they sent did not arrive within DEEP_EP_TIMEOUT_S, but they "
                    "are not missing",
                    "they take part in the next operation",
                )

    # ---- steps

    def _runtime(self, where: str) -> Runtime:
        runtime = self._communicator.connected_runtime(where)
        if not self.is_enabled:
            fail(where, "the buffer has no masks", "enable_shrink", EPUsageError)
        return runtime

    def _set(self, where: str, rank: int, masked: bool) -> None:
        native = self._runtime(where).native
        self._run(where, lambda on: native.update_mask(rank=rank, masked=masked, stream=on))

    def _run(self, where: str, launch: Callable[[int], None]) -> None:
        """Launches on the stream of the operations, behind and before what the caller's stream has."""
        communicator = self._communicator
        back, current = communicator.backend, communicator.calling_stream(where)
        comm = communicator.connected_runtime(where).get_comm_stream()
        back.wait_stream(comm, current, communicator.stream_event)
        launch(back.stream_handle(comm))
        back.wait_stream(current, comm, communicator.stream_event)


def _name(key: Key) -> str:
    return f"{key.series} {key.op}"


def _reason(rank: int, key: Key, decision: Decision | None, places: Sequence[RankPlace]) -> str:
    found = f"rank {rank} did not arrive in {_name(key)}"
    return found if decision is None else f"{found}: {state_of(rank, decision, places[rank])}"


def _warn(what: str, then: str) -> None:
    warn(f"{what}. Its results are those of the other ranks; {then}.")
