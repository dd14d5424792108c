"""What the litmus tests do not tell apart, and why that is right."""

from __future__ import annotations

HOST_COPIES = "progress that the host copies while the kernel runs; nothing is ordered by it"
QUEUE_PAIRS = (
    "orders queue pairs: NVSHMEM documents what they promise, the PTX model says nothing of NICs"
)

# Sites that no litmus test stands for.
LEFT_OUT = {
    "send_headers.store_relaxed": HOST_COPIES,
    "hand_over.store_relaxed#1": HOST_COPIES,
    "hand_over.store_relaxed#2": HOST_COPIES,
    "close_operation.store_relaxed#2": HOST_COPIES,
    "show_host.store_relaxed": HOST_COPIES,
    "record_sent.block_sync": "orders time, not memory: a block has sent when all of its warps have",
    "record_sent.add_relaxed": "counts blocks; nothing is read behind it",
    "refuse_surplus.newest": "what it counts is compared; nothing is read behind it",
    "comes_with_others.poll": "whether somebody has come; what headers hold is read behind await_all()",
    "comes_with_others.block_any": "all threads need its result; nothing is read behind it",
    "stays_away.load_relaxed": "what block 0 stored in front of the release in hand_over(), or an earlier launch",
    "exchange_clocks.block_sync": "orders time, not memory: rank 0 stamps when all threads are done",
    "tell_handed_over.block_sync": QUEUE_PAIRS,
    "rows_lie_within.block_any": "all threads need its result; what it looks at is the caller's",
    "clean_masks.store_relaxed": "ends what the host said before; later launches read it",
    "leader_sync.warp_sync": "what it is on a GPU; its callers are sites",
    "team_sync.warp_sync": "what it is for a warp; its callers are sites",
    "team_sync.block_sync": "what it is for a block; its callers are sites",
    "team_any.block_any": "what it is for a block; its callers are sites",
    "run_tasks.team_any": "all threads need its result; nothing is read behind it",
    "run_tasks.load_relaxed": "whether the operation has failed; nothing is read behind it",
    "run_tasks.block_any": "all threads need its result; what it would order is read by one thread only",
    "QueuePairs.put_warp.warp_sync": QUEUE_PAIRS,
    "Transport.put_warp.queue_pairs.put_warp": QUEUE_PAIRS,
    "Transport.put_word.queue_pairs.put_word": QUEUE_PAIRS,
    "Transport.fence.queue_pairs.fence": QUEUE_PAIRS,
    "Transport.quiet.queue_pairs.quiet": QUEUE_PAIRS,
    "Transport.signal.queue_pairs.signal": QUEUE_PAIRS,
}

# Sites whose instructions the compiler gives the line of another one, with which it merges them.
OTHER_LINE = {
    "barrier.block_sync": "of the barrier at the end of await_sources()",
    "close_operation.store_relaxed#2": "of the stores of show_host() in front of it",
}

WORD = "payload in front of a fence: a weak store would do; the host target and NVSHMEM have words anyway"
ALONE = "nothing is read behind this word, and the word itself is newer at the next look"
TWICE = "the same thread acquires the same word in the other line"
ORDERED = "already ordered by blocks_done or by the end of the launch: a weak access would do"

FORGOTTEN = "others write the word only after they have been told, behind a fence"
OWN_COUNT = "only the threads of one block add to it; the host target wants device scope outside of shared memory"
AGREED = "already ordered by blocks_decided: a weak access would do"

# Variants that change nothing that the model can show.
NO_DIFFERENCE = {
    "Transport.put_word.store_relaxed: narrowed to gpu": WORD,
    "Transport.put_word.store_relaxed: narrowed to cta": WORD,
    "meet_headers.poll: no acquire": "await_all() has acquired the same word in the same thread",
    "find_given_up.newest#2: no acquire": ALONE,
    "newest_given_up.newest: no acquire": ALONE,
    "somebody_gave_up.newest: no acquire": ALONE,
    "await_notices.poll#1: no acquire": TWICE,
    "await_notices.poll#2: no acquire": TWICE,
    "count_channels.add_relaxed: narrowed to cta": OWN_COUNT,
    "count_for_ranks.add_relaxed#1: narrowed to cta": OWN_COUNT,
    "count_for_ranks.add_relaxed#2: narrowed to cta": OWN_COUNT,
    "count_for_ranks.add_relaxed#3: narrowed to cta": OWN_COUNT,
    "leave_record.store_relaxed: narrowed to gpu": "stands before the release of `reason`",
    "leave_record.store_relaxed: narrowed to cta": "stands before the release of `reason`",
    "agree_on_left_out.add_acq_rel: no acquire": "the thread acquires the same word in its look",
    "leave_out.store_relaxed: narrowed to cta": AGREED,
    "is_left_out.load_relaxed: narrowed to cta": AGREED,
    "drop_counts.store_relaxed: narrowed to cta": AGREED,
    "mask_left_out.load_relaxed: narrowed to cta": ORDERED,
    "mask_left_out.store_relaxed: narrowed to cta": ORDERED,
    "mask_missing.store_relaxed: narrowed to gpu": "stands before the release of `any`",
    "mask_missing.store_relaxed: narrowed to cta": "stands before the release of `any`",
    "clean_masks.fence: removed": "the fence in front of the answer covers the same words",
    "has_joined.poll#2: no acquire": "behind the answer, which was acquired",
    "join_all.newest#1: no acquire": "behind the answer, which was acquired",
    "join_all.newest#2: no acquire": "behind the answer, which was acquired",
    "join_all.store_relaxed#1: narrowed to gpu": FORGOTTEN,
    "join_all.store_relaxed#1: narrowed to cta": FORGOTTEN,
    "join_all.store_relaxed#2: narrowed to gpu": "for the host's look; other blocks read it behind `joins`",
    "join_all.store_relaxed#2: narrowed to cta": "for the host's look; other blocks read it behind `joins`",
    "close_operation.load_relaxed: narrowed to cta": ORDERED,
    "close_operation.store_relaxed#3: narrowed to gpu": ORDERED,
    "close_operation.store_relaxed#3: narrowed to cta": ORDERED,
}

# Functions whose loads from, or stores to, global memory move 16 bytes each.
WIDE_LOADS = ("copy", "load_vector")
WIDE_STORES = ("copy", "store_vector")
