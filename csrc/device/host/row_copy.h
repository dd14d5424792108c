// RowCopy on the host target: see device/device.cuh for the contract. With a piece of shared memory, a row
// lies there until the next one or the end, as late as a GPU may write it: who tells of a row before finish() has told
// of one that is not there.
#pragma once

#include <string>

#include "device/host/device.h"

namespace ep {

class RowCopy {
  public:
    static constexpr size_t kAlignment = 16;

    static size_t piece_bytes(size_t row_bytes) { return row_bytes; }

    RowCopy(std::byte* piece, size_t piece_bytes) : piece_(piece), piece_bytes_(piece_bytes) {}

    EP_ALWAYS_INLINE void take(const void* src, size_t bytes) {
        if (piece_ != nullptr) stage(src, bytes);
        source_ = src;
        bytes_ = bytes;
    }

    EP_ALWAYS_INLINE void give(void* dst) {
        if (piece_ == nullptr) {
            copy_warp(dst, source_, bytes_);
            return;
        }
        write();
        destination_ = dst;
        if (elect_one()) host::current_executor->take_time(host::Step::kGiveRow, bytes_);
    }

    void finish() {
        write();
        if (piece_ != nullptr && elect_one()) host::current_executor->await_rows();
    }

    const void* source() const { return source_; }
    size_t bytes() const { return bytes_; }
    bool is_staged() const { return piece_ != nullptr; }

  private:
    void write() {
        if (destination_ != nullptr && elect_one()) std::memcpy(destination_, piece_, bytes_);
        destination_ = nullptr;
    }
    void stage(const void* src, size_t bytes) {
        write();
        if (bytes > piece_bytes_) {
            host::current_executor->fail("a row of " + std::to_string(bytes) +
                                         " bytes is copied through " +
                                         std::to_string(piece_bytes_) + " bytes of shared memory");
        }
        if (!elect_one()) return;
        host::current_executor->interleave(host::Step::kTakeRow, nullptr, bytes);
        std::memcpy(piece_, src, bytes);
    }

    std::byte* piece_;  // nullptr: none
    size_t piece_bytes_;
    const void* source_ = nullptr;
    size_t bytes_ = 0;
    void* destination_ = nullptr;  // that the row has still to be written to
};

}  // namespace ep
