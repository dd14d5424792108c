// What ranks write into each other's memory: the one definition of every message, word and offset,
// for kernels, for the allocator and, through the binding, for Python.
//
// A rank's symmetric memory is a control region (signals and their payload, fixed size for a group)
// followed by the buffer whose size the user chose. Offsets below count from the start of symmetric
// memory and are equal on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.cuh"

namespace ep {

constexpr int kMaxExperts = 4096;
constexpr int kMaxTopk = 32;
constexpr size_t kBufferAlignment = 128;  // of buffers, and of what a program may ask for
constexpr int kNumHalves = 2;             // operations alternate, see LowLatencyMap
// Payload of rows begins here: no line of L2 and no packet of NVLink is shared by two rows.
constexpr size_t kRowAlignment = 128;

EP_HOST_DEVICE size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

enum class Operation : uint32_t {
#define EP_OPERATION_NAME(value, name) value,
#include "kernels/protocol/names.def"
};

// What rows travel by.
enum class Hop : uint32_t {
#define EP_HOP_NAME(value, name) value,
#include "kernels/protocol/names.def"
};

// Tells of one low-latency operation of one source, sent to every rank before any payload. `op` is
// the signal; the other words are one put, and readable once `op` shows the operation's number.
struct OpHeader {
    uint64_t op;
    uint64_t reserved;
    uint64_t entered_ns;  // source's clock
    uint64_t flags;       // HeaderFlag
    static constexpr int kNumAgreed = 4;
    // OpShape, packed; which dispatch a combine belongs to, or kMostTokens; capacities of queues, packed
    uint64_t agreed[kNumAgreed];

    static constexpr size_t kContentsOffset = 16;
    static constexpr size_t kContentsBytes = 48;
};
static_assert(sizeof(OpHeader) == 64, "one cache line a source");
static_assert(OpHeader::kContentsOffset == offsetof(OpHeader, entered_ns) &&
                  OpHeader::kContentsOffset + OpHeader::kContentsBytes == sizeof(OpHeader),
              "one put covers everything but the signal");

// Marks the word that has the most tokens of a rank, in a fresh dispatch, in place of a dispatch's number.
constexpr uint64_t kMostTokens = uint64_t{1} << 63;

// Offset in a header of word i of `agreed`.
EP_HOST_DEVICE size_t agreed_field(int i) {
    return offsetof(OpHeader, agreed) + i * sizeof(uint64_t);
}

enum HeaderFlag : uint64_t {
    kExchangesClocks = 1,  // rank 0 only: this operation ends with a clock exchange
    kHandsOver = 2         // the source sends no row before all have met, see hand_over.cuh
};

// What all ranks must agree on; anything that changes where messages land belongs here.
struct OpShape {
    uint32_t num_max_tokens;
    uint32_t hidden;
    uint32_t num_experts;
    uint16_t message_format;  // of the payload, so that the message size agrees
    uint16_t operation;

    EP_HOST_DEVICE uint64_t word(int i) const {
        return i == 0 ? static_cast<uint64_t>(num_max_tokens) << 32 | hidden
                      : static_cast<uint64_t>(num_experts) << 32 |
                            static_cast<uint32_t>(message_format) << 16 | operation;
    }
    EP_HOST_DEVICE static OpShape from_words(uint64_t first, uint64_t second) {
        return {static_cast<uint32_t>(first >> 32),
                static_cast<uint32_t>(first),
                static_cast<uint32_t>(second >> 32),
                static_cast<uint16_t>(second >> 16),
                static_cast<uint16_t>(second)};
    }
};

// Announces that all rows of one (source rank, expert) pair have been put, and how many: one 8-byte
// signal. `tag` tells the operation, so nothing has to be cleared between operations.
struct CountWord {
    uint32_t tag;        // 16 bits, never 0
    uint32_t count;      // 16 bits
    uint32_t issued_lo;  // low half of the source's clock when it had handed over the last row

    EP_HOST_DEVICE uint64_t pack() const {
        return static_cast<uint64_t>(tag) << 48 | static_cast<uint64_t>(count) << 32 | issued_lo;
    }
    EP_HOST_DEVICE static CountWord unpack(uint64_t word) {
        return {static_cast<uint32_t>(word >> 48),
                static_cast<uint32_t>(word >> 32 & 0xFFFFu),
                static_cast<uint32_t>(word)};
    }
    EP_HOST_DEVICE static uint32_t tag_of(uint64_t op) {
        return static_cast<uint32_t>(op % 0xFFFFu) + 1;
    }
    // From a stamp not more than 2^32 ns (4.29 s) before, to when it had handed over the last row.
    EP_HOST_DEVICE uint32_t issue_ns(uint64_t since) const {
        return issued_lo - static_cast<uint32_t>(since);
    }
};
constexpr int kMaxCount = 0xFFFE;
constexpr int kRefusedCount = 0xFFFF;  // combine: the source found its handle to be wrong

// What a rank has given up, in one word of a series: the numbers from `newest` back to the last one that
// succeeded.
struct GivenUp {
    uint64_t newest;  // 48 bits
    uint64_t count;   // 16 bits; more are as good as the most

    EP_HOST_DEVICE uint64_t pack() const {
        return (count < 0xFFFF ? count : 0xFFFFu) << 48 | newest;
    }
    EP_HOST_DEVICE static GivenUp unpack(uint64_t word) {
        return {word & 0xFFFFFFFFFFFFu, word >> 48};
    }
    EP_HOST_DEVICE bool contains(uint64_t number) const {
        return number <= newest && number + count > newest;
    }
};

// One bounce of a clock exchange, from one partner.
struct ClockBounce {
    uint64_t number;   // signal: the bounce's number
    uint64_t sent_ns;  // partner's clock when it sent this
    int64_t delay_ns;  // its arrival stamp of the bounce before minus our send stamp; kNoDelay
    uint64_t reserved;
};
constexpr int64_t kNoDelay = INT64_MIN;

// Bounces take the two places in turn: a partner overwrites one only after it has heard that the
// bounce in it was read.
struct ClockSlot {
    ClockBounce places[2];
};
static_assert(sizeof(ClockSlot) == 64, "one cache line a partner");

// Where a rank is that has cleaned its masks, so that all go on from the same numbers; see masks.cuh. `number`
// is a signal: how often the rank has cleaned (16 bits), and its newest operation (48 bits). So is `answered`: the
// newest number that the rank has seen of the one whose memory this is.
struct JoinSlot {
    uint64_t number;
    uint64_t barriers;
    uint64_t clock_rounds;
    uint64_t answered;

    static constexpr int kOpBits = 48;
};
static_assert(sizeof(JoinSlot) == 32, "two to a cache line");

// Who exchanges clocks: all ranks in a launch of their own, or at the end of an operation.
enum class ClockExchange : int { kOfRound, kOfOperation, kEnd };

// What is numbered on its own.
enum class Series : int {
#define EP_SERIES(value, name) value,
#include "kernels/protocol/names.def"
    kEnd
};

struct ControlMap {
    int num_ranks;

    EP_HOST_DEVICE size_t header(int half, int source) const {
        return (static_cast<size_t>(half) * num_ranks + source) * sizeof(OpHeader);
    }
    EP_HOST_DEVICE size_t clock_slot(ClockExchange exchange, int partner) const {
        return header(kNumHalves, 0) +
               (static_cast<size_t>(exchange) * num_ranks + partner) * sizeof(ClockSlot);
    }
    EP_HOST_DEVICE size_t barrier(int source) const {
        return clock_slot(ClockExchange::kEnd, 0) + source * sizeof(uint64_t);
    }
    // Number of the newest operation in which the source may be sent rows of any layout.
    EP_HOST_DEVICE size_t handed_over(int source) const {
        return barrier(num_ranks) + source * sizeof(uint64_t);
    }
    // GivenUp: operations (or barriers, or clock rounds) in which the source gave up waiting.
    EP_HOST_DEVICE size_t given_up(Series series, int source) const {
        return handed_over(num_ranks) +
               (static_cast<size_t>(series) * num_ranks + source) * sizeof(uint64_t);
    }
    EP_HOST_DEVICE size_t join(int source) const {
        return round_up(given_up(Series::kEnd, 0), 64) + source * sizeof(JoinSlot);
    }
    // index: dispatch: local expert * num_ranks + source; combine: the source's expert, globally.
    EP_HOST_DEVICE size_t count(int half, int index) const {
        return round_up(join(num_ranks), 64) +
               (static_cast<size_t>(half) * kMaxExperts + index) * sizeof(uint64_t);
    }
    EP_HOST_DEVICE size_t bytes() const { return round_up(count(kNumHalves, 0), 4096); }
};

constexpr int kMaxTokens = kMaxCount + 1;

enum RowEncoding : uint32_t { kRowBf16 = 0, kRowLogFmt = 1 };

// What a row says about itself. Low latency: leads a combined row, where the logarithmic format needs the
// encoding on the wire; follows a dispatched one, whose token it tells. Normal operations: leads a pack. The sum is
// there if rows are verified, see verify.cuh.
struct RowProof {
    uint32_t encoding_or_token;  // low-latency combine: RowEncoding; else the token
    uint32_t op;                 // low half of the operation's number
    uint64_t sum;                // over the row's words

    // encoding_or_token and op, as they lie in memory
    EP_HOST_DEVICE uint64_t first_word() const {
        return static_cast<uint64_t>(op) << 32 | encoding_or_token;
    }
};
static_assert(sizeof(RowProof) == sizeof(Vector), "rows stay 16-byte aligned");
constexpr uint16_t kVerifiedFormat = 0x100;  // in OpShape::message_format

enum class Payload : uint16_t { kBf16 = 0, kFp8 = 1, kFp8PowerOfTwo = 2, kFp8Ue8m0 = 3 };

// A dispatched row: data, then scales (32-bit items: one float, or four UE8M0 bytes), then its proof.
struct DispatchMessage {
    int hidden;
    Payload payload;

    EP_HOST_DEVICE int num_groups() const { return hidden / kChannelsPerScale; }
    EP_HOST_DEVICE int num_scale_items() const {
        return payload == Payload::kBf16       ? 0
               : payload == Payload::kFp8Ue8m0 ? (num_groups() + 3) / 4
                                               : num_groups();
    }
    EP_HOST_DEVICE size_t data_bytes() const {
        return static_cast<size_t>(hidden) * (payload == Payload::kBf16 ? 2 : 1);
    }
    EP_HOST_DEVICE size_t scales_offset() const { return data_bytes(); }
    // 32-bit words of data and scales.
    EP_HOST_DEVICE int num_words() const {
        return static_cast<int>(data_bytes() / sizeof(uint32_t)) + num_scale_items();
    }
    EP_HOST_DEVICE size_t proof_offset() const {
        return round_up(scales_offset() + num_scale_items() * sizeof(uint32_t), sizeof(Vector));
    }
    EP_HOST_DEVICE size_t bytes() const { return proof_offset() + sizeof(RowProof); }
    // From one row to the next.
    EP_HOST_DEVICE size_t stride() const { return round_up(bytes(), kRowAlignment); }
};

// A row on its way back: its proof, then bf16 data or the logarithmic format, group by group.
struct CombineMessage {
    int hidden;

    // One group of 128 values: low and step, 128 low bytes, 32 bytes of high bit pairs.
    static constexpr size_t kLogGroupBytes = 176;  // 8 + 128 + 32, rounded up to 16
    static constexpr size_t kLogLowOffset = 16;
    static constexpr size_t kLogHighOffset = kLogLowOffset + kLogGroup;

    EP_HOST_DEVICE size_t data_offset() const { return kRowAlignment; }
    EP_HOST_DEVICE size_t proof_offset() const { return data_offset() - sizeof(RowProof); }
    EP_HOST_DEVICE size_t data_bytes() const { return static_cast<size_t>(hidden) * 2; }
    EP_HOST_DEVICE size_t log_bytes() const {
        return static_cast<size_t>(hidden / kLogGroup) * kLogGroupBytes;
    }
    EP_HOST_DEVICE size_t stride() const {
        return data_offset() + round_up(data_bytes(), kRowAlignment);
    }
};
static_assert(CombineMessage::kLogHighOffset + kLogGroup / 4 == CombineMessage::kLogGroupBytes,
              "a group is packed");

// The low-latency use of the buffer. Operations alternate between two halves by their number: when
// this rank sends operation n + 2 it has received operation n + 1 from everyone, so everyone has
// finished reading operation n. The same argument frees the staging memory of one-sided puts. It holds
// while the sizes stay; where they change, or after a failure, ranks hand over first (hand_over.cuh).
// The receive region of a half serves dispatch and combine, since a half serves one operation.
//
// Slots: a dispatched row lies at (local expert, source, position among the source's rows for that
// expert); it comes back to (expert, position). So its source knows both places, and nobody has to be told.
struct LowLatencyMap {
    int num_ranks;
    int num_experts;
    int num_max_tokens;
    int hidden;
    size_t begin;  // of the user's buffer

    EP_HOST_DEVICE int num_local_experts() const { return num_experts / num_ranks; }
    EP_HOST_DEVICE size_t max_dispatch_bytes() const {
        return DispatchMessage{hidden, Payload::kBf16}.stride();
    }
    EP_HOST_DEVICE size_t combine_bytes() const { return CombineMessage{hidden}.stride(); }
    EP_HOST_DEVICE size_t rows_per_expert() const {
        return static_cast<size_t>(num_ranks) * num_max_tokens;
    }

    EP_HOST_DEVICE size_t dispatch_staging(int half, int token) const {
        return begin + (static_cast<size_t>(half) * num_max_tokens + token) * max_dispatch_bytes();
    }
    EP_HOST_DEVICE size_t combine_staging(int half, int local_expert, size_t row) const {
        return dispatch_staging(kNumHalves, 0) +
               ((static_cast<size_t>(half) * num_local_experts() + local_expert) *
                    rows_per_expert() +
                row) *
                   combine_bytes();
    }
    EP_HOST_DEVICE size_t receive(int half) const {
        return combine_staging(kNumHalves, 0, 0) + half * receive_bytes();
    }
    EP_HOST_DEVICE size_t receive_bytes() const {
        const size_t row_bytes =
            max_dispatch_bytes() > combine_bytes() ? max_dispatch_bytes() : combine_bytes();
        return static_cast<size_t>(num_experts) * num_max_tokens * row_bytes;
    }
    EP_HOST_DEVICE size_t
    dispatched_row(int half, int local_expert, int source, int position, size_t row_stride) const {
        return receive(half) +
               ((static_cast<size_t>(local_expert) * num_ranks + source) * num_max_tokens +
                position) *
                   row_stride;
    }
    EP_HOST_DEVICE size_t combined_row(int half, int expert, int position) const {
        return receive(half) +
               (static_cast<size_t>(expert) * num_max_tokens + position) * combine_bytes();
    }
    EP_HOST_DEVICE size_t bytes() const {
        return round_up(receive(kNumHalves) - begin, kBufferAlignment);
    }
};

// Blocks that have work in an operation: one for each token that this rank sends, and a warp for each row
// that it may receive, whether it sends any or not.
EP_HOST_DEVICE int operation_blocks(const LowLatencyMap& map, int num_tokens, int warps) {
    const size_t rows = map.rows_per_expert() * map.num_local_experts();
    const size_t receiving = (rows + warps - 1) / warps;
    const auto sending = static_cast<size_t>(num_tokens);
    return static_cast<int>(sending > receiving ? sending : receiving);
}

}  // namespace ep
