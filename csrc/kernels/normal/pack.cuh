// Packs: what travels with each row, put together once for all destinations.
#pragma once

#include "kernels/normal/verify.cuh"

namespace ep {

// What packs are made of.
struct PackArgs {
    NormalRow row;
    int num_rows;
    const int64_t* topk_idx;    // [num_rows, num_topk], or nullptr
    const float* topk_weights;  // the same
    const uint32_t* scales;
    int64_t scale_row_stride;
    int64_t scale_column_stride;
    std::byte* packs;
};

// What rows are proved with.
struct ProveArgs : CommonArgs {
    NormalRow row;
    int num_rows;
    const std::byte* x;     // [num_rows, row_bytes]
    const int32_t* tokens;  // of the rows, or nullptr: their numbers
    int token_stride;
    std::byte* packs;
};

// A thread a row.
EP_KERNEL void normal_pack(const EP_GRID_CONSTANT PackArgs args) {
    const NormalRow& row = args.row;
    for (int i = block_index() * num_threads() + thread_index(); i < args.num_rows;
         i += num_blocks() * num_threads()) {
        std::byte* pack = args.packs + i * row.pack_bytes();
        *reinterpret_cast<RowProof*>(pack) = {static_cast<uint32_t>(i), 0, 0};
        auto* experts = reinterpret_cast<int32_t*>(pack + row.experts_offset());
        auto* weights = reinterpret_cast<float*>(pack + row.weights_offset());
        auto* scales = reinterpret_cast<uint32_t*>(pack + row.scales_offset());
        const int64_t first = static_cast<int64_t>(i) * row.num_topk;
        for (int k = 0; k < row.num_topk; ++k) {
            const int64_t expert = args.topk_idx == nullptr ? -1 : args.topk_idx[first + k];
            experts[k] = expert >= 0 && expert < kMaxExperts ? static_cast<int32_t>(expert) : -1;
            weights[k] = args.topk_weights[first + k];
        }
        for (int s = 0; s < row.num_scales; ++s)
            scales[s] = args.scales[i * args.scale_row_stride + s * args.scale_column_stride];
    }
}

// A warp a row, behind normal_pack() and before the operation that sends the rows.
EP_KERNEL void normal_prove(const EP_GRID_CONSTANT ProveArgs args) {
    const uint64_t op = args.common.op();
    for (int i = block_index() * num_warps() + warp_id(); i < args.num_rows;
         i += num_blocks() * num_warps()) {
        const int64_t row = i;
        const int32_t token = args.tokens == nullptr ? i : args.tokens[row * args.token_stride];
        prove_row(args.row,
                  op,
                  args.common.rank(),
                  static_cast<uint32_t>(token),
                  args.x + row * static_cast<int64_t>(args.row.row_bytes),
                  args.packs + row * static_cast<int64_t>(args.row.pack_bytes()));
    }
}

}  // namespace ep
