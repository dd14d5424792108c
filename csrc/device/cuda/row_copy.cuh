// RowCopy on the CUDA target: see device/device.cuh for the contract. With a piece of shared memory, one
// lane moves the row by two bulk copies (TMA), in place of all lanes and 16 bytes each.
//
// Bulk copies go through the async proxy, all other accesses through the generic one. What orders the two,
// by PTX ISA, *Async proxy*, *cp.async.bulk*, *membar/fence* and *mbarrier.try_wait*:
//   generic before async   What others wrote into the row, or read from the place it goes to, is ordered before
//                          take() by acquires and barriers, in the generic proxy only. fence.proxy.async.global
//                          carries this over to the bulk copies that this lane issues afterwards. The one for
//                          shared memory does the same for the barrier's initial value. One for both would be
//                          compiled to a MEMBAR of the device, for every row.
//   read before use        The wait for the barrier's phase, which acquires: the row is in the piece, and its
//                          source need not stay.
//   piece used again       wait_group.read: earlier copies have read the piece. No generic access touches it.
//   async before generic   wait_group without .read: the writes are visible to this lane. An implicit proxy
//                          fence goes with completion, so barriers and releases order them from there on.
// A bulk copy ends without anybody's help, so no wait here needs a deadline.
#pragma once

#include <cuda/ptx>

#include "device/cuda/device.cuh"

namespace ep {

class RowCopy {
  public:
    static constexpr size_t kAlignment = 128;

    EP_HOST_DEVICE static size_t piece_bytes(size_t row_bytes) {
        return kAlignment + (row_bytes + kAlignment - 1) / kAlignment * kAlignment;
    }

    EP_DEVICE RowCopy(std::byte* piece, size_t /*piece_bytes*/) : piece_(piece) {
        if (piece_ == nullptr || !elect_one()) return;
        cuda::ptx::mbarrier_init(barrier(), 1);
        phase_ = cuda::ptx::mbarrier_arrive(barrier());
        cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    }

    EP_DEVICE void take(const void* src, size_t bytes) {
        source_ = src;
        bytes_ = static_cast<uint32_t>(bytes);
        if (piece_ == nullptr || !elect_one()) return;
        await_row();
        cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>{});
        cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
        phase_ = cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release,
                                                      cuda::ptx::scope_cta,
                                                      cuda::ptx::space_shared,
                                                      barrier(),
                                                      bytes_);
        cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster,  // of one block: the own shared memory
                                 cuda::ptx::space_global,
                                 row(),
                                 source_,
                                 bytes_,
                                 barrier());
    }

    EP_DEVICE void give(void* dst) {
        if (piece_ == nullptr) {
            copy_warp(dst, source_, bytes_);
            return;
        }
        if (!elect_one()) return;
        await_row();
        cuda::ptx::cp_async_bulk(
            cuda::ptx::space_global, cuda::ptx::space_shared, dst, row(), bytes_);
        cuda::ptx::cp_async_bulk_commit_group();
    }

    EP_DEVICE void finish() {
        if (piece_ == nullptr || !elect_one()) return;
        await_row();
        cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>{});
    }

    EP_DEVICE const void* source() const { return source_; }
    EP_DEVICE size_t bytes() const { return bytes_; }

  private:
    EP_DEVICE uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(piece_); }
    EP_DEVICE std::byte* row() const { return piece_ + kAlignment; }

    // The phase is named by what arriving at it returned, so rows need not be counted; the first one has no row.
    // A phase that has ended ends every wait for it, until the next one has ended, too.
    EP_DEVICE void await_row() const {
        while (!cuda::ptx::mbarrier_try_wait(barrier(), phase_)) {
        }
    }

    std::byte* piece_;  // barrier, row; nullptr: none
    const void* source_ = nullptr;
    uint64_t phase_ = 0;
    uint32_t bytes_ = 0;
};

}  // namespace ep
