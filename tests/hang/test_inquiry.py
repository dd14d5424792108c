"""How rank 0 comes to a verdict: whom it asks, who looks at ranks that do not answer, and what is told."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deep_ep
from deep_ep.base.ranks import RankPlace
from deep_ep.diagnose.__main__ import main
from deep_ep.errors import EPTimeoutError
from deep_ep.hang import messages, stacks
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.hang_watch import HangWatch
from deep_ep.hang.inquiry import Inquiries, Inquiry
from deep_ep.hang.messages import (
    AskState,
    Dispatcher,
    InquiryRequest,
    InquiryVerdict,
    Message,
    RankLeft,
    RankRaised,
    StateReport,
)
from deep_ep.hang.states import RankState, Waits
from deep_ep.membership.agreement import Arbiter
from made_up_ranks import Group
from support.exchange import Mode, Shape, dispatch, make_inputs
from support.launch import Ranks
from support.manual_time import ManualTime
from support.waiting import eventually

PLACES = [RankPlace("a", 100), RankPlace("a", 101), RankPlace("b", 102), RankPlace("b", 103)]
# Ranks 0 to 2 wait for rank 3, which is elsewhere.
GROUP = Group(4, number=7, stuck={3: "not_called"})
STATES = GROUP.states()
WAITING = {rank: STATES[rank] for rank in range(3)}


class Rank0(ManualTime):
    """Inquiries on four ranks, in a time of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, Message]] = []
        self.ended: list[tuple[Inquiry, Mapping[int, RankState], HangVerdict]] = []
        self.arbiter = Arbiter(4, self._send, self.call_later, lambda: self.now)
        self.inquiries = Inquiries(
            *(PLACES, 4, self.arbiter, self._send, self.call_later),
            aside=lambda action, then: then(action()),
        )
        self.inquiries.announce = self._announce  # type: ignore[method-assign]
        self._take = Dispatcher(self.arbiter.handlers(), self.inquiries.handlers())

    def _send(self, rank: int, message: Message) -> None:
        self.sent.append((rank, messages.decode(messages.encode(message))))

    def _announce(self, *ended: Any) -> InquiryVerdict:
        self.ended.append(ended)
        return InquiryVerdict(ended[-1], {})

    def hear(self, by: int, message: Message) -> None:
        self._take(by, messages.decode(messages.encode(message)))

    def asked(self) -> list[int]:
        return sorted(rank for rank, message in self.sent if message == AskState(1, rank))

    def answer(self, states: dict[int, RankState]) -> None:
        for rank, message in list(self.sent):
            if isinstance(message, AskState) and rank == message.rank and rank in states:
                self.hear(rank, StateReport(message.inquiry, states[rank]))

    def causes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(cause.kind, cause.ranks) for cause in self.ended[-1][-1].causes]


def test_who_waits_has_all_asked_and_the_verdict_follows_from_the_answers() -> None:
    rank_0 = Rank0()
    rank_0.hear(1, InquiryRequest(False))
    assert rank_0.asked() == [0, 1, 2, 3]
    rank_0.answer(WAITING)
    assert not rank_0.ended
    rank_0.answer({3: STATES[3]})
    assert rank_0.causes() == [("not_called", (3,))]
    assert not rank_0.ended[0][0].is_final
    told = [(rank, m.verdict) for rank, m in rank_0.sent if isinstance(m, InquiryVerdict)]
    assert told == [(rank, rank_0.ended[0][-1]) for rank in range(4)]


def test_a_rank_that_does_not_answer_is_looked_at_by_one_of_its_host() -> None:
    rank_0 = Rank0()
    rank_0.hear(3, StateReport(0, STATES[3]))
    rank_0.hear(0, InquiryRequest(True))
    rank_0.answer(WAITING)
    rank_0.pass_time(1.0)
    rank, look = rank_0.sent[-1]
    assert rank == 2
    assert look == AskState(1, 3)
    rank_0.hear(2, StateReport(1, RankState(3, 4, process="stopped")))
    assert rank_0.causes() == [("stopped", (3,))]
    assert rank_0.ended[0][0].is_final


def test_without_anybody_of_its_host_it_is_said_that_nothing_is_known() -> None:
    rank_0 = Rank0()
    rank_0.hear(0, InquiryRequest(False))
    rank_0.answer({0: STATES[0], 1: STATES[1]})
    rank_0.pass_time(1.0)
    assert all(rank == m.rank for rank, m in rank_0.sent if isinstance(m, AskState))
    assert ("unknown", (3,)) in rank_0.causes()


def test_the_dead_are_not_asked_and_are_named() -> None:
    rank_0 = Rank0()
    rank_0.arbiter.dead[3] = "process"
    rank_0.hear(2, StateReport(0, RankState(3, 4, exit="signal 9")))
    rank_0.inquiries.ask(is_final=True)
    assert rank_0.asked() == [0, 1, 2]
    rank_0.answer(WAITING)
    assert rank_0.causes() == [("gone", (3,))]
    assert rank_0.ended[-1][-1].causes[0].accused[0].exit == "signal 9"


def test_who_waits_in_destroy_is_asked_and_has_ended_for_the_others() -> None:
    rank_0 = Rank0()
    rank_0.hear(1, RankLeft(1, 6, parts=True))
    rank_0.sent.clear()
    rank_0.hear(1, InquiryRequest(False))
    assert rank_0.asked() == [0, 1, 2, 3]
    waits = Waits("destruction", 1, 12.0, {"entry": (0, 2, 3)})
    parting = RankState(1, 4, waits=waits, written_by=1)
    states = {rank: GROUP.state(rank) for rank in (0, 2, 3)}
    rank_0.answer({**states, 1: parting})
    assert rank_0.causes() == [("not_called", (0, 2, 3))]
    rank_0.hear(0, InquiryRequest(False))
    rank_0.sent = [sent for sent in rank_0.sent if isinstance(sent[1], AskState)][-4:]
    owed = Waits("operation", 7, 3.0, {"entry": (1,)})
    rank_0.answer({**states, 0: replace(STATES[0], waits=owed), 1: parting})
    assert ("ended", (1,)) in rank_0.causes()


def test_an_exception_that_ended_a_program_is_told_to_all_and_stays_known() -> None:
    rank_0 = Rank0()
    rank_0.hear(3, RankRaised(3, "ValueError: no batch at train.py:12 in step"))
    assert [rank for rank, m in rank_0.sent if isinstance(m, RankRaised)] == [0, 1, 2, 3]
    rank_0.arbiter.left[3] = 6
    rank_0.hear(0, InquiryRequest(False))
    rank_0.answer(WAITING)
    assert rank_0.ended[-1][1][3].raised.startswith("ValueError")


def test_an_old_answer_belongs_to_no_new_inquiry() -> None:
    rank_0 = Rank0()
    rank_0.hear(0, InquiryRequest(False))
    rank_0.pass_time(1.0)
    rank_0.pass_time(1.0)
    assert len(rank_0.ended) == 1
    rank_0.hear(0, InquiryRequest(False))
    rank_0.hear(3, StateReport(1, STATES[3]))
    rank_0.answer({})
    assert len(rank_0.ended) == 1


def test_a_dump_that_is_asked_for_meanwhile_comes_with_the_verdict() -> None:
    rank_0 = Rank0()
    rank_0.hear(0, InquiryRequest(False))
    rank_0.hear(1, InquiryRequest(False, "/somewhere"))
    rank_0.answer(STATES)
    assert rank_0.ended[0][0].dump_to == ["/somewhere"]


def test_who_hands_over_comes_to_no_verdict_of_its_own() -> None:
    rank_0 = Rank0()
    rank_0.hear(1, InquiryRequest(False))
    rank_0.inquiries.drop()
    rank_0.answer(STATES)
    rank_0.pass_time(1.0)
    rank_0.pass_time(1.0)
    assert not rank_0.ended
    rank_0.hear(1, InquiryRequest(False))
    rank_0.pass_time(2.0)
    assert rank_0.ended


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"type":"StateReport","inquiry":1,"state":[]}', "state is .*; expected an object"),
        ('{"type":"InquiryRequest","final":true,"more":1}', "more is no field of InquiryRequest"),
        (
            '{"type":"FailureReport","key":{"series":"operation","op":-1},"failure":"timeout","missing":[]}',
            "-1",
        ),
        ('{"type":"Frame"}', "type is 'Frame'"),
        ("3", "no object"),
    ],
)
def test_what_is_no_message_is_refused_and_says_why(line: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        messages.decode(line.encode())


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (StateReport(1, RankState(3, 5)), "rank 3 of 4 tells of rank 3 of 5"),
        (StateReport(1, RankState(1, 4)), "tells of rank 1 of 4, which does not run beside it"),
        (AskState(1, 3), "nobody here handles AskState"),
    ],
)
def test_what_a_rank_may_not_say_is_refused(message: Message, error: str) -> None:
    rank_0 = Rank0()
    rank_0.hear(0, InquiryRequest(False))
    with pytest.raises(ValueError, match=error):
        rank_0.hear(3, message)


# --- a rank's own part ----------------------------------------------------------------------------


class OwnRecorder:
    """Says what the test says."""

    buffer = "b0"

    def __init__(self) -> None:
        self.now: Waits | None = None

    def waits(self) -> Waits | None:
        return self.now

    def place(self) -> tuple[int, int]:
        return 1, 1

    def state(self, most_calls: int, with_threads: bool) -> RankState:
        return RankState(1, 4, host="a", waits=self.now)


def waits_for(seconds: float, number: int = 7) -> Waits:
    return Waits("operation", number, seconds, {"rows": (3,)})


def test_a_rank_says_that_it_waits_once_then_rarely_and_once_before_the_end() -> None:
    said: list[Message] = []
    watch, own = HangWatch(1, said.append), OwnRecorder()
    watch.begin(own, 10.0, 100.0, PLACES, [None] * 4)  # type: ignore[arg-type]
    told = []
    for seconds in (None, 1.0, 9.9, 10.1, 11.0, 39.0, 41.0, 96.0, 97.1, 99.0):
        own.now = None if seconds is None else waits_for(seconds)
        watch.look()
        told.append([m.final for m in said if isinstance(m, InquiryRequest)])
    watch.close()
    assert told[2] == []
    assert told[3] == told[5] == [False]
    assert told[6] == told[7] == [False, False]
    assert told[8] == told[9] == [False, False, True]


def test_zero_seconds_warn_of_nothing_but_the_end_is_told() -> None:
    said: list[Message] = []
    watch, own = HangWatch(1, said.append), OwnRecorder()
    watch.begin(own, 10.0, 100.0, PLACES, [None] * 4)  # type: ignore[arg-type]
    watch.warn_after(0.0)
    for seconds in (11.0, 50.0, 98.0):
        own.now = waits_for(seconds)
        watch.look()
    watch.close()
    assert [m.final for m in said if isinstance(m, InquiryRequest)] == [True]


def test_who_ends_after_rank_0_is_not_called_dead_and_who_was_dead_before_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = {100: "gone", 101: "busy", 102: "gone", 103: "busy", 104: "gone"}
    monkeypatch.setattr(stacks, "process_of", lambda pid, _: processes[pid])
    said: list[Message] = []
    watch, own = HangWatch(1, said.append), OwnRecorder()
    places = [RankPlace("a", pid) for pid in processes]
    watch.begin(own, 10.0, 100.0, places, [{"fd": -1}] * 5)  # type: ignore[arg-type]
    own.now = waits_for(1.0)
    watch.lose_rank_0("gone", left=[4])
    found = watch.verdict_on("low_latency_dispatch", 7)
    assert found is not None
    assert found.ranks == (0, 2)
    processes[103] = "gone"
    for rank in (2, 3):
        said.append(watch.inspect(AskState(1, rank)).state)
    watch.close()
    assert [(one.rank, one.process) for one in said] == [(2, "gone"), (3, "silent")]


# --- dumps for who asks -----------------------------------------------------------------------------

_PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import deep_ep
rank = int(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
size = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 256, 2, 4)
buffer = deep_ep.Buffer(dist.group.WORLD, 0, size, low_latency_mode=True)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.exhaustive
def test_a_process_is_asked_for_a_dump_and_says_how_another_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with contextlib.ExitStack() as stack:
        ranks, lines = [], []
        for rank in range(2):
            command = [sys.executable, "-c", _PROGRAM, str(rank), str(tmp_path / "store")]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
            assert process.stdout is not None
            lines.append(iter(process.stdout.readline, ""))
        assert all("ready\n" in said for said in lines)
        into = tmp_path / "dump"
        assert main(["dump", str(ranks[1].pid), "--into", str(into), "--timeout", "60"]) == 0
        assert "no rank waits" in capsys.readouterr().out
        assert {"0.hang.json", "1.hang.json"} < {path.name for path in into.glob("*/*")}
        # Its parent has not asked for the status yet.
        ranks[1].kill()
        said = next(line for line in lines[0] if "is dead" in line)
        assert f"rank 1 is dead: the process is gone (process {ranks[1].pid} on host" in said
        assert "signal 9)" in said


# --- in a group -----------------------------------------------------------------------------------


def test_a_warning_names_who_has_not_called_and_the_exception_and_the_dump_say_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = tmp_path / "with blanks"
    for name, value in (("WARN_S", "0.3"), ("TIMEOUT_S", "3"), ("DUMP_DIR", str(folder))):
        monkeypatch.setenv(f"DEEP_EP_{name}", value)
    shape = Shape((8, 5), 8, 256, 4, 2)
    inputs = make_inputs(shape)
    has_raised = threading.Event()

    def run(rank: int, buffer: deep_ep.Buffer) -> tuple[EPTimeoutError] | None:
        dispatch(buffer, inputs[rank], shape, Mode())
        if rank == 1:
            has_raised.wait(30)
            return None
        with pytest.raises(EPTimeoutError) as raised:
            dispatch(buffer, inputs[rank], shape, Mode())
        has_raised.set()
        return (raised.value,)

    with caplog.at_level(logging.WARNING, "deep_ep"), Ranks(2, 8, 256, 4) as ranks:
        (error,) = ranks.run(run)[0]
        ranks.buffers[1].dump_state(tmp_path / "asked")
        assert eventually((tmp_path / "asked" / "verdict.hang.json").exists, 20)
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        "rank 1 has not called operation 2 (low_latency_dispatch)" in line
        and "rank 0 waits for it" in line
        for line in lines
    )
    assert error.verdict is not None
    assert error.verdict.ranks == error.missing_ranks == (1,)
    assert "its thread" in str(error) or "its main thread" in str(error)
    written = {path.name for path in tmp_path.rglob("*.hang.json")}
    assert written == {"0.hang.json", "1.hang.json", "verdict.hang.json"}
    assert any(f" hang '{folder}/" in line for line in lines), "a line that can be pasted"
