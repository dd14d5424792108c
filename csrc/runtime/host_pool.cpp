#include "runtime/host_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace ep {

HostPool::~HostPool() {
    for (const Idle& idle : idle_) munmap(idle.memory, idle.bytes);
}

std::unique_ptr<HostPool::Block> HostPool::take(size_t bytes) {
    constexpr size_t kPage = 4096;
    bytes = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
    {
        const std::scoped_lock lock(mutex_);
        // Only an exact fit: calls repeat their sizes, and a loose fit would hoard memory.
        const auto fit = std::find_if(
            idle_.rbegin(), idle_.rend(), [&](const Idle& idle) { return idle.bytes == bytes; });
        if (fit != idle_.rend()) {
            void* memory = fit->memory;
            idle_.erase(std::next(fit).base());
            return std::make_unique<Block>(shared_from_this(), memory, bytes);
        }
    }
    void* memory = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return std::make_unique<Block>(shared_from_this(), memory, bytes);
}

void HostPool::give_back(void* memory, size_t bytes) {
    Idle discarded{nullptr, 0};
    {
        const std::scoped_lock lock(mutex_);
        if (idle_.size() == kMaxIdle) {
            discarded = idle_.front();
            idle_.erase(idle_.begin());
        }
        idle_.push_back({memory, bytes});
    }
    if (discarded.memory != nullptr) munmap(discarded.memory, discarded.bytes);
}

}  // namespace ep
