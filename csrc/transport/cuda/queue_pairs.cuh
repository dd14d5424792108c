// Ranks out of NVLink's reach, through NVSHMEM's public device API. A symmetric address is this
// rank's own address of the place; NVSHMEM finds the same place on the destination.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "device/cuda/device.cuh"

// NVSHMEM < 3.5 has no queue-pair API; everything then goes through the default queues.
#define EP_HAS_QUEUE_PAIRS (NVSHMEM_VENDOR_MAJOR_VERSION * 100 + NVSHMEM_VENDOR_MINOR_VERSION >= 305)

namespace ep {

struct QueuePairs {
#if EP_HAS_QUEUE_PAIRS
    nvshmemx_qp_handle_t* handles;  // in device memory
    int num_handles;
#endif
    // Whether this GPU may show a NIC's signal before the data that was sent ahead of it. Hopper
    // keeps the order of such writes, so there an acquiring load is enough.
    bool reorders_arrivals;

#if EP_HAS_QUEUE_PAIRS
    EP_DEVICE nvshmemx_qp_handle_t* handle(int qp) const { return handles + qp % num_handles; }
#endif

    // Full warp; 16-byte aligned, multiples of 16. Returns before `src` has been read.
    EP_DEVICE void put_warp(int dst, std::byte* place, const void* src, size_t bytes, [[maybe_unused]] int qp) const {
        auto* to = reinterpret_cast<uint64_t*>(place);
        const auto* from = static_cast<const uint64_t*>(src);
#if EP_HAS_QUEUE_PAIRS
        nvshmemx_qp_uint64_put_nbi_warp(to, from, bytes / sizeof(uint64_t), dst, *handle(qp));
#else
        nvshmemx_putmem_nbi_warp(to, from, bytes, dst);
#endif
    }

    EP_DEVICE void put_word(int dst, std::byte* place, uint64_t value, [[maybe_unused]] int qp) const {
        auto* to = reinterpret_cast<uint64_t*>(place);
#if EP_HAS_QUEUE_PAIRS
        nvshmemx_qp_uint64_p(to, value, dst, *handle(qp));
#else
        nvshmem_uint64_p(to, value, dst);
#endif
    }

    // One handle at a time: a queue pair delivers in order, so the fence costs next to nothing, where
    // a fence over several would have to wait for all of their completions.
    EP_DEVICE void fence([[maybe_unused]] int dst, [[maybe_unused]] int qp) const {
#if EP_HAS_QUEUE_PAIRS
        nvshmemx_qp_fence(dst, handle(qp), 1);
#else
        nvshmem_fence();
#endif
    }

    EP_DEVICE void signal(int dst, std::byte* place, uint64_t value, [[maybe_unused]] int qp) const {
        auto* word = reinterpret_cast<uint64_t*>(place);
#if EP_HAS_QUEUE_PAIRS
        nvshmemx_qp_signal_op(word, value, NVSHMEM_SIGNAL_SET, dst, *handle(qp));
#else
        nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, dst);
#endif
    }

    // After a poll has seen `word` set: a test that succeeds makes what was sent ahead readable.
    EP_DEVICE void order_after_arrival(uint64_t* word) const {
        if (reorders_arrivals) nvshmem_uint64_test(word, NVSHMEM_CMP_NE, 0);
    }
};

}  // namespace ep
