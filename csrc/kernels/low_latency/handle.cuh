// What dispatch leaves for combine: the tensors of the handle, and behind the tokens in the first of them, in the
// same storage, where the row of each entry of topk_idx comes back, and what lets combine find out that all this is
// not of its dispatch any more. Tensors are the caller's, so nothing in them may be trusted with an address or a sum.
#pragma once

#include "kernels/protocol/messages.cuh"

namespace ep {

// Leads what lies behind the tokens.
struct HandleHead {
    uint64_t op;          // of the dispatch, once it has been received; 0 before
    uint32_t num_tokens;  // of topk_idx in the dispatch
    uint32_t num_topk;
};

// The first thing in a handle that is not as dispatch left it.
struct HandleFault {
    enum Reason : int {
#define EP_HANDLE_FAULT(value, name) value,
#include "kernels/protocol/names.def"
    };
    Reason reason = kNone;
    int64_t place[2] = {0, 0};  // index in the tensor, or the shape in the dispatch
    int64_t expected = 0;
};

// What dispatch did with an entry of topk_idx: where combine finds the row that comes back for it.
struct HandleEntry {
    int32_t expert;     // negative: no row was sent
    uint32_t position;  // among the rows sent to the expert, and a seal over all three

    static constexpr uint32_t kPositionMask = 0xFFFF;
    static_assert(kMaxTokens - 1 <= kPositionMask);

    EP_HOST_DEVICE static uint32_t seal(uint32_t entry, uint32_t expert, uint32_t position) {
        uint32_t mixed = entry * 0x9E3779B1u ^ position * 0x85EBCA77u ^ expert * 0xC2B2AE3Du;
        mixed = (mixed ^ mixed >> 15) * 0x27D4EB2Fu;
        return (mixed ^ mixed >> 13) & ~kPositionMask;
    }
    EP_HOST_DEVICE static HandleEntry of(size_t entry, int32_t expert, uint32_t position) {
        return {
            expert,
            position | seal(static_cast<uint32_t>(entry), static_cast<uint32_t>(expert), position)};
    }
    // An expert that was named and got no row: its rank is masked, or dispatch has said that it is an error.
    EP_HOST_DEVICE static int32_t withheld(int64_t expert) {
        return static_cast<int32_t>(-2 - expert) | INT32_MIN;
    }
    EP_HOST_DEVICE static HandleEntry without_row(int64_t expert) {
        return {expert < 0 ? -1 : withheld(expert), 0};
    }

    // The expert that dispatch was given, or -1.
    EP_HOST_DEVICE int32_t named() const { return expert < -1 ? -2 - expert : expert; }
    EP_HOST_DEVICE int place() const { return static_cast<int>(position & kPositionMask); }
    EP_HOST_DEVICE bool was_sent_to(int64_t other) const { return other >= 0 && other == expert; }
    // Whether combine may name this expert: the same, or none.
    EP_HOST_DEVICE bool allows(int64_t other) const {
        return other < 0 || other == expert || withheld(other) == expert;
    }
    EP_HOST_DEVICE bool is_intact(size_t entry, const LowLatencyMap& map) const {
        return place() < map.num_max_tokens && expert < map.num_experts &&
               position == of(entry, expert, position & kPositionMask).position;
    }
    // What keeps combine from naming this expert in its entry `entry`: kNone, kTopkEntry or kPlace.
    EP_HOST_DEVICE HandleFault::Reason fault(size_t entry,
                                             int64_t other,
                                             const LowLatencyMap& map) const {
        if (!allows(other)) return HandleFault::kTopkEntry;
        const bool holds = !was_sent_to(other) || is_intact(entry, map);
        return holds ? HandleFault::kNone : HandleFault::kPlace;
    }
};

// Rows of one source within one expert's: an entry of handle[1].
struct RowRange {
    int begin;
    int count;

    EP_HOST_DEVICE int end() const {
        return static_cast<int>(static_cast<uint32_t>(begin) + static_cast<uint32_t>(count));
    }
    EP_HOST_DEVICE int64_t pack() const { return static_cast<int64_t>(begin) << 32 | count; }
    EP_HOST_DEVICE static RowRange unpack(int64_t packed) {
        return {static_cast<int>(packed >> 32), static_cast<int>(packed & 0xFFFFFFFF)};
    }
};

// [num_local_experts, rows] tokens (handle[0]), the head, [num_experts] rows sent to each expert,
// [num_local_experts, num_ranks] rows received, [num_tokens, num_topk] entries.
struct HandleView {
    int32_t* tokens;
    int num_experts;
    size_t num_rows;  // of all local experts

    // Words before the head, which has one of 64 bits.
    EP_HOST_DEVICE static size_t num_token_words(size_t num_rows) {
        return num_rows + num_rows % 2;
    }
    EP_HOST_DEVICE HandleHead* head() const {
        return reinterpret_cast<HandleHead*>(tokens + num_token_words(num_rows));
    }
    EP_HOST_DEVICE uint32_t* sent() const { return reinterpret_cast<uint32_t*>(head() + 1); }
    EP_HOST_DEVICE uint32_t* received() const { return sent() + num_experts; }
    // In received(): dispatch was without the source, which may have sent rows all the same.
    static constexpr uint32_t kLeftOut = UINT32_MAX;
    EP_HOST_DEVICE bool was_left_out(int pair) const { return received()[pair] == kLeftOut; }
    EP_HOST_DEVICE HandleEntry* entries() const {
        return reinterpret_cast<HandleEntry*>(received() + num_experts);
    }
    // 32-bit words of all this.
    EP_HOST_DEVICE static size_t num_words(const LowLatencyMap& map, int num_tokens, int num_topk) {
        return num_token_words(map.rows_per_expert() * map.num_local_experts()) +
               sizeof(HandleHead) / sizeof(int32_t) + 2 * map.num_experts +
               static_cast<size_t>(num_tokens) * num_topk * sizeof(HandleEntry) / sizeof(int32_t);
    }
    EP_HOST_DEVICE static HandleView of(int32_t* src_info, const LowLatencyMap& map) {
        return {src_info, map.num_experts, map.rows_per_expert() * map.num_local_experts()};
    }

    EP_HOST_DEVICE bool is_of(int num_tokens, int num_topk) const {
        return head()->op != 0 && head()->num_tokens == static_cast<uint32_t>(num_tokens) &&
               head()->num_topk == static_cast<uint32_t>(num_topk);
    }
    // `end`: where the rows of the source before end.
    EP_HOST_DEVICE bool is_intact(const RowRange& range,
                                  int pair,
                                  int end,
                                  const LowLatencyMap& map) const {
        const uint32_t count = was_left_out(pair) ? 0u : received()[pair];
        return range.begin == end && static_cast<uint32_t>(range.count) == count &&
               range.begin >= 0 && count <= static_cast<uint32_t>(map.num_max_tokens) &&
               static_cast<size_t>(range.end()) <= map.rows_per_expert();
    }
};

}  // namespace ep
