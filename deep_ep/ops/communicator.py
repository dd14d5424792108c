"""A rank that is connected with its group: the runtime that operations run on, one at a time.

Every operation asks it for the runtime, which it refuses where none may run, and has it raise what
went wrong. What operations there are it does not know.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import torch

from deep_ep.base.rules import COMBINE, DISPATCH, NORMAL_COMBINE, NORMAL_DISPATCH, fail
from deep_ep.base.warning import warn
from deep_ep.checks import arguments as checks
from deep_ep.errors import EPError, EPTransportError, EPUsageError, ranks_text
from deep_ep.hang import wording
from deep_ep.hang.states import DESTRUCTION
from deep_ep.observe.counters import RecvCounters
from deep_ep.observe.parts import PartStamps
from deep_ep.ops.failures import error_from_failure
from deep_ep.ops.hooks import MOST_OPEN_HOOKS
from deep_ep.ops.masks import Masks

if TYPE_CHECKING:
    from deep_ep.base.group import Group
    from deep_ep.base.ranks import RankPlace
    from deep_ep.checks.arguments import Limits
    from deep_ep.hang.recorder import Recorder
    from deep_ep.membership.liveness import Liveness
    from deep_ep.native.backend import Backend
    from deep_ep.native.runtime import Runtime
    from deep_ep.native.streams import StreamClaims
    from deep_ep.observe.watchers import Watcher
    from deep_ep.ops.hooks import PendingReceive

# What normal operations count besides their rows: the first step of fresh dispatches, and between nodes what this rank relays.
NOTIFY, RELAY_DISPATCH, RELAY_COMBINE = "notify", "relay_dispatch", "relay_combine"

# Round trips to a peer that a call may take; the shortest of a few counts.
_MOST_SAMPLES = 1 << 16

_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator:
    """Usable from several threads of a rank, one operation at a time, but not in a fork.

    Attributes:
        group: the ranks.
        rank: this rank.
        num_ranks: size of the group.
        backend: on which it runs.
        limits: what calls are checked against.
        runtime: the native runtime; `None` once destroyed.
        lock: held for the time of a call.
        recorder: of its calls; `None` if it remembers none.
        open_hooks: the receive phases whose hooks have not been called, at most `MOST_OPEN_HOOKS`.
        stream_event: orders two streams within an operation, for who holds the lock.
        before_operation: called with the name of each operation before it begins.
        watchers: who is told of the end.
        is_in_a_fork: whether this is a fork of the process that connected it.
        masks: whom operations go on without.
        hangs: what this rank does about waiting for long.
        counters: of operations that are given none of their own, by name; empty while nothing is counted.
        parts: stamps of what the rank does around operations; `None` while nothing is counted.
    """

    def __init__(
        self,
        group: Group,
        backend: Backend,
        runtime: Runtime,
        limits: Limits,
        places: Sequence[RankPlace],
        liveness: Liveness,
        claims: StreamClaims | None,
        may_mask: bool,
    ) -> None:
        """Internal: use `construction.connect`. The first four are the attributes of these names.

        Args:
            places: where the ranks run.
            liveness: this rank's part in who lives.
            claims: the streams of this rank, where others of this process may not use them.
            may_mask: whether ranks may be masked.
        """
        self.group = group
        self.rank = group.rank
        self.num_ranks = group.size
        self.backend = backend
        self.limits = limits
        self.runtime: Runtime | None = runtime
        self.lock = threading.RLock()
        self.stream_event = backend.new_event()
        self.open_hooks: list[PendingReceive] = []
        self.before_operation: list[Callable[[str], None]] = []
        self.watchers: list[Watcher] = []
        self.recorder: Recorder | None = None
        self.parts: PartStamps | None = None
        self.counters: dict[str, RecvCounters] = {}
        self.masks = Masks(self, may_mask, liveness, places)
        self._num_nodes = runtime.topology.num_nodes
        self._places = places
        self.hangs = liveness.hangs
        self._liveness = liveness
        self._claims = claims
        if claims is not None:
            weakref.finalize(self, claims.release)
        self._process = os.getpid()
        self.is_in_a_fork = False
        _communicators.add(self)

    # ---- who may call

    def check_process(self, where: str) -> None:
        """Refuses calls in a fork.

        Raises:
            EPUsageError: this is one.
        """
        if self.is_in_a_fork:
            got = f"the buffer was made in process {self._process}, this is its fork {os.getpid()}"
            fail(where, got, "forked", EPUsageError)

    def connected_runtime(self, where: str) -> Runtime:
        """The runtime, for what may be done while a receive phase is pending.

        Raises:
            EPUsageError: this is a fork, or it was destroyed.
        """
        self.check_process(where)
        if self.runtime is None:
            fail(where, "destroy() was called", "destroyed", EPUsageError)
        return self.runtime

    def idle_runtime(self, where: str) -> Runtime:
        """The runtime, for the next operation. Where that sends, `receive_sent` comes first.

        Raises:
            EPUsageError: as `connected_runtime`, or a hook is to be called first.
        """
        runtime = self.connected_runtime(where)
        for pending in tuple(self.open_hooks):
            if pending.is_lost:
                self._drop(where, pending)
        if len(self.open_hooks) >= MOST_OPEN_HOOKS:
            names = " and ".join(pending.name for pending in self.open_hooks)
            got = f"the hooks of {names} have not been called"
            fail(where, got, "pending_hook", EPUsageError, most=MOST_OPEN_HOOKS)
        return runtime

    def _drop(self, where: str, pending: PendingReceive) -> None:
        """Receives in place of a hook that was lost. What goes wrong in it is no failure of the next call."""
        failed = ""
        try:
            self.receive(pending)
        except EPError as error:
            failed = f"; that failed: {error}"
        warn(
            f"{where} on rank {self.rank}: the hook of {pending.name} was lost before it was "
            f"called; what it would have received is received now and dropped{failed}"
        )

    def receive_sent(self) -> None:
        """Receives, ahead of their hooks, what earlier operations have sent.

        An operation is received before the next one is sent: rows of two would come to one place.
        """
        for pending in self.open_hooks:
            pending.run_ahead(self.raise_failure)

    def check_received(self, where: str, handle: torch.Tensor) -> None:
        """Refuses `handle[0]` of a dispatch whose hook has not been called.

        Raises:
            EPUsageError: it is one.
        """
        for pending in self.open_hooks:
            if pending.fills(handle):
                got = "the hook of the dispatch that returned handle has not been called"
                fail(where, got, "handle_not_received", EPUsageError)

    def calling_stream(self, where: str) -> Any:
        """The stream that the caller works on, once no other rank of the process does.

        Raises:
            EPUsageError: another one does.
        """
        stream = self.backend.current_stream()
        if self._claims is not None:
            self._claims.use(where, self.backend.stream_handle(stream))
        return stream

    # ---- waiting

    def receive(self, pending: PendingReceive) -> None:
        """Runs a receive phase, for its hook."""
        self.check_process(pending.name)
        with self.lock:
            if pending in self.open_hooks:
                self.open_hooks.remove(pending)
            if self.runtime is None:
                fail(
                    pending.name,
                    "its hook was called after destroy()",
                    "hook_after_destroy",
                    EPUsageError,
                )
            pending.finish(self.raise_failure)

    def abandon_hook(self) -> None:
        """Runs the receive phases whose hooks have not been called, in place of these. Raises what went wrong first."""
        self.check_process("abandon_hook")
        errors = []
        with self.lock:
            for pending in list(self.open_hooks):
                try:
                    self.receive(pending)
                except EPError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def raise_failure(self, called: str | None = None) -> None:
        """Raises what the runtime recorded, if it did; the buffer stays usable.

        Args:
            called: what the user called, where the runtime only knows it as a barrier.
        """
        self.masks.notice()
        failure = self.runtime.native.take_failure() if self.runtime is not None else None
        if failure is None:
            return
        if called is not None and failure["operation"] == "barrier":
            failure = {**failure, "operation": called}
        decision = self._liveness.agree(failure)
        verdict = self.hangs.verdict_on(failure["operation"], failure["op"])
        raised = self.hangs.raised
        raise error_from_failure(failure, self.rank, decision, self._places, verdict, raised)

    # ---- counters

    def enable_counters(self, ring: int) -> None:
        """See `Buffer.enable_counters`."""
        where = "enable_counters"
        self.check_process(where)
        ring = checks.not_negative_int(where, "ring", ring)
        names = [DISPATCH, COMBINE]
        if self.limits.num_nvl_bytes:
            names += NORMAL_DISPATCH, NORMAL_COMBINE, NOTIFY
            if self._num_nodes > 1:
                names += RELAY_DISPATCH, RELAY_COMBINE
        with self.lock:
            for name in names:
                counters = self.counters.get(name)
                if counters is None or counters.capacity != ring:
                    self.counters[name] = RecvCounters(self.num_ranks, ring, self.limits.device)
            if ring and (self.parts is None or self.parts.capacity != ring):
                self.parts = PartStamps(ring, self.limits.device)

    def disable_counters(self) -> None:
        """See `Buffer.disable_counters`."""
        self.check_process("disable_counters")
        with self.lock:
            self.counters.clear()
            self.parts = None

    # ---- clocks and memory

    def measure_clock_offsets(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Buffer.measure_clock_offsets`."""
        where = "measure_clock_offsets"
        samples = checks.positive_int(where, "samples", samples)
        checks.kernel_limit(where, "samples", samples, _MOST_SAMPLES)
        measured = self.meet(where, samples=samples)
        pairs = torch.tensor(measured, dtype=torch.int64, device="cpu").reshape(self.num_ranks, 2)
        return pairs[:, 0].clone(), pairs[:, 1].clone()

    def barrier(self) -> None:
        """Waits for all ranks, in the order of the current stream."""
        self.meet("barrier")

    def meet(self, where: str, **arguments: int) -> Any:
        """What the method of this name of the native runtime returns, in which all ranks meet in the order of their streams."""
        with self.lock:
            runtime = self.idle_runtime(where)
            stream = self.backend.stream_handle(self.calling_stream(where))
            self.receive_sent()
            result = getattr(runtime.native, where)(**arguments, stream=stream)
            self.raise_failure(called=where)
        return result

    def local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | Sequence[int] | None,
        offset: int,
        use_rdma_buffer: bool,
    ) -> torch.Tensor:
        """See `Buffer.get_local_buffer_tensor`."""
        where = "get_local_buffer_tensor"
        runtime = self.connected_runtime(where)
        checks.instance(where, "dtype", dtype, torch.dtype, "Pass one such as torch.bfloat16")
        (use_rdma_buffer,) = checks.flags(where, use_rdma_buffer=use_rdma_buffer)
        offset = checks.not_negative_int(where, "offset", offset)
        if size is not None:
            size = checks.shape(where, "size", size)
        memory = runtime.get_local_buffer_tensor(dtype, 0, use_rdma_buffer)
        wanted = math.prod(size) if size is not None else memory.numel() - offset
        if wanted < 0 or offset + wanted > memory.numel():
            got = f"offset is {offset} and size {size if size is None else list(size)}"
            fail(where, got, "view_size", available=memory.numel())
        view = memory[offset : offset + wanted]
        return view if size is None else view.view(size)

    # ---- end of life

    def destroy(self) -> None:
        """Releases all memory once all ranks have come. Collective; see `Buffer.destroy`."""
        self.check_process("destroy")
        with self.lock:
            if self.runtime is None:
                return
            runtime, self.runtime = self.runtime, None
            self.open_hooks.clear()
            watchers, self.watchers = self.watchers, []
            keeps_memory = False
            try:
                self._finish(runtime)
                # Of operations on a GPU after which no call came that could have raised it.
                failure = runtime.native.take_failure()
                if failure is not None:
                    warn(f"destroy on rank {self.rank}: {error_from_failure(failure, self.rank)}")
                # Before the others are waited for: they may be waiting for this rank.
                self._part()
                for watcher in watchers:
                    watcher.end()
                self._meet_at_the_end(runtime)
            except RuntimeError as error:
                # Who is late may still write to it; on the CPU to a mapping of its own, and who is dead not at all.
                keeps_memory = self.backend.runs_in_streams and not self._liveness.dead
                what = "kept until this process ends" if keeps_memory else "released all the same"
                warn(
                    f"destroy on rank {self.rank}: not all ranks came ({error}){self._why_not_all()}; "
                    f"local memory is {what}"
                )
            finally:
                self._liveness.close()
                runtime.native.close(keeps_memory=keeps_memory)
                for watcher in watchers:
                    watcher.close()

    def _finish(self, runtime: Runtime) -> None:
        """Waits for what this rank has queued; for the whole device would be for kernels that wait for this rank."""
        for stream in (self.backend.current_stream(), runtime.get_comm_stream()):
            stream.synchronize()

    def _part(self) -> None:
        """This rank makes no more calls, and says whom it waits for in `destroy`."""
        liveness = self._liveness
        liveness.part()
        if self.recorder is not None:
            everybody, rank, masked = range(self.num_ranks), self.rank, self.masks.known
            self.recorder.note_destruction(
                lambda: set(everybody) - {rank} - liveness.parted - set(masked())
            )

    def _why_not_all(self) -> str:
        """What was found while this rank waited in `destroy`; empty if nothing was."""
        verdict = self.hangs.verdict_on(DESTRUCTION, 1)
        return "" if verdict is None else f": {wording.line(verdict)}"

    def _meet_at_the_end(self, runtime: Runtime) -> None:
        """Waits for all ranks, no longer than for an operation; where ranks may be masked, for those that are not.

        Raises:
            RuntimeError: not all come, or one of them is known to be dead.
        """
        liveness = self._liveness
        if liveness.dead and not self.masks.is_enabled:
            raise EPTransportError(f"{ranks_text(liveness.dead)} died")
        runtime.native.part(stream=self.backend.stream_handle(runtime.get_comm_stream()))
        self._finish(runtime)
        failure = runtime.native.take_failure()
        if failure is not None:
            missing, waited_s = failure["ranks"], failure["waited_ns"] * 1e-9
            how = f"did not call it within {waited_s:.3g} s"
            if set(missing) <= liveness.dead.keys():
                how = "died"
            elif set(missing) <= liveness.away():
                raised = self.hangs.raised
                why = (f"rank {rank} raised {raised[rank]}" for rank in missing if rank in raised)
                how = "; ".join(["ended before", *why])
            raise EPTransportError(f"{ranks_text(missing)} {how}")

    def abort(self) -> None:
        """Releases local memory and says goodbye, without waiting for anybody."""
        runtime, self.runtime = self.runtime, None
        self._liveness.close()
        if runtime is not None:
            runtime.native.close()


def _note_fork() -> None:
    """In a fork: a thread that only the parent has may hold a lock for ever."""
    for communicator in _communicators:
        communicator.is_in_a_fork = True
        communicator.lock = threading.RLock()


os.register_at_fork(after_in_child=_note_fork)
