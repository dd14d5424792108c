// A launch as a whole: who its threads are, when they end, how they wait, in which order they run and on
// which stacks.
// sanitize: address
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "launches.h"

using namespace ep;
using ep::testing::check_contains;
using ep::testing::executor;
using ep::testing::launch;
using ep::testing::Random;
using ep::testing::under_schedules;

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

TEST(lanes_that_wait_together_give_up_together) {
    under_schedules([](Random& random) {
        const int late_lane = random.between(1, 31);
        int given_up = 0;
        launch({.blocks = 1, .threads = 32}, [&] {
            // The first lane's deadline is that of all, however early or late they come with their own.
            const uint64_t ns = lane_id() == 0           ? 3'000'000
                                : lane_id() == late_lane ? 0
                                                         : 60'000'000'000;
            const bool came =
                warp_spin_until([] { return ballot(false) != 0; }, deadline_in(ns), [] {});
            given_up += came ? 0 : 1;
        });
        CHECK_EQUAL(given_up, 32);
    });
}

TEST(lanes_that_wait_together_see_what_came_while_nobody_could_move) {
    // What another rank writes comes while the launch is idle. A lane that has read before and still waits for the
    // others in its look has not seen it.
    struct Waiter final : host::IdleWaiter {
        int pumps = 0;
        bool pump() override {
            ++pumps;
            return true;
        }
        bool pass_time() override { return false; }
        void arm() override {}
        void sleep(uint64_t) override {}
        void disarm() override {}
    };
    under_schedules([](Random& random) {
        Waiter waiter;
        const int pumps = random.between(1, 8);
        const int reading_lane = random.between(0, 31);
        executor().set_idle_waiter(&waiter);
        int came = 0;
        launch({.blocks = 1, .threads = 32}, [&] {
            const auto look = [&] {
                return ballot(lane_id() == reading_lane && waiter.pumps >= pumps) != 0;
            };
            came += warp_spin_until(look, deadline_in(60'000'000'000), [] {}) ? 1 : 0;
        });
        executor().set_idle_waiter(nullptr);
        CHECK_EQUAL(came, 32);
        CHECK_EQUAL(waiter.pumps, pumps);
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

TEST(the_rank_clock_of_a_thread_that_loses_its_core_never_goes_back) {
    std::atomic<bool> stop{false};
    std::vector<std::thread> others;
    for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i)
        others.emplace_back([&] {
            while (!stop) {
            }
        });
    host::RankClock clock(host::ClockMode::kRank);
    uint64_t last = clock.now_ns();
    uint64_t back = 0;
    // Long enough for hundreds of changes of threads, most of which come while the clock is read.
    const uint64_t end = clock.monotonic_ns() + 1'000'000'000;
    while (clock.monotonic_ns() < end) {
        clock.enter_operation();
        clock.leave_operation();
        for (int i = 0; i < 100; ++i) {
            const uint64_t now = clock.now_ns();
            back = std::max(back, last - std::min(now, last));
            last = now;
        }
    }
    stop = true;
    for (std::thread& other : others) other.join();
    CHECK_EQUAL(back, 0u);
}

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
