"""The timeline: who came last in each operation, and when."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np

from deep_ep.diagnose.core.diagnosis import Measured, Timeline
from deep_ep.diagnose.render.timeline import timeline
from fixtures import diagnosis


def drawn(**times: object) -> ElementTree.Element:
    """Two operations of three ranks, unless changed."""
    known: dict[str, object] = {
        "observer": 0,
        "ops": np.array([7, 9]),
        "begin_us": np.array([0.0, 500.0]),
        "entered_us": np.array([[0.0, 0.0, -50.0], [0.0, 60.0, np.nan]]),
        "arrival_us": np.array([[10.0, 100.0, 40.0], [10.0, np.nan, 100.0]]),
        "last": np.array([1, 2]),
        **times,
    }
    return page_of(replace(diagnosis(3).measured["dispatch"], timeline=Timeline(**known)))  # type: ignore[arg-type]


def page_of(measured: Measured) -> ElementTree.Element:
    return ElementTree.fromstring(f"<section>{timeline(diagnosis(3), measured)}</section>")


def test_it_says_who_came_last_and_when() -> None:
    page = drawn()
    first, second = (title.text for title in page.iter("title"))
    assert first == (
        "dispatch 7: rank 1 (node0 cuda:1) came last; data there 100 us after the wait began, entered 0 us after the wait "
        "began"
    )
    assert second is not None
    assert second.endswith("data there 100 us after the wait began, entered at a time not known")
    assert "as rank 0 (node0 cuda:0) saw them" in "".join(page.itertext())


def test_marks_stand_at_their_times_and_those_beyond_at_the_edge() -> None:
    page = drawn()
    # From 50 us before the wait to a tenth more than the usual last arrival, between margins of 76 of 900 pixels.
    expected = {us: 76 + (us + 50) / 160 * 748 for us in (-50.0, 0.0, 10.0, 40.0, 60.0, 100.0)}
    for name, times in (("entered", [0, 0, -50, 0, 60]), ("arrived", [10, 100, 40, 10, 100])):
        (path,) = (path.get("d", "") for path in page.iter("path") if path.get("class") == name)
        assert re.findall(r"M([\d.]+)", path) == [f"{expected[us]:.1f}" for us in times]
    late = np.array([[10.0, 100.0, 40.0], [10.0, 0.0, 1e6]])
    circles = [circle.get("cx") for circle in drawn(arrival_us=late).iter("circle")]
    assert circles[1] == "824.0"


def test_nothing_is_drawn_of_what_was_not_kept_and_nothing_unknown_is_a_number() -> None:
    assert not list(page_of(replace(diagnosis(3).measured["dispatch"], timeline=None)))
    unknown = np.full((2, 3), np.nan)
    text = ElementTree.tostring(drawn(entered_us=unknown, arrival_us=unknown), encoding="unicode")
    assert "nan" not in text
