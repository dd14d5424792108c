// The rows of one expert lie by source, in ascending order: where those of each source begin, and whose
// a row is.
#pragma once

#include "device/device.cuh"

namespace ep {

// Warp 0. offsets[s]: first row of source s in this expert's block; offsets[num_ranks]: all rows.
EP_ALWAYS_INLINE void prefix_counts(const uint32_t* counts, int num_ranks, int* offsets) {
    int before = 0;
    for (int base = 0; base < num_ranks; base += kWarpSize) {
        const int source = base + lane_id();
        const int count = source < num_ranks
                              ? static_cast<int>(load_relaxed<Scope::kDevice>(&counts[source]))
                              : 0;
        const int prefix = before + warp_prefix_sum(count);
        if (source < num_ranks) offsets[source] = prefix;
        before = shuffle(prefix + count, kWarpSize - 1);
    }
    if (elect_one()) offsets[num_ranks] = before;
}

// The source whose rows include `row`: the last one that begins at or before it.
EP_DEVICE int source_of_row(const int* offsets, int num_ranks, int row) {
    int low = 0;
    int high = num_ranks;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (offsets[middle] <= row ? low : high) = middle;
    }
    return low;
}

}  // namespace ep
