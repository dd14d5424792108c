// Every error that the executor promises: each names block, warp and lane, and the executor works on
// (error_of() checks that).
// sanitize: address
#include <string>
#include <utility>

#include "launches.h"

using namespace ep;
using ep::testing::check_contains;
using ep::testing::error_of;
using ep::testing::executor;
using ep::testing::launch;
using ep::testing::Random;
using ep::testing::under_schedules;

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

TEST(a_launch_may_have_16384_threads_and_no_more) {
    int threads = 0;
    launch({.blocks = 16, .threads = 1024}, [&] { ++threads; });
    CHECK_EQUAL(threads, 16384);
    for (const int blocks : {17, 1'000'000, 2'147'483'647}) {
        const std::string text = error_of({.blocks = blocks, .threads = 1024}, [] {});
        check_contains(text, {std::to_string(blocks) + " blocks x 1024", "at most 16384 threads"});
    }
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

TEST(error_some_lanes_in_block_sync_and_some_in_warp_sync) {
    const std::string text = error_of({.blocks = 1, .threads = 32}, [] {
        if (lane_id() < 4) {
            block_sync();
        } else {
            warp_sync();
        }
    });
    check_contains(text,
                   {"deadlock",
                    "block 0 warp 0 lane 0..3 in block_sync",
                    "block 0 warp 0 lane 4..31 in warp_sync"});
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

TEST(error_shared_arena_overflow) {
    const std::string text = error_of({.blocks = 1, .threads = 32, .shared_bytes = 64}, [] {
        SharedArena arena;
        arena.take<int>(16);
        arena.take<char>(1);
    });
    check_contains(text, {"takes 65 bytes of shared memory", "gave 64"});
}

TEST(error_row_beyond_its_piece) {
    const std::string text = error_of({.blocks = 1, .threads = 32, .shared_bytes = 64}, [] {
        RowCopy row(SharedArena().take<std::byte>(64), 64);
        const Vector vectors[5] = {};
        row.take(vectors, sizeof(vectors));
    });
    check_contains(text, {"a row of 80 bytes is copied through 64 bytes of shared memory"});
}
