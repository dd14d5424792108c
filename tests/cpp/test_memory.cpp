// Memory within a launch: shared memory, scoped atomics, and copies and loops that a warp or a block shares.
// sanitize: address
#include <cstring>
#include <set>
#include <vector>

#include "launches.h"

using namespace ep;
using ep::testing::launch;
using ep::testing::Random;
using ep::testing::under_schedules;

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

namespace {

constexpr int kRowVectors = 24;
constexpr size_t kRowBytes = kRowVectors * sizeof(Vector);

// Two warps, each with a RowCopy: through its piece of shared memory, or without.
template <class F>
void with_row_copies(bool has_pieces, F kernel) {
    const size_t piece = RowCopy::piece_bytes(kRowBytes);
    launch({.blocks = 1, .threads = 64, .shared_bytes = 2 * piece}, [&] {
        SharedArena arena;
        std::byte* pieces = arena.take<std::byte>(static_cast<int>(2 * piece));
        RowCopy row(has_pieces ? pieces + warp_id() * piece : nullptr, piece);
        kernel(row);
    });
}

}  // namespace

TEST(rows_are_where_they_were_given_when_they_are_finished) {
    under_schedules([](Random& random) {
        constexpr int kRows = 3;
        constexpr int kPlaces = 2;  // of each row
        std::vector<Vector> source(2 * kRows * kRowVectors);
        for (Vector& vector : source) {
            for (uint32_t& word : vector.words) word = static_cast<uint32_t>(random.bits());
        }
        for (const bool has_pieces : {false, true}) {
            std::vector<Vector> copies(kPlaces * source.size());
            bool right = true;
            with_row_copies(has_pieces, [&](RowCopy& row) {
                const auto begin = [&](int i) { return (warp_id() * kRows + i) * kRowVectors; };
                for (int i = 0; i < kRows; ++i) {
                    row.take(source.data() + begin(i), kRowBytes);
                    for (int place = 0; place < kPlaces; ++place)
                        row.give(copies.data() + place * source.size() + begin(i));
                }
                row.finish();
                block_sync();
                for (int place = 0; place < kPlaces; ++place) {
                    const Vector* copy = copies.data() + place * source.size();
                    right = right &&
                            std::memcmp(copy, source.data(), source.size() * sizeof(Vector)) == 0;
                }
            });
            CHECK(right);
        }
    });
}

// As on a GPU, where bulk copies are on their way until somebody waits for them.
TEST(a_row_that_is_not_finished_is_not_there) {
    std::vector<Vector> source(kRowVectors, Vector{{1, 2, 3, 4}});
    std::vector<Vector> copy(kRowVectors);
    with_row_copies(true, [&](RowCopy& row) {
        if (warp_id() != 0) return;
        row.take(source.data(), kRowBytes);
        row.give(copy.data());
    });
    for (const Vector& vector : copy) CHECK_EQUAL(vector.words[0], 0u);
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
