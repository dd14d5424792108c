// What an operation works on: its arguments, the rank's memory between launches, and what a kernel
// that gives up leaves behind.
#pragma once

#include "kernels/counters.cuh"
#include "kernels/messages.cuh"
#include "transport/transport.cuh"

namespace ep {

enum class FailureKind : uint32_t {
    kNone = 0,
    kTimeout = 1,
    kMismatch = 2,
    kAbandoned = 3,
    kIndex = 4
};

// Left in host-visible memory by a kernel that gives up.
struct FailureRecord {
    uint32_t kind;  // FailureKind
    Operation operation;
    uint64_t op;
    uint64_t waited_ns;
    uint64_t seen_shape[2];  // of the first rank that disagrees
    uint64_t expected_shape[2];
    uint32_t ranks[kMaxExperts];  // 1: this rank is missing, disagrees or has given up
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

// Per-rank device memory, private to the rank and kept between launches.
struct Workspace {
    uint64_t op;  // operations closed
    uint64_t barriers;
    uint64_t clock_rounds;
    uint64_t entered_ns;
    uint64_t wait_begin_ns;  // when the last block began to wait; 0: none has
    uint64_t sent_ns;        // when the last row to anybody had been handed over; 0: none has
    uint64_t previous_exit_ns;
    uint64_t timer_step_ns;
    ClockSchedule clock_schedule;
    uint32_t blocks_done;
    uint32_t failed;
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

enum Phase : int { kPhaseSend = 1, kPhaseReceive = 2 };

// Arguments common to all low-latency kernels.
struct OperationArgs {
    Transport transport;
    Workspace* workspace;
    FailureRecord* failure;
    ControlMap control;
    LowLatencyMap map;
    OpShape shape;
    uint64_t timeout_ns;
    int phases;
    CounterView counters;
    int64_t* wait_stats;  // [num_ranks] nanoseconds, or nullptr
    size_t row_bytes;     // payload of one received row

    EP_DEVICE int rank() const { return transport.rank; }
    EP_DEVICE int num_ranks() const { return transport.num_ranks; }
    EP_DEVICE bool measures() const { return counters.on() || wait_stats != nullptr; }
};

// The operation a launch belongs to. In hook mode send and receive are two launches of one operation.
struct OpenOperation {
    uint64_t op;
    int half;
    Deadline deadline;
};

EP_DEVICE uint64_t header_word(const OperationArgs& args, int half, int source, size_t field) {
    return *reinterpret_cast<const uint64_t*>(
        args.transport.local(args.control.header(half, source) + field));
}

}  // namespace ep
