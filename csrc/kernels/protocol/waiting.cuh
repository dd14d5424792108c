// Waiting for other ranks, within limits: until the deadline, or until the host knows that they will
// never come. Who is missing then is named.
#pragma once

#include "kernels/protocol/failure.cuh"
#include "kernels/protocol/recorder.cuh"

namespace ep {

// One thread. Whether the host knows that a rank will never come again.
EP_DEVICE bool has_ended(const OperationArgs& args, int rank) {
    const News& news = args.workspace->news;
    return load_relaxed<Scope::kSystem>(&news.any) != 0 &&
           load_relaxed<Scope::kSystem>(&news.gone[rank]) != 0;
}

// One thread. The same, or, where ranks may be masked, that the group goes on without it.
EP_DEVICE bool is_gone(const OperationArgs& args, int rank) {
    return has_ended(args, rank) ||
           (args.masks != nullptr &&
            load_relaxed<Scope::kSystem>(&args.workspace->news.out[rank]) > args.masks->cleaned_op);
}

// One thread. Whether the host knows that the group has given an operation up.
EP_DEVICE bool is_lost(const OperationArgs& args, const OpenOperation& open) {
    const News& news = args.workspace->news;
    return open.series == Series::kOperations && load_relaxed<Scope::kSystem>(&news.any) != 0 &&
           load_relaxed<Scope::kSystem>(&news.lost_op) >= open.op;
}

// Block. Names who is missing: the ranks that will never come again, or else all.
// for_each_missing(f) calls f(source) for those that a thread misses.
template <class ForEachMissing>
EP_DEVICE void name_missing(const OperationArgs& args,
                            const OpenOperation& open,
                            ForEachMissing for_each_missing) {
    for_each_missing([&](int source) {
        if (is_gone(args, source)) record_failure(args, open, FailureReason::kTimeout, source);
    });
    if (has_failed(args)) return;
    for_each_missing(
        [&](int source) { record_failure(args, open, FailureReason::kTimeout, source); });
}

// Block, the only one that looks at masks now. Waits until has_come(source) for each source that is not masked.
// Names the sources that do not come; or masks them, where ranks may be masked.
template <class HasCome>
EP_DEVICE void await_sources(const OperationArgs& args,
                             const OpenOperation& open,
                             HasCome has_come,
                             Owed owed = Owed::kEntry) {
    const auto for_each_missing = [&](auto f) {
        for (int source = thread_index(); source < args.num_ranks(); source += num_threads()) {
            if (!is_masked(args, source) && !has_come(source)) f(source);
        }
    };
    const bool masks = args.masks != nullptr;
    const auto mask = [&](int source) { mask_missing(args, open, source); };
    bool all_came = false;
    const auto look = [&] {
        all_came = true;
        bool in_vain = is_lost(args, open);
        for_each_missing([&](int source) {
            const bool gone = is_gone(args, source);
            if (masks && gone) return mask(source);
            all_came = false;
            in_vain = in_vain || gone;
        });
        return all_came || in_vain;
    };
    bool has_noted = false;
    const auto note = [&] {
        for_each_missing([&](int source) { note_missing(args, open, owed, source); });
        has_noted = true;
    };
    // Who has waited in vain for one rank has the full time for the others.
    const Deadline deadline = masks ? deadline_in(args.timeout_ns) : open.deadline;
    const bool in_time = spin_until(look, deadline, note);
    if (has_noted && all_came) {
        for (int source = thread_index(); source < args.num_ranks(); source += num_threads())
            forget_missing(args, owed, source);
    }
    if (!block_any(!in_time || !all_came)) return;
    if (!masks) return name_missing(args, open, for_each_missing);
    for_each_missing(mask);
    block_sync();
}

// Block. The same for a word of each source that `concerns`, which must be at least `number`.
template <class WordOf, class Concerns>
EP_DEVICE void await_all(const OperationArgs& args,
                         const OpenOperation& open,
                         uint64_t number,
                         WordOf word_of,
                         Concerns concerns,
                         Owed owed = Owed::kEntry) {
    const auto has_come = [&](int source) {
        return !concerns(source) || args.transport.poll(word_of(source)) >= number;
    };
    await_sources(args, open, has_come, owed);
}

// What the threads of a block that waits share. The words it looks for (items) are dealt to the
// threads in turn.
struct WaitShared {
    static constexpr int kItemsPerMask = 64;

    // [masks, num_threads]: bit j of mask m of a thread is its item m * 64 + j, set while it is missing.
    uint64_t* missing;
    struct State {
        uint64_t begin_ns;
        int headers_left;
        int num_words;
        int hopeless;  // a rank disagrees, or has left this operation behind
        int in_vain;   // the host says so
    }* state;

    // One thread. Whether to wait no longer, though words are missing. Counts of a rank that disagrees
    // or has gone on need never come; still all headers are awaited, so that everybody who disagrees is
    // named, and not who gave up because of them.
    EP_DEVICE bool is_over() const {
        if (load_relaxed<Scope::kBlock>(&state->in_vain) != 0) return true;
        return load_relaxed<Scope::kBlock>(&state->hopeless) != 0 &&
               load_relaxed<Scope::kBlock>(&state->headers_left) == 0;
    }

    // One thread. Whether a rank disagrees, or has left this operation behind.
    EP_DEVICE bool is_hopeless() const {
        return load_relaxed<Scope::kBlock>(&state->hopeless) != 0;
    }

    EP_DEVICE WaitShared(SharedArena arena, int num_items) {
        missing = arena.take<uint64_t>(num_masks(num_items, num_threads()) * num_threads());
        state = arena.take<State>(1);
    }
    EP_HOST_DEVICE static int num_masks(int num_items, int threads) {
        const int per_thread = (num_items + threads - 1) / threads;
        return (per_thread + kItemsPerMask - 1) / kItemsPerMask;
    }
    // With what alignment may cost.
    EP_HOST_DEVICE static size_t bytes(int num_items, int threads) {
        return sizeof(uint64_t) * num_masks(num_items, threads) * threads + sizeof(State) +
               2 * alignof(uint64_t);
    }

    EP_DEVICE static int item(int mask, int bit) {
        return (mask * kItemsPerMask + bit) * num_threads() + thread_index();
    }
    EP_DEVICE void miss_all(int num_items) const {
        for (int mask = 0; mask < num_masks(num_items, num_threads()); ++mask) {
            uint64_t mine = 0;
            for (int bit = 0; bit < kItemsPerMask && item(mask, bit) < num_items; ++bit)
                mine |= 1ull << bit;
            missing[mask * num_threads() + thread_index()] = mine;
        }
    }
    // Calls is_there(item) for each of this thread's items that are missing, and takes out those that
    // are there. Whether none is left.
    template <class IsThere>
    EP_DEVICE bool look(int num_items, IsThere is_there) const {
        uint64_t any = 0;
        for (int mask = 0; mask < num_masks(num_items, num_threads()); ++mask) {
            uint64_t& mine = missing[mask * num_threads() + thread_index()];
            uint64_t left = mine;
            for (int bit = 0; bit < kItemsPerMask && mine >> bit != 0; ++bit) {
                if ((mine >> bit & 1) && is_there(item(mask, bit))) left &= ~(1ull << bit);
            }
            mine = left;
            any |= left;
        }
        return any == 0;
    }
};

}  // namespace ep
