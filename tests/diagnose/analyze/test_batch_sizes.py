"""Steps of two sizes, as speculative decoding has them: a path's median must not fall between them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deep_ep import diagnose
from deep_ep.diagnose.collect.rank_summary import _of_one_batch_size
from deep_ep.testing.faults import SlowPath, SlowRank
from generator import simulate_windows
from generator.faults import GeneratorFault
from generator.machines import CLUSTER

ROUNDS = 64
MACHINE = replace(
    CLUSTER, batches=(0.5, 1 / 128), ranks_per_node=8, clock_error=0.5, host_clock_error=0.3
)


def named(
    faults: list[GeneratorFault], num_windows: int, num_ranks: int = 32, seed: int = 0
) -> list[set[object]]:
    """Ranks and paths that the verdicts of each window name."""
    made = simulate_windows(
        MACHINE, num_ranks, ROUNDS, [faults] * num_windows, seed, capacity=2 * ROUNDS
    )
    found = (diagnose.judge(diagnose.gather(window.snapshots)).verdicts for window in made)
    return [{v.rank if v.edge is None else v.edge for v in verdicts} for verdicts in found]


@pytest.mark.parametrize("seed", [1, 11])
def test_two_batch_sizes_alone_are_no_cause(seed: int) -> None:
    """Windows that had slow paths where times of both sizes were mixed."""
    assert named([], 1, seed=seed) == [set()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "subject"), [(SlowPath(3, 12, 20e-6), (3, 12)), (SlowRank(5, 20e-6), 5)]
)
def test_what_is_slow_is_found_among_two_batch_sizes(
    fault: GeneratorFault, subject: object
) -> None:
    assert named([fault], 2) == [{subject}] * 2


def test_a_hot_rank_is_no_batch_size() -> None:
    received = np.array([4000.0] * 40 + [1000.0] * 88)
    assert _of_one_batch_size(received).all()


@pytest.mark.parametrize(("num_large", "large_count"), [(32, True), (31, False), (1, False)])
def test_the_largest_size_that_is_not_rare_is_compared(num_large: int, large_count: bool) -> None:
    received = np.array([4096.0] * num_large + [64.0] * (128 - num_large))
    chosen = _of_one_batch_size(received)
    assert chosen.tolist() == ((received > 1000) == large_count).tolist()


def test_sizes_without_a_gap_and_no_tokens_at_all_are_all_compared() -> None:
    assert _of_one_batch_size(np.geomspace(1, 4096, 64)).all()
    assert _of_one_batch_size(np.zeros(64)).all()
    assert _of_one_batch_size(np.array([0.0, 1, 2, 3, 8, 16])).all()
