// What dispatch leaves for combine: the tensors of the handle, and behind the first of them, in the
// same storage, what lets combine find out that they are not those of its dispatch. Tensors are the
// caller's, so nothing in them may be trusted with an address or a sum.
#pragma once

#include "kernels/messages.cuh"

namespace ep {

// Leads what lies behind the two planes of rows.
struct HandleHead {
    uint64_t op;          // of the dispatch, once it has been received; 0 before
    uint32_t num_tokens;  // of topk_idx in the dispatch
    uint32_t num_topk;
};

// Where a row came from, as combine reads it: the top-k slot, and a seal over everything that says
// where the row goes back to.
struct SealedSlot {
    static constexpr uint32_t kSlotMask = 0xFF;

    EP_HOST_DEVICE static uint32_t seal(uint32_t token,
                                        uint32_t slot,
                                        uint32_t row,
                                        uint32_t source) {
        uint32_t mixed =
            token * 0x9E3779B1u ^ row * 0x85EBCA77u ^ (source << 8 | slot) * 0xC2B2AE3Du;
        mixed = (mixed ^ mixed >> 15) * 0x27D4EB2Fu;
        return (mixed ^ mixed >> 13) & ~kSlotMask;
    }
    EP_HOST_DEVICE static uint32_t pack(const RowSource& origin, uint32_t row, uint32_t source) {
        return origin.slot | seal(origin.token, origin.slot, row, source);
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

// [num_local_experts, rows] tokens (handle[0]), as many sealed slots, the head, [num_experts] rows
// sent to each expert, [num_local_experts, num_ranks] rows received, [num_tokens, num_topk] experts
// dispatched to.
struct HandleView {
    int32_t* tokens;
    int num_experts;
    size_t num_rows;  // of all local experts

    EP_HOST_DEVICE uint32_t* slots() const {
        return reinterpret_cast<uint32_t*>(tokens) + num_rows;
    }
    EP_HOST_DEVICE HandleHead* head() const {
        return reinterpret_cast<HandleHead*>(slots() + num_rows);
    }
    EP_HOST_DEVICE uint32_t* sent() const { return reinterpret_cast<uint32_t*>(head() + 1); }
    EP_HOST_DEVICE uint32_t* received() const { return sent() + num_experts; }
    // In received(): dispatch was without the source, which may have sent rows all the same.
    static constexpr uint32_t kLeftOut = UINT32_MAX;
    EP_HOST_DEVICE bool was_left_out(int pair) const { return received()[pair] == kLeftOut; }
    EP_HOST_DEVICE int32_t* experts() const {
        return reinterpret_cast<int32_t*>(received() + num_experts);
    }
    // 32-bit words of all this.
    EP_HOST_DEVICE static size_t num_words(const LowLatencyMap& map, int num_tokens, int num_topk) {
        return 2 * map.rows_per_expert() * map.num_local_experts() +
               sizeof(HandleHead) / sizeof(int32_t) + 2 * map.num_experts +
               static_cast<size_t>(num_tokens) * num_topk;
    }
    EP_HOST_DEVICE static HandleView of(int32_t* src_info, const LowLatencyMap& map) {
        return {src_info, map.num_experts, map.rows_per_expert() * map.num_local_experts()};
    }

    EP_HOST_DEVICE bool is_of(int num_tokens, int num_topk) const {
        return head()->op != 0 && head()->num_tokens == static_cast<uint32_t>(num_tokens) &&
               head()->num_topk == static_cast<uint32_t>(num_topk);
    }
    // In experts(): an expert that was selected, and is not sent to because its rank was masked.
    EP_HOST_DEVICE static int32_t withheld(int64_t expert) {
        return static_cast<int32_t>(-2 - expert);
    }
    // Whether combine may take `expert` where dispatch had its entry `entry`: the same, or none.
    EP_HOST_DEVICE bool allows(size_t entry, int64_t expert) const {
        return expert < 0 || expert == experts()[entry] || withheld(expert) == experts()[entry];
    }
    // `end`: where the rows of the source before end.
    EP_HOST_DEVICE bool is_intact(const RowRange& range,
                                  int pair,
                                  int end,
                                  const LowLatencyMap& map) const {
        const uint32_t count = was_left_out(pair) ? 0u : received()[pair];
        return range.begin == end && static_cast<uint32_t>(range.count) == count &&
               range.begin >= 0 && static_cast<size_t>(range.end()) <= map.rows_per_expert();
    }
    // `row`: index in [num_local_experts, rows].
    EP_HOST_DEVICE bool is_intact(size_t row, int source) const {
        const auto token = static_cast<uint32_t>(tokens[row]);
        const uint32_t slot = slots()[row] & SealedSlot::kSlotMask;
        return slots()[row] == SealedSlot::pack({token, slot}, static_cast<uint32_t>(row), source);
    }
};

// The first thing in a handle that is not as dispatch left it.
struct HandleFault {
    enum Reason : int {
#define EP_HANDLE_FAULT(value, name) value,
#include "kernels/names.def"
    };
    Reason reason = kNone;
    int64_t place[2] = {0, 0};  // index in the tensor, or the shape in the dispatch
    int64_t expected = 0;
};

}  // namespace ep
