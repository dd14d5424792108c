// From one layout of the buffer to another, and back into step after a failure.
//
// While sizes stay, the two halves keep apart what ranks still read and what others already send. Rows
// of another layout would lie across both. And after an operation that failed nobody knows what the
// others still read, or what is still on its way. So before a rank sends in an operation whose layout
// differs from its last one's, whose last one failed, or who left one out, it waits
//
//   1 for the headers of all ranks: they have left every earlier operation, and agree in shape;
//   2 until what it sent itself, to anybody, has been delivered, and until all others that hand over
//     say the same of theirs: nothing old can arrive any more, anywhere.
//
// This costs nothing while sizes stay, and two round trips where they change. Headers say who hands
// over; who has another layout than the others finds that out before it sends.
#pragma once

#include "kernels/protocol/waiting.cuh"

namespace ep {

// Whether rows of this operation may lie across what earlier ones still use.
EP_DEVICE bool hands_over(const OperationArgs& args) {
    const Layout& last = args.workspace->layout;
    return args.skips() || (!(last == args.layout) && !last.is_fresh());
}

// Block. Returns when everything this rank has sent so far is there.
EP_DEVICE void deliver_all(const OperationArgs& args) {
    for (int dst = thread_index(); dst < args.num_ranks(); dst += num_threads()) {
        if (is_masked(args, dst)) continue;
        for (int qp = 0; qp < static_cast<int>(args.workspace->num_queue_pairs); ++qp)
            args.transport.quiet(dst, qp);
    }
}

// Block. Tells all ranks that everything this rank has sent so far is there. To all of them: a rank
// that is told sends to others than this one, over what this one may have sent them.
EP_DEVICE void tell_handed_over(const OperationArgs& args, const OpenOperation& open) {
    deliver_all(args);
    block_sync();
    for (int dst = thread_index(); dst < args.num_ranks(); dst += num_threads()) {
        if (is_masked(args, dst)) continue;
        args.transport.signal(dst, args.control.handed_over(args.rank()), open.op, 0);
    }
}

// Block. Waits for the headers of all ranks. Whether they are in this operation and agree in shape; all
// threads agree.
EP_DEVICE bool meet_headers(const OperationArgs& args, const OpenOperation& open) {
    const auto header = [&](int source) { return args.control.header(open.half, source); };
    await_all(
        args,
        open,
        open.op,
        [&](int s) { return header(s) + offsetof(OpHeader, op); },
        [](int) { return true; });
    if (has_failed(args)) return false;
    for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
        if (is_masked(args, source)) continue;
        const uint64_t op = args.transport.poll(header(source) + offsetof(OpHeader, op));
        if (op == open.op && !agrees_in_shape(args, open, source))
            record_failure(args, open, FailureReason::kMismatch, source);
    }
    if (has_failed(args)) return false;
    find_given_up(args, open);
    return !has_failed(args);
}

// Of the timeout: how long who has skipped operations waits for the first of the others. Chosen; ranks that meet
// between their calls begin them within much less.
constexpr uint64_t kShareForTheFirst = 4;

// Block 0, of a rank that skips what the group has given up. Either it had left calls out, and the others come to
// this operation now; or it is late, and they have left the step. Then it fails, and leaves this operation to its next
// call. Whether they come; all threads agree.
EP_DEVICE bool comes_with_others(const OperationArgs& args, const OpenOperation& open) {
    const auto has_come = [&](int source) {
        const size_t word = args.control.header(open.half, source) + offsetof(OpHeader, op);
        return source != args.rank() && args.transport.poll(word) >= open.op;
    };
    const auto look = [&] {
        bool came = false;
        for (int source = 0; source < args.num_ranks(); ++source) came = came || has_come(source);
        return came || is_lost(args, open);
    };
    const Deadline deadline = deadline_in(args.timeout_ns / kShareForTheFirst);
    const bool came = thread_index() != 0 || spin_until(look, deadline);
    if (!block_any(!came)) return true;
    for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
        if (source != args.rank() && !is_masked(args, source))
            record_failure(args, open, FailureReason::kLate, source);
    }
    return false;
}

// Block, behind hand_over(). Whether this rank is late, and has not entered the operation.
EP_DEVICE bool stays_away(const OperationArgs& args, const OpenOperation& open) {
    return args.skips() && load_relaxed<Scope::kSystem>(&args.workspace->open_op) != open.op;
}

// Block 0. Whether rows may be sent.
EP_DEVICE bool meet_all(const OperationArgs& args, const OpenOperation& open) {
    if (!meet_headers(args, open)) return false;
    tell_handed_over(args, open);
    await_all(
        args,
        open,
        open.op,
        [&](int s) { return args.control.handed_over(s); },
        [&](int s) {
            return (header_word(args, open.half, s, offsetof(OpHeader, flags)) & kHandsOver) != 0;
        },
        Owed::kRows);
    return !has_failed(args);
}

// Block, after send_headers(). Whether this rank may send rows; all blocks agree. False when the
// operation has failed.
EP_DEVICE bool hand_over(const OperationArgs& args, const OpenOperation& open) {
    if (!hands_over(args)) return true;
    uint64_t* handed_over = &args.workspace->handed_over;
    if (block_index() == 0) {
        if (thread_index() == 0) store_relaxed<Scope::kSystem>(&args.workspace->meets, 1u);
        const bool may_send = !stays_away(args, open) && meet_all(args, open);
        if (thread_index() == 0) {
            store_relaxed<Scope::kSystem>(&args.workspace->meets, 0u);
            store_release<Scope::kDevice>(handed_over, open.op * 2 + (may_send ? 1 : 0));
        }
    }
    uint64_t outcome = 0;
    const auto look = [&] {
        outcome = load_acquire<Scope::kDevice>(handed_over);
        return outcome / 2 >= open.op;
    };
    while (!spin_until(look, open.deadline)) {  // block 0 keeps the deadline
    }
    return !block_any(outcome % 2 == 0);
}

}  // namespace ep
