// Normal operations in a simulation: rows between nodes are read when they arrive, as a NIC does, so what is
// staged must stay as it is until then. Waiting costs nothing, and a seed repeats.
// Not under ThreadSanitizer; see test_simulation.cpp.
// sanitize: address:-DEP_NUMBERS_OF_GPU
#include <algorithm>
#include <vector>

#include "kernels/normal/notify.cuh"
#include "normal_exchange.h"
#include "ranks.h"
#include "runtime/runtime.h"
#include "testing.h"

using namespace ep;
using namespace ep::testing;

namespace {

constexpr int kNumSimulations = EP_UNDER_ASAN ? 5 : 40;

template <const Shape& kShape>
struct SimulatedRank {
    SimulatedRank(int rank, int)
        : runtime(options_of(kShape, rank, kPatienceNs)), memory(runtime.memory()) {}
    static constexpr uint64_t kPatienceNs = 10'000'000'000;

    Runtime runtime;
    SymmetricMemory& memory;
};

host::SimulationOptions simulation_of(const Shape& shape, uint64_t seed) {
    host::SimulationOptions options;
    options.num_ranks = shape.num_ranks();
    options.ranks_per_node = shape.ranks_per_node;
    options.seed = seed;
    if (seed % 2 == 0) options.longest_delivery_ns *= 10;
    return options;
}

template <const Shape& kShape>
void exchange_simulated() {
    Random random(ep::testing::seed());
    for (int i = 0; i < kNumSimulations; ++i) {
        std::vector<Round> rounds;
        for (int round = 0; round < 2; ++round)
            rounds.push_back(random_round(kShape, random_setting(kShape, random), random));
        const int blocks = random.between(1, 3);
        simulate<SimulatedRank<kShape>>(simulation_of(kShape, random.bits()),
                                        [&](SimulatedRank<kShape>& self, int rank) {
                                            self.runtime.set_launch_shape(blocks, 2);
                                            for (const Round& round : rounds)
                                                Exchange(self.runtime, rank, kShape, round).run();
                                        });
    }
}

}  // namespace

TEST(two_simulated_nodes_equal_the_reference) { exchange_simulated<kTwoNodes>(); }
TEST(a_simulated_node_per_rank_equals_the_reference) { exchange_simulated<kNodePerRank>(); }

// A rank that has nothing to wait for goes on while others still wait for notices.
TEST(dispatches_may_follow_each_other) {
    Random random(ep::testing::seed());
    for (int i = 0; i < kNumSimulations; ++i) {
        const Setting setting = random_setting(kTwoNodes, random);
        std::vector<Round> rounds;
        for (int j = 0; j < 12; ++j) {
            rounds.push_back(random_round(kTwoNodes, setting, random));
            rounds.back().combines = false;
            rounds.back().again = false;
            const int first = std::max(0, random.between(-6, kTwoNodes.num_ranks()));
            for (int rank = first; rank < kTwoNodes.num_ranks(); ++rank) {
                Inputs& inputs = rounds.back().inputs[rank];
                std::fill(inputs.topk_idx.begin(), inputs.topk_idx.end(), -1);
                lay_out(kTwoNodes, inputs);
            }
        }
        auto options = simulation_of(kTwoNodes, random.bits());
        options.longest_delivery_ns = 2'000'000;
        simulate<SimulatedRank<kTwoNodes>>(options, [&](SimulatedRank<kTwoNodes>& self, int rank) {
            for (const Round& round : rounds) Exchange(self.runtime, rank, kTwoNodes, round).run();
        });
    }
}

TEST(a_missing_rank_is_named_and_the_group_works_on) {
    Random random(ep::testing::seed());
    const Round round = random_round(kTwoNodes, random_setting(kTwoNodes, random), random);
    const Round after = random_round(kTwoNodes, random_setting(kTwoNodes, random), random);
    simulate<SimulatedRank<kTwoNodes>>(
        simulation_of(kTwoNodes, random.bits()), [&](SimulatedRank<kTwoNodes>& self, int rank) {
            host::Seat& seat = *host::Simulation::seat();
            const uint64_t late_ns = 2 * SimulatedRank<kTwoNodes>::kPatienceNs;
            const uint64_t next_ns = seat.simulation().now_ns() + late_ns;
            if (rank == 1) seat.sleep_until(next_ns);
            Exchange exchange(self.runtime, rank, kTwoNodes, round);
            CHECK(!exchange.notify(exchange.mine.num_tokens_per_rank));
            exchange.abandon();
            if (rank == 1) {
                check_failure(self.runtime.take_failure(), FailureReason::kAbandoned, {0, 2, 3});
            } else {
                check_failure(self.runtime.take_failure(), FailureReason::kTimeout, {1});
                seat.sleep_until(next_ns);
            }
            Exchange(self.runtime, rank, kTwoNodes, after).run();
        });
}

// ---- handles that say something else

namespace {

// What a cached dispatch receives, between rows that it must leave alone.
struct Fenced {
    explicit Fenced(const Exchange& exchange)
        : num_rows(exchange.handle.num_rows), received(exchange.shape, num_rows + 2 * kFence) {}
    static constexpr int kFence = 8;

    NormalDispatchCall call(Exchange& exchange) {
        const Shape& shape = exchange.shape;
        auto call = exchange.dispatch_call(1, received);
        call.recv_x += static_cast<size_t>(kFence) * shape.row_bytes();
        call.recv_scales += static_cast<size_t>(kFence) * shape.num_scales;
        return call;
    }
    void check(const Shape& shape) const {
        const auto is_fence = [&](size_t row) {
            return row < kFence || row >= static_cast<size_t>(num_rows + kFence);
        };
        for (size_t i = 0; i < received.x.size(); ++i)
            CHECK(!is_fence(i / shape.hidden) || received.x[i].bits == 0);
        for (size_t i = 0; i < received.scales.size(); ++i)
            CHECK(!is_fence(i / shape.num_scales) || received.scales[i] == 0);
    }

    int num_rows;
    Received received;
};

Round everything_again(const Setting& setting) {
    Inputs inputs = everything_to_all(kTwoNodes);
    for (auto& x : inputs.x) std::fill(x.begin(), x.end(), to_bf16(1.0f));
    for (auto& scales : inputs.scales) std::fill(scales.begin(), scales.end(), 1u);
    return {setting, std::vector(kTwoNodes.num_ranks(), inputs), false, true, 1, false};
}

}  // namespace

// With slots for all rows, so that nobody waits for one before those that are too many have come.
TEST(more_rows_than_the_handle_says_are_refused_and_written_nowhere) {
    Random random(ep::testing::seed());
    const Setting setting{3, 2, 3 * kTwoNodes.num_nodes, 2, 3};
    for (int i = 0; i < kNumSimulations; ++i) {
        const Round round = everything_again(setting);
        const int liar = random.between(0, kTwoNodes.num_ranks() - 1);
        const int source = random.between(0, kTwoNodes.num_ranks() - 1);
        const int channel = random.between(1, setting.num_channels - 1);
        const int change = random.between(0, 1) == 0 ? 1 : -1;
        const auto options = simulation_of(kTwoNodes, random.bits());
        simulate<SimulatedRank<kTwoNodes>>(options, [&](SimulatedRank<kTwoNodes>& self, int rank) {
            Exchange exchange(self.runtime, rank, kTwoNodes, round);
            exchange.run();
            auto& prefix = exchange.handle.recv_channel_prefix;
            if (rank == liar) prefix[source * setting.num_channels + channel] += change;
            Fenced fenced(exchange);
            self.runtime.normal_dispatch(fenced.call(exchange));
            fenced.check(kTwoNodes);
            const auto failure = self.runtime.take_failure();
            if (rank == liar) {
                const int node = kTwoNodes.node_of(source);
                const int gateway = kTwoNodes.node_of(rank) * kTwoNodes.ranks_per_node +
                                    source % kTwoNodes.ranks_per_node;
                const bool is_near = node == kTwoNodes.node_of(rank);
                check_failure(failure, FailureReason::kSurplus, {is_near ? source : gateway});
            }
            Exchange(self.runtime, rank, kTwoNodes, round).run();
        });
    }
}

// Any number of it, and any value.
TEST(whatever_a_handle_says_nothing_else_is_written) {
    Random random(ep::testing::seed());
    for (int i = 0; i < 4 * kNumSimulations; ++i) {
        const Round round = everything_again(random_setting(kTwoNodes, random));
        const int liar = random.between(0, kTwoNodes.num_ranks() - 1);
        const int which = random.between(0, 7);
        const uint64_t place = random.bits();
        const int32_t change =
            random.between(0, 1) == 0 ? random.between(-3, 3) : static_cast<int32_t>(random.bits());
        const bool combines = random.between(0, 1) == 0;
        const auto options = simulation_of(kTwoNodes, random.bits());
        simulate<SimulatedRank<kTwoNodes>>(options, [&](SimulatedRank<kTwoNodes>& self, int rank) {
            Exchange exchange(self.runtime, rank, kTwoNodes, round);
            exchange.run();
            Handle& handle = exchange.handle;
            std::vector<int32_t>* const tensors[] = {&handle.source_prefix,
                                                     &handle.channel_prefix,
                                                     &handle.recv_channel_prefix,
                                                     &handle.node_channel_prefix,
                                                     &handle.recv_node_channel_prefix,
                                                     &handle.recv_node_prefix,
                                                     &handle.node_head,
                                                     &handle.nvl_head};
            std::vector<int32_t>& tensor = *tensors[which];
            int32_t& value = tensor[place % tensor.size()];
            if (rank == liar)
                value = static_cast<int32_t>(static_cast<uint32_t>(value) +
                                             static_cast<uint32_t>(change));
            if (combines) {
                exchange.combine(1);
            } else {
                Fenced fenced(exchange);
                self.runtime.normal_dispatch(fenced.call(exchange));
                fenced.check(kTwoNodes);
            }
            self.runtime.take_failure();
            // Who had nothing to wait for has not seen it fail.
            Exchange(self.runtime, rank, kTwoNodes, round).run();
        });
    }
}

namespace {

// A rank of two nodes, the only one that runs, with the notices of all four.
struct NoticedRank : Rank {
    NoticedRank(int rank, int num_ranks)
        : Rank(rank, num_ranks, ControlMap{kTwoNodes.num_ranks()}.bytes()) {}
    static constexpr int kChannels = 2;

    NotifyArgs args() {
        const Topology topology = kTwoNodes.topology();
        const ControlMap control{topology.num_ranks};
        NotifyArgs args{};
        args.common.transport = memory.transport();
        args.common.workspace = workspace.get();
        args.common.failure = failure.get();
        args.common.control = control;
        args.num_channels = kChannels;
        args.num_experts = kTwoNodes.num_experts();
        args.queues.topology = topology;
        args.words = {topology, control.bytes()};
        args.source_prefix = handle.source_prefix.data();
        args.source_stride = 1;
        args.recv_channel_prefix = handle.recv_channel_prefix.data();
        args.recv_node_channel_prefix = handle.recv_node_channel_prefix.data();
        args.recv_node_prefix = handle.recv_node_prefix.data();
        return args;
    }

    Handle handle{kTwoNodes, {kChannels, 1, 1, 1, 1}, 0};
    std::unique_ptr<Workspace> workspace = std::make_unique<Workspace>();
    std::unique_ptr<FailureRecord> failure = std::make_unique<FailureRecord>();
};

}  // namespace

TEST(notices_of_more_rows_than_a_tensor_holds_are_refused) {
    struct Lie {
        int source;
        int item;
        int32_t rows;
        bool holds;
    };
    const int first = NormalControlMap::notice_channels();
    const int relayed = NormalControlMap::notice_node_channels(NoticedRank::kChannels);
    // Every source has five rows in each channel, and so many for this rank to relay have this one and rank 2.
    constexpr int32_t kMost = INT32_MAX - 3 * 10;
    const std::vector<Lie> lies = {{3, first, 0, true},
                                   {3, first + 1, kMost, true},
                                   {3, first + 1, kMost + 1, false},
                                   {1, first, -1, false},
                                   {1, first + 1, 4, false},
                                   {1, first + 1, INT32_MIN, false},
                                   {2, relayed + 1, INT32_MAX - 10, true},
                                   {2, relayed + 1, INT32_MAX, false},
                                   {2, relayed, -1, false},
                                   {2, relayed + 1, 4, false}};
    for (const Lie& lie : lies) {
        host::SimulationOptions options;
        simulate<NoticedRank>(options, [&](NoticedRank& self, int) {
            const NotifyArgs args = self.args();
            const auto notice = [&](int source) {
                const size_t place = args.words.notice(1, source, notice_bytes(args));
                return reinterpret_cast<int32_t*>(args.common.transport.local(place));
            };
            for (int source = 0; source < kTwoNodes.num_ranks(); ++source) {
                for (int channel = 0; channel < NoticedRank::kChannels; ++channel) {
                    notice(source)[first + channel] = 5 * (channel + 1);
                    if (source % 2 == 0) notice(source)[relayed + channel] = 5 * (channel + 1);
                }
            }
            notice(lie.source)[lie.item] = lie.rows;
            self.launch(1, [&](const Transport&) {
                const OpenOperation open{1, 1, deadline_in(1'000'000'000)};
                CHECK_EQUAL(place_rows(args, open), lie.holds);
            });
            CHECK_EQUAL(
                self.failure->reason,
                static_cast<uint32_t>(lie.holds ? FailureReason::kNone : FailureReason::kSurplus));
            for (int source = 0; source < kTwoNodes.num_ranks() && !lie.holds; ++source)
                CHECK_EQUAL(self.failure->ranks[source], source == lie.source ? 1u : 0u);
        });
    }
}

// Rows of an operation that failed may still be on their way when the next one begins.
TEST(a_rank_without_room_ends_the_operation_of_all) {
    Random random(ep::testing::seed());
    for (int i = 0; i < kNumSimulations; ++i) {
        Round round = random_round(kTwoNodes, random_setting(kTwoNodes, random), random);
        round.inputs.assign(kTwoNodes.num_ranks(), everything_to_all(kTwoNodes));
        std::vector<Round> after;
        for (int j = 0; j < 2; ++j) {
            Setting moved = round.setting;
            moved.num_channels = 1 + moved.num_channels % 3;
            after.push_back(random_round(kTwoNodes, moved, random));
        }
        const int full = random.between(0, 3);
        const bool waits = random.between(0, 1) == 0;
        const auto options = simulation_of(kTwoNodes, random.bits());
        simulate<SimulatedRank<kTwoNodes>>(options, [&](SimulatedRank<kTwoNodes>& self, int rank) {
            host::Seat& seat = *host::Simulation::seat();
            Exchange exchange(self.runtime, rank, kTwoNodes, round);
            const bool has_counts = exchange.notify(exchange.mine.num_tokens_per_rank);
            if (rank == full && waits) seat.sleep_until(seat.simulation().now_ns() + 300'000);
            if (has_counts) {
                Received received(kTwoNodes, exchange.handle.num_rows);
                auto call = exchange.dispatch_call(0, received);
                if (rank == full) --call.num_recv_rows;
                self.runtime.normal_dispatch(call);
            } else {
                exchange.abandon();
            }
            const auto failure = self.runtime.take_failure();
            if (rank == full) {
                check_failure(failure, FailureReason::kRoom, {rank});
            } else {
                check_abandoned(failure, rank);
            }
            for (const Round& next : after) Exchange(self.runtime, rank, kTwoNodes, next).run();
        });
    }
}
