// What an operation measures: when words of other ranks were first seen, and what that adds to the
// counters once the operation closes.
#pragma once

#include "kernels/clocks.cuh"

namespace ep {

// When this rank first saw a word of another one. Packed so that the earliest sight of several
// blocks is the largest value, and 0 means that nobody has seen it.
struct Sight {
    uint64_t at_ns;
    // Whether somebody saw it come. Otherwise it was there at the first look, which is `at_ns`: it
    // came at an unknown time before.
    bool witnessed;

    EP_HOST_DEVICE uint64_t pack() const { return ~(at_ns << 1 | (witnessed ? 1u : 0u)); }
    EP_HOST_DEVICE static Sight unpack(uint64_t packed) {
        return {~packed >> 1, (~packed & 1u) != 0};
    }
};

// One thread. A word has just been found by a look; `is_first_look` of a block that began to look at
// `begin_ns`.
EP_DEVICE Sight sight_of(const OperationArgs& args,
                         size_t offset,
                         bool is_first_look,
                         uint64_t begin_ns) {
    const uint64_t arrival_ns = args.transport.arrival_ns(offset);
    const bool witnessed = !is_first_look || args.transport.stamps_arrivals();
    return {witnessed ? arrival_ns : begin_ns, witnessed};
}

EP_DEVICE void note_sight(uint64_t* packed, const Sight& sight) {
    max_relaxed<Scope::kDevice>(packed, sight.pack());
}

// What one source's words say of one operation.
struct SourceSights {
    Sight last;       // of its last word
    uint64_t issued;  // on its own clock
    int64_t tokens;
};

EP_DEVICE SourceSights sights_of(const OperationArgs& args,
                                 int source,
                                 uint64_t entered_remote,
                                 int first_word,
                                 int word_stride) {
    const Workspace& workspace = *args.workspace;
    // The later sight has the smaller packed value.
    uint64_t last = workspace.header_sight[source];
    uint64_t issued = entered_remote;
    int64_t tokens = 0;
    EP_UNROLL(8)  // whose loads do not wait for each other
    for (int i = 0; i < args.map.num_local_experts(); ++i) {
        const int index = first_word + i * word_stride;
        const CountWord word{0, 0, workspace.issued_lo[index]};
        const uint64_t stamp = word.issued_ns(entered_remote);
        issued = stamp > issued ? stamp : issued;
        last = workspace.word_sight[index] < last ? workspace.word_sight[index] : last;
        tokens += workspace.counts[index];
    }
    return {Sight::unpack(last), issued, tokens};
}

// One thread, once per source: what one operation adds to the counters of this source. CountWords of
// the source are at `first_word` and then every `word_stride`.
EP_DEVICE void count_source(const OperationArgs& args,
                            const OpenOperation& open,
                            int source,
                            int first_word,
                            int word_stride) {
    const Workspace& workspace = *args.workspace;
    const uint64_t entered_remote =
        header_word(args, open.half, source, offsetof(OpHeader, entered_ns));
    const SourceSights seen = sights_of(args, source, entered_remote, first_word, word_stride);
    const ClockLine& clock = workspace.clocks[source];
    const int64_t offset = clock_offset_at(clock, seen.last.at_ns);
    const SourceTiming timing{static_cast<int64_t>(workspace.wait_begin_ns),
                              static_cast<int64_t>(entered_remote) - offset,
                              static_cast<int64_t>(seen.issued) - offset,
                              static_cast<int64_t>(seen.last.at_ns)};
    args.workspace->source_arrival_ns[source] = timing.arrival;
    const int64_t wait = timing.wait();
    if (args.wait_stats != nullptr) args.wait_stats[source] += wait;
    if (!args.counters.on()) return;

    // All loads before the first store, or each would wait for the one before.
    int64_t* totals = args.counters.totals + source;
    int64_t total[kNumSourceCounters];
    EP_UNROLL(16)
    for (int i = 0; i < kNumSourceCounters; ++i) total[i] = totals[i * args.num_ranks()];
    total[kSource_ops] += 1;
    total[kSource_tokens] += seen.tokens;
    total[kSource_bytes] += seen.tokens * static_cast<int64_t>(args.row_bytes);
    total[kSource_wait_ns] += wait;
    total[kSource_late_ns] += timing.late();
    total[kSource_issue_ns] += timing.issue();
    total[kSource_path_ns] += timing.path();
    total[kSource_slack_ns] += timing.slack();
    if (wait > total[kSource_max_wait_ns]) total[kSource_max_wait_ns] = wait;
    EP_UNROLL(16)
    for (int i = 0; i < kNumSourceCounters; ++i) totals[i * args.num_ranks()] = total[i];
    if (args.counters.ring_capacity == 0) return;
    int64_t* row = args.counters.ring_row(open.op, source, args.num_ranks());
    row[kRingSource_entered] = timing.entered;
    row[kRingSource_issued] = timing.issued;
    row[kRingSource_arrival] = timing.arrival;
    row[kRingSource_tokens] = seen.tokens;
    row[kRingSource_seen] = seen.last.witnessed;
    row[kRingSource_clock_error] =
        source == args.rank() ? 0 : clock_error_at(clock, seen.last.at_ns);
}

// Who arrived last, and when the one before did; INT64_MIN where there is none.
struct LastArrival {
    int source;
    int64_t at_ns;
    int64_t second_ns;
};

// Warp. Each lane looks at its share of the sources.
EP_DEVICE LastArrival find_last_arrival(const OperationArgs& args) {
    const int64_t* arrivals = args.workspace->source_arrival_ns;
    int64_t latest = INT64_MIN;
    int64_t second = INT64_MIN;
    int source = args.num_ranks();
    for (int i = lane_id(); i < args.num_ranks(); i += kWarpSize) {
        const int64_t arrival = arrivals[i];
        const bool is_latest = arrival > latest;
        second = is_latest ? latest : arrival > second ? arrival : second;
        if (is_latest) source = i;
        latest = is_latest ? arrival : latest;
    }
    const int64_t at_ns = warp_reduce<Max>(latest);
    const int last = warp_reduce<Min>(latest == at_ns ? source : args.num_ranks());
    return {last, at_ns, warp_reduce<Max>(source == last ? second : latest)};
}

// Warp, after count_source() for all.
EP_DEVICE void count_operation(const OperationArgs& args, const OpenOperation& open) {
    const Workspace& workspace = *args.workspace;
    const CounterView& counters = args.counters;
    const auto [last, last_arrival, second] = find_last_arrival(args);
    if (!elect_one()) return;
    const auto wait_begin = static_cast<int64_t>(workspace.wait_begin_ns);
    const int64_t runner_up = second > wait_begin ? second : wait_begin;
    if (last_arrival > wait_begin) {
        counters.totals[kSource_critical_ops * args.num_ranks() + last] += 1;
        counters.totals[kSource_critical_ns * args.num_ranks() + last] += last_arrival - runner_up;
    }
    const auto entered = static_cast<int64_t>(workspace.entered_ns);
    const auto sent = static_cast<int64_t>(workspace.sent_ns);
    const auto exit = static_cast<int64_t>(now_ns());
    const auto previous_exit = static_cast<int64_t>(workspace.previous_exit_ns);
    int64_t own[kNumOwnCounters];
    EP_UNROLL(8)
    for (int i = 0; i < kNumOwnCounters; ++i) own[i] = counters.own[i];
    own[kOwn_ops] += 1;
    if (previous_exit != 0) own[kOwn_gap_ns] += entered - previous_exit;
    own[kOwn_send_ns] += sent > entered ? sent - entered : 0;
    own[kOwn_wait_ns] += last_arrival > wait_begin ? last_arrival - wait_begin : 0;
    own[kOwn_drain_ns] += exit - (last_arrival > wait_begin ? last_arrival : wait_begin);
    EP_UNROLL(8)
    for (int i = 0; i < kNumOwnCounters; ++i) counters.own[i] = own[i];
    if (counters.ring_capacity == 0) return;
    int64_t* row = counters.ring_row(open.op, args.num_ranks(), args.num_ranks());
    row[kRingOwn_op] = static_cast<int64_t>(open.op);
    row[kRingOwn_wait_begin] = wait_begin;
    row[kRingOwn_exit] = exit;
    row[kRingOwn_previous_exit] = previous_exit;
    row[kRingOwn_sent] = sent;
    row[kRingOwn_timer_step] = static_cast<int64_t>(workspace.timer_step_ns);
}

// Block, after counting: the next operation starts without sights.
EP_DEVICE void forget_sights(const OperationArgs& args) {
    Workspace* workspace = args.workspace;
    for (int i = thread_index(); i < args.map.num_experts; i += num_threads())
        workspace->word_sight[i] = 0;
    for (int i = thread_index(); i < args.num_ranks(); i += num_threads())
        workspace->header_sight[i] = 0;
}

}  // namespace ep
