// The simulation as a machine: virtual time, messages that arrive late and in any order that fences
// allow, sources of puts that are read on arrival, ranks that stop and die, and that a seed repeats.
// Not under ThreadSanitizer: a source that is overwritten too early is a race, and shows here as one.
// sanitize: address
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ranks.h"
#include "testing.h"

using namespace ep;
using ep::testing::kControlBytes;
using ep::testing::kFlag;
using ep::testing::kFlagWithoutPayload;
using ep::testing::kPayload;
using ep::testing::kPayloadWithoutFlag;
using ep::testing::Rank;

namespace {

constexpr size_t kReply = 128;
constexpr size_t kSource = kControlBytes + 256;  // where a rank puts from
constexpr uint64_t kPatienceNs = 1'000'000'000;
constexpr uint64_t kEndNs = 60'000'000'000;

// body(rank object, rank) of two simulated ranks, on one node or on two.
template <class F>
std::shared_ptr<host::Simulation> simulate(host::SimulationOptions options, F body) {
    options.num_ranks = 2;
    return ep::testing::simulate<Rank>(options, body);
}

host::SimulationOptions two_nodes(uint64_t seed) {
    host::SimulationOptions options;
    options.seed = seed;
    options.end_ns = kEndNs;
    return options;
}

// (flag, payload) as rank 1 sees them, whenever a message has come, over many seeds; rank 0 acts.
template <class Act>
std::set<std::pair<uint64_t, uint64_t>> outcomes(Act act) {
    std::set<std::pair<uint64_t, uint64_t>> seen;
    for (uint64_t seed = 0; seed < 40; ++seed) {
        simulate(two_nodes(seed), [&](Rank& self, int rank) {
            host::Seat& seat = *host::Simulation::seat();
            host::Simulation& simulation = seat.simulation();
            if (rank == 0) {
                *self.words(kSource) = 42;
                self.launch(1, [&](const Transport& transport) { act(transport); });
            }
            for (int i = 0; i < 100; ++i) {
                seat.sleep_until(simulation.now_ns() + 300);
                if (rank == 1) seen.insert({*self.words(kFlag), *self.words(kPayload)});
            }
        });
    }
    return seen;
}

const std::pair<uint64_t, uint64_t> kBoth{1, 42};

}  // namespace

TEST(a_fence_keeps_a_signal_behind_a_put) {
    const auto seen = outcomes([](const Transport& transport) {
        transport.put_warp(1, kPayload, transport.local(kSource), 16, 3);
        if (!elect_one()) return;
        transport.fence(1, 3);
        transport.signal(1, kFlag, 1, 3);
    });
    CHECK(seen.contains(kBoth));
    CHECK(seen.contains(kPayloadWithoutFlag));
    CHECK(!seen.contains(kFlagWithoutPayload));
}

TEST(without_a_fence_a_signal_may_be_first) {
    const auto seen = outcomes([](const Transport& transport) {
        transport.put_warp(1, kPayload, transport.local(kSource), 16, 3);
        if (elect_one()) transport.signal(1, kFlag, 1, 3);
    });
    CHECK(seen.contains(kPayloadWithoutFlag));
    CHECK(seen.contains(kFlagWithoutPayload));
}

TEST(a_fence_orders_nothing_on_another_queue_pair) {
    const auto seen = outcomes([](const Transport& transport) {
        transport.put_warp(1, kPayload, transport.local(kSource), 16, 3);
        if (!elect_one()) return;
        transport.fence(1, 3);
        transport.signal(1, kFlag, 1, 4);
    });
    CHECK(seen.contains(kFlagWithoutPayload));
}

TEST(a_put_to_another_node_reads_its_source_when_it_arrives) {
    const auto put_and_overwrite = [](bool waits) {
        return [waits](const Transport& transport) {
            transport.put_warp(1, kPayload, transport.local(kSource), 16, 3);
            if (!elect_one()) return;
            if (waits) transport.quiet(1, 3);
            *reinterpret_cast<uint64_t*>(transport.local(kSource)) = 7;
        };
    };
    CHECK(outcomes(put_and_overwrite(false)).contains({0, 7}));
    CHECK(!outcomes(put_and_overwrite(true)).contains({0, 7}));
}

TEST(ranks_of_one_node_are_addressed_and_others_are_not) {
    for (const int ranks_per_node : {1, 2}) {
        host::SimulationOptions options = two_nodes(1);
        options.ranks_per_node = ranks_per_node;
        simulate(options, [&](Rank& self, int rank) {
            const Transport transport = self.memory.transport();
            CHECK_EQUAL(transport.all_direct(), ranks_per_node == 2);
            CHECK(transport.direct(rank, 0) != nullptr);
            CHECK_EQUAL(transport.direct(1 - rank, 0) != nullptr, ranks_per_node == 2);
        });
    }
}

TEST(a_put_to_another_node_from_memory_its_link_cannot_read_is_an_error) {
    std::string text;
    try {
        simulate(two_nodes(1), [&](Rank& self, int rank) {
            if (rank != 0) return;
            alignas(16) static uint64_t elsewhere[2];
            self.launch(1, [&](const Transport& transport) {
                transport.put_warp(1, kPayload, elsewhere, sizeof(elsewhere), 0);
            });
        });
    } catch (const host::DeviceError& error) {
        text = error.what();
    }
    CHECK_THAT(text.find("outside of symmetric memory") != std::string::npos, text);
}

TEST(waiting_ends_at_the_deadline_and_costs_no_time) {
    const uint64_t begin = host::monotonic_ns();
    simulate(two_nodes(1), [&](Rank& self, int rank) {
        host::Simulation& simulation = host::Simulation::seat()->simulation();
        const uint64_t patience = rank == 0 ? kPatienceNs : 30 * kPatienceNs;
        const uint64_t before = simulation.now_ns();
        bool came = true;
        self.launch(1, [&](const Transport& transport) {
            if (!elect_one()) return;
            came = spin_until([&] { return transport.poll(kFlag) == 1; }, deadline_in(patience));
        });
        const uint64_t waited = simulation.now_ns() - before;
        CHECK(!came);
        CHECK_THAT(waited >= patience && waited < patience + 100'000, std::to_string(waited));
    });
    CHECK(host::monotonic_ns() - begin < kPatienceNs * 10);
}

TEST(who_waits_is_woken_by_a_signal_and_by_nothing_else) {
    simulate(two_nodes(1), [&](Rank& self, int rank) {
        host::Seat& seat = *host::Simulation::seat();
        constexpr uint64_t kLateNs = 20'000'000;
        const uint64_t before = seat.simulation().now_ns();
        if (rank == 0) seat.sleep_until(before + kLateNs);
        int polls = 0;
        self.launch(1, [&](const Transport& transport) {
            if (!elect_one()) return;
            if (rank == 0) return transport.signal(1, kFlag, 1, 0);
            CHECK(spin_until(
                [&] {
                    ++polls;
                    return transport.poll(kFlag) == 1;
                },
                deadline_in(kPatienceNs)));
        });
        if (rank == 0) return;
        CHECK_THAT(polls < 5, std::to_string(polls));
        CHECK(seat.simulation().now_ns() - before < kLateNs + 1'000'000);
    });
}

TEST(who_waits_without_end_is_ended_with_the_simulation) {
    bool returned = false;
    const auto simulation = simulate(two_nodes(1), [&](Rank& self, int rank) {
        if (rank == 1) return;
        self.launch(1, [&](const Transport& transport) {
            if (elect_one())
                returned =
                    spin_until([&] { return transport.poll(kFlag) == 1; }, deadline_in(2 * kEndNs));
        });
        returned = true;
    });
    CHECK(simulation->has_ended());
    CHECK(!returned);
}

namespace {

// How far rank 1 came: rank 0 sends 20 fenced signals, and dies or stops somewhere between.
uint64_t last_signal(uint64_t points, bool dies, uint64_t* took_ns = nullptr) {
    uint64_t last = 0;
    simulate(two_nodes(points), [&](Rank& self, int rank) {
        host::Seat& seat = *host::Simulation::seat();
        const uint64_t before = seat.simulation().now_ns();
        if (rank == 0) {
            if (dies) {
                seat.die_after(points);
            } else {
                seat.stop_after(points, kPatienceNs);
            }
            self.launch(1, [&](const Transport& transport) {
                for (uint64_t i = 1; i <= 20; ++i) {
                    if (elect_one()) {
                        transport.fence(1, 0);
                        transport.signal(1, kFlag, i, 0);
                    }
                    warp_sync();
                }
            });
            if (took_ns != nullptr) *took_ns = seat.simulation().now_ns() - before;
            CHECK(!dies || points >= 20);
        }
        seat.sleep_until(seat.simulation().now_ns() + 3 * kPatienceNs);
        if (rank == 1) last = *self.words(kFlag);
    });
    return last;
}

}  // namespace

TEST(a_rank_dies_between_two_puts_and_some_of_what_it_sent_still_arrives) {
    std::set<uint64_t> lost;
    for (uint64_t points = 0; points < 20; ++points) {
        const uint64_t last = last_signal(points, true);
        CHECK_THAT(last <= points, std::to_string(last));
        lost.insert(points - last);
    }
    CHECK(lost.contains(0));
    CHECK(lost.size() > 2);
    CHECK_EQUAL(last_signal(1000, true), 20u);
}

TEST(a_rank_stops_between_two_puts_and_goes_on) {
    uint64_t took_ns = 0;
    for (const uint64_t points : {0, 7, 19}) {
        CHECK_EQUAL(last_signal(points, false, &took_ns), 20u);
        CHECK(took_ns >= kPatienceNs && took_ns < kPatienceNs + 1'000'000);
    }
    CHECK_EQUAL(last_signal(1000, false, &took_ns), 20u);
    CHECK(took_ns < kPatienceNs);
}

TEST(a_seed_repeats_and_another_one_differs) {
    const auto times_of = [](uint64_t seed) {
        std::vector<uint64_t> times;
        simulate(two_nodes(seed), [&](Rank& self, int rank) {
            for (uint64_t round = 1; round <= 30; ++round) {
                self.launch(1, [&](const Transport& transport) {
                    if (!elect_one()) return;
                    if (rank == 0) transport.signal(1, kFlag, round, 0);
                    const size_t mine = rank == 0 ? kReply : kFlag;
                    CHECK(spin_until([&] { return transport.poll(mine) >= round; },
                                     deadline_in(kPatienceNs)));
                    if (rank == 1) transport.signal(0, kReply, round, 0);
                });
                times.push_back(host::Simulation::seat()->simulation().now_ns());
            }
        });
        return times;
    };
    const auto first = times_of(1);
    CHECK(first.size() == 60);
    CHECK(first == times_of(1));
    CHECK(first != times_of(2));
}
