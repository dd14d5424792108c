// What normal operations write into each other's memory: where queues lie, what a slot of them holds and
// the words that go with them.
//
// A queue is a ring of slots in the memory of its consumer, for one producer and one channel. Tokens of a
// rank are divided into channels, which are independent of each other. Two hops have queues:
//
//   kNvl   between the ranks of a node. Whatever crosses it belongs to a rank s = (node, local rank), the
//          token's source. Dispatch: from the local rank of s, on this node, to the token's destination.
//          Combine: back.
//   kRdma  between the ranks of equal place on two nodes (gateways).
//
// Seen from either end, the queue of a hop is numbered by the rank (kNvl: node of the source, local rank of
// the other end) or by the node (kRdma) that it leads to.
#pragma once

#include "kernels/protocol/messages.cuh"

namespace ep {

constexpr int kMaxChannels = 128;
constexpr int kMaxNormalTopk = 128;
constexpr int kMaxNormalScales = 255;
constexpr int kMaxRanksPerNode = 64;  // a bit each in a RelayMark

// Ranks of a node are consecutive.
struct Topology {
    int num_ranks;
    int ranks_per_node;
    int num_nodes;

    Topology() = default;
    Topology(int num_ranks, int ranks_per_node)
        : num_ranks(num_ranks),
          ranks_per_node(ranks_per_node),
          num_nodes((num_ranks + ranks_per_node - 1) / ranks_per_node) {}
    EP_HOST_DEVICE int node_of(int rank) const { return rank / ranks_per_node; }
    EP_HOST_DEVICE int local_of(int rank) const { return rank % ranks_per_node; }
    EP_HOST_DEVICE int rank_of(int node, int local) const { return node * ranks_per_node + local; }
};

// i modulo n, for i < 2 * n.
EP_HOST_DEVICE int wrapped(int i, int n) { return i < n ? i : i - n; }

// Tokens begin .. end of a channel.
struct TokenRange {
    int begin;
    int end;

    // size: tokens of a channel, of which the last ones may have fewer.
    EP_HOST_DEVICE static int size(int num_channels, int num_tokens) {
        return (num_tokens + num_channels - 1) / num_channels;
    }
    EP_HOST_DEVICE static TokenRange of(int channel, int size, int num_tokens) {
        const int begin = channel * size;
        return {begin < num_tokens ? begin : num_tokens,
                begin + size < num_tokens ? begin + size : num_tokens};
    }
};

// Whom the row of a slot between nodes is for, behind its pack.
struct RelayMark {
    uint64_t local_ranks;  // a bit each
    uint64_t last_of;      // those of them that get no later row of this channel
    uint64_t issued_ns;    // when the source handed it over
    uint64_t proof;        // if rows are verified: proof_of_mark()
};
static_assert(sizeof(RelayMark) % sizeof(Vector) == 0, "slots stay 16-byte aligned");

// What a slot holds: the row; its pack, which is made once for all destinations; and between nodes the
// local ranks it is for.
struct NormalRow {
    size_t row_bytes;  // a multiple of 16
    int num_topk;
    int num_scales;  // 32-bit items
    bool verified;

    // Whether combine reads more of a slot than the row.
    EP_HOST_DEVICE bool returns_packs() const { return num_topk > 0 || verified; }
    EP_HOST_DEVICE size_t pack_offset() const { return row_bytes; }
    // Within a pack: RowProof, experts, weights, scales.
    EP_HOST_DEVICE size_t experts_offset() const { return sizeof(Vector); }
    EP_HOST_DEVICE size_t weights_offset() const {
        return experts_offset() + num_topk * sizeof(int32_t);
    }
    EP_HOST_DEVICE size_t scales_offset() const {
        return weights_offset() + num_topk * sizeof(float);
    }
    EP_HOST_DEVICE size_t pack_bytes() const {
        return round_up(scales_offset() + num_scales * sizeof(uint32_t), sizeof(Vector));
    }
    EP_HOST_DEVICE size_t bytes() const { return row_bytes + pack_bytes(); }
    EP_HOST_DEVICE size_t relay_offset() const { return bytes(); }
    EP_HOST_DEVICE size_t nvl_slot_bytes() const { return round_up(bytes(), kRowAlignment); }
    EP_HOST_DEVICE size_t rdma_slot_bytes() const {
        return round_up(bytes() + sizeof(RelayMark), kRowAlignment);
    }
};

// How far one end of a queue is, in one word. `tag` tells the operation, so nothing has to be cleared.
struct QueueWord {
    uint32_t tag;    // CountWord::tag_of(op)
    uint32_t count;  // slots filled, or given back, in this operation

    EP_HOST_DEVICE uint64_t pack() const { return static_cast<uint64_t>(tag) << 32 | count; }
    EP_HOST_DEVICE static QueueWord unpack(uint64_t word) {
        return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
    }
};

// What one rank last said to another in the exchange of counts: that its notice is there, or that there is
// none.
struct NoticeWord {
    uint64_t op;
    bool refuses;

    EP_HOST_DEVICE uint64_t pack() const { return op << 1 | (refuses ? 1 : 0); }
    EP_HOST_DEVICE static NoticeWord unpack(uint64_t word) { return {word >> 1, (word & 1) != 0}; }
};

// The control region of normal operations. It follows that of low latency.
struct NormalControlMap {
    Topology topology;
    size_t begin;

    // What a rank says of itself in a fresh dispatch: numbers as int32, in this order. Of channels: the tokens up
    // to and with each. The experts are the reader's.
    EP_HOST_DEVICE static int notice_tokens() { return 0; }
    EP_HOST_DEVICE static int notice_issue_ns() { return 1; }  // after it entered
    EP_HOST_DEVICE static int notice_channels() { return 4; }
    EP_HOST_DEVICE static int notice_node_channels(int num_channels) {
        return notice_channels() + num_channels;
    }
    EP_HOST_DEVICE static int notice_experts(int num_channels) {
        return notice_node_channels(num_channels) + num_channels;
    }
    EP_HOST_DEVICE static size_t notice_bytes(int num_channels, int num_local_experts) {
        return round_up((notice_experts(num_channels) + num_local_experts) * sizeof(int32_t),
                        sizeof(Vector));
    }
    EP_HOST_DEVICE size_t notices_bytes() const {
        return round_up(kMaxExperts * sizeof(int32_t), kRowAlignment) +
               topology.num_ranks * notice_bytes(kMaxChannels, 0);
    }
    EP_HOST_DEVICE size_t notice(int half, int source, size_t bytes) const {
        return begin + half * notices_bytes() + source * bytes;
    }
    EP_HOST_DEVICE size_t staged_notice(int half, int dst, size_t bytes) const {
        return notice(kNumHalves, 0, 0) + half * notices_bytes() + dst * bytes;
    }
    // NoticeWord of a source.
    EP_HOST_DEVICE size_t noticed(int source) const {
        return staged_notice(kNumHalves, 0, 0) + source * sizeof(uint64_t);
    }

    EP_HOST_DEVICE int num_queues(Hop hop) const {
        return hop == Hop::kNvl ? topology.num_ranks : topology.num_nodes;
    }
    // Words of the queue (queue, channel) of a hop.
    enum Word : int {
        kFilled,  // at the consumer, QueueWord
        kGiven,   // at the producer, QueueWord: slots given back
        // At the consumer, readable once all slots are filled: when the source had handed over the last
        // row, on its clock; and for how long the producer could not go on for want of slots.
        kIssuedNs,
        kBlockedNs,
        kNumWords
    };
    EP_HOST_DEVICE size_t word(Word word, Hop hop, int queue, int channel) const {
        const size_t first = hop == Hop::kNvl ? 0 : num_queues(Hop::kNvl);
        const size_t index =
            static_cast<size_t>(word) * (num_queues(Hop::kNvl) + num_queues(Hop::kRdma)) + first +
            queue;
        return noticed(topology.num_ranks) + (index * kMaxChannels + channel) * sizeof(uint64_t);
    }
    EP_HOST_DEVICE size_t end() const { return round_up(word(kNumWords, Hop::kNvl, 0, 0), 4096); }
};

// Where the slots of queues lie in the user's buffer. Each queue has an equal share, whatever its rows are:
// only a change of the number of channels moves it.
struct NormalMap {
    Topology topology;
    int num_channels;
    size_t nvl_begin;
    size_t nvl_share;  // of each queue
    size_t rdma_begin;
    size_t rdma_share;

    EP_HOST_DEVICE static size_t share(size_t bytes, int num_queues) {
        return bytes / num_queues / kRowAlignment * kRowAlignment;
    }
    EP_HOST_DEVICE size_t nvl_queue(int queue, int channel) const {
        return nvl_begin + nvl_share * (queue * num_channels + channel);
    }
    // Filled by the gateway of another node; its producer stages rows in a second set.
    EP_HOST_DEVICE size_t rdma_queue(int queue, int channel, bool is_staging) const {
        const int num_queues = topology.num_nodes * num_channels;
        return rdma_begin +
               rdma_share * ((is_staging ? num_queues : 0) + queue * num_channels + channel);
    }
};

// Slots of a queue. Those between the ranks of a node share a channel's with the other nodes.
EP_HOST_DEVICE int nvl_slots(const Topology& topology, int num_max_nvl_chunked_recv_tokens) {
    return num_max_nvl_chunked_recv_tokens / topology.num_nodes;
}

}  // namespace ep
