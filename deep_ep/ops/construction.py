"""How a buffer comes to be: the ranks agree on its settings, allocate, connect, and start.

Each step is collective, and what goes wrong on one rank is raised on all of them (rendezvous.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from deep_ep.base import env
from deep_ep.base.rules import fail
from deep_ep.base.topology import Topology, ranks_per_node
from deep_ep.checks import arguments as checks
from deep_ep.checks.arguments import Limits
from deep_ep.errors import EPError, EPUsageError
from deep_ep.hang import stacks
from deep_ep.hang.recorder import Recorder
from deep_ep.membership import coordinator, rendezvous
from deep_ep.membership.monitored_group import MonitoredGroup
from deep_ep.native import backend
from deep_ep.native.runtime import Runtime
from deep_ep.native.streams import StreamClaims
from deep_ep.observe import phases, watchers
from deep_ep.ops.communicator import Communicator
from deep_ep.ops.watchdog import Watchdog
from deep_ep.testing import faults
from deep_ep.types.bounds import integer

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime as NativeRuntime
    from deep_ep.base.group import Group
    from deep_ep.base.ranks import RankPlace
    from deep_ep.membership.connection import Address
    from deep_ep.membership.liveness import Liveness
    from deep_ep.native.backend import Backend


# What is read when an error would be this rank's alone, and the others would wait for it.
_NEEDED_LATER = (
    *(env.verify, env.recorder, env.recorder_frames, env.warn_s, env.phases, env.diagnose),
    env.nvshmem_qp_depth,
)


@dataclass(frozen=True)
class BufferSettings:
    """What must be equal on all ranks; names and meaning are those of `Buffer`'s arguments."""

    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    num_qps_per_rank: int
    allow_nvlink_for_low_latency_mode: bool
    allow_mnnvl: bool
    enable_shrink: bool
    timeout_s: float | None

    def checked(self) -> BufferSettings:
        """The same, with numbers that are allowed.

        Raises:
            EPArgumentError: they are not.
        """
        return replace(
            self,
            num_nvl_bytes=checks.byte_size("num_nvl_bytes", self.num_nvl_bytes),
            num_rdma_bytes=checks.byte_size("num_rdma_bytes", self.num_rdma_bytes),
            num_qps_per_rank=integer("Buffer", "num_qps_per_rank", self.num_qps_per_rank),
            timeout_s=self.timeout_s
            if self.timeout_s is None
            else checks.timeout("Buffer", "timeout_s", self.timeout_s),
        )

    @property
    def wait_s(self) -> float:
        """How long an operation waits for other ranks."""
        return env.timeout_s() if self.timeout_s is None else self.timeout_s

    @property
    def may_mask(self) -> bool:
        """Whether operations may go on without ranks."""
        return self.enable_shrink and self.num_rdma_bytes > 0

    def check_topology(self, topology: Topology) -> None:
        """Rules that depend on the number of nodes; the same on all ranks, so all of them raise."""
        uses_rdma = self.low_latency_mode or topology.num_nodes > 1
        if uses_rdma and self.num_qps_per_rank <= 0:
            got = f"num_qps_per_rank is {self.num_qps_per_rank}"
            fail("Buffer", got, "queue_pairs", EPUsageError)


class Agreement(NamedTuple):
    """What all ranks have agreed on, and where they are.

    Attributes:
        settings: checked.
        backend: the same on all ranks.
        topology: this rank's place.
        places: where all ranks run.
        monitored: in which this rank meets the others meanwhile.
    """

    settings: BufferSettings
    backend: Backend
    topology: Topology
    places: Sequence[RankPlace]
    monitored: MonitoredGroup


def agree(group: Group, settings: BufferSettings) -> Agreement:
    """Checks the settings here and against the other ranks'. Collective; nothing is allocated yet.

    Raises:
        EPArgumentError: a setting is not allowed, or ranks passed different ones; names them.
        EPNotBuiltError: the backend asked for is not available.
        EPTimeoutError: some ranks did not come.
    """
    monitored = MonitoredGroup(group)
    selected: Backend | None = None
    error: EPError | None = None
    try:
        selected = backend.get()
        for variable in _NEEDED_LATER:
            variable()
        for fault in faults.parse_list(env.inject()):
            faults.validate(fault, group.size)
        settings = settings.checked()
    except EPError as raised:
        error = raised
    agreed = {
        "the group size": group.size,
        "the backend": selected.name if selected else None,
        "DEEP_EP_DIAGNOSE": env.diagnose.text(),
        "DEEP_EP_VERIFY": env.verify.text(),
        **vars(settings),
    }
    topology, places = _meet(monitored, agreed, error)
    assert selected is not None  # otherwise there was an error, and the exchange raised it
    settings.check_topology(topology)
    return Agreement(settings, selected, topology, places, monitored)


def meet(group: Group, agreed: Mapping[str, Any], error: EPError | None = None) -> Topology:
    """The place of this rank, once all ranks have said the same. Collective; nothing is allocated.

    Args:
        group: the ranks.
        agreed: what must be equal on all of them, by name.
        error: why this rank cannot go on.

    Raises:
        EPArgumentError: it is not equal, or a rank has an error; names the ranks.
        EPTimeoutError: some ranks did not come.
    """
    return _meet(MonitoredGroup(group), agreed, error)[0]


def _meet(
    monitored: MonitoredGroup, agreed: Mapping[str, Any], error: EPError | None
) -> tuple[Topology, Sequence[RankPlace]]:
    asked = None
    try:
        asked = env.ranks_per_node()
    except EPError as raised:
        error = error or raised
    agreed = {env.ranks_per_node.name: asked, **agreed}
    places = rendezvous.exchange_facts(monitored, agreed, error)
    per_node = ranks_per_node([place.host for place in places], asked)
    return Topology(monitored.rank, monitored.size, per_node), places


# Of each rank: the handle of its memory in hex, where it can be reached, how its stacks can be seen.
Allocated = Sequence[tuple[str, Any, dict[str, int]]]
# Of each rank: why it cannot be reached, or its address.
Connected = Sequence[tuple[Union[str, None], Any]]


def connect(owner: object, group: Group, agreed: Agreement) -> Communicator:
    """Allocates and maps the memory of all ranks, and connects those who watch over them. Collective.

    Args:
        owner: the buffer; the others hear of it when it is collected.
        group: the ranks.
        agreed: by them.

    Raises:
        EPTransportError: some rank could not allocate or connect; raised on all ranks.
        EPTimeoutError: some ranks did not come.
    """
    rank = _Connecting(group, agreed)
    monitored = agreed.monitored
    try:
        allocated = rendezvous.together(monitored, "allocating memory", rank.allocate)
        connected = rendezvous.together(
            monitored, "connecting", lambda: rank.connect(owner, allocated)
        )
    except RuntimeError:
        rank.close()
        raise
    return rank.communicator(allocated, connected)


class _Connecting:
    """What a rank has of its communicator so far; it is given back if another rank fails."""

    def __init__(self, group: Group, agreed: Agreement) -> None:
        self._group = group
        self._agreed = agreed
        self._native: NativeRuntime | None = None
        self._comm_stream: Any = None
        self._claims: StreamClaims | None = None
        self._offer: coordinator.Offer | None = None
        self._member: Liveness | None = None

    def allocate(self) -> tuple[str, coordinator.Offer | None, dict[str, int]]:
        """First step: this rank's memory, and what the others must know of it."""
        settings, selected, topology, places, _ = self._agreed
        group = self._group
        self._native = selected.create_runtime(
            needs_rdma=topology.num_nodes > 1,
            spans_hosts=len({place.host for place in places}) > 1,
            allow_nvlink=settings.allow_nvlink_for_low_latency_mode,
            allow_mnnvl=settings.allow_mnnvl,
            rank=group.rank,
            num_ranks=group.size,
            num_nvl_bytes=settings.num_nvl_bytes,
            num_rdma_bytes=settings.num_rdma_bytes,
            low_latency_mode=settings.low_latency_mode,
            num_qps_per_rank=settings.num_qps_per_rank,
            timeout_ns=round(settings.wait_s * 1e9),
            verify=env.verify(),
            num_recorded_calls=env.recorder(),
            enable_shrink=settings.may_mask,
            ranks_per_node=topology.ranks_per_node,
            device_index=selected.device().index or 0,
        )
        handle = self._native.local_handle().hex()
        self._offer = coordinator.offer(group.rank, places, topology.ranks_per_node)
        return handle, self._offer, stacks.offer()

    def connect(self, owner: object, allocated: Allocated) -> tuple[str | None, Address | None]:
        """Second step: maps the memory of all ranks, takes a stream that no other rank has, and reaches rank 0."""
        settings, selected, topology, places, _ = self._agreed
        group, native = self._group, self._native
        assert native is not None
        if selected.runs_in_streams and list(places).count(places[group.rank]) > 1:
            self._claims = StreamClaims(
                _name_of(allocated), selected.device().index or 0, group.rank
            )
            self._comm_stream = self._claims.take(
                selected.create_comm_stream, selected.stream_handle
            )
            self._claims.use("Buffer", selected.stream_handle(selected.current_stream()))
        else:
            self._comm_stream = selected.create_comm_stream()
        native.connect([bytes.fromhex(handle) for handle, *_ in allocated])
        known = group.rank, places, native, allocated[0][1], topology.ranks_per_node
        self._member, problem = coordinator.join(owner, *known, settings.may_mask)
        return problem, self._member.address

    def close(self) -> None:
        """There will be no buffer."""
        if self._member is not None:
            self._member.close()
        coordinator.withdraw(self._offer)
        if self._native is not None:
            self._native.close()
        if self._claims is not None:
            self._claims.release()

    def communicator(self, allocated: Allocated, connected: Connected) -> Communicator:
        """Last step: who watches over the ranks knows where all of them listen, and operations may run."""
        native, member = self._native, self._member
        assert native is not None
        assert member is not None
        coordinator.complete(self._offer, member, connected)
        settings, selected, topology, places, monitored = self._agreed
        native.release_handle()
        runtime = Runtime(native, selected, topology, self._comm_stream)
        limits = Limits(
            self._group.size,
            settings.num_rdma_bytes,
            selected.device(),
            selected.binding,
            settings.num_nvl_bytes,
        )
        communicator = Communicator(
            *(self._group, selected, runtime, limits, places),
            *(member, self._claims, settings.may_mask),
        )
        if env.recorder():
            num_frames, rank = env.recorder_frames(), self._group.rank
            own = rank, self._group.size, _name_of(allocated)[:12], places[rank], native
            masked = communicator.masks.known
            recorder = Recorder(*own, env.recorder(), masked, num_frames, monitored.called_ns)
            communicator.recorder = recorder
            if num_frames:
                communicator.before_operation.append(recorder.note_call)
            offers = [offered for *_, offered in allocated]
            member.watch(recorder, env.warn_s(), settings.wait_s, places, offers)
        return communicator


def _name_of(allocated: Allocated) -> str:
    """Names a buffer: all ranks have the same handles, and no other buffer has them."""
    return hashlib.sha256("".join(handle for handle, *_ in allocated).encode()).hexdigest()


def start(buffer: Any, timeout_s: float) -> None:
    """What a connected buffer does first: measures clocks and starts what the environment asks for.

    Args:
        buffer: a `deep_ep.Buffer` with its communicator.
        timeout_s: how long an operation waits for other ranks.

    Raises:
        EPError: that failed; the buffer is let go.
    """
    communicator: Communicator = buffer.communicator
    runtime = communicator.connected_runtime("Buffer")
    if communicator.backend.may_hang(runtime.native):
        communicator.watchers.append(Watchdog(communicator, timeout_s).start())
    has_operations = buffer.low_latency_mode or buffer.num_nvl_bytes > 0
    try:
        if has_operations:
            buffer.measure_clock_offsets()
        watch = env.diagnose()
        if watch.mode != "off" or env.phases():
            buffer.enable_counters()
        if env.phases() and buffer.rank == 0:
            communicator.watchers.append(phases.AtTheEnd(buffer))
        if env.inject() and has_operations:
            faults.apply(buffer, faults.parse_list(env.inject()))
        if watch.mode != "off" and has_operations:
            communicator.watchers += watchers.start_all(buffer, communicator.group, watch)
    except RuntimeError:
        communicator.abort()
        raise
