"""Whatever holds waiting is read by its content; what is missing or damaged is named with file and line."""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fixtures
from deep_ep import EPArgumentError
from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.diagnose.storage import counter_archive, loader, record_layout
from deep_ep.diagnose.storage.loader import read_any
from deep_ep.diagnose.storage.log_writer import Writer
from deep_ep.diagnose.storage.record import Record
from deep_ep.testing import faults
from fixtures import comparable
from generator import simulate
from generator.machines import CPU
from generator.recording import COUNTER_FIELDS

LATE_COLUMN = 2
NUM_FIELDS = len(COUNTER_FIELDS)
NUM_RANKS = 8


def row(rank: int, num_ranks: int = NUM_RANKS, window: int = 0) -> str:
    """LATE_COLUMN is waited for twenty times as long as the others, by all others."""
    waits = [100_000 + 1000 * ((3 * rank + 5 * j + window) % 7) for j in range(num_ranks)]
    waits[LATE_COLUMN] *= 1 if rank == LATE_COLUMN else 20
    return f"rank={rank} [{' '.join(map(str, waits))}]"


def line(rank: int, num_ranks: int = NUM_RANKS, window: int = 0) -> str:
    return f"[2025-09-15T16:28:{window:02}.686] {row(rank, num_ranks, window)}"


def matrix_log(num_ranks: int = NUM_RANKS, window: int = 0) -> list[str]:
    return [line(rank, num_ranks, window) for rank in range(num_ranks)]


def write(file: Path, lines: list[str], end: str = "\n") -> Path:
    file.write_text("\n".join(lines) + end, encoding="utf-8")
    return file


def test_windows_follow_each_other_in_one_file(tmp_path: Path) -> None:
    log = read_any(
        write(tmp_path / "any.txt", [text for w in range(6) for text in matrix_log(window=w)])
    )
    assert [r.window for r in log] == [1, 2, 3, 4, 5, 6]
    assert log[1].time_s - log[0].time_s == pytest.approx(1)
    assert [r.diagnosis.keys for r in log] == [set()] * 4 + [{("comp-slow", LATE_COLUMN)}] * 2
    assert log.remarks == ()


def test_other_words_around_rows_and_other_lines_are_passed_over(tmp_path: Path) -> None:
    lines = ["starting with rank=3 [cuda:3]", "", "{not json}", "rank=1 is here"]
    lines.append(f"rank={'9' * 5000} [1 2]")  # more digits than Python reads
    for rank in range(NUM_RANKS):
        lines += [
            f"2025-09-15 16:28:53,686 - INFO - worker.py:12 - {line(rank)}",
            "loss = 3.2 [1.0, 2.0]",
        ]
    log = read_any(write(tmp_path / "train.log", lines * 5))
    assert len(log) == 5
    assert log[4].diagnosis.keys == {("comp-slow", LATE_COLUMN)}
    assert log.remarks == ()


def test_rows_of_combine_are_a_matrix_of_their_own(tmp_path: Path) -> None:
    lines = []
    for rank in range(NUM_RANKS):
        lines += [line(rank), f"{line(rank)} combine", f"{line(rank)} normal dispatch"]
    log = read_any(write(tmp_path / "wait.log", lines))
    assert [list(r.diagnosis.measured) for r in log] == [
        ["dispatch"],
        ["combine"],
        ["normal dispatch"],
    ]


def test_in_a_folder_only_rank_0_may_have_the_rows(tmp_path: Path) -> None:
    for rank in range(NUM_RANKS):
        write(tmp_path / f"diagnose_rank{rank}.log", matrix_log() if rank == 0 else ["started"])
    # The file of the day before has a date behind its name, and comes first.
    write(tmp_path / "diagnose_rank0.log.2025-09-14", matrix_log())
    text = (tmp_path / "diagnose_rank0.log").read_text(encoding="utf-8")
    (tmp_path / "diagnose_rank0.log").write_text(text.replace("09-15T", "09-16T"), encoding="utf-8")
    log = read_any(tmp_path)
    assert len(log) == 2
    assert log[0].time_s < log[1].time_s


def test_in_a_folder_every_rank_may_have_its_own_row(tmp_path: Path) -> None:
    for rank in range(NUM_RANKS):
        write(tmp_path / f"diagnose_rank{rank}.log", [line(rank, window=w) for w in range(5)])
    log = read_any(tmp_path)
    assert [r.diagnosis.keys for r in log] == [set()] * 4 + [{("comp-slow", LATE_COLUMN)}]
    assert log.remarks == ()


def test_missing_ranks_are_nan_rows_and_a_remark(tmp_path: Path) -> None:
    lines = [text for rank, text in enumerate(matrix_log()) if rank not in (5, 6)]
    log = read_any(write(tmp_path / "wait.log", lines * 5))
    wait = log[0].diagnosis.measured["dispatch"].wait_us
    assert np.isnan(wait[[5, 6]]).all()
    assert np.isfinite(wait[0, 1:]).all()
    assert log[4].diagnosis.keys == {("comp-slow", LATE_COLUMN)}
    assert "window 1" in log.remarks[0]
    assert "no line of ranks 5-6" in log.remarks[0]


def test_a_row_cut_off_is_left_out_with_a_remark(tmp_path: Path) -> None:
    lines = matrix_log()
    file = write(tmp_path / "wait.log", [*lines[:-1], lines[-1][:-20]], end="")
    log = read_any(file)
    assert np.isnan(log[0].diagnosis.measured["dispatch"].wait_us[NUM_RANKS - 1]).all()
    assert log.remarks[0].startswith(f"{file}:{NUM_RANKS}: the line is cut off")
    assert "no line of rank 7" in log.remarks[1]


def test_of_a_long_log_the_latest_windows_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_MOST_WINDOWS", 5)
    file = write(tmp_path / "wait.log", [text for w in range(10) for text in matrix_log(window=w)])
    log = read_any(file)
    assert [time.gmtime(record.time_s).tm_sec for record in log] == [5, 6, 7, 8, 9]
    assert log[4].diagnosis.keys == {("comp-slow", LATE_COLUMN)}
    assert log.remarks[0].startswith(f"{file}: the first 5 windows are left out")


def test_a_line_of_a_log_that_is_too_long_is_refused_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_layout, "LONGEST_LINE", 1000)
    file = write(tmp_path / "wait.log", [*matrix_log(), "x" * 1001])
    with pytest.raises(EPArgumentError, match=f"{file}:9: the line has more than 1000 bytes"):
        read_any(file)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (f"rank=3 [{'1 ' * 7}]", "has 7 values; expected 8, one for each rank from 0 to 7, as in"),
        (f"rank=3 [{'1 ' * 9}]", "has 9 values; expected 8"),
        (
            f"rank=8 [{'1 ' * 8}]",
            "of rank 8 and has 8 values; expected 8, one for each rank from 0 to 7",
        ),
        (f"rank=-1 [{'1 ' * 8}]", "of rank -1 and has 8 values"),
        (f"rank=3 [{'1 ' * 7} -5]", "value 8 is '-5'; expected a number of at least 0"),
        (f"rank=3 [1 nan {'1 ' * 6}]", "value 2 is 'nan'; expected a number"),
        (f"rank=3 [1 1 oops {'1 ' * 5}]", "value 3 is 'oops'; expected a number"),
        (f"rank=3 [1 inf {'1 ' * 6}]", "value 2 is 'inf'; expected a number"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused_with_file_and_line(
    tmp_path: Path, bad: str, said: str
) -> None:
    file = write(tmp_path / "wait.log", [*matrix_log()[:3], bad])
    with pytest.raises(EPArgumentError, match=re.escape(f"{file}:4: ")) as caught:
        read_any(file)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"hello\n", b"\x00\x01\xff binary", b"a,b\n1,2\n"]
)
def test_what_is_nothing_of_ours_is_refused_with_what_was_expected(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "thing"
    file.write_bytes(content)
    with pytest.raises(EPArgumentError, match=r"expected records .* saved counters .* or a log"):
        read_any(file)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(EPArgumentError, match="there is no such file or folder"):
        read_any(tmp_path / "none")
    with pytest.raises(EPArgumentError, match=r"nothing to read .*`hang` reads dumps"):
        read_any(tmp_path)


def test_records_are_known_by_their_content(tmp_path: Path) -> None:
    Writer(tmp_path, "ep").write(Record(fixtures.diagnosis(2), 1.0, 7, "ep"), with_matrices=True)
    (tmp_path / "diagnose-ep.jsonl").rename(tmp_path / "renamed.txt")
    assert [r.window for r in read_any(tmp_path / "renamed.txt")] == [7]


def snapshots(num_ranks: int = 4) -> list[Snapshot]:
    return simulate(CPU, num_ranks, 24, faults.parse_list("slow-rank=1:4ms"), seed=1)


def test_saved_counters_are_what_they_were(tmp_path: Path) -> None:
    taken = snapshots()
    counter_archive.save(taken[0], tmp_path)
    counter_archive.save(taken[1:], tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f"counters-rank{r}.npz" for r in range(4)]
    assert comparable(counter_archive.load(tmp_path)) == comparable(taken)
    (alone,) = counter_archive.load(tmp_path / "counters-rank2.npz")
    assert comparable(alone) == comparable(taken[2])


def test_counters_saved_at_different_moments_cover_the_same_operations(tmp_path: Path) -> None:
    counter_archive.save(simulate(CPU, 4, 24, seed=1), tmp_path)
    counter_archive.save(simulate(CPU, 4, 27, seed=1)[2], tmp_path)
    log = read_any(tmp_path)
    assert log.remarks == ()
    assert log[0].diagnosis.measured["combine"].last_operation == 48


def test_counters_too_far_apart_are_judged_and_it_is_said(tmp_path: Path) -> None:
    counter_archive.save(simulate(CPU, 4, 24, seed=1, capacity=16), tmp_path)
    counter_archive.save(simulate(CPU, 4, 64, seed=1, capacity=16)[2], tmp_path)
    log = read_any(tmp_path)
    assert "rows of the ranks cover different operations" in log.remarks[0]
    assert log[0].diagnosis.num_ranks == 4


def test_counters_without_a_ring_are_judged_by_their_sums(tmp_path: Path) -> None:
    counter_archive.save(simulate(CPU, 4, 24, seed=1), tmp_path)
    counter_archive.save(simulate(CPU, 4, 24, seed=1, capacity=0)[2], tmp_path)
    log = read_any(tmp_path)
    assert log[0].diagnosis.measured["dispatch"].last_operation == 47


def test_counters_of_some_ranks_are_judged_and_the_missing_named(tmp_path: Path) -> None:
    counter_archive.save(snapshots(8), tmp_path)
    (tmp_path / "counters-rank3.npz").unlink()
    file = tmp_path / "counters-rank0.npz"
    file.write_bytes(file.read_bytes()[:2000])
    log = read_any(tmp_path)
    assert ("comp-slow", 1) in log[0].diagnosis.keys
    assert str(file) in log.remarks[0]
    assert re.search(r"\branks 0, 3\b", " ".join(log[0].diagnosis.remarks))


def test_counters_that_may_not_be_read_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, opened = counter_archive.save(snapshots(), tmp_path), io.open

    def refuse(file: Path, *arguments: Any, **more: Any) -> Any:
        # The tests may be root, who may read everything.
        if file == files[0]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, *arguments, **more)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", refuse)
    assert read_any(tmp_path).remarks[0] == f"left out: {files[0]}: Permission denied"
    with pytest.raises(PermissionError):
        counter_archive.load(files[0])


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    counter_archive.save(snapshots(), tmp_path)
    shutil.copy(tmp_path / "counters-rank0.npz", tmp_path / "counters-rank1.npz")
    with pytest.raises(EPArgumentError, match=f"{tmp_path}: .*every rank may appear once"):
        read_any(tmp_path)


def rewrite(file: Path, **changes: Any) -> None:
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, value in changes.items():
        path = name.replace("__", "/")
        if value is None:
            del arrays[path]
        else:
            arrays[path] = value
    with file.open("wb") as opened:
        np.savez(opened, **arrays)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "deep_ep.counters/2"}, "schema is 'deep_ep.counters/2'; this version reads"),
        ({"rank": None}, "entry rank is missing; expected an integer"),
        ({"rank": 4}, "entry rank is 4; expected an integer of at least 0 and below 4"),
        ({"rank": "one"}, 'entry rank is "one"; expected an integer of at least 0'),
        ({"num_ranks": 0}, "entry num_ranks is 0; expected an integer of at least 1"),
        ({"kinds": np.zeros(2)}, "entry kinds is float64 of shape [2]; expected a list of texts"),
        ({"dispatch__own": None}, "entry dispatch/own is missing"),
        (
            {"dispatch__totals": np.zeros((NUM_FIELDS, 3), int)},
            f"expected int64 of shape [{NUM_FIELDS}, 4]",
        ),
        ({"dispatch__ring": np.zeros((8, 4, 4), int)}, "expected int64 of shape [any, 5, 6]"),
        ({"dispatch__totals": np.zeros((NUM_FIELDS, 4))}, f"is float64 of shape [{NUM_FIELDS}, 4]"),
        ({"dispatch__own": np.array([{}], object)}, "Object arrays cannot be loaded"),
    ],
)
def test_damaged_counters_are_refused_with_file_and_entry(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (file,) = counter_archive.save(snapshots()[0], tmp_path)
    rewrite(file, **changes)
    with pytest.raises(EPArgumentError) as caught:
        read_any(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("kept", [4, 100, 2000])
def test_counters_cut_off_are_refused(tmp_path: Path, kept: int) -> None:
    (file,) = counter_archive.save(snapshots()[0], tmp_path)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(EPArgumentError, match="Was the program stopped"):
        read_any(file)
