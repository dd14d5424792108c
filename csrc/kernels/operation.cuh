// What dispatch and combine share: how an operation opens (headers to everyone), how a rank waits
// for the others, and how it closes (counters, operation number).
//
//   open    Block 0 stamps the entry and sends every rank an OpHeader: number, entry, shape.
//   wait    Of every source the header with our number, which must agree in shape, and its CountWords.
//           Silence until the deadline means that the source is missing. This leaves a FailureRecord
//           and ends the operation.
//   close   The last block to finish turns stamps into counters, exchanges clocks where rank 0 asks for
//           it, and counts the operation, failed or not. A rank that gave up tells the others: who
//           comes late to an operation that others have given up fails as well and takes up their
//           number, so that all meet in the next one.
#pragma once

#include "kernels/clocks.cuh"
#include "kernels/measuring.cuh"

namespace ep {

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
    const bool exchanges_clocks = clock_exchange_is_due(args, entered_ns);
    for (int i = thread_index(); i < args.num_ranks(); i += num_threads()) {
        const int dst = (args.rank() + i) % args.num_ranks();
        const size_t header = args.control.header(open.half, args.rank());
        transport.put_word(dst, header + offsetof(OpHeader, entered_ns), entered_ns, 0);
        transport.put_word(dst, header + offsetof(OpHeader, shape), args.shape.word(0), 0);
        transport.put_word(
            dst, header + offsetof(OpHeader, shape) + sizeof(uint64_t), args.shape.word(1), 0);
        transport.put_word(
            dst, header + offsetof(OpHeader, exchanges_clocks), exchanges_clocks ? 1 : 0, 0);
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
        const uint64_t number = args.transport.newest(args.control.given_up(series, source));
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

EP_DEVICE bool has_given_up(const OperationArgs& args, const OpenOperation& open, int source) {
    const size_t header = args.control.header(open.half, source) + offsetof(OpHeader, op);
    return args.transport.newest(header) > open.op ||
           args.transport.newest(args.control.given_up(Series::kOperations, source)) >= open.op;
}

EP_DEVICE bool agrees_in_shape(const OperationArgs& args, const OpenOperation& open, int source) {
    for (int i = 0; i < 2; ++i) {
        const size_t word = offsetof(OpHeader, shape) + i * sizeof(uint64_t);
        if (header_word(args, open.half, source, word) != args.shape.word(i)) return false;
    }
    return true;
}

// What the threads of a block that waits share. The words it looks for (items) are dealt to the
// threads in turn.
struct WaitShared {
    static constexpr int kItemsPerMask = 64;

    // [masks, num_threads]: bit j of mask m of a thread is its item m * 64 + j, set while it is missing.
    uint64_t* missing;
    struct State {
        uint64_t begin_ns;
        int headers_left;
        int hopeless;  // a rank disagrees, or has left this operation behind
        int quit;      // and all headers have come
    }* state;

    EP_DEVICE WaitShared(SharedArena arena, int num_items) {
        missing = arena.take<uint64_t>(num_masks(num_items, num_threads()) * num_threads());
        state = arena.take<State>(1);
    }
    EP_HOST_DEVICE static int num_masks(int num_items, int threads) {
        const int per_thread = (num_items + threads - 1) / threads;
        return (per_thread + kItemsPerMask - 1) / kItemsPerMask;
    }
    // With what alignment may cost.
    EP_HOST_DEVICE static size_t bytes(int num_items, int threads) {
        return sizeof(uint64_t) * num_masks(num_items, threads) * threads + sizeof(State) +
               2 * alignof(uint64_t);
    }

    EP_DEVICE static int item(int mask, int bit) {
        return (mask * kItemsPerMask + bit) * num_threads() + thread_index();
    }
    EP_DEVICE void miss_all(int num_items) const {
        for (int mask = 0; mask < num_masks(num_items, num_threads()); ++mask) {
            uint64_t mine = 0;
            for (int bit = 0; bit < kItemsPerMask && item(mask, bit) < num_items; ++bit)
                mine |= 1ull << bit;
            missing[mask * num_threads() + thread_index()] = mine;
        }
    }
    // Calls is_there(item) for each of this thread's items that are missing, and takes out those that
    // are there. Whether none is left.
    template <class IsThere>
    EP_DEVICE bool look(int num_items, IsThere is_there) const {
        uint64_t any = 0;
        for (int mask = 0; mask < num_masks(num_items, num_threads()); ++mask) {
            uint64_t& mine = missing[mask * num_threads() + thread_index()];
            uint64_t left = mine;
            for (int bit = 0; bit < kItemsPerMask && mine >> bit != 0; ++bit) {
                if ((mine >> bit & 1) && is_there(item(mask, bit))) left &= ~(1ull << bit);
            }
            mine = left;
            any |= left;
        }
        return any == 0;
    }
};

// One thread. Whether the header of a source is there; checks its shape and notes when it was first
// seen. Pairs with the signal in send_headers().
EP_DEVICE bool find_header(const OperationArgs& args,
                           const OpenOperation& open,
                           WaitShared::State& state,
                           int source,
                           bool is_first_look) {
    const size_t word = args.control.header(open.half, source) + offsetof(OpHeader, op);
    const uint64_t seen = args.transport.poll(word);
    if (seen < open.op) return false;
    if (args.measures()) {
        note_sight(&args.workspace->header_sight[source],
                   sight_of(args, word, is_first_look, state.begin_ns));
    }
    const bool disagrees = seen == open.op && !agrees_in_shape(args, open, source);
    if (disagrees) record_failure(args, open, FailureKind::kMismatch, source);
    if (disagrees || seen > open.op) store_relaxed<Scope::kBlock>(&state.hopeless, 1);
    // Counts of a rank that disagrees or has gone on need never come. Still all headers are awaited,
    // so that everybody who disagrees is named, and not who gave up because of them.
    if (add_acq_rel<Scope::kBlock>(&state.headers_left, -1) == 1 &&
        load_relaxed<Scope::kBlock>(&state.hopeless) != 0) {
        store_relaxed<Scope::kBlock>(&state.quit, 1);
    }
    return true;
}

// One thread. Whether a CountWord is there; notes its contents and when it was first seen. Pairs with
// the signal in announce_rows().
EP_DEVICE bool find_count(const OperationArgs& args,
                          const OpenOperation& open,
                          const WaitShared::State& state,
                          int index,
                          bool is_first_look) {
    Workspace* workspace = args.workspace;
    const size_t offset = args.control.count(open.half, index);
    const CountWord word = CountWord::unpack(args.transport.poll(offset));
    if (word.tag != CountWord::tag_of(open.op)) return false;
    const Sight sight = sight_of(args, offset, is_first_look, state.begin_ns);
    if (args.measures()) note_sight(&workspace->word_sight[index], sight);
    workspace->counts[index] = word.count;
    workspace->issued_lo[index] = word.issued_lo;
    return true;
}

// Block. The receive phase: waits for the headers of all ranks and the CountWords index_of(0) ..
// index_of(num_words - 1), all in one loop, so that no source's arrival hides behind another's. False
// when the operation has failed; all threads agree.
template <class IndexOf, class SourceOf>
EP_DEVICE bool wait_for_words(const OperationArgs& args,
                              const OpenOperation& open,
                              const WaitShared& shared,
                              int num_words,
                              IndexOf index_of,
                              SourceOf source_of) {
    const int num_ranks = args.num_ranks();
    const int num_items = num_ranks + num_words;  // headers, then counts
    WaitShared::State& state = *shared.state;
    uint32_t* failed = &args.workspace->failed;
    shared.miss_all(num_items);
    if (thread_index() == 0) {
        state = {now_ns(), num_ranks, 0, 0};
        max_relaxed<Scope::kDevice>(&args.workspace->wait_begin_ns, state.begin_ns);
    }
    block_sync();

    bool is_first_look = true;
    const auto is_there = [&](int item) {
        return item < num_ranks
                   ? find_header(args, open, state, item, is_first_look)
                   : find_count(args, open, state, index_of(item - num_ranks), is_first_look);
    };
    const auto look = [&] {
        const bool complete = shared.look(num_items, is_there);
        is_first_look = false;
        return complete || load_relaxed<Scope::kBlock>(&state.quit) != 0;
    };
    if (!spin_until(look, open.deadline)) {
        shared.look(num_items, [&](int item) {
            const int source = item < num_ranks ? item : source_of(index_of(item - num_ranks));
            record_failure(args, open, FailureKind::kTimeout, source);
            return false;
        });
    }
    // Another block may fail between two threads' looks, and they must not part ways.
    if (block_any(load_relaxed<Scope::kDevice>(failed) != 0)) return false;
    // Only now: who gave up may have done so because another rank disagrees, and that one is to be named.
    for (int source = thread_index(); source < num_ranks; source += num_threads()) {
        if (has_given_up(args, open, source))
            record_failure(args, open, FailureKind::kAbandoned, source);
    }
    return !block_any(load_relaxed<Scope::kDevice>(failed) != 0);
}

// One thread. All rows of (this rank, expert) to dst have been put on `qp` and counted in `issued`.
EP_DEVICE void announce_rows(const OperationArgs& args,
                             const OpenOperation& open,
                             int dst,
                             int word_index,
                             int counter_index,
                             int count,
                             int qp) {
    Workspace* workspace = args.workspace;
    // Before the fence, which waits until the link has taken everything: that is the path's time.
    const uint64_t issued_ns = count > 0 ? workspace->issued_ns[counter_index] : now_ns();
    max_relaxed<Scope::kDevice>(&workspace->sent_ns, issued_ns);
    args.transport.fence(dst, qp);
    const CountWord word{
        CountWord::tag_of(open.op), static_cast<uint32_t>(count), static_cast<uint32_t>(issued_ns)};
    args.transport.signal(dst, args.control.count(open.half, word_index), word.pack(), qp);
    // For the next operation; nobody else looks until then.
    workspace->issued[counter_index] = 0;
    workspace->issued_ns[counter_index] = 0;
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

// Block, at the end of the receive phase. CountWords of a source are at first_word(source) and then
// every word_stride. Nothing else in shared memory is needed any more.
template <class FirstWord>
EP_DEVICE void close_operation(const OperationArgs& args,
                               const OpenOperation& open,
                               FirstWord first_word,
                               int word_stride) {
    Workspace* workspace = args.workspace;
    SharedArena arena;
    int* is_last = arena.take<int>(1);
    block_sync();
    if (thread_index() == 0) {
        *is_last = add_acq_rel<Scope::kDevice>(&workspace->blocks_done, 1u) + 1 ==
                   static_cast<uint32_t>(num_blocks());
    }
    block_sync();
    if (!*is_last) return;
    const bool succeeded = load_relaxed<Scope::kDevice>(&workspace->failed) == 0;
    const bool measured = args.measures() && succeeded;
    if (measured) {
        for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
            count_source(args, open, source, first_word(source), word_stride);
        }
    }
    block_sync();
    if (args.measures()) forget_sights(args);
    if (measured && args.counters.on() && thread_index() == 0) count_operation(args, open);
    if (succeeded && header_word(args, open.half, 0, offsetof(OpHeader, exchanges_clocks)) != 0)
        exchange_clocks(args, open);
    if (thread_index() != 0) return;
    uint64_t op = open.op;
    if (workspace->failed != 0) {
        tell_given_up(args, Series::kOperations, op);
        const uint64_t newest = newest_given_up(args, Series::kOperations);
        op = newest > op ? newest : op;
    }
    workspace->previous_exit_ns = now_ns();
    workspace->wait_begin_ns = 0;
    workspace->sent_ns = 0;
    workspace->blocks_done = 0;
    workspace->failed = 0;
    workspace->op = op;
    args.transport.flush();
}

}  // namespace ep
