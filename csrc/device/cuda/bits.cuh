// Bit casts and the arithmetic whose exact form matters, on the CUDA target. Usable on the host side
// too, where layouts and sizes are computed.
#pragma once

#include <cuda_fp8.h>

#include <bit>
#include <cmath>
#include <cstdint>

#define EP_DEVICE __device__ __forceinline__
#define EP_HOST_DEVICE __host__ __device__ __forceinline__
#define EP_PRAGMA(text) _Pragma(#text)
#define EP_UNROLL(n) EP_PRAGMA(unroll n)

namespace ep {

EP_HOST_DEVICE float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
EP_HOST_DEVICE uint32_t float_to_bits(float value) { return std::bit_cast<uint32_t>(value); }

// Correctly rounded, whatever the compiler's fast-math settings; never contracted with a neighbour.
EP_HOST_DEVICE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}
EP_HOST_DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
EP_HOST_DEVICE float log2_approx(float value) {
#if defined(__CUDA_ARCH__)
    return __log2f(value);
#else
    return std::log2(value);
#endif
}
EP_HOST_DEVICE float exp2_approx(float value) { return exp2f(value); }

// To e4m3, round to nearest even, saturating at 448; NaN becomes NaN. One instruction on Hopper.
EP_HOST_DEVICE uint8_t to_e4m3(float value) { return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); }

}  // namespace ep
