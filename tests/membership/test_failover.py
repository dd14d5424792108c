"""Inquiries that rank 0 does not lead: who does, what the others say, and what is found out."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deep_ep
from deep_ep.base.ranks import RankPlace
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.messages import AskState, InquiryRequest, InquiryVerdict, Message
from deep_ep.membership.channel import greeting
from deep_ep.membership.failover import LAST_WORDS_S, InquiryFailover
from membership.connected_ranks import connected, heard_until_closed
from support.launch import HANG_S
from support.manual_time import ManualTime
from support.waiting import eventually
from trials.many import run_trial
from trials.rank import Trial

STUCK = InquiryRequest(final=False)
BEGIN, VERDICT = AskState(1, 3), InquiryVerdict(HangVerdict(), {})


class Rank3(ManualTime):
    """The view of rank 3, in a time of its own."""

    def __init__(self, *unreachable: int) -> None:
        super().__init__()
        self.asked: list[int] = []
        loop: Any = SimpleNamespace(call_later=self.call_later, aside=None)
        member: Any = SimpleNamespace(rank=3, dead={}, left={})
        self.failover = InquiryFailover(
            loop,
            member,
            [RankPlace("here", 1)] * 4,
            0,
            lambda rank: rank not in unreachable,
            self._ask,
        )

    def _ask(self, rank: int, _: Message) -> None:
        self.asked.append(rank)


def test_one_rank_after_the_other_is_asked_until_an_inquiry_begins() -> None:
    rank_3 = Rank3()
    rank_3.failover.request(STUCK)
    assert rank_3.asked == [0]
    rank_3.pass_time(0.6)
    assert rank_3.asked == [0, 1]
    rank_3.failover.hear_of(1, BEGIN)
    rank_3.pass_time(1.0)
    rank_3.failover.hear_of(1, VERDICT)
    rank_3.pass_time(10.0)
    assert rank_3.asked == [0, 1]
    rank_3.failover.request(STUCK)
    assert rank_3.asked == [0, 1, 1]


def test_without_an_answer_of_anybody_a_rank_leads_itself_and_nobody_above_it() -> None:
    rank_3 = Rank3()
    rank_3.failover.request(STUCK)
    rank_3.pass_time(60.0)
    assert rank_3.asked == [0, 1, 2, 3]


def test_ranks_that_cannot_be_asked_cost_no_time() -> None:
    rank_3 = Rank3(0, 2)
    rank_3.failover.request(STUCK)
    assert rank_3.asked == [1]
    rank_3.pass_time(0.6)
    assert rank_3.asked == [1, 3]


def test_who_begins_and_comes_to_no_verdict_is_followed_by_the_next() -> None:
    rank_3 = Rank3()
    rank_3.failover.request(STUCK)
    rank_3.failover.hear_of(0, BEGIN)
    rank_3.pass_time(1.9)
    assert rank_3.asked == [0]
    rank_3.pass_time(0.2)
    assert rank_3.asked == [0, 1]


def test_a_request_while_an_inquiry_is_open_waits_for_its_verdict() -> None:
    rank_3 = Rank3()
    rank_3.failover.hear_of(0, BEGIN)
    rank_3.failover.request(STUCK)
    rank_3.pass_time(1.9)
    rank_3.failover.hear_of(0, VERDICT)
    rank_3.pass_time(10.0)
    assert rank_3.asked == [0]


def test_a_lower_rank_that_answers_after_all_is_asked_first_again() -> None:
    rank_3 = Rank3()
    rank_3.failover.request(STUCK)
    rank_3.pass_time(1.1)
    rank_3.failover.hear_of(0, VERDICT)
    rank_3.failover.request(STUCK)
    assert rank_3.asked == [0, 1, 2, 0]


@pytest.mark.parametrize(("unreachable", "begins"), [((0, 1, 2), [3]), ((0,), [])])
def test_what_all_know_only_who_leads_begins(unreachable: tuple[int, ...], begins: Any) -> None:
    rank_3 = Rank3(*unreachable)
    rank_3.failover.lose_rank_0()
    rank_3.pass_time(LAST_WORDS_S)
    assert rank_3.asked == begins
    rank_3.pass_time(0.6)
    assert rank_3.asked == (begins or [2])


# --- over connections -----------------------------------------------------------------------------


def test_a_rank_believes_others_only_what_they_may_say() -> None:
    with connected(3) as ranks:
        loop: Any = ranks[1].member.endpoint
        assert loop.channel.server.getsockname()[0] == "127.0.0.1"
        token = loop.channel._token
        dead = b'{"type": "RankDied", "rank": 0, "how": "process"}\n'
        state = b'{"type": "StateReport", "inquiry": 1, "state": []}\n'
        for greets, then in (
            (greeting("0" * len(token), 2), b""),
            (greeting(token, 0), b""),
            (greeting(token, 2), dead),
            (greeting(token, 2), state),
        ):
            with socket.create_connection(ranks[1].member.address, HANG_S) as stranger:
                stranger.sendall(greets + then)
                heard = heard_until_closed(stranger)
            assert bool(heard) == bool(then)
        assert ranks[1].native.gone == []
        assert ranks[0].agree([2]) is not None


def test_rank_0_is_heard_again_when_another_rank_has_led_meanwhile() -> None:
    with connected(3) as ranks:
        loop_0: Any = ranks[0].member.endpoint
        loop_1: Any = ranks[1].member.endpoint
        is_led, goes_on = threading.Event(), threading.Event()
        loop_1._failover._inquiries.announce = lambda *_: is_led.set() or VERDICT
        loop_0.post(goes_on.wait)
        loop_1.post(lambda: loop_1.say(1, STUCK))
        assert is_led.wait(HANG_S)
        goes_on.set()
        assert ranks[1].agree([2]) is not None
        assert not ranks[1].member.alone
        assert not ranks[1].member.dead


def test_doors_are_closed_with_their_ranks() -> None:
    with connected(2) as ranks:
        address = ranks[1].member.address
        assert address is not None
        ranks[1].member.close()

        def is_closed() -> bool:
            try:
                socket.create_connection(address, HANG_S).close()
            except ConnectionRefusedError:
                return True
            except ConnectionResetError:  # in the moment of its end
                pass
            return False

        assert eventually(is_closed)


# --- in a group of processes ------------------------------------------------------------------------

processes_only = pytest.mark.skipif(
    deep_ep.native.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
)


@pytest.mark.exhaustive
@processes_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "leads"),
    [
        # It loops, and its thread answers; nobody else logs.
        ({0: "holds the GIL in C", 1: "loops in Python"}, 1),
        ({0: "stopped", 1: "holds the GIL in C", 2: "holds the GIL in C"}, 3),
    ],
)
def test_all_faults_are_named_although_rank_0_does_not_answer(
    victims: dict[int, str], leads: int, tmp_path: Path
) -> None:
    trial = Trial(1, "low latency", 4, 4, victims, at_combine=False)
    judged = run_trial(trial, DEEP_EP_DUMP_DIR=str(tmp_path), DEEP_EP_TIMEOUT_S="6")
    assert judged.is_right, judged
    assert (judged.first_line_s is None) == (leads in victims)
    (written,) = tmp_path.rglob("verdict.hang.json")
    causes = HangVerdict.of(json.loads(written.read_text())).causes
    assert {rank for cause in causes for rank in cause.ranks} == victims.keys()


@processes_only
def test_the_death_of_rank_0_is_logged_by_the_next_one() -> None:
    judged = run_trial(Trial(2, "normal", 4, 4, {0: "killed"}, at_combine=True))
    assert judged.is_right, judged
    assert judged.first_line_s is not None
