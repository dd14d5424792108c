"""The litmus tests of the protocol: across ranks, between the blocks of a rank, within a block.

Rank A sends and B receives; C is a third. Names of places are those of the source. Every strong operation
names the source line that it stands for (sources.py); rows, lists and other payload are weak accesses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import z3

from .litmus import ALL, Actor, Program, litmus
from .ptx import Order

__all__ = ["ALL"]

HOST_ACQUIRES = Order(acquires=True, scope="sys")
HOST_RELAXED = Order(scope="sys")


def plus(amount: int) -> Any:
    return lambda value: value + amount


def at_least(stamp: int) -> Any:
    return lambda value: z3.If(value > stamp, value, z3.IntVal(stamp))


def set_if_zero(value: Any) -> Any:
    return z3.If(value == 0, z3.IntVal(1), value)


def send_contents(program: Program) -> None:
    """A writes a header for itself, and another thread of the block sends it."""
    first, sender = program.thread("A"), program.thread("A")
    first.write("own header")
    program.meet(first, sender, at="send_headers.block_sync")
    sender.read("own header", "sent")
    sender.write("contents", lambda registers: registers["sent"])
    send_header(sender)


def send_header(thread: Actor, number: int = 1) -> None:
    thread.fence(at="send_headers.fence")
    thread.write("header", number, at="send_headers.signal")


def announce(thread: Actor) -> None:
    thread.fence(at="announce_rows.fence")
    thread.write("count", at="announce_rows.signal")


def announce_issued(program: Program, block: str, num_blocks: int) -> None:
    """A thread of A announces when so many other blocks have issued."""
    announcer = program.thread("A", block)
    announcer.read("issued", at="wait_until_issued.load_acquire", sees=num_blocks)
    announce(announcer)


def see_count(program: Program, rank: str) -> Actor:
    """Another thread of the block whose first thread has seen the count word."""
    first, other = program.thread(rank), program.thread(rank)
    first.read("count", at="find_count.poll", sees=1)
    program.meet(first, other, at="wait_for_words.block_any")
    return other


def put(program: Program, block: str, place: str, at: str) -> Actor:
    """A warp puts a row: a lane writes, and the first lane goes on behind put_warp()."""
    lane, first = program.thread("A", block), program.thread("A", block)
    lane.write(place)
    program.meet(lane, first, at=at)
    return first


def close_block(program: Program, block: str, worker: Actor, done_before: int) -> Actor:
    """A block of B counts itself done, after what its worker did. Its first thread."""
    first = program.thread("B", block)
    program.meet(worker, first, at="close_operation.block_sync#1")
    first.update("blocks_done", plus(1), at="close_operation.add_acq_rel", sees=done_before)
    return first


def last_block(
    program: Program, look: Callable[[Actor], None] = lambda first: None
) -> tuple[Actor, Actor]:
    """The last block of two closes the operation: its first thread, which looks first, and another."""
    first = close_block(program, "2", program.thread("B", "2"), 1)
    look(first)
    other = program.thread("B", "2")
    program.meet(first, other, at="close_operation.block_sync#2")
    return first, other


def any_zero(*names: str) -> Any:
    return lambda registers: z3.Or(*[registers[name] == 0 for name in names])


def known_behind(p: Program, rank: str, at: str, place: str, write_at: str = "") -> None:
    """What a thread writes before a barrier, another thread of its block reads behind it."""
    writing, reading = p.thread(rank), p.thread(rank)
    writing.write(place, at=write_at)
    p.meet(writing, reading, at=at)
    reading.read(place, place)
    p.forbid(any_zero(place))


def known_between(p: Program, rank: str, at: str, until: str, place: str) -> None:
    """What a thread writes, another reads between two barriers; behind the second it is written anew."""
    writing, reading = p.thread(rank), p.thread(rank)
    writing.write(place, 1)
    p.meet(writing, reading, at=at)
    reading.read(place, place)
    p.meet(writing, reading, at=until)
    writing.write(place, 2)
    p.forbid(lambda registers: registers[place] != 1)


def known_before(p: Program, rank: str, at: str, place: str) -> None:
    """What a thread reads in front of a barrier, another writes behind it."""
    p.initial[place] = 1
    reading, writing = p.thread(rank), p.thread(rank)
    reading.read(place, place)
    p.meet(reading, writing, at=at)
    writing.write(place, 2)
    p.forbid(lambda registers: registers[place] != 1)


def rows_and_their_count(p: Program, *put_at: str) -> None:
    """Two blocks put a row each, at these lines, and a third one announces them."""
    for block, at in zip("12", put_at):
        first = put(p, block, f"row{block}", at)
        first.update("issued", plus(1), at="count_issued.add_release")
    announce_issued(p, "3", 2)
    b = see_count(p, "B")
    b.read("row1", "row1")
    b.read("row2", "row2")
    p.forbid(any_zero("row1", "row2"))


# ---- across ranks


@litmus("Once a header's number is seen, what it contains is there.")
def header_words(p: Program) -> None:
    send_contents(p)
    b = p.thread("B")
    b.read("header", at="find_header.poll", sees=1)
    b.read("contents", "contents")
    p.forbid(any_zero("contents"))


@litmus("The same for the header that a rank keeps for itself, which another of its blocks sees.")
def own_header(p: Program) -> None:
    first, sender = p.thread("A", "0"), p.thread("A", "0")
    first.write("own header")
    p.meet(first, sender, at="send_headers.block_sync")
    send_header(sender)
    other = p.thread("A", "1")
    other.read("header", at="find_header.poll", sees=1)
    other.read("own header", "contents")
    p.forbid(any_zero("contents"))


@litmus("The block that closes reads the flags of a header that another block has seen.")
def header_seen_by_another_block(p: Program) -> None:
    send_contents(p)
    b = p.thread("B", "1")
    b.read("header", at="find_header.poll", sees=1)
    close_block(p, "1", b, 0)
    _, other = last_block(p)
    other.read("contents", "flags")
    p.forbid(any_zero("flags"))


@litmus("Once a count word is seen, the rows of all blocks that it counts are there (dispatch).")
def rows_behind_their_count(p: Program) -> None:
    rows_and_their_count(p, "put_message.put_warp", "put_message.put_warp")


@litmus("The same for combine, whose rows are put as they are or in the logarithmic format.")
def returned_rows_behind_their_count(p: Program) -> None:
    rows_and_their_count(p, "return_row.put_warp#1", "return_row.put_warp#2")


@litmus("The token of a row that is put from the caller's tensor is there with the row.")
def token_behind_its_count(p: Program) -> None:
    first = p.thread("A", "1")
    first.write("token", at="put_message.put_word")
    first.update("issued", plus(1), at="count_issued.add_release")
    announce_issued(p, "2", 1)
    b = see_count(p, "B")
    b.read("token", "token")
    p.forbid(any_zero("token"))


@litmus("What a verified row says of itself is there with the row.")
def proof_behind_its_count(p: Program) -> None:
    first = p.thread("A", "1")
    first.write("word", at="return_row.put_word#1")
    first.write("sum", at="return_row.put_word#2")
    first.update("issued", plus(1), at="count_issued.add_release")
    announce_issued(p, "2", 1)
    b = see_count(p, "B")
    b.read("word", "word")
    b.read("sum", "sum")
    p.forbid(any_zero("word", "sum"))


@litmus("Two halves: no row of operation n + 2 comes before operation n has been read.")
def halves(p: Program) -> None:
    reader, b = p.thread("B", "n.1"), p.thread("B", "n+1.0")
    reader.read("row", "row")
    p.meet(reader, b)
    send_header(b, 2)
    a, sender = p.thread("A", "n+1.1"), p.thread("A", "n+2.2")
    a.read("header", at="find_header.poll", sees=2)
    p.meet(a, sender)
    sender.write("row", 2)
    p.forbid(lambda registers: registers["row"] == 2)


def may_send(p: Program, rank: str, word: str) -> Actor:
    """A thread of another block than the one that has met all."""
    met, first = p.thread(rank, "0"), p.thread(rank, "0")
    met.read(word, at="await_all.poll", sees=1)
    p.meet(met, first, at="await_sources.block_any")
    p.meet(met, first, at="has_failed.block_any")
    first.write("handed_over", at="hand_over.store_release")
    looking, sender = p.thread(rank, "1"), p.thread(rank, "1")
    looking.read("handed_over", at="hand_over.load_acquire", sees=1)
    p.meet(looking, sender, at="hand_over.block_any")
    return sender


@litmus("Handing over: no block sends before the others have left earlier operations.")
def hand_over_waits_for_readers(p: Program) -> None:
    reader, a = p.thread("A", "before"), p.thread("A", "0")
    reader.read("row", "row")
    p.meet(reader, a)
    send_header(a)
    may_send(p, "B", "header").write("row", 2)
    p.forbid(lambda registers: registers["row"] == 2)


@litmus("Handing over: a row that was sent before never overwrites one that is sent afterwards.")
def hand_over_waits_for_writers(p: Program) -> None:
    earlier, a = p.thread("A", "before"), p.thread("A", "0")
    earlier.write("row", 1)
    p.meet(earlier, a)
    send_header(a)
    sender = may_send(p, "B", "header")
    sender.write("row", 2)
    announce(sender)
    see_count(p, "C").read("row", "row")
    p.forbid(lambda registers: registers["row"] != 2)


@litmus("quiet() by itself: what was put before is there for whoever sees a later signal.")
def quiet_delivers(p: Program) -> None:
    a = p.thread("A")
    a.write("row", 1)
    a.fence(at="deliver_all.quiet")
    a.write("told", at="tell_handed_over.signal")
    sender = may_send(p, "B", "told")
    sender.write("row", 2)
    announce(sender)
    see_count(p, "C").read("row", "row")
    p.forbid(lambda registers: registers["row"] != 2)


@litmus("A rank that meets all agrees with a header before it looks at its words again.")
def shapes_are_compared_behind_the_header(p: Program) -> None:
    send_contents(p)
    b = p.thread("B")
    b.read("header", at="await_all.poll", sees=1)
    b.read("header", at="meet_headers.poll", sees=1)
    b.read("contents", "agreed")
    p.forbid(any_zero("agreed"))


@litmus("Who sees the next operation of a rank sees that it has given up this one.")
def giving_up_is_known_with_the_next_header(p: Program) -> None:
    a, next_a = p.thread("A", "n"), p.thread("A", "n+1")
    a.write("given_up", at="tell_given_up.signal")
    p.meet(a, next_a)
    send_header(next_a, 2)
    b = p.thread("B")
    b.read("header", at="find_given_up.newest#1", sees=2)
    b.read("given_up", "named", at="find_given_up.newest#2")
    closer = p.thread("B", "1")
    closer.read("header", at="find_header.poll", sees=2)
    closer.read("given_up", "taken", at="newest_given_up.newest")
    p.forbid(any_zero("named", "taken"))


@litmus("A clock's bounce is whole when its number is seen.")
def bounce_words(p: Program) -> None:
    a = p.thread("A")
    a.write("delay_ns", at="exchange_stamps.put_word#1")
    a.write("sent_ns", at="exchange_stamps.put_word#2")
    a.fence(at="exchange_stamps.fence")
    a.write("number", at="exchange_stamps.signal")
    b = p.thread("B")
    b.read("number", at="exchange_stamps.poll", sees=1)
    b.read("delay_ns", "delay_ns")
    b.read("sent_ns", "sent_ns")
    p.forbid(any_zero("delay_ns", "sent_ns"))


@litmus("A clock's bounce is read before the next but one takes its place.")
def bounce_places(p: Program) -> None:
    b = p.thread("B")
    b.read("sent_ns", "sent_ns")
    b.fence(at="exchange_stamps.fence")
    b.write("number", at="exchange_stamps.signal")
    a = p.thread("A")
    a.read("number", at="exchange_stamps.poll", sees=1)
    a.write("sent_ns", 2, at="exchange_stamps.put_word#2")
    p.forbid(lambda registers: registers["sent_ns"] == 2)


@litmus(
    "A barrier's words do not race, and a rank that was missed is known to the thread that closes."
)
def barrier_words(p: Program) -> None:
    p.thread("A").write("barrier", at="barrier.signal")
    b, first = p.thread("B"), p.thread("B")
    b.read("barrier", at="await_all.poll")
    b.update("failed", set_if_zero, at="record_failure.compare_exchange_relaxed")
    p.meet(b, first, at="barrier.block_sync")
    first.read("failed", "failed")
    p.forbid(any_zero("failed"))


@litmus("The host reads a failure that is whole.")
def failure_record(p: Program) -> None:
    b = p.thread("B")
    b.write("operation")
    b.write("rank", at="leave_record.store_relaxed")
    b.write("reason", at="leave_record.store_release")
    second = p.thread("B", "1")
    second.write("second rank", at="record_failure.store_relaxed")
    host = p.thread("host")
    host.read("reason", sees=1, order=HOST_ACQUIRES)
    host.read("operation", "operation")
    host.read("rank", "rank", order=HOST_RELAXED)
    host.read("second rank", order=HOST_RELAXED)
    p.forbid(any_zero("operation", "rank"))


# ---- between the blocks of a rank


@litmus("The stamp of the last row is known to the thread that announces.")
def issue_stamps(p: Program) -> None:
    for block, stamp in (("1", 7), ("2", 5)):
        sender = p.thread("A", block)
        sender.update("issued_ns", at_least(stamp), at="count_issued.max_relaxed")
        sender.update("issued", plus(1), at="count_issued.add_release")
    announcer = p.thread("A", "3")
    announcer.read("issued", at="wait_until_issued.load_acquire", sees=2)
    announcer.read("issued_ns", "issued_ns")
    p.forbid(lambda registers: registers["issued_ns"] != 7)


@litmus("The count of issued rows loses none, and starts the next launch at zero.")
def issued_is_reset(p: Program) -> None:
    for block in ("1", "2"):
        sender = p.thread("A", block)
        sender.update("issued", plus(1), at="count_issued.add_release")
    announcer, later = p.thread("A", "3"), p.thread("A", "next")
    announcer.read("issued", at="wait_until_issued.load_acquire", sees=2)
    announcer.write("issued", 0)
    p.meet(announcer, later)
    later.read("issued", "issued")
    p.forbid(lambda registers: registers["issued"] != 0)


@litmus("One failure alone is the first; the other blocks see it without a race.")
def first_failure(p: Program) -> None:
    for block in ("1", "2"):
        failing = p.thread("B", block)
        failing.update(
            "failed", set_if_zero, at="record_failure.compare_exchange_relaxed", register=block
        )
    looking = p.thread("B", "3")
    looking.read("failed", at="has_failed.load_relaxed")
    looking.read("failed", at="wait_until_issued.load_relaxed")
    looking.read("failed", at="wait_for_words.load_relaxed#1")
    p.forbid(lambda registers: z3.And(registers["1"] == 0, registers["2"] == 0))


@litmus("The last block knows of a failure of any block, and resets it after everybody's looks.")
def failure_of_another_block(p: Program) -> None:
    failing = p.thread("B", "1")
    failing.update("failed", set_if_zero, at="record_failure.compare_exchange_relaxed")
    failing.read("failed", "early", at="has_failed.load_relaxed", sees=1)
    close_block(p, "1", failing, 0)
    first, _ = last_block(
        p, lambda first: first.read("failed", "failed", at="close_operation.load_relaxed")
    )
    first.write("failed", 0)
    p.forbid(any_zero("failed"))


@litmus("Blocks that wait for the same word note the same count; readers see it without a race.")
def counts_of_several_blocks(p: Program) -> None:
    for block in ("1", "2"):
        first, other = p.thread("B", block), p.thread("B", block)
        first.write("counts", at="find_count.store_relaxed#2")
        first.write("issued_lo", at="find_count.store_relaxed#3")
        p.meet(first, other, at="wait_for_words.block_any")
        reader = "prefix_counts.load_relaxed" if block == "1" else "check_returned.load_relaxed"
        other.read("counts", block, at=reader)
    p.forbid(any_zero("1", "2"))


@litmus(
    "What several blocks measure of one thing keeps the largest value, and the last block has it."
)
def largest_stamps(p: Program) -> None:
    measured = {
        "sight": "note_sight.max_relaxed",
        "wait_begin_ns": "wait_for_words.max_relaxed",
        "sent_ns": "announce_rows.max_relaxed",
    }
    one = p.thread("B", "1")
    two = p.thread("B", "2")
    for place, at in measured.items():
        one.update(place, at_least(7), at=at)
        two.update(place, at_least(5), at=at)
    close_block(p, "1", one, 0)
    first = close_block(p, "2", two, 1)
    for place in measured:
        first.read(place, place)
    p.forbid(lambda registers: z3.Or(*[registers[place] != 7 for place in measured]))


@litmus(
    "Counts that one block has noted are there for the last block, which forgets them afterwards."
)
def sights_reach_the_last_block(p: Program) -> None:
    b = p.thread("B", "1")
    b.write("issued_lo", at="find_count.store_relaxed#3")
    close_block(p, "1", b, 0)
    first, other = last_block(p)
    other.read("issued_lo", "issued_lo")
    p.meet(first, other, at="close_low_latency.block_sync")
    first.write("issued_lo", 0)
    p.forbid(any_zero("issued_lo"))


@litmus("All blocks read the operation's number before the last one changes it.")
def number_of_the_operation(p: Program) -> None:
    b = p.thread("B", "1")
    b.read("op", "op")
    close_block(p, "1", b, 0)
    first, _ = last_block(p)
    first.write("op", 2, at="close_operation.store_relaxed#3")
    p.forbid(lambda registers: registers["op"] == 2)


@litmus("Arrivals of all sources are there for the thread that adds them up.")
def arrivals_are_added_up(p: Program) -> None:
    known_behind(p, "B", "close_low_latency.block_sync", "source_arrival_ns")


# ---- within a block


@litmus(
    "The last block's threads know that it is the last, and its shared memory is no longer in use."
)
def place_in_shared_memory(p: Program) -> None:
    p.initial["shared"] = 3
    worker, first = p.thread("B"), p.thread("B")
    worker.read("shared", "offsets")
    p.meet(worker, first, at="close_operation.block_sync#1")
    first.write("shared", 1)
    p.meet(worker, first, at="close_operation.block_sync#2")
    worker.read("shared", "place")
    p.forbid(lambda registers: z3.Or(registers["offsets"] != 3, registers["place"] != 1))


@litmus("The slot of an operation in the ring is known to the threads that count.")
def slot_of_the_ring(p: Program) -> None:
    known_behind(p, "B", "close_operation.block_sync#2", "ring_slot")


@litmus("A rank that is out of step is known to the thread that keeps the layout.")
def out_of_step(p: Program) -> None:
    known_behind(p, "B", "has_failed.block_any", "out_of_step", "close_operation.store_relaxed#1")


@litmus(
    "Positions count all entries of earlier tokens and no others; routes and staged row are whole before the puts."
)
def routes_of_a_token(p: Program) -> None:
    p.initial["num_entries"] = 9
    staging, putting = p.thread("A"), p.thread("A")
    staging.write("num_entries", 0)
    p.meet(staging, putting, at="send_rows.block_sync#1")
    for thread in (staging, putting):
        thread.update("num_entries", plus(1), at="count_entries.add_relaxed")
    staging.write("experts")
    p.meet(staging, putting, at="send_rows.block_sync#2")
    putting.read("experts", "experts")
    staging.read("num_entries", "entries")
    staging.write("positions")
    staging.write("staged")
    p.meet(staging, putting, at="send_rows.block_sync#3")
    putting.update("num_entries", plus(1), at="count_entries.add_relaxed")
    putting.read("positions", "positions")
    putting.read("staged", "staged")
    incomplete = any_zero("experts", "positions", "staged")
    p.forbid(lambda registers: z3.Or(registers["entries"] != 2, incomplete(registers)))


@litmus("All entries of an expert have been counted before it is announced.")
def entries_of_an_expert(p: Program) -> None:
    counting, announcer = p.thread("A"), p.thread("A")
    counting.update("num_entries", plus(1), at="count_entries.add_relaxed")
    p.meet(counting, announcer, at="send_rows.block_sync#4")
    announcer.read("num_entries", "entries")
    p.forbid(any_zero("entries"))


@litmus("A staged row is whole before its sum is taken.")
def sum_of_a_staged_row(p: Program) -> None:
    known_behind(p, "A", "stage_row.block_sync", "staged")


@litmus(
    "Offsets of an expert's rows are there for all warps, and are read before the next but one's."
)
def offsets_of_an_expert(p: Program) -> None:
    known_between(p, "B", "receive_expert.block_sync", "receive_expert.block_sync", "offsets")


@litmus("Combine's offsets are there for all warps that return rows.")
def offsets_of_returned_rows(p: Program) -> None:
    known_behind(p, "A", "find_offsets.block_any", "offsets")


@litmus("All threads see where a token's rows lie, and read that before the next but one's.")
def rows_that_came_back(p: Program) -> None:
    known_between(p, "B", "find_rows.block_sync", "find_rows.block_sync", "rows")


@litmus("A received row is copied before its sum is compared.")
def sum_of_a_received_row(p: Program) -> None:
    known_behind(p, "B", "verify_row.warp_sync", "recv_x")


@litmus(
    "A row that cannot be encoded is copied over what was encoded of it, summed, and put with its header."
)
def staged_returned_row(p: Program) -> None:
    encoding, copying, summing = (p.thread("A") for _ in range(3))
    encoding.write("data", 1)
    p.meet(encoding, copying, summing, at="return_row.warp_sync#1")
    copying.write("data", 2)
    p.meet(encoding, copying, summing, at="return_row.warp_sync#2")
    summing.read("data", "summed")
    p.forbid(lambda registers: registers["summed"] != 2)


@litmus("The header of a staged row, and its data, are there for the lanes that put it.")
def header_of_a_staged_row(p: Program) -> None:
    known_behind(p, "A", "return_row.warp_sync#3", "staged")


@litmus("A plain row that is staged is there for the lanes that put it.")
def plain_staged_row(p: Program) -> None:
    known_behind(p, "A", "return_row.warp_sync#4", "staged")


@litmus("Threads of a block that wait share what they find.")
def state_of_a_wait(p: Program) -> None:
    first, one, two = (p.thread("B") for _ in range(3))
    first.write("headers_left", 2)
    p.meet(first, one, two, at="wait_for_words.block_sync")
    for name, other, counted in (
        ("one", one, "find_header.add_relaxed"),
        ("two", two, "pass_header.add_relaxed"),
    ):
        other.write("hopeless", at="find_header.store_relaxed")
        other.update("headers_left", plus(-1), at=counted, register=name)
        other.write("hopeless", at="find_count.store_relaxed#1")
        other.write("in_vain", at="wait_for_words.store_relaxed")
        other.read("in_vain", at="WaitShared.is_over.load_relaxed#1")
        other.read("hopeless", at="WaitShared.is_over.load_relaxed#2")
        other.read("headers_left", at="WaitShared.is_over.load_relaxed#3")
        other.read("in_vain", at="wait_for_words.load_relaxed#3")
        other.read("hopeless", at="WaitShared.is_hopeless.load_relaxed")
        other.read("hopeless", at="wait_for_words.load_relaxed#4")
    p.forbid(lambda registers: z3.Or(registers["one"] + registers["two"] != 3))


@litmus("The timer's step is known to all threads that take a sample.")
def step_of_the_timer(p: Program) -> None:
    known_behind(p, "B", "clock_offset.block_sync#1", "timer_step_ns")


@litmus("A rank that missed a clock round is known to the thread that closes it.")
def failure_of_a_clock_round(p: Program) -> None:
    other, first = p.thread("B"), p.thread("B")
    other.update("failed", set_if_zero, at="record_failure.compare_exchange_relaxed")
    p.meet(other, first, at="clock_offset.block_sync#2")
    first.read("failed", "failed")
    p.forbid(any_zero("failed"))


@litmus("Counts of a layout start at zero and lose none.")
def counts_of_a_layout(p: Program) -> None:
    p.initial = {"expert": 9, "rank": 9, "node": 9}
    sites = {
        "expert": "count_for_ranks.add_relaxed#1",
        "rank": "count_for_ranks.add_relaxed#2",
        "node": "count_for_ranks.add_relaxed#3",
    }
    first, other = p.thread("A"), p.thread("A")
    for place in sites:
        first.write(place, 0)
    p.meet(first, other, at="count_for_ranks.block_sync")
    for place, at in sites.items():
        other.update(place, plus(1), at=at, register=place)
    p.forbid(lambda registers: z3.Or(*[registers[place] != 0 for place in sites]))


@litmus("What the host tells kernels that run is read without a race.")
def news(p: Program) -> None:
    host = p.thread("host")
    for place in ("gone", "out", "lost_op", "any", "reason"):
        host.write(place, order=HOST_RELAXED)
    b = p.thread("B")
    b.read("reason", at="follows.load_relaxed")
    b.read("any", at="has_ended.load_relaxed#1")
    b.read("gone", at="has_ended.load_relaxed#2")
    b.read("out", at="is_gone.load_relaxed")
    b.read("any", at="is_lost.load_relaxed#1")
    b.read("lost_op", at="is_lost.load_relaxed#2")
    b.read("any", at="wait_for_words.load_relaxed#2")
