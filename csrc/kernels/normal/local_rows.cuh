// What happens to the rows of one rank where each token has several of them: a received row goes to the places of
// its experts, and the rows of a token are added up. Local; ranks do not meet.
#pragma once

#include "kernels/normal/leader.cuh"
#include "kernels/normal/row_sum.cuh"
#include "kernels/normal/tasks.cuh"

namespace ep {

struct CopyRowsArgs : CopyRowsTensors {
    size_t row_piece_bytes;  // of shared memory, for the RowCopy of each warp; 0: none
};

// A warp a row: out[slots[i, k]] = x[i] for each k; slots outside of out are none. A row without slots is not read.
EP_KERNEL void copy_rows(const EP_GRID_CONSTANT CopyRowsArgs args) {
    const int64_t row_bytes = args.row_bytes;
    RowCopy copy = row_copy_of_warp(args.row_piece_bytes, SharedArena());
    for (int64_t i = block_index() * num_warps() + warp_id(); i < args.num_rows;
         i += num_blocks() * num_warps()) {
        const int32_t* slots = args.slots + i * args.width;
        bool is_taken = false;
        for (int k = 0; k < args.width; ++k) {
            const int32_t slot = slots[k];
            if (slot < 0 || slot >= args.num_out) continue;
            if (!is_taken) copy.take(args.x + i * row_bytes, row_bytes);
            is_taken = true;
            copy.give(args.out + slot * row_bytes);
        }
    }
    copy.finish();
}

// Shared memory of a block: for each warp the rows of two sums, so that lanes still read one while the next is listed.
struct SumRowsShared {
    RowList::Entry* lists;  // [2, RowList::size(most_rows())], of this warp
    int size;

    EP_DEVICE explicit SumRowsShared(int width) : size(RowList::size(most_rows(width))) {
        lists = SharedArena().take<RowList::Entry>(2 * num_warps() * size) + 2 * warp_id() * size;
    }
    EP_DEVICE RowList list(int turn) const { return {lists + turn * size}; }
    EP_HOST_DEVICE static int most_rows(int width) { return 2 + width; }  // two biases
    EP_HOST_DEVICE static size_t bytes(int width, int warps) {
        return 2 * warps * RowList::size(most_rows(width)) * sizeof(RowList::Entry);
    }
};

// Leader. The rows of a sum.
EP_DEVICE void list_rows_of_sum(const SumRowsArgs& args, int64_t sum, RowList list) {
    const auto row_of = [&](const bf16* tensor, int64_t number) {
        return reinterpret_cast<const std::byte*>(tensor) + number * args.row_bytes;
    };
    int count = 0;
    const auto list_bias = [&](const bf16* bias) {
        if (bias == nullptr) return;
        if (elect_one()) list.put(count, row_of(bias, sum));
        ++count;
    };
    list_bias(args.bias_0);
    list_bias(args.bias_1);
    const int num_biases = count;
    const int32_t* rows = args.rows + sum * args.width;
    for (int first = 0; first < args.width; first += kLeaderLanes) {
        const int k = first + lane_id();
        const int32_t row = k < args.width ? rows[k] : -1;
        const bool is_row = row >= 0 && row < args.num_rows;
        const uint32_t are_rows = leader_ballot(is_row);
        const int before = popcount(are_rows & bits_below(lane_id()));
        if (is_row) list.put(count + before, row_of(args.x, row));
        count += popcount(are_rows);
    }
    if (elect_one()) list.set_counts(count, num_biases);
}

// A warp a sum: out[i] = the biases, then x[rows[i, k]] for each k, in fp32, rounded once; rows outside of x are
// none. One row alone stays as it is, bit by bit.
EP_KERNEL void sum_rows(const EP_GRID_CONSTANT SumRowsArgs args) {
    const SumRowsShared shared(args.width);
    int turn = 0;
    for (int64_t i = block_index() * num_warps() + warp_id(); i < args.num_sums;
         i += num_blocks() * num_warps()) {
        const RowList list = shared.list(turn);
        if (is_leader_lane()) list_rows_of_sum(args, i, list);
        warp_sync();
        std::byte* out = reinterpret_cast<std::byte*>(args.out) + i * args.row_bytes;
        if (list.count() == 1) {
            copy_warp(out, list.row(0), args.row_bytes);
        } else {
            add_up(list, args.row_bytes, out);
        }
        turn ^= 1;
    }
}

}  // namespace ep
