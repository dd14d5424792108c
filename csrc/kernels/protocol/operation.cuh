// The protocol of an operation, which dispatch and combine share.
//
//   open     Block 0 stamps the entry and sends every rank an OpHeader: number, entry, shape. Where sizes
//            have changed, or the last operation failed, ranks then hand over (hand_over.cuh).
//   send     Warps count the rows that they have put. When all rows of a (source, expert) pair have been
//            counted, a CountWord announces them.
//   receive  Waits for the header of every source, with this operation's number, which must agree in shape,
//            and for its CountWords. Silence until the deadline means that the source is missing; this
//            ends the operation (waiting.cuh, failure.cuh).
//   close    The last block to finish looks whether anybody has left the operation behind meanwhile, turns
//            stamps into counters (measuring.cuh), exchanges clocks where rank 0 asks for it (clocks.cuh),
//            and counts the operation, failed or not.
#pragma once

#include "kernels/protocol/clocks.cuh"
#include "kernels/protocol/join.cuh"
#include "kernels/protocol/measuring.cuh"
#include "kernels/protocol/waiting.cuh"

namespace ep {

// ---- open

// Block.
EP_DEVICE OpenOperation current_operation(const OperationArgs& args) {
    join_if_cleaned(args);
    const uint64_t op = args.op();
    return {op, static_cast<int>(op % kNumHalves), deadline_in(args.timeout_ns)};
}

// Block. Enters the operation.
EP_DEVICE void send_headers(const OperationArgs& args, const OpenOperation& open) {
    if (block_index() != 0) return;
    if (args.skips() && !comes_with_others(args, open)) return;
    const Transport& transport = args.transport;
    Workspace* workspace = args.workspace;
    const size_t header = args.control.header(open.half, args.rank());
    const size_t contents = header + OpHeader::kContentsOffset;
    if (thread_index() == 0) {
        if (args.num_queue_pairs > workspace->num_queue_pairs)
            workspace->num_queue_pairs = args.num_queue_pairs;
        store_relaxed<Scope::kSystem>(&workspace->open_op, open.op);
        const uint64_t entered_ns = now_ns();
        workspace->entered_ns = entered_ns;
        record_entry(args, open.op, entered_ns);
        // The header for this rank, from which the others' are put. Like staged rows, it stays until the
        // next operation but one.
        auto* own = reinterpret_cast<OpHeader*>(transport.local(header));
        own->entered_ns = entered_ns;
        own->flags = 0;
        if (clock_exchange_is_due(args, entered_ns)) own->flags |= kExchangesClocks;
        if (hands_over(args)) own->flags |= kHandsOver;
        for (int i = 0; i < OpHeader::kNumAgreed; ++i) own->agreed[i] = args.agreed(i);
    }
    block_sync();
    for (int i = thread_index(); i < args.num_ranks(); i += num_threads()) {
        const int dst = (args.rank() + i) % args.num_ranks();
        if (is_masked(args, dst)) continue;
        if (dst != args.rank())
            transport.put(dst, contents, transport.local(contents), OpHeader::kContentsBytes, 0);
        transport.fence(dst, 0);
        transport.signal(dst, header + offsetof(OpHeader, op), open.op, 0);
    }
}

// Block, after send_headers(). hand_over() of a low-latency operation; where ranks may be masked, that has its
// full time afterwards.
EP_DEVICE bool may_send(const OperationArgs& args, OpenOperation& open) {
    const bool handed_over = hand_over(args, open);
    if (args.masks != nullptr) open.deadline = deadline_in(args.timeout_ns);
    keep_masks(args);
    return handed_over;
}

// ---- send

// One thread. Its warp has handed over rows counted in `issued[index]`, the last one at `now`: taken
// before this release, which may wait until the link has taken them. Pairs with wait_until_issued().
EP_DEVICE void count_issued(const OperationArgs& args, int index, uint32_t num_rows, uint64_t now) {
    max_relaxed<Scope::kDevice>(&args.workspace->issued_ns[index], now);
    add_release<Scope::kDevice>(&args.workspace->issued[index], num_rows);
}

// One thread. Until every block's puts that `issued[counter_index]` counts have happened. False when
// the operation has failed, on this rank, so that they may never.
EP_DEVICE bool wait_until_issued(const OperationArgs& args,
                                 const OpenOperation& open,
                                 int counter_index,
                                 int count) {
    const uint32_t* issued = &args.workspace->issued[counter_index];
    bool complete = false;
    const auto look = [&] {
        complete = load_acquire<Scope::kDevice>(issued) == static_cast<uint32_t>(count);
        return complete || load_relaxed<Scope::kDevice>(&args.workspace->failed) != 0;
    };
    if (!spin_until(look, open.deadline))
        record_failure(args, open, FailureReason::kTimeout, args.rank());
    return complete;
}

// Calls announce(word) for each of `num_words` once, in one thread. All blocks get equally many, and in a block all
// warps before a second lane, because each word has a fence to wait for. Last blocks first: the first has headers to send.
template <class Announce>
EP_DEVICE void for_each_announced(int num_words, Announce announce) {
    const int thread = lane_id() * num_warps() + warp_id();
    const int first = thread * num_blocks() + num_blocks() - 1 - block_index();
    for (int word = first; word < num_words; word += num_threads() * num_blocks()) announce(word);
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

// ---- receive

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
    if (disagrees) record_failure(args, open, FailureReason::kMismatch, source);
    if (disagrees || seen > open.op) store_relaxed<Scope::kBlock>(&state.hopeless, 1);
    add_relaxed<Scope::kBlock>(&state.headers_left, -1);
    return true;
}

// One thread. Whether a CountWord is there; notes its contents and when it was first seen. Pairs with
// the signal in announce_rows().
EP_DEVICE bool find_count(const OperationArgs& args,
                          const OpenOperation& open,
                          WaitShared::State& state,
                          int index,
                          int source,
                          bool is_first_look) {
    Workspace* workspace = args.workspace;
    const size_t offset = args.control.count(open.half, index);
    const CountWord word = CountWord::unpack(args.transport.poll(offset));
    if (word.tag != CountWord::tag_of(open.op)) return false;
    const Sight sight = sight_of(args, offset, is_first_look, state.begin_ns);
    if (args.measures()) note_sight(&workspace->word_sight[index], sight);
    // More than a rank may send would lie behind the tensors.
    const bool holds = word.count <= static_cast<uint32_t>(args.map.num_max_tokens);
    if (!holds) {
        const bool refused = word.count == kRefusedCount;
        record_failure(
            args, open, refused ? FailureReason::kAbandoned : FailureReason::kSurplus, source);
        store_relaxed<Scope::kBlock>(&state.hopeless, 1);
    }
    // Blocks that wait for the same word all write it.
    store_relaxed<Scope::kDevice>(&workspace->counts[index], holds ? word.count : 0);
    store_relaxed<Scope::kDevice>(&workspace->issued_lo[index], word.issued_lo);
    return true;
}

// One thread. The header of a source that the operation is without is not waited for.
EP_DEVICE bool pass_header(WaitShared::State& state) {
    add_relaxed<Scope::kBlock>(&state.headers_left, -1);
    return true;
}

// Block. Nothing of a source that is left out counts, whatever some block has seen of it.
template <class IndexOf, class SourceOf>
EP_DEVICE void drop_counts(const OperationArgs& args,
                           int num_words,
                           IndexOf index_of,
                           SourceOf source_of) {
    for (int i = thread_index(); i < num_words; i += num_threads()) {
        const int index = index_of(i);
        if (is_left_out(args, source_of(index)))
            store_relaxed<Scope::kDevice>(&args.workspace->counts[index], 0u);
    }
}

// Block. The receive phase: waits for the headers of all ranks and the CountWords index_of(0) ..
// index_of(num_words - 1), all in one loop, so that no source's arrival hides behind another's. False
// when the operation has failed; all threads agree, and all of the `num_waiting` blocks on whom they leave out.
template <class IndexOf, class SourceOf>
EP_DEVICE bool wait_for_words(const OperationArgs& args,
                              const OpenOperation& open,
                              const WaitShared& shared,
                              int num_words,
                              IndexOf index_of,
                              SourceOf source_of,
                              int num_waiting = num_blocks()) {
    if (stays_away(args, open)) return false;
    const int num_ranks = args.num_ranks();
    WaitShared::State& state = *shared.state;
    if (thread_index() == 0) {
        const bool failed = load_relaxed<Scope::kDevice>(&args.workspace->failed) != 0;
        state = {now_ns(), num_ranks, failed ? 0 : num_words, 0, 0};
        max_relaxed<Scope::kDevice>(&args.workspace->wait_begin_ns, state.begin_ns);
    }
    block_sync();
    // Headers, then counts. Who has failed already still awaits the headers, because its next operation
    // but one would overwrite what a slower rank has not looked at yet.
    const int num_items = num_ranks + state.num_words;
    shared.miss_all(num_items);

    bool is_first_look = true;
    const auto is_there = [&](int item) {
        const int index = item < num_ranks ? 0 : index_of(item - num_ranks);
        const int source = item < num_ranks ? item : source_of(index);
        if (is_left_out(args, source)) return item >= num_ranks || pass_header(state);
        return item < num_ranks ? find_header(args, open, state, source, is_first_look)
                                : find_count(args, open, state, index, source, is_first_look);
    };
    const auto for_each_missing = [&](auto f) {
        shared.look(num_items, [&](int item) {
            f(item < num_ranks ? item : source_of(index_of(item - num_ranks)));
            return false;
        });
    };
    const auto look = [&] {
        const bool complete = shared.look(num_items, is_there);
        is_first_look = false;
        if (complete || shared.is_over()) return true;
        if (load_relaxed<Scope::kSystem>(&args.workspace->news.any) == 0) return false;
        bool in_vain = is_lost(args, open);
        for_each_missing([&](int source) {
            const bool gone = is_gone(args, source);
            if (gone && args.masks != nullptr) return leave_out(args, source);
            in_vain = in_vain || gone;
        });
        if (in_vain) store_relaxed<Scope::kBlock>(&state.in_vain, 1);
        return in_vain;
    };
    const auto note = [&] {
        shared.look(num_items, [&](int item) {
            if (item < num_ranks)
                note_missing(args, open, Owed::kEntry, item);
            else
                note_missing(args, open, Owed::kRows, source_of(index_of(item - num_ranks)));
            return false;
        });
    };
    const bool in_time = spin_until(look, open.deadline, note);
    if (block_any(!in_time || load_relaxed<Scope::kBlock>(&state.in_vain) != 0)) {
        if (args.masks == nullptr) name_missing(args, open, for_each_missing);
        // Of ranks that have gone on nothing comes any more; that is no reason to leave them out.
        else if (!shared.is_hopeless())
            for_each_missing([&](int source) { leave_out(args, source); });
    }
    if (args.masks != nullptr) {
        agree_on_left_out(args, num_waiting);
        drop_counts(args, num_words, index_of, source_of);
    }
    // Who is hopeless has gone on; only now, because others may have done so for the one that disagrees.
    if (load_relaxed<Scope::kBlock>(&state.hopeless) != 0 && !has_failed(args))
        find_given_up(args, open);
    // Another block may fail between two threads' looks, and they must not part ways.
    return !has_failed(args);
}

// ---- close

// Block. Rows of an operation that failed may have been counted after they had been announced.
EP_DEVICE void forget_issued(const OperationArgs& args) {
    for (int i = thread_index(); i < args.map.num_experts; i += num_threads()) {
        args.workspace->issued[i] = 0;
        args.workspace->issued_ns[i] = 0;
    }
}

// Block, at the end of an operation. Nothing else in shared memory is needed any more. measure(ring slot,
// whether the operation succeeded) is called by the last block, after which nobody writes what it reads.
// True for one thread of the launch, if the operation succeeded.
template <class Measure>
EP_DEVICE bool close_operation(const OperationArgs& args,
                               const OpenOperation& open,
                               Measure measure) {
    Workspace* workspace = args.workspace;
    SharedArena arena;
    enum { kNotLast, kLast, kLastOfFailed };
    int* place = arena.take<int>(1);
    int* out_of_step = arena.take<int>(1);
    int* ring_slot = arena.take<int>(1);
    block_sync();
    if (thread_index() == 0) {
        const bool is_last = add_acq_rel<Scope::kDevice>(&workspace->blocks_done, 1u) + 1 ==
                             static_cast<uint32_t>(num_blocks());
        // Only the last one may look: it resets this word.
        *place = !is_last                                                ? kNotLast
                 : load_relaxed<Scope::kDevice>(&workspace->failed) != 0 ? kLastOfFailed
                                                                         : kLast;
        *out_of_step = 0;
    }
    // A division, while the first thread waits for `blocks_done`.
    if (thread_index() == num_threads() - 1) *ring_slot = args.counters.ring_slot(open.op);
    block_sync();
    if (*place == kNotLast) return false;
    // After the copies: they are of this operation only if nobody has left it behind.
    if (*place == kLast) find_given_up(args, open);
    // A rank that failed alone hands over while others do not; then all do in the next operation.
    for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
        if (is_left_out(args, source)) continue;
        const uint64_t flags = header_word(args, open.half, source, offsetof(OpHeader, flags));
        if (((flags & kHandsOver) != 0) != hands_over(args))
            store_relaxed<Scope::kBlock>(out_of_step, 1);
    }
    const bool succeeded = !has_failed(args);
    measure(*ring_slot, succeeded);
    const uint64_t flags = header_word(args, open.half, 0, offsetof(OpHeader, flags));
    if (succeeded && (flags & kExchangesClocks) && !is_left_out(args, 0))
        exchange_clocks(args, open);
    mask_left_out(args, open, succeeded);
    if (thread_index() != 0) return false;
    uint64_t op = open.op;
    if (stays_away(args, open)) {
        --op;  // is that of the next call
        workspace->handed_over = 0;
    }
    uint64_t num_given_up = 0;
    if (!succeeded) {
        num_given_up = workspace->num_given_up + op - workspace->op;
        tell_given_up(args, Series::kOperations, {op, num_given_up});
        const uint64_t newest = newest_given_up(args, Series::kOperations);
        if (newest > op) {
            num_given_up += newest - op;
            op = newest;
        }
    }
    workspace->num_given_up = num_given_up;
    if (args.shape.operation == static_cast<uint16_t>(Operation::kCombine))
        ++workspace->num_combines;
    workspace->previous_exit_ns = now_ns();
    record_end(args, workspace->failed, workspace->previous_exit_ns);
    store_relaxed<Scope::kSystem>(&workspace->wait_begin_ns, 0);
    workspace->sent_ns = 0;
    workspace->blocks_done = 0;
    workspace->failed = 0;
    workspace->layout = succeeded && *out_of_step == 0 ? args.layout : Layout::unknown();
    store_relaxed<Scope::kSystem>(&workspace->op, op);
    args.transport.flush();
    return succeeded;
}

// Block. close_operation() of a low-latency operation. CountWords of a source are at first_word(source) and
// then every word_stride.
template <class FirstWord>
EP_DEVICE bool close_low_latency(const OperationArgs& args,
                                 const OpenOperation& open,
                                 FirstWord first_word,
                                 int word_stride) {
    return close_operation(args, open, [&](int ring_slot, bool succeeded) {
        const bool measured = args.measures() && succeeded;
        if (measured) count_sources(args, open, ring_slot, first_word, word_stride);
        block_sync();
        if (!succeeded) forget_issued(args);
        if (args.measures()) forget_sights(args);
        if (measured && args.counters.on() && warp_id() == 0)
            count_operation(args, open, args.counters, ring_slot);
    });
}

}  // namespace ep
