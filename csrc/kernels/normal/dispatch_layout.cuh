// Counts where tokens go: per rank, per node, per expert (API specification, section 5). Local. Each number is counted
// by one block, which looks at all tokens for it, so blocks need not meet.
#pragma once

#include "kernels/protocol/calls.cuh"

namespace ep {

constexpr int kMostRanksAtOnce = 64;  // a bit each
constexpr int kEntriesAtOnce = 8;     // of a token, on their way together

// Block. The tokens for ranks first .. end, for their experts, and for the nodes whose last rank is among them.
EP_DEVICE void count_for_ranks(const DispatchLayoutArgs& args, int first, int end) {
    const int num_ranks = args.num_ranks;
    const int ranks_per_node = args.ranks_per_node;
    const int experts_per_rank = args.num_experts / num_ranks;
    const int first_expert = first * experts_per_rank;
    const int end_expert = end * experts_per_rank;
    // Experts that are on no rank are counted with those of the last one.
    const int counted_end = end == num_ranks ? args.num_experts : end_expert;
    const int first_node = first / ranks_per_node;
    const int node_expert = first_node * ranks_per_node * experts_per_rank;
    int32_t* per_rank = args.num_tokens_per_rank;
    int32_t* per_node = args.num_tokens_per_rdma_rank;
    int32_t* per_expert = args.num_tokens_per_expert;
    const int end_node = per_node == nullptr ? first_node
                         : end == num_ranks  ? (end - 1) / ranks_per_node + 1
                                             : end / ranks_per_node;
    const auto clear = [](int32_t* counts, int from, int to) {
        for (int i = from + thread_index(); i < to; i += num_threads()) counts[i] = 0;
    };
    clear(per_rank, first, end);
    clear(per_node, first_node, end_node);
    clear(per_expert, first_expert, counted_end);
    block_sync();
    for (int token = thread_index(); token < args.num_tokens; token += num_threads()) {
        const int64_t* experts = args.topk_idx + static_cast<size_t>(token) * args.num_topk;
        uint64_t ranks = 0;      // that the token is for, from `first` on
        bool is_before = false;  // whether it is for one before them on their node
        const auto note = [&](int64_t expert) {
            if (expert < first_expert || expert >= counted_end) {
                is_before = is_before || (expert >= node_expert && expert < first_expert);
                return;
            }
            add_relaxed<Scope::kDevice>(&per_expert[expert], 1);
            if (expert < end_expert) {
                const int rank = (static_cast<int>(expert) - first_expert) / experts_per_rank;
                ranks |= uint64_t{1} << rank;
            }
        };
        for (int k = 0; k < args.num_topk; k += kEntriesAtOnce) {
            int64_t some[kEntriesAtOnce];
            EP_UNROLL(kEntriesAtOnce)
            for (int i = 0; i < kEntriesAtOnce; ++i)
                some[i] = k + i < args.num_topk ? experts[k + i] : -1;
            EP_UNROLL(kEntriesAtOnce)
            for (int i = 0; i < kEntriesAtOnce; ++i) note(some[i]);
        }
        bool* in_rank = args.is_token_in_rank + static_cast<size_t>(token) * num_ranks;
        for (int rank = first; rank < end; ++rank) {
            const bool is_for = (ranks >> (rank - first) & 1) != 0;
            in_rank[rank] = is_for;
            if (is_for) add_relaxed<Scope::kDevice>(&per_rank[rank], 1);
        }
        for (int node = first_node; node < end_node; ++node) {
            const int num_bits = (node + 1) * ranks_per_node - first;  // up to its last rank
            const uint64_t later = num_bits < 64 ? ranks >> num_bits << num_bits : 0;
            if (is_before || later != ranks) add_relaxed<Scope::kDevice>(&per_node[node], 1);
            is_before = false;
            ranks = later;
        }
    }
}

EP_KERNEL void dispatch_layout(const EP_GRID_CONSTANT DispatchLayoutArgs args) {
    const int share = (args.num_ranks + num_blocks() - 1) / num_blocks();
    const int most = share < kMostRanksAtOnce ? share : kMostRanksAtOnce;
    for (int first = block_index() * most; first < args.num_ranks; first += num_blocks() * most) {
        const int left = args.num_ranks - first;
        count_for_ranks(args, first, first + (left < most ? left : most));
    }
}

}  // namespace ep
