// Measures the clocks of all other ranks in a launch of its own, one thread to a rank; see clocks.cuh.
// Launched with one block.
#pragma once

#include "kernels/protocol/clocks.cuh"
#include "kernels/protocol/join.cuh"
#include "kernels/protocol/recorder.cuh"

namespace ep {

struct ClockOffsetArgs {
    OperationArgs common;
    int num_samples;
    // The longest time between exchanges in operations; 0: there are none.
    uint64_t exchange_interval_ns;
};

EP_KERNEL void clock_offset(const EP_GRID_CONSTANT ClockOffsetArgs args) {
    const OperationArgs& common = args.common;
    Workspace* workspace = common.workspace;
    join_if_cleaned(common);
    const uint64_t given_up = newest_given_up(common, Series::kClockRounds);
    const uint64_t round =
        (given_up > workspace->clock_rounds ? given_up : workspace->clock_rounds) + 1;
    const OpenOperation open{round, 0, deadline_in(common.timeout_ns), Series::kClockRounds};
    // The first bounce lets the ranks meet, the last brings the other's half of a sample. Their number is
    // even: a partner that goes on at once must not overwrite the last with the first of the next round.
    const int num_bounces = (args.num_samples + 3) / 2 * 2;
    const uint64_t first_number = round << 32;  // later rounds are newer, whatever they sample
    if (thread_index() == 0) {
        record_entry(common, round, now_ns());
        workspace->timer_step_ns = timer_step();
    }
    block_sync();
    for (int partner = thread_index(); partner < common.num_ranks(); partner += num_threads()) {
        if (partner == common.rank() || is_masked(common, partner)) continue;
        if (!exchange_stamps(common,
                             ClockExchange::kOfRound,
                             partner,
                             first_number,
                             num_bounces,
                             open.deadline)) {
            if (common.masks != nullptr) {
                mask_missing(common, open, partner);
            } else {
                record_failure(common, open, FailureReason::kTimeout, partner);
            }
        }
        take_sample(workspace, partner, true);
    }
    block_sync();
    if (thread_index() != 0) return;
    if (workspace->failed != 0) tell_given_up(common, Series::kClockRounds, {round, 1});
    restart_clock_schedule(workspace, now_ns(), args.exchange_interval_ns);
    record_end(common, workspace->failed, now_ns());
    workspace->clock_rounds = round;
    workspace->failed = 0;
    common.transport.flush();
}

}  // namespace ep
