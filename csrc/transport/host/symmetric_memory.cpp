#include "transport/host/symmetric_memory.h"

#include <stdexcept>

namespace ep {

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
    : device_(device), options_(options), memory_(total_bytes()) {}

SymmetricMemory::~SymmetricMemory() {
    if (link_) {
        device_.executor().set_idle_waiter(nullptr);
        device_.set_after_launch(nullptr);
    }
}

void SymmetricMemory::connect(const std::vector<std::string>& handles) {
    if (static_cast<int>(handles.size()) != options_.num_ranks) {
        throw std::runtime_error("connect: " + std::to_string(handles.size()) + " handles for " +
                                 std::to_string(options_.num_ranks) + " ranks");
    }
    std::vector<host::MemoryHandle> parsed;
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        parsed.push_back(host::parse_handle(handles[rank], rank, total_bytes()));
        if (!host::is_in_this_pid_namespace(parsed.back())) memory_.serve();
    }
    std::vector<host::PeerMemory> peers;
    bases_.clear();
    mapped_.clear();
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        mapped_.push_back(host::map_memory(parsed[rank], rank));
        bases_.push_back(mapped_.back().get());
        peers.push_back(peer_memory(bases_.back()));
    }
    link_ = std::make_unique<host::Link>(
        device_.executor().clock(), options_.rank, extras_offset(), std::move(peers));
    link_->set_reorder(reorder_seed_);
    device_.executor().set_idle_waiter(link_.get());
    device_.set_after_launch([this] { link_->flush(); });
}

Transport SymmetricMemory::transport() const {
    return {bases_.data(), link_.get(), options_.rank, options_.num_ranks};
}

const Traffic& SymmetricMemory::traffic() const {
    if (!link_) throw std::runtime_error("traffic: connect first");
    return link_->traffic();
}

void SymmetricMemory::set_path_fault(int dst, uint64_t delay_ns, double bytes_per_s) {
    if (!link_) throw std::runtime_error("set_path_fault: connect first");
    if (dst < 0 || dst >= options_.num_ranks) {
        throw std::runtime_error("set_path_fault: no rank " + std::to_string(dst) +
                                 " in a group of " + std::to_string(options_.num_ranks));
    }
    link_->set_path_fault(dst, delay_ns, bytes_per_s);
}

void SymmetricMemory::set_receive_fault(size_t begin, size_t end, uint64_t delay_ns) {
    if (!link_) throw std::runtime_error("set_receive_fault: connect first");
    link_->set_receive_fault(begin, end, delay_ns);
}

void SymmetricMemory::set_delivery(const std::string& policy, uint64_t seed) {
    reorder_seed_ = policy == "random" ? std::optional(seed) : std::nullopt;
    if (link_) link_->set_reorder(reorder_seed_);
}

}  // namespace ep
