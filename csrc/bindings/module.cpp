// The module itself. setup.py compiles this folder into deep_ep._cpu; cuda_module.cu includes what the
// CUDA modules need of it.
#include "bindings/bindings.h"
#include "device/target.h"

#ifndef EP_MODULE_NAME
#define EP_MODULE_NAME _cpu
#endif

PYBIND11_MODULE(EP_MODULE_NAME, m) {
#if defined(EP_TARGET_HOST) && defined(__x86_64__) && defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        throw pybind11::import_error(
            "this build of deep_ep._cpu needs a processor with AVX2 and FMA; rebuild with "
            "DEEP_EP_CPU_ARCH=x86-64");
    }
#endif
    m.doc() = "Kernels and transport of deep_ep, one target";
    ep::bind_constants(m);
    ep::bind_runtime(m);
#if defined(EP_TARGET_HOST)
    ep::bind_host_pool(m);
    ep::bind_simulation(m);
#endif
}
