// What is timed to tell costs of the model of time (csrc/device/host/costs.def): turns of what kernels do, in words of
// device/device.cuh. benchmarks/gpu_costs.cu measures them on a GPU. On the host target they take what the model
// charges, which tests/cpp/test_time_model.cpp compares.
//
// All threads of a launch of shape() make the probe, then run it several times, in one block, or in one on each
// multiprocessor where shape() has several. What run() returns is kept, lest the compiler leave out what leads to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.cuh"

namespace ep::probes {

constexpr int kNumWords = 1024;
constexpr int kWordStride = 32;  // a cache line
constexpr size_t kRowBytes = 7168;

struct Memory {
    // Of kNumWords, kWordStride apart, each holds the index of the next one, the last one that of the first.
    uint32_t* words;
    std::byte* source;
    std::byte* target;
    size_t bytes;  // of the source, and of the target
};

// Every launch waits for the whole grid to be resident, with which large shared memory comes.
inline LaunchShape shape_of(int blocks, int threads, size_t shared_bytes = 0) {
    return {blocks, threads, shared_bytes, true};
}

// Pieces of the memory in turn: where it is large, none is still in the L2 when its turn comes again.
class Cursor {
  public:
    EP_DEVICE explicit Cursor(size_t all_bytes) : all_bytes_(all_bytes) {}
    EP_DEVICE size_t take(size_t bytes) {
        if (at_ + bytes > all_bytes_) at_ = 0;
        at_ += bytes;
        return at_ - bytes;
    }

  private:
    size_t all_bytes_;
    size_t at_ = 0;
};

// An atomic in shared memory that needs what the one before returned.
class SharedAccess {
  public:
    static constexpr int kTurns = 1000;
    static LaunchShape shape() { return shape_of(1, kWarpSize, sizeof(uint32_t)); }

    EP_DEVICE explicit SharedAccess(const Memory&) : word_(SharedArena().take<uint32_t>(1)) {
        if (thread_index() == 0) *word_ = 1;
        block_sync();
    }
    EP_DEVICE uint32_t run(int turns) {
        uint32_t value = 1;
        if (thread_index() != 0) return value;
        for (int i = 0; i < turns; ++i) value = exchange_relaxed<Scope::kBlock>(word_, value);
        return value;
    }

  private:
    uint32_t* word_;
};

// A load as a poll makes it, of a word in the L2 that the one before names.
class Load {
  public:
    static constexpr int kTurns = 512;
    static LaunchShape shape() { return shape_of(1, kWarpSize); }

    EP_DEVICE explicit Load(const Memory& memory) : words_(memory.words) {}
    EP_DEVICE uint32_t run(int turns) {
        if (thread_index() != 0) return 0;
        for (int i = 0; i < turns; ++i) at_ = load_acquire<Scope::kSystem>(words_ + at_);
        return at_;
    }

  private:
    const uint32_t* words_;
    uint32_t at_ = 0;
};

// A store that nothing waits for, one of so few that none waits for room.
class Store {
  public:
    static constexpr int kTurns = 16;
    static LaunchShape shape() { return shape_of(1, kWarpSize); }

    EP_DEVICE explicit Store(const Memory& memory)
        : words_(reinterpret_cast<uint32_t*>(memory.target)) {}
    EP_DEVICE uint32_t run(int turns) {
        if (thread_index() != 0) return 0;
        for (int i = 0; i < turns; ++i) store_relaxed<Scope::kSystem>(words_ + i * kWordStride, 1u);
        return 0;
    }

  private:
    uint32_t* words_;
};

// An exchange of a warp that needs what the one before gave.
class Exchange {
  public:
    static constexpr int kTurns = 1000;
    static LaunchShape shape() { return shape_of(1, kWarpSize); }

    EP_DEVICE explicit Exchange(const Memory&) {}
    EP_DEVICE uint32_t run(int turns) {
        for (int i = 0; i < turns; ++i) value_ = shuffle(value_, (lane_id() + 1) % kWarpSize);
        return value_;
    }

  private:
    uint32_t value_ = static_cast<uint32_t>(lane_id());
};

// A named barrier of all threads of a block.
class Barrier {
  public:
    static constexpr int kTurns = 1000;
    static LaunchShape shape() { return shape_of(1, kMaxThreads); }

    EP_DEVICE explicit Barrier(const Memory&) {}
    EP_DEVICE uint32_t run(int turns) {
        for (int i = 0; i < turns; ++i) bar_sync(1, num_threads());
        return 0;
    }
};

// A barrier of the grid.
class GridBarrier {
  public:
    static constexpr int kTurns = 64;
    static LaunchShape shape() { return shape_of(2, kMaxThreads); }

    EP_DEVICE explicit GridBarrier(const Memory&) {}
    EP_DEVICE uint32_t run(int turns) {
        for (int i = 0; i < turns; ++i) grid_sync();
        return 0;
    }
};

// A step of a warp's copy, from memory.
class CopyStep {
  public:
    static constexpr int kTurns = 32;
    static constexpr size_t kStepBytes = kLoadsInFlight * sizeof(Vector) * kWarpSize;
    static LaunchShape shape() { return shape_of(1, kWarpSize); }

    EP_DEVICE explicit CopyStep(const Memory& memory) : memory_(memory), cursor_(memory.bytes) {}
    EP_DEVICE uint32_t run(int turns) {
        const size_t bytes = kStepBytes * turns;
        const size_t at = cursor_.take(bytes);
        copy_warp(memory_.target + at, memory_.source + at, bytes);
        return 0;
    }

  private:
    Memory memory_;
    Cursor cursor_;
};

// A row of kBytes for each warp, from memory and back by bulk copies.
template <int kWarps, size_t kBytes>
class BulkRows {
  public:
    static constexpr int kTurns = 16;
    static constexpr size_t kTurnBytes = kWarps * kBytes;
    static LaunchShape shape() {
        return shape_of(1, kWarps * kWarpSize, kWarps * RowCopy::piece_bytes(kBytes));
    }

    EP_DEVICE explicit BulkRows(const Memory& memory)
        : memory_(memory), cursor_(memory.bytes), copy_(piece(), RowCopy::piece_bytes(kBytes)) {}
    EP_DEVICE uint32_t run(int turns) {
        for (int i = 0; i < turns; ++i) {
            const size_t at = cursor_.take(kTurnBytes) + warp_id() * kBytes;
            copy_.take(memory_.source + at, kBytes);
            copy_.give(memory_.target + at);
        }
        copy_.finish();
        return 0;
    }

  private:
    EP_DEVICE static std::byte* piece() {
        const size_t bytes = RowCopy::piece_bytes(kBytes);
        return SharedArena().take<std::byte>(static_cast<int>(kWarps * bytes)) + warp_id() * bytes;
    }

    Memory memory_;
    Cursor cursor_;
    RowCopy copy_;
};
using BulkRow = BulkRows<1, kRowBytes>;
// Nearly all of a multiprocessor's shared memory is under way, so that its rate decides and no latency does.
using ManyBulkRows = BulkRows<kMaxThreads / kWarpSize, 4 * kRowBytes>;

}  // namespace ep::probes
