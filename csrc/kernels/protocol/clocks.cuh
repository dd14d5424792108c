// Clocks of other ranks, seen from this one.
//
// An exchange: two ranks send each other a stamp, each as soon as it has seen the other's, a few
// times. Both delays of a bounce tell the offset; of all bounces the one with the smallest round trip
// counts, and its error is at most half of that (Cristian 1989), plus the timer's step.
//
// GPU timers drift by up to 20 millionths, which is more within a second than a path takes. So after
// the measurement at construction, rank 0 now and then asks all ranks, in its header, to end an
// operation with an exchange: no launch, no collective, and captured graphs contain it. Two
// measurements tell the drift, and offsets are carried forward with it. What that costs is counted:
// after the first ones, exchanges take at most a millionth of the time.
#pragma once

#include "kernels/protocol/waiting.cuh"

namespace ep {

constexpr int kClockBounces = 6;  // of an exchange at the end of an operation
// Two GPUs' timers gain on each other by no more than this, unless measured.
constexpr float kLargestDrift = 40e-6f;
// And what is measured changes by this, with temperature.
constexpr float kDriftWander = 0.2e-6f;
// The first exchanges come quickly, to learn the drift; then every interval is twice the one before.
constexpr uint64_t kFirstClockIntervalNs = 50'000'000;
constexpr uint64_t kFreeClockNs = 500'000;  // spent before the millionth counts
constexpr uint64_t kClockBudget = 1'000'000;
constexpr int64_t kNoRoundTrip = INT64_MAX;

// One thread; the partner does the same at about the same time. Leaves the best sample in the
// workspace. False when not all bounces came.
EP_DEVICE bool exchange_stamps(const OperationArgs& args,
                               ClockExchange exchange,
                               int partner,
                               uint64_t first_number,
                               int num_bounces,
                               Deadline deadline) {
    const Transport& transport = args.transport;
    const size_t mine = args.control.clock_slot(exchange, partner);
    const size_t theirs = args.control.clock_slot(exchange, args.rank());
    ClockSample& best = args.workspace->clock_samples[partner];
    best = {0, kNoRoundTrip, 0};
    int64_t delay = kNoDelay;
    EP_UNROLL(1)  // copies of this would cost registers that sending needs
    for (int bounce = 0; bounce < num_bounces; ++bounce) {
        const uint64_t number = first_number + bounce;
        const size_t place = bounce % 2 * sizeof(ClockBounce);
        transport.put_word(partner,
                           theirs + place + offsetof(ClockBounce, delay_ns),
                           static_cast<uint64_t>(delay),
                           0);
        transport.put_word(partner, theirs + place + offsetof(ClockBounce, sent_ns), now_ns(), 0);
        transport.fence(partner, 0);
        transport.signal(partner, theirs + place + offsetof(ClockBounce, number), number, 0);

        const size_t signal = mine + place + offsetof(ClockBounce, number);
        uint64_t seen = 0;
        uint64_t arrival_ns = 0;
        const auto look = [&] {
            seen = transport.poll(signal);
            if (seen >= number) arrival_ns = transport.arrival_ns(signal);
            return seen >= number;
        };
        const bool ended = spin_until(
            [&] {
                return look() || (exchange == ClockExchange::kOfRound && is_gone(args, partner));
            },
            deadline);
        if (!ended || seen != number) return false;
        const auto* message = reinterpret_cast<const ClockBounce*>(transport.local(mine + place));
        const int64_t their_delay = message->delay_ns;
        if (delay != kNoDelay && their_delay != kNoDelay &&
            delay + their_delay < best.round_trip_ns) {
            best = {(their_delay - delay) / 2, delay + their_delay, arrival_ns};
        }
        // Seen late or not, the error stays within half of the round trip that this makes.
        delay = static_cast<int64_t>(arrival_ns - message->sent_ns);
    }
    return true;
}

EP_DEVICE int64_t clock_offset_at(const ClockLine& clock, uint64_t now) {
    const auto age = static_cast<int64_t>(now - clock.measured_ns);
    return clock.offset_ns + static_cast<int64_t>(static_cast<float>(age) * clock.drift);
}

EP_DEVICE int64_t clock_error_at(const ClockLine& clock, uint64_t now) {
    const auto age = static_cast<int64_t>(now - clock.measured_ns);
    return clock.error_ns + static_cast<int64_t>(static_cast<float>(age) * clock.drift_error);
}

// One thread. Takes over the sample of a partner, if there is one: always if `anew`, else if it tells
// more than is known.
EP_DEVICE void take_sample(Workspace* workspace, int partner, bool anew) {
    const ClockSample& sample = workspace->clock_samples[partner];
    if (sample.round_trip_ns == kNoRoundTrip) return;
    ClockLine& clock = workspace->clocks[partner];
    const int64_t error = (sample.round_trip_ns > 0 ? sample.round_trip_ns / 2 : 0) +
                          static_cast<int64_t>(workspace->timer_step_ns);
    ClockLine line{
        sample.offset_ns, error, sample.round_trip_ns, sample.at_ns, 0.0f, kLargestDrift};
    if (clock.measured_ns != 0 && sample.at_ns > clock.measured_ns) {
        const int64_t expected_error = clock_error_at(clock, sample.at_ns);
        const int64_t moved = sample.offset_ns - clock_offset_at(clock, sample.at_ns);
        const bool agrees = (moved < 0 ? -moved : moved) <= expected_error + error;
        // A rank that was held up in the exchange learns less than it knows.
        if (!anew && agrees && error > expected_error) return;
        const auto elapsed = static_cast<float>(sample.at_ns - clock.measured_ns);
        const float drift_error =
            static_cast<float>(error + clock.error_ns) / elapsed + kDriftWander;
        if (agrees && drift_error < kLargestDrift) {
            line.drift = static_cast<float>(sample.offset_ns - clock.offset_ns) / elapsed;
            line.drift_error = drift_error;
        }
    }
    clock = line;
}

// One thread, rank 0: whether the operation that opens now ends with an exchange.
EP_DEVICE bool clock_exchange_is_due(const OperationArgs& args, uint64_t now) {
    const uint64_t next = args.workspace->clock_schedule.next_ns;
    return args.rank() == 0 && args.counters.on() && next != 0 && now >= next;
}

// One thread. After a measurement outside of operations; an interval of 0 asks for no exchanges.
EP_DEVICE void restart_clock_schedule(Workspace* workspace, uint64_t now, uint64_t longest_ns) {
    const uint64_t first = longest_ns < kFirstClockIntervalNs ? longest_ns : kFirstClockIntervalNs;
    workspace->clock_schedule = {now, longest_ns == 0 ? 0 : now + first, first, longest_ns, 0};
}

// One thread, rank 0. After an exchange that took `spent_ns` of the operation.
EP_DEVICE void schedule_next_exchange(ClockSchedule& schedule, uint64_t now, uint64_t spent_ns) {
    schedule.spent_ns += spent_ns;
    schedule.interval_ns = schedule.interval_ns * 2 < schedule.longest_ns ? schedule.interval_ns * 2
                                                                          : schedule.longest_ns;
    schedule.next_ns = now + schedule.interval_ns;
    if (schedule.spent_ns <= kFreeClockNs) return;
    const uint64_t affordable =
        schedule.begin_ns + (schedule.spent_ns - kFreeClockNs) * kClockBudget;
    schedule.next_ns = schedule.next_ns < affordable ? affordable : schedule.next_ns;
}

// Block, the last of an operation whose header of rank 0 asks for it. A rank that does not come, or
// comes late, leaves clocks as they were.
EP_DEVICE void exchange_clocks(const OperationArgs& args, const OpenOperation& open) {
    const uint64_t begin = now_ns();
    const Deadline deadline = deadline_in(kClockPatienceNs);
    const uint64_t first_number = open.op * kClockBounces + 1;
    for (int partner = thread_index(); partner < args.num_ranks(); partner += num_threads()) {
        if (partner == args.rank() || is_left_out(args, partner)) continue;
        exchange_stamps(
            args, ClockExchange::kOfOperation, partner, first_number, kClockBounces, deadline);
    }
    // Apart from the exchange, whose registers add to those of sending.
    for (int partner = thread_index(); partner < args.num_ranks(); partner += num_threads()) {
        if (partner != args.rank() && !is_left_out(args, partner))
            take_sample(args.workspace, partner, false);
    }
    block_sync();
    if (thread_index() != 0 || args.rank() != 0) return;
    const uint64_t now = now_ns();
    schedule_next_exchange(args.workspace->clock_schedule, now, now - begin);
}

// One thread. The smallest step between two different readings of the clock, or the time of one.
EP_DEVICE uint64_t timer_step() {
    constexpr int kSteps = 16;
    constexpr int kMostReadings = 1 << 14;  // a step of a microsecond takes some dozens
    uint64_t smallest = UINT64_MAX;
    uint64_t before = now_ns();
    for (int readings = 0, steps = 0; readings < kMostReadings && steps < kSteps; ++readings) {
        const uint64_t now = now_ns();
        if (now == before) continue;
        smallest = now - before < smallest ? now - before : smallest;
        before = now;
        ++steps;
    }
    return smallest;
}

}  // namespace ep
