// Reuses the memory of freed output tensors on the host target. A fresh allocation of a dispatch's
// outputs (235 MB at 128 x 7168, EP8, mostly never touched) is mapped and unmapped by the C library
// at every call, and the pages it touches are faulted in anew: over a third of the time of a
// dispatch on the machine where this was measured (EP1, 128 x 7168 x top-8, fp8).
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ep {

class HostPool : public std::enable_shared_from_this<HostPool> {
  public:
    // Memory on loan: goes back to the pool when destroyed, also after the pool's owner is gone.
    class Block {
      public:
        Block(std::shared_ptr<HostPool> pool, void* memory, size_t bytes)
            : pool_(std::move(pool)), memory_(memory), bytes_(bytes) {}
        ~Block() { pool_->give_back(memory_, bytes_); }
        Block(const Block&) = delete;
        Block& operator=(const Block&) = delete;

        void* memory() const { return memory_; }
        size_t bytes() const { return bytes_; }

      private:
        std::shared_ptr<HostPool> pool_;
        void* memory_;
        size_t bytes_;
    };

    ~HostPool();
    // Uninitialised, page aligned.
    std::unique_ptr<Block> take(size_t bytes);

  private:
    struct Idle {
        void* memory;
        size_t bytes;
    };
    static constexpr size_t kMaxIdle = 8;

    void give_back(void* memory, size_t bytes);

    std::mutex mutex_;
    std::vector<Idle> idle_;  // most recently returned last
};

}  // namespace ep
