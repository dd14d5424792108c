// Transport on the CUDA target: see transport/transport.cuh for the contract. Ranks whose memory can
// be addressed (NVLink peers, ranks of one process, this rank) are written directly; the others
// through NVSHMEM's queue pairs, which only the module built with EP_WITH_NVSHMEM has.
#pragma once

#include "device/cuda/device.cuh"
#include "device/cuda/row_copy.cuh"

#if defined(EP_WITH_NVSHMEM)
#include "transport/cuda/queue_pairs.cuh"
#endif

namespace ep {

struct Transport {
    std::byte* const* peers;  // in device memory; nullptr for ranks out of reach
    std::byte* own;           // peers[rank], so that a poll is one load
    int rank;
    int num_ranks;
    bool all_in_reach;
#if defined(EP_WITH_NVSHMEM)
    QueuePairs queue_pairs;
#endif

    EP_DEVICE std::byte* direct(int dst, size_t offset) const {
        std::byte* peer = peers[dst];
        return peer == nullptr ? nullptr : peer + offset;
    }
    EP_DEVICE bool all_direct() const { return all_in_reach; }
    EP_DEVICE std::byte* local(size_t offset) const { return own + offset; }

    EP_DEVICE void put_warp(
        int dst, size_t offset, const void* src, size_t bytes, [[maybe_unused]] int qp) const {
        if (std::byte* there = direct(dst, offset)) {
            copy_warp(there, src, bytes);
            warp_sync();  // lane 0 will release the stores of all
            return;
        }
#if defined(EP_WITH_NVSHMEM)
        queue_pairs.put_warp(dst, local(offset), src, bytes, qp);
#endif
    }

    EP_DEVICE void put_row(int dst, size_t offset, RowCopy& row, int /*qp*/) const {
        row.give(direct(dst, offset));
    }

    EP_DEVICE void put(
        int dst, size_t offset, const void* src, size_t bytes, [[maybe_unused]] int qp) const {
        if (std::byte* there = direct(dst, offset)) {
            cuda_target::copy(there, src, bytes, 0, 1);
            return;
        }
#if defined(EP_WITH_NVSHMEM)
        queue_pairs.put(dst, local(offset), src, bytes, qp);
#endif
    }

    EP_DEVICE void put_word(int dst, size_t offset, uint64_t value, [[maybe_unused]] int qp) const {
        if (std::byte* there = direct(dst, offset)) {
            store_relaxed<Scope::kSystem>(reinterpret_cast<uint64_t*>(there), value);
            return;
        }
#if defined(EP_WITH_NVSHMEM)
        queue_pairs.put_word(dst, local(offset), value, qp);
#endif
    }

    // For a direct peer this is where writes become visible to it: the signal that follows is a
    // relaxed store, because a release would wait for the same writes a second time.
    EP_DEVICE void fence(int dst, [[maybe_unused]] int qp) const {
        if (peers[dst] != nullptr) {
            cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
            return;
        }
#if defined(EP_WITH_NVSHMEM)
        queue_pairs.fence(dst, qp);
#endif
    }

    EP_DEVICE void quiet(int dst, [[maybe_unused]] int qp) const {
        if (peers[dst] != nullptr) {
            cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
            return;
        }
#if defined(EP_WITH_NVSHMEM)
        queue_pairs.quiet(dst, qp);
#endif
    }

    EP_DEVICE void signal(int dst, size_t offset, uint64_t value, [[maybe_unused]] int qp) const {
        if (std::byte* there = direct(dst, offset)) {
            store_relaxed<Scope::kSystem>(reinterpret_cast<uint64_t*>(there), value);
            return;
        }
#if defined(EP_WITH_NVSHMEM)
        queue_pairs.signal(dst, local(offset), value, qp);
#endif
    }

    EP_DEVICE uint64_t poll(size_t offset) const {
        auto* word = reinterpret_cast<uint64_t*>(local(offset));
        const uint64_t value = load_acquire<Scope::kSystem>(word);
#if defined(EP_WITH_NVSHMEM)
        if (value != 0) queue_pairs.order_after_arrival(word);
#endif
        return value;
    }

    EP_DEVICE uint64_t newest(size_t offset) const { return poll(offset); }

    // The GPU keeps no stamp of a remote write: a signal has arrived when it is seen.
    EP_DEVICE uint64_t arrival_ns(size_t) const { return now_ns(); }
    EP_DEVICE bool stamps_arrivals() const { return false; }

    EP_DEVICE void flush() const {}
};

}  // namespace ep
