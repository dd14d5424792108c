// Rows that prove themselves (DEEP_EP_VERIFY=1): each travels with the number of its operation and a
// sum over its words, and the receiver compares both with what it has copied. Kernels are built with
// and without this, so that it costs nothing when it is off.
#pragma once

#include "kernels/protocol/failure.cuh"

namespace ep {

// Warp; all lanes get it. word_at(i): 32-bit word i of n. Words count by their place, so that words in
// the wrong order do not sum up to the same.
template <class WordAt>
EP_DEVICE uint64_t sum_words(int n, WordAt word_at) {
    uint64_t sum = 0;
    for (int i = lane_id(); i < n; i += kWarpSize)
        sum += static_cast<uint64_t>(word_at(i)) * (2 * static_cast<uint64_t>(i) + 1);
    return warp_reduce<Sum>(sum);
}

EP_DEVICE uint64_t sum_row(const std::byte* row, size_t bytes) {
    const auto* words = reinterpret_cast<const uint32_t*>(row);
    return sum_words(static_cast<int>(bytes / sizeof(uint32_t)), [&](int i) { return words[i]; });
}

// One thread. Compares what came with a row of `source` with what was found in it.
EP_DEVICE void check_row(const OperationArgs& args,
                         const OpenOperation& open,
                         const RowProof& proof,
                         const RowProof& found,
                         int source,
                         const RowPlace& place) {
    if (proof.first_word() != found.first_word() || proof.sum != found.sum)
        record_failure(args, open, FailureReason::kCorrupt, source, place);
}

}  // namespace ep
