// Litmus tests of the transport: which outcomes may appear, and that those which may do appear when
// delivery is at random. Then time (delayed paths), sleeping ranks, and the memory of
// others.
//
// The outcomes are those of the transport alone. What is not seen here (missed bugs): a source buffer
// reused too early, since a put copies at once (test_simulation.cpp); and, outside of a build with
// ThreadSanitizer, an acquire that is missing on a machine that orders loads anyway.
// sanitize: address thread
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"
#include "testing.h"

using namespace ep;
using ep::testing::kControlBytes;
using ep::testing::kDataBytes;
using ep::testing::kFlag;
using ep::testing::kFlagWithoutPayload;
using ep::testing::kPayload;
using ep::testing::kPayloadWithoutFlag;
using ep::testing::on_ranks;
using ep::testing::Random;
using ep::testing::Rank;

namespace {

constexpr uint64_t kPatienceNs = 120'000'000'000;

// Ranks of one process, connected.
struct World {
    explicit World(int num_ranks) {
        std::vector<std::string> handles;
        for (int rank = 0; rank < num_ranks; ++rank) {
            ranks.push_back(std::make_unique<Rank>(rank, num_ranks));
            handles.push_back(ranks.back()->memory.local_handle());
        }
        for (const auto& rank : ranks) {
            rank->memory.connect(handles);
            rank->memory.release_handle();
        }
    }
    Rank& operator[](int rank) { return *ranks[rank]; }

    std::vector<std::unique_ptr<Rank>> ranks;
};

constexpr size_t kOtherFlag = 128;

// Rank 0 acts on rank 1's memory; after every single delivery rank 1 looks at (flag, payload).
// Returns all outcomes over many seeds.
template <class Act>
std::set<std::pair<uint64_t, uint64_t>> outcomes(Act act) {
    std::set<std::pair<uint64_t, uint64_t>> seen;
    Random random(ep::testing::seed());
    World world(2);
    for (int i = 0; i < 300; ++i) {
        world[0].memory.set_delivery("random", random.bits());
        std::memset(world[1].memory.local_base(), 0, kControlBytes + 64);
        act(world[0].link());
        do {
            seen.insert({world[1].word(kFlag), world[1].data(0)});
        } while (world[0].link().pump());
        CHECK_EQUAL(world[1].word(kFlag), 1u);
        CHECK_EQUAL(world[1].data(0), 42u);
    }
    return seen;
}

const uint64_t kValue = 42;

}  // namespace

// ---- which outcomes may appear

TEST(fenced_payload_is_there_when_its_signal_is) {
    const auto seen = outcomes([](host::Link& link) {
        link.put(1, kPayload, &kValue, sizeof(kValue), 3);
        link.fence(1, 3);
        link.signal(1, kFlag, 1, 3);
    });
    CHECK(!seen.contains(kFlagWithoutPayload));
    CHECK(seen.contains(kPayloadWithoutFlag));
}

TEST(without_a_fence_the_signal_may_overtake) {
    const auto seen = outcomes([](host::Link& link) {
        link.put(1, kPayload, &kValue, sizeof(kValue), 3);
        link.signal(1, kFlag, 1, 3);
    });
    CHECK(seen.contains(kFlagWithoutPayload) && seen.contains(kPayloadWithoutFlag));
}

TEST(a_fence_orders_nothing_between_queue_pairs) {
    const auto seen = outcomes([](host::Link& link) {
        link.put(1, kPayload, &kValue, sizeof(kValue), 3);
        link.fence(1, 3);
        link.fence(1, 4);
        link.signal(1, kFlag, 1, 4);
    });
    CHECK(seen.contains(kFlagWithoutPayload));
}

TEST(a_fence_orders_nothing_between_destinations) {
    World world(3);
    Random random(ep::testing::seed());
    bool overtaken = false;
    for (int i = 0; i < 100; ++i) {
        world[0].memory.set_delivery("random", random.bits());
        for (const int rank : {1, 2})
            std::memset(world[rank].memory.local_base(), 0, kControlBytes + 64);
        world[0].link().put(1, kPayload, &kValue, sizeof(kValue), 0);
        world[0].link().fence(1, 0);
        world[0].link().fence(2, 0);
        world[0].link().signal(2, kFlag, 1, 0);
        do {
            overtaken = overtaken || (world[2].word(kFlag) == 1 && world[1].data(0) == 0);
        } while (world[0].link().pump());
    }
    CHECK(overtaken);
}

TEST(quiet_completes_its_queue_pair_and_no_other) {
    World world(2);
    Random random(ep::testing::seed());
    bool other_held_back = false;
    for (int i = 0; i < 100; ++i) {
        world[0].memory.set_delivery("random", random.bits());
        std::memset(world[1].memory.local_base(), 0, kControlBytes + 64);
        world[0].link().put(1, kPayload, &kValue, sizeof(kValue), 3);
        world[0].link().fence(1, 3);
        world[0].link().signal(1, kFlag, 1, 3);
        world[0].link().signal(1, kFlag + sizeof(uint64_t), 1, 4);
        world[0].link().quiet(1, 3);
        CHECK(world[1].data(0) == kValue && world[1].word(kFlag) == 1);
        other_held_back = other_held_back || world[1].word(kFlag + sizeof(uint64_t)) == 0;
        world[0].link().flush();
        CHECK(world[1].word(kFlag + sizeof(uint64_t)) == 1);
    }
    CHECK(other_held_back);
}

TEST(a_fence_orders_everything_before_it_and_everything_behind_it) {
    World world(2);
    Random random(ep::testing::seed());
    bool reordered = false;
    for (int i = 0; i < 300; ++i) {
        world[0].memory.set_delivery("random", random.bits());
        std::memset(world[1].memory.local_base(), 0, kControlBytes + 64);
        host::Link& link = world[0].link();
        for (size_t k = 0; k < 3; ++k) link.put(1, kPayload + 8 * k, &kValue, sizeof(kValue), 0);
        link.fence(1, 0);
        for (size_t k = 3; k < 6; ++k) link.put(1, kPayload + 8 * k, &kValue, sizeof(kValue), 0);
        link.fence(1, 0);
        link.signal(1, kFlag, 1, 0);
        do {
            std::array<bool, 6> here;
            for (size_t k = 0; k < 6; ++k) here[k] = world[1].data(k) == kValue;
            const bool first_all = here[0] && here[1] && here[2];
            const bool second_any = here[3] || here[4] || here[5];
            const bool second_all = here[3] && here[4] && here[5];
            CHECK(!second_any || first_all);
            CHECK(world[1].word(kFlag) == 0 || second_all);
            reordered = reordered || (here[1] && !here[0]);
        } while (link.pump());
    }
    CHECK(reordered);
}

TEST(store_buffering_both_ranks_may_look_too_early) {
    World world(2);
    for (const int rank : {0, 1}) world[rank].memory.set_delivery("random", ep::testing::seed());
    world[0].link().signal(1, kFlag, 1, 0);
    world[1].link().signal(0, kFlag, 1, 0);
    CHECK(world[0].word(kFlag) == 0 && world[1].word(kFlag) == 0);
    for (const int rank : {0, 1}) world[rank].link().flush();
    CHECK(world[0].word(kFlag) == 1 && world[1].word(kFlag) == 1);
}

TEST(in_order_delivery_keeps_the_order_of_calls) {
    World world(2);
    world[0].link().signal(1, kFlag, 1, 0);
    CHECK_EQUAL(world[1].word(kFlag), 1u);
    world[0].memory.set_delivery("random", 1);
    world[0].link().signal(1, kOtherFlag, 1, 0);
    CHECK_EQUAL(world[1].word(kOtherFlag), 0u);
    world[0].memory.set_delivery("in-order", 0);  // what was held back is delivered
    CHECK_EQUAL(world[1].word(kOtherFlag), 1u);
}

TEST(the_same_seed_delivers_in_the_same_order) {
    const auto order_of = [](uint64_t seed) {
        World world(2);
        world[0].memory.set_delivery("random", seed);
        for (size_t k = 0; k < 32; ++k)
            world[0].link().put(
                1, kPayload + 8 * k, &kValue, sizeof(kValue), static_cast<int>(k % 4));
        std::vector<size_t> order;
        std::array<bool, 32> here{};
        while (world[0].link().pump()) {
            for (size_t k = 0; k < 32; ++k) {
                if (here[k] || world[1].data(k) != kValue) continue;
                here[k] = true;
                order.push_back(k);
            }
        }
        CHECK_EQUAL(order.size(), 32u);
        return order;
    };
    const uint64_t seed = ep::testing::seed();
    CHECK(order_of(seed) == order_of(seed));
    CHECK(order_of(seed) != order_of(seed + 1));
}

// ---- the same between kernels that run at the same time

namespace {

struct Exchange {
    static constexpr int kMessages = 48;
    static constexpr size_t kMessageBytes = 512;

    // Rank 0 sends, rank 1 looks at each payload as soon as it sees the signal. How many were stale.
    static int stale(World& world, bool with_fence) {
        // Relaxed: these must order nothing between the ranks.
        std::atomic<int> stale = 0;
        std::atomic<int> looked = 0;
        std::vector<Vector> source(kMessageBytes / sizeof(Vector));
        std::memset(source.data(), 0x5A, kMessageBytes);
        std::memset(world[1].memory.local_base(), 0, kControlBytes + kMessages * kMessageBytes);
        on_ranks(2, [&](int rank) {
            world[rank].launch(2, [&](const Transport& transport) {
                for (int i = warp_id(); i < kMessages; i += num_warps()) {
                    const size_t flag = static_cast<size_t>(i) * 64;
                    const size_t payload = kControlBytes + i * kMessageBytes;
                    if (rank == 0) {
                        transport.put_warp(1, payload, source.data(), kMessageBytes, i % 5);
                        if (!elect_one()) continue;
                        if (with_fence) transport.fence(1, i % 5);
                        transport.signal(1, flag, 1, i % 5);
                    } else if (elect_one()) {
                        const bool came = spin_until([&] { return transport.poll(flag) == 1; },
                                                     deadline_in(kPatienceNs));
                        const bool right = came && std::memcmp(transport.local(payload),
                                                               source.data(),
                                                               kMessageBytes) == 0;
                        stale.fetch_add(right ? 0 : 1, std::memory_order_relaxed);
                        looked.fetch_add(1, std::memory_order_relaxed);
                    }
                }
                if (rank != 0 || thread_index() != 0) return;
                transport.flush();
                // One delivery per look, and time between them for the other rank to see each.
                const auto all_looked = [&] {
                    std::this_thread::sleep_for(std::chrono::microseconds(20));
                    return looked.load(std::memory_order_relaxed) == kMessages;
                };
                const bool answered = spin_until(all_looked, deadline_in(kPatienceNs));
                stale.fetch_add(answered ? 0 : 1, std::memory_order_relaxed);
            });
        });
        return stale;
    }
};

}  // namespace

TEST(message_passing_between_kernels) {
    Random random(ep::testing::seed());
    World world(2);
    CHECK_EQUAL(Exchange::stale(world, true), 0);
    for (int i = 0; i < 40; ++i) {
        const uint64_t seed = random.bits();
        for (const int rank : {0, 1}) {
            world[rank].device.set_schedule("random", seed + static_cast<uint64_t>(rank));
            world[rank].memory.set_delivery("random", seed);
        }
        CHECK_THAT(Exchange::stale(world, true) == 0,
                   "schedule and delivery random:" + std::to_string(seed));
    }
}

TEST(message_passing_between_kernels_without_a_fence_is_found) {
    if (EP_UNDER_TSAN) return;  // it reports the race before the stale payload shows
    Random random(ep::testing::seed());
    World world(2);
    int stale = 0;
    for (int i = 0; i < 100 && stale == 0; ++i) {
        world[0].memory.set_delivery("random", random.bits());
        stale += Exchange::stale(world, false);
    }
    CHECK(stale > 0);
}

TEST(words_and_fences_of_many_ranks) {
    // Everyone tells everyone a payload word by every way, in rounds.
    constexpr int kRanks = 4;
    Random random(ep::testing::seed());
    World world(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
        world[rank].memory.set_delivery("random", random.bits());
        world[rank].device.set_schedule("random", random.bits());
    }
    std::array<int, kRanks> wrong{};
    on_ranks(kRanks, [&](int rank) {
        for (uint64_t round = 1; round <= 12; ++round) {
            world[rank].launch(1, [&](const Transport& transport) {
                const int peer = lane_id();
                if (peer >= kRanks) return;
                // Two slots by round: a rank is at most one round ahead of its slowest reader.
                const size_t slot = (round % 2 * kRanks + static_cast<size_t>(rank)) * 64;
                transport.put_word(
                    peer, kControlBytes + slot, round * 100 + static_cast<uint64_t>(rank), peer);
                transport.fence(peer, peer);
                transport.signal(peer, slot, round, peer);
                const size_t theirs = (round % 2 * kRanks + static_cast<size_t>(peer)) * 64;
                const bool came = spin_until([&] { return transport.poll(theirs) >= round; },
                                             deadline_in(kPatienceNs));
                uint64_t word;
                std::memcpy(&word, transport.local(kControlBytes + theirs), sizeof(word));
                if (!came || word != round * 100 + static_cast<uint64_t>(peer))
                    add_relaxed<Scope::kBlock>(&wrong[rank], 1);
            });
        }
    });
    for (const int count : wrong) CHECK_EQUAL(count, 0);
}

// ---- time

namespace {

struct Stamps {
    uint64_t before = 0;
    uint64_t after = 0;
    uint64_t arrival = 0;
};

// Rank 0 puts `bytes` and signals rank 1, one launch each, one after the other.
Stamps send_and_stamp(World& world, size_t bytes, uint64_t value) {
    Stamps stamps;
    std::vector<Vector> source(bytes / sizeof(Vector) + 1);
    world[0].launch(1, [&](const Transport& transport) {
        if (bytes > 0) transport.put_warp(1, kPayload, source.data(), bytes, 0);
        warp_sync();
        if (!elect_one()) return;
        stamps.before = world[0].device.executor().clock().true_ns();
        transport.signal(1, kFlag, value, 0);
        stamps.after = world[0].device.executor().clock().true_ns();
        transport.flush();
    });
    world[1].launch(1, [&](const Transport& transport) {
        if (!elect_one()) return;
        if (spin_until([&] { return transport.poll(kFlag) >= value; }, deadline_in(kPatienceNs))) {
            stamps.arrival = transport.arrival_ns(kFlag);
        }
    });
    return stamps;
}

void check_shifted(const Stamps& stamps, uint64_t by_ns) {
    CHECK_THAT(stamps.arrival >= stamps.before + by_ns && stamps.arrival <= stamps.after + by_ns,
               std::to_string(stamps.arrival - stamps.before) + " ns after it was sent");
}

}  // namespace

TEST(rank_time_a_delayed_path_shifts_arrivals_by_exactly_the_delay) {
    World world(2);
    check_shifted(send_and_stamp(world, 64, 1), 0);
    world[0].memory.set_path_fault(1, 5'000'000, 0);
    check_shifted(send_and_stamp(world, 64, 2), 5'000'000);
    world[0].memory.set_path_fault(1, 0, 0);
    check_shifted(send_and_stamp(world, 64, 3), 0);
}

TEST(a_clock_fault_bends_what_kernels_read_and_nothing_else) {
    World world(2);
    world[1].device.set_clock_fault(3'000'000'000, 0);
    const Stamps stamps = send_and_stamp(world, 0, 1);
    check_shifted(stamps, 3'000'000'000);  // the arrival is on rank 1's clock, the others are true
}

TEST(path_faults_name_a_rank_of_the_group) {
    World world(2);
    for (const int rank : {-1, 2}) {
        std::string text;
        try {
            world[0].memory.set_path_fault(rank, 1, 0);
        } catch (const std::runtime_error& error) {
            text = error.what();
        }
        CHECK_THAT(text.find("no rank " + std::to_string(rank)) != std::string::npos, text);
    }
}

// ---- sleeping ranks

TEST(a_signal_between_arming_and_sleeping_is_not_lost) {
    World world(2);
    host::Link& sleeper = world[1].link();
    sleeper.arm();
    CHECK_EQUAL(sleeper.newest(kFlag), 0u);
    world[0].link().signal(1, kFlag, 1, 0);
    world[0].link().ring();
    const uint64_t begin = host::monotonic_ns();
    sleeper.sleep(999'000'000);
    CHECK(host::monotonic_ns() - begin < 900'000'000);
    CHECK_EQUAL(sleeper.newest(kFlag), 1u);
}

// In a launch a sleep ends after a millisecond, which would hide a lost wake-up.
TEST(no_wake_up_is_lost_where_only_a_ring_ends_a_sleep) {
    World world(2);
    constexpr uint64_t kLongNs = 999'000'000;
    constexpr uint64_t kRounds = EP_UNDER_TSAN || EP_UNDER_ASAN ? 2'000 : 20'000;
    uint64_t longest_ns[2] = {};
    on_ranks(2, [&](int rank) {
        host::Link& link = world[rank].link();
        const auto say = [&](uint64_t round) {
            link.signal(1 - rank, kFlag, round, 0);
            link.ring();
        };
        for (uint64_t round = 1; round <= kRounds; ++round) {
            if (rank == 0) say(round);
            while (link.newest(kFlag) < round) {
                link.arm();
                const uint64_t begin = host::monotonic_ns();
                if (link.newest(kFlag) < round) {
                    link.sleep(kLongNs);
                } else {
                    link.disarm();
                }
                longest_ns[rank] = std::max(longest_ns[rank], host::monotonic_ns() - begin);
            }
            if (rank == 1) say(round);
        }
    });
    for (const uint64_t ns : longest_ns) CHECK_THAT(ns < kLongNs, std::to_string(ns) + " ns");
}

// ---- memory of others

TEST(a_descriptor_is_sent_to_who_knows_the_secret_only) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const host::Token secret = host::random_token();
    host::Token name;
    {
        host::DescriptorServer server;
        name = server.name();
        server.start(ends[1], secret);
        CHECK(!host::fetch_descriptor(name, host::random_token()));
        for (int i = 0; i < 3; ++i) {
            const host::Descriptor sent = host::fetch_descriptor(name, secret);
            CHECK(static_cast<bool>(sent));
            CHECK(write(sent.number(), "x", 1) == 1);
            char text = 0;
            CHECK(read(ends[0], &text, 1) == 1 && text == 'x');
        }
    }
    CHECK(!host::fetch_descriptor(name, secret));
    close(ends[0]);
    close(ends[1]);
}

TEST(handles_of_another_shape_are_refused) {
    Device device(0, "rank");
    Rank small(0, 2);
    SymmetricMemory large(
        device,
        {.rank = 1, .num_ranks = 2, .control_bytes = kControlBytes, .data_bytes = 4 * kDataBytes});
    for (const auto& [handle, words] :
         {std::pair<std::string, std::string>{large.local_handle(), "bytes of symmetric memory"},
          {"nonsense", "not one of the cpu backend"}}) {
        std::string text;
        try {
            small.memory.connect({small.memory.local_handle(), handle});
        } catch (const std::runtime_error& error) {
            text = error.what();
        }
        CHECK_THAT(
            text.find(words) != std::string::npos && text.find("rank 1") != std::string::npos,
            text);
    }
}

TEST(a_rank_may_close_while_another_still_rings_it) {
    // Rank 1 has what it waited for and goes; rank 0 is still about to wake it.
    World world(2);
    world[0].link().signal(1, kFlag, 1, 0);
    CHECK_EQUAL(world[1].word(kFlag), 1u);
    world.ranks[1].reset();
    world[0].link().ring();
    world[0].link().signal(1, kFlag, 2, 0);
    world[0].link().ring();
}
