"""The arithmetic of stamps, against a reader of counters.def who takes one source at a time."""

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


def of_one_source(entered: int, issued: int, arrival: int, begin: int) -> dict[str, int]:
    """Nanosecond by nanosecond: what did the receiver wait for?"""
    waited = range(begin, arrival)
    late = sum(now < entered for now in waited)
    issue = sum(entered <= now < issued for now in waited)
    return {
        "wait_ns": len(waited),
        "late_ns": late,
        "issue_ns": issue,
        "path_ns": len(waited) - late - issue,
        "slack_ns": max(0, begin - issued),
    }


@given(PER_SOURCE, PER_SOURCE, PER_SOURCE, PER_OPERATION)
def test_counters_of_a_source_are_counted_nanoseconds(
    entered: np.ndarray, issued: np.ndarray, arrival: np.ndarray, begin: np.ndarray
) -> None:
    added = stamps.source_counters(entered, issued, arrival, begin)
    for op in range(NUM_OPERATIONS):
        for source in range(NUM_RANKS):
            at = op, source
            expected = of_one_source(entered[at], issued[at], arrival[at], begin[op])
            assert {name: added[name][at] for name in expected} == expected
        # The first of those that came at once is the last source; it leads the runner-up.
        last = int(np.argmax(arrival[op]))
        others = np.delete(arrival[op], last)
        lead = arrival[op, last] - max(begin[op], others.max())
        is_waited_for = arrival[op, last] > begin[op]
        critical = np.arange(NUM_RANKS) == (last if is_waited_for else -1)
        assert added["critical_ops"][op].tolist() == critical.tolist()
        assert added["critical_ns"][op].tolist() == np.where(critical, lead, 0).tolist()


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


def test_a_rank_alone_leads_its_own_waiting() -> None:
    zero, one = np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64)
    added = stamps.source_counters(zero, zero, one * 5, one[:, 0])
    assert added["critical_ns"].tolist() == [[4]]


@given(PER_SOURCE, PER_OPERATION, PER_OPERATION)
def test_own_times_follow_each_other(
    arrival: np.ndarray, begin: np.ndarray, leave: np.ndarray
) -> None:
    own = stamps.own_counters(arrival, begin, leave)
    assert (own["wait_ns"] >= 0).all()
    assert (begin + own["wait_ns"] + own["drain_ns"] == leave).all()
    assert (begin + own["wait_ns"] >= arrival.max(axis=1)).all()


def test_the_first_operation_has_no_gap_before_it() -> None:
    assert stamps.gap(np.array([7, 9]), np.array([0, 8])).tolist() == [0, 1]
    assert stamps.send(np.array([7, 9]), np.array([9, 8])).tolist() == [2, 0]
