// A ring of slots between two ranks, as its two ends see it. One team of warps has each end: one of its threads
// at a time looks and tells, all of its warps fill or empty slots in between.
#pragma once

#include "kernels/normal/state.cuh"
#include "kernels/protocol/failure.cuh"

namespace ep {

// One end of a queue.
struct Queue {
    Hop hop;
    int peer;   // rank at the other end
    int here;   // its number on this rank
    int there;  // and on the peer
    int channel;
    int slots;
};

// Between this rank and another one of its node, for what belongs to sources (combine: of that node).
EP_DEVICE Queue nvl_queue(const NormalArgs& args, int source_node, int peer_local, int channel) {
    const Topology& topology = args.queues.topology;
    return {Hop::kNvl,
            topology.rank_of(args.node, peer_local),
            topology.rank_of(source_node, peer_local),
            topology.rank_of(source_node, args.local_rank),
            channel,
            args.nvl_slots};
}

// Between this rank and the one of its place on another node.
EP_DEVICE Queue rdma_queue(const NormalArgs& args, int node, int channel) {
    return {Hop::kRdma,
            args.queues.topology.rank_of(node, args.local_rank),
            node,
            args.node,
            channel,
            args.num_max_rdma_chunked_recv_tokens};
}

EP_DEVICE QueueState& state_of(const NormalArgs& args, const Queue& queue, bool is_producer) {
    const Topology& topology = args.queues.topology;
    const int row = (queue.hop == Hop::kNvl ? 0 : topology.num_ranks) + queue.here;
    const int rows = topology.num_ranks + topology.num_nodes;
    return args.queue_states[((is_producer ? 0 : rows) + row) * args.num_channels + queue.channel];
}

EP_DEVICE size_t slot_bytes(const NormalArgs& args, Hop hop) {
    return hop == Hop::kNvl ? args.row.nvl_slot_bytes() : args.row.rdma_slot_bytes();
}

// Where the slot number `index` of an operation lies in the memory of the consumer.
EP_DEVICE size_t slot_of(const NormalArgs& args, const Queue& queue, bool is_producer, int index) {
    const int number = is_producer ? queue.there : queue.here;
    const size_t begin = queue.hop == Hop::kNvl
                             ? args.queues.nvl_queue(number, queue.channel)
                             : args.queues.rdma_queue(number, queue.channel, false);
    return begin + index % queue.slots * slot_bytes(args, queue.hop);
}

// Where its producer prepares it.
EP_DEVICE size_t staging_of(const NormalArgs& args, const Queue& queue, int index) {
    return args.queues.rdma_queue(queue.here, queue.channel, true) +
           index % queue.slots * slot_bytes(args, queue.hop);
}

// Whether the memory of the other end can be addressed.
EP_DEVICE bool is_direct(const NormalArgs& args, const Queue& queue) {
    return args.common.transport.direct(queue.peer, 0) != nullptr;
}

EP_DEVICE size_t word_of(const NormalArgs& args,
                         const Queue& queue,
                         NormalControlMap::Word word,
                         int number) {
    return args.words.word(word, queue.hop, number, queue.channel);
}

// One thread. What a word of this operation counts, as far as it has been seen.
EP_DEVICE uint32_t look_at(const NormalArgs& args,
                           const OpenOperation& open,
                           const Queue& queue,
                           NormalControlMap::Word word,
                           QueueState& state) {
    const QueueWord found =
        QueueWord::unpack(args.common.transport.poll(word_of(args, queue, word, queue.here)));
    if (found.tag == static_cast<uint32_t>(open.op) && found.count > state.seen)
        state.seen = found.count;
    return state.seen;
}

// One thread. The other end counts what cannot be. It has moved nothing beyond what this end has; ends the
// operation.
EP_DEVICE int refuse_count(const NormalArgs& args,
                           const OpenOperation& open,
                           const Queue& queue,
                           QueueState& state) {
    state.seen = state.moved;
    record_failure(args.common, open, FailureReason::kSurplus, queue.peer);
    return 0;
}

// ---- the producer's end

// One thread. How many of `wanted` slots may be filled; notes how long there was none.
EP_DEVICE int free_slots(const NormalArgs& args,
                         const OpenOperation& open,
                         const Queue& queue,
                         int wanted) {
    QueueState& state = state_of(args, queue, true);
    const auto limit = static_cast<uint32_t>(queue.slots);
    uint32_t used = state.moved - state.seen;
    if (used + wanted > limit) {
        if (look_at(args, open, queue, NormalControlMap::kGiven, state) > state.moved)
            return refuse_count(args, open, queue, state);
        used = state.moved - state.seen;
    }
    const int free = static_cast<int>(limit - used);
    if (free == 0 && state.blocked_since_ns == 0) state.blocked_since_ns = now_ns();
    if (free > 0 && state.blocked_since_ns != 0) {
        state.blocked_ns += now_ns() - state.blocked_since_ns;
        state.blocked_since_ns = 0;
    }
    return free < wanted ? free : wanted;
}

// One thread, when the team has filled `count` slots; issued_ns: when the source had handed over the last
// row.
EP_DEVICE void tell_filled(const NormalArgs& args,
                           const OpenOperation& open,
                           const Queue& queue,
                           int count,
                           bool is_last,
                           uint64_t issued_ns) {
    const Transport& transport = args.common.transport;
    QueueState& state = state_of(args, queue, true);
    state.moved += count;
    const int qp = queue.channel;
    if (is_last) {
        const auto tell = [&](NormalControlMap::Word word, uint64_t value) {
            transport.put_word(queue.peer, word_of(args, queue, word, queue.there), value, qp);
        };
        tell(NormalControlMap::kIssuedNs, issued_ns);
        tell(NormalControlMap::kBlockedNs, state.blocked_ns);
    }
    transport.fence(queue.peer, qp);
    const QueueWord word{static_cast<uint32_t>(open.op), state.moved};
    transport.signal(
        queue.peer, word_of(args, queue, NormalControlMap::kFilled, queue.there), word.pack(), qp);
}

// ---- the consumer's end

// One thread. Slots filled and not yet emptied; `total` as in give_back(). Never more rows than are still to
// come, whatever the producer says: their number is their place in memory.
EP_DEVICE int filled_slots(const NormalArgs& args,
                           const OpenOperation& open,
                           const Queue& queue,
                           int total) {
    QueueState& state = state_of(args, queue, false);
    const uint32_t before = state.seen;
    if (look_at(args, open, queue, NormalControlMap::kFilled, state) == before) {
        state.has_waited = 1;
    } else {
        const size_t word = word_of(args, queue, NormalControlMap::kFilled, queue.here);
        state.arrival_ns = args.common.transport.arrival_ns(word);
    }
    const uint32_t filled = state.seen - state.moved;
    if (state.seen > static_cast<uint32_t>(total) || filled > static_cast<uint32_t>(queue.slots))
        return refuse_count(args, open, queue, state);
    return static_cast<int>(filled);
}

// One thread, which has waited in vain. Rows may have come that nobody looked for: by the handle there were none
// left.
EP_DEVICE void refuse_surplus(const NormalArgs& args,
                              const OpenOperation& open,
                              const Queue& queue,
                              int total) {
    const size_t word = word_of(args, queue, NormalControlMap::kFilled, queue.here);
    const QueueWord found = QueueWord::unpack(args.common.transport.newest(word));
    if (found.tag == static_cast<uint32_t>(open.op) && found.count > static_cast<uint32_t>(total))
        record_failure(args.common, open, FailureReason::kSurplus, queue.peer);
}

// One thread, when the team has emptied `count` slots; total: all rows that come in the operation, or
// more. The producer is told once half of the slots are empty, if it has rows left that need them.
EP_DEVICE void give_back(
    const NormalArgs& args, const OpenOperation& open, const Queue& queue, int count, int total) {
    const Transport& transport = args.common.transport;
    QueueState& state = state_of(args, queue, false);
    state.moved += count;
    const auto slots = static_cast<uint32_t>(queue.slots);
    if (2 * (state.moved - state.told) < slots) return;
    if (static_cast<uint32_t>(total) <= state.told + slots) return;
    state.told = state.moved;
    const int qp = queue.channel;
    // Keeps the words in order, of which only the last one counts.
    transport.fence(queue.peer, qp);
    const QueueWord word{static_cast<uint32_t>(open.op), state.moved};
    transport.signal(
        queue.peer, word_of(args, queue, NormalControlMap::kGiven, queue.there), word.pack(), qp);
}

// A word that came with the last slots.
EP_DEVICE uint64_t last_word(const NormalArgs& args,
                             const Queue& queue,
                             NormalControlMap::Word word) {
    return *reinterpret_cast<const uint64_t*>(
        args.common.transport.local(word_of(args, queue, word, queue.here)));
}

}  // namespace ep
