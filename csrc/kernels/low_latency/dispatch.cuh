// Low-latency dispatch: every selected (token, expert) pair sends the token's row to the expert's
// rank, which packs the rows of each of its experts.
//
//   send     1 Every rank is told that this one has entered (operation.cuh).
//            2 A block takes neighbouring tokens. It counts how many entries of those before name each
//              expert; that is the row's position, so the order is deterministic. It notes the position in
//              the handle, casts a row into staging memory, where its token follows it, and puts both into
//              the receiver's slot (expert, source, position). Then adds one to the expert's `issued`.
//            3 A thread per expert: when `issued` has reached the number of entries, signals the count.
//              Rows and count of an expert travel on one queue pair, so fence() suffices before the signal.
//   receive  4 Blocks wait for all headers and the counts of their experts; the prefix sum over the
//              sources is where each source's rows begin.
//            5 Rows, scales and tokens are copied to the caller's tensors.
// In hook mode 1-3 and 4-5 are two launches.
#pragma once

#include "kernels/low_latency/expert_rows.cuh"
#include "kernels/low_latency/handle.cuh"
#include "kernels/protocol/operation.cuh"
#include "kernels/protocol/verify.cuh"

namespace ep {

struct DispatchArgs : CommonArgs, DispatchTensors {
    HandleView handle;
};

// Shared memory of a block. It holds two tokens' routes and two experts' offsets, because warps that are
// done with one start on the next.
struct DispatchShared {
    int* num_entries;  // [num_experts], of those that have been counted
    int64_t* experts;  // [2, num_topk]
    int* positions;    // [2, num_topk]
    int* offsets;      // [2, num_ranks + 1]
    SharedArena rest;  // for the receive half

    EP_DEVICE DispatchShared(int num_topk, const LowLatencyMap& map) {
        experts = rest.take<int64_t>(2 * num_topk);
        positions = rest.take<int>(2 * num_topk);
        offsets = rest.take<int>(2 * (map.num_ranks + 1));
        num_entries = rest.take<int>(map.num_experts);
    }
    EP_HOST_DEVICE static size_t bytes(int num_topk, const LowLatencyMap& map, int threads) {
        return 2 * num_topk * (sizeof(int64_t) + sizeof(int)) +
               (2 * (map.num_ranks + 1) + map.num_experts) * sizeof(int) +
               WaitShared::bytes(map.num_ranks + map.num_experts, threads);
    }
};

// ---- send

// Block. Casts one row to e4m3. kCastLanes lanes share a group of 128 channels; kCastUnroll groups per
// step keep that many loads in flight and make one reduction of them.
template <Payload P>
EP_DEVICE void cast_row(const bf16* x, const DispatchMessage& message, std::byte* row) {
    constexpr int kVectorsPerGroup = kChannelsPerScale / kVectorElements;
    constexpr int kVectorsPerLane = kVectorsPerGroup / kCastLanes;
    const auto* source = reinterpret_cast<const Vector*>(x);
    std::byte* scales = row + message.scales_offset();
    const int stride = num_threads() / kCastLanes;  // groups in a step of the block
    // Uniform within a warp, whose lanes meet in the reduction.
    const int first_of_warp = warp_id() * kWarpSize / kCastLanes;
    for (int base = first_of_warp; base < message.num_groups(); base += kCastUnroll * stride) {
        Vector vectors[kCastUnroll][kVectorsPerLane];
        uint32_t abs_max[kCastUnroll];
        EP_UNROLL(kCastUnroll)
        for (int u = 0; u < kCastUnroll; ++u) {
            const int group = base + u * stride + lane_id() / kCastLanes;
            const int first = group * kVectorsPerGroup + lane_id() % kCastLanes * kVectorsPerLane;
            EP_UNROLL(kVectorsPerLane)
            for (int v = 0; v < kVectorsPerLane; ++v) {
                vectors[u][v] =
                    group < message.num_groups() ? load_vector(source + first + v) : Vector{};
            }
            abs_max[u] = largest_magnitude(vectors[u]);
        }
        if constexpr (kCastLanes > 1) group_reduce<kCastLanes, Max>(abs_max);
        EP_UNROLL(kCastUnroll)
        for (int u = 0; u < kCastUnroll; ++u) {
            const int group = base + u * stride + lane_id() / kCastLanes;
            if (group >= message.num_groups()) continue;
            const int first = group * kVectorsPerGroup + lane_id() % kCastLanes * kVectorsPerLane;
            const Fp8Scale scale = fp8_scale(bits_to_float(abs_max[u] << 16), P != Payload::kFp8);
            EP_UNROLL(kVectorsPerLane)
            for (int v = 0; v < kVectorsPerLane; ++v) {
                float values[kVectorElements];
                unpack(vectors[u][v], values);
                EP_UNROLL(8)
                for (int i = 0; i < kVectorElements; ++i) values[i] *= scale.multiplier;
                reinterpret_cast<uint64_t*>(row)[first + v] = to_e4m3(values);
            }
            if (lane_id() % kCastLanes != 0) continue;
            if (P == Payload::kFp8Ue8m0) {
                reinterpret_cast<uint8_t*>(scales)[group] = ue8m0(scale.stored);
            } else {
                reinterpret_cast<float*>(scales)[group] = scale.stored;
            }
        }
    }
    if (P == Payload::kFp8Ue8m0) {
        // Bytes of the last item that belong to no group.
        const int padded = message.num_scale_items() * 4;
        for (int group = message.num_groups() + thread_index(); group < padded;
             group += num_threads()) {
            reinterpret_cast<uint8_t*>(scales)[group] = 0;
        }
    }
}

// Whether rows are put from staging memory; plain bf16 in reach is put from x itself.
template <Payload P, bool kVerify>
EP_DEVICE bool stages_rows(const DispatchArgs& args) {
    return P != Payload::kBf16 || kVerify || !args.common.transport.all_direct();
}

// Warp; all lanes get it. What proves a dispatched row of which this is word i, and its token.
template <class WordAt>
EP_DEVICE uint64_t sum_message(const DispatchMessage& message, uint32_t token, WordAt word_at) {
    const int num_words = message.num_words();
    return sum_words(num_words + 1, [&](int i) { return i < num_words ? word_at(i) : token; });
}

// Block. What to put for this token.
template <Payload P, bool kVerify>
EP_DEVICE const std::byte* stage_row(const DispatchArgs& args,
                                     const OpenOperation& open,
                                     int token) {
    const OperationArgs& common = args.common;
    const DispatchMessage message{common.map.hidden, P};
    const bf16* x = args.x + static_cast<size_t>(token) * message.hidden;
    if (!stages_rows<P, kVerify>(args)) return reinterpret_cast<const std::byte*>(x);
    std::byte* row = common.transport.local(common.map.dispatch_staging(open.half, token));
    if (P == Payload::kBf16) {
        copy_block(row, x, message.data_bytes());
    } else {
        cast_row<P>(x, message, row);
    }
    RowProof proof{static_cast<uint32_t>(token), static_cast<uint32_t>(open.op), 0};
    if constexpr (kVerify) {
        block_sync();
        const auto* words = reinterpret_cast<const uint32_t*>(row);
        if (warp_id() == 0)
            proof.sum =
                sum_message(message, proof.encoding_or_token, [&](int i) { return words[i]; });
    }
    if (thread_index() == 0) *reinterpret_cast<RowProof*>(row + message.proof_offset()) = proof;
    return row;
}

// Whether there is such an expert, and its rank is not masked.
EP_DEVICE bool is_selected(const DispatchArgs& args, int64_t expert) {
    const OperationArgs& common = args.common;
    return expert >= 0 && expert < common.map.num_experts &&
           !is_masked(common, static_cast<int>(expert) / common.map.num_local_experts());
}

// First token of a block; the next block's is the end.
EP_DEVICE int first_token(const DispatchArgs& args, int block) {
    return block * args.num_tokens / num_blocks();
}

// Block. Counts the experts of the tokens begin .. end.
EP_DEVICE void count_entries(const DispatchArgs& args, int begin, int end, int* num_entries) {
    for (int i = begin * args.num_topk + thread_index(); i < end * args.num_topk;
         i += num_threads()) {
        const int64_t expert = args.topk_idx[i];
        if (is_selected(args, expert)) add_relaxed<Scope::kBlock>(&num_entries[expert], 1);
    }
}

// Block. positions[k]: how many entries before (token, k) name the same expert, given those of all
// tokens before. The handle notes it.
EP_DEVICE void find_positions(const DispatchArgs& args,
                              int token,
                              const int64_t* experts,
                              const int* num_entries,
                              int* positions) {
    for (int k = thread_index(); k < args.num_topk; k += num_threads()) {
        const size_t entry = static_cast<size_t>(token) * args.num_topk + k;
        HandleEntry noted = HandleEntry::without_row(experts[k]);
        if (is_selected(args, experts[k])) {
            const auto expert = static_cast<int32_t>(experts[k]);
            int position = num_entries[expert];
            for (int j = 0; j < k; ++j) position += experts[j] == expert ? 1 : 0;
            positions[k] = position;
            if (position < args.common.map.num_max_tokens)
                noted = HandleEntry::of(entry, expert, static_cast<uint32_t>(position));
        }
        args.handle.entries()[entry] = noted;
    }
}

// Warp. Puts a row of stage_row() into its slot.
template <Payload P, bool kVerify>
EP_DEVICE void put_message(const DispatchArgs& args,
                           const OpenOperation& open,
                           int dst,
                           size_t slot,
                           const std::byte* row,
                           int token,
                           int qp) {
    const Transport& transport = args.common.transport;
    const DispatchMessage message{args.common.map.hidden, P};
    const bool staged = stages_rows<P, kVerify>(args);
    transport.put_warp(dst, slot, row, staged ? message.bytes() : message.data_bytes(), qp);
    if (staged || !elect_one()) return;
    const RowProof proof{static_cast<uint32_t>(token), static_cast<uint32_t>(open.op), 0};
    transport.put_word(dst, slot + message.proof_offset(), proof.first_word(), qp);
}

template <Payload P, bool kVerify>
EP_DEVICE void send_rows(const DispatchArgs& args,
                         const OpenOperation& open,
                         const DispatchShared& shared) {
    const OperationArgs& common = args.common;
    const DispatchMessage message{common.map.hidden, P};
    const int num_local_experts = common.map.num_local_experts();
    const int first = first_token(args, block_index());
    const int end = first_token(args, block_index() + 1);
    for (int expert = thread_index(); expert < common.map.num_experts; expert += num_threads())
        shared.num_entries[expert] = 0;
    block_sync();
    count_entries(args, 0, first, shared.num_entries);
    int buffer = 0;
    for (int token = first; token < end; ++token, buffer ^= 1) {
        int64_t* experts = shared.experts + buffer * args.num_topk;
        int* positions = shared.positions + buffer * args.num_topk;
        for (int k = thread_index(); k < args.num_topk; k += num_threads())
            experts[k] = args.topk_idx[static_cast<size_t>(token) * args.num_topk + k];
        block_sync();
        find_positions(args, token, experts, shared.num_entries, positions);
        const std::byte* row = stage_row<P, kVerify>(args, open, token);
        block_sync();
        count_entries(args, token, token + 1, shared.num_entries);
        for (int k = warp_id(); k < args.num_topk; k += num_warps()) {
            const int64_t expert = experts[k];
            if (expert >= common.map.num_experts && elect_one())
                leave_record(common, open, FailureReason::kIndex, common.rank());
            if (!is_selected(args, expert)) continue;
            const int dst = static_cast<int>(expert) / num_local_experts;
            const int local_expert = static_cast<int>(expert) % num_local_experts;
            if (positions[k] < common.map.num_max_tokens) {
                const size_t slot = common.map.dispatched_row(
                    open.half, local_expert, common.rank(), positions[k], message.stride());
                put_message<P, kVerify>(args, open, dst, slot, row, token, local_expert);
            } else if (elect_one()) {
                leave_record(common, open, FailureReason::kIndex, common.rank());
            }
        }
        if (!elect_one()) continue;
        const uint64_t issued_ns = now_ns();
        for (int k = warp_id(); k < args.num_topk; k += num_warps()) {
            if (is_selected(args, experts[k]))
                count_issued(common, static_cast<int>(experts[k]), 1, issued_ns);
        }
    }
    count_entries(args, end, args.num_tokens, shared.num_entries);
    block_sync();
}

// Block, after send_rows(), which has counted the entries of every expert.
EP_DEVICE void announce_experts(const DispatchArgs& args,
                                const OpenOperation& open,
                                const int* num_entries) {
    const OperationArgs& common = args.common;
    const int num_local_experts = common.map.num_local_experts();
    for_each_announced(common.map.num_experts, [&](int expert) {
        const int dst = expert / num_local_experts;
        const int qp = expert % num_local_experts;
        const int entries = num_entries[expert];
        const int count = entries < common.map.num_max_tokens ? entries : common.map.num_max_tokens;
        args.handle.sent()[expert] = static_cast<uint32_t>(count);
        if (is_masked(common, dst)) return;
        announce_rows(common,
                      open,
                      dst,
                      qp * common.num_ranks() + common.rank(),
                      expert,
                      wait_until_issued(common, open, expert, entries) ? count : kRefusedCount,
                      qp);
    });
}

// ---- receive

// One thread. `index`: of the row in [num_local_experts, rows]. The caller may look up what this token is.
EP_DEVICE void note_token(const DispatchArgs& args,
                          const OpenOperation& open,
                          const RowProof& proof,
                          size_t index,
                          int source) {
    const uint32_t token = proof.encoding_or_token;
    if (token >= static_cast<uint32_t>(args.common.map.num_max_tokens))
        record_failure(args.common,
                       open,
                       FailureReason::kCorrupt,
                       source,
                       {token, source, source, Hop::kDirect});
    args.handle.tokens[index] = static_cast<int32_t>(token);
}

// Warp, after the copies. Looks at them, because what lies in the slot may change.
EP_DEVICE void verify_row(const DispatchArgs& args,
                          const OpenOperation& open,
                          const DispatchMessage& message,
                          const RowProof& proof,
                          int local_expert,
                          int source,
                          int row) {
    const size_t rows = args.common.map.rows_per_expert();
    const size_t index = local_expert * rows + row;
    const auto* data =
        reinterpret_cast<const uint32_t*>(args.recv_x + index * message.data_bytes());
    const int num_data = static_cast<int>(message.data_bytes() / sizeof(uint32_t));
    const size_t first_item = static_cast<size_t>(local_expert) * message.num_scale_items();
    warp_sync();
    const auto token = static_cast<uint32_t>(args.handle.tokens[index]);
    const uint64_t sum = sum_message(message, token, [&](int i) {
        return i < num_data ? data[i] : args.recv_scales[(first_item + i - num_data) * rows + row];
    });
    if (!elect_one()) return;
    check_row(args.common,
              open,
              proof,
              {token, static_cast<uint32_t>(open.op), sum},
              source,
              {token, source, source, Hop::kDirect});
}

// Warp. One row from its slot to the caller's tensors.
template <bool kVerify>
EP_DEVICE void receive_row(const DispatchArgs& args,
                           const OpenOperation& open,
                           const DispatchMessage& message,
                           const std::byte* slot,
                           int local_expert,
                           int source,
                           int row) {
    const size_t rows = args.common.map.rows_per_expert();
    const size_t index = local_expert * rows + row;
    copy_warp(args.recv_x + index * message.data_bytes(), slot, message.data_bytes());
    const int num_items = message.num_scale_items();
    const auto* scales = reinterpret_cast<const uint32_t*>(slot + message.scales_offset());
    const size_t first_item = static_cast<size_t>(local_expert) * num_items;
    warp_for(num_items,
             [&](int i) { args.recv_scales[(first_item + i) * rows + row] = scales[i]; });
    const auto& proof = *reinterpret_cast<const RowProof*>(slot + message.proof_offset());
    if (elect_one()) note_token(args, open, proof, index, source);
    if (kVerify) verify_row(args, open, message, proof, local_expert, source, row);
}

// Block. One expert, or one of `num_parts` interleaved parts of its rows.
template <bool kVerify>
EP_DEVICE void receive_expert(const DispatchArgs& args,
                              const OpenOperation& open,
                              const DispatchMessage& message,
                              int* offsets,
                              int local_expert,
                              int part,
                              int num_parts) {
    const OperationArgs& common = args.common;
    const int num_ranks = common.num_ranks();
    const int first_word = local_expert * num_ranks;
    if (warp_id() == 0) prefix_counts(common.workspace->counts + first_word, num_ranks, offsets);
    block_sync();
    const int num_rows = offsets[num_ranks];
    if (part == 0) {
        for (int source = thread_index(); source < num_ranks; source += num_threads()) {
            const int begin = offsets[source];
            const RowRange range{begin, offsets[source + 1] - begin};
            args.layout_range[first_word + source] = range.pack();
            args.handle.received()[first_word + source] = is_left_out(common, source)
                                                              ? HandleView::kLeftOut
                                                              : static_cast<uint32_t>(range.count);
        }
        if (thread_index() == 0) {
            args.recv_count[local_expert] = num_rows;
            if (args.cumulative_local_expert_recv_stats != nullptr)
                args.cumulative_local_expert_recv_stats[local_expert] += num_rows;
        }
    }
    for (int row = part * num_warps() + warp_id(); row < num_rows; row += num_parts * num_warps()) {
        const int source = source_of_row(offsets, num_ranks, row);
        const std::byte* slot = common.transport.local(common.map.dispatched_row(
            open.half, local_expert, source, row - offsets[source], message.stride()));
        receive_row<kVerify>(args, open, message, slot, local_expert, source, row);
    }
}

template <bool kVerify>
EP_DEVICE void receive_experts(const DispatchArgs& args,
                               const OpenOperation& open,
                               const DispatchMessage& message,
                               const DispatchShared& shared) {
    const OperationArgs& common = args.common;
    const int num_ranks = common.num_ranks();
    const int num_local_experts = common.map.num_local_experts();
    const int num_parts = num_blocks() > num_local_experts ? num_blocks() / num_local_experts : 1;
    const int num_waiting =
        num_blocks() < num_local_experts ? num_blocks() : num_local_experts * num_parts;
    if (block_index() >= num_waiting) return;
    const int first = block_index() / num_parts;
    const int part = block_index() % num_parts;
    const int num_teams = num_parts == 1 ? num_blocks() : num_local_experts;
    const int num_mine = (num_local_experts - first + num_teams - 1) / num_teams;
    // All counts before any copy: an arrival must not look late because this rank was copying.
    const auto index_of = [&](int i) {
        return (first + i / num_ranks * num_teams) * num_ranks + i % num_ranks;
    };
    const auto source_of = [&](int index) { return index % num_ranks; };
    const WaitShared wait(shared.rest, num_ranks + common.map.num_experts);
    const int num_words = num_mine * num_ranks;
    if (!wait_for_words(common, open, wait, num_words, index_of, source_of, num_waiting)) return;
    for (int i = 0; i < num_mine; ++i) {
        int* offsets = shared.offsets + i % 2 * (num_ranks + 1);
        receive_expert<kVerify>(
            args, open, message, offsets, first + i * num_teams, part, num_parts);
    }
}

// A handle is worth nothing until its rows are there.
EP_DEVICE void begin_handle(const DispatchArgs& args) {
    if (block_index() != 0 || thread_index() != 0) return;
    *args.handle.head() = {
        0, static_cast<uint32_t>(args.num_tokens), static_cast<uint32_t>(args.num_topk)};
}

template <Payload P, bool kVerify>
EP_KERNEL void low_latency_dispatch(const EP_GRID_CONSTANT DispatchArgs args) {
    const OperationArgs& common = args.common;
    OpenOperation open = current_operation(common);
    const DispatchShared shared(args.num_topk, common.map);
    if (common.phases & kPhaseSend) {
        begin_handle(args);
        send_headers(common, open);
        if (may_send(common, open)) {
            send_rows<P, kVerify>(args, open, shared);
            announce_experts(args, open, shared.num_entries);
            record_sent(common);
        }
        if (!(common.phases & kPhaseReceive)) return;
    }
    receive_experts<kVerify>(args, open, DispatchMessage{common.map.hidden, P}, shared);
    if (close_low_latency(common, open, [](int source) { return source; }, common.num_ranks()))
        args.handle.head()->op = open.op;
}

}  // namespace ep
