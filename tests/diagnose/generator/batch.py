"""Windows that go through the operations together."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from deep_ep.diagnose.core.diagnosis import FloatArray
from generator.faults import GeneratorFault
from generator.machines import Setup
from generator.normal import NormalRun
from generator.recording import COLUMNS
from generator.run import Run


class Batch:
    """Windows that go through the operations together.

    Attributes:
        stamps: [windows, operations, receiver, source or own, 6] int64, as rings hold them.
        blocked: [windows, operations, receiver, source] int64, ns that a source waited for slots;
            low latency has none.
        exits: [windows, operations + 1, num_ranks], us; the first is the start.
        loads: [windows, num_ranks], how popular each rank's experts are; 1 is even.
        congested: [windows, rails], in which share of the operations each is.
    """

    def __init__(
        self, setup: Setup, faults: Sequence[Sequence[GeneratorFault]], seeds: Sequence[int]
    ) -> None:
        self.setup = setup
        self.seeds = seeds
        shape = len(faults), setup.num_operations, setup.num_ranks
        self.stamps = np.zeros((*shape, setup.num_ranks + 1, COLUMNS), np.int64)
        self.blocked = np.zeros((*shape, setup.num_ranks), np.int64) if setup.is_normal else None
        run = _run(setup, faults, seeds)
        self.exits, self.loads = run.exits(self.stamps, self.blocked), run.draws.load
        self.congested = np.mean(run.draws.rail > 0, axis=1)

    @functools.cached_property
    def healthy_exits(self) -> FloatArray:
        """`exits` of the same windows without faults."""
        return _run(self.setup, [()] * len(self.seeds), self.seeds).exits()


def _run(setup: Setup, faults: Sequence[Sequence[GeneratorFault]], seeds: Sequence[int]) -> Run:
    return (NormalRun if setup.is_normal else Run)(setup, faults, seeds)
