// Number formats: bf16, e4m3, power-of-two scales and the 10-bit logarithmic format. One source for
// both targets; only the e4m3 conversion has a hardware instruction behind it on the GPU.
#pragma once

#include <cstdint>

#include "device/bits.cuh"

namespace ep {

// unpack(vector, values), pack(values) and to_e4m3(values) convert the 8 bf16 elements of a Vector;
// they are per target, in bits.cuh, because only their order of operations differs.

// ---- FP8 cast (API specification 8.3): groups of 128 channels, fp32 arithmetic

constexpr int kChannelsPerScale = 128;
constexpr float kE4m3Max = 448.0f;
constexpr float kMinAbsMax = 1e-4f;

// How data are multiplied and what is stored to undo it.
struct Fp8Scale {
    float multiplier;
    float stored;
};

// 2^exponent for -126 <= exponent <= 127.
EP_HOST_DEVICE float exact_exp2(int exponent) {
    return bits_to_float(static_cast<uint32_t>(exponent + 127) << 23);
}

EP_HOST_DEVICE Fp8Scale fp8_scale(float abs_max, bool power_of_two) {
    const float bounded =
        abs_max > kMinAbsMax ? abs_max : (abs_max == abs_max ? kMinAbsMax : abs_max);
    if (!power_of_two) return {divide(kE4m3Max, bounded), bounded * (1.0f / kE4m3Max)};
    // ceil(log2(s)) from the bits: the exponent, plus one unless s is a power of two. s is at least
    // 1e-4 / 448 and finite, so it is normal and the result is in [-22, 120].
    const uint32_t bits = float_to_bits(bounded * (1.0f / kE4m3Max));
    const int exponent = static_cast<int>(bits >> 23 & 0xFFu) - 127 + ((bits & 0x7FFFFFu) != 0);
    return {exact_exp2(-exponent), exact_exp2(exponent)};
}

// The 8-bit biased exponent of a power of two.
EP_HOST_DEVICE uint8_t ue8m0(float power_of_two) {
    return static_cast<uint8_t>(float_to_bits(power_of_two) >> 23);
}

// ---- LogFMT: 10 bits a value for combine (API specification 8.4)
// A group of 128 values is a sign and a 9-bit code each: 0 is zero, c >= 1 is 2^(low + (c - 1) * step).

constexpr int kLogGroup = 128;
constexpr float kLogRange = 32.0f;  // magnitudes more than 2^32 below the largest become 2^low or 0
constexpr int kLogCodes = 511;      // codes 1..511

struct LogScale {
    float low;
    float step;
};

EP_HOST_DEVICE LogScale log_scale(float abs_min, float abs_max) {
    const float high = log2_approx(abs_max);
    const float floor = high - kLogRange;
    const float low = abs_min > 0.0f ? log2_approx(abs_min) : floor;
    const float bounded = low > floor ? low : floor;
    return {bounded, (high - bounded) / static_cast<float>(kLogCodes - 1)};
}

EP_HOST_DEVICE float log_decode(uint32_t code, LogScale scale) {
    const uint32_t magnitude = code & 0x1FFu;
    if (magnitude == 0) return 0.0f;
    const float value = exp2_approx(scale.low + static_cast<float>(magnitude - 1) * scale.step);
    return code & 0x200u ? -value : value;
}

// Nearest representable value, distance measured on the values, not on their logarithms.
EP_HOST_DEVICE uint32_t log_encode(float value, LogScale scale) {
    const uint32_t sign = value < 0.0f ? 0x200u : 0u;
    const float magnitude = value < 0.0f ? -value : value;
    if (magnitude == 0.0f) return 0;
    const float position =
        scale.step > 0.0f ? (log2_approx(magnitude) - scale.low) / scale.step : 0.0f;
    if (position < 0.0f) {
        const float lowest = exp2_approx(scale.low);
        return magnitude * 2.0f < lowest ? 0u : sign | 1u;
    }
    const int below =
        position < static_cast<float>(kLogCodes - 1) ? static_cast<int>(position) : kLogCodes - 2;
    const float lower = log_decode(static_cast<uint32_t>(below + 1), scale);
    const float upper = log_decode(static_cast<uint32_t>(below + 2), scale);
    const bool up = scale.step > 0.0f && upper - magnitude < magnitude - lower;
    return sign | static_cast<uint32_t>(below + 1 + (up ? 1 : 0));
}

}  // namespace ep
