// Sums of rows that lie anywhere, in fp32 and in a given order, rounded once.
#pragma once

#include "kernels/normal/state.cuh"

namespace ep {

// The rows of one sum, as a list in shared memory that one thread writes, or several by put().
struct RowList {
    union Entry {
        const std::byte* row;
        struct {
            int32_t count;
            uint16_t num_biases;
            uint8_t group_begin;
            uint8_t group_end;
        } head;
    };
    Entry* entries;

    EP_HOST_DEVICE static int size(int most_rows) { return 1 + most_rows; }
    EP_DEVICE void clear() { entries[0].head = {0, 0, 0, 0}; }
    EP_DEVICE void add(const std::byte* row) { entries[++entries[0].head.count].row = row; }
    // Before all others. It has no pack.
    EP_DEVICE void add_bias(const std::byte* row) {
        add(row);
        ++entries[0].head.num_biases;
    }
    // The rows from `begin` on are to be added up on their own, and rounded, before they count. Of a list of 255 at most.
    EP_DEVICE void group_from(int begin) {
        if (count() - begin < 2) return;
        entries[0].head.group_begin = static_cast<uint8_t>(begin);
        entries[0].head.group_end = static_cast<uint8_t>(count());
    }
    // Of all behind the biases.
    EP_DEVICE void reverse() {
        if (has_group()) {
            const int ends = num_biases() + count();
            const int begin = group_begin();
            entries[0].head.group_begin = static_cast<uint8_t>(ends - group_end());
            entries[0].head.group_end = static_cast<uint8_t>(ends - begin);
        }
        for (int i = num_biases(), j = count() - 1; i < j; ++i, --j) {
            const std::byte* row = this->row(i);
            put(i, this->row(j));
            put(j, row);
        }
    }
    // By several threads: each row at its place, and by one of them how many there are.
    EP_DEVICE void put(int i, const std::byte* row) { entries[1 + i].row = row; }
    EP_DEVICE void set_counts(int count, int num_biases) {
        entries[0].head = {count, static_cast<uint16_t>(num_biases), 0, 0};
    }
    EP_DEVICE int count() const { return entries[0].head.count; }
    EP_DEVICE int num_biases() const { return entries[0].head.num_biases; }
    EP_DEVICE bool has_group() const { return group_end() != 0; }
    EP_DEVICE int group_begin() const { return entries[0].head.group_begin; }
    EP_DEVICE int group_end() const { return entries[0].head.group_end; }
    EP_DEVICE const std::byte* row(int i) const { return entries[1 + i].row; }
};

// Thread. Sums up some vectors of the rows; kGrouped: of a list that has a group.
template <bool kGrouped, int kTile>
EP_DEVICE void sum_tile(const RowList& list, int first, int stride, Vector* out) {
    float sums[kTile][kVectorElements];
    EP_UNROLL(kTile)
    for (auto& sum : sums) {
        EP_UNROLL(8)
        for (float& element : sum) element = 0.0f;
    }
    [[maybe_unused]] float before[kTile][kVectorElements] = {};  // the group
    const int begin = kGrouped ? list.group_begin() : 0;
    const int last = kGrouped ? list.group_end() - 1 : 0;
    const int count = list.count();
    for (int r = 0; r < count; ++r) {
        if (kGrouped && r == begin) {
            EP_UNROLL(kTile)
            for (int j = 0; j < kTile; ++j) {
                EP_UNROLL(8)
                for (int i = 0; i < kVectorElements; ++i) {
                    before[j][i] = sums[j][i];
                    sums[j][i] = 0.0f;
                }
            }
        }
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
        if (kGrouped && r == last) {
            EP_UNROLL(kTile)
            for (int j = 0; j < kTile; ++j) {
                float values[kVectorElements];
                unpack(pack(sums[j]), values);
                EP_UNROLL(8)
                for (int i = 0; i < kVectorElements; ++i) sums[j][i] = before[j][i] + values[i];
            }
        }
    }
    EP_UNROLL(kTile)
    for (int j = 0; j < kTile; ++j) store_vector(out + first + j * stride, pack(sums[j]));
}

// Warp. out = the sum of the rows; zero where there is none.
template <bool kGrouped = false>
EP_DEVICE void add_up(const RowList& list, size_t row_bytes, std::byte* out) {
    const auto vectors = static_cast<int>(row_bytes / sizeof(Vector));
    auto* to = reinterpret_cast<Vector*>(out);
    warp_for_tiles<kTileVectors>(
        vectors,
        [&](int first, int stride) { sum_tile<kGrouped, kTileVectors>(list, first, stride, to); },
        [&](int v) { sum_tile<kGrouped, 1>(list, v, 1, to); });
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
