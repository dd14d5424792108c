// How an operation opens, hands over and closes, and how ranks exchange clocks: kernels/protocol/operation.cuh,
// hand_over.cuh and clocks.cuh by themselves, in a simulation, so that what must wait for something is
// seen to do so, whatever comes late.
// sanitize: address
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/protocol/clock_offset.cuh"
#include "kernels/protocol/operation.cuh"
#include "ranks.h"

using namespace ep;
using ep::testing::OperatingRank;
using ep::testing::simulate;

namespace {

constexpr int kRanks = 3;
constexpr int kLate = 2;
constexpr int kHidden = 128;
constexpr uint64_t kLateNs = 5'000'000;  // longer than all that is not late
constexpr int kLastQueuePair = OperatingRank::kExpertsPerRank - 1;

host::SimulationOptions nodes(int num_ranks, uint64_t seed = 1) {
    host::SimulationOptions options;
    options.num_ranks = num_ranks;
    options.seed = seed;
    options.end_ns = 600'000'000'000;
    return options;
}

uint64_t now() { return host::Simulation::seat()->simulation().now_ns(); }
void sleep(uint64_t ns) { host::Simulation::seat()->sleep_until(now() + ns); }

// The blocks of an operation that opens, with what they make of it.
struct Opened {
    std::array<int, 4> may_send{};
    uint64_t at_ns = 0;  // when block 0 knew
};

// kernel() follows where blocks may send.
template <class F>
Opened open_operation(OperatingRank& self, const OperationArgs& args, int blocks, F kernel) {
    Opened opened;
    self.launch(
        [&](const Transport&) {
            const OpenOperation open = current_operation(args);
            send_headers(args, open);
            const bool may_send = hand_over(args, open);
            if (thread_index() == 0) opened.may_send[block_index()] = may_send;
            if (block_index() == 0 && thread_index() == 0) opened.at_ns = now();
            if (may_send) kernel();
        },
        {.blocks = blocks, .threads = kWarpSize, .cooperative = true});
    return opened;
}
Opened open_operation(OperatingRank& self, const OperationArgs& args, int blocks = 1) {
    return open_operation(self, args, blocks, [] {});
}

// As the last operation of other sizes leaves it.
void use_other_sizes(OperatingRank& self) {
    self.workspace->layout = self.args(2 * kHidden).layout;
}

// An operation without rows until all have come; `fails`: on this rank alone, and after the others.
void finish_operation(OperatingRank& self, const OperationArgs& args, bool fails = false) {
    const LaunchShape shape{1, kWarpSize, 64, true};
    self.launch(
        [&](const Transport&) {
            const OpenOperation open = current_operation(args);
            await_all(
                args,
                open,
                open.op,
                [&](int s) { return args.control.header(open.half, s) + offsetof(OpHeader, op); },
                [](int) { return true; });
        },
        shape);
    if (fails) sleep(kLateNs);
    self.launch(
        [&](const Transport&) {
            const OpenOperation open = current_operation(args);
            if (fails && thread_index() == 0)
                record_failure(args, open, FailureReason::kCorrupt, args.rank());
            close_low_latency(args, open, [](int source) { return source; }, kRanks);
        },
        shape);
}

}  // namespace

// ---- announcements

TEST(words_are_announced_once_and_by_all_blocks_and_warps_alike) {
    constexpr int kBlocks = 5;
    constexpr int kWarps = 2;
    constexpr int kThreads = kBlocks * kWarps * kWarpSize;
    for (const int num_words : {22, kThreads + 22}) {
        std::vector<int> times(num_words);
        std::array<int, kBlocks> of_block{};
        std::array<int, kBlocks * kWarps> of_warp{};
        simulate<OperatingRank>(nodes(1), [&](OperatingRank& self, int) {
            self.launch(
                [&](const Transport&) {
                    for_each_announced(num_words, [&](int word) {
                        ++times[word];
                        ++of_block[block_index()];
                        ++of_warp[block_index() * kWarps + warp_id()];
                    });
                },
                {.blocks = kBlocks, .threads = kWarps * kWarpSize});
        });
        for (const int count : times) CHECK_EQUAL(count, 1);
        for (const int words : of_block)
            CHECK(words == num_words / kBlocks || words == num_words / kBlocks + 1);
        CHECK(of_block[0] <= of_block[kBlocks - 1]);
        for (const int words : of_warp) {
            const int share = num_words / (kBlocks * kWarps);
            CHECK(words == share || words == share + 1);
        }
    }
}

// ---- hand-over

TEST(no_rank_sends_in_a_new_layout_while_old_rows_are_on_their_way) {
    constexpr int kSender = 0;
    constexpr int kReceiver = 1;
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        const OperationArgs args = self.args(kHidden);
        const size_t row = args.map.begin;
        const size_t source = row + 1024;
        if (rank == kSender) {
            *self.words(source) = 42;
            self.memory.set_path_fault(kReceiver, kLateNs, 0.0);
            self.launch([&](const Transport& transport) {
                transport.put_warp(
                    kReceiver, row, transport.local(source), sizeof(Vector), kLastQueuePair);
            });
            self.memory.set_path_fault(kReceiver, 0, 0.0);
        }
        use_other_sizes(self);
        uint64_t arrived = 0;
        const Opened opened = open_operation(self, args, 1, [&] {
            arrived = *reinterpret_cast<const uint64_t*>(args.transport.peers[kReceiver] + row);
        });
        CHECK(opened.may_send[0]);
        CHECK_EQUAL(arrived, 42u);
    });
}

TEST(no_rank_sends_in_a_new_layout_before_all_have_come) {
    uint64_t came_ns = 0;
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        if (rank == kLate) {
            sleep(kLateNs);
            came_ns = now();
        }
        use_other_sizes(self);
        const Opened opened = open_operation(self, self.args(kHidden));
        CHECK(opened.may_send[0]);
        CHECK(came_ns != 0 && opened.at_ns > came_ns);
    });
}

TEST(no_block_sends_when_a_rank_does_not_come_to_a_hand_over) {
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        if (rank == kLate) return;
        use_other_sizes(self);
        const Opened opened = open_operation(self, self.args(kHidden, kLateNs), 3);
        CHECK(opened.may_send == (std::array<int, 4>{}));
        CHECK_EQUAL(self.failure->reason, static_cast<uint32_t>(FailureReason::kTimeout));
        CHECK_EQUAL(self.failure->ranks[kLate], 1u);
    });
}

TEST(no_block_sends_when_a_rank_hands_over_to_another_layout) {
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        use_other_sizes(self);
        const int hidden = rank == kLate ? 3 * kHidden : kHidden;
        const Opened opened = open_operation(self, self.args(hidden), 3);
        CHECK(opened.may_send == (std::array<int, 4>{}));
        CHECK_EQUAL(self.failure->reason, static_cast<uint32_t>(FailureReason::kMismatch));
    });
}

// A rank fails alone, hands over alone in the next operation, and in the one after that all do: only
// then nothing of the failed one can be on its way. After it nobody waits any longer.
TEST(all_follow_a_rank_that_handed_over_alone) {
    constexpr uint64_t kNumOperations = 4;
    std::array<uint64_t, kNumOperations + 1> came_ns{};
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        const OperationArgs args = self.args(kHidden);
        for (uint64_t op = 1; op <= kNumOperations; ++op) {
            if (rank == kLate) {
                sleep(kLateNs);
                came_ns[op] = now();
            }
            const Opened opened = open_operation(self, args);
            CHECK(opened.may_send[0]);
            if (rank != kLate)
                CHECK_THAT((came_ns[op] != 0) == (op == 3), "operation " + std::to_string(op));
            finish_operation(self, args, rank == kLate && op == 1);
            CHECK_EQUAL(self.workspace->op, op);
        }
    });
}

// The others have given up what it did not call: it begins behind that, and nobody sends before all have come.
TEST(who_leaves_calls_out_hands_over) {
    constexpr uint64_t kGivenUp = 5;
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        const uint64_t begin_ns = now();
        OperationArgs args = self.args(kHidden);
        self.workspace->layout = args.layout;
        self.workspace->op = kGivenUp;
        if (rank == kLate) {
            self.workspace->op = 2;
            args.given_up = kGivenUp;
        } else {
            sleep(kLateNs * (1 + static_cast<uint64_t>(rank)));
        }
        const Opened opened = open_operation(self, args, 3);
        CHECK(opened.may_send == (std::array<int, 4>{1, 1, 1, 0}));
        CHECK_EQUAL(self.workspace->open_op, kGivenUp + 1);
        if (rank == kLate) CHECK(opened.at_ns >= begin_ns + kLateNs * kLate);
        finish_operation(self, args);
        CHECK_EQUAL(self.workspace->op, kGivenUp + 1);
        CHECK_EQUAL(self.workspace->num_given_up, 0u);
    });
}

// ---- close

TEST(who_leaves_calls_out_gives_them_up) {
    constexpr uint64_t kGivenUp = 5;
    simulate<OperatingRank>(nodes(kRanks), [&](OperatingRank& self, int rank) {
        OperationArgs args = self.args(kHidden);
        self.workspace->op = rank == kLate ? 2 : kGivenUp;
        args.given_up = rank == kLate ? kGivenUp : 0;
        open_operation(self, args);
        finish_operation(self, args, rank == kLate);
        if (rank == kLate) return;
        sleep(2 * kLateNs);
        const GivenUp told = GivenUp::unpack(
            args.transport.newest(args.control.given_up(Series::kOperations, kLate)));
        for (uint64_t op = 1; op <= kGivenUp + 2; ++op)
            CHECK_EQUAL(told.contains(op), op > 2 && op <= kGivenUp + 1);
    });
}

// Of two blocks; whichever of them is the last to come, the other one's warp is waited for as well.
TEST(an_operation_closes_only_when_all_warps_have_copied) {
    for (const int copying : {0, 1}) {
        simulate<OperatingRank>(nodes(1), [&](OperatingRank& self, int) {
            const OperationArgs args = self.args(kHidden);
            uint64_t closed = 0;
            self.launch(
                [&](const Transport&) {
                    const OpenOperation open = current_operation(args);
                    send_headers(args, open);
                    if (block_index() == copying && warp_id() == 1) {
                        CHECK(!spin_until([] { return false; }, deadline_in(kLateNs)));
                        if (elect_one()) closed = load_relaxed<Scope::kSystem>(&args.workspace->op);
                    }
                    close_low_latency(args, open, [](int source) { return source; }, 1);
                },
                {.blocks = 2, .threads = 2 * kWarpSize, .shared_bytes = 64, .cooperative = true});
            CHECK_EQUAL(closed, 0u);
            CHECK_EQUAL(self.workspace->op, 1u);
        });
    }
}

// Blocks that leave afterwards count as those that wait do.
TEST(all_has_been_sent_once_every_warp_of_every_block_has) {
    for (int late = 0; late < 4; ++late) {
        simulate<OperatingRank>(nodes(1), [&](OperatingRank& self, int) {
            OperationArgs args = self.args(kHidden);
            RecordedEntry entries[2]{};
            for (RecordedEntry& entry : entries) {
                args.record.entry = &entry;
                uint64_t begin_ns = 0;
                self.launch(
                    [&](const Transport&) {
                        if (block_index() == 0 && thread_index() == 0) begin_ns = now_ns();
                        if (2 * block_index() + warp_id() == late) {
                            CHECK(!spin_until([] { return false; }, deadline_in(kLateNs)));
                            CHECK_EQUAL(entry.sent_ns, 0u);
                        }
                        record_sent(args);
                    },
                    {.blocks = 2, .threads = 2 * kWarpSize, .cooperative = true});
                CHECK(entry.sent_ns >= begin_ns + kLateNs);
            }
        });
    }
}

TEST(a_count_of_more_rows_than_a_rank_may_send_is_refused) {
    for (const uint32_t count : {0u, 1u, 2u, 0xFFFEu}) {
        simulate<OperatingRank>(nodes(1), [&](OperatingRank& self, int) {
            const OperationArgs args = self.args(kHidden);
            CHECK_EQUAL(args.map.num_max_tokens, 1);
            const LaunchShape shape{1, kWarpSize, WaitShared::bytes(2, kWarpSize), true};
            self.launch(
                [&](const Transport& transport) {
                    const OpenOperation open = current_operation(args);
                    send_headers(args, open);
                    const CountWord word{CountWord::tag_of(open.op), count, 0};
                    if (thread_index() == 0)
                        transport.signal(0, args.control.count(open.half, 0), word.pack(), 0);
                    const WaitShared wait(SharedArena{}, 2);
                    const auto zero = [](int) { return 0; };
                    const bool came = wait_for_words(args, open, wait, 1, zero, zero);
                    CHECK_EQUAL(came, count <= 1);
                },
                shape);
            CHECK_EQUAL(self.workspace->counts[0], count <= 1 ? count : 0);
            CHECK_EQUAL(
                self.failure->reason,
                static_cast<uint32_t>(count <= 1 ? FailureReason::kNone : FailureReason::kSurplus));
        });
    }
}

// ---- clocks

TEST(the_first_exchange_of_clocks_is_right_in_any_order_of_delivery) {
    constexpr std::array<int64_t, 2> kOffsets = {0, 5'000'000'000};
    constexpr int kSamples = 4;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        simulate<OperatingRank>(nodes(2, seed), [&](OperatingRank& self, int rank) {
            const int other = 1 - rank;
            self.device.set_clock_fault(kOffsets[rank], 0);
            const ClockOffsetArgs args{self.args(kHidden), kSamples, 0};
            self.launch([&](const Transport&) { clock_offset(args); });
            const ClockLine& clock = self.workspace->clocks[other];
            const int64_t error = std::abs(clock.offset_ns - (kOffsets[other] - kOffsets[rank]));
            CHECK_THAT(error <= clock.round_trip_ns,
                       std::to_string(error) + " ns off, round trip " +
                           std::to_string(clock.round_trip_ns));
        });
    }
}
