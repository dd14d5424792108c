"""What is injected into generated windows, and what counts as right. Knows no judge's rules."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "diagnose"))

from deep_ep.diagnose import COMP_SLOW, MIXED_SLOW, Verdict
from deep_ep.testing.faults import HotRank, SlowPath, SlowRank  # noqa: E402
from generator.faults import (  # noqa: E402
    EarlyRank,
    GeneratorFault,
    IntermittentRank,
    Key,
    NicBursts,
    NonReporting,
    PathBursts,
    PausedSender,
    SlowDownlink,
    SlowEgress,
    SlowIngress,
    SlowNic,
    SlowNicOut,
    SlowNodePair,
    SlowNvlinkIn,
    SlowNvlinkOut,
    SlowRail,
    SlowReceive,
    SlowReceiver,
    SlowSend,
    SlowUplink,
    Throttled,
    Truth,
)
from generator.machines import (  # noqa: E402
    CLUSTER,
    LOW_LATENCY,
    NORMAL,
    NORMAL_OF_ONE_NODE,
    TOKENS_PER_RANK,
    Kind,
    Machine,
)

# Windows of one cell take seeds next to each other; no cell needs more.
_SEEDS_PER_CELL = 100_000
_CELLS = 20_000
# Where the seeds of a named set begin. Thresholds may be chosen on "tuning" only.
SEED_SETS = {"tuning": 0, "report": _CELLS * _SEEDS_PER_CELL}


def first_seed(seeds: str) -> int:
    """Where a set of seeds begins: one of SEED_SETS, or the number of a set of its own."""
    span = _CELLS * _SEEDS_PER_CELL
    return SEED_SETS[seeds] if seeds in SEED_SETS else (len(SEED_SETS) + int(seeds)) * span


# --- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A group: so many nodes of so many ranks."""

    nodes: int
    per_node: int

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.per_node


# By name, as tables and the command line have it: so many nodes x so many ranks of each.
SHAPES = {
    name: Shape(*map(int, name.split("x")))
    for name in (
        *("1x2", "1x3", "1x4", "1x8", "2x4", "4x2", "1x16", "8x1", "3x4", "2x8", "4x8"),
        *("6x8", "8x8", "1x72", "16x8", "18x8", "32x8"),
    )
}


# --- what is injected -----------------------------------------------------------------------------

# A throttled rank swings once in so many operations.
_SWING_OPERATIONS = (40, 120)

Faults = list[GeneratorFault]
Build = Callable[[np.random.Generator, Shape, float], Faults]


@dataclass(frozen=True)
class Scenario:
    """One kind of fault, or several at once.

    Attributes:
        name: as tables show it.
        build: (random numbers, shape, effect in s) -> faults.
        least_ranks, least_nodes, least_per_node: smaller groups cannot tell this fault from another.
        single: whether there is one cause, whose effect and saving are compared with the verdict's.
        least_effect_us: smaller effects drown in what healthy ranks show.
        most_effect_us: larger ones are cut off, and so not what was injected.
    """

    name: str
    build: Build
    least_ranks: int = 4
    least_nodes: int = 1
    least_per_node: int = 1
    single: bool = True
    least_effect_us: float = 0.0
    most_effect_us: float = math.inf

    def fits(self, shape: Shape, effect_us: float) -> bool:
        """Whether such a group can have this fault."""
        return (
            shape.num_ranks >= self.least_ranks
            and shape.nodes >= self.least_nodes
            and shape.per_node >= self.least_per_node
            and self.least_effect_us <= effect_us <= self.most_effect_us
        )


def hot(rank: int, effect_s: float) -> HotRank:
    """A rank whose additional tokens cost its experts this much more ahead of each combine."""
    return HotRank(rank, 1 + effect_s * 1e6 / (TOKENS_PER_RANK * CLUSTER.compute_per_token))


def _pick(generator: np.random.Generator, of: int, count: int = 1) -> list[int]:
    return [int(one) for one in generator.permutation(of)[:count]]


def _one(fault: Callable[[int, float], GeneratorFault]) -> Build:
    """A fault of any one rank."""
    return lambda generator, shape, effect_s: [
        fault(_pick(generator, shape.num_ranks)[0], effect_s)
    ]


def _one_node(fault: Callable[[int, float], GeneratorFault]) -> Build:
    """A fault of any one node."""
    return lambda generator, shape, effect_s: [fault(_pick(generator, shape.nodes)[0], effect_s)]


def _one_path(fault: Callable[[int, int, float], GeneratorFault]) -> Build:
    """A fault of the path between any two ranks."""
    return lambda generator, shape, effect_s: [
        fault(*_pick(generator, shape.num_ranks, 2), effect_s)
    ]


def _node_pair(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    src, dst = _pick(generator, shape.nodes, 2)
    return [SlowNodePair(src, dst, effect_s)]


def _rail(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    return [SlowRail(_pick(generator, shape.per_node)[0], effect_s)]


def _slow_nic(factor: float) -> Build:
    return _one(lambda rank, _effect_s: SlowNic(rank, factor))


def _throttled(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    (rank,) = _pick(generator, shape.num_ranks)
    return [Throttled(rank, effect_s, int(generator.integers(*_SWING_OPERATIONS, endpoint=True)))]


def _nearly_half_late(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    late = _pick(generator, shape.num_ranks, shape.num_ranks // 2 - 1)
    return [SlowRank(rank, effect_s) for rank in late]


def _silent(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    (rank,) = _pick(generator, shape.num_ranks)
    return [SlowRank(rank, effect_s), NonReporting(rank)]


def _mixture(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    slow, src, dst, busy = _pick(generator, shape.num_ranks, 4)
    return [SlowRank(slow, effect_s), SlowPath(src, dst, effect_s), hot(busy, effect_s)]


def _late_and_path(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    slow, src, dst = _pick(generator, shape.num_ranks, 3)
    return [SlowRank(slow, 4 * effect_s), SlowPath(src, dst, effect_s)]


def _late_and_side(side: Callable[[int, float], GeneratorFault], share: float) -> Build:
    def build(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
        slow, other = _pick(generator, shape.num_ranks, 2)
        return [SlowRank(slow, effect_s), side(other, share * effect_s)]

    return build


def _nvlink_pair(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    (node,), (src, dst) = _pick(generator, shape.nodes), _pick(generator, shape.per_node, 2)
    return [SlowPath(node * shape.per_node + src, node * shape.per_node + dst, effect_s)]


def _path_of_rail(generator: np.random.Generator, shape: Shape, effect_s: float) -> Faults:
    (src, dst), (index,) = _pick(generator, shape.nodes, 2), _pick(generator, shape.per_node)
    return [SlowPath(src * shape.per_node + index, dst * shape.per_node + index, effect_s)]


LATE, PATH, HALF_LATE, HEALTHY = "late rank", "slow path", "N/2-1 late ranks", "healthy"
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(LATE, _one(SlowRank), 2),
        Scenario("slow send", _one(SlowSend)),
        Scenario("slow receive", _one(SlowReceive)),
        Scenario("late in 30 %", _one(IntermittentRank), least_effect_us=20.0),
        Scenario(
            "late in bursts of 20",
            _one(lambda rank, effect_s: IntermittentRank(rank, effect_s, 0.3, 20)),
            least_effect_us=20.0,
        ),
        Scenario("late, does not report", _silent),
        # Of two ranks an early one is the other one late; nobody has less than nothing to do.
        Scenario("early rank", _one(EarlyRank), most_effect_us=100.0),
        Scenario("hot rank", _one(hot)),
        Scenario(PATH, _one_path(SlowPath)),
        Scenario("slow ingress", _one(SlowIngress)),
        Scenario("slow egress", _one(SlowEgress)),
        # Between two nodes a link slow in one direction looks like a wrong clock, and a rail is two
        # paths; within one there is neither. A node of one rank is that rank.
        Scenario("slow uplink", _one_node(SlowUplink), least_nodes=3, least_per_node=2),
        Scenario("slow downlink", _one_node(SlowDownlink), least_nodes=3, least_per_node=2),
        Scenario("slow node pair", _node_pair, least_nodes=3, least_per_node=2),
        Scenario("slow rail", _rail, least_nodes=4, least_per_node=2),
        Scenario("NIC at a quarter", _slow_nic(4.0), least_nodes=3, least_effect_us=100.0),
        Scenario(HALF_LATE, _nearly_half_late, single=False),
        Scenario("late + path + hot", _mixture, 8, single=False),
        Scenario("late + ingress", _late_and_side(SlowIngress, 1.0), single=False),
        Scenario(
            "late + 0.4 of it egress",
            _late_and_side(SlowEgress, 0.4),
            single=False,
            least_effect_us=50.0,
        ),
        Scenario("path + 4 times late", _late_and_path, single=False),
        Scenario(HEALTHY, lambda _generator, _shape, _effect_s: [], 2),
    )
}
FAULTY = [name for name in SCENARIOS if name != HEALTHY]
# In normal operations rows for other nodes travel on rails.
_NORMAL_ONLY = (
    Scenario("slow receiver", _one(SlowReceiver)),
    Scenario("slow NVLink pair", _nvlink_pair, least_per_node=2),
    Scenario("slow path of a rail", _path_of_rail, least_nodes=2),
    # Of two nodes a NIC has one path.
    Scenario("slow NIC, outwards", _one(SlowNicOut), least_nodes=2),
)
SCENARIOS |= {scenario.name: scenario for scenario in _NORMAL_ONLY}
# What comes and goes, swings, or is shared with other jobs. Of two nodes, a NIC of a node's only rank is
# its link; within a node of two ranks, a side is a path.
_OF_THE_FIELD = (
    Scenario("throttled rank", _throttled, least_effect_us=20.0),
    Scenario(
        "bursts at a NIC", _one(NicBursts), least_nodes=2, least_per_node=2, least_effect_us=20.0
    ),
    Scenario("bursts on a path", _one_path(PathBursts), least_effect_us=20.0),
    Scenario("paused sender", _one(PausedSender), least_effect_us=20.0),
    Scenario(
        "NIC at a third", _slow_nic(3.0), least_nodes=2, least_per_node=2, least_effect_us=100.0
    ),
    Scenario("NIC at half", _slow_nic(2.0), least_nodes=2, least_per_node=2, least_effect_us=100.0),
    Scenario("slow NVLink ingress", _one(SlowNvlinkIn), least_per_node=3),
    Scenario("slow NVLink egress", _one(SlowNvlinkOut), least_per_node=3),
)
SCENARIOS |= {scenario.name: scenario for scenario in _OF_THE_FIELD}
FIELD_FAULTY = [scenario.name for scenario in _OF_THE_FIELD]
NVLINK_SIDES = ["slow NVLink ingress", "slow NVLink egress"]
NORMAL_FAULTY = [
    LATE,
    "slow send",
    "slow receive",
    "hot rank",
    *(scenario.name for scenario in _NORMAL_ONLY),
    "NIC at a quarter",
]
MIXED_CLASSES = [
    "late + path + hot",
    "late + ingress",
    "late + 0.4 of it egress",
    "path + 4 times late",
]


# --- healthy machines and their clocks ------------------------------------------------------------

Change = Callable[[Machine], Machine]


def _with(**changes: Any) -> Change:
    return lambda machine: replace(machine, **changes)


USUAL, HOOK_US = "usual", 100.0
FENCED, ALTERNATING, PAUSES = "fences wait", "batches of 512 and 8 rows", "pauses of the fabric"
FAMILIES: dict[str, Change] = {
    USUAL: _with(),
    "noise of 10 us": _with(jitter=10.0),
    "heavy tails": _with(tail_degrees=2.0, hiccup_share=0.03),
    "AR(1) per rank": _with(rank_noise=5.0),
    "AR(1) per node": _with(node_noise=5.0),
    "congested rails": _with(congestion=30.0),
    "OS ticks": _with(tick=20.0),
    "paths differ": _with(path_spread=0.05),
    "loads differ": _with(skew=0.25),
    "hot experts move": _with(moving_hot_share=3.0),
    "layers": _with(layers=4, skew=0.15),
    "two batch sizes": _with(batches=(0.5, 1 / 128)),
    "combine by destination": _with(combine_by_destination=True),
    "destinations in turn": _with(in_turn=True),
    FENCED: _with(fenced=True),
    "timer of 1 us": _with(timer_step_ns=1000),
    "long hook": _with(hook_us=HOOK_US),
    ALTERNATING: _with(batches=(0.5, 1 / 128), batches_alternate=True),
    # Captured graphs: nobody's host has a say in when an operation begins.
    "graphs": _with(gap=20.0, jitter=0.3),
    PAUSES: _with(fabric_pause=40.0),
}

# Offsets that are measured again and again are off by about a microsecond at any age.
RE_MEASURED = "measured again"
AS_KERNELS, WHILE_SLOW = "as kernels state", "measured while slow"
STEPPED, STEPPED_WITHIN = "stepped before", "stepped within"
_AS_KERNELS: dict[str, Any] = {
    "clock_error": 0.5,
    "host_clock_error": 0.3,
    "drift_ppm": 10.0,
    "states_round_trip": True,
}
CLOCKS: dict[str, Change] = {
    RE_MEASURED: _with(clock_error=0.5, host_clock_error=0.3),
    "fresh": _with(drift_ppm=10.0),
    "2 s old": _with(drift_ppm=10.0, clock_age_s=2.0),
    "10 min old": _with(drift_ppm=10.0, clock_age_s=600.0),
    AS_KERNELS: _with(**_AS_KERNELS),
    f"{AS_KERNELS}, 2 s old": _with(**_AS_KERNELS, clock_age_s=2.0),
    f"{AS_KERNELS}, 10 min old": _with(**_AS_KERNELS, clock_age_s=600.0),
    # A minute after a second measurement, which was a minute after the first.
    f"{AS_KERNELS}, drift known": _with(
        **(_AS_KERNELS | {"drift_ppm": 0.1}), stated_drift_ppm=0.4, clock_age_s=60.0
    ),
    WHILE_SLOW: _with(**_AS_KERNELS, measured_while_slow=True),
    STEPPED: _with(**_AS_KERNELS, clock_step=5000.0),
    STEPPED_WITHIN: _with(**_AS_KERNELS, clock_step=5000.0, clock_steps_within=True),
}
# Ages of clocks whose errors are stated as kernels state them.
KERNEL_CLOCKS = [clock for clock in CLOCKS if clock.startswith(AS_KERNELS)]


@dataclass(frozen=True)
class Cell:
    """A fault in groups of one shape, with one effect; and the noise around it.

    Operations are dispatches and combines, whatever hops they have.
    """

    scenario: str
    shape: str
    effect_us: float
    family: str = USUAL
    clock: str = RE_MEASURED
    num_operations: int = 128
    # Has no part in the seed, which stays what it was.
    is_normal: bool = field(default=False, repr=False)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What a round consists of."""
        if not self.is_normal:
            return LOW_LATENCY
        return NORMAL if self.group.nodes > 1 else NORMAL_OF_ONE_NODE

    @property
    def seed(self) -> int:
        """First seed of the cell within a set of seeds."""
        return zlib.crc32(repr(self).encode()) % _CELLS * _SEEDS_PER_CELL

    @property
    def group(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def can_be(self) -> bool:
        """Whether there is such a group, and its fault can be told from others, and can be seen."""
        shape, far_only = self.group, ("AR(1) per node", "congested rails", PAUSES)
        is_hidden = (
            self.family == "long hook" and self.scenario == PATH and self.effect_us <= HOOK_US
        )
        return (
            SCENARIOS[self.scenario].fits(shape, self.effect_us)
            and not (self.family in far_only and shape.nodes == 1)
            and not is_hidden
        )

    @property
    def text(self) -> str:
        """One line for people."""
        size = f" of {self.effect_us:g} us" if self.effect_us else ""
        return f"{self.scenario}{size}, {self.shape}, {self.family}, clocks {self.clock}"

    def machine(self) -> Machine:
        machine = replace(CLUSTER, ranks_per_node=self.group.per_node)
        for change in (FAMILIES[self.family], CLOCKS[self.clock]):
            machine = change(machine)
        return machine

    def faults(self, seed: int) -> Faults:
        """What is injected into the window of this seed."""
        generator = np.random.default_rng([seed, 1])
        return SCENARIOS[self.scenario].build(generator, self.group, self.effect_us * 1e-6)


# --- what counts as right -------------------------------------------------------------------------


def meant(verdict: Verdict, truth: Truth, shape: Shape) -> Key:
    """The key of a verdict; of those that it leaves open, one that is true, if any is.

    Where clocks do not tell, a verdict says so: "path or back", "uplink or downlink". The only rank of
    a node is its node.
    """
    verdict_class, subject = verdict.key
    options: list[Key] = [(verdict_class, subject)]
    if verdict.cause.endswith(" or back") and verdict.edge is not None:
        options.append((verdict_class, verdict.edge[::-1]))
    if isinstance(subject, tuple) and subject[0] == "node":
        options = [
            (verdict_class, ("node", subject[1], side)) for side in str(subject[2]).split(" or ")
        ]
        if shape.per_node == 1:
            options = [(verdict_class, subject[1])]
    if isinstance(subject, tuple) and subject[0] == "nodes" and shape.per_node == 1:
        options = [(verdict_class, tuple(subject[1:]))]
    return next((key for key in options if key in truth.keys), options[0])


@dataclass(frozen=True)
class Score:
    """Verdicts counted over windows: right ones, false ones, missed ones."""

    right: int = 0
    false: int = 0
    missed: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.right + other.right, self.false + other.false, self.missed + other.missed)

    @property
    def precision(self) -> float:
        """Share of the verdicts that are right; 1 where there are none."""
        named = self.right + self.false
        return self.right / named if named else 1.0

    @property
    def recall(self) -> float:
        """Share of the injected causes that were named; 1 where there are none."""
        injected = self.right + self.missed
        return self.right / injected if injected else 1.0

    @property
    def f1(self) -> float:
        """Harmonic mean of both."""
        all_ = 2 * self.right + self.false + self.missed
        return 2 * self.right / all_ if all_ else 1.0


def grade(named: Collection[Key], truth: Truth) -> Score:
    """By (class, subject). Keys that are true without being injected count neither way.

    A late rank whose experts are in demand may be named for either, as `faults.expected_verdicts` says
    of hot ranks: its lateness cannot be told from that of its experts.
    """
    excused = {
        (verdict_class, subject)
        for verdict_class, subject in truth.keys - set(named)
        if verdict_class == COMP_SLOW and (MIXED_SLOW, subject) in truth.tolerated & set(named)
    }
    wrong = set(named) - truth.keys - truth.tolerated
    right = (truth.keys & set(named)) | excused
    return Score(len(right), len(wrong), len(truth.keys) - len(right))


def grade_subjects(named: Collection[Key], truth: Truth) -> Score:
    """By subject alone: whether the right rank or path is named, whatever the class."""
    subjects = {subject for _, subject in named}
    expected = {subject for _, subject in truth.keys}
    wrong = subjects - expected - {subject for _, subject in truth.tolerated}
    right = expected & subjects
    return Score(len(right), len(wrong), len(expected) - len(right))
