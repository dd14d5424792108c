// deep_ep._cuda and, with EP_WITH_NVSHMEM, deep_ep._cuda_nvshmem: kernels, runtime and binding of the
// CUDA target in one translation unit, so that kernels are compiled once and without device linking
// where NVSHMEM does not need it.
#include "bindings/constants.cpp"
#include "bindings/module.cpp"
#include "bindings/records.cpp"
#include "bindings/runtime.cpp"
#include "device/cuda/device_runtime.cpp"
#include "runtime/call_log.cpp"
#include "runtime/normal.cpp"
#include "runtime/runtime.cpp"
#if defined(EP_WITH_NVSHMEM)
#include "transport/cuda/nvshmem_world.cpp"
#endif
#include "transport/cuda/symmetric_memory.cpp"
