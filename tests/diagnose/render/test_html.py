"""The page people open at night: what it says without a script, and what a real browser shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

from deep_ep.diagnose.core.diagnosis import Diagnosis, Outlier
from deep_ep.diagnose.render import bandwidths, wording
from deep_ep.diagnose.render.html import write_page
from deep_ep.diagnose.storage.record import Record
from fixtures import LATE, LATE_RANK, NODE_PAIR, SLOW_PATH, diagnosis

NAN = float("nan")
# What the page shows has three to four digits.
SHOWN = 2e-3


def written(folder: Path, *diagnoses: Diagnosis, title: str = "job 7, group ep") -> Path:
    page = folder / "report.html"
    write_page([Record(found, NAN, i, title) for i, found in enumerate(diagnoses, 1)], page)
    return page


class Reader(HTMLParser):
    """Words, tags and table rows of a page as a browser without a script has them."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._code = self._cell = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._code = tag in ("script", "style")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._code = False
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._code:
            return
        self.words.append(data)
        if self._cell:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "\n".join(self.words)


# ---------------------------------------------------------------------------- without a script


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    page = written(tmp_path, diagnosis(8))
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|//cdn", text)
    links = {"src", "href", "srcset", "data", "action"}
    assert not [tag for tag in Reader(page).tags if links & set(tag[1])]
    assert "default-src 'none'" in text


def test_all_that_is_known_of_a_cause_stands_in_the_page(tmp_path: Path) -> None:
    both = [LATE, SLOW_PATH, replace(LATE, operation="combine", effect_us=50.0)]
    outlier = Outlier("dispatch", 512, 4, 20000.0)
    found = replace(diagnosis(8, verdicts=both), events=[outlier])
    text = Reader(written(tmp_path, found)).text
    heads = (
        "Comp-Slow rank 1 (node0 cuda:1): late",
        "Comm-Slow path 2 > 5 (node0 cuda:2 > node1 cuda:1): path",
    )
    assert [text.count(head) for head in heads] == [1, 1]
    for verdicts in wording.causes(found):
        for line in wording.details(found, verdicts):
            assert line in text
    for line in (*wording.savings(found), *wording.outliers(found, 1)):
        assert line in text


@pytest.mark.parametrize(
    ("changed", "said", "part", "marks"),
    [
        ({"cause": "egress", "rank": 2}, "rank 2", "path", [[0, 2, 6, 1]]),
        ({"cause": "ingress", "rank": 2}, "rank 2", "path", [[2, 0, 1, 6]]),
        ({"cause": "early", "rank": 2}, "rank 2", "late", [[2, 0, 1, 6]]),
        ({"cause": "hot experts", "rank": 2}, "rank 2", "tokens", [[2, 0, 1, 6]]),
        ({"cause": "path", "rank": None, "edge": (1, 3)}, "path 1 > 3", "path", [[3, 1, 1, 1]]),
        (
            {"cause": "node pair", "rank": None, "nodes": (0, 1)},
            "nodes 0 > 1", "path", [[2, c, 1, 1] for c in (0, 1, 3, 4, 5)],
        ),
        # More nodes than hosts were counted: nothing to mark, and no error.
        ({"cause": "node pair", "rank": None, "nodes": (0, 2)}, "nodes 0 > 2", "path", []),
        ({"cause": "uplink", "rank": None, "node": 1}, "node 1", "path", [[0, 2, 6, 1]]),
        ({"cause": "downlink", "rank": None, "node": 1}, "node 1", "path", [[2, 0, 1, 6]]),
        ({"cause": "rail", "rank": None, "rail": 1}, "rail 1", "path", [[0, 1, 6, 1], [0, 4, 6, 1]]),
        ({"cause": "everywhere", "rank": None}, "all ranks", "path", [[0, 0, 6, 6]]),
        ({"cause": "pair", "rank": None, "edge": (1, 3)}, "path 1 > 3", "wait", [[3, 1, 1, 1]]),
    ],
)  # fmt: skip
def test_every_subject_is_named_and_can_be_marked(
    tmp_path: Path, changed: dict[str, Any], said: str, part: str, marks: list[list[int]]
) -> None:
    # Host b has rank 2 alone, between the ranks of host a.
    found = diagnosis(6, verdicts=[replace(LATE, where="here", **changed)])
    found = replace(found, hosts=("a", "a", "b", "a", "a", "a"), devices=(0, 1, 0, 0, 1, 0))
    reader = Reader(written(tmp_path, found))
    assert f"{said} (here): " in reader.text
    button = next(given for tag, given in reader.tags if "data-marks" in given)
    assert button["data-part"] == part
    assert json.loads(button["data-marks"] or "") == marks


def test_nodes_of_one_host_are_parted_and_marked(tmp_path: Path) -> None:
    found = diagnosis(4, verdicts=[replace(NODE_PAIR, nodes=(1, 0))])
    page = written(tmp_path, replace(found, nodes=(0, 0, 1, 1)))
    reader = Reader(page)
    assert "4 ranks on 1 host, 2 NVLink domains" in reader.text
    button = next(given for tag, given in reader.tags if "data-marks" in given)
    assert json.loads(button["data-marks"] or "") == [[r, c, 1, 1] for r in (0, 1) for c in (2, 3)]
    assert '"borders": [2]' in page.read_text()


def test_bandwidths_are_those_of_the_terminal(tmp_path: Path) -> None:
    found = diagnosis(8)
    rows = [row for row in Reader(written(tmp_path, found)).rows if len(row) == 6]
    assert rows[0] == [" ".join(lines) for lines in bandwidths.COLUMNS]
    assert rows[1:] == [["".join(cell) for cell in row] for row in bandwidths.rows(found)]


@pytest.mark.parametrize(
    ("num_ranks", "most_kb"),
    [(8, 60), (64, 300), pytest.param(1024, 20_000, marks=pytest.mark.exhaustive)],
)
def test_pages_stay_small_enough_for_a_ticket(tmp_path: Path, num_ranks: int, most_kb: int) -> None:
    assert written(tmp_path, diagnosis(num_ranks)).stat().st_size < most_kb * 1000


def test_windows_of_several_groups_say_of_which_they_are(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_page([Record(diagnosis(4), 0.0, 1, "a"), Record(diagnosis(8), 60.0, 1, "b")], page)
    text = Reader(page).text
    assert "window 1 of 2, group a until 1970-01-01 00:00:00 UTC: 1 cause" in text
    assert "window 2 of 2, group b until 1970-01-01 00:01:00 UTC: 1 cause" in text
    assert "\na, b\n" in text


def test_paths_that_are_means_over_blocks_are_not_listed_as_slowest(tmp_path: Path) -> None:
    found, page = diagnosis(8, operations=["dispatch"]), tmp_path / "report.html"
    write_page([Record(found, NAN, 1, "job", block_of=(0,) * 4 + (1,) * 4)], page)
    assert "matrices were stored as means over blocks of ranks" in page.read_text()
    (row,) = (row for row in Reader(page).rows if row[:1] == ["dispatch"])
    assert row[3] == "not known"
    assert "rank" in row[4]


def test_ranks_of_unknown_hosts_are_not_missing(tmp_path: Path) -> None:
    for host in ("", "?"):
        found = replace(diagnosis(8, verdicts=[]), hosts=(host,) * 8, devices=(-1,) * 8)
        reader = Reader(written(tmp_path, found))
        assert "missing" not in reader.text
        assert "8 ranks, cuda" in reader.text
        assert "rank 4" in reader.words


# -------------------------------------------------------------------------- in a real browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.opened() as opened:
        yield opened


@pytest.fixture
def quiet(chromium: browser.Browser) -> Iterator[browser.Browser]:
    """The browser, and afterwards: no error in the console, nothing asked of the network."""
    yield chromium
    assert chromium.complaints() == []
    requested = chromium.requested()
    assert requested  # The page itself, so that the record is known to work.
    assert {url.split(":")[0] for url in requested} <= {"file", "data", "blob"}


def shown_value(lines: list[str], part: str) -> float:
    match = re.fullmatch(rf"{part} ([\d,.]+)(?: us)? per operation", lines[1])
    assert match, lines
    return float(match.group(1).replace(",", ""))


def test_a_hovered_cell_tells_its_value(quiet: browser.Browser, tmp_path: Path) -> None:
    found = diagnosis(8)
    dispatch = found.measured["dispatch"]
    quiet.show(written(tmp_path, found))

    lines = quiet.hover_cell(6, LATE_RANK)
    assert lines[0] == "rank 6 (node0 cuda:6) waits for rank 1 (node0 cuda:1)"
    assert shown_value(lines, "wait") == pytest.approx(dispatch.wait_us[6, 1], rel=SHOWN)
    assert lines[2].startswith("wait ")
    assert re.sub(r"[\d,.]+", "#", lines[2]) == "wait # = late # + issue # + path # us"
    assert lines[3] == f"{dispatch.tokens[6, 1]:.0f} tokens per operation"

    quiet.choose("part", "late")
    late = shown_value(quiet.hover_cell(6, LATE_RANK), "late")
    assert late == pytest.approx(dispatch.late_us[6, 1], rel=SHOWN)
    other = shown_value(quiet.hover_cell(LATE_RANK, 6), "late")
    assert other == pytest.approx(dispatch.late_us[1, 6], abs=0.06)

    quiet.choose("operation", "combine")
    combine = shown_value(quiet.hover_cell(6, LATE_RANK), "late")
    assert combine == pytest.approx(found.measured["combine"].late_us[6, 1], rel=SHOWN)

    quiet.choose("part", "tokens")
    assert quiet.text("#heat-caption").startswith("combine: tokens, tokens per operation")


def test_the_late_column_stands_out(quiet: browser.Browser, tmp_path: Path) -> None:
    quiet.show(written(tmp_path, diagnosis(8)))
    calm, loud = (sum(quiet.pixel(5, column)[:3]) for column in (6, LATE_RANK))
    assert calm - loud > 200
    assert f"{diagnosis(8).measured['dispatch'].wait_us[5, LATE_RANK]:.0f}" in quiet.written_over()


def test_keys_reach_every_cell(quiet: browser.Browser, tmp_path: Path) -> None:
    quiet.show(written(tmp_path, diagnosis(8)))
    first = quiet.press(Keys.ARROW_DOWN)
    assert first[0].startswith("rank 0 (node0 cuda:0) waits for rank 0")
    lines = quiet.press(*[Keys.ARROW_DOWN] * 5, *[Keys.ARROW_RIGHT] * 2)
    assert lines[0] == "rank 5 (node0 cuda:5) waits for rank 2 (node0 cuda:2)"
    assert quiet.press(Keys.ESCAPE) == []


def test_a_verdict_is_marked_in_the_picture_that_shows_it(
    quiet: browser.Browser, tmp_path: Path
) -> None:
    late = replace(LATE, operation="combine", effect_us=513.5, interval_us=(497.0, 530.0))
    quiet.show(written(tmp_path, diagnosis(8, verdicts=[late, SLOW_PATH])))
    size = quiet.dataset("heat")["cell"]
    quiet.click(".headlines button[data-operation=combine]")
    assert quiet.text("#heat-caption").startswith("combine: late, microseconds per operation")
    assert quiet.marks() == [[58 + LATE_RANK * size, 42, size, 8 * size]]
    quiet.click(".headlines button[data-operation=dispatch]")
    assert quiet.text("#heat-caption").startswith("dispatch: path")
    assert quiet.marks() == [[58 + 2 * size, 42 + 5 * size, size, size]]


def test_missing_ranks_are_striped_and_not_zero(quiet: browser.Browser, tmp_path: Path) -> None:
    quiet.show(written(tmp_path, diagnosis(8, missing=[4])))
    assert "8 ranks on 1 host, 1 missing" in quiet.text(".about")
    lines = quiet.hover_cell(4, 1)
    assert lines[0] == "rank 4 (missing) waits for rank 1 (node0 cuda:1)"
    assert lines[1] == "wait not known"
    assert lines[-1] == "Missing: no counters came from there."
    assert "Striped: not known." in quiet.text("#heat-caption")
    assert quiet.pixel(4, 1)[3] == 0 < quiet.pixel(3, 1)[3]


def test_two_windows_can_be_switched(quiet: browser.Browser, tmp_path: Path) -> None:
    slow, healthy = diagnosis(8, seed=1), diagnosis(8, seed=9, verdicts=[], operations=["combine"])
    quiet.show(written(tmp_path, slow, healthy))
    assert quiet.texts(".headlines li") == ["No anomaly: nothing stands out of the noise."]
    assert quiet.text("#heat-caption").startswith("combine")
    later = shown_value(quiet.hover_cell(5, 3), "wait")
    assert later == pytest.approx(healthy.measured["combine"].wait_us[5, 3], abs=0.06)

    quiet.choose_window(0)
    assert "rank 1" in quiet.texts(".headlines li")[0]
    earlier = shown_value(quiet.hover_cell(5, 3), "wait")
    assert earlier == pytest.approx(slow.measured["combine"].wait_us[5, 3], abs=0.06)


def test_sixty_four_ranks_on_eight_hosts(quiet: browser.Browser, tmp_path: Path) -> None:
    found = diagnosis(64)
    quiet.show(written(tmp_path, found))
    lines = quiet.hover_cell(5, LATE_RANK)
    assert shown_value(lines, "wait") == pytest.approx(
        found.measured["dispatch"].wait_us[5, 1], rel=SHOWN
    )
    assert quiet.hover_cell(63, 17)[0] == "rank 63 (node7 cuda:7) waits for rank 17 (node2 cuda:1)"
    assert quiet.count("#over .border") == 7, "a line between hosts"


def test_host_names_stay_text(quiet: browser.Browser, tmp_path: Path) -> None:
    name = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;\"'"
    verdict = replace(LATE, where=f"{name} cuda:1", next_step=name, evidence={name: 1.0})
    found = diagnosis(4, verdicts=[verdict])
    found = replace(found, hosts=("node0", name, "node0", "node0"), remarks=[name])
    quiet.show(written(tmp_path, found, title=name))
    assert quiet.text("h1") == name
    assert quiet.driver.title.startswith(name)
    assert quiet.text(".remarks li") == name
    assert all(name in row for row in quiet.texts(".headlines li"))
    assert quiet.hover_cell(2, 1)[0] == f"rank 2 (node0 cuda:2) waits for rank 1 ({name} cuda:1)"
    assert quiet.driver.find_elements("css selector", "img") == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_smallest_groups(quiet: browser.Browser, tmp_path: Path, num_ranks: int) -> None:
    found = diagnosis(num_ranks, verdicts=[], stamped=False)
    quiet.show(written(tmp_path, found))
    assert f"{num_ranks} rank" in quiet.text(".about")
    lines = quiet.hover_cell(num_ranks - 1, 0)
    expected = found.measured["dispatch"].wait_us[num_ranks - 1, 0]
    assert shown_value(lines, "wait") == pytest.approx(expected, abs=0.06)


def test_matrices_that_were_not_stored_are_not_drawn(
    quiet: browser.Browser, tmp_path: Path
) -> None:
    unknown = np.full((8, 8), np.nan)
    full = diagnosis(8, operations=["dispatch"])
    bare = replace(
        full.measured["dispatch"],
        wait_us=unknown, late_us=unknown, issue_us=unknown, path_us=unknown, tokens=unknown,
    )  # fmt: skip
    quiet.show(written(tmp_path, full, replace(full, measured={"dispatch": bare})))
    assert quiet.text("#heat-caption") == "dispatch: the matrices of this window were not stored."
    assert not quiet.driver.find_element("id", "heat").is_displayed()
    assert quiet.driver.find_element(
        "css selector", "section:not([hidden]) .timeline"
    ).is_displayed()
    quiet.choose_window(0)
    assert quiet.driver.find_element("id", "heat").is_displayed()


def test_waits_only_is_said_to_be_weaker_and_shows_no_parts(
    quiet: browser.Browser, tmp_path: Path
) -> None:
    unknown = np.full((8, 8), np.nan)
    full = diagnosis(8, operations=["dispatch"], stamped=False)
    waits = replace(
        full.measured["dispatch"],
        late_us=unknown,
        issue_us=unknown,
        path_us=unknown,
        tokens=unknown,
    )
    quiet.show(written(tmp_path, replace(full, measured={"dispatch": waits}, source="waits")))
    about = quiet.text(".about")
    assert about.endswith("from cumulative waiting alone: which side is slow, not why")
    assert quiet.hover_cell(5, 2)[2:] == ["what it consists of is not known"]
    quiet.choose("part", "late")
    assert quiet.hover_cell(5, 2)[1] == "late not known"


def test_nothing_measured_is_said_and_hides_the_pictures(
    quiet: browser.Browser, tmp_path: Path
) -> None:
    page = written(tmp_path, Diagnosis({}, [], ["no operations"], hosts=("a", "b"), devices=(0, 1)))
    quiet.show(page)
    assert not quiet.driver.find_element("id", "pictures").is_displayed()
    assert quiet.texts(".headlines li") == ["Nothing measured."]
    assert quiet.texts(".remarks li") == ["no operations"]


@pytest.mark.exhaustive
def test_a_thousand_ranks_can_be_read(quiet: browser.Browser, tmp_path: Path) -> None:
    found = diagnosis(1024, operations=["dispatch"])
    quiet.show(written(tmp_path, found))
    lines = quiet.hover_cell(1000, LATE_RANK)
    assert lines[0].startswith("rank 1000 (node125 cuda:0) waits for rank 1 (")
    expected = found.measured["dispatch"].wait_us[1000, 1]
    assert shown_value(lines, "wait") == pytest.approx(expected, rel=5e-3)
    assert "rounded to 0.2 %" in quiet.text("#heat-caption")
