// For the host half of the CUDA target, whose kernels are compiled and never run: the host target's
// interface, and the names that the CUDA target takes from elsewhere.
#pragma once

#include "cuda_runtime_api.h"
#include "device/host/device.h"

namespace cuda {

enum memory_order { memory_order_acq_rel };
enum thread_scope { thread_scope_system };
inline void atomic_thread_fence(memory_order, thread_scope) {}

}  // namespace cuda

namespace ep::cuda_target {

inline void copy(void*, const void*, size_t, int, int) {}

}  // namespace ep::cuda_target
