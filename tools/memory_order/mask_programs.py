"""The litmus tests of masks: whom blocks leave out, what the host learns, and how ranks join again.

Rank B goes on without others; A comes back. See programs.py for the other operations.
"""

from __future__ import annotations

import z3

from .litmus import Program, litmus
from .normal_programs import ALL
from .programs import (
    HOST_ACQUIRES,
    HOST_RELAXED,
    announce,
    any_zero,
    close_block,
    known_behind,
    last_block,
    may_send,
    plus,
)

__all__ = ["ALL"]


# ---- between the blocks of a rank


@litmus("Blocks that have waited agree on whom they leave out; nothing of it counts.")
def left_out_by_another_block(p: Program) -> None:
    waiting, first = p.thread("B", "1"), p.thread("B", "1")
    waiting.write("counts", 1, at="find_count.store_relaxed#2")
    waiting.write("left_out", at="leave_out.store_relaxed")
    p.meet(waiting, first, at="agree_on_left_out.block_sync#1")
    first.update("decided", plus(1), at="agree_on_left_out.add_acq_rel", sees=1)
    looking, other = p.thread("B", "2"), p.thread("B", "2")
    looking.update("decided", plus(1), at="agree_on_left_out.add_acq_rel", sees=0)
    looking.read("decided", at="agree_on_left_out.load_acquire", sees=2)
    p.meet(looking, other, at="agree_on_left_out.block_sync#2")
    other.read("left_out", "left_out", at="is_left_out.load_relaxed")
    other.write("counts", 0, at="drop_counts.store_relaxed")
    other.read("counts", "counts", at="prefix_counts.load_relaxed")
    p.forbid(lambda registers: z3.Or(registers["left_out"] == 0, registers["counts"] == 1))


@litmus("The last block masks those who were left out, after everybody has looked.")
def masked_by_the_last_block(p: Program) -> None:
    waiting = p.thread("B", "1")
    waiting.write("left_out", at="leave_out.store_relaxed")
    close_block(p, "1", waiting, 0)
    first, other = last_block(p)
    other.read("left_out", "measured", at="is_left_out.load_relaxed")
    p.meet(first, other, at="mask_left_out.block_sync")
    first.read("left_out", "left_out", at="mask_left_out.load_relaxed")
    first.write("left_out", 0, at="mask_left_out.store_relaxed")
    p.forbid(any_zero("measured", "left_out"))


@litmus("The block that waits alone knows whom its threads have masked.")
def masked_while_waiting(p: Program) -> None:
    known_behind(p, "B", "await_sources.block_sync", "masked")


# ---- the host


@litmus("Once the host is told that somebody is masked, it reads who.")
def mask_record(p: Program) -> None:
    b = p.thread("B")
    b.write("when", at="mask_missing.store_relaxed")
    b.write("any", at="mask_missing.store_release")
    host = p.thread("host")
    host.read("any", sees=1, order=HOST_ACQUIRES)
    host.read("when", "when", order=HOST_RELAXED)
    p.forbid(any_zero("when"))


# ---- across ranks


@litmus("Ranks that join read where the others are, behind their answers.")
def numbers_of_who_joins(p: Program) -> None:
    a = p.thread("A")
    a.write("barriers", at="clean_masks.put_word#1")
    a.write("clock_rounds", at="clean_masks.put_word#2")
    a.fence(at="clean_masks.fence")
    a.write("number", at="clean_masks.signal")
    a.fence(at="has_joined.fence")
    a.write("answered", at="has_joined.signal")
    waiting, first = p.thread("B"), p.thread("B")
    waiting.read("answered", at="has_joined.poll#1", sees=1)
    waiting.read("number", "number", at="has_joined.poll#2")
    p.meet(waiting, first, at="join_all.block_sync")
    first.read("barriers", "barriers", at="join_all.newest#1")
    first.read("clock_rounds", "clock_rounds", at="join_all.newest#2")
    p.forbid(any_zero("number", "barriers", "clock_rounds"))


@litmus("A rank that cleans tells its numbers from all threads alike.")
def numbers_of_who_cleans(p: Program) -> None:
    known_behind(p, "A", "clean_masks.block_sync", "cleans")


@litmus("Words that a rank forgets before it joins do not hide those that are sent afterwards.")
def forgotten_words(p: Program) -> None:
    p.initial = {"count": 7}
    forgetting, telling = p.thread("B"), p.thread("B")
    forgetting.write("count", 0, at="join_all.store_relaxed#1")
    p.meet(forgetting, telling, at="join_all.block_sync")
    telling.fence(at="deliver_all.quiet")
    telling.write("told", at="tell_handed_over.signal")
    sender = may_send(p, "A", "told")
    announce(sender)
    waiting = p.thread("B", "next")
    waiting.read("count", at="find_count.poll", sees=1)
    waiting.read("count", "count", at="find_count.poll")
    p.forbid(any_zero("count"))


@litmus("All threads of all blocks go on from the numbers that block 0 found.")
def numbers_of_all_blocks(p: Program) -> None:
    first, beside = p.thread("B", "0"), p.thread("B", "0")
    first.write("op", at="join_all.store_relaxed#2")
    first.write("joins", at="join_if_cleaned.store_release")
    p.meet(first, beside, at="join_if_cleaned.block_sync")
    beside.read("op", "beside")
    waiting = p.thread("B", "1")
    waiting.read("joins", at="join_if_cleaned.load_acquire#2", sees=1)
    waiting.read("op", "waiting")
    late, later = p.thread("B", "2"), p.thread("B", "2")
    late.read("joins", at="join_if_cleaned.load_acquire#1", sees=1)
    p.meet(late, later, at="join_if_cleaned.block_any")
    later.read("op", "later")
    p.forbid(any_zero("beside", "waiting", "later"))


@litmus("Words of the last barrier of a buffer do not race.")
def words_of_the_last_barrier(p: Program) -> None:
    p.thread("A").write("barrier", at="part.signal")
    p.thread("B").read("barrier", at="await_all.poll")
