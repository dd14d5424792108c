// How ranks go on together after masks have been cleaned; see masks.cuh.
#pragma once

#include "kernels/protocol/hand_over.cuh"

namespace ep {

EP_DEVICE void take_newer(uint64_t* number, uint64_t other) {
    *number = other > *number ? other : *number;
}

// What a rank that has cleaned says of itself, until it joins.
EP_DEVICE uint64_t own_join_number(const OperationArgs& args) {
    return static_cast<uint64_t>(args.masks->cleans) << JoinSlot::kOpBits | args.workspace->op;
}

// One thread, always the same for a source. Answers a source that has cleaned. Whether it has answered this rank: only
// who joins does, so what it said before it gave this rank up does not count.
EP_DEVICE bool has_joined(const OperationArgs& args, int source) {
    const size_t slot = args.control.join(source);
    // Before its number, which is then no older.
    const bool answered =
        args.transport.poll(slot + offsetof(JoinSlot, answered)) == own_join_number(args);
    const uint64_t number = args.transport.poll(slot + offsetof(JoinSlot, number));
    if (number != args.masks->joined[source]) {
        args.masks->joined[source] = number;
        const size_t own = args.control.join(args.rank());
        args.transport.fence(source, 0);
        args.transport.signal(source, own + offsetof(JoinSlot, answered), number, 0);
    }
    return answered;
}

// Block. All ranks are awaited that are not masked. Afterwards this rank has the newest numbers of those who came.
EP_DEVICE void join_all(const OperationArgs& args) {
    Workspace* workspace = args.workspace;
    Masks* masks = args.masks;
    const OpenOperation open{workspace->op + 1, 0, deadline_in(args.timeout_ns)};
    await_sources(
        args, open, [&](int source) { return source == args.rank() || has_joined(args, source); });
    // Words of operations long ago look like those to come once numbers have gone round.
    for (int half = 0; half < kNumHalves; ++half) {
        for (int i = thread_index(); i < kMaxExperts; i += num_threads()) {
            store_relaxed<Scope::kSystem>(
                reinterpret_cast<uint64_t*>(args.transport.local(args.control.count(half, i))),
                uint64_t{0});
        }
    }
    block_sync();
    if (thread_index() != 0) return;
    uint64_t op = workspace->op;
    for (int source = 0; source < args.num_ranks(); ++source) {
        if (source == args.rank() || is_masked(args, source)) continue;
        const size_t slot = args.control.join(source);
        take_newer(&op, masks->joined[source] & ((uint64_t{1} << JoinSlot::kOpBits) - 1));
        take_newer(&workspace->barriers,
                   args.transport.newest(slot + offsetof(JoinSlot, barriers)));
        take_newer(&workspace->clock_rounds,
                   args.transport.newest(slot + offsetof(JoinSlot, clock_rounds)));
    }
    masks->cleaned_op = op;
    workspace->num_given_up = 0;
    workspace->layout = Layout::unknown();
    store_relaxed<Scope::kSystem>(&workspace->op, op);
}

// Block, before a launch looks at numbers or masks. Joins all ranks if masks have been cleaned since.
EP_DEVICE void join_if_cleaned(const OperationArgs& args) {
    if (args.masks == nullptr || !(args.phases & kPhaseSend)) return;
    Masks* masks = args.masks;
    const uint32_t cleans = masks->cleans;
    if (!block_any(load_acquire<Scope::kDevice>(&masks->joins) != cleans)) return;
    if (block_index() == 0) {
        join_all(args);
        if (thread_index() == 0) store_release<Scope::kDevice>(&masks->joins, cleans);
        block_sync();
        return;
    }
    const auto look = [&] { return load_acquire<Scope::kDevice>(&masks->joins) == cleans; };
    while (!spin_until(look, deadline_in(args.timeout_ns))) {  // block 0 keeps the deadline
    }
}

}  // namespace ep
