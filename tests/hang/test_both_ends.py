"""Verdicts on ranks that wait without a kernel: in `Buffer()` and in `destroy()`."""

from __future__ import annotations

from dataclasses import replace

from deep_ep.hang import wording
from deep_ep.hang.states import CONSTRUCTION, DESTRUCTION, RankState, Waits
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


def test_who_destroys_another_buffer_first_is_not_said_to_be_where_it_has_not_come_to() -> None:
    states = {0: leaving(0, (1,), 2), 1: RankState(1, 2, in_call="destroy", written_by=1)}
    (cause,) = judge(states).causes
    assert wording.sentence(cause) == (
        "rank 1 is in destroy() of another buffer, or waits there for its own work; rank 0 waits for it, for 12 s"
    )
    assert wording.advice(cause).startswith("All ranks must make and destroy buffers in the same ")


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


def test_no_path_is_accused_where_rank_0_cannot_pass_on_who_has_come_to_destroy() -> None:
    states = {
        r: replace(leaving(r, missing), process="alive")
        for r, missing in ((1, (0, 2)), (2, (0, 1)))
    }
    states[0] = RankState(0, 3, process="stopped", written_by=1)
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks, cause.waited_by) == ("stopped", (0,), (1, 2))


def test_a_process_that_ended_without_destroy_is_the_reason() -> None:
    states = {0: leaving(0, (1,), 2), 1: RankState(1, 2, process="ended", closed=7, written_by=0)}
    assert "rank 1 destroyed its buffer, or ended, before destroy()" in wording.line(judge(states))


def building(rank: int, meeting: int, missing: tuple[int, ...]) -> RankState:
    """A rank that waits in Buffer()."""
    waits = Waits(CONSTRUCTION, meeting, 12.0, {"entry": missing})
    return RankState(rank, 3, waits=waits, written_by=rank)


def test_who_is_behind_in_buffer_is_named_with_the_step_and_what_is_known() -> None:
    states = {rank: building(rank, 2, (2,)) for rank in range(2)}
    for state, said in (
        (
            {"process": "alive", "in_call": "Buffer", "threads": thread(TRAIN)},
            "rank 2 is behind the others in Buffer() (allocating memory); its main thread runs "
            "(/home/user/train.py line 41, step)",
        ),
        (
            {"process": "unknown", "in_call": "Buffer"},
            "rank 2 is behind the others in Buffer() (allocating memory); it cannot be known why: process gone, "
            "process stopped, host unreachable or elsewhere in its program",
        ),
        (
            {"process": "alive", "in_call": "dispatch"},
            "rank 2 is in dispatch() on the host and has not come to Buffer() (allocating memory)",
        ),
        ({"process": "stopped", "in_call": "Buffer"}, "rank 2 is stopped"),
    ):
        states[2] = RankState(2, 3, **state)  # type: ignore[arg-type]
        assert wording.line(judge(states)) == f"{said}; ranks 0-1 wait for it, for 12 s"


def test_where_nothing_is_known_the_advice_is_to_look_at_the_process() -> None:
    states = {0: building(0, 1, (1,)), 1: RankState(1, 3, pid=41, process="unknown")}
    (cause,) = judge(states).causes
    assert "py-spy dump --pid 41" in wording.advice(cause)
