// Sums of rows that lie anywhere, in fp32 and in a given order, rounded once.
#pragma once

#include "kernels/normal_state.cuh"

namespace ep {

// The rows of one sum: a list in the shared memory of its warp, which one lane writes.
struct RowList {
    const std::byte** rows;
    int count;

    EP_DEVICE void add(const std::byte* row) {
        if (elect_one()) rows[count] = row;
        ++count;
    }
};

// Thread. Sums up some vectors of the rows.
template <int kTile>
EP_DEVICE void sum_tile(const RowList& list, int first, int stride, Vector* out) {
    float sums[kTile][kVectorElements];
    EP_UNROLL(kTile)
    for (auto& sum : sums) {
        EP_UNROLL(8)
        for (float& element : sum) element = 0.0f;
    }
    for (int r = 0; r < list.count; ++r) {
        const auto* row = reinterpret_cast<const Vector*>(list.rows[r]) + first;
        Vector vectors[kTile];
        EP_UNROLL(kTile)
        for (int j = 0; j < kTile; ++j) vectors[j] = load_vector(row + j * stride);
        EP_UNROLL(kTile)
        for (int j = 0; j < kTile; ++j) {
            float values[kVectorElements];
            unpack(vectors[j], values);
            EP_UNROLL(8)
            for (int i = 0; i < kVectorElements; ++i) sums[j][i] += values[i];
        }
    }
    EP_UNROLL(kTile)
    for (int j = 0; j < kTile; ++j) store_vector(out + first + j * stride, pack(sums[j]));
}

// Warp. out = the sum of the rows; zero where there is none.
EP_DEVICE void sum_rows(const RowList& list, size_t row_bytes, std::byte* out) {
    const auto vectors = static_cast<int>(row_bytes / sizeof(Vector));
    auto* to = reinterpret_cast<Vector*>(out);
    warp_for_tiles<kTileVectors>(
        vectors,
        [&](int first, int stride) { sum_tile<kTileVectors>(list, first, stride, to); },
        [&](int v) { sum_tile<1>(list, v, 1, to); });
}

// Warp. out[k] = the sum of item k of the packs behind the rows, which begin at `first_row` of the list.
EP_DEVICE void sum_weights(const RowList& list, int first_row, const NormalRow& row, float* out) {
    for (int k = lane_id(); k < row.num_topk; k += kWarpSize) {
        float sum = 0.0f;
        for (int r = first_row; r < list.count; ++r) {
            sum += reinterpret_cast<const float*>(list.rows[r] + row.pack_offset() +
                                                  row.weights_offset())[k];
        }
        out[k] = sum;
    }
}

}  // namespace ep
