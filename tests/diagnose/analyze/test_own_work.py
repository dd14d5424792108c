"""What ranks do by themselves: how late each is, how sure that is, and what tokens explain."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from deep_ep.diagnose.analyze.judged_kind import JudgedKind
from deep_ep.diagnose.analyze.own_work import by_tokens, compare
from deep_ep.diagnose.analyze.thresholds import Thresholds
from deep_ep.diagnose.core.robust_stats import student, z_for

US = 1e3
ONE_NODE = np.zeros(8, int)


def noise(memory: float, size: int, columns: int, seed: int = 1) -> np.ndarray:
    """[size, columns] ns of standard deviation 5 us that forgets itself by `memory` from one operation to the next."""
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(size, columns))
    for op in range(1, size):
        values[op] = memory * values[op - 1] + np.sqrt(1 - memory**2) * values[op]
    return 5 * US * values


@pytest.mark.parametrize("memory", [0.0, 0.6, 0.85])
def test_errors_hold_where_noise_lasts_several_operations(memory: float) -> None:
    """Of a rank without any cause, effects are as far from zero as their errors say."""
    off = []
    for seed in range(200):
        effect = compare(150 * US + noise(memory, 64, 8, seed), ONE_NODE)
        off.append(effect.value[3] / effect.usual_error)
    assert np.std(off) < 1.7


@pytest.mark.parametrize("memory", [0.92, 0.96])
def test_noise_that_lasts_longer_than_a_stretch_makes_nobody_late(memory: float) -> None:
    """Neighbouring stretches go together then: what they differ by says too little, and is itself known badly."""
    late = []
    for seed in range(600):
        effect = compare(150 * US + noise(memory, 64, 8, seed), ONE_NODE)
        late.append(
            effect.value.max() > student(z_for(64, 1e-3), effect.own.degrees) * effect.usual_error
        )
    assert np.mean(late) < 0.015


@pytest.mark.parametrize("sizes", [(8, 8), (4, 4, 4)])
def test_noise_that_is_common_to_a_node_makes_nobody_late_and_hides_no_late_rank(
    sizes: tuple[int, ...],
) -> None:
    """Of a few nodes it is badly known how far they differ, of a rank and its mates it is known well."""
    nodes = np.repeat(np.arange(len(sizes)), sizes)
    late_at_all, is_named = [], []
    for seed in range(200):
        of_nodes = noise(0.82, 64, len(sizes), seed)[:, nodes]
        values = 150 * US + of_nodes + 0.6 * noise(0.0, 64, nodes.size, seed + 1000)
        late_at_all.append((exceeds(values, nodes)).any())
        values[:, 5] += 20 * US
        is_named.append(np.flatnonzero(exceeds(values, nodes)).tolist() == [5])
    assert np.mean(late_at_all) <= 0.005
    assert np.mean(is_named) > 0.98


def exceeds(values: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """[num_ranks]: which ranks exceed what is asked of a verdict."""
    effect = compare(values, nodes)
    return effect.value > _Kind(cast("Any", None), Thresholds.of("cuda")).bar(effect)


class _Kind(JudgedKind):
    rank_floor = 3 * US  # type: ignore[assignment]


@pytest.mark.parametrize(("num_nodes", "late_us"), [(2, 20), (3, 6), (8, 6)])
def test_a_node_all_of_whose_ranks_are_late_is_late(num_nodes: int, late_us: float) -> None:
    """Of two nodes there is one difference, of which it is hardly known how far it varies."""
    nodes = np.repeat(np.arange(num_nodes), 8)
    values = 150 * US + 0.6 * noise(0.0, 64, nodes.size) + late_us * US * (nodes == 1)
    np.testing.assert_array_equal(exceeds(values, nodes), nodes == 1)


def test_a_rank_that_is_late_by_much_in_a_slow_swing_is_late_for_certain() -> None:
    """How much it is late is not known so well, and its interval says so."""
    values = 150 * US + noise(0.0, 64, 8)
    values[:, 2] += 75 * US * np.sin(np.arange(64) / 10) ** 2
    effect = compare(values, ONE_NODE)
    assert effect.value[2] > 8 * effect.usual_error
    assert effect.error[2] > 3 * effect.usual_error


def test_what_was_taken_out_for_tokens_is_as_uncertain_of_early_ranks() -> None:
    effect = compare(150 * US + noise(0.0, 64, 8), ONE_NODE, 5 * US * np.linspace(-1, 1, 8))
    np.testing.assert_array_equal(effect.reversed().by_tokens, effect.by_tokens)
    assert (effect.reversed().error >= effect.by_tokens).all()


def test_early_ranks_may_lie_as_far_from_the_others_as_late_ones() -> None:
    level, deviations = 150 * US, noise(0.0, 64, 8)
    early = compare(level + deviations, ONE_NODE).reversed()
    late = compare(level - deviations, ONE_NODE)
    np.testing.assert_allclose(early.value, late.value, atol=1)
    assert early.apart == pytest.approx(late.apart, rel=0.02)


def test_the_cost_of_a_token_is_what_a_rank_s_time_follows_and_not_what_ranks_differ_by() -> None:
    generator = np.random.default_rng(3)
    tokens = generator.integers(500, 1500, (64, 8)).astype(float)
    tokens[:, 1] += 1000
    values = 150 * US + 20.0 * tokens + noise(0.0, 64, 8)
    values[:, 4] += 40 * US
    found = by_tokens(values, np.median(tokens, axis=0), tokens)
    assert found.is_known
    assert found.time[1] - found.time[0] == pytest.approx(20 * US, rel=0.2)
    assert compare(values - found.each, ONE_NODE).value[4] == pytest.approx(40 * US, abs=4 * US)


def test_the_cost_of_a_token_is_right_on_average_and_off_by_what_it_says() -> None:
    """The median rank of an operation is another one in tokens than in time, which made tokens look too cheap."""
    generator, deviations = np.random.default_rng(4), []
    for seed in range(100):
        tokens = generator.poisson(1024, (64, 16)).astype(float)
        tokens[:, 1] += 500
        values = 150 * US + 60.0 * tokens + 0.6 * noise(0.0, 64, 16, seed)
        found = by_tokens(values, tokens[0], tokens)
        more = np.median(tokens[:, 1]) - np.sort(np.median(tokens, axis=0))[7]
        deviations.append((found.time[1] - 60.0 * more) / found.error[1])
    assert abs(np.mean(deviations)) < 0.5
    assert np.std(deviations) == pytest.approx(1, abs=0.25)


def test_of_tokens_that_never_change_the_cost_is_not_known_unless_all_have_as_many() -> None:
    values = 150 * US + noise(0.0, 64, 4)
    even, uneven = np.full(4, 900.0), np.array([900.0, 900.0, 1800.0, 900.0])
    for usual, is_known in ((even, True), (uneven, False)):
        found = by_tokens(values, usual, np.broadcast_to(usual, (64, 4)))
        assert found.is_known == is_known
        assert not found.each.any()
