// The memory of a rank on the host target, and that of its peers. It is anonymous (memfd): it has no
// name, so nothing can stay behind when a rank is killed, and it does not count against the size of
// /dev/shm. Ranks that are threads of one process share the mapping, and keep it while they use it,
// because a rank may close while another is about to wake it. Other processes open it through
// /proc/<pid>/fd or, from another PID namespace, get its descriptor over a Unix socket.
//
// A process number may have come to mean another process, and anything may be behind a descriptor.
// So nothing is written before what was opened has proved to be that memory: a regular file, of the
// expected size, sealed against changes of it, with the token of the handle inside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "transport/host/descriptor.h"
#include "transport/host/descriptor_server.h"

namespace ep::host {

// What another rank needs to map a memory. Crosses the group as bytes.
struct MemoryHandle {
    char magic[8];
    uint64_t bytes;
    Token token;             // random; lies in the memory as well
    uint64_t pid_namespace;  // in which `process` is meant
    int64_t process;
    int64_t descriptor;
    Token server;  // name of the socket
};

class SharedMemory {
  public:
    // Zeroed. Throws std::runtime_error.
    explicit SharedMemory(size_t bytes);

    const std::shared_ptr<std::byte>& mapping() const { return mapping_; }
    std::string handle() const;
    // Until release_handle() other processes can map this memory; those of other PID namespaces,
    // once this is called.
    void serve();
    void release_handle();

  private:
    size_t bytes_;
    Token token_;
    Descriptor descriptor_;
    std::optional<DescriptorServer> server_;
    std::shared_ptr<std::byte> mapping_;
};

// A rank's handle, checked for its form and for `bytes`. Throws std::runtime_error that names `rank`.
MemoryHandle parse_handle(const std::string& text, int rank, size_t bytes);
bool is_in_this_pid_namespace(const MemoryHandle& handle);
// The memory behind a handle. Throws std::runtime_error that names `rank`.
std::shared_ptr<std::byte> map_memory(const MemoryHandle& handle, int rank);

}  // namespace ep::host
