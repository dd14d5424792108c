"""Stamps as floats, and odd ones; `diagnose/collect/test_snapshot.py` has what whole ones add to the counters."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from deep_ep.observe import stamps

NUM_OPERATIONS, NUM_RANKS = 3, 4
# Few values, so that stamps are often equal.
TIMES = st.integers(-6, 6)
PER_SOURCE = arrays(np.int64, (NUM_OPERATIONS, NUM_RANKS), elements=TIMES)
PER_OPERATION = arrays(np.int64, NUM_OPERATIONS, elements=TIMES)


@given(PER_SOURCE, PER_SOURCE, PER_SOURCE, PER_OPERATION)
def test_floats_since_the_begin_of_waiting_give_the_same_parts(
    entered: np.ndarray, issued: np.ndarray, arrival: np.ndarray, begin: np.ndarray
) -> None:
    relative = (x.astype(np.float64) - begin[:, None] for x in (entered, issued, arrival))
    found = stamps.waiting(*relative, np.zeros(NUM_OPERATIONS))
    for part, expected in zip(found, stamps.waiting(entered, issued, arrival, begin)):
        np.testing.assert_array_equal(part, expected)


def test_a_source_that_was_not_heard_is_not_known_and_holds_nobody_up() -> None:
    arrival = np.array([[3.0, np.nan], [np.nan, np.nan]])
    found = stamps.waiting(arrival - 2, arrival - 1, arrival, np.zeros(2))
    assert np.isnan(found).tolist() == [np.isnan(arrival).tolist()] * 4
    assert stamps.ready(arrival, np.zeros(2)).tolist() == [3.0, 0.0]


def test_the_first_operation_has_no_gap_and_who_sent_before_it_entered_sent_in_no_time() -> None:
    assert stamps.gap(np.array([7, 9]), np.array([0, 8])).tolist() == [0, 1]
    assert stamps.send(np.array([7, 9]), np.array([9, 8])).tolist() == [2, 0]
