// The last calls of a rank, and what their kernels tell of themselves while they run (kernels/protocol/recorder.cuh).
// Read from any thread: it asks neither the device nor any rank, and waits for no operation.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "device/device_runtime.h"
#include "kernels/protocol/recorder.cuh"

namespace ep {

// What all ranks must agree on in an operation.
struct Agreed {
    OpShape shape;
    uint64_t dispatch_op;  // combine: the operation whose rows it returns
    uint64_t capacities;   // normal operations: of their queues
};

struct RecordedCall {
    uint64_t call;  // its number, from 1
    Series series;
    Agreed agreed;
    int num_tokens;
    Stream stream;
    int64_t called_ns;  // UTC
    int64_t receive_called_ns;
    bool has_hook;
    RecordedEntry seen;  // of its kernel
};

// By what they owe, the ranks that are missing.
struct WaitsNow {
    Series series;
    uint64_t number;  // 0: it waits for nobody
    double waited_s;
    std::array<std::vector<int>, static_cast<size_t>(Owed::kNumKinds)> missing;
};

class CallLog {
  public:
    // Remembers so many calls; none: 0.
    void open(Device& device, int num_calls);
    void close(Device& device);

    // A call, or the second half of one (`continues`) such as the receive phase of a hook. Where its kernel
    // writes.
    Record add(const Agreed& agreed, int num_tokens, Stream stream, bool continues, bool has_hook);

    uint64_t num_calls() const;
    // At most so many, oldest first.
    std::vector<RecordedCall> calls(size_t most) const;
    WaitsNow waits(int num_ranks) const;

  private:
    RecordedEntry read(uint64_t call) const;

    mutable std::mutex mutex_;
    std::vector<RecordedCall> calls_;  // a ring, like entries_
    uint64_t num_calls_ = 0;           // all, so far
    RecordedEntry* entries_ = nullptr;
    RecordedWaits* waits_ = nullptr;
};

}  // namespace ep
