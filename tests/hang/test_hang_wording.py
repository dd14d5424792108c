"""A verdict in words: one line that names rank, reason, evidence and who waits; and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from deep_ep.hang import messages, wording
from deep_ep.hang.cause import HangCause, HangVerdict, Kind
from deep_ep.hang.states import RankState
from deep_ep.hang.verdict import judge
from made_up_ranks import Group

OPERATION = "operation 1234 (low_latency_dispatch)"
WAIT = "; ranks 0-2, 4-7 wait for it, for 12 s"
RUNS = "; its main thread runs (/home/user/train.py line 41, step)"
PLACE = "(process 1003 on host node0)"


@pytest.mark.parametrize(
    ("stuck", "line"),
    [
        ("gone", f"rank 3 is dead: the process is gone {PLACE}{WAIT}"),
        ("stopped", f"rank 3 is stopped {PLACE}{WAIT}"),
        ("unreachable", f"rank 3 is on a host that cannot be reached {PLACE}{WAIT}"),
        ("ended", f"rank 3 destroyed its buffer, or ended, before {OPERATION} {PLACE}{WAIT}"),
        (
            "silent",
            f"rank 3 does not answer {PLACE}, and it cannot be known which it is: process stopped, process busy "
            f"(holds the GIL) or host unreachable{WAIT}",
        ),
        (
            "busy",
            "rank 3 is busy: its process runs, and something in it does not release the GIL "
            f"{PLACE}{RUNS}{WAIT}",
        ),
        (
            "not_called",
            f"rank 3 has not called {OPERATION}; its main thread is compiling (torch/_inductor/compile_fx.py line "
            f"712, compile_fx), called from /home/user/train.py line 41, step{WAIT}",
        ),
        (
            "not_started",
            f"rank 3 has called {OPERATION} and its kernel has not started: the stream is busy, or its SMs are "
            f"taken{RUNS}{WAIT}",
        ),
        (
            "host_in_call",
            "rank 3 is in low_latency_dispatch() on the host, without a kernel for "
            f"{OPERATION}{RUNS}{WAIT}",
        ),
        (
            "hook",
            f"rank 3 has not called the receive hook of operation 1233, nor {OPERATION}{RUNS}{WAIT}",
        ),
        (
            "not_sent",
            f"rank 3 has entered {OPERATION} and not sent everything, although it waits for nobody{WAIT}",
        ),
        (
            "mismatch",
            f"not all ranks called the same: ranks 0-2, 4-7 called {OPERATION} at /home/user/train.py line 41, step "
            "while rank 3 called operation 1234 (low_latency_combine) at /home/user/train.py line 41, step; ranks "
            "0-7 wait, for 12 s",
        ),
    ],
)
def test_a_line_says_who_why_and_who_waits(stuck: str, line: str) -> None:
    assert wording.line(judge(Group(8, 1234, stuck={3: stuck}).states())) == line


def test_paths_and_circles() -> None:
    lost = Group(8, lost={(1, 2), (1, 4)})
    assert wording.line(judge(lost.states())) == (
        "rows in operation 12 (low_latency_dispatch) were sent and did not arrive on the paths 1 > 2, 1 > 4; "
        "ranks 0-7 wait for them, for 12 s"
    )
    hop = Group(8, name="normal_dispatch", ranks_per_node=4, lost={(1, 6)})
    assert wording.line(judge(hop.states(), ranks_per_node=4)).startswith(
        "rows of rank 1, to be passed on, in operation 12 (normal_dispatch) were sent and did not arrive on the "
        "path 5 > 6 over NVLink; "
    )
    circle = Group(8, name="normal_combine", blocked={1: (2,), 2: (5,), 5: (1,)})
    assert wording.line(judge(circle.states())).startswith(
        "ranks 1-2, 5 wait for each other's slots in operation 12 (normal_combine); ranks 0-7 wait, for 12 s"
    )


def test_a_line_of_many_ranks_is_short_and_so_is_its_message() -> None:
    lost = Group(256, lost={(rank, rank + 128) for rank in range(128)})
    assert "paths 0 > 128, 1 > 129, " in wording.line(judge(lost.states()))
    silent = Group(256, stuck=dict.fromkeys(range(128), "silent"))
    for group in (lost, silent):
        verdict = judge(group.states())
        assert " and 112 more" in wording.line(verdict)
        assert len(wording.line(verdict)) < 1000
        assert len(messages.encode(messages.InquiryVerdict(verdict, {}))) < 100_000


def test_independent_causes_share_the_line() -> None:
    verdict = judge(Group(8, stuck={3: "gone", 5: "not_called"}).states())
    first, second = wording.line(verdict).split("; also: ")
    assert first.startswith("rank 3 is dead")
    assert second.startswith("rank 5 has not called")


def test_what_a_rank_raised_comes_before_what_it_does() -> None:
    states = Group(4, stuck={1: "not_called"}).states()
    states[1] = replace(states[1], raised="ValueError: no such token (serve.py line 7, step)")
    verdict = judge(states)
    assert "; it raised ValueError: no such token (serve.py line 7, step); its" in wording.line(
        verdict
    )
    assert wording.advice(verdict.causes[0]).startswith("Read that rank's exception first; ")


def advice_of(*places: tuple[str, int], kind: Kind = "stopped") -> str:
    accused = (RankState(rank, 4, host=host, pid=pid) for rank, (host, pid) in enumerate(places))
    return wording.advice(HangCause(kind, tuple(accused)))


def test_the_advice_has_the_processes_of_all_ranks() -> None:
    apart, together = (("a", 11), ("b", 33)), (("a", 11), ("a", 12), ("", 0))
    assert advice_of(("a", 11)).startswith("Let it go on (kill -CONT 11), ")
    assert "Let them go on (kill -CONT 11 on host a, kill -CONT 33 on host b)" in advice_of(*apart)
    assert "(kill -CONT 11, kill -CONT 12), " in advice_of(*together)
    assert "(kill -CONT PID), " in advice_of(("", 0))
    commands: dict[Kind, str] = {
        "busy": "py-spy dump --native --pid",
        "unknown": "py-spy dump --pid",
    }
    for kind, command in commands.items():
        assert f"({command} 11 on host a, {command} 33 on host b)" in advice_of(*apart, kind=kind)
    assert " and 112 more)" in advice_of(*(("a", pid) for pid in range(1, 129)))


def test_verbs_agree_with_the_number_of_ranks() -> None:
    accused = RankState(0, 4), RankState(2, 4)
    for count, said in (
        (1, "entered operation 5 and empties no"),
        (2, "entered operation 5 and empty no"),
    ):
        cause = HangCause("not_sent", accused[:count], "operation", 5, what="slots")
        assert said in wording.sentence(cause)


def test_how_far_behind_a_rank_is() -> None:
    group = Group(4, stuck={1: "not_called"})
    states = group.states()
    states[1] = replace(states[1], closed=5, calls=group.done_calls(5))
    said = wording.line(judge(states))
    assert said.startswith("rank 1 has not called operation 12 ")
    assert "; the last that rank 1 entered was 5; " in said


def test_of_a_rank_without_a_state_is_not_said_how_far_it_is() -> None:
    states = Group(4, stuck={1: "not_called"}).states()
    del states[1]
    said = wording.line(judge(states))
    assert said.startswith("rank 1 was never heard of, and it cannot be known which it is: ")
    assert "entered" not in said


def test_nobody_waits() -> None:
    assert wording.line(HangVerdict()) == "no rank waits"


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_says_what_it_is_and_what_to_do(kind: Kind) -> None:
    cause = HangCause(kind, number=3, series="operation")
    assert wording.sentence(cause)
    assert wording.advice(cause)


def test_the_document_explains_every_kind() -> None:
    document = (Path(__file__).parents[2] / "docs/hang.md").read_text(encoding="utf-8")
    missing = [title for title in wording.TITLES.values() if f"| {title} |" not in document]
    assert not missing
    assert set(wording.TITLES) == set(get_args(Kind))
