// Collectives of a warp against scalar models, over masks and schedules; barriers, and the memory that they
// order.
// sanitize: address
#include <array>
#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "launches.h"

using namespace ep;
using ep::testing::executor;
using ep::testing::launch;
using ep::testing::Random;
using ep::testing::under_schedules;

namespace {

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

}  // namespace

// ---- warp collectives

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
