// How an operation fails on this rank: what it leaves for the host, and what it tells the others.
//
// A rank that gives up leaves a FailureRecord and closes the operation all the same. It tells the others
// which numbers it has given up: who comes late to one of them fails as well and takes up the newest,
// so that all meet in the next one.
#pragma once

#include "kernels/protocol/masks.cuh"

namespace ep {

// One thread. The first reason recorded in an operation stays.
EP_DEVICE void leave_record(const OperationArgs& args,
                            const OpenOperation& open,
                            FailureReason reason,
                            int source,
                            const RowPlace& row = {}) {
    FailureRecord* record = args.failure;
    record->operation = static_cast<Operation>(args.shape.operation);
    record->op = open.op;
    record->waited_ns = args.timeout_ns - left_ns(open.deadline);
    for (int i = 0; i < OpHeader::kNumAgreed; ++i) {
        record->seen_shape[i] = header_word(args, open.half, source, agreed_field(i));
        record->expected_shape[i] = args.agreed(i);
    }
    record->row = row;
    store_relaxed<Scope::kSystem>(&record->ranks[source], 1u);
    store_release<Scope::kSystem>(&record->reason, static_cast<uint32_t>(reason));
}

// One thread. Whether a failure follows from one that the host has not taken yet, and which says more: where a dispatch
// has failed, its combine finds an empty handle. On a GPU both may have been launched before the host looks.
EP_DEVICE bool follows(const OperationArgs& args, FailureReason reason) {
    return reason == FailureReason::kHandle &&
           load_relaxed<Scope::kSystem>(&args.failure->reason) != 0;
}

// One thread. Ends the operation on this rank.
EP_DEVICE void record_failure(const OperationArgs& args,
                              const OpenOperation& open,
                              FailureReason reason,
                              int source,
                              const RowPlace& row = {}) {
    const auto first = compare_exchange_relaxed<Scope::kDevice>(
        &args.workspace->failed, 0u, static_cast<uint32_t>(reason));
    if (first == 0) {
        if (!follows(args, reason)) leave_record(args, open, reason, source, row);
    } else if (first == static_cast<uint32_t>(reason) && reason != FailureReason::kHandle) {
        store_relaxed<Scope::kSystem>(&args.failure->ranks[source], 1u);
    }
}

// Block. Whether the operation has failed on this rank; all threads agree.
EP_DEVICE bool has_failed(const OperationArgs& args) {
    return block_any(load_relaxed<Scope::kDevice>(&args.workspace->failed) != 0);
}

EP_DEVICE void tell_given_up(const OperationArgs& args, Series series, const GivenUp& given_up) {
    for (int dst = 0; dst < args.num_ranks(); ++dst) {
        if (dst == args.rank() || is_masked(args, dst)) continue;
        args.transport.signal(dst, args.control.given_up(series, args.rank()), given_up.pack(), 0);
    }
}

// Newest number that any rank has given up in a series.
EP_DEVICE uint64_t newest_given_up(const OperationArgs& args, Series series) {
    uint64_t newest = 0;
    for (int source = 0; source < args.num_ranks(); ++source) {
        if (is_masked(args, source)) continue;
        const auto word = args.transport.newest(args.control.given_up(series, source));
        const uint64_t number = GivenUp::unpack(word).newest;
        newest = number > newest ? number : newest;
    }
    return newest;
}

// Block. Names the ranks that have left this operation behind.
EP_DEVICE void find_given_up(const OperationArgs& args, const OpenOperation& open) {
    for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
        if (is_left_out(args, source)) continue;
        const size_t header = args.control.header(open.half, source) + offsetof(OpHeader, op);
        const size_t given_up = args.control.given_up(Series::kOperations, source);
        if (args.transport.newest(header) > open.op ||
            GivenUp::unpack(args.transport.newest(given_up)).contains(open.op))
            record_failure(args, open, FailureReason::kAbandoned, source);
    }
}

}  // namespace ep
