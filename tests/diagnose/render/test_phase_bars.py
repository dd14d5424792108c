"""Stacked bars: what each rank's time is made of, and who is marked."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from deep_ep.diagnose.core.diagnosis import Measured
from deep_ep.diagnose.render.phase_bars import bars
from fixtures import LATE, LATE_RANK, diagnosis


def drawn(measured: Measured, num_ranks: int = 8) -> ElementTree.Element:
    text = bars(diagnosis(num_ranks, verdicts=[LATE]), measured)
    return ElementTree.fromstring(f"<section>{text}</section>")


def measured(gap: float, send: float, wait: float, drain: float) -> Measured:
    """The same for all ranks, but for the late one, whose gap is 10 longer."""
    gap_us, send_us, own_wait_us, drain_us = np.full((8, 4), [gap, send, wait, drain]).T
    gap_us[LATE_RANK] += 10
    known = diagnosis(8).measured["dispatch"]
    return replace(
        known, gap_us=gap_us, send_us=send_us, own_wait_us=own_wait_us, drain_us=drain_us
    )


def test_a_bar_is_as_long_as_its_share_of_the_longest_and_the_late_rank_is_marked() -> None:
    page = drawn(measured(gap=10.0, send=20.0, wait=30.0, drain=30.0))
    widths = [float(bar.get("width", "")) for bar in page.iter("rect")]
    whole = 560.0  # of the late rank: 100 us
    one = [0.1 * whole, 0.2 * whole, 0.3 * whole, 0.3 * whole]
    expected = [one] * 8
    expected[LATE_RANK] = [0.2 * whole, *one[1:]]
    assert widths == pytest.approx(sum(expected, []))
    named = [text.text for text in page.iter("text") if text.get("class") == "named"]
    assert len(named) == 1
    assert str(named[0]).startswith(f"rank {LATE_RANK} ")
    assert [title.text for title in page.iter("title")][1].endswith("sending: 20 us")


def test_of_many_ranks_those_with_the_largest_gap_have_bars() -> None:
    known = diagnosis(70).measured["dispatch"]
    gap_us = np.arange(70.0)
    gap_us[5] = np.nan
    page = drawn(replace(known, gap_us=gap_us), 70)
    names = [text.text for text in page.iter("text") if text.get("class") in ("name", "named")]
    assert [int(str(name).split()[1]) for name in names] == [*range(69, 5, -1)]
    assert "of the 64 ranks with the largest gap" in "".join(page.itertext())


def test_nothing_is_drawn_of_what_is_not_known() -> None:
    unknown = measured(gap=np.nan, send=np.nan, wait=np.nan, drain=np.nan)
    assert not list(drawn(unknown))
