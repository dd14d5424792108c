// All ranks meet: each signals every other and waits for all. A rank that missed one which others
// gave up joins them in the next. Launched with one block.
//
// The same once more at the end of a buffer, by number the last.
#pragma once

#include "kernels/protocol/join.cuh"

namespace ep {

EP_KERNEL void barrier(const EP_GRID_CONSTANT OperationArgs args) {
    join_if_cleaned(args);
    const uint64_t given_up = newest_given_up(args, Series::kBarriers);
    const uint64_t round =
        (given_up > args.workspace->barriers ? given_up : args.workspace->barriers) + 1;
    const OpenOperation open{round, 0, deadline_in(args.timeout_ns), Series::kBarriers};
    if (thread_index() == 0) record_entry(args, round, now_ns());
    for (int dst = thread_index(); dst < args.num_ranks(); dst += num_threads()) {
        if (is_masked(args, dst)) continue;
        args.transport.signal(dst, args.control.barrier(args.rank()), round, 0);
    }
    await_all(
        args,
        open,
        open.op,
        [&](int source) { return args.control.barrier(source); },
        [](int) { return true; });
    block_sync();
    if (thread_index() != 0) return;
    if (args.workspace->failed != 0) tell_given_up(args, Series::kBarriers, {round, 1});
    record_end(args, args.workspace->failed, now_ns());
    args.workspace->barriers = round;
    args.workspace->failed = 0;
    args.transport.flush();
}

// The end of the buffer on this rank. Tells all ranks, and waits until all that are not masked have said so.
// Counts as the last of all barriers, so that it does not matter how many a rank was away for.
EP_KERNEL void part(const EP_GRID_CONSTANT OperationArgs args) {
    constexpr uint64_t kLast = uint64_t{1} << 60;
    const OpenOperation open{kLast, 0, deadline_in(args.timeout_ns), Series::kBarriers};
    for (int dst = thread_index(); dst < args.num_ranks(); dst += num_threads()) {
        if (!has_ended(args, dst))
            args.transport.signal(dst, args.control.barrier(args.rank()), kLast, 0);
    }
    await_all(
        args,
        open,
        kLast,
        [&](int source) { return args.control.barrier(source); },
        [](int) { return true; });
    if (thread_index() == 0) args.transport.flush();
}

}  // namespace ep
