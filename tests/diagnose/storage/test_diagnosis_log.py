"""Records: what is written can be read, and what cannot be read is refused with file and line."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fixtures
from deep_ep.base import codec
from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.diagnose.core.diagnosis import (
    Bandwidth,
    Diagnosis,
    Measured,
    Timeline,
    Verdict,
)
from deep_ep.diagnose.storage import counter_archive, diagnosis_log, record_layout
from deep_ep.diagnose.storage.diagnosis_log import read
from deep_ep.diagnose.storage.log_follower import Follower
from deep_ep.diagnose.storage.log_writer import Writer
from deep_ep.diagnose.storage.record import MATRICES, Means, Record
from deep_ep.diagnose.storage.record_layout import SCHEMA, to_line
from deep_ep.errors import EPArgumentError
from fixtures import comparable

# Of all kinds of verdict, with outliers, notes and nodes; and one without what is not always there.
FULL = replace(
    fixtures.diagnosis(8, fixtures.ALL_KINDS, per_host=4),
    remarks=["a note", ""],
    events=[fixtures.HICCUP],
    nodes=(0, 0, 0, 0, 1, 1, 1, 1),
)
BARE = replace(
    fixtures.diagnosis(3, (), missing=(2,), stamped=False), source="waits", device="", events=[]
)
LINE = to_line(Record(FULL, 12.5, 7, "ep"), with_matrices=True)


def require_like(found: Any, expected: Any) -> None:
    """The same types and values, but for what rounding to nanoseconds makes of numbers in arrays."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, atol=6e-4)
    elif isinstance(expected, (dict, Measured, Bandwidth, Timeline, Diagnosis)):
        one, other = (v if isinstance(v, dict) else vars(v) for v in (found, expected))
        assert one.keys() == other.keys()
        for name, value in other.items():
            require_like(one[name], value)
    else:
        assert comparable(found) == comparable(expected)


@pytest.mark.parametrize("diagnosis", [FULL, BARE])
def test_what_is_written_is_read(diagnosis: Diagnosis) -> None:
    line = to_line(Record(diagnosis, 12.5, 7, "ep"), with_matrices=True)
    assert "\n" not in line
    record = diagnosis_log.parse_line(line.encode(), "file:1")
    assert (record.time_s, record.window, record.group) == (12.5, 7, "ep")
    require_like(record.diagnosis, diagnosis)


def fractions_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to them."""
    if not isinstance(value, (dict, list)):
        return [path] * isinstance(value, float)
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [place for key, item in inner for place in fractions_in(item, (*path, key))]


FRACTIONS = [path for path in fractions_in(json.loads(LINE)) if path != ("time",)]
numbers = st.none() | st.floats(-1e9, 1e9).map(lambda number: round(number, 3) + 0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FRACTIONS), numbers), max_size=20))
def test_what_is_read_is_written_again(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    value = json.loads(LINE)
    for (*path, last), number in changes:
        functools.reduce(lambda at, key: at[key], path, value)[last] = number
    line = json.dumps(value)
    assert to_line(diagnosis_log.parse_line(line.encode(), "file:1"), with_matrices=True) == line


@pytest.mark.parametrize("diagnosis", [FULL, BARE])
def test_without_matrices_the_rest_and_the_means_are_there(diagnosis: Diagnosis) -> None:
    record = Record(diagnosis, 0.0, 1, "ep")
    back = diagnosis_log.parse_line(to_line(record, with_matrices=False).encode(), "file:1")
    assert comparable(back.diagnosis.verdicts) == comparable(diagnosis.verdicts)
    for kind, measured in diagnosis.measured.items():
        stored = back.diagnosis.measured[kind]
        assert np.isnan(stored.wait_us).all()
        assert stored.wait_us.shape == measured.wait_us.shape
        assert stored.timeline is None
        require_like(stored.own_wait_us, measured.own_wait_us)
        for name in MATRICES:
            for side in ("waiting", "waited_for"):
                np.testing.assert_allclose(
                    getattr(back.means(kind), side)[name],
                    getattr(record.means(kind), side)[name],
                    atol=6e-4,
                )


def test_means_leave_out_what_a_rank_waits_for_itself() -> None:
    wait = np.array([[1000.0, 2.0, 4.0], [1.0, 1000.0, np.nan], [np.nan] * 3])
    measured = replace(fixtures.measured(3), wait_us=wait)
    means = Means.of(measured)
    np.testing.assert_array_equal(means.waiting["wait_us"], [3.0, 1.0, np.nan])
    np.testing.assert_array_equal(means.waited_for["wait_us"], [1.0, 2.0, 4.0])


def test_above_128_ranks_matrices_are_means_over_nodes_and_say_so(tmp_path: Path) -> None:
    diagnosis = fixtures.diagnosis(256)
    Writer(tmp_path, "ep").write(Record(diagnosis, 0.0, 1, "ep"), with_matrices=True)
    (record,) = read(tmp_path)
    assert record.block_of == tuple(rank // 8 for rank in range(256))
    wait = diagnosis.measured["dispatch"].wait_us
    back = record.diagnosis.measured["dispatch"].wait_us
    assert back.shape == (256, 256)
    expected = wait[8:16, 16:24].mean()
    np.testing.assert_allclose(back[8:16, 16:24], expected, atol=6e-4)
    own_node = wait[8:16, 8:16][~np.eye(8, dtype=bool)].mean()
    assert back[9, 10] == pytest.approx(own_node, abs=6e-4)
    # Stored once more, nothing changes.
    assert (
        to_line(record, with_matrices=True).encode() + b"\n"
        == next(tmp_path.iterdir()).read_bytes()
    )
    assert (tmp_path / "diagnose-ep.jsonl").stat().st_size < 1_000_000


def test_above_128_ranks_nodes_of_one_host_are_kept_apart(tmp_path: Path) -> None:
    nodes = tuple(rank // 32 for rank in range(256))
    diagnosis = replace(fixtures.diagnosis(256, per_host=256), nodes=nodes)
    Writer(tmp_path, "ep").write(Record(diagnosis, 0.0, 1, "ep"), with_matrices=True)
    (record,) = read(tmp_path)
    assert record.block_of == record.diagnosis.nodes == nodes


def test_a_record_without_nodes_is_read(tmp_path: Path) -> None:
    line = json.loads(to_line(record(), with_matrices=False))
    del line["nodes"]
    (read_back,) = read(write_lines(tmp_path, json.dumps(line)))
    assert read_back.diagnosis.nodes == ()
    assert read_back.diagnosis.hosts == record().diagnosis.hosts


def test_a_group_is_a_file_and_its_name_is_tamed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for group in ("a", "../b c"):
        Writer(folder, group).write(record(group=group), with_matrices=False)
    assert sorted(file.name for file in folder.iterdir()) == [
        "diagnose-..-b-c.jsonl",
        "diagnose-a.jsonl",
    ]
    assert {r.group for r in read(folder)} == {"a", "../b c"}


def test_a_folder_is_read_in_order_of_time(tmp_path: Path) -> None:
    for group, time_s in (("a", 30.0), ("b", 20.0), ("a", 40.0)):
        Writer(tmp_path, group).write(record(group=group, time_s=time_s), with_matrices=False)
    assert [r.time_s for r in read(tmp_path)] == [20.0, 30.0, 40.0]


def record(**changes: Any) -> Record:
    return replace(Record(fixtures.diagnosis(2), 1.0, 1, "ep"), **changes)


def write_lines(folder: Path, *lines: str, end: str = "\n") -> Path:
    file = folder / "diagnose-ep.jsonl"
    file.write_text("\n".join(lines) + end, encoding="utf-8", errors="surrogateescape")
    return file


GOOD = to_line(record(), with_matrices=True)


def changed(**values: Any) -> str:
    """A good line with some fields set; a path has __ between its parts."""
    line = json.loads(GOOD)
    for path, value in values.items():
        at = line
        *parts, last = [int(p) if p.isdecimal() else p for p in path.split("__")]
        for part in parts:
            at = at[part]
        if value is KeyError:
            del at[last]
        else:
            at[last] = value
    return json.dumps(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("what is this", r"not JSON .*expected a 'deep_ep.diagnose/1' object per line"),
        ("[1, 2]", r"the line is \[1, 2\]; expected an object"),
        (
            changed(schema="deep_ep.diagnose/2"),
            r"schema is 'deep_ep.diagnose/2'; this version reads",
        ),
        (changed(schema=KeyError), r"field schema is missing; expected a text"),
        (changed(hosts=["a"]), r"hosts has 1 entries; expected 2"),
        (changed(nodes=[0]), r"nodes has 1 entries; expected 2"),
        (changed(nodes=[1, -1]), r"nodes is \[1, -1\]; expected every node from 0 on"),
        (changed(source="guess"), r'source is "guess"; expected "stamps" or "waits"'),
        (changed(verdicts__0__kind="odd"), r'verdicts\[0\].kind is "odd"; expected "comp-slow" or'),
        (changed(verdicts__0__rank=2), r"verdicts\[0\].rank is 2; expected .* below 2"),
        (changed(measured__0__gap_us=[1.0]), r"measured\[0\].gap_us has 1 entries; expected 2"),
        (
            changed(measured__0__matrices__wait_us=[[1.0, 2.0]]),
            r"measured\[0\].matrices.wait_us has 1 entries; expected 2",
        ),
        (
            changed(measured__0__matrices__wait_us=[[1.0, 2.0], [1.0]]),
            r"matrices.wait_us\[1\] has 1 entries; expected 2",
        ),
        (
            changed(measured__0__matrices__late_us=[[1.0, 2.0], [1.0, "x"]]),
            r'late_us\[1\]\[1\] is "x"; expected a number or null',
        ),
        (
            changed(measured__0__matrices__late_us=[[0, 98765.5], [0, 0]]).replace(
                "98765.5", "1e999"
            ),
            r"late_us\[0\]\[1\] is Infinity; expected a number that fits a double",
        ),
        (changed(block_of=[0, 2]), r"block_of\[1\] is 2; expected an integer of .* below 2"),
        (changed(block_of=[1, 1]), r"block_of is \[1, 1\]; expected every block from 0 on"),
        # Asks for too much.
        (changed(num_ranks=10**9), "num_ranks is 1000000000; expected .* below 2049"),
        (changed(measured=json.loads(GOOD)["measured"] * 5), "expected a list of at most 8"),
        (GOOD.replace('"window": 1', '"window": ' + "[" * 500 + "]" * 500), "window is"),
        (changed(window=10**400), "window is 1000"),
        (GOOD.replace('"window": 1', '"window": 1e999'), "window is Infinity"),
        (GOOD.replace("2430.0", "1e300"), "duration_us is 1e.300; expected .* up to 1e.20"),
        (changed(time=1e12), "time is 1000000000000.0; expected seconds"),
        (changed(time=-1e300), "time is -1e"),
        (changed(measured__0__timeline__observer=4), "observer is 4"),
    ],
)
def test_what_is_no_record_is_refused_with_file_and_line(
    tmp_path: Path, line: str, said: str
) -> None:
    file = write_lines(tmp_path, GOOD, line, GOOD)
    with pytest.raises(EPArgumentError, match=re.escape(f"{file}:2: ")) as caught:
        read(file)
    assert re.search(said, str(caught.value)), str(caught.value)
    log = fixtures.caught_up(Follower(file))
    assert len(log) == 2
    assert log.remarks == (str(caught.value),)


def test_empty_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EPArgumentError, match=r"there is no diagnose-\*.jsonl in this folder"):
        read(tmp_path)
    file = write_lines(tmp_path, "", end="\n")
    for path in (file, tmp_path):
        with pytest.raises(EPArgumentError, match=f"{file}: the file is empty"):
            read(path)


def test_an_empty_file_hides_no_other_one(tmp_path: Path) -> None:
    """A full disk leaves one."""
    write_lines(tmp_path, GOOD)
    (tmp_path / "diagnose-new.jsonl").touch()
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (GOOD[:1], "Expecting property name"),
        (GOOD[:20], "Unterminated string"),
        (GOOD[: len(GOOD) // 2], ""),
        (GOOD[:-1], "Expecting ',' delimiter"),
        (GOOD.replace("2430.0", "NaN"), "NaN is not a JSON number; unknown numbers are null"),
        (GOOD.replace("node0", "node\udcff"), "can't decode"),
        ('{"schema": ' + "[" * 100_000, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("end", ["", "\n" + GOOD + "\n"])
def test_a_line_that_does_not_end_is_left_out_with_a_remark(
    tmp_path: Path, line: str, said: str, end: str
) -> None:
    file = write_lines(tmp_path, GOOD, line, end=end)
    log = read(file)
    assert len(log) == 1 + bool(end)
    (remark,) = log.remarks
    assert remark.startswith(f"{file}:2: the line is cut off")
    assert said in remark


def test_of_a_file_of_lines_that_do_not_end_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis_log, "_MOST_REMARKS", 3)
    assert len(read(write_lines(tmp_path, GOOD, "{", "{", "{")).remarks) == 3
    with pytest.raises(EPArgumentError, match=":5: the line is cut off"):
        read(write_lines(tmp_path, GOOD, *"{{{{"))


def test_a_last_line_without_line_end_counts(tmp_path: Path) -> None:
    log = read(write_lines(tmp_path, GOOD, GOOD, end=""))
    assert (len(log), log.remarks) == (2, ())


def test_a_program_that_goes_on_after_a_cut_line_starts_a_new_one(tmp_path: Path) -> None:
    write_lines(tmp_path, GOOD, GOOD[:-200], end="")
    Writer(tmp_path, "ep").write(record(window=9), with_matrices=False)
    log = read(tmp_path)
    assert [r.window for r in log] == [1, 9]
    assert ":2: the line is cut off" in log.remarks[0]


PAGE = (Path(__file__).parents[3] / "docs" / "records.md").read_text(encoding="utf-8")


def stored_in(hint: Any) -> set[str]:
    """Names of all fields, those of objects in it as well."""
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return set(hints).union(*map(stored_in, hints.values()))
    inner = get_args(hint)
    if get_origin(hint) is Annotated and get_origin(inner[0]) is Mapping:
        return set(inner[1])
    return set().union(*map(stored_in, inner))


def test_every_stored_field_is_documented() -> None:
    assert SCHEMA in PAGE
    stored = stored_in(record_layout.Line) | stored_in(counter_archive.Head)
    stored |= get_type_hints(Snapshot).keys() - {"operations"}
    assert {name for name in stored if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize("layout", [record_layout.Line, Verdict, record_layout.StoredMeasured])
def test_types_are_documented_as_they_are_read(layout: Any) -> None:
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", PAGE, re.MULTILINE)
    documented = {(name, kind) for names, kind in rows for name in re.findall(r"`(.*?)`", names)}
    hints = get_type_hints(layout, include_extras=True)
    read_as = {(name, codec.codec_of(hint).name) for name, hint in hints.items()}
    assert read_as - documented == set()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (Diagnosis, record_layout.Line),
        (Measured, record_layout.StoredMeasured),
        (Bandwidth, record_layout.StoredBandwidth),
    ],
)
def test_no_field_of_a_diagnosis_is_forgotten(kind: Any, layout: Any) -> None:
    assert {f.name for f in fields(kind)} - stored_in(layout) == set()
