"""Rules about ranks on generated windows: noise that lasts, missing ranks, lateness now and then, intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from generator import Window, simulate_windows
from generator_faults import (
    EarlyRank,
    GeneratorFault,
    SlowReceive,
    SlowSend,
)
from generator_machines import GPU, Machine

from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis
from deep_ep.diagnose.estimate import Estimates, estimate_kinds
from deep_ep.faults import SlowRank

NODES = replace(GPU, ranks_per_node=8)
NUM_ROUNDS = 64


def judged(
    machine: Machine, num_ranks: int, faults: Sequence[Sequence[GeneratorFault]], seed: int
) -> list[tuple[Window, Diagnosis]]:
    windows = simulate_windows(
        machine, num_ranks, NUM_ROUNDS, faults, seed, capacity=2 * NUM_ROUNDS
    )
    return [(w, diagnose.judge(diagnose.gather(w.snapshots))) for w in windows]


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
@pytest.mark.parametrize("fault", [SlowRank, SlowSend, SlowReceive, EarlyRank])
def test_intervals_hold_what_was_injected(fault: type[SlowRank], num_ranks: int) -> None:
    """Stated are 95 %; what a rank differs from others anyway, and what these vary by, is in them."""
    injected = [[fault(seed % num_ranks, 40e-6)] for seed in range(40)]
    held = [
        low <= 40 <= high
        for _, found in judged(NODES, num_ranks, injected, 600)
        for low, high in (verdict.interval_us for verdict in found.verdicts)
    ]
    assert len(held) >= 70
    assert np.mean(held) >= 0.9


def estimates(snapshots: Sequence[diagnose.Snapshot]) -> dict[str, Estimates]:
    return {e.operation: e for e in estimate_kinds(diagnose.gather(snapshots))}


def test_nobody_knows_what_a_missing_rank_received() -> None:
    ((window, _),) = judged(NODES, 8, [[]], 700)
    for kind, e in estimates([s for s in window.snapshots if s.rank != 3]).items():
        others = np.delete(e.load, 3)
        assert others == pytest.approx(np.ones(7), abs=0.05), kind
        # What it sent, the others know.
        assert np.isnan(e.load[3]) == (kind == "dispatch")
