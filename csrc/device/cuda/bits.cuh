// Bit casts and conversions on the CUDA target: see device/bits.cuh. Usable on the host's side too,
// where sizes and layouts are computed.
#pragma once

#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cuda/std/bit>

#include "device/bits.cuh"

#define EP_DEVICE __device__ __forceinline__
#define EP_ALWAYS_INLINE EP_DEVICE
#define EP_HOST_DEVICE __host__ __device__ __forceinline__
#define EP_PRAGMA(text) _Pragma(#text)
#define EP_UNROLL(n) EP_PRAGMA(unroll n)

namespace ep {

EP_HOST_DEVICE float bits_to_float(uint32_t bits) { return cuda::std::bit_cast<float>(bits); }
EP_HOST_DEVICE uint32_t float_to_bits(float value) { return cuda::std::bit_cast<uint32_t>(value); }

EP_DEVICE int popcount(uint32_t bits) { return __popc(bits); }
EP_DEVICE int lowest_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
EP_DEVICE int highest_bit(uint32_t bits) { return 31 - __clz(static_cast<int>(bits)); }

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

EP_DEVICE Vector load_vector(const Vector* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return {{words.x, words.y, words.z, words.w}};
}
EP_DEVICE void store_vector(Vector* to, const Vector& vector) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
}

EP_DEVICE void unpack(const Vector& vector, float (&values)[kVectorElements]) {
    EP_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = bits_to_float(vector.words[i] << 16);
        values[2 * i + 1] = bits_to_float(vector.words[i] & 0xFFFF0000u);
    }
}

EP_DEVICE Vector pack(const float (&values)[kVectorElements]) {
    Vector vector;
    EP_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(vector.words[i])
            : "f"(values[2 * i + 1]), "f"(values[2 * i]));
    }
    return vector;
}

template <int N>
EP_DEVICE uint32_t largest_magnitude(const Vector (&vectors)[N]) {
    uint32_t largest = 0;  // two at a time, as unsigned 16-bit numbers
    EP_UNROLL(N)
    for (const Vector& vector : vectors) {
        EP_UNROLL(4)
        for (int i = 0; i < 4; ++i) largest = __vmaxu2(largest, vector.words[i] & 0x7FFF7FFFu);
    }
    return max(largest & 0xFFFFu, largest >> 16);
}

EP_DEVICE uint64_t to_e4m3(const float (&values)[kVectorElements]) {
    uint64_t bytes = 0;
    EP_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
        const float2 pair{values[2 * i], values[2 * i + 1]};
        bytes |= static_cast<uint64_t>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3))
                 << (16 * i);
    }
    return bytes;
}

}  // namespace ep
