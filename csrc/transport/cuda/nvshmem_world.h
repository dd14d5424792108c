// NVSHMEM as this process uses it. NVSHMEM has one world per process, its heap calls are collective and
// it cannot be left by one rank alone; so it is joined once and stays until the process ends, and the
// memory of a closed buffer is kept for the next one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "transport/cuda/queue_pairs.cuh"

namespace ep {

class NvshmemWorld {
  public:
    static constexpr size_t kUniqueIdBytes = sizeof(nvshmemx_uniqueid_t);

    struct Membership {
        int rank = 0;
        int num_ranks = 1;
        int num_queue_pairs = 1;
        bool allow_nvlink = true;
        bool allow_mnnvl = false;  // NVLink between hosts
        int device = 0;
    };

    static NvshmemWorld& instance();

    // On rank 0, for the others: where they meet it. Once the world exists, nothing.
    void write_unique_id(const Membership& membership, char* id);
    // Collective; `membership` as before. A second call must ask for the same world.
    void join(const Membership& membership, const char* unique_id);

    // Which blocks of this size are free on this rank, a bit each. Blocks are numbered in the order in which all
    // ranks have made them; later ones than kMostReused are not used again.
    uint64_t free_blocks(size_t bytes);
    // Collective, in the same order on all ranks: zeroed symmetric memory. free_everywhere: free_blocks() of all
    // ranks, combined with AND; ranks give blocks back when their garbage is collected, each at its own time.
    std::byte* allocate(size_t bytes, uint64_t free_everywhere);
    // Local. The memory serves a later allocate() of the same size.
    void give_back(std::byte* memory);

    // Where `rank`'s copy of symmetric memory can be addressed, or nullptr.
    std::byte* peer(std::byte* memory, int rank) const;
    QueuePairs queue_pairs() const { return queue_pairs_; }

  private:
    static constexpr size_t kMostReused = 64;

    struct Block {
        size_t bytes;
        std::byte* memory;
        bool in_use;
    };

    void create_queue_pairs();

    std::mutex mutex_;
    bool joined_ = false;
    Membership membership_;
    QueuePairs queue_pairs_{};
    std::vector<Block> blocks_;
};

}  // namespace ep
