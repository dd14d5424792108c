"""The litmus tests of normal operations: queues, relays, sums, notices. See programs.py for the others.

A queue leads from rank A to rank B. A thread of the warp that leads a team looks and tells, all of the team move
rows. Teams are warps or blocks, which is the same to the model.
"""

from __future__ import annotations

import z3

from .litmus import ALL, Actor, Program, litmus
from .programs import (
    HOST_ACQUIRES,
    HOST_RELAXED,
    any_zero,
    at_least,
    close_block,
    known_before,
    known_behind,
    known_between,
    plus,
    set_if_zero,
)

__all__ = ["ALL"]


def tell_filled(thread: Actor, place: str = "filled") -> None:
    thread.fence(at="tell_filled.fence")
    thread.write(place, at="tell_filled.signal")


def copy_in_bulk(
    program: Program, lane: Actor, at: tuple[str, str], source: str, *destinations: str
) -> None:
    """A bulk copy of a lane that takes and finishes at these lines.

    The async proxy is a thread of its own: take() has its accesses behind what the lane knows, finish() has them
    before what the lane does next, and nothing else does.
    """
    proxy = program.thread(lane.thread.rank, lane.thread.block)
    register = f"copied from {source}"
    program.meet(lane, proxy, at=at[0])
    proxy.read(source, register)
    for destination in destinations:
        proxy.write(destination, lambda registers: registers[register])
    program.meet(lane, proxy, at=at[1])


def end_step(program: Program, lane: Actor) -> Actor:
    """A thread that leads, behind the step of which a warp's lane has done its part."""
    first = program.thread(lane.thread.rank)
    program.meet(lane, first, at="run_tasks.team_sync#2")
    return first


def see_filled(program: Program, rank: str, place: str = "filled") -> Actor:
    """Another thread of the team whose leader has seen that slots are filled."""
    first, other = program.thread(rank), program.thread(rank)
    first.read(place, at="look_at.poll", sees=1)
    program.meet(first, other, at="run_tasks.team_sync#1")
    return other


# ---- across ranks


@litmus("Slots that are called filled hold their rows, put by any warp, and their packs.")
def rows_of_filled_slots(p: Program) -> None:
    p.initial["x"] = 1
    lane = p.thread("A")
    lane.write("pack")
    copy_in_bulk(p, lane, ("put_row_and_pack.take", "run_tasks.finish"), "x", "row")
    p.meet(lane, at="put_row_and_pack.put_warp")
    tell_filled(end_step(p, lane))
    b = see_filled(p, "B")
    b.read("row", "row")
    b.read("pack", "pack")
    p.forbid(any_zero("row", "pack"))


@litmus("The mark of a row between nodes is there with it, where it is put word by word.")
def marks_of_filled_slots(p: Program) -> None:
    warp = p.thread("A")
    warp.write("mark", at="put_marked_token.put_word")
    tell_filled(end_step(p, warp))
    see_filled(p, "B").read("mark", "mark")
    p.forbid(any_zero("mark"))


@litmus("A row between nodes, its pack and its mark are staged before they are put.")
def staged_marked_row(p: Program) -> None:
    staging, putting = p.thread("A"), p.thread("A")
    staging.write("staged")
    p.meet(staging, putting, at="put_staged.team_sync")
    putting.read("staged", "copied")
    putting.write("row", lambda registers: registers["copied"])
    p.meet(staging, putting, at="put_staged.put_warp")
    tell_filled(end_step(p, staging))
    see_filled(p, "B").read("row", "row")
    p.forbid(any_zero("row"))


@litmus("What comes with the last slots is there for the block that closes.")
def words_of_filled_slots(p: Program) -> None:
    a = p.thread("A")
    a.write("issued_ns", at="tell_filled.put_word")
    tell_filled(a)
    b = p.thread("B", "1")
    b.read("filled", at="look_at.poll", sees=1)
    close_block(p, "1", b, 0)
    last = close_block(p, "2", p.thread("B", "2"), 1)
    last.read("issued_ns", "issued_ns")
    p.forbid(any_zero("issued_ns"))


@litmus("A slot that is given back has been read by all warps before its next row comes.")
def slots_given_back(p: Program) -> None:
    p.initial["x"] = 2
    reading = p.thread("B")
    reading.read("pack", "pack")
    copy_in_bulk(p, reading, ("deliver_row.take", "run_tasks.finish"), "row", "recv_x")
    first = end_step(p, reading)
    first.fence(at="give_back.fence")
    first.write("given", at="give_back.signal")
    lane = see_filled(p, "A", "given")
    lane.write("pack", 2)
    copy_in_bulk(p, lane, ("put_row_and_pack.take", "run_tasks.finish"), "x", "row")
    p.forbid(lambda registers: z3.Or(registers["copied from row"] == 2, registers["pack"] == 2))


@litmus("A row that a gateway passes on to several ranks is the one that it was sent.")
def relayed_rows(p: Program) -> None:
    a = p.thread("A")
    a.write("row")
    tell_filled(a)
    relay = see_filled(p, "B")
    copy_in_bulk(p, relay, ("relay_row.take", "run_tasks.finish"), "row", "relayed", "other")
    tell_filled(end_step(p, relay), "relayed filled")
    see_filled(p, "C", "relayed filled").read("relayed", "row")
    p.forbid(any_zero("row"))


@litmus("A row that is delivered is the one that was sent, also for the warp that verifies it.")
def delivered_rows(p: Program) -> None:
    a = p.thread("A")
    a.write("row")
    tell_filled(a)
    lane = see_filled(p, "B")
    copy_in_bulk(p, lane, ("deliver_row.take", "DispatchTasks.move.finish"), "row", "recv_x")
    verifying = p.thread("B")
    p.meet(lane, verifying, at="sum_with_pack.warp_sync")
    verifying.read("recv_x", "row")
    p.forbid(any_zero("row"))


@litmus("A row is copied, or added up, before its sum is taken.")
def sum_of_a_moved_row(p: Program) -> None:
    known_behind(p, "B", "sum_with_pack.warp_sync", "row")


@litmus("A gateway's sum is whole when it is put, and there when its slot is called filled.")
def relayed_sums(p: Program) -> None:
    adding, putting, first = (p.thread("A") for _ in range(3))
    adding.write("staged")
    p.meet(adding, putting, first, at="put_staged.team_sync")
    putting.read("staged", "copied")
    putting.write("row", lambda registers: registers["copied"])
    p.meet(putting, first, at="put_staged.put_warp")
    p.meet(adding, putting, first, at="run_tasks.team_sync#2")
    tell_filled(first)
    see_filled(p, "B").read("row", "row")
    p.forbid(any_zero("row"))


@litmus("A notice is whole when it is sent, and there for all threads once its number is seen.")
def notices(p: Program) -> None:
    writing, putting, sending = (p.thread("A") for _ in range(3))
    writing.write("staged")
    p.meet(writing, putting, at="send_notices.warp_sync")
    putting.read("staged", "copied")
    putting.write("notice", lambda registers: registers["copied"])
    p.meet(writing, putting, at="send_notices.put_warp")
    p.meet(putting, sending, at="send_notices.block_sync")
    sending.fence(at="send_notices.fence")
    sending.write("noticed", at="send_notices.signal")
    looking, other = p.thread("B"), p.thread("B")
    looking.read("noticed", at="await_notices.poll#1", sees=1)
    looking.read("noticed", at="await_notices.poll#2", sees=1)
    p.meet(looking, other, at="has_failed.block_any")
    other.read("notice", "notice")
    p.forbid(any_zero("notice"))


@litmus("The host reads counts that are whole.")
def counts_for_the_host(p: Program) -> None:
    counting, first = p.thread("B"), p.thread("B")
    counting.write("per_expert")
    p.meet(counting, first, at="tell_host.block_sync")
    first.write("num_rows")
    first.write("ticket", at="tell_host.store_release")
    host = p.thread("host")
    host.read("ticket", sees=1, order=HOST_ACQUIRES)
    host.read("per_expert", "per_expert")
    host.read("num_rows", "num_rows")
    p.forbid(any_zero("per_expert", "num_rows"))


@litmus(
    "Who looks for something to do reads what others and the host have given up without a race."
)
def search_that_is_over(p: Program) -> None:
    a = p.thread("A")
    a.write("given_up", at="tell_given_up.signal")
    host = p.thread("host")
    host.write("any", order=HOST_RELAXED)
    failing = p.thread("B", "1")
    failing.update("failed", set_if_zero, at="record_failure.compare_exchange_relaxed")
    b = p.thread("B", "2")
    b.read("failed", at="TaskSearch.is_over.load_relaxed#1")
    b.read("given_up", at="somebody_gave_up.newest")
    b.read("any", at="TaskSearch.is_over.load_relaxed#2")


# ---- between the blocks of a rank


@litmus("When the last block began to wait and sent its last row is known to the one that closes.")
def largest_stamps_of_normal_operations(p: Program) -> None:
    places = {
        "DispatchTasks.tell.max_relaxed": "sent_ns",
        "CombineTasks.tell.max_relaxed": "sent_ns of a combine",
        "begin_waiting.max_relaxed": "wait_begin_ns",
    }
    one = p.thread("B", "1")
    two = p.thread("B", "2")
    for thread, stamp in ((one, 7), (two, 5)):
        for at, place in places.items():
            thread.update(place, at_least(stamp), at=at)
    close_block(p, "1", one, 0)
    first = close_block(p, "2", two, 1)
    for place in places.values():
        first.read(place, place)
    p.forbid(lambda registers: z3.Or(*[registers[place] != 7 for place in places.values()]))


# ---- within a block


@litmus("All warps work on the step that the first thread has found, and on no later one.")
def step_of_a_block(p: Program) -> None:
    known_between(p, "A", "run_tasks.team_sync#1", "run_tasks.team_sync#2", "step")


@litmus("What one lane of the leader has noted is known to the others, and to the step.")
def notes_of_a_leader(p: Program) -> None:
    sites = (
        "TaskSearch.begin.leader_sync",
        "TaskSearch.tell.leader_sync#1",
        "TaskSearch.tell.leader_sync#3",
        "DispatchTasks.prepare_sender.leader_sync",
        "DispatchTasks.prepare_relay.leader_sync",
        "CombineTasks.prepare.leader_sync",
    )
    for site in sites:
        known_behind(p, "A", site, site)
    p.forbid(any_zero(*sites))


@litmus("Where a sum's task stands is read by all lanes before it goes on.")
def cursor_of_a_task(p: Program) -> None:
    known_before(p, "A", "CombineTasks.tell.leader_sync", "cursor")


@litmus("A task that moves up by a place is read before the one behind it takes its own.")
def tasks_that_move_up(p: Program) -> None:
    known_before(p, "A", "TaskSearch.tell.leader_sync#2", "place")


@litmus("A row that is copied on one rank is there when the kernel ends.")
def locally_copied_row(p: Program) -> None:
    lane = p.thread("A")
    lane.write("x")
    copy_in_bulk(p, lane, ("copy_rows.take", "copy_rows.finish"), "x", "out", "other")
    lane.read("out", "out")
    lane.read("other", "other")
    p.forbid(any_zero("out", "other"))


@litmus(
    "The rows of a sum on one rank are listed before lanes read them, and those of the next but one afterwards."
)
def rows_of_a_local_sum(p: Program) -> None:
    known_between(p, "A", "sum_rows.warp_sync", "sum_rows.warp_sync", "list")


@litmus("The rows of a sum are listed before they are added up.")
def rows_of_a_sum(p: Program) -> None:
    known_behind(p, "B", "run_tasks.team_sync#1", "list")


@litmus(
    "Arrivals on a hop are there for the threads that add them up, before those of the next hop."
)
def arrivals_on_a_hop(p: Program) -> None:
    place = "source_arrival_ns"
    known_between(p, "B", "count_hop.block_sync#1", "count_hop.block_sync#2", place)


@litmus("Queues are forgotten when they have been counted.")
def queues_are_forgotten(p: Program) -> None:
    p.initial["moved"] = 1
    counting, forgetting = p.thread("B"), p.thread("B")
    counting.read("moved", "moved")
    p.meet(counting, forgetting, at="close_normal.block_sync")
    forgetting.write("moved", 0)
    p.forbid(any_zero("moved"))


@litmus("Tokens of a channel start at zero, and all are there before channels are added up.")
def tokens_of_channels(p: Program) -> None:
    p.initial["in channel"] = 9
    first, other = p.thread("A"), p.thread("A")
    first.write("in channel", 0)
    p.meet(first, other, at="count_channels.block_sync#1")
    for thread in (first, other):
        thread.update("in channel", plus(1), at="count_channels.add_relaxed")
    p.meet(first, other, at="count_channels.block_sync#2")
    other.read("in channel", "count")
    p.forbid(lambda registers: registers["count"] != 2)


@litmus("What all blocks have counted is there for all threads of the block that tells it.")
def counts_of_all_blocks(p: Program) -> None:
    adding, first = p.thread("A", "1"), p.thread("A", "1")
    adding.write("prefix of 1")
    p.meet(adding, first, at="gather_counts.block_sync#1")
    first.update("blocks_done", plus(1), at="gather_counts.add_release")
    gathering, telling = p.thread("A", "0"), p.thread("A", "0")
    gathering.write("prefix of 0")
    gathering.read("blocks_done", sees=1, at="gather_counts.load_acquire")
    gathering.write("blocks_done", 0)
    p.meet(gathering, telling, at="gather_counts.block_sync#2")
    telling.read("prefix of 0", "own")
    telling.read("prefix of 1", "other")
    p.forbid(any_zero("own", "other"))


@litmus("Rows of all sources are added up before they are placed behind each other.")
def places_of_rows(p: Program) -> None:
    known_behind(p, "B", "has_failed.block_any", "source_prefix")
