// Ranks that operations go on without, if the buffer was built for that.
//
// A masked rank is neither sent to nor waited for. The program masks ranks; and a rank that does not arrive in
// time, or of which the host knows that it will not, is masked by those who wait for it. All blocks then agree on
// whom the operation is without: nothing of a source that one of them has given up is used.
//
// A rank that was away comes back when all ranks clean their masks. Its numbers are behind, and rows of its own
// may still be under way. So whoever cleans first waits until what it has sent is delivered, then tells where it
// is. In its next operation, or barrier, every rank answers those who have said so, waits for their answers, and goes
// on from the newest numbers; then ranks hand over.
#pragma once

#include "kernels/protocol/operation_state.cuh"

namespace ep {

// One thread. Whether the operation neither sends to a rank nor waits for it.
EP_DEVICE bool is_masked(const OperationArgs& args, int rank) {
    const Masks* masks = args.masks;
    if (masks == nullptr) return false;
    return ((args.phases & kPhaseSend) ? masks->masked : masks->of_sent)[rank] != 0;
}

// One thread. Whether the operation is without what a source sends.
EP_DEVICE bool is_left_out(const OperationArgs& args, int source) {
    return args.masks != nullptr &&
           (is_masked(args, source) ||
            load_relaxed<Scope::kDevice>(&args.masks->left_out[source]) != 0);
}

// One thread. Does so from now on; all blocks know once they agree.
EP_DEVICE void leave_out(const OperationArgs& args, int source) {
    store_relaxed<Scope::kDevice>(&args.masks->left_out[source], 1u);
}

// One thread. Masks a rank that has not arrived, and tells the host. No other block looks at masks now.
EP_DEVICE void mask_missing(const OperationArgs& args, const OpenOperation& open, int rank) {
    Masks* masks = args.masks;
    masks->masked[rank] = 1;
    const uint64_t when =
        open.op * static_cast<uint64_t>(Series::kEnd) + static_cast<uint64_t>(open.series);
    store_relaxed<Scope::kSystem>(&masks->record->when[rank], when);
    store_release<Scope::kSystem>(&masks->record->any, 1u);
}

// Block 0, once an operation has been sent that a later launch receives.
EP_DEVICE void keep_masks(const OperationArgs& args) {
    if (args.masks == nullptr || (args.phases & kPhaseReceive) || block_index() != 0) return;
    for (int rank = thread_index(); rank < args.num_ranks(); rank += num_threads())
        args.masks->of_sent[rank] = args.masks->masked[rank];
}

// Block, of `num_waiting` blocks that have waited for words. Returns when all of them have decided whom they
// leave out.
EP_DEVICE void agree_on_left_out(const OperationArgs& args, int num_waiting) {
    block_sync();
    if (thread_index() == 0) {
        uint32_t* decided = &args.masks->blocks_decided;
        add_acq_rel<Scope::kDevice>(decided, 1u);
        const auto look = [&] {
            return load_acquire<Scope::kDevice>(decided) == static_cast<uint32_t>(num_waiting);
        };
        while (!spin_until(look, deadline_in(args.timeout_ns))) {  // the others keep the deadline
        }
    }
    block_sync();
}

// Block, the last of an operation, when nobody looks any more. From now on those left out are masked, unless the
// operation failed for another reason.
EP_DEVICE void mask_left_out(const OperationArgs& args, const OpenOperation& open, bool succeeded) {
    if (args.masks == nullptr) return;
    block_sync();
    for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
        uint32_t* left_out = &args.masks->left_out[source];
        if (load_relaxed<Scope::kDevice>(left_out) == 0) continue;
        store_relaxed<Scope::kDevice>(left_out, 0u);
        if (succeeded) mask_missing(args, open, source);
    }
    if (thread_index() == 0) args.masks->blocks_decided = 0;
}

}  // namespace ep
