// What dispatch and combine share: how an operation opens (headers to everyone), how a rank waits
// for the others (headers, then counts), and how it closes (counters, operation number).
//
//   open    Block 0 stamps the entry and sends every rank an OpHeader: number, entry, shape.
//   wait    A source's header with our number must come and agree in shape; then its CountWords.
//           Silence until the deadline means that the source is missing. This leaves a FailureRecord
//           and ends the operation.
//   close   The last block to finish turns stamps into counters and counts the operation, failed or
//           not. A rank that gave up tells the others: who comes late to an operation that others
//           have given up fails as well and takes up their number, so that all meet in the next one.
#pragma once

#include "kernels/counters.cuh"
#include "kernels/messages.cuh"
#include "transport/transport.cuh"

namespace ep {

enum class FailureKind : uint32_t {
    kNone = 0,
    kTimeout = 1,
    kMismatch = 2,
    kAbandoned = 3,
    kIndex = 4
};

// Left in host-visible memory by a kernel that gives up.
struct FailureRecord {
    uint32_t kind;  // FailureKind
    Operation operation;
    uint64_t op;
    uint64_t waited_ns;
    uint64_t seen_shape[2];  // of the first rank that disagrees
    uint64_t expected_shape[2];
    uint32_t ranks[kMaxExperts];  // 1: this rank is missing, disagrees or has given up
};

// Per-rank device memory, private to the rank and kept between launches.
struct Workspace {
    uint64_t op;  // operations closed
    uint64_t barriers;
    uint64_t clock_rounds;
    uint64_t entered_ns;
    uint64_t wait_begin_ns;
    uint64_t previous_exit_ns;
    uint32_t blocks_done;
    uint32_t failed;
    // By destination expert (dispatch) or local expert * num_ranks + destination (combine).
    uint32_t issued[kMaxExperts];
    uint64_t issued_ns[kMaxExperts];
    // By index of the CountWord they came with.
    uint32_t counts[kMaxExperts];
    uint32_t issued_lo[kMaxExperts];
    uint64_t arrival_ns[kMaxExperts];
    // By rank.
    int64_t clock_offset_ns[kMaxExperts];  // its clock minus this rank's
    int64_t round_trip_ns[kMaxExperts];
    int64_t source_arrival_ns[kMaxExperts];
};

enum Phase : int { kPhaseSend = 1, kPhaseReceive = 2 };

// Arguments common to all low-latency kernels.
struct OperationArgs {
    Transport transport;
    Workspace* workspace;
    FailureRecord* failure;
    ControlMap control;
    LowLatencyMap map;
    OpShape shape;
    uint64_t timeout_ns;
    int phases;
    CounterView counters;
    int64_t* wait_stats;  // [num_ranks] nanoseconds, or nullptr
    size_t row_bytes;     // payload of one received row

    EP_DEVICE int rank() const { return transport.rank; }
    EP_DEVICE int num_ranks() const { return transport.num_ranks; }
    EP_DEVICE bool measures() const { return counters.on() || wait_stats != nullptr; }
};

// The operation a launch belongs to. In hook mode send and receive are two launches of one operation.
struct OpenOperation {
    uint64_t op;
    int half;
    Deadline deadline;
};

EP_DEVICE OpenOperation current_operation(const OperationArgs& args) {
    const uint64_t op = args.workspace->op + 1;
    return {op, static_cast<int>(op % kNumHalves), deadline_in(args.timeout_ns)};
}

EP_DEVICE void send_headers(const OperationArgs& args, const OpenOperation& open) {
    if (block_index() != 0) return;
    const Transport& transport = args.transport;
    if (thread_index() == 0) args.workspace->entered_ns = now_ns();
    block_sync();
    const uint64_t entered_ns = args.workspace->entered_ns;
    for (int i = thread_index(); i < args.num_ranks(); i += num_threads()) {
        const int dst = (args.rank() + i) % args.num_ranks();
        const size_t header = args.control.header(open.half, args.rank());
        transport.put_word(dst, header + offsetof(OpHeader, entered_ns), entered_ns, 0);
        transport.put_word(dst, header + offsetof(OpHeader, shape), args.shape.word(0), 0);
        transport.put_word(
            dst, header + offsetof(OpHeader, shape) + sizeof(uint64_t), args.shape.word(1), 0);
        transport.fence(dst, 0);
        transport.signal(dst, header + offsetof(OpHeader, op), open.op, 0);
    }
}

// One thread. The first kind recorded in an operation stays.
EP_DEVICE void leave_record(const OperationArgs& args,
                            const OpenOperation& open,
                            FailureKind kind,
                            int source) {
    FailureRecord* record = args.failure;
    record->operation = static_cast<Operation>(args.shape.operation);
    record->op = open.op;
    record->waited_ns = args.timeout_ns;
    for (int i = 0; i < 2; ++i) {
        const size_t seen = args.control.header(open.half, source) + offsetof(OpHeader, shape) +
                            i * sizeof(uint64_t);
        record->seen_shape[i] = *reinterpret_cast<const uint64_t*>(args.transport.local(seen));
        record->expected_shape[i] = args.shape.word(i);
    }
    store_relaxed<Scope::kSystem>(&record->ranks[source], 1u);
    store_release<Scope::kSystem>(&record->kind, static_cast<uint32_t>(kind));
}

// One thread. Ends the operation on this rank.
EP_DEVICE void record_failure(const OperationArgs& args,
                              const OpenOperation& open,
                              FailureKind kind,
                              int source) {
    const auto first = compare_exchange_relaxed<Scope::kDevice>(
        &args.workspace->failed, 0u, static_cast<uint32_t>(kind));
    if (first == 0) {
        leave_record(args, open, kind, source);
    } else if (first == static_cast<uint32_t>(kind)) {
        store_relaxed<Scope::kSystem>(&args.failure->ranks[source], 1u);
    }
}

// Newest number that any rank has given up in a series.
EP_DEVICE uint64_t newest_given_up(const OperationArgs& args, Series series) {
    uint64_t newest = 0;
    for (int source = 0; source < args.num_ranks(); ++source) {
        const uint64_t number = args.transport.poll(args.control.given_up(series, source));
        newest = number > newest ? number : newest;
    }
    return newest;
}

EP_DEVICE void tell_given_up(const OperationArgs& args, Series series, uint64_t number) {
    for (int dst = 0; dst < args.num_ranks(); ++dst) {
        if (dst != args.rank())
            args.transport.signal(dst, args.control.given_up(series, args.rank()), number, 0);
    }
}

EP_DEVICE uint64_t header_word(const OperationArgs& args, int half, int source, size_t field) {
    return *reinterpret_cast<const uint64_t*>(
        args.transport.local(args.control.header(half, source) + field));
}

// One thread. Pairs with the signal in send_headers().
EP_DEVICE void wait_for_header(const OperationArgs& args, const OpenOperation& open, int source) {
    const size_t word = args.control.header(open.half, source) + offsetof(OpHeader, op);
    uint64_t seen = 0;
    const bool arrived = spin_until(
        [&] {
            seen = args.transport.poll(word);
            return seen >= open.op;
        },
        open.deadline);
    if (!arrived) {
        record_failure(args, open, FailureKind::kTimeout, source);
    } else if (seen == open.op &&
               (header_word(args, open.half, source, offsetof(OpHeader, shape)) !=
                    args.shape.word(0) ||
                header_word(
                    args, open.half, source, offsetof(OpHeader, shape) + sizeof(uint64_t)) !=
                    args.shape.word(1))) {
        record_failure(args, open, FailureKind::kMismatch, source);
    }
}

EP_DEVICE bool has_given_up(const OperationArgs& args, const OpenOperation& open, int source) {
    const size_t header = args.control.header(open.half, source) + offsetof(OpHeader, op);
    return args.transport.poll(header) > open.op ||
           args.transport.poll(args.control.given_up(Series::kOperations, source)) >= open.op;
}

// Block. Begins the receive phase: stamps the wait and hears from every rank. False when the
// operation has failed; all threads agree.
EP_DEVICE bool wait_for_headers(const OperationArgs& args, const OpenOperation& open) {
    if (block_index() == 0 && thread_index() == 0) args.workspace->wait_begin_ns = now_ns();
    for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
        wait_for_header(args, open, source);
    }
    // Another block may fail between two threads' looks, and they must not part ways.
    if (block_any(load_relaxed<Scope::kDevice>(&args.workspace->failed) != 0)) return false;
    // Only now: who gave up may have done so because another rank disagrees, and that one is to be named.
    for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
        if (has_given_up(args, open, source))
            record_failure(args, open, FailureKind::kAbandoned, source);
    }
    return !block_any(load_relaxed<Scope::kDevice>(&args.workspace->failed) != 0);
}

// Block. Waits for the CountWords index_of(0) .. index_of(num_words - 1) and notes their contents.
// A thread looks at all its words in every poll, so that a late source does not hide when another
// one arrived. Pairs with the signals in announce_rows(). False when the operation has failed.
template <class IndexOf, class SourceOf>
EP_DEVICE bool wait_for_counts(const OperationArgs& args,
                               const OpenOperation& open,
                               int num_words,
                               IndexOf index_of,
                               SourceOf source_of) {
    constexpr int kWordsPerPoll = 64;  // bits of the mask of those still missing
    const uint32_t tag = CountWord::tag_of(open.op);
    Workspace* workspace = args.workspace;
    for (int base = thread_index(); base < num_words; base += kWordsPerPoll * num_threads()) {
        uint64_t missing = 0;
        for (int j = 0; j < kWordsPerPoll; ++j) {
            if (base + j * num_threads() < num_words) missing |= 1ull << j;
        }
        const auto look = [&] {
            for (int j = 0; j < kWordsPerPoll && missing >> j != 0; ++j) {
                if (!(missing >> j & 1)) continue;
                const int index = index_of(base + j * num_threads());
                const size_t offset = args.control.count(open.half, index);
                const CountWord word = CountWord::unpack(args.transport.poll(offset));
                if (word.tag != tag) continue;
                missing &= ~(1ull << j);
                const uint64_t arrival_ns = args.transport.arrival_ns(offset);
                workspace->counts[index] = word.count;
                workspace->issued_lo[index] = word.issued_lo;
                workspace->arrival_ns[index] = arrival_ns;
            }
            return missing == 0;
        };
        if (spin_until(look, open.deadline)) continue;
        for (int j = 0; j < kWordsPerPoll; ++j) {
            if (missing >> j & 1) {
                record_failure(args,
                               open,
                               FailureKind::kTimeout,
                               source_of(index_of(base + j * num_threads())));
            }
        }
    }
    return !block_any(load_relaxed<Scope::kDevice>(&workspace->failed) != 0);
}

// One thread. All rows of (this rank, expert) to dst have been put on `qp` and counted in `issued`.
EP_DEVICE void announce_rows(const OperationArgs& args,
                             const OpenOperation& open,
                             int dst,
                             int word_index,
                             int counter_index,
                             int count,
                             int qp) {
    args.transport.fence(dst, qp);
    const uint64_t issued_ns = now_ns();
    const CountWord word{
        CountWord::tag_of(open.op), static_cast<uint32_t>(count), static_cast<uint32_t>(issued_ns)};
    args.transport.signal(dst, args.control.count(open.half, word_index), word.pack(), qp);
    args.workspace->issued_ns[counter_index] = issued_ns;
    args.workspace->issued[counter_index] =
        0;  // for the next operation; nobody else looks until then
}

// One thread. Until every block's puts that `issued[counter_index]` counts have happened.
EP_DEVICE bool wait_until_issued(const OperationArgs& args,
                                 const OpenOperation& open,
                                 int counter_index,
                                 int count) {
    const uint32_t* issued = &args.workspace->issued[counter_index];
    return spin_until(
        [&] { return load_acquire<Scope::kDevice>(issued) == static_cast<uint32_t>(count); },
        open.deadline);
}

// One thread, once per source: what one operation adds to the counters of this source.
EP_DEVICE void count_source(const OperationArgs& args,
                            const OpenOperation& open,
                            int source,
                            int first_word,
                            int word_stride) {
    const Workspace& workspace = *args.workspace;
    const uint64_t entered_remote =
        header_word(args, open.half, source, offsetof(OpHeader, entered_ns));
    uint64_t issued_remote = entered_remote;
    int64_t arrival = 0;
    int64_t tokens = 0;
    for (int i = 0; i < args.map.num_local_experts(); ++i) {
        const int index = first_word + i * word_stride;
        const CountWord word{0, 0, workspace.issued_lo[index]};
        const uint64_t issued = word.issued_ns(entered_remote);
        issued_remote = issued > issued_remote ? issued : issued_remote;
        arrival = static_cast<int64_t>(workspace.arrival_ns[index]) > arrival
                      ? static_cast<int64_t>(workspace.arrival_ns[index])
                      : arrival;
        tokens += workspace.counts[index];
    }
    const int64_t offset = workspace.clock_offset_ns[source];
    const SourceTiming timing{static_cast<int64_t>(workspace.wait_begin_ns),
                              static_cast<int64_t>(entered_remote) - offset,
                              static_cast<int64_t>(issued_remote) - offset,
                              arrival};
    args.workspace->source_arrival_ns[source] = arrival;
    const int64_t wait = timing.wait();
    if (args.wait_stats != nullptr) args.wait_stats[source] += wait;
    if (!args.counters.on()) return;

    const auto total = [&](SourceCounter counter) -> int64_t& {
        return args.counters.totals[counter * args.num_ranks() + source];
    };
    total(kSource_ops) += 1;
    total(kSource_tokens) += tokens;
    total(kSource_bytes) += tokens * static_cast<int64_t>(args.row_bytes);
    total(kSource_wait_ns) += wait;
    total(kSource_late_ns) += timing.late();
    total(kSource_issue_ns) += timing.issue();
    total(kSource_path_ns) += timing.path();
    total(kSource_slack_ns) += timing.slack();
    if (wait > total(kSource_max_wait_ns)) total(kSource_max_wait_ns) = wait;
    if (args.counters.ring_capacity == 0) return;
    int64_t* entry =
        args.counters.ring +
        (open.op % args.counters.ring_capacity * (args.num_ranks() + 1) + source) * kNumRingFields;
    entry[kRingEntered] = timing.entered;
    entry[kRingIssued] = timing.issued;
    entry[kRingArrival] = timing.arrival;
    entry[kRingTokens] = tokens;
}

// One thread, after count_source() for all.
EP_DEVICE void count_operation(const OperationArgs& args, const OpenOperation& open) {
    const Workspace& workspace = *args.workspace;
    const CounterView& counters = args.counters;
    const auto wait_begin = static_cast<int64_t>(workspace.wait_begin_ns);
    int last = 0;
    int64_t runner_up = wait_begin;
    for (int source = 1; source < args.num_ranks(); ++source) {
        const int64_t arrival = workspace.source_arrival_ns[source];
        const int64_t latest = workspace.source_arrival_ns[last];
        const int64_t second = arrival > latest ? latest : arrival;
        runner_up = second > runner_up ? second : runner_up;
        if (arrival > latest) last = source;
    }
    const int64_t last_arrival = workspace.source_arrival_ns[last];
    if (last_arrival > wait_begin) {
        counters.totals[kSource_critical_ops * args.num_ranks() + last] += 1;
        counters.totals[kSource_critical_ns * args.num_ranks() + last] += last_arrival - runner_up;
    }
    uint64_t issued_ns = workspace.entered_ns;
    for (int i = 0; i < args.map.num_experts; ++i) {
        issued_ns = workspace.issued_ns[i] > issued_ns ? workspace.issued_ns[i] : issued_ns;
    }
    const auto exit = static_cast<int64_t>(now_ns());
    const auto previous_exit = static_cast<int64_t>(workspace.previous_exit_ns);
    counters.own[kOwn_ops] += 1;
    if (previous_exit != 0)
        counters.own[kOwn_gap_ns] += static_cast<int64_t>(workspace.entered_ns) - previous_exit;
    counters.own[kOwn_send_ns] += static_cast<int64_t>(issued_ns - workspace.entered_ns);
    counters.own[kOwn_wait_ns] += last_arrival > wait_begin ? last_arrival - wait_begin : 0;
    counters.own[kOwn_drain_ns] += exit - (last_arrival > wait_begin ? last_arrival : wait_begin);
    if (counters.ring_capacity == 0) return;
    int64_t* entry = counters.ring + (open.op % counters.ring_capacity * (args.num_ranks() + 1) +
                                      args.num_ranks()) *
                                         kNumRingFields;
    entry[kRingOp] = static_cast<int64_t>(open.op);
    entry[kRingWaitBegin] = wait_begin;
    entry[kRingExit] = exit;
    entry[kRingPreviousExit] = previous_exit;
}

// Block, at the end of the receive phase. CountWords of a source are at first_word(source) and then
// every word_stride. `is_last` is one int of shared memory.
template <class FirstWord>
EP_DEVICE void close_operation(const OperationArgs& args,
                               const OpenOperation& open,
                               int* is_last,
                               FirstWord first_word,
                               int word_stride) {
    Workspace* workspace = args.workspace;
    block_sync();
    if (thread_index() == 0) {
        *is_last = add_acq_rel<Scope::kDevice>(&workspace->blocks_done, 1u) + 1 ==
                   static_cast<uint32_t>(num_blocks());
    }
    block_sync();
    if (!*is_last) return;
    const bool measured = args.measures() && load_relaxed<Scope::kDevice>(&workspace->failed) == 0;
    if (measured) {
        for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
            count_source(args, open, source, first_word(source), word_stride);
        }
    }
    block_sync();
    if (thread_index() != 0) return;
    if (measured && args.counters.on()) count_operation(args, open);
    uint64_t op = open.op;
    if (workspace->failed != 0) {
        tell_given_up(args, Series::kOperations, op);
        const uint64_t newest = newest_given_up(args, Series::kOperations);
        op = newest > op ? newest : op;
    }
    workspace->previous_exit_ns = now_ns();
    workspace->blocks_done = 0;
    workspace->failed = 0;
    workspace->op = op;
    args.transport.flush();
}

}  // namespace ep
