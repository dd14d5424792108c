// Counts where tokens go: per rank, per node, per expert (API specification, section 5). Local, one
// block.
#pragma once

#include "kernels/calls.cuh"

namespace ep {

EP_KERNEL void dispatch_layout(const EP_GRID_CONSTANT DispatchLayoutArgs args) {
    const int experts_per_rank = args.num_experts / args.num_ranks;
    const int num_nodes = args.num_tokens_per_rdma_rank == nullptr
                              ? 0
                              : (args.num_ranks + args.ranks_per_node - 1) / args.ranks_per_node;
    for (int i = thread_index(); i < args.num_ranks; i += num_threads())
        args.num_tokens_per_rank[i] = 0;
    for (int i = thread_index(); i < num_nodes; i += num_threads())
        args.num_tokens_per_rdma_rank[i] = 0;
    for (int i = thread_index(); i < args.num_experts; i += num_threads())
        args.num_tokens_per_expert[i] = 0;
    block_sync();
    for (int token = thread_index(); token < args.num_tokens; token += num_threads()) {
        bool* in_rank = args.is_token_in_rank + static_cast<size_t>(token) * args.num_ranks;
        for (int rank = 0; rank < args.num_ranks; ++rank) in_rank[rank] = false;
        for (int k = 0; k < args.num_topk; ++k) {
            const int64_t expert = args.topk_idx[static_cast<size_t>(token) * args.num_topk + k];
            if (expert < 0 || expert >= args.num_experts) continue;
            add_relaxed<Scope::kBlock>(&args.num_tokens_per_expert[expert], 1);
            const int64_t rank = experts_per_rank == 0 ? args.num_ranks : expert / experts_per_rank;
            if (rank < args.num_ranks) in_rank[rank] = true;
        }
        bool in_node = false;
        for (int rank = 0; rank < args.num_ranks; ++rank) {
            if (in_rank[rank]) add_relaxed<Scope::kBlock>(&args.num_tokens_per_rank[rank], 1);
            in_node = in_node || in_rank[rank];
            const bool node_ends =
                (rank + 1) % args.ranks_per_node == 0 || rank + 1 == args.num_ranks;
            if (!node_ends) continue;
            if (in_node && num_nodes > 0)
                add_relaxed<Scope::kBlock>(
                    &args.num_tokens_per_rdma_rank[rank / args.ranks_per_node], 1);
            in_node = false;
        }
    }
}

}  // namespace ep
