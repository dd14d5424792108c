// Normal operations in a simulation: rows between nodes are read when they arrive, as a NIC does, so what is
// staged must stay as it is until then. Waiting costs nothing, and a seed repeats.
// Not under ThreadSanitizer; see test_simulation.cpp.
// sanitize: address
#include <algorithm>
#include <vector>

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
