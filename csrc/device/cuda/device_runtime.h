// The device of the CUDA target: one GPU as one rank sees it. Launches are asynchronous and touch no
// host memory the GPU could still need, so streams, events and graph capture work as with any kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/cuda/launch.h"
#include "device/cuda/launch_order.h"

namespace ep {

using Stream = uintptr_t;  // a cudaStream_t

class Device {
  public:
    static constexpr bool kIsHost = false;
    static constexpr bool kHasGpuShapes = true;

    // The clock is the GPU's own, so the choice of the host target's clock does not matter here.
    Device(int device_index, const std::string& clock);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // GPUs this process can use; 0 without a driver or a GPU. Throws where CUDA cannot say.
    static int count();

    int index() const { return index_; }
    // This rank's share, if several ranks run on the GPU.
    int num_multiprocessors() const { return std::max(1, num_multiprocessors_ / ranks_on_device_); }
    // Behind all calls of prepare().
    void share_with(int ranks_on_device);

    // Zeroed memory for kernels.
    void* allocate(size_t bytes);
    // Zeroed memory that kernels write and the host reads while they run: pinned, the same address on
    // both sides.
    void* allocate_host_visible(size_t bytes);
    void release(void* memory);
    void release_host_visible(void* memory);

    // Copies after everything enqueued on `stream` has ended.
    template <class T>
    T read(const T* source, Stream stream) const {
        static_assert(sizeof(T) <= kStagingBytes);
        T value;
        copy_to_host(&value, source, sizeof(value), read_, reinterpret_cast<cudaStream_t>(stream));
        return value;
    }
    // Copies what is there now, without waiting for kernels that may still run.
    template <class T>
    T peek(const T* source) const {
        static_assert(sizeof(T) <= kStagingBytes);
        T value;
        copy_to_host(&value, source, sizeof(value), beside_, own_stream_);
        return value;
    }

    // Writes what kernels that run may be reading, without waiting for them.
    template <class T>
    void poke(T* destination, T value) const {
        static_assert(sizeof(T) <= kStagingBytes);
        copy_to_device(destination, &value, sizeof(value));
    }

    // Loads kernels ahead of their first launch. Loading may have to wait for the GPU, which would be
    // for ever if a kernel that runs there waits for the one to be loaded.
    template <class... Kernels>
    void prepare(Kernels... kernels) {
        const cuda_target::DeviceGuard guard(index_);
        const int most_shared_bytes = cuda_target::most_shared_bytes(index_);
        for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
            cuda_target::load(kernel, most_shared_bytes);
            kernels_.push_back(kernel);
        }
    }

    // Enqueues kernel(args) on `stream`.
    template <class Args>
    void launch(const char* name,
                void (*kernel)(Args),
                const LaunchShape& shape,
                const Args& args,
                Stream stream) {
        const cuda_target::DeviceGuard guard(index_);
        cuda_target::launch(kernel,
                            name,
                            shape,
                            {index_, reinterpret_cast<cudaStream_t>(stream), ranks_on_device_},
                            args);
    }

    // The same for an operation, which shares the rank's workspace with the others: they run one after
    // another on whichever streams. Not for several threads at once.
    template <class Args>
    void launch_operation(const char* name,
                          void (*kernel)(Args),
                          const LaunchShape& shape,
                          const Args& args,
                          Stream stream) {
        const cuda_target::DeviceGuard guard(index_);
        order_->before(reinterpret_cast<cudaStream_t>(stream));
        launch(name, kernel, shape, args, stream);
        order_->after(reinterpret_cast<cudaStream_t>(stream));
    }

    uint64_t now_ns();
    // Has the GPU write its clock there, once `stream` has come so far.
    void write_clock(uint64_t* where, Stream stream);

    // Faults and schedules belong to the host target.
    void delay(uint64_t ns);
    void block_stream(uint64_t ns);
    void set_clock_fault(int64_t offset_ns, double drift_ppm);
    void set_schedule(const std::string& policy, uint64_t seed);

  private:
    // Pinned memory through which values pass, one at a time. A copy from or to memory that is not pinned would wait
    // for its stream with a lock of the driver in hand, and nobody could launch a kernel, or tell one that waits.
    struct Staging {
        std::mutex mutex;
        std::byte* memory = nullptr;
    };
    static constexpr size_t kStagingBytes = 256;

    void copy_to_host(
        void* to, const void* from, size_t bytes, Staging& staging, cudaStream_t stream) const;
    void copy_to_device(void* to, const void* from, size_t bytes) const;

    int index_;
    int num_multiprocessors_ = 0;
    int ranks_on_device_ = 1;
    std::vector<const void*> kernels_;               // that have been loaded
    std::optional<cuda_target::LaunchOrder> order_;  // made on this device, before anybody captures
    cudaStream_t own_stream_ = nullptr;  // non-blocking: never waits for a caller's stream
    mutable Staging beside_;             // of copies on it
    mutable Staging read_;               // of those behind a caller's stream
};

// What the CUDA target answers to calls that only make sense under the host target's executor.
[[noreturn]] inline void refuse_on_cuda(const char* call) {
    throw std::runtime_error(std::string(call) +
                             ": only on the cpu backend; set DEEP_EP_BACKEND=cpu.");
}

}  // namespace ep
