// What the program does with masks. Small kernels of one block, in the order of the program's stream.
#pragma once

#include "kernels/protocol/join.cuh"

namespace ep {

struct UpdateMaskArgs {
    Masks* masks;
    int rank;
    int32_t value;
};

EP_KERNEL void update_mask(const EP_GRID_CONSTANT UpdateMaskArgs args) {
    if (thread_index() == 0) args.masks->masked[args.rank] = args.value;
}

struct QueryMasksArgs {
    const Masks* masks;
    int num_ranks;
    int32_t* status;  // [num_ranks]
};

EP_KERNEL void query_masks(const EP_GRID_CONSTANT QueryMasksArgs args) {
    for (int rank = thread_index(); rank < args.num_ranks; rank += num_threads())
        args.status[rank] = args.masks->masked[rank];
}

// Masks nobody, and tells all ranks where this one is; see join.cuh.
EP_KERNEL void clean_masks(const EP_GRID_CONSTANT OperationArgs args) {
    const Transport& transport = args.transport;
    Workspace* workspace = args.workspace;
    Masks* masks = args.masks;
    // Who will never come again is told nothing, and masked anew by the next operation. Each thread looks at
    // ranks of its own.
    // What the group decided before is void, also on the operation to come: ranks may have met for it in vain.
    for (int rank = thread_index(); rank < args.num_ranks(); rank += num_threads()) {
        masks->masked[rank] = has_ended(args, rank);
        store_relaxed<Scope::kSystem>(&workspace->news.out[rank], uint64_t{0});
    }
    deliver_all(args);
    if (thread_index() == 0) {
        ++masks->cleans;
        masks->cleaned_op = UINT64_MAX;  // until the number is known from which all go on
    }
    block_sync();
    const uint64_t number = own_join_number(args);
    const size_t slot = args.control.join(args.rank());
    for (int dst = thread_index(); dst < args.num_ranks(); dst += num_threads()) {
        if (is_masked(args, dst)) continue;
        transport.put_word(dst, slot + offsetof(JoinSlot, barriers), workspace->barriers, 0);
        transport.put_word(
            dst, slot + offsetof(JoinSlot, clock_rounds), workspace->clock_rounds, 0);
        transport.fence(dst, 0);
        transport.signal(dst, slot + offsetof(JoinSlot, number), number, 0);
    }
    for (int rank = thread_index(); rank < args.num_ranks(); rank += num_threads())
        masks->masked[rank] = 0;
    if (thread_index() == 0) transport.flush();
}

}  // namespace ep
