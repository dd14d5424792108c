// What a normal operation adds to the counters: hop by hop, and per source rank of the hop.
//
//   what ends here    Dispatch: by the rank whose tokens they are, whichever gateway passed them on. Combine:
//                     by the rank of this node, or the gateway, that sent them.
//   what is relayed   Dispatch: by the gateway that sent it. Combine: by rank of this node.
// What of an issue time was waiting for slots is the receiver's doing, and counted by itself. A gateway may wait
// for slots long after the source has issued.
#pragma once

#include "kernels/normal/queue.cuh"
#include "kernels/protocol/measuring.cuh"

namespace ep {

// Block, once it has entered: what it does from here on depends on the others.
EP_DEVICE void begin_waiting(const OperationArgs& args) {
    if (thread_index() == 0) max_relaxed<Scope::kDevice>(&args.workspace->wait_begin_ns, now_ns());
}

// What the queues of one source say.
struct QueuesSeen {
    uint64_t arrival_ns = 0;
    uint64_t issued_ns = 0;   // on the source's clock
    uint64_t blocked_ns = 0;  // in the channel that waited longest
    int64_t tokens = 0;
    bool witnessed = false;
    bool is_relayed = false;  // somebody else than the source waited for slots

    EP_DEVICE void add(const NormalArgs& args, const Queue& queue) {
        const QueueState& state = state_of(args, queue, false);
        if (state.moved == 0) return;
        const uint64_t issued = last_word(args, queue, NormalControlMap::kIssuedNs);
        const uint64_t blocked = last_word(args, queue, NormalControlMap::kBlockedNs);
        tokens += state.moved;
        blocked_ns = blocked > blocked_ns ? blocked : blocked_ns;
        issued_ns = issued > issued_ns ? issued : issued_ns;
        if (state.arrival_ns < arrival_ns) return;
        arrival_ns = state.arrival_ns;
        witnessed = state.has_waited != 0 || args.common.transport.stamps_arrivals();
    }
};

// One thread. What the hop adds to the counters of one source.
EP_DEVICE void count_queues(const NormalArgs& args,
                            const OpenOperation& open,
                            const CounterView& counters,
                            int64_t* wait_stats,
                            int ring_slot,
                            int source,
                            const QueuesSeen& seen) {
    const OperationArgs& common = args.common;
    const uint64_t wait_begin = common.workspace->wait_begin_ns;
    const uint64_t entered = header_word(common, open.half, source, offsetof(OpHeader, entered_ns));
    const ClockLine clock = common.workspace->clocks[source];
    // What nobody saw come was there before; so was what need not come.
    const uint64_t arrival = seen.witnessed ? seen.arrival_ns : wait_begin;
    const int64_t offset = clock_offset_at(clock, arrival);
    const uint64_t issued = seen.issued_ns > entered ? seen.issued_ns : entered;
    const SourceTiming timing{static_cast<int64_t>(wait_begin),
                              static_cast<int64_t>(entered) - offset,
                              static_cast<int64_t>(issued) - offset,
                              static_cast<int64_t>(arrival)};
    common.workspace->source_arrival_ns[source] = timing.arrival;
    if (wait_stats != nullptr) wait_stats[source] += timing.wait();
    if (!counters.on()) return;
    SourceTotals totals(counters, source, common.num_ranks(), true);
    const int64_t clock_error = source == common.rank() ? 0 : clock_error_at(clock, arrival);
    const int64_t sending = timing.issue() + (seen.is_relayed ? timing.path() : 0);
    const auto blocked = static_cast<int64_t>(seen.blocked_ns);
    add_operation(
        counters,
        totals,
        {timing, seen.tokens, seen.witnessed, clock_error, blocked < sending ? blocked : sending},
        ring_slot,
        source,
        common.num_ranks(),
        common.row_bytes);
}

// Block. seen_of(source, QueuesSeen) adds the queues of a source; false: the hop has none.
template <class SeenOf>
EP_DEVICE void count_hop(const NormalArgs& args,
                         const OpenOperation& open,
                         const CounterView& counters,
                         int64_t* wait_stats,
                         SeenOf seen_of) {
    const OperationArgs& common = args.common;
    if (!counters.on() && wait_stats == nullptr) return;
    const int ring_slot = counters.on() ? counters.ring_slot(open.op) : 0;
    for (int source = thread_index(); source < common.num_ranks(); source += num_threads()) {
        QueuesSeen seen;
        if (seen_of(source, seen)) {
            count_queues(args, open, counters, wait_stats, ring_slot, source, seen);
        } else {
            common.workspace->source_arrival_ns[source] = INT64_MIN;
        }
    }
    block_sync();
    if (counters.on() && warp_id() == 0) count_operation(common, open, counters, ring_slot);
    block_sync();
}

}  // namespace ep
