"""Offsets of pairs that contradict all others are found, whatever clocks say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deep_ep.diagnose.collect.joint_clocks import contradictions

DAY_NS = 86_400 * 10**9


def entered_with(
    clocks: Sequence[int], wrong: dict[tuple[int, int], int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[receiver, source]: an operation that all enter at once, by clocks and wrong offsets of pairs."""
    clock = np.array(clocks)
    offset = clock[None, :] - clock[:, None]
    for (receiver, source), error in wrong.items():
        offset[receiver, source] += error
        offset[source, receiver] -= error
    return 10**18 + clock[None, :] - offset


@given(st.data())
def test_a_wrong_pair_is_found_to_the_nanosecond(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(4, 12))
    ranks = st.integers(0, num_ranks - 1)
    clocks = data.draw(
        st.lists(st.integers(-DAY_NS, DAY_NS), min_size=num_ranks, max_size=num_ranks)
    )
    receiver, source = data.draw(st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1]))
    error = data.draw(st.integers(-(10**9), 10**9))
    found = contradictions(np.full(num_ranks, 8), entered_with(clocks, {(receiver, source): error}))
    expected = np.zeros((num_ranks, num_ranks))
    expected[receiver, source], expected[source, receiver] = error, -error
    off = ~np.eye(num_ranks, dtype=bool)
    assert np.array_equal(found[off], expected[off])


def test_of_three_ranks_none_can_outvote_a_pair() -> None:
    assert np.isnan(contradictions(np.full(3, 8), entered_with([0, 5, 9], {(0, 1): 7}))).all()


def test_nothing_is_known_of_who_tells_of_another_operation() -> None:
    entered = entered_with(range(6), {(0, 1): 700})
    found = contradictions(np.array([8, 8, 8, 16, 8, -1]), entered)
    assert np.isnan(found[[3, 5]]).all()
    assert np.isnan(found[:, [3, 5]]).all()
    assert (found[0, 1], found[1, 0], found[0, 2]) == (700, -700, 0)
