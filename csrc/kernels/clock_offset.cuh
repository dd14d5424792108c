// Clock offsets by ping-pong. Pairs meet in rounds (in round r, ranks i and j with i + j = r modulo
// the number of ranks), first one asks, then the other. Of all samples a rank keeps the one with the
// smallest round trip: its error is at most half of that (Cristian 1989). One warp, one lane works.
#pragma once

#include "kernels/operation.cuh"

namespace ep {

struct ClockOffsetArgs {
    OperationArgs common;
    int num_samples;
};

// False when the partner did not answer.
EP_DEVICE bool ask(const ClockOffsetArgs& args,
                   const OpenOperation& open,
                   int partner,
                   uint64_t first_sequence) {
    const OperationArgs& common = args.common;
    const Transport& transport = common.transport;
    const size_t mine = common.control.ping(partner);
    const size_t theirs = common.control.ping(common.rank());
    int64_t best_round_trip = INT64_MAX;
    for (int i = 0; i < args.num_samples; ++i) {
        const uint64_t sequence = first_sequence + i;
        const auto sent = static_cast<int64_t>(now_ns());
        transport.signal(partner, theirs + offsetof(PingSlot, request), sequence, 0);
        const size_t reply = mine + offsetof(PingSlot, reply);
        if (!spin_until([&] { return transport.poll(reply) >= sequence; }, open.deadline))
            return false;
        const auto received = static_cast<int64_t>(transport.arrival_ns(reply));
        const auto answered =
            *reinterpret_cast<const int64_t*>(transport.local(mine + offsetof(PingSlot, reply_ns)));
        if (received - sent >= best_round_trip) continue;
        best_round_trip = received - sent;
        common.workspace->clock_offset_ns[partner] = answered - (sent + best_round_trip / 2);
        common.workspace->round_trip_ns[partner] = best_round_trip;
    }
    return true;
}

EP_DEVICE bool answer(const ClockOffsetArgs& args,
                      const OpenOperation& open,
                      int partner,
                      uint64_t first_sequence) {
    const OperationArgs& common = args.common;
    const Transport& transport = common.transport;
    const size_t request = common.control.ping(partner) + offsetof(PingSlot, request);
    const size_t theirs = common.control.ping(common.rank());
    for (int i = 0; i < args.num_samples; ++i) {
        const uint64_t sequence = first_sequence + i;
        if (!spin_until([&] { return transport.poll(request) >= sequence; }, open.deadline))
            return false;
        transport.arrival_ns(request);
        transport.put_word(partner, theirs + offsetof(PingSlot, reply_ns), now_ns(), 0);
        transport.fence(partner, 0);
        transport.signal(partner, theirs + offsetof(PingSlot, reply), sequence, 0);
    }
    transport.flush();
    return true;
}

EP_KERNEL void clock_offset(const EP_GRID_CONSTANT ClockOffsetArgs args) {
    const OperationArgs& common = args.common;
    if (thread_index() != 0) return;
    const int num_ranks = common.num_ranks();
    const uint64_t given_up = newest_given_up(common, Series::kClockRounds);
    const uint64_t rounds =
        (given_up > common.workspace->clock_rounds ? given_up : common.workspace->clock_rounds) + 1;
    const OpenOperation open{rounds, 0, deadline_in(common.timeout_ns)};
    const uint64_t first_sequence = rounds
                                    << 32;  // later calls must be newer, whatever they sample
    for (int round = 0; round < num_ranks; ++round) {
        const int partner = (round + num_ranks - common.rank()) % num_ranks;
        if (partner == common.rank()) continue;
        const bool first = common.rank() < partner;
        const bool ok = first ? ask(args, open, partner, first_sequence) &&
                                    answer(args, open, partner, first_sequence)
                              : answer(args, open, partner, first_sequence) &&
                                    ask(args, open, partner, first_sequence);
        if (!ok) record_failure(common, open, FailureKind::kTimeout, partner);
    }
    if (common.workspace->failed != 0) tell_given_up(common, Series::kClockRounds, rounds);
    common.workspace->clock_rounds = rounds;
    common.workspace->failed = 0;
}

}  // namespace ep
