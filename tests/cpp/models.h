// Number formats from their definitions, slowly, to judge csrc/device/numbers.cuh and bits.cuh.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ep::testing {

inline double value_of_bf16(uint16_t bits) {
    return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
}

// Nearest bf16, ties to even. Infinity where that is nearer than any number. Not for NaN.
inline uint16_t nearest_bf16(float value) {
    const auto below = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    const auto above = static_cast<uint16_t>(below + 1);  // away from zero
    const double low = std::fabs(value_of_bf16(below));
    // What would follow the largest number, so that overflow rounds like everything else.
    const double high =
        std::isinf(value_of_bf16(above)) ? 0x1p128 : std::fabs(value_of_bf16(above));
    if (std::isinf(value)) return below;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude - low == high - magnitude) return below % 2 == 0 ? below : above;
    return magnitude - low < high - magnitude ? below : above;
}

// Magnitude of e4m3 codes 0..0x7E: 4 exponent bits with bias 7, 3 mantissa bits, no infinity.
inline double value_of_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 0xF;
    const int mantissa = code & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return code & 0x80 ? -magnitude : magnitude;
}

// Nearest e4m3, ties to even, saturating at 448; NaN keeps its sign.
inline uint8_t nearest_e4m3(float value) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return sign | 0x7F;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= 448.0) return sign | 0x7E;
    uint8_t below = 0;
    for (int bit = 0x40; bit != 0; bit >>= 1) {
        const auto candidate = static_cast<uint8_t>(below | bit);
        if (candidate <= 0x7E && value_of_e4m3(candidate) <= magnitude) below = candidate;
    }
    const auto above = static_cast<uint8_t>(below + 1);
    const double to_below = magnitude - value_of_e4m3(below);
    const double to_above = value_of_e4m3(above) - magnitude;
    const bool up = to_above < to_below || (to_above == to_below && below % 2 == 1);
    return sign | (up ? above : below);
}

}  // namespace ep::testing
