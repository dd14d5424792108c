"""Verdicts on ranks that wait without a kernel: in `Buffer()` and in `destroy()`."""

from __future__ import annotations

from dataclasses import replace

from deep_ep.hang import wording
from deep_ep.hang.rank_calls import DESTRUCTION
from deep_ep.hang.states import RankState, Waits
from deep_ep.hang.verdict import judge
from made_up_ranks import TRAIN, Group, thread


def leaving(rank: int, missing: tuple[int, ...], num_ranks: int = 4) -> RankState:
    """A rank that waits in destroy()."""
    waits = Waits(DESTRUCTION, 1, 12.0, {"entry": missing})
    return RankState(rank, num_ranks, process="ended", closed=7, waits=waits, written_by=rank)


def test_who_has_not_called_destroy_is_named_with_what_it_does() -> None:
    states = {rank: leaving(rank, (3,)) for rank in range(3)}
    states[3] = RankState(3, 4, closed=7, threads=thread(TRAIN), written_by=3)
    assert wording.line(judge(states)) == (
        "rank 3 has not called destroy(); its main thread runs (/home/user/train.py line 41, step); "
        "ranks 0-2 wait for it, for 12 s"
    )


def test_a_rank_that_is_still_in_an_operation_hands_the_blame_on() -> None:
    states = Group(4, stuck={1: "not_called"}).states()
    states[3] = leaving(3, (0, 1, 2))
    verdict = judge(states)
    assert [(cause.kind, cause.ranks) for cause in verdict.causes] == [("not_called", (1,))]
    assert verdict.causes[0].waited_by == (0, 2, 3)


def test_who_left_before_the_operation_of_others_is_the_reason_although_it_waits_for_them() -> None:
    states = Group(4, stuck={1: "ended"}).states()
    states[1] = replace(leaving(1, (0, 2, 3)), closed=11)
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks, cause.waited_by) == ("ended", (1,), (0, 2, 3))


def test_who_has_come_to_destroy_since_is_no_reason() -> None:
    states = {0: leaving(0, (1,), 2), 1: leaving(1, (), 2)}
    assert judge(states).causes == ()


def test_a_process_that_ended_without_destroy_is_the_reason() -> None:
    states = {0: leaving(0, (1,), 2), 1: RankState(1, 2, process="ended", closed=7, written_by=0)}
    assert "rank 1 destroyed its buffer, or ended, before destroy()" in wording.line(judge(states))
