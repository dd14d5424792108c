"""What ranks do by themselves: how late each is, how sure that is, and what tokens explain."""

from __future__ import annotations

import numpy as np
import pytest

from deep_ep.diagnose.analyze.own_work import by_tokens, compare
from deep_ep.diagnose.core.robust_stats import student, z_for

US = 1e3


def noise(memory: float, size: int, columns: int, seed: int = 1) -> np.ndarray:
    """[size, columns] ns of standard deviation 5 us that forgets itself by `memory` from one operation to the next."""
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(size, columns))
    for op in range(1, size):
        values[op] = memory * values[op - 1] + np.sqrt(1 - memory**2) * values[op]
    return 5 * US * values


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 32])
def test_the_effect_is_what_one_rank_takes_longer_than_the_healthy_ones(num_ranks: int) -> None:
    values = 150 * US + noise(0.0, 128, num_ranks)
    values[:, 1] += 40 * US
    effect = compare(values)
    assert effect.value[1] == pytest.approx(40 * US, abs=3 * US)
    assert effect.above[1] > 0.9
    assert abs(effect.value[0]) < 3 * US


@pytest.mark.parametrize("memory", [0.0, 0.6, 0.85])
def test_errors_hold_where_noise_lasts_several_operations(memory: float) -> None:
    """Of a rank without any cause, effects are as far from zero as their errors say."""
    off = []
    for seed in range(200):
        effect = compare(150 * US + noise(memory, 64, 8, seed))
        off.append(effect.value[3] / effect.usual_error)
    assert np.std(off) < 1.7


@pytest.mark.parametrize("memory", [0.92, 0.96])
def test_noise_that_lasts_longer_than_a_stretch_makes_nobody_late(memory: float) -> None:
    """Neighbouring stretches go together then: what they differ by says too little, and is itself known badly."""
    late = []
    for seed in range(600):
        effect = compare(150 * US + noise(memory, 64, 8, seed))
        late.append(
            effect.value.max() > student(z_for(64, 1e-3), effect.degrees) * effect.usual_error
        )
    assert np.mean(late) < 0.015


def test_where_another_kind_shows_that_noise_lasts_errors_allow_for_it() -> None:
    effect = compare(150 * US + noise(0.0, 64, 8))
    assert not effect.lasts
    lasting = effect.lasting()
    assert lasting.degrees < effect.degrees / 4
    np.testing.assert_array_equal(lasting.value, effect.value)
    assert compare(150 * US + noise(0.9, 64, 8)).lasts


def test_ranks_whose_noise_is_the_same_are_one_series() -> None:
    alone = compare(noise(0.8, 64, 8))
    of_nodes = np.repeat(noise(0.8, 64, 2), 4, axis=1)
    together = compare(of_nodes + 0.1 * noise(0.0, 64, 8, 2))
    assert together.degrees < alone.degrees / 2


def test_a_rank_that_is_late_by_much_in_a_slow_swing_is_late_for_certain() -> None:
    """How much it is late is not known so well, and its interval says so."""
    values = 150 * US + noise(0.0, 64, 8)
    values[:, 2] += 75 * US * np.sin(np.arange(64) / 10) ** 2
    effect = compare(values)
    assert effect.value[2] > 8 * effect.usual_error
    assert effect.error[2] > 3 * effect.usual_error


def test_what_is_less_is_early() -> None:
    values = 150 * US + noise(0.0, 64, 8)
    values[:, 5] -= 30 * US
    assert compare(values).value[5] == pytest.approx(-30 * US, abs=3 * US)
    assert compare(values).reversed().value[5] == pytest.approx(30 * US, abs=3 * US)


def test_what_was_taken_out_for_tokens_is_as_uncertain_of_early_ranks() -> None:
    effect = compare(150 * US + noise(0.0, 64, 8), 5 * US * np.linspace(-1, 1, 8))
    np.testing.assert_array_equal(effect.reversed().by_tokens, effect.by_tokens)
    assert (effect.reversed().error >= effect.by_tokens).all()


def test_the_cost_of_a_token_is_what_a_rank_s_time_follows_and_not_what_ranks_differ_by() -> None:
    generator = np.random.default_rng(3)
    tokens = generator.integers(500, 1500, (64, 8)).astype(float)
    tokens[:, 1] += 1000
    values = 150 * US + 20.0 * tokens + noise(0.0, 64, 8)
    values[:, 4] += 40 * US
    found = by_tokens(values, np.median(tokens, axis=0), tokens)
    assert found.is_known
    assert found.time[1] - found.time[0] == pytest.approx(20 * US, rel=0.2)
    assert compare(values - found.each).value[4] == pytest.approx(40 * US, abs=4 * US)


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
