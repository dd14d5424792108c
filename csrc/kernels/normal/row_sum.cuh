// Sums of rows that lie anywhere, in fp32 and in a given order, rounded once.
#pragma once

#include "kernels/normal/state.cuh"

namespace ep {

// The rows of one sum, as a list in shared memory that one thread writes.
struct RowList {
    union Entry {
        const std::byte* row;
        struct {
            int32_t count;
            int32_t num_biases;
        } head;
    };
    Entry* entries;

    EP_HOST_DEVICE static int size(int most_rows) { return 1 + most_rows; }
    EP_DEVICE void clear() { entries[0].head = {0, 0}; }
    EP_DEVICE void add(const std::byte* row) { entries[++entries[0].head.count].row = row; }
    // Before all others. It has no pack.
    EP_DEVICE void add_bias(const std::byte* row) {
        add(row);
        ++entries[0].head.num_biases;
    }
    EP_DEVICE int count() const { return entries[0].head.count; }
    EP_DEVICE int num_biases() const { return entries[0].head.num_biases; }
    EP_DEVICE const std::byte* row(int i) const { return entries[1 + i].row; }
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
    const int count = list.count();
    for (int r = 0; r < count; ++r) {
        const auto* row = reinterpret_cast<const Vector*>(list.row(r)) + first;
        prefetch_ahead(row);
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

// Warp. out[k] = the sum of weight k in the packs behind the rows, which biases have none of.
EP_DEVICE void sum_weights(const RowList& list, const NormalRow& row, float* out) {
    for (int k = lane_id(); k < row.num_topk; k += kWarpSize) {
        float sum = 0.0f;
        for (int r = list.num_biases(); r < list.count(); ++r) {
            const std::byte* weights = list.row(r) + row.pack_offset() + row.weights_offset();
            sum += reinterpret_cast<const float*>(weights)[k];
        }
        out[k] = sum;
    }
}

}  // namespace ep
