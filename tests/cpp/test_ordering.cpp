// What orders memory between the threads of a launch, under ThreadSanitizer: what the contracts in
// device.cuh promise is no race, and what they do not promise is one, however the fibers take turns.
// sanitize: thread
#include <memory>
#include <string>
#include <vector>

#include "kernels/protocol/operation.cuh"
#include "launches.h"
#include "ranks.h"

using namespace ep;
using ep::testing::launch;
using ep::testing::OperatingRank;
using ep::testing::Random;

namespace {

constexpr uint64_t kPatienceNs = 60'000'000'000;

// A launch under the plain order and under several random ones, each with new memory: kernel(memory).
template <class F>
void under_schedules(const LaunchShape& shape, F kernel) {
    Random random(ep::testing::seed());
    host::Executor executor(host::ClockMode::kRank);
    for (int i = 0; i < 4; ++i) {
        if (i > 0) executor.set_schedule(host::make_random_schedule(random.bits()));
        std::vector<uint32_t> memory(256);
        launch(executor, shape, [&] { kernel(memory.data()); });
    }
}

constexpr LaunchShape kWarp{1, kWarpSize, 0, true};
constexpr LaunchShape kTwoWarps{1, 2 * kWarpSize, 0, true};
constexpr LaunchShape kTwoBlocks{2, kWarpSize, 0, true};

bool is_thread(int block, int thread) { return block_index() == block && thread_index() == thread; }

// Word 0 is written by one thread and read by another; between them stands `meet`.
template <class Meet>
void write_and_read(const LaunchShape& shape, int writer, int reader, Meet meet) {
    under_schedules(shape, [&](uint32_t* memory) {
        const int me = block_index() * num_threads() + thread_index();
        if (me == writer) memory[0] = 42;
        meet();
        if (me == reader && memory[0] != 42) host::current_executor->fail("not seen");
    });
}

// Block 0 writes word 0 and says so in word 1; block 1 waits for that and reads.
template <class Say, class Hear>
void message(Say say, Hear hear) {
    under_schedules(kTwoBlocks, [&](uint32_t* memory) {
        if (is_thread(0, 0)) {
            memory[0] = 42;
            say(&memory[1]);
        }
        if (is_thread(1, 0)) {
            const bool came =
                spin_until([&] { return hear(&memory[1]) == 1; }, deadline_in(kPatienceNs));
            memory[2] = came ? memory[0] : 0;
        }
    });
}

// Every block writes a word of its own; the last one to add to word 0 reads them all.
template <class Add>
void last_block_reads(Add add) {
    under_schedules(kTwoBlocks, [&](uint32_t* memory) {
        if (thread_index() != 0) return;
        memory[1 + block_index()] = 1;
        if (add(&memory[0]) + 1 == static_cast<uint32_t>(num_blocks()))
            memory[10] = memory[1] + memory[2];
    });
}

void say_with_release(uint32_t* word) { add_release<Scope::kDevice>(word, 1); }
uint32_t hear_with_acquire(const uint32_t* word) { return load_acquire<Scope::kDevice>(word); }

}  // namespace

// ---- between blocks

TEST(release_and_acquire_order_blocks) { message(say_with_release, hear_with_acquire); }
RACE(relaxed_add_releases_nothing) {
    message([](uint32_t* word) { add_relaxed<Scope::kDevice>(word, 1); }, hear_with_acquire);
}
RACE(relaxed_load_acquires_nothing) {
    message(say_with_release, [](uint32_t* word) { return load_relaxed<Scope::kDevice>(word); });
}
RACE(relaxed_store_releases_nothing) {
    message([](uint32_t* word) { store_relaxed<Scope::kDevice>(word, 1); }, hear_with_acquire);
}

TEST(last_block_sees_all_others) {
    last_block_reads([](uint32_t* word) { return add_acq_rel<Scope::kDevice>(word, 1); });
}
RACE(last_block_that_only_releases) {
    last_block_reads([](uint32_t* word) { return add_release<Scope::kDevice>(word, 1); });
}
RACE(last_block_that_only_counts) {
    last_block_reads([](uint32_t* word) { return add_relaxed<Scope::kDevice>(word, 1); });
}

TEST(grid_sync_orders_blocks) {
    write_and_read(kTwoBlocks, 0, kWarpSize, [] { grid_sync(); });
}
RACE(block_sync_orders_no_other_block) {
    write_and_read(kTwoBlocks, 0, kWarpSize, [] { block_sync(); });
}

// An atomic of block scope that another block could reach is refused before it can be a race.
TEST(block_scope_stays_in_the_block) {
    host::Executor executor(host::ClockMode::kRank);
    uint32_t word = 0;
    const auto add = [&](bool in_shared_memory) {
        LaunchShape shape = kTwoBlocks;
        shape.shared_bytes = sizeof(word);
        launch(executor, shape, [&] {
            SharedArena arena;
            auto* shared = arena.take<uint32_t>(1);
            add_relaxed<Scope::kBlock>(in_shared_memory ? shared : &word, 1);
        });
    };
    add(true);
    std::string error;
    try {
        add(false);
    } catch (const host::DeviceError& refusal) {
        error = refusal.what();
    }
    CHECK_THAT(!EP_UNDER_TSAN || error.find("block scope") != std::string::npos, error);
}

// ---- between warps

TEST(block_sync_orders_warps) {
    write_and_read(kTwoWarps, 0, kWarpSize, [] { block_sync(); });
}
TEST(block_any_orders_warps) {
    write_and_read(kTwoWarps, 0, kWarpSize, [] { (void)block_any(false); });
}
TEST(named_barrier_orders_warps) {
    write_and_read(kTwoWarps, 0, kWarpSize, [] { bar_sync(3, 2 * kWarpSize); });
}
RACE(warp_sync_orders_no_other_warp) {
    write_and_read(kTwoWarps, 0, kWarpSize, [] { warp_sync(); });
}
RACE(named_barrier_orders_only_who_comes) {
    write_and_read(kTwoWarps, 0, kWarpSize, [] { bar_sync(warp_id(), kWarpSize); });
}
RACE(what_follows_a_barrier_is_not_ordered) {
    under_schedules(kTwoWarps, [](uint32_t* memory) {
        block_sync();
        if (thread_index() == 0) memory[0] = 42;
        if (thread_index() == kWarpSize) memory[1] = memory[0];
        block_sync();
    });
}

// ---- between lanes

TEST(warp_sync_orders_lanes) {
    write_and_read(kWarp, 0, 1, [] { warp_sync(); });
}
RACE(warp_sync_of_other_lanes_orders_nothing) {
    write_and_read(kWarp, 0, 16, [] { warp_sync(lane_id() < 16 ? 0xFFFFu : 0xFFFF0000u); });
}
RACE(shuffle_orders_nothing) {
    write_and_read(kWarp, 0, 1, [] { (void)shuffle(1, 0); });
}
RACE(ballot_orders_nothing) {
    write_and_read(kWarp, 0, 1, [] { (void)ballot(true); });
}
RACE(reduction_orders_nothing) {
    write_and_read(kWarp, 0, 1, [] { (void)warp_reduce<Sum>(1); });
}

namespace {

template <class Between>
void copy_and_read(Between between) {
    std::vector<Vector> source(kWarpSize);
    under_schedules(kWarp, [&](uint32_t* memory) {
        copy_warp(memory, source.data(), 16 * sizeof(Vector));
        between();
        if (lane_id() == 0) memory[200] = memory[16 * 4 - 1];
    });
}

}  // namespace

TEST(copy_is_there_after_a_warp_sync) {
    copy_and_read([] { warp_sync(); });
}
RACE(copy_is_not_there_before_a_warp_sync) {
    copy_and_read([] {});
}

// ---- between ranks

// A rank reads what it has received, then both hand over, and a block of the other that waited for none
// of it writes there.
TEST(a_hand_over_orders_what_was_read_before_what_any_block_sends) {
    constexpr int kReader = 0;
    constexpr int kWriter = 1;
    constexpr LaunchShape kBlocks{2, kWarpSize, 0, true};
    std::vector<std::unique_ptr<OperatingRank>> ranks;
    std::vector<std::string> handles;
    for (const int rank : {kReader, kWriter}) {
        ranks.push_back(std::make_unique<OperatingRank>(rank, 2));
        handles.push_back(ranks.back()->memory.local_handle());
    }
    for (const auto& rank : ranks) rank->memory.connect(handles);
    ep::testing::on_ranks(2, [&](int rank) {
        OperatingRank& self = *ranks[rank];
        self.workspace->layout = self.args(256).layout;  // of the last operation
        const OperationArgs args = self.args(128, kPatienceNs);
        const size_t row = args.map.begin;
        uint64_t was_there = 0;
        self.launch(
            [&](const Transport& transport) {
                if (rank == kReader && is_thread(0, 0)) was_there = *self.words(row);
                block_sync();
                const OpenOperation open = current_operation(args);
                send_headers(args, open);
                const bool may_send = hand_over(args, open);
                if (!may_send) host::current_executor->fail("no hand-over");
                if (rank == kWriter && block_index() == 1)
                    transport.put_warp(
                        kReader, row, transport.local(row + 1024), sizeof(Vector), 0);
            },
            kBlocks);
        CHECK_EQUAL(was_there, 0u);
    });
}

// ---- launches

TEST(launches_follow_each_other) {
    host::Executor executor(host::ClockMode::kRank);
    std::vector<uint32_t> memory(4);
    for (uint32_t i = 1; i <= 8; ++i) {
        launch(executor, kTwoBlocks, [&] {
            if (is_thread(i % 2, i % kWarpSize)) memory[0] += i;
        });
        memory[0] += 1;
    }
    CHECK_EQUAL(memory[0], 44u);
}

// The sanitizer's record of a fiber serves again in the next launch.
RACE(blocks_of_a_later_launch_are_not_ordered) {
    host::Executor executor(host::ClockMode::kRank);
    std::vector<uint32_t> memory(2);
    launch(executor, kTwoBlocks, [&] {
        if (thread_index() == 0) memory[block_index()] = 1;
    });
    launch(executor, kTwoBlocks, [&] {
        if (thread_index() == 0) memory[0] += 1;
    });
}

TEST(launch_follows_one_that_was_abandoned) {
    host::Executor executor(host::ClockMode::kRank);
    uint32_t word = 0;
    for (int i = 0; i < 3; ++i) {
        bool failed = false;
        try {
            launch(executor, kTwoBlocks, [&] {
                if (is_thread(1, 0)) {
                    word += 1;
                    host::current_executor->fail("enough");
                }
                block_sync();
                grid_sync();
            });
        } catch (const host::DeviceError&) {
            failed = true;
        }
        CHECK(failed);
        word += 1;
    }
    CHECK_EQUAL(word, 6u);
}
