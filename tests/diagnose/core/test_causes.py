"""Causes: a row each, and documents that say what the rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deep_ep.diagnose.core.causes import CAUSES, COMM_SLOW, COMP_SLOW, MIXED_SLOW, TITLES, Cause
from deep_ep.diagnose.core.diagnosis import Measured

DOCS = Path(__file__).resolve().parents[3] / "docs"
# Of the operation and of the rules.
WORDS = {
    "operation": "dispatch or combine",
    "load": "so many",
    "links": "",
    "check": "its PCIe link, its NVLink port, its NIC and its switch port",
}


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def rows_of_the_document() -> list[list[str]]:
    """Class and what is named, cause, claim, and next step of each row; evidence stands there alone."""
    text = (DOCS / "reading_a_verdict.md").read_text(encoding="utf-8")
    lines = text[text.index("| Class | Cause |") :].split("\n\n")[0].splitlines()[2:]
    rows, named = [], ""
    for names, cause, claim, evidence, step in map(cells_of, lines):
        assert evidence, cause
        named = names or named
        rows.append([named, cause, claim, step])
    return rows


def test_the_table_of_verdicts_is_the_code_s() -> None:
    told = rows_of_the_document()
    assert [cause for _, cause, *_ in told] == list(CAUSES)
    for named, cause, claim, step in told:
        row = CAUSES[cause]
        letters = re.findall(r"\*(\w)\*", named.split("**")[2])
        words = dict.fromkeys(
            ("rank", "node", "rail", "source"), f"*{letters[0]}*" if letters else ""
        )
        words |= {"destination": f"*{letters[-1]}*" if letters else "", **WORDS}
        if cause == Cause.EVERYWHERE:
            words["links"] = "of one kind of link"
        assert named.startswith(f"**{TITLES[row.slow]}** "), cause
        assert (claim, step) == (row.claim, row.next_step.format_map(words)), cause


def test_records_may_hold_every_cause() -> None:
    page = (DOCS / "records.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `cause` |")]
    assert set(re.findall(r"`([a-z ]+)`", row)) - {"cause"} == set(CAUSES)


@pytest.mark.parametrize("cause", list(Cause))
def test_a_row_names_what_there_is(cause: Cause) -> None:
    row = cause.row
    assert row.slow in (COMP_SLOW, COMM_SLOW, MIXED_SLOW)
    assert row.axis in ("column", "row", "cell")
    assert row.matrix == "tokens" or f"{row.matrix}_us" in Measured.__dataclass_fields__


def test_a_cause_is_its_text() -> None:
    assert Cause.LATE == "late"
    assert f"{Cause.LATE}, {Cause.LATE!s:>6}" == "late,   late"
    assert json.loads(json.dumps({"cause": Cause.HOT_EXPERTS})) == {"cause": "hot experts"}
