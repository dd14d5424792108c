"""Who is named when ranks are missing, for every order in which that becomes known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from deep_ep.base.ranks import Decision, Key, Progress, RankPlace
from deep_ep.errors import (
    EPRankGoneError,
    EPTimeoutError,
    EPTransportError,
)
from deep_ep.hang import messages
from deep_ep.hang.cause import HangCause, HangVerdict
from deep_ep.hang.messages import (
    AskProgress,
    Dispatcher,
    Failure,
    FailureReport,
    Message,
    ProgressAnswer,
    RankDied,
    RankLeft,
    Undecided,
    Unmasked,
)
from deep_ep.membership.agreement import LONGEST_S, Arbiter, decide
from deep_ep.ops.failures import error_from_failure
from support.manual_time import ManualTime

OP = Key("operation", 73)
WAITS = Progress(72, 73, True)
IDLE = Progress(72, 0, False)
PLACES = [RankPlace("a", 4708 + rank) for rank in range(4)]


class Ranks(ManualTime):
    """Four ranks around an arbiter, in a time of their own. `at` is what each says when asked; a rank
    that is not in there says nothing.
    """

    def __init__(self, at: dict[int, Progress]) -> None:
        super().__init__()
        self.at = at
        self.told: dict[int, list[Message]] = {rank: [] for rank in range(4)}
        self._asked: list[tuple[int, int]] = []
        self.arbiter = Arbiter(4, self._send, self.call_later, lambda: self.now)
        self.hear = Dispatcher(self.arbiter.handlers())

    def _send(self, rank: int, message: Message) -> None:
        self.told[rank].append(messages.decode(messages.encode(message)))
        if isinstance(message, AskProgress):
            self._asked.append((rank, message.round))

    def report(
        self,
        rank: int,
        missing: list[int],
        failure: Failure = "timeout",
        key: Key = OP,
        masks: bool = False,
    ) -> None:
        self.hear(rank, FailureReport(key, failure, tuple(missing), masks))

    def answer(self) -> None:
        """Everybody who is asked and can answer does, also when that makes the arbiter ask again."""
        while asked := [(rank, number) for rank, number in self._asked if rank in self.at]:
            rank, number = asked[0]
            self._asked.remove((rank, number))
            self.hear(rank, ProgressAnswer(number, self.at[rank]))

    def round(self) -> int:
        """The number of the last question to all."""
        return self._asked[-1][1]

    def pass_time(self, seconds: float = LONGEST_S) -> None:
        super().pass_time(seconds)

    def settle(self) -> None:
        """Everybody answers, and what can be decided is."""
        self.answer()
        self.pass_time()

    def decisions(self, rank: int) -> list[Decision]:
        return [told for told in self.told[rank] if isinstance(told, Decision)]

    def decision(self) -> Decision:
        """The one decision that every rank that lives and answers was told."""
        listening = [rank for rank in self.at if rank not in self.arbiter.dead]
        found = [self.decisions(rank) for rank in listening]
        assert all(decisions == found[0] for decisions in found)
        assert len(found[0]) == 1
        return found[0][0]


# What ranks say, whom they miss, and the decision. Of who gave up for another one's sake, the ranks that gave up before.
@dataclass(frozen=True)
class Case:
    at: dict[int, Progress]
    missed: dict[int, list[int]]
    abandoned: dict[int, list[int]] = field(default_factory=dict)
    masks: bool = False
    culprits: tuple[int, ...] = ()
    paths: tuple[tuple[int, int], ...] = ()


ENDED = Progress(73, 0, False)
SENDS = Progress(72, 73, False)
ALL_WAIT = dict.fromkeys(range(4), WAITS)
CASES = {
    "elsewhere": Case({**ALL_WAIT, 1: IDLE}, {0: [1, 2]}, culprits=(1,)),
    "still sending in the operation": Case(
        {**ALL_WAIT, 1: IDLE, 2: SENDS}, {0: [1, 2]}, culprits=(1,)
    ),
    "gave up for another rank, and says so first": Case(
        {0: WAITS, 2: ENDED, 3: ENDED}, {0: [1]}, {2: [0], 3: [0]}, culprits=(1,)
    ),
    # As in normal operations, whose rows come by way of others.
    "silent, and all who are missed wait themselves": Case(
        {0: WAITS, 2: WAITS, 3: WAITS}, {2: [0]}, {0: [2, 3]}, culprits=(1,)
    ),
    "who gave up first is no source of a path": Case(ALL_WAIT, {0: [1]}, {2: [0]}, paths=((1, 0),)),
    "all wait": Case(ALL_WAIT, {0: [1]}, paths=((1, 0),)),
    # Rank 3 is busy; but its rows have come.
    "masks leave out nobody whom nobody misses": Case(
        {0: WAITS, 1: WAITS, 2: WAITS}, {0: [1]}, masks=True, paths=((1, 0),)
    ),
    "masks: has come and ended": Case(
        {0: WAITS, 1: ENDED, 2: WAITS}, {0: [1]}, masks=True, paths=((1, 0),)
    ),
    "masks: has come and sends": Case(
        {0: WAITS, 1: SENDS, 2: WAITS}, {0: [1]}, masks=True, paths=((1, 0),)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_who_is_named(case: Case) -> None:
    """Whichever is reported first."""
    for order in (1, -1):
        ranks = Ranks(case.at)
        said = [*((r, m, "timeout") for r, m in case.missed.items())]
        said += [(r, m, "abandoned") for r, m in case.abandoned.items()]
        for rank, missing, why in said[::order]:
            ranks.report(rank, missing, why, masks=case.masks)
        ranks.settle()
        decision = ranks.decision()
        assert decision.culprits == case.culprits
        assert decision.paths == case.paths
        for rank, at in decision.elsewhere.items():
            assert at == case.at[rank]
        waiting = {rank for rank, at in case.at.items() if at == WAITS}
        assert decision.waiting.keys() == waiting | {*case.missed, *case.abandoned}


def test_in_a_barrier_who_waits_in_an_operation_is_missing() -> None:
    decision = decide(Key("barrier", 2), {0: [1]}, {1: WAITS}, {}, {})
    assert decision.culprits == (1,)
    assert decision.waiting == {0: 2}


def test_a_dead_rank_is_named_and_who_waits_is_not() -> None:
    ranks = Ranks(dict.fromkeys((0, 1, 2), WAITS))
    ranks.arbiter.lose(3, "process")
    for rank in range(3):
        assert RankDied(3, "process") in ranks.told[rank]
    ranks.report(1, [0, 3])
    ranks.settle()
    decision = ranks.decision()
    assert decision.dead == {3: "process"}
    assert decision.culprits == (3,)
    assert decision.waiting == {0: 73, 1: 73, 2: 73}


def test_ranks_that_die_together_are_named_together() -> None:
    ranks = Ranks({0: WAITS, 1: WAITS, 2: WAITS})
    ranks.arbiter.lose(3, "process")
    ranks.report(1, [3])
    ranks.answer()
    ranks.pass_time(0.05)
    assert not ranks.decisions(0)
    ranks.arbiter.lose(2, "process")
    ranks.pass_time()
    assert ranks.decision().culprits == (2, 3)


def test_who_waits_is_told_even_if_it_answers_a_little_later() -> None:
    ranks = Ranks({0: WAITS, 1: WAITS})
    ranks.arbiter.lose(3, "process")
    ranks.report(1, [3])
    ranks.answer()
    ranks.pass_time(0.2)
    ranks.at[2] = WAITS
    ranks.answer()
    assert ranks.decision().waiting == {0: 73, 1: 73, 2: 73}


@pytest.mark.parametrize("at", [Progress(72, 73, False), Progress(73, 0, False)])
def test_who_gave_up_just_before_it_was_asked_is_among_those_who_waited(at: Progress) -> None:
    """Its answer comes before its report: it does not wait any more."""
    ranks = Ranks({0: WAITS, 1: IDLE, 2: at, 3: WAITS})
    ranks.report(0, [1])
    ranks.answer()
    assert not ranks.decisions(0)
    ranks.report(2, [1])
    ranks.answer()
    decision = ranks.decision()
    assert decision.culprits == (1,)
    assert decision.waiting == {0: 73, 2: 73, 3: 73}


@pytest.mark.parametrize("answers", [True, False])
def test_who_waits_hears_of_a_decision_after_who_left_the_operation_out(answers: bool) -> None:
    """Else what they do together next would find that rank in the operation that has been given up."""
    ranks = Ranks(dict.fromkeys((0, 2, 3), WAITS))
    ranks.report(0, [1])
    ranks.hear(1, ProgressAnswer(ranks.round(), IDLE))
    ranks.answer()
    assert ranks.decisions(1)
    assert not any(ranks.decisions(rank) for rank in (0, 2, 3))
    if answers:
        ranks.at[1] = IDLE
        ranks.answer()
    else:  # it was stopped just now
        ranks.pass_time()
    assert all(ranks.decisions(rank) == ranks.decisions(1) for rank in (0, 2, 3))


def test_a_rank_that_does_not_answer_is_named_only_if_it_is_missing() -> None:
    ranks = Ranks({0: WAITS, 2: WAITS})
    ranks.report(0, [1])
    ranks.answer()
    ranks.pass_time(0.2)
    assert not ranks.decisions(0)
    ranks.pass_time()
    decision = ranks.decision()
    assert decision.silent == decision.culprits == (1,)
    assert decision.waiting == {0: 73, 2: 73}


def test_operations_are_decided_in_their_order() -> None:
    """Rank 2 has got all that rank 1 owed it, and is one ahead of the others."""
    ranks = Ranks({0: Progress(73, 0, False), 2: Progress(73, 74, True), 3: Progress(73, 0, False)})
    ranks.report(0, [1])
    ranks.answer()
    ranks.report(2, [0, 1, 3], key=Key("operation", 74))
    ranks.answer()
    ranks.report(3, [1])
    ranks.pass_time()
    assert [decision.key.op for decision in ranks.decisions(2)] == [73, 74]
    assert [decision.culprits for decision in ranks.decisions(2)] == [(1,), (1,)]


@pytest.mark.parametrize("at", [Progress(73, 0, False), Progress(72, 73, False)])
def test_who_failed_one_operation_before_is_not_named_beside_the_dead(at: Progress) -> None:
    """Its report comes behind those of ranks that were one ahead."""
    ahead = Progress(73, 74, True)
    ranks = Ranks({0: at, 2: ahead, 3: ahead})
    ranks.arbiter.lose(1, "process")
    ranks.report(2, [0, 1], key=Key("operation", 74))
    ranks.answer()
    ranks.pass_time(0.15)
    assert not ranks.decisions(0)
    ranks.report(0, [1])
    ranks.settle()
    assert [decision.culprits for decision in ranks.decisions(2)] == [(1,), (1,)]


def test_who_is_asked_for_two_decisions_answers_for_both() -> None:
    """It did not have the time to answer for the first before the second."""
    ranks = Ranks({0: WAITS, 2: Progress(73, 74, True), 3: WAITS})
    ranks.report(0, [1])
    ranks.report(2, [1, 3], key=Key("operation", 74))
    ranks.arbiter.lose(1, "process")
    ranks.settle()
    assert [decision.culprits for decision in ranks.decisions(2)] == [(1,), (1,)]


def test_all_are_told_the_first_decision() -> None:
    ranks = Ranks({0: WAITS, 1: IDLE, 2: WAITS, 3: WAITS})
    ranks.report(0, [1])
    ranks.answer()
    first = ranks.decision()
    ranks.at[1] = WAITS
    ranks.report(2, [0, 1, 3])
    ranks.report(3, [1], "abandoned")
    assert ranks.decisions(2) == ranks.decisions(3) == [first, first]


def test_a_stopped_rank_is_told_when_it_goes_on() -> None:
    ranks = Ranks({0: WAITS, 2: WAITS, 3: WAITS})
    ranks.report(0, [1])
    ranks.settle()
    assert not ranks.decisions(1)
    ranks.at[1] = IDLE
    ranks.answer()
    assert ranks.decisions(1) == [ranks.decision()]


def test_a_stopped_rank_is_not_asked_again_and_again() -> None:
    ranks = Ranks({0: WAITS, 2: WAITS, 3: WAITS})
    for op in range(80, 90):
        ranks.report(0, [1], key=Key("operation", op))
        ranks.settle()
    assert len(ranks.told[1]) == 1
    assert [decision.culprits for decision in ranks.decisions(0)] == [(1,)] * 10


def test_who_gave_up_for_another_rank_is_not_named_in_the_next_operation() -> None:
    ranks = Ranks({0: WAITS, 2: Progress(73, 74, True), 3: WAITS})
    ranks.report(0, [1])
    ranks.settle()
    ranks.at.update({0: Progress(73, 0, False), 3: Progress(73, 0, False)})
    ranks.report(2, [0, 1, 3], key=Key("operation", 74))
    ranks.settle()
    assert ranks.decisions(2)[-1].culprits == (1,)


def test_a_rank_that_ended_is_missing_after_its_last_operation_only() -> None:
    for closed, culprits in ((72, (3,)), (73, ())):
        ranks = Ranks(dict.fromkeys(range(3), WAITS))
        ranks.hear(3, RankLeft(3, closed))
        ranks.report(0, [3])
        ranks.answer()
        assert ranks.decision().culprits == culprits


def test_a_closed_connection_after_a_goodbye_is_no_death() -> None:
    ranks = Ranks(dict.fromkeys(range(3), WAITS))
    ranks.hear(3, RankLeft(3, 73))
    ranks.arbiter.lose(3, "process")
    assert not ranks.arbiter.dead


def test_who_waits_in_destroy_hears_who_else_has_come_there_and_can_be_asked() -> None:
    ranks = Ranks(dict.fromkeys(range(3), WAITS))
    arbiter = ranks.arbiter
    for rank in (3, 1):
        ranks.hear(rank, RankLeft(rank, 73, parts=True))

    def told() -> list[tuple[int, int]]:
        return [
            (rank, message.rank)
            for rank, told in sorted(ranks.told.items())
            for message in told
            if isinstance(message, RankLeft)
        ]

    before = told()
    assert {(3, 1), (1, 3), (0, 1), (2, 3)} <= set(before)
    assert not arbiter.away()
    ranks.hear(1, RankLeft(1, 73))
    arbiter.lose(3, "process")
    assert (arbiter.away(), arbiter.dead) == ({1, 3}, {})
    assert told() == before


def test_who_sees_first_that_others_gave_up_waits_for_their_reason() -> None:
    ranks = Ranks({0: IDLE, 1: IDLE, 2: WAITS, 3: WAITS})
    ranks.report(2, [0], "abandoned")
    ranks.pass_time(0.01)
    assert not ranks.decisions(2)
    ranks.report(0, [1])
    ranks.settle()
    assert ranks.decision().culprits == (1,)
    assert not [told for told in ranks.told[2] if isinstance(told, Undecided)]


@pytest.mark.parametrize("said", [True, False])
def test_who_saw_that_others_gave_up_for_another_reason_is_told_that_nobody_is_missing(
    said: bool,
) -> None:
    ranks = Ranks({})
    if said:
        ranks.report(0, [], "other")
    ranks.report(2, [0], "abandoned")
    ranks.pass_time()
    assert ranks.told[2] == [Undecided(OP)]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (RankDied(1, "process"), "nobody here handles RankDied"),
        (FailureReport(OP, "timeout", (4,)), "rank 4 of 4 does not exist"),
    ],
    ids=["class", "rank"],
)
def test_a_wrong_message_is_refused(message: Message, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Ranks({}).hear(1, message)


# ---- words


FAILURE: dict[str, Any] = {
    "reason": "timeout",
    "operation": "low_latency_dispatch",
    "op": 73,
    "ranks": [0, 3],
    "last_op": {0: 73, 3: 72},
    "given_up": {0: 0, 3: 0},
    "waited_ns": 100_000_000_000,
}


def words(decision: Decision, rank: int = 1) -> str:
    return str(error_from_failure(FAILURE, rank, decision, PLACES)).partition(": ")[2]


def test_the_error_says_who_is_dead_and_who_waits() -> None:
    decision = Decision(OP, dead={3: "process"}, waiting={0: 73, 1: 73, 2: 73})
    error = error_from_failure(FAILURE, 1, decision, PLACES)
    assert type(error) is EPRankGoneError
    assert error.missing_ranks == error.dead_ranks == (3,)
    assert error.waiting_ranks == (0, 1, 2)
    assert error.last_seen == {3: 72}
    assert str(error).startswith(
        "low_latency_dispatch (operation 73) on rank 1: rank 3 is dead (its process 4711 on host a "
        "ended); ranks 0-2 wait for it in operation 73."
    )
    assert words(decision, 0) == words(decision, 2)


def test_paths_that_the_inquiry_found_are_those_of_the_error() -> None:
    """Who waits for rank 0, which waits for its own row, says so too once it gives up."""
    decision = Decision(OP, paths=((0, 2),), waiting={0: 73, 2: 73})
    cause = HangCause(
        "not_arrived", (), "operation", 73, "low_latency_dispatch", "rows", paths=((1, 0),)
    )
    verdict = HangVerdict(buffer="b0", num_ranks=4, ranks_per_node=0, causes=(cause,))
    error = error_from_failure(FAILURE, 2, decision, PLACES, verdict)
    assert isinstance(error, EPTimeoutError)
    assert (error.missing_ranks, error.broken_paths) == ((), ((1, 0),))
    assert "1 > 0" in str(error)
    assert "0 > 2" not in str(error)


def test_the_error_says_where_the_others_are() -> None:
    decision = Decision(
        OP,
        left={0: 70},
        silent=(1,),
        elsewhere={2: Progress(72, 0, False)},
        waiting={3: 74},
    )
    text = words(decision, 3)
    assert "rank 0 destroyed its buffer, or ended, after operation 70" in text
    assert "rank 1 does not answer (process 4709 on host a is stopped or busy)" in text
    assert "rank 2 is between operations, after operation 72" in text
    assert "rank 3 waits for them in operation 74" in text
    assert "host a cannot be reached" in words(Decision(OP, dead={3: "host"}))


def test_a_broken_path_names_no_rank_as_missing() -> None:
    decision = Decision(OP, waiting={0: 73, 1: 73}, paths=((1, 0),))
    error = error_from_failure(FAILURE, 0, decision, PLACES)
    assert type(error) is EPTimeoutError
    assert error.missing_ranks == ()
    assert error.broken_paths == ((1, 0),)
    assert "did not arrive on the paths 1 > 0; ranks 0-1 wait in operation 73" in str(error)


ABANDONED = {"reason": "abandoned", "ranks": [0, 2], "given_up": {0: 73, 2: 73}}


@pytest.mark.parametrize(
    ("failure", "decision", "given_up"),
    [
        ({}, Decision(Key("operation", 74), silent=(1,), waiting={0: 74, 2: 74}), 74),
        # It was missing, and is back before the decision: it gives up for the others' sake, who have waited in vain.
        (ABANDONED, Decision(OP, waiting={0: 73, 1: 73, 2: 73}, paths=((1, 0), (1, 2))), 73),
        # It was stopped for longer than the others waited: they are two operations on, and gave up the one between.
        ({}, Decision(OP, waiting={1: 73, 0: 75, 2: 75}, paths=((2, 1),)), 74),
    ],
    ids=["late", "back-before-the-decision", "stopped-for-longer"],
)
def test_the_late_rank_is_told_what_the_others_gave_up_and_no_broken_path(
    failure: dict[str, Any], decision: Decision, given_up: int
) -> None:
    error = error_from_failure({**FAILURE, **failure}, 1, decision, PLACES)
    assert type(error) is EPTransportError
    said = f"ranks 0, 2 gave up operation {given_up} while this rank was in operation 73"
    assert said in str(error)


def test_who_is_one_operation_behind_the_others_is_told_the_broken_path() -> None:
    one_on = Decision(OP, waiting={1: 73, 0: 74, 2: 74}, paths=((2, 1),))
    error = error_from_failure(FAILURE, 1, one_on, PLACES)
    assert "did not arrive on the paths 2 > 1" in str(error)


# ---- ranks that operations go on without


def test_who_is_masked_names_nobody_until_it_is_back() -> None:
    """All others go on without it, so it misses them."""
    ranks = Ranks({0: IDLE, 1: IDLE, 2: IDLE, 3: IDLE})
    ranks.report(0, [3], masks=True)
    ranks.settle()
    assert ranks.decision().culprits == (3,)
    later = Key("operation", 74)
    ranks.report(3, [0, 1, 2], key=later, masks=True)
    ranks.settle()
    assert ranks.told[3][-1] == Undecided(later)
    assert len(ranks.decisions(0)) == 1
    ranks.hear(3, Unmasked())
    ranks.report(3, [2], key=Key("operation", 80), masks=True)
    ranks.settle()
    assert ranks.decisions(0)[-1].culprits == (2,)


def test_who_waits_for_a_decision_is_missed_in_one_operation_and_named_in_the_next() -> None:
    ranks = Ranks({0: WAITS, 1: Progress(73, 0, False), 2: WAITS})
    ranks.report(1, [3], masks=True)
    ranks.settle()
    for op, named in ((74, ()), (75, (1,))):
        ranks.report(0, [1], key=Key("operation", op), masks=True)
        ranks.at[0] = Progress(op - 1, op, True)
        ranks.settle()
        assert ranks.decisions(0)[-1].culprits == named
