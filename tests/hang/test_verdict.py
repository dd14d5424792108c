"""The verdict names who is stuck, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.states import Call, Frame, RankState, Waits
from deep_ep.hang.verdict import judge
from made_up_ranks import BEFORE, NOW_NS, TRAIN, Group, S, thread, with_last_call

# What a rank that is stuck in this way is accused of.
KIND = {**{how: how for how in BEFORE}, "not_sent": "not_sent", "mismatch": "mismatch"}
KIND |= {"hook": "not_called", "silent": "unknown"}


def accused(verdict: HangVerdict) -> set[tuple[str, int]]:
    return {(cause.kind, rank) for cause in verdict.causes for rank in cause.ranks}


def paths(verdict: HangVerdict) -> set[tuple[int, int]]:
    return {path for cause in verdict.causes for path in cause.paths}


@st.composite
def stories(draw: st.DrawFn) -> Group:
    """One to three ranks that are stuck, each in its way, and paths that lose rows between others."""
    group = Group(draw(st.integers(2, 64)), number=draw(st.integers(3, 40)))
    ranks = draw(st.permutations(range(group.num_ranks)))
    causes = draw(st.integers(1, min(3, group.num_ranks - 1)))
    for rank in ranks[:causes]:
        group.stuck[rank] = draw(st.sampled_from([*BEFORE, "not_sent"]))
    healthy = ranks[causes:]
    if len(healthy) > 1 and draw(st.booleans()):
        ends = st.tuples(st.sampled_from(healthy), st.sampled_from(healthy))
        group.lost = {(a, b) for a, b in draw(st.lists(ends, max_size=2)) if a != b}
    if not group.lost and draw(st.booleans()):
        # Some wait for slots of those who are stuck, and keep others waiting for their rows. One waits for all.
        for rank in healthy[1 : draw(st.integers(1, 4))]:
            of = draw(st.sets(st.sampled_from(sorted(group.stuck)), min_size=1))
            group.blocked[rank] = tuple(sorted(of))
    return group


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=120)
@given(stories())
def test_who_is_stuck_is_named_with_the_reason_and_nobody_else(group: Group) -> None:
    verdict = judge(group.states())
    assert accused(verdict) == {(KIND[how], rank) for rank, how in group.stuck.items()}
    assert paths(verdict) == group.lost
    for cause in verdict.causes:
        assert set(cause.waited_by) <= set(range(group.num_ranks)) - set(group.stuck)


@settings(deadline=None, max_examples=50)
@given(stories(), st.data())
def test_an_unheard_rank_is_unknown_and_hides_no_other(group: Group, data: st.DataObject) -> None:
    states = group.states()
    unheard = data.draw(st.sampled_from(sorted(group.stuck)))
    del states[unheard]
    verdict = judge({**states})
    expected = {(KIND[how], rank) for rank, how in group.stuck.items() if rank != unheard}
    assert accused(verdict) == {*expected, ("unknown", unheard)}
    assert verdict.missing == (unheard,)


@settings(deadline=None, max_examples=50)
@given(st.integers(3, 64), st.data())
def test_a_circle_is_named_whoever_else_waits(num_ranks: int, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(num_ranks)))
    circle = ranks[: data.draw(st.integers(2, min(4, num_ranks)))]
    group = Group(num_ranks, name="normal_combine")
    group.blocked = {a: (b,) for a, b in zip(circle, [*circle[1:], circle[0]])}
    (cause,) = judge(group.states()).causes
    assert (cause.kind, list(cause.ranks)) == ("circle", sorted(circle))
    assert cause.waited_by == tuple(range(num_ranks))


@settings(deadline=None, max_examples=50)
@given(st.integers(3, 64), st.data())
def test_a_circle_with_a_way_out_is_none(num_ranks: int, data: st.DataObject) -> None:
    """Who waits for a rank outside of it, too, may get slots from that."""
    ranks = data.draw(st.permutations(range(num_ranks)))
    a, b, outside = ranks[:3]
    group = Group(num_ranks, stuck={outside: "not_called"}, blocked={a: (b,), b: (a, outside)})
    assert accused(judge(group.states())) == {("not_called", outside)}


def test_of_two_circles_the_one_that_waits_for_the_other_is_none() -> None:
    group = Group(5, blocked={0: (1,), 1: (0, 2), 2: (3,), 3: (2,)})
    (cause,) = judge(group.states()).causes
    assert cause.ranks == (2, 3)


def test_slots_close_a_circle_before_rows_do() -> None:
    group = Group(4, blocked={0: (1,), 1: (2,), 2: (0,)})
    states = group.states()
    # Rank 1 waits for rows of rank 0, which has not sent them for want of slots.
    waits = Waits("operation", 12, 12.0, {"slots": (2,), "rows": (0,)})
    states[1] = replace(states[1], waits=waits)
    (cause,) = judge(states).causes
    assert cause.ranks == (0, 1, 2)


@settings(deadline=None, max_examples=50)
@given(st.integers(3, 64), st.data())
def test_a_rank_that_calls_something_else_is_named(num_ranks: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, num_ranks - 1))
    (cause,) = judge(Group(num_ranks, stuck={odd: "mismatch"}).states()).causes
    assert (cause.kind, cause.ranks) == ("mismatch", (odd,))
    others, mine = cause.sides
    assert (others.name, mine.name) == ("low_latency_dispatch", "low_latency_combine")
    assert mine.frame == others.frame == TRAIN


def test_where_no_side_is_larger_all_are_named() -> None:
    (cause,) = judge(Group(4, stuck={0: "mismatch", 2: "mismatch"}).states()).causes
    assert (cause.kind, cause.ranks) == ("mismatch", (0, 1, 2, 3))
    assert [side.ranks for side in cause.sides] == [(0, 2), (1, 3)]


def test_other_sizes_are_a_mismatch_although_nobody_says_so() -> None:
    states = Group(4, lost={(0, 1), (1, 0), (2, 1), (3, 1)}).states()
    states[1] = with_last_call(states[1], sizes={"hidden": 4096})
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks) == ("mismatch", (1,))
    assert [side.values for side in cause.sides] == [{"hidden": "7168"}, {"hidden": "4096"}]


def test_sizes_of_different_operations_are_not_compared() -> None:
    states = Group(4, stuck={1: "mismatch"}).states()
    states[1] = with_last_call(states[1], sizes={"hidden": 4096})
    (cause,) = judge(states).causes
    assert [dict(side.values) for side in cause.sides] == [{}, {}]


def test_a_ring_that_has_lost_the_first_half_of_a_dispatch_is_no_mismatch() -> None:
    group = Group(3, name="normal_dispatch", stuck={1: "not_called"})
    states = group.states()
    notify = group.call(12, name="normal_notify", finished_ns=5)
    for rank, state in states.items():
        *done, call = state.calls
        if rank == 0:
            states[rank] = replace(state, calls=(*done, notify, call))
        elif rank == 2:
            states[rank] = replace(state, calls=(call,))
    assert accused(judge(states)) == {("not_called", 1)}


def test_ranks_that_wait_for_each_other_in_two_series_called_in_another_order() -> None:
    group = Group(4)
    barrier = Call(12, "barrier", 3, "barrier", called_ns=NOW_NS - S, entered_ns=5, frames=(TRAIN,))
    states = {
        rank: group.state(
            rank,
            calls=(*group.done_calls(11), barrier),
            waits=Waits("barrier", 3, 12.0, {"entry": (2,)}),
        )
        for rank in (0, 1, 3)
    }
    waits = Waits("operation", 12, 12.0, {"entry": (0, 1, 3)})
    states[2] = group.state(
        2, opened=12, calls=(*group.done_calls(11), group.call(12)), waits=waits
    )
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks) == ("mismatch", (2,))
    assert [side.series for side in cause.sides] == ["barrier", "operation"]


def test_a_kernel_that_has_not_started_of_another_operation_is_a_mismatch() -> None:
    states = Group(4, stuck={1: "not_started"}).states()
    states[1] = with_last_call(states[1], name="low_latency_combine")
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks) == ("mismatch", (1,))


def test_a_rank_that_raised_has_not_called() -> None:
    states = Group(4, stuck={1: "host_in_call"}).states()
    states[1] = replace(states[1], raised="ValueError: no (train.py:3)")
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks, cause.accused[0].raised) == (
        "not_called",
        (1,),
        "ValueError: no (train.py:3)",
    )


def test_a_host_in_a_call_by_its_stack() -> None:
    states = Group(4, stuck={1: "not_called"}).states()
    ours = Frame("dispatch", "/usr/lib/python3/site-packages/deep_ep/buffer.py", 9)
    states[1] = replace(states[1], threads=thread(ours, TRAIN))
    (cause,) = judge(states).causes
    assert (cause.kind, cause.accused[0].in_call) == ("host_in_call", "dispatch")


def test_what_others_remember_of_a_rank_says_not_how_far_it_is() -> None:
    states = Group(4, stuck={1: "stopped"}).states()
    states[1] = replace(states[1], written_by=0)
    assert judge(states).causes[0].accused[0].last == -1


def test_the_second_half_of_a_normal_dispatch_that_its_host_does_not_launch() -> None:
    group = Group(4, name="normal_dispatch", stuck={1: "not_sent"})
    states = group.states()
    *done, _ = states[1].calls
    notify = group.call(12, name="normal_notify", finished_ns=5)
    for rank in (0, 2, 3):
        *before, call = states[rank].calls
        calls = (*before, notify, replace(call, call=13))
        states[rank] = replace(states[rank], calls=calls)
    states[1] = replace(states[1], calls=(*done, notify), in_call="dispatch")
    assert accused(judge(states)) == {("host_in_call", 1)}
    states[1] = replace(states[1], in_call="", raised="ValueError: no")
    assert accused(judge(states)) == {("not_called", 1)}
    launched = group.call(12, call=13, number=0, entered_ns=0, sent_ns=0)
    states[1] = replace(states[1], calls=(*done, notify, launched), raised="", in_call="dispatch")
    assert accused(judge(states)) == {("not_started", 1)}


def test_a_rank_that_has_entered_and_whose_word_of_that_is_not_there() -> None:
    states = Group(3, blocked={1: (2,), 2: (1,)}).states()
    waits = Waits("operation", 12, 12.0, {"entry": (1,)})
    states[0] = replace(states[0], waits=waits)
    assert paths(judge(states)) == {(1, 0)}


def test_who_waits_in_the_first_half_of_a_dispatch_needs_what_that_sends() -> None:
    """Rank 1 is through with it, so what rank 0 waits for was sent, whatever keeps rank 1 now."""
    group = Group(3, name="normal_notify", lost={(1, 0)}, stuck={2: "stopped"})
    states = group.states()
    *done, notify = states[1].calls
    second = group.call(12, call=13, name="normal_dispatch", sent_ns=0)
    waits = Waits("operation", 12, 12.0, {"rows": (2,)})
    states[1] = replace(states[1], calls=(*done, replace(notify, finished_ns=5), second))
    states[1] = replace(states[1], waits=waits)
    assert paths(judge(states)) == {(1, 0)}


def test_slots_that_a_receive_hook_would_free() -> None:
    group = Group(2, blocked={0: (1,)})
    states = group.states()
    states[1] = replace(with_last_call(states[1], has_hook=True), waits=None)
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks, cause.hook) == ("not_called", (1,), 12)


def test_a_rank_that_holds_the_gil_between_two_halves_is_busy() -> None:
    states = Group(4, stuck={1: "hook"}).states()
    states[1] = replace(states[1], process="busy")
    assert accused(judge(states)) == {("busy", 1)}


def test_a_rank_that_neither_waits_nor_has_ended_is_undecided() -> None:
    states = Group(4, stuck={1: "hook"}).states()
    states[1] = with_last_call(states[1], has_hook=False)
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks, cause.between) == ("unknown", (1,), ("not_called", "not_sent"))


def test_the_oldest_operation_in_which_it_is_waited_for_is_named() -> None:
    states = Group(4, stuck={1: "not_called"}).states()
    states[0] = replace(states[0], waits=Waits("operation", 14, 2.0, {"entry": (1,)}))
    (cause,) = judge(states).causes
    assert (cause.number, cause.waited_by, cause.waited_s) == (12, (0, 2, 3), 12.0)


def test_a_rank_in_another_buffer() -> None:
    states = Group(4, stuck={1: "host_in_call"}).states()
    other = RankState(1, 4, buffer="b1", opened=3, waits=Waits("operation", 3, 9.0, {"rows": (0,)}))
    (cause,) = judge(states, elsewhere={1: [other]}).causes
    assert (cause.kind, cause.ranks) == ("other_buffer", (1,))
    assert cause.elsewhere == "operation 3 of buffer b1"


def test_a_call_that_its_stack_shows_need_not_be_one_of_the_other_buffer() -> None:
    states = Group(4, stuck={1: "host_in_call"}).states()
    other = RankState(1, 4, buffer="b1", in_call="dispatch", closed=3)
    (cause,) = judge(states, elsewhere={1: [other]}).causes
    assert (cause.kind, cause.elsewhere) == ("host_in_call", "")


@pytest.mark.parametrize("stuck", BEFORE)
def test_masked_ranks_are_left_out(stuck: str) -> None:
    states = Group(4, stuck={1: stuck}).states()
    states = {rank: replace(state, masked=(1,)) for rank, state in states.items()}
    verdict = judge(states)
    assert (verdict.causes, verdict.edges, verdict.masked) == ((), (), (1,))


def test_what_a_masked_rank_waits_for_is_nobody_s_fault() -> None:
    """It was stopped, is masked, and goes on in an operation that the others have left."""
    states = Group(4, stuck={1: "not_called"}).states()
    states = {r: replace(s, masked=() if r == 1 else (1,), waits=None) for r, s in states.items()}
    states[1] = replace(states[1], waits=Waits("operation", 5, 3.0, {"rows": (0, 2, 3)}))
    verdict = judge(states)
    assert (verdict.causes, verdict.edges, verdict.masked) == ((), (), (1,))


def test_ranks_that_owe_slots_and_ranks_that_owe_rows_are_told_apart() -> None:
    owed = {"slots": (1,), "rows": (2,)}
    states = Group(4, stuck={1: "not_sent", 2: "not_sent"}).states()
    for rank in (0, 3):
        states[rank] = replace(states[rank], waits=Waits("operation", 12, 3.0, owed))
    found = {cause.ranks: cause.what == "slots" for cause in judge(states).causes}
    assert found == {(1,): True, (2,): False}


def test_a_rank_that_came_since_is_not_accused() -> None:
    group = Group(4, stuck={1: "not_started"})
    states = group.states()
    states[1] = with_last_call(states[1], called_ns=NOW_NS + 1)
    assert judge(states).causes == ()


def test_who_gave_up_for_another_one_s_sake_is_not_accused() -> None:
    group = Group(4, stuck={1: "not_called", 2: "not_sent"})
    states = group.states()
    failed = with_last_call(states[2], failed="timeout", finished_ns=9)
    states[2] = replace(failed, opened=0, closed=12)
    assert accused(judge(states)) == {("not_called", 1)}
    alone = {rank: state for rank, state in states.items() if rank != 1}
    alone[0] = replace(alone[0], waits=Waits("operation", 12, 12.0, {"rows": (2,)}))
    del alone[3]
    assert accused(judge(alone)) == {("given_up", 2)}


def test_a_dead_rank_is_named_before_anybody_waits_for_it() -> None:
    states = Group(4).states()
    states[3] = replace(states[3], process="gone", exit="signal 9")
    (cause,) = judge(states).causes
    assert (cause.kind, cause.ranks, cause.waited_by) == ("gone", (3,), ())


def test_ranks_that_wait_for_each_other_s_rows_and_say_no_more_are_undecided() -> None:
    states = Group(4, lost={(0, 1), (1, 0)}).states()
    states = {rank: replace(state, calls=()) for rank, state in states.items()}
    (cause,) = judge(states).causes
    assert (cause.kind, cause.between) == ("unknown", ("not_arrived", "circle"))


def test_alike_ranks_share_a_cause_and_others_do_not() -> None:
    states = Group(8, stuck={1: "not_called", 2: "not_called", 3: "not_called"}).states()
    elsewhere = thread(Frame("evaluate", "/home/user/train.py", 99))
    states[3] = replace(states[3], threads=elsewhere)
    assert [cause.ranks for cause in judge(states).causes] == [(1, 2), (3,)]


# ---- two nodes


@st.composite
def dispatches(draw: st.DrawFn) -> tuple[int, int, int]:
    """Ranks per node, and two ranks on different nodes."""
    per_node = draw(st.integers(2, 8))
    nodes = draw(st.integers(2, 4))
    one = draw(st.integers(0, per_node * nodes - 1))
    other = draw(
        st.integers(0, per_node * nodes - 1).filter(lambda r: r // per_node != one // per_node)
    )
    return per_node, one, other


@settings(deadline=None, max_examples=100)
@given(dispatches(), st.sampled_from(["gateway does not pass on", "network", *BEFORE]))
def test_between_nodes_the_gateway_or_its_hop_is_named(
    drawn: tuple[int, int, int], how: str
) -> None:
    per_node, source, destination = drawn
    gateway = destination // per_node * per_node + source % per_node
    num_ranks = per_node * (max(source, destination) // per_node + 1)
    group = Group(num_ranks, name="normal_dispatch", ranks_per_node=per_node)
    group.lost = {(source, destination)}
    if how == "network":
        # The gateway needs the rows as well, and passes on none.
        node = destination // per_node * per_node
        group.lost = {(source, rank) for rank in range(node, node + per_node)}
    elif how in BEFORE:
        if gateway == destination:
            group.lost = set()
        group.stuck = {gateway: how}
    verdict = judge(group.states(), ranks_per_node=per_node)
    if how in BEFORE:
        assert accused(verdict) == {(KIND[how], gateway)}
        assert not paths(verdict)
        return
    assert not accused(verdict)
    is_hop = how != "network" and gateway != destination
    assert paths(verdict) == {(gateway, destination) if is_hop else (source, gateway)}
    (cause,) = verdict.causes
    assert cause.hop == ("NVLink" if is_hop else "network")
    assert cause.passed_on == ((source,) if is_hop else ())


def test_a_gateway_s_sum_needs_its_node() -> None:
    group = Group(8, name="normal_combine", ranks_per_node=4, stuck={6: "not_sent"})
    states = group.states()
    # Rank 1 waits for the sum of rank 5, which waits for rank 6; ranks of the other node for none of it.
    for rank in (0, 1, 2, 3):
        waits = Waits("operation", 12, 12.0, {"rows": (rank + 4,)})
        states[rank] = replace(states[rank], waits=waits)
    verdict = judge(states, ranks_per_node=4)
    assert (accused(verdict), paths(verdict)) == ({("not_sent", 6)}, set())


def test_a_gateway_that_waits_for_slots_passes_the_blame_on() -> None:
    # Rank 0 sends to rank 7 by way of rank 4, which waits for slots of rank 5.
    group = Group(8, name="normal_dispatch", ranks_per_node=4, stuck={5: "not_sent"})
    group.blocked = {4: (5,)}
    states = group.states()
    for rank in (0, 1, 2, 3, 6):
        states[rank] = group.state(rank, closed=12, calls=group.done_calls(12))
    waits = Waits("operation", 12, 12.0, {"rows": (0,)})
    states[7] = replace(states[7], waits=waits)
    verdict = judge(states, ranks_per_node=4)
    assert (accused(verdict), paths(verdict)) == ({("not_sent", 5)}, set())
    assert verdict.causes[0].waited_by == (4, 7)


def test_without_a_recorder_a_rank_is_where_it_waits() -> None:
    states = {
        rank: RankState(rank, 2, waits=Waits("barrier", 3, 12.0, {"entry": (1 - rank,)}))
        for rank in (0, 1)
    }
    assert paths(judge(states)) == {(0, 1), (1, 0)}
