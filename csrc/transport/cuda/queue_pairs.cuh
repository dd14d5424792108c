// Ranks out of NVLink's reach, through NVSHMEM's public device API. A symmetric address is this
// rank's own address of the place; NVSHMEM finds the same place on the destination.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "device/cuda/device.cuh"

namespace ep {

struct QueuePairs {
    // How often each handle stands in `handles`. A count of one is also NVSHMEMX_QP_DEFAULT, and quiet takes it
    // for that: it would wait for the default queue pairs and not for the one that is named (3.8.0).
    static constexpr int kCopies = 2;

    // In device memory. NVSHMEM's default queue alone where its transport cannot create others.
    nvshmemx_qp_handle_t* handles;
    int num_handles;
    // Whether this GPU may show a NIC's signal before the data that was sent ahead of it. Hopper
    // keeps the order of such writes, so there an acquiring load is enough.
    bool reorders_arrivals;

    EP_DEVICE nvshmemx_qp_handle_t* handle(int qp) const {
        return handles + qp % num_handles * kCopies;
    }

    // Full warp; 16-byte aligned, multiples of 16. Returns before `src` has been read.
    EP_DEVICE void put_warp(
        int dst, std::byte* place, const void* src, size_t bytes, int qp) const {
        nvshmemx_qp_uint64_put_nbi_warp(reinterpret_cast<uint64_t*>(place),
                                        static_cast<const uint64_t*>(src),
                                        bytes / sizeof(uint64_t),
                                        dst,
                                        *handle(qp));
        warp_sync();
    }

    // One thread, and the same.
    EP_DEVICE void put(int dst, std::byte* place, const void* src, size_t bytes, int qp) const {
        nvshmemx_qp_uint64_put_nbi(reinterpret_cast<uint64_t*>(place),
                                   static_cast<const uint64_t*>(src),
                                   bytes / sizeof(uint64_t),
                                   dst,
                                   *handle(qp));
    }

    EP_DEVICE void put_word(int dst, std::byte* place, uint64_t value, int qp) const {
        nvshmemx_qp_uint64_p(reinterpret_cast<uint64_t*>(place), value, dst, *handle(qp));
    }

    // One handle at a time: a queue pair delivers in order, so the fence costs next to nothing, where
    // a fence over several would have to wait for all of their completions.
    EP_DEVICE void fence(int dst, int qp) const { nvshmemx_qp_fence(dst, handle(qp), 1); }

    EP_DEVICE void quiet(int dst, int qp) const { nvshmemx_qp_quiet(dst, handle(qp), kCopies); }

    EP_DEVICE void signal(int dst, std::byte* place, uint64_t value, int qp) const {
        nvshmemx_qp_signal_op(
            reinterpret_cast<uint64_t*>(place), value, NVSHMEM_SIGNAL_SET, dst, *handle(qp));
    }

    // After a poll has seen `word` set: a test that succeeds makes what was sent ahead readable.
    EP_DEVICE void order_after_arrival(uint64_t* word) const {
        if (reorders_arrivals) nvshmem_uint64_test(word, NVSHMEM_CMP_NE, 0);
    }
};

}  // namespace ep
