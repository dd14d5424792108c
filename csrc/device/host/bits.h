// Bit casts and the arithmetic whose exact form matters, on the host target.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace ep {

inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float value) { return std::bit_cast<uint32_t>(value); }

// Correctly rounded, whatever the compiler's fast-math settings.
inline float divide(float a, float b) { return a / b; }
inline float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float log2_approx(float value) { return std::log2(value); }
inline float exp2_approx(float value) { return std::exp2(value); }

// Four floats to four e4m3 bytes, round to nearest even, saturating at 448; NaN becomes NaN.
// Branch-free, so that the compiler turns a loop over it into vector code.
inline uint8_t to_e4m3(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t sign = bits >> 24 & 0x80u;
    // Normal results: round the 23-bit mantissa to 3 bits, then change the bias from 127 to 7.
    const uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    // Below 2^-6 the spacing is 2^-9, which is the spacing of floats at 2^14: adding it rounds.
    const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 16384.0f) - float_to_bits(16384.0f);
    const uint32_t finite = magnitude < (121u << 23) ? subnormal : normal;
    const uint32_t saturated = magnitude > float_to_bits(448.0f) ? 0x7Eu : finite;
    const uint32_t result = magnitude > 0x7F800000u ? 0x7Fu : saturated;
    return static_cast<uint8_t>(sign | result);
}

}  // namespace ep
