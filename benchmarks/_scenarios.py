"""What is injected into generated windows, and what counts as right. Knows no judge's rules."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "diagnose"))

from generator_faults import (  # noqa: E402
    EarlyRank,
    GeneratorFault,
    Key,
    SlowEgress,
    SlowIngress,
    SlowNodePair,
    SlowRail,
    Truth,
)
from generator_machines import GPU, Machine  # noqa: E402

from deep_ep.diagnose import COMP_SLOW, MIXED_SLOW  # noqa: E402
from deep_ep.faults import HotRank, SlowPath, SlowRank  # noqa: E402

RANKS_PER_NODE = 8
TOKENS_PER_RANK = 1024
# Windows of one cell take seeds next to each other; no cell needs more.
_SEEDS_PER_CELL = 100_000
_CELLS = 20_000
# Where the seeds of a named set begin. Thresholds may be chosen on "tuning" only.
SEED_SETS = {"tuning": 0, "report": _CELLS * _SEEDS_PER_CELL}


def first_seed(seeds: str) -> int:
    """Where a set of seeds begins: one of SEED_SETS, or the number of a set of its own."""
    span = _CELLS * _SEEDS_PER_CELL
    return SEED_SETS[seeds] if seeds in SEED_SETS else (len(SEED_SETS) + int(seeds)) * span


Faults = list[GeneratorFault]
Build = Callable[[np.random.Generator, int, float], Faults]


@dataclass(frozen=True)
class Scenario:
    """One kind of fault, or several at once.

    Attributes:
        name: as tables show it.
        build: (random numbers, num_ranks, effect in s) -> faults.
        least_ranks: smaller groups cannot tell this fault from another one.
        least_effect_us: smaller effects drown in what healthy ranks show.
        single: whether there is one cause, whose effect and saving are compared with the verdict's.
        machine: what differs from the usual machine.
    """

    name: str
    build: Build
    least_ranks: int
    least_effect_us: float = 0.0
    single: bool = True
    machine: Callable[[Machine], Machine] = lambda machine: machine

    def fits(self, num_ranks: int, effect_us: float) -> bool:
        """Whether such a group can have this fault."""
        return num_ranks >= self.least_ranks and effect_us >= self.least_effect_us


@dataclass(frozen=True)
class Cell:
    """One place in the tables: a scenario, how many ranks, how large, how noisy."""

    scenario: str
    num_ranks: int
    effect_us: float
    jitter_us: float

    @property
    def seed(self) -> int:
        """First seed of the cell within a set of seeds."""
        return zlib.crc32(repr(self).encode()) % _CELLS * _SEEDS_PER_CELL

    @property
    def text(self) -> str:
        """One line for people."""
        size = f" of {self.effect_us:g} us" if self.effect_us else ""
        return f"{self.scenario}{size}, EP{self.num_ranks}, jitter {self.jitter_us:g} us"

    def machine(self) -> Machine:
        """The ranks' machine."""
        usual = replace(GPU, jitter=self.jitter_us, ranks_per_node=RANKS_PER_NODE)
        return SCENARIOS[self.scenario].machine(usual)

    def faults(self, seed: int) -> Faults:
        """What is injected into the window of this seed."""
        generator = np.random.default_rng([seed, 1])
        scenario = SCENARIOS[self.scenario]
        return scenario.build(generator, self.num_ranks, self.effect_us * 1e-6)


def hot(rank: int, effect_s: float) -> HotRank:
    """A rank whose additional tokens cost its experts this much more ahead of each combine."""
    return HotRank(rank, 1 + effect_s * 1e6 / (TOKENS_PER_RANK * GPU.compute_per_token))


def wrong_clocks(machine: Machine) -> Machine:
    """Offsets are wrong by 1 us per rank and another 1 us per host, clocks drift by 20 ppm."""
    return replace(
        machine, clock_error=1.0, host_clock_error=1.0, drift_ppm=20.0, host_drift_ppm=20.0
    )


def drifted_clocks(machine: Machine) -> Machine:
    """After minutes: each clock is off by 400 us."""
    return replace(machine, clock_error=400.0, host_clock_error=400.0, drift_ppm=20.0)


def heavy_tails(machine: Machine) -> Machine:
    """Noise without a variance, and hiccups three times as often."""
    return replace(machine, tail_degrees=2.0, hiccup_share=0.03)


def skewed(machine: Machine) -> Machine:
    """Healthy ranks' experts are in demand by a quarter more or less."""
    return replace(machine, skew=0.25)


def _ranks(generator: np.random.Generator, num_ranks: int, count: int) -> list[int]:
    return [int(rank) for rank in generator.permutation(num_ranks)[:count]]


def _nothing(_generator: np.random.Generator, _num_ranks: int, _effect_s: float) -> Faults:
    return []


def _one(fault: Callable[[int, float], GeneratorFault]) -> Build:
    """A fault of any one rank."""
    return lambda generator, num_ranks, effect_s: [
        fault(_ranks(generator, num_ranks, 1)[0], effect_s)
    ]


def _slow_path(generator: np.random.Generator, num_ranks: int, effect_s: float) -> Faults:
    src, dst = _ranks(generator, num_ranks, 2)
    return [SlowPath(src, dst, effect_s)]


def _node_pair(generator: np.random.Generator, num_ranks: int, effect_s: float) -> Faults:
    src, dst = _ranks(generator, num_ranks // RANKS_PER_NODE, 2)
    return [SlowNodePair(src, dst, effect_s)]


def _rail(generator: np.random.Generator, _num_ranks: int, effect_s: float) -> Faults:
    return [SlowRail(int(generator.integers(RANKS_PER_NODE)), effect_s)]


def _nearly_half_late(generator: np.random.Generator, num_ranks: int, effect_s: float) -> Faults:
    return [SlowRank(rank, effect_s) for rank in _ranks(generator, num_ranks, num_ranks // 2 - 1)]


def _mixture(generator: np.random.Generator, num_ranks: int, effect_s: float) -> Faults:
    slow, src, dst, busy = _ranks(generator, num_ranks, 4)
    return [SlowRank(slow, effect_s), SlowPath(src, dst, effect_s), hot(busy, effect_s)]


def _late_and_path(generator: np.random.Generator, num_ranks: int, effect_s: float) -> Faults:
    slow, src, dst = _ranks(generator, num_ranks, 3)
    return [SlowRank(slow, effect_s), SlowPath(src, dst, effect_s)]


def _late_and_ingress(generator: np.random.Generator, num_ranks: int, effect_s: float) -> Faults:
    slow, receiver = _ranks(generator, num_ranks, 2)
    return [SlowRank(slow, effect_s), SlowIngress(receiver, effect_s)]


LATE, HALF_LATE, MIXTURE = "late rank", "N/2-1 late ranks", "late + path + hot"
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(LATE, _one(SlowRank), 2),
        Scenario("slow path", _slow_path, 4),
        Scenario("slow ingress", _one(SlowIngress), 4),
        Scenario("slow egress", _one(SlowEgress), 4),
        # Between two nodes a link slow in one direction looks like a wrong clock, and a rail is two
        # paths; within one there is neither.
        Scenario("slow node pair", _node_pair, 3 * RANKS_PER_NODE),
        Scenario("slow rail", _rail, 4 * RANKS_PER_NODE),
        Scenario("hot rank", _one(hot), 4),
        # Of two ranks an early one is the other one late.
        Scenario("early rank", _one(EarlyRank), 4),
        Scenario(HALF_LATE, _nearly_half_late, 4, single=False),
        Scenario(MIXTURE, _mixture, 8, single=False),
        Scenario("late + ingress", _late_and_ingress, 8, single=False),
        Scenario("late, wrong clocks", _one(SlowRank), 2, machine=wrong_clocks),
        Scenario("path, wrong clocks", _slow_path, 4, machine=wrong_clocks),
        Scenario("late, drifted clocks", _one(SlowRank), 2, machine=drifted_clocks),
        Scenario("path, drifted clocks", _slow_path, 4, machine=drifted_clocks),
        Scenario("late, heavy tails", _one(SlowRank), 2, machine=heavy_tails),
        Scenario("late + path, skewed", _late_and_path, 8, single=False, machine=skewed),
        Scenario("hot rank, skewed", _one(hot), 8, least_effect_us=50.0, machine=skewed),
        Scenario("healthy", _nothing, 2),
        Scenario("healthy, wrong clocks", _nothing, 2, machine=wrong_clocks),
        Scenario("healthy, drifted clocks", _nothing, 2, machine=drifted_clocks),
        Scenario("healthy, heavy tails", _nothing, 2, machine=heavy_tails),
        Scenario("healthy, skewed", _nothing, 2, machine=skewed),
    )
}
FAULTY = [name for name in SCENARIOS if not name.startswith("healthy")]
HEALTHY = [name for name in SCENARIOS if name.startswith("healthy")]
MIXED_CLASSES = [MIXTURE, "late + ingress", "late + path, skewed"]


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
    """By (kind, subject). Keys that are true without being injected count neither way.

    A late rank whose experts are in demand may be named for either, as `faults.expected_verdicts` says
    of hot ranks: its lateness cannot be told from that of its experts.
    """
    excused = {
        (kind, subject)
        for kind, subject in truth.keys - set(named)
        if kind == COMP_SLOW and (MIXED_SLOW, subject) in truth.tolerated & set(named)
    }
    wrong = set(named) - truth.keys - truth.tolerated
    right = (truth.keys & set(named)) | excused
    return Score(len(right), len(wrong), len(truth.keys) - len(right))


def grade_subjects(named: Collection[Key], truth: Truth) -> Score:
    """By subject alone: whether the right rank or path is named, whatever the kind."""
    subjects = {subject for _, subject in named}
    expected = {subject for _, subject in truth.keys}
    wrong = subjects - expected - {subject for _, subject in truth.tolerated}
    right = expected & subjects
    return Score(len(right), len(wrong), len(expected) - len(right))
