"""How healthy ranks behave, and which operations they go through again and again."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np

from deep_ep.diagnose.core.diagnosis import FloatArray, IntArray

TOKEN_BYTES = 7168
# Tokens times experts per token that each rank sends.
TOKENS_PER_RANK = 1024


class StampRule(enum.Enum):
    """When a receiver says that a source's data came.

    TRUE_ARRIVAL: when it came, also before waiting began, as the CPU's rank clock knows it.
    FIRST_SIGHT: when this source was first seen; what is there at the first look counts as there
        when waiting began, and is marked as not seen to come.
    """

    TRUE_ARRIVAL = "true arrival"
    FIRST_SIGHT = "first sight"


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
        path_spread: how far healthy paths differ from each other for good, as a share of their latency.
        tail_degrees: of freedom of Student's t, the noise's shape.
        hiccup_share: of the pieces of work and paths that are much slower, by 10 jitters on average.
        spread: how far healthy ranks differ from each other for good, as a share of their work.
        wander: how far the speed of each drifts slowly up and down, likewise.
        skew: how far the loads of healthy ranks differ, as a standard deviation relative to their
            mean; popularity of experts is log-normal.
        layers: rounds that follow each other and come again in the same order, each with a routing of
            its own; with more than one, the gaps of each differ from the usual as well.
        batches: what share of the tokens there is in a round, one of these at random (speculative
            decoding); with `batches_alternate` one after the other.
        moving_hot_share: the share of the tokens that the experts of one rank get, 1 is even, another
            rank every 50 operations; 0: no such rank.
        rank_noise, node_noise: of the work of each rank, and common to a node, standard deviations;
            both are forgotten over `noise_memory` operations.
        tick: what an operating system takes of a rank's time in every k-th operation.
        congestion: how much longer paths between nodes take on a rail that is congested, in
            `congested_share` of the operations, 10 to 50 at a time.
        fabric_pause: how much longer all paths between nodes take, all alike, in `paused_share` of the
            operations; half to one and a half times that.
        ranks_per_node: None: all ranks share one node.
        clock_error, host_clock_error: what measured clock offsets are wrong by, standard deviations
            over ranks, over hosts.
        drift_ppm, host_drift_ppm: how fast the clocks drift apart since they were measured, standard
            deviations over ranks, over hosts; none by more than two.
        clock_age_s: how long ago they were measured when the run begins.
        states_round_trip: whether offsets are stated to be wrong by up to half a round trip, as kernels
            do; otherwise by two standard deviations of what they are wrong by.
        stated_drift_ppm: how fast stated errors grow; None: as fast as timers gain on each other at
            most, if clocks drift at all.
        measured_while_slow: whether slow paths were slow already when offsets were measured over them.
        clock_step: by how much the clock of one rank was set forward after it was measured; before the
            run begins or, with `clock_steps_within`, ahead of one of its operations.
        stamp_rule: how arrivals are stamped.
        timer_step_ns: step of each rank's timer; stamps are rounded down to it.
        ports: whether tokens of several destinations, and of several sources, share a port and so
            wait for each other; per-token costs of paths are those of ports then. Otherwise each path
            is on its own.
        combine_by_destination: whether a combine returns all tokens of one destination before those
            of the next, all ranks beginning with rank 0; otherwise one local expert after the other.
        in_turn: whether every operation sends all tokens of one destination before those of the next,
            each rank beginning with the one after it.
        fenced: whether waiting begins only when what was sent within the node has come there.
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
    path_spread: float = 0.0
    tail_degrees: float = 3.0
    hiccup_share: float = 0.01
    spread: float = 0.01
    wander: float = 0.002
    skew: float = 0.0
    layers: int = 1
    batches: tuple[float, ...] = (1.0,)
    batches_alternate: bool = False
    moving_hot_share: float = 0.0
    rank_noise: float = 0.0
    node_noise: float = 0.0
    noise_memory: float = 10.0
    tick: float = 0.0
    congestion: float = 0.0
    congested_share: float = 0.05
    fabric_pause: float = 0.0
    paused_share: float = 0.02
    ranks_per_node: int | None = None
    clock_error: float = 0.0
    host_clock_error: float = 0.0
    drift_ppm: float = 0.0
    host_drift_ppm: float = 0.0
    clock_age_s: float = 0.0
    states_round_trip: bool = False
    stated_drift_ppm: float | None = None
    measured_while_slow: bool = False
    clock_step: float = 0.0
    clock_steps_within: bool = False
    stamp_rule: StampRule = StampRule.TRUE_ARRIVAL
    timer_step_ns: int = 1
    ports: bool = False
    combine_by_destination: bool = False
    in_turn: bool = False
    fenced: bool = False
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
    stamp_rule=StampRule.FIRST_SIGHT,
    timer_step_ns=32,
    device="cuda",
    spread=0.003,
)

# The same with ports as fast as NVLink (360 GB/s) and a NIC of 400 Gbit/s.
CLUSTER = replace(GPU, ports=True, path_per_token=0.02)


@dataclass(frozen=True)
class Kind:
    """One operation of a round, or a hop of it.

    Attributes:
        name: as snapshots name it.
        returns: whether the experts work before it, and tokens go back.
    """

    name: str
    returns: bool = False


LOW_LATENCY = (Kind("dispatch"), Kind("combine", returns=True))
# The hops of a fresh dispatch and of a combine; those of gateways only where there are several nodes.
NORMAL = (
    Kind("notify"),
    Kind("gateway dispatch"),
    Kind("normal dispatch"),
    Kind("gateway combine"),
    Kind("normal combine", returns=True),
)
NORMAL_OF_ONE_NODE = tuple(kind for kind in NORMAL if "gateway" not in kind.name)


@dataclass(frozen=True)
class Setup:
    """What all windows of a call of `simulate_windows` have in common; attributes as there."""

    machine: Machine
    num_ranks: int
    num_rounds: int
    capacity: int
    kinds: tuple[Kind, ...]

    @property
    def num_operations(self) -> int:
        """Of all kinds together."""
        return self.num_rounds * len(self.kinds)

    @property
    def is_normal(self) -> bool:
        """Whether these are normal operations, of several hops."""
        return self.kinds[0] == NORMAL[0]

    def layer(self, op: int) -> int:
        """Which layer operation `op` belongs to; the first operation is 0."""
        return op // len(self.kinds) % self.machine.layers
