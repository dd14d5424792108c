"""Faults of generated windows: what each adds to a healthy run, and what may be said about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

import numpy as np

from deep_ep.diagnose.core.causes import COMM_SLOW, COMP_SLOW, MIXED_SLOW
from deep_ep.diagnose.core.diagnosis import BoolArray, FloatArray
from deep_ep.testing import faults as injectable
from deep_ep.testing.faults import ClockFault, HotRank, SlowPath, SlowRank
from generator.machines import TOKEN_BYTES, TOKENS_PER_RANK, Setup

Key = tuple[str, Union[int, tuple, None]]

# A rank whose experts handle this much more or less than an even share may be named for it.
_TOLERATED_LOAD = 0.08
# A rank that is late in fewer of a window's operations may be named for it, and need not be.
_EXPECTED_SHARE = 0.1


@dataclass(frozen=True)
class _RankDelay:
    rank: int
    delay_s: float


class EarlyRank(_RankDelay):
    """Rank `rank` has `delay_s` less to do before each operation."""


class SlowSend(_RankDelay):
    """Rank `rank` takes `delay_s` longer to send."""


class SlowReceive(_RankDelay):
    """Rank `rank` takes `delay_s` longer to take in what has arrived."""


class SlowReceiver(_RankDelay):
    """Rank `rank` empties its queues slowly: its sources wait `delay_s` longer for slots of them."""


class SlowIngress(_RankDelay):
    """Data from everybody to `rank` takes `delay_s` longer."""


class SlowEgress(_RankDelay):
    """Data from `rank` to everybody takes `delay_s` longer."""


class SlowNicOut(_RankDelay):
    """Data from `rank` to other nodes takes `delay_s` longer."""


class SlowNvlinkIn(_RankDelay):
    """Data from the others of its node to `rank` takes `delay_s` longer."""


class SlowNvlinkOut(_RankDelay):
    """Data from `rank` to the others of its node takes `delay_s` longer."""


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
class _NodeDelay:
    node: int
    delay_s: float


class SlowUplink(_NodeDelay):
    """Data from any rank of node `node` to other nodes takes `delay_s` longer."""


class SlowDownlink(_NodeDelay):
    """Data from other nodes to any rank of node `node` takes `delay_s` longer."""


@dataclass(frozen=True)
class SlowNic:
    """Tokens take `factor` times as long between nodes, out of and into rank `rank`."""

    rank: int
    factor: float = 4.0


@dataclass(frozen=True)
class _RankNowAndThen(_RankDelay):
    share: float = 0.3
    burst: int = 1


class IntermittentRank(_RankNowAndThen):
    """Rank `rank` is late by `delay_s` now and then, in `share` of the operations.

    It is late in `burst` operations one after the other, and again after a time that no one knows.
    """


@dataclass(frozen=True)
class Throttled:
    """Rank `rank` is late in every operation, by 0 to `most_s`: it swings once in `period_operations`."""

    rank: int
    most_s: float
    period_operations: float = 80.0


@dataclass(frozen=True)
class NicBursts(_RankNowAndThen):
    """Other jobs use the NIC of rank `rank`: data to and from other nodes takes `delay_s` longer.

    In `share` of the operations, in about `burst` of them one after the other.
    """

    share: float = 0.4
    burst: int = 6


@dataclass(frozen=True)
class PathBursts:
    """Other jobs use the path from `src` to `dst`: data takes `delay_s` longer, as often as `NicBursts`."""

    src: int
    dst: int
    delay_s: float
    share: float = 0.4
    burst: int = 6


class PausedSender(_RankNowAndThen):
    """What rank `rank` sends to other nodes is held back by `delay_s` in `share` of the operations.

    On one node, what it sends to anybody. It knows nothing of that; only what it sends comes later.
    """


@dataclass(frozen=True)
class NonReporting:
    """Nobody learns what rank `rank` recorded; it may have other faults besides."""

    rank: int


@dataclass(frozen=True)
class Everything:
    """Every path takes `delay_s` longer: only a group's own history shows it."""

    delay_s: float


@dataclass(frozen=True)
class Hiccup:
    """Rank `rank` is late by `delay_s` once, in operation number `operation`: no lasting cause."""

    rank: int
    operation: int
    delay_s: float


GeneratorFault = Union[
    injectable.Fault,
    _RankDelay,
    SlowNodePair,
    SlowRail,
    _NodeDelay,
    SlowNic,
    Throttled,
    PathBursts,
    NonReporting,
    Everything,
    Hiccup,
]
NowAndThen = Union[_RankNowAndThen, PathBursts]
_NOW_AND_THEN = (_RankNowAndThen, PathBursts)

# Each kind of fault that differs by operation draws from a stream of its own.
_STREAMS = {IntermittentRank: 2, Throttled: 3, NicBursts: 4, PathBursts: 5, PausedSender: 6}


# --- what they add --------------------------------------------------------------------------------


class Extra(NamedTuple):
    """What the faults of a batch add, in us; its first dimension: windows."""

    gap: FloatArray  # [., num_ranks]
    early: FloatArray
    send: FloatArray
    drain: FloatArray
    slots: FloatArray
    drift: FloatArray  # [., num_ranks], us per us
    path: FloatArray  # [., receiver, source]
    path_per_token: FloatArray
    nic: FloatArray  # [., num_ranks]: how many times as long tokens take between nodes
    share: FloatArray  # [., num_ranks]: of the tokens, 1 is even; NaN: as the machine has it
    hiccups: Mapping[int, Sequence[tuple[int, int, float]]]  # by operation: (window, rank, us)
    # By operation: (window, [receiver, source], us) of paths that are slower in this one.
    held_up: Mapping[int, Sequence[tuple[int, BoolArray, float]]]


def added_by(
    faults: Sequence[Sequence[GeneratorFault]], setup: Setup, seeds: Sequence[int]
) -> Extra:
    """faults, seeds: of each window."""
    num_ranks, size = setup.num_ranks, len(faults)
    gap, early, send, drain, slots, drift = np.zeros((6, size, num_ranks))
    path, path_per_token = np.zeros((2, size, num_ranks, num_ranks))
    nic = np.ones((size, num_ranks))
    share = np.full((size, num_ranks), np.nan)
    hiccups: dict[int, list[tuple[int, int, float]]] = {}
    held_up: dict[int, list[tuple[int, BoolArray, float]]] = {}
    own_work = {
        SlowRank: gap,
        EarlyRank: early,
        SlowSend: send,
        SlowReceive: drain,
        SlowReceiver: slots,
    }
    for i, members in enumerate(faults):
        for fault in members:
            us = getattr(fault, "delay_s", 0.0) * 1e6
            if type(fault) in own_work:
                own_work[type(fault)][i, fault.rank] += us
            elif isinstance(fault, HotRank):
                share[i, fault.rank] = fault.share
            elif isinstance(fault, Hiccup):
                hiccups.setdefault(fault.operation, []).append((i, fault.rank, us))
            elif isinstance(fault, IntermittentRank):
                for op in operations_with(fault, setup.num_operations, seeds[i]):
                    hiccups.setdefault(op, []).append((i, fault.rank, us))
            elif isinstance(fault, Throttled):
                for op, late_us in enumerate(_swing_us(fault, setup.num_operations, seeds[i]), 1):
                    hiccups.setdefault(op, []).append((i, fault.rank, late_us))
            elif isinstance(fault, (NicBursts, PathBursts, PausedSender)):
                slow = _slow_paths(fault, setup) & ~np.eye(num_ranks, dtype=bool)
                for op in operations_with(fault, setup.num_operations, seeds[i]):
                    held_up.setdefault(op, []).append((i, slow, us))
            elif isinstance(fault, SlowNic):
                nic[i, fault.rank] *= fault.factor
            elif isinstance(fault, NonReporting):
                pass
            elif isinstance(fault, ClockFault):  # its offset is measured away, its drift is not
                drift[i, fault.rank] += fault.drift_ppm * 1e-6
            else:
                slow = _slow_paths(fault, setup)
                path[i, slow] += us
                if isinstance(fault, SlowPath) and fault.bytes_per_s:
                    path_per_token[i, slow] += TOKEN_BYTES / fault.bytes_per_s * 1e6
    return Extra(
        gap, early, send, drain, slots, drift, path, path_per_token, nic, share, hiccups, held_up
    )


def operations_with(fault: NowAndThen, num_operations: int, seed: int) -> list[int]:
    """Numbers of the operations in which a fault that comes and goes is there; the first of a run is 1.

    Single operations are drawn one by one; between bursts lie exponential times. Bursts of a rank are
    equally long, those of other jobs are not.
    """
    generator = _stream(fault, seed)
    if fault.burst == 1:
        return (1 + np.flatnonzero(generator.random(num_operations) < fault.share)).tolist()
    pause = fault.burst * (1 / fault.share - 1)
    present: list[int] = []
    # As far into the turn as a passer-by finds it.
    op = 1 - int(generator.integers(fault.burst + round(pause)))
    while op <= num_operations:
        length = fault.burst
        if not isinstance(fault, IntermittentRank):
            length = int(generator.integers(1, 2 * fault.burst))
        present += range(max(op, 1), min(op + length, num_operations + 1))
        op += length + 1 + int(generator.exponential(max(pause - 0.5, 0.0)))
    return present


def _swing_us(fault: Throttled, num_operations: int, seed: int) -> FloatArray:
    """[operations]: by how much the rank is late in each."""
    turns = np.arange(num_operations) / fault.period_operations + _stream(fault, seed).random()
    swing: FloatArray = fault.most_s * 1e6 * (1 - np.cos(2 * np.pi * turns)) / 2
    return swing


def _stream(fault: NowAndThen | Throttled, seed: int) -> np.random.Generator:
    subject = (fault.src, fault.dst) if isinstance(fault, PathBursts) else (fault.rank,)
    return np.random.default_rng([seed, *subject, _STREAMS[type(fault)]])


def _slow_paths(fault: GeneratorFault, setup: Setup) -> BoolArray:
    """[receiver, source]: which paths a fault of paths is on."""
    node, index = setup.machine.node_and_index(setup.num_ranks)
    rank = np.arange(setup.num_ranks)
    everybody = rank >= 0
    if isinstance(fault, (SlowPath, PathBursts)):
        return np.outer(rank == fault.dst, rank == fault.src)
    if isinstance(fault, SlowIngress):
        return np.outer(rank == fault.rank, everybody)
    if isinstance(fault, SlowNicOut) or (isinstance(fault, PausedSender) and node.any()):
        return np.outer(node != node[fault.rank], rank == fault.rank)
    if isinstance(fault, (SlowEgress, PausedSender)):
        return np.outer(everybody, rank == fault.rank)
    if isinstance(fault, NicBursts):
        away = np.outer(node != node[fault.rank], rank == fault.rank)
        return away | away.T
    if isinstance(fault, SlowNvlinkIn):
        return np.outer(rank == fault.rank, node == node[fault.rank])
    if isinstance(fault, SlowNvlinkOut):
        return np.outer(node == node[fault.rank], rank == fault.rank)
    if isinstance(fault, SlowNodePair):
        return np.outer(node == fault.dst, node == fault.src)
    if isinstance(fault, SlowRail):
        return np.outer(index == fault.index, index == fault.index)
    if isinstance(fault, SlowUplink):
        return np.outer(node != fault.node, node == fault.node)
    if isinstance(fault, SlowDownlink):
        return np.outer(node == fault.node, node != fault.node)
    if isinstance(fault, Everything):
        return np.outer(everybody, everybody)
    raise TypeError(f"{fault!r} is not a fault of the generator")


# --- what is true of them -------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What is the matter in one window.

    Attributes:
        keys: (class, subject) of the lasting causes that the other ranks show, as
            `faults.expected_verdicts` has them; of ingress, egress, early ranks: the rank; of node
            pairs ("nodes", source, destination); of rails ("rail", index); of what leaves or enters
            a node ("node", node, "uplink" or "downlink").
        effects_us: microseconds per operation that were injected, per key; of hot ranks what their
            tokens cost more ahead of each combine; of what comes and goes, or swings, the mean over all
            operations; NaN where it differs by operation and path.
        tolerated: keys that are true and need not be named: ranks whose experts are in demand, or are
            not, ranks and paths that happen to be slow in a few operations only, and rails that healthy
            machines have congested in as many operations as bursts at a NIC are in.
        everything_us: by how much all paths are slower.
        outliers: (operation number, rank) of single hiccups.
    """

    keys: frozenset[Key]
    effects_us: Mapping[Key, float]
    tolerated: frozenset[Key] = frozenset()
    everything_us: float = 0.0
    outliers: frozenset[tuple[int, int]] = frozenset()


def truth_of(
    faults: Sequence[GeneratorFault],
    setup: Setup,
    load: FloatArray,
    congested: FloatArray,
    seed: int,
) -> Truth:
    """Of one window.

    Args:
        faults: that were injected.
        setup: of the window.
        load: [num_ranks], how popular each rank's experts are, 1 is even.
        congested: [rails], in which share of the operations each is.
        seed: of the window.
    """
    effects: dict[Key, float] = {}
    # The lateness of a hot rank cannot be told from that of its experts.
    hidden = {(COMP_SLOW, fault.rank) for fault in faults if isinstance(fault, HotRank)}
    rarely = set()
    for fault in faults:
        key = _key(fault)
        if isinstance(fault, _NOW_AND_THEN) and _share(fault, setup, seed) < _EXPECTED_SHARE:
            rarely.add(key)
        elif key is not None and key not in hidden:
            effects[key] = effects.get(key, 0.0) + _effect_us(fault, setup, seed)
    in_demand = np.flatnonzero(np.abs(load - 1.0) > _TOLERATED_LOAD)
    rails = np.flatnonzero(congested >= NicBursts.share)
    tolerated = {(MIXED_SLOW, int(rank)) for rank in in_demand}
    tolerated |= {(COMM_SLOW, ("rail", int(rail))) for rail in rails}
    return Truth(
        keys=frozenset(effects),
        effects_us=effects,
        tolerated=frozenset(tolerated | rarely) - set(effects),
        everything_us=sum(f.delay_s for f in faults if isinstance(f, Everything)) * 1e6,
        outliers=frozenset((f.operation, f.rank) for f in faults if isinstance(f, Hiccup)),
    )


def _key(fault: GeneratorFault) -> Key | None:
    """None: it is no lasting cause, or cannot be seen within one window."""
    if isinstance(fault, (SlowRank, SlowSend, SlowReceive, IntermittentRank, Throttled)):
        return COMP_SLOW, fault.rank
    if isinstance(fault, (EarlyRank, HotRank, SlowReceiver)):
        return MIXED_SLOW, fault.rank
    if isinstance(fault, (_RankDelay, SlowNic)):
        return COMM_SLOW, fault.rank
    if isinstance(fault, (SlowPath, PathBursts)):
        return COMM_SLOW, (fault.src, fault.dst)
    if isinstance(fault, SlowNodePair):
        return COMM_SLOW, ("nodes", fault.src, fault.dst)
    if isinstance(fault, SlowRail):
        return COMM_SLOW, ("rail", fault.index)
    if isinstance(fault, SlowUplink):
        return COMM_SLOW, ("node", fault.node, "uplink")
    if isinstance(fault, SlowDownlink):
        return COMM_SLOW, ("node", fault.node, "downlink")
    return None


def _share(fault: NowAndThen, setup: Setup, seed: int) -> float:
    """Of the operations, those in which the fault is there."""
    return len(operations_with(fault, setup.num_operations, seed)) / setup.num_operations


def _effect_us(fault: GeneratorFault, setup: Setup, seed: int) -> float:
    if isinstance(fault, SlowNic):
        return np.nan
    if isinstance(fault, _NOW_AND_THEN):
        return fault.delay_s * 1e6 * _share(fault, setup, seed)
    if isinstance(fault, Throttled):
        return float(_swing_us(fault, setup.num_operations, seed).mean())
    if isinstance(fault, HotRank):
        tokens = TOKENS_PER_RANK * float(np.mean(setup.machine.batches))
        return (fault.share - 1) * tokens * setup.machine.compute_per_token
    if isinstance(fault, SlowPath) and fault.bytes_per_s:
        even = TOKENS_PER_RANK / setup.num_ranks
        return fault.delay_s * 1e6 + even * TOKEN_BYTES / fault.bytes_per_s * 1e6
    return float(fault.delay_s) * 1e6
