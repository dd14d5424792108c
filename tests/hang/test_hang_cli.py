"""`python -m deep_ep.diagnose hang`: what it prints and writes, and its exit status."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.cli.hang import svg_text
from deep_ep.hang.cause import HangCause, HangVerdict
from deep_ep.hang.report import operation_table
from deep_ep.hang.states import Frame, RankState
from deep_ep.hang.traces import write_dump
from deep_ep.hang.verdict import judge
from made_up_ranks import Group, thread

SVG = "{http://www.w3.org/2000/svg}"


def dump(directory: Path, states: dict[int, RankState]) -> Path:
    write_dump(directory, states, judge(states))
    return directory


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["hang", *map(str, arguments), "--width", "160"]) == 0
    return capsys.readouterr().out


def test_in_a_file_tables_are_as_wide_as_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    states = Group(8, 1234, stuck={3: "not_called"}).states()
    assert main(["hang", str(dump(tmp_path, states))]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines() if "1234  " in line) < 100


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, dump(tmp_path, Group(8, 1234, stuck={3: "not_called"}).states()))
    lines = [line.rstrip() for line in said.splitlines()]
    assert lines == [
        "buffer b0, 8 ranks",
        "  rank 3 has not called operation 1234 (low_latency_dispatch); its main thread is compiling "
        "(torch/_inductor/compile_fx.py line 712, compile_fx), called from /home/user/train.py line 41, step; "
        "ranks 0-2, 4-7 wait for it, for 12 s",
        "  Compile before the first operation, on all ranks, or raise DEEP_EP_TIMEOUT_S.",
        "",
        "who waits for whom",
        "  ranks 0-2, 4-7  >  entry of rank 3  (operation 1234, 12 s)",
        "",
        "recent operations",
        "  operation  name                  ranks 0-2, 4-7  rank 3",
        "       1230  low_latency_dispatch  done            done",
        "       1231  low_latency_dispatch  done            done",
        "       1232  low_latency_dispatch  done            done",
        "       1233  low_latency_dispatch  done            done",
        "       1234  low_latency_dispatch  sent            -       < first disagreement",
        "",
        "Python stacks",
        "  rank 3, thread MainThread",
        "    torch/_inductor/compile_fx.py line 712, compile_fx",
        "    /home/user/train.py line 41, step",
        "  ranks 0-2, 4-7, thread MainThread",
        "    /home/user/train.py line 41, step",
        "",
    ]


@pytest.mark.parametrize(("stuck", "status"), [({1: "gone"}, 3), ({}, 0)])
def test_exit_status_for_scripts(tmp_path: Path, stuck: dict[int, str], status: int) -> None:
    dump(tmp_path, Group(4, stuck=stuck).states())
    assert main(["hang", str(tmp_path), "--check"]) == status
    assert main(["hang", str(tmp_path)]) == 0


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = Group(4, stuck={1: "gone"}).states()
    plain = json.loads(run(capsys, dump(tmp_path, states), "--json"))
    assert plain["exit_status"] == 0
    (buffer,) = plain["buffers"]
    assert HangVerdict.of(buffer["verdict"]) == judge(states)
    assert buffer["causes"][0].startswith("rank 1 is dead")


def test_page_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = Group(8, stuck={3: "gone"}, lost={(1, 2)}).states()
    # What others wrote stays text.
    states[0] = replace(states[0], threads=thread(Frame("<script>alert(1)</script>", "a.py", 1)))
    html, svg = tmp_path / "page.html", tmp_path / "picture.svg"
    run(capsys, dump(tmp_path / "dump", states), "--html", html, "--svg", svg)
    page = html.read_text()
    assert "rank 3 is dead" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    drawn = ElementTree.parse(svg).getroot()
    names = {text.text for text in drawn.iter(f"{SVG}text")}
    assert {"rank 3", "process gone", "rank 1", "rank 2", "lost"} <= names
    assert {"ranks 0, 4-7"} <= names
    assert len([path for path in drawn.iter(f"{SVG}path") if path.get("class") == "lost"]) == 1


def test_where_no_buffer_was_dumped_there_is_no_picture_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"version": "2.10", "pg_config": {}, "entries": []}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(plain))
    svg = tmp_path / "picture.svg"
    assert main(["hang", str(tmp_path), "--svg", str(svg)]) == 2
    assert "--svg: there is no graph of a buffer to draw" in capsys.readouterr().err
    assert not svg.exists()


def test_lost_paths_that_are_left_out_are_counted() -> None:
    paths = tuple((source, to) for source in range(32) for to in range(32) if source != to)
    verdict = HangVerdict("b", 32, causes=(HangCause("not_arrived", paths=paths),))
    assert f"{len(paths) - 400} more arrows are left out" in svg_text(verdict)


@pytest.mark.parametrize("num_ranks", [1, 2, 64])
def test_a_picture_of_ranks_that_all_wait_for_each_other(num_ranks: int) -> None:
    pairs = {(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b}
    text = svg_text(judge(Group(num_ranks, lost=pairs).states()))
    assert len(text) < 200_000
    ElementTree.fromstring(text)


def test_terminals_are_not_steered_by_a_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = Group(2, stuck={1: "not_called"}).states()
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    frames = thread(Frame(evil, evil, 1))
    states[1] = replace(states[1], threads=frames, raised=evil, buffer="b0", host=evil)
    states[0] = replace(states[0], calls=tuple(replace(c, name=evil) for c in states[0].calls))
    said = run(capsys, dump(tmp_path, states))
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
    assert "\\x1b[2J" in said


def test_the_first_disagreement_is_in_what_was_called() -> None:
    states = Group(4, stuck={2: "mismatch"}).states()
    table = operation_table(states, 4)
    assert table.columns == ("operation", "name", "ranks 0-1, 3", "rank 2", "")
    *before, last = table.rows
    assert not any(row[-1] for row in before)
    cells = ("low_latency_dispatch sent", "low_latency_combine sent")
    assert last == ("12", "", *cells, "< first disagreement")


def test_what_a_ring_no_longer_holds_is_no_disagreement() -> None:
    group = Group(4, lost={(0, 1), (1, 0), (2, 3), (3, 2)})
    states = group.states()
    states[2] = replace(states[2], calls=states[2].calls[2:])
    del states[3]
    table = operation_table(states, 4)
    assert table.columns[2:-1] == ("ranks 0-1", "rank 2", "rank 3")
    assert not any(row[-1] for row in table.rows)
    assert table.rows[0][2:-1] == ("done", "?", "?")


@pytest.mark.parametrize("last_word", [2, 10])
def test_a_rank_that_does_not_answer_is_not_said_to_miss_what_others_finished(
    last_word: int,
) -> None:
    group = Group(4, stuck={2: "stopped"})
    states = group.states()
    states[2] = replace(states[2], calls=group.done_calls(last_word), closed=last_word)
    table = operation_table(states, 4)
    assert table.columns[2:-1] == ("ranks 0-1, 3", "rank 2")
    *before, last = table.rows
    assert {row[2:] for row in before if int(row[0]) > last_word} == {("done", "done", "")}
    assert last == ("12", "low_latency_dispatch", "sent", "?", "")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        # The others wait for rank 2 in our operation, and it waits for them in the collective.
        ([0, 1, 2], "so not all ranks call that collective and that operation in the same order"),
        # It waits for rank 3, which is in neither.
        ([2, 3], "rank 2 of buffer b0 can go on only when that collective ends"),
    ],
)
def test_a_collective_behind_it_is_one_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: list[int], words: str
) -> None:
    for rank in ranks:
        entry: dict[str, Any] = {
            "process_group": ("0", "default_pg"),
            "collective_seq_id": 5,
            "profiling_name": "nccl:all_reduce",
            "state": "started",
        }
        config = {"0": {"ranks": str(ranks)}}
        plain = {"version": "2.10", "pg_config": config, "entries": [entry] * (rank == 2)}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(plain))
    group = Group(4, stuck={2: "not_called", 3: "busy"})
    if 3 not in ranks:
        del group.stuck[3]
    dump(tmp_path / "nccl_trace_rank_deep_ep", group.states())
    said = run(capsys, tmp_path)
    assert "rank 2 is in nccl:all_reduce 5 of torch's group 0, which rank" in said
    assert words in said


def test_a_log_beside_collectives_of_torch_names_ranks_without_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 5,
        "profiling_name": "nccl:all_reduce",
        "state": "started",
    }
    for rank in range(2):
        plain = {"version": "2.10", "pg_config": {}, "entries": [started] * (rank == 0)}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(plain))
    line = "DeepEP timeout check failed: rank = 0, thread = 1, value = 1)\n"
    (tmp_path / "job.log").write_text(line)
    assert "rank 0 is in nccl:all_reduce 5" in run(capsys, tmp_path)
