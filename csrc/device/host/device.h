// The device interface on the host target: see device/device.cuh for the contracts.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "device/bits.cuh"
#include "device/host/executor.h"
#include "device/work_numbers.h"

#define EP_KERNEL inline
#define EP_DEVICE inline
#define EP_ALWAYS_INLINE \
    [[gnu::always_inline]] inline  // where the compiler chose otherwise, at a cost
#define EP_HOST_DEVICE inline
#define EP_UNROLL(n)      // the compiler unrolls constant loops by itself
#define EP_GRID_CONSTANT  // kernel arguments stay in constant memory on the GPU

namespace ep {

constexpr int kWarpSize = host::kWarpSize;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

inline int thread_index() { return host::current_executor->fiber().thread; }
inline int block_index() { return host::current_executor->fiber().block; }
inline int num_threads() { return host::current_executor->shape().threads; }
inline int num_blocks() { return host::current_executor->shape().blocks; }
inline int lane_id() { return thread_index() % kWarpSize; }
inline int warp_id() { return thread_index() / kWarpSize; }
inline int num_warps() { return num_threads() / kWarpSize; }

namespace host {

// One exchange, or one for each half of the lanes that is left.
constexpr int halvings(int lanes) { return std::countr_zero(static_cast<unsigned>(lanes)); }
inline constexpr Collective kWarpSync{"warp_sync", 1};
inline constexpr Collective kShuffle{"shuffle", 1};
inline constexpr Collective kBallot{"ballot", 1};
inline constexpr Collective kPrefixSum{"warp_prefix_sum", halvings(kWarpSize)};
template <int G>
inline constexpr Collective kGroupReduce{"group_reduce", halvings(G)};

}  // namespace host

struct Sum {
    static constexpr host::Collective kReduce{"warp_reduce<Sum>", host::halvings(host::kWarpSize)};
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Max {
    static constexpr host::Collective kReduce{"warp_reduce<Max>", host::halvings(host::kWarpSize)};
    template <class T>
    T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};
struct Min {
    static constexpr host::Collective kReduce{"warp_reduce<Min>", host::halvings(host::kWarpSize)};
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};

namespace host {

template <class T>
T* slot_as(void* slot) {
    return static_cast<T*>(slot);
}

template <class F>
void for_lanes(uint32_t mask, F f) {
    for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

}  // namespace host

inline void warp_sync(uint32_t mask = kFullWarp) {
    host::current_executor->warp_collective(host::kWarpSync, mask, nullptr, nullptr);
}

template <class T>
T shuffle(T value, int source_lane, uint32_t mask = kFullWarp) {
    struct Slot {
        T value;
        int source;
        T result;
    } slot{value, source_lane, value};
    host::current_executor->warp_collective(
        host::kShuffle, mask, &slot, [](void* const* slots, uint32_t mask) {
            host::for_lanes(mask, [&](int lane) {
                auto* mine = host::slot_as<Slot>(slots[lane]);
                const int source = mine->source % kWarpSize;
                // As on the GPU, a lane outside of the mask has no defined value; the own one is harmless.
                if (mask >> source & 1) mine->result = host::slot_as<Slot>(slots[source])->value;
            });
        });
    return slot.result;
}

inline uint32_t ballot(bool predicate, uint32_t mask = kFullWarp) {
    uint32_t slot = predicate;
    host::current_executor->warp_collective(
        host::kBallot, mask, &slot, [](void* const* slots, uint32_t mask) {
            uint32_t bits = 0;
            host::for_lanes(
                mask, [&](int lane) { bits |= *host::slot_as<uint32_t>(slots[lane]) << lane; });
            host::for_lanes(mask, [&](int lane) { *host::slot_as<uint32_t>(slots[lane]) = bits; });
        });
    return slot;
}

template <class Op, class T>
T warp_reduce(T value, uint32_t mask = kFullWarp) {
    host::current_executor->warp_collective(
        Op::kReduce, mask, &value, [](void* const* slots, uint32_t mask) {
            T total = *host::slot_as<T>(slots[std::countr_zero(mask)]);
            host::for_lanes(mask & (mask - 1),
                            [&](int lane) { total = Op{}(total, *host::slot_as<T>(slots[lane])); });
            host::for_lanes(mask, [&](int lane) { *host::slot_as<T>(slots[lane]) = total; });
        });
    return value;
}

template <class T>
T warp_prefix_sum(T value) {
    host::current_executor->warp_collective(
        host::kPrefixSum, kFullWarp, &value, [](void* const* slots, uint32_t) {
            T before = 0;
            for (int lane = 0; lane < kWarpSize; ++lane) {
                T* slot = host::slot_as<T>(slots[lane]);
                const T own = *slot;
                *slot = before;
                before += own;
            }
        });
    return value;
}

template <int G, class Op, class T, int N>
void group_reduce(T (&values)[N]) {
    static_assert(G >= 1 && G <= kWarpSize && (G & (G - 1)) == 0,
                  "groups are powers of two up to a warp");
    host::current_executor->warp_collective(
        host::kGroupReduce<G>, kFullWarp, values, [](void* const* slots, uint32_t) {
            for (int first = 0; first < kWarpSize; first += G) {
                T totals[N];
                std::memcpy(totals, slots[first], sizeof(totals));
                for (int lane = first + 1; lane < first + G; ++lane) {
                    for (int i = 0; i < N; ++i)
                        totals[i] = Op{}(totals[i], host::slot_as<T>(slots[lane])[i]);
                }
                for (int lane = first; lane < first + G; ++lane)
                    std::memcpy(slots[lane], totals, sizeof(totals));
            }
        });
}

inline bool elect_one() { return lane_id() == 0; }

inline void block_sync() { host::current_executor->block_barrier(false); }
inline bool block_any(bool predicate) { return host::current_executor->block_barrier(predicate); }
inline void bar_sync(int id, int num_threads) {
    host::current_executor->named_barrier(id, num_threads);
}
inline void grid_sync() { host::current_executor->grid_barrier(); }

class SharedArena {
  public:
    template <class T>
    T* take(int count) {
        used_ = (used_ + alignof(T) - 1) / alignof(T) * alignof(T);
        auto* begin = reinterpret_cast<T*>(host::current_executor->shared_memory() + used_);
        used_ += sizeof(T) * static_cast<size_t>(count);
        if (used_ > host::current_executor->shape().shared_bytes) {
            host::current_executor->fail(
                "the kernel takes " + std::to_string(used_) +
                " bytes of shared memory, the launch gave " +
                std::to_string(host::current_executor->shape().shared_bytes));
        }
        return begin;
    }

  private:
    size_t used_ = 0;
};

// Scopes do not differ between threads of one machine; the host target treats all as system. Under
// ThreadSanitizer an atomic of block scope may only be where no other block can reach it.
enum class Scope { kBlock, kDevice, kSystem };

namespace host {

template <Scope S, class T>
std::atomic_ref<T> atomic(T* pointer, Step step) {
    if (current_executor != nullptr) {
        if (kThreadSanitizer && S == Scope::kBlock) current_executor->check_block_scope(pointer);
        if (S == Scope::kBlock) step = step == Step::kLoad ? Step::kRead : Step::kWrite;
        current_executor->interleave(step, pointer);
    }
    return std::atomic_ref<T>(*pointer);
}

}  // namespace host

template <Scope S, class T>
T load_acquire(const T* pointer) {
    return host::atomic<S>(const_cast<T*>(pointer), host::Step::kLoad)
        .load(std::memory_order_acquire);
}
template <Scope S, class T>
T load_relaxed(const T* pointer) {
    return host::atomic<S>(const_cast<T*>(pointer), host::Step::kLoad)
        .load(std::memory_order_relaxed);
}
template <Scope S, class T>
void store_release(T* pointer, std::type_identity_t<T> value) {
    host::atomic<S>(pointer, host::Step::kRelease).store(value, std::memory_order_release);
}
template <Scope S, class T>
void store_relaxed(T* pointer, std::type_identity_t<T> value) {
    host::atomic<S>(pointer, host::Step::kStore).store(value, std::memory_order_relaxed);
}
template <Scope S, class T>
T add_relaxed(T* pointer, std::type_identity_t<T> value) {
    return host::atomic<S>(pointer, host::Step::kStore).fetch_add(value, std::memory_order_relaxed);
}
template <Scope S, class T>
T add_release(T* pointer, std::type_identity_t<T> value) {
    return host::atomic<S>(pointer, host::Step::kRelease)
        .fetch_add(value, std::memory_order_release);
}
template <Scope S, class T>
T add_acq_rel(T* pointer, std::type_identity_t<T> value) {
    return host::atomic<S>(pointer, host::Step::kReleaseUpdate)
        .fetch_add(value, std::memory_order_acq_rel);
}
template <Scope S, class T>
T or_relaxed(T* pointer, std::type_identity_t<T> value) {
    return host::atomic<S>(pointer, host::Step::kStore).fetch_or(value, std::memory_order_relaxed);
}
template <Scope S, class T>
T exchange_relaxed(T* pointer, std::type_identity_t<T> value) {
    return host::atomic<S>(pointer, host::Step::kUpdate).exchange(value, std::memory_order_relaxed);
}
template <Scope S, class T>
void max_relaxed(T* pointer, std::type_identity_t<T> value) {
    const std::atomic_ref<T> word = host::atomic<S>(pointer, host::Step::kStore);
    T found = word.load(std::memory_order_relaxed);
    while (found < value && !word.compare_exchange_weak(found, value, std::memory_order_relaxed)) {
    }
}
// Returns the value found; it was replaced if that equals `expected`.
template <Scope S, class T>
T compare_exchange_relaxed(T* pointer,
                           std::type_identity_t<T> expected,
                           std::type_identity_t<T> desired) {
    host::atomic<S>(pointer, host::Step::kUpdate)
        .compare_exchange_strong(expected, desired, std::memory_order_relaxed);
    return expected;
}

struct Deadline {
    uint64_t at_ns;
};
inline Deadline deadline_in(uint64_t ns) { return {host::current_executor->monotonic_ns() + ns}; }
inline uint64_t left_ns(Deadline deadline) {
    const uint64_t now = host::current_executor->monotonic_ns();
    return deadline.at_ns > now ? deadline.at_ns - now : 0;
}
// How long a rank waits for the others in a clock exchange: they may have to be scheduled first.
constexpr uint64_t kClockPatienceNs = 20'000'000;
inline uint64_t now_ns() {
    const host::Unobserved own_records;
    return host::current_executor->clock().now_ns();
}

template <class Predicate, class Note, class Clock>
[[nodiscard]] bool spin_until(Predicate ready, Deadline deadline, Note note, Clock clock_ns) {
    uint64_t note_at_ns = 0;
    host::current_executor->begin_looks();
    for (int polls = 1;; ++polls) {
        if (ready()) {
            host::current_executor->poll_succeeded();
            return true;
        }
        // Reading the clock at every poll would cost more than the poll.
        if (polls % 8 == 0) {
            const uint64_t now = clock_ns();
            if (now >= deadline.at_ns) {
                host::current_executor->poll_succeeded();
                return false;
            }
            if (note_at_ns != 0 && now >= note_at_ns) note();
            if (now >= note_at_ns) note_at_ns = now + kNoteIntervalNs;
        }
        host::current_executor->poll_failed(deadline.at_ns);
    }
}
template <class Predicate, class Note>
[[nodiscard]] bool spin_until(Predicate ready, Deadline deadline, Note note) {
    return spin_until(ready, deadline, note, [] { return host::current_executor->monotonic_ns(); });
}
template <class Predicate>
[[nodiscard]] bool spin_until(Predicate ready, Deadline deadline) {
    return spin_until(ready, deadline, [] {});
}
// Lanes must not part ways, so clock and deadline are those of one of them.
template <class Predicate, class Note>
[[nodiscard]] bool warp_spin_until(Predicate ready, Deadline deadline, Note note) {
    const Deadline common{shuffle(deadline.at_ns, 0)};
    return spin_until(
        ready, common, note, [] { return shuffle(host::current_executor->monotonic_ns(), 0); });
}

// Rows go to memory that another core reads next, and that is far more than the cache: stores that
// bypass it save reading the destination first. 4 % of a round at EP8.
inline void copy_streaming(void* dst, const void* src, size_t bytes) {
#if defined(__AVX2__)
    constexpr size_t kLine = 64;
    constexpr size_t kWorthIt = 2048;
    if (bytes >= kWorthIt && reinterpret_cast<uintptr_t>(dst) % sizeof(__m256i) == 0) {
        auto* to = static_cast<__m256i*>(dst);
        const auto* from = static_cast<const __m256i*>(src);
        const size_t lines = bytes / kLine;
        for (size_t i = 0; i < 2 * lines; i += 2) {
            const __m256i low = _mm256_loadu_si256(from + i);
            const __m256i high = _mm256_loadu_si256(from + i + 1);
            _mm256_stream_si256(to + i, low);
            _mm256_stream_si256(to + i + 1, high);
        }
        // Streaming stores are not ordered by a later release store; this orders them.
        _mm_sfence();
        dst = to + 2 * lines;
        src = from + 2 * lines;
        bytes -= lines * kLine;
    }
#endif
    std::memcpy(dst, src, bytes);
}

namespace host {

// What a GPU does, so that ThreadSanitizer knows which lane read and wrote what.
inline void copy_interleaved(void* dst, const void* src, size_t bytes, int first, int stride) {
    const auto num_vectors = static_cast<int>(bytes / sizeof(Vector));
    for (int i = first; i < num_vectors; i += stride)
        static_cast<Vector*>(dst)[i] = static_cast<const Vector*>(src)[i];
}

}  // namespace host

// One lane copies for all: the C library's copy is faster than 32 strided ones, and the contract
// (source visible before, destination after the next sync) allows it. The other lanes' way past it is
// in the caller: a call each would be one percent of a round.
[[gnu::noinline]] inline void copy_by_one_lane(void* dst, const void* src, size_t bytes) {
    host::current_executor->interleave(host::Step::kCopyWarp, nullptr, bytes);
    copy_streaming(dst, src, bytes);
}
EP_ALWAYS_INLINE void copy_warp(void* dst, const void* src, size_t bytes) {
    if (host::kThreadSanitizer) {
        host::copy_interleaved(dst, src, bytes, lane_id(), kWarpSize);
    } else if (elect_one()) {
        copy_by_one_lane(dst, src, bytes);
    }
}
inline void copy_block(void* dst, const void* src, size_t bytes) {
    if (host::kThreadSanitizer) {
        host::copy_interleaved(dst, src, bytes, thread_index(), num_threads());
    } else if (thread_index() == 0) {
        host::current_executor->take_time(host::Step::kCopyBlock, bytes);
        std::memcpy(dst, src, bytes);
    }
}

// Contiguous chunks per thread, so that a thread's memory accesses are neighbours; the CUDA target
// interleaves instead, so that a warp's are.
template <class F>
void warp_for(int n, F f) {
    const int chunk = (n + kWarpSize - 1) / kWarpSize;
    const int end = std::min(n, (lane_id() + 1) * chunk);
    for (int i = lane_id() * chunk; i < end; ++i) f(i);
}
template <class F>
void block_for(int n, F f) {
    const int chunk = (n + num_threads() - 1) / num_threads();
    const int end = std::min(n, (thread_index() + 1) * chunk);
    for (int i = thread_index() * chunk; i < end; ++i) f(i);
}

// Tiles of kTile vectors a lane: full(first, stride) for whole ones, single(v) for what is left.
template <int kTile, class Full, class Single>
void warp_for_tiles(int n, Full full, Single single) {
    const int chunk = (n + kWarpSize - 1) / kWarpSize;
    const int end = std::min(n, (lane_id() + 1) * chunk);
    int i = lane_id() * chunk;
    for (; i + kTile <= end; i += kTile) full(i, 1);
    for (; i < end; ++i) single(i);
}

// Hints that this thread, and then the next ones, will read on from `vector`. Several rows read side
// by side are more streams than the processor follows by itself.
inline void prefetch_ahead(const Vector* vector) {
    constexpr int kVectorsPerLine = 4;
    constexpr int kVectorsAhead = 24;
    __builtin_prefetch(vector + kVectorsAhead);
    __builtin_prefetch(vector + kVectorsAhead + kVectorsPerLine);
}

struct Tile {
    int first;
    int count;
    int index(int j) const { return first + j; }
    int clamped(int j) const { return index(j < count ? j : count - 1); }
};
template <int V, class F>
void block_for_tiles(int n, F f) {
    const int chunk = (n + num_threads() * V - 1) / (num_threads() * V) * V;
    const int end = std::min(n, (thread_index() + 1) * chunk);
    host::current_executor->interleave();
    for (int i = thread_index() * chunk; i < end; i += V) f(Tile{i, std::min(V, end - i)});
}

}  // namespace ep
