"""Robust statistics: what is not known does not count, and slow members do not move the healthy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from deep_ep.diagnose.core import robust_stats

MATRICES = nps.arrays(
    np.float64,
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    elements=st.one_of(st.floats(-1e9, 1e9), st.just(np.nan)),
)


@given(MATRICES, st.integers(0, 1))
def test_median_is_that_of_the_known_values(values: np.ndarray, axis: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)
        expected = np.nanmedian(values, axis=axis)
    np.testing.assert_allclose(robust_stats.median(values, axis), expected)


@given(MATRICES, st.floats(0, 1))
def test_a_quantile_is_a_known_value_with_its_share_below(values: np.ndarray, share: float) -> None:
    found = robust_stats.quantile(values, share, 0)
    for column, value in zip(values.T, found):
        known = np.sort(column[np.isfinite(column)])
        if known.size:
            assert value in known
            assert np.sum(known < value) <= share * known.size
        else:
            assert np.isnan(value)


def test_one_long_step_tells_a_slope_that_noise_of_short_ones_hides() -> None:
    step = np.array([0.1, -0.1, 0.2, 4.0, 0.0, np.nan])
    rise = np.array([-1.0, 2.0, 3.0, 8.0, 5.0, 1.0])
    assert robust_stats.typical_slope(step, rise, 0.05) == 2.0
    assert robust_stats.typical_slope(step, rise, 4.0) == 0.0


def test_nothing_known_is_nan_and_not_an_error() -> None:
    nothing = np.full((3, 2), np.nan)
    assert np.isnan(robust_stats.median(nothing, 0)).all()
    assert np.isnan(robust_stats.median_of(nothing))
    assert np.isnan(robust_stats.lower_median(nothing))
    assert np.isnan(robust_stats.healthy(nothing)[0])


@pytest.mark.parametrize("noise", [0.0, 1.0])
@given(num_healthy=st.integers(5, 40), slow_share=st.floats(0.0, 0.9), seed=st.integers(0, 2**31))
def test_slow_members_do_not_move_the_healthy(
    noise: float, num_healthy: int, slow_share: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    healthy = generator.uniform(-1.0, 1.0, num_healthy)
    slow = generator.uniform(30.0, 90.0, int(slow_share * num_healthy))
    location, spread = robust_stats.healthy(np.concatenate([slow, healthy]), noise)
    assert -1.0 <= location <= 1.0
    assert spread <= 1.5


def test_the_standard_error_shrinks_with_the_operations() -> None:
    noise = np.random.default_rng(1).normal(0.0, 5.0, (6400, 1))
    assert robust_stats.standard_error(noise, 0)[0] == pytest.approx(1.2533 * 5.0 / 80, rel=0.1)
    assert robust_stats.standard_error(noise[:64], 0)[0] == pytest.approx(1.2533 * 5.0 / 8, rel=0.4)


def test_more_tests_ask_for_more_standard_errors() -> None:
    assert robust_stats.z_for(1, 0.025) == pytest.approx(1.96, abs=0.001)
    assert robust_stats.z_for(1_000, 1e-6) > robust_stats.z_for(10, 1e-6) > 4.5


def test_certainty_falls_with_the_number_of_places_looked_at() -> None:
    assert robust_stats.certainty(10.0, 1.0, 1) > 0.999999
    assert robust_stats.certainty(3.0, 1.0, 1) > robust_stats.certainty(3.0, 1.0, 100) > 0.8
    assert robust_stats.certainty(0.0, 1.0, 100) == 0.0


def test_half_of_the_weight_lies_below_a_weighted_median() -> None:
    values, weights = np.array([9.0, 1.0, np.nan, 5.0]), np.array([1.0, 1.0, 9.0, 3.0])
    assert robust_stats.weighted_median(values, weights) == 5.0
    assert robust_stats.weighted_median(np.array([1.0, 3.0]), np.ones(2)) == 2.0
    assert robust_stats.weighted_median(np.array([np.nan]), np.ones(1)) == 0.0


@pytest.mark.parametrize(("degrees", "expected"), [(2, 4.303), (5, 2.571), (10, 2.228), (60, 2.0)])
def test_few_values_ask_for_more_standard_deviations(degrees: int, expected: float) -> None:
    assert robust_stats.student(1.96, degrees) == pytest.approx(expected, rel=0.05)
