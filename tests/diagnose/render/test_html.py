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
from deep_ep.diagnose.render.html import write_page
from deep_ep.diagnose.storage.record import Record
from fixtures import LATE, LATE_RANK, NODE_PAIR, SLOW_PATH, diagnosis

NAN = float("nan")
# What the page shows has three to four digits.
SHOWN = 2e-3
# What is gained without LATE, and of what that is a part.
GAINED = "2,020 us less per operation (mean of dispatch and combine; 4,040 us for one of each)."


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


def test_verdicts_stand_in_the_page_with_every_field(tmp_path: Path) -> None:
    late = replace(LATE, effect_us=40.5, interval_us=(38.0, 42.0))
    path = replace(SLOW_PATH, effect_us=60.0, interval_us=(NAN, NAN))
    reader = Reader(written(tmp_path, diagnosis(8, verdicts=[late, path])))
    head = next(i for i, row in enumerate(reader.rows) if row[0] == "Class: cause")
    first, check_path, second, check_late = reader.rows[head + 1 : head + 5]
    assert first[0] == "Comm-Slow: path"
    assert first[1] == "path 2 > 5, node0 cuda:2 > node1 cuda:1"
    assert first[3] == "60"
    assert second == [
        "Comp-Slow: late",
        "rank 1, node0 cuda:1",
        "dispatch",
        "40.5 (38 to 42)",
        "98 %",
        "2,020",
        "97 %",
        "> 99.9 %",
    ]
    assert "Check the link from rank 2 to rank 5." in check_path[0]
    assert "Check clocks, throttling and host code of rank 1." in check_late[0]
    assert "own time over median 2,020 us, error 12.2 us" in check_late[0]


def test_what_a_cause_of_two_operations_costs_is_said_once(tmp_path: Path) -> None:
    both = [LATE, SLOW_PATH, replace(LATE, operation="combine", effect_us=50.0)]
    reader = Reader(written(tmp_path, diagnosis(8, verdicts=both)))
    head = next(i for i, row in enumerate(reader.rows) if row[0] == "Class: cause")
    saved = [row[5] for row in reader.rows[head + 1 :] if row[0].startswith("Com") and len(row) > 5]
    assert saved == ["2,020", "", "2,020"]
    assert reader.rows[head + 3][:3] == ["Comp-Slow: late", "rank 1, node0 cuda:1", "combine"]
    assert reader.text.count(f"Without it: {GAINED}") == 2
    assert (
        "98 % of all waiting, and in combine, +50 us (95 %: 1,990 to 2,040) per operation, "
        "98 % of all waiting. Without it" in reader.text
    )


def test_what_others_hide_is_not_said_to_be_worth_nothing(tmp_path: Path) -> None:
    hidden = replace(SLOW_PATH, saving_us=0.0, alone_us=884.0)
    reader = Reader(written(tmp_path, diagnosis(8, verdicts=[LATE, hidden])))
    rows = {row[0]: row for row in reader.rows if len(row) == 8}
    assert rows["Comm-Slow: path"][5] == "0, hidden"
    assert rows["Comp-Slow: late"][5] == "2,020"
    of_each = "(mean of dispatch and combine; 1,768 us for one of each)."
    assert f"hide it; once they are gone, 884 us less per operation {of_each}" in reader.text


def test_nobody_is_certain_to_the_last_digit_and_what_is_unknown_is_no_number(
    tmp_path: Path,
) -> None:
    sure = replace(LATE, certainty=1.0)
    unknown = dict.fromkeys(("certainty", "seen_in", "saving_us", "share"), NAN)
    found = diagnosis(8, verdicts=[sure, replace(SLOW_PATH, **unknown)])
    reader = Reader(written(tmp_path, found))
    rows = {row[0]: row for row in reader.rows if len(row) == 8}
    assert rows["Comp-Slow: late"][7] == "> 99.9 %"
    assert rows["Comm-Slow: path"][4:] == ["not known"] * 4
    assert "nan" not in reader.text


@pytest.mark.parametrize(
    ("changed", "said", "part", "marks"),
    [
        ({"cause": "egress", "rank": 2}, "rank 2", "path", [[0, 2, 6, 3]]),
        ({"cause": "ingress", "rank": 2}, "rank 2", "path", [[2, 0, 3, 6]]),
        ({"cause": "early", "rank": 2}, "rank 2", "late", [[2, 0, 3, 6]]),
        ({"cause": "hot experts", "rank": 2}, "rank 2", "tokens", [[2, 0, 3, 6]]),
        ({"cause": "path", "rank": None, "edge": (1, 3)}, "path 1 > 3", "path", [[3, 1, 4, 2]]),
        (
            {"cause": "node pair", "rank": None, "nodes": (0, 1)},
            "nodes 0 > 1", "path", [[2, 0, 3, 2], [2, 3, 3, 6]],
        ),
        # More nodes than hosts were counted: nothing to mark, and no error.
        ({"cause": "node pair", "rank": None, "nodes": (0, 2)}, "nodes 0 > 2", "path", []),
        ({"cause": "uplink", "rank": None, "node": 1}, "node 1", "path", [[0, 2, 6, 3]]),
        ({"cause": "downlink", "rank": None, "node": 1}, "node 1", "path", [[2, 0, 3, 6]]),
        ({"cause": "rail", "rank": None, "rail": 1}, "rail 1", "path", [[0, 1, 6, 2], [0, 4, 6, 5]]),
        ({"cause": "everywhere", "rank": None}, "all ranks", "path", [[0, 0, 6, 6]]),
        ({"cause": "pair", "rank": None, "edge": (1, 3)}, "path 1 > 3", "wait", [[3, 1, 4, 2]]),
    ],
)  # fmt: skip
def test_every_subject_is_named_and_can_be_marked(
    tmp_path: Path, changed: dict[str, Any], said: str, part: str, marks: list[list[int]]
) -> None:
    # Host b has rank 2 alone, between the ranks of host a.
    found = diagnosis(6, verdicts=[replace(LATE, where="here", **changed)])
    found = replace(found, hosts=("a", "a", "b", "a", "a", "a"), devices=(0, 1, 0, 0, 1, 0))
    reader = Reader(written(tmp_path, found))
    assert any(row[1:2] == [f"{said}, here"] for row in reader.rows)
    button = next(given for tag, given in reader.tags if "data-marks" in given)
    assert button["data-part"] == part
    assert json.loads(button["data-marks"] or "") == marks


def test_nodes_of_one_host_are_parted_and_marked(tmp_path: Path) -> None:
    found = diagnosis(4, verdicts=[replace(NODE_PAIR, nodes=(1, 0))])
    page = written(tmp_path, replace(found, nodes=(0, 0, 1, 1)))
    reader = Reader(page)
    assert "4 ranks on 1 host, 2 NVLink domains" in reader.text
    button = next(given for tag, given in reader.tags if "data-marks" in given)
    assert json.loads(button["data-marks"] or "") == [[0, 2, 2, 4]]
    assert '"borders": [2]' in page.read_text()


def test_without_a_count_of_operations_times_are_of_the_window(tmp_path: Path) -> None:
    found = diagnosis(8, operations=["dispatch"])
    window = replace(found.measured["dispatch"], num_operations=0, duration_us=float("nan"))
    reader = Reader(written(tmp_path, replace(found, measured={"dispatch": window})))
    assert "per operation" not in reader.text
    assert "operations not counted" in reader.text
    assert "+2,013 us (95 %: 1,990 to 2,040) in the whole window" in reader.text


def test_operations_that_began_nobody_knows_when_do_not_spoil_the_pictures(tmp_path: Path) -> None:
    found = diagnosis(8)
    measured = found.measured["dispatch"]
    assert measured.timeline is not None
    unknown = replace(measured.timeline, begin_us=np.full_like(measured.timeline.begin_us, np.nan))
    found = replace(found, measured={"dispatch": replace(measured, timeline=unknown)})
    text = written(tmp_path, found).read_text(encoding="utf-8")
    assert '"begin": [null' in text
    assert "NaN" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_outliers_name_operation_and_rank(tmp_path: Path) -> None:
    outliers = [Outlier("dispatch", 512, 4, 20000.0)]
    text = Reader(written(tmp_path, replace(diagnosis(8), events=outliers))).text
    assert "dispatch 512: everybody waited 20,000 us longer for rank 4 (node0 cuda:4)" in text


def test_bandwidth_names_the_slowest_path_and_ranks(tmp_path: Path) -> None:
    found = diagnosis(8, operations=["dispatch"])
    bandwidth = found.measured["dispatch"].bandwidth
    assert bandwidth is not None
    bandwidth.edge[3, 1] = 0.01
    bandwidth.edge[5, 5] = 0.001  # With itself: no path.
    bandwidth.ingress[6] = 0.02
    reader = Reader(written(tmp_path, found))
    slowest = {row[0]: row for row in reversed(reader.rows) if row[0].startswith("dispatch, ")}
    assert slowest["dispatch, path"][1:3] == [
        "rank 1 (node0 cuda:1) > rank 3 (node0 cuda:3)",
        "0.01",
    ]
    assert slowest["dispatch, into"][1:3] == ["rank 6 (node0 cuda:6)", "0.02"]
    medians = next(row for row in reader.rows if row[0] == "dispatch" and len(row) == 5)
    assert float(medians[1]) == pytest.approx(np.median(bandwidth.effective), rel=0.1)


def test_of_paths_that_are_equally_slow_the_first_are_named(tmp_path: Path) -> None:
    found = diagnosis(8, operations=["dispatch"])
    bandwidth = found.measured["dispatch"].bandwidth
    assert bandwidth is not None
    bandwidth.edge[:] = 10.0
    bandwidth.edge[4:6] = 0.5
    rows = Reader(written(tmp_path, found)).rows
    named = [row[1] for row in rows if row[0] == "dispatch, path"]
    assert named == [
        f"rank {rank} (node0 cuda:{rank}) > rank 4 (node0 cuda:4)" for rank in (0, 1, 2)
    ]


def test_missing_ranks_are_called_missing(tmp_path: Path) -> None:
    found = diagnosis(8, missing=[4])
    reader = Reader(written(tmp_path, found))
    assert "8 ranks on 1 host, 1 missing" in reader.text
    assert "rank 4 (missing)" in reader.text
    row = next(row for row in reader.rows if row[0] == "rank 4 (missing)")
    assert "0" not in row[1:]


@pytest.mark.parametrize(("num_ranks", "most_kb"), [(8, 60), (64, 300), (1024, 20_000)])
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
    found, page = diagnosis(8), tmp_path / "report.html"
    write_page([Record(found, NAN, 1, "job", block_of=(0,) * 4 + (1,) * 4)], page)
    assert "dispatch, into" in page.read_text()
    assert "dispatch, path" not in page.read_text()


def test_ranks_of_unknown_hosts_are_not_missing(tmp_path: Path) -> None:
    for host in ("", "?"):
        found = replace(diagnosis(8, verdicts=[]), hosts=(host,) * 8, devices=(-1,) * 8)
        reader = Reader(written(tmp_path, found))
        assert "missing" not in reader.text
        assert "8 ranks, cuda" in reader.text
        assert ["rank 4"] in [row[:1] for row in reader.rows]


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


def test_the_late_column_stands_out_on_both_papers(quiet: browser.Browser, tmp_path: Path) -> None:
    page = written(tmp_path, diagnosis(8))
    for dark in (False, True):
        quiet.show(page, dark=dark)
        for scale in ("log", "linear"):
            quiet.choose("scale", scale)
            at = quiet.dataset("heat")
            row = at["top"] + 5 * at["cell"] + 4
            colours = [
                quiet.pixel("heat", at["left"] + column * at["cell"] + 4, row)
                for column in (LATE_RANK, 6)
            ]
            loud, calm = (sum(colour[:3]) for colour in colours)
            assert (loud - calm if dark else calm - loud) > 200


def test_keys_reach_every_cell(quiet: browser.Browser, tmp_path: Path) -> None:
    quiet.show(written(tmp_path, diagnosis(8)))
    first = quiet.press("heat", Keys.ARROW_DOWN)
    assert first[0].startswith("rank 0 (node0 cuda:0) waits for rank 0")
    lines = quiet.press("heat", *[Keys.ARROW_DOWN] * 5, *[Keys.ARROW_RIGHT] * 2)
    assert lines[0] == "rank 5 (node0 cuda:5) waits for rank 2 (node0 cuda:2)"
    assert quiet.press("heat", Keys.ESCAPE) == []
    before = quiet.dataset("heat")["cell"]
    quiet.press("heat", "+")
    assert quiet.dataset("heat")["cell"] == 2 * before


def test_a_verdict_is_marked_in_the_picture_that_shows_it(
    quiet: browser.Browser, tmp_path: Path
) -> None:
    late = replace(LATE, operation="combine", effect_us=513.5, interval_us=(497.0, 530.0))
    found = diagnosis(8, verdicts=[late, SLOW_PATH])
    quiet.show(written(tmp_path, found))
    rows = quiet.texts(".verdicts tbody tr")
    assert len(rows) == 4
    assert rows[0].startswith(
        "Comp-Slow: late rank 1, node0 cuda:1 combine 513.5 (497 to 530) 98 %"
    )
    assert "Check the link from rank 2 to rank 5." in rows[3]

    quiet.click(".verdicts tbody tr:nth-child(2) button")
    assert quiet.text("#heat-caption").startswith("combine: late, microseconds per operation")
    at = quiet.dataset("heat")
    edge = at["left"] + LATE_RANK * at["cell"]
    middle = at["top"] + 4.3 * at["cell"]
    assert quiet.pixel("heat", edge - 1, middle)[:3] == [11, 95, 208]
    quiet.click(".verdicts tbody tr:nth-child(4) button")
    assert quiet.text("#heat-caption").startswith("dispatch: path")
    assert quiet.pixel("heat", edge - 1, middle)[:3] != [11, 95, 208]


def test_missing_ranks_are_striped_and_not_zero(quiet: browser.Browser, tmp_path: Path) -> None:
    quiet.show(written(tmp_path, diagnosis(8, missing=[4])))
    lines = quiet.hover_cell(4, 1)
    assert lines[0] == "rank 4 (missing) waits for rank 1 (node0 cuda:1)"
    assert lines[1] == "wait not known"
    assert lines[-1] == "Missing: no counters came from there."
    assert "Striped: not known." in quiet.text("#heat-caption")


def test_the_timeline_tells_who_came_last_and_when(quiet: browser.Browser, tmp_path: Path) -> None:
    found = diagnosis(8)
    recent = found.measured["dispatch"].timeline
    assert recent is not None
    quiet.show(written(tmp_path, found))
    assert "as rank 0 (node0 cuda:0) saw them" in quiet.text("#line-caption")
    at = quiet.dataset("line")
    width = quiet.driver.execute_script("return document.getElementById('line').clientWidth")
    lines = quiet.hover("line", width - 90, at["top"] + 3.5 * at["row"])
    assert lines[0] == "dispatch 1423: rank 1 (node0 cuda:1) came last"
    number = float(re.findall(r"[\d,.]+", lines[1])[0].replace(",", ""))
    assert number == pytest.approx(recent.arrival_us[3, 1], rel=SHOWN)
    assert lines[1].endswith("us after the wait began")

    lines = quiet.press("line", Keys.ESCAPE, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    second = np.argsort(recent.arrival_us[1])[-2]
    assert lines[0] == f"dispatch 1419: rank {second} (node0 cuda:{second})"


def test_two_windows_can_be_switched(quiet: browser.Browser, tmp_path: Path) -> None:
    slow, healthy = diagnosis(8, seed=1), diagnosis(8, seed=9, verdicts=[], operations=["combine"])
    quiet.show(written(tmp_path, slow, healthy))
    assert quiet.texts(".headlines li") == ["No anomaly: nothing stands out of the noise."]
    assert quiet.texts(".verdicts tbody tr") == []
    assert quiet.text("#heat-caption").startswith("combine")
    later = shown_value(quiet.hover_cell(5, 3), "wait")
    assert later == pytest.approx(healthy.measured["combine"].wait_us[5, 3], abs=0.06)

    quiet.choose_window(0)
    assert "rank 1" in quiet.texts(".headlines li")[0]
    assert len(quiet.texts(".verdicts tbody tr")) == 2
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
    # A line between hosts, none within.
    at = quiet.dataset("heat")
    middle = at["top"] + 60.5 * at["cell"]
    border, inside = (
        sum(quiet.pixel("heat", at["left"] + column * at["cell"], middle)[:3])
        for column in (24, 28)
    )
    assert inside - border > 200
    assert "Lines part the nodes." in quiet.text("#heat-caption")


def test_host_names_stay_text(quiet: browser.Browser, tmp_path: Path) -> None:
    name = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;\"'"
    verdict = replace(LATE, where=f"{name} cuda:1", next_step=name, evidence={name: 1.0})
    found = diagnosis(4, verdicts=[verdict])
    found = replace(found, hosts=("node0", name, "node0", "node0"), remarks=[name])
    quiet.show(written(tmp_path, found, title=name))
    assert quiet.text("h1") == name
    assert quiet.driver.title.startswith(name)
    assert quiet.text(".remarks li") == name
    assert all(name in row for row in quiet.texts(".verdicts tbody tr"))
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
    assert quiet.text("#line-caption") == "No recent operations were kept."


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
    assert quiet.driver.find_element("id", "line").is_displayed()
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


def test_a_thousand_ranks_can_be_read(quiet: browser.Browser, tmp_path: Path) -> None:
    found = diagnosis(1024, operations=["dispatch"])
    quiet.show(written(tmp_path, found))
    lines = quiet.hover_cell(1000, LATE_RANK)
    assert lines[0].startswith("rank 1000 (node125 cuda:0) waits for rank 1 (")
    expected = found.measured["dispatch"].wait_us[1000, 1]
    assert shown_value(lines, "wait") == pytest.approx(expected, rel=5e-3)
    caption = quiet.text("#heat-caption")
    assert "rounded to 0.2 %" in caption
    # 127 lines in 1024 pixels would hide the cells; enlarged, they part them.
    assert "Lines part the nodes." not in caption
    quiet.click("#larger")
    quiet.click("#larger")
    assert "Lines part the nodes." in quiet.text("#heat-caption")
