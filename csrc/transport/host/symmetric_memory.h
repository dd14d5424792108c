// Symmetric memory on the host target: the shared memory of all ranks, and the link between them.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device_runtime.h"
#include "transport/host/link.h"
#include "transport/host/shared_memory.h"
#include "transport/host/transport.h"
#include "transport/symmetric_memory_options.h"
#include "transport/traffic.h"

namespace ep {

class SymmetricMemory {
  public:
    SymmetricMemory(Device& device, const SymmetricMemoryOptions& options);
    ~SymmetricMemory();
    SymmetricMemory(const SymmetricMemory&) = delete;
    SymmetricMemory& operator=(const SymmetricMemory&) = delete;

    // What another rank needs to map this memory.
    std::string local_handle() const { return memory_.handle(); }
    // handles[r] is rank r's local_handle(). Local, maps the others' memory.
    void connect(const std::vector<std::string>& handles);
    // The others have mapped this rank's memory: no further process can.
    void release_handle() { memory_.release_handle(); }
    // Who writes to it has a mapping of its own.
    void keep() {}

    bool connected() const { return link_ != nullptr; }
    std::byte* local_base() const { return memory_.mapping().get(); }
    Transport transport() const;
    // What kernels have asked of it so far.
    const Traffic& traffic() const;

    void set_path_fault(int dst, uint64_t delay_ns, double bytes_per_s);
    void set_receive_fault(size_t begin, size_t end, uint64_t delay_ns);
    void set_delivery(const std::string& policy, uint64_t seed);

  private:
    host::PeerMemory peer_memory(std::byte* base) const;
    size_t total_bytes() const;
    size_t extras_offset() const;

    Device& device_;
    SymmetricMemoryOptions options_;
    host::SharedMemory memory_;
    std::vector<std::shared_ptr<std::byte>> mapped_;  // by rank
    std::vector<std::byte*> bases_;                   // the same, for kernels
    std::optional<uint64_t> reorder_seed_;
    std::unique_ptr<host::Link> link_;
};

}  // namespace ep
