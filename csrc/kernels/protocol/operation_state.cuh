// What an operation works on: its arguments, the rank's memory between launches, the headers of the
// others, and the record that a kernel leaves when it gives up.
#pragma once

#include "kernels/protocol/calls.cuh"
#include "kernels/protocol/messages.cuh"
#include "transport/transport.cuh"

namespace ep {

enum class FailureReason : uint32_t {
#define EP_FAILURE_REASON(value, name) value,
#include "kernels/protocol/names.def"
};

// Which row a failure is about.
struct RowPlace {
    uint32_t token;
    int32_t owner;   // the rank whose token it is
    int32_t sender;  // who put the row, over
    Hop hop;
};

// Left in host-visible memory by a kernel that gives up.
struct FailureRecord {
    uint32_t reason;  // FailureReason
    Operation operation;
    uint64_t op;
    uint64_t waited_ns;
    uint64_t seen_shape[OpHeader::kNumAgreed];  // of the first rank that disagrees
    uint64_t expected_shape[OpHeader::kNumAgreed];
    RowPlace row;                 // of the first row found that is not what was sent
    uint32_t ranks[kMaxExperts];  // 1: this rank is missing, disagrees or has given up
};

// What the host reads of an operation while its kernel runs. Zero where that has not happened.
struct RecordedEntry {
    uint64_t number;  // in its series
    uint64_t entered_ns;
    uint64_t sent_ns;  // low latency: when all blocks had sent what they send
    uint64_t finished_ns;
    uint32_t failed;  // FailureReason
};

// What a rank waits for of another one.
enum class Owed : uint32_t {
#define EP_OWED(value, name) value,
#include "kernels/protocol/names.def"
    kNumKinds
};

// Which ranks a kernel that waits for long has last been missing, and when: see recorder.cuh.
struct RecordedWaits {
    uint64_t noted[static_cast<int>(Owed::kNumKinds)][kMaxExperts];  // WaitNote, packed
};

// Both are nullptr where nothing is recorded.
struct Record {
    RecordedEntry* entry;
    RecordedWaits* waits;
};

// Left in host-visible memory by a kernel that masks ranks which have not arrived.
struct MaskRecord {
    uint32_t any;  // set last
    uint64_t when
        [kMaxExperts];  // by rank: number in its series * Series::kEnd + series; 0: not masked since
};

// What this rank knows of another one's clock: a straight line, and how far it may be off.
struct ClockLine {
    int64_t offset_ns;      // its clock minus this rank's, at `measured_ns`
    int64_t error_ns;       // of the offset
    int64_t round_trip_ns;  // of the sample it is from
    uint64_t measured_ns;   // this rank's clock; 0: never
    float drift;            // what the offset grows by in a nanosecond
    float drift_error;
};

// The best of an exchange with one rank.
struct ClockSample {
    int64_t offset_ns;
    int64_t round_trip_ns;  // kNoRoundTrip: there is none
    uint64_t at_ns;
};

// When rank 0 asks for the next clock exchange; see clocks.cuh.
struct ClockSchedule {
    uint64_t begin_ns;  // of the first measurement
    uint64_t next_ns;   // 0: never
    uint64_t interval_ns;
    uint64_t longest_ns;  // of the intervals
    uint64_t spent_ns;    // in exchanges at the end of operations, all together
};

// Sizes that say where the rows of an operation lie.
struct Layout {
    uint64_t words[2];  // zeroes: no operation has used the buffer

    EP_HOST_DEVICE bool is_fresh() const { return words[0] == 0; }
    EP_HOST_DEVICE bool operator==(const Layout& other) const {
        return words[0] == other.words[0] && words[1] == other.words[1];
    }
    // Like no other one.
    EP_HOST_DEVICE static Layout unknown() { return {{UINT64_MAX, UINT64_MAX}}; }
};

// What the host tells kernels while they run.
struct News {
    uint32_t any;                // set last; kernels that wait look at nothing else
    uint32_t gone[kMaxExperts];  // by rank, 1: it will never come again
    uint64_t lost_op;            // the group has given up operations up to this one
    uint64_t out[kMaxExperts];   // by rank: the newest operation that the group goes on without it
};

// Whom operations go on without, if ranks may be masked. Private to the rank; written in the order of its
// streams. `masked` stays while an operation sends and receives, except that block 0 adds to it before the other
// blocks look.
struct Masks {
    int32_t masked[kMaxExperts];   // by rank, 1: neither sent to nor waited for
    int32_t of_sent[kMaxExperts];  // as they were when the operation that is not received was sent
    uint32_t left_out[kMaxExperts];  // by source: did not arrive in the operation that is open
    uint32_t blocks_decided;         // that no longer wait in it
    uint32_t cleans;                 // how often masks have been cleaned
    uint32_t joins;                  // and up to which of them all have joined
    uint64_t cleaned_op;  // the newest operation before; what the group decided on it is void
    uint64_t joined[kMaxExperts];  // by rank: the newest JoinSlot::number that was answered
    MaskRecord* record;
};

// Per-rank device memory, private to the rank and kept between launches.
struct Workspace {
    uint64_t op;            // operations closed
    uint64_t open_op;       // the newest one that was opened
    uint64_t num_given_up;  // operations since the last one that succeeded
    uint64_t num_combines;  // closed
    uint64_t barriers;
    uint64_t clock_rounds;
    uint64_t entered_ns;
    uint64_t wait_begin_ns;  // when the last block began to wait; 0: none has
    uint64_t sent_ns;        // when the last row to anybody had been handed over; 0: none has
    uint64_t previous_exit_ns;
    uint64_t timer_step_ns;
    ClockSchedule clock_schedule;
    uint32_t blocks_done;
    uint32_t blocks_sent;
    uint32_t failed;
    Layout layout;             // of the last operation; unknown() if it failed
    uint32_t num_queue_pairs;  // that operations have used, at most
    uint64_t handed_over;      // operation * 2 + whether it may send; see hand_over()
    uint32_t meets;            // it waits for the others in order to hand over
    News news;
    // By destination expert (dispatch) or local expert * num_ranks + destination (combine).
    uint32_t issued[kMaxExperts];
    uint64_t issued_ns[kMaxExperts];  // when the last row so far had been handed over; 0: none has
    // By index of the CountWord they came with.
    uint32_t counts[kMaxExperts];
    uint32_t issued_lo[kMaxExperts];
    uint64_t word_sight[kMaxExperts];  // Sight, packed
    // By rank.
    uint64_t header_sight[kMaxExperts];  // Sight, packed
    ClockLine clocks[kMaxExperts];
    ClockSample clock_samples[kMaxExperts];
    int64_t source_arrival_ns[kMaxExperts];
};

// Arguments common to the kernels of all operations.
struct OperationArgs : OperationOptions {
    Transport transport;
    Workspace* workspace;
    Masks* masks;  // nullptr: ranks cannot be masked
    FailureRecord* failure;
    Record record;
    ControlMap control;
    LowLatencyMap map;
    OpShape shape;
    Layout layout;
    uint64_t capacities;          // normal operations: of their queues, packed; else 0
    const uint64_t* dispatch_op;  // combine: the operation whose rows it returns; or nullptr
    uint64_t most_tokens;         // where there is none: of a rank, with kMostTokens; or 0
    uint32_t num_queue_pairs;     // that it uses
    uint64_t timeout_ns;
    size_t row_bytes;   // payload of one received row
    uint64_t given_up;  // newest operation that the group had given up when this one was launched

    // What all ranks must agree on, by word of the header.
    EP_DEVICE uint64_t agreed(int i) const {
        return i < 2                    ? shape.word(i)
               : i == 3                 ? capacities
               : dispatch_op == nullptr ? most_tokens
                                        : *dispatch_op;
    }
    EP_DEVICE int rank() const { return transport.rank; }
    EP_DEVICE int num_ranks() const { return transport.num_ranks; }
    EP_DEVICE bool measures() const { return counters.on() || wait_stats != nullptr; }
    // Whether the group has given up operations that this rank never called. Nobody comes back to these.
    EP_DEVICE bool skips() const { return given_up > workspace->op; }
    // The number of the operation that is launched, or open. Not a look at memory that others write: all
    // blocks, and both launches of one operation, must agree.
    EP_DEVICE uint64_t op() const { return (skips() ? given_up : workspace->op) + 1; }
};

// Leads the arguments of a kernel: one pointer then serves for both.
struct CommonArgs {
    OperationArgs common;
};

// The operation a launch belongs to. In hook mode send and receive are two launches of one operation.
struct OpenOperation {
    uint64_t op;  // its number in its series
    int half;
    Deadline deadline;
    Series series = Series::kOperations;
};

EP_DEVICE uint64_t header_word(const OperationArgs& args, int half, int source, size_t field) {
    return *reinterpret_cast<const uint64_t*>(
        args.transport.local(args.control.header(half, source) + field));
}

EP_DEVICE bool agrees_in_shape(const OperationArgs& args, const OpenOperation& open, int source) {
    for (int i = 0; i < OpHeader::kNumAgreed; ++i) {
        if (header_word(args, open.half, source, agreed_field(i)) != args.agreed(i)) return false;
    }
    return true;
}

}  // namespace ep
