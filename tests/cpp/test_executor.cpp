// The SIMT executor as a machine: every collective against a scalar model, barriers, memory, early
// exit, waiting, and every error it promises, after each of which it must work on.
// sanitize: address
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "device/device.cuh"
#include "testing.h"

using namespace ep;
using ep::testing::Random;

namespace {

// One executor for all cases: what a case leaves behind must not disturb the next.
host::Executor& executor() {
    static host::Executor instance(host::ClockMode::kRank);
    return instance;
}

template <class F>
void launch(const LaunchShape& shape, F kernel) {
    executor().run(shape, [](void* argument) { (*static_cast<F*>(argument))(); }, &kernel);
}

// check() under the plain order and under several random ones.
template <class F>
void under_schedules(F check) {
    Random random(ep::testing::seed());
    executor().set_schedule(host::make_round_robin_schedule());
    check(random);
    for (int i = 0; i < 6; ++i) {
        executor().set_schedule(host::make_random_schedule(random.bits()));
        check(random);
    }
    executor().set_schedule(host::make_round_robin_schedule());
}

constexpr int kRounds = 24;
constexpr int kLanes = 2 * kWarpSize;  // two warps, so that they could disturb each other

// For every round and warp a partition of some of the lanes into disjoint sets that call at once;
// mask 0 sits the round out.
struct Masks {
    std::array<std::array<uint32_t, kLanes>, kRounds> of_lane{};

    explicit Masks(Random& random) {
        for (auto& round : of_lane) {
            for (int first = 0; first < kLanes; first += kWarpSize) {
                const int num_sets = random.between(1, 6);
                std::array<int, kWarpSize> set_of{};
                for (int& set : set_of) set = random.between(0, num_sets);
                for (int lane = 0; lane < kWarpSize; ++lane) {
                    if (set_of[lane] == num_sets) continue;
                    uint32_t mask = 0;
                    for (int other = 0; other < kWarpSize; ++other) {
                        mask |= static_cast<uint32_t>(set_of[other] == set_of[lane]) << other;
                    }
                    round[first + lane] = mask;
                }
            }
        }
    }
};

template <class T>
using Rounds = std::array<std::array<T, kLanes>, kRounds>;

// collective(values of all lanes, lane, mask) on fibers must give model(the same) of every round.
template <class T, class Collective, class Model>
void compare_over_masks(Random& random, int low, int high, Collective collective, Model model) {
    const auto masks = std::make_unique<Masks>(random);
    const auto values = std::make_unique<Rounds<T>>();
    const auto results = std::make_unique<Rounds<T>>();
    for (auto& round : *values) {
        for (T& value : round) value = static_cast<T>(random.between(low, high));
    }
    launch({.blocks = 1, .threads = kLanes}, [&] {
        for (int round = 0; round < kRounds; ++round) {
            const int thread = thread_index();
            const uint32_t mask = masks->of_lane[round][thread];
            if (mask != 0) (*results)[round][thread] = collective((*values)[round][thread], mask);
        }
    });
    for (int round = 0; round < kRounds; ++round) {
        for (int thread = 0; thread < kLanes; ++thread) {
            const uint32_t mask = masks->of_lane[round][thread];
            if (mask == 0) continue;
            const T* warp = (*values)[round].data() + thread / kWarpSize * kWarpSize;
            const T expected = model(warp, thread % kWarpSize, mask);
            const T got = (*results)[round][thread];
            CHECK_THAT(got == expected,
                       "round " + std::to_string(round) + " thread " + std::to_string(thread) +
                           " mask " + std::to_string(mask) + ": " + ep::testing::text_of(got) +
                           " instead of " + ep::testing::text_of(expected) + " under " +
                           executor().schedule().describe());
        }
    }
}

template <class Op, class T>
void compare_reduce(Random& random) {
    compare_over_masks<T>(
        random,
        -1000,
        1000,
        [](T value, uint32_t mask) { return warp_reduce<Op>(value, mask); },
        [](const T* values, int, uint32_t mask) {
            T total = values[std::countr_zero(mask)];
            for (int lane = std::countr_zero(mask) + 1; lane < kWarpSize; ++lane) {
                if (mask >> lane & 1) total = Op{}(total, values[lane]);
            }
            return total;
        });
}

template <int G, class Op, class T, int N>
void compare_group_reduce(Random& random) {
    std::vector<std::array<T, N>> values(kLanes);
    std::vector<std::array<T, N>> results(kLanes);
    for (auto& lane : values) {
        for (T& value : lane) value = static_cast<T>(random.between(-500, 500));
    }
    launch({.blocks = 1, .threads = kLanes}, [&] {
        T mine[N];
        for (int i = 0; i < N; ++i) mine[i] = values[thread_index()][i];
        group_reduce<G, Op>(mine);
        for (int i = 0; i < N; ++i) results[thread_index()][i] = mine[i];
    });
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < N; ++i) {
            T total = values[lane / G * G][i];
            for (int other = lane / G * G + 1; other < lane / G * G + G; ++other) {
                total = Op{}(total, values[other][i]);
            }
            CHECK_EQUAL(results[lane][i], total);
        }
    }
}

template <int G>
void compare_group_reduces(Random& random) {
    compare_group_reduce<G, Sum, int, 1>(random);
    compare_group_reduce<G, Max, float, 4>(random);
    compare_group_reduce<G, Min, int64_t, 3>(random);
    compare_group_reduce<G, Max, uint32_t, 2>(random);
}

// What a launch says when it is wrong; empty when it ends well. A full launch must work after it.
template <class F>
std::string error_of(const LaunchShape& shape, F kernel) {
    std::string text;
    try {
        launch(shape, kernel);
    } catch (const host::DeviceError& error) {
        text = error.what();
    }
    int sum = 0;
    launch({.blocks = 2, .threads = 64, .cooperative = true}, [&] {
        const int total = warp_reduce<Sum>(lane_id());
        grid_sync();
        if (thread_index() == 0) sum += total;
    });
    CHECK_EQUAL(sum, 2 * 31 * 16);
    return text;
}

void check_contains(const std::string& text, const std::vector<std::string>& words) {
    for (const std::string& word : words) {
        CHECK_THAT(text.find(word) != std::string::npos, "no \"" + word + "\" in \"" + text + "\"");
    }
}

}  // namespace

// ---- warp collectives

TEST(identity_of_every_thread) {
    std::set<std::pair<int, int>> seen;
    bool right = true;
    launch({.blocks = 3, .threads = 96}, [&] {
        seen.insert({block_index(), thread_index()});
        right = right && num_blocks() == 3 && num_threads() == 96 && num_warps() == 3 &&
                lane_id() == thread_index() % 32 && warp_id() == thread_index() / 32;
    });
    CHECK(right);
    CHECK_EQUAL(seen.size(), 3u * 96u);
}

TEST(shuffle_matches_the_model_over_random_masks) {
    under_schedules([](Random& random) {
        // Each lane asks for the lane of its mask that its value points at.
        const auto asked = [](int value, uint32_t mask) {
            int skip = std::abs(value) % std::popcount(mask);
            for (; skip > 0; --skip) mask &= mask - 1;
            return std::countr_zero(mask);
        };
        compare_over_masks<int>(
            random,
            -1000,
            1000,
            [&](int value, uint32_t mask) { return shuffle(value, asked(value, mask), mask); },
            [&](const int* values, int lane, uint32_t mask) {
                return values[asked(values[lane], mask)];
            });
    });
}

TEST(ballot_matches_the_model_over_random_masks) {
    under_schedules([](Random& random) {
        compare_over_masks<uint32_t>(
            random,
            0,
            1,
            [](uint32_t value, uint32_t mask) { return ballot(value != 0, mask); },
            [](const uint32_t* values, int, uint32_t mask) {
                uint32_t bits = 0;
                for (int lane = 0; lane < kWarpSize; ++lane) bits |= values[lane] << lane;
                return bits & mask;
            });
    });
}

TEST(warp_reduce_matches_the_model_over_random_masks) {
    under_schedules([](Random& random) {
        compare_reduce<Sum, int>(random);
        compare_reduce<Max, int>(random);
        compare_reduce<Min, int>(random);
        compare_reduce<Sum, int64_t>(random);
        compare_reduce<Max, float>(random);
        compare_reduce<Min, double>(random);
    });
}

TEST(different_collectives_on_disjoint_masks_at_the_same_time) {
    under_schedules([](Random&) {
        std::vector<int> results(kWarpSize);
        launch({.blocks = 1, .threads = kWarpSize}, [&] {
            const int lane = lane_id();
            const uint32_t mask = lane < 8 ? 0xFFu : lane < 16 ? 0xFF00u : 0xFFFF0000u;
            int result = 0;
            for (int round = 0; round < 5; ++round) {
                if (lane < 8) result += warp_reduce<Sum>(lane, mask);
                if (lane >= 8 && lane < 16) result += std::popcount(ballot(lane % 2 == 0, mask));
                if (lane >= 16) result += shuffle(lane, 20, mask);
            }
            results[lane] = result;
        });
        for (int lane = 0; lane < kWarpSize; ++lane) {
            CHECK_EQUAL(results[lane], 5 * (lane < 8 ? 28 : lane < 16 ? 4 : 20));
        }
    });
}

TEST(a_lane_may_meet_overlapping_masks_one_after_the_other) {
    under_schedules([](Random&) {
        std::vector<int> results(kWarpSize);
        launch({.blocks = 1, .threads = kWarpSize}, [&] {
            const int lane = lane_id();
            if (lane == 0 || lane == 1) results[lane] += warp_reduce<Sum>(lane + 1, 0b011u);
            if (lane == 0 || lane == 2) results[lane] += warp_reduce<Sum>(lane + 10, 0b101u);
            if (lane == 1 || lane == 2) results[lane] += warp_reduce<Sum>(lane + 100, 0b110u);
        });
        CHECK_EQUAL(results[0], 3 + 22);
        CHECK_EQUAL(results[1], 3 + 203);
        CHECK_EQUAL(results[2], 22 + 203);
    });
}

TEST(warp_prefix_sum_matches_the_model) {
    under_schedules([](Random& random) {
        for (int repeat = 0; repeat < 10; ++repeat) {
            std::vector<int64_t> values(kLanes);
            std::vector<int64_t> results(kLanes);
            for (int64_t& value : values) value = random.between(-1000, 1000);
            launch({.blocks = 1, .threads = kLanes},
                   [&] { results[thread_index()] = warp_prefix_sum(values[thread_index()]); });
            for (int first = 0; first < kLanes; first += kWarpSize) {
                int64_t before = 0;
                for (int lane = 0; lane < kWarpSize; ++lane) {
                    CHECK_EQUAL(results[first + lane], before);
                    before += values[first + lane];
                }
            }
        }
    });
}

TEST(group_reduce_matches_the_model) {
    under_schedules([](Random& random) {
        compare_group_reduces<1>(random);
        compare_group_reduces<2>(random);
        compare_group_reduces<4>(random);
        compare_group_reduces<8>(random);
        compare_group_reduces<16>(random);
        compare_group_reduces<32>(random);
    });
}

TEST(elect_one_elects_one_lane_per_warp) {
    std::vector<int> elected(6);
    launch({.blocks = 2, .threads = 96}, [&] {
        if (elect_one()) ++elected[block_index() * num_warps() + warp_id()];
    });
    for (const int count : elected) CHECK_EQUAL(count, 1);
}

TEST(warp_sync_orders_memory_among_its_lanes) {
    under_schedules([](Random&) {
        std::vector<int> cells(kWarpSize);
        bool right = true;
        launch({.blocks = 1, .threads = kWarpSize}, [&] {
            for (int round = 1; round <= 20; ++round) {
                cells[lane_id()] = round * 100 + lane_id();
                warp_sync();
                const int other = (lane_id() + round) % kWarpSize;
                right = right && cells[other] == round * 100 + other;
                warp_sync();
            }
        });
        CHECK(right);
    });
}

// ---- barriers

TEST(block_sync_orders_memory_among_its_threads) {
    under_schedules([](Random&) {
        constexpr int kThreads = 128;
        std::vector<int> cells(3 * kThreads);
        bool right = true;
        launch({.blocks = 3, .threads = kThreads}, [&] {
            int* mine = cells.data() + block_index() * kThreads;
            for (int round = 1; round <= 10; ++round) {
                mine[thread_index()] = round;
                block_sync();
                right = right && mine[(thread_index() + 37 * round) % kThreads] == round;
                block_sync();
            }
        });
        CHECK(right);
    });
}

TEST(block_any_tells_all_threads_of_its_block_only) {
    under_schedules([](Random& random) {
        const int voter = random.between(0, 63);
        bool right = true;
        launch({.blocks = 2, .threads = 64}, [&] {
            for (int round = 0; round < 6; ++round) {
                const bool votes = block_index() == 1 && round % 2 == 0 && thread_index() == voter;
                const bool expected = block_index() == 1 && round % 2 == 0;
                right = block_any(votes) == expected && right;
            }
        });
        CHECK(right);
    });
}

TEST(bar_sync_with_several_ids_and_counts) {
    under_schedules([](Random&) {
        // Warps 0-1 meet on id 1, warps 2-4 on id 2, all but warp 5 on id 15; ids do not mix.
        std::vector<int> rounds_done(6);
        bool right = true;
        launch({.blocks = 1, .threads = 192}, [&] {
            const int warp = warp_id();
            if (warp == 5) return;
            const int first = warp < 2 ? 0 : 2;
            const int last = warp < 2 ? 1 : 4;
            for (int round = 1; round <= 8; ++round) {
                if (lane_id() == 0) rounds_done[warp] = round;
                bar_sync(warp < 2 ? 1 : 2, (last - first + 1) * kWarpSize);
                for (int w = first; w <= last; ++w) right = right && rounds_done[w] == round;
                bar_sync(warp < 2 ? 1 : 2, (last - first + 1) * kWarpSize);
            }
            bar_sync(15, 5 * kWarpSize);
            for (int w = 0; w < 5; ++w) right = right && rounds_done[w] == 8;
        });
        CHECK(right);
    });
}

TEST(grid_sync_orders_memory_among_all_threads) {
    under_schedules([](Random&) {
        constexpr int kTotal = 4 * 64;
        std::vector<int> cells(kTotal);
        bool right = true;
        launch({.blocks = 4, .threads = 64, .cooperative = true}, [&] {
            const int me = block_index() * 64 + thread_index();
            for (int round = 1; round <= 6; ++round) {
                cells[me] = round;
                grid_sync();
                right = right && cells[(me + 97 * round) % kTotal] == round;
                grid_sync();
            }
        });
        CHECK(right);
    });
}

// ---- memory

TEST(shared_memory_belongs_to_its_block) {
    under_schedules([](Random&) {
        bool right = true;
        std::set<const void*> arenas;
        launch({.blocks = 4, .threads = 64, .shared_bytes = 64 * 4 + 64 * 8, .cooperative = true},
               [&] {
                   SharedArena arena;
                   int* ints = arena.take<int>(64);
                   auto* longs = arena.take<int64_t>(64);
                   ints[thread_index()] = block_index() * 1000 + thread_index();
                   longs[thread_index()] = -block_index() * 1000 - thread_index();
                   arenas.insert(ints);
                   grid_sync();
                   const int other = 63 - thread_index();
                   right = right && ints[other] == block_index() * 1000 + other &&
                           longs[other] == -block_index() * 1000 - other &&
                           reinterpret_cast<uintptr_t>(longs) % alignof(int64_t) == 0;
               });
        CHECK(right);
        CHECK_EQUAL(arenas.size(), 4u);
    });
}

TEST(shared_memory_starts_undefined) {
    bool zero = false;
    launch({.blocks = 1, .threads = 32, .shared_bytes = 4},
           [&] { zero = *SharedArena().take<int>(1) == 0; });
    CHECK_THAT(!zero, "a kernel that forgets to initialise it would pass");
}

TEST(error_shared_arena_overflow) {
    const std::string text = error_of({.blocks = 1, .threads = 32, .shared_bytes = 64}, [] {
        SharedArena arena;
        arena.take<int>(16);
        arena.take<char>(1);
    });
    check_contains(text, {"takes 65 bytes of shared memory", "gave 64"});
}

TEST(scoped_atomics_return_the_old_value) {
    uint32_t word = 5;
    launch({.blocks = 1, .threads = 32}, [&] {
        if (thread_index() != 0) return;
        bool right = load_relaxed<Scope::kDevice>(&word) == 5;
        right = right && add_relaxed<Scope::kBlock>(&word, 2) == 5;
        right = right && add_release<Scope::kDevice>(&word, 3) == 7;
        right = right && add_acq_rel<Scope::kSystem>(&word, 1) == 10;
        right = right && or_relaxed<Scope::kDevice>(&word, 0x100) == 11;
        right = right && exchange_relaxed<Scope::kDevice>(&word, 40) == 0x10B;
        right = right && compare_exchange_relaxed<Scope::kDevice>(&word, 41, 1) == 40;
        right = right && compare_exchange_relaxed<Scope::kDevice>(&word, 40, 1) == 40;
        right = right && load_acquire<Scope::kSystem>(&word) == 1;
        store_relaxed<Scope::kBlock>(&word, 8);
        right = right && load_relaxed<Scope::kBlock>(&word) == 8;
        store_release<Scope::kSystem>(&word, right ? 77 : 0);
    });
    CHECK_EQUAL(word, 77u);
}

TEST(atomics_lose_nothing_and_plain_adds_do) {
    bool lost = false;
    under_schedules([&](Random&) {
        int64_t sum = 0;
        int64_t racing = 0;
        launch({.blocks = 4, .threads = 64}, [&] {
            for (int i = 0; i < 10; ++i) {
                add_relaxed<Scope::kDevice>(&sum, thread_index());
                const int64_t before = load_relaxed<Scope::kDevice>(&racing);
                store_relaxed<Scope::kDevice>(&racing, before + 1);
            }
        });
        CHECK_EQUAL(sum, 4 * 10 * (63 * 64 / 2));
        lost = lost || racing != 4 * 64 * 10;
    });
    CHECK_THAT(lost, "random schedules do not interrupt threads between two memory operations");
}

TEST(copies_are_there_after_the_next_sync) {
    under_schedules([](Random& random) {
        std::vector<Vector> source(64);
        for (Vector& vector : source) {
            for (uint32_t& word : vector.words) word = static_cast<uint32_t>(random.bits());
        }
        std::vector<Vector> by_block(64);
        std::vector<Vector> by_warp(64);
        const auto differ = [&](const std::vector<Vector>& copy, size_t first, size_t count) {
            return std::memcmp(copy.data() + first, source.data() + first, count * sizeof(Vector));
        };
        bool right = true;
        launch({.blocks = 1, .threads = 64}, [&] {
            copy_block(by_block.data(), source.data(), 64 * sizeof(Vector));
            block_sync();
            right = right && differ(by_block, 0, 64) == 0;
            const size_t first = static_cast<size_t>(warp_id()) * 32;
            copy_warp(by_warp.data() + first, source.data() + first, 32 * sizeof(Vector));
            warp_sync();
            right = right && differ(by_warp, first, 32) == 0;
        });
        CHECK(right);
    });
}

TEST(loops_cover_every_index_once) {
    for (const int n : {0, 1, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 1000}) {
        std::vector<int> warp_hits(2 * n);
        std::vector<int> block_hits(n);
        std::vector<int> tile_hits(n);
        bool right = true;
        launch({.blocks = 1, .threads = 64}, [&] {
            warp_for(n, [&](int i) { ++warp_hits[warp_id() * n + i]; });
            block_for(n, [&](int i) { ++block_hits[i]; });
            block_for_tiles<4>(n, [&](const Tile& tile) {
                right = right && tile.count >= 1 && tile.count <= 4;
                for (int j = 0; j < tile.count; ++j) {
                    ++tile_hits[tile.index(j)];
                    right = right && tile.clamped(j) == tile.index(j);
                }
                right = right && tile.clamped(4) == tile.index(tile.count - 1);
            });
        });
        CHECK(right);
        for (const auto* hits : {&warp_hits, &block_hits, &tile_hits}) {
            for (const int count : *hits) CHECK_EQUAL(count, 1);
        }
    }
}

// ---- early exit

TEST(lanes_warps_and_blocks_may_end_early) {
    under_schedules([](Random& random) {
        const int early_lane = random.between(0, 31);
        const int early_warp = random.between(0, 3);
        const int early_block = random.between(0, 2);
        int rounds = 0;
        bool right = true;
        launch({.blocks = 3, .threads = 128, .cooperative = true}, [&] {
            if (block_index() == early_block) return;
            if (warp_id() == early_warp) return;
            if (lane_id() == early_lane) return;
            const uint32_t others = kFullWarp & ~(1u << early_lane);
            right = right && warp_reduce<Sum>(1, others) == 31;
            block_sync();
            grid_sync();
            add_relaxed<Scope::kDevice>(&rounds, 1);
            block_sync();
            right = right && !block_any(false);
            grid_sync();
            right = right && rounds == 2 * 3 * 31;
        });
        CHECK(right);
        CHECK_EQUAL(rounds, 2 * 3 * 31);
    });
}

TEST(the_last_to_end_releases_those_who_wait) {
    under_schedules([](Random&) {
        int passed = 0;
        uint32_t waiting = 0;
        launch({.blocks = 2, .threads = 64, .cooperative = true}, [&] {
            const bool leaves = block_index() == 1 || warp_id() == 1;
            if (leaves) {
                // Only after the others are in their barrier.
                while (!spin_until([&] { return load_acquire<Scope::kDevice>(&waiting) == 32; },
                                   deadline_in(1'000'000'000))) {
                }
                return;
            }
            add_release<Scope::kDevice>(&waiting, 1);
            block_sync();
            grid_sync();
            ++passed;
        });
        CHECK_EQUAL(passed, 32);
    });
}

// ---- waiting

TEST(spin_until_sees_what_another_thread_writes) {
    under_schedules([](Random&) {
        uint32_t flag = 0;
        std::vector<int> payload(4 * 32);
        bool right = true;
        launch({.blocks = 4, .threads = 32}, [&] {
            // A chain through all blocks, against the order in which they start.
            const auto turn = static_cast<uint32_t>(num_blocks() - 1 - block_index());
            const bool came =
                spin_until([&] { return load_acquire<Scope::kDevice>(&flag) == turn; },
                           deadline_in(60'000'000'000));
            right = right && came;
            if (turn > 0) right = right && payload[(turn - 1) * 32 + lane_id()] == 7;
            payload[turn * 32 + lane_id()] = 7;
            warp_sync();
            if (elect_one()) store_release<Scope::kDevice>(&flag, turn + 1);
        });
        CHECK(right);
        CHECK_EQUAL(flag, 4u);
    });
}

TEST(spin_until_gives_up_at_the_deadline_and_not_before) {
    under_schedules([](Random&) {
        constexpr uint64_t kNs = 3'000'000;
        bool ready = true;
        uint64_t waited = 0;
        int others = 0;
        launch({.blocks = 1, .threads = 64}, [&] {
            if (thread_index() == 0) {
                const uint64_t begin = host::monotonic_ns();
                ready = spin_until([] { return false; }, deadline_in(kNs));
                waited = host::monotonic_ns() - begin;
            } else {
                ++others;
            }
        });
        CHECK(!ready);
        CHECK(waited >= kNs);
        CHECK_EQUAL(others, 63);
    });
}

TEST(an_idle_launch_asks_its_waiter_before_it_sleeps) {
    struct Waiter final : host::IdleWaiter {
        std::string calls;
        bool ready = false;
        bool pump() override {
            calls += 'p';
            return false;
        }
        bool pass_time() override {
            calls += 't';
            return false;
        }
        void arm() override { calls += 'a'; }
        void sleep(uint64_t) override {
            calls += 's';
            ready = true;
        }
        void disarm() override { calls += 'd'; }
    } waiter;
    executor().set_idle_waiter(&waiter);
    bool came = false;
    launch({.blocks = 1, .threads = 32},
           [&] { came = spin_until([&] { return waiter.ready; }, deadline_in(60'000'000'000)); });
    executor().set_idle_waiter(nullptr);
    CHECK(came);
    // Everyone looks once more between arming and sleeping, so at least one pump lies between them.
    const size_t armed = waiter.calls.find('a');
    const size_t slept = waiter.calls.find('s');
    CHECK_THAT(armed != std::string::npos && slept != std::string::npos, waiter.calls);
    CHECK_THAT(waiter.calls.substr(armed, slept - armed).find('p') != std::string::npos,
               waiter.calls);
}

TEST(the_rank_clock_does_not_count_polling) {
    // The waiting thread polls for 20 ms of wall time; its clock must stand still meanwhile.
    uint64_t begin = 0;
    uint64_t end = 0;
    executor().clock().enter_operation();
    launch({.blocks = 1, .threads = 32}, [&] {
        if (thread_index() != 0) return;
        begin = now_ns();
        const bool came = spin_until([] { return false; }, deadline_in(20'000'000));
        end = came ? begin + 1'000'000'000 : now_ns();
    });
    executor().clock().leave_operation();
    CHECK_THAT(end - begin < 5'000'000, std::to_string(end - begin) + " ns");
}

// ---- errors: each names block, warp and lane, and the executor works on (error_of() checks that)

TEST(error_divergent_collective) {
    const std::string text = error_of({.blocks = 2, .threads = 64}, [] {
        if (block_index() == 1 && thread_index() == 40) {
            ballot(true);
        } else {
            warp_sync();
        }
    });
    check_contains(text, {"divergent", "block 1 warp 1 lane", "ballot", "warp_sync", "lane 8"});
}

TEST(error_masks_that_do_not_match) {
    const std::string text = error_of({.blocks = 1, .threads = 32},
                                      [] { warp_sync(lane_id() == 5 ? 0xFFu : kFullWarp); });
    check_contains(text, {"divergent", "block 0 warp 0 lane 5", "warp_sync"});
}

TEST(error_mask_without_the_caller) {
    const std::string text = error_of({.blocks = 1, .threads = 64}, [] {
        if (thread_index() == 35) shuffle(1, 0, 1u);
    });
    check_contains(text, {"block 0 warp 1 lane 3 calls shuffle", "does not contain it"});
}

TEST(error_mask_that_nobody_shares) {
    const std::string text = error_of({.blocks = 1, .threads = 32}, [] {
        if (lane_id() == 3) warp_sync(0b1000u | 0b10000u);
    });
    check_contains(text, {"block 0 warp 0 lane", "lane 4", "warp_sync"});
}

TEST(error_lane_ends_while_its_warp_waits) {
    const std::string text = error_of({.blocks = 3, .threads = 96}, [] {
        if (block_index() == 2 && thread_index() == 95) return;  // after the others have called
        warp_reduce<Sum>(1);
    });
    check_contains(text, {"block 2 warp 2 lane 31 ended", "waits for it in warp_reduce<Sum>"});
}

TEST(error_lane_had_ended_before_its_warp_waits) {
    const std::string text = error_of({.blocks = 1, .threads = 64}, [] {
        if (thread_index() == 32) return;  // before the others call
        warp_prefix_sum(1);
    });
    check_contains(text,
                   {"block 0 warp 1 lane 1 waits in warp_prefix_sum for lane 0", "has ended"});
}

TEST(error_lane_ends_while_its_warp_waits_in_any_order) {
    under_schedules([](Random& random) {
        executor().set_schedule(host::make_random_schedule(random.bits()));
        const std::string text = error_of({.blocks = 1, .threads = 32}, [] {
            if (lane_id() != 17) warp_sync();
        });
        check_contains(text, {"block 0 warp 0 lane", "lane 17", "warp_sync", "schedule random:"});
    });
}

TEST(error_everyone_waits_forever) {
    const std::string text = error_of({.blocks = 2, .threads = 64}, [] {
        if (block_index() == 0) return;
        if (warp_id() == 0) {
            block_sync();
        } else {
            bar_sync(3, 64);
        }
    });
    check_contains(text,
                   {"deadlock",
                    "block 1 warp 0 lane 0..31 in block_sync",
                    "block 1 warp 1 lane 0..31 in bar_sync 3"});
}

TEST(error_some_in_block_sync_and_some_in_grid_sync) {
    const std::string text = error_of({.blocks = 2, .threads = 32, .cooperative = true}, [] {
        if (block_index() == 0 && lane_id() < 4) {
            block_sync();
        } else {
            grid_sync();
        }
    });
    check_contains(text,
                   {"deadlock",
                    "block 0 warp 0 lane 0..3 in block_sync",
                    "block 0 warp 0 lane 4..31 in grid_sync",
                    "block 1 warp 0 lane 0..31"});
}

TEST(error_bar_sync_counts_differ) {
    const std::string text = error_of({.blocks = 1, .threads = 96}, [] {
        if (warp_id() < 2) bar_sync(2, warp_id() == 0 ? 96 : 64);
    });
    check_contains(text, {"block 0 warp 1 lane 0 calls bar_sync(2) for 64", "wait in it for 96"});
}

TEST(error_bar_sync_arguments) {
    for (const auto& [id, count] : {std::pair{16, 32}, {-1, 32}, {0, 33}, {0, 0}, {0, 128}}) {
        const std::string text = error_of({.blocks = 1, .threads = 64}, [id = id, count = count] {
            if (thread_index() == 1) bar_sync(id, count);
        });
        check_contains(text,
                       {"block 0 warp 0 lane 1 calls bar_sync(" + std::to_string(id) + ", " +
                        std::to_string(count) + ")"});
    }
}

TEST(error_grid_sync_needs_a_cooperative_launch) {
    const std::string text = error_of({.blocks = 2, .threads = 32}, [] {
        if (block_index() == 1 && lane_id() == 9) grid_sync();
    });
    check_contains(text, {"block 1 warp 0 lane 9 calls grid_sync", "not cooperative"});
}

TEST(error_launch_shapes) {
    for (const auto& [blocks, threads] : {std::pair{0, 32}, {1, 0}, {1, 33}, {1, 1056}}) {
        const std::string text = error_of({.blocks = blocks, .threads = threads}, [] {});
        check_contains(text, {std::to_string(blocks) + " blocks x " + std::to_string(threads)});
    }
}

TEST(error_launch_inside_a_launch) {
    std::string text;
    launch({.blocks = 1, .threads = 32}, [&] {
        if (thread_index() != 0) return;
        try {
            launch({.blocks = 1, .threads = 32}, [] {});
        } catch (const host::DeviceError& error) {
            text = error.what();
        }
    });
    check_contains(text, {"a kernel cannot launch a kernel"});
}

// ---- stacks

namespace {

[[gnu::noinline]] int recurse(volatile int* depth) {
    volatile char frame[512];
    frame[0] = static_cast<char>(*depth);
    *depth = *depth + 1;
    return *depth > 0 ? frame[0] + recurse(depth) : 0;
}

}  // namespace

TEST(stack_overflow_names_the_thread_and_kills_the_process) {
    int channel[2];
    CHECK(pipe(channel) == 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(channel[1], STDERR_FILENO);
        launch({.blocks = 2, .threads = 64}, [] {
            volatile int depth = 0;
            if (block_index() == 1 && thread_index() == 37) recurse(&depth);
        });
        _exit(0);
    }
    close(channel[1]);
    std::string text;
    char chunk[512];
    for (ssize_t n = 0; (n = read(channel[0], chunk, sizeof(chunk))) > 0;) text.append(chunk, n);
    close(channel[0]);
    int status = 0;
    waitpid(child, &status, 0);
    check_contains(text, {"stack overflow in a kernel", "block 1 warp 1 lane 5"});
#if EP_UNDER_ASAN
    CHECK_THAT(!WIFEXITED(status) || WEXITSTATUS(status) != 0,
               "it went on");  // after its own report
#else
    CHECK_THAT(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV,
               "status " + std::to_string(status));
#endif
}

TEST(stacks_hold_what_they_promise) {
    int sum = 0;
    launch({.blocks = 1, .threads = 32}, [&] {
        volatile char frame[host::StackPool::kStackBytes - 12 * 1024];
        frame[0] = 1;
        frame[sizeof(frame) - 1] = 1;
        warp_sync();
        sum += frame[0] + frame[sizeof(frame) - 1];
    });
    CHECK_EQUAL(sum, 64);
}

// ---- schedules

namespace {

// The order in which threads pass their memory operations, as one number.
uint64_t trace_hash() {
    uint64_t hash = 0xCBF29CE484222325ull;
    uint32_t word = 0;
    launch({.blocks = 3, .threads = 64}, [&] {
        for (int i = 0; i < 4; ++i) {
            add_relaxed<Scope::kDevice>(&word, 1);
            hash = (hash ^ static_cast<uint64_t>(block_index() * 64 + thread_index())) *
                   0x100000001B3ull;
            if (i == 1) warp_sync();
            if (i == 2) block_sync();
        }
    });
    return hash;
}

}  // namespace

TEST(a_seed_is_an_interleaving) {
    Random random(ep::testing::seed());
    std::set<uint64_t> hashes;
    for (int i = 0; i < 16; ++i) {
        const uint64_t seed = random.bits();
        executor().set_schedule(host::make_random_schedule(seed));
        const uint64_t first = trace_hash();
        const uint64_t next = trace_hash();  // the generator goes on
        executor().set_schedule(host::make_random_schedule(seed));
        CHECK_EQUAL(trace_hash(), first);
        CHECK_EQUAL(trace_hash(), next);
        CHECK_EQUAL(executor().schedule().describe(), "random:" + std::to_string(seed));
        hashes.insert({first, next});
    }
    CHECK_EQUAL(hashes.size(), 32u);
    executor().set_schedule(host::make_round_robin_schedule());
    CHECK_EQUAL(trace_hash(), trace_hash());
}

TEST(round_robin_serves_threads_in_turn) {
    std::vector<int> order;
    launch({.blocks = 1, .threads = 64}, [&] {
        order.push_back(thread_index());
        block_sync();
        order.push_back(thread_index());
    });
    for (int i = 0; i < 64; ++i) CHECK_EQUAL(order[i], i);
    CHECK_EQUAL(order.size(), 128u);
    CHECK_EQUAL(std::set<int>(order.begin() + 64, order.end()).size(), 64u);
}
