// What a normal operation works on: its arguments, and the state of this rank's queues.
#pragma once

#include "kernels/normal/messages.cuh"
#include "kernels/protocol/operation_state.cuh"

namespace ep {

// One end of a queue in one operation. Only the team that has it looks here.
struct QueueState {
    uint32_t moved;       // slots filled (producer) or emptied (consumer)
    uint32_t seen;        // how far the other end is known to be
    uint32_t told;        // consumer: slots that the producer knows to be empty again
    int32_t cursor;       // where the task that has it is in its tokens or rows
    int32_t has_waited;   // consumer: there was a look that found nothing new
    uint32_t next_token;  // consumer that verifies: no row that is still to come is of one below
    uint64_t blocked_ns;  // how long there was no slot to fill
    uint64_t blocked_since_ns;
    uint64_t arrival_ns;  // when the newest slots were seen to be filled
};

// What the host waits for in a fresh dispatch.
struct ReceiveCounts {
    uint64_t ticket;   // set last: of the call whose counts these are
    uint32_t refused;  // there are none, for it has failed
    int32_t num_rows;
    int32_t num_relayed;
    int32_t per_expert[kMaxExperts];  // of this rank
};

struct NormalArgs : CommonArgs, NormalSize, NormalHandle {
    NormalMap queues;
    NormalControlMap words;
    NormalRow row;
    CounterView relay_counters;
    QueueState* queue_states;  // [2 (producer, consumer), num_ranks + num_nodes, num_channels]
    ReceiveCounts* receive_counts;
    size_t row_piece_bytes;  // of shared memory, for the RowCopy of each warp; 0: none
    // What follows from the rest, so that no thread divides for it.
    int node;
    int local_rank;
    int nvl_slots;
    int channel_tokens;  // TokenRange::size()

    EP_DEVICE const Topology& topology() const { return queues.topology; }
    EP_DEVICE TokenRange tokens_of(int channel) const {
        return TokenRange::of(channel, channel_tokens, num_tokens);
    }
    EP_DEVICE int source_end(int source) const { return source_prefix[source * source_stride]; }

    // From a matrix of inclusive prefixes over channels.
    EP_DEVICE int in_channel(const int32_t* prefix, int row, int channel) const {
        const int32_t* entry = prefix + row * num_channels + channel;
        return channel == 0 ? *entry : *entry - entry[-1];
    }
    // Tokens that this rank sends to another one, or to a node.
    EP_DEVICE int to_rank(int rank, int channel) const {
        return in_channel(channel_prefix, rank, channel);
    }
    EP_DEVICE int to_node(int node, int channel) const {
        return in_channel(node_channel_prefix, node, channel);
    }
    // Rows that this rank relays for the source of its place on another node.
    EP_DEVICE int relayed(int node, int channel) const {
        return in_channel(recv_node_channel_prefix, node, channel);
    }
    // The first of them, among the rows of nvl_head.
    EP_DEVICE int first_relayed(int node, int channel) const {
        const int before = node == 0 ? 0 : recv_node_prefix[node - 1];
        const int in_node =
            channel == 0 ? 0 : recv_node_channel_prefix[node * num_channels + channel - 1];
        return num_tokens + before + in_node;
    }
    // Rows received from a source: the first one, and how many.
    EP_DEVICE int first_row(int source, int channel) const {
        return recv_channel_prefix[source * num_channels + channel];
    }
    EP_DEVICE int from_rank(int source, int channel) const {
        const int end =
            channel + 1 < num_channels ? first_row(source, channel + 1) : source_end(source);
        return end - first_row(source, channel);
    }
    EP_DEVICE bool is_token_for(int token, int rank) const {
        return is_token_in_rank[static_cast<size_t>(token) * topology().num_ranks + rank];
    }
    // The local ranks of a node that a token is for, a bit each.
    EP_DEVICE uint64_t local_ranks(int token, int node) const {
        uint64_t mask = 0;
        for (int local = 0; local < topology().ranks_per_node; ++local) {
            if (is_token_for(token, topology().rank_of(node, local))) mask |= uint64_t{1} << local;
        }
        return mask;
    }
};

}  // namespace ep
