// Low-latency combine: every row that dispatch delivered goes back to its source, which sums the
// rows of each token with the token's weights.
//
//   send     1 Every rank is told that this one has entered (operation.cuh).
//            2 A warp per row: puts it into slot (expert, position) of its source rank, as bf16 or in
//              the logarithmic format, and adds one to `issued` of (expert, source).
//            3 A thread per (expert, source): when `issued` has reached the number of rows, signals
//              the count on the expert's queue pair.
//   receive  4 All blocks wait for all headers and counts.
//            5 A block per token: fp32 accumulation over the top-k slots in ascending order, one fused
//              multiply-add each, one rounding at the end.
// The rows' places come from dispatch (HandleEntry), so entries of topk_idx that were set to -1 since
// only drop terms of the sum.
#pragma once

#include "kernels/low_latency/expert_rows.cuh"
#include "kernels/low_latency/handle.cuh"
#include "kernels/low_latency/log_rows.cuh"
#include "kernels/protocol/operation.cuh"
#include "kernels/protocol/verify.cuh"

namespace ep {

struct CombineArgs : CommonArgs, CombineTensors {
    HandleView handle;
    size_t x_stride;     // elements; row r of expert e at x + (e * num_ranks * M + r) * x_stride
    int zero_copy_half;  // of the staging memory, which x is in; kNotStaged: x is elsewhere
    static constexpr int kNotStaged = -1;

    EP_DEVICE bool x_is_staged() const { return zero_copy_half != kNotStaged; }
    // Where rows are staged. Counted on the device unless the caller has written there: a captured graph
    // may hold any number of combines.
    EP_DEVICE int staging_half() const {
        return x_is_staged() ? zero_copy_half
                             : static_cast<int>(common.workspace->num_combines % kNumHalves);
    }
};

// Shared memory of a block. It holds two experts' offsets and two tokens' rows, because warps that are done with
// one start on the next.
struct CombineShared {
    const std::byte** rows;  // [2, kMaxTopk]; nullptr: none came back
    int* offsets;            // [2, num_ranks + 1]
    SharedArena rest;        // for the receive half

    EP_DEVICE explicit CombineShared(int num_ranks) {
        rows = rest.take<const std::byte*>(2 * kMaxTopk);
        offsets = rest.take<int>(2 * (num_ranks + 1));
    }
    EP_HOST_DEVICE static size_t bytes(const LowLatencyMap& map, int threads) {
        return 2 * kMaxTopk * sizeof(const std::byte*) + 2 * (map.num_ranks + 1) * sizeof(int) +
               WaitShared::bytes(map.num_ranks + map.num_experts, threads);
    }
};

EP_DEVICE RowRange range_of(const CombineArgs& args, int pair) {
    return RowRange::unpack(args.layout_range[pair]);
}

// ---- send

// Warp. Puts one row back to its source, into the slot at `destination`.
template <bool kLogFormat, bool kVerify>
EP_DEVICE void return_row(const CombineArgs& args,
                          const OpenOperation& open,
                          size_t destination,
                          int local_expert,
                          int dst,
                          int row) {
    const OperationArgs& common = args.common;
    const CombineMessage message{common.map.hidden};
    const size_t index = local_expert * common.map.rows_per_expert() + row;
    const bf16* x = args.x + index * args.x_stride;
    const auto staging = [&] {
        return common.transport.local(
            common.map.combine_staging(args.staging_half(), local_expert, row));
    };
    RowProof proof{kRowBf16, static_cast<uint32_t>(open.op), 0};
    if (kLogFormat) {
        std::byte* staged = staging();
        std::byte* data = staged + message.data_offset();
        const bool encoded = encode_row(x, message.hidden, data);
        const size_t bytes = encoded ? message.log_bytes() : message.data_bytes();
        warp_sync();
        if (!encoded) copy_warp(data, x, bytes);
        if (encoded) proof.encoding_or_token = kRowLogFmt;
        if (kVerify) {
            warp_sync();
            proof.sum = sum_row(data, bytes);
        }
        if (elect_one()) *reinterpret_cast<RowProof*>(staged + message.proof_offset()) = proof;
        warp_sync();
        common.transport.put_warp(dst,
                                  destination + message.proof_offset(),
                                  staged + message.proof_offset(),
                                  sizeof(RowProof) + bytes,
                                  local_expert);
        return;
    }
    const void* source = x;
    if (!args.x_is_staged() && common.transport.direct(dst, 0) == nullptr) {
        std::byte* staged = staging() + message.data_offset();
        copy_warp(staged, x, message.data_bytes());
        warp_sync();
        source = staged;
    }
    common.transport.put_warp(
        dst, destination + message.data_offset(), source, message.data_bytes(), local_expert);
    if constexpr (kVerify) {
        proof.sum = sum_row(static_cast<const std::byte*>(source), message.data_bytes());
        if (!elect_one()) return;
        const size_t place = destination + message.proof_offset();
        common.transport.put_word(dst, place, proof.first_word(), local_expert);
        common.transport.put_word(dst, place + offsetof(RowProof, sum), proof.sum, local_expert);
    }
}

// Block. offsets[s]: first row of source s among this expert's; offsets[num_ranks]: all rows. False when
// the handle is not as dispatch left it. Each block that sends rows of the expert looks at all ranges
// before it counts a row as issued.
EP_DEVICE bool find_offsets(const CombineArgs& args,
                            const OpenOperation& open,
                            int expert,
                            int* offsets) {
    const OperationArgs& common = args.common;
    const int num_ranks = common.num_ranks();
    bool intact = true;
    for (int source = thread_index(); source < num_ranks; source += num_threads()) {
        const int pair = expert * num_ranks + source;
        const RowRange range = range_of(args, pair);
        const int end = source == 0 ? 0 : range_of(args, pair - 1).end();
        offsets[source] = range.begin;
        if (source == num_ranks - 1) offsets[num_ranks] = range.end();
        intact = intact && args.handle.is_intact(range, pair, end, common.map);
    }
    if (!block_any(!intact)) return true;
    record_failure(common, open, FailureReason::kHandle, common.rank());
    return false;
}

template <bool kLogFormat, bool kVerify>
EP_DEVICE void return_rows(const CombineArgs& args,
                           const OpenOperation& open,
                           const CombineShared& shared) {
    const OperationArgs& common = args.common;
    const int num_ranks = common.num_ranks();
    const int num_local_experts = common.map.num_local_experts();
    const int num_parts = num_blocks() > num_local_experts ? num_blocks() / num_local_experts : 1;
    const int num_teams = num_blocks() / num_parts;
    const int part = block_index() % num_parts;
    int buffer = 0;
    for (int expert = block_index() / num_parts; expert < num_local_experts;
         expert += num_teams, buffer ^= 1) {
        int* offsets = shared.offsets + buffer * (num_ranks + 1);
        if (!find_offsets(args, open, expert, offsets)) continue;
        const int num_rows = offsets[num_ranks];
        const int stride = num_parts * num_warps();
        uint32_t num_issued = 0;  // to this destination, and not yet counted
        for (int row = part * num_warps() + warp_id(); row < num_rows; row += stride) {
            const int dst = source_of_row(offsets, num_ranks, row);
            if (is_masked(common, dst)) continue;
            const size_t slot = common.map.combined_row(
                open.half, common.rank() * num_local_experts + expert, row - offsets[dst]);
            return_row<kLogFormat, kVerify>(args, open, slot, expert, dst, row);
            ++num_issued;
            // Rows to one destination follow each other.
            if (row + stride < offsets[dst + 1]) continue;
            if (elect_one()) count_issued(common, expert * num_ranks + dst, num_issued, now_ns());
            num_issued = 0;
        }
    }
}

EP_DEVICE void announce_returns(const CombineArgs& args, const OpenOperation& open) {
    const OperationArgs& common = args.common;
    const int num_ranks = common.num_ranks();
    const int num_local_experts = common.map.num_local_experts();
    for_each_announced(common.map.num_experts, [&](int pair) {
        const int expert = pair / num_ranks;
        const int dst = pair % num_ranks;
        // Who sent rows that dispatch was without must not take what lies in their places for terms.
        if (is_masked(common, dst) || args.handle.was_left_out(pair)) return;
        const int count = range_of(args, pair).count;
        announce_rows(common,
                      open,
                      dst,
                      common.rank() * num_local_experts + expert,
                      pair,
                      wait_until_issued(common, open, pair, count) ? count : kRefusedCount,
                      expert);
    });
}

// ---- receive

// Thread. Adds a tile of kRows rows, in order; all of them are under way before the first is added.
template <bool kLogFormat, bool kFullTile, int kTile, int kRows>
EP_DEVICE void add_rows(const CombineArgs& args,
                        const std::byte* const* rows,
                        size_t entry,
                        const int (&slots)[kRows],
                        const Tile& tile,
                        float (&sums)[kTile][kVectorElements]) {
    const CombineMessage message{args.common.map.hidden};
    // Past the end of the last tile its last vector is summed again and not stored: no branch.
    const auto index_of = [&](int j) { return kFullTile ? tile.index(j) : tile.clamped(j); };
    const std::byte* data[kRows];
    bool encoded[kRows];
    Vector vectors[kRows][kTile];
    EP_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
        const std::byte* row = rows[slots[r]];
        data[r] = row + message.data_offset();
        encoded[r] =
            kLogFormat &&
            reinterpret_cast<const RowProof*>(row + message.proof_offset())->encoding_or_token ==
                kRowLogFmt;
        prefetch_ahead(reinterpret_cast<const Vector*>(data[r]) + tile.first);
        if (encoded[r]) continue;
        EP_UNROLL(kTile)
        for (int j = 0; j < kTile; ++j)
            vectors[r][j] = load_vector(reinterpret_cast<const Vector*>(data[r]) + index_of(j));
    }
    EP_UNROLL(4)
    for (int r = 0; r < kRows; ++r) {
        const float weight = args.topk_weights[entry + slots[r]];
        EP_UNROLL(kTile)
        for (int j = 0; j < kTile; ++j) {
            float values[kVectorElements];
            if (encoded[r]) {
                decode_vector(data[r], index_of(j), values);
            } else {
                unpack(vectors[r][j], values);
            }
            EP_UNROLL(8)
            for (int i = 0; i < kVectorElements; ++i)
                sums[j][i] = fused_multiply_add(values[i], weight, sums[j][i]);
        }
    }
}

// Block. rows[k]: where the row lies that came back for the token's entry k, or nullptr where none did. An entry that
// dispatch did not have, or another place, would add what some earlier operation left there.
EP_DEVICE void find_rows(const CombineArgs& args,
                         const OpenOperation& open,
                         int token,
                         const std::byte** rows) {
    const OperationArgs& common = args.common;
    for (int k = thread_index(); k < args.num_topk; k += num_threads()) {
        const size_t entry = static_cast<size_t>(token) * args.num_topk + k;
        const int64_t expert = args.topk_idx[entry];
        const HandleEntry sent = args.handle.entries()[entry];
        const bool intact = sent.fault(entry, expert, common.map) == HandleFault::kNone;
        if (!intact) record_failure(common, open, FailureReason::kHandle, common.rank());
        const int owner = sent.expert / common.map.num_local_experts();
        const bool returned = intact && sent.was_sent_to(expert) && !is_left_out(common, owner);
        rows[k] = returned ? common.transport.local(
                                 common.map.combined_row(open.half, sent.expert, sent.place()))
                           : nullptr;
    }
    block_sync();
}

// Thread. Sums up to kTile vectors of a token over those of its rows that came back.
template <bool kLogFormat, bool kFullTile, int kTile>
EP_DEVICE void reduce_tile(const CombineArgs& args,
                           const std::byte* const* rows,
                           size_t entry,
                           const Tile& tile,
                           Vector* out) {
    float sums[kTile][kVectorElements];
    EP_UNROLL(kTile)
    for (auto& sum : sums) {
        EP_UNROLL(8)
        for (float& element : sum) element = 0.0f;
    }
    const auto next = [&](int k) {
        while (k < args.num_topk && rows[k] == nullptr) ++k;
        return k;
    };
    int k = next(0);
    // Rows in the logarithmic format take too many instructions to wait for a load.
    if constexpr (!kLogFormat && kRowsInFlight == 2) {
        for (int second = next(k + 1); second < args.num_topk; second = next(k + 1)) {
            add_rows<kLogFormat, kFullTile, kTile, 2>(args, rows, entry, {k, second}, tile, sums);
            k = next(second + 1);
        }
    }
    for (; k < args.num_topk; k = next(k + 1))
        add_rows<kLogFormat, kFullTile, kTile, 1>(args, rows, entry, {k}, tile, sums);
    EP_UNROLL(kTile)
    for (int j = 0; j < kTile; ++j) {
        if (kFullTile || j < tile.count) store_vector(out + tile.index(j), pack(sums[j]));
    }
}

template <bool kLogFormat>
EP_DEVICE void reduce_token(const CombineArgs& args, int token, const std::byte* const* rows) {
    constexpr int kTile = kLogFormat ? 1 : kTileVectors;
    const OperationArgs& common = args.common;
    const size_t entry = static_cast<size_t>(token) * args.num_topk;
    auto* out =
        reinterpret_cast<Vector*>(args.out + static_cast<size_t>(token) * common.map.hidden);
    block_for_tiles<kTile>(common.map.hidden / kVectorElements, [&](const Tile& tile) {
        if (tile.count == kTile) {
            reduce_tile<kLogFormat, true, kTile>(args, rows, entry, tile, out);
        } else {
            reduce_tile<kLogFormat, false, kTile>(args, rows, entry, tile, out);
        }
    });
}

// Block. Every expert must return as many rows as dispatch sent it.
EP_DEVICE void check_returned(const CombineArgs& args, const OpenOperation& open) {
    const OperationArgs& common = args.common;
    for (int expert = thread_index(); expert < common.map.num_experts; expert += num_threads()) {
        const int source = expert / common.map.num_local_experts();
        const uint32_t count = load_relaxed<Scope::kDevice>(&common.workspace->counts[expert]);
        if (count != args.handle.sent()[expert] && !is_left_out(common, source))
            record_failure(common, open, FailureReason::kReturned, source);
    }
}

// Block, after the rows of a token have been added up: a warp per row.
template <bool kLogFormat>
EP_DEVICE void verify_token(const CombineArgs& args,
                            const OpenOperation& open,
                            int token,
                            const std::byte* const* rows) {
    const OperationArgs& common = args.common;
    const CombineMessage message{common.map.hidden};
    for (int k = warp_id(); k < args.num_topk; k += num_warps()) {
        const std::byte* row = rows[k];
        if (row == nullptr) continue;
        const size_t entry = static_cast<size_t>(token) * args.num_topk + k;
        const auto& proof = *reinterpret_cast<const RowProof*>(row + message.proof_offset());
        const bool encoded = kLogFormat && proof.encoding_or_token == kRowLogFmt;
        const uint64_t sum = sum_row(row + message.data_offset(),
                                     encoded ? message.log_bytes() : message.data_bytes());
        const int source = static_cast<int>(args.topk_idx[entry]) / common.map.num_local_experts();
        const RowProof expected{
            encoded ? kRowLogFmt : kRowBf16, static_cast<uint32_t>(open.op), sum};
        const RowPlace place{static_cast<uint32_t>(token), common.rank(), source, Hop::kDirect};
        if (elect_one()) check_row(common, open, proof, expected, source, place);
    }
}

template <bool kLogFormat, bool kVerify>
EP_DEVICE void receive_tokens(const CombineArgs& args,
                              const OpenOperation& open,
                              const CombineShared& shared) {
    const OperationArgs& common = args.common;
    const int num_local_experts = common.map.num_local_experts();
    const auto index_of = [](int i) { return i; };
    const auto source_of = [&](int index) { return index / num_local_experts; };
    const WaitShared wait(shared.rest, common.num_ranks() + common.map.num_experts);
    if (!wait_for_words(common, open, wait, common.map.num_experts, index_of, source_of)) return;
    if (block_index() == 0) check_returned(args, open);
    int buffer = 0;
    for (int token = block_index(); token < args.num_tokens; token += num_blocks(), buffer ^= 1) {
        const std::byte** rows = shared.rows + buffer * kMaxTopk;
        find_rows(args, open, token, rows);
        reduce_token<kLogFormat>(args, token, rows);
        if (kVerify) verify_token<kLogFormat>(args, open, token, rows);
    }
}

template <bool kLogFormat, bool kVerify>
EP_KERNEL void low_latency_combine(const EP_GRID_CONSTANT CombineArgs args) {
    const OperationArgs& common = args.common;
    OpenOperation open = current_operation(common);
    const CombineShared shared(common.num_ranks());
    if (common.phases & kPhaseSend) {
        send_headers(common, open);
        if (may_send(common, open)) {
            // A handle without rows is read no further; all threads see the same.
            if (args.handle.is_of(args.num_tokens, args.num_topk)) {
                return_rows<kLogFormat, kVerify>(args, open, shared);
            } else {
                record_failure(common, open, FailureReason::kHandle, common.rank());
            }
            announce_returns(args, open);
            record_sent(common);
        }
        if (!(common.phases & kPhaseReceive)) return;
    }
    receive_tokens<kLogFormat, kVerify>(args, open, shared);
    const int num_local_experts = common.map.num_local_experts();
    close_low_latency(common, open, [&](int source) { return source * num_local_experts; }, 1);
}

}  // namespace ep
