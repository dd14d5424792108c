// Copyright (c) 2026 the deep_ep-diagnose authors. MIT licence.
//
// Sums of waiting for kernels that do not measure themselves. `python -m deep_ep.diagnose patch` puts this file beside
// another project's kernels, with single lines that call it.
//
//   hop     what is waited for; hops are never added up (patches/README.md says what each counts)
//   source  the rank for which a wait waits. Of a hop whose name ends in `credit`: the destination
//   cell    two int64 for each hop and rank: the nanoseconds waited, and how many waits that were. Kernels only add.
//           Channels and warps that wait at once all add, so a sum may exceed what the operation took
//
// Off until `ep_watch_set` of the extension is called: till then kernels compare a pointer with null and do nothing more.
// They read it when they run, so captured graphs follow. A wait adds when it ends: one that lasts for ever adds nothing.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define EP_WATCH_FN __device__ __forceinline__
#else
#define EP_WATCH_FN inline
#endif

namespace ep_watch {

enum Hop : int {
    kDispatchEntry,
    kDispatchStart,
    kDispatchRows,
    kDispatchCredit,
    kCombineEntry,
    kCombineRows,
    kCombineCredit,
    kDispatchNodes,
    kDispatchRdmaStart,
    kDispatchRdmaRows,
    kDispatchRdmaCredit,
    kCombineNodes,
    kCombineRdmaRows,
    kCombineRdmaCredit,
    kNumHops
};

// The hops in the order of the cells, separated by spaces.
inline const char* hops() {
    return "dispatch_entry dispatch_start dispatch_rows dispatch_credit combine_entry combine_rows combine_credit "
           "dispatch_nodes dispatch_rdma_start dispatch_rdma_rows dispatch_rdma_credit "
           "combine_nodes combine_rdma_rows combine_rdma_credit";
}

constexpr int kRanksPerNode = 8;

struct Target {
    unsigned long long* cells;  // [kNumHops][ranks][2], or null: off
    int ranks;
    int node_begin;  // the first rank of this rank's node
};

// One wait of one thread. `active`: whether this thread measures. `Machine` has the target, the number of hops, the clock
// and the addition: a GPU's, or those of a test.
template <class Machine>
class BasicWait {
   public:
    EP_WATCH_FN BasicWait(int hop, int source, bool active, Machine machine = {})
        : machine_(machine), hop_(hop), source_(source), active_(active) {}

    // After each look at what is waited for. Time counts from a look that finds it missing to the one that finds it.
    EP_WATCH_FN void look(bool missing) {
        if (!active_ || machine_.target().cells == nullptr) return;
        if (missing) {
            if (since_ == 0) since_ = Machine::now();
        } else if (since_ != 0) {
            waited_ += Machine::now() - since_;
            since_ = 0;
        }
    }

    // The wait is over, which adds to the cell. `counts`: whether there was anything to wait for.
    EP_WATCH_FN void end(bool counts = true) {
        look(false);
        if (!active_ || !(counts || waited_ != 0)) return;
        const Target& target = machine_.target();
        if (target.cells == nullptr || hop_ < 0 || hop_ >= Machine::kHops || source_ < 0 || source_ >= target.ranks) return;
        unsigned long long* cell = target.cells + 2 * (static_cast<int64_t>(hop_) * target.ranks + source_);
        if (waited_ != 0) Machine::add(cell, waited_);
        if (counts) Machine::add(cell + 1, 1);
    }

   private:
    Machine machine_;
    int hop_, source_;
    bool active_;
    unsigned long long since_ = 0, waited_ = 0;
};

// ---------------------------------------------------------------------------------- host: who sets what

// Each translation unit with kernels has a pointer of its own. Setters return what went wrong, or null.
using Setter = const char* (*)(const Target&);

#if defined(__GNUC__)
__attribute__((visibility("hidden")))
#endif
inline std::vector<Setter>&
setters() {
    static std::vector<Setter> list;
    return list;
}

// `cells` is the address of an int64 tensor of [hops, ranks, 2] on the current device, 0 is off. Waits until the device is
// idle, so afterwards the former tensor may be freed; not while a graph is captured. Throws what Python calls ValueError
// for a rank outside of the group, RuntimeError for what CUDA refuses.
inline void set(std::uintptr_t cells, int ranks, int rank) {
    if (ranks < 1 || rank < 0 || rank >= ranks)
        throw std::invalid_argument("rank " + std::to_string(rank) + " is not in a group of " + std::to_string(ranks) + " ranks");
    if (cells % alignof(unsigned long long) != 0) throw std::invalid_argument("cells are not aligned to 8 bytes");
    const Target target{reinterpret_cast<unsigned long long*>(cells), ranks, rank / kRanksPerNode * kRanksPerNode};
    for (const Setter setter : setters())
        if (const char* problem = setter(target)) throw std::runtime_error(std::string("ep_watch_set: ") + problem);
}

// `extension` is a module of pybind11.
template <class Extension>
void bind(Extension& extension) {
    extension.def("ep_watch_set", &set);
    extension.def("ep_watch_hops", &hops);
}

// ---------------------------------------------------------------------------------- device

#if defined(__CUDACC__)
// Constant, so that reading it costs nothing; whoever sets it sees to it that no kernel runs.
static __constant__ Target target;

struct Gpu {
    static constexpr int kHops = kNumHops;
    static EP_WATCH_FN const Target& target() { return ep_watch::target; }
    static EP_WATCH_FN unsigned long long now() {
        unsigned long long ns;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
        return ns;
    }
    static EP_WATCH_FN void add(unsigned long long* cell, unsigned long long value) { atomicAdd(cell, value); }
};

using Wait = BasicWait<Gpu>;

// The hop of the barriers at which ranks meet: a kernel sets it, on every thread, before it goes there.
EP_WATCH_FN int& entry() {
    __shared__ int hop;
    return hop;
}

// The rank of this node's k-th.
EP_WATCH_FN int in_node(int k) { return Gpu::target().node_begin + k; }

// Off first, so that no kernel sees a half of each target.
static const char* set_here(const Target& value) {
    const Target off{nullptr, value.ranks, value.node_begin};
    cudaError_t status = cudaMemcpyToSymbol(target, &off, sizeof off);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status == cudaSuccess) status = cudaMemcpyToSymbol(target, &value, sizeof value);
    return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

[[maybe_unused]] static const bool listed = (setters().push_back(set_here), true);
#endif

}  // namespace ep_watch
