// Symmetric memory on the CUDA target. Without NVSHMEM it is a cudaMalloc that ranks of other
// processes on this host map through CUDA IPC, while ranks that are threads of one process share plain
// pointers. With NVSHMEM (EP_WITH_NVSHMEM) it lies in NVSHMEM's heap, which maps the peers itself and
// serves the others through queue pairs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "device/device_runtime.h"
#include "transport/cuda/transport.cuh"
#include "transport/symmetric_memory_options.h"
#include "transport/traffic.h"

#if defined(EP_WITH_NVSHMEM)
#include "transport/cuda/nvshmem_world.h"
#endif

namespace ep {

class SymmetricMemory {
  public:
    SymmetricMemory(Device& device, const SymmetricMemoryOptions& options);
    ~SymmetricMemory();
    SymmetricMemory(const SymmetricMemory&) = delete;
    SymmetricMemory& operator=(const SymmetricMemory&) = delete;

    // What another rank needs to map this memory.
    std::string local_handle() const;
    // handles[r] is rank r's local_handle(). Maps the others' memory; with NVSHMEM it is collective.
    void connect(const std::vector<std::string>& handles);
    // CUDA's handles name nothing that would outlive the process.
    void release_handle() {}
    // It stays until the process ends: a rank that is late may write to it, and must not find it gone.
    void keep() { is_kept_ = true; }

    bool connected() const { return peer_table_ != nullptr; }
    std::byte* local_base() const { return base_; }
    Transport transport() const;
    // The host target counts.
    const Traffic& traffic() const;

    // Faults belong to the host target.
    void set_path_fault(int dst, uint64_t delay_ns, double bytes_per_s);
    void set_receive_fault(size_t begin, size_t end, uint64_t delay_ns);
    void set_delivery(const std::string& policy, uint64_t seed);

  private:
    size_t total_bytes() const { return options_.control_bytes + options_.data_bytes; }
    void publish(const std::vector<std::byte*>& peers);

    Device& device_;
    SymmetricMemoryOptions options_;
    std::byte* base_ = nullptr;
    std::byte** peer_table_ = nullptr;  // in device memory
    std::vector<void*> opened_;         // IPC mappings
    bool all_in_reach_ = false;
    bool is_kept_ = false;
#if defined(EP_WITH_NVSHMEM)
    NvshmemWorld::Membership membership() const;

    QueuePairs queue_pairs_{};
#endif
};

}  // namespace ep
