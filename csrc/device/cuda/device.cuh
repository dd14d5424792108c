// The device interface on the CUDA target: see device/device.cuh for the contracts. Everything here
// is for code inside a kernel; the host's side of a launch is in device/cuda/launch.h.
#pragma once

#include <cooperative_groups.h>

#include <cstddef>
#include <cstdint>
#include <cuda/atomic>
#include <type_traits>

#include "device/cuda/bits.cuh"
#include "device/launch_shape.h"
#include "device/work_numbers.h"

// One resident block per SM is enough, so registers are limited by the largest block alone.
#define EP_KERNEL __global__ __launch_bounds__(ep::kMaxThreads, 1)
#define EP_GRID_CONSTANT __grid_constant__

namespace ep {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

EP_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
EP_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
EP_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }
EP_DEVICE int num_blocks() { return static_cast<int>(gridDim.x); }
EP_DEVICE int lane_id() { return thread_index() % kWarpSize; }
EP_DEVICE int warp_id() { return thread_index() / kWarpSize; }
EP_DEVICE int num_warps() { return num_threads() / kWarpSize; }

struct Sum {
    template <class T>
    EP_HOST_DEVICE T operator()(T a, T b) const {
        return a + b;
    }
};
struct Max {
    template <class T>
    EP_HOST_DEVICE T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};
struct Min {
    template <class T>
    EP_HOST_DEVICE T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};

EP_DEVICE void warp_sync(uint32_t mask = kFullWarp) { __syncwarp(mask); }

namespace cuda_target {

// The shuffle instruction moves 32 bits; wider values take two, so the intrinsics know 4 and 8 bytes.
template <class T>
using ShuffleWord = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned>;

template <class T, class F>
EP_DEVICE T through_words(T value, F move) {
    static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                  "shuffles move 4 or 8 bytes");
    return cuda::std::bit_cast<T>(move(cuda::std::bit_cast<ShuffleWord<T>>(value)));
}

template <class Op, class T>
inline constexpr bool kHasReduceInstruction =
    std::is_integral_v<T> && sizeof(T) == 4 &&
    (std::is_same_v<Op, Sum> || std::is_same_v<Op, Max> || std::is_same_v<Op, Min>);

}  // namespace cuda_target

template <class T>
EP_DEVICE T shuffle(T value, int source_lane, uint32_t mask = kFullWarp) {
    return cuda_target::through_words(
        value, [=](auto word) { return __shfl_sync(mask, word, source_lane); });
}

EP_DEVICE uint32_t ballot(bool predicate, uint32_t mask = kFullWarp) {
    return __ballot_sync(mask, predicate);
}

template <class Op, class T>
EP_DEVICE T warp_reduce(T value, uint32_t mask = kFullWarp) {
    if constexpr (cuda_target::kHasReduceInstruction<Op, T>) {
        if constexpr (std::is_same_v<Op, Sum>)
            return static_cast<T>(__reduce_add_sync(mask, value));
        if constexpr (std::is_same_v<Op, Max>)
            return static_cast<T>(__reduce_max_sync(mask, value));
        if constexpr (std::is_same_v<Op, Min>)
            return static_cast<T>(__reduce_min_sync(mask, value));
    } else if (mask == kFullWarp) {
        EP_UNROLL(5)
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            value = Op{}(value, cuda_target::through_words(value, [=](auto word) {
                             return __shfl_xor_sync(kFullWarp, word, distance);
                         }));
        }
        return value;
    } else {
        T total = shuffle(value, __ffs(mask) - 1, mask);
        for (uint32_t rest = mask & (mask - 1); rest != 0; rest &= rest - 1) {
            total = Op{}(total, shuffle(value, __ffs(rest) - 1, mask));
        }
        return total;
    }
}

template <class T>
EP_DEVICE T warp_prefix_sum(T value) {
    T inclusive = value;
    EP_UNROLL(5)
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const T below = cuda_target::through_words(
            inclusive, [=](auto word) { return __shfl_up_sync(kFullWarp, word, distance); });
        if (lane_id() >= distance) inclusive += below;
    }
    return inclusive - value;
}

template <int G, class Op, class T, int N>
EP_DEVICE void group_reduce(T (&values)[N]) {
    static_assert(G >= 1 && G <= kWarpSize && (G & (G - 1)) == 0,
                  "groups are powers of two up to a warp");
    EP_UNROLL(5)
    for (int distance = G / 2; distance > 0; distance /= 2) {
        EP_UNROLL(N)
        for (int i = 0; i < N; ++i) {
            values[i] = Op{}(values[i], cuda_target::through_words(values[i], [=](auto word) {
                                 return __shfl_xor_sync(kFullWarp, word, distance);
                             }));
        }
    }
}

// Always lane 0, as on the host target, so that both targets elect the same one.
EP_DEVICE bool elect_one() { return lane_id() == 0; }

EP_DEVICE void block_sync() { __syncthreads(); }
EP_DEVICE bool block_any(bool predicate) { return __syncthreads_or(predicate) != 0; }
EP_DEVICE void bar_sync(int id, int num_threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

enum class Scope { kBlock, kDevice, kSystem };

namespace cuda_target {

template <Scope S, class T>
EP_DEVICE auto atomic(T* pointer) {
    constexpr auto kScope = S == Scope::kBlock    ? cuda::thread_scope_block
                            : S == Scope::kDevice ? cuda::thread_scope_device
                                                  : cuda::thread_scope_system;
    return cuda::atomic_ref<T, kScope>(*pointer);
}

}  // namespace cuda_target

template <Scope S, class T>
EP_DEVICE T load_acquire(const T* pointer) {
    return cuda_target::atomic<S>(const_cast<T*>(pointer)).load(cuda::memory_order_acquire);
}
template <Scope S, class T>
EP_DEVICE T load_relaxed(const T* pointer) {
    return cuda_target::atomic<S>(const_cast<T*>(pointer)).load(cuda::memory_order_relaxed);
}
template <Scope S, class T>
EP_DEVICE void store_release(T* pointer, std::type_identity_t<T> value) {
    cuda_target::atomic<S>(pointer).store(value, cuda::memory_order_release);
}
template <Scope S, class T>
EP_DEVICE void store_relaxed(T* pointer, std::type_identity_t<T> value) {
    cuda_target::atomic<S>(pointer).store(value, cuda::memory_order_relaxed);
}
template <Scope S, class T>
EP_DEVICE T add_relaxed(T* pointer, std::type_identity_t<T> value) {
    return cuda_target::atomic<S>(pointer).fetch_add(value, cuda::memory_order_relaxed);
}
template <Scope S, class T>
EP_DEVICE T add_release(T* pointer, std::type_identity_t<T> value) {
    return cuda_target::atomic<S>(pointer).fetch_add(value, cuda::memory_order_release);
}
template <Scope S, class T>
EP_DEVICE T add_acq_rel(T* pointer, std::type_identity_t<T> value) {
    return cuda_target::atomic<S>(pointer).fetch_add(value, cuda::memory_order_acq_rel);
}
template <Scope S, class T>
EP_DEVICE T or_relaxed(T* pointer, std::type_identity_t<T> value) {
    return cuda_target::atomic<S>(pointer).fetch_or(value, cuda::memory_order_relaxed);
}
template <Scope S, class T>
EP_DEVICE T exchange_relaxed(T* pointer, std::type_identity_t<T> value) {
    return cuda_target::atomic<S>(pointer).exchange(value, cuda::memory_order_relaxed);
}
template <Scope S, class T>
EP_DEVICE void max_relaxed(T* pointer, std::type_identity_t<T> value) {
    cuda_target::atomic<S>(pointer).fetch_max(value, cuda::memory_order_relaxed);
}
// Returns the value found; it was replaced if that equals `expected`.
template <Scope S, class T>
EP_DEVICE T compare_exchange_relaxed(T* pointer,
                                     std::type_identity_t<T> expected,
                                     std::type_identity_t<T> desired) {
    cuda_target::atomic<S>(pointer).compare_exchange_strong(
        expected, desired, cuda::memory_order_relaxed);
    return expected;
}

// Only in launches with LaunchShape::cooperative: the driver provides the grid's barrier.
EP_DEVICE void grid_sync() { cooperative_groups::this_grid().sync(); }

// Dynamic shared memory of the launch; nothing else in a kernel uses it.
class SharedArena {
  public:
    template <class T>
    EP_DEVICE T* take(int count) {
        extern __shared__ __align__(128) unsigned char shared_memory[];
        used_ = (used_ + alignof(T) - 1) / alignof(T) * alignof(T);
        auto* begin = reinterpret_cast<T*>(shared_memory + used_);
        used_ += sizeof(T) * static_cast<size_t>(count);
        return begin;
    }

  private:
    size_t used_ = 0;
};

// The GPU's nanosecond counter, common to all of its SMs. Its step is between 32 ns and about a
// microsecond, depending on the GPU.
EP_DEVICE uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

struct Deadline {
    uint64_t at_ns;
};
// How long a rank waits for the others in a clock exchange. Ranks close an operation within some
// microseconds of each other; chosen, not tuned.
constexpr uint64_t kClockPatienceNs = 100'000;
EP_DEVICE Deadline deadline_in(uint64_t ns) { return {now_ns() + ns}; }
EP_DEVICE uint64_t left_ns(Deadline deadline) {
    const uint64_t now = now_ns();
    return deadline.at_ns > now ? deadline.at_ns - now : 0;
}

// Polls at full speed as long as a message usually takes, then more and more rarely: a rank that is
// late by milliseconds should not find its NVLink and L2 busy with polls.
template <class Predicate, class Note, class Clock>
[[nodiscard]] EP_DEVICE bool spin_until(Predicate ready,
                                        Deadline deadline,
                                        Note note,
                                        Clock clock_ns) {
    constexpr int kEagerPolls = 256;       // chosen, not tuned
    constexpr uint32_t kMaxSleepNs = 256;  // chosen, not tuned
    for (int polls = 0; polls < kEagerPolls; ++polls) {
        if (ready()) return true;
    }
    uint64_t note_at_ns = clock_ns() + kNoteIntervalNs;
    for (uint32_t sleep_ns = 32;;) {
        if (ready()) return true;
        const uint64_t now = clock_ns();
        if (now >= deadline.at_ns) return false;
        if (now >= note_at_ns) {
            note();
            note_at_ns = now + kNoteIntervalNs;
        }
        __nanosleep(sleep_ns);
        sleep_ns = sleep_ns < kMaxSleepNs ? sleep_ns * 2 : kMaxSleepNs;
    }
}
template <class Predicate, class Note>
[[nodiscard]] EP_DEVICE bool spin_until(Predicate ready, Deadline deadline, Note note) {
    return spin_until(ready, deadline, note, [] { return now_ns(); });
}
template <class Predicate>
[[nodiscard]] EP_DEVICE bool spin_until(Predicate ready, Deadline deadline) {
    return spin_until(ready, deadline, [] {});
}
// Lanes must not part ways, so clock and deadline are those of one of them.
template <class Predicate, class Note>
[[nodiscard]] EP_DEVICE bool warp_spin_until(Predicate ready, Deadline deadline, Note note) {
    const Deadline common{shuffle(deadline.at_ns, 0)};
    return spin_until(ready, common, note, [] { return shuffle(now_ns(), 0); });
}

namespace cuda_target {

// Consecutive threads move consecutive vectors; each has kLoadsInFlight loads under way before its first
// store, because a load from HBM or a peer takes longer than the stores of a whole row. What is left at
// the end is one more such step, and no loop of its own.
EP_DEVICE void copy(void* dst, const void* src, size_t bytes, int thread, int threads) {
    auto* to = static_cast<uint4*>(dst);
    const auto* from = static_cast<const uint4*>(src);
    const int vectors = static_cast<int>(bytes / sizeof(uint4));
    int i = thread;
    for (; i + (kLoadsInFlight - 1) * threads < vectors; i += kLoadsInFlight * threads) {
        uint4 values[kLoadsInFlight];
        EP_UNROLL(kLoadsInFlight)
        for (int j = 0; j < kLoadsInFlight; ++j) values[j] = from[i + j * threads];
        EP_UNROLL(kLoadsInFlight)
        for (int j = 0; j < kLoadsInFlight; ++j) to[i + j * threads] = values[j];
    }
    if (i >= vectors) return;
    uint4 rest[kLoadsInFlight];
    EP_UNROLL(kLoadsInFlight)
    for (int j = 0; j < kLoadsInFlight; ++j)
        if (i + j * threads < vectors) rest[j] = from[i + j * threads];
    EP_UNROLL(kLoadsInFlight)
    for (int j = 0; j < kLoadsInFlight; ++j)
        if (i + j * threads < vectors) to[i + j * threads] = rest[j];
}

}  // namespace cuda_target

EP_DEVICE void copy_warp(void* dst, const void* src, size_t bytes) {
    cuda_target::copy(dst, src, bytes, lane_id(), kWarpSize);
}
EP_DEVICE void copy_block(void* dst, const void* src, size_t bytes) {
    cuda_target::copy(dst, src, bytes, thread_index(), num_threads());
}

// Interleaved, so that the lanes of a warp touch neighbouring memory.
template <class F>
EP_DEVICE void warp_for(int n, F f) {
    for (int i = lane_id(); i < n; i += kWarpSize) f(i);
}
template <class F>
EP_DEVICE void block_for(int n, F f) {
    for (int i = thread_index(); i < n; i += num_threads()) f(i);
}

// Nothing to do: a warp's neighbouring vectors and the tile's independent loads are in flight.
EP_DEVICE void prefetch_ahead(const Vector* /*vector*/) {}

struct Tile {
    int first;
    int stride;
    int count;
    EP_DEVICE int index(int j) const { return first + j * stride; }
    EP_DEVICE int clamped(int j) const { return index(j < count ? j : count - 1); }
};
template <int V, class Full, class Single>
EP_DEVICE void warp_for_tiles(int n, Full full, Single single) {
    const int whole = n / (V * kWarpSize) * (V * kWarpSize);
    for (int first = lane_id(); first < whole; first += V * kWarpSize) full(first, kWarpSize);
    for (int i = whole + lane_id(); i < n; i += kWarpSize) single(i);
}
template <int V, class F>
EP_DEVICE void block_for_tiles(int n, F f) {
    const int stride = num_threads();
    for (int first = thread_index(); first < n; first += V * stride) {
        const int left = (n - first + stride - 1) / stride;
        f(Tile{first, stride, left < V ? left : V});
    }
}

}  // namespace ep
