"""How a buffer comes to be: the ranks agree on its settings, allocate, connect, and start.

Each step is collective, and what goes wrong on one rank is raised on all of them (rendezvous.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from deep_ep import (
    backend,
    checks,
    env,
    faults,
    hang_watch,
    liveness,
    phases,
    rendezvous,
    stacks,
    watchers,
)
from deep_ep.checks import Limits
from deep_ep.communicator import Communicator
from deep_ep.errors import EPError, EPUsageError
from deep_ep.roll_call import RollCall
from deep_ep.rules import fail
from deep_ep.runtime import Runtime
from deep_ep.streams import StreamClaims
from deep_ep.topology import Topology, ranks_per_node
from deep_ep.watchdog import Watchdog

if TYPE_CHECKING:
    from deep_ep._cpu import Runtime as NativeRuntime
    from deep_ep.backend import Backend
    from deep_ep.buffer import Buffer
    from deep_ep.group import Group
    from deep_ep.lines import Address
    from deep_ep.liveness import Liveness
    from deep_ep.rendezvous import Place


@dataclass(frozen=True)
class Settings:
    """What must be equal on all ranks; names and meaning are those of `Buffer`'s arguments."""

    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    num_qps_per_rank: int
    allow_nvlink_for_low_latency_mode: bool
    allow_mnnvl: bool
    enable_shrink: bool

    def checked(self) -> Settings:
        """The same, with sizes that are allowed.

        Raises:
            EPArgumentError: they are not.
        """
        return replace(
            self,
            num_nvl_bytes=checks.byte_size("num_nvl_bytes", self.num_nvl_bytes),
            num_rdma_bytes=checks.byte_size("num_rdma_bytes", self.num_rdma_bytes),
        )

    def uses_rdma(self, topology: Topology) -> bool:
        """Whether the RDMA buffer is used."""
        return self.low_latency_mode or topology.num_nodes > 1

    @property
    def may_mask(self) -> bool:
        """Whether operations may go on without ranks."""
        return self.enable_shrink and self.num_rdma_bytes > 0

    def check_topology(self, topology: Topology) -> None:
        """Rules that depend on the number of nodes; the same on all ranks, so all of them raise."""
        if self.uses_rdma(topology) and not self.num_qps_per_rank > 0:
            got = f"num_qps_per_rank is {self.num_qps_per_rank}"
            fail("Buffer", got, "queue_pairs", EPUsageError)


class Agreement(NamedTuple):
    """What all ranks have agreed on, and where they are.

    Attributes:
        settings: checked.
        backend: the same on all ranks.
        topology: this rank's place.
        places: where all ranks run.
        roll_call: in which this rank meets the others meanwhile.
    """

    settings: Settings
    backend: Backend
    topology: Topology
    places: Sequence[Place]
    roll_call: RollCall


def agree(group: Group, settings: Settings) -> Agreement:
    """Checks the settings here and against the other ranks'. Collective; nothing is allocated yet.

    Raises:
        EPArgumentError: a setting is not allowed, or ranks passed different ones; names them.
        EPNotBuiltError: the backend asked for is not available.
        EPTimeoutError: some ranks did not come.
    """
    roll_call = RollCall(group)
    selected: Backend | None = None
    error: EPError | None = None
    asked_ranks_per_node = None
    try:
        selected = backend.get()
        asked_ranks_per_node = env.ranks_per_node()
        env.verify()
        env.recorder()
        env.recorder_frames()
        env.warn_s()
        env.phases()
        env.diagnose()  # is needed later, when an error would be this rank's alone
        settings = settings.checked()
    except EPError as raised:
        error = raised
    facts = rendezvous.exchange_facts(
        roll_call,
        {
            "the group size": group.size,
            "the backend": selected.name if selected else None,
            "DEEP_EP_RANKS_PER_NODE": asked_ranks_per_node,
            "DEEP_EP_DIAGNOSE": env.DIAGNOSE.text(),
            "DEEP_EP_VERIFY": env.VERIFY.text(),
            **vars(settings),
        },
        error,
    )
    assert selected is not None  # otherwise there was an error, and the exchange raised it
    places = [fact.place for fact in facts]
    hosts = [place.host for place in places]
    topology = Topology(group.rank, group.size, ranks_per_node(hosts, asked_ranks_per_node))
    settings.check_topology(topology)
    return Agreement(settings, selected, topology, places, roll_call)


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
    settings, selected, topology, places, roll_call = agreed
    natives: list[NativeRuntime] = []
    comm_streams: list[Any] = []
    claims: list[StreamClaims] = []
    offers: list[liveness.Offer | None] = []
    members: list[Liveness | None] = []

    def allocate() -> tuple[str, liveness.Offer | None, dict[str, int]]:
        native = selected.create_runtime(
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
            timeout_ns=round(env.timeout_s() * 1e9),
            verify=env.verify(),
            num_recorded_calls=env.recorder(),
            enable_shrink=settings.may_mask,
            ranks_per_node=topology.ranks_per_node,
            device_index=selected.device().index or 0,
        )
        natives.append(native)
        handle = native.local_handle().hex()
        offers.append(liveness.offer(group.rank, places, topology.ranks_per_node))
        return handle, offers[0], stacks.offer()

    def connect_to_all() -> tuple[str | None, Address | None]:
        if selected.runs_in_streams and list(places).count(places[group.rank]) > 1:
            name = _name_of(handle for handle, *_ in allocated)
            claims.append(StreamClaims(name, selected.device().index or 0, group.rank))
            comm_streams.append(claims[0].take(selected.create_comm_stream, selected.stream_handle))
            claims[0].use("Buffer", selected.stream_handle(selected.current_stream()))
        else:
            comm_streams.append(selected.create_comm_stream())
        natives[0].connect([bytes.fromhex(handle) for handle, *_ in allocated])
        offered = liveness.Offer.of(allocated[0][1])
        # Shorter than others wait for this rank in the next operation.
        patience_s = env.timeout_s() / 2 if settings.may_mask else 0.0
        own = group.rank, group.size, natives[0]
        member, problem = liveness.join(owner, *own, offered, patience_s)
        members.append(member)
        return problem, member.address if member is not None else None

    try:
        allocated = rendezvous.together(roll_call, "allocating memory", allocate)
        connected = rendezvous.together(roll_call, "connecting", connect_to_all)
    except RuntimeError:
        for member in members:
            if member is not None:
                member.close()
        for offered in offers:
            liveness.withdraw(offered)
        for native in natives:
            native.close()
        for claimed in claims:
            claimed.release()
        raise
    liveness.complete(offers[0], [problem for problem, _ in connected])
    if members[0] is not None:
        addresses = [address for _, address in connected]
        members[0].introduce(addresses, places, topology.ranks_per_node)
    natives[0].release_handle()
    runtime = Runtime(natives[0], selected, topology, comm_streams[0])
    limits = Limits(
        group.size,
        settings.num_rdma_bytes,
        selected.device(),
        selected.binding,
        settings.num_nvl_bytes,
    )
    own = claims[0] if claims else None
    communicator = Communicator(
        group, selected, runtime, limits, places, members[0], own, settings.may_mask
    )
    if env.recorder():
        name = _name_of(handle for handle, *_ in allocated)
        settings_of_watch = hang_watch.Settings.from_environment()
        shown = [offered for *_, offered in allocated]
        called_ns = roll_call.called_ns
        communicator.record(name[:12], env.recorder(), settings_of_watch, shown, called_ns)
    return communicator


def _name_of(handles: Iterable[str]) -> str:
    """Names a buffer: all ranks have the same handles, and no other buffer has them."""
    return hashlib.sha256("".join(handles).encode()).hexdigest()


def start(buffer: Buffer) -> None:
    """What a connected buffer does first: measures clocks and starts what the environment asks for.

    Raises:
        EPError: that failed; the buffer is let go.
    """
    communicator = buffer.communicator
    runtime = communicator.connected_runtime("Buffer")
    if communicator.backend.may_hang(runtime.native):
        communicator.watchers.append(Watchdog(communicator, env.timeout_s()).start())
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
            faults.apply(buffer, faults.parse_list(env.inject(), buffer.group_size))
        if watch.mode != "off" and has_operations:
            communicator.watchers += watchers.start_all(buffer, communicator.group, watch)
    except RuntimeError:
        communicator.abort()
        raise
