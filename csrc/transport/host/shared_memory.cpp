#include "transport/host/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace ep::host {
namespace {

constexpr char kMagic[sizeof(MemoryHandle::magic)] = "epcpu-1";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The token lies behind what the caller asked for.
size_t token_offset(size_t bytes) { return (bytes + 63) / 64 * 64; }
size_t file_bytes(size_t bytes) { return token_offset(bytes) + sizeof(Token); }
std::byte* token_in(std::byte* memory, size_t bytes) { return memory + token_offset(bytes); }

std::string error_text() { return std::strerror(errno); }

uint64_t pid_namespace() {
    struct stat found;
    return stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

// This process as /proc counts, which may be that of an outer PID namespace.
int64_t process_number() {
    char text[32] = {};
    const ssize_t length = readlink("/proc/self", text, sizeof(text) - 1);
    return length > 0 ? std::atoll(text) : getpid();
}

std::shared_ptr<std::byte> map_shared(const Descriptor& descriptor, size_t bytes) {
    void* memory = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor.number(), 0);
    if (memory == MAP_FAILED) return nullptr;
    return {static_cast<std::byte*>(memory), [bytes](std::byte* begin) { munmap(begin, bytes); }};
}

// Memory that this process created, by its token.
class OwnMemory {
  public:
    static OwnMemory& instance() {
        static OwnMemory memory;
        return memory;
    }
    void add(const Token& token, const std::shared_ptr<std::byte>& mapping, size_t bytes) {
        const std::scoped_lock lock(mutex_);
        std::erase_if(entries_, [](const auto& entry) { return entry.second.mapping.expired(); });
        entries_[token] = {mapping, bytes};
    }
    // nullptr unless it is there and has that size.
    std::shared_ptr<std::byte> find(const Token& token, size_t bytes) {
        const std::scoped_lock lock(mutex_);
        const auto entry = entries_.find(token);
        if (entry == entries_.end() || entry->second.bytes != bytes) return nullptr;
        return entry->second.mapping.lock();
    }

  private:
    struct Entry {
        std::weak_ptr<std::byte> mapping;
        size_t bytes;
    };
    std::mutex mutex_;
    std::map<Token, Entry> entries_;
};

// What to do about the call that has just failed.
const char* reach_rule() {
    if (errno == EMFILE || errno == ENFILE)
        return "Close files of this process, or raise the limit (ulimit -n).";
    if (errno == ENOMEM)
        return "Make the buffer smaller, or let this process have more memory (ulimit -v).";
    return "Ranks of the cpu backend must run on one machine and as one user, and share a PID "
           "namespace or a network namespace. Start containers with --pid=host or --network=host, "
           "pods with shareProcessNamespace: true.";
}
constexpr char kOursRule[] =
    "It must be the sealed memory that this rank made for this buffer. See whether the rank has "
    "died "
    "and another process has taken its number; build the buffer again on all ranks.";

[[noreturn]] void refuse(const MemoryHandle& handle,
                         int rank,
                         const std::string& found,
                         const std::string& rule) {
    throw std::runtime_error("connect: cannot map the memory of rank " + std::to_string(rank) +
                             " (descriptor " + std::to_string(handle.descriptor) + " of process " +
                             std::to_string(handle.process) + "): " + found + ". " + rule);
}

Descriptor open_through_proc(const MemoryHandle& handle, int rank) {
    const std::string path =
        "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.descriptor);
    // A look first: to open a pipe or a device may wait, or do something.
    const Descriptor look(open(path.c_str(), O_PATH | O_CLOEXEC));
    if (!look) refuse(handle, rank, error_text(), reach_rule());
    struct stat found;
    if (fstat(look.number(), &found) != 0 || !S_ISREG(found.st_mode))
        refuse(handle, rank, "there is something else, no memory", kOursRule);
    const std::string same = "/proc/self/fd/" + std::to_string(look.number());
    Descriptor result(open(same.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
    if (!result) refuse(handle, rank, error_text(), reach_rule());
    return result;
}

Descriptor open_through_socket(const MemoryHandle& handle, int rank) {
    Descriptor result = fetch_descriptor(handle.server, handle.token);
    if (!result) {
        refuse(handle,
               rank,
               "that rank is in another PID namespace (pid:[" +
                   std::to_string(handle.pid_namespace) + "], here pid:[" +
                   std::to_string(pid_namespace()) + "]) and its socket gives: " + error_text(),
               reach_rule());
    }
    return result;
}

std::shared_ptr<std::byte> map_checked(const Descriptor& descriptor,
                                       const MemoryHandle& handle,
                                       int rank) {
    const size_t expected = file_bytes(handle.bytes);
    const int seals = fcntl(descriptor.number(), F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals)
        refuse(handle, rank, "there is a file without the seals of such memory", kOursRule);
    struct stat found{};
    if (fstat(descriptor.number(), &found) != 0 || static_cast<size_t>(found.st_size) != expected) {
        refuse(handle,
               rank,
               "there are " + std::to_string(found.st_size) + " bytes instead of " +
                   std::to_string(expected),
               kOursRule);
    }
    std::shared_ptr<std::byte> mapping = map_shared(descriptor, expected);
    if (mapping == nullptr) refuse(handle, rank, "mmap: " + error_text(), reach_rule());
    if (std::memcmp(token_in(mapping.get(), handle.bytes), &handle.token, sizeof(Token)) != 0)
        refuse(handle, rank, "there is the memory of another buffer or job", kOursRule);
    return mapping;
}

}  // namespace

SharedMemory::SharedMemory(size_t bytes)
    : bytes_(bytes),
      token_(random_token()),
      descriptor_(memfd_create("deep_ep", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    const size_t total = file_bytes(bytes);
    if (!descriptor_ || ftruncate(descriptor_.number(), static_cast<off_t>(total)) != 0 ||
        fcntl(descriptor_.number(), F_ADD_SEALS, kSeals) != 0 ||
        (mapping_ = map_shared(descriptor_, total)) == nullptr) {
        throw std::runtime_error("cannot create " + std::to_string(total) +
                                 " bytes of shared memory: " + error_text());
    }
    std::memcpy(token_in(mapping_.get(), bytes), &token_, sizeof(token_));
    server_.emplace();
    OwnMemory::instance().add(token_, mapping_, bytes);
}

std::string SharedMemory::handle() const {
    MemoryHandle handle{.magic = {},
                        .bytes = bytes_,
                        .token = token_,
                        .pid_namespace = pid_namespace(),
                        .process = process_number(),
                        .descriptor = descriptor_.number(),
                        .server = server_ ? server_->name() : Token{}};
    std::memcpy(handle.magic, kMagic, sizeof(kMagic));
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void SharedMemory::serve() {
    if (server_) server_->start(descriptor_.number(), token_);
}

void SharedMemory::release_handle() {
    server_.reset();
    descriptor_.reset();
}

MemoryHandle parse_handle(const std::string& text, int rank, size_t bytes) {
    MemoryHandle handle;
    if (text.size() != sizeof(handle) || std::memcmp(text.data(), kMagic, sizeof(kMagic)) != 0) {
        throw std::runtime_error("connect: the handle of rank " + std::to_string(rank) +
                                 " is not one of the cpu backend of this version; all ranks must "
                                 "use the same. Install one version on all ranks.");
    }
    std::memcpy(&handle, text.data(), sizeof(handle));
    if (handle.bytes != bytes) {
        throw std::runtime_error("connect: rank " + std::to_string(rank) + " has " +
                                 std::to_string(handle.bytes) +
                                 " bytes of symmetric memory, this rank " + std::to_string(bytes) +
                                 "; pass the same buffer sizes on all ranks.");
    }
    return handle;
}

bool is_in_this_pid_namespace(const MemoryHandle& handle) {
    return handle.pid_namespace == pid_namespace();
}

std::shared_ptr<std::byte> map_memory(const MemoryHandle& handle, int rank) {
    if (auto own = OwnMemory::instance().find(handle.token, handle.bytes)) return own;
    if (!is_in_this_pid_namespace(handle))
        return map_checked(open_through_socket(handle, rank), handle, rank);
    if (handle.process == process_number())
        refuse(handle, rank, "that rank of this process has closed it", kOursRule);
    return map_checked(open_through_proc(handle, rank), handle, rank);
}

}  // namespace ep::host
