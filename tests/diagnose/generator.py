"""Timestamps as groups of ranks would record them, with known faults. Knows nothing of the rules.

    for window in simulate_windows(GPU, 8, num_rounds=32, faults=[[SlowRank(3, 20e-6)], []]):
        named = diagnose.judge(diagnose.gather(window.snapshots)).keys
        right = named == window.truth.keys

The protocol is followed causally: a rank enters an operation when it is done with the one before.
So ranks run in lockstep, and one fault shows everywhere, as in a real run:

* A rank that is late by d keeps the others waiting by d less one path time: it needs the data of
  the others to leave as they need its, but theirs is there when it comes. In the next operation it
  starts that much ahead. The group's period grows by d less what this slack (and that of a hook)
  hides.
* A slow path holds up its receiver, which enters the next operation late through no fault of its
  own.
* Lateness below a path time swings: who is late by d leaves first, so the others are late by d in
  the next operation, and so on; in groups of two this hardly fades.
* A slow rank's waits are short, because everybody else has sent long ago.

All windows of a batch go through each operation together, in arrays [windows, receiver, source].
Every window has random streams of its own, so a window does not depend on the batch it is in, a
shorter run is the beginning of a longer one, and faults change the faulty times only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Union

import numpy as np
import numpy.typing as npt

from deep_ep import faults as injectable
from deep_ep.counters import CounterSnapshot
from deep_ep.diagnose.snapshot import Snapshot
from deep_ep.faults import ClockFault, HotRank, SlowPath, SlowRank

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Key = tuple[str, Union[int, tuple, None]]

COUNTER_FIELDS = (
    "ops",
    "tokens",
    "bytes",
    "wait_ns",
    "late_ns",
    "issue_ns",
    "path_ns",
    "slack_ns",
    "critical_ops",
    "critical_ns",
    "max_wait_ns",
)
OWN_FIELDS = ("ops", "gap_ns", "send_ns", "wait_ns", "drain_ns")
RING_SOURCE_FIELDS = ("entered", "issued", "arrival", "tokens")
RING_OWN_FIELDS = ("op", "wait_begin", "exit", "previous_exit")
TOKEN_BYTES = 7168

# `previous_exit` is stamped at the very end, `exit` before the counters are written.
_EXIT_STAMPS_APART_US = 0.5
# Nobody enters an operation sooner than this after the one before.
_LEAST_GAP_US = 1.0
# A rank whose experts handle this much more or less than an even share may be named for it.
_TOLERATED_LOAD = 0.1
# Operations over which the drift of a rank's speed forgets itself.
_WANDER_OPERATIONS = 100.0
# Stamps of one batch, and cells that are counted at once; bounds memory.
_BATCH_BYTES = 2**28
_COUNTED_CELLS = 2**21
_NOISE_TABLE = 2**18


# --- faults that only the generator has -----------------------------------------------------------


@dataclass(frozen=True)
class SlowIngress:
    """Data from everybody to `rank` takes `delay_s` longer."""

    rank: int
    delay_s: float


@dataclass(frozen=True)
class SlowEgress:
    """Data from `rank` to everybody takes `delay_s` longer."""

    rank: int
    delay_s: float


@dataclass(frozen=True)
class SlowNodePair:
    """Data from any rank of node `src` to any rank of node `dst` takes `delay_s` longer."""

    src: int
    dst: int
    delay_s: float


@dataclass(frozen=True)
class SlowRail:
    """Data between devices `index` of different nodes takes `delay_s` longer."""

    index: int
    delay_s: float


@dataclass(frozen=True)
class EarlyRank:
    """Rank `rank` has `delay_s` less to do before each operation."""

    rank: int
    delay_s: float


@dataclass(frozen=True)
class SlowSend:
    """Rank `rank` takes `delay_s` longer to send."""

    rank: int
    delay_s: float


@dataclass(frozen=True)
class SlowReceive:
    """Rank `rank` takes `delay_s` longer to take in what has arrived."""

    rank: int
    delay_s: float


@dataclass(frozen=True)
class Hiccup:
    """Rank `rank` is late by `delay_s` once, in operation number `operation`: no lasting cause."""

    rank: int
    operation: int
    delay_s: float


@dataclass(frozen=True)
class Everything:
    """Every path takes `delay_s` longer: only a group's own history shows it."""

    delay_s: float


GeneratorFault = Union[
    injectable.Fault,
    SlowIngress,
    SlowEgress,
    SlowNodePair,
    SlowRail,
    EarlyRank,
    SlowSend,
    SlowReceive,
    Hiccup,
    Everything,
]


# --- machines -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """How healthy ranks behave; times in microseconds, token costs in microseconds per token.

    Attributes:
        gap, compute_per_token: between two operations; ahead of a combine, per token handled.
        send, drain: before and after waiting, each with a part per token.
        path: latency of a path within a node; path_same_rail between devices of equal index of
            two nodes, path_cross_rail between others of two nodes; None: as within a node.
        path_per_token: and per token; path_per_token_between: between nodes; None: as within.
        jitter: scale of the noise of each piece of work of a rank.
        path_jitter: scale of the noise of each path.
        tail_degrees: of freedom of Student's t, the noise's shape.
        hiccup_share: of the pieces of work and paths that are much slower, by 10 jitters on average.
        spread: how far healthy ranks differ from each other for good, as a share of their work.
        wander: how far the speed of each drifts slowly to and fro, likewise.
        skew: how far the loads of healthy ranks differ, as a standard deviation relative to their
            mean; popularity of experts is log-normal.
        ranks_per_node: None: all ranks share one node.
        clock_error, host_clock_error: what measured clock offsets are wrong by, standard deviations
            over ranks, over hosts.
        drift_ppm, host_drift_ppm: how fast the clocks drift apart since they were measured.
        true_arrival: whether an arrival before the begin of waiting is stamped as such, or as the
            begin of waiting, as CUDA kernels do.
        hook_us: work between sending and beginning to wait.
        device: "cpu" or "cuda".
    """

    gap: float
    compute_per_token: float
    send: float
    send_per_token: float
    path: float
    path_per_token: float
    drain: float
    drain_per_token: float
    jitter: float
    path_jitter: float
    path_same_rail: float | None = None
    path_cross_rail: float | None = None
    path_per_token_between: float | None = None
    tail_degrees: float = 3.0
    hiccup_share: float = 0.01
    spread: float = 0.01
    wander: float = 0.002
    skew: float = 0.0
    ranks_per_node: int | None = None
    clock_error: float = 0.0
    host_clock_error: float = 0.0
    drift_ppm: float = 0.0
    host_drift_ppm: float = 0.0
    true_arrival: bool = True
    hook_us: float = 0.0
    device: str = "cpu"

    def node_and_index(self, num_ranks: int) -> tuple[IntArray, IntArray]:
        """[num_ranks] int64 each: a rank's node, and its device's index on it."""
        node, index = np.divmod(np.arange(num_ranks), self.ranks_per_node or num_ranks)
        return node, index

    def latency(self, num_ranks: int) -> tuple[FloatArray, FloatArray]:
        """[receiver, source] each: us of every path, and us per token."""
        node, index = self.node_and_index(num_ranks)
        between = node[:, None] != node[None, :]
        same_rail = index[:, None] == index[None, :]
        values = [self.path_same_rail, self.path_cross_rail, self.path_per_token_between]
        defaults = [self.path, self.path, self.path_per_token]
        rail, cross, per_token = (d if v is None else v for v, d in zip(values, defaults))
        path = np.where(between, np.where(same_rail, rail, cross), self.path)
        return path, np.where(between, per_token, self.path_per_token)


CPU = Machine(
    gap=800.0,
    compute_per_token=0.2,
    send=3000.0,
    send_per_token=1.0,
    path=2.0,
    path_per_token=0.0,
    drain=1500.0,
    drain_per_token=1.0,
    jitter=400.0,
    path_jitter=1.0,
)
GPU = Machine(
    gap=150.0,
    compute_per_token=0.05,
    send=10.0,
    send_per_token=0.01,
    path=8.0,
    path_per_token=0.05,
    path_same_rail=12.0,
    path_cross_rail=14.0,
    path_per_token_between=0.14,
    drain=10.0,
    drain_per_token=0.01,
    jitter=3.0,
    path_jitter=1.0,
    clock_error=0.3,
    true_arrival=False,
    device="cuda",
    spread=0.003,
)


@dataclass(frozen=True)
class Kind:
    """One operation of a round.

    Attributes:
        name: as snapshots name it.
        gap: what of the machine's gap stands before it.
        computes: whether the experts work before it.
        tokens: "dispatched", "returned", "forwarded" (to the gateway of a node), or "none".
        same_rail_only: whether only sources of the receiver's device index send to it.
        own_times_only: whether nothing is stamped per source.
    """

    name: str
    gap: float = 1.0
    computes: bool = False
    tokens: str = "dispatched"
    same_rail_only: bool = False
    own_times_only: bool = False


LOW_LATENCY = (Kind("dispatch"), Kind("combine", computes=True, tokens="returned"))
# The parts of a normal dispatch one after the other, each with an operation number of its own.
NORMAL = (
    Kind("notify", tokens="none", own_times_only=True),
    Kind("gateway dispatch", gap=0.05, tokens="forwarded", same_rail_only=True),
    Kind("normal dispatch", gap=0.05),
    Kind("normal combine", computes=True, tokens="returned"),
)


# --- windows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What is the matter in one window.

    Attributes:
        keys: (kind, subject) of the lasting causes that the other ranks show, as
            `faults.expected_verdicts` has them; of ingress, egress, early ranks: the rank; of node
            pairs ("nodes", source, destination); of rails ("rail", index).
        effects_us: microseconds per operation that were injected, per key; of hot ranks what their
            tokens cost more ahead of each combine.
        tolerated: keys that are true although nothing was injected: ranks whose experts are
            in demand, or are not.
        everything_us: by how much all paths are slower.
        events: (operation number, rank) of single hiccups.
    """

    keys: frozenset[Key]
    effects_us: Mapping[Key, float]
    tolerated: frozenset[Key] = frozenset()
    everything_us: float = 0.0
    events: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Window:
    """What the ranks of one group recorded. Made by `simulate_windows`.

    Attributes:
        faults: what was injected.
        truth: what may be said about it.
        num_operations: of all kinds together.
        seed: repeats it: `simulate(machine, num_ranks, num_rounds, faults, seed)`.
    """

    faults: tuple[GeneratorFault, ...]
    truth: Truth
    num_operations: int
    seed: int
    _batch: _Batch = field(repr=False, compare=False)
    _place: int = field(repr=False)

    @functools.cached_property
    def snapshots(self) -> list[Snapshot]:
        """Every rank's; rings and totals of all operations in this window."""
        return [self.snapshot(rank) for rank in range(self._batch.setup.num_ranks)]

    def snapshot(self, rank: int) -> Snapshot:
        """One rank's, for groups so large that all at once take too much memory."""
        setup = self._batch.setup
        node, index = setup.machine.node_and_index(setup.num_ranks)
        return Snapshot(
            rank=rank,
            num_ranks=setup.num_ranks,
            device=setup.machine.device,
            host=f"host{node[rank]}",
            operations={r.kind.name: r.counters(rank) for r in self._recorded},
            device_index=int(index[rank]),
            node=int(node[rank]),
        )

    @functools.cached_property
    def _recorded(self) -> list[_Recorded]:
        setup = self._batch.setup
        return [
            _Recorded(self._stamps(i), kind, setup.capacity) for i, kind in enumerate(setup.kinds)
        ]

    @functools.cached_property
    def saving_us(self) -> float:
        """By how much the mean operation would be shorter without the faults.

        From the same run with the same random numbers, over all operations after the first round.
        """
        with_faults, without = self._batch.exits, self._batch.healthy_exits
        return _period(with_faults[self._place], self._count, len(self._batch.setup.kinds)) - (
            _period(without[self._place], self._count, len(self._batch.setup.kinds))
        )

    @property
    def period_us(self) -> float:
        """Mean time from the end of one operation to the end of the next."""
        return _period(self._batch.exits[self._place], self._count, len(self._batch.setup.kinds))

    def wait_matrix(self, kind: str) -> IntArray:
        """[receiver, source] int64: nanoseconds the row waited for the column, over all operations."""
        names = [k.name for k in self._batch.setup.kinds]
        stamps = self._stamps(names.index(kind))
        wait = stamps[:, :, :-1, _ARRIVAL] - stamps[:, :, -1:, _WAIT_BEGIN]
        waited: IntArray = np.maximum(wait, 0).sum(axis=0)
        return waited

    def first(self, num_operations: int) -> Window:
        """The same window, ended after its first operations (of all kinds together)."""
        return replace(self, num_operations=min(num_operations, self.num_operations))

    @property
    def _count(self) -> int:
        return self.num_operations

    def _stamps(self, kind: int) -> IntArray:
        """[n, receiver, source or own, 4] of one kind."""
        step = len(self._batch.setup.kinds)
        stamps: IntArray = self._batch.stamps[self._place, kind : self.num_operations : step]
        return stamps


def simulate(
    machine: Machine,
    num_ranks: int,
    num_rounds: int,
    faults: Sequence[GeneratorFault] = (),
    seed: int = 0,
    tokens_per_rank: int = 1024,
    capacity: int = 64,
    kinds: Sequence[Kind] = LOW_LATENCY,
) -> list[Snapshot]:
    """Runs `num_rounds` of dispatch and combine; returns every rank's snapshot.

    The rings hold the last `capacity` operations of all kinds together.
    """
    windows = simulate_windows(
        machine, num_ranks, num_rounds, [faults], seed, tokens_per_rank, capacity, kinds
    )
    return next(windows).snapshots


def simulate_windows(
    machine: Machine,
    num_ranks: int,
    num_rounds: int,
    faults: Sequence[Sequence[GeneratorFault]],
    seed: int = 0,
    tokens_per_rank: int = 1024,
    capacity: int = 64,
    kinds: Sequence[Kind] = LOW_LATENCY,
) -> Iterator[Window]:
    """One window for each entry of `faults`, the i-th with random numbers of `seed + i`.

    Args:
        machine: how healthy ranks behave.
        num_ranks: of each group.
        num_rounds: how often the operations of `kinds` are run, in their order.
        faults: what is injected into each window.
        seed: of the first window.
        tokens_per_rank: tokens times experts per token that each rank sends.
        capacity: operations of all kinds together that the rings hold.
        kinds: LOW_LATENCY or NORMAL.

    Returns:
        An iterator that holds one batch at a time (of about 256 MB of stamps, or one window).
    """
    per_window = num_rounds * len(kinds) * num_ranks * (num_ranks + 1) * 4 * 8
    size = max(1, _BATCH_BYTES // max(per_window, 1))
    setup = _Setup(machine, num_ranks, num_rounds, tokens_per_rank, capacity, tuple(kinds))
    for begin in range(0, len(faults), size):
        members = [tuple(f) for f in faults[begin : begin + size]]
        seeds = tuple(seed + begin + i for i in range(len(members)))
        batch = _Batch(setup, tuple(members), seeds)
        for place, injected in enumerate(members):
            yield Window(
                faults=injected,
                truth=_truth(setup, injected, batch.loads[place]),
                num_operations=num_rounds * len(kinds),
                seed=seeds[place],
                _batch=batch,
                _place=place,
            )


def _period(exits: FloatArray, num_operations: int, num_kinds: int) -> float:
    """exits [operations + 1, num_ranks]; the first round is left out, if there are others."""
    first = num_kinds if num_operations > num_kinds else 0
    span = exits[num_operations] - exits[first]
    return float(span.mean()) / max(num_operations - first, 1)


def _truth(setup: _Setup, faults: Sequence[GeneratorFault], load: FloatArray) -> Truth:
    effects: dict[Key, float] = {}
    hot = {fault.rank for fault in faults if isinstance(fault, HotRank)}
    for fault in faults:
        key: Key | None = None
        if isinstance(fault, (SlowRank, SlowSend, SlowReceive)) and fault.rank not in hot:
            key = "comp-slow", fault.rank
        elif isinstance(fault, (SlowIngress, SlowEgress)):
            key = "comm-slow", fault.rank
        elif isinstance(fault, SlowPath):
            key = "comm-slow", (fault.src, fault.dst)
        elif isinstance(fault, SlowNodePair):
            key = "comm-slow", ("nodes", fault.src, fault.dst)
        elif isinstance(fault, SlowRail):
            key = "comm-slow", ("rail", fault.index)
        elif isinstance(fault, (EarlyRank, HotRank)):
            key = "mixed-slow", fault.rank
        if key is not None:
            effects[key] = effects.get(key, 0.0) + _effect_us(setup, fault)
    tolerated = np.flatnonzero(np.abs(load - 1.0) > _TOLERATED_LOAD)
    return Truth(
        keys=frozenset(effects),
        effects_us=effects,
        tolerated=frozenset(("mixed-slow", int(rank)) for rank in tolerated) - set(effects),
        everything_us=sum(f.delay_s for f in faults if isinstance(f, Everything)) * 1e6,
        events=frozenset((f.operation, f.rank) for f in faults if isinstance(f, Hiccup)),
    )


def _effect_us(setup: _Setup, fault: GeneratorFault) -> float:
    if isinstance(fault, HotRank):
        return (fault.share - 1) * setup.tokens_per_rank * setup.machine.compute_per_token
    if isinstance(fault, SlowPath) and fault.bytes_per_s:
        even = setup.tokens_per_rank / setup.num_ranks
        return fault.delay_s * 1e6 + even * TOKEN_BYTES / fault.bytes_per_s * 1e6
    return float(fault.delay_s) * 1e6


# --- the run --------------------------------------------------------------------------------------

# Places in the last dimension of the stamps.
_ENTERED, _ISSUED, _ARRIVAL, _TOKENS = range(4)
_OP, _WAIT_BEGIN, _EXIT, _PREVIOUS_EXIT = range(4)


@dataclass(frozen=True)
class _Setup:
    """What all windows of a call have in common."""

    machine: Machine
    num_ranks: int
    num_rounds: int
    tokens_per_rank: int
    capacity: int
    kinds: tuple[Kind, ...]

    @property
    def num_operations(self) -> int:
        return self.num_rounds * len(self.kinds)


class _Batch:
    """Windows that go through the operations together.

    Attributes:
        stamps: [windows, operations, receiver, source or own, 4] int64, as rings hold them.
        exits: [windows, operations + 1, num_ranks], us; the first is the start.
        loads: [windows, num_ranks], how popular each rank's experts are; 1 is even.
    """

    def __init__(
        self,
        setup: _Setup,
        faults: tuple[tuple[GeneratorFault, ...], ...],
        seeds: tuple[int, ...],
    ) -> None:
        self.setup = setup
        self.seeds = seeds
        size, ranks = len(faults), setup.num_ranks
        self.stamps = np.zeros((size, setup.num_operations, ranks, ranks + 1, 4), np.int64)
        self.exits, self.loads = _run(setup, faults, seeds, self.stamps)

    @functools.cached_property
    def healthy_exits(self) -> FloatArray:
        """`exits` of the same windows without faults."""
        return _run(self.setup, tuple(() for _ in self.seeds), self.seeds, None)[0]


def _run(
    setup: _Setup,
    faults: Sequence[Sequence[GeneratorFault]],
    seeds: Sequence[int],
    stamps: IntArray | None,
) -> tuple[FloatArray, FloatArray]:
    """Follows the protocol; fills in `stamps` and returns exits and loads, as `_Batch` has them."""
    machine, num_ranks = setup.machine, setup.num_ranks
    extra = _extra(setup, faults)
    draws = _draw(setup, extra.share, seeds)
    path_us, path_per_token = machine.latency(num_ranks)
    path_us = path_us + extra.path
    path_rate = path_per_token + extra.path_per_token
    node, index = machine.node_and_index(num_ranks)
    same_rail = index[:, None] == index[None, :]
    own = np.eye(num_ranks, dtype=bool)
    # A source issues to one destination after the other, to the last when all is sent.
    order = 1 - 0.2 * (1 - (np.arange(num_ranks)[:, None] + 1) / num_ranks)
    memory = np.exp(-1.0 / _WANDER_OPERATIONS)
    wander = draws.wander[:, 0]

    exit_at = draws.start
    exits = [exit_at]
    for op in range(setup.num_operations):
        kind = setup.kinds[op % len(setup.kinds)]
        tokens = _tokens_of(kind, draws.tokens[:, op // len(setup.kinds)], node, same_rail)
        outgoing, incoming = tokens.sum(axis=1), tokens.sum(axis=2)
        if op:
            wander = memory * wander + np.sqrt(1 - memory**2) * draws.wander[:, op]
        speed = draws.personal + machine.wander * wander
        gap = kind.gap * machine.gap
        if kind.computes:
            gap = gap + machine.compute_per_token * outgoing
        gap = speed * gap + machine.jitter * draws.gap[:, op] - extra.early
        entered = exit_at + np.maximum(gap, _LEAST_GAP_US) + extra.gap
        for place, rank, late_us in extra.hiccups.get(op + 1, ()):
            entered[place, rank] += late_us
        send = speed * (machine.send + machine.send_per_token * outgoing)
        send = np.maximum(send + machine.jitter / 3 * draws.send[:, op], 0.0) + extra.send
        issued = entered[:, None, :] + send[:, None, :] * (1.0 if kind.own_times_only else order)
        wait_begin = entered + send + machine.hook_us * draws.personal
        path = path_us + path_rate * tokens + machine.path_jitter * np.abs(draws.path[:, op])
        arrival = issued + np.where(own, 0.0, path)
        if kind.same_rail_only:
            arrival = np.where(same_rail, arrival, -np.inf)
        ready = np.maximum(wait_begin, arrival.max(axis=2))
        drain = speed * (machine.drain + machine.drain_per_token * incoming)
        drain = np.maximum(drain + machine.jitter / 3 * draws.drain[:, op], 0.0) + extra.drain
        leaves = ready + drain
        if stamps is not None:
            slot = stamps[:, op]
            zero = draws.clock_zero
            wrong = draws.clock_error + (draws.drift + extra.drift) * entered
            wrong = wrong[:, :, None] - wrong[:, None, :]
            seen = arrival
            if kind.own_times_only:  # all that is seen is the last
                seen = np.broadcast_to(arrival.max(axis=2)[:, :, None], arrival.shape)
            if not machine.true_arrival:
                seen = np.maximum(seen, wait_begin[:, :, None])
            slot[:, :, :-1, _ENTERED] = _to_ns(entered[:, None, :] + wrong, zero)
            slot[:, :, :-1, _ISSUED] = _to_ns(issued + wrong, zero)
            slot[:, :, :-1, _ARRIVAL] = _to_ns(np.where(np.isfinite(seen), seen, 0.0), zero)
            slot[:, :, :-1, _TOKENS] = tokens
            if kind.same_rail_only or kind.own_times_only:
                slot[:, :, :-1][:, ~(own if kind.own_times_only else same_rail)] = 0
            slot[:, :, -1, _OP] = op + 1
            slot[:, :, -1, _WAIT_BEGIN] = _to_ns(wait_begin, zero)
            slot[:, :, -1, _EXIT] = _to_ns(leaves, zero)
            if op:
                slot[:, :, -1, _PREVIOUS_EXIT] = _to_ns(exit_at + _EXIT_STAMPS_APART_US, zero)
        exit_at = leaves
        exits.append(exit_at)
    return np.stack(exits, axis=1), draws.load


def _tokens_of(kind: Kind, dispatched: IntArray, node: IntArray, same_rail: FloatArray) -> IntArray:
    """[windows, receiver, source] of one operation, from what experts' ranks get of each source."""
    if kind.tokens == "none":
        return np.zeros_like(dispatched)
    if kind.tokens == "returned":
        return np.swapaxes(dispatched, 1, 2)
    if kind.tokens == "forwarded":
        same_node = (node[:, None] == node[None, :]).astype(np.int64)
        return np.where(same_rail, same_node @ dispatched, 0)
    return dispatched


def _to_ns(us: FloatArray, zero: IntArray) -> IntArray:
    """On the clock of the receiver, the second dimension."""
    stamps: IntArray = np.rint(us * 1e3).astype(np.int64)
    return stamps + (zero[:, :, None] if us.ndim == 3 else zero)


class _Extra(NamedTuple):
    """What the faults add, in us; per window and rank, or per window, receiver and source."""

    gap: FloatArray
    early: FloatArray
    send: FloatArray
    drain: FloatArray
    drift: FloatArray
    path: FloatArray
    path_per_token: FloatArray
    share: FloatArray
    hiccups: Mapping[int, Sequence[tuple[int, int, float]]]


def _extra(setup: _Setup, faults: Sequence[Sequence[GeneratorFault]]) -> _Extra:
    num_ranks, size = setup.num_ranks, len(faults)
    node, index = setup.machine.node_and_index(num_ranks)
    per_rank = np.zeros((5, size, num_ranks))
    gap, early, send, drain, drift = per_rank
    path, path_per_token = np.zeros((2, size, num_ranks, num_ranks))
    share = np.full((size, num_ranks), np.nan)
    hiccups: dict[int, list[tuple[int, int, float]]] = {}
    by_type = {SlowRank: gap, EarlyRank: early, SlowSend: send, SlowReceive: drain}
    for i, members in enumerate(faults):
        for fault in members:
            us = getattr(fault, "delay_s", 0.0) * 1e6
            if type(fault) in by_type:
                by_type[type(fault)][i, fault.rank] += us
            elif isinstance(fault, SlowPath):
                path[i, fault.dst, fault.src] += us
                if fault.bytes_per_s:
                    path_per_token[i, fault.dst, fault.src] += TOKEN_BYTES / fault.bytes_per_s * 1e6
            elif isinstance(fault, SlowIngress):
                path[i, fault.rank, :] += us
            elif isinstance(fault, SlowEgress):
                path[i, :, fault.rank] += us
            elif isinstance(fault, SlowNodePair):
                path[i][np.ix_(node == fault.dst, node == fault.src)] += us
            elif isinstance(fault, SlowRail):
                on_rail = (index == fault.index)[:, None] & (index == fault.index)[None, :]
                path[i][on_rail] += us
            elif isinstance(fault, Everything):
                path[i] += us
            elif isinstance(fault, HotRank):
                share[i, fault.rank] = fault.share
            elif isinstance(fault, Hiccup):
                hiccups.setdefault(fault.operation, []).append((i, fault.rank, us))
            elif isinstance(fault, ClockFault):  # its offset is measured away, its drift is not
                drift[i, fault.rank] += fault.drift_ppm * 1e-6
            else:
                raise TypeError(f"{fault!r} is not a fault of the generator")
    return _Extra(gap, early, send, drain, drift, path, path_per_token, share, hiccups)


class _Draws(NamedTuple):
    """All random numbers of a batch. First dimension: windows; noise is in units of its scale."""

    personal: FloatArray  # [., num_ranks], about 1
    clock_error: FloatArray  # [., num_ranks], us
    drift: FloatArray  # [., num_ranks]
    clock_zero: IntArray  # [., num_ranks], ns: each clock has its own
    start: FloatArray  # [., num_ranks], us
    wander: FloatArray  # [., operations, num_ranks], standard normal
    gap: FloatArray  # [., operations, num_ranks]
    send: FloatArray
    drain: FloatArray
    path: FloatArray  # [., operations, num_ranks, num_ranks]
    tokens: IntArray  # [., rounds, expert rank, source]
    load: FloatArray  # [., num_ranks]


def _draw(setup: _Setup, share: FloatArray, seeds: Sequence[int]) -> _Draws:
    windows = [_draw_window(setup, share[i], seed) for i, seed in enumerate(seeds)]
    return _Draws(*(np.stack(values) for values in zip(*windows)))


def _draw_window(setup: _Setup, share: FloatArray, seed: int) -> _Draws:
    """Each quantity from its own stream, operation by operation."""
    machine, num_ranks, operations = setup.machine, setup.num_ranks, setup.num_operations
    streams = (
        np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(7)
    )
    ranks, wander, gap, send, drain, path, routing = streams
    table = _noise_table(machine.tail_degrees, machine.hiccup_share)
    node, _ = machine.node_and_index(num_ranks)

    def noise(stream: np.random.Generator, *shape: int) -> FloatArray:
        return table[stream.integers(0, _NOISE_TABLE, shape, np.uint32)]

    personal = 1.0 + machine.spread * np.clip(ranks.normal(size=num_ranks), -2, 2)
    clocks, drifts = ranks.normal(size=(2, num_ranks))
    host_clocks, host_drifts = ranks.normal(size=(2, num_ranks))[:, node]
    clock_zero = ranks.integers(10**12, 10**15, num_ranks)
    start = ranks.uniform(0, 10 * machine.jitter, num_ranks)

    popularity = _popularity(machine.skew, routing.normal(size=num_ranks))
    load = _with_hot_ranks(popularity, share)
    shape = setup.num_rounds, num_ranks
    tokens = routing.multinomial(setup.tokens_per_rank, load / load.sum(), shape)
    return _Draws(
        personal=personal,
        clock_error=machine.clock_error * clocks + machine.host_clock_error * host_clocks,
        drift=(machine.drift_ppm * drifts + machine.host_drift_ppm * host_drifts) * 1e-6,
        clock_zero=clock_zero,
        start=start,
        wander=wander.normal(size=(operations, num_ranks)),
        gap=noise(gap, operations, num_ranks),
        send=noise(send, operations, num_ranks),
        drain=noise(drain, operations, num_ranks),
        path=noise(path, operations, num_ranks, num_ranks),
        tokens=np.swapaxes(tokens, 1, 2),
        load=load,
    )


def _popularity(skew: float, normal: FloatArray) -> FloatArray:
    """[num_ranks], mean 1: log-normal of relative standard deviation `skew`, cut at two of them."""
    sigma = np.sqrt(np.log1p(skew**2))
    popularity = np.exp(sigma * np.clip(normal, -2, 2))
    return popularity / popularity.mean()


def _with_hot_ranks(popularity: FloatArray, share: FloatArray) -> FloatArray:
    """Hot ranks get their share of an even load, the others what is left in their proportions."""
    hot = np.isfinite(share)
    if not hot.any():
        return popularity
    left = max(popularity.size - share[hot].sum(), 0.0)
    others = np.where(hot, 0.0, popularity)
    return np.where(hot, share, others * left / max(others.sum(), 1e-12))


@functools.lru_cache(maxsize=8)
def _noise_table(tail_degrees: float, hiccup_share: float) -> npt.NDArray[np.float32]:
    """Heavy-tailed noise to draw from: Student's t, and now and then a hiccup.

    Drawing entries of a table costs a quarter of drawing afresh.
    """
    rng = np.random.default_rng(20250611)
    noise = 0.8 * rng.standard_t(tail_degrees, _NOISE_TABLE)
    hiccup = rng.random(_NOISE_TABLE) < hiccup_share
    return (noise + np.where(hiccup, rng.exponential(10.0, _NOISE_TABLE), 0.0)).astype(np.float32)


# --- what the kernels would have written ----------------------------------------------------------


class _Recorded:
    """Counters of all ranks of one operation kind, from its stamps [n, receiver, source or own, 4]."""

    def __init__(self, stamps: IntArray, kind: Kind, capacity: int) -> None:
        self.stamps = stamps
        self.kind = kind
        self.capacity = capacity
        num_ranks = stamps.shape[1]
        self.totals = np.zeros((num_ranks, len(COUNTER_FIELDS), num_ranks), np.int64)
        self.own = np.zeros((num_ranks, len(OWN_FIELDS)), np.int64)
        step = max(1, _COUNTED_CELLS // num_ranks**2)
        for begin in range(0, len(stamps), step):
            self._count(stamps[begin : begin + step])
        # A slot holds the last operation that was written to it.
        slots = stamps[::-1, 0, -1, _OP] % max(capacity, 1)
        self.kept = len(stamps) - 1 - np.unique(slots, return_index=True)[1]

    def counters(self, rank: int) -> CounterSnapshot:
        num_ranks = self.stamps.shape[1]
        ring = np.zeros((self.capacity, num_ranks + 1, 4), np.int64)
        if self.capacity:
            kept = self.stamps[self.kept, rank]
            if self.kind.own_times_only:
                kept[:, :-1] = 0
            ring[kept[:, -1, _OP] % self.capacity] = kept
        return CounterSnapshot(
            fields=COUNTER_FIELDS,
            own_fields=OWN_FIELDS,
            ring_source_fields=RING_SOURCE_FIELDS,
            ring_own_fields=RING_OWN_FIELDS,
            totals=self.totals[rank],
            own=self.own[rank],
            ring=ring,
        )

    def _count(self, stamps: IntArray) -> None:
        entered, issued, arrival, tokens = np.moveaxis(stamps[:, :, :-1], -1, 0)
        _, wait_begin, exit_at, previous_exit = np.moveaxis(stamps[:, :, -1], -1, 0)
        itself = np.arange(stamps.shape[1])
        heard = arrival != 0
        begin = wait_begin[:, :, None]
        wait = np.where(heard, np.maximum(arrival - begin, 0), 0)
        late = np.clip(entered - begin, 0, wait)
        issue = np.clip(issued - np.maximum(entered, begin), 0, wait - late)
        ready = np.maximum(arrival.max(axis=2), wait_begin)
        runner_up = np.maximum(_second_largest(arrival), wait_begin)
        came_last = np.argmax(arrival, axis=2)[:, :, None]
        waited = ready > wait_begin
        critical_ops, critical_ns = np.zeros_like(wait), np.zeros_like(wait)
        np.put_along_axis(critical_ops, came_last, waited[:, :, None], axis=2)
        lead = np.where(waited, ready - runner_up, 0)
        np.put_along_axis(critical_ns, came_last, lead[:, :, None], axis=2)
        own = {
            "ops": np.ones_like(ready),
            "gap_ns": np.where(previous_exit != 0, entered[:, itself, itself] - previous_exit, 0),
            "send_ns": np.where(heard, issued - entered, 0).max(axis=1),
            "wait_ns": ready - wait_begin,
            "drain_ns": exit_at - ready,
        }
        for name, values in own.items():
            self.own[:, OWN_FIELDS.index(name)] += values.sum(axis=0)
        if self.kind.own_times_only:
            return
        sums = {
            "ops": heard,
            "tokens": tokens,
            "bytes": tokens * TOKEN_BYTES,
            "wait_ns": wait,
            "late_ns": late,
            "issue_ns": issue,
            "path_ns": wait - late - issue,
            "slack_ns": np.where(heard, np.maximum(begin - issued, 0), 0),
            "critical_ops": critical_ops,
            "critical_ns": critical_ns,
        }
        for name, values in sums.items():
            self.totals[:, COUNTER_FIELDS.index(name)] += values.sum(axis=0)
        largest = self.totals[:, COUNTER_FIELDS.index("max_wait_ns")]
        np.maximum(largest, wait.max(axis=0, initial=0), out=largest)


def _second_largest(values: IntArray) -> IntArray:
    """Of the last dimension; the largest where there is no other."""
    if values.shape[-1] == 1:
        return values[..., 0]
    second: IntArray = np.partition(values, -2, axis=-1)[..., -2]
    return second
