// The host's side of a launch on the CUDA target: checks that a grid whose blocks wait for each other
// fits the GPU as a whole, then enqueues it. Nothing here waits for the GPU, so launches can be
// captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "device/cuda/error.h"
#include "device/launch_shape.h"

namespace ep::cuda_target {

// Where a rank launches.
struct Place {
    int device = 0;
    cudaStream_t stream = nullptr;
    int ranks_on_device = 1;  // their grids wait for each other too
};

// Shared memory that a block may have on a GPU. Some of those newer than Hopper have less than it.
inline int most_shared_bytes(int device) {
    int most = 0;
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute",
          "the shared memory of a block");
    return std::min(most, static_cast<int>(kMaxSharedBytes));
}

inline void load(const void* kernel, int most_shared_bytes) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kernel),
          "cudaFuncGetAttributes",
          "loading a kernel; this module may not be built for this GPU");
    // Launches change nothing of a kernel: they may find one that runs, and waits for them.
    check(cudaFuncSetAttribute(
              kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_bytes),
          "cudaFuncSetAttribute",
          "the shared memory that a kernel may have");
}

// A multiprocessor has one memory for shared memory and for its cache. CUDA's programming guide has kernels with little
// shared memory ask for much where others, which need it, are to run at the same time.
inline void divide_as_others(const void* kernel) {
    check(
        cudaFuncSetAttribute(
            kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute",
        "the division of a multiprocessor's memory");
}

// Blocks of this kernel that a GPU can run at the same time.
inline int resident_blocks(const void* kernel,
                           const char* name,
                           const LaunchShape& shape,
                           int device) {
    static std::mutex mutex;
    static std::map<std::tuple<const void*, int, int, size_t>, int> known;
    const std::lock_guard lock(mutex);
    const auto [entry, is_new] =
        known.try_emplace({kernel, device, shape.threads, shape.shared_bytes}, 0);
    if (!is_new) return entry->second;
    try {
        int per_multiprocessor = 0;
        int multiprocessors = 0;
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                  &per_multiprocessor, kernel, shape.threads, shape.shared_bytes),
              "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
              name);
        check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
              "cudaDeviceGetAttribute",
              "the number of multiprocessors");
        entry->second = per_multiprocessor * multiprocessors;
    } catch (...) {
        known.erase(entry);
        throw;
    }
    return entry->second;
}

inline void require_residency(const void* kernel,
                              const char* name,
                              const LaunchShape& shape,
                              const Place& place) {
    const int resident = resident_blocks(kernel, name, shape, place.device);
    if (shape.blocks * place.ranks_on_device <= resident) return;
    if (resident == 0) {
        throw CudaError(
            "launch of " + std::string(name) + ": a block of " + std::to_string(shape.threads) +
            " threads and " + std::to_string(shape.shared_bytes) +
            " bytes of shared memory does not fit; kernels are built for up to " +
            std::to_string(kMaxThreads) + " threads. Ask for fewer warps (DEEP_EP_LAUNCH_SHAPE).");
    }
    if (resident < place.ranks_on_device) {
        throw CudaError("launch of " + std::string(name) + ": " +
                        std::to_string(place.ranks_on_device) + " ranks share GPU " +
                        std::to_string(place.device) + ", which holds " + std::to_string(resident) +
                        " blocks of " + std::to_string(shape.threads) +
                        " threads; each rank needs one, or they would wait for each other for "
                        "ever. Put fewer ranks on it.");
    }
    throw CudaError("launch of " + std::string(name) + ": " +
                    std::to_string(place.ranks_on_device) + " rank(s) on GPU " +
                    std::to_string(place.device) + " with " + std::to_string(shape.blocks) +
                    " blocks of " + std::to_string(shape.threads) +
                    " threads each are not co-resident, the GPU holds " + std::to_string(resident) +
                    " such blocks; they would wait for each other for ever. Use at most " +
                    std::to_string(resident / place.ranks_on_device) +
                    " blocks a rank (DEEP_EP_LAUNCH_SHAPE).");
}

// Enqueues kernel(args). `name` is for messages.
template <class Args>
void launch(void (*kernel)(Args),
            const char* name,
            const LaunchShape& shape,
            const Place& place,
            const Args& args) {
    const auto* address = reinterpret_cast<const void*>(kernel);
    if (shape.cooperative) require_residency(address, name, shape, place);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = place.stream;
    cudaLaunchAttribute attribute{};
    // All blocks start together or not at all: without it, a kernel of another stream could keep the
    // last ones out. Ranks that share a GPU go without, lest the driver run their grids in turn.
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.attrs = &attribute;
    config.numAttrs = shape.cooperative && place.ranks_on_device == 1 ? 1 : 0;
    void* arguments[] = {const_cast<Args*>(&args)};
    const cudaError_t status = cudaLaunchKernelExC(&config, address, arguments);
    if (status == cudaSuccess) return;  // the text below would cost more than the launch
    check(status,
          "cudaLaunchKernelExC",
          std::string(name) + " with " + std::to_string(shape.blocks) + " blocks of " +
              std::to_string(shape.threads) + " threads");
}

}  // namespace ep::cuda_target
