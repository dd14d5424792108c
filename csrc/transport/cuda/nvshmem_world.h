// NVSHMEM as this process uses it. NVSHMEM has one world per process, its heap calls are collective and
// it cannot be left by one rank alone; so it is joined once and stays until the process ends, and the
// memory of a closed buffer is kept for the next one.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

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

    // Collective, in the same order on all ranks: zeroed symmetric memory.
    std::byte* allocate(size_t bytes);
    // Local. The memory serves a later allocate() of the same size.
    void give_back(std::byte* memory);

    // Where `rank`'s copy of symmetric memory can be addressed, or nullptr.
    std::byte* peer(std::byte* memory, int rank) const;
    QueuePairs queue_pairs() const { return queue_pairs_; }

  private:
    struct Block {
        std::byte* memory;
        bool in_use;
    };

    void create_queue_pairs();

    std::mutex mutex_;
    bool joined_ = false;
    Membership membership_;
    QueuePairs queue_pairs_{};
    std::multimap<size_t, Block> blocks_;
};

}  // namespace ep
