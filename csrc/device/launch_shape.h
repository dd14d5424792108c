// A launch as a value: how many threads run a kernel and what they share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ep {

constexpr int kMaxThreads = 256;  // of a block on a GPU; leaves each thread 255 registers

// Of one launch on the host target. Each has a stack and a guard below it, which are two mappings,
// and Linux grants a process 65530.
#if defined(EP_TIME_MODEL)
constexpr int kMaxHostThreads = 65536;  // stacks are not guarded
#else
constexpr int kMaxHostThreads = 16384;
#endif

// How often who waits for long says so to the host.
constexpr uint64_t kNoteIntervalNs = 100'000'000;

// Shared memory of a block, at most: what Hopper has.
constexpr size_t kMaxSharedBytes = 227 * 1024;

struct LaunchShape {
    int blocks = 1;
    int threads = 32;  // per block, a multiple of 32
    size_t shared_bytes = 0;
    bool cooperative = false;  // blocks wait for each other, so all must be resident
};

}  // namespace ep
