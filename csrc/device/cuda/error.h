// CUDA calls that failed, as exceptions that name the call, what it was for and CUDA's own words.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace ep::cuda_target {

class CudaError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// `call` is the name of the CUDA function, `purpose` says what for: "cudaMalloc", "512 bytes of ...".
inline void check(cudaError_t status, const char* call, std::string_view purpose) {
    if (status == cudaSuccess) return;
    // The error has been reported here; without this the next check would report it again.
    (void)cudaGetLastError();
    throw CudaError(std::string(call) + " failed: " + cudaGetErrorString(status) + " (" +
                    cudaGetErrorName(status) + "); it was called for " + std::string(purpose) +
                    ".");
}

// Makes `device` current for the calling thread and puts back the previous one at the end.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check(cudaGetDevice(&previous_), "cudaGetDevice", "the calling thread's device");
        if (previous_ == device) return;
        check(cudaSetDevice(device), "cudaSetDevice", "GPU " + std::to_string(device));
        changed_ = true;
    }
    ~DeviceGuard() {
        if (changed_) (void)cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int previous_ = 0;
    bool changed_ = false;
};

// Lets the calling thread make calls that a capture of any thread in global mode, torch's default, forbids: what
// it calls meanwhile concerns no stream that is captured. Without it the call fails, and breaks the capture.
class BesideCaptures {
  public:
    BesideCaptures() {
        check(cudaThreadExchangeStreamCaptureMode(&mode_),
              "cudaThreadExchangeStreamCaptureMode",
              "a look at memory beside captures");
    }
    ~BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
    BesideCaptures(const BesideCaptures&) = delete;
    BesideCaptures& operator=(const BesideCaptures&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace ep::cuda_target
