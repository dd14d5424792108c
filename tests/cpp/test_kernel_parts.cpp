// Parts of kernels by themselves, on values that are made up: samples of clocks, numbers of barriers and clock
// rounds, what the words of a source add up to, the layout of a dispatch, rows that are copied and added
// up, queues of several channels, whom waiting tasks name, the order of tasks, masks of an operation that
// failed, and notes of waits.
// sanitize: address:-DEP_NUMBERS_OF_GPU
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "kernels/normal/counters.cuh"
#include "kernels/normal/dispatch.cuh"
#include "kernels/normal/dispatch_layout.cuh"
#include "kernels/normal/local_rows.cuh"
#include "kernels/normal/tasks.cuh"
#include "kernels/protocol/barrier.cuh"
#include "kernels/protocol/clock_offset.cuh"
#include "kernels/protocol/mask_calls.cuh"
#include "kernels/protocol/operation.cuh"
#include "launches.h"
#include "ranks.h"
#include "runtime/call_log.h"

using namespace ep;
using ep::testing::OperatingRank;
using ep::testing::simulate;

namespace {

constexpr int kRanks = 3;
constexpr int kLate = 2;
constexpr int kHidden = 128;
constexpr uint64_t kLateNs = 5'000'000;  // longer than all that is not late

host::SimulationOptions nodes(int num_ranks) {
    host::SimulationOptions options;
    options.num_ranks = num_ranks;
    options.seed = 1;
    options.end_ns = 600'000'000'000;
    return options;
}

uint64_t now() { return host::Simulation::seat()->simulation().now_ns(); }
void sleep(uint64_t ns) { host::Simulation::seat()->sleep_until(now() + ns); }

template <class F>
void alone(F body) {
    simulate<OperatingRank>(nodes(1), [&](OperatingRank& self, int) { body(self); });
}

FailureReason take_failure(OperatingRank& self) {
    const auto reason = static_cast<FailureReason>(self.failure->reason);
    *self.failure = {};
    return reason;
}

}  // namespace

// ---- samples of clocks

namespace {

constexpr int kOther = 1;
constexpr uint64_t kFirstNs = 1'000'000'000;
constexpr uint64_t kStepNs = 32;

// One rank's knowledge of another one's clock, after samples.
struct Clocks {
    Clocks() { workspace->timer_step_ns = kStepNs; }
    const ClockLine& take(int64_t offset, int64_t round_trip, uint64_t at_ns, bool anew = false) {
        workspace->clock_samples[kOther] = {offset, round_trip, at_ns};
        take_sample(workspace.get(), kOther, anew);
        return workspace->clocks[kOther];
    }
    std::unique_ptr<Workspace> workspace = std::make_unique<Workspace>();
};

}  // namespace

TEST(the_error_of_a_sample_is_half_its_round_trip_and_a_step_of_the_clock) {
    CHECK_EQUAL(Clocks().take(7, 200, kFirstNs).error_ns, int64_t{100 + kStepNs});
    // Clocks that go in steps may show an answer before its question.
    CHECK_EQUAL(Clocks().take(7, -200, kFirstNs).error_ns, int64_t{kStepNs});
}

TEST(a_sample_that_tells_less_than_is_known_is_left) {
    Clocks clocks;
    clocks.take(7, 200, kFirstNs);
    CHECK_EQUAL(clocks.take(9, 2000, kFirstNs + 1000).offset_ns, 7);
    CHECK_EQUAL(clocks.take(8, 100, kFirstNs + 2000).offset_ns, 8);
    CHECK_EQUAL(clocks.take(9, 2000, kFirstNs + 3000, true).offset_ns, 9);
    // None came.
    CHECK_EQUAL(clocks.take(10, kNoRoundTrip, kFirstNs + 4000, true).offset_ns, 9);
}

TEST(a_sample_that_contradicts_what_is_known_is_taken_without_a_drift) {
    // Soon after, when it is less exact; and after long, when it could tell a drift.
    for (const uint64_t after_ns : {uint64_t{1000}, kFirstNs}) {
        Clocks clocks;
        clocks.take(7, 200, kFirstNs);
        const ClockLine& clock = clocks.take(1'000'000'000, 2000, kFirstNs + after_ns);
        CHECK_EQUAL(clock.offset_ns, 1'000'000'000);
        CHECK_EQUAL(clock.drift, 0.0f);
        CHECK_EQUAL(clock.drift_error, kLargestDrift);
    }
}

TEST(a_drift_is_told_by_samples_far_apart_only) {
    Clocks near;
    near.take(7, 200, kFirstNs);
    const ClockLine& wild = near.take(107, 200, kFirstNs + 1000);
    CHECK_EQUAL(wild.drift, 0.0f);
    CHECK_EQUAL(wild.drift_error, kLargestDrift);

    Clocks far;
    far.take(0, 200, kFirstNs);
    const ClockLine& known = far.take(10'000, 200, 2 * kFirstNs);
    CHECK(std::abs(known.drift - 10e-6f) < 1e-9f);
    const float error = 2e-9f * (100 + kStepNs) + kDriftWander;
    CHECK(std::abs(known.drift_error - error) < 1e-9f);
}

// ---- exchanges of clocks

TEST(a_bounce_that_comes_after_the_one_that_is_awaited_is_no_answer) {
    simulate<OperatingRank>(nodes(2), [&](OperatingRank& self, int rank) {
        if (rank == kOther) return sleep(10 * kLateNs);
        const OperationArgs args = self.args(kHidden);
        constexpr uint64_t kFirst = 5;
        auto* slot = reinterpret_cast<ClockSlot*>(
            args.transport.local(args.control.clock_slot(ClockExchange::kOfOperation, kOther)));
        slot->places[0] = {kFirst + 2, 1, 100, 0};
        slot->places[1] = {kFirst + 1, 1, 100, 0};
        bool came = true;
        self.launch([&](const Transport&) {
            if (thread_index() == 0)
                came = exchange_stamps(
                    args, ClockExchange::kOfOperation, kOther, kFirst, 2, deadline_in(kLateNs));
        });
        CHECK(!came);
        CHECK_EQUAL(self.workspace->clock_samples[kOther].round_trip_ns, kNoRoundTrip);
    });
}

TEST(exchanges_of_operations_that_follow_each_other_have_numbers_of_their_own) {
    simulate<OperatingRank>(nodes(2), [&](OperatingRank& self, int rank) {
        const OperationArgs args = self.args(kHidden);
        for (uint64_t op = 1; op <= 4; ++op) {
            ClockSample& sample = self.workspace->clock_samples[1 - rank];
            sample.round_trip_ns = kNoRoundTrip;
            self.launch([&](const Transport&) {
                exchange_clocks(args, {op, 0, deadline_in(args.timeout_ns)});
            });
            CHECK_THAT(sample.round_trip_ns != kNoRoundTrip, "operation " + std::to_string(op));
        }
    });
}

// ---- numbers that others have given up

namespace {

// The others give a round up for which one rank does not come; all meet in the next one.
template <class Round>
void check_that_a_late_rank_joins(Round round) {
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        for (int missed = 0; missed < 2 && rank != kLate; ++missed) {
            self.launch([&](const Transport&) { round(self.args(kHidden, kLateNs)); });
            CHECK(take_failure(self) == FailureReason::kTimeout);
        }
        if (rank == kLate) sleep(4 * kLateNs);
        for (int i = 0; i < 2; ++i) {
            self.launch([&](const Transport&) { round(self.args(kHidden)); });
            CHECK(take_failure(self) == FailureReason::kNone);
        }
        CHECK_EQUAL(std::max(self.workspace->barriers, self.workspace->clock_rounds), uint64_t{4});
    });
}

}  // namespace

TEST(who_comes_late_to_barriers_joins_the_others_in_the_next_one) {
    check_that_a_late_rank_joins([](const OperationArgs& args) { barrier(args); });
}

TEST(who_comes_late_to_rounds_of_clocks_joins_the_others_in_the_next_one) {
    check_that_a_late_rank_joins([](const OperationArgs& args) { clock_offset({args, 2, 0}); });
}

// ---- the words of a source

// Wherever among its words the largest stands.
TEST(all_words_of_a_source_count) {
    constexpr int kNumWords = 37;  // more than the lanes of a source have under way at once
    constexpr uint64_t kEntered = 1'000'000;
    constexpr uint64_t kLast = 900;
    for (int largest = 0; largest < kNumWords; ++largest) {
        alone([&](OperatingRank& self) {
            OperationArgs args = self.args(kHidden);
            args.map.num_experts = kNumWords;
            Workspace& workspace = *self.workspace;
            workspace.header_sight[0] = Sight{100, true}.pack();
            for (int i = 0; i < kNumWords; ++i) {
                const bool is_largest = i == largest;
                workspace.issued_lo[i] = kEntered + (is_largest ? 500 : 50 + i);
                workspace.word_sight[i] = Sight{is_largest ? kLast : 200 + i, true}.pack();
                workspace.counts[i] = 1 + i;
            }
            SourceSights seen{};
            self.launch([&](const Transport&) {
                const SourceSights found = sights_of(args, 0, kEntered, 0, 1);
                if (thread_index() == 0) seen = found;
            });
            CHECK_EQUAL(seen.issued, kEntered + 500);
            CHECK_EQUAL(seen.last.at_ns, kLast);
            CHECK_EQUAL(seen.tokens, kNumWords * (kNumWords + 1) / 2);
        });
    }
}

// ---- the layout of a dispatch

namespace {

struct Counted {
    Counted(int num_ranks, int num_nodes, int num_experts, int num_tokens)
        : per_rank(num_ranks), per_node(num_nodes), per_expert(num_experts) {
        in_rank.assign(static_cast<size_t>(num_tokens) * num_ranks, 0);
    }
    bool operator==(const Counted&) const = default;

    std::vector<int32_t> per_rank;
    std::vector<int32_t> per_node;
    std::vector<int32_t> per_expert;
    std::vector<char> in_rank;  // [num_tokens, num_ranks]
};

// What `args` ask for, token by token.
Counted count_of(const DispatchLayoutArgs& args, int num_nodes) {
    Counted counted(args.num_ranks, num_nodes, args.num_experts, args.num_tokens);
    const int experts_per_rank = args.num_experts / args.num_ranks;
    for (int token = 0; token < args.num_tokens; ++token) {
        std::vector<bool> in_node(num_nodes);
        for (int k = 0; k < args.num_topk; ++k) {
            const auto expert = static_cast<int>(args.topk_idx[token * args.num_topk + k]);
            if (expert < 0 || expert >= args.num_experts) continue;
            ++counted.per_expert[expert];
            if (expert >= experts_per_rank * args.num_ranks) continue;
            const int rank = expert / experts_per_rank;
            char& is_in = counted.in_rank[token * args.num_ranks + rank];
            if (is_in == 0) ++counted.per_rank[rank];
            is_in = 1;
            const int node = rank / args.ranks_per_node;
            if (!in_node[node]) ++counted.per_node[node];
            in_node[node] = true;
        }
    }
    return counted;
}

}  // namespace

TEST(any_number_of_blocks_counts_the_same_layout) {
    struct Group {
        int num_ranks;
        int ranks_per_node;
        int num_experts;
    };
    // With experts of no rank, ranks without experts, a last node that is smaller, and more ranks than a part has.
    const std::vector<Group> groups = {
        {1, 1, 3}, {4, 2, 14}, {5, 2, 13}, {6, 3, 5}, {72, 8, 150}, {72, 72, 72}};
    ep::testing::Random random(ep::testing::seed());
    for (const Group& group : groups) {
        constexpr int kTokens = 70;
        constexpr int kTopk = 4;
        const int num_nodes = (group.num_ranks + group.ranks_per_node - 1) / group.ranks_per_node;
        std::vector<int64_t> topk_idx(kTokens * kTopk);
        for (int64_t& expert : topk_idx) expert = random.between(-1, group.num_experts);
        for (const int blocks : {1, 2, 3, group.num_ranks + num_nodes}) {
            // What tensors hold before does not matter.
            Counted got(group.num_ranks, num_nodes, group.num_experts, kTokens);
            for (auto* counts : {&got.per_rank, &got.per_node, &got.per_expert})
                std::fill(counts->begin(), counts->end(), 7);
            std::fill(got.in_rank.begin(), got.in_rank.end(), char{1});
            const DispatchLayoutArgs args{topk_idx.data(),
                                          kTokens,
                                          kTopk,
                                          group.num_experts,
                                          group.num_ranks,
                                          group.ranks_per_node,
                                          got.per_rank.data(),
                                          got.per_node.data(),
                                          got.per_expert.data(),
                                          reinterpret_cast<bool*>(got.in_rank.data())};
            ep::testing::launch({.blocks = blocks}, [&] { dispatch_layout(args); });
            CHECK(got == count_of(args, num_nodes));
        }
    }
}

// ---- rows that are copied and added up

namespace {

constexpr int kRowBytes = 3 * sizeof(Vector);
constexpr int kRowElements = kRowBytes / sizeof(bf16);

// Whole numbers, whose sums are exact.
bf16 number(int value) { return {static_cast<uint16_t>(float_to_bits(value) >> 16)}; }
float value_of(bf16 element) { return bits_to_float(uint32_t{element.bits} << 16); }

std::vector<bf16> random_rows(ep::testing::Random& random, int num_rows) {
    std::vector<bf16> rows(num_rows * kRowElements);
    for (bf16& element : rows) element = number(random.between(-3, 3));
    return rows;
}

// check(shape, random) with any number of blocks and warps, under the plain order and random ones.
template <class F>
void in_any_shape(F check) {
    ep::testing::under_schedules([&](ep::testing::Random& random) {
        for (const LaunchShape& shape : {LaunchShape{1, 32}, {1, 96}, {3, 64}})
            check(shape, random);
    });
}

}  // namespace

TEST(rows_come_to_all_of_their_slots_and_to_no_others) {
    in_any_shape([](LaunchShape shape, ep::testing::Random& random) {
        constexpr int kRows = 13;
        constexpr int kWidth = 3;
        constexpr int kOut = kRows * kWidth;
        const std::vector<bf16> x = random_rows(random, kRows);
        std::vector<int32_t> slots(kOut);
        for (int i = 0; i < kOut; ++i) slots[i] = i;
        for (int i = kOut - 1; i > 0; --i) std::swap(slots[i], slots[random.between(0, i)]);
        std::vector<bf16> expected((kOut + 1) * kRowElements, number(99));
        for (int i = 0; i < kOut; ++i) {
            if (random.between(0, 3) == 0) slots[i] = random.between(0, 1) == 0 ? -1 : kOut;
            if (slots[i] < 0 || slots[i] >= kOut) continue;
            std::copy_n(x.data() + i / kWidth * kRowElements,
                        kRowElements,
                        expected.data() + slots[i] * kRowElements);
        }
        std::vector<bf16> got(expected.size());
        CopyRowsArgs args{{reinterpret_cast<const std::byte*>(x.data()),
                           slots.data(),
                           kRows,
                           kWidth,
                           kRowBytes,
                           kOut,
                           reinterpret_cast<std::byte*>(got.data())},
                          0};
        const auto same = [](bf16 a, bf16 b) { return a.bits == b.bits; };
        for (const size_t piece : {size_t{0}, RowCopy::piece_bytes(kRowBytes)}) {
            args.row_piece_bytes = piece;
            shape.shared_bytes = RowCopy::kAlignment + shape.threads / kWarpSize * piece;
            std::fill(got.begin(), got.end(), number(99));
            ep::testing::launch(shape, [&] { copy_rows(args); });
            CHECK(std::equal(got.begin(), got.end(), expected.begin(), same));
        }
    });
}

TEST(rows_are_added_up_behind_their_biases) {
    in_any_shape([](LaunchShape shape, ep::testing::Random& random) {
        constexpr int kRows = 9;
        constexpr int kSums = 17;
        const int width = random.between(0, 70);  // more than lanes list at a time
        const std::vector<bf16> x = random_rows(random, kRows + 1);  // of which the last is none
        const std::vector<bf16> bias_0 = random_rows(random, kSums);
        const std::vector<bf16> bias_1 = random_rows(random, kSums);
        const int num_biases = random.between(0, 2);
        std::vector<int32_t> rows(kSums * width);
        for (int32_t& row : rows)
            row = random.between(0, 8) == 0 ? random.between(0, kRows) : -random.between(1, 2);
        std::vector<bf16> got(kSums * kRowElements, number(99));
        const SumRowsArgs args{x.data(),
                               rows.data(),
                               kRows,
                               kSums,
                               width,
                               kRowBytes,
                               num_biases > 0 ? bias_0.data() : nullptr,
                               num_biases > 1 ? bias_1.data() : nullptr,
                               got.data()};
        shape.shared_bytes = SumRowsShared::bytes(width, shape.threads / kWarpSize);
        ep::testing::launch(shape, [&] { sum_rows(args); });
        for (int i = 0; i < kSums; ++i) {
            for (int j = 0; j < kRowElements; ++j) {
                const int at = i * kRowElements + j;
                float sum = 0.0f;
                if (num_biases > 0) sum += value_of(bias_0[at]);
                if (num_biases > 1) sum += value_of(bias_1[at]);
                for (int k = 0; k < width; ++k) {
                    const int32_t row = rows[i * width + k];
                    if (row >= 0 && row < kRows) sum += value_of(x[row * kRowElements + j]);
                }
                CHECK_EQUAL(value_of(got[at]), sum);
            }
        }
    });
}

// ---- queues of several channels

namespace {

constexpr int kChannels = 3;

// What a normal operation needs of its arguments for looks at queues and marks.
struct Queues {
    explicit Queues(OperatingRank& self, Topology topology, int num_tokens = 0)
        : states(2 * (topology.num_ranks + topology.num_nodes) * kChannels),
          is_token_in_rank(new bool[static_cast<size_t>(num_tokens) * topology.num_ranks + 1]()) {
        args.common = self.args(kHidden);
        args.num_channels = kChannels;
        args.num_tokens = num_tokens;
        args.channel_tokens = TokenRange::size(kChannels, num_tokens);
        args.queues.topology = topology;
        args.words.topology = topology;
        args.words.begin = 0;
        args.queue_states = states.data();
        args.is_token_in_rank = is_token_in_rank.get();
    }
    NormalDispatchArgs args{};
    std::vector<QueueState> states;
    std::unique_ptr<bool[]> is_token_in_rank;
};

}  // namespace

TEST(of_several_channels_the_longest_time_counts_and_rows_are_added) {
    for (int longest = 0; longest < kChannels; ++longest) {
        alone([&](OperatingRank& self) {
            Queues queues(self, {1, 1});
            std::vector<std::byte> memory(queues.args.words.end());
            std::byte* const mine = memory.data();
            queues.args.common.transport.peers = &mine;
            QueuesSeen seen;
            self.launch([&](const Transport&) {
                if (thread_index() != 0) return;
                for (int channel = 0; channel < kChannels; ++channel) {
                    const Queue queue = nvl_queue(queues.args, 0, 0, channel);
                    const auto say = [&](NormalControlMap::Word word, uint64_t value) {
                        const size_t at = word_of(queues.args, queue, word, queue.here);
                        *reinterpret_cast<uint64_t*>(queues.args.common.transport.local(at)) =
                            value;
                    };
                    const uint64_t more = channel == longest ? 100 : 0;
                    QueueState& state = state_of(queues.args, queue, false);
                    state.moved = 2 + channel;
                    state.arrival_ns = 30 + more;
                    state.has_waited = channel == longest;
                    say(NormalControlMap::kIssuedNs, 20 + more);
                    say(NormalControlMap::kBlockedNs, 10 + more);
                    seen.add(queues.args, queue);
                }
            });
            CHECK_EQUAL(seen.blocked_ns, 110u);
            CHECK_EQUAL(seen.issued_ns, 120u);
            CHECK_EQUAL(seen.arrival_ns, 130u);
            CHECK_EQUAL(seen.tokens, 2 + 3 + 4);
            CHECK(seen.witnessed);
        });
    }
}

// The second rank of the node gets tokens 1, 2 and 5; channels end behind tokens 2 and 5.
TEST(the_last_row_of_a_rank_is_marked_in_each_channel) {
    constexpr int kTokens = 9;
    constexpr std::array kIsFor = {false, true, true, false, false, true, false, false, false};
    alone([&](OperatingRank& self) {
        Queues queues(self, {2, 2}, kTokens);
        for (int token = 0; token < kTokens; ++token) {
            queues.is_token_in_rank[2 * token] = true;
            queues.is_token_in_rank[2 * token + 1] = kIsFor[token];
        }
        for (int token = 0; token < kTokens; ++token) {
            RelayMark mark{};
            self.launch([&](const Transport&) {
                if (thread_index() == 0)
                    mark = mark_of(queues.args, {1, 0, {}}, 0, token / 3, token);
            });
            CHECK_EQUAL(mark.local_ranks, uint64_t{kIsFor[token] ? 3u : 1u});
            const uint64_t last_of = (token % 3 == 2 ? 1 : 0) | (token == 2 || token == 5 ? 2 : 0);
            CHECK_THAT(mark.last_of == last_of, "token " + std::to_string(token));
        }
    });
}

// ---- whom waiting tasks name

namespace {

// Tasks that cannot go on, each for a rank of its own.
struct BlockedTasks {
    static inline std::array<int, 3> looks_for_surplus{};
    static constexpr std::array kBlockers = {1, 2, 4};
    struct {
        EP_DEVICE void finish() const {}
    } copy;
    EP_DEVICE int count() const { return kBlockers.size(); }
    EP_DEVICE Task task(int number) const { return {0, number, 0, 0}; }
    EP_DEVICE bool is_done(Task) const { return false; }
    EP_DEVICE int movable(Task) const { return 0; }
    EP_DEVICE int prepare(Task, int) const { return 0; }
    EP_DEVICE Blocker blocked_by(Task task) const { return {kBlockers[task.node], Owed::kRows}; }
    EP_DEVICE void move(Task, int, const Team&) const {}
    EP_DEVICE void tell(Task, int) const {}
    EP_DEVICE void find_surplus(Task task) const { ++looks_for_surplus[task.node]; }
};

constexpr int kGroup = 5;
constexpr uint64_t kLongNs = 10'000'000'000;

// kernel(args, open, tasks, share, shared) on rank 0; nothing comes from the others.
template <class Tasks, class F>
void launch_tasks(OperatingRank& self, RecordedWaits* waits, F kernel) {
    NormalArgs args{};
    args.common = self.args(kHidden, kLongNs);
    args.common.record.waits = waits;
    self.launch(
        [&](const Transport&) {
            const Tasks tasks{};
            const Share share{0, tasks.count(), Team::of_block(0, 1)};
            const TaskShared shared(share.team, tasks.count());
            kernel(args, OpenOperation{1, 1, deadline_in(kLongNs)}, tasks, share, shared);
        },
        {.blocks = 1,
         .threads = kWarpSize,
         .shared_bytes = 64 + TaskShared::bytes(Tasks{}.count(), 1),
         .cooperative = true});
}

constexpr auto kRunTasks =
    [](auto& args, const auto& open, auto& tasks, auto& share, auto& shared) {
        run_tasks(args, open, tasks, share, shared);
    };

// The ranks that tasks which wait are found to miss; `gone` is one of which the host knows that it will not come.
std::vector<int> named(int gone) {
    std::vector<int> result;
    simulate<OperatingRank>(nodes(kGroup), [&](OperatingRank& self, int rank) {
        if (rank != 0) return sleep(2 * kLongNs);
        self.workspace->news.any = gone >= 0;
        if (gone >= 0) self.workspace->news.gone[gone] = 1;
        const uint64_t begin = now();
        launch_tasks<BlockedTasks>(self, nullptr, kRunTasks);
        CHECK((now() - begin < kLongNs) == (gone >= 0));
        for (int other = 0; other < kGroup; ++other) {
            if (self.failure->ranks[other] != 0) result.push_back(other);
        }
    });
    return result;
}

}  // namespace

TEST(all_ranks_that_tasks_wait_for_are_named) { CHECK(named(-1) == (std::vector{1, 2, 4})); }

TEST(who_waits_in_vain_looks_once_for_rows_that_are_too_many) {
    BlockedTasks::looks_for_surplus = {};
    named(-1);
    CHECK(BlockedTasks::looks_for_surplus == (std::array{1, 1, 1}));
}

TEST(all_ranks_that_tasks_wait_for_are_noted) {
    alone([&](OperatingRank& self) {
        RecordedWaits waits{};
        launch_tasks<BlockedTasks>(
            self, &waits, [](auto& args, const auto& open, auto& tasks, auto& share, auto& shared) {
                if (!share.team.leads()) return;
                TaskSearch<BlockedTasks> search{args, open, tasks, shared};
                search.begin(share);
                search.note();
            });
        for (const int rank : BlockedTasks::kBlockers) {
            const uint64_t note = waits.noted[static_cast<int>(Owed::kRows)][rank];
            CHECK(WaitNote::unpack(note).is_of(Series::kOperations, 1));
        }
    });
}

TEST(a_rank_that_is_gone_ends_the_wait_of_tasks_whichever_waits_for_it) {
    for (const int gone : BlockedTasks::kBlockers) CHECK(named(gone) == std::vector{gone});
}

// ---- in which order a team moves rows

namespace {

// Tasks of one or two steps each, more than lanes. One can go on when `ready_after()` steps are done.
struct OrderedTasks {
    static constexpr int kTasks = 70;
    static int ready_after(int task) { return task % 3 == 0 ? 0 : task * 31 % 60; }
    static inline std::array<int, kTasks> left{};
    static inline std::vector<int> moved;
    struct {
        EP_DEVICE void finish() const {}
    } copy;
    EP_DEVICE int count() const { return kTasks; }
    EP_DEVICE Task task(int number) const { return {0, number, 0, 0}; }
    EP_DEVICE bool is_done(Task task) const { return left[task.node] == 0; }
    EP_DEVICE int movable(Task task) const {
        return static_cast<int>(moved.size()) >= ready_after(task.node) ? left[task.node] : 0;
    }
    EP_DEVICE int prepare(Task, int) const { return 1; }
    EP_DEVICE Blocker blocked_by(Task) const { return {0, Owed::kRows}; }
    EP_DEVICE void move(Task, int, const Team&) const {}
    EP_DEVICE void tell(Task task, int) const {
        if (!elect_one()) return;
        moved.push_back(task.node);
        --left[task.node];
    }
    EP_DEVICE void find_surplus(Task) const {}
};

}  // namespace

TEST(a_team_moves_the_first_of_its_tasks_that_can_go_on) {
    std::vector<int> left(OrderedTasks::kTasks);
    for (int task = 0; task < OrderedTasks::kTasks; ++task) left[task] = 1 + task % 2;
    std::copy(left.begin(), left.end(), OrderedTasks::left.begin());
    OrderedTasks::moved.clear();
    alone([&](OperatingRank& self) { launch_tasks<OrderedTasks>(self, nullptr, kRunTasks); });
    std::vector<int> expected;
    for (int task = 0; task < OrderedTasks::kTasks; ++task) {
        const bool can_go_on =
            left[task] > 0 && static_cast<int>(expected.size()) >= OrderedTasks::ready_after(task);
        if (!can_go_on) continue;
        --left[task];
        expected.push_back(task);
        task = -1;
    }
    CHECK(std::all_of(left.begin(), left.end(), [](int steps) { return steps == 0; }));
    CHECK(OrderedTasks::moved == expected);
}

// ---- masks

TEST(an_operation_that_failed_masks_nobody) {
    for (const bool succeeded : {false, true}) {
        alone([&](OperatingRank& self) {
            Masks masks{};
            MaskRecord record{};
            masks.record = &record;
            OperationArgs args = self.args(kHidden);
            args.masks = &masks;
            args.phases = kPhaseSend | kPhaseReceive;
            self.launch([&](const Transport&) {
                if (thread_index() == 0) leave_out(args, 0);
                mask_left_out(args, {1, 1, {}}, succeeded);
            });
            CHECK_EQUAL(masks.masked[0], succeeded ? 1 : 0);
            CHECK_EQUAL(record.any, succeeded ? 1u : 0u);
            CHECK_EQUAL(masks.left_out[0], 0u);
        });
    }
}

TEST(who_cleans_its_masks_waits_until_its_rows_are_delivered) {
    constexpr int kSender = 0;
    constexpr int kReceiver = 1;
    constexpr int kQueuePair = OperatingRank::kExpertsPerRank - 1;
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        Masks masks{};
        OperationArgs args = self.args(kHidden);
        args.masks = &masks;
        args.phases = kPhaseSend | kPhaseReceive;
        self.workspace->num_queue_pairs = OperatingRank::kExpertsPerRank;
        if (rank != kSender) return sleep(4 * kLateNs);
        const size_t row = args.map.begin;
        *self.words(row + 1024) = 42;
        self.memory.set_path_fault(kReceiver, kLateNs, 0.0);
        self.launch([&](const Transport& transport) {
            transport.put_warp(
                kReceiver, row, transport.local(row + 1024), sizeof(Vector), kQueuePair);
        });
        self.memory.set_path_fault(kReceiver, 0, 0.0);
        self.launch([&](const Transport&) { clean_masks(args); });
        CHECK_EQUAL(*reinterpret_cast<const uint64_t*>(args.transport.peers[kReceiver] + row), 42u);
    });
}

// ---- notes of waits

TEST(a_note_of_another_wait_says_nothing_of_this_one) {
    const WaitNote one = WaitNote::unpack(WaitNote{1, 5, 7}.pack());
    const auto series = static_cast<Series>(1);
    CHECK(one.is_of(series, 5));
    CHECK(!one.is_of(series, 6));
    CHECK(!one.is_of(static_cast<Series>(2), 5));
    CHECK(!(WaitNote{1, 5, 0}.is_of(series, 5)));

    Device device(0, "rank");
    CallLog calls;
    calls.open(device, 4);
    const auto note = [](uint64_t number, uint64_t waited) {
        return WaitNote{static_cast<uint64_t>(Series::kOperations), number, waited}.pack();
    };
    const auto enter = [&](uint64_t number) {
        const Record record = calls.add({}, 0, {}, false, false);
        record.entry->number = number;
        record.entry->entered_ns = number;
        return record;
    };
    const Record ended = enter(1);
    uint64_t* noted = ended.waits->noted[0];
    for (const int rank : {1, 2}) noted[rank] = note(1, 300);
    ended.entry->finished_ns = 1;
    enter(2);
    CHECK_EQUAL(calls.waits(4).number, 0u);  // it has not waited for long
    const auto check = [&](int missing, uint64_t waited) {
        const WaitsNow now = calls.waits(4);
        CHECK_EQUAL(now.number, 2u);
        CHECK(now.missing[0] == std::vector{missing});
        CHECK_EQUAL(now.waited_s, static_cast<double>(waited * WaitNote::kUnitNs) * 1e-9);
    };
    noted[3] = note(2, 20);
    check(3, 20);
    noted[2] = note(2, 20'000);  // rank 3 has come since
    check(2, 20'000);
    calls.close(device);
}
