#include "transport/host/symmetric_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace ep {
namespace {

// Tells ranks of one process from ranks of another process that happens to have the same id.
uint64_t process_token() {
    static const uint64_t token = [] {
        uint64_t value = 0;
        [[maybe_unused]] const ssize_t bytes = getrandom(&value, sizeof(value), 0);
        return value;
    }();
    return token;
}

struct Handle {
    uint64_t token;
    int64_t process;
    int64_t descriptor;
    uint64_t bytes;
    uint64_t address;
};

std::string error_text() { return std::strerror(errno); }

std::shared_ptr<std::byte> map_shared(int descriptor, size_t bytes) {
    void* memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (memory == MAP_FAILED) return nullptr;
    return {static_cast<std::byte*>(memory), [bytes](std::byte* begin) { munmap(begin, bytes); }};
}

// Memory of the ranks of this process, by its address.
class LocalRanks {
  public:
    static LocalRanks& instance() {
        static LocalRanks ranks;
        return ranks;
    }
    void add(const std::shared_ptr<std::byte>& mapping) {
        const std::scoped_lock lock(mutex_);
        std::erase_if(mappings_, [](const auto& entry) { return entry.second.expired(); });
        mappings_[reinterpret_cast<uint64_t>(mapping.get())] = mapping;
    }
    // nullptr when that rank has closed.
    std::shared_ptr<std::byte> find(uint64_t address) {
        const std::scoped_lock lock(mutex_);
        const auto entry = mappings_.find(address);
        return entry == mappings_.end() ? nullptr : entry->second.lock();
    }

  private:
    std::mutex mutex_;
    std::map<uint64_t, std::weak_ptr<std::byte>> mappings_;
};

}  // namespace

// Layout: [control][data], which kernels see, then [a stamp per control word][doorbell].
size_t SymmetricMemory::extras_offset() const {
    return (options_.control_bytes + options_.data_bytes + 4095) / 4096 * 4096;
}

size_t SymmetricMemory::total_bytes() const {
    return extras_offset() + options_.control_bytes + 4096;
}

host::PeerMemory SymmetricMemory::peer_memory(std::byte* base) const {
    std::byte* extras = base + extras_offset();
    return {base,
            reinterpret_cast<std::atomic<uint64_t>*>(extras),
            reinterpret_cast<host::Doorbell*>(extras + options_.control_bytes)};
}

SymmetricMemory::SymmetricMemory(Device& device, const SymmetricMemoryOptions& options)
    : device_(device), options_(options) {
    descriptor_ = memfd_create("deep_ep", MFD_CLOEXEC);
    if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(total_bytes())) != 0) {
        const std::string reason = error_text();
        release_handle();
        throw std::runtime_error("cannot create " + std::to_string(total_bytes()) +
                                 " bytes of shared memory: " + reason);
    }
    mapping_ = map_shared(descriptor_, total_bytes());
    if (mapping_ == nullptr) {
        const std::string reason = error_text();
        release_handle();
        throw std::runtime_error("cannot map " + std::to_string(total_bytes()) +
                                 " bytes of shared memory: " + reason);
    }
    LocalRanks::instance().add(mapping_);
}

SymmetricMemory::~SymmetricMemory() {
    if (link_) {
        device_.executor().set_idle_waiter(nullptr);
        device_.set_after_launch(nullptr);
    }
    release_handle();
}

std::string SymmetricMemory::local_handle() const {
    const Handle handle{process_token(),
                        getpid(),
                        descriptor_,
                        total_bytes(),
                        reinterpret_cast<uint64_t>(mapping_.get())};
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void SymmetricMemory::connect(const std::vector<std::string>& handles) {
    if (static_cast<int>(handles.size()) != options_.num_ranks) {
        throw std::runtime_error("connect: " + std::to_string(handles.size()) + " handles for " +
                                 std::to_string(options_.num_ranks) + " ranks");
    }
    std::vector<host::PeerMemory> peers;
    bases_.clear();
    mapped_.clear();
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        Handle handle;
        if (handles[rank].size() != sizeof(handle)) {
            throw std::runtime_error("connect: the handle of rank " + std::to_string(rank) +
                                     " is not one of the cpu backend");
        }
        std::memcpy(&handle, handles[rank].data(), sizeof(handle));
        if (handle.bytes != total_bytes()) {
            throw std::runtime_error(
                "connect: rank " + std::to_string(rank) + " has " + std::to_string(handle.bytes) +
                " bytes of symmetric memory, this rank " + std::to_string(total_bytes()));
        }
        std::shared_ptr<std::byte> mapping;
        if (handle.token == process_token() && handle.process == getpid()) {
            mapping = LocalRanks::instance().find(handle.address);
            if (mapping == nullptr) {
                throw std::runtime_error("connect: rank " + std::to_string(rank) +
                                         " of this process has closed its memory");
            }
        } else {
            const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" +
                                     std::to_string(handle.descriptor);
            const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
            if (descriptor >= 0) {
                mapping = map_shared(descriptor, handle.bytes);
                close(descriptor);
            }
            if (mapping == nullptr) {
                throw std::runtime_error(
                    "connect: cannot map the memory of rank " + std::to_string(rank) +
                    " (process " + std::to_string(handle.process) + "): " + error_text() +
                    ". Ranks of the cpu backend run on one machine, in one container, as one user");
            }
        }
        peers.push_back(peer_memory(mapping.get()));
        bases_.push_back(mapping.get());
        mapped_.push_back(std::move(mapping));
    }
    link_ =
        std::make_unique<host::Link>(device_.executor().clock(), options_.rank, std::move(peers));
    link_->set_reorder(reorder_seed_);
    device_.executor().set_idle_waiter(link_.get());
    device_.set_after_launch([this] { link_->flush(); });
}

void SymmetricMemory::release_handle() {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = -1;
}

Transport SymmetricMemory::transport() const {
    return {bases_.data(), link_.get(), options_.rank, options_.num_ranks};
}

void SymmetricMemory::set_path_fault(int dst, uint64_t delay_ns, double bytes_per_s) {
    if (!link_) throw std::runtime_error("set_path_fault: connect first");
    if (dst < 0 || dst >= options_.num_ranks) {
        throw std::runtime_error("set_path_fault: no rank " + std::to_string(dst) +
                                 " in a group of " + std::to_string(options_.num_ranks));
    }
    link_->set_path_fault(dst, delay_ns, bytes_per_s);
}

void SymmetricMemory::set_delivery(const std::string& kind, uint64_t seed) {
    reorder_seed_ = kind == "random" ? std::optional(seed) : std::nullopt;
    if (link_) link_->set_reorder(reorder_seed_);
}

}  // namespace ep
