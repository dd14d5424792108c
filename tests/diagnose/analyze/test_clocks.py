"""Clocks that have drifted: the paths of all ranks, of all kinds of operation, tell how far."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import diagnose
from deep_ep.diagnose.analyze.clocks import Prior, joint_clocks
from deep_ep.diagnose.collect.group_matrices import Place
from deep_ep.diagnose.core.diagnosis import FloatArray, IntArray
from generator import simulate
from generator.faults import GeneratorFault, SlowNic, SlowSend, SlowUplink
from generator.machines import CLUSTER

US = 1e3
WITHIN_US, BETWEEN_US = 9.0, 90.0


def place_of(nodes: int, per_node: int) -> tuple[Place, IntArray]:
    """Ranks, and the kinds of link between them."""
    num_ranks = nodes * per_node
    node = np.repeat(np.arange(nodes), per_node)
    classes = np.where(node[:, None] == node[None, :], 0, 2)
    np.fill_diagonal(classes, -1)
    devices = tuple(rank % per_node for rank in range(num_ranks))
    return Place(("",) * num_ranks, devices, node, "cuda"), classes


def path_times(
    classes: IntArray, clock: FloatArray, generator: np.random.Generator, noise_us: float
) -> FloatArray:
    """[receiver, source] ns as clocks that are off have them."""
    usual = np.where(classes == 0, WITHIN_US, BETWEEN_US) * US
    noise = generator.normal(0.0, noise_us * US, classes.shape)
    time = usual + noise + clock[:, None] - clock[None, :]
    np.fill_diagonal(time, np.nan)
    return time


def told(times: list[FloatArray], classes: IntArray, place: Place) -> FloatArray:
    """What paths alone say of clocks of which nothing was measured."""
    unknown = np.full(place.num_ranks, np.inf)
    return joint_clocks(np.stack(times), classes, place, unknown[: len(times)], Prior(unknown))[0]


def apart(clock: FloatArray, without: IntArray | None = None) -> FloatArray:
    """Clocks about that of the first rank; those of some ranks are left out."""
    kept = np.delete(clock, without) if without is not None else clock
    return kept - kept[0]


@given(st.integers(0, 10_000), st.sampled_from([(1, 4), (1, 8), (3, 4), (2, 8), (8, 1)]))
@settings(max_examples=60)
def test_one_slow_path_is_in_nobody_s_clock(seed: int, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(seed)
    place, classes = place_of(*shape)
    clock = generator.normal(0.0, generator.choice([10.0, 1e4]) * US, place.num_ranks)
    times = [path_times(classes, clock, generator, noise) for noise in (0.2, 1.0)]
    dst, src = generator.permutation(place.num_ranks)[:2]
    for time in times:
        time[dst, src] += generator.choice([20.0, 2_000.0]) * US
    found = told(times, classes, place)
    assert np.abs(apart(found) - apart(clock)).max() < 2 * US


def test_the_only_pair_that_is_seen_both_ways_may_be_slow() -> None:
    place, classes = place_of(1, 4)
    time = path_times(classes, np.zeros(4), np.random.default_rng(1), 0.2)
    for receiver, source in [(1, 0), (0, 2), (2, 1), (3, 1), (3, 2)]:
        time[receiver, source] = np.nan
    time[3, 0] += 80_000 * US
    prior = Prior(np.full(4, 10 * US))
    found, _ = joint_clocks(np.stack([time, time]), classes, place, np.full(2, np.inf), prior)
    assert np.abs(found).max() < 2 * US


@pytest.mark.parametrize("seed", range(6))
def test_where_clocks_are_far_off_a_pair_that_is_seen_both_ways_tells_what_paths_take(
    seed: int,
) -> None:
    """Ranks that send in turn see those after them only, and milliseconds of drift in their paths."""
    generator = np.random.default_rng(seed)
    place, classes = place_of(1, 8)
    clock = generator.normal(0.0, 2e3 * US, 8)
    time = path_times(classes, clock, generator, 0.2)
    seen_too = time[1, 0]
    time[np.tril_indices(8, -1)] = np.nan
    time[1, 0] = seen_too
    found = told([time], classes, place)
    assert np.abs(apart(found) - apart(clock)).max() < 2 * US


@given(st.integers(0, 10_000), st.sampled_from([(1, 8), (3, 4), (4, 8)]), st.booleans())
@settings(max_examples=60)
def test_a_slow_side_moves_no_clock_but_its_rank_s(
    seed: int, shape: tuple[int, int], into: bool
) -> None:
    """And that one no further than the side is slow."""
    generator = np.random.default_rng(seed)
    place, classes = place_of(*shape)
    clock = generator.normal(0.0, 20.0 * US, place.num_ranks)
    time = path_times(classes, clock, generator, 0.2)
    rank, slow = int(generator.integers(place.num_ranks)), 50.0 * US
    time[(rank, slice(None)) if into else (slice(None), rank)] += slow
    found = told([time], classes, place)
    one = np.array([rank])
    assert np.abs(apart(found, one) - apart(clock, one)).max() < 2 * US
    other = 0 if rank else 1
    moved = (found - clock)[rank] - (found - clock)[other]
    assert -2 * US < (moved if into else -moved) < slow + 2 * US


@pytest.mark.parametrize("seen", [1, 2])
def test_a_rank_of_which_one_direction_is_known_has_a_clock(seen: int) -> None:
    generator = np.random.default_rng(seen)
    place, classes = place_of(1, 8)
    clock = generator.normal(0.0, 1e4 * US, 8)
    time = path_times(classes, clock, generator, 0.1)
    time[3, :] = np.nan
    if seen == 2:
        time[3, 5] = WITHIN_US * US + clock[3] - clock[5] + 300.0 * US
    found = told([time], classes, place)
    assert np.abs(apart(found) - apart(clock)).max() < 2 * US


@pytest.mark.exhaustive
@pytest.mark.parametrize("age_s", [2.0, 600.0])
@pytest.mark.parametrize(
    ("fault", "keys"),
    [
        (None, set()),
        (SlowSend(10, 50e-6), {("comp-slow", 10)}),
        (SlowUplink(1, 50e-6), {("comm-slow", ("node", 1, "uplink or downlink"))}),
        (SlowNic(5, 4.0), {("comm-slow", 5)}),
    ],
    ids=["healthy", "slow send", "uplink", "nic"],
)
def test_what_old_clocks_hide_is_named_and_nothing_else(
    age_s: float, fault: GeneratorFault | None, keys: set[object]
) -> None:
    machine = replace(CLUSTER, ranks_per_node=4, drift_ppm=10.0, clock_age_s=age_s)
    for seed in range(3):
        snapshots = simulate(machine, 12, 64, [fault] if fault else [], seed=seed, capacity=128)
        found = diagnose.judge(diagnose.gather(snapshots))
        assert found.keys == keys, (seed, found.verdicts)


def test_measured_offsets_hold_against_what_is_as_likely_a_slow_side() -> None:
    """Half a round trip is a limit; a clock that was stepped is beyond all limits, and is believed all the same."""
    prior = Prior(np.full(4, 3.0 * US))
    near, far = prior.drawn(np.array([1.0, 5_000.0, 0.0, 0.0]) * US, 0.5 * US)[:2]
    assert near == pytest.approx(1.0 * US, rel=0.05)
    assert far == pytest.approx(5_000 * US, rel=0.001)
    assert prior.penalty(np.array([3.0, 30.0, 3.0, 30.0]) * US)[:2] == pytest.approx(
        [0.52, 13.2], abs=0.1
    )
    assert Prior(np.full(2, np.inf)).penalty(np.array([1e12, 0.0])) == pytest.approx([0.0, 0.0])
