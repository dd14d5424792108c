// What an operation measures: when words of other ranks were first seen, and what that adds to the
// counters once the operation closes.
#pragma once

#include "kernels/protocol/clocks.cuh"

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

// Lanes that look at the words of one source together, and the words that each has under way. So 256 experts
// on eight ranks or more take one step, and a block of 256 threads looks at 64 sources at once.
constexpr int kSourceLanes = 4;
constexpr int kWordsInFlight = 8;

// What one source's words say of one operation.
struct SourceSights {
    Sight last;       // of its last word
    uint64_t issued;  // on its own clock
    int64_t tokens;
};

// Warp. Each group of kSourceLanes lanes looks at a source of its own.
EP_DEVICE SourceSights sights_of(const OperationArgs& args,
                                 int source,
                                 uint64_t entered_remote,
                                 int first_word,
                                 int word_stride) {
    const Workspace& workspace = *args.workspace;
    const int num_words = args.map.num_local_experts();
    // The later sight has the smaller packed value.
    uint64_t last = workspace.header_sight[source];
    uint32_t issue_ns = 0;
    uint32_t tokens[] = {0};
    for (int first = lane_id() % kSourceLanes; first < num_words;
         first += kSourceLanes * kWordsInFlight) {
        uint32_t issued_lo[kWordsInFlight];
        uint64_t sight[kWordsInFlight];
        uint32_t count[kWordsInFlight];
        EP_UNROLL(8)
        for (int j = 0; j < kWordsInFlight; ++j) {
            // Without a branch, around which loads would not be moved.
            const int i = first + j * kSourceLanes;
            const int index = first_word + (i < num_words ? i : first) * word_stride;
            issued_lo[j] = workspace.issued_lo[index];
            sight[j] = workspace.word_sight[index];
            count[j] = i < num_words ? workspace.counts[index] : 0;
        }
        EP_UNROLL(8)
        for (int j = 0; j < kWordsInFlight; ++j) {
            const uint32_t after_ns = CountWord{0, 0, issued_lo[j]}.issue_ns(entered_remote);
            issue_ns = after_ns > issue_ns ? after_ns : issue_ns;
            last = sight[j] < last ? sight[j] : last;
            tokens[0] += count[j];
        }
    }
    uint64_t latest[] = {~last, issue_ns};
    group_reduce<kSourceLanes, Max>(latest);
    group_reduce<kSourceLanes, Sum>(tokens);
    return {Sight::unpack(~latest[0]), entered_remote + latest[1], tokens[0]};
}

// What one operation tells of one source.
struct SourceSeen {
    SourceTiming timing;
    int64_t tokens;
    bool witnessed;
    int64_t clock_error;
    int64_t blocked_ns = 0;  // of the waiting, how long slots were waited for
};

// One thread. The counters of a source, loaded before anything else is needed.
struct SourceTotals {
    int64_t values[kNumSourceCounters];

    EP_DEVICE SourceTotals(const CounterView& counters, int source, int num_ranks, bool loads)
        : values{} {
        if (!loads) return;
        EP_UNROLL(16)
        for (int i = 0; i < kNumSourceCounters; ++i)
            values[i] = counters.totals[i * num_ranks + source];
    }
};

// One thread. Adds one operation to the counters of a source.
EP_ALWAYS_INLINE void add_operation(const CounterView& counters,
                                    SourceTotals& totals,
                                    const SourceSeen& seen,
                                    int ring_slot,
                                    int source,
                                    int num_ranks,
                                    size_t row_bytes) {
    const SourceTiming& timing = seen.timing;
    const int64_t wait = timing.wait();
    int64_t(&total)[kNumSourceCounters] = totals.values;
    total[kSource_ops] += 1;
    total[kSource_tokens] += seen.tokens;
    total[kSource_bytes] += seen.tokens * static_cast<int64_t>(row_bytes);
    total[kSource_wait_ns] += wait;
    total[kSource_late_ns] += timing.late();
    total[kSource_issue_ns] += timing.issue();
    total[kSource_path_ns] += timing.path();
    total[kSource_slack_ns] += timing.slack();
    total[kSource_credit_ns] += seen.blocked_ns;
    if (wait > total[kSource_max_wait_ns]) total[kSource_max_wait_ns] = wait;
    EP_UNROLL(16)
    for (int i = 0; i < kNumSourceCounters; ++i) counters.totals[i * num_ranks + source] = total[i];
    if (counters.ring_capacity == 0) return;
    int64_t* row = counters.ring_row(ring_slot, source, num_ranks);
    row[kRingSource_entered] = timing.entered;
    row[kRingSource_issued] = timing.issued;
    row[kRingSource_arrival] = timing.arrival;
    row[kRingSource_tokens] = seen.tokens;
    row[kRingSource_seen] = seen.witnessed;
    row[kRingSource_clock_error] = seen.clock_error;
}

// One thread. An operation without this source: no counter grows, and in the ring it was not heard of.
EP_DEVICE void pass_over(const OperationArgs& args, int ring_slot, int source) {
    args.workspace->source_arrival_ns[source] = INT64_MIN;
    if (!args.counters.on() || args.counters.ring_capacity == 0) return;
    int64_t* row = args.counters.ring_row(ring_slot, source, args.num_ranks());
    for (int i = 0; i < kNumRingSourceFields; ++i) row[i] = 0;
}

// Warp, each group of kSourceLanes lanes for a source of its own: what one operation adds to the counters of
// this source, unless `is_spare`. CountWords of the source are at `first_word` and then every `word_stride`.
EP_DEVICE void count_source(const OperationArgs& args,
                            const OpenOperation& open,
                            int ring_slot,
                            int source,
                            bool is_spare,
                            int first_word,
                            int word_stride) {
    const Workspace& workspace = *args.workspace;
    const CounterView& counters = args.counters;
    // One lane of the group adds; the others may not look at what it writes, for shuffles order nothing.
    const bool adds = !is_spare && lane_id() % kSourceLanes == 0;
    // All loads before the first value is needed, or each would wait for the one before.
    const uint64_t entered_remote =
        header_word(args, open.half, source, offsetof(OpHeader, entered_ns));
    const ClockLine clock = workspace.clocks[source];
    const auto wait_begin = static_cast<int64_t>(workspace.wait_begin_ns);
    const int64_t waited = adds && args.wait_stats != nullptr ? args.wait_stats[source] : 0;
    SourceTotals totals(counters, source, args.num_ranks(), adds && counters.on());
    const SourceSights seen = sights_of(args, source, entered_remote, first_word, word_stride);
    if (!adds) return;
    if (is_left_out(args, source)) return pass_over(args, ring_slot, source);

    const int64_t offset = clock_offset_at(clock, seen.last.at_ns);
    const SourceTiming timing{wait_begin,
                              static_cast<int64_t>(entered_remote) - offset,
                              static_cast<int64_t>(seen.issued) - offset,
                              static_cast<int64_t>(seen.last.at_ns)};
    args.workspace->source_arrival_ns[source] = timing.arrival;
    if (args.wait_stats != nullptr) args.wait_stats[source] = waited + timing.wait();
    if (!counters.on()) return;
    const int64_t clock_error = source == args.rank() ? 0 : clock_error_at(clock, seen.last.at_ns);
    add_operation(counters,
                  totals,
                  {timing, seen.tokens, seen.last.witnessed, clock_error},
                  ring_slot,
                  source,
                  args.num_ranks(),
                  args.row_bytes);
}

// Block. What one operation adds to the counters of all sources. Their CountWords are at first_word(source) and
// then every `word_stride`.
template <class FirstWord>
EP_DEVICE void count_sources(const OperationArgs& args,
                             const OpenOperation& open,
                             int ring_slot,
                             FirstWord first_word,
                             int word_stride) {
    const int num_ranks = args.num_ranks();
    // Lanes without a source of their own take part in what their warp does together.
    for (int first = warp_id() * (kWarpSize / kSourceLanes); first < num_ranks;
         first += num_threads() / kSourceLanes) {
        const int source = first + lane_id() / kSourceLanes;
        const bool is_spare = source >= num_ranks;
        const int some = is_spare ? first : source;
        count_source(args, open, ring_slot, some, is_spare, first_word(some), word_stride);
    }
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

// Warp, after the sources have been counted.
EP_DEVICE void count_operation(const OperationArgs& args,
                               const OpenOperation& open,
                               const CounterView& counters,
                               int ring_slot) {
    const Workspace& workspace = *args.workspace;
    // Before the arrivals, which it would wait for. Only for the lane that writes to the same places.
    const bool adds = elect_one();
    const auto load = [adds](const auto& value) {
        return adds ? static_cast<int64_t>(value) : int64_t{0};
    };
    int64_t own[kNumOwnCounters];
    EP_UNROLL(8)
    for (int i = 0; i < kNumOwnCounters; ++i) own[i] = load(counters.own[i]);
    const int64_t wait_begin = load(workspace.wait_begin_ns);
    const int64_t entered = load(workspace.entered_ns);
    const int64_t sent = load(workspace.sent_ns);
    const int64_t previous_exit = load(workspace.previous_exit_ns);
    const int64_t timer_step = load(workspace.timer_step_ns);
    const auto [last, last_arrival, second] = find_last_arrival(args);
    if (!adds) return;
    const int64_t runner_up = second > wait_begin ? second : wait_begin;
    if (last_arrival > wait_begin) {
        int64_t* critical_ops = counters.totals + kSource_critical_ops * args.num_ranks() + last;
        int64_t* critical_ns = counters.totals + kSource_critical_ns * args.num_ranks() + last;
        const int64_t ops = *critical_ops;
        const int64_t ns = *critical_ns;
        *critical_ops = ops + 1;
        *critical_ns = ns + (last_arrival - runner_up);
    }
    const auto exit = static_cast<int64_t>(now_ns());
    own[kOwn_ops] += 1;
    if (previous_exit != 0) own[kOwn_gap_ns] += entered - previous_exit;
    own[kOwn_send_ns] += sent > entered ? sent - entered : 0;
    own[kOwn_wait_ns] += last_arrival > wait_begin ? last_arrival - wait_begin : 0;
    own[kOwn_drain_ns] += exit - (last_arrival > wait_begin ? last_arrival : wait_begin);
    EP_UNROLL(8)
    for (int i = 0; i < kNumOwnCounters; ++i) counters.own[i] = own[i];
    if (counters.ring_capacity == 0) return;
    int64_t* row = counters.ring_row(ring_slot, args.num_ranks(), args.num_ranks());
    row[kRingOwn_op] = static_cast<int64_t>(open.op);
    row[kRingOwn_wait_begin] = wait_begin;
    row[kRingOwn_exit] = exit;
    row[kRingOwn_previous_exit] = previous_exit;
    row[kRingOwn_sent] = sent;
    row[kRingOwn_timer_step] = timer_step;
}

// Block, after counting: the next operation starts without sights.
EP_DEVICE void forget_sights(const OperationArgs& args) {
    Workspace* workspace = args.workspace;
    EP_UNROLL(1)  // most threads have one; more at a time would cost them a division
    for (int i = thread_index(); i < args.map.num_experts; i += num_threads())
        workspace->word_sight[i] = 0;
    EP_UNROLL(1)
    for (int i = thread_index(); i < args.num_ranks(); i += num_threads())
        workspace->header_sight[i] = 0;
}

}  // namespace ep
