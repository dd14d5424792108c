#include "device/cuda/device_runtime.h"

#include "device/cuda/device.cuh"

namespace ep {
namespace {

using cuda_target::BesideCaptures;
using cuda_target::check;
using cuda_target::DeviceGuard;

struct ReadClockArgs {
    uint64_t* now_ns;
};

EP_KERNEL void read_clock(const EP_GRID_CONSTANT ReadClockArgs args) { *args.now_ns = now_ns(); }

}  // namespace

Device::Device(int device_index, const std::string& /*clock*/) : index_(device_index) {
    const int available = count();
    if (device_index < 0 || device_index >= available) {
        throw cuda_target::CudaError(
            "GPU " + std::to_string(device_index) + " was asked for; this process can use " +
            std::to_string(available) + " (see CUDA_VISIBLE_DEVICES and nvidia-smi).");
    }
    const DeviceGuard guard(index_);
    check(cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, index_),
          "cudaDeviceGetAttribute",
          "the number of multiprocessors");
    check(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking),
          "cudaStreamCreateWithFlags",
          "a stream for status reads");
    order_.emplace();
    for (Staging* staging : {&beside_, &read_})
        staging->memory = static_cast<std::byte*>(allocate_host_visible(kStagingBytes));
    prepare(&read_clock);
}

Device::~Device() {
    for (Staging* staging : {&beside_, &read_}) release_host_visible(staging->memory);
    if (own_stream_ != nullptr) (void)cudaStreamDestroy(own_stream_);
}

int Device::count() {
    int devices = 0;
    const cudaError_t status = cudaGetDeviceCount(&devices);
    if (status == cudaSuccess) return devices;
    (void)cudaGetLastError();
    int driver = 0;
    int runtime = 0;
    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    // CUDA says of a machine without a driver that its driver is too old.
    const bool no_driver = status == cudaErrorInsufficientDriver && driver == 0;
    if (status == cudaErrorNoDevice || no_driver) return 0;
    const auto text = [](int version) {
        return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    };
    throw cuda_target::CudaError(
        std::string("cudaGetDeviceCount failed: ") + cudaGetErrorString(status) + " (" +
        cudaGetErrorName(status) + "). The driver serves CUDA " + text(driver) +
        " and older, this module is built with CUDA " + text(runtime) +
        "; if that is the reason, update the driver or build with an older toolkit, else see "
        "nvidia-smi and dmesg");
}

void Device::share_with(int ranks_on_device) {
    ranks_on_device_ = ranks_on_device;
    if (ranks_on_device == 1) return;
    const DeviceGuard guard(index_);
    for (const void* kernel : kernels_) cuda_target::divide_as_others(kernel);
}

void* Device::allocate(size_t bytes) {
    const DeviceGuard guard(index_);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes),
          "cudaMalloc",
          std::to_string(bytes) + " bytes on GPU " + std::to_string(index_));
    check(cudaMemsetAsync(memory, 0, bytes, own_stream_), "cudaMemsetAsync", "new memory");
    check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize", "new memory to be zero");
    return memory;
}

void* Device::allocate_host_visible(size_t bytes) {
    const DeviceGuard guard(index_);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc",
          std::to_string(bytes) + " bytes that GPU and host share");
    std::memset(memory, 0, bytes);
    return memory;
}

// Errors are ignored: at the end of a process the driver may be gone, and the memory with it.
void Device::release(void* memory) {
    if (memory != nullptr) (void)cudaFree(memory);
}

void Device::release_host_visible(void* memory) {
    if (memory != nullptr) (void)cudaFreeHost(memory);
}

void Device::copy_to_host(
    void* to, const void* from, size_t bytes, Staging& staging, cudaStream_t stream) const {
    const DeviceGuard guard(index_);
    const BesideCaptures beside;
    const std::scoped_lock lock(staging.mutex);
    check(cudaMemcpyAsync(staging.memory, from, bytes, cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync",
          std::to_string(bytes) + " bytes of status");
    check(cudaStreamSynchronize(stream),
          "cudaStreamSynchronize",
          "a status read; an earlier kernel may have failed");
    std::memcpy(to, staging.memory, bytes);
}

void Device::copy_to_device(void* to, const void* from, size_t bytes) const {
    const DeviceGuard guard(index_);
    const BesideCaptures beside;
    const std::scoped_lock lock(beside_.mutex);
    std::memcpy(beside_.memory, from, bytes);
    check(cudaMemcpyAsync(to, beside_.memory, bytes, cudaMemcpyHostToDevice, own_stream_),
          "cudaMemcpyAsync",
          std::to_string(bytes) + " bytes of news");
    check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize", "news to arrive");
}

uint64_t Device::now_ns() {
    const std::scoped_lock lock(beside_.mutex);
    auto* word = reinterpret_cast<uint64_t*>(beside_.memory);
    write_clock(word, reinterpret_cast<Stream>(own_stream_));
    check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize", "the GPU's clock");
    return *word;
}

void Device::write_clock(uint64_t* where, Stream stream) {
    launch("read_clock", &read_clock, {}, ReadClockArgs{where}, stream);
}

void Device::delay(uint64_t) { refuse_on_cuda("delay"); }
void Device::block_stream(uint64_t) { refuse_on_cuda("block_stream"); }
void Device::set_clock_fault(int64_t, double) { refuse_on_cuda("set_clock_fault"); }
void Device::set_schedule(const std::string&, uint64_t) { refuse_on_cuda("set_schedule"); }

}  // namespace ep
