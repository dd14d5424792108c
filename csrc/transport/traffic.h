// What a rank has asked its transport for since it connected: the host target counts it, for
// benchmarks/operation_counts.py.
#pragma once

#include <cstdint>
#include <vector>

namespace ep {

// To one destination, in calls of the transport.
struct PathTraffic {
    uint64_t puts = 0;  // put_warp
    uint64_t put_bytes = 0;
    uint64_t words = 0;  // put_word
    uint64_t signals = 0;
    uint64_t fences = 0;
    uint64_t quiets = 0;
};

struct Traffic {
    std::vector<PathTraffic> to;  // by destination
    uint64_t polls = 0;           // looks at words that others set
};

}  // namespace ep
