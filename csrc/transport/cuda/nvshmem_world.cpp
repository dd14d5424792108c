#include "transport/cuda/nvshmem_world.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/cuda/error.h"

namespace ep {
namespace {

using cuda_target::check;

constexpr size_t kHeapAlignment = 4096;

void require(int status, const char* call, const std::string& purpose) {
    if (status == 0) return;
    throw std::runtime_error(std::string(call) + " failed with status " + std::to_string(status) +
                             "; it was called for " + purpose +
                             ". NVSHMEM_DEBUG=INFO makes NVSHMEM say more.");
}

// What DeepEP sets before it starts NVSHMEM (API specification, section 1.4), but for the number of queue
// pairs, which would be there twice. NVSHMEM reads its variables
// once per process, in the first call that touches it, which on rank 0 is the one for the unique id.
void set_environment(const NvshmemWorld::Membership& membership) {
    const auto set = [](const char* name, const std::string& value) {
        setenv(name, value.c_str(), 1);
    };
    const auto set_default = [](const char* name, const char* value) { setenv(name, value, 0); };
    set("NVSHMEM_DISABLE_P2P", membership.allow_nvlink ? "0" : "1");
    set("NVSHMEM_IB_ENABLE_IBGDA", "1");
    // NVSHMEM's own, which nothing uses: create_queue_pairs() makes those that operations use.
    set("NVSHMEM_IBGDA_NUM_RC_PER_PE", "1");
    set_default("NVSHMEM_QP_DEPTH", "1024");
    set("NVSHMEM_MAX_TEAMS", "7");
    set("NVSHMEM_DISABLE_NVLS", "1");
    set("NVSHMEM_CUMEM_GRANULARITY", "536870912");
    set("NVSHMEM_DISABLE_MNNVL", membership.allow_mnnvl ? "0" : "1");
}

// A handle that means all queue pairs, the default ones or the host's would have every fence and quiet on it
// wait for the wrong ones, or for none.
void require_ordinary(nvshmemx_qp_handle_t handle) {
    if (handle != NVSHMEMX_QP_HOST && handle != NVSHMEMX_QP_DEFAULT && handle != NVSHMEMX_QP_ANY)
        return;
    throw std::runtime_error("nvshmemx_qp_create returned the handle " + std::to_string(handle) +
                             ", which NVSHMEM's interface reserves for its own queue pairs. Use an "
                             "NVSHMEM that this version was tested with (install_nvshmem.sh).");
}

}  // namespace

NvshmemWorld& NvshmemWorld::instance() {
    static NvshmemWorld world;
    return world;
}

void NvshmemWorld::write_unique_id(const Membership& membership, char* id) {
    const std::lock_guard lock(mutex_);
    if (joined_) return;
    set_environment(membership);
    nvshmemx_uniqueid_t value = NVSHMEMX_UNIQUEID_INITIALIZER;
    require(nvshmemx_get_uniqueid(&value), "nvshmemx_get_uniqueid", "the address where ranks meet");
    std::memcpy(id, &value, sizeof(value));
}

void NvshmemWorld::join(const Membership& membership, const char* unique_id) {
    const std::lock_guard lock(mutex_);
    if (joined_) {
        if (membership.rank == membership_.rank && membership.num_ranks == membership_.num_ranks &&
            membership.device == membership_.device &&
            membership.allow_nvlink == membership_.allow_nvlink &&
            membership.allow_mnnvl == membership_.allow_mnnvl &&
            membership.num_queue_pairs <= membership_.num_queue_pairs) {
            return;
        }
        throw std::runtime_error(
            "NVSHMEM runs in this process as rank " + std::to_string(membership_.rank) + " of " +
            std::to_string(membership_.num_ranks) + " with " +
            std::to_string(membership_.num_queue_pairs) +
            " queue pairs; a second buffer must have the same rank, group size, GPU and NVLink "
            "setting and no more queue pairs, but "
            "is rank " +
            std::to_string(membership.rank) + " of " + std::to_string(membership.num_ranks) +
            " with " + std::to_string(membership.num_queue_pairs) +
            ". Create the buffer with the most queue pairs first.");
    }
    set_environment(membership);
    nvshmemx_uniqueid_t id;
    std::memcpy(&id, unique_id, sizeof(id));
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    require(
        nvshmemx_set_attr_uniqueid_args(membership.rank, membership.num_ranks, &id, &attributes),
        "nvshmemx_set_attr_uniqueid_args",
        "rank " + std::to_string(membership.rank));
    require(nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes),
            "nvshmemx_init_attr",
            "a world of " + std::to_string(membership.num_ranks) + " ranks");
    membership_ = membership;
    joined_ = true;
    create_queue_pairs();
}

void NvshmemWorld::create_queue_pairs() {
    int ordering = 0;
    check(cudaDeviceGetAttribute(
              &ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, membership_.device),
          "cudaDeviceGetAttribute",
          "the ordering of RDMA writes");
    queue_pairs_.reorders_arrivals = ordering < cudaGPUDirectRDMAWritesOrderingAllDevices;
    std::vector<nvshmemx_qp_handle_t> handles;
    nvshmemx_qp_handle_t* created = nullptr;
    if (nvshmemx_qp_create(membership_.num_queue_pairs, &created) == 0 && created != nullptr) {
        for (int i = 0; i < membership_.num_queue_pairs; ++i) {
            require_ordinary(created[i]);
            handles.insert(handles.end(), QueuePairs::kCopies, created[i]);
        }
    } else {
        // Transports through a proxy may have no queue pairs of their own; the default one serves all, and a
        // fence on it waits for whatever is on it.
        handles.assign(QueuePairs::kCopies, NVSHMEMX_QP_DEFAULT);
    }
    const size_t bytes = handles.size() * sizeof(handles[0]);
    check(cudaMalloc(&queue_pairs_.handles, bytes), "cudaMalloc", "the handles of queue pairs");
    check(cudaMemcpy(queue_pairs_.handles, handles.data(), bytes, cudaMemcpyHostToDevice),
          "cudaMemcpy",
          "the handles of queue pairs");
    queue_pairs_.num_handles = static_cast<int>(handles.size()) / QueuePairs::kCopies;
}

uint64_t NvshmemWorld::free_blocks(size_t bytes) {
    const std::lock_guard lock(mutex_);
    uint64_t found = 0;
    for (size_t i = 0; i < std::min(blocks_.size(), kMostReused); ++i) {
        if (blocks_[i].bytes == bytes && !blocks_[i].in_use) found |= uint64_t{1} << i;
    }
    return found;
}

std::byte* NvshmemWorld::allocate(size_t bytes, uint64_t free_everywhere) {
    const std::lock_guard lock(mutex_);
    size_t number = blocks_.size();
    if (free_everywhere != 0) {
        number = std::countr_zero(free_everywhere);
    } else {
        auto* memory = static_cast<std::byte*>(nvshmem_align(kHeapAlignment, bytes));
        if (memory == nullptr) {
            throw std::runtime_error(
                "nvshmem_align found no " + std::to_string(bytes) +
                " bytes of symmetric heap; raise NVSHMEM_SYMMETRIC_SIZE or free GPU memory.");
        }
        blocks_.push_back({bytes, memory, false});
    }
    Block& block = blocks_.at(number);
    if (block.in_use) {
        throw std::runtime_error(
            "symmetric memory that all ranks had said to be free is used by another buffer here; "
            "build one buffer after another, in the same order on all ranks.");
    }
    block.in_use = true;
    check(cudaMemset(block.memory, 0, bytes), "cudaMemset", "new symmetric memory");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize", "new symmetric memory to be zero");
    // Nobody may signal into memory that its owner has yet to zero.
    nvshmem_barrier_all();
    return block.memory;
}

void NvshmemWorld::give_back(std::byte* memory) {
    const std::lock_guard lock(mutex_);
    for (Block& block : blocks_) {
        if (block.memory == memory) block.in_use = false;
    }
}

std::byte* NvshmemWorld::peer(std::byte* memory, int rank) const {
    return rank == membership_.rank ? memory : static_cast<std::byte*>(nvshmem_ptr(memory, rank));
}

}  // namespace ep
