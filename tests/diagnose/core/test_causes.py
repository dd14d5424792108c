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


def table() -> list[str]:
    """The rows of docs/reading_a_verdict.md."""
    rows = []
    named = ""
    for cause, row in CAUSES.items():
        letters = re.findall(r"\*\w\*", row.names)
        words = dict.fromkeys(("rank", "node", "rail", "source"), "".join(letters[:1]))
        words |= {"destination": letters[-1] if letters else "", **WORDS}
        if cause == Cause.EVERYWHERE:
            words["links"] = "of one kind of link"
        names = f"**{TITLES[row.slow]}** {row.names}"
        step = row.next_step.format_map(words)
        rows.append(
            f"|{'' if names == named else f' {names}'} | {cause} | {row.claim} | {row.evidence} | {step} |"
        )
        named = names
    return rows


def test_the_table_of_verdicts_is_the_code_s() -> None:
    text = (DOCS / "reading_a_verdict.md").read_text(encoding="utf-8")
    at = text.index("| Class | Cause |")
    lines = text[at:].split("\n\n")[0].splitlines()[2:]
    assert lines == table(), "\n".join(table())


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
