// Bit casts and conversions on the host target: see device/bits.cuh. Written with the compiler's
// vector types (GCC and clang), because their loops over small arrays stay scalar.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device/bits.cuh"

namespace ep {

inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float value) { return std::bit_cast<uint32_t>(value); }

inline int popcount(uint32_t bits) { return std::popcount(bits); }
inline int lowest_bit(uint32_t bits) { return std::countr_zero(bits); }
inline int highest_bit(uint32_t bits) { return 31 - std::countl_zero(bits); }

inline float divide(float a, float b) { return a / b; }
inline float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float log2_approx(float value) { return std::log2(value); }
inline float exp2_approx(float value) { return std::exp2(value); }

namespace host {

using U8x8 = uint8_t __attribute__((vector_size(8)));
using U16x8 = uint16_t __attribute__((vector_size(16)));
using U32x8 = uint32_t __attribute__((vector_size(32)));
using F32x8 = float __attribute__((vector_size(32)));

}  // namespace host

#if defined(EP_TIME_MODEL)
namespace host {
void load_vector_takes_time();
}
#endif
inline Vector load_vector(const Vector* from) {
#if defined(EP_TIME_MODEL)
    host::load_vector_takes_time();
#endif
    return *from;
}
inline void store_vector(Vector* to, const Vector& vector) { *to = vector; }

inline void unpack(const Vector& vector, float (&values)[kVectorElements]) {
    const auto elements = std::bit_cast<host::U16x8>(vector);
    const host::U32x8 bits = __builtin_convertvector(elements, host::U32x8) << 16;
    std::memcpy(values, &bits, sizeof(values));
}

inline Vector pack(const float (&values)[kVectorElements]) {
    host::U32x8 bits;
    std::memcpy(&bits, values, sizeof(bits));
    const host::U32x8 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const host::U32x8 result =
        (bits & 0x7FFFFFFFu) > 0x7F800000u ? host::U32x8{} + 0x7FC0u : rounded;
    return std::bit_cast<Vector>(__builtin_convertvector(result, host::U16x8));
}

template <int N>
uint32_t largest_magnitude(const Vector (&vectors)[N]) {
    host::U16x8 largest{};
    const auto keep = [&](const host::U16x8& other) {
        largest = largest > other ? largest : other;
    };
    for (const Vector& vector : vectors) keep(std::bit_cast<host::U16x8>(vector) & 0x7FFF);
    keep(__builtin_shufflevector(largest, largest, 4, 5, 6, 7, 0, 1, 2, 3));
    keep(__builtin_shufflevector(largest, largest, 2, 3, 0, 1, 6, 7, 4, 5));
    keep(__builtin_shufflevector(largest, largest, 1, 0, 3, 2, 5, 4, 7, 6));
    return largest[0];
}

inline uint64_t to_e4m3(const float (&values)[kVectorElements]) {
    host::U32x8 bits;
    std::memcpy(&bits, values, sizeof(bits));
    const host::U32x8 magnitude = bits & 0x7FFFFFFFu;
    // Normal results: round the 23-bit mantissa to 3 bits, then change the bias from 127 to 7.
    const host::U32x8 normal =
        ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    // Below 2^-6 the spacing is 2^-9, that of floats at 2^14: adding 2^14 rounds.
    const host::F32x8 shifted = std::bit_cast<host::F32x8>(magnitude) + 16384.0f;
    const host::U32x8 subnormal = std::bit_cast<host::U32x8>(shifted) - 0x46800000u;
    const host::U32x8 finite = magnitude < (121u << 23) ? subnormal : normal;
    const host::U32x8 saturated = magnitude > 0x43E00000u ? host::U32x8{} + 0x7Eu : finite;  // 448
    const host::U32x8 result = magnitude > 0x7F800000u ? host::U32x8{} + 0x7Fu : saturated;
    // In two steps, each one instruction; in one, GCC 12 moves byte by byte.
    const auto halves = __builtin_convertvector(((bits >> 24) & 0x80u) | result, host::U16x8);
    return std::bit_cast<uint64_t>(__builtin_convertvector(halves, host::U8x8));
}

}  // namespace ep
