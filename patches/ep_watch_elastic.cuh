// Copyright (c) 2026 the deep_ep-diagnose authors. MIT licence.
//
// The cells of ep_watch.cuh for kernels that are compiled when they run: those of DeepEP's ElasticBuffer. Their modules have
// no symbol that a program could set, so the address of the cells stands where all ranks have memory in common, behind what
// is used of a buffer's workspace. It is zero there, which is off, until somebody sets it.
//
// At a barrier over NVLink ranks add to one counter, which does not tell who came. So each rank, before it adds, writes the
// barrier's number into a word of its own on every other rank, and threads that have nothing to do there look at the words.
#pragma once

#include <deep_ep/common/ep_watch.cuh>

namespace ep_watch::elastic {

enum Hop : int {
    kDispatchEntry,
    kDispatchStart,
    kDispatchRows,
    kCombineEntry,
    kCombineRows,
    kDispatchRdmaEntry,
    kDispatchRdmaRows,
    kCombineRdmaEntry,
    kCombineRdmaRows,
    kNumHops
};

// The hops in the order of the cells, separated by spaces.
inline const char* hops() {
    return "dispatch_entry dispatch_start dispatch_rows combine_entry combine_rows "
           "dispatch_rdma_entry dispatch_rdma_rows combine_rdma_entry combine_rdma_rows";
}

constexpr int kMostRanks = 1024;

struct Area {
    Target target;
    int ranks_per_node;
    alignas(64) unsigned long long arrived[kMostRanks];  // the number of the last barrier to which a rank of this node came
};

// Where it begins in a workspace: behind the 12,820,528 bytes that are used.
constexpr std::int64_t kUsedBytes = 12820528;
constexpr std::int64_t kBegin = (kUsedBytes + 63) / 64 * 64;

#if defined(__CUDACC__)
#define EP_WATCH_BOTH __host__ __device__ __forceinline__
#else
#define EP_WATCH_BOTH inline
#endif

EP_WATCH_BOTH Area* area(void* workspace) { return reinterpret_cast<Area*>(static_cast<char*>(workspace) + kBegin); }

// Hops of a barrier by its tag: 2, 6 begin a dispatch, 3, 7 end it; 4, 8 begin a combine, 5, 9 end it. Others have none: -1.
constexpr int hop_in_node(int tag) {
    return tag == 2 || tag == 6   ? kDispatchEntry
           : tag == 3 || tag == 7 ? kDispatchRows
           : tag == 4 || tag == 8 ? kCombineEntry
           : tag == 5 || tag == 9 ? kCombineRows
                                  : -1;
}
constexpr int hop_of_nodes(int tag) {
    return tag == 2 || tag == 6   ? kDispatchRdmaEntry
           : tag == 3 || tag == 7 ? kDispatchRdmaRows
           : tag == 4 || tag == 8 ? kCombineRdmaEntry
           : tag == 5 || tag == 9 ? kCombineRdmaRows
                                  : -1;
}

// Sets where to count, on the current device: `cells` is the address of an int64 tensor of [hops, ranks, 2], 0 is off.
// `used_bytes` of the workspace are used, and it ends at a multiple of `alignment`. `context` knows the ranks. `copy` waits for
// the device, then copies bytes to it. Throws what Python calls RuntimeError where the workspace has no room for us.
template <class Context, class Copy>
void set(void* workspace, std::int64_t used_bytes, std::int64_t alignment, std::uintptr_t cells, const Context& context, Copy copy) {
    const std::int64_t bytes = (used_bytes + alignment - 1) / alignment * alignment;
    if (used_bytes != kUsedBytes || kBegin + static_cast<std::int64_t>(sizeof(Area)) > bytes || context.num_ranks > kMostRanks)
        throw std::runtime_error("ep_watch_set: this workspace has another layout");
    if (cells % alignof(unsigned long long) != 0) throw std::invalid_argument("cells are not aligned to 8 bytes");
    const int per_node = context.num_scaleup_ranks;
    Target target{nullptr, context.num_ranks, context.rank_idx / per_node * per_node};
    copy(&area(workspace)->target, &target, sizeof target);
    copy(&area(workspace)->ranks_per_node, &per_node, sizeof per_node);
    target.cells = reinterpret_cast<unsigned long long*>(cells);
    copy(&area(workspace)->target, &target, sizeof target);
}

#if defined(__CUDACC__)
struct Gpu {
    static constexpr int kHops = kNumHops;
    Area* area = nullptr;
    EP_WATCH_FN const Target& target() const { return area->target; }
    static EP_WATCH_FN unsigned long long now() { return ep_watch::Gpu::now(); }
    static EP_WATCH_FN void add(unsigned long long* cell, unsigned long long value) { atomicAdd(cell, value); }
};

using Wait = BasicWait<Gpu>;

EP_WATCH_FN Wait wait(void* workspace, int hop, int source, bool active) {
    return Wait(hop, source, active && hop >= 0, Gpu{area(workspace)});
}

// The rank with this one's place in the k-th node.
EP_WATCH_FN int in_other_node(void* workspace, int k, int place) { return k * area(workspace)->ranks_per_node + place; }

// This rank's word, on whoever has this workspace.
EP_WATCH_FN unsigned long long* word(void* workspace, int rank) { return &area(workspace)->arrived[rank]; }

// Threads from the second warp on wait for a rank each, to the `number`th barrier over NVLink; no longer than until `signal`,
// which all ranks move, is at `target`, where the barrier is over.
template <int kTag, int kNumRanks, int kNumThreads>
EP_WATCH_FN void await(void* workspace, unsigned long long number, int thread, const int* signal, int target) {
    if constexpr (hop_in_node(kTag) >= 0 && 32 + kNumRanks <= kNumThreads) {
        Area* const here = area(workspace);
        const int k = thread - 32;
        if (k < 0 || k >= kNumRanks || here->target.cells == nullptr) return;
        Wait arrival = wait(workspace, hop_in_node(kTag), here->target.node_begin + k, true);
        while (*static_cast<volatile unsigned long long*>(&here->arrived[k]) < number) {
            arrival.look(true);
            if (*static_cast<const volatile int*>(signal) == target) break;
        }
        arrival.end();
    }
}
#endif

}  // namespace ep_watch::elastic
