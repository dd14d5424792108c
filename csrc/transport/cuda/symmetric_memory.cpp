#include "transport/cuda/symmetric_memory.h"

#include <sys/random.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace ep {
namespace {

using cuda_target::check;
using cuda_target::DeviceGuard;

#if defined(EP_WITH_NVSHMEM)
constexpr char kMagic[8] = "epnvsh1";
#else
constexpr char kMagic[8] = "epcuda1";
#endif

// What ranks tell each other through the group, as plain bytes.
struct Handle {
    char magic[sizeof(kMagic)];
    uint64_t process;  // random, one per process
    char host[40];     // boot id: the same in all containers of a machine
    char gpu[16];      // UUID
    int64_t device;    // its index in the process
    uint64_t bytes;
    uint64_t address;
#if defined(EP_WITH_NVSHMEM)
    char unique_id[NvshmemWorld::kUniqueIdBytes];  // of rank 0; the others leave it empty
    uint64_t free_blocks;                          // see NvshmemWorld
#else
    cudaIpcMemHandle_t memory;
    int64_t memory_status;  // cudaError_t: whether other processes can have it
#endif

    bool same_process(const Handle& other) const { return process == other.process; }
    bool same_host(const Handle& other) const {
        return std::strncmp(host, other.host, sizeof(host)) == 0;
    }
    bool same_gpu(const Handle& other) const {
        return same_host(other) && std::memcmp(gpu, other.gpu, sizeof(gpu)) == 0;
    }
};

uint64_t process_token() {
    static const uint64_t token = [] {
        uint64_t value = 0;
        if (getrandom(&value, sizeof(value), 0) != sizeof(value))
            throw std::runtime_error("getrandom failed");
        return value;
    }();
    return token;
}

std::string boot_id() {
    std::string id;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
    return id;
}

Handle parse_handle(const std::string& text, int rank, size_t expected_bytes) {
    Handle handle;
    if (text.size() != sizeof(handle) || std::memcmp(text.data(), kMagic, sizeof(kMagic)) != 0) {
        throw std::runtime_error(
            "connect: the handle of rank " + std::to_string(rank) +
            " comes from another module than this rank's; all ranks must use the same backend.");
    }
    std::memcpy(&handle, text.data(), sizeof(handle));
    if (handle.bytes != expected_bytes) {
        throw std::runtime_error(
            "connect: rank " + std::to_string(rank) + " has " + std::to_string(handle.bytes) +
            " bytes of symmetric memory, this rank " + std::to_string(expected_bytes) +
            "; pass the same buffer sizes on all ranks.");
    }
    return handle;
}

// A kernel that waits for a lost rank uses the memory until its deadline.
void wait_for_kernels(const Device& device) {
    int previous = 0;
    if (cudaGetDevice(&previous) != cudaSuccess) return;  // the driver is gone, so are the kernels
    (void)cudaSetDevice(device.index());
    (void)cudaDeviceSynchronize();
    (void)cudaSetDevice(previous);
}

#if defined(EP_WITH_NVSHMEM)
// It was asked for, so without it operations would be slow in silence.
void require_nvlink_between_hosts(const Handle& own,
                                  const std::vector<Handle>& handles,
                                  const std::vector<std::byte*>& peers) {
    int num_elsewhere = 0;
    for (size_t rank = 0; rank < handles.size(); ++rank) {
        if (own.same_host(handles[rank])) continue;
        if (peers[rank] != nullptr) return;
        ++num_elsewhere;
    }
    if (num_elsewhere == 0) return;
    throw std::runtime_error(
        "connect: allow_mnnvl is True, but NVSHMEM can address none of the " +
        std::to_string(num_elsewhere) +
        " ranks on other hosts over NVLink; some must be in this GPU's NVLink domain. "
        "`nvidia-smi -q` shows the fabric's state and clique, and nvidia-imex must run on all "
        "hosts of "
        "it. Pass allow_mnnvl=False to reach them over RDMA.");
}
#else
// A peer's memory in this process, or why it cannot be had and what helps.
struct Reach {
    std::byte* memory = nullptr;
    bool is_mapping = false;  // to be closed again
    std::string obstacle;
};

Reach reach_within_process(const Handle& own, const Handle& peer) {
    auto* memory = reinterpret_cast<std::byte*>(peer.address);
    if (peer.device == own.device) return {memory, false, {}};
    const std::string pair =
        "GPU " + std::to_string(own.device) + " and GPU " + std::to_string(peer.device);
    int possible = 0;
    check(cudaDeviceCanAccessPeer(
              &possible, static_cast<int>(own.device), static_cast<int>(peer.device)),
          "cudaDeviceCanAccessPeer",
          pair);
    if (possible == 0)
        return {
            nullptr, false, pair + " have no peer access; run each rank in a process of its own"};
    const cudaError_t status = cudaDeviceEnablePeerAccess(static_cast<int>(peer.device), 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
    } else {
        check(status, "cudaDeviceEnablePeerAccess", pair);
    }
    return {memory, false, {}};
}

Reach reach_across_processes(const Handle& peer) {
    const auto obstacle = [](const char* call, cudaError_t status) {
        return Reach{nullptr,
                     false,
                     std::string(call) + " failed: " + cudaGetErrorString(status) +
                         "; containers that allow it (--ipc=host) share memory, and "
                         "DEEP_EP_RANKS_PER_NODE=1 reaches it through NVSHMEM"};
    };
    const auto there = static_cast<cudaError_t>(peer.memory_status);
    if (there != cudaSuccess) return obstacle("cudaIpcGetMemHandle on that rank", there);
    void* memory = nullptr;
    const cudaError_t status =
        cudaIpcOpenMemHandle(&memory, peer.memory, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess) return {static_cast<std::byte*>(memory), true, {}};
    (void)cudaGetLastError();
    return obstacle("cudaIpcOpenMemHandle", status);
}

Reach reach(const Handle& own, const Handle& peer, bool allow_nvlink) {
    if (!allow_nvlink) {
        return {
            nullptr,
            false,
            "NVLink is not allowed for this buffer, which takes the module "
            "deep_ep._cuda_nvshmem (install_nvshmem.sh, then build again) and a process per rank"};
    }
    if (own.same_process(peer)) return reach_within_process(own, peer);
    if (own.same_host(peer)) return reach_across_processes(peer);
    return {nullptr,
            false,
            "it runs on another host; pass allow_mnnvl=True if NVLink joins the hosts, else unset "
            "DEEP_EP_RANKS_PER_NODE"};
}
#endif

}  // namespace

#if defined(EP_WITH_NVSHMEM)

// The heap exists once all ranks have joined, so the memory is taken in connect().
SymmetricMemory::SymmetricMemory(Device& device, const SymmetricMemoryOptions& options)
    : device_(device), options_(options) {}

SymmetricMemory::~SymmetricMemory() {
    wait_for_kernels(device_);
    if (!is_kept_) NvshmemWorld::instance().give_back(base_);
    device_.release(peer_table_);
}

NvshmemWorld::Membership SymmetricMemory::membership() const {
    return {.rank = options_.rank,
            .num_ranks = options_.num_ranks,
            .num_queue_pairs = options_.num_queue_pairs,
            .allow_nvlink = options_.allow_nvlink,
            .allow_mnnvl = options_.allow_mnnvl,
            .device = device_.index()};
}

#else

SymmetricMemory::SymmetricMemory(Device& device, const SymmetricMemoryOptions& options)
    : device_(device),
      options_(options),
      base_(static_cast<std::byte*>(device.allocate(total_bytes()))) {}

SymmetricMemory::~SymmetricMemory() {
    wait_for_kernels(device_);
    for (void* mapping : opened_) (void)cudaIpcCloseMemHandle(mapping);
    device_.release(peer_table_);
    if (!is_kept_) device_.release(base_);
}

#endif

std::string SymmetricMemory::local_handle() const {
    const DeviceGuard guard(device_.index());
    Handle handle{};
    std::memcpy(handle.magic, kMagic, sizeof(kMagic));
    handle.process = process_token();
    boot_id().copy(handle.host, sizeof(handle.host) - 1);
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device_.index()),
          "cudaGetDeviceProperties",
          "the GPU's UUID");
    std::memcpy(handle.gpu, &properties.uuid, sizeof(handle.gpu));
    handle.device = device_.index();
    handle.bytes = total_bytes();
    handle.address = reinterpret_cast<uint64_t>(base_);
#if defined(EP_WITH_NVSHMEM)
    if (options_.rank == 0)
        NvshmemWorld::instance().write_unique_id(membership(), handle.unique_id);
    handle.free_blocks = NvshmemWorld::instance().free_blocks(total_bytes());
#else
    // A rank by itself, and ranks that are threads, do without; reach_across_processes() needs it.
    handle.memory_status = cudaIpcGetMemHandle(&handle.memory, base_);
    if (handle.memory_status != cudaSuccess) (void)cudaGetLastError();
#endif
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void SymmetricMemory::connect(const std::vector<std::string>& texts) {
    if (static_cast<int>(texts.size()) != options_.num_ranks) {
        throw std::runtime_error("connect: " + std::to_string(texts.size()) + " handles for " +
                                 std::to_string(options_.num_ranks) + " ranks.");
    }
    const DeviceGuard guard(device_.index());
    std::vector<Handle> handles;
    for (int rank = 0; rank < options_.num_ranks; ++rank)
        handles.push_back(parse_handle(texts[rank], rank, total_bytes()));
    const Handle& own = handles[options_.rank];
    int ranks_on_device = 0;
    for (const Handle& handle : handles) ranks_on_device += own.same_gpu(handle) ? 1 : 0;
    device_.share_with(ranks_on_device);

    std::vector<std::byte*> peers(options_.num_ranks, nullptr);
#if defined(EP_WITH_NVSHMEM)
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        if (rank == options_.rank || !own.same_process(handles[rank])) continue;
        throw std::runtime_error(
            "connect: rank " + std::to_string(rank) + " is in the same process as rank " +
            std::to_string(options_.rank) + "; NVSHMEM has one rank per process.");
    }
    NvshmemWorld& world = NvshmemWorld::instance();
    world.join(membership(), handles[0].unique_id);
    uint64_t free_everywhere = own.free_blocks;
    for (const Handle& handle : handles) free_everywhere &= handle.free_blocks;
    base_ = world.allocate(total_bytes(), free_everywhere);
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        if (options_.allow_nvlink || rank == options_.rank) peers[rank] = world.peer(base_, rank);
    }
    if (options_.allow_mnnvl) require_nvlink_between_hosts(own, handles, peers);
    queue_pairs_ = world.queue_pairs();
#else
    std::string obstacles;
    for (int rank = 0; rank < options_.num_ranks; ++rank) {
        if (rank == options_.rank) {
            peers[rank] = base_;
            continue;
        }
        const Reach found = reach(own, handles[rank], options_.allow_nvlink);
        peers[rank] = found.memory;
        if (found.is_mapping) opened_.push_back(found.memory);
        if (found.memory == nullptr)
            obstacles += " rank " + std::to_string(rank) + ": " + found.obstacle + ".";
    }
    if (!obstacles.empty()) {
        throw std::runtime_error("connect: rank " + std::to_string(options_.rank) +
                                 " cannot address the memory of some ranks:" + obstacles);
    }
#endif
    publish(peers);
}

void SymmetricMemory::publish(const std::vector<std::byte*>& peers) {
    all_in_reach_ = true;
    for (const std::byte* peer : peers) all_in_reach_ = all_in_reach_ && peer != nullptr;
    const size_t bytes = peers.size() * sizeof(std::byte*);
    auto* table = static_cast<std::byte**>(device_.allocate(bytes));
    const cudaError_t status = cudaMemcpy(table, peers.data(), bytes, cudaMemcpyHostToDevice);
    if (status != cudaSuccess) device_.release(table);
    check(status, "cudaMemcpy", "the addresses of the other ranks");
    peer_table_ = table;
}

Transport SymmetricMemory::transport() const {
    return {
        .peers = peer_table_,
        .own = base_,
        .rank = options_.rank,
        .num_ranks = options_.num_ranks,
        .all_in_reach = all_in_reach_,
#if defined(EP_WITH_NVSHMEM)
        .queue_pairs = queue_pairs_,
#endif
    };
}

const Traffic& SymmetricMemory::traffic() const { refuse_on_cuda("traffic"); }
void SymmetricMemory::set_path_fault(int, uint64_t, double) { refuse_on_cuda("set_path_fault"); }
void SymmetricMemory::set_receive_fault(size_t, size_t, uint64_t) {
    refuse_on_cuda("set_receive_fault");
}
void SymmetricMemory::set_delivery(const std::string&, uint64_t) { refuse_on_cuda("set_delivery"); }

}  // namespace ep
