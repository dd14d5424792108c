"""What paths take, by what their receivers saw: bursts that recur, apart from what a path takes without them."""

from __future__ import annotations

import numpy as np
import pytest

from deep_ep.diagnose.collect.path_times import path_times


@pytest.mark.parametrize("apart", [False, True])
def test_one_burst_that_noise_takes_apart_does_not_recur(apart: bool) -> None:
    """In eighteen of 64 operations a path is 30 us slower: all in a row but for two in which it is not, or three times six."""
    generator = np.random.default_rng(1)
    elapsed = 90e3 + generator.normal(0.0, 1e3, (64, 8))
    slow = [*range(8, 14), *range(28, 34), *range(48, 54)] if apart else [*range(20, 40)]
    elapsed[slow, 3] += 30e3
    if not apart:
        elapsed[[26, 33], 3] -= 30e3
    share = path_times(elapsed, np.ones(elapsed.shape, bool)).burst_share
    assert share[3] == pytest.approx(18 / 64 if apart else 0.0, abs=0.02)
    assert not np.delete(share, 3).any()


def test_noise_that_just_exceeds_the_bar_is_no_other_burst() -> None:
    """A path is 25 us slower twenty times in a row, and once before and after that by what noise may make of it."""
    generator = np.random.default_rng(1)
    elapsed = 90e3 + generator.normal(0.0, 1e3, (64, 8))
    elapsed[20:40, 3] += 25e3
    elapsed[[8, 52], 3] = 95e3
    times = path_times(elapsed, np.ones(elapsed.shape, bool))
    assert times.burst[3] == pytest.approx(25e3 * 20 / 64, rel=0.1)
    assert not times.burst_share.any()


@pytest.mark.parametrize("share", [0.2, 0.3, 0.4])
def test_bursts_not_much_larger_than_noise_are_seen(share: float) -> None:
    """Five standard deviations, in a part of the operations that moves the median and the lower quartile."""
    found, quiet = [], []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        elapsed = 90e3 + generator.normal(0.0, 4e3, (64, 2))
        elapsed[np.arange(64) % 15 < round(15 * share), 1] += 20e3
        times = path_times(elapsed, np.ones(elapsed.shape, bool))
        found.append(times.burst_share)
        quiet.append(times.median[1])
    healthy, slow = np.mean(np.array(found) > 0, axis=0)
    assert healthy < 0.02
    assert slow > 0.65
    assert np.median(quiet) == pytest.approx(90e3, abs=2e3)
